"""On the CPU the encoder computes tokens only; on CUDA it computes padding, too."""

from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from seq2seq_serve import kernels
from seq2seq_serve.bundle.names import SOURCE_IDS, SOURCE_LENGTHS, Axis, Role, Verb
from seq2seq_serve.export import convert
from seq2seq_serve.export.graphs.families import make_modules
from seq2seq_serve.export.graphs.linear import FloatFactory
from seq2seq_serve.export.runtime import Graphs, Sources

B, S = 4, 14
LENGTHS = np.array([6, S, 1, 11], np.int32)
PACKED = ["post_fp32", "pre_fp32", "post_int8"]


@pytest.fixture
def source_ids(exported):
    return np.random.default_rng(3).integers(0, exported.trained.config.vocab_size, (B, S))


def encode(exported, source_ids, lengths=LENGTHS):
    sources = Sources({SOURCE_IDS: source_ids, SOURCE_LENGTHS: lengths}, lengths)
    return exported.graphs.encode(sources, memory_capacity=S + 5)


@pytest.mark.parametrize("exported", PACKED, indirect=True)
def test_padding_is_not_looked_up(exported, source_ids):
    """ONNX Runtime refuses to look up an id that is not in the vocabulary."""
    is_token = np.arange(S) < LENGTHS[:, None]
    memory = encode(exported, source_ids)
    for name, array in encode(exported, np.where(is_token, source_ids, 10**9)).items():
        np.testing.assert_array_equal(array, memory[name])


@pytest.mark.parametrize("exported", PACKED, indirect=True)
def test_the_maps_read_one_row_a_token(exported, source_ids):
    model = onnx.load(exported.folder / "encode.onnx")
    products = [node.output[0] for node in model.graph.node if "Linear" in node.op_type]
    assert len(products) >= 5
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in products)
    options = onnxruntime.SessionOptions()
    kernels.register(options)
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    sizes = {Axis.BATCH: B, Axis.MEMORY_CAPACITY: S}
    buffers = [spec for spec in exported.modules[Verb.ENCODE].inputs if spec.role is Role.MEMORY]
    feeds = {spec.name: np.zeros(spec.shape(sizes), spec.storage) for spec in buffers}
    outputs = session.run(products, feeds | {SOURCE_IDS: source_ids, SOURCE_LENGTHS: LENGTHS})
    assert {len(rows) for rows in outputs} == {LENGTHS.sum()}


@pytest.mark.parametrize("exported", PACKED, indirect=True)
def test_a_source_has_the_same_memory_alone_and_in_a_batch(exported, source_ids):
    memory = encode(exported, source_ids)
    for row, length in enumerate(LENGTHS):
        here = slice(row, row + 1)
        for name, array in encode(exported, source_ids[here, :length].copy(), LENGTHS[here]).items():
            np.testing.assert_array_equal(array, memory[name][here])


@pytest.mark.parametrize("exported", ["post_fp32"], indirect=True)
def test_both_layouts_give_the_same_memory(exported, source_ids, tmp_path):
    graph = make_modules(exported.trained.model, FloatFactory(torch.float32, is_fused=True))[Verb.ENCODE]
    paths = convert.save({Verb.ENCODE: convert.convert(graph)}, tmp_path)
    fused = Graphs(paths, {Verb.ENCODE: graph}, "CPUExecutionProvider")
    packed, padded = encode(exported, source_ids), encode(replace(exported, graphs=fused), source_ids)
    for name, array in packed.items():
        assert np.abs(array).max() > 0.1
        for row, length in enumerate(LENGTHS):
            live = np.s_[row, :, :length]
            np.testing.assert_allclose(array[live], padded[name][live], atol=1e-5)
