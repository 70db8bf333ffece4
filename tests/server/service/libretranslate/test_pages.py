"""LibreTranslate's pages, asked by a client of LibreTranslate, unmodified."""

import asyncio
import http.client
import json
import select
import sys
import time
import urllib.error
import urllib.request
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from libretranslatepy import LibreTranslateAPI

from seq2seq_serve.bundle.manifest import Choice
from seq2seq_serve.server.errors import Overloaded
from seq2seq_serve.server.service.calls import Calls
from seq2seq_serve.server.service.libretranslate import files, languages
from seq2seq_serve.server.service.libretranslate.pages import MAX_FILE_BYTES
from seq2seq_serve.server.service.read.terms import Glossary
from tests.server.service.harness import access_file, on_a_thread, serving, with_manifest

MANY = {"en_XX": 5, "de_DE": 6, "ko_KR": 7}


@asynccontextmanager
async def serving_languages():
    """Echoes from Korean into English, from three languages into the same three, and without languages."""
    async with serving(names=("fixed", "many", "unknown")) as served:
        models, served_as = served.app.models, {model.name: model for model in served.app.models}
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
    pairs = ["de", "en", "ko"]  # with itself, as LibreTranslate lists them
    assert names == {"de": ("German", pairs), "en": ("English", pairs), "ko": ("Korean", pairs)}


def test_the_languages_are_listed_anew_when_other_models_are_served(monkeypatch):
    named, num_listed = languages.named_languages, []
    monkeypatch.setattr(languages, "named_languages", lambda names: num_listed.append(1) or named(names))
    languages.listed_languages.cache_clear()

    async def serve():
        async with serving() as served:
            url = f"http://127.0.0.1:{served.app.http.port}"
            for source, expected in (("ko", ["en", "ko"]), ("de", ["de", "en"])):
                model = with_manifest(served.model, source_language=source, target_language="en")
                served.app.models.put(model)
                for _ in range(3):
                    listed = json.loads((await asyncio.to_thread(get, f"{url}/languages"))[2])
                    assert [one["code"] for one in listed] == expected

    asyncio.run(serve())
    assert len(num_listed) == 2


@asynccontextmanager
async def serving_korean():
    """A server of one model, which reads Korean and writes English."""
    async with serving() as served:
        served.app.models.put(with_manifest(served.model, source_language="ko", target_language="en"))
        yield served


def test_a_language_that_is_only_a_target_is_listed():
    """Programs without `targets` choose both languages from the list."""
    with on_a_thread(serving_korean()) as served:
        url = f"http://127.0.0.1:{served.app.http.port}"
        listed = {one["code"]: one["targets"] for one in LibreTranslateAPI(url).languages()}
        assert listed == {"en": ["en"], "ko": ["en", "ko"]}
        with urllib.request.urlopen(f"{url}/frontend/settings", timeout=20) as answer:
            settings = json.load(answer)
        assert settings["language"]["target"] == {"code": "en", "name": "English"}
        assert (settings["keyRequired"], settings["suggestions"]) == (False, False)
        with urllib.request.urlopen(f"{url}/spec", timeout=20) as answer:
            assert json.load(answer)["info"]["title"] == "LibreTranslate"
        assert ".srt" in settings["supportedFilesFormat"]


def test_it_translates_a_text_and_keeps_its_lines(client):
    for text in ("오늘은 금요일", "ab\n\ncd. ef", "a+b&c=%", " "):
        assert client.translate(text, "ko", "en") == text


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
    assert post(url, "/translate", **fields) == (200, {"translatedText": ["ab", " ", "cd"]})
    assert post(url, "/translate", **fields | {"q": []}) == (200, {"translatedText": []})


def test_a_wrong_text_of_several_is_named(url):
    status, answer = post(url, "/translate", q=["가", "", "x" * 10_000], source="ko", target="en")
    assert (status, answer["field"]) == (400, "q")
    assert answer["error"].startswith("text 2 of q: ")


