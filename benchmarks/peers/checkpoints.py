"""Checkpoints of Hugging Face with random weights, in the sizes of published ones.

Each has the settings of `generate` of the published checkpoint, and a small tokenizer made on the spot, whose
vocabulary is filled up with words. Only the token that is forced at the end of a long target is left out,
because CTranslate2 does not force one.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sentencepiece
import torch
import transformers
from tokenizers import AddedToken, pre_tokenizers
from transformers.models.whisper.tokenization_whisper import LANGUAGES

from benchmarks.peers.work import NUM_AFTER_WORDS, Checkpoint
from seq2seq_serve.export.huggingface.samples import SENTENCES
from seq2seq_serve.training.config import TransformerConfig

_NUM_PIECES = 400
# Large enough that the sources have different targets, and small enough that rounding does not decide them:
# standard deviations of products of maps with values of a deviation of 1. T5 does not scale scores.
_MAPS, _GAIN = r"\.(layers|block)\.(?!.*relative)", 2.0
_GAINS_OF_QUERIES = {r"q_proj": 4.0, r"Attention\.q\.": 0.25}
_LANGUAGES = {"src_lang": "eng_Latn", "tgt_lang": "kor_Hang"}


def make_checkpoint(checkpoint: Checkpoint, folder: Path) -> None:
    """Write the files of a checkpoint as `save_pretrained` does.

    Its model never ends a target before its limit.
    """
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    model = _FAMILIES[checkpoint.family](checkpoint.sizes, folder)
    config = model.config
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and re.search(_MAPS, name):
                gains = [gain for pattern, gain in _GAINS_OF_QUERIES.items() if re.search(pattern, name)]
                weight.normal_(std=(*gains, _GAIN)[0] / math.sqrt(weight.shape[1]))
        # Their logits are 0, far below the best of many, so no program has to forbid them.
        model.get_input_embeddings().weight[[config.eos_token_id, config.pad_token_id]] = 0
    model.save_pretrained(folder)


def _marian(sizes: TransformerConfig, folder: Path) -> Any:
    V = sizes.vocab_size
    content, pieces = _pieces()
    for name in ("source.spm", "target.spm"):
        (folder / name).write_bytes(content)
    vocab = [*_filled(["</s>", "<unk>", *pieces], V - 1), "<pad>"]
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(vocab)}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "MarianTokenizer"}))
    config = transformers.MarianConfig(
        **_bart_sizes(sizes),
        activation_function="swish",
        max_position_embeddings=512,
        eos_token_id=0,
        pad_token_id=V - 1,
        decoder_start_token_id=V - 1,
    )
    model = transformers.MarianMTModel(config)
    model.generation_config.update(bad_words_ids=[[V - 1]], renormalize_logits=True)
    return model


def _nllb(sizes: TransformerConfig, folder: Path) -> Any:
    V = sizes.vocab_size
    letters = [piece for piece in _pieces()[1] if len(piece) == 1]
    words = _filled(["<s>", "<pad>", "</s>", "<unk>", *letters], V - NUM_AFTER_WORDS)
    vocab = {token: i for i, token in enumerate(words)}
    tokenizer = transformers.NllbTokenizer(vocab=vocab, merges=[], **_LANGUAGES)
    tokenizer.save_pretrained(folder)
    config = transformers.M2M100Config(
        **_bart_sizes(sizes),
        activation_function="relu",
        max_position_embeddings=1024,
        bos_token_id=0,
        pad_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
    )
    model = transformers.M2M100ForConditionalGeneration(config)
    target_id = tokenizer.convert_tokens_to_ids(_LANGUAGES["tgt_lang"])
    model.generation_config.update(forced_bos_token_id=target_id)
    return model


def _t5(sizes: TransformerConfig, folder: Path) -> Any:
    V, D, H = sizes.vocab_size, sizes.d_model, sizes.num_heads
    sentinels = [f"<extra_id_{i}>" for i in reversed(range(100))]
    vocab = [*_filled(["<pad>", "</s>", "<unk>", *_pieces()[1]], V - len(sentinels)), *sentinels]
    tokenizer = transformers.T5Tokenizer(vocab=[(token, -float(i)) for i, token in enumerate(vocab)])
    tokenizer.save_pretrained(folder)
    config = transformers.T5Config(
        vocab_size=V,
        d_model=D,
        d_kv=D // H,
        d_ff=sizes.d_ff,
        num_heads=H,
        num_layers=sizes.num_encoder_layers,
        num_decoder_layers=sizes.num_decoder_layers,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def _whisper(sizes: TransformerConfig, folder: Path) -> Any:
    special = ["startoftranscript", *list(LANGUAGES)[:99], "translate", "transcribe"]
    special += ["startoflm", "startofprev", "nospeech", "notimestamps"]
    names = ["<|endoftext|>", *(f"<|{name}|>" for name in special)]
    times = [f"<|{0.02 * i:.2f}|>" for i in range(1501)]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = _filled(letters, sizes.vocab_size - len(names) - len(times))
    vocab = {token: i for i, token in enumerate([*words, names[0]])}
    tokenizer = transformers.WhisperTokenizer(vocab, [])
    tokenizer.add_tokens([AddedToken(name, special=True) for name in names])
    tokenizer.add_tokens([AddedToken(time) for time in times])
    tokenizer.save_pretrained(folder)
    transformers.WhisperFeatureExtractor().save_pretrained(folder)
    first = len(words)
    ids = {name.strip("<|>"): first + i for i, name in enumerate(names)}
    config = transformers.WhisperConfig(
        **_bart_sizes(sizes) | {"scale_embedding": False},
        max_source_positions=sizes.max_source_length,
        max_target_positions=448,
        eos_token_id=first,
        bos_token_id=first,
        pad_token_id=first,
        decoder_start_token_id=first + 1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model = transformers.WhisperForConditionalGeneration(config)
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=first,
        bos_token_id=first,
        pad_token_id=first,
        decoder_start_token_id=first + 1,
        suppress_tokens=[*range(300, 380), *(ids[name] for name in special[-6:-1])],
        begin_suppress_tokens=[220, first],
        no_timestamps_token_id=ids["notimestamps"],
        is_multilingual=True,
        language="en",
        task="transcribe",
        lang_to_id={f"<|{name}|>": ids[name] for name in special[1:100]},
        task_to_id={name: ids[name] for name in ("translate", "transcribe")},
        alignment_heads=[[0, 0]],
    )
    return model


_FAMILIES: dict[str, Callable[[TransformerConfig, Path], Any]] = {
    "marian": _marian,
    "nllb": _nllb,
    "t5": _t5,
    "whisper": _whisper,
}


def _bart_sizes(sizes: TransformerConfig) -> dict[str, Any]:
    """Returns sizes and settings by the names of BART's descendants."""
    options: dict[str, Any] = {"vocab_size": sizes.vocab_size, "d_model": sizes.d_model}
    for side, num_layers in (("encoder", sizes.num_encoder_layers), ("decoder", sizes.num_decoder_layers)):
        options |= {
            f"{side}_layers": num_layers,
            f"{side}_attention_heads": sizes.num_heads,
            f"{side}_ffn_dim": sizes.d_ff,
            f"{side}_layerdrop": 0.0,
        }
    return options | {"scale_embedding": True, "forced_eos_token_id": None}


def _pieces() -> tuple[bytes, list[str]]:
    """Returns a SentencePiece model of a few sentences, and its pieces without the special ones."""
    content = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_writer=content,
        model_type="unigram",
        vocab_size=_NUM_PIECES,
        character_coverage=0.98,
        minloglevel=2,
    )
    model = sentencepiece.SentencePieceProcessor(model_proto=content.getvalue())
    return content.getvalue(), [model.id_to_piece(i) for i in range(3, model.get_piece_size())]


def _filled(tokens: list[str], count: int) -> list[str]:
    """Returns the tokens, and words up to a number of tokens."""
    return [*tokens, *(f"\u2581word{i}" for i in range(len(tokens), count))]
