"""The folder of a training run: its files, and how a trained model is read from them.

config.json        model, recipe, preset, corpus and its hash, commit, versions; a folder with it is a run
tokenizer.json     the one tokenizer of source and target, in the `tokenizers` library's own format
dev.source.txt …   held-out pairs; test.source.txt … if the corpus has a test set
encoded/           the training corpus as token ids; if it is missing, it is encoded again from its files
pictures/          the files of a built-in corpus of pictures or clips
source.vectors.pt … the initial word vectors of an embedding, if they were read from a file
initial.pt         the weights of the parent run, if there is one
published/         settings and tokenizers of the published model that the run tunes, if it tunes one
checkpoints/       the states from which training resumes
metrics.jsonl      one JSON object per line; tensorboard/ and learning-curve.png show the same
model.pt           the final weights; of a run with an adapter, those of the adapter alone
adapter/           the same adapter, as the library peft reads it
summary.json       dev score, steps, seconds: written last, so a run with it is finished
summary.before.json  the summary of model.pt while a finished run trains further
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import logging
import os
import platform
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import AllowInfNan, PlainValidator
from torch import Tensor

from seq2seq_serve.bundle.checked import checked, from_json
from seq2seq_serve.bundle.manifest import LengthBound, file_spec, is_checkpoint
from seq2seq_serve.bundle.names import TOKENIZER_FILE
from seq2seq_serve.bundle.sentences import split_sentences
from seq2seq_serve.bundle.tokenizer import Tokenizer
from seq2seq_serve.training.checkpoint import (
    average_weights,
    check_config,
    checkpoint_path,
    checkpoint_step,
    list_checkpoints,
    load_tensors,
    load_weights,
    save_tensors,
    write_atomically,
)
from seq2seq_serve.training.config import ModelConfig, TrainingConfig, check_special_ids
from seq2seq_serve.training.data.corpus import CorpusFiles
from seq2seq_serve.training.data.encoded import EncodedCorpus
from seq2seq_serve.training.data.lengths import learn_length_bound
from seq2seq_serve.training.data.sources import TOKENS, SourceKind
from seq2seq_serve.training.data.text_files import SentencePair, read_parallel, write_lines
from seq2seq_serve.training.huggingface.checkpoint import open_checkpoint
from seq2seq_serve.training.huggingface.tuning import names_of_layers, read_published
from seq2seq_serve.training.lora import Base, chosen_layers, linear_layers, merged_weights
from seq2seq_serve.training.models.base import EncoderDecoder, Metric
from seq2seq_serve.training.models.registry import (
    config_from_json,
    config_text,
    config_to_json,
    make_model,
    source_kind_of,
)

_log = logging.getLogger(__name__)

RUN_FORMAT = 1
_SINGLE_SHARE = 0.9  # 9 of 10 held-out sources; abbreviations count as ends of sentences


def _model_of(given: Any) -> ModelConfig:
    return given if isinstance(given, ModelConfig) else config_from_json(given)


@checked(strict=True, extra="ignore")
class RunConfig:
    """Everything that decides what a run learns.

    Attributes:
        model: Its `vocab_size` is the tokenizer's.
        corpus: One line for people about where the pairs come from.
        commit: The commits of this repository that trained the run; "unknown" outside git.
        versions: The library versions of the last session.
        parent: One line for people about the run whose weights this one started with; empty for random ones.
        length_bound: The bound on target lengths learned from the corpus; None in runs older than the bound.
        source_folder: The folder from which relative names of source files start. It is relative to the run's
            folder if it lies there, so that a run can be moved with its pictures.
        max_vocab_size: The most tokens that the tokenizer could learn; None in runs older than this field.
        base: The model that the run's adapter changes; None without an adapter.
    """

    preset: str
    model: Annotated[ModelConfig, PlainValidator(_model_of)]
    training: TrainingConfig
    corpus: str
    corpus_files: CorpusFiles
    corpus_sha256: str
    commit: str
    versions: dict[str, str]
    parent: str = ""
    length_bound: LengthBound | None = None
    source_folder: str = ""
    max_vocab_size: int | None = None
    base: Base | None = None

    def to_json(self) -> dict[str, Any]:
        """The content of `config.json`."""
        return {"format": RUN_FORMAT} | dataclasses.asdict(self) | {"model": config_to_json(self.model)}

    @classmethod
    def from_json(cls, content: Any) -> RunConfig:
        """Read what `to_json` returned; raise ValueError for another format or a missing or wrong field."""
        if not isinstance(content, dict) or content.get("format") != RUN_FORMAT:
            raise ValueError(f"not the configuration of a run of format {RUN_FORMAT}")
        return from_json(cls, content)


@checked(strict=True, extra="ignore")
class Summary:
    """The result of a run, or of weights on the way. Without generated targets, BLEU and the like are None.

    Attributes:
        metric: The score by which the weights were chosen.
        weights: Which weights `model.pt` holds.
        steps: Optimizer steps until training stopped.
        seconds: Time of training and scoring, summed over all sessions.
    """

    dev_bleu: float | None
    dev_chrf: float | None
    bleu_signature: str
    chrf_signature: str
    weights: str
    steps: int
    seconds: float
    dev_accuracy: float | None = 0.0
    dev_loss: Annotated[float, AllowInfNan(True)] = 0.0  # not a number after steps that were none
    metric: Metric = "bleu"
    dev_wer: float | None = None
    dev_cer: float | None = None

    @property
    def dev_score(self) -> float:
        """The dev score by the metric; of errors it is negative, so that a higher one is better."""
        if self.dev_cer is not None:
            return -self.dev_cer
        scores = {
            "bleu": self.dev_bleu,
            "chrf": self.dev_chrf,
            "accuracy": self.dev_accuracy,
            "likelihood": -self.dev_loss,
        }
        score = scores[self.metric]
        assert score is not None
        return score

    @property
    def scores(self) -> str:
        """All scores in one line."""
        named = (
            ("BLEU", self.dev_bleu, ""),
            ("chrF", self.dev_chrf, ""),
            ("accuracy", self.dev_accuracy, " %"),
            ("WER", self.dev_wer, " %"),
            ("CER", self.dev_cer, " %"),
        )
        texts = [f"{name} {score:.2f}{unit}" for name, score, unit in named if score is not None]
        return ", ".join([f"dev loss {self.dev_loss:.3f}", *texts])

    def __str__(self) -> str:
        if self.metric == "accuracy":
            return f"dev accuracy {self.dev_accuracy:.2f} %"
        if self.metric == "cer":
            return f"dev WER {self.dev_wer:.2f} %, CER {self.dev_cer:.2f} %"
        if self.metric == "likelihood":
            return f"dev loss {self.dev_loss:.3f}"
        if self.metric == "chrf":
            return f"dev chrF {self.dev_chrf:.2f} ({self.chrf_signature}), BLEU {self.dev_bleu:.2f}"
        return f"dev BLEU {self.dev_bleu:.2f} ({self.bleu_signature}), chrF {self.dev_chrf:.2f}"


@dataclass(frozen=True)
class TrainedModel:
    """A model of a run, ready to be used.

    Attributes:
        model: In eval mode, on the CPU; an adapter is merged into it.
        provenance: Facts for people about how the model was made; every value is a text.
        dev: Source and reference of each held-out pair.
        dev_score: The score of greedy search on `dev` by the model's metric; None if these weights were not
            scored.
        source_language: The recipe's `source_language`; empty if it has none.
        target_language: The recipe's `target_language`; empty if it has none.
        length_bound: The bound on target lengths; None if the corpus is not known.
        published: The folder with the settings and tokenizers of a published model; None for others.
        has_single_sentences: Whether the sources of the corpus are texts of one sentence, so that the model
            may leave out what follows a sentence.
    """

    model: EncoderDecoder
    tokenizer: Tokenizer
    config: ModelConfig
    provenance: dict[str, str]
    dev: list[tuple[str, str]]
    dev_score: float | None = None
    source_language: str = ""
    target_language: str = ""
    length_bound: LengthBound | None = None
    published: Path | None = None
    has_single_sentences: bool = False


class RunFolder:
    """The paths of a run's files, as the module lists them; reads and writes the small ones.

    `is_run` and `is_finished` depend on which files exist: `config.json` and `summary.json` are written last.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.json"
        self.tokenizer_file = path / TOKENIZER_FILE
        self.encoded = path / "encoded"
        self.pictures = path / "pictures"
        self.initial_file = path / "initial.pt"
        self.published = path / "published"
        self.checkpoints = path / "checkpoints"
        self.metrics_file = path / "metrics.jsonl"
        self.tensorboard = path / "tensorboard"
        self.curve_file = path / "learning-curve.png"
        self.model_file = path / "model.pt"
        self.adapter = path / "adapter"
        self.summary_file = path / "summary.json"
        self.summary_before_file = path / "summary.before.json"

    def text_files(self, part: str) -> tuple[Path, Path]:
        """Source and target file of "dev" or "test"."""
        return self.path / f"{part}.source.txt", self.path / f"{part}.target.txt"

    def vectors_file(self, side: str) -> Path:
        """The initial word vectors of "source" or "target"."""
        return self.path / f"{side}.vectors.pt"

    @property
    def optional_files(self) -> list[Path]:
        """The files that only some runs have; one left over from an interrupted start would change a run."""
        return [self.initial_file, *map(self.vectors_file, ("source", "target")), *self.text_files("test")]

    @property
    def is_run(self) -> bool:
        return self.config_file.is_file()

    @property
    def is_finished(self) -> bool:
        return self.summary_file.is_file()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps the folder for this process; raises ValueError if another one has it."""
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ValueError(f"another process trains in {self.path}: wait for it, or stop it") from error
            except OSError:
                _log.warning("%s is on a file system without locks: do not train there twice", self.path)
            yield
        finally:
            os.close(descriptor)

    def check_is_free(self, advice: str = "give another folder") -> None:
        """Raise ValueError, with the advice, if the path is a file or already holds a run."""
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self.path} is a file, and a run needs a folder")
        if self.is_run:
            raise ValueError(f"{self.path} already holds a run: {advice}")

    def write_pairs(self, part: str, pairs: Sequence[SentencePair]) -> None:
        """Write the pairs of "dev" or "test"."""
        source_file, target_file = self.text_files(part)
        write_lines(source_file, [pair.source for pair in pairs])
        write_lines(target_file, [pair.target for pair in pairs])

    def read_pairs(self, part: str) -> list[SentencePair]:
        """Read what `write_pairs` wrote; names of source files can be opened from the working directory.

        Raises:
            ValueError: The run has no such pairs, or the two files have different numbers of lines.
            OSError: A file cannot be read.
        """
        files = self.text_files(part)
        if not any(file.is_file() for file in files):
            raise ValueError(f"the run {self.path} has no {part} pairs")
        pairs, config = read_parallel(*files), self.read_config()
        if source_kind_of(config.model).is_text:
            return pairs
        folder = self.path / config.source_folder
        return [SentencePair(str(folder / pair.source), pair.target) for pair in pairs]

    def write_config(self, config: RunConfig) -> None:
        _write_json(self.config_file, config.to_json())

    def read_config(self) -> RunConfig:
        """Read `config.json`; a ValueError that names the file says what is missing or wrong."""
        try:
            return RunConfig.from_json(_read_json(self.config_file))
        except ValueError as error:
            raise ValueError(f"{self.config_file}: {error}") from error

    def read_tokenizer(self) -> Tokenizer:
        """Read `tokenizer.json`, or the tokenizers of a published model.

        Raises:
            ValueError: A file is damaged, or `tokenizer.json` has other special tokens.
        """
        if self.published.is_dir():
            return read_published(self.published).tokenizer
        tokenizer = Tokenizer.load(self.tokenizer_file)
        check_special_ids(tokenizer)
        return tokenizer

    def learn_length_bound(self, kind: SourceKind) -> LengthBound | None:
        """The length bound of an encoded corpus of texts; None if the corpus was removed or is empty.

        It is None for other sources, too: the length of a caption does not follow from the size of a picture.
        """
        corpus = EncodedCorpus(self.encoded) if kind is TOKENS and self.encoded.is_dir() else None
        return learn_length_bound(corpus.source_lengths, corpus.target_lengths) if corpus else None

    def read_metrics(self) -> list[dict[str, Any]]:
        """The recorded metrics in the order of the steps."""
        return [json.loads(line) for line in self.metrics_file.read_text(encoding="utf-8").splitlines()]

    def write_summary(self, summary: Summary) -> None:
        _write_json(self.summary_file, dataclasses.asdict(summary))

    def read_summary(self, file: Path | None = None) -> Summary:
        """Read `summary.json`, or `summary.before.json` if given; a ValueError names the file."""
        file = file or self.summary_file
        try:
            return from_json(Summary, _read_json(file))
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error


def write_weights(file: Path, weights: dict[str, Tensor], config: ModelConfig) -> None:
    """Write `model.pt` or `initial.pt`."""
    save_tensors(file, {"weights": weights, "config": config_text(config)})


def read_weights(file: Path, config: ModelConfig) -> dict[str, Tensor]:
    """Read what `write_weights` wrote.

    Raises:
        ValueError: The file is missing or damaged, or the weights are those of a model with another config.
    """
    content = load_tensors(file, keys=["weights"])
    check_config(content.get("config"), config_text(config), file)
    weights: dict[str, Tensor] = content["weights"]
    return weights


def load_run(path: Path | str) -> TrainedModel:
    """Read a finished run; a ValueError lists all missing files, or names one that is damaged or wrong."""
    folder = RunFolder(Path(path))
    _check_files(folder, folder.model_file, folder.summary_file)
    summary = folder.read_summary()
    weights = read_weights(folder.model_file, folder.read_config().model)
    trained = _with_weights(folder, weights, folder.model_file, summary.weights, summary.steps)
    signature = {
        "dev_score_signature": {"bleu": summary.bleu_signature, "chrf": summary.chrf_signature}.get(
            summary.metric, summary.metric
        )
    }
    return dataclasses.replace(
        trained, provenance=trained.provenance | signature, dev_score=summary.dev_score
    )


def load_published(path: Path) -> TrainedModel:
    """Read a published model from its folder; a ValueError says what is not supported."""
    published = read_published(path, has_weights=True)
    model = published.read_model()
    provenance = {"weights": f"{published.family.name} checkpoint {path.resolve().name}"}
    return TrainedModel(model, published.tokenizer, model.config, provenance, dev=[], published=path)


def load_parent(path: Path) -> TrainedModel:
    """Read what `--from` names, as `load_published` or `load_run` does."""
    return load_published(path) if is_checkpoint(path) else load_run(path)


def base_of(path: Path, parent: TrainedModel, targets: str) -> Base:
    """Describe the base of a new adapter, the parent in a folder; raise ValueError for unknown targets."""
    import peft  # noqa: F401  # a missing package is reported before the long work

    layers = linear_layers(parent.model)
    names = names_of_layers(parent.published, layers) if parent.published else {name: name for name in layers}
    chosen = {name: names[name] for name in chosen_layers(names, targets)}
    return Base(str(path.resolve()), _checksums(path), chosen)


def check_base(run: Path, base: Base) -> None:
    """Raise ValueError if the base of a run's adapter is missing or its weights have changed."""
    folder = Path(base.folder)
    try:
        found = _checksums(folder)
    except ValueError as error:
        raise ValueError(
            f"{run} has an adapter of {folder}, which cannot be read: put it back, or write its new folder "
            f"into config.json ({error})"
        ) from error
    if found != base.sha256:
        names = sorted(name for name in found | base.sha256 if found.get(name) != base.sha256.get(name))
        raise ValueError(
            f"{run} has an adapter of {folder}, whose weights have changed since ({', '.join(names)}): "
            "put the former ones back"
        )


