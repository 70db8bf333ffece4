"""`--glossary` against a server that echoes: the terms of the file are in the targets."""

import gzip
import json
from types import SimpleNamespace

import pytest

from seq2seq_serve.bundle.names import SOURCE_IDS
from seq2seq_serve.client import GenerateOptions, read_glossary
from seq2seq_serve.client.files.flaws import Flaws
from seq2seq_serve.client.files.plan import settings_of
from seq2seq_serve.client.rpcs import Translated
from seq2seq_serve.client.translate import _Server
from seq2seq_serve.documents.segments import FormattedText, kind_of, options_by_kind, software_text
from seq2seq_serve.protos.seq2seq_v1_pb2 import GenerateResponse, Hypothesis, Model, WordAlignment

TERMS = "# terms\ncat\tKatze\nblack dog\tHund\n"
TBX = """<tbx><text><body><conceptEntry>
<langSec xml:lang="en"><termSec><term>cat</term></termSec></langSec>
<langSec xml:lang="de"><termSec><term>Katze</term></termSec></langSec>
<langSec xml:lang="fr"><termSec><term>chat</term></termSec></langSec>
</conceptEntry></body></text></tbx>"""
CODE, OUT, ERR = range(3)


@pytest.fixture(autouse=True)
def _glossary(tmp_path):
    (tmp_path / "terms.tsv").write_text(TERMS)


@pytest.mark.parametrize("flags", [[], ["--stream"], ["--terms", "cow=Kuh"]])
def test_targets_have_the_terms_of_a_glossary(run, flags):
    code, out, err = run("translate", "--glossary", "terms.tsv", *flags, stdin=b"a cat\nb\na Black Dog cow\n")
    first, second, third = out.splitlines()
    assert (code, second, err) == (0, "b", [])
    assert "Katze" in first
    assert "Hund" in third
    assert ("Kuh" in third) == ("--terms" in flags)


def test_a_term_of_a_document_is_whole(run, tmp_path):
    """Its second word had the formatting of the text after it."""
    (tmp_path / "a.html").write_text("<p>a <b>c</b> d e</p>")
    assert run("translate", "--input", "a.html", "--terms", "c=K L", "--output", "b.html")[CODE] == 0
    assert "<b>K L</b>" in (tmp_path / "b.html").read_text()


def test_a_term_of_a_glossary_and_of_a_flag_must_agree(run):
    code, out, [line] = run("translate", "a", "--glossary", "terms.tsv", "--terms", "cat=Kater")
    assert (code, out) == (1, "")
    assert "the term 'cat' has two translations" in line


def test_terms_that_do_not_agree_are_refused_once_before_any_text(run):
    """Each line of the input had the same error."""
    flags = ["--glossary", "terms.tsv", "--terms", "Cat=Kater"]
    code, out, lines = run("translate", *flags, stdin=b"a\nb\n")
    message = "line 2: the term 'cat' has two translations, 'Katze' and 'Kater' of --terms: remove one"
    assert (code, out, lines) == (1, "", [f"error: terms.tsv: {message}"])
    assert run("translate", "a", "--glossary", "terms.tsv", "--terms", "cat=Katze")[0] == 0


@pytest.mark.parametrize(
    "terms", [["cat=a", "--terms", "Cat=b"], ['{"cat": "a", "Cat": "b"}'], ['{"cat": "a", "cat": "b"}']]
)
def test_two_translations_of_a_flag_are_wrong_usage(run, capsys, terms):
    """The last one of an object of JSON was taken."""
    with pytest.raises(SystemExit, match="2"):
        run("translate", "a", "--terms", *terms)
    assert "has two translations, 'a' and 'b': remove one" in capsys.readouterr().err


@pytest.mark.parametrize("terms", ["=b", "a=", "a= ", '{" ": "b"}', '[{"source": "a"}]'])
def test_a_blank_term_of_a_flag_is_wrong_usage(run, capsys, terms):
    """Each text was refused."""
    with pytest.raises(SystemExit, match="2"):
        run("translate", "a", "--terms", "c=d", "--terms", terms)
    assert " is blank" in capsys.readouterr().err


