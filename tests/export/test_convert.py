"""The files: named axes, weights once, and nothing of the machine that exported."""

import dataclasses
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from seq2seq_serve import kernels, load
from seq2seq_serve.bundle.manifest import Bundle, load_bundle
from seq2seq_serve.bundle.names import NUM_CANDIDATES, PLACES, Precision, Verb
from seq2seq_serve.export import convert, parity
from seq2seq_serve.export.exporter import TOLERANCES, ExportError, export_bundle, make_graphs
from seq2seq_serve.export.graphs import linear
from seq2seq_serve.export.graphs.transformer import Graph
from seq2seq_serve.export.runtime import Graphs
from tests.kernels.test_adapters import low_rank_of

PRECISIONS = [Precision.FP32, Precision.INT8, Precision.INT4]


def graph_of(bundle: Bundle, precision: Precision, verb: Verb) -> onnx.GraphProto:
    path = bundle.path / bundle.manifest.variants[precision].graphs[verb].file.file
    return onnx.load(path, load_external_data=False).graph


def described(value: onnx.ValueInfoProto) -> tuple[str, str, tuple[int | str, ...]]:
    tensor = value.type.tensor_type
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type).name
    return value.name, dtype, tuple(d.dim_param or d.dim_value for d in tensor.shape.dim)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("verb", Verb)
def test_the_graphs_have_the_names_types_and_axes_of_the_manifest(precision, verb, random_bundle):
    graph = graph_of(random_bundle, precision, verb)
    spec = random_bundle.manifest.variants[precision].graphs[verb]
    for values, tensors in ((graph.input, spec.inputs), (graph.output, spec.outputs)):
        assert [described(value) for value in values] == [
            (tensor.name, tensor.dtype, tensor.axes) for tensor in tensors
        ]
    named = {axis for tensor in spec.inputs for axis in tensor.axes if isinstance(axis, str)}
    looked_up = set() if precision == "fp32" else {"places"}
    assert (
        named
        == {
            Verb.ENCODE: {"batch", "source_length", "memory_capacity"},
            Verb.STEP: {"batch", "cache_capacity", "memory_capacity"} | looked_up,
            Verb.DECODE: {"batch", "target_length", "label_length", "cache_capacity", "memory_capacity"},
        }[verb]
    )


