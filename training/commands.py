"""The commands of `python -m training`, one function each. Results go to standard output."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from seq2seq_serve.bundle import names
from seq2seq_serve.training import distill
from seq2seq_serve.training.data.built_in import TRANSLATION_LANGUAGES
from seq2seq_serve.training.data.corpus import Corpus, CorpusFiles, built_in_corpus, load_corpus
from seq2seq_serve.training.data.encoded import encode_pairs
from seq2seq_serve.training.data.lengths import target_limits
from seq2seq_serve.training.data.sources import NOTHING, STORIES, TOKENS
from seq2seq_serve.training.data.text_files import SentencePair, read_lines, write_lines
from seq2seq_serve.training.evaluation.comparison import MetricScore, MetricSettings, compare
from seq2seq_serve.training.evaluation.scoring import by_source, score, total_loss, translate
from seq2seq_serve.training.evaluation.search import SourceLengthError, greedy_search
from seq2seq_serve.training.interrupt import TrainingInterrupted, sigterm_as_interrupt
from seq2seq_serve.training.loop import fast_matmul
from seq2seq_serve.training.loss import BatchLoss
from seq2seq_serve.training.models.registry import FAMILIES, kind_of, source_kind_of
from seq2seq_serve.training.prepare import CHANGEABLE, check_can_continue, continue_run, start_run
from seq2seq_serve.training.presets import Preset, preset_named
from seq2seq_serve.training.ranks import Ranks, num_ranks
from seq2seq_serve.training.reports.attention_maps import alignment, encoder_self_attention
from seq2seq_serve.training.run import (
    RunFolder,
    Summary,
    TrainedModel,
    base_of,
    load_checkpoints,
    load_parent,
    load_run,
)

_log = logging.getLogger(__name__)

_LOSS_BATCH_TOKENS = 4000


@dataclass(frozen=True)
class TrainRequest:
    """The arguments of `python -m training train` and `distill`.

    Attributes:
        out: The run's folder.
        settings: Values of the preset's fields that a new run replaces.
        is_resumed: Whether a run that exists already is continued; otherwise it is an error.
        is_compiled: Whether `torch.compile` compiles the model.
        parent: The finished run, or the folder of a published model, whose model, weights and tokenizer a new
            run starts with.
        teacher: The finished run for which a new run trains a draft model, with its tokenizer and from its
            own targets.
        max_sources: The most of the teacher's sources.
    """

    preset: str
    out: Path
    files: CorpusFiles
    settings: Mapping[str, Any]
    is_resumed: bool = False
    is_compiled: bool = False
    parent: Path | None = None
    teacher: Path | None = None
    max_sources: int = 0

    @property
    def changes(self) -> dict[str, Any]:
        """The settings that a resumed run may replace; it must have the other ones."""
        return {name: value for name, value in self.settings.items() if name in CHANGEABLE}

    @property
    def resume_command(self) -> str:
        """The command line that continues the run."""
        command = "torchrun ..." if num_ranks() > 1 else "python"
        return f"{command} -m training train {self.preset} --out {self.out} --resume"

    def load_parent(self) -> TrainedModel | None:
        """Read the parent, if there is one; raise ValueError as `load_run` and `load_published` do."""
        return None if self.parent is None else load_parent(self.parent)

    def configuration(
        self, parent: TrainedModel | None = None, teacher: TrainedModel | None = None
    ) -> Preset:
        """Return the preset of a new run with all that parent, teacher, corpus and settings change.

        Raises:
            ValueError: There is no such preset, or a setting is wrong.
        """
        preset = preset_named(self.preset)
        if parent:
            own, given = kind_of(preset.model), kind_of(parent.config)
            if own != given and not parent.published:
                raise ValueError(
                    f"{self.preset} is of the family {own}, and {self.parent} of the family {given}: "
                    "give a preset of that family"
                )
            preset = dataclasses.replace(preset, model=parent.config)
            preset = preset.changed({"normalization": parent.tokenizer.normalization})
            if parent.published:  # its tokenizer always cuts a text into the same pieces
                preset = preset.changed({"bpe_dropout": 0.0})
        if teacher:
            preset = distill.recipe(preset, teacher, self.settings)
        if self.files.is_built_in and source_kind_of(preset.model) is TOKENS:
            preset = preset.changed(TRANSLATION_LANGUAGES)
        preset = preset.changed(self.settings)
        if preset.training.lora and not parent:
            raise ValueError("--lora needs --from: an adapter changes a finished run or a published model")
        return preset


def train(request: TrainRequest, device: torch.device, ranks: Ranks, console: Console) -> Summary:
    """Start or resume a run."""
    folder, lock = RunFolder(request.out), ExitStack()
    corpus: Corpus | None = None  # only the first process reads one

    def prepare() -> None:
        nonlocal corpus
        corpus = _prepare(request, folder, device, console)
        lock.enter_context(folder.locked())

    try:
        ranks.first(prepare, is_preparation=True)
        return continue_run(
            folder,
            corpus,
            device,
            console,
            request.changes,
            ranks=ranks,
            is_compiled=request.is_compiled,
        )
    except KeyboardInterrupt as interrupt:
        if not ranks.is_first:
            raise
        if isinstance(interrupt, TrainingInterrupted):
            _log.warning("%s; continue with: %s", interrupt, request.resume_command)
        elif folder.is_run:
            _log.warning("interrupted; continue with: %s", request.resume_command)
        elif request.teacher is not None:
            _log.warning("interrupted; the same command goes on after the targets that are written")
        else:
            _log.warning("interrupted before anything was trained: start again")
        raise
    finally:
        lock.close()


def _prepare(
    request: TrainRequest, folder: RunFolder, device: torch.device, console: Console
) -> Corpus | None:
    """Start a run, unless there is one to continue; return a corpus that must be compared with the run's."""
    if request.is_resumed and folder.is_run:
        return _check_run(request, folder)
    folder.check_is_free(f"continue it with `{request.resume_command}`, or give another --out")
    if request.teacher is None and distill.distilled_folder(request.out).is_dir():
        raise ValueError(f"{request.out} is the beginning of a draft model: repeat its `distill` command")
    parent = request.load_parent()  # before the long work, as the next checks
    teacher = None if request.teacher is None else load_run(request.teacher)
    preset = request.configuration(parent, teacher)
    recipe, base = preset.training, None
    if recipe.lora and parent and request.parent:
        base = base_of(request.parent, parent, recipe.lora.targets)
    if recipe.max_steps < recipe.warmup_steps:
        _log.warning(
            "the learning rate rises for %s steps, and training ends after %s: set warmup_steps, too",
            f"{recipe.warmup_steps:,}",
            f"{recipe.max_steps:,}",
        )
    MetricSettings(recipe.bleu_tokenization).check()
    if request.is_compiled:
        FAMILIES[kind_of(preset.model)].model.check_compilable()
    kind = source_kind_of(preset.model)
    if teacher:
        assert request.teacher is not None
        with fast_matmul(device), sigterm_as_interrupt():
            run, most = RunFolder(request.teacher), request.max_sources
            distill.write_targets(run, teacher, request.out, most, device, console)
    corpus = load_corpus(request.files, recipe.seed, kind, folder.pictures)
    if request.is_resumed:
        _log.warning("%s has no run yet: starting one on %s", request.out, corpus.description)
    tokenizer = teacher.tokenizer if teacher else None
    start_run(folder, preset, corpus, request.files, parent, tokenizer, base)
    return None


