"""`--to`: several files in one command, each of which becomes a file of the same kind."""

import json
from pathlib import Path

import pytest

from seq2seq_serve.client.translate import parts_folder
from tests.documents.test_bilingual import QT, TMX, XLIFF
from tests.documents.test_catalogs import JSON, PROPERTIES, STRINGS, YAML
from tests.documents.test_markdown import MARKDOWN
from tests.documents.test_office import FILES_OF_OFFICES
from tests.documents.test_resources import ANDROID, RESX, STRINGSDICT
from tests.documents.test_styled import ASS

CONTENTS = {
    "a.txt": "one\ntwo\n",
    "a.xliff": XLIFF,
    "a.ts": QT,
    "a.tmx": TMX,
    "a.json": JSON,
    "a.yaml": YAML,
    "a.properties": PROPERTIES,
    "a.strings": STRINGS,
    "a.md": MARKDOWN,
    "a.xml": ANDROID,
    "a.resx": RESX,
    "a.stringsdict": STRINGSDICT,
    "a.ass": ASS,
} | {name: make() for name, make in FILES_OF_OFFICES.items()}


@pytest.fixture
def files(tmp_path) -> list[str]:
    for name, content in CONTENTS.items():
        path = tmp_path / "in" / ("deep" if name == "a.md" else "") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return sorted(str(path.relative_to(tmp_path)) for path in (tmp_path / "in").rglob("*.*"))


def test_files_of_every_kind_are_translated_into_a_folder_once(run, tmp_path, files):
    """The server answers each text with itself."""
    code, out, lines = run("translate", "--input", *files, "--to", "out", "--long-source", "truncate")
    assert (code, out, lines) == (0, "", [])
    written = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("[!.]*.*")}
    assert written == {str(Path(name).relative_to("in")) for name in files}
    assert (tmp_path / "out" / "a.txt").read_text() == CONTENTS["a.txt"]
    assert (tmp_path / "out" / "deep" / "a.md").is_file()
    assert json.loads((tmp_path / "out" / "a.json").read_text()) == json.loads(JSON)
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("[!.]*.*")}
    (tmp_path / "out" / "a.json").unlink()
    code, _, lines = run(
        "translate", "--input", *files, "--to", "out", "--resume", "--long-source", "truncate"
    )
    assert code == 0
    assert sum("is complete, and nothing was translated" in line for line in lines) == len(files) - 1
    again = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("[!.]*.*")}
    assert [path.name for path in times if times[path] != again[path]] == ["a.json"]
    assert not parts_folder(tmp_path / "out" / "a.json").exists()


def test_a_file_that_cannot_be_read_is_reported_and_the_others_go_on(run, tmp_path, files):
    (tmp_path / "in" / "a.json").write_text("{")
    (tmp_path / "in" / "a.docx").write_text("PK")
    code, _, lines = run("translate", "--input", "in/a.docx", "in/a.json", "in/a.txt", "--to", "out")
    assert code == 1
    assert [line.partition(": the file is not ")[2][:4] for line in lines] == ["a Wo", "JSON"]
    assert [path.name for path in (tmp_path / "out").glob("[!.]*")] == ["a.txt"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("in/missing.html", "in/missing.html: No such file or directory"),
        ("in/missing", "in/missing: No such file or directory"),
        ("in/a.xul", "in/a.xul: the kind .xul is not known"),
        ("in/a.parquet", "in/a.parquet is a table"),
        ("in/folder.md", "in/folder.md is not a file"),
        ("in/folder", "in/folder: Is a directory: give its files, such as --input in/folder/* --to FOLDER"),
    ],
)
def test_a_file_that_is_missing_or_unknown_is_reported_and_the_others_go_on(
    run, tmp_path, files, name, message
):
    for folder in ("folder", "folder.md"):
        (tmp_path / "in" / folder).mkdir()
    code, _, lines = run("translate", "--input", "in/a.txt", name, "in/a.json", "--to", "out")
    assert (code, len(lines)) == (1, 1)
    assert lines[0].startswith("error: ")
    assert message in lines[0]
    assert sorted(path.name for path in (tmp_path / "out").glob("[!.]*")) == ["a.json", "a.txt"]


def test_an_input_without_texts_and_a_glossary_without_terms_are_reported(run, tmp_path, files):
    for name in ("b.txt", "b.tsv"):
        (tmp_path / "in" / name).write_text("")
    (tmp_path / "in" / "b.html").write_text("<p>1</p>")
    flags = ["--input", "in/a.txt", "in/b.txt", "in/b.html", "--to", "out"]
    assert run("translate", *flags) == (
        0,
        "",
        [f"warning: in/{name}: 0 texts" for name in ("b.txt", "b.html")],
    )
    code, _, lines = run("translate", "--input", "in/a.json", "--to", "other", "--glossary", "in/b.tsv")
    assert (code, lines) == (0, ["warning: in/b.tsv: 0 terms"])