def test_the_language_of_a_text_is_detected(url, client):
    assert client.detect("오늘은 금요일 입니다")[0]["language"] == "ko"
    assert client.detect("Das ist ein ganz kurzer Text über Züge.")[0]["language"] == "de"
    assert client.detect("Ceci est un petit texte sur les trains.")[0]["language"] == "fr"  # no model has it
    assert client.detect("12:30") == [{"language": "en", "confidence": 0.0}]
    best, *others = client.detect("This is a short text about trains.")
    assert best["language"] == "en"
    assert best["confidence"] > 50 > max((one["confidence"] for one in others), default=0)
    assert all(one["confidence"] > 0 for one in others)
    status, answer = post(url, "/translate", q="This is a short text.", source="auto", target="de")
    assert (status, answer["translatedText"]) == (200, "This is a short text.")
    assert answer["detectedLanguage"]["language"] == "en"


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"source": "fr"}, "no model translates from 'fr' to 'en': there are de to en ko, "),
        ({"source": "q-" * 500}, "no model translates from 'q-q-q-q-q-q-q-q-q-q-' to 'en'"),
        # Two such tags were compared, and a token was hashed, on the event loop.
        ({"source": "q-" * 501}, "source must be a text of at most 1000 characters"),
        ({"api_key": "x" * 1001}, "api_key must be a text of at most 1000 characters"),
        ({"source": ["ko"]}, "source must be a text"),
        ({"target": ""}, "target is missing"),
        ({"q": None}, "q is missing"),
        ({"q": 5}, "q must be a text, or a list of at most 256 texts"),
        ({"file": "x"}, "file must be a file in a form"),
        ({"q": ["a"] * 257}, "q must be a text, or a list of at most 256 texts"),
        ({"format": "pdf"}, "format is 'pdf', and must be text or html"),
        ({"alternatives": "x"}, "alternatives is 'x', and must be a number from 0 on"),
        ({"alternatives": -1}, "alternatives is '-1', and must be a number from 0 on"),
        ({"alternatives": True}, "alternatives is 'True', and must be a number from 0 on"),
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
            served.app.models.put(with_manifest(served.model, choices=choices))
            yield served

    with on_a_thread(serving_nllb()) as served:
        url = f"http://127.0.0.1:{served.app.http.port}"
        client = LibreTranslateAPI(url)
        assert {one["code"]: one["name"] for one in client.languages()} == {
            "ko": "Korean",
            "en": "English",
            "zh": "Chinese (zh)",
            "zh-Hant": "Chinese (zh-Hant)",
            "ki": "Kikuyu",
        }
        assert client.detect("我们今天去看一部很长的电影")[0]["language"] == "zh"
        for source, target in (("ko", "zh-TW"), ("Korean", "zt"), ("zh", "zh-Hant"), ("zh-Hans", "english")):
            assert client.translate("ab", source, target) == "ab"
        status, answer = post(url, "/translate", q="오늘은 금요일 입니다", source="auto", target="en")
        assert (status, answer["detectedLanguage"]["language"]) == (200, "ko")


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
    assert "more than 262144 bytes" in json.load(answer)["error"]
    connection.close()


def test_without_the_package_that_detects_the_answer_says_so(url, monkeypatch):
    monkeypatch.setitem(sys.modules, "py3langid.langid", None)
    languages._identifier.cache_clear()
    status, answer = post(url, "/detect", q="a text")
    assert status == 400
    assert (
        "the server cannot detect languages: name the source, or on the server pip install" in answer["error"]
    )


def get(url: str) -> tuple[int, dict, bytes]:
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, dict(error.headers), error.read()


def send(url: str, body: bytes, content_type: str | None = None, **headers: str) -> tuple[int, dict]:
    """Sends bytes with a content type, or without any, which urllib cannot do."""
    host, _, path = url.removeprefix("http://").partition("/")
    connection = http.client.HTTPConnection(host, timeout=20)
    given = {} if content_type is None else {"Content-Type": content_type}
    connection.request("POST", f"/{path}", body, given | headers)
    answer = connection.getresponse()
    content = json.load(answer)
    connection.close()
    return answer.status, content


