"""Translation memories: what is read of TMX, in which languages, and what is refused."""

import gzip
import tracemalloc
from collections.abc import Iterable
from pathlib import Path

import pytest

from seq2seq_serve.client import TranslationMemory, read_memory
from seq2seq_serve.client.files import elements, memory
from seq2seq_serve.documents.segments import FormattedText, WrongFile


def unit(*variants: tuple[str, str], attributes: str = "", of_last: str = "") -> str:
    """A unit with texts by their languages, with attributes of the unit and of its last variant."""
    *first, (language, text) = variants
    tuvs = [f'<tuv xml:lang="{one}"><seg>{content}</seg></tuv>' for one, content in first]
    last = f'<tuv xml:lang="{language}" {of_last}><seg>{text}</seg></tuv>'
    return f"<tu {attributes}>{''.join(tuvs)}{last}</tu>\n"


def tmx(units: Iterable[str], source_language: str = "de", before: str = "") -> str:
    return (
        f'{before}<tmx version="1.4"><header srclang="{source_language}"/><body>{"".join(units)}</body></tmx>'
    )


@pytest.fixture
def written(tmp_path):
    def write(content: str, name: str = "a.tmx", encoding: str = "utf-8") -> Path:
        path = tmp_path / name
        encoded = content.encode(encoding)
        path.write_bytes(gzip.compress(encoded) if name.endswith(".gz") else encoded)
        return path

    return write


def target(known: TranslationMemory, source: str) -> str | None:
    answer = known.answer(source)
    return None if answer is None else answer.hypotheses[0].text


@pytest.mark.parametrize(
    ("content", "source", "found"),
    [
        ("Ein Haus", "Ein Haus", "A house"),
        ("\n  Ein\n  Haus ", " Ein\tHaus\n", "A house"),
        ("Ein <hi>Haus</hi>", "Ein Haus", "A house"),
        ("Ein <bpt i='1'>&lt;b></bpt>Haus<ept i='1'>&lt;/b></ept>", "Ein Haus", "A house"),
        ("<ph>x<sub>Ein y</sub></ph>Ein Haus<it pos='end'>z</it><ut>u</ut>", "Ein Haus", "A house"),
        ("<bpt i='1'>a<sub>b<ph>c</ph>d</sub>e</bpt>Ein Haus", "Ein Haus", "A house"),
        ("Ein <!-- x --><![CDATA[<Haus>]]> &amp; &#228;", "Ein <Haus> & ä", "A house"),
        ("Ein Haus", "ein Haus", None),
        ("Ein Haus", "Ein Haus.", None),
        (" ", "", None),
    ],
)
def test_a_text_that_is_exactly_in_the_memory_has_its_translation(written, content, source, found):
    path = written(tmx([unit(("de", content), ("en", "A <hi>house</hi>"))]))
    assert target(read_memory(path), source) == found


def test_a_text_is_in_the_memory_without_the_marks_of_a_list_which_documents_do_not_send(written):
    pairs = ("• Ein Haus", "•  A house"), ("- Ein Hof", "A yard")
    content = tmx(unit(("de", source), ("en", target)) for source, target in pairs)
    for known in (TranslationMemory(pairs), read_memory(written(content))):
        found = [target(known, text) for text in ("Ein Haus", "• Ein Haus", "- Ein Hof", "Ein Hof")]
        assert found == ["A house", "•  A house", "A yard", None]


@pytest.mark.parametrize("date", ["", "20260101T000000Z"])
@pytest.mark.parametrize("is_reversed", [False, True])
def test_a_text_that_is_there_as_it_is_counts_more_than_one_with_the_mark_of_a_list(
    written, date, is_reversed
):
    pairs = [("Ein Haus", "A house"), ("- Ein Haus", "- One house"), ("- Ein Hof", "- A yard")]
    pairs.sort(reverse=is_reversed)
    dates = {source: f'changedate="{date}"' if source[0] == "-" and date else "" for source, _ in pairs}
    content = tmx(
        unit(("de", source), ("en", translation), attributes=dates[source]) for source, translation in pairs
    )
    for known in (TranslationMemory(pairs), read_memory(written(content))):
        found = [target(known, text) for text in ("Ein Haus", "- Ein Haus", "Ein Hof")]
        assert (found, len(known)) == (["A house", "- One house", "A yard"], 4)


def test_what_is_not_a_plain_text_is_never_in_the_memory():
    known = TranslationMemory([("Ein  Haus", "A house"), ("Ein Haus ", "One house")])
    assert (len(known), target(known, "Ein Haus")) == (1, "One house")
    for source in (FormattedText("Ein Haus"), b"Ein Haus", [1, 2], None):
        assert known.answer(source) is None


