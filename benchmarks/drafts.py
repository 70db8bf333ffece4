"""Measures speculative decoding beside the same engine without it: `python -m benchmarks.drafts`.

Each group of requests, `--in-flight` of them at once, is decoded by both engines, one right after the other,
because the machine's speed varies over time; which one begins alternates. The ratio is that of such a pair,
of whole requests without gRPC, and the median over all pairs is reported, with the quartiles. The targets
must be equal. The first groups are not counted: in them the averages of times and of right drafts settle.

Acceptance is the share of drafted tokens that were selected; of the target's tokens, the rest took a step
each. With `--draft` a draft model drafts, too. `--simulated SHARE` is for models with random weights: sources
are random, n-grams do not draft, and the draft model takes its time, but each of its tokens is then the right
one with that chance. The last line on standard output is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.flags import positive
from benchmarks.hardware import describe_hardware
from benchmarks.report import command, publish
from seq2seq_serve.bundle.names import SOURCE_IDS, Precision
from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.server.config import ProviderPolicy, RunnerConfig, Speculation
from seq2seq_serve.server.engine.draft_model import DraftModel
from seq2seq_serve.server.engine.drafts import Drafter
from seq2seq_serve.server.library import AsyncModel
from seq2seq_serve.training.data.text_files import read_lines

_LEAST_PAIRS = 20
_NUM_SIMULATED, _SOURCE_TOKENS, _TARGET_TOKENS = 32, 20, 32


def main() -> int:
    """Measure, and print one JSON object; returns 0 if all targets are equal."""
    parser = _parser()
    options = parser.parse_args()
    is_simulated = options.simulated is not None
    if is_simulated != (options.texts is None) or (is_simulated and options.draft is None):
        parser.error("give either TEXTS, or --draft and --simulated")
    if options.simulated is None:
        try:
            texts = [text for text in read_lines(options.texts) if text.strip()]
        except (OSError, ValueError) as error:
            parser.error(str(error))
        if not texts:
            parser.error(f"{options.texts} contains no text")
        sources = [pb.Source(text=text) for text in texts]
    else:
        if not 0 <= options.simulated <= 1:
            parser.error("--simulated is from 0 to 1")
        sources = []
    try:
        figures = asyncio.run(_measure(options, sources))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    publish({"benchmark": "drafts", "hardware": describe_hardware(), **figures}, options.out)
    return 0 if figures["are_equal"] else 1


async def _measure(options: argparse.Namespace, sources: list[pb.Source]) -> dict[str, object]:
    settings: dict[str, Any] = {
        "provider": ProviderPolicy.CPU,
        "precision": options.precision,
        "num_threads": options.threads,
        "shares_threads": True,
        "max_slots": max(options.in_flight),
    }
    without = AsyncModel(options.bundle, RunnerConfig(**settings, speculative=Speculation.OFF))
    drafted = AsyncModel(options.bundle, RunnerConfig(**settings, draft=options.draft))
    await without.start()
    with ExitStack() as stack:
        if options.simulated is not None:
            sources = await _simulate(without, options.simulated, stack)
        await drafted.start()
        rows = [
            await _take_turns(without, drafted, sources, num_in_flight, options)
            for num_in_flight in options.in_flight
        ]
    for model in (without, drafted):
        await model.stop()
    return {"rows": rows, "are_equal": all(row["are_equal"] for row in rows)}


async def _take_turns(
    without: AsyncModel,
    drafted: AsyncModel,
    sources: Sequence[pb.Source],
    num_in_flight: int,
    options: argparse.Namespace,
) -> dict[str, object]:
    order, ratios, are_equal, endless = [without, drafted], list[float](), True, itertools.cycle(sources)
    num_tokens = num_drafted = num_accepted = 0
    num_pairs = max(options.pairs // num_in_flight, _LEAST_PAIRS)
    for number in range(num_pairs + options.warm_up):
        group = list(itertools.islice(endless, num_in_flight))
        seconds, answers = dict[AsyncModel, float](), dict[AsyncModel, list[pb.GenerateResponse]]()
        order.reverse()
        for model in order:
            began = time.perf_counter()
            answers[model] = await _decode(model, group, options.simulated)
            seconds[model] = time.perf_counter() - began
        ids = [[list(answer.hypotheses[0].token_ids) for answer in answers[model]] for model in order]
        are_equal &= ids[0] == ids[1]
        if number < options.warm_up:
            continue
        ratios.append(seconds[without] / seconds[drafted])
        for answer in answers[drafted]:
            num_tokens += answer.usage.target_tokens
            num_drafted += answer.timings.draft_tokens
            num_accepted += answer.timings.accepted_tokens
    return {
        "in_flight": num_in_flight,
        "ratio": statistics.median(ratios),
        "quartiles": statistics.quantiles(ratios, n=4),
        "drafted_tokens": num_drafted,
        "accepted_tokens": num_accepted,
        "acceptance": num_accepted / num_drafted if num_drafted else None,
        "accepted_share_of_targets": num_accepted / num_tokens,
        "are_equal": are_equal,
    }


async def _simulate(model: AsyncModel, share: float, stack: ExitStack) -> list[pb.Source]:
    """Let draft models know the targets of random sources, which are returned, until the stack ends."""
    chance = random.Random(0)
    size, eos_id = model.description.vocab_size, model.description.eos_ids[0]
    ids = [
        (*chance.choices(range(10, size // 2), k=_SOURCE_TOKENS - 1), eos_id) for _ in range(_NUM_SIMULATED)
    ]
    sources = [pb.Source(token_ids=pb.TokenIds(values=each)) for each in ids]
    answers = [(await _decode(model, [source], share))[0] for source in sources]
    targets = {each: list(answer.hypotheses[0].token_ids) for each, answer in zip(ids, answers, strict=True)}
    propose = DraftModel._propose

    def propose_right(self: DraftModel, rows: Any, most: Any) -> None:
        propose(self, rows, most)
        for row in rows:
            sequence = row.sequence
            right = targets[tuple(sequence.request.sources[SOURCE_IDS])][sequence.num_generated :]
            row.token_ids = [
                token_id if chance.random() < share else other
                for token_id, other in zip(right, row.token_ids, strict=False)
            ]
            row.fed[row.num_read :] = row.token_ids[: len(row.fed) - row.num_read]  # as if it had fed them

    stack.enter_context(patch.object(DraftModel, "_propose", propose_right))
    stack.enter_context(patch.object(Drafter, "draft", lambda *_: ()))
    return sources


async def _decode(
    model: AsyncModel, sources: Sequence[pb.Source], simulated: float | None
) -> list[pb.GenerateResponse]:
    """Decode sources at once, greedily unless the model's defaults are others."""
    options = pb.GenerateOptions()
    if simulated is not None:
        options.max_new_tokens = _TARGET_TOKENS
    decoding = model.read_options(options)
    return await asyncio.gather(*(model.generate([source], decoding) for source in sources))


def _counts(text: str) -> list[int]:
    return [positive(count) for count in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = command("drafts", __doc__, "bundles/marian benchmarks/quality/russian.txt --in-flight 1,32")
    add = parser.add_argument
    add("bundle", type=Path, metavar="BUNDLE")
    add("texts", type=Path, nargs="?", metavar="TEXTS", help="file of sources, one in a line")
    add("--draft", type=Path, metavar="BUNDLE", help="a draft model (default: n-grams alone)")
    add("--simulated", type=float, metavar="SHARE", help="the share of right drafts, in place of TEXTS")
    add("--precision", type=Precision, choices=list(Precision), help="default: the fastest")
    add("--threads", type=positive, default=2, help="(default: %(default)s)")
    add("--in-flight", type=_counts, default=[1], metavar="N,…", help="requests at once (default: 1)")
    add("--pairs", type=positive, default=200, help="requests of each number at once (default: %(default)s)")
    add("--warm-up", type=positive, default=20, help="untimed groups first (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
