"""The page in Debian's Chromium."""

import contextlib
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import soundfile

from seq2seq_serve.bundle.manifest import Generation
from tests.server.service.harness import (
    EchoRunner,
    Served,
    on_a_thread,
    serving,
    serving_bundles,
    serving_on_a_thread,
)

sync_api = pytest.importorskip("playwright.sync_api", reason="pip install -e '.[dev-deploy]'")

ROOT = Path(__file__).parent.parent.parent
CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium"),
]


@pytest.fixture(scope="module")
def playwright():
    with sync_api.sync_playwright() as playwright:
        yield playwright


@pytest.fixture(scope="module")
def browser(playwright):
    browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
    yield browser
    browser.close()


@contextlib.contextmanager
def serving_page(served: Served, *program: str) -> Iterator[str]:
    flags = [
        "--address",
        served.address,
        "--port",
        "0",
        "--metrics-url",
        f"http://127.0.0.1:{served.app.http.port}",
    ]
    with page_of(flags, *program) as url:
        yield url


@contextlib.contextmanager
def page_of(flags: list[str], *program: str) -> Iterator[str]:
    command = [sys.executable, *(program or ("-m", "client")), "web", *flags]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        yield process.stderr.readline().split()[1]
        process.terminate()
        process.stderr.read()


@pytest.fixture(scope="module")
def url():
    """The address of a page whose model echoes its source, and aligns each token with itself."""
    runner = EchoRunner(generation=Generation(splits_sentences=True))
    with serving_on_a_thread(runner) as served, serving_page(served) as url:
        yield url


@pytest.fixture(scope="module")
def toys(toy_paths):
    """The address of a page with a tiny model of every family."""
    with on_a_thread(serving_bundles(*toy_paths.values())) as served, serving_page(served) as url:
        yield url


