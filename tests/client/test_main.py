import errno
import gzip
import io
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import trustme

from seq2seq_serve.bundle.names import SOURCE_IDS
from seq2seq_serve.client.__main__ import main
from seq2seq_serve.client.errors import ClientError
from seq2seq_serve.client.files.formats import Writer
from seq2seq_serve.client.files.plan import locked
from seq2seq_serve.client.files.worker import Worker
from seq2seq_serve.client.flags import make_parser, translations
from seq2seq_serve.protos.seq2seq_v1_pb2 import Timings
from seq2seq_serve.server.runner.sizing import Draft
from tests.server.service.harness import access_file, serving_on_a_thread


@pytest.fixture(scope="module")
def server():
    with serving_on_a_thread(is_repository_open=True) as served:
        yield served


@pytest.fixture
def run(run):
    """Run the command against the server: exit code, lines of stdout, lines of stderr."""

    def run_lines(*arguments: str, **options: bytes) -> tuple[int, list[str], list[str]]:
        code, out, err = run(*arguments, **options)
        return code, out.split("\n")[:-1], err

    return run_lines


def test_texts_are_translated_one_line_each(run):
    assert run("translate", "오늘은 금요일", "abc") == (0, ["오늘은 금요일", "abc"], [])


def test_a_failed_line_keeps_its_place_and_loses_no_other(run):
    stdin = "첫째\n\n".encode() + b"\xff\xfe\n" + b"x" * 1_000_000 + "\r\n끝".encode()
    code, out, err = run("translate", stdin=stdin)
    assert code == 1
    assert out == ["첫째", "", "", "", "끝"]
    for line, prefix in zip(err, ("line 3: INVALID_ARGUMENT: ", "line 4: INVALID_ARGUMENT: "), strict=True):
        assert line.startswith(f"error: {prefix}")
    assert "1000000 bytes" in err[1]


def test_a_byte_order_mark_is_not_part_of_the_first_line(run):
    assert run("translate", stdin=b"\xef\xbb\xbfabc\n")[1] == ["abc"]


def test_empty_standard_input_is_nothing_to_do(run):
    assert run("translate", stdin=b"") == (0, [], [])


@pytest.mark.parametrize("flags", [(), ("--stream",)])
def test_only_the_answer_to_a_single_text_keeps_its_line_breaks(run, flags):
    """They became spaces, also those of a text that was split into paragraphs."""
    assert run("translate", *flags, "a\n\nb")[1] == ["a", "", "b"]
    assert run("translate", *flags, "--long-source", "split", "a\n\nb")[1] == ["a", "", "b"]
    assert run("translate", *flags, "a\nb", "c")[1] == ["a b", "c"]
    assert run("translate", *flags, "--num-hypotheses", "2", "a\nb")[1] == ["a b", ""]


@pytest.mark.parametrize("flags", [(), ("--stream",)])
def test_blank_lines_stay_blank_without_a_request_of_the_engine(run, server, flags):
    """A line of a zero-width space was an error."""
    before = server.turns.num_submitted
    stdin = "가\n\n \t\u3000\n\u200b\n\ufeff\u3000\n나\n".encode()
    assert run("translate", *flags, stdin=stdin) == (0, ["가", *[""] * 4, "나"], [])
    for blank in ("", "\u200b"):
        assert run("translate", *flags, blank) == (0, [""], [])
    assert server.turns.num_submitted == before + 2


@pytest.mark.parametrize("flags", [(), ("--stream",)])
def test_every_line_has_as_many_lines_as_were_asked_for(run, flags):
    stdin = b"ab\n\n" + b"x" * 100 + b"\ncd\n"
    flags = [*flags, "--beam-size", "3", "--num-hypotheses", "3", "--max-new-tokens", "1"]
    code, out, err = run("translate", *flags, stdin=stdin)
    assert code == 1
    assert sum(line.startswith("error: ") for line in err) == 1
    assert len(out) == 12
    assert out[3:9] == [""] * 6
    assert out[0] != out[3] != out[9]


@pytest.mark.parametrize("flags", [(), ("--stream",), ("--beam-size", "2", "--num-hypotheses", "2")])
def test_a_single_text_that_fails_is_one_clear_line_and_no_output(run, flags):
    """Standard output had a blank line."""
    code, out, [line] = run("translate", *flags, "x" * 100)
    assert (code, out) == (1, [])
    assert line.startswith("error: INVALID_ARGUMENT: the source has 101 tokens")


def test_pieces_before_a_failure_end_with_a_line_break(run, server, monkeypatch):
    step = server.runner.step

    def fail_at_the_second_token(rows, num_steps):
        if rows[0].token_ids:
            raise RuntimeError("broken")
        return step(rows, num_steps)

    monkeypatch.setattr(server.runner, "step", fail_at_the_second_token)
    code, out, err = run("translate", "--stream", "ab")
    assert (code, out) == (1, ["a"])
    assert err[-1].startswith("error: INTERNAL: ")


def test_a_server_without_a_model_is_reported_in_its_own_words_and_only_lines_wait_for_it(run):
    """A TEXT waited for 300 seconds, and the message was about the connection."""
    words = "UNAVAILABLE: no model is served: the server is loading them, or they were unloaded"
    assert run("unload", "echo")[0] == 0
    try:
        assert run("translate", "a", "b") == (1, [], [f"error: {words}"])
        assert run("translate", "--stream", stdin=b"a\n") == (1, [], [f"error: {words}"])
        code, out, err = run("translate", "--give-up-seconds", "0.1", stdin=b"a\n")
        assert (code, out, err[0]) == (1, [], f"warning: {words}")
        assert "trying again for up to 0.1 seconds" in err[1]
        assert "gave up" in err[2]
    finally:
        run("load", "echo")


