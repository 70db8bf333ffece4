"""Documents whose texts are translated in their places, and the command that does so."""

import asyncio
import cProfile
import gc
import io
import os
import tracemalloc
from pathlib import Path

import docx
import polib
import pytest

from seq2seq_serve.client.files.documents import DocumentTranslation, read_document
from seq2seq_serve.client.files.formats import Writer
from seq2seq_serve.client.files.plan import DOCUMENT, JobError
from seq2seq_serve.client.files.run import plan_run
from seq2seq_serve.client.files.worker import RunFiles, Worker
from seq2seq_serve.documents.kinds import DOCUMENTS
from seq2seq_serve.documents.segments import MAX_BYTES, FormattedText, WrongFile
from seq2seq_serve.protos.seq2seq_v1_pb2 import (
    GenerateResponse,
    Hypothesis,
    WordAlignment,
    WordLink,
)
from tests.documents.answers import aligned, backwards, capitals, translated
from tests.documents.attacks import ATTACKS, Attack, word_file
from tests.documents.large import SUFFIXES, large

SRT = """1
00:00:01,000 --> 00:00:02,500
{\\an8}One <i>two three</i> four,
five and six.

2
00:00:03,000 --> 00:00:04,000 X1:10 X2:20
- Who?
- I am.

3
00:00:05,000 --> 00:00:06,000
...
"""
VTT = """WEBVTT - a title

NOTE
Not shown

STYLE
::cue {color: red}

begin
01:00.000 --> 01:02.000 align:start line:0
<v.loud Mary>Fish &amp; <b>chips</b>
"""
HTML = """<!DOCTYPE html>
<html><head><title>The title</title><style>p {color: red}</style></head>
<body><h1>Big news</h1>
<p class="a">Go <b>to <i>sleep</i></b> now,<br>or <a href="x?a=1&amp;b=2">never</a>.</p>
<!-- a comment --><pre>as it is</pre><p translate="no">Brand</p>
<ul><li>one<ul><li>two</li></ul></li></ul><img alt="A red cat" src="cat.png"><p>  12 : 30 </p></body></html>
"""
PO = """msgid ""
msgstr ""
"Content-Type: text/plain; charset=UTF-8\\n"
"Plural-Forms: nplurals=3; plural=n;\\n"

#: a.py:3
msgid ""
"Hello, %s!\\n"
"\\n"
"Bye {name}"
msgstr ""

msgid "done"
msgstr "fertig"

msgid "%d file"
msgid_plural "%d files"
msgstr[0] ""
msgstr[1] ""
msgstr[2] ""
"""


