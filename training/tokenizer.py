"""How a tokenizer is trained; how one is used stands in `bundle.tokenizer`."""

from __future__ import annotations

from collections.abc import Iterable

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from bundle.normalization import Normalization, normalizer
from bundle.tokenizer import Tokenizer
from training.config import BOS, EOS, EOS_ID, PAD, UNK, TrainingConfig

SMALLEST_VOCAB_SIZE = 4 + 256  # the special tokens and every byte


def check_vocab_size(vocab_size: int) -> None:
    """Make sure that a vocabulary holds the special tokens and every byte.

    Raises:
        ValueError: It does not.
    """
    if vocab_size < SMALLEST_VOCAB_SIZE:
        raise ValueError(
            f"a vocabulary of {vocab_size} is too small: the special tokens and every byte make "
            f"{SMALLEST_VOCAB_SIZE}"
        )


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, normalization: Normalization = TrainingConfig.normalization
) -> Tokenizer:
    """Learn one vocabulary of byte pairs for all `texts`, sources and targets together.

    Byte-pair encoding (Sennrich et al. 2016, arXiv:1508.07909) over UTF-8 bytes: every byte has a token, so
    any text comes back as it was normalised (`bundle.normalization`). A source is framed by the file's own
    post-processor as its tokens and eos. Deterministic: the same texts give the same file.

    Args:
        texts: Any number of them, read once.
        vocab_size: The most tokens there may be; few texts give fewer.
        normalization: What becomes of a text before it is cut, here and wherever the tokenizer is used.

    Raises:
        ValueError: `vocab_size` does not hold the special tokens and every byte.
    """
    check_vocab_size(vocab_size)
    inner = tokenizers.Tokenizer(models.BPE())
    inner.normalizer = normalizer(normalization)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, BOS, EOS, UNK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    inner.post_processor = processors.TemplateProcessing(single=f"$A {EOS}", special_tokens=[(EOS, EOS_ID)])
    return Tokenizer(inner)
