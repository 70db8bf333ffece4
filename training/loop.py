"""The training loop: steps, checkpoints, evaluation, early stop, and the choice of the final weights."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from seq2seq_serve.bundle.tokenizer import Tokenizer
from seq2seq_serve.training.checkpoint import (
    BestScore,
    Checkpoint,
    average_weights,
    check_config,
    checkpoint_path,
    checkpoint_step,
    list_checkpoints,
    load_checkpoint,
    load_weights,
    remove_checkpoints,
    save_checkpoint,
)
from seq2seq_serve.training.config import TrainingPrecision
from seq2seq_serve.training.data.batches import BatchShare, BatchStream
from seq2seq_serve.training.data.encoded import EncodedPair, encode_pairs
from seq2seq_serve.training.data.text_files import SentencePair
from seq2seq_serve.training.data.vectors import PieceVectors
from seq2seq_serve.training.evaluation.comparison import MetricSettings, metric_for
from seq2seq_serve.training.evaluation.scoring import Score, by_source, score, total_loss, translate
from seq2seq_serve.training.interrupt import TrainingInterrupted, caught_interrupt
from seq2seq_serve.training.lora import add_adapter, kept_weights, write_adapter
from seq2seq_serve.training.loss import BatchLoss
from seq2seq_serve.training.models.registry import config_text, make_model
from seq2seq_serve.training.ranks import Ranks
from seq2seq_serve.training.reports.meter import DivergenceGuard, Meter
from seq2seq_serve.training.reports.progress import Reporter
from seq2seq_serve.training.run import (
    RunConfig,
    RunFolder,
    Summary,
    load_parent,
    read_weights,
    write_weights,
)
from seq2seq_serve.training.schedule import learning_rate

_log = logging.getLogger(__name__)

_REPORT_INTERVAL_STEPS = 20


class _Stopped(Exception):
    """Ends an evaluation in an interrupted process; the other processes learn of it afterwards."""


class Trainer:
    """Owns the model, the optimizer, the place in the corpus and the best score of a run in training.

    `last_step` is that of the recipe, until `patience` moves it forward.

    Invariant: after each step, `checkpoint()` is all that a new trainer needs to continue, on a CPU bit for
    bit. Every process has a trainer. After each step all trainers hold the same weights and make the same
    decisions.

    `train_pairs` returns the training pairs of a pass over the corpus, by its number from 0. Without a
    checkpoint, training starts at step 0.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        tokenizer: Tokenizer,
        train_pairs: Callable[[int], Sequence[EncodedPair]],
        dev_pairs: Sequence[SentencePair],
        device: torch.device,
        checkpoint: Checkpoint | None = None,
        *,
        ranks: Ranks | None = None,
        is_compiled: bool = False,
    ) -> None:
        self.config = config
        self.folder = folder
        self.tokenizer = tokenizer
        self.dev_pairs = dev_pairs
        self.device = device
        self.ranks = ranks or Ranks()
        self.step = checkpoint.step if checkpoint else 0
        self.best = checkpoint.best if checkpoint else None
        self.last_step = (checkpoint and checkpoint.last_step) or config.training.max_steps
        self._is_scored = checkpoint.is_scored if checkpoint else True
        self._interrupt_signal: Callable[[], int | None] = lambda: None
        self._seconds_before = checkpoint.seconds if checkpoint else 0.0
        self._start = time.monotonic()
        recipe = config.training
        torch.manual_seed(recipe.seed)
        dtype = compute_dtype(recipe.precision, device)
        self.model = make_model(config.model)
        if recipe.lora and config.base:
            origin = Path(config.base.folder)
            load_weights(self.model, load_parent(origin).model.state_dict(), origin)
            add_adapter(self.model, recipe.lora, config.base.layers, dtype)
        self.model.to(device)
        if recipe.frozen is not None:
            self.model.freeze(recipe.frozen)
        divergence = checkpoint.divergence if checkpoint else ()
        first_step = config.model.num_unstable_steps + 1
        self.guard = DivergenceGuard(config.model.vocab_size, *divergence, first_step=first_step)
        self._vectors = self._load_vectors()
        trained = [
            weight for weight in self.model.parameters() if weight.requires_grad or recipe.lora is None
        ]
        self.optimizer = torch.optim.Adam(trained, betas=(0.9, 0.98), eps=1e-9, fused=True)
        place = (checkpoint.epoch, checkpoint.batch_index) if checkpoint else (0, 0)
        self.batches = BatchStream(
            train_pairs,
            recipe.batch_tokens,
            recipe.seed,
            *place,
            ranks=self.ranks,
            piece_tokens=recipe.micro_batch_tokens,
            kind=self.model.source_kind.in_folder(folder.path / config.source_folder),
            frame=config.model.frame,
            mixes_lengths=recipe.mixes_lengths,
        )
        if not checkpoint:
            if folder.initial_file.is_file():
                initial = read_weights(folder.initial_file, config.model)
                load_weights(self.model, initial, folder.initial_file)
            for embedding, vectors in self._vectors:
                vectors.write_to(embedding)
        else:
            origin = checkpoint_path(folder.checkpoints, checkpoint.step)
            check_config(checkpoint.config, config_text(config.model), origin)
            load_weights(self.model, checkpoint.model, origin)
            self.optimizer.load_state_dict(checkpoint.optimizer)
        check_recurrent_layers(self.model, dtype, device)
        references = [pair.target for pair in dev_pairs]
        self._metric = metric_for(self.model.metric, references, MetricSettings(recipe.bleu_tokenization))
        if self._metric != self.model.metric and self.ranks.is_first:
            _log.info("dev score: chrF, because most dev targets have fewer tokens than BLEU's n-grams")
        self._batch_loss = BatchLoss(self.model, dtype, is_compiled)
        # DistributedDataParallel sums gradients over the processes while they are still being computed.
        self._shared_loss: nn.Module = self._batch_loss
        if self.ranks.size > 1:
            self._shared_loss = DistributedDataParallel(self._batch_loss, gradient_as_bucket_view=True)

    @property
    def seconds(self) -> float:
        """Time spent so far, in all sessions."""
        return self._seconds_before + time.monotonic() - self._start

    def train(self, console: Console) -> Summary:
        """Train to the end, and write the final weights and the summary; the console shows the progress.

        Raises:
            TrainingInterrupted: Ctrl-C or SIGTERM; a checkpoint of the last whole step was written. A resumed
                run repeats an evaluation that was interrupted.
            ValueError: Gradients or the loss show that training failed.
        """
        recipe = self.config.training
        with (
            caught_interrupt() as self._interrupt_signal,
            fast_matmul(self.device),
            self._reporter(console) as reporter,
        ):
            meter = Meter()
            if not self._is_scored:
                self._evaluate(reporter)
                self._save()
            while self.step < self.last_step:
                self.model.train()
                share = self.batches.next_batch()
                meter.add(*self.train_step(share), share.num_tokens)
                if reporter:
                    reporter.advance(self.step)
                if self.step % _REPORT_INTERVAL_STEPS == 0:
                    self._report(reporter, meter)
                    meter = Meter()
                if self.step % recipe.eval_interval_steps == 0 or self.step == self.last_step:
                    start = time.monotonic()
                    self._evaluate(reporter)
                    meter.leave_out(time.monotonic() - start)
                if self._is_scheduled(self.step):
                    self._save()
                if signal_number := self._signal_of_any():
                    self._save()
                    raise TrainingInterrupted(self.step, signal_number)
            return self._finish()

    def _signal_of_any(self) -> int:
        """The signal that interrupted any of the processes, the same in all of them; 0 for none."""
        return self.ranks.largest(self._interrupt_signal() or 0)

    def checkpoint(self) -> Checkpoint:
        """The state after the last step."""
        return Checkpoint(
            step=self.step,
            model=kept_weights(self.model),
            optimizer=self.optimizer.state_dict(),
            epoch=self.batches.epoch,
            batch_index=self.batches.batch_index,
            best=self.best,
            seconds=self.seconds,
            divergence=(self.guard.best_loss, self.guard.num_steps_above),
            is_scored=self._is_scored,
            last_step=self.last_step if self.last_step < self.config.training.max_steps else None,
            config=config_text(self.config.model),
        )

    def _reporter(self, console: Console) -> AbstractContextManager[Reporter | None]:
        if not self.ranks.is_first:
            return nullcontext()
        return Reporter(self.folder, console, self.step, self.config.training.max_steps)

    def _load_vectors(self) -> list[tuple[nn.Embedding, PieceVectors]]:
        """The word vectors of each side's embedding. The target's are last and win in a shared embedding."""
        embeddings = {
            "source": self.model.source_embedding or self.model.embedding,
            "target": self.model.embedding,
        }
        files = {side: self.folder.vectors_file(side) for side in embeddings}
        return [(embeddings[side], PieceVectors.load(file)) for side, file in files.items() if file.is_file()]

    def _end_early(self) -> None:
        """Begin the cool-down if `patience` is used up; without a cool-down, this step is the last one."""
        recipe = self.config.training
        is_cooling = self.last_step - self.step <= recipe.cooldown_steps(self.last_step)
        is_worse = recipe.patience and self.best and self.best.num_worse_since >= recipe.patience
        if not is_worse or is_cooling:  # scores improve again in the cool-down
            return
        # Its share of all steps is that of the recipe.
        self.last_step = min(math.ceil(self.step / (1 - recipe.cooldown_share)), self.last_step)
        _log.info(
            "no better dev score in %d evaluations (patience): the last step is %d",
            recipe.patience,
            self.last_step,
        )

    def _is_scheduled(self, step: int) -> bool:
        """Whether an uninterrupted run writes a checkpoint at this step."""
        recipe = self.config.training
        intervals = (recipe.checkpoint_interval_steps, recipe.eval_interval_steps)
        return step == self.last_step or any(step % interval == 0 for interval in intervals)

    def train_step(self, share: BatchShare) -> tuple[Tensor, Tensor]:
        """Update the weights; return this process' part of the loss and the gradient norm, on the device."""
        recipe = self.config.training
        self.step += 1
        self.model.begin_step(self.step)
        # Random numbers depend on the step alone, so that a resumed run draws the same ones.
        seeds = np.random.SeedSequence([recipe.seed, self.step, self.ranks.rank])
        torch.manual_seed(int(seeds.generate_state(1, np.uint64)[0]))
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.config.model.d_model, recipe, self.last_step)
        loss = self._backward(share)
        self.model.finish_step(lambda own: self.ranks.total(own if share.pieces else [0.0] * len(own)))
        if recipe.are_vectors_frozen:
            for embedding, vectors in self._vectors:
                vectors.hold(embedding)
        gradient_norm = nn.utils.clip_grad_norm_(self.model.parameters(), recipe.max_gradient_norm)
        # The optimizer skips a step if this is not 0. That keeps undefined gradients out of the weights
        # without reading anything from the device.
        self.optimizer.found_inf = (~gradient_norm.isfinite()).float()  # type: ignore[attr-defined]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, gradient_norm

    def _backward(self, share: BatchShare) -> Tensor:
        """Compute the gradients of the batch's mean loss per target token, over all pieces and processes."""
        # The others wait for every process' gradients, so one without rows computes a pair of weight 0.
        pieces = share.pieces or [self.batches.any_batch()]
        recipe = self.config.training
        total = torch.zeros((), device=self.device)
        for number, piece in enumerate(pieces):
            weight = piece.num_labels / share.num_labels if share.pieces else 0.0
            module = self._shared_loss
            is_own = number < len(pieces) - 1  # the processes sum their gradients with the last piece
            with (
                module.no_sync() if is_own and isinstance(module, DistributedDataParallel) else nullcontext()
            ):
                loss = weight * module(piece.to(self.device), recipe.label_smoothing)
                # DistributedDataParallel averages gradients over the processes; the sum is needed here.
                torch.autograd.backward(loss * self.ranks.size)
            total += loss.detach()
        return total

    def _report(self, reporter: Reporter | None, meter: Meter) -> None:
        means = meter.read(self.ranks)
        if means.num_skipped and reporter:
            skipped = f"{means.num_skipped} of {means.num_steps} steps"
            _log.warning("step %d: skipped %s, whose gradients were not finite", self.step, skipped)
        try:
            self.guard.check(self.step, means)
        except ValueError as error:
            raise ValueError(f"{error}: {self._advice()}") from error
        if reporter:
            values = {
                "loss": means.loss,
                "gradient_norm": means.gradient_norm,
                "skipped_steps": means.num_skipped,
                "learning_rate": self.optimizer.param_groups[0]["lr"],
                "tokens_per_second": means.tokens_per_second,
                "epoch": self.batches.epoch,
                "seconds": self.seconds,
            }
            reporter.record(self.step, "train", values)
            reporter.show(f"loss {means.loss:.3f}  {means.tokens_per_second:,.0f} tokens/s")

    def _advice(self) -> str:
        """The advice to a user whose training failed."""
        kept = ""
        if self.best and self.best.step <= self.step - self.guard.num_steps_above:  # before the loss rose
            kept = f"; the best checkpoint, of step {self.best.step}, is kept: score it with --step"
        return (
            "train again with a lower learning_rate_scale, more warmup_steps, "
            f'a smaller max_gradient_norm, or norm="pre"{kept}'
        )

    def _evaluate(self, reporter: Reporter | None) -> None:
        if reporter:
            reporter.show("scoring dev pairs")
        self._is_scored = False
        try:
            result = self._summarise(f"weights of step {self.step}")
        except TrainingInterrupted:
            self._save()
            raise
        self._is_scored = True
        if self.best is None or result.dev_score > self.best.dev_score:
            self.best = BestScore(self.step, result.dev_score)
        else:
            self.best = BestScore(self.best.step, self.best.dev_score, self.best.num_worse_since + 1)
            self._end_early()
        if reporter:
            names = "bleu", "chrf", "accuracy", "wer", "cer"
            scores = {name: getattr(result, f"dev_{name}") for name in names}
            known = {name: value for name, value in scores.items() if value is not None}
            reporter.record(self.step, "dev", {"loss": result.dev_loss} | known)
            from seq2seq_serve.training.reports import curves  # matplotlib takes long to import

            curves.save_learning_curve(self.folder)
        _log.info("step %d: %s", self.step, result.scores)
        if reporter:
            reporter.show("")

    def _summarise(self, weights: str) -> Summary:
        """Evaluate these weights; raise TrainingInterrupted in all processes if one is interrupted."""
        self.model.eval()
        metric = self._metric
        # Targets of a language model do not depend on a source, so all would be the same.
        result = self._score_dev() if metric != "likelihood" else None
        texts = result if metric in ("bleu", "chrf") else None  # answers of one word have no n-grams
        return Summary(
            dev_bleu=texts.bleu if texts else None,
            dev_chrf=texts.chrf if texts else None,
            dev_accuracy=result.accuracy if result and metric == "accuracy" else None,
            dev_wer=result.wer if result and metric == "cer" else None,
            dev_cer=result.cer if result and metric == "cer" else None,
            dev_loss=self._dev_loss(),
            metric=metric,
            bleu_signature=texts.bleu_signature if texts else "",
            chrf_signature=texts.chrf_signature if texts else "",
            weights=weights,
            steps=self.step,
            seconds=round(self.seconds, 1),
        )

    def _score_dev(self) -> Score:
        """Score the targets that the model generates for the dev pairs."""
        references = by_source(self.dev_pairs)
        sources = self.ranks.share(list(references))
        share: list[str] = []
        bound = self.config.length_bound
        dtype = self._batch_loss.dtype
        is_narrow = self.config.base is not None and dtype != torch.float32  # see `add_adapter`
        with suppress(_Stopped), torch.autocast(self.device.type, dtype, enabled=is_narrow):
            share = translate(
                self.model, self.tokenizer, sources, length_bound=bound, before_step=self._stop_if_interrupted
            )
        self._raise_if_interrupted()
        targets = self.ranks.gather(share)
        return score(targets, list(references.values()), self.config.training.bleu_tokenization)

    def _stop_if_interrupted(self) -> None:
        if self._interrupt_signal():
            raise _Stopped

    def _raise_if_interrupted(self) -> None:
        if signal_number := self._signal_of_any():
            raise TrainingInterrupted(self.step, signal_number)

    def _dev_loss(self) -> float:
        """Cross-entropy per target token, without smoothing."""
        pairs = self.ranks.share(encode_pairs(self.dev_pairs, self.tokenizer, self.model.source_kind))
        loss, num_labels = 0.0, 0
        with suppress(_Stopped):
            loss, num_labels = total_loss(
                self._batch_loss, pairs, self.config.training.batch_tokens, self._stop_if_interrupted
            )
        self._raise_if_interrupted()
        total, num_tokens = self.ranks.total([loss, num_labels])
        return total / num_tokens

    def _save(self) -> None:
        self.ranks.first(self._write_checkpoint)

    def _write_checkpoint(self) -> None:
        save_checkpoint(self.folder.checkpoints, self.checkpoint())
        kept = set(self._newest_scheduled()) | {checkpoint_path(self.folder.checkpoints, self.step)}
        if self.best:
            kept.add(checkpoint_path(self.folder.checkpoints, self.best.step))
        remove_checkpoints(self.folder.checkpoints, kept)

    def _newest_scheduled(self) -> list[Path]:
        paths = list_checkpoints(self.folder.checkpoints)
        scheduled = [path for path in paths if self._is_scheduled(checkpoint_step(path))]
        return scheduled[-self.config.training.num_averaged :]

    def _finish(self) -> Summary:
        """Write model.pt: whichever of three scores best on dev.

        They are the average of the newest checkpoints, the best checkpoint, and the previous model.pt.
        """
        if self.guard.num_steps_above:
            _log.warning("%s up to the last one: %s", self.guard.judgement, self._advice())
        average, weights = self.ranks.first(self._average_of_newest)
        self.model.load_state_dict(average, strict=False)
        summary = self._summarise(weights)
        is_best = self.best is not None and self.best.dev_score > summary.dev_score
        best = self.ranks.first(self._best_weights) if is_best else None
        if self.best and best:
            self.model.load_state_dict(best, strict=False)
            summary = self._summarise(f"checkpoint at step {self.best.step}")
        return self.ranks.first(lambda: self._keep_better(summary))

    def _average_of_newest(self) -> tuple[dict[str, Tensor], str]:
        """The mean of the newest readable checkpoints, otherwise the last step's weights; and its name."""
        paths = self._newest_scheduled()
        try:
            average = average_weights(paths)
        except ValueError:
            paths = [path for path in paths if self._read(path)]
            if not paths:
                return kept_weights(self.model), f"weights of step {self.step}"
            average = average_weights(paths)
        steps = ", ".join(str(checkpoint_step(path)) for path in paths)
        return average, f"average of the checkpoints at steps {steps}"

    def _best_weights(self) -> dict[str, Tensor] | None:
        """The weights that scored best on dev; None if their checkpoint cannot be read."""
        assert self.best is not None
        best = self._read(checkpoint_path(self.folder.checkpoints, self.best.step))
        return None if best is None else best.model

    @staticmethod
    def _read(path: Path) -> Checkpoint | None:
        """Read a checkpoint; if it cannot be read, log a warning and return None."""
        try:
            return load_checkpoint(path)
        except ValueError as error:
            _log.warning("a checkpoint is not considered for the final weights: %s", error)
            return None

    def _keep_better(self, summary: Summary) -> Summary:
        """Write the model, unless the run's model.pt from before it was continued is better."""
        file, metric = self.folder.summary_before_file, summary.metric
        before = self.folder.read_summary(file) if file.is_file() else None
        has_same_score = before and (before.metric, before.bleu_signature) == (metric, summary.bleu_signature)
        if before and has_same_score and before.dev_score > summary.dev_score:
            scores = before.dev_score, summary.dev_score
            _log.info("the dev score was %.2f before and is %.2f now: model.pt stays as it was", *scores)
            summary = dataclasses.replace(before, steps=summary.steps, seconds=summary.seconds)
        else:
            weights, lora, base = kept_weights(self.model), self.config.training.lora, self.config.base
            write_weights(self.folder.model_file, weights, self.config.model)
            if lora and base:
                write_adapter(self.folder.adapter, weights, lora, base)
        self.folder.write_summary(summary)
        file.unlink(missing_ok=True)
        return summary