@pytest.mark.parametrize(
    ("name", "encoding", "before"),
    [
        ("a.tmx", "utf-16", '<?xml version="1.0" encoding="utf-16"?>'),
        ("a.tmx", "iso-8859-1", '<?xml version="1.0" encoding="iso-8859-1"?>'),
        ("a.tmx.gz", "utf-8", '\ufeff<!DOCTYPE tmx SYSTEM "http://127.0.0.1:1/tmx14.dtd">'),
    ],
)
def test_files_of_other_programs_are_read(written, name, encoding, before):
    content = tmx([unit(("de", "Über"), ("en", "About")).replace("xml:lang", "lang")], before=before)
    assert target(read_memory(written(content, name, encoding)), "Über") == "About"


@pytest.mark.parametrize(
    ("wanted", "of_head", "tags", "found"),
    [
        (("", ""), "de", ["de", "en"], "en"),
        (("", ""), "en", ["de", "en"], "de from en"),
        (("de", "en"), "en", ["de-AT", "en-US", "fr"], "en-US"),
        (("deu_Latn", "eng_Latn"), "*all*", ["DE_DE", "EN", "fr"], "EN"),
        (("", "en"), "*all*", ["en", "de"], "en"),
        (("de", ""), "*all*", ["fr", "de"], "fr"),
        (("", "de"), "de", ["de", "en"], "de from en"),
        (("de", "pt-BR"), "de", ["de", "pt-BR", "pt-PT"], "pt-BR"),
        (("de", "pt"), "de", ["de", "pt-BR", "pt-PT"], "pt-PT"),
        (("en-US", "en-GB"), "en", ["en-GB", "en-US"], "en-GB from en-US"),
        (("de", "zho_Hans"), "de", ["de", "zh-CN", "zh-TW"], "zh-CN"),
    ],
)
def test_the_languages_are_those_asked_for_or_the_only_ones(written, wanted, of_head, tags, found):
    target_tag, _, source_tag = found.partition(" from ")
    path = written(tmx([unit(*((tag, f"in {tag}") for tag in tags))], of_head))
    known = read_memory(path, source_language=wanted[0], target_language=wanted[1])
    source = source_tag or next(tag for tag in tags if tag.casefold().startswith("de"))
    assert target(known, f"in {source}") == f"in {target_tag}"
    assert len(known) == 1


@pytest.mark.parametrize(
    ("wanted", "of_head", "tags", "problem"),
    [
        (("", ""), "*all*", ["de", "en"], "it is not clear which texts are translations"),
        (("", ""), "de", ["de", "en", "fr"], "it is not clear which texts are translations"),
        (("", "en"), "*all*", ["de", "en", "fr"], "it is not clear which texts are translations"),
        (("", ""), "de", ["de"], "it is not clear which texts are translations"),
        (("ko", "en"), "de", ["de", "en"], "there are no translations from ko to en"),
        (("de", "zh-TW"), "de", ["de", "zh-CN"], "there are no translations from de to zh-TW"),
        (("de", "en"), "de", ["de", "x&#10;y"], "there are no translations from de to en"),
    ],
)
def test_languages_that_are_not_clear_are_refused_with_those_of_the_file(
    written, wanted, of_head, tags, problem
):
    path = written(tmx([unit(*((tag, "x") for tag in tags))], of_head))
    with pytest.raises(WrongFile) as caught:
        read_memory(path, source_language=wanted[0], target_language=wanted[1])
    assert caught.value.strerror == (
        f"{problem}: the languages of the file are {', '.join(tags).replace('&#10;', ' ')}: give "
        "--source-language and --target-language"
    )


def test_the_newest_translation_counts_and_without_dates_the_last_one(written):
    def dated(source: str, translation: str, date: str, *, is_of_unit: bool = False) -> str:
        attribute = f'changedate="{date}"' if date else ""
        where = {"attributes": attribute} if is_of_unit else {"of_last": attribute}
        return unit(("de", source), ("en", translation), **where)

    first = [
        dated("a", "newest", "20260102T000000Z"),
        dated("a", "older", "20260101T235959Z", is_of_unit=True),
        dated("b", "first", ""),
        dated("b", "second", ""),
        dated("c", "dated", "20260101T000000Z"),
        dated("d", "dated", "20260101T000000Z"),
    ]
    second = [dated("a", "oldest", "20250101T000000Z"), dated("c", "undated", ""), dated("b", "third", "")]
    second += [dated("d", "undated", ""), dated("d", "last", "20250101T000000Z")]
    known = read_memory(written(tmx(first)), written(tmx(second), "b.tmx"))
    assert [target(known, source) for source in "abcd"] == ["newest", "third", "undated", "last"]