def test_tbx_is_read_in_the_languages_of_the_options(run, tmp_path):
    (tmp_path / "terms.tbx").write_text(TBX)
    command = ["translate", "a cat", "--glossary", "terms.tbx"]
    assert run(*command)[ERR] == [
        "error: terms.tbx: it is not clear which texts are translations: the languages of the file are en, "
        "de, fr: give --source-language and --target-language"
    ]
    (tmp_path / "terms.tbx").write_text(TBX.replace("fr", "en-GB").replace("chat", "cat"))
    assert "cat" in run(*command, "--source-language", "de")[OUT]
    assert "Katze" in run(*command, "--source-language", "en")[OUT]


def test_a_wrong_glossary_is_one_line_and_no_output(run, tmp_path):
    (tmp_path / "in.txt").write_text("a cat\n")
    (tmp_path / "wrong.tsv").write_text("cat Katze\n")
    for arguments in (["a cat"], ["--input", "in.txt", "--output", "out.txt"]):
        code, out, [line] = run("translate", *arguments, "--glossary", "wrong.tsv")
        assert (code, out) == (1, "")
        assert line.startswith("error: wrong.tsv: line 1: a term, a tab and its translation are expected")
    assert not (tmp_path / "out.txt").exists()


def test_names_of_columns_are_left_out_and_reported(run, tmp_path):
    (tmp_path / "named.tsv").write_text("source\ttarget\ncat\tKatze\n")
    code, out, err = run("translate", "a source cat", "--glossary", "named.tsv")
    assert (code, err) == (0, ["named.tsv: column 'source' has the terms, and 'target' their translations"])
    assert "Katze" in out
    assert "target" not in out


@pytest.mark.parametrize("flags", [[], ["--stream"], ["--output", "out.txt"]])
def test_terms_and_translations_in_the_wrong_order_are_a_warning(run, tmp_path, flags):
    (tmp_path / "in.txt").write_text("the Katze\nb\na black  DOG or cow\n")
    (tmp_path / "wrong.tsv").write_text("Katze\tcat\nHund\tblack dog\nKuh\tcow\nAmsel\tBlackbird\n")
    command = ["translate", "--input", "in.txt", "--glossary", "wrong.tsv", *flags]
    assert run(*command)[ERR] == []
    (tmp_path / "in.txt").write_text("the cat\nb\na black  DOG or cow\n")
    message = "the source has translations of terms (cat, black dog, cow), and no source has a term"
    overwrite = ["--overwrite"] * ("--output" in flags)
    assert run(*command, *overwrite)[ERR] == [
        f"warning: line 1 and 1 more: {message}: exchange them if they are in the wrong order"
    ]
    (tmp_path / "in.txt").write_text("the black cat\nb\na blackbird\n")  # two translations may be chance
    assert run(*command, *overwrite)[ERR] == []


def test_documents_and_programs_take_a_glossary(run, client, tmp_path):
    (tmp_path / "in.html").write_text("<p>a cat</p><p>a <b>black</b> dog</p>")
    command = ["--input", "in.html", "--output", "out.html", "--glossary", "terms.tsv"]
    assert run("translate", *command)[CODE] == 0
    assert "Katze" in (tmp_path / "out.html").read_text()
    assert "Hund" in (tmp_path / "out.html").read_text()
    terms = read_glossary(tmp_path / "terms.tsv")
    [result] = client.translate_many(["a cat"], options={"terms": terms})
    assert "Katze" in result.text


def test_the_plan_of_a_run_has_a_digest_of_the_terms():
    """A difference of two runs is printed, and would be a thousand terms."""

    def settings(**terms):
        return settings_of(GenerateOptions(terms=[{"source": a, "target": b} for a, b in terms.items()]))

    assert settings(a="b") != settings(a="c")
    assert len(json.dumps(settings(**{str(number): "x" for number in range(1000)}))) < 100
    assert settings_of(GenerateOptions(priority=3)) == settings() == {}


PO = 'msgid ""\nmsgstr ""\n\nmsgid "a %s"\nmsgstr ""\n\nmsgid "b"\nmsgstr ""\n'