def multipart(*fields: tuple[str, str | bytes, str], edge: str = "edge") -> tuple[bytes, str]:
    """A form with fields, each with a name, a value, and the name of its file, which may be empty."""
    parts = b""
    for name, value, file_name in fields:
        file = f'; filename="{file_name}"' if file_name else ""
        head = f'--{edge}\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'
        parts += head.encode() + (value if isinstance(value, bytes) else value.encode()) + b"\r\n"
    return parts + f"--{edge}--\r\n".encode(), f"multipart/form-data; boundary={edge}"


FORM = "application/x-www-form-urlencoded"
PAIR = b"source=ko&target=en"


@pytest.mark.parametrize(
    ("query", "body", "content_type"),
    [
        ("q=ab&source=ko&target=en", b"", None),
        ("q=ab&source=ko&target=en", b"", "application/json"),
        ("source=ko&target=en&api_key=", b"q=ab", FORM),
        ("target=de", b"q=ab&" + PAIR, FORM),  # the body's comes first
        ("", b"q=ab&format=&alternatives=&" + PAIR, None),
        ("", b'{"q": "ab", "source": "ko", "target": "en"}', None),
        ("", b'\n {"q": "ab", "source": "ko", "target": "en"}', FORM),  # `curl -d`
        ("", b'{"q": "ab", "source": "ko", "target": "en"}', "text/plain;charset=UTF-8"),  # `fetch`
        (
            "",
            b'{"q": "ab", "source": "ko", "target": "en", "api_key": null, "format": ""}',
            "application/json",
        ),
        ("", *multipart(("q", "ab", ""), ("source", "ko", ""), ("target", "en", ""), ("api_key", "", ""))),
        ("", *multipart(("q", "ab", ""), ("source", "ko", ""), ("target", "en", ""), edge="json")),
    ],
)
def test_fields_come_in_every_way_in_which_programs_send_them(url, query, body, content_type):
    assert send(f"{url}/translate?{query}", body, content_type) == (200, {"translatedText": "ab"})


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"q=ab&q=cd&" + PAIR, {"translatedText": ["ab", "cd"]}),
        (b"q=a%0D%0Ab&" + PAIR, {"translatedText": "a\nb"}),  # as browsers write line breaks in forms
        (b"q=ab&source=ko&source=ko&target=en", {"translatedText": "ab"}),
    ],
)
def test_several_texts_of_a_form_are_a_list(url, body, expected):
    """Only the last one was translated."""
    assert send(f"{url}/translate", body, FORM) == (200, expected)


def test_several_values_of_another_field_are_refused(url):
    status, answer = send(f"{url}/translate", b"q=ab&source=ko&source=en&target=en", FORM)
    assert status == 400
    assert "source has several values" in answer["error"]


def test_a_form_without_its_content_type_has_the_room_of_one_with_it(url):
    status, answer = send(f"{url}/translate", b"q=" + b"%41" * 100_000, None)
    assert status == 413
    assert "send JSON" in answer["error"]


@pytest.mark.parametrize("source", ["auto", "", None, "missing"])
def test_a_source_that_is_not_named_is_detected(url, source):
    fields = {"q": "오늘은 금요일 입니다", "source": source, "target": "en"}
    if source == "missing":
        del fields["source"]
    status, answer = post(url, "/translate", **fields)
    assert (status, answer["translatedText"]) == (200, "오늘은 금요일 입니다")
    assert answer["detectedLanguage"]["language"] == "ko"


def metric(served) -> float:
    return sum(served.metric("seq2seq_generated_tokens_total", model_name=name) for name in served.runners)


