"""LibreTranslate's clients, unmodified, and what other programs send, against a trained model."""

import json
import shutil
import subprocess
import urllib.request
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlencode

import pytest
from libretranslatepy import LibreTranslateAPI

from tests.server.service.harness import access_file, on_a_thread, serving_bundles, with_manifest
from tests.server.service.libretranslate.test_pages import FORM, get, multipart, send

pytestmark = pytest.mark.slow  # trains a model; the pages have quick tests of their own

KEY = "secret"
_INSTALL_SECONDS, _RUN_SECONDS = 120, 60


@asynccontextmanager
async def serving_numbers(bundle, **changes):
    async with serving_bundles(bundle, **changes) as served:
        served.app.models.put(with_manifest(served.model, source_language="ko", target_language="en"))
        yield served


@pytest.fixture(scope="module")
def url(trained_run):
    """A server whose model translates number words."""
    with on_a_thread(serving_numbers(trained_run.bundle)) as served:
        yield f"http://127.0.0.1:{served.app.http.port}"


@pytest.fixture(scope="module")
def url_with_key(trained_run, tmp_path_factory):
    path = access_file(tmp_path_factory.mktemp("access"), ("shop", KEY, "predict"))
    with on_a_thread(serving_numbers(trained_run.bundle, access_file=path)) as served:
        yield f"http://127.0.0.1:{served.app.http.port}"


def test_the_client_for_python(url, url_with_key):
    client = LibreTranslateAPI(url)
    assert client.translate("하나 둘", "ko", "en") == "one two"
    assert client.translate("하나 둘", "auto", "en") == "one two"
    assert client.detect("하나 둘")[0]["language"] == "ko"
    targets = {one["code"]: one["targets"] for one in client.languages()}
    assert targets == {"en": ["en"], "ko": ["en", "ko"]}
    with_key = LibreTranslateAPI(url_with_key, KEY)
    assert with_key.translate("셋", "ko", "en") == "three"
    assert with_key.detect("하나 둘")[0]["language"] == "ko"
    assert with_key.languages()
    with pytest.raises(urllib.error.HTTPError, match="401"):
        LibreTranslateAPI(url_with_key, "wrong").translate("셋", "ko", "en")


@dataclass(frozen=True)
class Sent:
    """A request as a program sends it, and what the program takes from the answer.

    Attributes:
        program: The program.
        path: The page, with the query.
        body: The body.
        content_type: Its media type; None for none.
        expected: What must be in the answer.
    """

    program: str
    path: str
    body: bytes
    content_type: str | None
    expected: object


def as_json(program, path, expected, content_type="application/json", **fields) -> Sent:
    return Sent(program, path, json.dumps(fields).encode(), content_type, expected)


def as_form(program, path, expected, **fields) -> Sent:
    return Sent(program, path, urlencode(fields).encode(), FORM, expected)


TEXT, PAIR = "하나 둘", {"source": "ko", "target": "en"}
ANSWER = {"translatedText": "one two"}
DETECTED = {"language": "ko", "confidence": 100.0}

MENTION = '<span class="h-card" translate="no"><a href="https://a.example/@b">@<span>b</span></a></span>'

