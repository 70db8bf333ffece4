"""What a draft model learns from: the targets that a finished run writes by itself.

So it learns to predict the run, and not the corpus (sequence-level knowledge distillation, Kim and Rush 2016,
arXiv:1606.07947). A server lets it draft tokens, which the run's model checks (`--draft`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from seq2seq_serve.training.config import TransformerConfig
from seq2seq_serve.training.data.corpus import CorpusFiles
from seq2seq_serve.training.data.encoded import EncodedCorpus
from seq2seq_serve.training.data.sources import TOKENS
from seq2seq_serve.training.data.text_files import write_lines
from seq2seq_serve.training.evaluation.scoring import translate
from seq2seq_serve.training.models.transformer import Transformer
from seq2seq_serve.training.presets import Preset
from seq2seq_serve.training.run import RunFolder, TrainedModel

_SOURCES_AT_ONCE = 500
# In place of the preset's: a draft is too small to overfit, and its targets are certain.
_RECIPE: Mapping[str, Any] = {
    "dropout": 0.0,
    "label_smoothing": 0.0,
    "bpe_dropout": 0.0,
    "max_length_ratio": None,
}


def recipe(preset: Preset, teacher: TrainedModel) -> Preset:
    """Returns a preset with the limits of a run, for a draft model of it.

    Raises:
        ValueError: The run is not that of a Transformer that reads texts, or tunes a published model, or the
            preset is of another family.
    """
    if not isinstance(teacher.model, Transformer) or teacher.model.source_kind is not TOKENS:
        raise ValueError("only a Transformer that reads texts can have a draft model")
    if teacher.published:
        raise ValueError("a draft model of a published model is a smaller published one with the same tokens")
    if not isinstance(preset.model, TransformerConfig):
        raise ValueError(f"a draft model is a Transformer, and {preset.name} is another one")
    limits = {name: getattr(teacher.config, name) for name in ("max_source_length", "max_target_length")}
    return preset.changed({**_RECIPE, **limits, "normalization": teacher.tokenizer.normalization})


def target_files(folder: Path) -> CorpusFiles:
    """The files of `write_targets` in the folder of a draft model's run."""
    source, target, dev_source, dev_target = (
        str(folder / "distilled" / f"{part}.{side}.txt")
        for part in ("train", "dev")
        for side in ("source", "target")
    )
    return CorpusFiles(source=source, target=target, dev_source=dev_source, dev_target=dev_target)


def write_targets(run: RunFolder, teacher: TrainedModel, out: Path, most: int, console: Console) -> None:
    """Write the run's own targets of at most `most` sources that it learned from, and of its dev sources.

    Raises:
        ValueError: The run does not have its corpus any more.
    """
    if not run.encoded.is_dir():
        raise ValueError(f"{run.encoded} is missing, so there is nothing to translate: train the run anew")
    pairs, files = EncodedCorpus(run.encoded).texts(teacher.tokenizer), target_files(out)
    sources = dict.fromkeys(pair.source for pair in islice(pairs, most))
    dev_sources = dict.fromkeys(source for source, _ in teacher.dev)
    for texts, source_file, target_file in (
        (list(dev_sources), files.dev_source, files.dev_target),
        (list(sources), files.source, files.target),
    ):
        assert source_file is not None
        assert target_file is not None
        Path(source_file).parent.mkdir(parents=True, exist_ok=True)
        write_lines(Path(source_file), texts)
        write_lines(Path(target_file), _translated(teacher, texts, console))


@torch.inference_mode()
def _translated(teacher: TrainedModel, texts: Sequence[str], console: Console) -> Iterator[str]:
    starts = range(0, len(texts), _SOURCES_AT_ONCE)
    for start in track(starts, f"translating {len(texts):,} sources", console=console):
        given = texts[start : start + _SOURCES_AT_ONCE]
        yield from translate(teacher.model, teacher.tokenizer, given, length_bound=teacher.length_bound)