def test_a_server_that_answers_again_is_reported(run, server, monkeypatch):
    """Nothing was written: the level was set for a logger of another name."""
    models, calls = server.app.models, server.app.calls
    model, records = models.remove("echo"), []

    def come_back(record):
        records.append(record)
        if len(records) == 6:
            models.put(model)

    monkeypatch.setattr(calls, "_sinks", (*calls._sinks, come_back))
    code, out, err = run("translate", stdin=b"ab\n")
    assert (code, out, err[-1]) == (0, ["ab"], "the server answers again")
    assert [line.split(":")[0] for line in err] == ["warning", "UNAVAILABLE", "the server answers again"]


def test_a_single_text_gives_up_sooner_than_an_input_file():
    commands = ["translate a", "translate", "translate a --give-up-seconds 7"]
    options = [make_parser().parse_args(command.split()) for command in commands]
    assert [translations(each)[0].give_up_seconds for each in options] == [10, 300, 7]


def test_an_argument_that_is_not_utf8_is_refused(run):
    code, out, err = run("translate", "abc", os.fsdecode(b"a\xff"))
    assert (code, out) == (1, ["abc", ""])
    assert err == ["error: text 2: INVALID_ARGUMENT: not valid UTF-8 at character 2"]


def test_stream_prints_pieces_as_they_come(server, monkeypatch):
    class Output(io.StringIO):
        def __init__(self):
            super().__init__()
            self.flushed = []

        def flush(self):
            self.flushed.append(self.getvalue())

    monkeypatch.setattr(sys, "stdout", output := Output())
    assert main(["translate", "--address", server.address, "--stream", "금요일"]) == 0
    assert output.flushed[-1] == "금요일\n"
    assert output.flushed[-2] == "금요일"
    assert all("금요일".startswith(text) for text in output.flushed[:-1])


def test_json_has_everything_the_server_answered(run):
    code, [line], _ = run("translate", "--json", "--max-new-tokens", "2", "abc")
    assert code == 0
    answer = json.loads(line)
    assert answer["source"] == "abc"
    assert answer["hypotheses"][0]["text"] == "ab"
    assert answer["hypotheses"][0]["finish_reason"] == "FINISH_REASON_LENGTH"
    assert (answer["usage"]["source_tokens"], answer["usage"]["target_tokens"]) == (4, 2)
    assert set(answer["timings"]) == {field.name for field in Timings.DESCRIPTOR.fields}


@pytest.mark.parametrize("flags", [(), ("--stream",), ("--json",), ("--json", "--stream")])
def test_targets_that_end_at_a_limit_are_printed_with_one_warning(run, flags):
    """There was one a line."""
    stdin = b"\nabcdefg\nx\nabcde\n"
    code, out, err = run("translate", *flags, "--max-length-ratio", "0.5", stdin=stdin)
    assert code == 0
    if not flags:
        assert out == ["", "abcd", "x", "abc"]
    assert err == [
        "warning: line 2 and 2 more: the target ended at its length limit: it may repeat itself or lack its "
        "end (raise --max-length-ratio)"
    ]


@pytest.mark.parametrize("flags", [(), ("--stream",)])
def test_sources_that_were_truncated_are_a_warning(run, flags):
    """Nothing was said about them."""
    stdin = b"ab\n" + b"x" * 100 + b"\n" + b"y" * 70 + b"\n"
    assert run("translate", *flags, "--long-source", "truncate", "--max-length-ratio", "9", stdin=stdin) == (
        0,
        ["ab", "x" * 63, "y" * 63],
        [
            "warning: line 2 and 1 more: the source is too long, and 44 tokens at its end were left out "
            "(--long-source split_always translates each sentence of a source with several)"
        ],
    )


def test_terms_are_given_by_flags_and_targets_that_lack_some_are_a_warning(run, server, monkeypatch):
    flags = "--terms", "cat=Katze", "--terms", '{"dog": "Hund"}', "--keep-placeholders"
    code, out, err = run("translate", *flags, stdin=b"a cat {x}\nb dog\nc cow\n")
    assert (code, out[2], err) == (0, "c cow", [])
    assert "Katze" in out[0]
    assert "{x}" in out[0]
    assert "Hund" in out[1]
    step = server.runner.step

    def without_wanted(rows, num_steps=1):
        selected = step(rows, num_steps)
        tables = [replace(table, found=np.full_like(table.found, -math.inf)) for table in selected.candidates]
        return replace(selected, candidates=tuple(tables))

    monkeypatch.setattr(server.runner, "step", without_wanted)
    code, _, err = run("translate", *flags, stdin=b"a cat\nb dog\nc cow\n")
    assert code == 0
    assert err[-1] == "warning: line 1 and 1 more: the target lacks terms that it has to have: Katze, Hund"


def test_json_of_a_failed_line_is_its_error(run):
    code, lines, _ = run("translate", "--json", stdin=b"abc\n\n" + b"x" * 100 + b"\n\xffb")
    assert code == 1
    good, blank, error, broken = map(json.loads, lines)
    assert (good["source"], blank["source"], blank["hypotheses"]) == ("abc", "", [])
    assert (error["source"], error["line"]) == ("x" * 100, 3)
    assert error["error"]["code"] == "INVALID_ARGUMENT"
    assert error["error"]["field_violations"][0]["field"] == "sources[0].text"
    assert (broken["source"], broken["line"]) == ("\ufffdb", 4)


