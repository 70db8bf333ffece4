"""The folder of a training run: what lies in it, and how a trained model is read from it.

config.json        model, recipe, preset, corpus and its hash, commit, versions
tokenizer.json     the `tokenizers` library's own format
dev.source.txt …   held-out pairs; test.source.txt … where the corpus has a test set
encoded/           the training corpus as token ids; made again from its files where it is missing
source.vectors.pt … what embeddings started as, where that was read from a file
initial.pt         the weights of the run that this one started from, if it did
checkpoints/       what training resumes from
metrics.jsonl      one JSON object a line; tensorboard/ and learning-curve.png show the same
model.pt           the final weights
summary.json       dev score, steps, seconds: written last; summary.before.json while a finished run goes on
"""

from __future__ import annotations

import dataclasses
import json
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from bundle.manifest import LengthBound
from bundle.names import TOKENIZER_FILE
from bundle.tokenizer import Tokenizer
from training.checkpoint import (
    average_weights,
    checkpoint_path,
    checkpoint_step,
    list_checkpoints,
    load_tensors,
    load_weights,
    save_tensors,
    write_atomically,
)
from training.config import TrainingConfig, TransformerConfig, check_special_ids
from training.corpus import CorpusFiles
from training.encoded import EncodedCorpus
from training.lengths import learn_length_bound
from training.text_files import SentencePair, read_parallel, write_lines
from training.transformer import Transformer

