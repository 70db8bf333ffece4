"""Converts our weights and checkpoints to CTranslate2, so that both engines decode the same model."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ctranslate2
from ctranslate2.converters import TransformersConverter
from ctranslate2.converters.transformers import BartLoader

from benchmarks.peers.marian import with_names_of_marian
from benchmarks.peers.work import Checkpoint, Search
from seq2seq_serve.training.config import BOS, EOS, PAD, UNK, TransformerConfig
from seq2seq_serve.training.models.base import EncoderDecoder
from seq2seq_serve.training.models.transformer import Transformer
from seq2seq_serve.training.run import TrainedModel

# At 0, a beam would end as soon as its best hypothesis ends. This small value leaves the scores unchanged.
_NO_PENALTY = 1e-9
# Many requests are sorted by length and cut into batches; on Multi30k, 64 to 80 rows were the fastest of 16
# to 2500. Few requests form one batch per worker.
_FEW_REQUESTS, _BATCH_ROWS = 32, 80


def convert(model: EncoderDecoder, path: Path) -> list[str]:
    """Write `model` in CTranslate2's format; returns the token string of each id."""
    assert isinstance(model, Transformer)
    assert isinstance(model.config, TransformerConfig)
    marian = with_names_of_marian(model)
    marian.config.normalize_before = is_pre_norm = model.config.norm == "pre"
    marian.config.normalize_embedding = False
    if is_pre_norm:
        marian.model.encoder.layer_norm = model.encoder_norm
        marian.model.decoder.layer_norm = model.decoder_norm
    spec = BartLoader().get_model_spec(marian)
    tokens = [PAD, BOS, EOS, UNK] + [f"t{i}" for i in range(4, model.config.vocab_size)]
    spec.config.bos_token, spec.config.eos_token, spec.config.unk_token = BOS, EOS, UNK
    spec.config.decoder_start_token = BOS
    spec.register_source_vocabulary(tokens)
    spec.register_target_vocabulary(tokens)
    spec.validate()
    path.mkdir(parents=True, exist_ok=True)
    spec.save(str(path))
    return tokens


def converted(
    model: TrainedModel | Checkpoint, folder: Path, settings: dict[str, Any]
) -> Callable[..., CTranslate2Peer]:
    """Convert a model, or the checkpoint in `folder/checkpoint`; returns what loads it with its threads.

    Args:
        model: Decides which class loads it.
        folder: Receives the converted model.
        settings: Fields of every request, as `benchmarks.load.engine.settings_of` returns them.
    """
    path = folder / "ctranslate2"
    if not isinstance(model, Checkpoint):
        return partial(CTranslate2Peer, path, convert(model.model, path))
    TransformersConverter(str(folder / "checkpoint")).convert(str(path))
    (vocabulary,) = path.glob("*vocabulary.json")
    tokens: list[str] = json.loads(vocabulary.read_text(encoding="utf-8"))
    return partial(CTranslate2Peer, path, tokens, forced_ids=settings["prefix_ids"])


class CTranslate2Peer:
    """One translator with its thread setting.

    Args:
        path: Folder that `convert` wrote.
        tokens: Token strings that `convert` returned.
        compute_type: CTranslate2's name, such as `float32` or `int8`; it converts the weights itself.
        inter_threads: Number of batches at once.
        intra_threads: Number of threads per batch.
        forced_ids: The first tokens of every target, which are not returned.
    """

    def __init__(
        self,
        path: Path,
        tokens: list[str],
        compute_type: str,
        inter_threads: int,
        intra_threads: int,
        forced_ids: Sequence[int] = (),
    ) -> None:
        self._tokens = tokens
        self._forced = [tokens[token_id] for token_id in forced_ids]
        self._ids = {token: token_id for token_id, token in enumerate(tokens)}
        self._inter_threads = inter_threads
        self._translator = ctranslate2.Translator(
            str(path),
            compute_type=compute_type,
            inter_threads=inter_threads,
            intra_threads=intra_threads,
        )

    def translate(self, sources: Sequence[Any], search: Search) -> list[list[int]]:
        """Returns the best target of each source; includes encoding."""
        num_forced = len(self._forced)
        max_batch_size = -(-len(sources) // self._inter_threads)
        if len(sources) > _FEW_REQUESTS:
            max_batch_size = min(max_batch_size, _BATCH_ROWS // search.beam_size)
        answers: dict[int, Any] = {}
        for most, numbers in search.groups(sources).items():
            results = self._translator.translate_batch(
                [[self._tokens[token_id] for token_id in sources[number]] for number in numbers],
                asynchronous=True,
                beam_size=search.beam_size,
                length_penalty=_NO_PENALTY,
                max_input_length=0,
                min_decoding_length=num_forced,
                max_decoding_length=num_forced + most,
                max_batch_size=max_batch_size,
                target_prefix=[self._forced] * len(numbers) if num_forced else None,
            )
            answers |= zip(numbers, results, strict=True)
        best = [answers[number].result().hypotheses[0][num_forced:] for number in range(len(sources))]
        return [[self._ids[token] for token in tokens] for tokens in best]