@pytest.mark.parametrize("stream", [(), ("--stream",)])
def test_attention_is_written_as_image_or_numbers(run, tmp_path, stream):
    png, numbers = tmp_path / "attention.png", tmp_path / "attention.json"
    assert run("translate", *stream, "가나", "--attention", str(png))[:2] == (0, ["가나"])
    assert png.read_bytes().startswith(b"\x89PNG")
    assert run("translate", *stream, "ab", "--attention", str(numbers))[:2] == (0, ["ab"])
    content = json.loads(numbers.read_text())
    assert content["source_tokens"] == content["target_tokens"] == ["a", "b", "</s>"]
    assert content["weights"] == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["translate", "a", "--attention", "a.txt"], "the name must end in .png or .json"),
        (["translate", "a", "b", "--attention", "a.png"], "--attention needs exactly one TEXT: 2 were given"),
        (["translate", "a", "--attention", "none/a.png"], "--attention: none/a.png: there is no folder none"),
        (
            ["translate", "a", "--attention", "a.png", "--long-source", "split"],
            "--attention cannot show a text that --long-source splits",
        ),
        (
            ["translate", "a", "--max-new-tokens", str(2**70)],
            "--max-new-tokens: it is '1180591620717411303424', and must be a 64-bit integer",
        ),
        (["translate", "a", "--timeout-seconds", "0"], "'0' is not a number of seconds above 0"),
        (
            ["translate", "a", "--logit-bias", "5"],
            "it is '5', and must be a string of biases by token id, such as 5=-1.5,17=2",
        ),
        (["translate", "a", "--input", "b"], "TEXT and --input are both given"),
        (["translate", "a", "--output", "b"], "give the file as --input, and no TEXT"),
        (["translate", "--stream", "--output", "b"], "leave out --stream"),
        (
            ["translate", "--output", "b.gz"],
            "--output b.gz: the client does not compress its output: leave out .gz",
        ),
        (["translate", "--resume"], "--resume and --overwrite need --output FILE"),
        (
            ["transcribe", "a.wav", "--num-hypotheses", "2", "--long-source", "split"],
            "--num-hypotheses needs --json where --long-source splits",
        ),
        (
            ["transcribe", "a.wav", "--num-hypotheses", "2", "--timestamps"],
            "--num-hypotheses needs --json with --timestamps",
        ),
        (["health", "--tls-key", "a"], "--tls-certificate and --tls-key must be given together"),
        (["translate", "a", "--beam-size", "0"], "it is '0', and must be from 1 to 16"),
        (["translate", "a", "--nothing"], "unrecognized arguments: --nothing"),
        (["models", "--adress", "a:1"], "unrecognized arguments: --adress a:1 (meant: --address?)"),
        (["translate", "a", "--server", "b:1"], "--server b:1 (meant: --address HOST:PORT?)"),
        (["models", "--host=b", "--port=1"], "--host=b --port=1 (meant: --address HOST:PORT?)"),
        (["translate", "a", "--seed", "1", "--seed", "2"], "--seed is given twice: leave one out"),
        (["models", "--address", "ipv4:10.0.0.7:70000,10.0.0.8:1"], "'70000' is not a port from 0 to 65535"),
        (
            ["translate", "a", "--target", "localhost:1"],
            "arguments: --target localhost:1 (meant: --target-field, --target-prefix, --target-language?)",
        ),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_wrong_usage_exits_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    err = capsys.readouterr().err
    command = " ".join(["python -m client", *arguments[:1]])
    first, second = err.splitlines()
    assert first.startswith("error: ")
    assert message in first
    assert second == f"{command} --help shows the usage"


def test_every_option_reaches_the_server(run):
    flags = "--min-new-tokens 1 --repetition-penalty 1.2 --no-repeat-ngram-size 9 --suppressed-token-ids 7,8"
    flags += " --logit-bias 9=-0.5,10=2 --target-prefix a --temperature 0.7 --top-k 4 --top-p 0.9 --min-p 0.1"
    flags += " --seed 5"
    code, [line], _ = run("translate", "ab", *flags.split(), "--log-probabilities", "--json")
    assert code == 0
    [hypothesis] = json.loads(line)["hypotheses"]
    assert hypothesis["log_probabilities"] == [-0.5] * 2
    assert hypothesis["score"] == -1
    assert hypothesis["text"] == "ab"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--beam-size 2 --temperature 0.5",
            "--beam-size and --temperature are both set: leave one of them out",
        ),
        ("--task translate", "echo does not have a --task to choose: leave it out"),
        ("--priority 11", "--priority is 11, and must be from -10 to 10"),
    ],
)
def test_an_error_names_options_as_the_command_does(run, flags, message):
    assert run("translate", "ab", *flags.split()) == (1, [], [f"error: INVALID_ARGUMENT: {message}"])


def test_hypotheses_are_printed_one_a_line(run):
    flags = "--beam-size 3 --num-hypotheses 2 --length-penalty 0.8 --early-stopping false"
    assert run("translate", "ab", *flags.split()) == (0, ["ab", ""], [])
    assert run("translate", "ab", "--stream", *flags.split()) == (0, ["ab", ""], [])
    with pytest.raises(SystemExit, match="2"):
        run("translate", "ab", "--early-stopping", "maybe")


def test_score_prints_every_token_and_the_sum(run):
    code, lines, _ = run("score", "ab", "x")
    assert code == 0
    assert [line.split() for line in lines] == [
        [lines[0].split()[0], "x"],
        ["-2.0000", "</s>"],
        [lines[2].strip()],
    ]
    assert float(lines[2]) == float(lines[0].split()[0]) - 2
    code, [line], _ = run("score", "ab", "x", "--json")
    assert json.loads(line)["target_tokens"] == ["x", "</s>"]
    assert run("score", "ab", "\udcff") == (1, [], ["error: SOURCE or TARGET is not valid UTF-8"])


