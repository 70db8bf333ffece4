"""Published models that a run tunes: what it keeps of their folder, and that folder again with new weights.

It keeps the settings and tokenizers in a folder of its own, beside the names of the weights.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from seq2seq_serve.bundle.manifest import Choice, TemplateTokens
from seq2seq_serve.bundle.normalization import Normalization
from seq2seq_serve.bundle.tokenizer import Tokenizer
from seq2seq_serve.training.config import TargetFrame
from seq2seq_serve.training.evaluation.comparison import tokenization_for
from seq2seq_serve.training.huggingface.checkpoint import (
    CheckpointError,
    CheckpointFolder,
    eos_ids,
    open_checkpoint,
    read_json,
)
from seq2seq_serve.training.huggingface.dialect import Limits, PublishedFamily
from seq2seq_serve.training.huggingface.families import config_of, family_of
from seq2seq_serve.training.huggingface.tokenizers import ImportedTokenizers, read_tokenizers
from seq2seq_serve.training.huggingface.weights import (
    has_projection,
    names_of_weights,
    published_weights,
    read_model,
    renamed_by,
)
from seq2seq_serve.training.models.options import PublishedConfig
from seq2seq_serve.training.models.transformer import Transformer

_NAMES_FILE = "names-of-weights.json"
_WEIGHTS_FILE = "model.safetensors"
_KEPT_SUFFIXES = (".json", ".txt", ".model", ".spm")
_INDEX = ".index.json"


class FramedTokenizer(Tokenizer):
    """The tokenizers of a published model as training uses them, with the special tokens around sources.

    It is that of targets. Sources have their own, which may be another one.
    """

    def __init__(self, given: ImportedTokenizers) -> None:
        self._source = given.source
        super().__init__(tokenizers.Tokenizer.from_str(given.target.to_json()))
        self._is_prompted = given.timestamps is not None
        self._prefix = _filled(given.template.source_prefix, given.choices)
        self._suffix = _filled(given.template.source_suffix, given.choices)

    @property
    def normalization(self) -> Normalization:
        return "none"  # of ours: the files have their own

    @property
    def vocab_size(self) -> int:
        return max(super().vocab_size, self._source.vocab_size)

    def normalize(self, text: str) -> str:
        return super().normalize(text).strip()  # pieces begin with a space that no text has

    def source_pieces(self, token_ids: Sequence[int]) -> list[str]:
        return self._source.pieces(token_ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if not self._is_prompted:
            return super().encode_batch(texts)
        # Whisper writes a space before a text, but not in Chinese, Japanese, Thai and the like.
        is_spaced = [tokenization_for([text]) == "13a" for text in texts]
        return super().encode_batch([" " * one + text for one, text in zip(is_spaced, texts, strict=True)])

    def encode_sources(self, texts: Sequence[str]) -> list[list[int]]:
        return [[*self._prefix, *ids, *self._suffix] for ids in self._source.encode_batch(texts)]


@dataclass(frozen=True)
class Published:
    """The settings of a published model, read from its folder or from what a run keeps of it.

    Attributes:
        frame: The tokens around targets.
    """

    checkpoint: CheckpointFolder
    family: PublishedFamily
    tokenizer: FramedTokenizer
    frame: TargetFrame

    def read_model(self) -> Transformer:
        """Read the weights; the model's configuration is that of a run.

        Raises:
            CheckpointError: A setting or a weight is not supported.
        """
        config = config_of(self.family, self.checkpoint, Limits())
        model = read_model(self.checkpoint, self.family, replace(config, target_frame=self.frame))
        assert isinstance(model.config, PublishedConfig)
        return model


def read_published(folder: Path, *, has_weights: bool = False) -> Published:
    """Read the settings and tokenizers of a published model.

    Raises:
        ValueError: The folder is not a checkpoint, it is not supported, or a language must be chosen and the
            settings have no default.
    """
    checkpoint = open_checkpoint(folder, has_weights=has_weights)
    family = family_of(checkpoint)
    config = config_of(family, checkpoint, Limits())
    settings = {**checkpoint.config, "vocab_size": config.source_vocab_size or config.vocab_size}
    given = read_tokenizers(folder, family.name, settings, checkpoint.generation)
    start_ids = _filled((*given.template.start, *given.template.forced), given.choices)
    eos_id, *_ = eos_ids(checkpoint.generation, config.vocab_size)
    return Published(checkpoint, family, FramedTokenizer(given), TargetFrame(tuple(start_ids), eos_id))


def names_of_layers(folder: Path, layers: Mapping[str, nn.Linear]) -> dict[str, str]:
    """The names that transformers has for the linear layers of a published model, by ours.

    Layers that it computes in another form, such as convolutions, are left out.
    """
    import transformers  # takes seconds

    checkpoint = open_checkpoint(folder, has_weights=False)
    family = family_of(checkpoint)
    media = config_of(family, checkpoint, Limits()).media
    kind = getattr(transformers, "AutoModelForSeq2SeqLM" if media is None else media.auto_class)
    settings = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        theirs = kind.from_config(settings, trust_remote_code=False)
    names = {}
    for name, module in theirs.named_modules():
        own = renamed_by(family.dialect, f"{name}.weight").removesuffix(".weight")
        if (
            isinstance(module, nn.Linear)
            and own in layers
            and layers[own].weight.shape == module.weight.shape
        ):
            names[own] = name
    return names


def keep_published(given: Path, model: Transformer, folder: Path) -> None:
    """Write what a run keeps of a published model's folder, or of what another run kept of it."""
    folder.mkdir(parents=True)
    for file in given.iterdir():
        if file.suffix in _KEPT_SUFFIXES and not file.name.endswith(_INDEX) and file.is_file():
            shutil.copyfile(file, folder / file.name)
    config = read_json(folder / "config.json")
    if has_projection(config):  # which is a part of keys and values now
        config["decoder"]["cross_attention_hidden_size"] = config["encoder"]["hidden_size"]
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if not (folder / _NAMES_FILE).is_file():
        published = read_published(given, has_weights=True)
        names = names_of_weights(published.checkpoint, published.family, model)
        (folder / _NAMES_FILE).write_text(json.dumps(names, indent=2) + "\n", encoding="utf-8")


def write_published(kept: Path, weights: Mapping[str, Tensor], config: PublishedConfig, folder: Path) -> None:
    """Write a folder as `save_pretrained` does, of what a run keeps and of its weights."""
    published = read_published(kept)
    names: dict[str, Any] = read_json(kept / _NAMES_FILE)
    shutil.copytree(kept, folder, ignore=shutil.ignore_patterns(_NAMES_FILE))
    tensors = published_weights(weights, names, published.family, config)
    save_file(tensors, folder / _WEIGHTS_FILE, metadata={"format": "pt"})


def _filled(places: TemplateTokens, choices: Mapping[str, Choice]) -> list[int]:
    """The ids of places, of languages by the defaults of the settings."""
    ids = []
    for place in places:
        if isinstance(place, str):
            choice = choices[place]
            if not choice.default:
                raise CheckpointError(
                    f"the model has several languages, and the settings name none as {place}: "
                    "set src_lang and tgt_lang in tokenizer_config.json, and for Whisper language in "
                    "generation_config.json"
                )
            ids.append(choice.ids[choice.default])
        else:
            ids.append(place)
    return ids
