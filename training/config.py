"""The configuration of a Transformer and of training; both are checked when they are created.

The presets' values are in `training.presets`, the configuration of other families beside their models.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import KW_ONLY
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from seq2seq_serve.bundle.checked import checked
from seq2seq_serve.bundle.normalization import Normalization
from seq2seq_serve.bundle.tokenizer import Tokenizer

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
PAD_ID, BOS_ID, EOS_ID, UNK_ID = range(4)

Norm = Literal["post", "pre"]
TrainingPrecision = Literal["fp32", "bf16"]
Tokenization = Literal["13a", "intl", "none", "char", "zh", "ja-mecab", "ko-mecab"]  # need no download
Tied = Literal["all", "target", "none"]
ALL_LINEAR = "all-linear"  # the `targets` of an adapter that changes all linear layers

LANGUAGE_TAG = re.compile(r"[A-Za-z]{2,3}(-[A-Za-z0-9]{1,8})*")
_D_HEAD_MULTIPLE = 8  # the attention operator of the served graphs refuses others


def _language_tag(text: str) -> str:
    if not LANGUAGE_TAG.fullmatch(text):
        raise PydanticCustomError("tag", 'Input should be a BCP 47 tag such as "ko" or "pt-BR"')
    return text


SEEDS = 2**63  # those of torch on every device
Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, lt=1)]
AtLeast0 = Annotated[float, Field(ge=0)]
Above0 = Annotated[float, Field(gt=0)]
LanguageTag = Annotated[str, AfterValidator(_language_tag)]


def check_special_ids(tokenizer: Tokenizer) -> None:
    """Raise ValueError if a special token is missing or does not have the id that training expects."""
    for expected, token in enumerate((PAD, BOS, EOS, UNK)):
        if tokenizer.token_id(token) != expected:
            raise ValueError(
                f"the tokenizer gives {token} the id {tokenizer.token_id(token)}, not {expected}"
            )


class TargetFrame(NamedTuple):
    """The tokens around a target.

    Attributes:
        start_ids: The tokens that the decoder reads before it.
        eos_id: The token that ends it.
    """

    start_ids: tuple[int, ...] = (BOS_ID,)
    eos_id: int = EOS_ID


@checked(strict=True)
class ModelConfig:
    """The fields that every family of models has.

    Attributes:
        vocab_size: Tokens of the one vocabulary that source and target share.
        d_model: Width of the embeddings, and of the decoder's states before the output projection.
        dropout: Dropout of the embeddings and of each layer's output; the family's file says where exactly.
        word_dropout: Dropout of whole tokens, on both sides: their embeddings become 0 (Gal and Ghahramani
            2016, arXiv:1512.05287, per position; Sennrich and Zhang 2019, arXiv:1905.11901).
        tied: Which matrices are shared: "all" is the embeddings of source and target and the output
            projection (Vaswani et al. 2017, section 3.4); "target" is target and output; "none" shares
            nothing.
        max_source_length: Source tokens, with eos.
        max_target_length: Decoder positions: bos and the target's tokens.
    """

    vocab_size: Annotated[int, Field(ge=UNK_ID + 1)]
    d_model: Count
    _: KW_ONLY
    dropout: Share = 0.1
    word_dropout: Share = 0.0
    tied: Tied = "all"
    max_source_length: Annotated[int, Field(ge=2)] = 256
    max_target_length: Annotated[int, Field(ge=2)] = 256

    def to_json(self) -> dict[str, Any]:
        """The fields by name."""
        return dataclasses.asdict(self)

    def require(self, is_right: bool, name: str, expected: str) -> None:
        """Raise ValueError with a field's name and what it must be, unless it is right."""
        if not is_right:
            raise ValueError(f"{name} is {getattr(self, name)!r}, and must be {expected}")

    @property
    def frame(self) -> TargetFrame:
        """The tokens around targets."""
        return TargetFrame()

    @property
    def max_target_tokens(self) -> int:
        """The most tokens of a target, with its eos."""
        return self.max_target_length + 1 - len(self.frame.start_ids)

    @property
    def num_unstable_steps(self) -> int:
        """The number of first training steps in which a high loss is no sign of a failed run."""
        return 0

    @property
    def free_in_a_child(self) -> tuple[str, ...]:
        """The fields in which a model that starts with this one's weights may differ from it."""
        return "dropout", "word_dropout", "max_source_length", "max_target_length"


@checked(strict=True)
class TransformerConfig(ModelConfig):
    """The sizes of a Transformer.

    Attributes:
        attention_dropout: Dropout of the attention weights.
        norm: "post" normalises after each residual sum, as the paper does; "pre" before each sub-layer.
    """

    d_ff: Count
    num_heads: Count
    num_encoder_layers: Count
    num_decoder_layers: Count
    _: KW_ONLY
    attention_dropout: Share = 0.0
    norm: Norm = "post"

    def __post_init__(self) -> None:
        self.require(
            self.d_model % (self.num_heads * _D_HEAD_MULTIPLE) == 0,
            "d_model",
            f"a multiple of {_D_HEAD_MULTIPLE} x num_heads, {self.num_heads * _D_HEAD_MULTIPLE}",
        )

    @property
    def free_in_a_child(self) -> tuple[str, ...]:
        return *super().free_in_a_child, "attention_dropout"

    @property
    def d_head(self) -> int:
        return self.d_model // self.num_heads


