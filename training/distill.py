"""Trains a draft of a finished run: a shallow decoder over the run's own encoder and embeddings.

Its targets are those that the run itself writes by greedy search (Kim and Rush 2016, arXiv:1606.07947), so it
learns to predict the run, and not the corpus. A server lets it draft tokens, which the run's model checks.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seq2seq_serve.training.config import EOS_ID, TransformerConfig
from seq2seq_serve.training.data.corpus import CorpusFiles
from seq2seq_serve.training.data.encoded import EncodedCorpus
from seq2seq_serve.training.data.text_files import write_lines
from seq2seq_serve.training.evaluation.scoring import translate
from seq2seq_serve.training.models.base import EncoderDecoder
from seq2seq_serve.training.models.registry import make_model
from seq2seq_serve.training.run import RunFolder, TrainedModel, load_run

_log = logging.getLogger(__name__)

_SOURCES_AT_ONCE = 2000
_COVERED = 0.98  # of the tokens of all targets: the other tokens are most of a vocabulary
_OWN_PARTS = ("decoder_layers", "decoder_norm")
# Of the recipe, instead of the run's. So few layers are too small to overfit, and the targets are certain.
_RECIPE: Mapping[str, Any] = {
    "dropout": 0.0,
    "word_dropout": 0.0,
    "attention_dropout": 0.0,
    "label_smoothing": 0.0,
    "bpe_dropout": 0.0,
    "source_vectors": None,
    "target_vectors": None,
    "are_vectors_frozen": False,
    "max_length_ratio": None,
    "drop_copies": False,
}


@dataclass(frozen=True)
class Draft:
    """A draft that can be exported.

    Attributes:
        trained: Its run.
        token_ids: The tokens that it proposes. A smaller choice takes less time (Zhao et al. 2025,
            arXiv:2502.14856).
    """

    trained: TrainedModel
    token_ids: Sequence[int]


def load_draft(path: Path) -> Draft:
    """Read the finished run of a draft; raise ValueError as `load_run` does, or if its corpus is missing."""
    trained, encoded = load_run(path), RunFolder(path).encoded
    if not encoded.is_dir():
        raise ValueError(f"{encoded} is missing: distil the draft again")
    counts = Counter(token_id for pair in EncodedCorpus(encoded) for token_id in pair.target_ids)
    frequent, left = [EOS_ID], _COVERED * counts.total()
    for token_id, count in counts.most_common():
        if left <= 0:
            break
        frequent.append(token_id)
        left -= count
    return Draft(trained, sorted(frequent))


def shallow(trained: TrainedModel, num_layers: int) -> TrainedModel:
    """The run with only the last layers of its decoder, with which a draft begins.

    Raises:
        ValueError: The run is not a Transformer that was trained here, or does not have more layers.
    """
    config = trained.config
    if not isinstance(config, TransformerConfig):
        raise ValueError("only a Transformer that was trained here can have a draft")
    first = config.num_decoder_layers - num_layers
    if first < 1:
        raise ValueError(
            f"a draft of {num_layers} layers needs a decoder with more, and the run's has "
            f"{config.num_decoder_layers}"
        )
    config = dataclasses.replace(config, num_decoder_layers=num_layers)
    model = make_model(config)
    model.load_state_dict(_from_layer(first, trained.model))
    return dataclasses.replace(trained, model=model.eval(), config=config)


def recipe(run: RunFolder, draft: TrainedModel) -> dict[str, Any]:
    """The settings of a draft's training: the run's own, and what is frozen, because both models share it."""
    return {**run.read_config().training.to_json(), **_RECIPE, "frozen": ",".join(_shared_parts(draft.model))}


def check_draft(trained: TrainedModel, draft: TrainedModel) -> None:
    """Raise ValueError unless a draft was distilled from the weights of this run."""
    expected = shallow(trained, getattr(draft.config, "num_decoder_layers", 0))
    free = {name: getattr(expected.config, name) for name in expected.config.free_in_a_child}
    if not isinstance(draft.config, type(expected.config)) or (
        dataclasses.replace(draft.config, **free) != expected.config
    ):
        raise ValueError(f"the draft is a {draft.config}, and a draft of this run is a {expected.config}")
    parts = _shared_parts(draft.model)
    weights = expected.model.state_dict()
    for name, weight in draft.model.state_dict().items():
        if any(f"{name}.".startswith(f"{part}.") for part in parts) and not weight.equal(weights[name]):
            raise ValueError(f"the draft has other weights {name}: it was not distilled from this run")


def write_targets(run: RunFolder, trained: TrainedModel, files: CorpusFiles, max_sources: int) -> None:
    """Write the run's own targets of the sources that it learned from, and of its dev sources.

    Raises:
        ValueError: The run does not have its corpus any more.
    """
    if not run.encoded.is_dir():
        raise ValueError(f"{run.encoded} is missing, so there is nothing to translate: train the run anew")
    pairs = EncodedCorpus(run.encoded).texts(trained.tokenizer)
    sources = dict.fromkeys(pair.source for pair in islice(pairs, max_sources))
    dev_sources = dict.fromkeys(source for source, _ in trained.dev)
    for texts, names in (
        (list(dev_sources), (files.dev_source, files.dev_target)),
        (list(sources), (files.source, files.target)),
    ):
        source_file, target_file = (Path(name) for name in names if name is not None)
        source_file.parent.mkdir(parents=True, exist_ok=True)
        write_lines(source_file, texts)
        write_lines(target_file, _translated(trained, texts))


def target_files(folder: Path) -> CorpusFiles:
    """The files of `write_targets` in a run's folder."""
    source, target, dev_source, dev_target = (
        str(folder / "distilled" / f"{part}.{side}.txt")
        for part in ("train", "dev")
        for side in ("source", "target")
    )
    return CorpusFiles(source=source, target=target, dev_source=dev_source, dev_target=dev_target)


@torch.inference_mode()
def _translated(trained: TrainedModel, texts: Sequence[str]) -> Iterator[str]:
    for start in range(0, len(texts), _SOURCES_AT_ONCE):
        given = texts[start : start + _SOURCES_AT_ONCE]
        yield from translate(trained.model, trained.tokenizer, given, length_bound=trained.length_bound)
        _log.info("translated %s of %s sources", f"{start + len(given):,}", f"{len(texts):,}")


def _from_layer(first: int, model: EncoderDecoder) -> dict[str, Tensor]:
    """The weights of a model without the layers of its decoder before one."""
    weights = {}
    for name, weight in model.state_dict().items():
        part, _, rest = name.partition(".")
        if part != "decoder_layers":
            weights[name] = weight
            continue
        layer, _, rest = rest.partition(".")
        if int(layer) >= first:
            weights[f"{part}.{int(layer) - first}.{rest}"] = weight
    return weights


def _shared_parts(draft: EncoderDecoder) -> list[str]:
    """The parts that a draft has from its run, by the first words of the names of their weights.

    Among them are the maps from the encoder's states to keys and values, so that both read one memory.
    """
    names = [name for name, _ in draft.named_parameters()]
    whole = {name.partition(".")[0]: None for name in names if name.partition(".")[0] not in _OWN_PARTS}
    maps = {
        name.rpartition(".")[0]: None
        for name in names
        if ".cross_attention.key." in name or ".cross_attention.value." in name
    }
    return [*whole, *maps]
