"""Training from a program: `train` starts or continues a run as `python -m training train` does.

The command calls it, too. Messages are logged; nothing is printed but the progress bar.
"""

from __future__ import annotations

import seq2seq_serve.training.spin  # noqa: F401  # isort: skip

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from seq2seq_serve.bundle.normalization import Normalization
from seq2seq_serve.training import commands
from seq2seq_serve.training.config import Lora, TrainingPrecision
from seq2seq_serve.training.data.corpus import CorpusFiles
from seq2seq_serve.training.evaluation.scoring import translate
from seq2seq_serve.training.ranks import current_rank, joined_ranks, local_rank, num_local_ranks
from seq2seq_serve.training.run import RunFolder, Summary, TrainedModel, load_checkpoints, load_run

_Name = str | os.PathLike[str]
_Pairs = Iterable[tuple[str, str]]


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        folder: Its folder, which `python -m export` takes.
        summary: Its scores, its steps, and which weights were chosen.
    """

    folder: Path
    summary: Summary

    @property
    def score(self) -> float:
        """The best dev score by the run's metric; higher is better."""
        return self.summary.dev_score

    @cached_property
    def model(self) -> TrainedModel:
        """The model of the final weights, with its tokenizer and facts about it."""
        return load_run(self.folder)

    def checkpoint(self, step: int) -> TrainedModel:
        """The model after a step whose checkpoint was kept; raises ValueError for another step."""
        return load_checkpoints(self.folder, [step])

    def translate(self, sources: Sequence[str], *, beam_size: int = 1, alpha: float = 0.6) -> list[str]:
        """The targets of sources as the corpus has them: texts, stories with a question, or names of files.

        Args:
            sources: Any number of them.
            beam_size: 1 is greedy search.
            alpha: The length penalty of a beam search (`training.evaluation.search`).

        Raises:
            SourceLengthError: A source is empty or too long for the model.
        """
        model = self.model
        return translate(
            model.model,
            model.tokenizer,
            sources,
            beam_size=beam_size,
            alpha=alpha,
            length_bound=model.length_bound,
        )


def train(
    preset: str,
    out: _Name,
    pairs: _Pairs | None = None,
    *,
    dev_pairs: _Pairs | None = None,
    source: _Name | None = None,
    target: _Name | None = None,
    tsv: _Name | None = None,
    data: _Name | None = None,
    dev_source: _Name | None = None,
    dev_target: _Name | None = None,
    dev_tsv: _Name | None = None,
    dev_data: _Name | None = None,
    source_field: str = CorpusFiles.source_field,
    target_field: str = CorpusFiles.target_field,
    parent: _Name | None = None,
    lora: Lora | Mapping[str, Any] | None = None,
    resume: bool = False,
    max_steps: int | None = None,
    precision: TrainingPrecision | None = None,
    micro_batch_tokens: int | None = None,
    seed: int | None = None,
    vocab_size: int | None = None,
    normalization: Normalization | None = None,
    source_language: str | None = None,
    target_language: str | None = None,
    settings: Mapping[str, Any] | None = None,
    device: str | torch.device = "auto",
    threads: int | None = None,
    compile: bool = False,
    progress: bool | Console = True,
) -> Run:
    """Starts or continues a run, and returns it when it is finished.

    The arguments are the flags of `python -m training train`; None is the preset's value.

    Args:
        preset: The model and its recipe, such as "tiny".
        out: The run's folder.
        pairs: A source and its target each. The run keeps them in `pairs.jsonl`. Names of files as sources
            have to be absolute. Without pairs and files, the corpus is the built-in one.
        dev_pairs: The held-out pairs; None holds out some of `pairs`.
        source: In place of pairs: the file of sources, one per line.
        target: The file of their targets.
        tsv: Instead of both: a file with source, tab, target on each line.
        data: Instead of them: records (`training.data.records`).
        dev_source: As `source`, for the held-out pairs; None holds out some.
        dev_target: As `target`.
        dev_tsv: As `tsv`.
        dev_data: As `data`.
        source_field: The field of the source in records.
        target_field: The field of the target.
        parent: `--from`: the finished run, or the folder of a published model, to start with.
        lora: With `parent`: the settings of an adapter to train, such as `{"rank": 16}`.
        resume: Whether a run in the folder is continued; otherwise it is an error.
        max_steps: The last step.
        precision: The number format of matrix products.
        micro_batch_tokens: The most padded tokens that go through the model at once.
        seed: The seed of weights, dropout and order.
        vocab_size: The most tokens of the vocabulary.
        normalization: How texts are normalised before tokenization.
        source_language: BCP 47 tag of the sources' language.
        target_language: BCP 47 tag of the targets' language.
        settings: `--set`: any fields of the preset's model and recipe, the ones above, too.
        device: "auto", "cpu", "cuda" or "cuda:N".
        threads: CPU threads; None is the CPUs that this process may use.
        compile: Whether `torch.compile` compiles the model.
        progress: Whether a bar is shown on stderr, or the console that shows it.

    Raises:
        ValueError: A setting, the corpus or the folder is wrong, or training diverged.
        OSError: A file cannot be read or written.
        TrainingInterrupted: Ctrl-C or SIGTERM; a checkpoint was written, and `resume` continues from it.
    """
    flags = {
        "max_steps": max_steps,
        "precision": precision,
        "micro_batch_tokens": micro_batch_tokens,
        "seed": seed,
        "vocab_size": vocab_size,
        "normalization": normalization,
        "source_language": source_language,
        "target_language": target_language,
        "lora": Lora(**lora) if isinstance(lora, Mapping) else lora,
    }
    given = {name: value for name, value in flags.items() if value is not None}
    if twice := given.keys() & (settings or {}).keys():
        raise ValueError(f"{', '.join(sorted(twice))}: given as an argument and in settings")
    names = {
        "source": source,
        "target": target,
        "tsv": tsv,
        "data": data,
        "dev_source": dev_source,
        "dev_target": dev_target,
        "dev_tsv": dev_tsv,
        "dev_data": dev_data,
    }
    of_files = {name: os.fspath(file) for name, file in names.items() if file is not None}
    if pairs is not None and of_files:
        raise ValueError(f"give either pairs or files, not both: {', '.join(of_files)}")
    if pairs is None and dev_pairs is not None:
        raise ValueError("dev_pairs go with pairs: give both")
    folder = RunFolder(Path(out))
    if pairs is not None:
        of_files = _write_pairs(folder, pairs, dev_pairs, is_resumed=resume)
    request = commands.TrainRequest(
        preset=preset,
        out=folder.path,
        files=CorpusFiles(**of_files, source_field=source_field, target_field=target_field),
        settings={**given, **(settings or {})},
        is_resumed=resume,
        is_compiled=compile,
        parent=None if parent is None else Path(parent),
    )
    return run(request, device, threads, progress)


