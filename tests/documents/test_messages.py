"""Files of gettext: only the lines with new translations change."""

from pathlib import Path

import polib
import pytest

from seq2seq_serve.documents.messages import Messages
from seq2seq_serve.documents.segments import WrongFile
from seq2seq_serve.protos.seq2seq_v1_pb2 import GenerateResponse, Hypothesis
from tests.documents.answers import capitals, translated

FILE = r"""# A header
msgid ""
msgstr ""
"Plural-Forms: nplurals=2; plural=n != 1;\n"

#  translator
#. developer
#: a.c:1
#, c-format
#| msgid "old"
msgctxt "menu"
msgid ""
"say \"%s\"\n"
"\ttwice \\"
msgstr ""

msgid  "kept"
msgstr    "behalten"
msgid "next"
msgstr ""
#~ msgid "obsolete"
#~ msgstr ""

msgid "a file"
msgid_plural "files"
msgstr[0] ""
msgstr[1] ""
"""


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_only_new_translations_change(newline):
    content = FILE.replace("\n", newline)
    assert Messages(content.encode(), Path("a.po")).content().decode() == content
    texts, written = translated("a.po", content, capitals)
    assert texts == ['say "%s"', "twice \\", "next", "a file", "files"]
    expected = FILE.replace(
        'twice \\\\"\nmsgstr ""', 'twice \\\\"\nmsgstr ""\n"SAY \\"%S\\"\\n"\n"\\tTWICE \\\\"'
    )
    expected = expected.replace("#, c-format", "#, c-format, fuzzy")
    expected = expected.replace('"next"\nmsgstr ""', '"next"\nmsgstr "NEXT"')
    expected = expected.replace('msgstr[0] ""\nmsgstr[1] ""', 'msgstr[0] "A FILE"\nmsgstr[1] "FILES"')
    assert written == expected.replace("\n", newline)
    entry = polib.pofile(written)[0]
    assert (entry.msgstr, entry.flags) == ('SAY "%S"\n\tTWICE \\', ["c-format", "fuzzy"])


def test_an_escape_that_is_not_read_stays_in_the_text():
    """Its backslash was lost."""
    texts, written = translated("a.po", 'msgid "a \\x41 \\\\ \\""\nmsgstr ""\n', capitals)
    assert texts == ['a \\x41 \\ "']
    assert polib.pofile(written)[0].msgstr == 'A \\X41 \\ "'


@pytest.mark.parametrize("message", ["{n, plural,\\n other {files}}", "%s: %d", "%Y-%m-%d"])
def test_choices_of_icu_and_messages_without_words_stay(message):
    content = f'msgid "{message}"\nmsgstr ""\n'
    assert translated("a.po", content, capitals) == ([], content)


def test_a_message_without_flags_gets_a_line_for_them():
    _, written = translated("a.po", 'msgctxt "x"\nmsgid "{a} b"\nmsgstr ""\n', capitals)
    assert written == '#, fuzzy\nmsgctxt "x"\nmsgid "{a} b"\nmsgstr "{A} B"\n'


@pytest.mark.parametrize(
    ("message", "target", "is_fuzzy"),
    [
        ("100% of it", "100 % davon", False),
        ("%s of {n}", "{n} von %s", False),
        ("Go to %1", "Geh", True),
        ("A%% b", "A b", True),
        ("See $t(a.b)", "Sieh $T(a.b)", True),
        ("{n, number} b", "{n} b", True),
        ("See https://a.de/b", "Sieh https://a.de", True),
        ("I <b>am</b>", "Ich <b>bin</b>", False),
        ("I <b>am</b>", "Ich</b>.<b>.", True),
    ],
)
def test_a_message_is_fuzzy_without_its_placeholders(message, target, is_fuzzy):
    answer = GenerateResponse(hypotheses=[Hypothesis(text=target)])
    content = f'msgid "{message}"\nmsgstr ""\n'
    assert ("fuzzy" in translated("a.po", content, lambda _: answer)[1]) is is_fuzzy