def test_models_lists_each_on_a_line(run, server, monkeypatch):
    code, [line], _ = run("models")
    assert code == 0
    assert line.startswith("echo: echo, version 0123456789ab, fp32 on cpu, 4 slots")
    model = json.loads(run("models", "--json")[1][0])
    assert model["provenance"] == {"preset": "echo"}
    assert model["source_shapes"] == {"source_ids": {"sizes": [-1]}}
    assert "draft" not in line
    served = server.model
    monkeypatch.setattr(served, "sizing", replace(served.sizing, draft=Draft(None, served.sizing)))
    assert run("models")[1] == [f"{line}, with a draft model"]


def test_versions_are_listed_unloaded_and_loaded(run):
    assert run("versions") == (0, ["echo, version : ready"], [])  # there is no bundle, really
    assert run("versions", "echo")[0] == 0
    assert run("versions", "nobody")[2] == ["error: NOT_FOUND: there is no bundle of a model named 'nobody'"]
    assert json.loads(run("versions", "--json")[1][0])["state"] == "VERSION_STATE_READY"
    assert run("unload", "echo") == (0, [], [])
    assert run("models") == (0, [], [])
    code, [line], _ = run("load", "echo")
    assert (code, line) == (0, run("models")[1][0])
    assert run("load", "echo", "--version", "7")[::2] == (
        1,
        ["error: NOT_FOUND: echo has no version '7' on disk: there is "],
    )


@pytest.mark.parametrize("flag", [["--log-probabilities"], ["--num-alternatives", "2"], ["--word-alignment"]])
def test_an_option_that_only_json_shows_needs_json(run, flag, capsys):
    with pytest.raises(SystemExit, match="2"):
        run("translate", "ab", *flag)
    assert f"{flag[0]} needs --json" in capsys.readouterr().err


def test_health_exits_0_only_when_serving(run, server):
    assert run("health") == (0, ["SERVING"], [])
    assert run("health", "echo") == (0, ["SERVING"], [])
    url = f"http://127.0.0.1:{server.app.http.port}"
    assert run("health", "--metrics-url", url) == (0, ["SERVING"], [])
    assert run("health", "nobody")[::2] == (1, ["error: NOT_FOUND: unknown service 'nobody'"])
    server.model.engine.cores[0].failing_since = math.inf
    try:
        assert run("health") == (1, ["NOT_SERVING"], [])
        code, [line], _ = run("health", "--metrics-url", url)
        assert (code, line) == (1, "NOT_SERVING: echo: the engine's steps keep failing")
    finally:
        server.model.engine.cores[0].failing_since = None


@pytest.mark.parametrize(
    ("url", "end"),
    [
        ("http://127.0.0.1:1", "refused>)"),
        ("http://local host:1", ")"),
        ("localhost:9464", "; write http://localhost:9464"),
    ],
)
def test_a_metrics_port_that_does_not_answer_is_an_error(run, url, end):
    code, out, [line] = run("health", "--metrics-url", url)
    assert (code, out) == (1, [])
    assert line.startswith(f"error: no server answers at {url} (")
    assert line.endswith(end)


def test_output_to_dev_null_works_and_utf16_input_is_refused(run, files, tmp_path):
    source, _, _ = files
    both = ["--input", str(source), "--output", "/dev/null"]
    code, _, lines = run("translate", *both, "--overwrite")
    assert not [line for line in lines if "output" in line], lines
    wide = tmp_path / "wide.txt"
    wide.write_text("a\nb\n", encoding="utf-16")
    code, out, lines = run("translate", "--input", str(wide))
    assert (code, out) == (1, [])
    expected = [f"error: {wide}: the file is UTF-16: convert it with `iconv -f UTF-16 -t UTF-8`"]
    assert lines == expected
    output = tmp_path / "wide.out"  # it was left there, empty, with the advice to continue it
    assert run("translate", "--input", str(wide), "--output", str(output)) == (1, [], expected)
    assert not output.exists()


@pytest.mark.parametrize(
    "command", [["translate", "a", "b"], ["translate", "--stream", "a"], ["models"], ["health"]]
)
def test_a_server_that_is_not_there_is_one_clear_line(command, capfd):
    assert main([*command, "--address", "127.0.0.1:1"]) == 1
    out, err = capfd.readouterr()  # also what gRPC itself writes
    [line] = err.splitlines()
    assert out == ""
    assert line.startswith("error: UNAVAILABLE: no server answers at 127.0.0.1:1 (")