@pytest.fixture
def server_later():
    """The address of a page, and a function that starts the server that it asks."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = ["--address", f"127.0.0.1:{port}", "--port", "0", "--timeout-seconds", "5"]
    with page_of(flags) as url:
        yield url, lambda: serving_on_a_thread(port=port)


@pytest.fixture
def page(browser, url):
    with opened(browser, url) as page:
        yield page


@contextlib.contextmanager
def opened(browser, url: str, **settings):
    """A page that has loaded; errors of its scripts, and of its policy, fail the test."""
    context = browser.new_context(**settings)
    page, problems = context.new_page(), []
    page.set_default_timeout(20_000)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.goto(url)
    page.wait_for_selector("#about:not(:empty)")
    yield page
    context.close()
    assert problems == []


def ask(page, text: str) -> None:
    page.fill("textarea", text)
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#timings .bar")


def test_a_text_is_translated_and_its_words_are_joined(page):
    ask(page, "오늘은 금요일 입니다")
    words = page.locator("#target-words .word")
    assert words.all_inner_texts() == ["오늘은", "금요일", "입니다"]
    words.nth(1).hover()
    linked = page.locator("#source-words .word.is-linked")
    assert linked.all_inner_texts() == ["금요일"]
    page.mouse.move(0, 0)
    page.locator("#source-words .word").nth(2).focus()
    assert page.locator("#target-words .word.is-linked").all_inner_texts() == ["입니다"]


def test_the_heatmap_has_a_row_for_each_token_and_arrow_keys_move_in_it(page):
    ask(page, "abc")
    table = page.locator("table.grid")
    assert table.locator("thead th").all_inner_texts() == ["", "a", "b", "c", "</s>"]
    assert table.locator("tbody th").all_inner_texts() == ["a", "b", "c", "</s>"]
    table.locator("td").first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#status") == "b looks at b: 100 %"
    assert table.locator("th.is-linked").all_inner_texts() == ["b", "b"]


def test_choosing_an_alternative_continues_the_target_from_it(browser, toys):
    with opened(browser, toys) as page:
        page.select_option("#model", "text")
        ask(page, "w1 w2 w3")
        page.click("table.grid tbody tr:nth-child(2) th button")
        items = page.locator(".alternatives li button:not(:disabled)")
        assert items.count() > 2
        chosen = items.nth(1).locator("span").first.inner_text()
        assert re.search(r"\d %", items.nth(1).inner_text())
        items.first.press("Tab")  # the first one has the focus
        page.keyboard.press("Enter")
        page.wait_for_selector("#prefix:not([hidden])")
        page.wait_for_selector("#timings .bar")
        assert page.locator("table.grid tbody th").nth(1).inner_text() == chosen
        assert page.inner_text("#prefix").startswith("The answer begins with “")
        page.click("#prefix button")
        page.wait_for_selector("#prefix", state="hidden")


def test_sentences_are_split_by_default_and_keep_their_paragraphs(page):
    """A model of single sentences answered the first one, and nothing showed that the others were missing."""
    text = "One. Two.\n\nThree."
    ask(page, text)
    for name in ("target", "source"):
        assert page.inner_text(f"#{name}-sentences") == text
        sentences = page.locator(f"#{name}-sentences .sentence")
        assert sentences.all_inner_texts() == ["One.", "Two.", "Three."]
        assert sentences.locator("xpath=self::*[contains(@class, 'is-linked')]").all_inner_texts() == ["One."]
    assert "3 sentences, each decoded by itself" in page.inner_text("#answer")
    heads = page.locator("table.grid thead th")
    assert heads.all_inner_texts() == ["", *"One.", "</s>"]
    page.locator("#target-sentences .sentence").nth(1).press("Enter")
    assert heads.all_inner_texts() == ["", *"Two.", "</s>"]
    assert page.locator("table.grid td.waits").count() == 0
    sync_api.expect(page.locator("#target-sentences .sentence").nth(1)).to_be_focused()
    assert page.locator("#source-sentences .is-linked").all_inner_texts() == ["Two."]


def test_several_sentences_as_one_text_are_warned_of(page):
    page.click("summary")
    page.select_option("#option-long_source", label="as one text")
    ask(page, "One. Two.")
    assert page.locator("#target-words .word").all_inner_texts() == ["One.", "Two."]
    assert page.inner_text("#warning").startswith("2 sentences, decoded as one text.")
    page.click("#warning button")
    page.wait_for_selector("#target-sentences")
    ask(page, "One.")
    assert page.locator("#warning").count() == 0


def test_two_models_answer_beside_each_other(browser):
    server = serving_on_a_thread(names=("echo", "other"))
    with server as served, serving_page(served) as url, opened(browser, url) as page:
        ask(page, "abc")
        assert page.is_hidden("#other")
        assert page.inner_text("#answer-title") == "ANSWER"
        page.select_option("#beside", "other")
        ask(page, "One two")
        page.wait_for_selector("#other-timings .bar")
        assert page.inner_text("#other-answer") == "One two"
        assert page.inner_text("#other-name").startswith("OTHER (ECHO, FP32 ON CPU)")
        assert page.inner_text("#answer-title") == "ECHO (ECHO, FP32 ON CPU)"
        assert "8 target tokens" in page.inner_text("#other-timings")
        boxes = [page.locator(one).bounding_box() for one in ("section:has(#answer)", "#other")]
        assert boxes[0]["y"] == boxes[1]["y"], "they are side by side"
        page.select_option("#model", "other")
        assert page.locator("#beside option").all_inner_texts() == ["no other", "echo"]
        assert page.is_hidden("#other")
        assert page.inner_text("#answer-title") == "ANSWER"
    with serving_on_a_thread() as served, serving_page(served) as url, opened(browser, url) as page:
        assert page.is_hidden("#beside")


def test_several_answers_have_scores_and_can_be_chosen(page):
    page.click("summary")
    page.select_option("#option-search", "beam search")
    page.fill("#option-num_hypotheses", "2")
    ask(page, "abcd")
    buttons = page.locator("#hypotheses button")
    assert buttons.count() == 2
    assert buttons.first.get_attribute("aria-pressed") == "true"
    assert re.search(r"-\d+\.\d{3}", buttons.last.inner_text())
    ends = page.evaluate("""() => [...document.querySelectorAll(".score")].map(
        (one) => one.getBoundingClientRect().right)""")
    assert len(ends) == 2
    assert len(set(ends)) == 1, "scores stand under each other"
    assert "3 target tokens in 2 answers" in page.inner_text("#timings")
    buttons.last.click()
    assert buttons.last.get_attribute("aria-pressed") == "true"


def test_an_error_is_said_and_the_next_request_works(page):
    page.fill("textarea", "x" * 200)
    page.click("#go")
    page.wait_for_selector("#error:not([hidden])")
    error = page.inner_text("#error")
    assert all(datum in error for datum in ("Sentence 1", "201 tokens", "64", "(INVALID_ARGUMENT)"))
    page.click("summary")
    page.select_option("#option-long_source", label="as one text")
    page.click("#go")
    sync_api.expect(page.locator("#error")).to_contain_text("“Several sentences”")
    page.fill("#option-max_new_tokens", "99")
    page.click("#go")
    sync_api.expect(page.locator("#error")).to_contain_text("“Tokens at most” is 99")
    page.fill("#option-max_new_tokens", "")
    ask(page, "abc")
    assert page.is_hidden("#error")


def test_stop_ends_the_request_and_keeps_what_came(browser):
    with serving_on_a_thread() as served, serving_page(served) as url, opened(browser, url) as page:
        served.runner.gate.clear()
        page.fill("textarea", "abc")
        page.click("#go")
        assert served.runner.stepping.wait(20)
        page.press("#stop", "Enter")
        sync_api.expect(page.locator("#answer .text")).to_have_text(" …")
        assert page.evaluate("document.activeElement.id") == "go"
        served.runner.gate.set()
        ask(page, "abc")


def test_another_model_begins_anew_while_the_first_one_decodes(browser):
    """The answer of the first one was printed below the second one."""
    server = on_a_thread(serving(names=("echo", "other")))
    with server as served, serving_page(served) as url, opened(browser, url) as page:
        served.runner.gate.clear()
        page.fill("textarea", "abc")
        page.click("#go")
        assert served.runner.stepping.wait(20)
        page.select_option("#model", "other")
        served.runner.gate.set()
        assert page.inner_text("#answer") == "The answer appears here while it is decoded."
        assert page.is_disabled("#stop")
        ask(page, "de")
        assert page.locator("#target-words .word").all_inner_texts() == ["de"]


def test_the_page_waits_for_a_server(browser, server_later):
    url, start = server_later
    context = browser.new_context()
    page = context.new_page()
    page.goto(url)
    page.wait_for_selector("#error:not([hidden])")
    assert "trying again" in page.inner_text("#error")
    assert page.is_disabled("#go")
    with start():
        page.wait_for_selector("#about:not(:empty)")
        ask(page, "abc")
    context.close()


def test_the_panel_shows_a_model_at_once(browser, toys):
    """It was empty until the second look at the metrics, and showed the model before meanwhile."""
    with opened(browser, toys) as page:
        sync_api.expect(page.locator(".tile").first).to_contain_text("0.0")
        page.select_option("#model", "text")
        ask(page, "w1 w2 w3")
        times = page.locator("#latency td").first
        sync_api.expect(times).to_contain_text("ms")
        page.route("**/api/metrics", lambda route: None)  # no answer from now on
        texts = page.evaluate("""() => {
          const choose = (name) => {
            const model = document.querySelector("#model");
            model.value = name;
            model.dispatchEvent(new Event("change"));
            return document.querySelector("#latency").textContent;
          };
          return [choose("story"), choose("text")];
        }""")
        assert "slots in use" in texts[0]
        assert "ms" in texts[1]


def test_the_keyboard_alone_reaches_everything(page):
    names = []
    ask(page, "ab cd")
    page.locator("#model").focus()
    for _ in range(18):
        page.keyboard.press("Tab")
        look = (
            "(one => one.id || one.className.split(' ')[0] || one.parentElement.tagName + ' ' + one.tagName)"
        )
        names.append(page.evaluate(f"{look}(document.activeElement)"))
    assert names[:3] == ["source-source_ids", "DETAILS SUMMARY", "go"]
    assert names[3:7] == ["word"] * 4
    assert names[7:10] == ["scroll", "TH BUTTON", "TR TD"] or names[7:9] == ["TH BUTTON", "TR TD"]


def test_a_story_is_answered_with_its_hops(browser, toys):
    with opened(browser, toys) as page:
        page.select_option("#model", "story")
        page.fill("textarea", "w1 w2. w3 w1.")
        page.fill("input[name]", "w1")
        page.click("#go")
        page.wait_for_selector("table.hops")
        assert page.locator("table.hops tbody tr").count() == 2
        assert page.locator("table.hops thead th").count() > 1
        assert "2 sentences" in page.inner_text("#timings")
        assert page.locator(".alternatives li").count() > 1


@pytest.mark.parametrize(("name", "drawn"), [("picture", "figure canvas"), ("clip", "figure .film img")])
def test_a_picture_or_clip_has_its_attention_laid_over_it(browser, toys, tmp_path, name, drawn):
    from PIL import Image

    frames = [Image.new("RGB", (64, 64), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "file.gif", save_all=True, append_images=frames[1:], duration=100)
    with opened(browser, toys, viewport={"width": 400, "height": 800}, color_scheme="dark") as page:
        page.select_option("#model", name)
        assert page.is_hidden(".preview"), "a picture without a file is a broken one"
        page.set_input_files("input[type=file]", tmp_path / "file.gif")
        sync_api.expect(page.locator(".preview")).to_have_js_property("naturalWidth", 64)
        assert page.is_visible(".preview")
        page.click("#go")
        page.wait_for_selector(drawn)
        num_words = len(page.inner_text("#answer .text").split())
        assert page.locator("figure").count() >= num_words
        assert page.evaluate("document.documentElement.scrollWidth") <= 400


# The command, with a client that does not look for speech, for which a server needs an extra
WITHOUT_TURNS = """
import sys
from functools import partialmethod
from seq2seq_serve.client import AsyncClient, TurnDetection
from seq2seq_serve.client.__main__ import main
settings = {"turn_detection": TurnDetection(off=True), "interval_seconds": 0.1}
AsyncClient.transcribe_live = partialmethod(AsyncClient.transcribe_live, **settings)
main(sys.argv[1:])
"""


@pytest.fixture
def speaking_page(playwright, whisper_path, tmp_path):
    """A page in a browser whose microphone plays a noise again and again."""
    samples = np.random.default_rng(0).standard_normal(5 * 48_000) * 0.1
    soundfile.write(tmp_path / "noise.wav", samples, 48_000)
    flags = [
        "--no-sandbox",
        "--use-fake-device-for-media-stream",
        "--use-fake-ui-for-media-stream",
        f"--use-file-for-fake-audio-capture={tmp_path / 'noise.wav'}",
    ]
    with (
        on_a_thread(serving_bundles(whisper_path / "bundle")) as served,
        serving_page(served, "-c", WITHOUT_TURNS) as url,
    ):
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        with opened(browser, url) as page:
            yield page
        browser.close()


def test_what_is_said_into_the_microphone_grows_until_it_is_stopped(speaking_page):
    page = speaking_page
    page.click("#speak")
    page.wait_for_selector("#live span:first-child:not(:empty)")
    page.wait_for_selector("#lag:not(:empty)")
    assert re.fullmatch(r"\d+\.\d s behind the speaker", page.inner_text("#lag"))
    assert page.is_disabled("#speak")
    page.click("#stop")
    page.wait_for_selector("#speak:enabled")
    assert page.is_hidden("#error")
    assert page.is_disabled("#stop")
    assert page.inner_text("#live span:first-child").strip()
    assert page.inner_text("#lag") == page.inner_text("#live .unstable") == ""
    assert page.locator("#look").is_visible()
    page.click("#speak")  # again
    page.wait_for_selector("#lag:not(:empty)")
