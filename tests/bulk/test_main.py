"""The whole command on a small bundle, also when it is killed."""

import asyncio
import gzip
import html
import json
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet
import pytest

from seq2seq_serve.bulk.__main__ import main
from seq2seq_serve.bulk.engine import start_worker
from seq2seq_serve.client import AsyncClient, GenerateOptions
from seq2seq_serve.client.__main__ import main as client
from seq2seq_serve.client.files.formats import Writer
from seq2seq_serve.documents.terms import WholeTerms
from seq2seq_serve.server.runner.runner import OnnxRunner
from tests.server.service.harness import on_a_thread, serving_bundles

WORDS = ["하나", "둘", "셋", "넷", "다섯", "오늘은", "금요일", "비가", "온다"]
FLAGS = ["--threads", "1", "--max-slots", "8"]


def texts_of(number, seed=0):
    chance = random.Random(seed)
    return [" ".join(chance.choices(WORDS, k=chance.randint(1, 8))) for _ in range(number)]


def served(bundle_path, texts, **options):
    """The targets of a server."""

    async def run():
        async with serving_bundles(bundle_path) as server, AsyncClient(server.address) as client:
            calls = (client.generate(text, options=GenerateOptions(**options)) for text in texts)
            return [answer.hypotheses for answer in await asyncio.gather(*calls)]

    return asyncio.run(run())