def external(bundle: Bundle, precision: Precision) -> list[tuple[int, int]]:
    """Offset and length of every weight in the file of weights, by every graph that has it."""
    places = []
    for verb in Verb:
        for tensor in graph_of(bundle, precision, verb).initializer:
            entries = {entry.key: entry.value for entry in tensor.external_data}
            if entries:
                assert entries["location"] == "weights.bin"
                places.append((int(entries["offset"]), int(entries["length"])))
    return places


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_weight_is_stored_once(precision, random_bundle):
    places = Counter(external(random_bundle, precision))
    content = (random_bundle.path / precision / "weights.bin").read_bytes()
    end = 0
    for offset, length in sorted(places):
        assert offset == -(-end // 4096) * 4096, "weights lie one after the other, at whole pages"
        end = offset + length
    assert end == len(content) > 20_000
    blobs = [content[offset : offset + length] for offset, length in places]
    assert len(set(blobs)) == len(blobs)
    # The embedding belongs to all graphs; in fp32 those of targets have it as their output projection, too.
    assert max(places.values()) == (5 if precision == "fp32" else 3)
    for verb in Verb:
        file = random_bundle.manifest.variants[precision].graphs[verb].file
        assert file.size_bytes < 100_000, "large weights are not in the graph itself"


def test_the_embedding_is_the_output_projection(random_bundle, random_trained):
    content = (random_bundle.path / "fp32" / "weights.bin").read_bytes()
    weight = random_trained.model.embedding.weight.detach().numpy()
    assert content.count(weight.tobytes()) == 1
    assert content.count(np.ascontiguousarray(weight.T).tobytes()) == 0


# slow: in int4 a table is looked up and multiplied as in int8, and tests above count the tables in fp32
@pytest.mark.parametrize(
    "precision", ["int8", *(pytest.param(each, marks=pytest.mark.slow) for each in ("fp32", "int4"))]
)
def test_a_large_table_is_stored_once_for_embeddings_and_output(
    precision, one_layer_trained, tmp_path, monkeypatch
):
    precision = Precision(precision)
    monkeypatch.setattr(linear, "_LEAST_SHARED_BYTES", 0)
    export_bundle(one_layer_trained, tmp_path / "bundle", [precision])
    bundle = load_bundle(tmp_path / "bundle")
    tables = set()
    for verb in Verb:
        graph = graph_of(bundle, precision, verb)
        names = [node.input[1] for node in graph.node if node.op_type.endswith("Embedding")]
        last = [node.input[1] for node in graph.node if node.op_type.endswith(("Linear", "Choice"))][-1]
        names += [last] if verb is not Verb.ENCODE else []
        assert names
        for tensor in graph.initializer:
            if tensor.name in names:
                places = {entry.key: entry.value for entry in tensor.external_data}
                tables.add((places["offset"], places["length"]))
    assert len(tables) == 1

    def answers() -> list[tuple[int, ...]]:
        with load(bundle.path, provider="cpu", threads=1) as model:
            return [
                answer.hypotheses[0].token_ids
                for answer in model.generate(["하나 둘 셋", "다섯"], max_new_tokens=20, beam_size=2)
            ]

    expected = answers()
    monkeypatch.setattr(kernels, "add", lambda *_, **__: "they are not compiled")
    assert answers() == expected


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("verb", Verb)
def test_nothing_of_the_exporting_machine_is_in_a_graph(precision, verb, random_bundle):
    file = random_bundle.path / precision / f"{verb}.onnx"
    content = file.read_bytes()
    for trace in (b".py", b'File "', b"pkg.torch", b"site-packages", str(Path.cwd()).encode(), b"/home/"):
        assert trace not in content
    assert str(random_bundle.path).encode() not in content
    graph = onnx.load(file, load_external_data=False).graph
    assert not any(node.doc_string or node.metadata_props for node in graph.node)


@pytest.mark.parametrize("verb", Verb)
def test_the_graphs_are_valid_by_the_checker_of_onnx(verb, random_bundle):
    onnx.checker.check_model(str(random_bundle.path / "fp32" / f"{verb}.onnx"))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_graphs_run_without_the_compiled_operators(precision, random_bundle, random_trained, monkeypatch):
    monkeypatch.setattr(kernels, "library", lambda _: None)
    variant = random_bundle.manifest.variants[precision]
    paths = {verb: random_bundle.path / graph.file.file for verb, graph in variant.graphs.items()}
    graphs = Graphs(paths, variant.graphs, "CPUExecutionProvider")
    difference = parity.worst_difference(random_trained.model, graphs)
    assert difference <= 2 * max(variant.parity.max_log_probability_difference, 1e-5)


def test_the_fused_operators_are_in_place(random_bundle):
    """One node a projection, the operators that are fast, and nothing but products in a step's layers."""
    L = 2
    nodes = graph_of(random_bundle, Precision.FP32, Verb.STEP).node
    step = Counter(node.op_type for node in nodes)
    assert (step["CacheAttention"], step["MemoryAttention"]) == (L, L)
    # Query, key and value together, their output, the two of cross-attention, two of the feed-forward;
    # logits.
    maps = {"Linear": 5 * L + 1, "LinearRelu": L}
    others = {"Gather": 2, "Mul": 1, "Add": 1}
    assert step == Counter(CacheAttention=L, MemoryAttention=L, AddNorm=3 * L, **maps, **others)
    assert "SkipLayerNormalization" not in step  # measured several times slower on the CPU
    encode = Counter(node.op_type for node in graph_of(random_bundle, Precision.FP32, Verb.ENCODE).node)
    assert encode["SourceAttention"] == L
    assert encode["ScatterND"] == 2 * L
    assert encode["Split"] == 1  # keys and values of the memory
    assert (encode["NonZero"], encode["Transpose"]) == (1, 1)  # the places of tokens, as pairs
    assert not encode.keys() & {"TensorScatter", "Concat", "Expand", "Where"}
    # And the decoder's cross-attention keys and values, all at once
    assert encode["Linear"] + encode["LinearRelu"] == 4 * L + 1
    decode = Counter(node.op_type for node in graph_of(random_bundle, Precision.FP32, Verb.DECODE).node)
    assert (decode["GroupQueryAttention"], decode["Softmax"]) == (L, L)


@pytest.mark.parametrize(("precision", "family"), [(Precision.INT8, "Quantized"), (Precision.INT4, "Int4")])
@pytest.mark.parametrize(("verb", "num_maps"), [(Verb.ENCODE, 9), (Verb.STEP, 13), (Verb.DECODE, 13)])
def test_graphs_quantise_every_map_by_constant_weights(verb, num_maps, precision, family, random_bundle):
    graph = graph_of(random_bundle, precision, verb)
    operators = Counter(node.op_type for node in graph.node)
    assert operators[f"{family}Linear"] + operators[f"{family}Choice"] == num_maps
    assert operators[f"{family}Choice"] == (verb is Verb.STEP)
    assert operators["Gemm"] == operators["DynamicQuantizeLinear"] == operators["MatMulInteger"] == 0
    # What is left are no maps by weights: queries by keys and weights by values, in decode's cross-attention.
    assert operators["MatMul"] == (4 if verb is Verb.DECODE else 0)
    constants = {tensor.name for tensor in graph.initializer}
    constants |= {node.output[0] for node in graph.node if node.op_type == "Constant"}
    for node in graph.node:
        if node.op_type == "MatMul":
            assert not constants & set(node.input)
        if node.op_type.startswith(family):
            assert set(node.input[1:]) <= constants | {NUM_CANDIDATES, PLACES}


@pytest.fixture(scope="module")
def bf16_files(one_layer_trained, tmp_path_factory) -> tuple[dict[Verb, Graph], dict[Verb, Path]]:
    folder = tmp_path_factory.mktemp("bf16")
    modules = make_graphs(one_layer_trained, Precision.BF16)
    return modules, convert.save({verb: convert.convert(module) for verb, module in modules.items()}, folder)


@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_graphs_for_cuda_hold_short_floats_and_answer_in_float32(dtype, fp16_manifest, request):
    path, manifest = fp16_manifest
    graphs = manifest.variants[Precision.FP16].graphs
    files = {verb: path / graph.file.file for verb, graph in graphs.items()}
    if dtype == "bfloat16":  # the graphs of float16 but for the type: converted for the long tests only
        graphs, files = request.getfixturevalue("bf16_files")
    for verb, spec in graphs.items():
        graph = onnx.load(files[verb], load_external_data=False).graph
        for values, tensors in ((graph.input, spec.inputs), (graph.output, spec.outputs)):
            assert [described(value)[:2] for value in values] == [
                (tensor.name, tensor.dtype) for tensor in tensors
            ]
        weights = {tensor.data_type for tensor in graph.initializer if len(tensor.dims) == 2}
        assert weights == {getattr(onnx.TensorProto, dtype.upper())}
        buffers = [t for t in (*spec.inputs, *spec.outputs) if t.role in ("cache", "memory")]
        assert {tensor.dtype for tensor in buffers} == {dtype}
        answers = {tensor.name: tensor.dtype for tensor in spec.outputs if tensor not in buffers}
        assert (
            answers
            == {
                Verb.ENCODE: {},
                Verb.STEP: {"logits": "float32", "token_ids_out": "int64", "previous_lengths_out": "int32"},
                Verb.DECODE: {"log_probabilities": "float32", "attention": "float32"},
            }[verb]
        )


def test_fp16_was_proved_well_within_its_tolerance(fp16_manifest):
    parity = fp16_manifest[1].variants[Precision.FP16].parity
    assert 0 < parity.max_log_probability_difference < parity.tolerance / 10
    assert parity.tolerance == 0.1


def test_a_step_for_cuda_joins_norms_maps_and_embeddings(fp16_manifest):
    """So the stub of CUDA counts 53 kernels in a greedy step of `base` with 16 rows, where there were 171."""
    path, _ = fp16_manifest
    graph = onnx.load(path / "fp16" / f"{Verb.STEP}.onnx", load_external_data=False).graph
    step = Counter(node.op_type for node in graph.node)
    fused = ("CudaEmbedding", "CudaNormLinear", "CudaNormLinearRelu", "SkipLayerNormalization")
    assert [step[name] for name in fused] == [1, 1, 1, 1]
    assert (step["CudaCacheAttention"], step["CudaMemoryAttention"], step["MostProbable"]) == (1, 1, 1)
    assert not step.keys() & {"LayerNormalization", "Mul", "Relu", "Add", "Gather"}
    with_bias = [node for node in graph.node if node.op_type == "Gemm" and len(node.input) == 3]
    assert len(with_bias) == 1  # the first, before which there is no norm
    assert step["Gemm"] == 5
    # What is written in place: no other node may read what stood there before.
    [counting] = [node for node in graph.node if "previous_lengths" in node.input]
    assert (counting.op_type, counting.output[1:]) == ("CudaEmbedding", ["previous_lengths_out"])
    [choice] = [node for node in graph.node if node.op_type == "MostProbable"]
    assert list(choice.output) == ["logits", "token_ids_out"]


def test_what_a_kernel_of_cuda_reads_on_the_host_stays_in_the_graph(tmp_path):
    """A server places the weights of the file on the device."""
    model = onnx.load_from_string(low_rank_of(np.arange(256) // 128, 64, on_cuda=True))
    convert.save({Verb.STEP: ir.from_proto(model)}, tmp_path)
    [parts] = onnx.load(tmp_path / f"{Verb.STEP}.onnx", load_external_data=False).graph.initializer
    assert (parts.name, parts.data_location) == ("parts", onnx.TensorProto.DEFAULT)
    assert (tmp_path / convert.WEIGHTS_FILE).read_bytes() == b""


def widened(path: Path) -> None:
    """Rewrite a graph of bfloat16 to compute the same in float32, for which the CPU has kernels."""
    short, wide = onnx.TensorProto.BFLOAT16, onnx.TensorProto.FLOAT
    model = onnx.load(path)
    graph = model.graph
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.elem_type == short:
            value.type.tensor_type.elem_type = wide
    attributes = [attribute for node in graph.node for attribute in node.attribute]
    for tensor in (*graph.initializer, *(a.t for a in attributes if a.type == onnx.AttributeProto.TENSOR)):
        if tensor.data_type == short:
            array = onnx.numpy_helper.to_array(tensor).astype("float32")
            tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    for attribute in attributes:
        if attribute.name == "to" and attribute.i == short:
            attribute.i = wide
    onnx.save(model, path)


@pytest.mark.slow  # float16 is proved by its export, in the same way
def test_bf16_graphs_compute_what_the_model_does_but_for_the_rounding_of_weights(
    one_layer_trained, bf16_files, tmp_path, monkeypatch
):
    """Not its kernels, which are CUDA's alone."""
    modules, files = bf16_files
    paths = {verb: Path(shutil.copy(path, tmp_path)) for verb, path in files.items()}
    shutil.copy(files[Verb.STEP].parent / convert.WEIGHTS_FILE, tmp_path)
    for path in paths.values():
        widened(path)
    for module in modules.values():
        for side in ("inputs", "outputs"):
            specs = [
                dataclasses.replace(spec, dtype=spec.dtype.replace("bfloat16", "float32"))
                for spec in getattr(module, side)
            ]
            monkeypatch.setattr(module, side, tuple(specs))
    graphs = Graphs(paths, modules, "CPUExecutionProvider")
    difference = parity.worst_difference(one_layer_trained.model, graphs)
    assert 0 < difference < TOLERANCES[Precision.BF16] / 4


def test_bf16_without_a_device_is_refused_before_anything_is_converted(one_layer_trained, tmp_path):
    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("CUDA may work here")
    told = []
    with pytest.raises(ExportError, match=r"bf16 .* CUDA"):
        export_bundle(one_layer_trained, tmp_path / "bundle", [Precision.BF16], report=told.append)
    assert told == []
    assert list(tmp_path.iterdir()) == []
