"""Starts a run from a preset and a corpus, and trains a started run to its end."""

from __future__ import annotations

import dataclasses
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from seq2seq_serve.bundle.tokenizer import Tokenizer
from seq2seq_serve.training.checkpoint import (
    checkpoint_step,
    list_checkpoints,
    newest_checkpoint,
    save_checkpoint,
)
from seq2seq_serve.training.config import ModelConfig
from seq2seq_serve.training.data.corpus import Corpus, CorpusFiles, as_read, load_corpus
from seq2seq_serve.training.data.encoded import EncodedCorpus, EncodedPair, passing_pairs, write_encoded
from seq2seq_serve.training.data.filters import CorpusFilters
from seq2seq_serve.training.data.segmentation import FreshlyCutPairs
from seq2seq_serve.training.data.sources import TOKENS, SourceKind
from seq2seq_serve.training.data.tokenizer import check_vocab_size, train_tokenizer, train_word_tokenizer
from seq2seq_serve.training.data.vectors import PieceVectors
from seq2seq_serve.training.evaluation.comparison import MetricSettings
from seq2seq_serve.training.huggingface.tuning import keep_published
from seq2seq_serve.training.loop import Trainer
from seq2seq_serve.training.lora import Base
from seq2seq_serve.training.models.base import EncoderDecoder
from seq2seq_serve.training.models.registry import config_to_json, make_model, source_kind_of
from seq2seq_serve.training.models.transformer import Transformer
from seq2seq_serve.training.presets import Preset
from seq2seq_serve.training.ranks import Ranks
from seq2seq_serve.training.run import (
    RunConfig,
    RunFolder,
    Summary,
    TrainedModel,
    check_base,
    library_versions,
    repository_commit,
    write_weights,
)

_log = logging.getLogger(__name__)

_MAX_TOKENIZER_PAIRS = 100_000_000  # of a larger corpus, a tokenizer learns from every second pair or fewer

# The fields that a resumed run may change: when and how it ends, what suits the machine, and its score.
_ENDING = "max_steps", "cooldown_share", "patience"
CHANGEABLE = *_ENDING, "precision", "micro_batch_tokens", "bleu_tokenization"


