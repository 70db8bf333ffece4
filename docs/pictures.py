"""Takes the pictures of docs/web.md and operations.md anew, from servers that really run.

It needs what `make gallery` makes, the extra `dev-deploy`, and Debian's `chromium`, `prometheus` and
`fonts-nanum`. From the root:

python -m docs.pictures runs/gallery
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc
from playwright.sync_api import Browser, Page, sync_playwright

from benchmarks.serving import RunningServer, serving
from seq2seq_serve.client import AsyncClient, GenerateOptions
from seq2seq_serve.protos.seq2seq_v1_pb2 import GenerateRequest, Source
from seq2seq_serve.protos.seq2seq_v1_pb2_grpc import Seq2SeqStub

DOCS = Path(__file__).parent
DASHBOARD = DOCS.parent / "deploy" / "grafana" / "dashboards" / "seq2seq.json"
RULES = DOCS.parent / "deploy" / "prometheus" / "rules.yml"
_TEXT = "오늘은 금요일 입니다"
_MODELS = ("transformer", "captioner-soft", "memory-network")
_SCRAPE_SECONDS = 1
_TRACE, _PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
_TOKEN = "a token for the pictures"
_MEASURED = "text=Times of the newest requests"  # of the server's panel
# Keeps back the last event of a translation and leaves the answer open: all events come within milliseconds.
_HOLD_BACK = """() => {
  const fetchAnswer = window.fetch;
  window.fetch = async (path, settings) => {
    if (path !== "/api/generate") return fetchAnswer(path, settings);
    let kept = [];
    while (!kept.some((event) => event.includes('{"alignment"'))) {
      const answer = await fetchAnswer(path, settings);
      kept = (await answer.text()).split("\\n\\n").filter((event) => event && !event.includes('{"result"'));
    }
    const text = kept.map((event) => event + "\\n\\n").join("");
    const start = (body) => body.enqueue(new TextEncoder().encode(text));
    return new Response(new ReadableStream({ start }));
  };
}"""
_UNITS = {"s": (1e3, "ms"), "percentunit": (100, "%"), "bytes": (2**-20, "MiB"), "decgbytes": (1, "GiB")}


def main() -> int:
    """Writes the pictures; returns 0."""
    parser = argparse.ArgumentParser(prog="python -m docs.pictures", description=__doc__.partition("\n")[0])
    parser.add_argument("gallery", type=Path, help="the folder of `make gallery`")
    options = parser.parse_args()
    bundles = [options.gallery / "bundles" / name for name in _MODELS]
    spans: list[Any] = []
    with collecting(spans) as endpoint, tempfile.TemporaryDirectory() as name:
        token_file, access_file = Path(name) / "token", Path(name) / "access.toml"
        token_file.write_text(_TOKEN)
        digest = hashlib.sha256(_TOKEN.encode()).hexdigest()
        access_file.write_text(f'[[token]]\nname = "shop"\nsha256 = "{digest}"\nroles = ["predict"]\n')
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_BSP_SCHEDULE_DELAY": "200"}
        flags = ["--tracing", "--access-file", str(access_file)]
        with serving(bundles, flags, environment=environment) as server:
            with asking_page(server, token_file) as url, sync_playwright() as playwright:
                browser = playwright.chromium.launch(
                    executable_path=shutil.which("chromium"), args=["--no-sandbox"]
                )
                picture = options.gallery / "runs" / "captioner-soft" / "pictures" / "test" / "00003.png"
                take_pages(browser, url, picture)
            trace(server, spans)
            draw_trace(spans, DOCS / "trace.png")
            with scraping(server) as prometheus:
                began = time.time()
                asyncio.run(load(server.address, num_callers=24, seconds=90))
                draw_dashboard(prometheus, began, DOCS / "dashboard.png")
    return 0


@contextlib.contextmanager
def asking_page(server: RunningServer, token_file: Path) -> Iterator[str]:
    """Runs `python -m client web` beside a server, and yields its address."""
    flags = ["--address", server.address, "--metrics-url", server.metrics_url, "--port", "0"]
    flags += ["--token-file", str(token_file)]
    command = [sys.executable, "-m", "client", "web", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            yield process.stderr.readline().split()[1]
        finally:
            process.terminate()


def take_pages(browser: Browser, url: str, picture: Path) -> None:
    """Takes the page while it translates, with an alignment, with a caption, and on a telephone."""
    page = browser.new_page(viewport={"width": 1100, "height": 560})
    page.goto(url)
    page.wait_for_selector("#about:not(:empty)")
    take_translating(browser, url)
    page.click("summary")
    page.select_option("#option-search", "beam search")
    page.fill("#option-num_hypotheses", "3")
    ask(page, _TEXT)
    page.click("table.grid tbody tr:nth-child(3) th button")
    page.mouse.move(0, 0)
    page.locator("#target-words .word").nth(2).hover()
    page.wait_for_selector(_MEASURED)
    page.screenshot(path=DOCS / "page-alignment.png", full_page=True)
    page.select_option("#model", "captioner-soft")
    page.set_input_files("input[type=file]", picture)
    page.click("#go")
    page.wait_for_selector("figure canvas")
    page.wait_for_selector(_MEASURED)
    page.screenshot(path=DOCS / "page-caption.png", full_page=True)
    page.set_viewport_size({"width": 400, "height": 800})
    page.select_option("#model", "memory-network")
    page.click("#go")
    page.wait_for_selector("table.hops")
    page.wait_for_selector(_MEASURED)
    page.screenshot(path=DOCS / "page-story-400.png", full_page=True)


def take_translating(browser: Browser, url: str) -> None:
    """Takes the page while an answer is open: with the caret after its text, and without an error."""
    page = browser.new_page(viewport={"width": 1100, "height": 560})
    page.goto(url)
    page.wait_for_selector("#about:not(:empty)")
    ask(page, _TEXT)
    page.evaluate(_HOLD_BACK)
    page.fill("textarea", "아이들은 오늘 밤에 아이스크림을 먹을 것이다")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(".caret")
    page.wait_for_selector("table.grid tbody tr")
    assert page.locator("#error").is_hidden()
    page.screenshot(path=DOCS / "page-translating.png")
    page.close()


def ask(page: Page, text: str) -> None:
    """Sends a text, and waits for the whole answer."""
    page.fill("textarea", text)
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#timings .bar")


class _Collector(otlp_grpc.TraceServiceServicer):
    """Keeps every span that a server exports."""

    def __init__(self, spans: list[Any]) -> None:
        self._spans = spans

    def Export(self, request: Any, _context: Any) -> Any:  # noqa: N802
        """Takes spans, as a collector does."""
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self._spans.extend(scope.spans)
        return otlp.ExportTraceServiceResponse()


@contextlib.contextmanager
def collecting(spans: list[Any]) -> Iterator[str]:
    """Runs a receiver of OTLP, and yields its address."""
    server = grpc.server(futures.ThreadPoolExecutor(2))
    otlp_grpc.add_TraceServiceServicer_to_server(  # type: ignore[no-untyped-call]
        _Collector(spans), server
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop(None)


def trace(server: RunningServer, spans: list[Any]) -> None:
    """Sends a request of a caller who traces, and waits until its spans have come."""
    with grpc.insecure_channel(server.address) as channel:
        request = GenerateRequest(sources=[Source(text=_TEXT)], options=GenerateOptions(beam_size=4))
        metadata = (
            ("authorization", f"Bearer {_TOKEN}"),
            ("traceparent", f"00-{_TRACE}-{_PARENT}-01"),
            ("x-request-id", "checkout-7"),
        )
        stub = Seq2SeqStub(channel)
        stub.Generate(request, metadata=metadata)
    while sum(span.trace_id.hex() == _TRACE for span in spans) < 4:
        time.sleep(0.1)


def draw_trace(spans: list[Any], path: Path) -> None:
    """Draws the spans of the request as bars over time."""
    its = [span for span in spans if span.trace_id.hex() == _TRACE]
    order = ("seq2seq.v1.Seq2Seq/Generate", "queue", "encode", "decode")
    its.sort(key=lambda span: order.index(span.name))
    begin = its[0].start_time_unix_nano
    figure = Figure(figsize=(9, 2.6), layout="constrained")
    axes = figure.add_subplot()
    for row, span in enumerate(its):
        start, end = ((at - begin) / 1e6 for at in (span.start_time_unix_nano, span.end_time_unix_nano))
        axes.barh(row, end - start, left=start, color=("#5b6675", "#8a94a3", "#c4680b", "#0b57d0")[row])
        axes.text(max(end, 0.01), row, f" {end - start:.2f} ms", va="center")
        for event in span.events:
            at = (event.time_unix_nano - begin) / 1e6
            axes.plot(at, row, "v", color="white")
            axes.annotate(
                event.name, (at, row), (7, -1), textcoords="offset points", va="center", color="white"
            )
    axes.set_yticks(range(len(its)), [span.name for span in its])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("milliseconds")
    attributes = {one.key: one.value for one in its[0].attributes}
    shown = ("request_id", "model", "mode", "source_tokens", "target_tokens")
    values = {name: attributes[f"seq2seq.{name}"] for name in shown}
    text = ", ".join(f"{name} {one.string_value or one.int_value}" for name, one in values.items())
    axes.set_title(f"trace {_TRACE}\n{text}", fontsize=9, loc="left")
    _save(figure, path)


@contextlib.contextmanager
def scraping(server: RunningServer) -> Iterator[str]:
    """Runs Prometheus beside a server, and yields its address."""
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), 19_090
        target = server.metrics_url.removeprefix("http://")
        (folder / "prometheus.yml").write_text(
            f"global: {{scrape_interval: {_SCRAPE_SECONDS}s, evaluation_interval: 5s}}\n"
            f"rule_files: [{RULES}]\n"
            f"scrape_configs: [{{job_name: seq2seq-serve, static_configs: [{{targets: ['{target}']}}]}}]\n"
        )
        command = [
            "prometheus",
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
            try:
                yield f"http://127.0.0.1:{port}"
            finally:
                process.terminate()


async def load(address: str, *, num_callers: int, seconds: float) -> None:
    """Sends mixed requests; half of the callers only in the middle third of the time."""
    texts = [_TEXT, "나는 학생이다", "드디어 금요일이다", "오늘은 금요일 입니다. 나는 학생이다."]
    ways = [
        GenerateOptions(),
        GenerateOptions(beam_size=4),
        GenerateOptions(temperature=1.0),
        GenerateOptions(max_new_tokens=3),
    ]
    end = time.monotonic() + seconds

    async def call(client: AsyncClient, number: int) -> None:
        while (left := end - time.monotonic()) > 0:
            if number < num_callers // 2 or seconds / 3 < left < 2 * seconds / 3:
                text, way = texts[number % len(texts)], ways[number // 3 % len(ways)]
                await client.generate(text, model="transformer", options=way)
            await asyncio.sleep(0.02)

    async with AsyncClient(address, token=_TOKEN) as client:
        await asyncio.gather(*(call(client, number) for number in range(num_callers)))


def draw_dashboard(prometheus: str, began: float, path: Path) -> None:
    """Draws every panel of the dashboard with a time axis but those of live speech, from its own queries."""
    panels = [
        one
        for one in json.loads(DASHBOARD.read_text())["panels"]
        if one["type"] == "timeseries" and "seq2seq_live_" not in one["targets"][0]["expr"]
    ]
    columns = 4
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4 * columns, 2.5 * rows), layout="constrained")
    for place, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(rows, columns, place)
        factor, unit = _UNITS.get(panel["fieldConfig"]["defaults"].get("unit", ""), (1, ""))
        for target in panel["targets"]:
            for series in query(prometheus, target["expr"], began):
                times = [float(at) - began for at, _ in series["values"]]
                values = [factor * float(value) for _, value in series["values"]]
                legend = re.sub(
                    r"{{\s*(\w+)\s*}}",
                    lambda match: series["metric"].get(match[1], ""),  # noqa: B023
                    target.get("legendFormat", ""),
                )
                axes.plot(times, values, label=legend)
        axes.set_title(panel["title"] + (f" [{unit}]" if unit else ""), fontsize=9)
        axes.set_ylim(bottom=0)
        axes.tick_params(labelsize=7)
        if axes.lines:
            axes.legend(fontsize=6)
    _save(figure, path)


def query(prometheus: str, expression: str, began: float) -> list[dict[str, Any]]:
    """Returns the time series of one query of the dashboard."""
    filled = expression.replace("$model_name", ".*").replace("$__rate_interval", "10s")
    settings = {"query": filled, "start": began, "end": time.time(), "step": 1}
    url = f"{prometheus}/api/v1/query_range?{urllib.parse.urlencode(settings)}"
    with urllib.request.urlopen(url, timeout=20) as answer:
        series: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    return series


def _save(figure: Figure, path: Path) -> None:
    FigureCanvasAgg(figure).print_png(path, metadata={"Software": None})  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    sys.exit(main())
