"""The families of checkpoints that can be imported: a table of their options, and the names of their weights.

To add a family, add a line to `FAMILIES`, and a recipe for its tokenizer to `export.huggingface.tokenizers`.
A model whose configuration or weights have other names also needs a `Dialect`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from seq2seq_serve.export.graphs.architecture import Activation, LayerKind, Rotary
from seq2seq_serve.export.huggingface.checkpoint import CheckpointError, CheckpointFolder
from seq2seq_serve.export.huggingface.model import (
    ALL_MAPS,
    ImportedConfig,
    ImportedModel,
    Positions,
    StackConfig,
)
from seq2seq_serve.export.huggingface.pictures import Patches
from seq2seq_serve.export.huggingface.sounds import Sounds
from seq2seq_serve.export.huggingface.tokenizers import ANY_CLASS, RECIPES, Checkpoint, by_languages

# D d_model   H heads   M largest distance

_ACTIVATIONS: dict[str, Activation] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}
_LAYER_NORM_EPSILON = 1e-5
_D_HEAD_MULTIPLE = 8  # the attention operator of the served graphs refuses others
_NAMES_IN_MESSAGE = 5
# Buffers that older releases of transformers and fairseq saved with the weights of any model
_BUFFERS = re.compile(r"(.*\.)?(version|position_ids|_float_tensor|rotary_emb\.inv_freq)")
_TIED = "shared.weight", "source_embedding.weight", "target_embedding.weight", "output.weight"


@dataclass(frozen=True)
class Dialect:
    """How some families name their settings and weights.

    Attributes:
        options: Reads the settings of a family from those of a checkpoint.
        names: Patterns of a weight's name and their replacements by this project's names, in order.
        unused: The names, after replacement, of weights that are computed instead, or that texts do not need,
            besides those of every family.
        norm_offset: Added to the weights of norms.
    """

    options: Callable[[Family, CheckpointFolder, Limits], ImportedConfig]
    names: tuple[tuple[str, str], ...]
    unused: str
    norm_offset: float = 0.0


@dataclass(frozen=True)
class Family:
    """Models that differ in sizes only.

    Attributes:
        name: Also that of its tokenizer's recipe.
        model_type: Of `config.json`.
        tokenizer_class: The class that tells the family from others of its `model_type`; empty for any class.
        activation: The default of `config.json`.
        scales_embedding: The default of `scale_embedding`.
        scales_output: Whether a tied projection divides decoder states by √D.
        shares_embedding: The default of `share_encoder_decoder_embeddings`.
        is_merged: Whether decoder layers read cache and memory at once, and heads have norms.
        longest: The most tokens of a source and of a target by default, for a model without a limit.
    """

    name: str
    model_type: str
    dialect: Literal["bart", "t5", "gemma", "whisper", "trocr"]
    positions: Positions | None = None
    tokenizer_class: str = ""
    is_pre_norm: bool = True
    has_embedding_norm: bool = False
    activation: str = "gelu"
    scales_embedding: bool = False
    scales_output: bool = False
    shares_embedding: bool = True
    is_merged: bool = False
    longest: int = 1024


@dataclass(frozen=True)
class Limits:
    """The most tokens of a source, and the most positions of a target; 0 is the family's default."""

    max_source_length: int = 0
    max_target_length: int = 0

    def filled(self, default: int, most: int | None) -> Limits:
        """The limits with the default; a CheckpointError names one above the most positions of the model."""
        for name, given in vars(self).items():
            if most is not None and given > most:
                flag = name.replace("_", "-")
                raise CheckpointError(f"--{flag} is {given}, and the model has {most} positions")
        return Limits(*(given or default for given in vars(self).values()))


def sinusoids(num_positions: int, d_model: int, first: int) -> Tensor:
    """(positions, D): all sines, then all cosines; frequencies of Vaswani et al. 2017, section 3.5."""
    places = torch.arange(first, first + num_positions, dtype=torch.float64)[:, None]
    angles = places / 10000 ** (torch.arange(0, d_model, 2, dtype=torch.float64) / d_model)
    return torch.cat([angles.sin(), angles.cos()], dim=1).float()