@pytest.mark.parametrize(
    ("name", "content"), [("a.srt", SRT), ("a.vtt", VTT), ("a.html", HTML), ("a.po", PO)]
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_document_without_translations_is_as_it_was(name, content, encoding):
    """The mark with which editors on Windows begin UTF-8, and by which players know it, was lost."""
    path, encoded = Path(name), content.replace("\n", "\r\n").encode(encoding)
    assert DOCUMENTS[path.suffix](encoded, path).content() == encoded


def test_subtitles_keep_their_times_places_tags_and_speakers():
    texts, written = translated("a.srt", SRT, capitals)
    assert texts == ["One two three four, five and six.", "Who?", "I am."]
    expected = SRT.replace("One <i>two three</i> four,\nfive", "ONE <i>TWO THREE</i> FOUR,\nFIVE")
    expected = expected.replace(" and six.", " AND SIX.").replace("Who?", "WHO?").replace("I am", "I AM")
    assert written == expected


def test_tags_of_subtitles_follow_their_words():
    assert "{\\an8}SIX. AND FIVE FOUR,\n<i>THREE TWO</i> ONE\n" in translated("a.srt", SRT, backwards)[1]
    texts, written = translated("a.vtt", VTT, backwards)
    assert texts == ["Fish & chips"]
    before, after = "Fish &amp; <b>chips</b>", "<b>CHIPS</b> &amp; FISH</v>"
    assert written == VTT.replace(before, after)
    marks = "1\r\n0:01,0 --> 0:02,0\r\n(Go <b>now</b>, <i>please</i>!)"
    assert translated("a.srt", marks, capitals)[1] == marks.replace("Go", "GO").replace(
        "<b>now</b>, <i>please</i>", "<b>NOW</b>, <i>PLEASE</i>"
    )


def test_tags_of_subtitles_stay_one_over_adjacent_words_and_split_at_words_apart():
    film = "1\n0:01,0 --> 0:02,0\nIch habe <b>gestern das <i>Buch</i> gelesen</b>.\n"
    answer = aligned("I read the book yesterday.", "0 5 3 4 2")
    assert "\nI <b>read the <i>book</i> yesterday</b>.\n" in translated("a.srt", film, answer)[1]
    answer = aligned("Yesterday I had the man seen, reading", "2 0 1 1 1 1 5")
    assert "\n<b>Yesterday</b> I had the man seen, <b>reading</b>\n" in translated("a.srt", film, answer)[1]
    speaker = f"{VTT[: VTT.index('<v')]}<v Mary>Geh <c.red>nach Hause</c>, los"
    written = translated("a.vtt", speaker, aligned("Go now on home", "0 3 1 2"))[1]
    assert written.endswith("<v Mary>Go now <c.red>on home</c></v>")


def test_voices_of_a_subtitle_are_texts_of_their_own():
    film = "WEBVTT\n\n0:01.0 --> 0:02.0\n<v Ann>One two\nthree</v>\n<v Ben>Four <i>five</i></v>\n"
    texts, written = translated("a.vtt", film, backwards)
    assert texts == ["One two three", "Four five"]
    assert "\n<v Ann>THREE</v>\n<v Ann>TWO ONE</v>\n<v Ben><i>FIVE</i> FOUR</v>\n" in written


def test_html_keeps_its_elements_and_what_is_not_text():
    texts, written = translated("a.html", HTML, capitals)
    assert texts == ["The title", "Big news", "Go to sleep now,", "or never.", "one", "two", "A red cat"]
    expected = HTML
    for text in ("The title", "Big news", "Go ", "to ", "sleep", " now,", "or ", "never", "A red cat"):
        expected = expected.replace(text, text.upper())
    assert written == expected.replace(">one<", ">ONE<").replace(">two<", ">TWO<")


def test_elements_of_html_follow_their_words():
    written = translated("a.html", HTML, backwards)[1]
    assert '<p class="a">NOW, <b><i>SLEEP</i> TO</b> GO<br>' in written
    assert '<a href="x?a=1&amp;b=2">NEVER</a>. OR</p>' in written


def test_pages_may_be_nested_more_deeply_than_calls():
    page = "<div>a <b>" * 3_000 + "word" + "</b></div>" * 3_000
    texts, written = translated("a.html", page, capitals)
    assert texts == ["a"] * 2_999 + ["a word"]
    assert written == page.replace("a <b>", "A <b>").replace("word", "WORD")


def test_an_empty_target_of_a_text_with_formatting_leaves_nothing_behind():
    empty = GenerateResponse(hypotheses=[Hypothesis(word_alignment=WordAlignment())])
    texts, written = translated("a.html", "<p>Go <b>away</b></p>", lambda _: empty)
    assert texts == ["Go away"]
    assert written == "<p></p>"


def test_what_only_looks_like_a_tag_is_text():
    less = "1\n0:01,0 --> 0:02,0\nx <3 and y> z"
    texts, written = translated("a.srt", less, capitals)
    assert texts == ["x <3 and y> z"]
    assert written == less.replace(texts[0], "X <3 AND Y> Z")
    times = "WEBVTT\n\n00:01.000 --> 00:02.000\none <00:01.500>two"
    assert translated("a.vtt", times, capitals)[0] == ["one two"]


def word_document() -> bytes:
    document = docx.Document()
    paragraph = document.add_paragraph("Go ")
    paragraph.add_run("to sleep").bold = True
    paragraph.add_run(" now\tor never")
    document.add_table(1, 1).cell(0, 0).text = "in a cell"
    document.sections[0].header.paragraphs[0].text = "at the top"
    document.add_paragraph("12 : 30")
    stream = io.BytesIO()
    document.save(stream)
    return stream.getvalue()


def test_word_keeps_runs_tables_and_headers():
    texts, written = translated("a.docx", word_document(), capitals)
    assert texts == ["Go to sleep now", "or never", "in a cell", "at the top"]
    document = docx.Document(io.BytesIO(written))
    assert [paragraph.text for paragraph in document.paragraphs] == ["GO TO SLEEP NOW\tOR NEVER", "12 : 30"]
    assert [run.text for run in document.paragraphs[0].runs if run.bold] == ["TO SLEEP"]
    assert document.tables[0].cell(0, 0).text == "IN A CELL"
    assert document.sections[0].header.paragraphs[0].text == "AT THE TOP"


def test_runs_of_word_follow_their_words():
    [paragraph, _] = docx.Document(io.BytesIO(translated("a.docx", word_document(), backwards)[1])).paragraphs
    assert paragraph.text == "NOW SLEEP TO GO\tNEVER OR"
    assert [run.text for run in paragraph.runs if run.bold] == ["SLEEP TO"]


def test_messages_keep_translations_and_a_lost_placeholder_is_fuzzy():
    texts, written = translated("a.po", PO, capitals)
    assert texts == ["Hello, %s!", "Bye {name}", "%d file", "%d files", "%d files"]
    first, done, files = polib.pofile(written)
    assert (first.msgstr, first.fuzzy) == ("HELLO, %S!\n\nBYE {NAME}", True)
    assert done.msgstr == "fertig"
    assert files.msgstr_plural == {0: "%D FILE", 1: "%D FILES", 2: "%D FILES"}
    _, written = translated("a.po", PO, lambda text: GenerateResponse(hypotheses=[Hypothesis(text=text)]))
    assert not any(entry.fuzzy for entry in polib.pofile(written))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.srt", b"\xff", "the file is not UTF-8: byte 1 is wrong"),
        ("a.docx", b"PK", "the file is not a Word document"),
        ("a.po", b"nothing", "the file is not a file of gettext"),
    ],
)
def test_a_damaged_document_is_refused(name, content, message):
    with pytest.raises(WrongFile) as caught:
        DOCUMENTS[Path(name).suffix](content, Path(name)).content()
    assert caught.value.strerror.startswith(message)