@contextmanager
def fast_matmul(device: torch.device) -> Iterator[None]:
    """Let torch multiply float32 matrices with oneDNN instead of MKL on a CPU; fp32 on a GPU stays fp32.

    Measured on one core of an AMD EPYC (Zen 5) with this project's shapes: 240 instead of 110 GFLOP/s, with
    an error of 4e-7 instead of 2.4e-7. A CPU with matrix units for bfloat16 (AMX) would round its inputs to
    that format, so there MKL multiplies.
    """
    before = torch.get_float32_matmul_precision()
    if device.type == "cpu" and not torch.cpu._is_amx_tile_supported():
        torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def compute_dtype(precision: TrainingPrecision | None, device: torch.device) -> torch.dtype:
    """The number format of matrix products; `precision` None takes bf16 where a GPU has units for it."""
    has_units = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    is_half = has_units if precision is None else precision == "bf16"
    return torch.bfloat16 if is_half else torch.float32


def check_recurrent_layers(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a number format in which torch cannot run the model's recurrent layers on this device.

    A tiny layer of each kind shows it. On a CPU without AVX-512 oneDNN does not have an LSTM in bfloat16.
    Torch uses that one only for batches whose rows are all equally long, so training would fail at any step.

    Raises:
        ValueError: Torch cannot run one of them.
    """
    if dtype == torch.float32:
        return
    for layer in {type(module) for module in model.modules() if isinstance(module, nn.GRU | nn.LSTM)}:
        try:
            with torch.no_grad(), torch.autocast(device.type, dtype):
                layer(8, 8, device=device)(torch.zeros(1, 1, 8, device=device))
        except RuntimeError as error:
            raise ValueError(
                f"torch cannot run an {layer.__name__} layer in bf16 on this {device.type.upper()}: "
                "train with --precision fp32"
            ) from error