@pytest.mark.parametrize(
    ("source", "target"), [("en", "en"), ("en", "en-US"), ("English", "en"), ("ko", "ko_KR")]
)
def test_the_same_language_twice_gives_the_text_back(served, url, source, target):
    before = len(served.turns.requests)
    fields = {"q": ["a\n b ", "c"], "source": source, "target": target, "alternatives": 2}
    status, answer = post(url, "/translate", **fields)
    assert (status, answer) == (200, {"translatedText": ["a\n b ", "c"], "alternatives": [[], []]})
    assert len(served.turns.requests) == before
    assert post(url, "/translate", q="a", source="fr", target="fr")[0] == 400  # no model knows it


def test_texts_without_words_stay_as_they_are(served, url):
    """A model makes words of them."""
    before = len(served.turns.requests)
    fields = {"q": ["🙂", " ", "!", ""], "source": "auto", "target": "en"}
    unknown = {"language": "en", "confidence": 0.0}
    expected = {"translatedText": ["🙂", " ", "!", ""], "detectedLanguage": [unknown] * 4}
    assert post(url, "/translate", **fields) == (200, expected)
    assert len(served.turns.requests) == before


def test_each_text_of_a_list_has_its_language(served, url):
    """All had that of their joined text."""
    texts = [
        "오늘은 금요일 입니다",
        "This is a text about trains.",
        "Das ist ein Text über Züge.",
        "C'est la vie, mes amis.",
    ]
    before = len(served.turns.requests)
    status, answer = post(url, "/translate", q=texts, source="auto", target="en")
    assert (status, answer["translatedText"]) == (200, texts)  # the models echo
    assert [one["language"] for one in answer["detectedLanguage"]] == ["ko", "en", "de", "fr"]
    sent = len(served.turns.requests) - before
    assert sent == 2  # English is the target, and no model reads French


def test_a_text_whose_language_is_not_clear_is_read_as_its_neighbours(url):
    status, answer = post(
        url, "/translate", q=["Das ist ein Text über Züge.", "OK"], source="auto", target="en"
    )
    assert status == 200
    assert [one["language"] for one in answer["detectedLanguage"]] == ["de", "de"]


def test_a_language_that_no_model_reads_is_never_translated():
    """English for a model of Korean was read as Korean, with a confidence of 0.0."""
    with on_a_thread(serving_korean()) as served:
        url = f"http://127.0.0.1:{served.app.http.port}"
        for target in ("en", "de"):
            status, answer = post(url, "/translate", q="C'est un petit texte sur les trains.", target=target)
            assert status == 400
            assert f"no model translates from 'fr' to '{target}': there are ko to en" in answer["error"]
        status, answer = post(url, "/translate", q="OK", target="en")
        assert status == 400
        assert "the language of the text is not clear: " in answer["error"]
        text = "This is a short text about trains."
        assert post(url, "/translate", q=text, target="en")[1]["translatedText"] == text
        assert post(url, "/translate", q=text, target="ko")[0] == 400
        assert not served.turns.requests


def test_alternatives_are_further_translations(url):
    fields = {"source": "ko", "target": "en"}
    status, answer = post(url, "/translate", q="ab", alternatives=3, **fields)
    assert (status, answer["translatedText"]) == (200, "ab")
    others = answer["alternatives"]
    assert others
    assert "ab" not in others
    assert len(set(others)) == len(others) <= 3
    status, answer = post(url, "/translate", q=["ab", "cd.\n ef"], alternatives="2", **fields)
    assert answer["translatedText"] == ["ab", "cd.\n ef"]
    assert [len(one) for one in answer["alternatives"]] == [1, 1]
    assert "alternatives" not in post(url, "/translate", q="ab", alternatives=0, **fields)[1]


HTML = (
    '<p>ab <b class="x">cd</b> &amp; <a href="https://x.example/?a=1&amp;b=2">ef</a><br>gh</p><pre>ij</pre>'
)


