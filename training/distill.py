"""The corpus of a draft model: sources of a finished run, with the targets that the run itself writes.

From it a model learns to predict the run, and not the run's corpus (sequence-level knowledge distillation,
Kim and Rush 2016, arXiv:1606.07947). A server lets it draft tokens, which the run's model checks (`--draft`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from seq2seq_serve.bundle.manifest import file_spec
from seq2seq_serve.training.data.corpus import CorpusFiles
from seq2seq_serve.training.data.encoded import EncodedCorpus
from seq2seq_serve.training.data.sources import TOKENS
from seq2seq_serve.training.data.text_files import read_lines, write_lines
from seq2seq_serve.training.evaluation.scoring import translate
from seq2seq_serve.training.models.transformer import Transformer
from seq2seq_serve.training.presets import Preset
from seq2seq_serve.training.run import RunFolder, TrainedModel

_log = logging.getLogger(__name__)

_SOURCES_AT_ONCE = 500
_OF_THE_RUN = "normalization", "vocab_size", "max_source_length", "max_target_length"
# In place of the preset's: a draft is too small to overfit, its targets are certain, and none is dropped.
_RECIPE: Mapping[str, Any] = {
    "dropout": 0.0,
    "label_smoothing": 0.0,
    "bpe_dropout": 0.0,
    "max_length_ratio": None,
}


def recipe(preset: Preset, teacher: TrainedModel, settings: Iterable[str]) -> Preset:
    """Returns a preset with the limits of a run, for a draft model of it.

    Args:
        preset: The preset of a Transformer.
        teacher: The run.
        settings: The names of the settings that will replace others.

    Raises:
        ValueError: One of the settings is given by the run, the run is not that of a Transformer that reads
            texts, or tunes a published model.
    """
    if given := sorted(set(settings) & set(_OF_THE_RUN)):
        raise ValueError(f"a draft model takes {', '.join(given)} from its run: leave out what --set gives")
    if not isinstance(teacher.model, Transformer) or teacher.model.source_kind is not TOKENS:
        raise ValueError("only a Transformer that reads texts can have a draft model")
    if teacher.published:
        raise ValueError("a draft model of a published model is a smaller published one with the same tokens")
    limits = {name: getattr(teacher.config, name) for name in ("max_source_length", "max_target_length")}
    return preset.changed({**_RECIPE, **limits, "normalization": teacher.tokenizer.normalization})


def distilled_folder(out: Path) -> Path:
    """The folder of the corpus in that of a draft model's run."""
    return out / "distilled"


def target_files(folder: Path) -> CorpusFiles:
    """The files of `write_targets` in the folder of a draft model's run."""
    source, target, dev_source, dev_target = (
        str(distilled_folder(folder) / f"{part}.{side}.txt")
        for part in ("train", "dev")
        for side in ("source", "target")
    )
    return CorpusFiles(source=source, target=target, dev_source=dev_source, dev_target=dev_target)


def write_targets(
    run: RunFolder, teacher: TrainedModel, out: Path, most: int, device: torch.device, console: Console
) -> None:
    """Write the run's own targets of about `most` sources that it learned from, and of its dev sources.

    Targets that an earlier call has written with the same weights are kept.

    Raises:
        ValueError: The run does not have its corpus any more, or an earlier call has targets of other
            sources.
    """
    if not run.encoded.is_dir():
        raise ValueError(f"{run.encoded} is missing, so there is nothing to translate: train the run anew")
    files = target_files(out)
    weights = file_spec(run.path, run.model_file.name).sha256
    _start_anew_with(weights, distilled_folder(out), files)
    pairs = EncodedCorpus(run.encoded)
    num_sources = min(most, len(pairs))
    chosen = (pairs[number * len(pairs) // num_sources] for number in range(num_sources))  # of all parts
    texts_of_train = teacher.tokenizer.decode_batch([pair.source_ids for pair in chosen])
    sources, dev_sources = (
        dict.fromkeys(" ".join(text.splitlines()) for text in texts)
        for texts in (texts_of_train, (source for source, _ in teacher.dev))
    )
    teacher.model.to(device)
    for part, texts, source_file, target_file in (
        ("dev", list(dev_sources), files.dev_source, files.dev_target),
        ("training", list(sources), files.source, files.target),
    ):
        assert source_file is not None
        assert target_file is not None
        _translate(teacher, part, texts, Path(source_file), Path(target_file), console)


def _start_anew_with(weights: str, folder: Path, files: CorpusFiles) -> None:
    """Remove what a run with other weights has written.

    Raises:
        ValueError: The folder has files of others.
    """
    weights_file = folder / "weights.sha256"
    own = {weights_file, *map(Path, files.names)}
    found = set(folder.iterdir()) if folder.is_dir() else set()
    if folder.is_symlink() or found - own or (found and weights_file not in found):
        raise ValueError(f"{folder} has files that `distill` did not write: give another --out")
    if not found or weights_file.read_text(encoding="utf-8") != weights:
        for old in found:
            old.unlink()
        folder.mkdir(parents=True, exist_ok=True)
        weights_file.write_text(weights, encoding="utf-8")


@torch.inference_mode()
def _translate(
    teacher: TrainedModel,
    part: str,
    texts: Sequence[str],
    source_file: Path,
    target_file: Path,
    console: Console,
) -> None:
    content = target_file.read_bytes() if target_file.is_file() else b""
    done = content[: content.rfind(b"\n") + 1].decode().split("\n")[:-1]  # whole lines alone
    known = read_lines(source_file) if source_file.is_file() else []
    if done and known != texts:
        raise ValueError(
            f"{target_file} has {len(done):,} targets, for another --max-sources: give the same one again, "
            f"give another --out, or remove {target_file.parent}"
        )
    if done:
        _log.info("%s of %s %s targets are there already", f"{len(done):,}", f"{len(texts):,}", part)
    if not done:
        write_lines(source_file, texts)
    write_lines(target_file, done)
    if len(done) == len(texts):
        return
    starts = range(len(done), len(texts), _SOURCES_AT_ONCE)
    with target_file.open("a", encoding="utf-8") as file:
        for start in track(starts, f"translating {len(texts):,} {part} sources", console=console):
            given = texts[start : start + _SOURCES_AT_ONCE]
            targets = translate(teacher.model, teacher.tokenizer, given, length_bound=teacher.length_bound)
            file.writelines(" ".join(target.splitlines()) + "\n" for target in targets)
            file.flush()