def start_run(
    folder: RunFolder,
    preset: Preset,
    corpus: Corpus,
    files: CorpusFiles | None = None,
    parent: TrainedModel | None = None,
    tokenizer: Tokenizer | None = None,
    base: Base | None = None,
) -> RunConfig:
    """Train the tokenizer and write the files that the whole run keeps, `config.json` last.

    A run with a parent takes its tokenizer, and starts with its weights; another one takes `tokenizer` if it
    is given. `base` describes the parent if the run trains an adapter of it. `files` is where the corpus was
    read from, for a resume without flags; None is the built-in corpus. The folder may hold an interrupted
    start.

    Raises:
        ValueError: The folder holds a run, the corpus has nothing to train on or to score, a file of word
            vectors is wrong, the parent does not fit the preset, or another process writes to the folder.
            Nothing is written.
        OSError: A file of word vectors cannot be read.
    """
    assert (base is None) == (preset.training.lora is None)
    folder.check_is_free()
    kind = source_kind_of(preset.model).in_folder(corpus.folder)
    if not kind.has_word_tokens and not (parent or tokenizer):
        check_vocab_size(preset.model.vocab_size)
    recipe = preset.training
    if recipe.bpe_dropout and kind is not TOKENS:
        raise ValueError("bpe_dropout is for models that read texts: set bpe_dropout=0")
    if parent:
        _check_fits(preset, parent)
    if recipe.bpe_dropout and parent and parent.published:
        raise ValueError("bpe_dropout needs a byte-pair tokenizer that was learned here: set bpe_dropout=0")
    vector_files = {
        side: Path(name)
        for side, name in (("source", recipe.source_vectors), ("target", recipe.target_vectors))
        if name is not None
    }
    for file in vector_files.values():
        file.open("rb").close()  # a missing file is reported before the long work
    filters = CorpusFilters(
        preset.model.max_source_length,
        preset.model.max_target_tokens,
        max_characters=kind.max_characters,
    )
    if all(filters.text_reason(pair) for pair in corpus.train):
        raise ValueError(
            f"the training corpus has {len(corpus.train)} pairs and no text: nothing to train on"
        )
    dev_pairs = {(as_read(pair.source), as_read(pair.target)) for pair in corpus.dev}
    if shared := dev_pairs.intersection(
        (as_read(pair.source), as_read(pair.target)) for pair in corpus.train
    ):
        _log.warning("%d of %d dev pairs are in the training corpus, too", len(shared), len(corpus.dev))
    tokenizer = parent.tokenizer if parent else tokenizer
    if tokenizer is None:
        tokenizer = _learn_tokenizer(corpus, filters, preset, kind)
    _log.info("tokenizer: %s tokens", f"{tokenizer.vocab_size:,}")
    model = preset.model
    if not (parent and parent.published):  # whose matrices may have more rows than there are tokens
        model = dataclasses.replace(model, vocab_size=tokenizer.vocab_size)
    held_out = {}
    for part, pairs in (("dev", corpus.dev), ("test", corpus.test)):
        # All pairs that the model can translate are scored, so the ratio filter does not apply.
        kept, report = passing_pairs(pairs, tokenizer, filters, kind)
        if report.num_kept < report.num_given:
            _log.info("%s pairs:\n%s", part, report.table())
        if part == "dev" and not kept:
            raise ValueError(f"none of {report.num_given} dev pairs is left: nothing to score")
        held_out[part] = kept
    if recipe.frozen is not None:
        make_model(model).freeze(recipe.frozen)  # refuses unknown parts
    initial = _inherited(parent.model, model, recipe.seed) if parent else None
    if base and initial and parent:
        given = parent.model.state_dict()
        for name, weight in initial.items():
            if name not in given or given[name].shape != weight.shape:
                raise ValueError(
                    f"{name} is not a weight of {base.folder}, which an adapter needs: leave --lora out"
                )
        initial = None
    vectors = {side: PieceVectors.of(file, tokenizer, model.d_model) for side, file in vector_files.items()}
    folder.checkpoints.mkdir(parents=True, exist_ok=True)
    with folder.locked():
        folder.check_is_free()  # another process may have started it meanwhile
        for file in folder.optional_files:  # an interrupted start may have left them
            file.unlink(missing_ok=True)
        shutil.rmtree(folder.published, ignore_errors=True)
        tokenizer.save(folder.tokenizer_file)
        if parent and parent.published:
            assert isinstance(parent.model, Transformer)
            keep_published(parent.published, parent.model, folder.published)
        if initial:
            write_weights(folder.initial_file, initial, model)
        for side, found in vectors.items():
            _log.info("%s vectors: for %d of %d pieces", side, len(found.ids), tokenizer.vocab_size)
            found.save(folder.vectors_file(side))
        for part, kept in held_out.items():
            if kept:
                folder.write_pairs(part, kept)
        config = RunConfig(
            preset=preset.name,
            model=model,
            training=preset.training,
            corpus=corpus.description,
            corpus_files=files or CorpusFiles(),
            corpus_sha256=corpus.sha256(),
            commit=repository_commit(),
            versions=library_versions(),
            parent=_description(parent) if parent else "",
            source_folder=_source_folder(folder, corpus, kind),
            max_vocab_size=preset.model.vocab_size,
            base=base,
        )
        _encode(folder, config, corpus, tokenizer)
        config = dataclasses.replace(config, length_bound=folder.learn_length_bound(kind))
        folder.write_config(config)
    return config


def check_can_continue(
    folder: RunFolder, preset: str, settings: Mapping[str, Any], parent: TrainedModel | None = None
) -> None:
    """Raise ValueError unless the preset, settings and parent are those that the run was started with.

    So the command that started a run can also continue it. Fields in `CHANGEABLE` are not compared.
    """
    config = folder.read_config()
    if config.preset != preset:
        raise ValueError(f"{folder.path} was started with the preset {config.preset}, not {preset}")
    max_vocab_size = config.max_vocab_size
    if max_vocab_size is None:  # the run does not know what it was given: any value may be right
        max_vocab_size = settings.get("vocab_size", config.model.vocab_size)
    model = dataclasses.replace(config.model, vocab_size=max_vocab_size)
    started = Preset(preset, model, config.training)
    settings = started.scaled(settings)
    if started.changed(settings) != started:
        old = vars(model) | vars(config.training)
        changes = [f"{name} from {old[name]} to {new}" for name, new in settings.items() if old[name] != new]
        raise ValueError(
            f"--resume cannot change {', '.join(changes)}: fixed when the run was started, so leave it out "
            f"(it can change {', '.join(CHANGEABLE)})"
        )
    if parent and _description(parent) != config.parent:
        raise ValueError(f"{folder.path} was not started with the weights of --from: leave it out")


