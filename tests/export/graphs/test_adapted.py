"""Graphs whose rows may name an adapter."""

import numpy as np
import pytest
import torch

from seq2seq_serve import kernels
from seq2seq_serve.bundle.adapters import Places
from seq2seq_serve.bundle.names import Precision, Verb
from seq2seq_serve.export import parity
from seq2seq_serve.export.exporter import ExportError, export_bundle, factory_of, maps_for_adapters
from seq2seq_serve.export.graphs.families import make_modules
from seq2seq_serve.export.runtime import Graphs
from tests.models import make_random_recurrent, random_adapter, with_terms

PRECISIONS = [Precision.FP32, Precision.INT8]
SOURCES = [[4, 5, 6, 7, 2], [9, 2], [8, 30, 31, 7, 6, 5, 2], [5, 5, 5, 2]]


def graphs_of(bundle, precision) -> Graphs:
    variant = bundle.manifest.variants[precision]
    paths = {verb: bundle.path / graph.file.file for verb, graph in variant.graphs.items()}
    return Graphs(paths, variant.graphs, "CPUExecutionProvider", maps=bundle.manifest.adapted_maps)


def computed(graphs: Graphs, sources) -> list[list[np.ndarray]]:
    """For each source what all graphs compute for it: memory, logits of steps, scores and attention."""
    rows = [graphs.kind.inputs(source) for source in sources]
    batch = graphs.sources(rows)
    memory = graphs.encode(batch, memory_capacity=9)
    targets = np.array([[1, 7, 9, 11]] * len(sources))
    buffers = {name: array.copy() for name, array in memory.items()} | graphs.empty_cache(len(sources), 6)
    steps = [
        graphs.step(targets[:, place].copy(), np.full(len(sources), place, np.int32), batch.lengths, buffers)
        for place in range(4)
    ]
    scores, attention = graphs.decode(
        targets, targets, batch.lengths, memory | graphs.empty_cache(len(sources), 6)
    )
    live = [
        {name: array[row][..., :length, :] for name, array in memory.items()}
        for row, length in enumerate(batch.lengths)
    ]
    return [
        [*live[row].values(), *(step[row] for step in steps), scores[row], attention[row, :, :length]]
        for row, length in enumerate(batch.lengths)
    ]


def assert_same_bits(found, expected) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_rows_without_an_adapter_have_the_bits_of_plain_graphs(precision, adapted_bundle, random_bundle):
    plain = computed(graphs_of(random_bundle, precision), SOURCES)
    graphs = graphs_of(adapted_bundle, precision)
    for row, expected in zip(computed(graphs, SOURCES), plain, strict=True):
        assert_same_bits(row, expected)
    adapter = random_adapter(adapted_bundle, 1)
    graphs.use_adapters([adapter], (0, -1))
    rows = computed(graphs, SOURCES)
    for number in (1, 3):
        assert_same_bits(rows[number], plain[number])
    for number in (0, 2):
        assert np.abs(rows[number][-2] - plain[number][-2]).max() > 0.01


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_row_has_the_bits_alone_that_it_has_beside_rows_of_other_adapters(precision, adapted_bundle):
    graphs = graphs_of(adapted_bundle, precision)
    adapters = [random_adapter(adapted_bundle, seed, rank) for seed, rank in ((1, 1), (2, 8))]
    ids = [1, 0, -1, 1]
    graphs.use_adapters(adapters, ids)
    together = computed(graphs, SOURCES)
    for row, source in enumerate(SOURCES):
        graphs.use_adapters(adapters, ids[row : row + 1])
        [alone] = computed(graphs, [source])
        assert_same_bits(alone, together[row])
        if ids[row] >= 0:  # whatever else is loaded
            graphs.use_adapters([adapters[ids[row]]], (0,))
            assert_same_bits(computed(graphs, [source])[0], alone)