def test_the_command_translates_a_document_and_keeps_what_fails(run, capsys, tmp_path):
    long = "x" * 99
    (tmp_path / "in.html").write_text(f"<p>One <b>two</b></p><p>{long}</p><p>three</p>")
    code, _, [line] = run("translate", "--input", "in.html", "--output", "out.html")
    assert code == 1
    assert line.startswith(f"error: text 2 ({long[:60]}): INVALID_ARGUMENT: the source has 100 tokens")
    assert line.endswith("or set --long-source")
    assert (tmp_path / "out.html").read_text() == (tmp_path / "in.html").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.html", "out.html"]
    with pytest.raises(SystemExit, match="2"):
        run("translate", "--input", "in.html", "--output", "out.html")
    assert "out.html exists" in capsys.readouterr().err
    assert run("translate", "--input", "in.html", "--output", "out.html", "--overwrite")[0] == 1


@pytest.mark.parametrize(
    "times",
    [
        "00:00:01,000 -> 00:00:02,000",
        "00:00:01,000-->00:00:02,000",
        "00:01.000 → 00:02.000",
        "0:01:02:3 –> 0:01:03:4",
    ],
)
@pytest.mark.parametrize("name", ["a.srt", "a.vtt"])
def test_a_subtitle_with_another_arrow_is_translated(name, times):
    """It stayed as it was, and nothing said so."""
    content = f"1\n{times}\nGo home\n"
    assert translated(name, content, capitals) == (["Go home"], content.replace("Go home", "GO HOME"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--output", "out.txt"], "in.srt is a document: give --output a name in .srt"),
        ([], "in.srt is a document: give --output a name in .srt"),
        (
            [],
            ".srt, such as translated.srt; to translate its lines without its structure, send them",
        ),
        (["--output", "out.srt", "--num-hypotheses", "2"], "are for lines, not for documents"),
    ],
)
def test_what_does_not_fit_a_document_is_one_line(run, capsys, tmp_path, flags, message):
    (tmp_path / "in.srt").write_text(SRT)
    with pytest.raises(SystemExit, match="2"):
        run("translate", "--input", "in.srt", *flags)
    [line, _] = capsys.readouterr().err.splitlines()
    assert message in line


_QUICK = frozenset([".docx", ".html", ".po"])  # an archive, a page and a catalog; the others take a minute
_HARD_BYTES, _BOMB_BYTES = 100_000, 40_000
_LANGUAGES = "en", "ko"
_TRANSLATED = [name for name, attack in ATTACKS.items() if not attack.is_refused]


@pytest.mark.parametrize("name", _TRANSLATED)
def test_the_time_of_a_document_grows_with_its_size(name, tmp_path):
    """The time limit of a test is the bar: a time in the square of the size is minutes here."""
    written = written_by(ATTACKS[name], _HARD_BYTES, tmp_path)
    assert len(written) < 8 * _HARD_BYTES


@pytest.mark.parametrize("name", _TRANSLATED)
def test_the_memory_of_a_document_grows_with_its_size(name, tmp_path):
    written_by(ATTACKS[name], 2_000, tmp_path)  # what the first document imports and compiles
    peaks = []
    for size in (2_000, 16_000):
        tracemalloc.start()
        written_by(ATTACKS[name], size, tmp_path)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 3 * 8 * peaks[0]  # in the square of the size: 64 times


