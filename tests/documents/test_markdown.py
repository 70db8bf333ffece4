"""Markdown: texts change, and what is not text stays, as another program renders it."""

import html
import re
from pathlib import Path

import markdown
import markdown_it
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from seq2seq_serve.documents.markdown import MarkdownDocument
from seq2seq_serve.protos.seq2seq_v1_pb2 import GenerateResponse, Hypothesis
from tests.documents.answers import aligned, backwards, capitals, translated

MARKDOWN = """---
title: stays
---
# Big *news* #

Go **to _sleep_** now, [never](http://a.b "title") and
later \\*x\\* &amp; on.\\
Next ![a cat](cat.png) [full][name] ~~gone~~

<http://x.y> [name]

> [!NOTE]
> quoted one
> line two

- [x] a task
- **bold *both*** end
  more
  1. inner

| one | two |
|-----|:---:|
| c d | `code` |

```py
code here
```

    indented code

Title
=====
<div>
html here
</div>

[name]: http://x "title"
"""


@pytest.mark.parametrize("path", [*Path("docs").glob("*.md"), Path("README.md")], ids=lambda path: path.name)
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_a_page_without_translations_is_as_it_was(path, newline):
    content = path.read_bytes().replace(b"\n", newline)
    document = MarkdownDocument(content, path)
    assert document.segments
    assert document.content() == content


def _structure(tokens: list) -> list[tuple]:
    """Returns the tokens of a page that are no text, sorted: a translation may change their order."""
    found = []
    for token in tokens:
        code = token.content if "code" in token.type or "html" in token.type or token.type == "fence" else ""
        if token.type not in ("text", "softbreak"):
            found.append((token.type, token.tag, token.attrs.get("href", token.attrs.get("src")), code))
        found += _structure(token.children or [])
    return sorted(found, key=str)


HARD_PAGES = (
    "# A `b` *c* {#d}\n\nOne[^1] two.^[A *b* [c](d)] Three[^2]\n\n[^1]: a b\n[^2]: c\n    d *e*\n",
    "- a\n\n  b\n  - c *d*\n\n        code\n- e\n1. f\n\n   > g\n   > h\n",
    "[![a b](c.png) d](e) f ![g](h) i [![j](k)](l)\n",
    "***a* b** c, **d *e f* g** ~~h *i*~~ __j__ _k_ \\_\\_l\\_\\_ m_n_o\n",
    "a  \nb\\\nc <br> d [e][f] [f] [f][]\n\n[f]: g 'h i'\n",
    "| a | b |\n|---|--:|\n| *c* `d` | [e](f) ![g](h) |\n| \\| i | |\n",
    "Word[1](#n). Word<sup>2</sup> <b>a *b*</b> c &copy; d <http://e.f> `` g`h `` i\n",
)


@pytest.mark.parametrize("content", HARD_PAGES)
@pytest.mark.parametrize("translate", [backwards, capitals])
def test_a_translated_page_has_the_structure_of_its_source(content, translate):
    parser = markdown_it.MarkdownIt("commonmark").enable(["table", "strikethrough"])
    written = translated("a.md", content, translate)[1]
    assert written != content
    assert _structure(parser.parse(written)) == _structure(parser.parse(content))


def test_markdown_keeps_all_but_its_texts():
    texts, written = translated("a.md", MARKDOWN, capitals)
    assert texts == [
        *("Big news", "title", "Go to sleep now, never and later *x* & on.", "a cat", "Next full gone"),
        *("quoted one line two", "a task", "bold both end more", "inner", "one", "two", "c d", "Title"),
        "title",
    ]
    expected = MARKDOWN.replace("and\nlater", "and later").replace("one\n> line", "one line")
    expected = expected.replace("end\n  more", "end more").replace("&amp;", "&")
    expected = expected.replace('"title"', '"TITLE"')
    for text in (
        "Big *news*",
        "Go **to _sleep_** now, [never]",
        " and later \\*x\\* & on",
        "Next",
        "[a cat]",
    ):
        assert text in expected
        expected = expected.replace(text, text.upper())
    for text in (
        "[full]",
        "~~gone~~",
        "quoted one line two",
        "a task",
        "**bold *both*** end more",
        ". inner",
    ):
        expected = expected.replace(text, text.upper())
    for text in ("| one | two |", "| c d |", "Title\n"):
        expected = expected.replace(text, text.upper())
    assert re.sub(r"\s+", " ", written) == re.sub(r"\s+", " ", expected)


