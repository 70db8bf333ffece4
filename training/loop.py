"""The training loop: steps, checkpoints, evaluation, early stop, and the choice of the final weights."""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch
from rich.console import Console
from torch import Tensor, nn

from bundle.tokenizer import Tokenizer
from training.batches import Batch, BatchStream, EncodedPair, batches_in_order, encode_pairs
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
from training.config import PAD_ID
from training.corpus import SentencePair
from training.loss import label_smoothed_loss
from training.progress import Reporter
from training.run import RunConfig, RunFolder, Summary
from training.schedule import learning_rate
from training.scoring import Score, score, translate
from training.transformer import Transformer
from training.vectors import PieceVectors

_log = logging.getLogger(__name__)

_REPORT_INTERVAL_STEPS = 20


class TrainingInterrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM stopped the run, and a checkpoint was left.

    Args:
        step: Where.
        signal_number: By which of the two.
    """

    def __init__(self, step: int, signal_number: int) -> None:
        super().__init__(f"interrupted at step {step}")
        self.step = step
        self.signal_number = signal_number


class Trainer:
    """Owns the model, the optimizer, the place in the corpus and the best score of a run being trained.

    Invariant: after each step, `checkpoint()` is all that a new trainer needs to go on bit for bit on a CPU.

    Args:
        config: Of the run.
        folder: Of the run.
        tokenizer: Of source and target.
        train_pairs: What is trained on, by the number of the pass over the corpus.
        dev_pairs: What is scored.
        device: Where.
        checkpoint: Where to go on; None starts anew.
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
    ) -> None:
        self.config = config
        self.folder = folder
        self.tokenizer = tokenizer
        self.dev_pairs = dev_pairs
        self.device = device
        self.step = checkpoint.step if checkpoint else 0
        self.best = checkpoint.best if checkpoint else None
        self._seconds_before = checkpoint.seconds if checkpoint else 0.0
        self._start = time.monotonic()
        recipe = config.training
        torch.manual_seed(recipe.seed)
        self.model = Transformer(config.model).to(device)
        self._vectors = self._load_vectors()
        self.optimizer = torch.optim.Adam(self.model.parameters(), betas=(0.9, 0.98), eps=1e-9, fused=True)
        place = (checkpoint.epoch, checkpoint.batch_index) if checkpoint else (0, 0)
        self.batches = BatchStream(train_pairs, recipe.batch_tokens, recipe.seed, *place)
        if not checkpoint:
            for embedding, vectors in self._vectors:
                vectors.write_to(embedding)
        else:
            origin = checkpoint_path(folder.checkpoints, checkpoint.step)
            load_weights(self.model, checkpoint.model, origin)
            self.optimizer.load_state_dict(checkpoint.optimizer)
            torch.set_rng_state(checkpoint.random_states["cpu"])
            if device.type == "cuda" and "cuda" in checkpoint.random_states:
                torch.cuda.set_rng_state(checkpoint.random_states["cuda"], device)

    @property
    def seconds(self) -> float:
        """Time spent so far, in all sessions."""
        return self._seconds_before + time.monotonic() - self._start

    def train(self, console: Console) -> Summary:
        """Train to the end, and leave the final weights and the summary in the folder.

        Args:
            console: Where the progress bar is drawn.

        Raises:
            TrainingInterrupted: Ctrl-C or SIGTERM; a checkpoint of the last whole step was left.
            ValueError: The loss became infinite or undefined.
        """
        recipe = self.config.training
        with (
            _caught_interrupt() as interrupt_signal,
            _fast_matmul(),
            Reporter(self.folder, console, self.step, recipe.max_steps) as reporter,
        ):
            meter = _Meter()
            while not self._is_done():
                self.model.train()
                batch = self.batches.next_batch().to(self.device)
                meter.add(*self._train_step(batch), batch.num_tokens)
                if self.step % _REPORT_INTERVAL_STEPS == 0:
                    self._report(reporter, meter)
                    meter = _Meter()
                if self.step % recipe.eval_interval_steps == 0 or self.step == recipe.max_steps:
                    start = time.monotonic()
                    self._evaluate(reporter)
                    meter.leave_out(time.monotonic() - start)
                if self._is_scheduled(self.step):
                    self._save()
                reporter.advance(self.step)
                signal_number = interrupt_signal()
                if signal_number is not None:
                    self._save()
                    raise TrainingInterrupted(self.step, signal_number)
            return self._finish()

    def checkpoint(self) -> Checkpoint:
        """The state after the last step."""
        random_states = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            random_states["cuda"] = torch.cuda.get_rng_state(self.device)
        return Checkpoint(
            step=self.step,
            model=self.model.state_dict(),
            optimizer=self.optimizer.state_dict(),
            random_states=random_states,
            epoch=self.batches.epoch,
            batch_index=self.batches.batch_index,
            best=self.best,
            seconds=self.seconds,
        )

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
        if recipe.patience and self.best and self.best.num_worse_since >= recipe.patience:
            _log.info("no better dev score in %d evaluations: stopping early", recipe.patience)
            return True
        return self.step >= recipe.max_steps

    def _is_scheduled(self, step: int) -> bool:
        """Whether a checkpoint belongs to this step, however often training was interrupted."""
        recipe = self.config.training
        intervals = (recipe.checkpoint_interval_steps, recipe.eval_interval_steps)
        return step == recipe.max_steps or any(step % interval == 0 for interval in intervals)

    def _train_step(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """One update; gives loss and gradient norm, left on the device."""
        recipe = self.config.training
        self.step += 1
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.config.model.d_model, recipe)
        loss = self._loss(batch, recipe.label_smoothing)
        torch.autograd.backward(loss)
        if recipe.are_vectors_frozen:
            for embedding, vectors in self._vectors:
                vectors.hold(embedding)
        gradient_norm = nn.utils.clip_grad_norm_(self.model.parameters(), recipe.max_gradient_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach(), gradient_norm

    def _loss(self, batch: Batch, label_smoothing: float) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            memory = self.model.encode(batch.source_ids, batch.source_mask)
            states = self.model.decode_states(batch.target_ids, memory, batch.source_mask)  # (B, T, D)
            is_real = batch.label_ids != PAD_ID
            return label_smoothed_loss(
                states[is_real], self.model.output_weight, batch.label_ids[is_real], label_smoothing
            )

    def _report(self, reporter: Reporter, meter: _Meter) -> None:
        loss, gradient_norm, tokens_per_second = meter.read()
        if not math.isfinite(loss):
            raise ValueError(
                f"the loss is {loss} at step {self.step}: "
                "train with a lower learning_rate_scale or more warmup_steps"
            )
        reporter.record(
            self.step,
            "train",
            {
                "loss": loss,
                "gradient_norm": gradient_norm,
                "learning_rate": self.optimizer.param_groups[0]["lr"],
                "tokens_per_second": tokens_per_second,
                "epoch": self.batches.epoch,
                "seconds": self.seconds,
            },
        )
        reporter.show(f"loss {loss:.3f}  {tokens_per_second:,.0f} tokens/s")

    def _evaluate(self, reporter: Reporter) -> None:
        result = self._score_dev()
        loss = self._dev_loss()
        if self.best is None or result.bleu > self.best.dev_bleu:
            self.best = BestScore(self.step, result.bleu)
        else:
            self.best = BestScore(self.best.step, self.best.dev_bleu, self.best.num_worse_since + 1)
        reporter.record(self.step, "dev", {"loss": loss, "bleu": result.bleu, "chrf": result.chrf})
        _log.info("step %d: dev loss %.3f, BLEU %.2f, chrF %.2f", self.step, loss, result.bleu, result.chrf)

    def _score_dev(self) -> Score:
        self.model.eval()
        sources = [pair.source for pair in self.dev_pairs]
        translations = translate(self.model, self.tokenizer, sources, is_cut_short=True)
        return score(translations, [pair.target for pair in self.dev_pairs])

    @torch.no_grad()
    def _dev_loss(self) -> float:
        """Cross-entropy per target token, without smoothing."""
        self.model.eval()
        total, num_tokens = 0.0, 0
        for batch in batches_in_order(
            encode_pairs(self.dev_pairs, self.tokenizer), self.config.training.batch_tokens
        ):
            num_labels = int((batch.label_ids != PAD_ID).sum())
            total += self._loss(batch.to(self.device), label_smoothing=0.0).item() * num_labels
            num_tokens += num_labels
        return total / num_tokens

    def _save(self) -> None:
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
        """Score the average of the newest checkpoints, and keep it or the best single one."""
        paths = self._newest_scheduled()
        self.model.load_state_dict(average_weights(paths))
        result = self._score_dev()
        steps = [checkpoint_step(path) for path in paths]
        weights = f"average of the checkpoints at steps {', '.join(map(str, steps))}"
        if self.best and self.best.dev_bleu > result.bleu:
            best_path = checkpoint_path(self.folder.checkpoints, self.best.step)
            self.model.load_state_dict(load_checkpoint(best_path).model)
            result = self._score_dev()
            weights = f"checkpoint at step {self.best.step}"
        self.folder.write_model(self.model.state_dict())
        summary = Summary(
            dev_bleu=result.bleu,
            dev_chrf=result.chrf,
            bleu_signature=result.bleu_signature,
            chrf_signature=result.chrf_signature,
            weights=weights,
            steps=self.step,
            seconds=round(self.seconds, 1),
        )
        self.folder.write_summary(summary)
        return summary


class _Meter:
    """Sums what happened since the last report. Values stay on the device until they are read."""

    def __init__(self) -> None:
        self._losses: list[Tensor] = []
        self._gradient_norms: list[Tensor] = []
        self._num_tokens = 0
        self._start = time.monotonic()

    def add(self, loss: Tensor, gradient_norm: Tensor, num_tokens: int) -> None:
        self._losses.append(loss)
        self._gradient_norms.append(gradient_norm)
        self._num_tokens += num_tokens

    def leave_out(self, seconds: float) -> None:
        """Do not count time that was not spent training."""
        self._start += seconds

    def read(self) -> tuple[float, float, float]:
        """Mean loss, mean gradient norm, tokens a second."""
        loss = torch.stack(self._losses).mean().item()
        gradient_norm = torch.stack(self._gradient_norms).mean().item()
        return loss, gradient_norm, self._num_tokens / (time.monotonic() - self._start)


@contextmanager
def _fast_matmul() -> Iterator[None]:
    """Let torch multiply float32 matrices in the fastest way, which on a CPU is oneDNN instead of MKL.

    Measured on an AMD EPYC (Zen 5), one core, this project's shapes: 240 against 110 GFLOP/s, with the same
    error against float64. A CPU with matrix units for bfloat16 may round to it.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def _caught_interrupt() -> Iterator[Callable[[], int | None]]:
    """The first Ctrl-C or SIGTERM is only noted, and the second ends at once; gives the question which came.

    Outside the main thread nothing is caught, since Python delivers signals only there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    noted: list[int] = []

    def note(signal_number: int, _frame: FrameType | None) -> None:
        noted.append(signal_number)
        restore()
        _log.info("interrupted: finishing this step (once more ends at once)")

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for number in previous:
            signal.signal(number, note)
        yield lambda: noted[0] if noted else None
    finally:
        restore()