@checked(strict=True)
class Lora:
    """The size of an adapter (`training.lora`), and the layers that it changes.

    Attributes:
        rank: r, the width of the change of each layer.
        alpha: The factor of the change is alpha / r; None is 2 r.
        dropout: Dropout of what the change reads.
        targets: The last words of the names of linear layers, with +, or `ALL_LINEAR`.
    """

    rank: Count = 16
    alpha: Above0 | None = None
    dropout: Share = 0.0
    targets: str = "query+value"

    def __str__(self) -> str:
        return ",".join(f"{name}={value}" for name, value in vars(self).items() if value is not None)

    @property
    def full_alpha(self) -> float:
        """`alpha`, also where it is the default."""
        return 2.0 * self.rank if self.alpha is None else self.alpha


@checked(strict=True)
class TrainingConfig:
    """The recipe of Vaswani et al. 2017 (section 5, arXiv:1706.03762).

    Attributes:
        max_steps: The last step, unless `patience` ends training before.
        batch_tokens: Padded tokens of a batch, on its longer side.
        mixes_lengths: Whether a batch has pairs of all lengths, in random order; otherwise of similar length,
            which pads less.
        learning_rate_scale: The factor of the paper's schedule; 1 is the paper's.
        cooldown_share: The last share of all steps, in which the learning rate falls to 0.
        max_gradient_norm: Longer gradients are scaled down to this norm.
        eval_interval_steps: How often the dev pairs are translated and scored.
        checkpoint_interval_steps: How often a checkpoint is written.
        num_averaged: How many of the newest checkpoints are kept, and averaged at the end.
        patience: Evaluations without a better dev score after which the cool-down begins, or training ends if
            there is none; None never ends early.
        bleu_tokenization: sacreBLEU's tokenizer of the dev score; None is the one for the script of the dev
            targets.
        normalization: How texts are normalised before they are cut into tokens, "nfc", "nfkc" or "none"
            (`bundle.normalization`). A run with a parent has the parent's normalization.
        source_language: BCP 47 tag of the sources' language, such as "ko", or None; a server splits texts
            into sentences by its rules.
        target_language: The same of the targets' language, by which a server finds a model for it.
        bpe_dropout: Probability of leaving out a merge when training texts are cut into pieces, which each
            pass over the corpus does anew (Provilkov et al. 2020, arXiv:1910.13267).
        source_vectors: Text file of word vectors of width d_model with which source embeddings start
            (`training.data.vectors`); None starts them at random.
        target_vectors: The same for the target, whose vector wins where both sides share one matrix.
        are_vectors_frozen: Whether embeddings that start with a word vector keep it.
        frozen: The parts of the model that training leaves as they are: the first words of the names of its
            weights, with commas, such as "embedding,encoder_layers"; None trains all.
        lora: The adapter that is trained in place of the model (`training.lora`); None trains the model.
        max_length_ratio: A pair is dropped if one side has more tokens than this times the other side's;
            None keeps all pairs.
        drop_copies: Whether pairs with equal source and target are dropped.
        precision: Number format of matrix products, "fp32" or "bf16"; None is bf16 on a GPU with units for
            it, otherwise fp32.
        micro_batch_tokens: The most padded tokens that go through the model at once, in each process. Larger
            batches are cut and their gradients accumulated, with the same result. None does not cut.
    """

    max_steps: Count = 100_000
    batch_tokens: Count = 25_000
    mixes_lengths: bool = False
    label_smoothing: Share = 0.1
    learning_rate_scale: Above0 = 1.0
    warmup_steps: Count = 4000
    cooldown_share: Share = 0.0
    max_gradient_norm: Above0 = 1.0
    eval_interval_steps: Count = 2000
    checkpoint_interval_steps: Count = 1000
    num_averaged: Count = 5
    patience: Count | None = 10
    max_length_ratio: Annotated[float, Field(gt=1)] | None = 5.0
    bleu_tokenization: Tokenization | None = None
    normalization: Normalization = "nfc"
    source_language: LanguageTag | None = None
    target_language: LanguageTag | None = None
    bpe_dropout: Share = 0.0
    drop_copies: bool = False
    precision: TrainingPrecision | None = None
    micro_batch_tokens: Count | None = None
    source_vectors: str | None = None
    target_vectors: str | None = None
    are_vectors_frozen: bool = False
    frozen: str | None = None
    lora: Lora | None = None
    seed: Annotated[int, Field(ge=0, lt=SEEDS)] = 0

    def __post_init__(self) -> None:
        if self.are_vectors_frozen and self.source_vectors is None and self.target_vectors is None:
            raise ValueError("are_vectors_frozen is True, and must be False without word vectors")
        if self.lora is not None and self.frozen is not None:
            raise ValueError(
                f"frozen is {self.frozen!r}, and must be None with lora, which freezes the model"
            )

    def cooldown_steps(self, last_step: int) -> int:
        """The number of last steps, of `last_step` in all, in which the learning rate falls."""
        return round(self.cooldown_share * last_step)
