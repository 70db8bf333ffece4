"""`seq2seq translate --memory` against a server that echoes: what is not sent, and what is reported."""

import json
import os
import threading

import pytest

from seq2seq_serve.bundle.manifest import Choice
from seq2seq_serve.client.files.formats import Writer
from tests.server.service.harness import serving_on_a_thread, with_manifest

TMX = """<tmx version="1.4"><header srclang="{head}"/><body>
<tu><tuv xml:lang="ko-KR"><seg>가</seg></tuv><tuv xml:lang="en"><seg>one</seg></tuv></tu>
<tu><tuv xml:lang="ko-KR"><seg>나 <ph>x</ph>다</seg></tuv>
<tuv xml:lang="en"><seg>two &amp; {last}</seg></tuv></tu>
</body></tmx>"""


@pytest.fixture(autouse=True)
def _memory(tmp_path):
    (tmp_path / "old.tmx").write_text(TMX.format(head="ko", last="three"))


def test_texts_of_the_memory_are_not_sent_and_are_counted(run, server):
    before = server.turns.num_submitted
    flags = ["--memory", "old.tmx"]
    lines = "나\n나  다 \n\n가\nab\n".encode()
    expected = "나\ntwo & three\n\none\nab\n"
    assert run("translate", *flags, stdin=lines) == (0, expected, ["from the memory: 2 texts"])
    assert server.turns.num_submitted == before + 2
    assert run("translate", "가", *flags) == (0, "one\n", ["from the memory: 1 text"])
    assert run("translate", "가", "--stream", *flags) == (0, "one\n", ["from the memory: 1 text"])
    assert run("translate", "라", *flags) == (0, "라\n", ["from the memory: 0 texts"])
    several = ["--beam-size", "2", "--num-hypotheses", "2"]
    assert run("translate", "가", *flags, *several) == (0, "one\n\n", ["from the memory: 1 text"])
    assert server.turns.num_submitted == before + 3


@pytest.mark.parametrize("flags", [[], ["--stream"]])
def test_json_marks_the_answers_of_the_memory(run, flags):
    _, out, _ = run("translate", "--json", *flags, "--memory", "old.tmx", stdin="가\nab\n".encode())
    first, *others = map(json.loads, out.splitlines())
    assert (first["source"], first["from_memory"]) == ("가", True)
    assert [hypothesis["text"] for hypothesis in first["hypotheses"]] == ["one"]
    assert others
    assert not any("from_memory" in other for other in others)


def test_lines_records_and_plain_texts_of_documents_come_from_the_memory(run, server, tmp_path):
    (tmp_path / "in.txt").write_text("가\nab\n")
    (tmp_path / "in.jsonl").write_text('{"text": "가"}\n{"text": "ab"}\n')
    (tmp_path / "in.html").write_text("<p> 가</p><p>나 다</p><p>나 <b>다</b></p><p>ab</p>")
    before = server.turns.num_submitted
    for suffix, number in ((".txt", "1 text"), (".jsonl", "1 text"), (".html", "2 texts")):
        files = ["--input", f"in{suffix}", "--output", f"out{suffix}"]
        assert run("translate", *files, "--memory", "old.tmx") == (0, "", [f"from the memory: {number}"])
    assert (tmp_path / "out.txt").read_text() == "one\nab\n"
    records = list(map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines()))
    assert [record["target"] for record in records] == ["one", "ab"]
    # A text whose parts have different formattings needs the alignment of words, so it is decoded.
    assert (tmp_path / "out.html").read_text() == (
        "<p> one</p><p>two &amp; three</p><p>나 <b>다</b></p><p>ab</p>"
    )
    assert server.turns.num_submitted == before + 4


def test_an_output_is_continued_with_the_memory_that_it_was_begun_with(run, tmp_path, monkeypatch):
    (tmp_path / "in.txt").write_text("가\nab\n나 다\n")
    monkeypatch.setattr("seq2seq_serve.client.translate._SHARD_LINES", 2)
    command = ["--input", "in.txt", "--output", "out.txt", "--memory", "old.tmx"]
    write = Writer.write

    def write_first(writer, shard, *rest):
        if shard.first_line:
            raise OSError("the disk is gone")
        write(writer, shard, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Writer, "write", write_first)
        assert run("translate", *command)[0] == 1
    (tmp_path / "old.tmx").write_text(TMX.format(head="ko", last="four"))
    [line] = run("translate", *command, "--resume")[2]
    assert 'belongs to a run with other settings: memory was "2 texts (' in line
    assert "memory was" in run("translate", *command[:-2], "--resume")[2][0]
    (tmp_path / "old.tmx").write_text(TMX.format(head="ko", last="three"))
    assert run("translate", *command, "--resume") == (0, "", ["from the memory: 1 text"])
    assert (tmp_path / "out.txt").read_text() == "one\nab\ntwo & three\n"