def _checksums(folder: Path) -> dict[str, str]:
    """The checksums of the weights of a run, or of a published model, by file."""
    if is_checkpoint(folder):
        files = open_checkpoint(folder).files
    else:
        files = (RunFolder(folder).model_file,)
        _check_files(RunFolder(folder), *files)
    return {file.name: file_spec(folder, file.name).sha256 for file in files}


def load_checkpoints(path: Path | str, steps: Sequence[int]) -> TrainedModel:
    """Read a run, finished or not, with the mean weights of the checkpoints of some steps.

    Raises:
        ValueError: See `load_run`; or a step has no checkpoint.
    """
    folder = RunFolder(Path(path))
    _check_files(folder)
    there = [checkpoint_step(file) for file in list_checkpoints(folder.checkpoints)]
    if missing := sorted(set(steps) - set(there)):
        has = f"those of {', '.join(map(str, there))}" if there else "none"
        raise ValueError(f"{path} has no checkpoint of step {missing[0]}; it has {has}")
    files = [checkpoint_path(folder.checkpoints, step) for step in steps]
    config = config_text(folder.read_config().model)
    numbers = ", ".join(map(str, steps))
    is_one = len(steps) == 1
    name = f"checkpoint at step {numbers}" if is_one else f"average of the checkpoints at steps {numbers}"
    return _with_weights(folder, average_weights(files, config), files[-1], name, max(steps))