def tensor2tensor_sinusoids(num_positions: int, d_model: int, first: int) -> Tensor:
    """(positions, D): all sines, then all cosines; the last frequency is 1 / 10000.

    Computed in float32 as the models did in training, because angles of far positions are rounded.
    """
    half = d_model // 2
    frequencies = torch.exp(torch.arange(half).float() * -(math.log(10000) / (half - 1)))
    angles = torch.arange(first, first + num_positions).float()[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1)


_LEARNED = Positions(None)
_BART_LEARNED = Positions(None, offset=2)
_SINUSOIDAL = Positions(sinusoids)
_M2M100 = Positions(tensor2tensor_sinusoids, offset=2, is_limited=False, skips_pad=True)

FAMILIES = (
    Family("marian", "marian", "bart", _SINUSOIDAL, is_pre_norm=False),
    Family("pegasus", "pegasus", "bart", _SINUSOIDAL),
    Family("bart", "bart", "bart", _BART_LEARNED, is_pre_norm=False, has_embedding_norm=True),
    Family("mbart50", "mbart", "bart", _BART_LEARNED, "MBart50Tokenizer", has_embedding_norm=True),
    Family("mbart", "mbart", "bart", _BART_LEARNED, has_embedding_norm=True),
    Family("nllb", "m2m_100", "bart", _M2M100, "NllbTokenizer", activation="relu", scales_embedding=True),
    Family("m2m100", "m2m_100", "bart", _M2M100, activation="relu", scales_embedding=True),
    Family("blenderbot", "blenderbot", "bart", _LEARNED),
    Family("byt5", "t5", "t5", tokenizer_class="ByT5Tokenizer", activation="relu", scales_output=True),
    Family("t5", "t5", "t5", activation="relu", scales_output=True, longest=512),
    Family("mt5", "mt5", "t5", activation="gated-gelu", longest=512),
    Family("whisper", "whisper", "whisper", _LEARNED),
    Family("trocr", "vision-encoder-decoder", "trocr"),
    Family("t5gemma", "t5gemma", "gemma", shares_embedding=False),
    Family("t5gemma2", "t5gemma2", "gemma", is_merged=True),
)


def family_of(checkpoint: CheckpointFolder) -> Family:
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
    if name not in ("", *ANY_CLASS) or not all(RECIPES[one].language for one in families):
        return named[0]
    found = by_languages(Checkpoint.read(checkpoint.path, checkpoint.config), list(families))
    if len(found) != 1:
        classes = dict.fromkeys(one for family in families for one in RECIPES[family].classes)
        raise CheckpointError(
            f"{checkpoint.path}: the tokenizer has the languages of {' and '.join(found) or 'none'} of "
            f"{', '.join(families)}: set tokenizer_class in tokenizer_config.json to "
            f"{' or '.join(classes)}"
        )
    return families[found[0]]


def config_of(family: Family, checkpoint: CheckpointFolder, limits: Limits) -> ImportedConfig:
    """The options of a model as its settings have them, before its weights are seen.

    Raises:
        CheckpointError: A setting is missing, or its value is not supported.
    """
    try:
        result = _DIALECTS[family.dialect].options(family, checkpoint, limits)
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


def read_model(checkpoint: CheckpointFolder, family: Family, config: ImportedConfig) -> ImportedModel:
    """Read a checkpoint's weights into a model in eval mode, in float32.

    Raises:
        CheckpointError: A weight is missing, has another shape, is not finite, or would not be used.
    """
    dialect = _DIALECTS[family.dialect]
    weights: dict[str, Tensor] = {}
    origins: dict[str, str] = {}
    for name, tensor in checkpoint.weights():
        if _BUFFERS.fullmatch(name):
            continue
        renamed = _renamed(name, dialect)
        if renamed in weights:
            raise CheckpointError(f"{checkpoint.path} has two weights for one: {origins[renamed]} and {name}")
        if not re.fullmatch(dialect.unused, renamed):
            offset = dialect.norm_offset if renamed.endswith("norm.weight") else 0.0
            tensor = tensor.to(torch.float32)
            if tensor.numel() and not all(map(math.isfinite, tensor.aminmax())):  # without a copy
                raise CheckpointError(f"{checkpoint.path}: {name} has numbers that are NaN or infinite")
            if renamed.startswith("front.") and renamed.endswith(".weight"):
                tensor = _linear(tensor)
            weights[renamed], origins[renamed] = tensor + offset if offset else tensor, name
    _add_positions(weights, config, checkpoint.config)
    _fold_projection(weights, config, is_needed=_has_projection(checkpoint.config))
    is_shared = bool(checkpoint.config.get("share_encoder_decoder_embeddings", family.shares_embedding))
    options = _tie(weights, is_shared=is_shared, reads_texts=config.media is None) | _logits_bias(weights)
    if family.scales_output and _scales_output(checkpoint.config):
        options["output_scale"] = config.d_model**-0.5
    with torch.device("meta"):
        model = ImportedModel(replace(config, **options))
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    _check_names(
        checkpoint, {origins.get(name, name) for name in weights.keys() - expected.keys()}, "are not used"
    )
    _check_names(checkpoint, expected.keys() - weights.keys(), "are missing")
    for name, shape in expected.items():
        if weights[name].shape != shape:
            raise CheckpointError(
                f"{checkpoint.path}: {origins.get(name, name)} has the shape {list(weights[name].shape)}, "
                f"and config.json asks for {list(shape)}"
            )
    model.load_state_dict(weights, assign=True)
    return model.eval().requires_grad_(False)