def test_markup_follows_its_words():
    content = "Go **to _sleep_** now, [never](http://a.b)."
    page = markdown.markdown(translated("a.md", content, backwards)[1])
    assert page == '<p><a href="http://a.b">NEVER</a>. NOW, <strong><em>SLEEP</em> TO</strong> GO</p>'


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('a [b c](<u v> "the title") d', 'D [C B](<u v> "TITLE THE") A'),
        ("![pic](u 'my pic') x", "![PIC](u 'PIC MY') X"),
        ("[![alt](i (one)) b](u (t) ) c", "C [![ALT](i (ONE)) B](u (T) )"),
        ('[![alt](i "one")](u "")', '[![ALT](i "ONE")](u "")'),
        ('> [a](u "one\n> two") b', '> B [A](u "TWO ONE")'),
        ("[a](u 'it\\'s me')", "[A](u 'ME IT\\'S')"),
        (
            '| a |\n|---|\n| [b](u "c \\| d &amp; e") |\n',
            '| A |\n|---|\n| [B](u "E & D \\| C") |\n',
        ),
        ('a [b][c]\n\n[c]: <u "v"> "my \\"d\\""  \n\ne', '[B][c] A\n\n[c]: <u "v"> "\\"D\\" MY"  \n\nE'),
        ("> [c]: u\n>   (a d)\n> e", "> [c]: u\n>   (D A)\n> E"),
        ('[c]: u "x"\n[c]: u "twice"\n[d]: u "y"\ne', '[c]: u "X"\n[c]: u "twice"\n[d]: u "Y"\nE'),
        ('[//]: # (a note)\n[^1]: See "the note"\n', '[//]: # (a note)\n[^1]: NOTE" "THE SEE\n'),
        ('[a](u "1.2") [b]("c") [d](u) "e"', '"E" [D](u) [B]("c") [A](u "1.2")'),
    ],
)
def test_titles_of_links_pictures_and_references_are_texts(content, expected):
    path = Path("a.md")
    assert MarkdownDocument(content.encode(), path).content() == content.encode()
    assert translated("a.md", content, backwards)[1] == expected


