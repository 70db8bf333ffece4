"""Checkpoints: the whole state from which training resumes bit for bit, written whole or not at all.

The other files of a run are in `training.run`.
"""

from __future__ import annotations

import json
import math
import os
import zipfile
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from seq2seq_serve.bundle.files import sync_folder
from seq2seq_serve.training.lora import kept_weights

CHECKPOINT_FORMAT = 1
_PREFIX, _SUFFIX = "step-", ".pt"


@dataclass(frozen=True)
class BestScore:
    """The best evaluation so far by the model's metric, and the number of evaluations since then."""

    step: int
    dev_score: float
    num_worse_since: int = 0


@dataclass(frozen=True)
class Checkpoint:
    """The whole state of a training run after a step.

    Attributes:
        model: The weights by name; of a run with an adapter, only those that training changes.
        optimizer: `Optimizer.state_dict()`.
        epoch: The pass over the corpus that the next batch belongs to.
        batch_index: The next batch's number in its pass.
        best: None before the first evaluation.
        seconds: Time spent training so far, in all sessions.
        divergence: The arguments of `meter.DivergenceGuard`; a checkpoint of an older commit has none.
        is_scored: False if the evaluation of this step was interrupted.
        last_step: The last step, if `patience` ended training before `max_steps`; otherwise None.
        config: The JSON text of the model's config; None in those of older commits.
    """

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    epoch: int
    batch_index: int
    best: BestScore | None
    seconds: float
    divergence: tuple[float, int] = (math.inf, 0)
    is_scored: bool = True
    last_step: int | None = None
    config: str | None = None


def write_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file under a temporary name and rename it, so that `path` never holds half a file."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as stream:
        write(stream)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)
    sync_folder(path.parent)  # otherwise the new name may be lost after older files were removed


def save_tensors(path: Path, content: dict[str, Any]) -> None:
    """Write tensors and plain values atomically, for `load_tensors`."""
    write_atomically(path, lambda stream: torch.save({"format": CHECKPOINT_FORMAT} | content, stream))


def load_tensors(path: Path, keys: Sequence[str]) -> dict[str, Any]:
    """Read what `save_tensors` wrote, without running code from the file.

    Raises:
        ValueError: The file is missing, damaged, or lacks one of `keys`; the message names it.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such checkpoint")
    try:
        with zipfile.ZipFile(path) as archive:  # torch's loader does not check the checksums
            damaged = archive.testzip()
        if damaged is not None:
            raise ValueError(f"wrong checksum of {damaged}")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except PermissionError:
        raise
    except Exception as error:  # a damaged zip file or pickle makes its reader raise almost anything
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{path}: damaged or half-written checkpoint ({reason})") from error
    if not isinstance(content, dict) or content.get("format") != CHECKPOINT_FORMAT:
        raise ValueError(f"{path}: not a checkpoint of format {CHECKPOINT_FORMAT}")
    missing = [key for key in keys if key not in content]
    if missing:
        raise ValueError(f"{path}: the checkpoint lacks {', '.join(missing)}")
    return content


def checkpoint_path(folder: Path, step: int) -> Path:
    """The path of a step's checkpoint."""
    return folder / f"{_PREFIX}{step:08d}{_SUFFIX}"


def checkpoint_step(path: Path) -> int:
    """The step in a checkpoint's name."""
    return int(path.name.removeprefix(_PREFIX).removesuffix(_SUFFIX))


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a folder, readable or not, oldest first."""
    return sorted(folder.glob(f"{_PREFIX}{'[0-9]' * 8}{_SUFFIX}"))


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint and return its path."""
    path = checkpoint_path(folder, checkpoint.step)
    content = dict(vars(checkpoint))
    content["best"] = None if checkpoint.best is None else dict(vars(checkpoint.best))
    save_tensors(path, content)
    return path


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint; raise ValueError, with its name, if it is missing, damaged or half-written."""
    needed = [field.name for field in fields(Checkpoint) if field.default is MISSING]
    content = load_tensors(path, keys=needed)
    values = {field.name: content[field.name] for field in fields(Checkpoint) if field.name in content}
    if values["best"] is not None:
        values["best"] = BestScore(**values["best"])
    return Checkpoint(**values)


def newest_checkpoint(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that can be read, and what is wrong with each newer one.

    Raises:
        ValueError: There are checkpoints, and none of them can be read.
    """
    problems: list[str] = []
    for path in reversed(list_checkpoints(folder)):
        try:
            return load_checkpoint(path), problems
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError("no checkpoint can be read: " + "; ".join(problems))
    return None, problems


def remove_checkpoints(folder: Path, kept: Container[Path]) -> None:
    """Remove the checkpoints of a folder that are not among the kept ones."""
    for path in list_checkpoints(folder):
        if path not in kept:
            path.unlink()


def load_weights(model: nn.Module, weights: dict[str, Tensor], origin: Path) -> None:
    """Load the weights that a run keeps of a model, which were read from `origin`, into it.

    Raises:
        ValueError: The model has other weights; the message names the first one that differs.
    """
    expected, found = _shapes(kept_weights(model)), _shapes(weights)
    for name in expected | found:
        if expected.get(name) != found.get(name):
            raise ValueError(
                f"{origin}: not the weights of the model in config.json "
                f"({name} is {found.get(name, 'missing')}, expected {expected.get(name, 'none')})"
            )
    model.load_state_dict(weights, strict=False)


def check_config(found: str | None, config: str, origin: Path) -> None:
    """Raise ValueError if weights that were read from `origin` are those of a model with another config.

    Both are JSON texts; older files have None. Shapes alone do not tell: a model with another number of heads
    has the same.
    """
    ours = json.loads(config)
    for name, value in json.loads(found or "{}").items():
        if ours.get(name) != value:
            raise ValueError(
                f"{origin}: the weights of a model with {name} {json.dumps(value)}, and config.json has "
                f"{json.dumps(ours.get(name))}: write {json.dumps(value)} there"
            )


def average_weights(paths: Sequence[Path], config: str | None = None) -> dict[str, Tensor]:
    """The mean of the checkpoints' weights: Vaswani et al. 2017, section 6.1.

    The sum is in float64, so that the order of the files does not matter. `config` is compared with theirs.

    Raises:
        ValueError: A checkpoint cannot be read, or its weights have other names or shapes than the first's.
    """
    if not paths:
        raise ValueError("no checkpoint to average")
    sums: dict[str, Tensor] = {}
    dtypes: dict[str, torch.dtype] = {}
    for path in paths:
        checkpoint = load_checkpoint(path)
        weights = checkpoint.model
        if config is not None:
            check_config(checkpoint.config, config, path)
        if not sums:
            sums = {name: torch.zeros_like(weight, dtype=torch.float64) for name, weight in weights.items()}
            dtypes = {name: weight.dtype for name, weight in weights.items()}
        if _shapes(weights) != _shapes(sums):
            raise ValueError(f"{path}: its weights have other names or shapes than those of {paths[0]}")
        for name, weight in weights.items():
            sums[name] += weight
    return {name: (total / len(paths)).to(dtypes[name]) for name, total in sums.items()}


def _shapes(weights: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(weight.shape) for name, weight in weights.items()}
