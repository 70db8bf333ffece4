"""Demonstrates a bundle, as in `make demo`: `python -m benchmarks.demo bundles/demo --run runs/demo`.

Starts the real server, translates sentences through the gRPC client, and prints each translation with its
attention alignment. Then it scores the run's held-out test set through the server, once for every precision
that this machine supports, and prints the latencies from `/metrics`. The last line on standard output is one
JSON object.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.hardware import describe_hardware
from benchmarks.report import command, markdown, publish
from benchmarks.serving import RunningServer, serving
from seq2seq_serve.bundle.manifest import load_bundle
from seq2seq_serve.client import Client, ClientError, GenerateOptions
from seq2seq_serve.protos.seq2seq_v1_pb2 import Attention
from seq2seq_serve.server.config import ProviderPolicy
from seq2seq_serve.server.runner.device import CUDA, usable_variants
from seq2seq_serve.training.evaluation import scoring
from seq2seq_serve.training.run import RunFolder

_SENTENCES = (
    "오늘은 금요일 입니다",
    "오늘은 금요일입니다",
    "드디어 금요일이다",
    "나는 학생이다",
)
_LATENCIES = {
    "whole request": "seq2seq_e2e_request_latency_seconds",
    "waiting for a slot": "seq2seq_request_queue_time_seconds",
    "encoding": "seq2seq_encode_time_seconds",
    "first token": "seq2seq_time_to_first_token_seconds",
    "between tokens": "seq2seq_inter_token_latency_seconds",
    "one step": "seq2seq_decode_step_seconds",
}
_TIMEOUT_SECONDS = 300.0  # long, so that quality can be measured on a slow machine


def main() -> int:
    """Run the demonstration; returns 0 if done, 1 if it failed, 130 if it was interrupted."""
    parser = command("demo", __doc__, "bundles/demo --run runs/demo")
    parser.add_argument("bundle", type=Path, help="folder of the bundle, written by `python -m export`")
    parser.add_argument("--run", type=Path, help="folder of the bundle's training run, for its test set")
    options = parser.parse_args()
    console = Console(stderr=True)
    try:
        report = demonstrate(options.bundle, options.run, console)
    except (ClientError, OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    publish(report, options.out)
    console.print(
        f"to see it in a browser: {sys.executable} -m server {options.bundle}, and in another terminal "
        f"{sys.executable} -m client web",
        soft_wrap=True,
        highlight=False,
    )
    return 0


def demonstrate(bundle: Path, run: Path | None, console: Console) -> dict[str, Any]:
    """Show the fastest variant of a bundle, and score the run's test set with every usable variant."""
    variants = usable_variants(load_bundle(bundle))
    report: dict[str, Any] = {"benchmark": "demo", "hardware": describe_hardware(), "scores": {}}
    for i, (provider, precision) in enumerate(variants):
        policy = ProviderPolicy.REQUIRE if provider == CUDA else ProviderPolicy.CPU
        with serving(bundle, ["--provider", policy, "--precision", precision]) as server:
            if i == 0:
                show_translations(server, console)
            if run:
                report["scores"][precision] = score(server, run, precision, console)
            if i == 0:
                report["latencies_seconds"] = show_latencies(server, console)
    if run:
        trained = RunFolder(run)
        report["seed"] = trained.read_config().training.seed
        report["training"] = dataclasses.asdict(trained.read_summary())
    return report


def show_translations(server: RunningServer, console: Console) -> None:
    """Translate a few sentences, and show the source token that each target token attends to most."""
    shown = Table("Korean", "English", "alignment", title="translated through gRPC")
    with Client(server.address) as client:
        for sentence in _SENTENCES:
            answer = client.generate(sentence, options=GenerateOptions(attention=True))
            best = answer.hypotheses[0]
            shown.add_row(sentence, best.text, _alignment(best.attention))
    console.print(shown)


def show_latencies(server: RunningServer, console: Console) -> dict[str, Any]:
    """Show and return the quantiles of the latencies that the server has measured since it started."""
    report, rows = {}, []
    for label, name in _LATENCIES.items():
        histogram = server.histogram(name)
        p50, p99 = histogram.quantile(0.5), histogram.quantile(0.99)
        rows.append((label, str(histogram.count), f"{1e3 * p50:.2f}", f"{1e3 * p99:.2f}"))
        report[name] = {"count": histogram.count, "p50": p50, "p99": p99}
    columns = "latency", "count", "p50 ms", "p99 ms"
    console.print(f"from {server.metrics_url}/metrics\n\n{markdown(columns, rows)}\n", highlight=False)
    return report


def score(server: RunningServer, run: Path, precision: str, console: Console) -> dict[str, Any]:
    """Compute sacreBLEU of the run's held-out test set; the server gets many requests at once."""
    sources = (run / "test.source.txt").read_text(encoding="utf-8").splitlines()
    references = (run / "test.target.txt").read_text(encoding="utf-8").splitlines()
    started = time.perf_counter()
    with Client(server.address, timeout_seconds=_TIMEOUT_SECONDS) as client:
        results = client.translate_many(sources)
        label = f"test set, {precision}"
        hypotheses = [result.text for result in track(results, label, total=len(sources), console=console)]
    seconds = time.perf_counter() - started
    result = scoring.score(hypotheses, references)
    rate = len(sources) / seconds
    console.print(
        f"test set through the server, {precision}: [bold]{result.bleu:.2f}[/] sacreBLEU, {len(sources)} "
        f"sentences, {rate:.0f} a second  ({result.bleu_signature})",
        highlight=False,
    )
    return {
        "bleu": result.bleu,
        "signature": result.bleu_signature,
        "sentences": len(sources),
        "sentences_per_second": rate,
    }


def _alignment(attention: Attention) -> str:
    num_sources = len(attention.source_tokens)
    arrows = []
    for i, token in enumerate(attention.target_tokens):
        weights = attention.weights[i * num_sources : (i + 1) * num_sources]
        looked_at = max(range(num_sources), key=weights.__getitem__)
        arrows.append(f"{token.strip()}←{attention.source_tokens[looked_at].strip()}")
    return "  ".join(arrows)


if __name__ == "__main__":
    sys.exit(main())
