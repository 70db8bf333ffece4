"""The training loop: steps, checkpoints, evaluation, early stop, and the choice of the final weights."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bundle.tokenizer import Tokenizer
from training.batches import BatchShare, BatchStream, batches_in_order
from training.checkpoint import (
    BestScore,
    Checkpoint,
    average_weights,
    checkpoint_path,
    checkpoint_step,
    list_checkpoints,
    load_checkpoint,
    load_weights,
    remove_checkpoints,
    save_checkpoint,
)
from training.config import Precision
from training.encoded import EncodedPair, encode_pairs
from training.interrupt import TrainingInterrupted, caught_interrupt
from training.loss import BatchLoss
from training.meter import DivergenceGuard, Meter
from training.progress import Reporter
from training.ranks import Ranks
from training.run import RunConfig, RunFolder, Summary
from training.schedule import learning_rate
from training.scoring import Score, score, translate
from training.text_files import SentencePair
from training.transformer import Transformer
from training.vectors import PieceVectors

_log = logging.getLogger(__name__)

_REPORT_INTERVAL_STEPS = 20


class _Stopped(Exception):
    """Ends an evaluation in this process, until all processes know that one was interrupted."""


class Trainer:
    """Owns the model, the optimizer, the place in the corpus and the best score of a run being trained.

    Invariant: after each step, `checkpoint()` is all that a new trainer needs to go on bit for bit on a CPU.
    Every process has a trainer; after each step all hold the same weights, and they decide the same.

    Args:
        config: Of the run.
        folder: Of the run.
        tokenizer: Of source and target.
        train_pairs: What is trained on, by the number of the pass over the corpus.
        dev_pairs: What is scored.
        device: Where.
        checkpoint: Where to go on; None starts anew.
        ranks: The processes that train together.
        is_compiled: Whether `torch.compile` makes the model faster.
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
        self._is_scored = checkpoint.is_scored if checkpoint else True
        self._interrupt_signal: Callable[[], int | None] = lambda: None
        self._seconds_before = checkpoint.seconds if checkpoint else 0.0
        self._start = time.monotonic()
        recipe = config.training
        torch.manual_seed(recipe.seed)
        self.model = Transformer(config.model).to(device)
        divergence = checkpoint.divergence if checkpoint else ()
        self.guard = DivergenceGuard(config.model.vocab_size, *divergence)
        self._vectors = self._load_vectors()
        self.optimizer = torch.optim.Adam(self.model.parameters(), betas=(0.9, 0.98), eps=1e-9, fused=True)
        place = (checkpoint.epoch, checkpoint.batch_index) if checkpoint else (0, 0)
        self.batches = BatchStream(
            train_pairs,
            recipe.batch_tokens,
            recipe.seed,
            *place,
            ranks=self.ranks,
            piece_tokens=recipe.micro_batch_tokens and -(-recipe.micro_batch_tokens // recipe.num_passes),
        )
        if not checkpoint:
            if initial := folder.read_initial():
                load_weights(self.model, initial, folder.initial_file)
            for embedding, vectors in self._vectors:
                vectors.write_to(embedding)
        else:
            origin = checkpoint_path(folder.checkpoints, checkpoint.step)
            load_weights(self.model, checkpoint.model, origin)
            self.optimizer.load_state_dict(checkpoint.optimizer)
        self._batch_loss = BatchLoss(self.model, compute_dtype(recipe.precision, device), is_compiled)
        # Sums gradients over the processes while they are still being computed.
        self._shared_loss: nn.Module = self._batch_loss
        if self.ranks.size > 1:
            self._shared_loss = DistributedDataParallel(self._batch_loss, gradient_as_bucket_view=True)

    @property
    def seconds(self) -> float:
        """Time spent so far, in all sessions."""
        return self._seconds_before + time.monotonic() - self._start

    def train(self, console: Console) -> Summary:
        """Train to the end, and leave the final weights and the summary in the folder.

        Args:
            console: Where the progress bar is drawn.

        Raises:
            TrainingInterrupted: Ctrl-C or SIGTERM; a checkpoint of the last whole step was left. An
                evaluation that was interrupted is made again when the run goes on.
            ValueError: Gradients or the loss show that training came to nothing.
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
            while not self._is_done():
                self.model.train()
                share = self.batches.next_batch()
                meter.add(*self.train_step(share), share.num_tokens)
                if reporter:
                    reporter.advance(self.step)
                if self.step % _REPORT_INTERVAL_STEPS == 0:
                    self._report(reporter, meter)
                    meter = Meter()
                if self.step % recipe.eval_interval_steps == 0 or self.step == recipe.max_steps:
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
        """The signal that interrupted any of the processes, the same answer in all of them; 0 for none."""
        return self.ranks.largest(self._interrupt_signal() or 0)

    def checkpoint(self) -> Checkpoint:
        """The state after the last step."""
        return Checkpoint(
            step=self.step,
            model=self.model.state_dict(),
            optimizer=self.optimizer.state_dict(),
            epoch=self.batches.epoch,
            batch_index=self.batches.batch_index,
            best=self.best,
            seconds=self.seconds,
            divergence=(self.guard.best_loss, self.guard.num_steps_above),
            is_scored=self._is_scored,
        )

    def _reporter(self, console: Console) -> AbstractContextManager[Reporter | None]:
        if not self.ranks.is_first:
            return nullcontext()
        return Reporter(self.folder, console, self.step, self.config.training.max_steps)

    def _load_vectors(self) -> list[tuple[nn.Embedding, PieceVectors]]:
        """What was read for each side's embedding; where they are one, the target's stands last."""
        embeddings = {
            "source": self.model.source_embedding or self.model.embedding,
            "target": self.model.embedding,
        }
        files = {side: self.folder.vectors_file(side) for side in embeddings}
        return [(embeddings[side], PieceVectors.load(file)) for side, file in files.items() if file.is_file()]

    def _is_done(self) -> bool:
        recipe = self.config.training
        is_cooling = recipe.max_steps - self.step <= recipe.cooldown_steps
        is_worse = recipe.patience and self.best and self.best.num_worse_since >= recipe.patience
        if is_worse and not is_cooling:  # what cools down gets better only then
            _log.info("no better dev BLEU in %d evaluations (patience): stopping early", recipe.patience)
            return True
        return self.step >= recipe.max_steps

    def _is_scheduled(self, step: int) -> bool:
        """Whether a checkpoint belongs to this step, however often training was interrupted."""
        recipe = self.config.training
        intervals = (recipe.checkpoint_interval_steps, recipe.eval_interval_steps)
        return step == recipe.max_steps or any(step % interval == 0 for interval in intervals)

    def train_step(self, share: BatchShare) -> tuple[Tensor, Tensor]:
        """One update; gives this process' part of the loss, and the gradient norm, left on the device."""
        recipe = self.config.training
        self.step += 1
        # Random numbers depend on the step alone, so that a resumed run draws the same.
        seeds = np.random.SeedSequence([recipe.seed, self.step, self.ranks.rank])
        torch.manual_seed(int(seeds.generate_state(1, np.uint64)[0]))
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.config.model.d_model, recipe)
        loss = self._backward(share)
        if recipe.are_vectors_frozen:
            for embedding, vectors in self._vectors:
                vectors.hold(embedding)
        gradient_norm = nn.utils.clip_grad_norm_(self.model.parameters(), recipe.max_gradient_norm)
        # The optimizer skips a step where this is not 0. So no weight becomes undefined, and nothing has to
        # be read from the device for it.
        self.optimizer.found_inf = (~gradient_norm.isfinite()).float()  # type: ignore[attr-defined]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, gradient_norm

    def _backward(self, share: BatchShare) -> Tensor:
        """Gradients of the mean over all target tokens of the batch, of whatever pieces and processes."""
        # A process without a row computes one of no weight, because the others wait for its gradients.
        pieces = share.pieces or [self.batches.any_batch()]
        recipe = self.config.training
        total = torch.zeros((), device=self.device)
        for number, piece in enumerate(pieces):
            weight = piece.num_labels / share.num_labels if share.pieces else 0.0
            is_last = number == len(pieces) - 1
            with nullcontext() if is_last else self._without_sharing():
                loss = weight * self._shared_loss(
                    piece.to(self.device), recipe.label_smoothing, recipe.r_drop
                )
                # Gradients are the mean over the processes, and the sum is wanted.
                torch.autograd.backward(loss * self.ranks.size)
            total += loss.detach()
        return total

    def _without_sharing(self) -> AbstractContextManager[None]:
        """Where gradients are only added to this process' own."""
        if isinstance(self._shared_loss, DistributedDataParallel):
            return self._shared_loss.no_sync()
        return nullcontext()

    def _report(self, reporter: Reporter | None, meter: Meter) -> None:
        reading = meter.read(self.ranks)
        if reading.num_skipped and reporter:
            _log.warning(
                "step %d: %d of %d steps had gradients that are not finite, and were skipped",
                self.step,
                reading.num_skipped,
                reading.num_steps,
            )
        try:
            self.guard.check(self.step, reading)
        except ValueError as error:
            raise ValueError(f"{error}: {self._advice()}") from error
        if reporter:
            reporter.record(
                self.step,
                "train",
                {
                    "loss": reading.loss,
                    "gradient_norm": reading.gradient_norm,
                    "skipped_steps": reading.num_skipped,
                    "learning_rate": self.optimizer.param_groups[0]["lr"],
                    "tokens_per_second": reading.tokens_per_second,
                    "epoch": self.batches.epoch,
                    "seconds": self.seconds,
                },
            )
            reporter.show(f"loss {reading.loss:.3f}  {reading.tokens_per_second:,.0f} tokens/s")

    def _advice(self) -> str:
        """What to do where training came to nothing."""
        kept = ""
        if self.best and self.best.step <= self.step - self.guard.num_steps_above:  # later ones are no good
            kept = f"; the best checkpoint, of step {self.best.step}, is kept: score it with --step"
        return (
            "train anew with a lower learning_rate_scale, more warmup_steps, "
            f'a smaller max_gradient_norm, or norm="pre"{kept}'
        )

    def _evaluate(self, reporter: Reporter | None) -> None:
        if reporter:
            reporter.show("scoring dev pairs")
        self._is_scored = False
        try:
            result, loss = self._score_dev(), self._dev_loss()
        except TrainingInterrupted:
            self._save()
            raise
        self._is_scored = True
        if self.best is None or result.bleu > self.best.dev_bleu:
            self.best = BestScore(self.step, result.bleu)
        else:
            self.best = BestScore(self.best.step, self.best.dev_bleu, self.best.num_worse_since + 1)
        if reporter:
            reporter.record(self.step, "dev", {"loss": loss, "bleu": result.bleu, "chrf": result.chrf})
            from training.curves import save_learning_curve  # matplotlib takes long to import

            save_learning_curve(self.folder)
        _log.info("step %d: dev loss %.3f, BLEU %.2f, chrF %.2f", self.step, loss, result.bleu, result.chrf)
        if reporter:
            reporter.show("")

    def _score_dev(self) -> Score:
        """Score the model on the dev pairs.

        Raises:
            TrainingInterrupted: In all processes where one was interrupted, which stops before its next step.
        """
        self.model.eval()
        sources = self.ranks.share([pair.source for pair in self.dev_pairs])
        share: list[str] = []
        with suppress(_Stopped):
            share = translate(
                self.model,
                self.tokenizer,
                sources,
                length_bound=self.config.length_bound,
                before_step=self._stop_if_interrupted,
            )
        self._raise_if_interrupted()
        return score(self.ranks.gather(share), [pair.target for pair in self.dev_pairs])

    def _stop_if_interrupted(self) -> None:
        if self._interrupt_signal():
            raise _Stopped

    def _raise_if_interrupted(self) -> None:
        if signal_number := self._signal_of_any():
            raise TrainingInterrupted(self.step, signal_number)

    @torch.no_grad()
    def _dev_loss(self) -> float:
        """Cross-entropy per target token, without smoothing; raises as `_score_dev` where interrupted."""
        self.model.eval()
        pairs = self.ranks.share(encode_pairs(self.dev_pairs, self.tokenizer))
        loss, num_labels = 0.0, 0
        for batch in batches_in_order(pairs, self.config.training.batch_tokens) if pairs else ():
            mean = self._batch_loss(batch.to(self.device), label_smoothing=0.0)
            loss += mean.item() * batch.num_labels
            num_labels += batch.num_labels
            if self._interrupt_signal():
                break
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
        """Keep what is best on dev: the newest checkpoints' average, a single one, or what `model.pt` is."""
        if self.guard.num_steps_above:
            _log.warning("%s until the last one: %s", self.guard.judgement, self._advice())
        average, weights = self.ranks.first(self._average_of_newest)
        self.model.load_state_dict(average)
        result = self._score_dev()
        is_best = self.best is not None and self.best.dev_bleu > result.bleu
        best = self.ranks.first(self._best_weights) if is_best else None
        if self.best and best:
            self.model.load_state_dict(best)
            result = self._score_dev()
            weights = f"checkpoint at step {self.best.step}"
        summary = Summary(
            dev_bleu=result.bleu,
            dev_chrf=result.chrf,
            bleu_signature=result.bleu_signature,
            chrf_signature=result.chrf_signature,
            weights=weights,
            steps=self.step,
            seconds=round(self.seconds, 1),
        )
        return self.ranks.first(lambda: self._keep_better(summary))

    def _average_of_newest(self) -> tuple[dict[str, Tensor], str]:
        """The mean of the newest checkpoints that can be read, and its name.

        Where none can be read, these are the weights of the last step.
        """
        paths = self._newest_scheduled()
        try:
            average = average_weights(paths)
        except ValueError:
            paths = [path for path in paths if self._read(path)]
            if not paths:
                return self.model.state_dict(), f"weights of step {self.step}"
            average = average_weights(paths)
        steps = ", ".join(str(checkpoint_step(path)) for path in paths)
        return average, f"average of the checkpoints at steps {steps}"

    def _best_weights(self) -> dict[str, Tensor] | None:
        """The weights that scored best on dev; None where their checkpoint cannot be read."""
        assert self.best is not None
        best = self._read(checkpoint_path(self.folder.checkpoints, self.best.step))
        return None if best is None else best.model

    @staticmethod
    def _read(path: Path) -> Checkpoint | None:
        """A checkpoint, or None and a line of the log where it cannot be read."""
        try:
            return load_checkpoint(path)
        except ValueError as error:
            _log.warning("a checkpoint is left out of the choice of the final weights: %s", error)
            return None

    def _keep_better(self, summary: Summary) -> Summary:
        """Write the model, unless the run had come to a better one before it went on."""
        before = self.folder.read_summary_before()
        if before and before.dev_bleu > summary.dev_bleu:
            bleus = before.dev_bleu, summary.dev_bleu
            _log.info("dev BLEU was %.2f before, and is %.2f now: model.pt stays as it was", *bleus)
            summary = dataclasses.replace(before, steps=summary.steps, seconds=summary.seconds)
        else:
            self.folder.write_model(self.model.state_dict())
        self.folder.write_summary(summary)
        self.folder.summary_before_file.unlink(missing_ok=True)
        return summary


@contextmanager
def fast_matmul(device: torch.device) -> Iterator[None]:
    """Let torch multiply float32 matrices with oneDNN instead of MKL on a CPU; fp32 on a GPU stays fp32.

    Measured on an AMD EPYC (Zen 5), one core, this project's shapes: 240 against 110 GFLOP/s, and 4e-7
    instead of 2.4e-7 away from float64. A CPU with matrix units for bfloat16 may round to it.
    """
    before = torch.get_float32_matmul_precision()
    if device.type == "cpu":
        torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def compute_dtype(precision: Precision | None, device: torch.device) -> torch.dtype:
    """What matrices are multiplied in; None is what suits the kind of device."""
    is_half = device.type == "cuda" if precision is None else precision == "bf16"
    return torch.bfloat16 if is_half else torch.float32