@pytest.mark.parametrize("content", ["[1](u {})", "![1](u {})", "[1]\n\n[1]: u {}"])
@pytest.mark.parametrize("quoted", ['"word"', "'word'", "(word)"])
def test_a_title_may_have_all_quotes(content, quoted):
    target = "a \"b\" 'c' (d) \\"
    _, written = translated("a.md", content.format(quoted), aligned(target))
    page = markdown_it.MarkdownIt().render(written)
    assert html.unescape(re.search('title="([^"]*)"', page)[1]) == target


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("Run `a b` (then), `c d` here.", "HERE. `c d` (THEN), `a b` RUN"),
        ("With `x`, `y` and (`z`) go!", "GO! (`z`) AND `y` `x`, WITH"),
        ("**Go** *there* [now](a) ~~or~~ never", "NEVER ~~OR~~ [NOW](a) *THERE* **GO**"),
        ("Go to **the big** house", "HOUSE **BIG THE** TO GO"),
    ],
)
def test_code_and_styles_stand_apart_from_the_words_beside_them(content, expected):
    assert translated("a.md", content, backwards)[1] == expected


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('+++\ntitle = "x"\n---\n+++\nGo', '+++\ntitle = "x"\n---\n+++\nGO'),
        (
            "[^1]: One\n\n    two\n\n    - three\n\n          x\n",
            "[^1]: ONE\n\n    TWO\n\n    - THREE\n\n          x\n",
        ),
        ("> [^1]:\n>     One\n>\n>     two\n\nthree", "> [^1]:\n>     ONE\n>\n>     TWO\n\nTHREE"),
        ("Term\n:   One\n\n    two\n~ Three", "TERM\n:   ONE\n\n    TWO\n~ THREE"),
        ("Text\n\\begin{a}\nx &= y\n\\end{a}\nmore", "TEXT\n\\begin{a}\nx &= y\n\\end{a}\nMORE"),
        ('!!! note "x"\n    One\n\n    two\n', '!!! note "x"\n    ONE\n\n    TWO\n'),
        ("![a](b){width=5} ![c](d){.e f=g}", "![A](b){width=5} ![C](d){.e f=g}"),
        ("(@) One\n(@a) two\na) three\nb) four", "(@) ONE\n(@a) TWO\na) THREE\nb) FOUR"),
        ("| One\n|   two", "| ONE\n|   TWO"),
        ("+---+---+\n| a | b |\n+---+---+\n", "+---+---+\n| a | b |\n+---+---+\n"),
        ("Go [@a; see @b, p. 3] to me@x.yz [@c]", "GO [@a; see @b, p. 3] TO ME@X.YZ [@c]"),
        ("# A title {#start .x}\n", "# A TITLE {#start .x}\n"),
        ("Pay $5 or $10\n", "PAY $5 OR $10\n"),
        ("{{% tip %}}\nText **one**\n{{% /tip %}}\n", "{{% tip %}}\nTEXT **ONE**\n{{% /tip %}}\n"),
        (":::tip My tip\nText\n:::\nmore\n:::", ":::tip My tip\nTEXT\n:::\nMORE\n:::"),
        ("Text  \n::: a\nmore\\\n::: b\n", "TEXT  \n::: a\nMORE\\\n::: b\n"),
        ('!!! note "Title"\n    Text\n', '!!! note "Title"\n    TEXT\n'),
        ("Text\n$$\nE = mc\n$$\n", "TEXT\n$$\nE = mc\n$$\n"),
        ("> Term\n> : Text\n> : more\n", "> TERM\n> : TEXT\n> : MORE\n"),
        ("[^1]: Text of one\n[^n]: and two\n", "[^1]: TEXT OF ONE\n[^n]: AND TWO\n"),
        (
            "import A from 'b';\nexport const a = 'b'\n\nText\n</Tabs>\n",
            "import A from 'b';\nexport const a = 'b'\n\nTEXT\n</Tabs>\n",
        ),
        ("you can\nexport your data\nimport it", "YOU CAN EXPORT YOUR DATA IMPORT IT"),
        (
            "|a|\n|---|\n| x \\| y `c \\| d` \\| z |\n| w |",
            "|A|\n|---|\n| X \\| Y `c \\| d` \\| Z |\n| W |",
        ),
        ('Go to {{< ref "x" >}} now {% y %}\n', 'GO TO {{< ref "x" >}} NOW {% y %}\n'),
        ("Go <br> now\n", "GO <br> NOW\n"),
        ("Say $a_1 + b_2$ or $$c$$, {{x}}", "SAY $a_1 + b_2$ OR $$c$$, {{x}}"),
    ],
)
def test_code_of_programs_that_read_more_than_commonmark_stays(content, expected):
    assert translated("a.md", content, capitals)[1] == expected


_LONG = "One two three four five six seven eight nine ten eleven twelve"


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        ("One two\nthree\n~ four\nfive", ["One two three ~ four five"]),
        ("One two\nthree\n: four", ["One two three : four"]),
        (f"{_LONG}\n~ four\nfive", [f"{_LONG} ~ four five"]),
        (f"> {_LONG}\n> ~ four", [f"{_LONG} ~ four"]),
        ("One two\n(a) three\nfour", ["One two (a) three four"]),
        ("- One two\n  a) three", ["One two a) three"]),
        ("One two\n(b) three\n(a) four", ["One two (b) three (a) four"]),
        # Lists of Pandoc
        ("Term\n~ one\n  two\n~ three", ["Term", "one two", "three"]),
        ("- Term\n  : one\n  : two", ["Term", "one", "two"]),
        ("One\ntwo\n\n~ three", ["One two", "three"]),
        ("(a) one\ntwo\n(b) three", ["one two", "three"]),
        ("- One\n  a) two\n  b) three", ["One", "two", "three"]),
    ],
)
def test_only_what_begins_a_block_ends_a_paragraph(content, texts):
    """A line of it that began with a mark of Pandoc's lists did, too."""
    assert translated("a.md", content, capitals)[0] == texts