# Read in the programs' sources: the fields, where they are, and the media type.
SENT = [
    as_json(
        "Mastodon, a post without a language",
        "/translate",
        {"translatedText": ["<p>one two</p>", "three"], "detectedLanguage": [DETECTED, DETECTED]},
        q=[f"<p>{TEXT}</p>", "셋"],
        source="auto",
        target="en",
        format="html",
        api_key=None,
    ),
    as_json(
        "Mastodon, a post with a mention",
        "/translate",
        {"translatedText": [f"<p>{MENTION} one two</p>"]},
        q=[f"<p>{MENTION} {TEXT}</p>"],
        format="html",
        api_key="",
        **PAIR,
    ),
    as_form(
        "Discourse, a post",
        "/translate",
        {"translatedText": "<p>one two</p>"},
        q=f"<p>{TEXT}</p>",
        format="html",
        api_key="",
        **PAIR,
    ),
    as_form("Discourse, its language", "/detect", [DETECTED], q=TEXT, api_key=""),
    as_json("Subtitle Edit", "/translate", ANSWER, q=TEXT, **PAIR),
    as_json("Lingarr, for Bazarr", "/translate", ANSWER, q=TEXT, format="text", api_key=None, **PAIR),
    as_form("Weblate", "/translate", ANSWER, api_key="", q=TEXT, **PAIR),
    Sent(
        "deep-translator", f"/translate?{urlencode({'q': TEXT, 'format': 'text'} | PAIR)}", b"", None, ANSWER
    ),
    as_json("Dialect", "/translate", ANSWER, q=TEXT, **PAIR),
    as_form("Dialect, whether the key is valid", "/detect", [], q="hello", api_key="any"),
    Sent(
        "jefs42/libretranslate for Nextcloud",
        "/translate",
        *multipart(*((name, value, "") for name, value in {"q": TEXT, "format": "html", **PAIR}.items())),
        ANSWER,
    ),
    Sent(
        "the same, the language of a text",
        f"/detect?{urlencode({'q': TEXT, 'api_key': ''})}",
        *multipart(),
        [DETECTED],
    ),
    as_json("libretranslate-ts", "/detect", [DETECTED], q=TEXT, format="text", api_key=None),
    as_json(
        "the example of LibreTranslate's documentation",
        "/translate",
        ANSWER | {"detectedLanguage": DETECTED},
        q=TEXT,
        source="auto",
        target="en",
        format="text",
        alternatives=3,
        api_key="",
    ),
    Sent(
        "LibreTranslate's page",
        "/translate",
        *multipart(
            ("q", TEXT, ""),
            ("source", "auto", ""),
            ("target", "en", ""),
            ("format", "text", ""),
            ("alternatives", "3", ""),
            ("api_key", "", ""),
            ("secret", "1E2F", ""),
        ),
        ANSWER | {"detectedLanguage": DETECTED},
    ),
    as_json("`fetch` without headers", "/translate", ANSWER, "text/plain;charset=UTF-8", q=TEXT, **PAIR),
    as_json("`curl -d` with JSON", "/translate", ANSWER, FORM, q=TEXT, **PAIR),
]


@pytest.mark.parametrize("sent", SENT, ids=lambda sent: sent.program)
def test_what_programs_send_is_answered(url, sent):
    status, answer = send(f"{url}{sent.path}", sent.body, sent.content_type)
    assert status == 200
    if isinstance(sent.expected, dict):
        assert {name: answer[name] for name in sent.expected} == sent.expected
        assert ("alternatives" in answer) == (b"alternatives" in sent.body)
    else:
        assert answer[: len(sent.expected)] == sent.expected
        assert "confidence" in answer[0]


def test_what_programs_read_before_the_first_text(url_with_key):
    """None of them sends its key for these."""
    languages = json.loads(get(f"{url_with_key}/languages")[2])
    # Mastodon offers the targets of a post's language without itself.
    assert {one["code"]: [code for code in one["targets"] if code != one["code"]] for one in languages} == {
        "en": [],
        "ko": ["en"],
    }
    settings = json.loads(get(f"{url_with_key}/frontend/settings")[2])  # Dialect, LibreTranslate's page
    assert (settings["apiKeys"], settings["suggestions"], int(settings["charLimit"])) == (True, False, -1)
    assert json.loads(get(f"{url_with_key}/spec")[2])["info"]["title"] == "LibreTranslate"  # Dialect


def test_a_suggestion_is_refused_in_words(url):
    body = urlencode({"q": TEXT, "s": "one two"} | PAIR).encode()
    status, answer = send(f"{url}/suggest", body, FORM)
    assert status == 404
    assert "suggestions are not kept" in answer["error"]


def run(*command: str, stdin: bytes = b"", seconds: float = _RUN_SECONDS) -> str:
    done = subprocess.run(command, input=stdin, capture_output=True, check=False, timeout=seconds)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


@pytest.fixture
def node():
    path = shutil.which("node")
    if path is None:
        pytest.skip("install node, in version 20 or newer")
    return path


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A folder with npm's client."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("install npm")
    folder = tmp_path_factory.mktemp("npm")
    command = [npm, "install", "--no-audit", "--no-fund", "--prefix", str(folder), "libretranslate-ts@0.5.12"]
    try:
        done = subprocess.run(command, capture_output=True, check=False, timeout=_INSTALL_SECONDS, text=True)
    except subprocess.TimeoutExpired:
        pytest.skip("npm reaches no registry")
    if done.returncode:
        pytest.skip(f"npm cannot install the client: {done.stderr.strip().splitlines()[-1:]}")
    return folder


