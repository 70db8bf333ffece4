"""The configuration of a Transformer and of training; both are checked when they are created.

The presets' values are in `training.presets`, the configuration of other families beside their models.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, NamedTuple, Self, get_args

from seq2seq_serve.bundle.normalization import Normalization
from seq2seq_serve.bundle.tokenizer import Tokenizer

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
PAD_ID, BOS_ID, EOS_ID, UNK_ID = range(4)

Norm = Literal["post", "pre"]
Precision = Literal["fp32", "bf16"]
Tokenization = Literal["13a", "intl", "none", "char", "zh", "ja-mecab", "ko-mecab"]  # need no download
Tied = Literal["all", "target", "none"]

SEEDS = 2**63  # those of torch on every device
LANGUAGE_TAG = re.compile(r"[A-Za-z]{2,3}(-[A-Za-z0-9]{1,8})*")
_D_HEAD_MULTIPLE = 8  # the attention operator of the served graphs refuses others


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


@dataclass(frozen=True)
class _Config:
    """A configuration that is read from and written to JSON; a ValueError names a wrong field."""

    def to_json(self) -> dict[str, Any]:
        """The fields by name."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, content: Any) -> Self:
        """Read what `to_json` returned; raise ValueError if a field is missing, unknown or wrong.

        A field with a default may be missing: the run is older than the field. The default of a new field is
        therefore what training did before the field existed.
        """
        if not isinstance(content, dict):
            raise ValueError(f"{cls.__name__} must be a JSON object, not {type(content).__name__}")
        names = {field.name for field in dataclasses.fields(cls)}
        needed = {field.name for field in dataclasses.fields(cls) if field.default is dataclasses.MISSING}
        unknown, missing = sorted(content.keys() - names), sorted(needed - content.keys())
        if unknown or missing:
            raise ValueError(f"{cls.__name__}: unknown fields {unknown}, missing fields {missing}")
        return cls(**content)

    def _require(self, is_right: bool, name: str, expected: str) -> None:
        if not is_right:
            raise ValueError(f"{name} is {getattr(self, name)!r}, and must be {expected}")

    def _require_int(self, name: str, at_least: int, below: float = math.inf) -> None:
        value = getattr(self, name)
        is_right = isinstance(value, int) and not isinstance(value, bool) and at_least <= value < below
        bound = f" and below {below}" if below < math.inf else ""
        self._require(is_right, name, f"an integer of at least {at_least}{bound}")

    def _require_number(self, name: str, *, above: float | None = None, below: float = math.inf) -> None:
        value = getattr(self, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_right = is_number and (value >= 0 if above is None else value > above) and value < below
        bounds = "of at least 0" if above is None else f"above {above}"
        self._require(
            is_right, name, f"a number {bounds}" + (f" and below {below}" if below < math.inf else "")
        )


@dataclass(frozen=True)
class ModelConfig(_Config):
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

    vocab_size: int
    d_model: int
    _: KW_ONLY
    dropout: float = 0.1
    word_dropout: float = 0.0
    tied: Tied = "all"
    max_source_length: int = 256
    max_target_length: int = 256

    def __post_init__(self) -> None:
        self._require_int("vocab_size", at_least=UNK_ID + 1)
        self._require_int("d_model", at_least=1)
        for name in ("max_source_length", "max_target_length"):
            self._require_int(name, at_least=2)
        for name in ("dropout", "word_dropout"):
            self._require_number(name, below=1)
        self._require(self.tied in get_args(Tied), "tied", '"all", "target" or "none"')

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


@dataclass(frozen=True)
class TransformerConfig(ModelConfig):
    """The sizes of a Transformer.

    Attributes:
        attention_dropout: Dropout of the attention weights.
        norm: "post" normalises after each residual sum, as the paper does; "pre" before each sub-layer.
    """

    d_ff: int
    num_heads: int
    num_encoder_layers: int
    num_decoder_layers: int
    _: KW_ONLY
    attention_dropout: float = 0.0
    norm: Norm = "post"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("d_ff", "num_heads", "num_encoder_layers", "num_decoder_layers"):
            self._require_int(name, at_least=1)
        self._require_number("attention_dropout", below=1)
        self._require(self.norm in get_args(Norm), "norm", 'either "post" or "pre"')
        self._require(
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


@dataclass(frozen=True)
class TrainingConfig(_Config):
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
        max_length_ratio: A pair is dropped if one side has more tokens than this times the other side's;
            None keeps all pairs.
        drop_copies: Whether pairs with equal source and target are dropped.
        precision: Number format of matrix products, "fp32" or "bf16"; None is bf16 on a GPU with units for
            it, otherwise fp32.
        micro_batch_tokens: The most padded tokens that go through the model at once, in each process. Larger
            batches are cut and their gradients accumulated, with the same result. None does not cut.
    """

    max_steps: int = 100_000
    batch_tokens: int = 25_000
    mixes_lengths: bool = False
    label_smoothing: float = 0.1
    learning_rate_scale: float = 1.0
    warmup_steps: int = 4000
    cooldown_share: float = 0.0
    max_gradient_norm: float = 1.0
    eval_interval_steps: int = 2000
    checkpoint_interval_steps: int = 1000
    num_averaged: int = 5
    patience: int | None = 10
    max_length_ratio: float | None = 5.0
    bleu_tokenization: Tokenization | None = None
    normalization: Normalization = "nfc"
    source_language: str | None = None
    target_language: str | None = None
    bpe_dropout: float = 0.0
    drop_copies: bool = False
    precision: Precision | None = None
    micro_batch_tokens: int | None = None
    source_vectors: str | None = None
    target_vectors: str | None = None
    are_vectors_frozen: bool = False
    frozen: str | None = None
    seed: int = 0

    def cooldown_steps(self, last_step: int) -> int:
        """The number of last steps, of `last_step` in all, in which the learning rate falls."""
        return round(self.cooldown_share * last_step)

    def __post_init__(self) -> None:
        for name in ("max_steps", "batch_tokens", "warmup_steps", "num_averaged"):
            self._require_int(name, at_least=1)
        for name in ("eval_interval_steps", "checkpoint_interval_steps"):
            self._require_int(name, at_least=1)
        self._require_int("seed", at_least=0, below=SEEDS)
        for name in ("cooldown_share", "label_smoothing", "bpe_dropout"):
            self._require_number(name, below=1)
        for name in ("learning_rate_scale", "max_gradient_norm"):
            self._require_number(name, above=0)
        for name in ("source_vectors", "target_vectors"):
            value = getattr(self, name)
            self._require(value is None or isinstance(value, str), name, "the name of a file, or None")
        has_vectors = self.source_vectors is not None or self.target_vectors is not None
        self._require(
            self.are_vectors_frozen is False or (self.are_vectors_frozen is True and has_vectors),
            "are_vectors_frozen",
            "False without source_vectors and target_vectors, and True or False with them",
        )
        is_known = self.frozen is None or isinstance(self.frozen, str)
        self._require(is_known, "frozen", "names of parts of the model, with commas, or null")
        if self.patience is not None:
            self._require_int("patience", at_least=1)
        if self.max_length_ratio is not None:
            self._require_number("max_length_ratio", above=1)
        for name in ("source_language", "target_language"):
            language = getattr(self, name)
            is_tag = language is None or (isinstance(language, str) and LANGUAGE_TAG.fullmatch(language))
            self._require(bool(is_tag), name, 'a BCP 47 tag such as "ko" or "pt-BR", or null')
        tokenizations = get_args(Tokenization)
        is_known = self.bleu_tokenization in (None, *tokenizations)
        self._require(is_known, "bleu_tokenization", f"null or one of {', '.join(tokenizations)}")
        forms = get_args(Normalization)
        self._require(self.normalization in forms, "normalization", " or ".join(forms))
        for name in ("drop_copies", "mixes_lengths"):
            self._require(isinstance(getattr(self, name), bool), name, "true or false")
        is_known = self.precision is None or self.precision in get_args(Precision)
        self._require(is_known, "precision", '"fp32", "bf16" or null')
        if self.micro_batch_tokens is not None:
            self._require_int("micro_batch_tokens", at_least=1)