@pytest.mark.parametrize(
    ("content", "text", "answer", "expected"),
    [
        (
            "누나는 오늘 건강합니다.[^1] 나는 학생이다.",
            "누나는 오늘 건강합니다. 나는 학생이다.",
            ("My older sister is healthy today. I am a student.", "0 0 0 2 2 1 3 4 4 4"),
            "My older sister is healthy today.[^1] I am a student.",
        ),
        (
            "우리는 **정원에서** 음악을 듣고 있다.[^1]",
            "우리는 정원에서 음악을 듣고 있다.",
            ("We are listening to music in the garden.", "0 4 3 3 2 1 1 1"),
            "We are listening to music **in the garden**.[^1]",
        ),
        (
            "우리는 [정원에서](http://x.y) 음악을 듣고 있다[^1].",
            "우리는 정원에서 음악을 듣고 있다.",
            ("We are listening to music in the garden.", "0 4 3 3 2 1 1 1"),
            "We are listening to music [in the garden](http://x.y)[^1].",
        ),
        (
            "[^n] One two. [^1] [^2] Three.\n\n[^1]: 1",
            "One two. Three.",
            ("Two one. Three.", "1 0 2"),
            "[^n] Two one. [^1] [^2] Three.\n\n[^1]: 1",
        ),
    ],
)
def test_a_footnote_stays_where_its_sentence_ends(content, text, answer, expected):
    """The end of a sentence before it was not seen, and the next sentence was lost."""
    assert translated("a.md", content, aligned(*answer)) == ([text], expected)


@pytest.mark.parametrize(
    ("content", "texts", "expected"),
    [
        ("Some word<sup>1</sup> two", ["Some word two"], "TWO WORD SOME<sup>1</sup>"),
        ("Some word[\\[1\\]](#n) two", ["Some word two"], "TWO WORD SOME[\\[1\\]](#n)"),
        (
            "Some<sup>[1](#n)</sup> [x<sup>2</sup>](u)",
            ["Some x2"],
            "[X<sup>2</sup>](u) SOME<sup>[1](#n)</sup>",
        ),
        ("[<sup>1</sup>](#n) Some [↩](#m)", ["Some"], "[<sup>1</sup>](#n) SOME [↩](#m)"),
        ("see [1](#n), 3 m<sup>2</sup>", ["see 1, 3 m2"], "M<sup>2</sup> 3 [1](#n), SEE"),
        ('Some[1](#n "a b")', ["a b", "Some1"], 'SOME[1](#n "B A")'),
        # The text of a footnote within a text is one of its own
        ("One two.^[Three *four*] Five", ["Three four", "One two. Five"], "FIVE TWO. ONE^[*FOUR* THREE]"),
        (
            "*One ^[two] three* ^[four ^[five]]",
            ["two", "five", "four", "One three"],
            "*THREE ONE ^[TWO]* ^[FOUR ^[FIVE]]",
        ),
        ("[one^[two]](u) x^[1] ^[three", ["two", "one x ^[three"], "^\\[THREE X^[1] [ONE^[TWO]](u)"),
    ],
)
def test_a_note_is_not_sent_with_the_text_around_it(content, texts, expected):
    assert translated("a.md", content, backwards) == (texts, expected)


@pytest.mark.parametrize(
    ("content", "texts", "expected"),
    [
        ("One [![a b](c) two](d) three", ["a b", "One two three"], "THREE [![B A](c) TWO](d) ONE"),
        ("One ![a b](c) two", ["a b", "One two"], "TWO ONE ![B A](c)"),
        ("One **![a b](c) two** three", ["a b", "One two three"], "THREE **![B A](c) TWO** ONE"),
        ('One [![a](b)](c "d") two', ["a", "d", "One two"], 'TWO ONE [![A](b)](c "D")'),
        (
            "[![a](b)](c) [![1](e)](f)\n![g](h) one two",
            ["a", "g", "one two"],
            "[![A](b)](c) [![1](e)](f)\n![G](h) TWO ONE",
        ),
        ("[![a](b) one two](c)", ["a", "one two"], "[![A](b) TWO ONE](c)"),
    ],
)
def test_a_picture_in_a_link_or_after_a_word_does_not_end_a_text(content, texts, expected):
    assert translated("a.md", content, backwards) == (texts, expected)


@pytest.mark.parametrize("tag", ["<br>", "<BR />"])
def test_the_tag_of_a_line_break_is_one(tag):
    content = f"| a |\n|---|\n| c *d*{tag}e f{tag}**g h{tag}i j** k |\n"
    expected = f"| A |\n|---|\n| *D* C{tag}F E{tag}**H G{tag}J I** K |\n"
    texts, written = translated("a.md", content, backwards)
    assert texts == ["a", "c d", "e f", "g h", "i j", "k"]
    assert written == expected


_MARKS = "*", "**", "_", "__", "~~"
_WORDS = "v", "v,", "(v", "v.", "“v”", "v€", "v-v", "花", "v_v"


