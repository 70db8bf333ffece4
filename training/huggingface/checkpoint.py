"""The folder of a checkpoint as `save_pretrained` writes it: its settings, and its weights by name.

`open_checkpoint` reads only small files, and refuses a folder that cannot be imported before any weight is
read. No code of a checkpoint is run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from seq2seq_serve.bundle.errors import first_line

_INDEXED = {  # the file of all weights, and the index of several files, in the order of preference
    "model.safetensors": "model.safetensors.index.json",
    "pytorch_model.bin": "pytorch_model.bin.index.json",
}
_OTHER_WEIGHTS = ("tf_model.h5", "flax_model.msgpack", "adapter_model.safetensors", "adapter_model.bin")
ADAPTER_FILE = "adapter_config.json"
_LFS_POINTER = b"version https://git-lfs"
_OLD_CLASSES = ("T5WithLMHeadModel", "BartForMaskedLM")  # names of 2020 of models that write texts
_DECODERS = ("ForCausalLM", "LMHeadModel")
_ENCODERS = (
    "ForMaskedLM",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForAudioClassification",
    "ForQuestionAnswering",
    "ForPreTraining",
    "EncoderModel",
)
SINGLE_IDS = "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id", "pad_token_id"
_NEEDED_IDS = "eos_token_id", "pad_token_id"
_GENERATION_KEYS = (  # of config.json, for a checkpoint without generation_config.json
    "bad_words_ids",
    "begin_suppress_tokens",
    "bos_token_id",
    "decoder_start_token_id",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "eos_token_id",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "length_penalty",
    "max_length",
    "max_new_tokens",
    "min_length",
    "min_new_tokens",
    "no_repeat_ngram_size",
    "num_beams",
    "pad_token_id",
    "renormalize_logits",
    "repetition_penalty",
    "suppress_tokens",
)


class CheckpointError(ValueError):
    """A checkpoint cannot be imported; the message says why."""


@dataclass(frozen=True)
class CheckpointFolder:
    """A checkpoint whose small files have been read.

    Attributes:
        config: The content of `config.json`.
        generation: The settings of `generate` as transformers finds them: all of `generation_config.json`, or
            without such a file those in `config.json`. An end of sequence or a padding that is null in the
            first is that of the second.
        tokenizer_class: The class of the tokenizer; empty if the folder does not name one.
        files: The files with weights.
    """

    path: Path
    config: Mapping[str, Any]
    generation: Mapping[str, Any]
    tokenizer_class: str
    files: tuple[Path, ...]

    @cached_property
    def num_weights(self) -> int:
        """The number of numbers in all weights, read from the files' headers where they have one.

        Weights that a file stores once, such as tied embeddings under several names, count once.
        """
        count = 0
        for file in self.files:
            if file.suffix == ".safetensors":
                with _opened(file) as tensors:
                    shapes = [tensors.get_slice(name).get_shape() for name in tensors.keys()]  # noqa: SIM118
                count += sum(int(torch.Size(shape).numel()) for shape in shapes)
            else:
                stored = {tensor.data_ptr(): tensor.numel() for tensor in _read_bin(file).values()}
                count += sum(stored.values())
        return count

    @property
    def feature_extractor(self) -> Mapping[str, Any]:
        """The settings by which sounds become numbers, from where transformers takes them."""
        for name in ("processor_config.json", "preprocessor_config.json"):
            file = self.path / name
            settings = read_json(file) if file.is_file() else {}
            if name.startswith("processor"):
                settings = settings.get("feature_extractor") or {}
            if settings:
                return settings
        return {}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The name and the value of each weight; values are views of the files until they are used."""
        for file in self.files:
            if file.suffix == ".safetensors":
                with _opened(file) as tensors:
                    for name in tensors.keys():  # noqa: SIM118
                        yield name, tensors.get_tensor(name)
            else:
                yield from _read_bin(file).items()


def open_checkpoint(path: Path, *, has_weights: bool = True) -> CheckpointFolder:
    """Read a checkpoint's settings and find its weights, unless they are kept elsewhere.

    Raises:
        CheckpointError: The folder is not a checkpoint, or one of a kind that cannot be imported.
    """
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is not a folder; give one as save_pretrained writes it "
            "(`hf download NAME --local-dir FOLDER` fetches one of the hub)"
        )
    if not (path / "config.json").is_file():
        if (path / ADAPTER_FILE).is_file():
            raise CheckpointError(
                f"{path} is an adapter, which changes another checkpoint: give that one, and --merge {path}"
            )
        raise CheckpointError(f"{path} has no config.json; give a folder as save_pretrained writes it")
    config = read_json(path / "config.json")
    _check_kind(path, config)
    tokenizer_file = path / "tokenizer_config.json"
    settings = read_json(tokenizer_file) if tokenizer_file.is_file() else {}
    for name, content in (("config.json", config), ("tokenizer_config.json", settings)):
        if content.get("auto_map"):
            raise CheckpointError(
                f"{path / name} requests code of the checkpoint (auto_map), which is never run"
            )
    generation = _settings_of_generate(path, config)
    tokenizer_class = settings.get("tokenizer_class") or config.get("tokenizer_class") or ""
    files = _weight_files(path) if has_weights else ()
    return CheckpointFolder(path, config, generation, tokenizer_class, files)