def run(
    request: commands.TrainRequest,
    device: str | torch.device = "auto",
    threads: int | None = None,
    progress: bool | Console = True,
) -> Run:
    """Trains what is requested, with the processes that `torchrun` started; raises as `train`."""
    if not isinstance(progress, Console):
        progress = Console(stderr=True, force_jupyter=False, quiet=not progress)
    if not isinstance(device, torch.device):
        device = find_device(device)
    # torch starts a thread for each CPU of the machine. In a process tied to a few CPUs that is many times
    # slower.
    has_affinity = hasattr(os, "sched_getaffinity")  # Linux only
    num_cpus = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    torch.set_num_threads(threads or max(num_cpus // num_local_ranks(), 1))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with joined_ranks() as ranks:
        return Run(request.out, commands.train(request, device, ranks, progress))


def find_device(name: str) -> torch.device:
    """Returns the device of a flag's text, and this process' own GPU for "cuda".

    Raises:
        ValueError: There is no such device.
    """
    num_devices = torch.cuda.device_count()
    if name == "auto":
        name = "cuda" if num_devices else "cpu"
    unknown = ValueError(f"{name!r} is unknown: give auto, cpu, cuda or cuda:N")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise unknown from error
    if device.type not in ("cpu", "cuda"):
        raise unknown
    if device.type == "cuda":
        device = torch.device("cuda", local_rank() if device.index is None else device.index)
        if device.index >= num_devices:
            raise ValueError(f"there is no {device}: torch finds {num_devices} CUDA devices")
    return device


def _write_pairs(
    folder: RunFolder, pairs: _Pairs, dev_pairs: _Pairs | None, *, is_resumed: bool
) -> dict[str, str]:
    """Keeps the pairs in the run's folder, from which it continues, and returns their files by field."""
    if not is_resumed:
        folder.check_is_free("give resume=True to continue it, or another folder")
    files = {}
    for name, part in (("data", pairs), ("dev_data", dev_pairs)):
        if part is None:
            continue
        content = "".join(json.dumps(_record(pair)) + "\n" for pair in part).encode()
        file = folder.path / ("pairs.jsonl" if name == "data" else "dev-pairs.jsonl")
        files[name] = str(file)
        if current_rank() or (file.is_file() and file.read_bytes() == content):
            continue
        if folder.is_run:
            raise ValueError(f"{folder.path} was started with other pairs: leave them out, or give the same")
        folder.path.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return files


def _record(pair: Any) -> dict[str, str]:
    """Returns the record of a pair; an object, as data sets have them, would be read as its keys."""
    if not (isinstance(pair, tuple | list) and len(pair) == 2 and all(isinstance(one, str) for one in pair)):
        raise ValueError(
            f"{repr(pair)[:100]} is among the pairs, and must be a source and a target, both texts"
        )
    return {"source": pair[0], "target": pair[1]}