@pytest.mark.parametrize("name", _TRANSLATED)
def test_the_calls_of_a_document_grow_with_its_size(name, tmp_path):
    """The limit of the time bounds the work within one call, such as that of an expression."""
    written_by(ATTACKS[name], 1_000, tmp_path)
    numbers = []
    for size in (1_000, 8_000):
        profile = cProfile.Profile()
        profile.runcall(written_by, ATTACKS[name], size, tmp_path)
        numbers.append(sum(entry.callcount for entry in profile.getstats()))
    assert numbers[1] < 1.5 * 8 * numbers[0]  # in the square of the size: 64 times


@pytest.mark.parametrize("name", [name for name, attack in ATTACKS.items() if attack.is_refused])
def test_a_bomb_is_refused_in_one_line_before_it_has_its_memory(name, tmp_path):
    path = tmp_path / f"a{ATTACKS[name].suffix}"
    path.write_bytes(ATTACKS[name].make(_BOMB_BYTES))
    tracemalloc.start()
    with pytest.raises(WrongFile) as caught:
        read_document(path).content()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert caught.value.filename == str(path)
    assert len(caught.value.strerror.splitlines()) == 1
    assert peak < 3 * MAX_BYTES


class _Decoder:
    """A decoder that answers at once."""

    in_flight, give_up_seconds = 8, 60.0

    def prepare(self, text):
        return text

    def kind_of(self, _text):
        return "text"

    async def send(self, texts):
        for place, text in enumerate(texts):
            if isinstance(text, FormattedText):
                yield place, backwards(text)
            else:
                yield place, GenerateResponse(hypotheses=[Hypothesis(text=text.upper())])

    async def stop(self):
        pass


async def _translate_file(path: Path, folder: Path) -> None:
    plan = plan_run(folder, [path], {}, 1000, "")
    files = RunFiles("text", Writer(folder, DOCUMENT, "target"), plan.inputs)
    worker = Worker(files, _Decoder())
    [shard] = plan.shards
    assert (await worker.translate(shard)).num_failed == 0
    await worker.stop()


@pytest.mark.parametrize(
    "suffix", [pytest.param(one, marks=[] if one in _QUICK else [pytest.mark.slow]) for one in SUFFIXES]
)
def test_a_document_takes_at_most_ten_times_its_size(suffix, tmp_path):
    """It was up to 65 times: all tags, texts and answers were held until the end.

    What a small file takes does not count: texts on their way, and what the first file imports.
    """
    peaks, sizes = [], []
    for number, num_bytes in enumerate((2_000, 60_000, 240_000)):
        content, size = large(suffix, num_bytes)
        path = tmp_path / f"{number}{suffix}"
        path.write_bytes(content)
        del content
        gc.collect()
        tracemalloc.start()
        asyncio.run(_translate_file(path, tmp_path / f"out{number}"))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        sizes.append(size)
    assert peaks[2] - peaks[1] < 10 * (sizes[2] - sizes[1])


@pytest.mark.parametrize("name", _TRANSLATED)
def test_a_document_that_is_written_part_by_part_is_as_one_that_is_held(name, tmp_path):
    path = tmp_path / f"a{ATTACKS[name].suffix}"
    expected = written_by(ATTACKS[name], 5_000, tmp_path)
    num_texts = len(read_document(path, _LANGUAGES).segments)
    document = DocumentTranslation(path, num_texts, _LANGUAGES)
    document.begin(_LANGUAGES[1])
    for texts in document.texts():
        for text in texts:
            document.add([backwards(text)])
    assert document.content() == expected


@pytest.mark.parametrize("num_texts", [2, 4])
def test_a_document_with_another_number_of_texts_than_planned_is_refused(num_texts, tmp_path):
    path = tmp_path / "a.srt"
    path.write_text(SRT)  # has three
    with pytest.raises(JobError, match="it has other texts"):
        DocumentTranslation(path, num_texts)


def written_by(attack: Attack, size: int, folder: Path) -> bytes:
    """The content of a document with its words the other way round."""
    path = folder / f"a{attack.suffix}"
    path.write_bytes(attack.make(size))
    document = read_document(path, _LANGUAGES)
    document.target_language = _LANGUAGES[1]
    for segment in document.segments:
        segment.translate(backwards(segment.text))
    return document.content()