def _with_weights(
    folder: RunFolder, weights: dict[str, Tensor], origin: Path, name: str, num_steps: int
) -> TrainedModel:
    config = folder.read_config()
    tokenizer = folder.read_tokenizer()
    is_published = folder.published.is_dir()
    if tokenizer.vocab_size != config.model.vocab_size and not is_published:
        raise ValueError(
            f"{folder.tokenizer_file} has {tokenizer.vocab_size} tokens, "
            f"and {folder.config_file.name} has {config.model.vocab_size}"
        )
    model = make_model(config.model)
    if config.training.lora and config.base:
        check_base(folder.path, config.base)
        base = load_parent(Path(config.base.folder)).model.state_dict()
        weights = merged_weights(base, weights, config.training.lora, config.base.layers, origin)
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
    bound = config.length_bound or folder.learn_length_bound(model.source_kind)
    return TrainedModel(
        model.eval(),
        tokenizer,
        config.model,
        provenance,
        dev,
        source_language=config.training.source_language or "",
        target_language=config.training.target_language or "",
        length_bound=bound,
        published=folder.published if is_published else None,
        has_single_sentences=model.source_kind.is_text
        and _are_single_sentences([source for source, _ in dev]),
    )


def _are_single_sentences(texts: Sequence[str]) -> bool:
    """Whether nearly all texts are one sentence."""
    num_single = sum(len(split_sentences(text)) == 1 for text in texts)
    return num_single > _SINGLE_SHARE * len(texts)


