"""The proof that an imported model computes what `transformers` computes for the same checkpoint."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seq2seq_serve.training.data.media import Media
from seq2seq_serve.training.huggingface.checkpoint import ADAPTER_FILE, CheckpointError, read_json
from seq2seq_serve.training.models.options import PublishedConfig
from seq2seq_serve.training.models.transformer import Transformer

# (batch, source length, target length); the last ones are longer than the distances of relative positions.
_SHAPES = ((1, 1, 1), (1, 8, 6), (3, 21, 11), (2, 47, 29), (1, 150, 140))


_MEDIA_SHAPES = ((1, 0, 1), (2, 0, 9))  # all sounds and pictures are equally long


NUM_GENERATED = 16
# Of the checkpoint's settings: without those of a search, and those that change the model's choice of a token
_START_SETTINGS = "bos_token_id", "decoder_start_token_id", "forced_bos_token_id", "pad_token_id"


@dataclass(frozen=True)
class RandomBatch:
    """Random sources, with their mask (B, S), and random targets (B, T).

    Sources are token ids (B, S), spectrograms, or pictures.
    """

    source: Tensor
    source_mask: Tensor
    target_ids: Tensor

    def named_source(self, media: Media | None) -> dict[str, Tensor]:
        """The source as the arguments of a model of `transformers`."""
        if media is not None:
            return media.arguments(self.source)
        return {"input_ids": self.source, "attention_mask": self.source_mask.long()}


def random_batches(config: PublishedConfig, pad_id: int) -> list[RandomBatch]:
    """Batches of several sizes; the first row of texts is full, and other rows are padded.

    No other token is pad, because some models do not count it as a position; its neighbour is in its place.
    """
    generator = torch.Generator().manual_seed(0)
    batches = []
    if config.media is not None:
        rng = np.random.default_rng(0)
        for B, _, T in _MEDIA_SHAPES:
            source, mask = config.media.tensors([config.media.random(rng, 0, 0) for _ in range(B)])
            target_ids = torch.randint(config.vocab_size, (B, T), generator=generator)
            batches.append(RandomBatch(source, mask, target_ids))
        return batches
    for B, longest_source, longest_target in _SHAPES:
        S = min(longest_source, config.max_source_length)
        T = min(longest_target, config.max_target_length)
        lengths = torch.tensor([S, *torch.randint(1, S + 1, (B - 1,), generator=generator).tolist()])
        mask = torch.arange(S) < lengths[:, None]
        source_ids = torch.randint(config.source_vocab_size, (B, S), generator=generator)
        target_ids = torch.randint(config.vocab_size, (B, T), generator=generator)
        for token_ids, vocab_size in (
            (source_ids, config.source_vocab_size),
            (target_ids, config.vocab_size),
        ):
            token_ids[token_ids == pad_id] = (pad_id + 1) % vocab_size
        batches.append(RandomBatch(source_ids.masked_fill(~mask, pad_id), mask, target_ids))
    return batches


@dataclass(frozen=True)
class Reference:
    """What `transformers` computes in float32.

    Attributes:
        log_probabilities: Those of each batch, (B, T, V).
        target: The start tokens of a source, and the next ones of greedy `generate` by the checkpoint's
            settings; empty if there was no source.
    """

    log_probabilities: list[Tensor]
    target: list[int]


def reference(
    path: Path,
    media: Media | None,
    batches: Sequence[RandomBatch],
    source: RandomBatch | None,
    starts: Mapping[str, int | list[int]],
) -> Reference:
    """Ask `transformers`; it runs no code of the checkpoint.

    Args:
        path: The checkpoint.
        media: The kind of its sources, if they are not texts.
        batches: Sources with given targets.
        source: One source, for `generate`.
        starts: The settings of `generate` for that source's languages and ends.
    """
    import transformers  # takes seconds

    model = read_theirs(path, media)
    target: list[int] = []
    log_probabilities = [their_log_probabilities(model, media, batch) for batch in batches]
    with torch.inference_mode():
        if source is not None:
            kept = {name: getattr(model.generation_config, name) for name in _START_SETTINGS}
            model.generation_config = transformers.GenerationConfig(**kept, do_sample=False, num_beams=1)
            # T5's cache has as many layers as its encoder.
            options = {"max_new_tokens": NUM_GENERATED, "use_cache": False, **starts}
            (found,) = model.generate(**source.named_source(media), **options)
            target = found.tolist()
    return Reference(log_probabilities, target)


def read_theirs(path: Path, media: Media | None) -> Any:
    """The model of a checkpoint as `transformers` reads it, in float32 and in eval mode."""
    import transformers
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    kind = getattr(transformers, "AutoModelForSeq2SeqLM" if media is None else media.auto_class)
    model = kind.from_pretrained(path, dtype=torch.float32, local_files_only=True, trust_remote_code=False)
    for module in model.modules():
        # transformers 5.24 leaves the sinusoids of TrOCR without values; None is computed anew.
        if type(module).__name__ == "TrOCRSinusoidalPositionalEmbedding":
            module.weights = None
    return model.eval()


def their_log_probabilities(model: Any, media: Media | None, batch: RandomBatch) -> Tensor:
    """The log-probabilities (B, T, V) of a batch by a model of `transformers`."""
    with torch.inference_mode():
        answer = model(**batch.named_source(media), decoder_input_ids=batch.target_ids)
    log_probabilities: Tensor = answer.logits.log_softmax(-1)
    return log_probabilities


def adapter_settings(folder: Path) -> dict[str, Any]:
    """The settings of an adapter of peft; raises CheckpointError if the folder is not one."""
    if not (folder / ADAPTER_FILE).is_file():
        raise CheckpointError(
            f"{folder} has no {ADAPTER_FILE}: give a folder as save_pretrained of peft writes it"
        )
    return read_json(folder / ADAPTER_FILE)


def with_adapter(model: Any, folder: Path) -> Any:
    """The model that peft makes of both, in eval mode; raises what peft raises, also for missing weights."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)  # of transformers, that peft causes
        warnings.filterwarnings("error", message=".*missing adapter keys.*")
        import peft

        return peft.PeftModel.from_pretrained(model, folder, local_files_only=True).eval()