def test_the_digest_is_of_the_texts_and_their_translations(written):
    digests = {
        TranslationMemory(pairs).digest()
        for pairs in ([("a", "b")], [("a", "c")], [("ab", "")], [], [("a", "b"), ("c", "d")])
    }
    assert len(digests) == 5
    assert TranslationMemory([(" a", "b")]).digest() == TranslationMemory([("a", "b")]).digest()
    assert TranslationMemory([("a", "b")]).digest().startswith("1 texts (")


_ENTITY = '<!DOCTYPE tmx [<!ENTITY e "{}">]>'
_DEFAULT = '<!DOCTYPE tmx [<!ATTLIST tu x CDATA "y">]>'
_OUTSIDE = '<!DOCTYPE tmx SYSTEM "tmx14.dtd">'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("source\ttarget\n", "the file is not XML: syntax error: line 1, column 0"),
        ("", "the file is not XML: no element found"),
        (tmx([])[:-6], "the file is not XML: no element found"),
        ("<html/>", "line 1: the file is not <tmx>, but <html>"),
        (tmx(["&e;"], before=_ENTITY.format("x" * 99)), "line 1: the DOCTYPE has declarations"),
        (tmx([], before=_DEFAULT), "line 1: the DOCTYPE has declarations"),
        (
            tmx([unit(("de", "a&nbsp;b"), ("en", "x"))], before=_OUTSIDE),
            "line 1: the entity &nbsp; is not known",
        ),
        (tmx(["<tu>" * 200]), "line 1: the file has more than 100 elements inside each other"),
        (tmx([unit(("de", "<hi>" * 200), ("en", "x"))]), "line 1: the file has more than 100 elements"),
    ],
)
def test_what_is_not_a_memory_is_refused_in_one_line(written, content, message):
    with pytest.raises(WrongFile) as caught:
        read_memory(path := written(content))
    assert caught.value.strerror.startswith(message)
    assert len(caught.value.strerror.splitlines()) == 1
    assert caught.value.filename == str(path)


@pytest.mark.parametrize(
    ("limit", "units"),
    [
        ((elements, "_MAX_TEXT", 1000), [unit(("de", "x" * 1001), ("en", "y"))]),
        ((elements, "_MAX_TAG_BYTES", 2 * 2**20), [f"<!--{' ' * 2**22}-->"]),
        ((elements, "_MAX_TAG_BYTES", 2 * 2**20), [unit(("de", "x"), ("en", "y"), of_last=" " * 2**22)]),
        ((elements, "MAX_XML_BYTES", 1000), [unit(("de", "x"), ("en", "y"))] * 20),
        ((memory, "MAX_ENTRIES", 2), [unit(("de", f"{number}"), ("en", "y")) for number in range(3)]),
    ],
)
def test_every_size_has_a_limit(written, monkeypatch, limit, units):
    monkeypatch.setattr(*limit)
    with pytest.raises(WrongFile, match=r"has more than \d+ (characters|bytes|texts)"):
        read_memory(written(tmx(units)))


def test_the_memory_of_a_bomb_is_bounded(written):
    path = written(tmx([unit(("de", "x" * 2**25), ("en", "y"))]), "a.tmx.gz")
    tracemalloc.start()
    with pytest.raises(WrongFile, match="a text has more than 4194304 characters"):
        read_memory(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**25


@pytest.mark.parametrize(
    "units",
    [
        lambda number: [unit(("de", f"text {n}"), ("en", f"target {n}")) for n in range(number)],
        lambda number: [unit(*([("de", "x")] * number), *([("en", "y")] * number))],
        lambda number: [unit((f"x{n}", "x"), ("de", "x"), ("en", "y")) for n in range(number)],
        lambda number: [unit(("de", "<ph>x</ph>y " * number), ("en", "y"))],
    ],
    ids=["many units", "a unit of many variants", "many languages", "many codes"],
)
def test_the_memory_that_a_file_takes_grows_with_its_size(written, units):
    """The time limit of a test is the bar for a time in the square of the size."""
    peaks = []
    for number in (2_000, 16_000):
        path = written(tmx(units(number)))
        tracemalloc.start()
        assert len(read_memory(path, source_language="de", target_language="en"))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert peaks[-1] < 10 * max(path.stat().st_size, 2**20)
    assert peaks[1] < 3 * 8 * peaks[0]