@pytest.mark.parametrize("suffix", [".srt", ".html", ".po", ".docx"])
def test_a_document_of_too_many_tags_and_lines_is_refused(suffix, tmp_path):
    path = tmp_path / f"a{suffix}"
    marks = "<\n" * 500_001
    path.write_bytes(word_file("<w:p/>" * 1_000_001) if suffix == ".docx" else marks.encode())
    with pytest.raises(WrongFile, match="1000000"):
        read_document(path)


def test_tags_that_would_be_written_too_often_are_left_out():
    """Each word of the target changes between two long tags: with them, it had thousands of copies."""
    words = range(400)
    tag = "<b {}>".format("x" * 1000)
    page = tag + "".join(f"a{word} " for word in words) + "</b><i>" + "".join(f"b{word} " for word in words)

    def mixed(text: str) -> GenerateResponse:
        places = [place for word in words for place in (word, len(words) + word)]
        links = [WordLink(source_word=place, target_word=number) for number, place in enumerate(places)]
        targets = [text.split()[place] for place in places]
        alignment = WordAlignment(source_words=text.split(), target_words=targets, links=links)
        return GenerateResponse(hypotheses=[Hypothesis(text=" ".join(targets), word_alignment=alignment)])

    for name, content in (("a.html", page), ("a.srt", f"1\n0:01,0 --> 0:02,0\n{page}")):
        _, written = translated(name, content, mixed)
        assert len(written) < 6 * len(content)
        assert "a0 b0 a1 b1" in written


def test_a_number_with_more_digits_than_an_integer_may_have_is_one_character():
    number = "&#" + "1" * 5_000 + ";"
    assert translated("a.html", f"<p>x{number}</p>", capitals) == (["x\ufffd"], "<p>X\ufffd</p>")
    times = "WEBVTT\n\n00:01.000 --> 00:02.000\n"
    assert translated("a.vtt", f"{times}x{number}", capitals) == (["x\ufffd"], f"{times}X\ufffd")


@pytest.mark.parametrize("output", ["loop.srt", "loop/out.srt", "kept.srt"])
def test_an_output_that_is_a_loop_of_links_is_one_line(run, capsys, tmp_path, output):
    (tmp_path / "in.srt").write_text(SRT)
    for name in ("loop", "loop.srt", "kept.srt.parts"):
        (tmp_path / name).symlink_to(name)
    for flags in ([], ["--overwrite"], ["--resume"]):
        with pytest.raises(SystemExit, match="2"):
            run("translate", "--input", "in.srt", "--output", output, *flags)
        [line, _] = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: --output {output}")
        assert line.endswith("Too many levels of symbolic links: give another name")


def test_what_is_not_a_file_is_neither_read_nor_written_as_a_document(run, capsys, tmp_path):
    (tmp_path / "in.srt").write_text(SRT)
    (tmp_path / "null.srt").symlink_to("/dev/null")
    (tmp_path / "folder.srt").mkdir()
    os.mkfifo(tmp_path / "pipe.srt")
    for source, output, message in [
        ("in.srt", "null.srt", "--output null.srt is a pipe or a device: a document is written to a file"),
        ("in.srt", "folder.srt", "--output folder.srt is a folder: give the name of a file in it"),
        ("pipe.srt", "out.srt", "pipe.srt is not a file: a document is read from one"),
        ("folder.srt", "out.srt", "folder.srt is not a file: a document is read from one"),
    ]:
        with pytest.raises(SystemExit, match="2"):
            run("translate", "--input", source, "--output", output, "--overwrite")
        [line, _] = capsys.readouterr().err.splitlines()
        assert line == f"error: {message}"


def test_a_folder_without_permission_is_one_line(run, tmp_path):
    (tmp_path / "in.srt").write_text(SRT)
    (tmp_path / "closed").mkdir(0o555)
    before = os.geteuid()
    if before == 0:  # who may write everywhere
        tmp_path.chmod(0o777)
        for folder in tmp_path.parents[:2]:
            folder.chmod(0o755)
        os.seteuid(65534)
    try:
        code, _, lines = run("translate", "--input", "in.srt", "--output", "closed/out.srt")
    finally:
        os.seteuid(before)
    assert (code, len(lines)) == (1, 1)
    assert lines[0].endswith("closed/out.srt.parts: Permission denied")


def test_names_that_are_not_utf8_are_names(run, tmp_path):
    source, output = "in\udcff.srt", "out\udcff.srt"
    (tmp_path / source).write_text(SRT)
    assert run("translate", "--input", source, "--output", output) == (0, "", [])
    assert "-->" in (tmp_path / output).read_text()
    code, _, lines = run("translate", "--input", "no\udcff.srt", "--output", "other.srt")
    assert (code, lines) == (1, ["error: no\\udcff.srt: No such file or directory"])
