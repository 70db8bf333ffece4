"""LibreTranslate's pages, asked by a client of LibreTranslate, unmodified."""

import http.client
import json
import sys
import urllib.error
import urllib.request
from contextlib import asynccontextmanager

import pytest
from libretranslatepy import LibreTranslateAPI

from seq2seq_serve.bundle.manifest import Choice
from seq2seq_serve.server.service import libretranslate
from tests.server.service.harness import on_a_thread, serving, with_manifest

MANY = {"en_XX": 5, "de_DE": 6, "ko_KR": 7}


@asynccontextmanager
async def serving_languages():
    """Echoes from Korean into English, from three languages into the same three, and without languages."""
    async with serving(names=("fixed", "many", "unknown")) as served:
        models, served_as = served.app._models, {model.name: model for model in served.app._models}
        models.put(with_manifest(served_as["fixed"], source_language="ko", target_language="en"))
        choice = Choice(MANY, "")
        choices = {"source_language": choice, "target_language": choice}
        models.put(with_manifest(served_as["many"], choices=choices))
        yield served


@pytest.fixture(scope="module")
def served():
    with on_a_thread(serving_languages()) as served:
        yield served


@pytest.fixture(scope="module")
def url(served):
    return f"http://127.0.0.1:{served.app.http.port}"


@pytest.fixture(scope="module")
def client(url):
    return LibreTranslateAPI(url)


def post(url: str, path: str, **fields) -> tuple[int, dict]:
    body = json.dumps(fields).encode()
    request = urllib.request.Request(url + path, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_it_lists_the_languages_of_the_models(client):
    names = {one["code"]: (one["name"], one["targets"]) for one in client.languages()}
    assert names == {
        "ko": ("Korean (ko)", ["en"]),
        "de_DE": ("German", ["en_XX", "ko_KR"]),
        "en_XX": ("English", ["de_DE", "ko_KR"]),
        "ko_KR": ("Korean (ko_KR)", ["de_DE", "en_XX"]),
    }


def test_it_translates_a_text_and_keeps_its_lines(client):
    for text in ("오늘은 금요일", "ab\n\ncd. ef", "a+b&c=%", " "):
        assert client.translate(text, "ko", "en") == ("" if text == " " else text)


def test_the_first_model_that_has_both_languages_translates(served, client):
    assert client.translate("ab", "en", "de") == "ab"
    seen = []

    def metric(name):
        return served.metric("seq2seq_requests_total", code="OK", method="ModelInfer", model_name=name)

    for source, target in (("ko", "en"), ("en", "ko"), ("de", "en")):
        before = metric("fixed"), metric("many")
        client.translate("ab", source, target)
        seen.append((metric("fixed") - before[0], metric("many") - before[1]))
    assert seen == [(1, 0), (0, 1), (0, 1)]


def test_many_texts_are_translated_at_once(url):
    fields = {"q": ["ab", " ", "cd"], "source": "ko", "target": "en", "format": "text"}
    assert post(url, "/translate", **fields) == (200, {"translatedText": ["ab", "", "cd"]})
    assert post(url, "/translate", **fields | {"q": []}) == (200, {"translatedText": []})


def test_a_wrong_text_of_several_is_named(url):
    status, answer = post(url, "/translate", q=["가", "", "x" * 10_000], source="ko", target="en")
    assert (status, answer["field"]) == (400, "q")
    assert answer["error"].startswith("text 2 of q: ")


def test_the_language_of_a_text_is_detected(url, client):
    assert client.detect("오늘은 금요일 입니다")[0]["language"] == "ko"  # of the first model that has it
    assert client.detect("Das ist ein ganz kurzer Text über Züge.")[0]["language"] == "de_DE"
    best, *others = client.detect("This is a short text about trains.")
    assert best["language"] == "en_XX"
    assert best["confidence"] > 50 > max(one["confidence"] for one in others)
    status, answer = post(url, "/translate", q="This is a short text.", source="auto", target="de")
    assert (status, answer["translatedText"]) == (200, "This is a short text.")
    assert answer["detectedLanguage"]["language"] == "en_XX"


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"source": "fr"}, "no model translates from 'fr' to 'en': there are de_DE to en_XX ko_KR, "),
        ({"source": "q-" * 1_000_000}, "no model translates from 'q-q-q-q-q-q-q-q-q-q-' to 'en'"),
        ({"source": ["ko"]}, "source must be the code of a language"),
        ({"target": ""}, "no model translates from 'ko' to ''"),
        ({"q": None}, "q must be a text, or a list of at most 256 texts"),
        ({"q": ["a"] * 257}, "q must be a text, or a list of at most 256 texts"),
        ({"format": "html"}, "format is 'html', and the server supports only text"),
        ({"alternatives": 3}, "alternatives is '3', and the server supports only 0"),
        ({"glossary": "x"}, "there is no field 'glossary'"),
        ({"q": "a" * 5000}, "the text has 5000 bytes"),
    ],
)
def test_a_wrong_request_is_an_error(url, fields, match):
    status, answer = post(url, "/translate", **{"q": "a", "source": "ko", "target": "en"} | fields)
    assert status == 400
    assert match in answer["error"]


