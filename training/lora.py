"""LoRA adapters: low-rank changes of linear layers of a base, whose own weights stay as they are.

    W x + (alpha / r) B A x, with A (r, inputs) random at first, and B (outputs, r) zero

Hu et al. 2021, section 4.1, arXiv:2106.09685; dropout is on the x that A reads. The library `peft` adds the
layers, and reads the folder of a trained adapter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from seq2seq_serve.bundle.checked import checked
from seq2seq_serve.training.config import ALL_LINEAR, Lora

_MARK = ".lora_A."
_OUTPUT = "output"  # the projection to logits, which `all-linear` leaves out, as that of peft does


@checked(strict=True, extra="ignore")
class Base:
    """The model that an adapter changes; a run with an adapter keeps no weights of it.

    Attributes:
        folder: That of a finished run or of a published model.
        sha256: The checksums of its files of weights, by name.
        layers: The layers that the adapter changes, and the name of each in the adapter's folder: in a
            published model, that of transformers.
    """

    folder: str
    sha256: dict[str, str]
    layers: dict[str, str]


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers of a model by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def chosen_layers(layers: Iterable[str], targets: str) -> list[str]:
    """Those of some layers that `Lora.targets` names: whole names, or their last words.

    Raises:
        ValueError: A target is not the name of a layer, or there are no layers.
    """
    known = list(layers)
    if not known:
        raise ValueError(
            "the model has no linear layers, which are what an adapter changes: leave --lora out"
        )
    if targets == ALL_LINEAR:
        return [name for name in known if name != _OUTPUT]
    given = [target.strip() for target in targets.split("+")]
    for target in given:
        if not any(f".{name}".endswith(f".{target}") for name in known):
            names = ", ".join(sorted({name.rpartition(".")[2] for name in known}))
            raise ValueError(
                f"targets has {target!r}, and the linear layers are {names}; {ALL_LINEAR} is all"
            )
    return [name for name in known if any(f".{name}".endswith(f".{target}") for target in given)]


def add_adapter(
    model: nn.Module, lora: Lora, layers: Iterable[str], dtype: torch.dtype = torch.float32
) -> None:
    """Add a new adapter, which changes nothing yet, and let only its weights be trained.

    The other matrices, which are most of a model, get the number format; the adapter is in float32.
    """
    import peft  # takes seconds

    peft.inject_adapter_in_model(_settings(lora, layers), model)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding) and not module.weight.requires_grad:
            module.to(dtype)


def kept_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights that a run keeps of a model: all, or of one with an adapter those that training changes."""
    weights: dict[str, Tensor] = model.state_dict()
    if not any(_MARK in name for name in weights):
        return weights
    fixed = {name for name, weight in model.named_parameters() if not weight.requires_grad}
    return {name: weight for name, weight in weights.items() if name not in fixed}


def merged_weights(
    base: Mapping[str, Tensor], adapter: Mapping[str, Tensor], lora: Lora, layers: Iterable[str], origin: Path
) -> dict[str, Tensor]:
    """The weights of the base as the adapter, which was read from `origin`, changes them.

    Raises:
        ValueError: The adapter lacks a layer.
    """
    rest = dict(adapter)
    merged = dict(base)
    for layer in layers:
        try:
            A, B = (rest.pop(_own_name(layer, part)) for part in "AB")
        except KeyError as error:
            raise ValueError(f"{origin}: not the adapter in config.json ({error} is missing)") from error
        merged[f"{layer}.weight"] = merged[f"{layer}.weight"] + lora.full_alpha / lora.rank * (B @ A)
    return merged | rest


def write_adapter(folder: Path, weights: Mapping[str, Tensor], lora: Lora, base: Base) -> None:
    """Write the folder that `peft.PeftModel.from_pretrained` reads, with the names of the base."""
    folder.mkdir(exist_ok=True)
    tensors = {
        f"base_model.model.{theirs}.lora_{part}.weight": weights[_own_name(ours, part)].contiguous()
        for ours, theirs in base.layers.items()
        for part in "AB"
    }
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = _settings(lora, base.layers.values(), base_model_name_or_path=base.folder, inference_mode=True)
    settings.save_pretrained(folder)


def _own_name(layer: str, part: str) -> str:
    return f"{layer}.lora_{part}.default.weight"


def _settings(lora: Lora, layers: Iterable[str], **options: Any) -> Any:
    """The settings of peft, which also takes the last words of names as targets."""
    import peft

    return peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.full_alpha,
        lora_dropout=lora.dropout,
        target_modules=list(layers),
        **options,
    )
