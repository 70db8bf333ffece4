"""Folders with a small random model of each family and its tokenizer, as `save_pretrained` writes them.

Each model has what published checkpoints have and class defaults lack: other layers, heads and sizes on each
side, biases of logits that are not zero, norms that are not the identity, and for T5 heads that together are
wider than the model.
"""

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from tests.export.huggingface import tokenizer_files as files


class Depth(NamedTuple):
    """The layers of each half."""

    encoder: int
    decoder: int


DEEP = Depth(2, 3)
SHALLOW = Depth(1, 1)  # for exports, which take most of a second for each layer of each graph

_SIZES = {
    "d_model": 32,
    "encoder_layers": DEEP.encoder,
    "decoder_layers": DEEP.decoder,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 56,
    "max_position_embeddings": 64,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
}
_T5_SIZES = {"d_model": 32, "d_kv": 16, "num_heads": 3, "d_ff": 40}
_BART_IDS = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
_T5_IDS = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}


def _sizes(depth: Depth) -> dict[str, Any]:
    return _SIZES | {"encoder_layers": depth.encoder, "decoder_layers": depth.decoder}


def _marian(vocab: Mapping[str, int], depth: Depth, **options: Any) -> Any:
    pad_id = vocab.get("decoder_vocab_size", vocab["vocab_size"]) - 1
    ids = {"pad_token_id": pad_id, "eos_token_id": 0, "decoder_start_token_id": pad_id, "bos_token_id": None}
    config = transformers.MarianConfig(**_sizes(depth), **vocab, **ids, scale_embedding=True, **options)
    return transformers.MarianMTModel(config)


def _generator(name: str, **settings: Any) -> Any:
    config = getattr(transformers, f"{name}Config")(**settings)
    return getattr(transformers, f"{name}ForConditionalGeneration")(config)


def _bart_like(name: str, ids: Mapping[str, int] = _BART_IDS, **options: Any) -> Callable[..., Any]:
    return lambda vocab, depth: _generator(name, **_sizes(depth), **vocab, **ids, **options)


def _t5_like(name: str, **options: Any) -> Callable[..., Any]:
    def make(vocab: Mapping[str, int], depth: Depth) -> Any:
        layers = {"num_layers": depth.encoder, "num_decoder_layers": depth.decoder}
        model = _generator(name, **_T5_SIZES, **layers, **vocab, **_T5_IDS, **options)
        if options.get("tie_word_embeddings") is False:
            model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight))
            tied = model.all_tied_weights_keys
            model.all_tied_weights_keys = {key: tied[key] for key in tied if key != "lm_head.weight"}
        return model

    return make


def _whisper(vocab: Mapping[str, int], depth: Depth) -> Any:
    ids = {f"{name}_token_id": vocab["vocab_size"] - 44 for name in ("bos", "eos", "pad")}
    ids |= {"decoder_start_token_id": ids["eos_token_id"] + 1}
    ids |= {"suppress_tokens": None, "begin_suppress_tokens": None}
    sizes = _sizes(depth) | {"num_mel_bins": 12, "max_source_positions": 32, "max_target_positions": 40}
    return _generator("Whisper", **sizes, **vocab, **ids)


def _gemma(side: str, depth: Depth, **options: Any) -> dict[str, Any]:
    """The settings of one half: a window that is shorter than the tests' texts, and caps that are felt."""
    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2}
    if side == "encoder":
        sizes = dict(zip(sizes, (48, 56, 3, 1), strict=True))
    return {
        **sizes,
        "num_hidden_layers": getattr(depth, side),  # the first with a window, the second without
        "head_dim": 16,
        "query_pre_attn_scalar": 20,
        "max_position_embeddings": 64,
        "sliding_window": 5,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 4.0,
        **options,
    }


def _t5gemma(vocab: Mapping[str, int], depth: Depth) -> Any:
    halves = {side: _gemma(side, depth, **vocab) for side in ("encoder", "decoder")}
    return _generator("T5Gemma", **halves, **vocab)