@st.composite
def _paragraphs(draw, others):
    """Words in random emphases and links, and a random target with the alignment of its words."""

    def content(depth):
        parts = []
        for _ in range(draw(st.integers(1, 3))):
            kind = draw(st.sampled_from(["word", "emphasis", "link", "other"]))
            inside = content(depth + 1) if depth < 2 and kind in ("emphasis", "link") else "w"
            mark = draw(st.sampled_from(_MARKS))
            other = draw(st.sampled_from(others)) if kind == "other" else "w"
            parts.append({"emphasis": f"{mark}{inside}{mark}", "link": f"[{inside}](u)"}.get(kind, other))
        return draw(st.sampled_from([" ", " ", "", ", "])).join(parts)

    targets = draw(st.lists(st.sampled_from(_WORDS), min_size=1, max_size=6))
    links = [draw(st.integers(0, 9)) for _ in targets]
    return "w " + content(0), draw(st.sampled_from([" ", "|", ""])).join(targets), links


def _translated_and_shown(case):
    """The translation as it is shown, and that of the same page of HTML."""
    source, target, links = case

    def translate(text):
        num_words = len(text.split())
        return aligned(target, " ".join(str(link % num_words) for link in links))(text)

    parser = markdown_it.MarkdownIt().enable("strikethrough")
    page = parser.render(source)
    assume(not re.search(r"[*~_]|\[w|w\]", page))  # that are not marks
    written, expected = translated("a.md", source, translate)[1], translated("a.html", page, translate)[1]
    return parser.render(written), expected


@given(_paragraphs(["`c`"]))
def test_all_marks_of_a_translation_are_emphasis(case):
    """CommonMark reads `** in a**` and `花**（花）**花` as text."""
    written, expected = _translated_and_shown(case)
    while expected != (expected := re.sub(r"<(\w+)></\1>", "", expected)):
        pass
    for tag in ("em>", "strong>", "s>", "a ", "code>"):
        assert written.count(f"<{tag}") == expected.count(f"<{tag}")
    shown, same = (re.sub(r"<[^>]*>|\s", "", text) for text in (written, expected))
    assert shown == same


@given(_paragraphs(["w[^1]", "*w\\\nw*", "w<br>w", "**w ![w](u) w**"]))
def test_all_marks_of_a_translation_in_parts_are_emphasis(case):
    assert not re.search("[*~]", _translated_and_shown(case)[0])


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("Say $a_1 + b_2$ to me", "ME TO $a_1 + b_2$ SAY"),
        ("A <b>bold word</b> and <KBD>Ctrl</KBD>", "<KBD>Ctrl</KBD> AND <b>WORD BOLD</b> A"),
        ("A <a href='x'>b *c* d</a> e", "E <a href='x'>D *C* B</a> A"),
        ("A *b <i>c* d</i> e", "E D </i>*C B<i>* A"),
        ("A [b *c*]{.d} e", "E [*C* B]{.d} A"),
        ("A [b <i>c](x) d</i> e", "E D </i>[C B<i>](x) A"),
    ],
)
def test_html_within_a_text_follows_its_words(content, expected):
    assert translated("a.md", content, backwards)[1] == expected


@pytest.mark.parametrize(
    "target",
    [
        "# a",
        "- a",
        "+ a",
        "> a",
        "1. a",
        "1984. a",
        "2) a",
        "a *b* c",
        "_a_ b",
        "`a`",
        "[a](b)",
        "<b>a",
        "&lt; a",
        "a | b",
    ],
)
@pytest.mark.parametrize(
    "content",
    [
        "word",
        "- word",
        "> word",
        "# word",
        "|word|\n|----|\n|other|",
        '[other](u "word")',
        "[other](u 'word')",
    ],
)
def test_a_target_is_text_and_not_markup(target, content):
    answer = GenerateResponse(hypotheses=[Hypothesis(text=target)])
    _, written = translated("a.md", content, lambda text: answer if text == "word" else capitals(text))
    page = markdown.markdown(written, extensions=["tables"])
    before = markdown.markdown(content, extensions=["tables"]).replace("other", "OTHER")
    expected = target.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    assert page.replace("&gt;", ">") == before.replace("word", expected).replace("&gt;", ">")


def test_a_text_that_stays_keeps_the_marks_of_its_emphasis():
    """Those that would not count beside other words are replaced in translations only."""
    content = '*<br>(b "c")*\n'

    def same(text):
        return GenerateResponse(hypotheses=[Hypothesis(text=text)])

    assert translated("a.md", content, same)[1] == content
