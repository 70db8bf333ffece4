"""The families of checkpoints that can be read, and how to tell which one a checkpoint has.

To add a family, add a line to `FAMILIES`, and a recipe for its tokenizer to
`training.huggingface.tokenizers`. A model whose configuration or weights have other names also needs a
`Dialect`, in a file of its own.
"""

from __future__ import annotations

from seq2seq_serve.training.huggingface.bart import BART, BART_LEARNED, LEARNED, M2M100, SINUSOIDAL
from seq2seq_serve.training.huggingface.checkpoint import CheckpointError, CheckpointFolder
from seq2seq_serve.training.huggingface.dialect import Limits, PublishedFamily
from seq2seq_serve.training.huggingface.gemma import GEMMA
from seq2seq_serve.training.huggingface.t5 import T5
from seq2seq_serve.training.huggingface.tokenizers import (
    ANY_CLASS,
    RECIPES,
    TOKENIZER_FILES,
    TokenizerFiles,
    by_languages,
)
from seq2seq_serve.training.huggingface.trocr import TROCR
from seq2seq_serve.training.huggingface.whisper import WHISPER
from seq2seq_serve.training.models.options import PublishedConfig

_D_HEAD_MULTIPLE = 8  # the attention operator of the served graphs refuses others

FAMILIES = (
    PublishedFamily("marian", "marian", BART, SINUSOIDAL, is_pre_norm=False, translates_sentences=True),
    PublishedFamily("pegasus", "pegasus", BART, SINUSOIDAL),
    PublishedFamily("bart", "bart", BART, BART_LEARNED, is_pre_norm=False, has_embedding_norm=True),
    PublishedFamily(
        "mbart50",
        "mbart",
        BART,
        BART_LEARNED,
        "MBart50Tokenizer",
        has_embedding_norm=True,
        translates_sentences=True,
    ),
    PublishedFamily("mbart", "mbart", BART, BART_LEARNED, has_embedding_norm=True),
    PublishedFamily(
        "nllb",
        "m2m_100",
        BART,
        M2M100,
        "NllbTokenizer",
        activation="relu",
        scales_embedding=True,
        translates_sentences=True,
    ),
    PublishedFamily(
        "m2m100",
        "m2m_100",
        BART,
        M2M100,
        activation="relu",
        scales_embedding=True,
        translates_sentences=True,
    ),
    PublishedFamily("blenderbot", "blenderbot", BART, LEARNED),
    PublishedFamily("byt5", "t5", T5, tokenizer_class="ByT5Tokenizer", activation="relu", scales_output=True),
    PublishedFamily("t5", "t5", T5, activation="relu", scales_output=True, longest=512),
    PublishedFamily("mt5", "mt5", T5, activation="gated-gelu", longest=512),
    PublishedFamily("whisper", "whisper", WHISPER, LEARNED),
    PublishedFamily("trocr", "vision-encoder-decoder", TROCR),
    PublishedFamily("t5gemma", "t5gemma", GEMMA, shares_embedding=False),
    PublishedFamily("t5gemma2", "t5gemma2", GEMMA, is_merged=True),
)


def family_of(checkpoint: CheckpointFolder) -> PublishedFamily:
    """The family of a checkpoint.

    Families of one model differ in the frames of texts. The class of the tokenizer tells them apart, or the
    languages in its files where the class is a general one.

    Raises:
        CheckpointError: There is no such family, or nothing tells it from others.
    """
    model_type, name = checkpoint.config["model_type"], checkpoint.tokenizer_class.removesuffix("Fast")
    families = {family.name: family for family in FAMILIES if family.model_type == model_type}
    if not families:
        kinds = ", ".join(dict.fromkeys(family.model_type for family in FAMILIES))
        raise CheckpointError(
            f"{checkpoint.path} is a model of the type {model_type!r}, which is not supported; there are "
            f"{kinds}"
        )
    named = [family for family in families.values() if family.tokenizer_class in ("", name)]
    is_general = name in ("", *ANY_CLASS) and len(families) > 1
    if not is_general or not all(RECIPES[one].language for one in families):
        return named[0]
    if not any((checkpoint.path / file).is_file() for file in TOKENIZER_FILES):
        raise CheckpointError(
            f"{checkpoint.path} has no file of a tokenizer (tokenizer.json, or vocab.json and pieces): "
            "copy those of the original model"
        )
    found = by_languages(TokenizerFiles.read(checkpoint.path, checkpoint.config), list(families))
    if len(found) != 1:
        classes = dict.fromkeys(one for family in families for one in RECIPES[family].classes)
        raise CheckpointError(
            f"{checkpoint.path}: the tokenizer has the languages of {' and '.join(found) or 'none'} of "
            f"{', '.join(families)}: set tokenizer_class in tokenizer_config.json to "
            f"{' or '.join(classes)}"
        )
    return families[found[0]]


def config_of(family: PublishedFamily, checkpoint: CheckpointFolder, limits: Limits) -> PublishedConfig:
    """The options of a model as its settings have them, before its weights are seen.

    Raises:
        CheckpointError: A setting is missing, or its value is not supported.
    """
    try:
        result = family.dialect.options(family, checkpoint, limits)
    except KeyError as error:
        raise CheckpointError(f"config.json lacks {error.args[0]}") from error
    except CheckpointError:
        raise
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise CheckpointError(f"config.json has a size that is not supported: {error}") from error
    for sizes in (result.encoder, result.decoder):
        if sizes.d_head % _D_HEAD_MULTIPLE:
            raise CheckpointError(
                f"the model's heads are {sizes.d_head} wide; a multiple of {_D_HEAD_MULTIPLE} is supported"
            )
    return result