RUN_FORMAT = 1


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides what a run learns.

    Attributes:
        model: With the tokenizer's own vocabulary size.
        corpus: One line for people.
        commit: Of this repository, all that the run went on with; "unknown" outside git.
        versions: Of what computed it last.
        parent: The run whose weights it started with, one line for people; empty where they were random.
        length_bound: Of targets, learned from the corpus; None in a run that is older than the bound.
    """

    preset: str
    model: TransformerConfig
    training: TrainingConfig
    corpus: str
    corpus_files: CorpusFiles
    corpus_sha256: str
    commit: str
    versions: dict[str, str]
    parent: str = ""
    length_bound: LengthBound | None = None

    def to_json(self) -> dict[str, Any]:
        """For `config.json`."""
        return {"format": RUN_FORMAT} | dataclasses.asdict(self)

    @classmethod
    def from_json(cls, content: Any) -> RunConfig:
        """Read what `to_json` gave.

        Raises:
            ValueError: It is of another format, or a field is missing or wrong.
        """
        if not isinstance(content, dict) or content.get("format") != RUN_FORMAT:
            raise ValueError(f"not the configuration of a run of format {RUN_FORMAT}")
        bound = content.get("length_bound")
        try:
            return cls(
                preset=content["preset"],
                model=TransformerConfig.from_json(content["model"]),
                training=TrainingConfig.from_json(content["training"]),
                corpus=content["corpus"],
                corpus_files=CorpusFiles(**content["corpus_files"]),
                corpus_sha256=content["corpus_sha256"],
                commit=content["commit"],
                versions=dict(content["versions"]),
                parent=content.get("parent", ""),
                length_bound=LengthBound(**bound) if bound else None,
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"a field is missing or wrong: {error}") from error


@dataclass(frozen=True)
class Summary:
    """What came out of a run.

    Attributes:
        weights: Which weights `model.pt` holds.
        steps: Optimizer steps until training stopped.
        seconds: Training and scoring, of all sessions.
    """

    dev_bleu: float
    dev_chrf: float
    bleu_signature: str
    chrf_signature: str
    weights: str
    steps: int
    seconds: float


@dataclass(frozen=True)
class TrainedModel:
    """A model of a run, ready to be used.

    Attributes:
        model: In eval mode, on the CPU.
        provenance: For people, every value a text; what has a field of its own is not repeated.
        dev: Source and reference of each held-out pair.
        dev_score: sacreBLEU of greedy search on them; None where nobody scored these weights.
        source_language: As the recipe names it; empty where it does not.
        length_bound: Of targets; None where the corpus is not known.
    """

    model: Transformer
    tokenizer: Tokenizer
    config: TransformerConfig
    provenance: dict[str, str]
    dev: list[tuple[str, str]]
    dev_score: float | None = None
    source_language: str = ""
    length_bound: LengthBound | None = None


@dataclass(frozen=True)
class RunFolder:
    """The paths of a run's files, and how the small ones are written and read."""

    path: Path

    @property
    def config_file(self) -> Path:
        """`config.json`: a folder that has it is a run."""
        return self.path / "config.json"

    @property
    def tokenizer_file(self) -> Path:
        """The one tokenizer of source and target."""
        return self.path / TOKENIZER_FILE

    @property
    def model_file(self) -> Path:
        """The final weights."""
        return self.path / "model.pt"

    @property
    def initial_file(self) -> Path:
        """What weights started as, where the run started from another one."""
        return self.path / "initial.pt"

    @property
    def summary_file(self) -> Path:
        """`summary.json`: a run that has it is finished."""
        return self.path / "summary.json"

    @property
    def summary_before_file(self) -> Path:
        """`summary.before.json`: of what `model.pt` was when a finished run went on."""
        return self.path / "summary.before.json"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def metrics_file(self) -> Path:
        """One JSON object a line."""
        return self.path / "metrics.jsonl"

    def read_metrics(self) -> list[dict[str, Any]]:
        """What was recorded, in the order of the steps."""
        return [json.loads(line) for line in self.metrics_file.read_text(encoding="utf-8").splitlines()]

    @property
    def curve_file(self) -> Path:
        """`learning-curve.png`."""
        return self.path / "learning-curve.png"

    @property
    def encoded(self) -> Path:
        """The folder of the training corpus as token ids."""
        return self.path / "encoded"

    def learn_length_bound(self) -> LengthBound | None:
        """The bound that the training corpus teaches; None where its token ids were removed or are none."""
        corpus = EncodedCorpus(self.encoded) if self.encoded.is_dir() else None
        return learn_length_bound(corpus.source_lengths, corpus.target_lengths) if corpus else None

    @property
    def tensorboard(self) -> Path:
        """The folder of TensorBoard's event files."""
        return self.path / "tensorboard"

    @property
    def is_run(self) -> bool:
        """Whether a run was started here."""
        return self.config_file.is_file()

    @property
    def is_finished(self) -> bool:
        """Whether the run came to its end."""
        return self.summary_file.is_file()

    def check_is_free(self, advice: str = "give another folder") -> None:
        """Make sure that a new run can be started here.

        Raises:
            ValueError: A run was started here already (`advice` is added to the message), or it is a file.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self.path} is a file, and a run needs a folder")
        if self.is_run:
            raise ValueError(f"{self.path} already holds a run: {advice}")

    def text_files(self, part: str) -> tuple[Path, Path]:
        """Source and target file of "dev" or "test"."""
        return self.path / f"{part}.source.txt", self.path / f"{part}.target.txt"

    def vectors_file(self, side: str) -> Path:
        """What the embeddings of "source" or "target" started as, if not at random."""
        return self.path / f"{side}.vectors.pt"

    @property
    def optional_files(self) -> list[Path]:
        """What a start writes only where it is asked to, and what then decides what the run is."""
        return [self.initial_file, *map(self.vectors_file, ("source", "target")), *self.text_files("test")]

    def write_pairs(self, part: str, pairs: Sequence[SentencePair]) -> None:
        """Write the pairs of "dev" or "test"."""
        source_file, target_file = self.text_files(part)
        write_lines(source_file, [pair.source for pair in pairs])
        write_lines(target_file, [pair.target for pair in pairs])

    def read_pairs(self, part: str) -> list[SentencePair]:
        """Read what `write_pairs` wrote.

        Raises:
            ValueError: The run has no such pairs, or the two files do not fit.
            OSError: A file cannot be read.
        """
        files = self.text_files(part)
        if not any(file.is_file() for file in files):
            raise ValueError(f"the run {self.path} has no {part} pairs")
        return read_parallel(*files)

    def write_config(self, config: RunConfig) -> None:
        """Write `config.json`."""
        _write_json(self.config_file, config.to_json())

    def read_config(self) -> RunConfig:
        """Read `config.json`.

        Raises:
            ValueError: It is missing or wrong; the message names it.
        """
        try:
            return RunConfig.from_json(_read_json(self.config_file))
        except ValueError as error:
            raise ValueError(f"{self.config_file}: {error}") from error

    def write_model(self, weights: dict[str, torch.Tensor]) -> None:
        """Write `model.pt`."""
        _write_weights(self.model_file, weights)

    def write_initial(self, weights: dict[str, torch.Tensor]) -> None:
        """Write what `read_initial` gives."""
        _write_weights(self.initial_file, weights)

    def read_initial(self) -> dict[str, torch.Tensor] | None:
        """What weights start as; None where they are random.

        Raises:
            ValueError: The file is damaged.
        """
        return _read_weights(self.initial_file) if self.initial_file.is_file() else None

    def write_summary(self, summary: Summary) -> None:
        """Write `summary.json`, last of all files."""
        _write_json(self.summary_file, dataclasses.asdict(summary))

    def read_summary(self) -> Summary:
        """Read `summary.json`.

        Raises:
            ValueError: It is missing or wrong; the message names it.
        """
        return _read_summary(self.summary_file)

    def read_summary_before(self) -> Summary | None:
        """What the run had come to before it went on; None where it has not finished before."""
        file = self.summary_before_file
        return _read_summary(file) if file.is_file() else None


def load_run(path: Path | str) -> TrainedModel:
    """Read a finished run.

    Raises:
        ValueError: Files are missing (all are listed), damaged, or do not fit each other.
    """
    folder = RunFolder(Path(path))
    _check_files(folder, folder.model_file, folder.summary_file)
    summary = folder.read_summary()
    weights = _read_weights(folder.model_file)
    trained = _with_weights(folder, weights, folder.model_file, summary.weights, summary.steps)
    signature = {"dev_score_signature": summary.bleu_signature}
    return dataclasses.replace(trained, provenance=trained.provenance | signature, dev_score=summary.dev_bleu)


def load_checkpoints(path: Path | str, steps: Sequence[int]) -> TrainedModel:
    """Read the mean of some checkpoints of a run, which need not have finished.

    Raises:
        ValueError: As `load_run`, and where there is no checkpoint of a step.
    """
    folder = RunFolder(Path(path))
    _check_files(folder)
    there = [checkpoint_step(file) for file in list_checkpoints(folder.checkpoints)]
    if missing := sorted(set(steps) - set(there)):
        has = f"those of {', '.join(map(str, there))}" if there else "none"
        raise ValueError(f"{path} has no checkpoint of step {missing[0]}; it has {has}")
    files = [checkpoint_path(folder.checkpoints, step) for step in steps]
    numbers = ", ".join(map(str, steps))
    name = (
        f"checkpoint at step {numbers}"
        if len(steps) == 1
        else f"average of the checkpoints at steps {numbers}"
    )
    return _with_weights(folder, average_weights(files), files[-1], name, max(steps))


def _with_weights(
    folder: RunFolder, weights: dict[str, torch.Tensor], origin: Path, name: str, num_steps: int
) -> TrainedModel:
    config = folder.read_config()
    tokenizer = Tokenizer.load(folder.tokenizer_file)
    check_special_ids(tokenizer)
    if tokenizer.vocab_size != config.model.vocab_size:
        raise ValueError(
            f"{folder.tokenizer_file} has {tokenizer.vocab_size} tokens, "
            f"and {folder.config_file.name} says {config.model.vocab_size}"
        )
    model = Transformer(config.model)
    load_weights(model, weights, origin)
    provenance = {
        "preset": config.preset,
        "corpus": config.corpus,
        "corpus_sha256": config.corpus_sha256,
        "seed": str(config.training.seed),
        "commit": config.commit,
        "weights": name,
        "steps": str(num_steps),
    } | config.versions
    if config.parent:
        provenance["parent"] = config.parent
    dev = [(pair.source, pair.target) for pair in folder.read_pairs("dev")]
    bound = config.length_bound or folder.learn_length_bound()
    return TrainedModel(
        model.eval(),
        tokenizer,
        config.model,
        provenance,
        dev,
        source_language=config.training.source_language or "",
        length_bound=bound,
    )


def library_versions() -> dict[str, str]:
    """What computes here: Python and torch."""
    return {"python": platform.python_version(), "torch": torch.__version__}


def repository_commit() -> str:
    """The commit of this repository, marked where files differ from it; "unknown" outside git."""
    command = ["git", "describe", "--always", "--abbrev=40", "--dirty", "--match="]
    try:
        output = subprocess.check_output(command, cwd=Path(__file__).parent, stderr=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return output.decode().strip()


def _check_files(folder: RunFolder, *finished: Path) -> None:
    if not folder.is_run:
        raise ValueError(f"{folder.path} is not a training run: there is no {folder.config_file.name} in it")
    needed = folder.tokenizer_file, *folder.text_files("dev"), *finished
    missing = [file.name for file in needed if not file.is_file()]
    if missing:
        preset = folder.read_config().preset
        raise ValueError(
            f"{folder.path} lacks {', '.join(missing)}: training has not finished "
            f"(go on with `python -m training train {preset} --out {folder.path} --resume`, "
            "or `python -m training score` a checkpoint with --step)"
        )


def _write_weights(path: Path, weights: dict[str, torch.Tensor]) -> None:
    save_tensors(path, {"weights": weights})


def _read_weights(path: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = load_tensors(path, keys=["weights"])["weights"]
    return weights


def _read_summary(path: Path) -> Summary:
    try:
        return Summary(**_read_json(path))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error


def _write_json(path: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"

    def write(stream: IO[bytes]) -> None:
        stream.write(text.encode())

    write_atomically(path, write)


def _read_json(path: Path) -> Any:
    if not path.is_file():
        raise ValueError("no such file")
    return json.loads(path.read_text(encoding="utf-8"))