def files(folder):
    """The names and contents of all files of an output."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_lines_of_files_are_those_of_a_server(bundle_path, tmp_path, capsys):
    texts = texts_of(40)
    (tmp_path / "de").mkdir()
    (tmp_path / "a.txt").write_text("".join(f"{text}\n" for text in texts[:25]))
    (tmp_path / "de" / "b.txt.gz").write_bytes(gzip.compress("\n".join(texts[25:]).encode()))
    patterns = [str(tmp_path / "a.txt"), str(tmp_path / "**" / "*.gz")]
    arguments = [str(bundle_path), "--input", *patterns, "--output", str(tmp_path / "out")]
    assert main([*arguments, "--shard-lines", "10", *FLAGS]) == 0
    names = ["a-00000", "a-00001", "a-00002", "de/b-00000", "de/b-00001"]
    assert files(tmp_path / "out").keys() == {"_plan.json", *(f"{name}.txt" for name in names)}
    lines = "".join((tmp_path / "out" / f"{name}.txt").read_text() for name in names).splitlines()
    assert lines == [hypotheses[0].text for hypotheses in served(bundle_path, texts)]
    assert "40 lines in" in capsys.readouterr().out


def test_records_keep_their_fields_and_bad_lines_are_reported_by_number(bundle_path, tmp_path, capsys):
    good = ['{"id": 1, "ko": "하나 둘"}', '{"id": 2, "ko": " "}', '{"id": 3, "ko": "셋"}', ""]
    bad = ['{"id": 4}', "half", json.dumps({"ko": "하나 " * 500}), '{"ko": "\\ud800"}']
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join((*good, *bad)))
    flags = ["--field", "ko", "--target-field", "en", "--beam-size", "3", "--num-hypotheses", "2", *FLAGS]
    assert main([str(bundle_path), "--input", str(path), "--output", str(tmp_path / "out"), *flags]) == 0
    records = list(map(json.loads, (tmp_path / "out" / "a-00000.jsonl").read_text().splitlines()))
    one, three = served(bundle_path, ["하나 둘", "셋"], beam_size=3, num_hypotheses=2)
    for record, hypotheses in ((records[0], one), (records[2], three)):
        assert record["en"] == hypotheses[0].text
        assert [each["text"] for each in record["en_hypotheses"]] == [each.text for each in hypotheses]
        assert record["en_score"] == pytest.approx(hypotheses[0].score, abs=1e-5)
    assert records[1] == {"id": 2, "ko": " ", "en": "", "en_score": None, "en_hypotheses": []}
    assert [record["en"] for record in records[3:]] == ["", *[None] * 4]
    errors = list(map(json.loads, (tmp_path / "out" / "_errors" / "a-00000.jsonl").read_text().splitlines()))
    assert [error["line"] for error in errors] == [5, 6, 7, 8]
    assert "8 lines, 4 of them failed" in capsys.readouterr().err


def test_rows_of_parquet_get_new_columns(bundle_path, tmp_path):
    texts = texts_of(12)
    table = pyarrow.table({"text": texts, "number": range(12)})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=5)
    flags = ["--output", str(tmp_path / "out"), "--shard-lines", "7", *FLAGS]
    assert main([str(bundle_path), "--input", str(tmp_path / "a.parquet"), *flags]) == 0
    found = pyarrow.parquet.read_table(tmp_path / "out")
    assert found.drop_columns(["target", "target_score"]) == table
    assert found["target"].to_pylist() == [one[0].text for one in served(bundle_path, texts)]


def test_documents_keep_their_markup_and_times_beside_files_of_lines(bundle_path, tmp_path, capsys):
    texts = texts_of(4)
    times = ["00:00:01,000 --> 00:00:02,000", "00:00:03,000 --> 00:00:04,000"]
    content = "".join(f"{number}\n{time}\n{{}}\n\n" for number, time in enumerate(times, start=1))
    (tmp_path / "film.srt.gz").write_bytes(gzip.compress(content.format(*texts[:2]).encode()))
    page = "<html lang='ko-KR'><body><p>{}</p><p>{} <b>{}</b></p></body></html>"
    long = "하나 " * 500
    (tmp_path / "page.html").write_text(page.format(long, texts[2], texts[3]))
    (tmp_path / "a.txt").write_text(f"{texts[0]}\n")
    inputs = [str(tmp_path / name) for name in ("film.srt.gz", "page.html", "a.txt")]
    out = tmp_path / "out"
    arguments = [str(bundle_path), "--input", *inputs, "--output", str(out), *FLAGS]
    assert main(arguments) == 0
    first, second, third = (
        one[0].text for one in served(bundle_path, [*texts[:2], f"{texts[2]} {texts[3]}"])
    )
    assert (out / "film.srt").read_text() == content.format(first, second)
    assert (out / "a-00000.txt").read_text() == f"{first}\n"
    written = (out / "page.html").read_text()
    assert written.startswith(f'<html lang="en"><body><p>{long}</p><p>')
    shown = re.sub("<[^>]*>", "", written[written.index("</p><p>") :])
    assert " ".join(shown.split()) == " ".join(third.split())
    (error,) = map(json.loads, (out / "_errors" / "page.html.jsonl").read_text().splitlines())
    assert (error["line"], error["code"]) == (1, "INVALID_ARGUMENT")
    with on_a_thread(serving_bundles(bundle_path)) as server:
        flags = ["--address", server.address, "--input", inputs[1], "--output", str(tmp_path / "client.html")]
        assert client(["translate", *flags]) == 1  # for the text that is too long
    assert (tmp_path / "client.html").read_text() == written
    before = files(out)
    capsys.readouterr()
    (out / "film.srt").unlink()
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith("2 lines")
    assert files(out) == before
    assert main([*arguments, "--format", "text", "--output", str(tmp_path / "other")]) == 0
    one = [str(bundle_path), "--input", inputs[1], "--output", str(tmp_path / "one"), *FLAGS]
    assert main([*one, "--format", "text"]) == 2
    assert "--format" in capsys.readouterr().err


@pytest.fixture
def lines(bundle_path, tmp_path):
    """The beginning of a command, and its output folder."""
    (tmp_path / "a.txt").write_text("".join(f"{text}\n" for text in texts_of(60)))
    arguments = [str(bundle_path), "--input", str(tmp_path / "a.txt"), "--output", str(tmp_path / "out")]
    return [*arguments, "--shard-lines", "10", *FLAGS], tmp_path / "out"


def test_the_same_command_does_only_what_is_missing(lines, capsys):
    arguments, out = lines
    assert main(arguments) == 0
    before = files(out)
    (out / "a-00003.txt").unlink()
    times = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert main(arguments) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("10 lines")
    assert files(out) == before
    assert main(arguments) == 0
    assert f"{out} has all 6 shards" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in times} == times


def test_an_input_that_changes_during_the_run_ends_it(lines, monkeypatch, capsys):
    arguments, out = lines
    write = Writer.write

    def write_and_change(writer, shard, *rest):
        write(writer, shard, *rest)
        path = Path(shard.input)
        path.write_bytes(path.read_bytes()[::-1])

    monkeypatch.setattr(Writer, "write", write_and_change)
    assert main([*arguments, "--shard-lines", "1"]) == 2
    assert "a.txt has changed since the run was planned" in capsys.readouterr().err
    assert len(list(out.glob("*.txt"))) < 60


def test_a_failed_part_keeps_the_plan_for_the_other_parts(lines):
    """It removed the plan, and the shards of the others came to belong to no run."""
    arguments, out = lines
    (out.parent / "a.txt").write_text('{"text": "하나"}\n' * 30)
    arguments = [arguments[0], "--input", str(out.parent / "a.txt"), *arguments[3:], "--format", "jsonl"]
    before = None
    for part in ("0/3", "1/3"):
        assert main([*arguments, "--target-field", "text", "--part", part]) == 2
        plan = (out / "_plan.json").read_bytes()
        assert before in (None, plan)
        before = plan


def test_parts_are_done_by_different_commands(lines):
    arguments, out = lines
    for part, names in (("0/4", ["a-00000", "a-00004"]), ("3/4", ["a-00003"])):
        before = files(out).keys() if out.exists() else {"_plan.json"}
        assert main([*arguments, "--part", part]) == 0
        assert files(out).keys() - before == {f"{name}.txt" for name in names}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--beam-size", "4"], 'options beam_size was null and is "4"'),
        (["--max-slots", "2", "--shard-lines", "20"], "shard_lines was 10 and is 20"),
        (["--format", "jsonl"], 'format was "text" and is "jsonl"'),
    ],
)
def test_another_command_does_not_touch_the_output(lines, capsys, flags, message):
    arguments, out = lines
    assert main([*arguments, "--part", "0/6"]) == 0
    before = files(out)
    assert main([*arguments, *flags]) == 2
    assert message in capsys.readouterr().err
    assert files(out) == before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--beam-size", "20"], "INVALID_ARGUMENT: --beam-size is 20, and must be from 1 to"),
        (["--task", "x"], "does not have a --task to choose"),
        (["--num-hypotheses", "2"], "--num-hypotheses needs --format jsonl"),
        (["--input", "nothing.txt"], "there is no file"),
        (["--precision", "fp16"], "fp16"),
    ],
)
def test_a_mistake_ends_the_command_with_one_line(lines, capsys, flags, message):
    arguments, _ = lines
    assert main([*arguments, *flags]) == 2
    (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert message in error
    assert main(arguments) == 0  # the mistake has left no plan behind


@pytest.mark.parametrize("target", ["out", "/dev/null", "nothing"])
def test_an_output_that_is_not_a_folder_is_one_line(lines, capsys, target):
    """The name of a link to itself, to a device, or to nothing."""
    arguments, out = lines
    out.symlink_to(target)
    assert main(arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: --output {out} is not a folder")


def test_names_that_are_not_utf8_are_names(lines, capsys):
    arguments, out = lines
    source = (out.parent / "a.txt").rename(out.parent / "a\udcff.txt")
    arguments = [arguments[0], "--input", str(source), "--output", str(out) + "\udcff", *FLAGS]
    assert main(arguments) == main(arguments) == 0
    assert "nothing is left to do" in capsys.readouterr().out
    assert len((Path(str(out) + "\udcff") / "a\udcff-00000.txt").read_text().splitlines()) == 60


@pytest.mark.parametrize(
    "flags", [["--draft", "nothing"], ["--max-slots-size", "1"], ["--memory-budget", "1"]]
)
def test_settings_that_do_not_fit_are_refused_before_the_inputs_are_read(lines, capsys, flags):
    """All inputs were read, and an empty folder was left."""
    arguments, out = lines
    assert main([*arguments, *flags]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert not out.exists()


def test_files_of_the_output_and_links_are_seen_as_what_they_are(lines):
    arguments, out = lines
    blob = out.parent / "blob"
    blob.write_text('{"text": "하나"}\n')
    (out.parent / "in").mkdir()
    (out.parent / "in" / "a.jsonl").symlink_to(blob)
    arguments = [arguments[0], "--input", str(out.parent / "**" / "*.jsonl"), *arguments[3:]]
    for _ in range(2):  # the second time the output matches the pattern, too
        assert main(arguments) == 0
    assert files(out).keys() == {"_plan.json", "a-00000.jsonl"}


@pytest.fixture
def broken_steps(monkeypatch):
    """Makes the steps fail that have a row with a source of more tokens, as soon as the model is loaded."""

    def break_steps(more_than):
        step, is_loaded = OnnxRunner.step, False

        async def load(job):
            nonlocal is_loaded
            is_loaded = False
            worker = await start_worker(job)
            is_loaded = True
            return worker

        def broken(runner, rows, num_steps=1):
            if is_loaded and any(row.request.memory_length > more_than for row in rows):
                raise RuntimeError("this step is broken")
            return step(runner, rows, num_steps)

        monkeypatch.setattr("seq2seq_serve.bulk.__main__.start_worker", load)
        monkeypatch.setattr("seq2seq_serve.client.files.run._PAUSE_SECONDS", 0.0)
        monkeypatch.setattr(OnnxRunner, "step", broken)

    return break_steps


def test_a_text_that_breaks_its_steps_is_an_error_and_its_neighbours_are_not(lines, broken_steps):
    arguments, out = lines
    arguments += ["--shard-lines", "20"]
    texts = [WORDS[number % 5] for number in range(20)]
    texts[7] = " ".join(WORDS[4:7])  # the only long one
    (out.parent / "a.txt").write_text("".join(f"{text}\n" for text in texts))
    assert main(arguments) == 0
    expected = (out / "a-00000.txt").read_text().splitlines()
    (out / "a-00000.txt").unlink()
    broken_steps(more_than=12)
    assert main(arguments) == 0
    (error,) = map(json.loads, (out / "_errors" / "a-00000.jsonl").read_text().splitlines())
    assert (error["line"], error["code"]) == (8, "INTERNAL")
    assert (out / "a-00000.txt").read_text().splitlines() == [*expected[:7], "", *expected[8:]]


def test_an_engine_whose_steps_keep_failing_writes_nothing(lines, broken_steps, capsys):
    arguments, out = lines
    broken_steps(more_than=0)
    assert main(arguments) == 1
    assert "workers were lost one after the other" in capsys.readouterr().err
    assert files(out).keys() == {"_plan.json"}


def test_sampling_needs_a_seed(lines, capsys):
    arguments, _ = lines
    with pytest.raises(SystemExit, match="2"):
        main([*arguments, "--temperature", "1"])
    assert "--temperature needs --seed" in capsys.readouterr().err


def start(arguments, **settings):
    command = [sys.executable, "-m", "bulk", *arguments]
    return subprocess.Popen(
        command, cwd=Path(__file__).parents[2], stderr=subprocess.PIPE, text=True, **settings
    )


@pytest.mark.slow  # four runs of the command
def test_a_driver_that_is_killed_again_and_again_writes_every_line_once(lines, tmp_path):
    arguments, out = lines
    (tmp_path / "a.txt").write_text("".join(f"{text}\n" for text in texts_of(3000)))
    arguments = [*arguments, "--shard-lines", "40"]
    for num_done in (1, 20):
        process = start(arguments)
        while len(list(out.glob("*.txt"))) < num_done:
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
        process.communicate()
    process = start(arguments)
    _, log = process.communicate(timeout=300)
    assert process.returncode == 0, log
    whole = tmp_path / "whole"
    arguments[arguments.index("--output") + 1] = str(whole)
    assert main(arguments) == 0
    written = {name: content for name, content in files(out).items() if not name.endswith(".tmp")}
    assert written == files(whole)


def test_sigterm_ends_the_command_between_two_shards(lines, tmp_path):
    arguments, out = lines
    (tmp_path / "a.txt").write_text("".join(f"{text}\n" for text in texts_of(20_000)))
    process = start(arguments)
    while not list(out.glob("*.txt")):
        time.sleep(0.01)
    process.terminate()
    _, log = process.communicate(timeout=30)
    assert process.returncode == 143, log
    assert log.endswith("interrupted: run the same command again to continue\n")


@pytest.mark.parametrize("suffix", [".txt", ".parquet"])
def test_texts_of_a_translation_memory_are_not_decoded(bundle_path, tmp_path, capsys, suffix):
    texts = [*texts_of(4), "하나  둘"]
    if suffix == ".txt":
        (tmp_path / "a.txt").write_text("".join(f"{text}\n" for text in texts))
    else:
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet")
    memory = tmp_path / "old.tmx"
    content = (
        '<tmx><header srclang="ko"/><body><tu><tuv xml:lang="ko"><seg>하나 둘</seg></tuv>'
        '<tuv xml:lang="en"><seg>{}</seg></tuv></tu></body></tmx>'
    )
    memory.write_text(content.format("one two"))
    files = ["--input", str(tmp_path / f"a{suffix}"), "--output", str(tmp_path / "out")]
    arguments = [str(bundle_path), *files, "--memory", str(memory), *FLAGS]
    assert main(arguments) == 0
    if suffix == ".txt":
        targets = (tmp_path / "out" / "a-00000.txt").read_text().splitlines()
    else:
        targets = pyarrow.parquet.read_table(tmp_path / "out")["target"].to_pylist()
    assert targets == [*(one[0].text for one in served(bundle_path, texts[:4])), "one two"]
    assert capsys.readouterr().err.splitlines()[-1] == "from the memory: 1 text"
    memory.write_text(content.format("another"))
    assert main(arguments) == 2
    assert "other settings: memory was" in capsys.readouterr().err
    memory.write_text(content[:-6])
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith(f"error: {memory}: the file is not XML")


def test_changed_placeholders_and_inputs_and_glossaries_without_texts_are_reported(
    bundle_path, tmp_path, capsys
):
    """They were not: only `translate` reported them."""
    units = "".join(
        f'<tu><tuv xml:lang="ko"><seg>{text}</seg></tuv><tuv xml:lang="en"><seg>lost</seg></tuv></tu>'
        for text in ("하나 {a}", "둘 {b}", "셋")
    )
    (tmp_path / "m.tmx").write_text(f'<tmx version="1.4"><header srclang="ko"/><body>{units}</body></tmx>')
    (tmp_path / "a.json").write_text('{"a": "셋", "b": "하나 {a}", "c": "둘 {b}"}')
    (tmp_path / "b.txt").write_text("하나 {a}\n")  # has to keep none
    (tmp_path / "c.txt").write_text("")
    (tmp_path / "d.tsv").write_text("")
    inputs = [str(tmp_path / name) for name in ("a.json", "b.txt", "c.txt")]
    flags = ["--memory", str(tmp_path / "m.tmx"), "--glossary", str(tmp_path / "d.tsv"), *FLAGS]
    assert main([str(bundle_path), "--input", *inputs, "--output", str(tmp_path / "out"), *flags]) == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")]
    changed = "the target has other placeholders than the source, or a tag not around a text: correct it"
    assert warnings == [
        f"warning: {tmp_path}/d.tsv: 0 terms",
        f"warning: {tmp_path}/c.txt: 0 texts",
        f"warning: {tmp_path}/a.json: text 2 and 1 more: {changed}",
    ]


def test_targets_have_the_terms_of_a_glossary(bundle_path, tmp_path, capsys):
    texts = texts_of(6)
    (tmp_path / "a.txt").write_text("".join(f"{text}\n" for text in texts))
    (tmp_path / "terms.tsv").write_text("하나\taw\n")
    arguments = [str(bundle_path), "--input", str(tmp_path / "a.txt"), "--output", str(tmp_path / "out")]
    assert main([*arguments, "--glossary", str(tmp_path / "terms.tsv"), *FLAGS]) == 0
    targets = (tmp_path / "out" / "a-00000.txt").read_text().splitlines()
    terms = [{"source": "하나", "target": "aw"}]
    assert targets == [one[0].text for one in served(bundle_path, texts, terms=terms)]
    has_term = ["하나" in text for text in texts]
    assert {True, False} == set(has_term)
    assert all("aw" in target for target, has in zip(targets, has_term, strict=True) if has)
    assert main([*arguments, *FLAGS]) == 2
    assert 'options terms was "1 (' in capsys.readouterr().err


def test_the_terms_of_a_run_are_those_of_its_documents(bundle_path, tmp_path, monkeypatch):
    """The formatting of targets depends on them."""
    given = []
    monkeypatch.setattr(WholeTerms, "__init__", lambda _, terms: given.extend(terms))
    monkeypatch.setattr(WholeTerms, "joined", lambda _, source, target, kept: target)
    (tmp_path / "a.html").write_text("<p>둘 <b>하나</b></p>")
    arguments = [str(bundle_path), "--input", str(tmp_path / "a.html"), "--output", str(tmp_path / "out")]
    assert main([*arguments, "--terms", "하나=aw", *FLAGS]) == 0
    assert [(term.source, term.target) for term in given] == [("하나", "aw")]


def test_terms_and_translations_in_the_wrong_order_are_a_warning(bundle_path, tmp_path, capsys):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("오늘은 하나\n" * 3)
    (tmp_path / "terms.tsv").write_text("aw\t하나\n")
    arguments = [str(bundle_path), "--input", str(tmp_path / "?.txt"), "--output", str(tmp_path / "out")]
    assert main([*arguments, "--shard-lines", "2", "--glossary", str(tmp_path / "terms.tsv"), *FLAGS]) == 0
    message = " and 5 more: the source has translations of terms (하나), and no source has a term"
    assert capsys.readouterr().err.count(message) == 1


def test_documents_of_programs_keep_placeholders(bundle_path, tmp_path):
    texts = ["하나 {name}", "오늘은 금요일"]
    messages = "".join(f'msgid "{text}"\nmsgstr ""\n\n' for text in texts)
    (tmp_path / "a.po").write_text(f'msgid ""\nmsgstr ""\n\n{messages}')
    (tmp_path / "b.html").write_text("".join(f"<p>{text}</p>\n" for text in texts))
    inputs = ["--input", str(tmp_path / "a.po"), str(tmp_path / "b.html")]
    arguments = [str(bundle_path), *inputs, "--output"]
    assert main([*arguments, str(tmp_path / "out"), *FLAGS]) == 0
    assert main([*arguments, str(tmp_path / "other"), *FLAGS, "--no-keep-placeholders"]) == 0
    kept = [one[0].text for one in served(bundle_path, texts, keep_placeholders=True)]
    plain = [one[0].text for one in served(bundle_path, texts)]
    assert kept[0] != plain[0]

    def written(folder, name):
        found = re.findall('(?:<p>|msgstr ")(.+)(?:</p>|")', (tmp_path / folder / name).read_text())
        return list(map(html.unescape, found))

    assert written("out", "a.po") == kept
    assert written("other", "a.po") == plain
    assert written("out", "b.html") == plain