def _check_run(request: TrainRequest, folder: RunFolder) -> Corpus | None:
    """Check that a request may continue a run; return the given corpus, unless it surely is the run's.

    Text files with the names and the age of those that the run encoded are not read again: a corpus may take
    hours to read, may have come from a pipe, or may be missing on the machine where training restarts.
    """
    fixed = {name: value for name, value in request.settings.items() if name not in CHANGEABLE}
    check_can_continue(folder, request.preset, fixed, request.load_parent())
    config = folder.read_config()
    kind = source_kind_of(config.model)
    is_known = kind.is_text and request.files == config.corpus_files and not _is_newer(request.files, folder)
    if request.files.is_built_in or is_known:
        return None
    return load_corpus(request.files, config.training.seed, kind, folder.pictures)


def _is_newer(files: CorpusFiles, folder: RunFolder) -> bool:
    """Whether one of the files was changed after the corpus was encoded."""
    paths = [*files.paths(), *files.paths("dev_")]
    changes = [path.stat().st_mtime for path in paths if path.is_file()]
    return folder.encoded.is_dir() and max(changes, default=0.0) > folder.encoded.stat().st_mtime


def score_run(
    path: Path,
    step: int | None,
    tested: str | tuple[Path, Sequence[Path]],
    beam_size: int,
    alpha: float,
    settings: MetricSettings,
    device: torch.device,
) -> None:
    """Score a run by its metric on its "dev" or "test" pairs, or on a source file with its references.

    The settings are those of BLEU and chrF.
    """
    settings.check()
    run = _load(path, step)
    run.model.to(device)
    sources: Sequence[str]
    references: Sequence[Sequence[str]]  # of each source
    if isinstance(tested, str):
        name = f"{tested} pairs"
        targets = by_source(RunFolder(path).read_pairs(tested))
        sources, references = list(targets), list(targets.values())
    else:
        source, files = tested
        name = str(source)
        sources, *streams = _read_parallel([source, *files])
        # A run writes normalised text only: see `training.data.encoded.passing_pairs`.
        references = [
            [run.tokenizer.normalize(line) for line in lines] for lines in zip(*streams, strict=True)
        ]
    if not sources:
        raise ValueError(f"{name}: there are no sources to score")
    if run.model.metric == "likelihood":
        _print_scores(f"{path}, {name}", len(sources), [f"loss {_loss(run, sources, references):.3f}"])
        return
    try:
        with fast_matmul(device):
            translations = translate(
                run.model,
                run.tokenizer,
                sources,
                beam_size=beam_size,
                alpha=alpha,
                length_bound=run.length_bound,
            )
    except SourceLengthError as error:
        raise ValueError(f"{name}, line {error.row + 1}: {error}") from error
    scores: Sequence[MetricScore | str]
    if run.model.metric == "accuracy":
        scores = [f"accuracy {score(translations, references).accuracy:.2f} %"]
    elif run.model.metric == "cer":
        scores = [score(translations, references).error_rates]
    else:
        (scores,) = compare([translations], list(zip_longest(*references)), settings)
    search = f"beam {beam_size}" + (f", alpha {alpha:g}" if beam_size > 1 else "")
    _print_scores(f"{path}, {name}, {search}", len(sources), scores)