def bucket_of(distances: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """The buckets of distances from 0 on (Raffel et al. 2020, section 2.1): half are exact, half logarithmic.

    In float32, because rounding decides the bucket of some distances.
    """
    num_exact = num_buckets // 2
    logarithms = torch.log(distances.float() / num_exact) / math.log(max_distance / num_exact)
    far = num_exact + (logarithms * (num_buckets - num_exact)).to(torch.int64)
    return torch.where(distances < num_exact, distances, far.clamp(max=num_buckets - 1))


def _renamed(name: str, dialect: Dialect) -> str:
    for pattern, replacement in dialect.names:
        name = re.sub(pattern, replacement, name)
    return name


def _add_positions(weights: dict[str, Tensor], config: ImportedConfig, settings: Mapping[str, Any]) -> None:
    """Replace what a checkpoint says about positions by the tables of the model."""
    if config.max_distance is not None:
        num_buckets = settings.get("relative_attention_num_buckets", 32)
        for name, is_two_sided in (("source_bias", True), ("target_bias", False)):
            if name in weights:
                weights[name] = _relative_bias(
                    weights[name], num_buckets, config.max_distance, is_two_sided=is_two_sided
                )
    for name, sizes in (("source_positions", config.encoder), ("target_positions", config.decoder)):
        positions, rows = sizes.positions, sizes.num_positions
        if positions is None:
            continue
        if positions.compute is not None:
            first = positions.offset if config.zero_position_id is None else config.zero_position_id + 1
            weights[name] = positions.compute(rows, sizes.d_model, first)
        elif name in weights:
            table = weights[name]
            table = table[0] if table.dim() == 3 else table  # some have an axis of one batch
            weights[name] = table[positions.offset : positions.offset + rows] if table.dim() else table


def _fold_projection(weights: dict[str, Tensor], config: ImportedConfig, *, is_needed: bool) -> None:
    """Multiply a map from the encoder's width to the decoder's into the maps that read its output."""
    given = [weights.pop(f"projection.{name}", None) for name in ("weight", "bias")]
    shapes = [None if tensor is None else list(tensor.shape) for tensor in given]
    wanted = [[config.d_model, config.encoder.d_model], [config.d_model]] if is_needed else [None, None]
    if shapes != wanted:
        raise CheckpointError(
            f"enc_to_dec_proj of the checkpoint has the shapes {shapes}, and config.json asks for {wanted}"
        )
    if not is_needed:
        return
    matrix, shift = (tensor.double() for tensor in given if tensor is not None)
    for layer in range(config.decoder.num_layers):
        for name in ("key", "value"):
            path = f"decoder_layers.{layer}.cross_attention.{name}"
            weight, bias = (weights.get(f"{path}.{part}") for part in ("weight", "bias"))
            if weight is not None and bias is not None and weight.shape[1:] == shift.shape:
                weights[f"{path}.weight"] = (weight.double() @ matrix).float()
                weights[f"{path}.bias"] = (weight.double() @ shift + bias).float()


def _relative_bias(weight: Tensor, num_buckets: int, most: int, *, is_two_sided: bool) -> Tensor:
    """The bias (2 M + 1, H) of each distance, from that of each bucket (buckets, H)."""
    distances = torch.arange(-most, most + 1)  # of a key before its query
    if not is_two_sided:
        return weight[bucket_of(distances.clamp(min=0), num_buckets, most)]
    half = num_buckets // 2
    return weight[bucket_of(distances.abs(), half, most) + half * (distances < 0)]


def _linear(weight: Tensor) -> Tensor:
    """The weight of a convolution as that of a linear map over `neighbours` or `patches`.

    The first are (D, C, 3) or (D, 3, size, size), and the second (D, 3 C) or (D, size * size * 3).
    """
    return weight.movedim(1, -1).flatten(1) if weight.dim() > 2 else weight


def _tie(weights: dict[str, Tensor], *, is_shared: bool, reads_texts: bool) -> dict[str, Any]:
    """Keep one of equal matrices over the vocabulary; whether they are equal is read from the weights.

    A matrix that the file lacks is another one that it is tied to. Without `is_shared` the source has its own
    vocabulary and matrix.
    """
    shared, source, target, output = (weights.pop(name, None) for name in _TIED)
    target = _first(target, shared, source if is_shared else None, output)
    source = _first(source, shared, target if is_shared else None) if reads_texts else target
    output = _first(output, target)
    if source is None or target is None or output is None:
        raise CheckpointError("the checkpoint lacks a matrix of embeddings: shared.weight")
    if shared is not None and not any(_equal(shared, other) for other in (source, target)):
        raise CheckpointError("shared.weight of the checkpoint differs from both matrices of embeddings")
    weights["embedding.weight"] = target
    if "source_unscaled" in weights:
        weights.setdefault("target_unscaled", weights["source_unscaled"])
    has_source, has_output = not _equal(source, target), not _equal(output, target)
    if has_source:
        weights["source_embedding.weight"] = source
    if has_output:
        weights["output.weight"] = output
    return {"has_source_embedding": has_source, "has_output": has_output}


def _logits_bias(weights: dict[str, Tensor]) -> dict[str, Any]:
    bias = weights.pop("output_bias", None)
    if bias is None or not bias.any():
        return {}
    weights["output_bias"] = bias.flatten()
    return {"has_output_bias": True}


def _first(*tensors: Tensor | None) -> Tensor | None:
    return next((tensor for tensor in tensors if tensor is not None), None)


def _equal(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.shape == b.shape and torch.equal(a, b))


def _check_names(checkpoint: CheckpointFolder, names: set[str], problem: str) -> None:
    if names:
        listed = ", ".join(sorted(names)[:_NAMES_IN_MESSAGE])
        rest = f" and {len(names) - _NAMES_IN_MESSAGE} more" if len(names) > _NAMES_IN_MESSAGE else ""
        raise CheckpointError(f"{checkpoint.path}: weights {problem}: {listed}{rest}")


def _has_projection(config: Mapping[str, Any]) -> bool:
    """Whether a map is between the widths of the halves of a `VisionEncoderDecoderModel`."""
    if config["model_type"] != "vision-encoder-decoder":
        return False
    encoder, decoder = config["encoder"], config["decoder"]
    is_wide = decoder.get("cross_attention_hidden_size") is not None  # the decoder reads the encoder's width
    return not is_wide and encoder["hidden_size"] != decoder["d_model"]


def _scales_output(config: Mapping[str, Any]) -> bool:
    given = config.get("scale_decoder_outputs")
    return config.get("tie_word_embeddings") is not False if given is None else bool(given)


def _activation(name: str) -> Activation:
    if name not in _ACTIVATIONS:
        raise CheckpointError(
            f"the activation {name!r} is not supported; there are {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def _bart_stack(
    family: Family, config: Mapping[str, Any], side: Literal["encoder", "decoder"], num_positions: int
) -> StackConfig:
    D, heads = config["d_model"], config[f"{side}_attention_heads"]
    num_layers, d_ff = config[f"{side}_layers"], config[f"{side}_ffn_dim"]
    scales = config.get("scale_embedding", family.scales_embedding)
    return StackConfig(
        D,
        num_layers,
        heads,
        heads,
        _d_head(D, heads),
        d_ff,
        activation=_activation(config.get("activation_function", family.activation)),
        norm_epsilon=_LAYER_NORM_EPSILON,
        attention_scale=1 / math.sqrt(D // heads),
        is_pre_norm=family.is_pre_norm,
        has_embedding_norm=family.has_embedding_norm,
        embedding_scale=math.sqrt(D) if scales else 1.0,
        positions=family.positions,
        num_positions=num_positions,
    )


def _d_head(d_model: int, num_heads: int) -> int:
    if d_model % num_heads:
        raise CheckpointError(f"the model is {d_model} wide, and {num_heads} heads do not divide it")
    return d_model // num_heads


def _bart_options(family: Family, checkpoint: CheckpointFolder, limits: Limits) -> ImportedConfig:
    config = checkpoint.config
    assert family.positions is not None
    most = config["max_position_embeddings"]
    lengths = limits.filled(most, most if family.positions.is_limited else None)
    num_positions = most if family.positions.is_limited else max(vars(lengths).values())
    return ImportedConfig(
        vocab_size=config.get("decoder_vocab_size") or config["vocab_size"],
        source_vocab_size=config["vocab_size"],
        d_model=config["d_model"],
        encoder=_bart_stack(family, config, "encoder", num_positions),
        decoder=_bart_stack(family, config, "decoder", num_positions),
        zero_position_id=config.get("pad_token_id", 1) if family.positions.skips_pad else None,
        max_source_length=lengths.max_source_length,
        max_target_length=lengths.max_target_length,
    )


def _whisper_options(family: Family, checkpoint: CheckpointFolder, limits: Limits) -> ImportedConfig:
    config = checkpoint.config
    most = config["max_target_positions"]
    sounds = Sounds.of(config, checkpoint.feature_extractor)
    unbiased = frozenset({"key"})
    return ImportedConfig(
        vocab_size=config["vocab_size"],
        source_vocab_size=0,
        d_model=config["d_model"],
        encoder=replace(_bart_stack(family, config, "encoder", sounds.num_positions), unbiased=unbiased),
        decoder=replace(_bart_stack(family, config, "decoder", most), unbiased=unbiased),
        media=sounds,
        max_source_length=sounds.num_positions,
        max_target_length=_target_limit(limits, most),
    )


def _target_limit(limits: Limits, most: int) -> int:
    """The limit of targets of a model that does not read texts."""
    if limits.max_source_length:
        raise CheckpointError("--max-source-length is for texts: all sources of this model are equally long")
    return limits.filled(most, most).max_target_length


def _trocr_options(family: Family, checkpoint: CheckpointFolder, limits: Limits) -> ImportedConfig:
    encoder, decoder = checkpoint.config["encoder"], checkpoint.config["decoder"]
    types = encoder["model_type"], decoder["model_type"]
    if types[0] not in _PICTURE_TOKENS or types[1] != family.name:
        raise CheckpointError(
            f"the model reads pictures by {types[0]} and writes by {types[1]}, which is not supported; it "
            f"must read by {' or '.join(_PICTURE_TOKENS)}, and write by {family.name}"
        )
    pictures = Patches.of(encoder, _PICTURE_TOKENS[types[0]], checkpoint.path)
    most = decoder["max_position_embeddings"]
    has_table = decoder.get("use_learned_position_embeddings", True)
    return ImportedConfig(
        vocab_size=decoder["vocab_size"],
        source_vocab_size=0,
        d_model=decoder["d_model"],
        encoder=_vit_stack(encoder, pictures.num_positions),
        decoder=replace(
            _bart_stack(family, decoder, "decoder", most),
            is_pre_norm=False,
            has_embedding_norm=decoder.get("layernorm_embedding", True),
            positions=_BART_LEARNED if has_table else _M2M100,
        ),
        zero_position_id=None if has_table else decoder.get("pad_token_id", 1),
        media=pictures,
        max_source_length=pictures.num_positions,
        max_target_length=_target_limit(limits, most),
    )


def _vit_stack(config: Mapping[str, Any], num_positions: int) -> StackConfig:
    D, heads = config["hidden_size"], config["num_attention_heads"]
    has_biases = config.get("qkv_bias", True)
    return StackConfig(
        D,
        config["num_hidden_layers"],
        heads,
        heads,
        _d_head(D, heads),
        config["intermediate_size"],
        activation=_activation(config.get("hidden_act", "gelu")),
        norm_epsilon=config.get("layer_norm_eps", 1e-12),
        attention_scale=1 / math.sqrt(D // heads),
        unbiased=frozenset() if has_biases else frozenset({"query", "key", "value"}),
        positions=_LEARNED,
        num_positions=num_positions,
    )


def _t5_options(family: Family, checkpoint: CheckpointFolder, limits: Limits) -> ImportedConfig:
    config = checkpoint.config
    feed_forward = config.get("feed_forward_proj", family.activation)
    gated, _, activation = feed_forward.rpartition("-")
    D, heads = config["d_model"], config["num_heads"]
    num_layers = config["num_layers"], config.get("num_decoder_layers") or config["num_layers"]
    encoder, decoder = (
        StackConfig(
            D,
            count,
            heads,
            heads,
            config["d_kv"],
            config["d_ff"],
            activation="gelu_tanh" if feed_forward == "gated-gelu" else _activation(activation),
            norm_epsilon=config.get("layer_norm_epsilon", 1e-6),
            attention_scale=1.0,
            norm_kind="rms",
            unbiased=ALL_MAPS,
        )
        for count in num_layers
    )
    lengths = limits.filled(family.longest, None)
    return ImportedConfig(
        vocab_size=config["vocab_size"],
        source_vocab_size=config["vocab_size"],
        d_model=D,
        encoder=encoder,
        decoder=decoder,
        is_gated=gated == "gated",
        max_distance=config.get("relative_attention_max_distance", 128),
        max_source_length=lengths.max_source_length,
        max_target_length=lengths.max_target_length,
    )


def _gemma_options(family: Family, checkpoint: CheckpointFolder, limits: Limits) -> ImportedConfig:
    encoder, decoder, unscaled_id = checkpoint.config["encoder"], checkpoint.config["decoder"], None
    if family.is_merged:
        encoder, unscaled_id = encoder["text_config"], encoder.get("eoi_token_index", 256_000)
    shared = {}
    for name, default in _GEMMA_DEFAULTS.items():
        values = {side.get(name, default) for side in (encoder, decoder)}
        if len(values) > 1:
            raise CheckpointError(f"{name} differs between encoder and decoder, which is not supported")
        (shared[name],) = values
    if shared["attention_bias"]:
        raise CheckpointError("attention_bias is true, which is not supported")
    most = min(side["max_position_embeddings"] for side in (encoder, decoder))
    lengths = limits.filled(min(family.longest, most), most)
    return ImportedConfig(
        vocab_size=decoder["vocab_size"],
        source_vocab_size=encoder["vocab_size"],
        d_model=decoder["hidden_size"],
        encoder=_gemma_stack(family, encoder, is_causal=False),
        decoder=_gemma_stack(family, decoder, is_causal=True),
        has_output_norms=True,
        has_head_norms=family.is_merged,
        is_merged=family.is_merged,
        is_gated=True,
        score_cap=None if family.is_merged else shared["attn_logit_softcapping"],  # T5Gemma 2 ignores it
        unscaled_id=unscaled_id,  # the end of an image
        logits_cap=decoder.get("final_logit_softcapping", None if family.is_merged else 30.0),
        max_source_length=lengths.max_source_length,
        max_target_length=lengths.max_target_length,
    )


def _gemma_stack(family: Family, config: Mapping[str, Any], *, is_causal: bool) -> StackConfig:
    num_layers, window = config["num_hidden_layers"], config.get("sliding_window", 4096)
    period = config.get("sliding_window_pattern", 6) if family.is_merged else 2
    types = config.get("layer_types") or [
        "sliding_attention" if (i + 1) % period else "full_attention" for i in range(num_layers)
    ]
    if is_causal:
        sliding = (window - 1, 0)
    elif family.is_merged:
        sliding = ((window + 1) // 2 - 1, window // 2)
    else:
        sliding = (window, window)
    windows = {"full_attention": None, "sliding_attention": sliding}
    if unknown := set(types) - windows.keys():
        raise CheckpointError(f"layer_types has {', '.join(sorted(unknown))}, which is not supported")
    return StackConfig(
        config["hidden_size"],
        num_layers,
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["head_dim"],
        config["intermediate_size"],
        activation=_activation(config.get("hidden_activation", "gelu_pytorch_tanh")),
        norm_epsilon=config.get("rms_norm_eps", 1e-6),
        norm_kind="rms",
        unbiased=ALL_MAPS,
        attention_scale=config.get("query_pre_attn_scalar", 256) ** -0.5,
        embedding_scale=math.sqrt(config["hidden_size"]),
        kinds=tuple(LayerKind(windows[one], _rotary(family, config, one)) for one in types),
    )


def _rotary(family: Family, config: Mapping[str, Any], layer_type: str) -> Rotary:
    """The rotary positions of a type of layers; their settings have had several names."""
    given = config.get("rope_parameters") or {}
    base, base_name = 10_000.0, "rope_theta"
    scaling = config.get("rope_scaling") or {}
    if family.is_merged:
        given = given.get(layer_type) or {}
        if layer_type == "full_attention":
            base = 1_000_000.0
        else:
            base_name, scaling = "rope_local_base_freq", {}
    rope = {"rope_type": "default", "rope_theta": config.get(base_name, base)} | scaling | given
    if rope["rope_type"] not in ("default", "linear"):
        raise CheckpointError(
            f"rotary positions of the type {rope['rope_type']!r} are not supported; there are default, linear"
        )
    return Rotary(rope["rope_theta"], rope["factor"] if rope["rope_type"] == "linear" else 1.0)


_GEMMA_DEFAULTS: dict[str, Any] = {  # that both halves of a model share
    "attention_bias": False,
    "attn_logit_softcapping": 50.0,
}


_PICTURE_TOKENS = {"vit": 1, "deit": 2}  # before the patches of a picture, by the type of the encoder

# Parts of names that several dialects have
_PROJECTIONS = (
    (r"\.q_proj\.", ".query."),
    (r"\.k_proj\.", ".key."),
    (r"\.v_proj\.", ".value."),
)
_EMBEDDINGS = (
    (r"^encoder\.embed_tokens\.", "source_embedding."),
    (r"^decoder\.embed_tokens\.", "target_embedding."),
)
_BART_NAMES = (
    (r"^model\.", ""),
    (r"^(en|de)coder\.layers\.", r"\1coder_layers."),
    (r"\.self_attn\.", ".self_attention."),
    (r"\.encoder_attn\.", ".cross_attention."),
    *_PROJECTIONS,
    (r"\.out_proj\.", ".output."),
    (r"\.self_attn_layer_norm\.", ".self_attention_norm."),
    (r"\.encoder_attn_layer_norm\.", ".cross_attention_norm."),
    (r"\.fc1\.", ".feed_forward.inner."),
    (r"\.fc2\.", ".feed_forward.outer."),
    (r"\.final_layer_norm\.", ".feed_forward_norm."),
    (r"^encoder\.(layernorm_embedding|embed_\w+)\.", r"source_\1."),
    (r"^decoder\.(layernorm_embedding|embed_\w+)\.", r"target_\1."),
    (r"^(source|target)_layernorm_embedding\.", r"\1_norm."),
    (r"^(source|target)_embed_tokens\.", r"\1_embedding."),
    (r"^(source|target)_embed_positions\.weights?$", r"\1_positions"),
    (r"^(en|de)coder\.layer_norm\.", r"\1coder_norm."),
    (r"^lm_head\.", "output."),
    (r"^final_logits_bias$", "output_bias"),
)
_DIALECTS = {
    "bart": Dialect(_bart_options, _BART_NAMES, unused=""),
    "whisper": Dialect(
        _whisper_options,
        (
            *_BART_NAMES,
            (r"^encoder\.conv1\.", "front.first."),
            (r"^encoder\.conv2\.", "front.last."),
            (r"^proj_out\.", "output."),
        ),
        unused="",
    ),
    "trocr": Dialect(
        _trocr_options,
        (
            (r"^decoder\.(model\.)?", ""),
            (r"^output_projection\.", "output."),
            (r"^enc_to_dec_proj\.", "projection."),
            (r"^encoder\.embeddings\.cls_token$", "front.class_token"),
            (r"^encoder\.embeddings\.distillation_token$", "front.distillation_token"),
            (r"^encoder\.embeddings\.patch_embeddings\.projection\.", "front.last."),
            (r"^encoder\.embeddings\.position_embeddings$", "source_positions"),
            (r"^encoder\.(encoder\.layer|layers)\.", "encoder_layers."),
            (r"\.attention\.attention\.", ".self_attention."),
            (r"\.attention\.(output\.dense|o_proj)\.", ".self_attention.output."),
            (r"\.attention\.(\w_proj)\.", r".self_attention.\1."),
            (r"\.intermediate\.dense\.", ".feed_forward.inner."),
            (r"\.output\.dense\.", ".feed_forward.outer."),
            (r"\.mlp\.", "."),
            (r"\.layernorm_before\.", ".self_attention_norm."),
            (r"\.layernorm_after\.", ".feed_forward_norm."),
            (r"^encoder\.layernorm\.", "encoder_norm."),
            *_BART_NAMES,
        ),
        unused=r"encoder\.(pooler\..*|embeddings\.mask_token)",  # the training of the encoder needed them
    ),
    "t5": Dialect(
        _t5_options,
        (
            (r"^(en|de)coder\.block\.", r"\1coder_layers."),
            (r"\.layer\.0\.SelfAttention\.", ".self_attention."),
            (r"\.layer\.1\.EncDecAttention\.", ".cross_attention."),
            (r"\.layer\.[12]\.DenseReluDense\.", ".feed_forward."),
            (r"\.layer\.0\.layer_norm\.", ".self_attention_norm."),
            (r"^(encoder_layers\.\d+)\.layer\.1\.layer_norm\.", r"\1.feed_forward_norm."),
            (r"\.layer\.1\.layer_norm\.", ".cross_attention_norm."),
            (r"\.layer\.2\.layer_norm\.", ".feed_forward_norm."),
            (r"attention\.q\.", "attention.query."),
            (r"attention\.k\.", "attention.key."),
            (r"attention\.v\.", "attention.value."),
            (r"attention\.o\.", "attention.output."),
            (r"\.feed_forward\.wi_0\.", ".feed_forward.gate."),
            (r"\.feed_forward\.wi(_1)?\.", ".feed_forward.inner."),
            (r"\.feed_forward\.wo\.", ".feed_forward.outer."),
            (r"^encoder_layers\.0\.self_attention\.relative_attention_bias\.weight$", "source_bias"),
            (r"^decoder_layers\.0\.self_attention\.relative_attention_bias\.weight$", "target_bias"),
            *_EMBEDDINGS,
            (r"^(en|de)coder\.final_layer_norm\.", r"\1coder_norm."),
            (r"^lm_head\.", "output."),
        ),
        # Files of the first T5 models have it, and no release of transformers used it.
        unused=r"decoder_layers\.0\.cross_attention\.relative_attention_bias\.weight",
    ),
    "gemma": Dialect(
        _gemma_options,
        (
            (r"^model\.", ""),
            (r"^encoder\.text_model\.", "encoder."),
            (r"^(en|de)coder\.layers\.", r"\1coder_layers."),
            (r"\.(self|cross)_attn\.", r".\1_attention."),
            (r"\.q_norm\.", ".query_norm."),
            (r"\.k_norm\.", ".key_norm."),
            *_PROJECTIONS,
            (r"\.o_proj\.", ".output."),
            (r"\.pre_(self|cross)_attn_layernorm\.", r".\1_attention_norm."),
            (r"\.post_(self|cross)_attn_layernorm\.", r".\1_attention_output_norm."),
            (r"\.pre_feedforward_layernorm\.", ".feed_forward_norm."),
            (r"\.post_feedforward_layernorm\.", ".feed_forward_output_norm."),
            (r"\.mlp\.gate_proj\.", ".feed_forward.gate."),
            (r"\.mlp\.up_proj\.", ".feed_forward.inner."),
            (r"\.mlp\.down_proj\.", ".feed_forward.outer."),
            *_EMBEDDINGS,
            (r"^(source|target)_embedding\.eoi_embedding$", r"\1_unscaled"),
            (r"^(en|de)coder\.norm\.", r"\1coder_norm."),
            (r"^lm_head\.out_proj\.", "output."),
        ),
        unused=r"encoder\.(vision_tower|multi_modal_projector)\..*",
        norm_offset=1.0,
    ),
}