def test_the_client_for_javascript(url, url_with_key, node, package):
    script = """
const { libreTranslate } = require(process.argv[1]);
(async () => {
  libreTranslate.setApiEndpoint(process.argv[2]);
  if (process.argv[3]) libreTranslate.setApiKey(process.argv[3]);
  const languages = await libreTranslate.listLanguages();
  const detected = await libreTranslate.detect("하나 둘");
  const translated = await libreTranslate.translate("하나 둘", "ko", "en", 2);
  const wrong = await libreTranslate.translate("하나 둘", "ko", "zz");
  console.log(JSON.stringify({ languages, detected, translated, wrong }));
})();
"""
    module = str(package / "node_modules" / "libretranslate-ts")
    for address, key in ((url, ""), (url_with_key, KEY)):
        answer = json.loads(run(node, "-e", script, module, address, key))
        assert [one["code"] for one in answer["languages"]] == ["en", "ko"]
        assert answer["detected"]["language"] == "ko"
        assert answer["translated"]["translatedText"] == "one two"
        assert answer["translated"]["alternatives"]
        assert "zz is not supported" in answer["wrong"]["error"]


def test_streams_of_node(url, node, tmp_path):
    """The server answered 411, because the body of a stream does not have a length."""
    script = """
const { createReadStream, openAsBlob } = require("node:fs");
const { Readable } = require("node:stream");
(async () => {
  const [url, json, text] = process.argv.slice(1);
  const headers = { "Content-Type": "application/json" };
  const body = Readable.toWeb(createReadStream(json, { highWaterMark: 7 }));
  const answer = await fetch(`${url}/translate`, { method: "POST", headers, body, duplex: "half" });
  const form = new FormData();
  form.append("file", await openAsBlob(text), "numbers.txt");
  form.append("source", "ko");
  form.append("target", "en");
  const stream = new Response(form);
  const type = stream.headers.get("content-type");
  const file = await fetch(`${url}/translate_file`, {
    method: "POST", headers: { "Content-Type": type }, body: stream.body, duplex: "half",
  });
  const { translatedFileUrl } = await file.json();
  const fetched = await (await fetch(translatedFileUrl)).text();
  console.log(JSON.stringify({ answer: await answer.json(), fetched }));
})();
"""
    (tmp_path / "request.json").write_text(json.dumps({"q": TEXT} | PAIR), encoding="utf-8")
    (tmp_path / "numbers.txt").write_text("하나 둘\n\n셋\n", encoding="utf-8")
    told = run(node, "-e", script, url, str(tmp_path / "request.json"), str(tmp_path / "numbers.txt"))
    assert json.loads(told) == {"answer": ANSWER, "fetched": "one two\n\nthree\n"}


def test_streams_of_curl(url, tmp_path):
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("install curl")
    body = json.dumps({"q": TEXT} | PAIR).encode()
    kind = "Content-Type: application/json"
    assert (
        json.loads(run(curl, "-sS", "-X", "POST", "-H", kind, "-T", "-", f"{url}/translate", stdin=body))
        == ANSWER
    )
    film = "1\n00:00:01,000 --> 00:00:02,000\n하나 <i>둘</i>\n"
    (tmp_path / "film.srt").write_text(film, encoding="utf-8")
    chunked = ("-H", "Transfer-Encoding: chunked", "-F", f"file=@{tmp_path / 'film.srt'}")
    told = run(curl, "-sS", *chunked, "-F", "source=ko", "-F", "target=en", f"{url}/translate_file")
    fetched = run(curl, "-sS", "-OJ", "--output-dir", str(tmp_path), json.loads(told)["translatedFileUrl"])
    assert fetched == ""
    others = [path for path in tmp_path.iterdir() if path.name != "film.srt"]
    translated = [path.read_text(encoding="utf-8") for path in others]
    assert translated == [film.replace("하나 <i>둘</i>", "one <i>two</i>")]