@pytest.mark.parametrize(
    ("name", "flags", "kept"),
    [
        ("in.po", [], [True, False]),
        ("in.po", ["--no-keep-placeholders"], [False, False]),
        ("in.po", ["--no-keep-placeholders", "--keep-placeholders"], [True, False]),
        ("in.po", ["--temperature", "0.5", "--seed", "1"], [False, False]),
        ("in.properties", [], [True, False]),
        ("in.yaml.gz", [], [True, False]),
        ("in.html", [], [False, False]),
        ("in.html", ["--keep-placeholders"], [True, False]),
    ],
)
def test_documents_of_programs_keep_placeholders(run, server, tmp_path, name, flags, kept):
    (tmp_path / "in.po").write_text(PO)
    (tmp_path / "in.properties").write_text("x=a %s\ny=b\n")
    (tmp_path / "in.yaml.gz").write_bytes(gzip.compress(b"en:\n  x: a %s\n  y: b\n"))
    (tmp_path / "in.html").write_text("<p>a %s</p><p>b</p>")
    before = len(server.turns.requests)
    code, _, err = run("translate", "--input", name, "--output", f"out.{name.split('.')[1]}", *flags)
    assert (code, err) == (0, [])
    requests = sorted(server.turns.requests[before:], key=lambda request: -len(request.sources[SOURCE_IDS]))
    assert [request.terms is not None for request in requests] == kept


def test_a_text_in_which_too_many_terms_occur_fails_alone(run, tmp_path):
    """Five of them in a row ended the work, because the server named an option as their fault."""
    (tmp_path / "terms.tsv").write_text(
        "".join(f"{chr(0x4E00 + n)}\t{chr(97 + n % 26)}{n}\n" for n in range(65))
    )
    long = "".join(chr(0x4E00 + number) for number in range(65))
    flags = ["--glossary", "terms.tsv", "--long-source", "split"]
    code, out, err = run("translate", *flags, stdin="\n".join(["ab", *[long] * 6, "cd"]).encode())
    assert (code, out) == (1, "ab\n\n\n\n\n\n\ncd\n")
    assert len(err) == 6
    assert err[0] == (
        "error: line 2: INVALID_ARGUMENT: the source has 65 terms, and at most 64 can be required: send a "
        "shorter source, or fewer terms"
    )


def test_a_text_whose_placeholders_have_no_room_fails_alone(run, tmp_path):
    """In bulk work it ended the run, because the server named an option as its fault."""
    (tmp_path / "in.po").write_text(PO.replace("a %s", "a " + "%s" * 8))
    command = ["--input", "in.po", "--output", "out.po", "--max-new-tokens", "8"]
    code, _, [line] = run("translate", *command)
    assert code == 1
    assert line.startswith(
        "error: text 1 (a %s%s%s%s%s%s%s%s): INVALID_ARGUMENT: what the target has to have takes"
    )
    assert 'msgid "b"\nmsgstr "b"' in (tmp_path / "out.po").read_text()


def test_a_text_asks_for_what_it_needs_alone():
    bold = FormattedText("b")
    texts = ["a", bold, software_text("a"), software_text(bold)]

    def asked(**model):
        by_kind = options_by_kind(GenerateOptions(beam_size=2), **model)
        found = [by_kind[kind_of(text)] for text in texts]
        assert all(options.beam_size == 2 for options in found)
        return [(options.word_alignment, options.keep_placeholders) for options in found]

    every = [(False, False), (True, False), (False, True), (True, True)]
    assert asked(has_attention=True, keeps_placeholders=True) == every
    assert asked(has_attention=False, keeps_placeholders=True) == [(False, keeps) for _, keeps in every]
    assert asked(has_attention=True, keeps_placeholders=False) == [(aligns, False) for aligns, _ in every]


def test_a_text_is_sent_with_its_tags_where_no_alignment_places_them():
    text = software_text(FormattedText("a b"), "<b>a</b> b")
    plan = SimpleNamespace(options=GenerateOptions(), keeps_placeholders=True, in_flight=1, give_up_seconds=1)

    def sent(*, has_attention):
        item = _Server(None, plan, Model(name="m", has_attention=has_attention)).prepare(text)
        return item.message.sources[0].text, item.options.word_alignment

    assert sent(has_attention=True) == ("a b", True)
    assert sent(has_attention=False) == ("<b>a</b> b", False)


@pytest.mark.parametrize(
    ("target", "is_aligned", "num_warnings"),
    [("c d", True, 0), ("<b>c</b> d", False, 0), ("c d", False, 1), ("<b>c</b> d", True, 1)],
)
def test_the_placeholders_of_a_target_are_compared_with_those_that_were_sent(
    target, is_aligned, num_warnings
):
    text = software_text(FormattedText("a b"), "<b>a</b> b")
    one = Hypothesis(text=target, word_alignment=WordAlignment() if is_aligned else None)
    flaws = Flaws()
    flaws.add("a.po", 1, Translated(text, GenerateResponse(hypotheses=[one])), keeps_placeholders=True)
    assert len(list(flaws.warnings(GenerateOptions()))) == num_warnings
