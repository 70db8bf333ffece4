"""Measures targets that must have terms beside plain beams of the same engine: `python -m benchmarks.terms`.

Each source has two terms: two of its words, translated by two words of its reference. Groups of requests,
`--in-flight` of them at once, are decoded with and without terms, one right after the other, because the
machine's speed varies over time; which one begins alternates. The ratio is that of the tokens a second of
such a pair, of whole requests without gRPC, and the median over all pairs is reported.

`others` are requests without terms: how fast they are beside as many requests with terms, compared with how
fast they are beside as many plain beams, and whether their targets are equal. `terms_present` counts whole
words in the text of a target; `bleu` compares all targets with the references. The last line on standard
output is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import re
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import sacrebleu

from benchmarks.flags import positive
from benchmarks.hardware import describe_hardware
from benchmarks.report import command, publish
from seq2seq_serve.bundle.names import Precision
from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.server.config import ProviderPolicy, RunnerConfig
from seq2seq_serve.server.library import AsyncModel
from seq2seq_serve.server.system.trimming import spare_what_lives
from seq2seq_serve.training.data.text_files import read_lines

_BEAM_SIZE, _NUM_TERMS, _LEAST_LETTERS = 5, 2, 3
_WORD = re.compile(rf"\b[^\W\d_]{{{_LEAST_LETTERS},}}\b")


class _Pair(NamedTuple):
    """A source and its reference, with the terms of the source."""

    source: str
    reference: str
    terms: list[pb.Term]


def main() -> int:
    """Measure, and print one JSON object; returns 0 if all terms are present and all others equal."""
    parser = _parser()
    options = parser.parse_args()
    try:
        lines = (list(read_lines(path)) for path in (options.sources, options.references))
        pairs = list(itertools.islice(_with_terms(zip(*lines, strict=True)), options.pairs))
        if not pairs:
            parser.error(f"no source in {options.sources} has {_NUM_TERMS} words, and its reference too")
        figures = asyncio.run(_measure(options, pairs))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    publish({"benchmark": "terms", "hardware": describe_hardware(), **figures}, options.out)
    is_right = figures["terms_present"] == 1 and all(one["are_equal"] for one in figures["others"].values())
    return 0 if is_right else 1


def _with_terms(lines: Iterator[tuple[str, str]]) -> Iterator[_Pair]:
    chance = random.Random(0)
    for source, reference in lines:
        sources, targets = (sorted(set(_WORD.findall(text))) for text in (source, reference))
        words = {word.casefold(): word for word in sources}
        if len(words) < _NUM_TERMS or len(targets) < _NUM_TERMS:
            continue
        chosen = chance.sample(sorted(words.values()), _NUM_TERMS), chance.sample(targets, _NUM_TERMS)
        terms = [pb.Term(source=word, target=target) for word, target in zip(*chosen, strict=True)]
        yield _Pair(source, reference, terms)


async def _measure(options: argparse.Namespace, pairs: list[_Pair]) -> dict[str, Any]:
    config = RunnerConfig(
        provider=ProviderPolicy.CPU,
        precision=options.precision,
        num_threads=options.threads,
        max_slots=2 * _BEAM_SIZE * options.in_flight,
    )
    model = AsyncModel(options.bundle, config)
    await model.start()
    groups = [pairs[first : first + options.in_flight] for first in range(0, len(pairs), options.in_flight)]
    beam, greedy = (
        pb.GenerateOptions(beam_size=size, max_new_tokens=options.max_new_tokens) for size in (_BEAM_SIZE, 1)
    )
    await _decode(model, groups[0], beam)
    spare_what_lives()  # as a server does
    ratios, texts, plain_texts, num_present = list[float](), list[str](), list[str](), 0
    others: dict[str, dict[str, Any]] = {
        name: {"ratios": list[float](), "are_equal": True} for name in ("beam", "greedy")
    }
    for number, group in enumerate(groups):
        speeds = {}
        for has_terms in _in_turns(number):
            seconds, answers = await _decode(model, group, beam, has_terms=has_terms)
            speeds[has_terms] = sum(answer.usage.target_tokens for answer in answers) / seconds
            (texts if has_terms else plain_texts).extend(answer.hypotheses[0].text for answer in answers)
        ratios.append(speeds[True] / speeds[False])
        for name, plain in (("beam", beam), ("greedy", greedy)):
            beside = groups[(number + 1) % len(groups)]
            taken, targets = dict[bool, float](), dict[bool, list[list[int]]]()
            for has_terms in _in_turns(number):
                neighbours = asyncio.ensure_future(_decode(model, beside, beam, has_terms=has_terms))
                taken[has_terms], answers = await _decode(model, group, plain)
                targets[has_terms] = [list(answer.hypotheses[0].token_ids) for answer in answers]
                await neighbours
            others[name]["ratios"].append(taken[False] / taken[True])
            others[name]["are_equal"] &= targets[True] == targets[False]
    await model.stop()
    for pair, text in zip(pairs, texts, strict=True):
        num_present += sum(bool(re.search(rf"\b{re.escape(term.target)}\b", text)) for term in pair.terms)
    references = [pair.reference for pair in pairs]
    return {
        "requests": len(pairs),
        "in_flight": options.in_flight,
        "terms_present": num_present / (_NUM_TERMS * len(pairs)),
        "ratio": statistics.median(ratios),
        "others": {
            name: {"ratio": statistics.median(one["ratios"]), "are_equal": one["are_equal"]}
            for name, one in others.items()
        },
        "bleu": sacrebleu.corpus_bleu(texts, [references]).score,
        "bleu_without_terms": sacrebleu.corpus_bleu(plain_texts, [references]).score,
    }


def _in_turns(number: int) -> tuple[bool, bool]:
    return (True, False) if number % 2 else (False, True)


async def _decode(
    model: AsyncModel, group: Sequence[_Pair], plain: pb.GenerateOptions, *, has_terms: bool = False
) -> tuple[float, list[pb.GenerateResponse]]:
    """Decodes sources at once, with their terms or without; returns the seconds and the answers."""
    decodings = []
    for pair in group:
        options = pb.GenerateOptions(terms=pair.terms if has_terms else ())
        options.MergeFrom(plain)
        decodings.append(model.read_options(options))
    began = time.perf_counter()
    answers = await asyncio.gather(
        *(
            model.generate([pb.Source(text=pair.source)], decoding)
            for pair, decoding in zip(group, decodings, strict=True)
        )
    )
    return time.perf_counter() - began, answers


def _parser() -> argparse.ArgumentParser:
    example = "bundles/demo runs/demo/test.source.txt runs/demo/test.target.txt --in-flight 16"
    parser = command("terms", __doc__, example)
    add = parser.add_argument
    add("bundle", type=Path, metavar="BUNDLE")
    add("sources", type=Path, metavar="SOURCES", help="file of sources, one in a line")
    add("references", type=Path, metavar="REFERENCES", help="file of their references")
    add("--precision", type=Precision, choices=list(Precision), help="default: the fastest")
    add("--threads", type=positive, default=2, help="(default: %(default)s)")
    add("--in-flight", type=positive, default=16, metavar="N", help="(default: %(default)s)")
    add("--pairs", type=positive, default=200, metavar="N", help="sources (default: %(default)s)")
    add(
        "--max-new-tokens",
        type=positive,
        metavar="N",
        help="of a target (default: the model's); one of random weights never ends before",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