def _source_folder(folder: RunFolder, corpus: Corpus, kind: SourceKind) -> str:
    if kind.is_text:
        return ""
    given, own = corpus.folder.resolve(), folder.path.resolve()
    return str(given.relative_to(own) if given.is_relative_to(own) else given)


def _check_fits(preset: Preset, parent: TrainedModel) -> None:
    """Raise ValueError unless a model of the preset can start with the parent's weights and tokenizer."""
    old, new = config_to_json(parent.config), config_to_json(preset.model)
    free_fields = parent.config.free_in_a_child
    for name, value in old.items():
        if name not in free_fields and new.get(name) != value:
            free = ", ".join(free_fields)
            raise ValueError(
                f"{name} is {value} in the run to start from, and cannot become {new.get(name)}: "
                f"in the model, only {free} may change"
            )
    if preset.training.normalization != parent.tokenizer.normalization:
        raise ValueError(
            f"normalization is {parent.tokenizer.normalization} in the run to start from, and cannot become "
            f"{preset.training.normalization}: it is part of the tokenizer, which a run takes from its parent"
        )
    if preset.training.source_vectors or preset.training.target_vectors:
        raise ValueError("the parent's embeddings are already trained: leave the word vectors out")


def _inherited(parent: EncoderDecoder, config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """The weights of the parent, and new ones for the parts that only the new model has, or in another size.

    Of the fields that are free in a child, only a captioner's max_target_length changes a size: its baseline.
    """
    torch.manual_seed(seed)
    given = parent.state_dict()
    return {
        name: given[name] if name in given and given[name].shape == new.shape else new
        for name, new in make_model(config).state_dict().items()
    }


def _description(parent: TrainedModel) -> str:
    """One line about where the weights come from."""
    names = "weights", "steps", "corpus", "corpus_sha256", "commit", "parent"
    return "; ".join(f"{name}: {parent.provenance[name]}" for name in names if name in parent.provenance)


def _learn_tokenizer(corpus: Corpus, filters: CorpusFilters, preset: Preset, kind: SourceKind) -> Tokenizer:
    step = -(-len(corpus.train) // _MAX_TOKENIZER_PAIRS)
    num_pairs = -(-len(corpus.train) // step)
    _log.info("learning a tokenizer from the texts of %s pairs", f"{num_pairs:,}")
    pairs = (pair for pair in islice(corpus.train, 0, None, step) if not filters.text_reason(pair))
    texts = (text for pair in pairs for text in (pair if kind.is_text else pair[1:]))
    learn = train_word_tokenizer if kind.has_word_tokens else train_tokenizer
    return learn(texts, preset.model.vocab_size, preset.training.normalization)


def continue_run(
    folder: RunFolder,
    corpus: Corpus | None,
    device: torch.device,
    console: Console,
    changes: Mapping[str, Any] | None = None,
    *,
    ranks: Ranks | None = None,
    is_compiled: bool = False,
) -> Summary:
    """Train a started run from its newest readable checkpoint, or from step 0, to the end.

    A corpus, if given, must be the one that the run was started with. `changes` are new values of the fields
    in `CHANGEABLE`.

    Raises:
        ValueError: The folder holds no run, the corpus is another, more than `max_steps` steps are done
            already, no checkpoint can be read, the machines see different checkpoints, or training diverged.
        TrainingInterrupted: Ctrl-C or SIGTERM; a checkpoint was written.
    """
    ranks = ranks or Ranks()
    summary = ranks.first(lambda: _prepare_to_continue(folder, corpus, changes or {}), is_preparation=True)
    if summary:
        _log.info("%s is finished: nothing to do (give more --max-steps to train further)", folder.path)
        return summary
    config = folder.read_config()
    checkpoint, problems = newest_checkpoint(folder.checkpoints)
    for problem in problems:
        _log.warning("checkpoint skipped: %s", problem)
    step = checkpoint.step if checkpoint else 0
    if ranks.first(lambda: step) != step:
        raise ValueError(f"the newest checkpoint in {folder.checkpoints} differs between the machines")
    if checkpoint:
        _log.info("continuing after step %d", step)
    tokenizer = folder.read_tokenizer()
    train = EncodedCorpus(folder.encoded)
    trainer = Trainer(
        config,
        folder,
        tokenizer,
        _pairs_of(config, train, tokenizer),
        folder.read_pairs("dev"),
        device,
        checkpoint,
        ranks=ranks,
        is_compiled=is_compiled,
    )
    num_parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    _log.info("model: %s parameters, on %s", f"{num_parameters:,}", device)
    if config.base:
        num_trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
        _log.info("adapter: %s of them, for %s", f"{num_trained:,}", config.base.folder)
    _log.info("training on %s pairs", f"{len(train):,}")
    return trainer.train(console)


def _prepare_to_continue(
    folder: RunFolder, corpus: Corpus | None, changes: Mapping[str, Any]
) -> Summary | None:
    """Bring the run's folder up to date, which only one process may do; return a finished run's summary."""
    config = folder.read_config()
    kind = source_kind_of(config.model)
    training = dataclasses.replace(config.training, **changes)
    MetricSettings(training.bleu_tokenization).check()
    checkpoints = list_checkpoints(folder.checkpoints)
    num_done = checkpoint_step(checkpoints[-1]) if checkpoints else 0
    if training.max_steps < num_done:
        raise ValueError(
            f"{folder.path} has done {num_done} steps, "
            f"and cannot stop at step {training.max_steps} any more: give at least {num_done}"
        )
    is_cooled = training.cooldown_share in (0, config.training.cooldown_share)
    if training.max_steps == num_done and not is_cooled:
        raise ValueError(
            f"{folder.path} has done all its {num_done} steps: to cool down it needs more of them (max_steps)"
        )
    is_same_end = all(getattr(training, name) == getattr(config.training, name) for name in _ENDING)
    is_finished = folder.is_finished and (is_same_end or training.max_steps == num_done)
    # The encoded corpus is missing in runs of older commits, and where a user removed it to save space.
    if corpus is None and not folder.encoded.is_dir() and not is_finished:
        corpus = load_corpus(config.corpus_files, config.training.seed, kind, folder.pictures)
    if corpus is not None and corpus.sha256() != config.corpus_sha256:
        raise ValueError(f"{corpus.description} is not the corpus that {folder.path} was started with")
    if corpus is not None and not folder.encoded.is_dir():
        _encode(folder, config, corpus, folder.read_tokenizer())
    if is_finished:
        return folder.read_summary()
    if config.base:
        check_base(folder.path, config.base)
    has_same_score = training.bleu_tokenization == config.training.bleu_tokenization
    if not (is_same_end and has_same_score):
        _restart_patience(folder, has_same_score=has_same_score)
    if folder.is_finished:
        folder.summary_file.replace(folder.summary_before_file)
    folder.write_config(
        dataclasses.replace(
            config,
            training=training,
            commit=_commits(config, num_done),
            versions=library_versions(),
            length_bound=config.length_bound or folder.learn_length_bound(kind),
            source_folder=_source_folder(folder, corpus, kind) if corpus else config.source_folder,
        )
    )
    return None


def _restart_patience(folder: RunFolder, *, has_same_score: bool) -> None:
    """Forget worse evaluations, and an end that they brought: the run has another end or score now."""
    checkpoint, _ = newest_checkpoint(folder.checkpoints)
    if checkpoint and checkpoint.best:
        best = dataclasses.replace(checkpoint.best, num_worse_since=0) if has_same_score else None
        save_checkpoint(folder.checkpoints, dataclasses.replace(checkpoint, best=best, last_step=None))


def _commits(config: RunConfig, num_done: int) -> str:
    """The commits that trained a run, this one included."""
    commit = repository_commit()
    if not num_done:
        return commit
    if config.commit.endswith(commit):
        return config.commit
    return f"{config.commit}, from step {num_done} {commit}"


def _encode(folder: RunFolder, config: RunConfig, corpus: Corpus, tokenizer: Tokenizer) -> None:
    kind = source_kind_of(config.model).in_folder(corpus.folder)
    filters = CorpusFilters(
        config.model.max_source_length,
        config.model.max_target_tokens,
        config.training.max_length_ratio if kind is TOKENS else None,
        config.training.drop_copies,
        kind.max_characters,
    )
    report = write_encoded(folder.encoded, corpus.train, tokenizer, filters, kind)
    _log.info("corpus: %s\n%s", corpus.description, report.table())


def _pairs_of(
    config: RunConfig, corpus: EncodedCorpus, tokenizer: Tokenizer
) -> Callable[[int], Sequence[EncodedPair]]:
    """A function from the number of a pass over the corpus to its training pairs."""
    if not config.training.bpe_dropout:
        return lambda _: corpus
    return FreshlyCutPairs(
        list(corpus.texts(tokenizer)),
        tokenizer,
        config.training.bpe_dropout,
        config.training.seed,
        max_source_length=config.model.max_source_length,
        max_target_length=config.model.max_target_length,
    )
