"""The page of runs: what it gets of them, to whom it answers, and what a browser shows."""

import json
import shutil
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from seq2seq_serve.training.__main__ import main
from seq2seq_serve.training.show.server import _curve, describe_run, serve

CHROMIUM = shutil.which("chromium")


@contextmanager
def serving(*runs: Path) -> Iterator[str]:
    with serve(runs, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def status_of(url: str, **headers: str) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_a_run_is_shown_with_its_curves_and_what_it_wrote(trained_run):
    """Samples come with each checkpoint, and more densely at first."""
    with serving(trained_run.run) as url, urllib.request.urlopen(f"{url}/api/runs") as answer:
        [run] = json.load(answer)["runs"]
    assert (run["name"], run["step"], run["max_steps"]) == ("run", run["max_steps"], run["max_steps"])
    assert run["result"].startswith("dev loss ")
    steps, losses = zip(*run["curves"]["train loss"], strict=True)
    assert steps[-1] <= run["max_steps"]
    assert losses[0] > losses[-1]
    assert run["curves"]["dev bleu"][-1][1] > 50
    lines = run["samples"]
    assert [line["step"] for line in lines[:2]] == [16, 32]
    assert lines[-1]["step"] == run["max_steps"]
    dev = {pair.source: pair.target for pair in trained_run.corpus.dev}
    for line in lines:
        assert len(line["samples"]) == 3
        for sample in line["samples"]:
            assert dev[sample["source"]] == sample["reference"]
            assert [len(row) for row in sample["weights"]] == [len(sample["source_tokens"])] * len(
                sample["target_tokens"]
            )
            assert all(sum(row) == pytest.approx(1, abs=0.02) for row in sample["weights"])
    assert any(sample["target"] == sample["reference"] for sample in lines[-1]["samples"])


def test_a_run_without_samples_is_shown(trained_run, tmp_path):
    shutil.copytree(trained_run.run, tmp_path / "older", ignore=lambda *_: ["checkpoints", "samples.jsonl"])
    assert describe_run(tmp_path / "older")["samples"] == []


def test_a_long_curve_has_the_means_of_equal_stretches():
    points = [{"step": step, "loss": float(step)} for step in range(1, 1001)]
    points[5]["loss"] = float("nan")
    curve = _curve(points, "loss")
    assert len(curve) <= 400
    assert curve[0] == (3, 2.0)
    assert curve[-1][0] == 1000


def test_a_folder_without_a_run_is_refused_in_one_line(tmp_path, caplog):
    assert main(["show", str(tmp_path)]) == 1
    assert caplog.messages[-1] == f"{tmp_path} is not a training run: there is no config.json in it"


def test_pages_of_other_sites_get_nothing(trained_run):
    with serving(trained_run.run) as url:
        for path in ("/", "/show.js", "/style.css", "/page.css", "/api/runs"):
            assert status_of(url + path) == 200
        assert status_of(f"{url}/config.json") == 404
        assert status_of(f"{url}/../server.py") == 404
        for headers in (
            {"Host": "evil.example"},
            {"Origin": "http://evil.example"},
            {"Sec-Fetch-Site": "cross-site"},
        ):
            assert status_of(f"{url}/api/runs", **headers) == 403


@pytest.mark.slow  # a browser
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_two_runs_are_shown_beside_each_other(trained_run, tmp_path):
    sync_api = pytest.importorskip("playwright.sync_api")
    shutil.copytree(trained_run.run, tmp_path / "other", ignore=lambda *_: ["checkpoints"])
    with serving(trained_run.run, tmp_path / "other") as url, sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page, problems = browser.new_page(), []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.goto(url)
        page.wait_for_selector("#samples article:nth-child(2) table")
        assert page.locator("#curves figure").count() == 4
        assert page.locator("#curves figure:first-child :is(polyline, circle)").count() == 4
        newest = page.inner_text("#at")
        page.focus("#step")
        page.keyboard.press("Home")
        assert page.inner_text("#at") == "step 16" != newest
        heads = page.locator("#samples article:first-child thead th")
        assert heads.last.inner_text() == "<eos>"
        source = page.inner_text("#pair dd:nth-of-type(1)")
        page.select_option("#sample", "2")
        assert page.inner_text("#pair dd:nth-of-type(1)") != source
        browser.close()
        assert problems == []
