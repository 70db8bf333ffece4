"""Measures the server under load, through gRPC: `python -m benchmarks.load`.

The model is a `base` Transformer, or another preset, with random weights in int8. Sources have 10–40 and
targets 4–64 tokens, with uniformly distributed lengths. 70 % of the requests are greedy, 20 % use beam search
of 4, and 10 % sample at temperature 1. All contenders get the same requests, which are drawn from a seed.
`max_new_tokens` alone sets the length of a target: random weights hardly ever end one earlier, and the report
counts those that do. No other option is set, because it would make rows slower than in normal use.

* Closed loops with 64 requests in flight: tokens per second of the engine in process, of unary calls and of
  streaming calls. The same engine also runs static batches of 64, in which a batch starts after the previous
  one has ended completely, padded to the longest target, as in a batch of fixed shape. Both with the mix, and
  with greedy requests only.
* Open loops: streams arrive as a Poisson process that does not wait for answers, at rising shares of the
  capacity (the rate of a full closed loop of the same mix). A latency starts when the request was due. Gaps
  between tokens are measured at the client for greedy and sampling streams, where every step yields a token;
  beam search answers in irregular pieces and is left out. Beside them are the latencies of an ideal scheduler
  for the same arrivals (`load/ideal.py`): its machine takes the times of graphs that each round measures in
  process, on the server's cores.
* Comparison with CTranslate2 (int8, the same weights and cores, no sampling): it gets the requests in
  process, without gRPC, in batches of the waiting requests, with the best of its thread settings and batch
  sizes. Our p99 of whole latencies at 70 % of our capacity, with gRPC, is compared with its p99 at lower
  rates. Its greedy targets end at their own lengths and leave the batch. It cannot end beams one by one, so
  they all run to their mean length, which is in its favour.

The contenders alternate within each round, and every round begins with its own measurement of the capacity,
because the machine's speed varies over time; medians over rounds are reported. Server, engine and CTranslate2
have the same cores. The load generator is a separate process, on other cores if there are any, and reports
its own processor time.

Not measured: tokenization of sources (they are sent as ids), networks, TLS, quality. The last line on
standard output is one JSON object.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.flags import cores
from benchmarks.hardware import describe_hardware
from benchmarks.load.engine import DrivenEngine, server_engine, server_flags
from benchmarks.load.figures import (
    IN_FLIGHT,
    Bench,
    Figures,
    Plan,
    measure_against_peer,
    measure_closed_loops,
    measure_sweep,
)
from benchmarks.load.generator import Generator
from benchmarks.load.mix import MAX_TARGET_LENGTH
from benchmarks.load.peer import PeerQueue
from benchmarks.report import bar, bars_table, command, publish, table
from benchmarks.scale.fit import fit, measure_turns
from benchmarks.serving import serving
from seq2seq_serve.bundle.names import Precision
from seq2seq_serve.server.config import ProviderPolicy, RunnerConfig, Speculation

_BAR_LOADS = (0.5, 0.7, 0.9)  # at which latencies are compared with those of an ideal scheduler
_FULL = Plan(
    num_rounds=3,
    open_seconds=20.0,
    loads=(0.3, *_BAR_LOADS),
    batch_sizes=(16, 32),
    rate_ratios=(0.67, 1.0, 1.5, 2.0, 3.0),
)
_QUICK = Plan(
    num_rounds=1,
    open_seconds=5.0,
    loads=_BAR_LOADS,
    batch_sizes=(16,),
    rate_ratios=(1.0, 1.5, 3.0),
)
_PRESETS = ("demo", "tiny", "small", "base", "big")
_NUM_SERVER_CORES = 2
# Twice the slots of 64 requests of the mix, so that no request waits for a slot below the capacity.
_MAX_SLOTS = 208
_IN_FLIGHT_BY_TURN = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # while the ideal scheduler's machine is measured


def main() -> int:
    """Measure, print the tables and one JSON object; returns 0 if done, 1 if it failed."""
    parser = command("load", __doc__, "--server-cores 0,1 --client-cores 2,3")
    add = parser.add_argument
    add("--only-latencies", action="store_true", help="measure neither closed loops nor CTranslate2")
    add("--quick", action="store_true", help="one short round, in about three minutes instead of ten")
    add("--preset", default="base", choices=_PRESETS, help="preset of the model (default: base)")
    add("--server-cores", type=cores, help="CPUs of server, engine and CTranslate2 (default: the first 2)")
    add(
        "--client-cores",
        type=cores,
        help="CPUs of the load generator (default: the others, or the same if there are none)",
    )
    options = parser.parse_args()
    usable = sorted(os.sched_getaffinity(0))
    server_cores = options.server_cores or usable[:_NUM_SERVER_CORES]
    client_cores = options.client_cores or [core for core in usable if core not in server_cores] or usable
    console = Console(stderr=True)
    if set(server_cores) & set(client_cores):
        console.print("the load generator shares cores with the server, so the server gets less CPU time")
    hardware = describe_hardware()  # before the affinity changes: it counts all usable CPUs
    os.sched_setaffinity(0, server_cores)  # the server inherits the affinity
    report: Figures = {"benchmark": "load", "hardware": hardware}
    try:
        with tempfile.TemporaryDirectory() as name:
            folder, plan = Path(name), _QUICK if options.quick else _FULL
            if options.only_latencies:
                plan = dataclasses.replace(plan, batch_sizes=(), loads=_BAR_LOADS)
            console.print(f"exporting a random `{options.preset}` model")
            queues = prepare(folder, options.preset, len(server_cores), plan.batch_sizes)
            report |= {"preset": options.preset, "plan": dataclasses.asdict(plan)}
            report |= measure(folder / "bundle", queues, plan, server_cores, client_cores, console)
    except (OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for shown in render(report):
        console.print(shown)
    if any(row["client_lateness_p99"] > row["step_median"] for row in report["sweep"]):
        console.print("the load generator sent requests more than a step late: its cores were busy")
    publish(report, options.out)
    return 0


def measure(
    bundle: Path,
    queues: Mapping[tuple[str, int], PeerQueue],
    plan: Plan,
    server_cores: Sequence[int],
    client_cores: Sequence[int],
    console: Console,
) -> Figures:
    """Run the contenders in alternation, and compare the results with the bars."""
    config = RunnerConfig(
        shares_threads=True,
        provider=ProviderPolicy.CPU,
        precision=Precision.INT8,
        num_threads=len(server_cores),
        max_slots=_MAX_SLOTS,
        max_source_length=MAX_TARGET_LENGTH,
        max_target_length=MAX_TARGET_LENGTH,
        speculative=Speculation.OFF,  # random weights repeat themselves
    )

    def measure_machine() -> Figures:
        return fit(measure_turns(bundle, config, _IN_FLIGHT_BY_TURN, 1, of_machine=True))

    closed, against = Figures(), Figures()
    with (
        serving(bundle, server_flags(config)) as server,
        Generator(client_cores) as generator,
        Progress(console=console) as progress,
    ):
        bench = Bench(plan, server, generator, progress)
        if queues:
            engine = DrivenEngine(server_engine(bundle, config))
            try:
                closed = measure_closed_loops(bench, engine)
            finally:
                engine.stop()
        sweep = measure_sweep(bench, measure_machine)
        if queues:
            against = measure_against_peer(bench, queues)
    return {
        "server_cores": list(server_cores),
        "client_cores": list(client_cores),
        "client_shares_server_cores": bool(set(server_cores) & set(client_cores)),
        "closed_loops": closed,
        "sweep": sweep,
        "against_ctranslate2": against,
        "bars": bars(closed, sweep, against),
    }


def prepare(
    folder: Path, preset: str, num_cores: int, batch_sizes: Sequence[int]
) -> dict[tuple[str, int], PeerQueue]:
    """Create a bundle, and queues of CTranslate2 with the same weights by threads and largest batch."""
    # Imports torch and the `bench` extra, which the load generator's process and --help do not need.
    from benchmarks.load.bundles import export_random

    trained = export_random(preset, folder / "bundle", vocab_size=None)
    if not batch_sizes:
        return {}
    from benchmarks.peers.ctranslate2_peer import CTranslate2Peer, convert

    tokens = convert(trained.model, folder / "ct2")
    queues = {}
    for workers in sorted({1, num_cores}):
        peer = CTranslate2Peer(folder / "ct2", tokens, "int8", workers, num_cores // workers)
        for batch_size in batch_sizes:
            queues[f"{workers}x{num_cores // workers}", batch_size] = PeerQueue(peer, workers, batch_size)
    return queues


def bars(closed: Figures, sweep: Sequence[Figures], against: Figures) -> list[Figures]:
    """Returns the bars with the measured values, and whether each is met."""
    found = [
        bar(f"{way} to engine, tokens/s, {mix}", figures[way]["to_engine"], 0.85)
        for mix, figures in closed.items()
        for way in ("unary", "stream")
    ]
    for row in sweep:
        for name, key in (("first token", "first_token"), ("between tokens", "inter_token")):
            label = f"{name} p99 to ideal at {row['load']:.0%}"
            found.append(bar(label, row[f"{key}_p99_to_ideal"], 1.3, is_least=False))
    if against:
        ratio = against["rate_ratio_at_same_p99"]
        found.append(bar("requests/s to CTranslate2's at the same p99", ratio, 2.0))
    for mix, figures in closed.items():
        ratio = 1 / figures["static"]["to_engine"]
        found.append(bar(f"engine to padded static batches, tokens/s, {mix}", ratio, 1.6))
    return found


def render(report: Figures) -> list[Table]:
    """Returns the report as tables for the terminal."""

    def milliseconds(row: Figures, name: str) -> str:
        return f"{1e3 * row[f'{name}_p50']:.1f}  {1e3 * row[f'{name}_p99']:.1f}"

    def beside_ideal(row: Figures, name: str) -> list[str]:
        ratios = f"{row[f'{name}_p50_to_ideal']:.2f}  {row[f'{name}_p99_to_ideal']:.2f}"
        return [milliseconds(row, name), milliseconds(row, f"ideal_{name}"), ratios]

    closed = table(
        f"tokens/s at {IN_FLIGHT} in flight, and their share of the engine's",
        ("", *next(iter(report["closed_loops"].values()), ())),
        (
            (mix, *(f"{one['tokens_per_second']:.0f}  {one['to_engine']:.0%}" for one in figures.values()))
            for mix, figures in report["closed_loops"].items()
        ),
    )
    columns = ("load", "requests/s", "step", "latency", "refused", "client CPU", "server CPU", "ideal CPU")
    sweep = table(
        "streams by arrival rate; milliseconds, p50 and p99",
        columns,
        (
            (
                f"{row['load']:.0%}",
                f"{row['requests_per_second']:.1f}",
                f"{1e3 * row['step_median']:.1f}",
                milliseconds(row, "latency"),
                f"{row['refused']:.0f}",
                f"{row['client_cpu_share']:.0%}",
                f"{row['server_cpu_share']:.0%}",
                f"{row['ideal_busy_share']:.0%}",
            )
            for row in report["sweep"]
        ),
    )
    ideal = table(
        "streams beside an ideal scheduler with the same arrivals; milliseconds, p50 and p99",
        ("load", "first token", "ideal", "ratio", "between tokens", "ideal", "ratio"),
        (
            (f"{row['load']:.0%}", *beside_ideal(row, "first_token"), *beside_ideal(row, "inter_token"))
            for row in report["sweep"]
        ),
    )
    return [*([closed] if report["closed_loops"] else []), sweep, ideal, bars_table(report["bars"])]


if __name__ == "__main__":
    sys.exit(main())