def test_html_keeps_its_tags(served, url):
    before = len(served.turns.requests)
    fields = {"source": "ko", "target": "en", "format": "html"}
    assert post(url, "/translate", q=HTML, **fields) == (200, {"translatedText": HTML})
    sources = [request.sources["source_ids"] for request in served.turns.requests[before:]]
    assert len(sources) == 2  # two segments, and none of the element that is not translated
    texts = ["오늘은 금요일", "<p></p>", '<meta charset="euc-kr">오늘', "a < b", '<html lang="{}">오늘']
    answer = {"translatedText": [text.format("en") for text in texts]}
    assert post(url, "/translate", q=[text.format("ko") for text in texts], **fields) == (200, answer)


def test_the_language_of_html_is_that_of_its_texts(url):
    tags = '<p class="this is the class of a paragraph with a long name">{}</p>'
    fields = {"q": tags.format("오늘은 금요일 입니다"), "target": "en", "format": "html"}
    assert post(url, "/translate", **fields)[1]["detectedLanguage"]["language"] == "ko"


def test_html_with_too_many_tags_is_refused(url):
    status, answer = post(url, "/translate", q="<a>" * 30_000, source="ko", target="en", format="html")
    assert status == 400
    assert "the texts have 30000 tags and lines, and at most 20000 are read" in answer["error"]


SRT = b"1\n00:00:01,000 --> 00:00:02,000\nab <i>cd</i>\n\n2\n00:00:03,000 --> 00:00:04,000\nef\n"


def translate_file(url, name, content, **fields):
    rest = [(field, value, "") for field, value in ({"source": "ko", "target": "en"} | fields).items()]
    return send(f"{url}/translate_file", *multipart(("file", content, name), *rest))


@pytest.mark.parametrize(
    ("name", "content"),
    [("film.srt", SRT), ("한 글.TXT", "오늘\r\n\r\n--\n금요일".encode()), ("page.html", HTML.encode())],
)
def test_a_file_is_translated_and_fetched(served, url, name, content):
    before = len(served.turns.requests)
    status, answer = translate_file(url, name, content)
    assert status == 200
    assert len(served.turns.requests) == before + 2
    fetched = answer["translatedFileUrl"]
    assert fetched.startswith(f"{url}/download_file/")
    status, headers, written = get(fetched)
    assert (status, written) == (200, content)
    assert headers["content-disposition"].startswith("attachment; filename*=UTF-8''")
    assert headers["content-disposition"].endswith(f"_en{name[name.rindex('.') :]}")
    assert headers["content-type"] == "application/octet-stream"
    assert get(fetched[:-30])[0] == 404


@pytest.mark.parametrize(("name", "is_kept"), [("a.properties", True), ("a.txt", False)])
def test_placeholders_are_kept_in_documents_of_programs(served, url, name, is_kept):
    """They were not, while the command keeps them there."""
    before = len(served.turns.requests)
    assert translate_file(url, name, "a = 오늘 {name}".encode())[0] == 200
    [request] = served.turns.requests[before:]
    assert (request.terms is not None) == is_kept


@pytest.mark.parametrize(("name", "keep"), [("a.properties", "false"), ("a.txt", "true")])
def test_a_request_says_whether_the_placeholders_of_a_file_are_kept(served, url, name, keep):
    before = len(served.turns.requests)
    content = "a = 오늘 {name}".encode()
    assert translate_file(url, name, content, keep_placeholders=keep)[0] == 200
    [request] = served.turns.requests[before:]
    assert (request.terms is not None) == (keep == "true")


@pytest.mark.parametrize("has_attention", [True, False])
def test_tags_in_strings_of_programs_are_placeholders_only_without_attention(has_attention):
    with on_a_thread(serving_languages()) as served:
        model = served.app.models.get("fixed")
        model.sizing = replace(model.sizing, num_hops=int(has_attention))
        content = '{"a": "<b>오늘</b> ab"}'.encode()
        status, answer = translate_file(f"http://127.0.0.1:{served.app.http.port}", "a.json", content)
        [request] = served.turns.requests
        assert (request.terms is None) == has_attention
        written = get(answer["translatedFileUrl"])[2]
        assert status == 200
        assert written == content if has_attention else b"<b>" in written