def library_versions() -> dict[str, str]:
    """The versions of Python and torch."""
    return {"python": platform.python_version(), "torch": torch.__version__}


def repository_commit() -> str:
    """The commit of this repository, marked "-dirty" if files differ from it; "unknown" outside git."""
    command = ["git", "describe", "--always", "--abbrev=40", "--dirty", "--match="]
    try:
        output = subprocess.check_output(command, cwd=Path(__file__).parent, stderr=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return output.decode().strip()


def _check_files(folder: RunFolder, *finished: Path) -> None:
    if not folder.path.is_dir():
        raise ValueError(f"there is no folder {folder.path}")
    if not folder.is_run:
        raise ValueError(f"{folder.path} is not a training run: there is no {folder.config_file.name} in it")
    needed = folder.tokenizer_file, *folder.text_files("dev"), *finished
    missing = [file.name for file in needed if not file.is_file()]
    if missing:
        preset = folder.read_config().preset
        raise ValueError(
            f"{folder.path} lacks {', '.join(missing)}: training has not finished "
            f"(continue with `python -m training train {preset} --out {folder.path} --resume`, "
            "or `python -m training score` a checkpoint with --step)"
        )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    write_atomically(path, lambda stream: stream.write(text.encode()))


def _read_json(path: Path) -> Any:
    if not path.is_file():
        raise ValueError("no such file")
    return json.loads(path.read_text(encoding="utf-8"))