@pytest.mark.parametrize("has_operators", [True, False])
def test_an_adapter_computes_what_the_model_with_its_terms_computes(
    has_operators, adapted_bundle, random_trained, monkeypatch
):
    """By the operator, and by its definition."""
    if not has_operators:
        monkeypatch.setattr(kernels, "register", lambda *_: False)
    graphs = graphs_of(adapted_bundle, Precision.FP32)
    adapters = [random_adapter(adapted_bundle, seed, rank=8) for seed in (1, 2)]
    graphs.use_adapters(adapters, (1,))
    with with_terms(random_trained.model, adapters[1]) as model:
        assert parity.worst_difference(model, graphs) < 1e-4
    assert parity.worst_difference(random_trained.model, graphs) > 0.1


def test_int8_adds_the_terms_in_full_precision(adapted_bundle, random_trained):
    """The difference to float32 is that of the base: terms are not quantised."""
    pairs = [({"source_ids": np.array(source)}, [1, 7, 9, 11, 12]) for source in SOURCES]
    graphs = graphs_of(adapted_bundle, Precision.INT8)
    alone = parity.mean_difference(random_trained.model, graphs, pairs)
    adapter = random_adapter(adapted_bundle, 3, scale=0.1)
    graphs.use_adapters([adapter], (0,))
    with with_terms(random_trained.model, adapter) as model:
        assert parity.mean_difference(model, graphs, pairs) < 1.5 * alone
    assert parity.mean_difference(random_trained.model, graphs, pairs) > 3 * alone


def test_a_place_that_was_used_keeps_nothing_of_its_last_adapter(adapted_bundle):
    places = Places(adapted_bundle.manifest.adapted_maps)
    array, ranks = np.zeros(8 * places.num_units, np.float16), np.zeros(places.num_parts, np.int32)
    new = random_adapter(adapted_bundle, 2, rank=2)
    places.write(new, {}, array, ranks, 8)
    expected = array.copy(), ranks.copy()
    places.write(random_adapter(adapted_bundle, 1, rank=8), {}, array, ranks, 8)
    assert (array != expected[0]).any()
    places.write(new, {}, array, ranks, 8)
    np.testing.assert_array_equal(array, expected[0])
    np.testing.assert_array_equal(ranks, expected[1])
    places.write({}, {}, array, ranks, 8)
    assert not array.any()
    assert not ranks.any()


def test_terms_have_the_scale_of_their_outputs(adapted_bundle):
    """In float16 some outputs are scaled, so that they do not leave its range."""
    [one, *_] = maps = adapted_bundle.manifest.adapted_maps
    weights = {
        part.name: (np.ones((1, one.num_inputs)), np.ones((1, part.num_outputs))) for part in one.parts
    }
    places = Places(maps)
    array, ranks = np.zeros(places.num_units, np.float16), np.zeros(places.num_parts, np.int32)
    places.write(weights, {one.parts[1].name: 0.25}, array, ranks, 1)
    b = array[len(one.parts) * one.num_inputs : one.num_units]
    width = one.parts[0].num_outputs
    assert b[:width].tolist() == [1] * width
    assert b[width : 2 * width].tolist() == [0.25] * width


def test_only_transformers_take_adapters(tmp_path):
    with pytest.raises(ExportError, match="recurrent takes no adapters"):
        export_bundle(make_random_recurrent("dot"), tmp_path / "b", [Precision.FP32], adapters=True)


def test_all_precisions_have_the_same_places(random_trained):
    """One adapter serves them all; in float16, of models with RMS norms, only scales differ."""
    model = random_trained.model
    maps = maps_for_adapters(model, is_wanted=True)
    make_modules(model, factory_of(Precision.FP32, maps))
    first = list(maps.maps)
    for precision in (Precision.INT8, Precision.FP16):
        make_modules(model, factory_of(precision, maps))
        assert maps.maps == first
    names = {part.name for one in first for part in one.parts}
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert names == linear
    assert Verb.ENCODE  # the memory's map is among them
    assert {"decoder_layers.0.cross_attention.key", "encoder_layers.1.feed_forward.outer"} <= names