def test_the_codes_of_nllb_are_found_by_those_of_other_programs():
    """`auto` found no language, and `ko` no model."""
    codes = ("kor_Hang", "eng_Latn", "zho_Hans", "zho_Hant", "kik_Latn")

    @asynccontextmanager
    async def serving_nllb():
        async with serving() as served:
            choice = Choice({code: 5 + number for number, code in enumerate(codes)}, "")
            choices = {"source_language": choice, "target_language": choice}
            served.app._models.put(with_manifest(served.model, choices=choices))
            yield served

    with on_a_thread(serving_nllb()) as served:
        url = f"http://127.0.0.1:{served.app.http.port}"
        client = LibreTranslateAPI(url)
        assert {one["code"]: one["name"] for one in client.languages()} == {
            "kor_Hang": "Korean",
            "eng_Latn": "English",
            "zho_Hans": "Chinese (zho_Hans)",
            "zho_Hant": "Chinese (zho_Hant)",
            "kik_Latn": "Kikuyu",
        }
        assert client.detect("오늘은 금요일 입니다")[0]["language"] == "kor_Hang"
        assert client.detect("我们今天去看一部很长的电影")[0]["language"] == "zho_Hans"
        assert client.translate("ab", "ko", "zh-TW") == "ab"
        status, answer = post(url, "/translate", q="오늘은 금요일 입니다", source="auto", target="en")
        assert (status, answer["detectedLanguage"]["language"]) == (200, "kor_Hang")


def test_a_form_that_is_not_utf_8_is_refused(url):
    for body in (b"q=%FF&source=ko&target=en", b"q=\xff&source=ko&target=en"):
        with pytest.raises(urllib.error.HTTPError, match="400") as caught:
            urllib.request.urlopen(f"{url}/translate", body, timeout=20)
        with caught.value as error:
            assert json.load(error) == {
                "error": "q is not UTF-8",
                "code": "INVALID_ARGUMENT",
                "reason": "INVALID_REQUEST",
                "field": "q",
            }


def test_a_large_form_is_refused_before_it_is_read(url):
    """One of 3.9 MB took two seconds and 320 MiB; as JSON, a text of this length takes neither."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=20)
    connection.putrequest("POST", "/translate")
    connection.putheader("Content-Type", "Application/X-WWW-Form-Urlencoded; charset=utf-8")
    connection.putheader("Content-Length", "3900000")
    connection.endheaders()
    answer = connection.getresponse()
    assert answer.status == 413
    assert "more than 262144 bytes: send less" in json.load(answer)["error"]
    connection.close()


def test_without_the_package_that_detects_the_answer_says_so(url, monkeypatch):
    monkeypatch.setitem(sys.modules, "py3langid.langid", None)
    libretranslate._identifier.cache_clear()
    status, answer = post(url, "/detect", q="a text")
    assert status == 400
    assert (
        "the server cannot detect languages: name the source, or on the server pip install" in answer["error"]
    )