@pytest.mark.parametrize("name", ["in/b", "in/b.txt", "in/b.jsonl", "in/b.json"])
def test_an_archive_is_not_read_as_text(run, tmp_path, files, name):
    (tmp_path / name).write_bytes(next(iter(FILES_OF_OFFICES.values()))())
    code, _, lines = run("translate", "--input", name, "in/a.txt", "--to", "out")
    assert (code, len(lines)) == (1, 1)
    assert f"/{name}: the file is an archive (ZIP)" in lines[0]
    assert [path.name for path in (tmp_path / "out").glob("[!.]*")] == ["a.txt"]


def test_a_text_that_fails_is_named_with_its_file(run, tmp_path, files):
    (tmp_path / "in" / "a.txt").write_text("x" * 99)
    (tmp_path / "in" / "a.json").write_text('["one", "{}"]'.format("x" * 99))
    code, _, lines = run("translate", "--input", "in/a.txt", "in/a.json", "--to", "out")
    assert code == 1
    assert [line.partition("INVALID")[0] for line in lines] == [
        "error: in/a.txt: line 1: ",
        f"error: in/a.json: text 2 ({'x' * 60}): ",
    ]
    assert json.loads((tmp_path / "out" / "a.json").read_text()) == ["one", "x" * 99]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--input", "in/a.txt", "in/a.md"],
            "2 files are given as --input: give --to FOLDER for the answers",
        ),
        (["--input", "in/a.txt", "--to", "out", "--output", "x"], "--to FOLDER is for the files of --input"),
        (["--to", "out"], "--to FOLDER is for the files of --input"),
        (["--input", "in/a.txt", "--to", "in/a.txt"], "--to in/a.txt is not a folder, and must be one"),
        (["--input", "in/a.txt", "in/a.txt.gz", "--to", "out"], "2 inputs would have the output out/a.txt"),
        (["--input", "in/a.xul", "--to", "out"], "in/a.xul: the kind .xul is not known"),
        (["--input", "in/a.txt", "in/a.md", "--to", "out", "--json"], "--json and --num-hypotheses are for"),
    ],
)
def test_wrong_usage_is_one_line(run, capsys, files, flags, message):
    with pytest.raises(SystemExit, match="2"):
        run("translate", *flags)
    [line, _] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {message}")


def test_an_output_that_exists_is_kept(run, capsys, tmp_path, files):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a.txt").write_text("mine")
    with pytest.raises(SystemExit, match="2"):
        run("translate", "--input", "in/a.json", "in/a.txt", "--to", "out")
    assert (
        "a.txt exists: continue it with --resume, or replace it with --overwrite" in capsys.readouterr().err
    )
    assert run("translate", "--input", "in/a.json", "in/a.txt", "--to", "out", "--overwrite")[0] == 0
    assert (tmp_path / "out" / "a.txt").read_text() == CONTENTS["a.txt"]


@pytest.mark.parametrize(
    ("flags", "difference"),
    [
        (["--beam-size", "2"], 'options beam_size was null and is "2"'),
        (["--glossary", "terms.tsv"], 'options terms was null and is "1 ('),
        (["--memory", "old.tmx"], 'memory was null and is "1 texts ('),
        (["--no-keep-placeholders"], "keeps_placeholders was true and is false"),
    ],
)
def test_a_folder_is_not_continued_with_other_options(run, tmp_path, files, flags, difference):
    """The new files had targets of the new options, beside those of the old ones."""
    (tmp_path / "terms.tsv").write_text("one\teins\n")
    (tmp_path / "old.tmx").write_text(
        '<tmx version="1.4"><header srclang="ko"/><body><tu><tuv xml:lang="ko"><seg>a</seg></tuv>'
        '<tuv xml:lang="en"><seg>b</seg></tuv></tu></body></tmx>'
    )
    command = ["--input", "in/a.txt", "in/a.json", "--to", "out"]
    assert run("translate", *command[:2], *command[3:])[0] == 0
    code, out, [line] = run("translate", *command, "--resume", *flags)
    assert (code, out) == (1, "")
    assert line.startswith(f"error: out belongs to a run with other settings: {difference}")
    assert line.endswith(
        ". Repeat the command of that run, give another --to, or replace its files with --overwrite"
    )
    assert [path.name for path in (tmp_path / "out").glob("[!.]*")] == ["a.txt"]
    assert run("translate", *command, "--resume")[0] == 0
    assert run("translate", *command, "--overwrite", *flags)[0] == 0
    assert run("translate", *command, "--resume")[2][0].startswith("error: out belongs to a run with other")


def test_a_folder_is_made_with_its_first_file(run, tmp_path, files):
    """A file that was refused left an empty folder behind."""
    (tmp_path / "in" / "deep" / "a.docx").write_text("PK")
    assert run("translate", "--input", "in/deep/a.docx", "in/a.xul", "--to", "out")[0] == 1
    assert not (tmp_path / "out").exists()
    assert run("translate", "--input", "in/deep/a.docx", "in/a.txt", "--to", "out")[0] == 1
    assert [path.name for path in (tmp_path / "out").glob("[!.]*")] == ["a.txt"]
    command = ["--input", "in/a.txt", "in/deep/a.md", "--to", "other"]
    assert run("translate", *command, "--max-new-tokens", "100000")[0] == 1
    assert not (tmp_path / "other").exists()