def test_the_log_of_grpc_does_not_repeat_an_error(server):
    """Its handshake with a server without TLS was in the log."""
    flags = ["--address", server.address, "--tls", "--give-up-seconds", "0.1"]
    command = [sys.executable, "-m", "client", "translate", "a", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    [line] = done.stderr.splitlines()
    assert line.startswith("error: UNAVAILABLE: no server answers at")


@pytest.fixture
def files(tmp_path):
    """An input of ten lines, one of them blank and one too long, and its output, which is not there yet."""
    lines = [f"문장 {number}" for number in range(10)]
    lines[3], lines[6] = "", "x" * 100
    source, output = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_text("\n".join(lines), encoding="utf-8")
    return source, output, "".join(line * (len(line) < 100) + "\n" for line in lines)


def test_a_file_is_translated_to_a_file(run, files):
    source, output, expected = files
    code, out, [line] = run("translate", "--input", str(source), "--output", str(output), "--in-flight", "2")
    assert (code, out) == (1, [])
    assert line.startswith("error: line 7: INVALID_ARGUMENT: ")
    assert output.read_text(encoding="utf-8") == expected
    packed = source.with_suffix(".gz")
    packed.write_bytes(gzip.compress(source.read_bytes()))
    assert "".join(f"{line}\n" for line in run("translate", "--input", str(packed))[1]) == expected
    packed.write_bytes(packed.read_bytes()[:-9])
    assert run("translate", "--input", str(packed))[2][-1].startswith(f"error: {packed}: ")


def test_an_output_that_exists_is_kept_unless_something_else_was_asked_for(run, files, capsys):
    source, output, expected = files
    output.write_text("precious\n")
    both = ["--input", str(source), "--output", str(output)]
    with pytest.raises(SystemExit, match="2"):
        run("translate", *both)
    told = capsys.readouterr().err
    assert all(datum in told for datum in (f"{output} exists", "--resume", "--overwrite"))
    with pytest.raises(SystemExit, match="2"):
        run("translate", "--input", str(output), "--output", str(output), "--overwrite")
    assert "--input and --output are the same file" in capsys.readouterr().err
    assert run("translate", "--input", "none", "--output", str(output), "--overwrite")[2] == [
        "error: none: No such file or directory"
    ]
    assert output.read_text() == "precious\n"
    assert run("translate", *both, "--overwrite")[0] == 1
    assert output.read_text(encoding="utf-8") == expected


def stopping(patch):
    """Returns an event that is set when the run ends its worker, as after a signal."""
    stop, is_stopping = Worker.stop, threading.Event()

    async def stop_worker(worker):
        is_stopping.set()
        await stop(worker)

    patch.setattr(Worker, "stop", stop_worker)
    return is_stopping


@pytest.fixture
def interrupted(run, files, monkeypatch):
    """Runs the command with shards of two lines until the first ones are written."""
    source, output, _ = files
    monkeypatch.setattr("seq2seq_serve.client.translate._SHARD_LINES", 2)

    def interrupt(*flags, stdin=None, num_shards=3, num_lines=None, by=signal.SIGINT):
        given = ["--input", str(source)] if stdin is None else []
        write, written, in_order = Writer.write, [], threading.Condition()

        def write_some(writer, shard, *rest):
            with in_order:  # whichever is translated first
                assert in_order.wait_for(lambda: 2 * len(written) == shard.first_line, 30)
                written.append(shard.name)
                in_order.notify_all()
                if len(written) <= num_shards:
                    write(writer, shard, *rest)
                    return
                if len(written) == num_shards + 1:
                    os.kill(os.getpid(), by)
            assert is_cancelled.wait(30)
            raise OSError("it was interrupted")

        with monkeypatch.context() as patch:
            patch.setattr(Writer, "write", write_some)
            is_cancelled = stopping(patch)
            code, _, err = run("translate", *given, "--output", str(output), *flags, stdin=stdin)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # it was ignored from the first on
        note = "none of the shards of 2 lines is done, so nothing is kept"
        if num_shards:
            num_lines = 2 * num_shards if num_lines is None else num_lines
            note = f"{num_lines} of 10 lines are done: continue with the same command and --resume"
        assert (code, err[-1]) == (130 if by == signal.SIGINT else 143, note)
        assert not output.exists()
        return [*given, "--output", str(output), *flags]

    return interrupt


@pytest.mark.parametrize("is_pipe", [False, True])
def test_an_interrupted_output_is_continued(run, server, files, interrupted, is_pipe):
    source, output, expected = files
    stdin = source.read_bytes() if is_pipe else None
    command = interrupted(stdin=stdin)
    before = server.turns.num_submitted
    code, _, err = run("translate", *command, "--resume", stdin=stdin)
    assert (code, [line[:31] for line in err]) == (1, ["error: line 7: INVALID_ARGUMENT"])
    # The lines that were left; what was on its way before the interrupt is among them, and may come now.
    left = {tuple(request.sources[SOURCE_IDS]) for request in server.turns.requests[before:]}
    assert len(left) <= 4
    assert output.read_text(encoding="utf-8") == expected
    assert {path.name for path in output.parent.iterdir()} - {"stdin"} == {"in.txt", "out.txt"}
    is_done = f"{output} is complete, and nothing was translated: --overwrite translates it again, also with"
    assert run("translate", *command, "--resume", "--beam-size", "2", stdin=stdin) == (
        0,
        [],
        [f"{is_done} other options"],
    )
    assert output.read_text(encoding="utf-8") == expected


def test_an_output_is_continued_with_the_options_and_the_input_that_it_was_begun_with(
    run, files, interrupted, capsys
):
    """Other options and inputs were taken, and the output had targets of both."""
    source, output, expected = files
    command = interrupted("--stop-sequences", "z")
    with pytest.raises(SystemExit, match="2"):
        run("translate", *command)
    assert "out.txt.parts exists" in capsys.readouterr().err
    code, _, [line] = run("translate", *command, "--resume", "--max-new-tokens", "3")
    assert code == 1
    assert 'max_new_tokens was null and is "3"' in line
    assert "--overwrite" in line
    content = source.read_bytes()
    source.write_bytes(content[::-1])
    assert f"other inputs: {source} has changed" in run("translate", *command, "--resume")[2][0]
    source.write_bytes(content)
    assert run("translate", *command, "--resume", "--priority", "3")[0] == 1
    assert output.read_text(encoding="utf-8") == expected


def test_a_line_that_failed_before_the_interruption_counts_in_the_exit_code(run, files, interrupted):
    source, output, _ = files
    lines = source.read_text(encoding="utf-8").split("\n")
    source.write_text("\n".join(["x" * 100, *lines[1:6], "y", *lines[7:]]), encoding="utf-8")
    command = interrupted()
    warning = "warning: failed before, and not tried again: line 1"
    assert run("translate", *command, "--resume") == (1, [], [warning])
    assert output.read_text(encoding="utf-8").split("\n")[:2] == ["", lines[1]]


def test_the_first_lines_that_failed_before_are_named_and_all_are_shown(run, files, interrupted, monkeypatch):
    """Their number was all that was said, and the progress had only those that failed since."""
    source, _, _ = files
    source.write_text("".join(f"{number}{'x' * 100 * (number != 1)}\n" for number in range(10)))
    command = interrupted(num_shards=4)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    code, _, err = run("translate", *command, "--resume")
    assert code == 1
    named = "warning: failed before, and not tried again: lines 1, 3, 4, 5, 6 and 2 more"
    assert err[0].endswith(named)
    assert " 10 of 10 lines, " in f" {err[-1]}".replace("\x1b[K", " ")
    assert err[-1].endswith(", 9 failed")


@pytest.mark.parametrize("form", [["--json"], []])
def test_a_line_that_failed_for_a_reason_that_may_pass_is_tried_again_by_resume(
    run, server, files, monkeypatch, form
):
    """It stayed blank: the output was complete, and nothing was left to continue."""
    source, output, expected = files
    monkeypatch.setattr("seq2seq_serve.client.translate._SHARD_LINES", 2)
    flags = ["--input", str(source), "--output", str(output), *form]
    step, decode = server.runner.step, server.model.target_tokenizer.decode

    def fail_for_one(rows, num_steps=1):
        if any("4" in decode(row.request.sources[SOURCE_IDS]) for row in rows):
            raise RuntimeError("broken")
        return step(rows, num_steps)

    with monkeypatch.context() as patch:
        patch.setattr(server.runner, "step", fail_for_one)
        code, _, err = run("translate", *flags)
    assert code == 1
    folder = output.with_name("out.txt.parts")
    assert err[-1] == (
        "warning: 1 line failed for a reason that may pass: the same command with --resume tries again, and "
        f"{folder} is kept for it"
    )
    before = server.turns.num_submitted
    code, _, err = run("translate", *flags, "--resume")
    assert (code, err) == (1, ["warning: failed before, and not tried again: line 7"])
    assert server.turns.num_submitted <= before + 2  # of the shard
    assert not folder.exists()
    if not form:
        assert output.read_text(encoding="utf-8") == expected


def test_lines_that_failed_for_now_cost_no_others_that_are_written(run, files, interrupted, monkeypatch):
    """Shards with such a line were removed when the command began, and all of them if no other was done."""
    source, output, expected = files
    lines = source.read_text(encoding="utf-8").split("\n")
    source.write_text("\n".join([*lines[:6], "y", *lines[7:]]), encoding="utf-8")
    write, folder = Writer.write, output.with_name("out.txt.parts")

    def fail_for_now(writer, shard, read, results):
        failed = {1 + shard.first_line: ClientError("INTERNAL", "broken")}
        results |= {number: replace(results[number], error=error) for number, error in failed.items()}
        write(writer, shard, read, results)

    async def refuse(*_arguments):
        raise ClientError("UNAUTHENTICATED", "the token has ended")
        yield

    def shards():
        return {path.name: path.read_bytes() for path in folder.glob("*.txt")}

    with monkeypatch.context() as patch:
        patch.setattr(Writer, "write", fail_for_now)
        command = interrupted(num_lines=3)
    written = shards()
    assert len(written) == 3
    with monkeypatch.context() as patch:
        patch.setattr("seq2seq_serve.client.translate._Server.send", refuse)
        code, _, err = run("translate", *command, "--resume")
    assert (code, err[-1]) == (
        1,
        "3 of 10 lines are done: continue with the same command and --resume",
    )
    assert shards() == written
    assert run("translate", *command, "--resume") == (0, [], [])
    assert output.read_text(encoding="utf-8").split("\n")[:6] == expected.split("\n")[:6]


def test_an_output_has_one_command_at_a_time(run, files, interrupted):
    """The second one ended with "No such file or directory" when the first one removed the shards."""
    _, output, expected = files
    command = interrupted()
    folder = output.with_name("out.txt.parts")
    for flag in ("--resume", "--overwrite"):
        with locked(folder):
            busy = f"error: another command is at work in {folder}: wait for it, or stop it"
            assert run("translate", *command, flag) == (1, [], [busy])
    assert run("translate", *command, "--resume")[0] == 1
    assert output.read_text(encoding="utf-8") == expected


def test_what_a_thread_writes_after_an_interrupt_is_counted(run, files, monkeypatch):
    """The shard was on the disk, and the message had one less."""
    source, output, _ = files
    monkeypatch.setattr("seq2seq_serve.client.translate._SHARD_LINES", 2)
    write, is_written = Writer.write, threading.Event()

    def write_late(writer, shard, *rest):
        if shard.first_line:
            assert is_written.wait(30)
            raise OSError("it was interrupted")
        os.kill(os.getpid(), signal.SIGINT)
        assert is_cancelled.wait(30)
        write(writer, shard, *rest)
        is_written.set()

    with monkeypatch.context() as patch:
        patch.setattr(Writer, "write", write_late)
        is_cancelled = stopping(patch)
        code, _, err = run("translate", "--input", str(source), "--output", str(output))
    assert (code, err[-1]) == (
        130,
        "2 of 10 lines are done: continue with the same command and --resume",
    )


def test_a_timeout_is_said_once_and_by_its_flag(run, server):
    """There was a pair of messages for each time, about other seconds."""
    server.runner.gate.clear()
    try:
        flags = ["--timeout-seconds", "0.2", "--in-flight", "2"]
        code, out, err = run("translate", *flags, stdin=b"ab\ncd\n")
    finally:
        server.runner.gate.set()
    assert (code, out) == (1, ["", ""])
    assert all("--timeout-seconds" in line for line in err), err  # also where the server reports it
    assert err[0].endswith("; a text is tried up to 3 times")
    assert [line.partition(": DEADLINE")[0] for line in err[1:]] == ["error: line 1", "error: line 2"]


def test_an_option_that_is_refused_ends_a_stream_of_lines(run):
    """Each line failed with the same message."""
    code, out, err = run("translate", "--stream", "--max-new-tokens", "0", stdin=b"ab\ncd\n")
    refusal = "error: INVALID_ARGUMENT: --max-new-tokens is 0, and echo takes 1 to 64"
    assert (code, out, err) == (1, [], [refusal])


BULK_PLAN = '{"settings": {"bundle_version": "v1", "inputs": {"/in/a.txt": [5, 9, "a1"]}}, "shards": []}'


@pytest.mark.parametrize("names", [["mine"], ["input.txt", "draft.tmp"], ["_plan.json", "news-00000.txt"]])
@pytest.mark.parametrize("flag", ["--resume", "--overwrite"])
def test_resume_and_overwrite_refuse_a_folder_of_another_program(run, files, flag, names):
    source, output, _ = files
    folder = output.parent / "out.txt.parts"
    folder.mkdir()
    for name in names:
        (folder / name).write_text(BULK_PLAN)
    code, _, [line] = run("translate", "--input", str(source), "--output", str(output), flag)
    assert (code, "out.txt.parts" in line) == (1, True)
    assert {path.name: path.read_text() for path in folder.iterdir()} == dict.fromkeys(names, BULK_PLAN)


def test_an_unfinished_output_is_replaced(run, files, interrupted):
    _, output, expected = files
    command = interrupted("--max-new-tokens", "3")
    assert run("translate", *command[:4], "--overwrite")[0] == 1
    assert output.read_text(encoding="utf-8") == expected


def test_an_output_that_is_of_another_input_or_release_is_not_continued(run, files):
    """Earlier versions wrote the file itself, a line at a time."""
    source, output, expected = files
    flags = ["--input", str(source), "--output", str(output), "--resume"]
    for content in (expected[:30], expected + "\n"):
        output.write_text(content)
        code, _, [line] = run("translate", *flags)
        number = len(content.splitlines())
        assert (code, f" {number} lines, " in line, "--overwrite" in line) == (1, True, True)
        assert output.read_text() == content


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_work_that_is_interrupted_says_what_is_kept(interrupted, files, by):
    """SIGTERM printed nothing, and SIGHUP left a folder without an answer."""
    interrupted(num_shards=0, by=by)
    source, output, _ = files
    assert [path.name for path in output.parent.iterdir()] == [source.name]
    interrupted(by=by)


def test_work_ends_with_its_terminal(server, tmp_path):
    """The last line to the closed terminal was an error in place of the exit code."""
    source, output = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_text("ab\n" * 100_000)
    command = [sys.executable, "-m", "client", "translate", "--input", source, "--output", output]
    master, terminal = os.openpty()
    with subprocess.Popen(
        ["setsid", "--ctty", *command, "--address", server.address],
        cwd=Path(__file__).parents[2],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
    ) as process:
        os.close(terminal)
        os.read(master, 1)  # its progress
        os.close(master)
        assert process.wait() == 128 + signal.SIGTERM
    assert not output.exists()


def test_a_device_is_written_to_without_being_asked_to_replace_it(run, files):
    """It "exists", and was refused although the documentation names it."""
    assert run("translate", "--input", str(files[0]), "--output", "/dev/null")[0] == 1  # of a long line
    assert Path("/dev/null").is_char_device()


def test_work_that_stops_before_its_first_shard_leaves_nothing(run, files):
    source, output, expected = files
    flags = ["--input", str(source), "--output", str(output)]
    refusal = "error: INVALID_ARGUMENT: --max-new-tokens is 0, and echo takes 1 to 64"
    assert run("translate", *flags, "--max-new-tokens", "0") == (1, [], [refusal])
    assert [path.name for path in output.parent.iterdir()] == ["in.txt"]
    assert run("translate", *flags)[0] == 1  # the corrected command
    assert output.read_text(encoding="utf-8") == expected


@pytest.mark.parametrize(("name", "content"), [("a.html", "<p>ab</p>"), ("a.txt", "\nab\nabc\n")])
def test_a_refused_option_leaves_no_output_of_a_short_input(run, tmp_path, name, content):
    """There were too few texts to stop, and an untranslated document was written."""
    source, output = tmp_path / name, tmp_path / f"out-{name}"
    source.write_text(content)
    flags = ["--input", str(source), "--output", str(output)]
    code, _, err = run("translate", *flags, "--max-new-tokens", "0")
    assert (code, err) == (1, ["error: INVALID_ARGUMENT: --max-new-tokens is 0, and echo takes 1 to 64"])
    assert list(tmp_path.iterdir()) == [source]
    assert run("translate", *flags)[0] == 0
    assert output.read_text() == content


def test_the_text_of_a_pipe_is_kept_when_work_stops_before_its_first_shard(run, files, monkeypatch):
    source, output, expected = files
    flags, text = ["--output", str(output)], source.read_bytes()
    kept = output.with_name("out.txt.parts") / "_pipe" / "input.txt"

    def fail(*_):
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patch:
        patch.setattr(Writer, "write", fail)
        code, _, err = run("translate", *flags, stdin=text)
    advice = f"the input is kept in {kept}: continue with the same command and --resume"
    assert (code, err[-1]) == (1, advice)
    assert (
        "is not that of the unfinished output"
        in run("translate", *flags, "--resume", stdin=b"another\n")[2][0]
    )
    assert "would remove the input" in run("translate", *flags, "--input", str(kept), "--overwrite")[2][0]
    assert kept.read_bytes() == text
    assert run("translate", *flags, "--resume", stdin=b"")[0] == 1  # one line is too long
    assert output.read_text(encoding="utf-8") == expected
    assert not kept.parent.parent.exists()


def test_a_command_that_is_killed_and_resumed_writes_every_line_once(server, tmp_path):
    source, output = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_text("".join(f"line {number}\n" for number in range(2_000)))
    flags = ["--address", server.address, "--input", str(source), "--output", str(output), "--resume"]
    command = [sys.executable, "-m", "client", "translate", *flags]
    process = subprocess.Popen(command)
    while not list(tmp_path.glob("out.txt.parts/in-*.txt")):
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert not output.exists()
    assert main(command[3:]) == 0
    assert output.read_bytes() == source.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt", "out.txt"]


def test_a_kill_while_shards_are_removed_repeats_no_translation(run, server, files, monkeypatch):
    """The lines were translated anew, although the output was complete."""
    source, output, expected = files
    flags = ["--input", str(source), "--output", str(output)]

    class Killed(BaseException):
        pass

    def remove_shards(folder):
        for path in folder.glob("in-*"):
            path.unlink()
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", remove_shards)
        with pytest.raises(Killed):
            run("translate", *flags)
    before = server.turns.num_submitted
    assert run("translate", *flags, "--resume")[0] == 0
    assert server.turns.num_submitted == before
    assert output.read_text(encoding="utf-8") == expected
    assert sorted(path.name for path in output.parent.iterdir()) == ["in.txt", "out.txt"]


def test_records_get_their_targets(run, tmp_path, capsys):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"ko": "가", "id": 1}\n{"ko": 5}\n')
    flags = ["--input", str(source), "--field", "ko", "--target-field", "en"]
    code, _, [line] = run("translate", *flags, "--output", str(output))
    assert (code, line) == (1, "error: line 2: INVALID_ARGUMENT: the field 'ko' is not a text: 5")
    records = list(map(json.loads, output.read_text().splitlines()))
    assert records == [
        {"ko": "가", "id": 1, "en": "가", "en_score": None},
        {"ko": 5, "en": None, "en_score": None},
    ]
    for name, advice in (
        ("in.jsonl", "has records"),
        ("in.parquet", "is a table"),
        ("in.csv", ".csv cannot"),
    ):
        with pytest.raises(SystemExit, match="2"):
            run("translate", "--input", str(tmp_path / name))
        assert advice in capsys.readouterr().err


