"""Sounds of any length, which `transcribe` sends in parts."""

import json
import tracemalloc
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from seq2seq_serve.client import AsyncClient, GenerateOptions
from seq2seq_serve.client.files.plan import locked
from seq2seq_serve.client.speech import parts
from seq2seq_serve.client.speech.parts import transcribe_parts
from seq2seq_serve.client.speech.sounds import SoundForm, opened
from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.protos.seq2seq_v1_pb2_grpc import Seq2SeqServicer, add_Seq2SeqServicer_to_server
from tests.client.speech.conftest import noise

SECONDS = 34.0  # the model reads 0.64 at once, and 32 in windows


@pytest.fixture
def sound(tmp_path) -> str:
    """A file of a few parts."""
    (tmp_path / "sound.raw").write_bytes(noise(4.0).tobytes())
    return "sound.raw"


@pytest.fixture
def run(run):
    def with_times(*arguments: str, **settings) -> tuple[int, str, list[str]]:
        return run("--rate", "16000", *arguments, **settings)

    return with_times


def test_a_sound_that_is_too_long_for_windows_is_sent_in_parts(run, tmp_path):
    (tmp_path / "long.raw").write_bytes(noise(SECONDS).tobytes())
    code, out, _ = run("long.raw", "--timestamps")
    assert code == 0
    assert out.splitlines()[-1].split()[2][:6] >= "00:33."
    assert len(out.splitlines()) > SECONDS / 0.64
    code, _, [err] = run("long.raw", "--long-source", "sequential")
    assert code == 1
    assert "32 is the limit" in err


def test_a_file_that_is_too_large_is_sent_in_parts(run, monkeypatch, tmp_path, sound):
    monkeypatch.setattr("seq2seq_serve.client.questions._MAX_FILE_BYTES", 100_000)
    code, out, _ = run(sound, "--format", "srt")
    assert (code, run(sound, "--format", "srt", "--voice-activity")[1]) == (0, out)
    assert run("-", "--format", "srt", stdin=(tmp_path / sound).read_bytes()) == (code, out, [])
    assert out.startswith("1\n00:00:00,")
    code, out, [err] = run(sound, "--num-hypotheses", "2", "--json")
    assert (code, out) == (1, "")
    assert "--num-hypotheses does not apply to a stream: leave it out; a file of more than 4 MiB" in err


@pytest.mark.parametrize("flags", [[], ["--timestamps"], ["--word-timestamps"], ["--format", "vtt"]])
def test_an_output_has_what_is_printed(run, monkeypatch, tmp_path, sound, flags):
    assert run(sound, "--output", "a.txt", *flags) == (0, "", [])
    monkeypatch.setattr("seq2seq_serve.client.questions._MAX_FILE_BYTES", 100_000)
    assert run(sound, *flags) == (0, (tmp_path / "a.txt").read_text(), [])
    assert not (tmp_path / "a.txt.parts").exists()


def test_json_is_one_object(run, tmp_path, sound):
    assert run(sound, "--output", "a.txt", "--timestamps")[0] == 0
    assert run(sound, "--output", "a.json", "--json")[0] == 0
    [best] = json.loads((tmp_path / "a.json").read_text())["hypotheses"]
    assert len(best["segments"]) == len((tmp_path / "a.txt").read_text().splitlines())
    assert all(not segment["words"] for segment in best["segments"])
    assert best["token_ids"] == [one for segment in best["segments"] for one in segment["token_ids"]]


@contextmanager
def interrupted_after(monkeypatch, num_segments: int):
    """Interrupts the command while it has a segment, which it has not written."""
    add = parts._Parts.add

    def interrupting(self, segment) -> None:
        if len(self.segments) == num_segments:
            raise KeyboardInterrupt
        add(self, segment)

    with monkeypatch.context() as patched:
        patched.setattr(parts._Parts, "add", interrupting)
        yield


@pytest.mark.parametrize("form", [["--format", "srt"], ["--json"]])
@pytest.mark.parametrize("num_segments", [1, 4])
def test_an_interrupted_output_is_continued_where_it_ended(
    run, monkeypatch, tmp_path, sound, form, num_segments
):
    assert run(sound, "--output", "whole", *form)[0] == 0
    with interrupted_after(monkeypatch, num_segments):
        code, _, err = run(sound, "--output", "part", *form)
    assert (code, err) == (130, ["continue with the same command and --resume"])
    written = (tmp_path / "part").read_text()
    assert (tmp_path / "whole").read_text().startswith(written)
    assert written.count("-->") == (0 if form == ["--json"] else num_segments)
    with (tmp_path / "part.parts" / "segments.jsonl").open("a") as file:
        file.write('{"begin_seconds": 1.')  # what a kill leaves
    with pytest.raises(SystemExit):
        run(sound, "--output", "part", *form)
    assert run(sound, "--output", "part", *form, "--resume")[0] == 0
    assert _content(tmp_path / "part") == _content(tmp_path / "whole")
    assert not (tmp_path / "part.parts").exists()
    assert "is complete" in run(sound, "--output", "part", *form, "--resume")[2][0]


