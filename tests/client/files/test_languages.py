"""Documents that say which languages they have: what other ones are refused, and what stays."""

import pytest

from seq2seq_serve.client.__main__ import main
from seq2seq_serve.client.files.documents import DocumentTranslation, read_document
from seq2seq_serve.client.files.formats import split_into_shards
from seq2seq_serve.documents.segments import WrongFile
from tests.documents.test_bilingual import QT, TMX, XLIFF, XLIFF2
from tests.server.service.harness import serving_on_a_thread, with_manifest

SOURCE = "its source language is en, and that of the translation is"
TARGET = "its target language is de"


@pytest.mark.parametrize(
    ("name", "content", "languages", "problem"),
    [
        ("a.xlf", XLIFF, ("en", "de"), ""),
        ("a.xlf", XLIFF, ("en-US", "de-AT"), ""),
        ("a.xlf", XLIFF, ("", ""), ""),
        ("a.xlf", XLIFF, ("ko", ""), f"{SOURCE} ko: give --source-language and"),
        (
            "a.xlf",
            XLIFF,
            ("en", "fr"),
            f"{TARGET}, and that of the translation is fr: give --source-language",
        ),
        ("a.xlf", XLIFF.replace('target-language="de"', ""), ("en", "fr"), ""),
        ("a.xlf", XLIFF2, ("en", "fr"), TARGET),
        (
            "a.xliff",
            XLIFF2.replace("<", "<x:").replace("<x:/", "</x:").replace("xmlns", "xmlns:x"),
            ("ko", ""),
            SOURCE,
        ),
        ("a.ts", QT, ("en", "fr"), "its target language is de_DE"),
        ("a.ts", QT, ("ko", "de"), ""),
        ("a.tmx", TMX, ("en", "de"), ""),
        ("a.tmx", TMX, ("en", "fr"), TARGET),
    ],
)
def test_a_document_in_other_languages_is_refused_before_a_text_is_sent(
    tmp_path, name, content, languages, problem
):
    """The file went on to say that its new texts were in the other language."""
    path = tmp_path / name
    path.write_text(content)
    if not problem:
        assert len(split_into_shards(path, "x", 9, languages)) == 1
        return
    with pytest.raises(WrongFile) as caught:
        split_into_shards(path, "x", 9, languages)
    assert caught.value.strerror.startswith(problem)


def test_an_element_of_a_page_in_another_language_stays(tmp_path):
    path = tmp_path / "a.html"
    path.write_text(
        '<html lang=en><body lang="de"><p>하나 <i lang=en>one</i> 둘</p>'
        '<div lang="fr"><p title=x>deux</p></div>'
        '<p lang="ko-KR">셋 <b lang="">넷</b></p>'
    )
    languages = ("ko", "en")
    assert [segment.text for segment in read_document(path, languages).segments] == ["하나 one 둘", "셋 넷"]
    assert len(read_document(path).segments) == 4
    [shard] = split_into_shards(path, "x", 9, languages)
    assert shard.num_lines == 2
    document = DocumentTranslation(path, 2, languages)
    assert [text for texts in document.texts() for text in texts] == ["하나 one 둘", "셋 넷"]
    assert document.content() == path.read_bytes()


@pytest.mark.parametrize(
    ("flag", "given", "own"),
    [
        ("--target-language", "en-GB", ""),
        ("--source-language", "Korean", ""),
        ("--target-language", "de", "en"),
    ],
)
def test_another_language_than_the_models_is_refused_before_a_text_is_sent(
    flag, given, own, capsys, tmp_path
):
    """The own target language was refused, and another one with each text until five had failed."""
    with serving_on_a_thread() as served:
        served.app.models.put(with_manifest(served.model, source_language="ko", target_language="en"))
        (tmp_path / "in.txt").write_text("a\nb\n")
        before = len(served.turns.requests)
        code = main(["translate", "--address", served.address, "--input", f"{tmp_path}/in.txt", flag, given])
        assert len(served.turns.requests) - before == (0 if own else 2)
    message = f"error: INVALID_ARGUMENT: {flag} is '{given}', and the model has only {own}: leave it out"
    out, err = capsys.readouterr()
    assert (code, out) == ((1, "") if own else (0, "a\nb\n"))
    assert err.startswith(message) if own else not err