def test_a_reader_that_leaves_early_gets_no_traceback(server):
    command = [sys.executable, "-m", "client", "translate", "--address", server.address]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdin.write(b"abc\n")
        process.stdin.flush()
        # An answer is there although more lines may come.
        assert process.stdout.readline() == b"abc\n"
        process.stdout.close()
        process.stdin.write(b"abc\n" * 100)
        process.stdin.flush()
        assert process.wait(20) == 128 + signal.SIGPIPE
        assert process.stderr.read() == b""


def test_tls_and_a_token_are_files(tmp_path, capsys):
    authority = trustme.CA()
    issued = authority.issue_cert("localhost")
    certificate, key, ca = (tmp_path / name for name in ("server.pem", "server.key", "ca.pem"))
    certificate.write_bytes(issued.cert_chain_pems[0].bytes())
    key.write_bytes(issued.private_key_pem.bytes())
    ca.write_bytes(authority.cert_pem.bytes())
    access, token = access_file(tmp_path, ("app", "sesame", "predict")), tmp_path / "token"
    token.write_text("sesame\n")
    with serving_on_a_thread(tls_certificate=certificate, tls_key=key, access_file=access) as served:
        address = f"localhost:{served.app.endpoint.port}"
        flags = ["--address", address, "--tls-ca", str(ca)]
        assert main(["translate", *flags, "--token-file", str(token), "abc"]) == 0
        assert capsys.readouterr().out == "abc\n"
        assert main(["models", *flags, "--token-file", str(token)]) == 0
        assert main(["health", *flags]) == 0  # for probes, which have none
        capsys.readouterr()
        assert main(["translate", *flags, "abc"]) == 1
        assert "UNAUTHENTICATED" in (err := capsys.readouterr().err)
        assert "--token-file" in err
        assert main(["models", "--address", address, "--tls"]) == 1
        assert "--tls-ca" in capsys.readouterr().err
    assert main(["health", "--address", "x:1", "--tls-ca", str(tmp_path / "none.pem")]) == 1
    assert "none.pem: No such file" in capsys.readouterr().err


def test_a_token_file_of_other_bytes_is_an_error_in_one_line(tmp_path, capsys):
    """It was a traceback."""
    (tmp_path / "token").write_bytes(b"\xff\xfe")
    assert main(["translate", "--token-file", str(tmp_path / "token"), "abc"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert str(tmp_path / "token") in line