@pytest.mark.parametrize(("language", "number"), [("ko-KR", 2), ("fr", 1)])
def test_elements_in_other_languages_stay_in_html_and_files(served, url, language, number):
    """They were translated, while the command keeps them."""
    page = f'<p>오늘</p><p lang="{language}">bon jour</p>'
    before = len(served.turns.requests)
    assert post(url, "/translate", q=page, format="html", source="ko", target="en")[0] == 200
    assert len(served.turns.requests) == before + number
    assert translate_file(url, "a.html", page.encode())[0] == 200
    assert len(served.turns.requests) == before + 2 * number


def test_a_file_of_another_kind_than_its_name_says_is_refused(url):
    """Faults of a document that its reader finds later were answered as errors of the server."""
    for name, content in (("a.json", b'{"a": '), ("a.po", b"nothing"), ("a.xlf", b"<a/>")):
        status, answer = translate_file(url, name, content)
        assert status == 400
        assert answer["error"].startswith("the file ")


def test_a_file_in_other_languages_than_the_fields_is_refused(url):
    unit = "<trans-unit><source>오늘은</source></trans-unit>"
    for target, expected in (("de", 400), ("en-GB", 200)):
        content = f'<xliff version="1.2"><file target-language="{target}">{unit}</file></xliff>'
        status, answer = translate_file(url, "a.xlf", content.encode())
        assert status == expected
    assert status == 200
    assert "error" not in answer


def test_the_url_of_a_file_is_that_of_the_proxy(url):
    form = multipart(("file", b"ab", "a.txt"), ("source", "ko", ""), ("target", "en", ""))
    _, answer = send(f"{url}/translate_file", *form, **{"X-Forwarded-Proto": "https", "Host": "localhost"})
    assert answer["translatedFileUrl"].startswith("https://localhost/download_file/")


def test_the_language_of_a_file_is_detected(url):
    assert translate_file(url, "a.txt", "오늘은 금요일 입니다".encode(), source="auto")[0] == 200
    status, answer = translate_file(url, "a.txt", b"This is a text.\n", source="auto")
    assert get(answer["translatedFileUrl"])[2] == b"This is a text.\n"
    status, answer = translate_file(url, "a.txt", b"C'est un petit texte sur les trains.", source="auto")
    assert (status, answer["error"][:36]) == (400, "fr is not supported: no model transl")


def test_a_segment_that_the_model_refuses_stays_as_it_is(url):
    content = b"ab\n" + b"x" * 5000 + b"\ncd"
    assert get(translate_file(url, "a.txt", content)[1]["translatedFileUrl"])[2] == content
    status, answer = translate_file(url, "a.txt", b"x" * 5000)
    assert (status, answer["field"]) == (400, "file")


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.pdf", b"x", "the file is 'a.pdf' with 1 bytes"),
        ("", b"x", "the file is '' with 1 bytes"),
        ("", b"", "file is missing: send one, as multipart/form-data"),
        ("a.txt", b"", "the file 'a.txt' is empty"),
        ("a.docx", b"x", "the file is not a Word document"),
        ("a.txt", b"\xff", "the file is not UTF-8"),
        ("a.html", b"<" * 60_000, "at most 50000 are read"),
    ],
)
def test_a_wrong_file_is_refused(url, name, content, problem):
    status, answer = translate_file(url, name, content)
    assert status == 400
    assert problem in answer["error"]


def test_files_are_kept_for_a_time_and_share_their_room(monkeypatch):
    """Short files took next to no room, so their number was not bounded."""
    monkeypatch.setattr(files, "_MAX_KEPT_BYTES", 2 * files._LEAST_BYTES)

    async def run():
        kept = files.TranslatedFiles()

        def status(path):
            return kept.answer(path.rpartition("/")[2]).status_code

        one, two = kept.add("a", "x.txt", bytes(5)), kept.add("a", "y.txt", bytes(5))
        with pytest.raises(Overloaded, match="32768 bytes are kept"):
            kept.add("a", "z.txt", bytes(5))
        assert status(two) == 200
        three = kept.add("a", "z.txt", bytes(5))  # in place of the one that is fetched
        assert [status(path) for path in (one, two, three)] == [200, 404, 200]
        monkeypatch.setattr(files, "_KEPT_SECONDS", 0.0)
        last = kept.add("a", "x.txt", bytes(5))
        async with asyncio.timeout(20):
            while status(last) == 200:
                await asyncio.sleep(0)

    asyncio.run(run())