def test_an_option_that_is_refused_stops_the_work_also_if_the_memory_has_some_texts(run, tmp_path):
    (tmp_path / "in.txt").write_text("가\nab\n")
    files = ["--input", "in.txt", "--output", "out.txt"]
    code, _, err = run("translate", *files, "--memory", "old.tmx", "--top-k", "3")
    assert (code, err) == (
        1,
        ["from the memory: 1 text", "error: INVALID_ARGUMENT: --top-k needs a temperature above 0"],
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt", "old.tmx"]


def test_a_memory_of_other_languages_is_one_line_and_no_output(run, tmp_path):
    (tmp_path / "other.tmx").write_text(TMX.format(head="*all*", last="three"))
    (tmp_path / "in.txt").write_text("가\n")
    files = ["--input", "in.txt", "--output", "out.txt"]
    for arguments in (["가"], files):
        code, out, [line] = run("translate", *arguments, "--memory", "old.tmx", "--memory", "other.tmx")
        assert (code, out) == (1, "")
        assert line == (
            "error: other.tmx: it is not clear which texts are translations: the languages of the file are "
            "ko-KR, en: give --source-language and --target-language"
        )
    assert not (tmp_path / "out.txt").exists()
    assert run("translate", "가", "--memory", "other.tmx", "--source-language", "ko")[1] == "one\n"
    code, _, [line] = run("translate", "가", "--memory", "none.tmx")
    assert (code, line) == (1, "error: none.tmx: No such file or directory")


def test_several_files_share_a_memory_that_is_read_once(run, tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("가\nab\n")
    os.mkfifo(tmp_path / "pipe")  # cannot be read twice
    writer = threading.Thread(target=lambda: (tmp_path / "pipe").write_text(TMX.format(head="ko", last="x")))
    writer.start()
    command = ["translate", "--input", "a.txt", "b.txt", "--to", "out", "--memory"]
    assert run(*command, "pipe") == (0, "", [f"{name}.txt: from the memory: 1 text" for name in "ab"])
    writer.join()
    assert (tmp_path / "out" / "b.txt").read_text() == "one\nab\n"
    (tmp_path / "wrong.tmx").write_text("<html/>")
    [line] = run(*command, "wrong.tmx", "--overwrite")[2]
    assert line == "error: wrong.tmx: line 1: the file is not <tmx>, but <html>"


def test_the_languages_are_those_of_the_model(run, tmp_path):
    (tmp_path / "all.tmx").write_text(TMX.format(head="*all*", last="three"))
    with serving_on_a_thread() as served:
        command = ["translate", "가", "one", "--memory", "all.tmx", "--address", served.address]
        models, choice = served.app.models, Choice({"en": 7, "ko": 8}, "en")
        models.put(with_manifest(served.model, source_language="ko", target_language="en"))
        assert run(*command)[1] == "one\none\n"
        models.put(with_manifest(served.model, source_language="", choices={"source_language": choice}))
        [line] = run(*command)[2]
        assert "no translations from en to en" in line
        models.put(with_manifest(served.model, target_language="ko"))
        assert run(*command)[1] == "가\n가\n"


def test_the_alignment_of_a_text_needs_the_text_to_be_decoded(run, capsys):
    with pytest.raises(SystemExit, match="2"):
        run("translate", "가", "--memory", "old.tmx", "--attention", "a.json")
    assert "--attention needs a text that is decoded: leave out --memory" in capsys.readouterr().err


def test_a_translation_of_the_memory_with_other_placeholders_is_reported(run, tmp_path):
    units = {"가 {a}": "one {b}", "나 &lt;b>다&lt;/b>": "two&lt;/b> &lt;b>", "라 {c}": "{c} three"}
    tuvs = [
        f'<tu><tuv xml:lang="ko"><seg>{one}</seg></tuv><tuv xml:lang="en"><seg>{other}</seg></tuv></tu>'
        for one, other in units.items()
    ]
    (tmp_path / "new.tmx").write_text(
        f'<tmx version="1.4"><header srclang="ko"/><body>{"".join(tuvs)}</body></tmx>'
    )
    (tmp_path / "in.po").write_text(
        "".join(f'msgid "{text}"\nmsgstr ""\n\n' for text in ("가 {a}", "나 <b>다</b>", "라 {c}"))
    )
    flags = ["--input", "in.po", "--output", "out.po", "--memory", "new.tmx"]
    code, _, err = run("translate", *flags)
    assert (code, err[0]) == (0, "from the memory: 3 texts")
    assert err[1].startswith("warning: text 1 and 1 more: the target has other placeholders than the source")
    assert (tmp_path / "out.po").read_text().count("fuzzy") == 2
    assert run("translate", *flags, "--overwrite", "--no-keep-placeholders")[2] == [
        "from the memory: 3 texts"
    ]