def _content(path: Path):
    """The file, without what differs between two requests."""
    text = path.read_text()
    if not text.startswith("{"):
        return text
    content = json.loads(text)
    return content["hypotheses"], content["detected_language"]


def test_a_continued_transcript_begins_at_its_last_segment(run, monkeypatch, sound):
    with interrupted_after(monkeypatch, 6):
        run(sound, "--output", "part")
    starts, transcribe_live = [], AsyncClient.transcribe_live

    def recording(self, chunks, **settings):
        starts.append(settings["begin_seconds"])
        return transcribe_live(self, chunks, **settings)

    monkeypatch.setattr(AsyncClient, "transcribe_live", recording)
    assert run(sound, "--output", "part", "--resume")[0] == 0
    assert starts[0] > 0.64


def test_an_output_of_another_command_is_not_continued(run, monkeypatch, tmp_path, sound):
    with interrupted_after(monkeypatch, 2):
        run(sound, "--output", "part")
    code, _, [err] = run(sound, "--output", "part", "--resume", "--source-language", "de")
    assert code == 1
    assert 'options source_language was null and is "de"' in err
    (tmp_path / sound).write_bytes(noise(3.0).tobytes())
    code, _, [err] = run(sound, "--output", "part", "--resume")
    assert code == 1
    assert "sound.raw has changed" in err
    with locked(tmp_path / "part.parts"):
        code, _, [err] = run(sound, "--output", "part", "--overwrite")
    assert (code, "another command is at work in" in err) == (1, True)
    assert run(sound, "--output", "part", "--overwrite")[0] == 0
    (tmp_path / "other.parts").mkdir()
    (tmp_path / "other.parts" / "mine").touch()
    code, _, [err] = run(sound, "--output", "other", "--overwrite")
    assert (code, (tmp_path / "other.parts" / "mine").exists()) == (1, True)
    assert "did not create it" in err


def test_nothing_is_kept_of_an_output_without_a_segment(run, monkeypatch, tmp_path, sound):
    code, _, [err] = run(sound, "--output", "part", "--max-new-tokens", "5")
    assert code == 1
    assert "--max-new-tokens does not apply to a stream" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == [sound]
    with interrupted_after(monkeypatch, 0):
        code, _, [err] = run(sound, "--output", "part")
    assert (code, err) == (130, "no segment is complete, so nothing is kept")
    assert sorted(path.name for path in tmp_path.iterdir()) == [sound]


class Counting(Seq2SeqServicer):
    """Answers with a segment for every 30 seconds of samples."""

    num_bytes = 0

    def ListModels(self, _request, _context):  # noqa: N802
        return pb.ListModelsResponse(models=[pb.Model(name="counting", sources={"sound": "sound"})])

    def Transcribe(self, requests, _context):  # noqa: N802
        num_segments = 0
        for request in requests:
            self.num_bytes += len(request.sound)
            while self.num_bytes >= 30 * 32_000 * (num_segments + 1):
                times = {"begin_seconds": 30.0 * num_segments, "end_seconds": 30.0 * num_segments + 29}
                segment = pb.Segment(text=f" Segment {num_segments}.", **times)
                yield pb.TranscribeResponse(segment=segment, received_seconds=self.num_bytes / 32_000)
                num_segments += 1
        yield pb.TranscribeResponse(result=pb.GenerateResponse(hypotheses=[pb.Hypothesis()]))


def test_three_hours_take_little_memory(tmp_path):
    """Of the client: the server counts the bytes. The file has no blocks on the disk."""
    counting, path = Counting(), tmp_path / "long.raw"
    with path.open("wb") as file:
        file.truncate(3 * 3600 * 32_000)
    server = grpc.server(ThreadPoolExecutor(2))
    add_Seq2SeqServicer_to_server(counting, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    options = Namespace(
        file=path,
        form=SoundForm("pcm_s16"),
        file_type="audio/pcm; rate=16000",
        output=tmp_path / "long.srt",
        format="srt",
        json=False,
        resume=False,
        overwrite=False,
        no_turn_detection=True,
    )
    tracemalloc.start()
    try:
        with opened(path) as stream:
            transcribe_parts(
                lambda: AsyncClient(f"127.0.0.1:{port}"), "counting", options, GenerateOptions(), stream
            )
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        server.stop(None)
    assert counting.num_bytes == path.stat().st_size
    assert (tmp_path / "long.srt").read_text().count("-->") == 360
    assert most < 4 * 2**20