def _loss(run: TrainedModel, sources: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """The cross-entropy per token of all references."""
    pairs = [
        SentencePair(source, target)
        for source, targets in zip(sources, references, strict=True)
        for target in targets
    ]
    encoded = encode_pairs(pairs, run.tokenizer, run.model.source_kind)
    total, num_tokens = total_loss(BatchLoss(run.model, torch.float32), encoded, _LOSS_BATCH_TOKENS)
    return total / num_tokens


def write_corpus(out: Path) -> None:
    """Write the built-in corpus as parallel text files, and print the number of pairs of each part."""
    out.mkdir(parents=True, exist_ok=True)
    corpus = built_in_corpus()
    for name, pairs in {"train": corpus.train, "dev": corpus.dev, "test": corpus.test}.items():
        write_lines(out / f"{name}.ko", [pair.source for pair in pairs])
        write_lines(out / f"{name}.en", [pair.target for pair in pairs])
        print(f"{name:<5}{len(pairs):>8} pairs")


def show_alignment(
    path: Path, step: int | None, text: str, json_file: Path | None, image_file: Path | None
) -> None:
    """Translate a text, and print which source piece each target piece attends to most."""
    _check_text(text)
    run = _load_translator(path, step)
    source_ids = run.tokenizer.encode_source(text)
    (limit,) = target_limits([len(source_ids)], run.config, run.length_bound)
    limit = min(limit, run.config.max_target_tokens - 1)  # the decoder reads bos, too
    (bos_id, *prefix_ids), eos_id = run.config.frame
    (target_ids,) = greedy_search(
        run.model, [source_ids], bos_id=bos_id, eos_id=eos_id, max_new_tokens=limit, prefix_ids=prefix_ids
    )
    is_ended = len(target_ids) < limit
    shown_ids = [*target_ids, eos_id] if is_ended else target_ids
    weights = alignment(run, source_ids, target_ids)[: len(shown_ids)]
    source, target = run.tokenizer.source_pieces(source_ids), run.tokenizer.pieces(shown_ids)
    print(run.tokenizer.decode(target_ids))
    _print_strongest(weights, target, source)
    if json_file:
        _write_json(json_file, {"source_tokens": source, "target_tokens": target}, weights)
    if image_file:
        from seq2seq_serve.drawing.heatmap import save_heatmap  # matplotlib takes long to import

        save_heatmap(weights.numpy(), target, source, image_file)


def show_self_attention(
    path: Path,
    step: int | None,
    text: str,
    layer: int | None,
    head: int | None,
    json_file: Path | None,
    image_file: Path | None,
) -> None:
    """Print where the encoder's heads look; for a single head, print each token's strongest weight."""
    _check_text(text)
    run = _load_translator(path, step)
    source_ids = run.tokenizer.encode_source(text)
    all_weights = encoder_self_attention(run, source_ids)  # (L, H, S, S)
    layers = _chosen("layer", layer, all_weights.shape[0])
    heads = _chosen("head", head, all_weights.shape[1])
    weights = all_weights[layers[0] - 1 : layers[-1], heads[0] - 1 : heads[-1]]
    tokens = run.tokenizer.source_pieces(source_ids)
    if weights.shape[:2] == (1, 1):
        _print_strongest(weights[0, 0], tokens, tokens)
    else:
        _print_directions(weights, layers, heads, tokens[-1])
    if json_file:
        _write_json(json_file, {"tokens": tokens, "layers": [*layers], "heads": [*heads]}, weights)
    if image_file:
        from seq2seq_serve.drawing.heatmap import save_heatmap  # matplotlib takes long to import

        titles = [f"layer {layer}, head {head}" for layer in layers for head in heads]
        save_heatmap(weights.numpy(), tokens, tokens, image_file, titles)


def _load(path: Path, step: int | None) -> TrainedModel:
    return load_run(path) if step is None else load_checkpoints(path, [step])


def _load_translator(path: Path, step: int | None) -> TrainedModel:
    """Load a run that reads texts; raise ValueError with advice if it reads other sources."""
    run = _load(path, step)
    kind = run.model.source_kind
    if kind is NOTHING:
        raise ValueError(f"{path} is a language model: it has no source to attend to")
    if kind is not TOKENS:
        command = "answer" if kind is STORIES else "caption"
        advice = f": export and serve the run, and use `python -m client {command} --attention FILE`"
        raise ValueError(
            f"{path} attends to {kind.unit}, and this command shows attention to the tokens of a text"
            + ("" if names.SOUND in kind.forms else advice)
        )
    return run


def _read_parallel(files: Sequence[Path]) -> list[list[str]]:
    """The lines of each file; raise ValueError unless all have the same number."""
    lines = [read_lines(file) for file in files]
    if len({len(texts) for texts in lines}) != 1:
        counts = ", ".join(f"{file} has {len(texts)}" for file, texts in zip(files, lines, strict=True))
        raise ValueError(f"the files have different numbers of lines: {counts}")
    return lines


def _print_scores(name: str, num_sentences: int, scores: Sequence[MetricScore | str]) -> None:
    print(f"{name}, {num_sentences} sentences")
    for line in scores:
        print(line)


def _check_text(text: str) -> None:
    if not text.strip():
        raise ValueError("the text is empty: nothing to translate")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the text is not UTF-8, from character {error.start + 1} on") from error


def _chosen(kind: str, number: int | None, count: int) -> range:
    """The numbers of the chosen layers or heads: one, or all."""
    if number is None:
        return range(1, count + 1)
    if number > count:
        raise ValueError(f"--{kind} is {number}, but the encoder has only {count}")
    return range(number, number + 1)


def _print_strongest(weights: Tensor, rows: list[str], columns: list[str]) -> None:
    for piece, row in zip(rows, weights.tolist(), strict=True):
        best = max(range(len(row)), key=row.__getitem__)
        print(f"{piece!r:>16}  {row[best]:.2f}  {columns[best]!r}")


def _print_directions(weights: Tensor, layers: range, heads: range, last: str) -> None:
    """Print one line per head: its mean weight on the token itself, its neighbours and the last token."""
    print(f"{'layer':>5}  {'head':>4}  {'itself':>6}  {'before':>6}  {'after':>6}  {last:>6}")
    for layer, heads_weights in zip(layers, weights, strict=True):
        for head, square in zip(heads, heads_weights, strict=True):
            columns = *(square.diagonal(offset) for offset in (0, -1, 1)), square[:, -1]
            print(f"{layer:>5}  {head:>4}  " + "  ".join(f"{column.mean():6.2f}" for column in columns))


def _write_json(path: Path, content: dict[str, Any], weights: Tensor) -> None:
    content = content | {"weights": weights.double().round(decimals=6).tolist()}
    path.write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")