def _t5gemma2(vocab: Mapping[str, int], depth: Depth) -> Any:
    """With a small vision tower, which is not imported."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    ropes = {
        "sliding_attention": {"rope_theta": 10_000.0, "rope_type": "default"},
        "full_attention": {"rope_theta": 1_000_000.0, "rope_type": "linear", "factor": 8.0},
    }
    options = {"rope_parameters": ropes, "hidden_size": 48, **vocab}
    sides = {
        side: _gemma(side, depth, layer_types=kinds[:num_layers], **options)
        for side, num_layers in depth._asdict().items()
    }
    names = "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "image_size"
    vision = dict(zip(names, (16, 16, 1, 2, 16), strict=True)) | {"patch_size": 4}
    encoder = {
        "text_config": sides["encoder"],
        "vision_config": {"model_type": "siglip_vision_model", **vision},
        "mm_tokens_per_image": 4,
        "eoi_token_index": 2,  # its embedding is not in the matrix; as bos it is in every target
    }
    return _generator("T5Gemma2", encoder=encoder, decoder=sides["decoder"])


def _trocr(encoder: str, d_encoder: int, *, qkv_bias: bool, **options: Any) -> Callable[..., Any]:
    """A decoder that is 32 wide, and an encoder of pictures."""
    sizes = {"num_attention_heads": 3, "intermediate_size": 64, "image_size": 32, "patch_size": 8}
    sizes |= {"hidden_size": d_encoder, "qkv_bias": qkv_bias}

    def make(vocab: Mapping[str, int], depth: Depth) -> Any:
        reader = getattr(transformers, encoder)(num_hidden_layers=depth.encoder, **sizes)
        decoder = {name: size for name, size in _sizes(depth).items() if not name.startswith("encoder")}
        flags = {"is_decoder": True, "add_cross_attention": True}
        writer = transformers.TrOCRConfig(**decoder, **vocab, **flags, **options)
        config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(reader, writer)
        return transformers.VisionEncoderDecoderModel(config)

    return make


_RELU, _SCALED = {"activation_function": "relu"}, {"scale_embedding": True}
_UNTIED = {"tie_word_embeddings": False}
_GATED = {"feed_forward_proj": "gated-gelu", **_UNTIED}
_SINUSOIDS = {"use_learned_position_embeddings": False, "layernorm_embedding": False}
_SEPARATE = functools.partial(_marian, **_RELU, share_encoder_decoder_embeddings=False, **_UNTIED)
_SMALL = _trocr("DeiTConfig", 24, qkv_bias=True, **_RELU, **_SCALED, **_SINUSOIDS, **_UNTIED)
# By the name of a case: the tokenizer's files, and the model.
CASES: dict[str, tuple[Callable[[Path], files.Files], Callable[..., Any]]] = {
    "marian": (files.marian, functools.partial(_marian, activation_function="swish")),
    "marian-separate": (functools.partial(files.marian, separate=True), _SEPARATE),
    "pegasus": (files.pegasus, _bart_like("Pegasus", _T5_IDS, **_RELU, **_SCALED)),
    "bart": (files.bart, _bart_like("Bart")),
    "mbart": (files.mbart, _bart_like("MBart", **_SCALED)),
    "mbart50": (files.mbart50, _bart_like("MBart", **_SCALED, **_RELU)),
    "m2m100": (files.m2m100, _bart_like("M2M100", **_SCALED)),
    "nllb": (files.nllb, _bart_like("M2M100", **_SCALED)),
    "blenderbot": (
        files.blenderbot,
        _bart_like("Blenderbot", {**_BART_IDS, "decoder_start_token_id": 1}, **_SCALED),
    ),
    "t5": (files.t5, _t5_like("T5")),
    "t5-1.1": (files.t5, _t5_like("T5", **_GATED)),
    "mt5": (files.FAMILIES["mt5"], _t5_like("MT5", **_UNTIED)),
    "byt5": (files.byt5, _t5_like("T5", **_GATED)),
    "whisper": (files.whisper, _whisper),
    "trocr": (files.trocr, _trocr("ViTConfig", 48, qkv_bias=False, cross_attention_hidden_size=48)),
    "trocr-deit": (functools.partial(files.only_pieces, family="trocr-small"), _SMALL),
    "t5gemma": (files.t5gemma, _t5gemma),
    "t5gemma2": (files.FAMILIES["t5gemma2"], _t5gemma2),
}
SOUNDS = ("whisper",)
PICTURES = ("trocr", "trocr-deit")
TEXTS = tuple(case for case in CASES if case not in SOUNDS + PICTURES)


def make_model(case: str, vocab: Mapping[str, int], depth: Depth) -> Any:
    """A random model of a case, in eval mode."""
    model = CASES[case][1](vocab, depth).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif parameter.requires_grad:  # tables of sinusoids are not
                # Scores of T5 are not scaled: with larger queries, rounding decides between two keys.
                spread = 0.02 if name.endswith(".q.weight") else 0.2
                parameter.copy_(torch.randn_like(parameter) * spread)
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_()
    return model


def make_checkpoint(case: str, folder: Path, depth: Depth = DEEP, **generation: Any) -> Any:
    """Write the files of a case; returns the model as transformers reads it from them."""
    folder.mkdir(parents=True, exist_ok=True)
    made = CASES[case][0](folder)
    vocab = {key: made.config[key] for key in ("vocab_size", "decoder_vocab_size") if key in made.config}
    model = make_model(case, vocab, depth)
    model.save_pretrained(folder)
    edit(folder / "generation_config.json", _from_model_config=None, **(made.generation | generation))
    return read_checkpoint(case, folder)


def read_checkpoint(case: str, folder: Path) -> Any:
    """The model of a case as transformers reads it from the folder."""
    kind = {"whisper": "SpeechSeq2Seq", "trocr": "ImageTextToText"}.get(family_name(case), "Seq2SeqLM")
    theirs = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(folder).eval()
    if case == "trocr-deit":
        table = theirs.decoder.model.decoder.embed_positions  # in 5.24, loading leaves it without values
        table.weights = table.get_embedding(80, table.embedding_dim, table.padding_idx)
    return theirs


def family_name(case: str) -> str:
    """The name of the case's family."""
    return case.removesuffix("-separate").removesuffix("-1.1").removesuffix("-deit")


def edit(file: Path, *half: str, **changes: Any) -> None:
    """Change fields of a JSON file, or of one of its objects; None removes one."""
    content = json.loads(file.read_text(encoding="utf-8"))
    part = content[half[0]] if half else content
    part.update(changes)
    for name in [name for name, value in part.items() if value is None]:
        del part[name]
    file.write_text(json.dumps(content))


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change the tensors of a checkpoint."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
