"""The weights of a checkpoint as a model, and back: a trained model as a checkpoint's weights."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from seq2seq_serve.training.huggingface.checkpoint import CheckpointError, CheckpointFolder
from seq2seq_serve.training.huggingface.dialect import Dialect, PublishedFamily
from seq2seq_serve.training.huggingface.pictures import Patches
from seq2seq_serve.training.models.options import PublishedConfig
from seq2seq_serve.training.models.transformer import Transformer

_NAMES_IN_MESSAGE = 5
# Buffers that older releases of transformers and fairseq saved with the weights of any model
_BUFFERS = re.compile(r"(.*\.)?(version|position_ids|_float_tensor|rotary_emb\.inv_freq)")
# Names that peft gives the weights of a model beside its adapters, and those of adapters
_OF_ADAPTER = re.compile(r"(^|\.)(base_model\.model|base_layer|lora_\w+|modules_to_save)\.")
TIED = "shared.weight", "source_embedding.weight", "target_embedding.weight", "output.weight"


def read_model(checkpoint: CheckpointFolder, family: PublishedFamily, config: PublishedConfig) -> Transformer:
    """Read a checkpoint's weights into a model in eval mode, in float32.

    Raises:
        CheckpointError: A weight is missing, has another shape, is not finite, or would not be used.
    """
    dialect = family.dialect
    weights: dict[str, Tensor] = {}
    origins: dict[str, str] = {}
    for name, tensor in checkpoint.weights():
        if _BUFFERS.fullmatch(name):
            continue
        if _OF_ADAPTER.search(name):
            raise CheckpointError(
                f"{checkpoint.path} has an adapter that is not merged into its weights ({name}): load it "
                "with peft, call merge_and_unload, then save_pretrained, and give that folder"
            )
        renamed = renamed_by(dialect, name)
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
    _cut_positions(weights, config)
    _fold_projection(weights, config, is_needed=has_projection(checkpoint.config))
    is_shared = bool(checkpoint.config.get("share_encoder_decoder_embeddings", family.shares_embedding))
    options = _tie(weights, is_shared=is_shared, reads_texts=config.media is None) | _logits_bias(weights)
    if family.scales_output and _scales_output(checkpoint.config):
        options["output_scale"] = config.d_model**-0.5
    with torch.device("meta"):
        model = Transformer(replace(config, **options))
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


def names_of_weights(
    checkpoint: CheckpointFolder, family: PublishedFamily, model: Transformer
) -> dict[str, str]:
    """The names of a checkpoint's weights, and the model's for each; without those that are not used."""
    own = model.state_dict()
    tied = {
        "source_embedding.weight": "embedding.weight"
        if model.source_embedding is None
        else "source_embedding.weight",
        "target_embedding.weight": "embedding.weight",
        "output.weight": "embedding.weight" if model.output is None else "output.weight",
    }
    names = {}
    for name, tensor in checkpoint.weights():
        renamed = renamed_by(family.dialect, name)
        if renamed == "shared.weight":
            is_target = _equal(tensor.to(torch.float32), own["embedding.weight"])
            renamed = "target_embedding.weight" if is_target else "source_embedding.weight"
        renamed = tied.get(renamed, renamed)
        if renamed in own:
            names[name] = renamed
    return names


def published_weights(
    weights: Mapping[str, Tensor], names: Mapping[str, str], family: PublishedFamily, config: PublishedConfig
) -> dict[str, Tensor]:
    """A model's weights with the names and values that a checkpoint of its family has."""
    given = dict(weights)
    if config.media is not None:
        for name in given:
            if name.startswith("front.") and name.endswith(".weight"):
                given[name] = given[name].view(len(given[name]), *config.media.window, -1).movedim(-1, 1)
    for name, stack in (("source_positions", config.encoder), ("target_positions", config.decoder)):
        if name in given and stack.positions is not None:
            unused = given[name].new_zeros(stack.positions.first, stack.d_model)  # rows of the table
            given[name] = torch.cat([unused, given[name]])
    if isinstance(config.media, Patches):
        given["source_positions"] = given["source_positions"][None]
    if "output_bias" in given:
        given["output_bias"] = given["output_bias"][None]
    for name in given:
        if name.endswith("norm.weight") and family.dialect.norm_offset:
            given[name] = given[name] - family.dialect.norm_offset
    return {
        theirs: given[ours].clone(memory_format=torch.contiguous_format) for theirs, ours in names.items()
    }


def renamed_by(dialect: Dialect, name: str) -> str:
    """This project's name of a checkpoint's weight."""
    for pattern, replacement in dialect.names:
        name = re.sub(pattern, replacement, name)
    return name


def _cut_positions(weights: dict[str, Tensor], config: PublishedConfig) -> None:
    """Keep the rows of tables of positions that the model has, and no table that it computes."""
    for name, stack in (("source_positions", config.encoder), ("target_positions", config.decoder)):
        positions = stack.positions
        if positions is None:
            continue
        table = weights.pop(name, None)
        if table is None or positions.kind != "learned":
            continue
        table = table[0] if table.dim() == 3 else table  # some have an axis of one batch
        rows = slice(positions.first, positions.first + positions.count)
        weights[name] = table[rows] if table.dim() else table


def _fold_projection(weights: dict[str, Tensor], config: PublishedConfig, *, is_needed: bool) -> None:
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
    shared, source, target, output = (weights.pop(name, None) for name in TIED)
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


def has_projection(config: Mapping[str, Any]) -> bool:
    """Whether a map is between the widths of the halves of a `VisionEncoderDecoderModel`."""
    if config["model_type"] != "vision-encoder-decoder":
        return False
    encoder, decoder = config["encoder"], config["decoder"]
    is_wide = decoder.get("cross_attention_hidden_size") is not None  # the decoder reads the encoder's width
    return not is_wide and encoder["hidden_size"] != decoder["d_model"]


def _scales_output(config: Mapping[str, Any]) -> bool:
    given = config.get("scale_decoder_outputs")
    return config.get("tie_word_embeddings") is not False if given is None else bool(given)
