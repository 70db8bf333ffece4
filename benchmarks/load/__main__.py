"""Measures the server under load, through gRPC: `python -m benchmarks.load`.

The model is a `base` Transformer, or another preset, with random weights in int8. Sources have 10–40 and
targets 4–64 tokens, with uniformly distributed lengths. 70 % of the requests are greedy, 20 % use beam search
of 4, and 10 % sample at temperature 1. All contenders get the same requests, which are drawn from a seed.
`max_new_tokens` alone sets the length of a target: random weights hardly ever end one earlier, and the report
counts those that do. No other option is set, because it would make rows slower than in normal use.

* Closed loops with 64 requests in flight: tokens per second of the engine in process, of unary calls and of
  streaming calls. Both with the mix, and with greedy requests only.
* Open loops: streams arrive as a Poisson process that does not wait for answers, at rising shares of the
  capacity (the rate of a full closed loop of the same mix). A latency starts when the request was due. Gaps
  between tokens are measured at the client for greedy and sampling streams, where every step yields a token;
  beam search answers in irregular pieces and is left out. Beside them are the latencies of an ideal scheduler
  for the same arrivals (`load/ideal.py`): its machine takes the times of graphs that each round measures in
  process, on the server's cores.

The contenders alternate within each round, and every round begins with its own measurement of the capacity,
because the machine's speed varies over time; medians over rounds are reported. Server and engine have the
same cores. The load generator is a separate process, on other cores if there are any, and reports its own
processor time.

Not measured: tokenization of sources (they are sent as ids), networks, TLS, quality. The last line on
standard output is one JSON object.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from benchmarks.flags import cores, positive, seconds
from benchmarks.hardware import describe_hardware
from benchmarks.load.engine import DrivenEngine, server_engine, server_flags
from benchmarks.load.figures import Bench, Figures, measure_closed_loops, measure_sweep
from benchmarks.load.generator import Generator
from benchmarks.load.mix import MAX_TARGET_LENGTH
from benchmarks.report import command, markdown, publish
from benchmarks.scale.fit import fit, measure_turns
from benchmarks.serving import serving
from seq2seq_serve.bundle.names import Precision
from seq2seq_serve.server.config import ProviderPolicy, RunnerConfig, Speculation

_LOADS = (0.3, 0.5, 0.7, 0.9)
_PRESETS = ("demo", "tiny", "small", "base", "big")
_NUM_SERVER_CORES = 2
# Twice the slots of 64 requests of the mix, so that no request waits for a slot below the capacity.
_MAX_SLOTS = 208
_IN_FLIGHT_BY_TURN = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # while the ideal scheduler's machine is measured


def main() -> int:
    """Measure, print the tables and one JSON object; returns 0 if done, 1 if it failed."""
    parser = command("load", __doc__, "--server-cores 0,1 --client-cores 2,3\n--rounds 1 --seconds 5")
    add = parser.add_argument
    add("--rounds", type=positive, default=3, help="timed rounds (default: %(default)s)")
    add("--seconds", type=seconds, default=20.0, help="duration of each open loop (default: %(default)s)")
    add("--preset", default="base", choices=_PRESETS, help="preset of the model (default: base)")
    add("--server-cores", type=cores, help="CPUs of server and engine (default: the first 2)")
    add(
        "--client-cores",
        type=cores,
        help="CPUs of the load generator (default: the others, or the same if there are none)",
    )
    options = parser.parse_args()
    usable = sorted(os.sched_getaffinity(0))
    server_cores = options.server_cores or usable[:_NUM_SERVER_CORES]
    client_cores = options.client_cores or [core for core in usable if core not in server_cores] or usable
    report: Figures = {
        "benchmark": "load",
        "hardware": describe_hardware(),  # before the affinity changes: it counts all usable CPUs
        "preset": options.preset,
        "server_cores": server_cores,
        "client_cores": client_cores,
    }
    os.sched_setaffinity(0, server_cores)  # the server inherits the affinity
    config = RunnerConfig(
        shares_threads=True,
        provider=ProviderPolicy.CPU,
        precision=Precision.INT8,
        max_slots=_MAX_SLOTS,
        max_source_length=MAX_TARGET_LENGTH,
        max_target_length=MAX_TARGET_LENGTH,
        speculative=Speculation.OFF,  # random weights repeat themselves
    )
    try:
        with tempfile.TemporaryDirectory() as name:
            # Imports torch, which the load generator's process and --help do not need.
            from benchmarks.load.bundles import export_random

            print(f"exporting a random `{options.preset}` model", file=sys.stderr)
            export_random(options.preset, Path(name) / "bundle", vocab_size=None)
            report |= measure(Path(name) / "bundle", config, client_cores, options.rounds, options.seconds)
    except (OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(render(report), file=sys.stderr)
    if any(row["client_lateness_p99"] > row["step_median"] for row in report["sweep"]):
        print("the load generator sent requests more than a step late: its cores were busy", file=sys.stderr)
    publish(report, options.out)
    return 0


def measure(
    bundle: Path, config: RunnerConfig, client_cores: list[int], num_rounds: int, open_seconds: float
) -> Figures:
    """Run the contenders in alternation on a server of the bundle."""

    def measure_machine() -> Figures:
        return fit(measure_turns(bundle, config, _IN_FLIGHT_BY_TURN, 1, of_machine=True))

    with (
        serving(bundle, server_flags(config)) as server,
        Generator(client_cores) as generator,
        Progress(console=Console(stderr=True)) as progress,
    ):
        bench = Bench(server, generator, progress, num_rounds, open_seconds)
        engine = DrivenEngine(server_engine(bundle, config))
        try:
            closed_loops = measure_closed_loops(bench, engine)
        finally:
            engine.stop()
        return {"closed_loops": closed_loops, "sweep": measure_sweep(bench, _LOADS, measure_machine)}


def render(report: Figures) -> str:
    """Returns the report as two Markdown tables."""

    def milliseconds(row: Figures, name: str) -> str:
        return f"{1e3 * row[f'{name}_p50']:.1f}, {1e3 * row[f'{name}_p99']:.1f}"

    closed = markdown(
        ("tokens/s, share of the engine's", *next(iter(report["closed_loops"].values()))),
        (
            (mix, *(f"{one['tokens_per_second']:.0f}, {one['to_engine']:.0%}" for one in figures.values()))
            for mix, figures in report["closed_loops"].items()
        ),
    )
    rows = []
    for row in report["sweep"]:
        cells = [f"{row['load']:.0%}", f"{row['requests_per_second']:.1f}"]
        cells.append(f"{row['server_cpu_share']:.0%}, {row['ideal_busy_share']:.0%}")
        for name in ("first_token", "inter_token"):
            cells += [milliseconds(row, name), milliseconds(row, f"ideal_{name}")]
            cells.append(f"{row[f'{name}_p99_to_ideal']:.2f}")
        rows.append([*cells, milliseconds(row, "latency"), f"{row['refused']:.0f}"])
    times = "ms: p50, p99"
    columns = ["share of the capacity", "requests/s", "busy share of the cores: server, ideal"]
    for name in ("first token", "between tokens"):
        columns += [f"{name}, {times}", f"ideal, {times}", "p99 to ideal"]
    columns += [f"whole request, {times}", "refused requests"]
    return f"{closed}\n\n{markdown(columns, rows)}"


if __name__ == "__main__":
    sys.exit(main())