@asynccontextmanager
async def serving_tokens(path):
    """A server of one model, from Korean into English, whose callers have tokens."""
    async with serving(access_file=path) as served:
        served.app.models.put(with_manifest(served.model, source_language="ko", target_language="en"))
        yield served


def test_a_key_is_the_callers_token(tmp_path):
    """All clients of LibreTranslate send it so, and none could use a server with tokens."""
    path = access_file(tmp_path, ("shop", "secret", "predict"), ("boss", "other", "admin"))
    with on_a_thread(serving_tokens(path)) as served:
        url = f"http://127.0.0.1:{served.app.http.port}"
        fields = {"q": "ab", "source": "ko", "target": "en"}
        assert LibreTranslateAPI(url, "secret").translate("ab", "ko", "en") == "ab"
        assert post(url, "/translate", api_key="secret", **fields)[0] == 200
        assert post(url, "/translate?api_key=secret", **fields)[0] == 200
        assert send(f"{url}/translate", b"q=ab&" + PAIR, FORM, Authorization="Bearer secret")[0] == 200
        _, answer = translate_file(url, "a.txt", b"ab", api_key="secret")
        assert get(answer["translatedFileUrl"])[2] == b"ab"
        assert {request.caller for request in served.turns.requests} == {"shop"}
        assert served.metric("seq2seq_requests_total", code="OK", method="ModelInfer") == 5
        for key, expected in (("wrong", 401), ("other", 403), ("", 401), (None, 401)):
            assert post(url, "/translate", api_key=key, **fields)[0] == expected
            assert post(url, "/detect", q="ab", api_key=key)[0] == expected
            assert translate_file(url, "a.txt", b"ab", api_key=key or "")[0] == expected
        # Programs compare the beginnings.
        assert post(url, "/translate", api_key="wrong", **fields)[1]["error"].startswith("Invalid API key: ")
        assert post(url, "/translate", **fields)[1]["error"].startswith("Please contact the server operator")
        # A token in the header that is known comes before the body.
        wrong = {"Authorization": "Bearer other"}
        assert send(f"{url}/translate?api_key=secret", b"", FORM, **wrong)[0] == 403
        # Its body may be as long as that of others.
        large = {"q": "ab " * 100_000, "source": "en", "target": "en"}
        answer = post(url, "/translate", api_key="secret", **large)
        assert answer == (200, {"translatedText": large["q"]})
        assert post(url, "/translate", api_key="wrong", **large)[0] == 401
        assert translate_file(url, "a.txt", b" " * 1_100_000, api_key="secret")[0] == 200
        assert LibreTranslateAPI(url).languages()  # no program sends its key here
        assert json.loads(get(f"{url}/frontend/settings")[2])["keyRequired"]