_HEAD = 'msgid ""\nmsgstr ""\n"Content-Type: text/plain; charset=UTF-8\\n"\n'
_MESSAGE = '\nmsgid "Language: xx\\n"\nmsgstr ""\n"Language: yy\\n"\n'


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        ('"Language: \\n"\n', '"Language: pt_BR\\n"\n'),
        ("", '"Language: pt_BR\\n"\n'),
        ('"Language: pt\\n"\n', '"Language: pt\\n"\n'),
        ('"X-Source-Language: de\\n"\n', '"X-Source-Language: de\\n"\n"Language: pt_BR\\n"\n'),
    ],
)
def test_the_header_gets_the_language_of_the_translations_if_it_lacks_one(head, expected):
    document = Messages(f"# c\n{_HEAD}{head}{_MESSAGE}".encode(), Path("a.po"))
    document.target_language = "pt-BR"
    written = document.content().decode()
    assert written == f"# c\n{_HEAD}{expected}{_MESSAGE}"
    assert polib.pofile(written).metadata["Language"] in ("pt", "pt_BR")


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (r'msgstr "Language: pt\nX: y\n"', r'msgstr "Language: pt\nX: y\n"'),
        (r'msgstr "X: y\nLanguage: pt\n"', r'msgstr "X: y\nLanguage: pt\n"'),
        (r'msgstr "X: y\nLanguage:\nZ: z\n"', r'msgstr "X: y\nLanguage: pt_BR\nZ: z\n"'),
        (r'msgstr "X: y\nLanguage: "', r'msgstr "X: y\nLanguage: pt_BR"'),
        (r'msgstr "X: y\n"', r'msgstr "X: y\n"|"Language: pt_BR\n"'),
        (r'msgstr "X: y"', r'msgstr "X: y\n"|"Language: pt_BR\n"'),
        (r'msgstr ""|"X: "|"y\nLangu"|"age: pt\n"', r'msgstr ""|"X: "|"y\nLangu"|"age: pt\n"'),
        (r'msgstr ""|"Language: Portuguese (Brazil)\n"', r'msgstr ""|"Language: Portuguese (Brazil)\n"'),
    ],
)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_a_header_has_one_language_however_its_lines_are_broken(head, expected, newline):
    """One whose fields are all on the line of msgstr got a second language."""

    def content(lines):
        return newline.join(["# c", 'msgid ""', *lines.split("|"), "", 'msgid "a"', 'msgstr "b"', ""])

    document = Messages(content(head).encode(), Path("a.po"))
    document.target_language = "pt-BR"
    assert document.language_problem(("de", "pt-BR")) == ""
    written = document.content().decode()
    assert written == content(expected)
    assert polib.pofile(written).metadata["Language"][:2].casefold() in ("pt", "po")


@pytest.mark.parametrize(
    ("head", "problem"),
    [
        ('"Language: pt_BR\\n"\n"X-Source-Language: de-AT\\n"\n', ""),
        ('"Language: pt@latin\\n"\n', ""),
        ('"Language: fr\\n"\n', "its target language is fr, and that of the translation is pt"),
        ('"X-Source-Language: fr\\n"\n', "its source language is fr, and that of the translation is de"),
        (
            '"X: y\\nLanguage: French\\nZ: z\\n"\n',
            "its target language is fr, and that of the translation is pt",
        ),
        ("", ""),
    ],
)
def test_the_languages_of_the_header_are_those_of_the_translation(head, problem):
    document = Messages(f"{_HEAD}{head}{_MESSAGE}".encode(), Path("a.po"))
    assert document.language_problem(("de", "pt")) == problem


@pytest.mark.parametrize("forms", ["1", "6", "0002"])
def test_a_message_has_the_plural_forms_of_its_file(forms):
    header = f'msgid ""\nmsgstr "Plural-Forms: nplurals={forms};"\n\n'
    texts, written = translated("a.po", f'{header}msgid "x"\nmsgid_plural "xs"\nmsgstr[0] ""\n', capitals)
    assert len(texts) == len(polib.pofile(written)[0].msgstr_plural) == int(forms)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('"a"', "the file is not a file of gettext (.po): see line 1"),
        ('msgid "a"\nmsgstr "\n', "the file is not a file of gettext (.po): see line 2"),
        ('msgid "a"\nmsgstr ""\n\n"b"\n', "the file is not a file of gettext (.po): see line 4"),
        ('msgid ""\nmsgstr "nplurals=7;"\n', "nplurals is 7 in its header, and can be at most 6: correct it"),
    ],
)
def test_what_is_not_a_file_of_gettext_is_refused(content, message):
    with pytest.raises(WrongFile) as caught:
        Messages(content.encode(), Path("a.po")).content()
    assert caught.value.strerror == message
