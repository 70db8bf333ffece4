"""Glossaries: tab-separated lines and TBX, and what is refused."""

import gzip

import pytest

from seq2seq_serve.client import read_glossary
from seq2seq_serve.documents.segments import WrongFile

_VERSION_2 = """<?xml version="1.0"?>
<!DOCTYPE martif SYSTEM "TBXcoreStructV02.dtd">
<martif type="TBX" xml:lang="en"><text><body>
<termEntry id="1"><descrip type="definition">A <hi>thing</hi></descrip>
  <langSet xml:lang="de-DE"><tig><term>Maschine</term></tig>
    <ntig><termGrp><term>Gerät,
      altes</term></termGrp></ntig></langSet>
  <langSet xml:lang="en"><tig><term>device</term>
    <termNote type="administrativeStatus">deprecatedTerm-admn-sts</termNote></tig>
    <tig><term>engine</term><termNote type="partOfSpeech">preferred</termNote></tig>
    <tig><term>machine</term><termNote type="administrativeStatus">preferredTerm-admn-sts</termNote></tig>
  </langSet>
  <langSet xml:lang="fr"><tig><term>machine (fr)</term></tig></langSet>
</termEntry>
<termEntry id="2"><langSet xml:lang="de"><tig><term>ohne Ziel</term></tig></langSet></termEntry>
<termEntry id="3"><langSet xml:lang="de"><tig><term>veraltet</term></tig></langSet>
  <langSet xml:lang="en"><tig><term>old</term>
    <termNote type="administrativeStatus">supersededTerm-admn-sts</termNote></tig></langSet></termEntry>
</body></text></martif>
"""
_CONCEPT = (
    '<conceptEntry><langSec xml:lang="de"><termSec><term>{}</term></termSec></langSec>\n'
    '<langSec xml:lang="en"><termSec><term>{}</term></termSec></langSec></conceptEntry>\n'
)


def version_3(*concepts: tuple[str, str]) -> str:
    body = "".join(_CONCEPT.format(*concept) for concept in concepts)
    head = '<tbx xmlns="urn:iso:std:iso:30042:ed-2" style="dca" xml:lang="en">'
    return f"{head}<text><body>\n{body}</body></text></tbx>"


@pytest.fixture
def written(tmp_path):
    def write(content: str | bytes, name: str = "a.tsv"):
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


@pytest.mark.parametrize(
    ("one", "other"),
    [("e-mail", "E - Mail"), ("software", "soft\u00adware"), ("caf\u00e9", "cafe\u0301"), ("a.", "a .")],
)
def test_terms_of_the_same_words_are_one_as_for_the_server(written, one, other):
    """The server refused every text with both, and named no line."""
    assert read_glossary(written(f"{one}\tX\n{other}\tX\n")) == [(one, "X")]
    with pytest.raises(WrongFile, match=r"lines 1 and 2: the term .* has two translations, 'X' and 'Y'"):
        read_glossary(written(f"{one}\tX\n{other}\tY\n"))
    assert len(read_glossary(written("email\tX\ne mail\tY\n"))) == 2


def test_a_term_of_invisible_characters_is_none(written):
    for line in ("\u200b\tX", "X\t\u00ad"):
        with pytest.raises(WrongFile, match="line 1: a term, a tab and its translation"):
            read_glossary(written(line))
    content = version_3(("\u200b", "nothing"), ("Maschine", "machine"))
    languages = {"source_language": "de", "target_language": "en"}
    assert read_glossary(written(content, "a.tbx"), **languages) == [("Maschine", "machine")]


def test_a_note_of_tbx_is_no_term(written):
    """That before a term, or of an empty one, was taken for it."""
    note = '<termNote type="partOfSpeech">noun</termNote>'
    content = version_3(("Maschine", "machine"), ("", "nothing"))
    content = content.replace("<termSec>", f"<termSec>{note}").replace("</term>", f"</term>{note}")
    languages = {"source_language": "de", "target_language": "en"}
    assert read_glossary(written(content, "a.tbx"), **languages) == [("Maschine", "machine")]


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("line_break", ["\n", "\r\n"])
def test_each_line_has_a_term_and_its_translation(written, mark, line_break):
    lines = ["# German\tEnglish", "Maschine\tmachine", "", "  ", " altes  Gerät \t old device", "C#\tC#"]
    lines += ["Maschine\tmachine", "zuletzt\tlast"]
    assert read_glossary(written(mark + line_break.join(lines))) == [
        ("Maschine", "machine"),
        ("altes Gerät", "old device"),
        ("C#", "C#"),
        ("zuletzt", "last"),
    ]
    assert read_glossary(written("")) == []