def test_callers_whose_keys_have_not_come_share_a_bound(tmp_path):
    """It holds for long bodies: they are read before their callers are known."""
    long = {"q": "ab " * 100_000, "source": "en", "target": "en"}
    with on_a_thread(serving_tokens(access_file(tmp_path, ("shop", "secret", "predict")))) as served:
        port = served.app.http.port
        url = f"http://127.0.0.1:{port}"
        begun = [http.client.HTTPConnection("127.0.0.1", port) for _ in range(4)]
        for connection in begun:
            headers = {
                "Content-Length": str(MAX_FILE_BYTES),
                "Content-Type": "multipart/form-data; boundary=b",
            }
            connection.request("POST", "/translate_file", b"--b", headers)
        answered, _, _ = select.select([connection.sock for connection in begun], [], [], 60)
        refused = next(connection for connection in begun if connection.sock in answered)
        refusal = refused.getresponse()
        assert refusal.status == 429
        assert "a key neither in header nor query" in json.loads(refusal.read())["error"]
        assert post(url, "/translate", api_key="secret", **long)[0] == 429
        assert post(url, "/translate?api_key=secret", **long)[0] == 200
        assert post(url, "/translate", api_key="secret", **long | {"q": "ab"})[0] == 200
        for connection in begun:
            connection.close()
        while (status := post(url, "/translate", api_key="secret", **long)[0]) == 429:
            time.sleep(0.05)
        assert status == 200


@pytest.mark.parametrize("terms", [{"cat": "Katze"}, "cat=Katze", [{"source": "Cat", "target": "Katze"}]])
def test_it_translates_terms_as_a_request_says(url, terms):
    status, answer = post(url, "/translate", q=["a cat", "a dog"], source="ko", target="en", terms=terms)
    assert status == 200
    first, second = answer["translatedText"]
    assert "Katze" in first
    assert second == "a dog"


def test_a_term_of_html_is_whole(url):
    """Its second word had the formatting of the text after it."""
    fields = {"format": "html", "source": "ko", "target": "en", "terms": {"c": "K L"}}
    status, answer = post(url, "/translate", q="a <b>c</b> d e", **fields)
    assert (status, answer["translatedText"]) == (200, "a <b>K L</b> e")


@pytest.mark.parametrize(("keep", "is_kept"), [(True, True), ("true", True), (False, False), ("", False)])
@pytest.mark.parametrize("form", ["text", "html"])
def test_it_keeps_placeholders_if_a_request_says_so(served, url, keep, is_kept, form):
    before = len(served.turns.requests)
    fields = {"q": "a {cat}", "format": form, "source": "ko", "target": "en", "keep_placeholders": keep}
    status, answer = post(url, "/translate", **fields)
    assert status == 200
    assert " {cat}" in answer["translatedText"]
    [request] = served.turns.requests[before:]
    assert (request.terms is not None) == is_kept


@pytest.mark.parametrize("keep", ["maybe", 2, ["true"]])
def test_it_refuses_what_does_not_say_whether_placeholders_are_kept(url, keep):
    fields = {"q": "a {cat}", "source": "ko", "target": "en", "keep_placeholders": keep}
    status, answer = post(url, "/translate", **fields)
    assert status == 400
    assert answer["error"].startswith("keep_placeholders must be")


def test_the_glossary_of_a_request_is_read_and_counted_once_for_texts_of_all_kinds(served, url, monkeypatch):
    """It was counted for texts with formatting and for others."""
    read, init, hold = [], Glossary.__init__, Calls.hold
    counted = []

    def note(self, *arguments):
        read.append(self)
        init(self, *arguments)

    def count(self, call, num_bytes):
        counted.append(num_bytes)
        hold(self, call, num_bytes)

    monkeypatch.setattr(Glossary, "__init__", note)
    monkeypatch.setattr(Calls, "hold", count)
    fields = {"source": "ko", "target": "en", "format": "html", "terms": {f"only here {'x' * 200}": "a"}}
    for _ in range(2):  # the second time, the options of both kinds are known
        counted.clear()
        status, _ = post(url, "/translate", q=["<p>a</p><p>b <b>here</b></p>"], **fields)
        assert status == 200
        [glossary] = read
        assert sum(num_bytes >= glossary.num_bytes for num_bytes in counted) == 1


@pytest.mark.parametrize("terms", ["cat", {"cat": 5}, 7, [{"from": "cat"}]])
def test_it_refuses_what_are_not_terms(url, terms):
    status, answer = post(url, "/translate", q="a cat", source="ko", target="en", terms=terms)
    assert status == 400
    assert answer["error"].startswith("terms must be a term such as machine=Maschine")
