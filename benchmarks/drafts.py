"""Measures speculative decoding beside the same engine without it: `python -m benchmarks.drafts`.

Each group of requests, `--in-flight` of them at once, is decoded by both engines, one right after the other,
because the machine's speed varies over time; which one begins alternates. The ratio is that of such a pair,
of whole requests without gRPC, and the median over all pairs is reported, with the quartiles. The targets
must be equal. The first round is not counted: in it the averages of times and of right predictions settle.

Acceptance is the share of drafted tokens that were selected; of the target's tokens, the rest took a step
each. The last line on standard output is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import sys
import time
from pathlib import Path

from benchmarks.flags import positive
from benchmarks.hardware import describe_hardware
from benchmarks.report import command, publish
from seq2seq_serve.bundle.names import Precision
from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.server.config import ProviderPolicy, RunnerConfig, Speculation
from seq2seq_serve.server.library import AsyncModel


def main() -> int:
    """Measure, and print one JSON object; returns 0 if all targets are equal."""
    options = _parser().parse_args()
    figures = asyncio.run(_measure(options))
    publish({"benchmark": "drafts", "hardware": describe_hardware(), **figures}, options.out)
    return 0 if figures["are_equal"] else 1


async def _measure(options: argparse.Namespace) -> dict[str, object]:
    config = RunnerConfig(
        provider=ProviderPolicy.CPU,
        precision=options.precision,
        num_threads=options.threads,
        shares_threads=True,
        max_slots=options.in_flight,
    )
    texts = itertools.cycle(options.texts.read_text().split("\n")[:-1])
    models = {}
    for speculative in Speculation:
        models[speculative] = AsyncModel(
            options.bundle, RunnerConfig(**vars(config) | {"speculative": speculative})
        )
        await models[speculative].start()
    order, ratios, are_equal = list(Speculation), list[float](), True
    num_tokens = num_drafted = num_accepted = 0
    for number in range(options.pairs + options.warm_up):
        group = list(itertools.islice(texts, options.in_flight))
        seconds, answers = dict[Speculation, float](), dict[Speculation, list[pb.GenerateResponse]]()
        order.reverse()
        for speculative in order:
            began = time.perf_counter()
            answers[speculative] = await _decode(models[speculative], group)
            seconds[speculative] = time.perf_counter() - began
        ids = [[list(answer.hypotheses[0].token_ids) for answer in answers[each]] for each in Speculation]
        are_equal &= ids[0] == ids[1]
        if number < options.warm_up:
            continue
        ratios.append(seconds[Speculation.OFF] / seconds[Speculation.NGRAM])
        for answer in answers[Speculation.NGRAM]:
            num_tokens += answer.usage.target_tokens
            num_drafted += answer.timings.draft_tokens
            num_accepted += answer.timings.accepted_tokens
    for model in models.values():
        await model.stop()
    return {
        "ratio": statistics.median(ratios),
        "quartiles": statistics.quantiles(ratios, n=4),
        "acceptance": num_accepted / max(num_drafted, 1),
        "accepted_share_of_targets": num_accepted / num_tokens,
        "are_equal": are_equal,
    }


async def _decode(model: AsyncModel, texts: list[str]) -> list[pb.GenerateResponse]:
    """Decode texts at once, greedily unless the model's defaults are others."""
    decoding = model.read_options(pb.GenerateOptions())
    return await asyncio.gather(*(model.generate([pb.Source(text=text)], decoding) for text in texts))


def _parser() -> argparse.ArgumentParser:
    parser = command("drafts", __doc__, "bundles/marian benchmarks/quality/russian.txt --in-flight 32")
    add = parser.add_argument
    add("bundle", type=Path, metavar="BUNDLE")
    add("texts", type=Path, metavar="TEXTS", help="file of sources, one in a line")
    add("--precision", type=Precision, choices=list(Precision), help="default: the fastest")
    add("--threads", type=positive, default=2, help="(default: %(default)s)")
    add("--in-flight", type=positive, default=1, help="requests at once (default: %(default)s)")
    add("--pairs", type=positive, default=100, help="groups of requests (default: %(default)s)")
    add("--warm-up", type=positive, default=20, help="untimed groups first (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