def test_each_concept_of_tbx_has_its_terms_and_the_best_translation(written):
    languages = {"source_language": "deu_Latn", "target_language": "en"}
    assert read_glossary(written(_VERSION_2, "a.tbx"), **languages) == [
        ("Maschine", "machine"),
        ("Gerät, altes", "machine"),
    ]
    content = version_3(("Maschine", "machine"), ("Bohrer", "drill"), ("Maschine", "machine"))
    assert read_glossary(written(content, "a.xml"), **languages) == [
        ("Maschine", "machine"),
        ("Bohrer", "drill"),
    ]
    other_way = {"source_language": "en"}
    assert read_glossary(written(content, "a.tbx"), **other_way)[0] == ("machine", "Maschine")
    with pytest.raises(WrongFile, match=r"not clear .* the languages of the file are de, en: give"):
        read_glossary(written(content, "a.tbx"))


@pytest.mark.parametrize(
    ("row", "languages", "is_left_out"),
    [
        ("source\ttarget", ("de", "en"), True),
        ("Source \tTarget", ("", ""), True),
        ("term\ttranslation", ("", ""), True),
        ("en\tde", ("en", "de"), True),
        ("en-US\tde_DE", ("eng_Latn", "deu_Latn"), True),
        ("kor_Hang\teng_Latn", ("kor_Hang", "eng_Latn"), True),
        ("en\tde", ("", ""), True),
        ("English\tGerman", ("", ""), True),
        ("English\tgerman", ("", "de"), True),
        ("English\tGerman", ("mul", "de"), True),
        ("it\tes", ("en", "de"), False),
        ("Thai\tThai", ("en", "de"), False),
        ("English\tEnglisch", ("en", "de"), False),
        ("source\tQuelle", ("en", "de"), False),
        ("en (x)\tde (y)", ("de", "en"), False),
        ("xx\tyy", ("", ""), False),
        ("Source term\tTarget term", ("", ""), True),
        ("source-term\tTarget (EN):", ("", ""), True),
        ("Quelle\tZiel", ("de", "en"), True),
        ("Begriff\tU\u0308bersetzung", ("de", "en"), True),
        ("terme\ttraduction", ("", ""), True),
        ("용어\t번역", ("ko", "en"), True),
        ("Deutsch\tEnglisch", ("de", "en"), True),
        ("Deutsch\tEnglish", ("deu_Latn", "eng_Latn"), True),
        ("한국어\t영어", ("ko", "en"), True),
        ("한국어\t영어", ("", ""), True),
        ("한국어\tEnglish", ("ko", "en"), True),
        ("简体中文\t英文", ("zh", "en"), True),
        ("Türkçe\tİngilizce", ("tr", "en"), True),
        ("français (France)\tallemand", ("fr", "de"), True),
        # Terms that are such words: a name of one language, or words for one side
        ("Deutsch\tGerman", ("de", "en"), False),
        ("Deutsch\tGerman", ("", ""), False),
        ("Englisch\tEnglish", ("de", "en"), False),
        ("한국어\tKorean", ("ko", "en"), False),
        ("Ziel\ttarget", ("de", "en"), False),
        ("Übersetzung\ttranslation", ("de", "en"), False),
        ("Begriff\tterm", ("de", "en"), False),
        ("Ziel\tgoal", ("de", "en"), False),
    ],
)
def test_a_first_row_that_names_the_columns_is_not_a_term(written, row, languages, is_left_out):
    source, target = languages
    path = written(f"# terms\n\n{row}\nMaschine\tmachine\n")
    found = read_glossary(path, source_language=source, target_language=target)
    assert len(found) == (1 if is_left_out else 2)
    assert found[-1] == ("Maschine", "machine")
    later = written(f"Maschine\tmachine\n{row}\n")
    assert len(read_glossary(later, source_language=source, target_language=target)) == 2


@pytest.mark.parametrize(
    ("content", "languages"),
    [
        ("target\tsource\nmachine\tMaschine\n", ("de", "en")),
        ("Target Language\tSource_Language\nmachine\tMaschine\n", ("", "")),
        ("id\tsrc\tx\ttgt\n1\tMaschine\ty\tmachine\n", ("de", "en")),
        ("en\tde\nmachine\tMaschine\n", ("de", "en")),
        ("English\tGerman\nmachine\tMaschine\n", ("deu_Latn", "eng_Latn")),
        ("English\tGerman\nmachine\tMaschine\n", ("de", "")),
        ("English (US)\tGerman (Austria)\nmachine\tMaschine\n", ("de", "en")),
        ("English\tGerman\nmachine\tMaschine\n", ("", "en")),
        ("en-US\tde-DE\nmachine\tMaschine\n", ("de", "en")),
        ("Englisch\tDeutsch\nmachine\tMaschine\n", ("de", "en")),
        ("Ziel\tQuelle\nmachine\tMaschine\n", ("de", "en")),
        ("Notes\tEnglish\tFrench\tGerman\n\tmachine\t\tMaschine\n", ("de", "en")),
        ("en-GB\ten-US\tde\nx\tmachine\tMaschine\n", ("de", "en-US")),
    ],
)
def test_a_first_row_says_which_columns_are_terms_and_translations(written, content, languages):
    """Terms in the second column were never found in a text."""
    source, target = languages
    found = read_glossary(written(content), source_language=source, target_language=target)
    assert found == [("Maschine", "machine")]