def agrees(
    model: Transformer, source: RandomBatch, ours: Sequence[int], theirs: Sequence[int], gap: float
) -> bool:
    """Whether two greedy targets are equal, or differ first in tokens whose log-probabilities are near."""
    place = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
    if place is None:
        return len(ours) == len(theirs)
    if place == 0:
        return False
    given = torch.tensor([[*ours[:place]]])
    (log_probabilities,) = _log_probabilities(model, replace(source, target_ids=given))[:, -1]
    return bool((log_probabilities[ours[place]] - log_probabilities[theirs[place]]).abs() <= gap)


def worst_difference(model: Transformer, batches: Sequence[RandomBatch], expected: Sequence[Tensor]) -> float:
    """The largest difference of a log-probability; infinite if one is not a number."""
    worst = 0.0
    for batch, log_probabilities in zip(batches, expected, strict=True):
        difference = (_log_probabilities(model, batch) - log_probabilities).abs().max()
        worst = max(worst, float(difference) if difference.isfinite() else float("inf"))
    return worst


def largest_rounding(config: PublishedConfig, expected: Sequence[Tensor]) -> float:
    """The largest difference of log-probabilities that float32 explains.

    A sum of n products rounds by about √n half units of its last place, if the signs of the errors are random
    (Higham 2002, "Accuracy and Stability of Numerical Algorithms", section 2.8). The residual stream adds N
    such sums of up to F products, one for each sublayer, whose errors add as random ones, too. They reach the
    logits in proportion to the logits' range R: u √(N F) R, where u is 2^-24. Of M compared numbers with this
    deviation, the largest is about √(2 ln M) times as large.
    """
    num_sublayers = 2 * config.encoder.num_layers + 3 * config.decoder.num_layers
    width = max(config.encoder.d_ff, config.decoder.d_ff)
    spread = max(float(one.max() - one.min()) for one in expected)
    num_values = sum(one.numel() for one in expected)
    return 2**-24 * math.sqrt(num_sublayers * width) * spread * math.sqrt(2 * math.log(num_values))


def _log_probabilities(model: Transformer, batch: RandomBatch) -> Tensor:
    """The log-probabilities (B, T, V) of a batch."""
    with torch.inference_mode():
        memory = model.encode(batch.source, batch.source_mask)
        return model.decode(batch.target_ids, memory, batch.source_mask).log_softmax(-1)
