"""Training of a tokenizer; its use is in `bundle.tokenizer`."""

from __future__ import annotations

from collections.abc import Iterable

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from seq2seq_serve.bundle.normalization import Normalization, normalizer
from seq2seq_serve.bundle.tokenizer import Tokenizer
from seq2seq_serve.training.config import BOS, EOS, EOS_ID, PAD, UNK, TrainingConfig

_WORD = r"\w+(?:['’,-]\w+)*"
SMALLEST_VOCAB_SIZE = 4 + 256  # the special tokens and every byte


def check_vocab_size(vocab_size: int) -> None:
    """Raise ValueError unless a vocabulary can hold the special tokens and every byte."""
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
    that decoding returns any text as it was normalised (`bundle.normalization`). The tokenizer's
    post-processor adds eos to a source. The same texts, which are read once, give the same file.

    The vocabulary has at most `vocab_size` tokens, and fewer if the texts are few. ValueError is raised if
    `vocab_size` cannot hold the special tokens and every byte.
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


def train_word_tokenizer(
    texts: Iterable[str], vocab_size: int, normalization: Normalization = TrainingConfig.normalization
) -> Tokenizer:
    """Learn a vocabulary of the most frequent words of all `texts`, in lower case and without punctuation.

    A word is a run of letters and digits; hyphens, apostrophes and commas inside it belong to it. Other words
    get the token for unknown ones, and sources get no eos.
    """
    inner = tokenizers.Tokenizer(models.WordLevel(unk_token=UNK))
    form = normalizer(normalization)
    inner.normalizer = normalizers.Sequence([*([form] if form else []), normalizers.Lowercase()])
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(_WORD), behavior="removed", invert=True)
    trainer = trainers.WordLevelTrainer(
        vocab_size=vocab_size, special_tokens=[PAD, BOS, EOS, UNK], show_progress=False
    )
    inner.train_from_iterator(texts, trainer)
    return Tokenizer(inner)