def _settings_of_generate(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of `CheckpointFolder.generation`; a token that may be only one is a number."""
    decoder, file = config.get("decoder"), path / "generation_config.json"
    parts = [decoder, config] if isinstance(decoder, dict) else [config]
    of_config = {key: part[key] for part in parts for key in _GENERATION_KEYS if part.get(key) is not None}
    if file.is_file():
        settings = read_json(file)
        for name in _NEEDED_IDS:  # a null of the file is not a value
            if settings.get(name) is None:
                settings[name] = of_config.get(name)
    else:
        settings = of_config
        if config.get("force_bos_token_to_be_generated"):
            settings.setdefault("forced_bos_token_id", config.get("bos_token_id"))
    for name in SINGLE_IDS:
        value = settings.get(name)
        if isinstance(value, list):
            if len(value) != 1:
                raise CheckpointError(f"{name} is {value}, and must be one token")
            (settings[name],) = value
    return settings


def _check_kind(path: Path, config: Mapping[str, Any]) -> None:
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError(f"{path / 'config.json'} has no model_type")
    listed, quantisation = config.get("architectures"), config.get("quantization_config")
    architecture = str(listed[0]) if isinstance(listed, list) and listed else ""
    if quantisation:
        method = quantisation.get("quant_method", "unknown") if isinstance(quantisation, dict) else "unknown"
        raise CheckpointError(
            f"{path} is quantised ({method}); give the original checkpoint, which --precision int8 quantises"
        )
    if architecture in _OLD_CLASSES:
        return
    if architecture.endswith(_DECODERS):
        raise CheckpointError(f"{path} is a decoder-only model ({architecture}), not an encoder-decoder")
    if architecture.endswith(_ENCODERS):
        raise CheckpointError(
            f"{path} is an encoder or a classifier ({architecture}), not a model that generates text"
        )


def _weight_files(path: Path) -> tuple[Path, ...]:
    files = _named_files(path)
    for file in files:
        with file.open("rb") as stream:
            if stream.read(len(_LFS_POINTER)) == _LFS_POINTER:
                raise CheckpointError(
                    f"{file} is a pointer of Git LFS, not the weights: run `git lfs pull` in {path}"
                )
    return files


def _named_files(path: Path) -> tuple[Path, ...]:
    for name, index_name in _INDEXED.items():
        if (path / name).is_file():
            return (path / name,)
        if not (path / index_name).is_file():
            continue
        index = read_json(path / index_name).get("weight_map")
        if not isinstance(index, dict) or not index:
            raise CheckpointError(f"{path / index_name} has no weight_map")
        files = tuple(path / file for file in sorted(set(index.values())))
        missing = [file.name for file in files if file.parent != path or not file.is_file()]
        if missing:
            raise CheckpointError(f"{path} lacks {', '.join(missing)}, which {index_name} names")
        return files
    others = [name for name in _OTHER_WEIGHTS if (path / name).is_file()]
    found = f" (only {', '.join(others)})" if others else ""
    raise CheckpointError(f"{path} has no weights: neither {' nor '.join(_INDEXED)}{found}")


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise CheckpointError(f"{file} is damaged: {error}") from error


def _read_bin(file: Path) -> dict[str, Tensor]:
    try:
        try:
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # files older than PyTorch 1.6 cannot be mapped
            content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle and zip files are damaged in many ways
        raise CheckpointError(f"{file} cannot be read as weights alone: {first_line(error)}") from error
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise CheckpointError(f"{file} holds more than weights by name")
    return content


def eos_ids(settings: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """The tokens that end a target."""
    given = settings.get("eos_token_id")
    known = known_ids(given if isinstance(given, list) else [given], vocab_size)
    if not known:
        raise CheckpointError(
            f"eos_token_id is {given}, and targets have {vocab_size} tokens: none would end a target"
        )
    return known


def known_ids(token_ids: Any, vocab_size: int) -> tuple[int, ...]:
    """Those of a list of tokens that a target can have; `generate` ignores others, such as the usual -1."""
    given = token_ids if isinstance(token_ids, list) else []
    return tuple(one for one in given if isinstance(one, int) and 0 <= one < vocab_size)


def read_json(file: Path) -> dict[str, Any]:
    """Read an object; a CheckpointError says why there is none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} is not a JSON object")
    return content