def test_names_of_other_languages_than_those_of_a_run_are_refused(written):
    languages = {"source_language": "ko", "target_language": "en"}
    message = "no translations from ko to en: the languages of the file are de, en"
    with pytest.raises(WrongFile, match=message):
        read_glossary(written("German\tEnglish\na\tb\n"), **languages)
    with pytest.raises(WrongFile, match=message):
        read_glossary(written("Deutsch\tEnglisch\na\tb\n"), **languages)
    assert read_glossary(written("German\tEnglish\na\tb\n"), target_language="en") == [("a", "b")]


def test_cells_in_quotes_are_read_as_spreadsheets_write_them(written):
    content = '"der, die"\tthe\n"das ""neue"" Gerät"\t"new" device\t\n'
    assert read_glossary(written(content)) == [("der, die", "the"), ('das "neue" Gerät', '"new" device')]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.tsv", "Source\tTarget\tNote\nMaschine\tmachine\tx\nder, die\tthe\n"),
        ("a.csv", 'Source,Target,Note\r\nMaschine,machine,"a, ""b""\nc"\r\n"der, die",the\r\n'),
        ("a.csv.gz", gzip.compress(b'Maschine,machine\n"der, die",the\n')),
        ("a.csv", '한국어,영어\nMaschine,machine\n"der, die",the\n'),
        ("a.csv", "# of us\n\nMaschine;machine\nder, die;the"),
    ],
)
def test_further_named_columns_are_left_out_and_tables_are_read(written, name, content):
    assert read_glossary(written(content, name)) == [("Maschine", "machine"), ("der, die", "the")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.tsv", "a\tb\nc\nd\te\tf\n\tg\nh\t\n", "lines 2, 3, 4, …: a term, a tab and its translation"),
        ("a.tsv", "a\tb\nc d", "line 2: a term, a tab and its translation"),
        (
            "a.csv",
            "a,b\nc,d,e\n",
            "line 2: two columns are expected; of more columns, the first line has the names, such as source",
        ),
        (
            "a.tsv",
            "a;b\nc,d\n",
            "lines 1, 2: a term, a tab and its translation are expected; of more columns, the "
            "first line has the names, such as source and target; the name of a table with commas",
        ),
        ("a.tsv", "source\ttarget\na\n\tb\n", "lines 2, 3: a term and its translation are expected"),
        (
            "a.csv",
            "Rad,wheel,de,en\nTür,door,de,en\n",
            "lines 1, 2: two columns are expected; of more columns",
        ),
        ("a.csv.gz", gzip.compress(b"a,b,c\n"), "line 1: two columns are expected"),
        ("a.XLSX", b"PK\3\4", "a glossary is lines of text, CSV or TBX: save the table as CSV in UTF-8"),
        ("a.csv", "a,b\nc," + "d" * 200_000, "line 2: field larger than"),
        ("a.tsv", "a\tb\n\nA\tc\n", "lines 1 and 3: the term 'A' has two translations, 'b' and 'c'"),
        ("a.tsv", f"a\tb\nc\t{'x' * 257}", "line 2: a term has 257 characters, and may have 256"),
        (
            "a.tsv",
            "".join(f"{number}\tx\n" for number in range(1001)),
            "line 1001: the file has more than 1000 terms",
        ),
        ("a.tsv", "a\tb\n".encode("utf-16"), "the file is UTF-16"),
        ("a.tsv", b"a\tb\n\xff", "the file is not UTF-8: byte 5"),
        ("a.tsv", " " * 2**22 + "x", "the file has more than 4194304 bytes"),
        (
            "a.tbx",
            version_3(("a", "b"), ("x", "y"), ("A", "c")),
            "lines 2 and 6: the term 'A' has two translations, 'b' and 'c'",
        ),
        (
            "a.tbx",
            version_3(*((str(number), "x") for number in range(1001))),
            "line 2002: the file has more than 1000 terms",
        ),
        ("a.tbx", "a\tb\n", "the file is not XML"),
        ("a.tbx", "<tmx/>", "line 1: the file is not <tbx> or <martif>, but <tmx>"),
        ("a.tbx", '<!DOCTYPE tbx [<!ENTITY a "b">]><tbx/>', "line 1: the DOCTYPE has declarations"),
    ],
)
def test_a_wrong_glossary_is_refused_in_one_line(written, name, content, message):
    with pytest.raises(WrongFile) as caught:
        read_glossary(path := written(content, name), source_language="de", target_language="en")
    assert caught.value.strerror.startswith(message)
    assert len(caught.value.strerror.splitlines()) == 1
    assert caught.value.filename == str(path)
