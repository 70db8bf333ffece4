"""A checkpoint becomes a bundle that computes the same, or nothing at all."""

import functools
import json
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import transformers

from seq2seq_serve.bundle import names
from seq2seq_serve.bundle.manifest import load_bundle
from seq2seq_serve.bundle.names import Axis, Form, Precision, Verb
from seq2seq_serve.export.exporter import TOLERANCES, ExportError
from seq2seq_serve.export.huggingface import exporter, reference
from seq2seq_serve.export.huggingface.exporter import export_checkpoint
from seq2seq_serve.export.parity import worst_difference
from seq2seq_serve.export.runtime import Graphs
from seq2seq_serve.server.config import RunnerConfig
from seq2seq_serve.server.engine.request import Beam, Request, Sampling
from seq2seq_serve.server.runner.runner import OnnxRunner
from seq2seq_serve.training.huggingface import families
from seq2seq_serve.training.huggingface.bart import BART
from seq2seq_serve.training.huggingface.checkpoint import CheckpointError, open_checkpoint
from seq2seq_serve.training.huggingface.dialect import Limits, PositionRule
from seq2seq_serve.training.huggingface.weights import read_model
from tests.export.huggingface.checkpoints import (
    PICTURES,
    SHALLOW,
    SOUNDS,
    TEXTS,
    Depth,
    change_weights,
    edit,
    family_name,
    make_checkpoint,
    read_checkpoint,
)
from tests.server.driver import Driver

FP32 = [Precision.FP32]


@pytest.fixture(scope="session")
def checkpoint(checkpoint):
    """A checkpoint with few layers: of each, an export takes long."""
    return functools.partial(checkpoint, depth=SHALLOW)


def slow_if(cases, is_slow):
    return [pytest.param(case, marks=pytest.mark.slow) if is_slow(case) else case for case in cases]


# The graphs of others have the same parts, and test_families.py compares all in torch.
QUICK = ("marian-separate", "bart", "t5", "whisper", "trocr")
EXPORTED = slow_if([*QUICK, "nllb", "trocr-deit", "t5gemma", "t5gemma2"], lambda case: case not in QUICK)


@pytest.mark.parametrize("case", EXPORTED)
def test_the_graphs_of_every_family_equal_transformers(imported, case):
    folder = imported(case)
    theirs = read_checkpoint(case, folder / "checkpoint")
    lines = (folder / "report").read_text(encoding="utf-8").splitlines()
    manifest = load_bundle(folder / "bundle").manifest
    proof = manifest.variants[Precision.FP32].parity
    assert 0 < proof.max_log_probability_difference < 3e-5
    assert manifest.kind == family_name(case)
    if case in SOUNDS:
        assert (manifest.source_vocab_size, manifest.sources) == (0, {"sound": Form.SOUND})
        assert manifest.memory.memory_length({}) == theirs.config.max_source_positions
    elif case in PICTURES:
        assert (manifest.source_vocab_size, manifest.sources) == (0, {"picture": Form.PICTURE})
        assert manifest.memory.memory_length({}) == 16 + (2 if case == "trocr-deit" else 1)
        assert manifest.resampling == ("bicubic" if case == "trocr-deit" else "bilinear")
    else:
        assert manifest.source_vocab_size == theirs.config.vocab_size
        assert manifest.sources == {"source_ids": Form.TEXT}
    assert manifest.special_ids.eos_ids == (theirs.generation_config.eos_token_id,)
    assert manifest.generation.repeats_start
    translators = "marian", "nllb", "m2m100", "mbart50"
    assert manifest.generation.splits_sentences == (manifest.kind in translators)
    assert manifest.provenance["transformers"] == transformers.__version__
    if "rows of the vocabulary" in lines[0]:  # as published models have them
        assert re.fullmatch(r"\d+ of \d+ rows of the vocabulary have no token", lines.pop(0))
    assert lines.pop(0).startswith("the tokenizer "), "published special tokens are not reported"
    assert lines[0].startswith("reading ")
    assert lines[1].startswith("the model equals transformers: worst difference of log-probabilities ")
    is_relative = manifest.kind in ("t5", "mt5", "byt5")
    assert any(target > 128 for _, _, target in proof.shapes) == is_relative


@pytest.mark.parametrize("case", slow_if(["bart", "t5", "t5gemma"], lambda case: case == "t5gemma"))
def test_padding_is_not_encoded_in_any_family(imported, case):
    """ONNX Runtime would refuse to look up the ids of the padding."""
    bundle = load_bundle(imported(case) / "bundle")
    graph = bundle.manifest.variants[Precision.FP32].graphs[Verb.ENCODE]
    session = onnxruntime.InferenceSession(bundle.path / graph.file.file)
    lengths = np.array([2, 7, 1], np.int32)
    source_ids = np.random.default_rng(0).integers(0, bundle.manifest.source_vocab_size, (3, 7))

    def encode(ids, lengths):
        sizes = {Axis.BATCH: len(lengths), Axis.SOURCE_LENGTH: 0, Axis.MEMORY_CAPACITY: 8}
        feeds = {spec.name: np.zeros(spec.shape(sizes), spec.storage) for spec in graph.inputs}
        return session.run(None, feeds | {names.SOURCE_IDS: ids, names.SOURCE_LENGTHS: lengths})

    padded_ids = np.where(np.arange(7) < lengths[:, None], source_ids, 10**9)
    together = encode(padded_ids, lengths)
    for row, length in enumerate(lengths):
        here = slice(row, row + 1)
        alone = encode(source_ids[here, :length], lengths[here])
        for one, all_rows in zip(alone, together, strict=True):
            np.testing.assert_allclose(one, all_rows[here], atol=1e-5)


def test_a_graph_hears_short_windows_as_torch_does(imported, monkeypatch):
    """Of lengths that no export has as an example, whole windows of 64 frames among them."""
    folder = imported("whisper")
    opened = open_checkpoint(folder / "checkpoint")
    family = families.family_of(opened)
    model = read_model(opened, family, families.config_of(family, opened, Limits()))
    bundle = load_bundle(folder / "bundle")
    specs = bundle.manifest.variants[Precision.FP32].graphs
    paths = {verb: bundle.path / graph.file.file for verb, graph in specs.items()}
    sounds = model.source_kind
    graphs = Graphs(paths, specs, "CPUExecutionProvider", sounds)
    for num_frames in (1, 2, 20, 33, 63, 64):
        monkeypatch.setattr(type(model), "source_kind", replace(sounds, num_frames=num_frames))
        assert 0 < worst_difference(model, graphs, ((1, 1, 6), (3, 1, 5))) < 3e-5


# slow: gated maps; the maps and products of the other families are like these
@pytest.mark.parametrize(
    "case", slow_if(["bart", "byt5", "t5gemma", "whisper", "trocr"], lambda case: case != "bart")
)
def test_int8_is_near_for_the_models_own_targets(checkpoint, case, tmp_path):
    bundle, lines = tmp_path / "bundle", []
    export_checkpoint(checkpoint(case)[0], bundle, [Precision.INT8], report=lines.append)
    assert verbs_with_levels(bundle) == {*Verb}
    assert not any("the encoder stays in float32" in line for line in lines)
    proof = load_bundle(bundle).manifest.variants[Precision.INT8].parity
    assert 0 < proof.mean_log_probability_difference < 0.08  # measured 0.002 to 0.027
    assert proof.score is None
    assert any(f" {12 if case in TEXTS else 4} sources" in line for line in lines)
    assert proof.equal_tokens > 0.9
    assert lines[-1].startswith("int8: ")


def verbs_with_levels(bundle):
    """The verbs whose graphs multiply int8 weights."""
    graphs = load_bundle(bundle).manifest.variants[Precision.INT8].graphs
    nodes = {verb: onnx.load(bundle / graph.file.file).graph.node for verb, graph in graphs.items()}
    return {verb for verb in nodes if "QuantizedLinear" in {node.op_type for node in nodes[verb]}}


def test_an_encoder_with_a_channel_that_is_far_larger_stays_in_float32(copied, tmp_path):
    """A row has one scale, so that its largest channel left too few levels to the others."""
    folder, name, lines = copied("marian"), "model.encoder.layers.0.final_layer_norm.weight", []
    change_weights(folder, lambda weights: weights[name][5].mul_(60))  # 16 times the median is the limit
    export_checkpoint(folder, tmp_path / "bundle", [Precision.INT8], report=lines.append)
    assert verbs_with_levels(tmp_path / "bundle") == {Verb.STEP, Verb.DECODE}
    assert any("the encoder stays in float32" in line for line in lines)


@pytest.mark.slow  # three graphs in float16, as of BART below
def test_float16_of_t5_keeps_large_residuals_in_its_range(tmp_path):
    """In float16 the residual of published models overflows; the graph's is smaller by a constant."""
    folder = tmp_path / "large"
    model = make_checkpoint("t5-1.1", folder, Depth(2, 1))
    with torch.no_grad():
        for stack in (model.encoder, model.decoder):
            for block in stack.block:
                block.layer[-1].DenseReluDense.wo.weight.mul_(3e4)
    model.save_pretrained(folder)
    source_ids = torch.arange(3, 23)[None]
    states = model.encoder(source_ids, output_hidden_states=True).hidden_states
    assert max(state.abs().max() for state in states[:-1]) > 65504
    manifest = export_checkpoint(folder, tmp_path / "bundle", [Precision.FP16])
    proof = manifest.variants[Precision.FP16].parity
    assert proof.max_log_probability_difference < TOLERANCES[Precision.FP16]


# slow: the same with softcapped logits; its graphs are proved above
@pytest.mark.parametrize("case", ["bart", pytest.param("t5gemma2", marks=pytest.mark.slow)])
def test_a_step_that_selects_tokens_never_selects_suppressed_ones(checkpoint, copied, case, tmp_path):
    folder, theirs = copied(case), checkpoint(case)[1]
    allowed = np.array([theirs.generation_config.eos_token_id, 5, 9])
    never_ids = sorted({*range(theirs.get_input_embeddings().num_embeddings)} - {*allowed.tolist()})
    edit(folder / "generation_config.json", suppress_tokens=never_ids)
    manifest = export_checkpoint(folder, tmp_path / "bundle", [Precision.FP16])
    step = manifest.variants[Precision.FP16].graphs[Verb.STEP]
    sizes = {Axis.BATCH: 3, Axis.CACHE_CAPACITY: 8, Axis.MEMORY_CAPACITY: 8}
    feeds = {spec.name: np.zeros(spec.shape(sizes), spec.storage) for spec in step.inputs}
    feeds |= {names.TOKEN_IDS: np.array([2, 7, 11]), names.CACHE_CAPACITY: np.array(8, np.int32)}
    feeds |= {names.MEMORY_CAPACITY: np.array(8, np.int32), names.PREVIOUS_LENGTHS: np.full(3, -1, np.int32)}
    feeds = {spec.name: feeds[spec.name] for spec in step.inputs}  # merged attention reads no capacities
    session = onnxruntime.InferenceSession(tmp_path / "bundle" / step.file.file)
    logits, token_ids = session.run([names.LOGITS, names.out(names.TOKEN_IDS)], feeds)
    assert np.isfinite(logits).all()
    assert {*logits.argmax(axis=1).tolist()} <= {*never_ids}
    np.testing.assert_array_equal(token_ids[:, 0], allowed[logits[:, allowed].argmax(axis=1)])


def test_a_step_that_chooses_tokens_never_chooses_suppressed_ones(checkpoint, copied, tmp_path):
    """In int8, also beside a row for which the step writes logits; every row gets the same there."""
    folder = copied("bart")
    theirs, eos_id = checkpoint("bart")[1], 2
    never_ids = {*range(theirs.config.vocab_size)} - {eos_id, *range(5, 60, 3)}
    edit(folder / "generation_config.json", suppress_tokens=sorted(never_ids))
    export_checkpoint(folder, tmp_path / "bundle", [Precision.INT8])
    config = RunnerConfig("cpu", Precision.INT8, num_threads=1, max_slots=8)
    runner = OnnxRunner(load_bundle(tmp_path / "bundle"), config)
    source = np.array([7, 11, 30, eos_id])
    plain = Request("r", {names.SOURCE_IDS: source}, len(source), 6, arrival=0.0)
    beams = [replace(plain, beam=Beam(3, alpha=0.0)), replace(plain, beam=Beam(2), num_hypotheses=2)]
    answers = []
    for beside in ([], [replace(plain, sampling=Sampling(1.0, 0, 1.0, 0.0, seed=1))]):
        driver = Driver(runner)
        given = [replace(request) for request in (plain, *beams)]
        for request in (*beside, *given):
            driver.submit(request)
            driver.turn(0 if beside else 10)
        driver.finish()
        answers.append([driver.results[request].hypotheses for request in given])
    assert answers[0] == answers[1]
    token_ids = {each for hypotheses in answers[0] for one in hypotheses for each in one.token_ids}
    assert token_ids
    assert not token_ids & never_ids


@pytest.mark.slow  # the float32 graphs are proved above
@pytest.mark.parametrize("case", ["t5gemma", "t5gemma2", "whisper", "trocr-deit"])
def test_float16_is_near(checkpoint, case, tmp_path):
    manifest = export_checkpoint(checkpoint(case)[0], tmp_path / "bundle", [Precision.FP16])
    proof = manifest.variants[Precision.FP16].parity
    assert 0 < proof.max_log_probability_difference < min(TOLERANCES[Precision.FP16], 0.05)


def test_the_vocabulary_of_t5gemma_is_that_of_its_halves(checkpoint, copied):
    folder = copied("t5gemma")
    edit(folder / "config.json", vocab_size=10)  # which nothing in transformers reads
    reported_before_weights(folder)
    assert (
        config_of(folder).source_vocab_size == checkpoint("t5gemma")[1].get_input_embeddings().num_embeddings
    )


def test_limits_are_those_of_the_checkpoint_or_those_given(imported, quick_checkpoint, tmp_path):
    manifest = load_bundle(imported("bart") / "bundle").manifest
    assert (manifest.max_source_length, manifest.max_target_length) == (64, 64)
    manifest = export_checkpoint(quick_checkpoint("bart"), tmp_path / "bundle", FP32, limits=Limits(32, 48))
    assert (manifest.max_source_length, manifest.max_target_length) == (32, 48)


def reported_before_weights(folder):
    """Returns the lines of an export, which is ended when it begins to read weights."""
    lines: list[str] = []

    def stop(line: str) -> None:
        lines.append(line)
        if line.startswith("reading"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_checkpoint(folder, folder / "bundle", FP32, report=stop)
    return lines


def config_of(folder):
    opened = open_checkpoint(folder)
    return families.config_of(families.family_of(opened), opened, Limits())


def refused(folder, match):
    """The export refuses the checkpoint before it reads weights, and leaves nothing behind."""
    with pytest.raises(CheckpointError, match=match):
        export_checkpoint(folder, folder.parent / "bundle", FP32, report=refuse_to_go_on)
    assert [*folder.parent.iterdir()] == [folder]


def refuse_to_go_on(line):
    if not line.startswith(("reading", "not taken over", "the tokenizer ")) and "rows of" not in line:
        raise AssertionError(f"the export went on to {line!r}")


def test_a_model_that_differs_from_transformers_is_not_exported(checkpoint, tmp_path, monkeypatch):
    wrong = families.PublishedFamily(
        "marian", "marian", BART, PositionRule("halves", offset=1), is_pre_norm=False
    )
    monkeypatch.setattr(families, "FAMILIES", (wrong,))
    with pytest.raises(ExportError, match="differs from transformers by"):
        export_checkpoint(checkpoint("marian")[0], tmp_path / "bundle", FP32, report=refuse_to_go_on)
    assert list(tmp_path.iterdir()) == []


def test_padding_that_sources_do_not_have_is_refused(checkpoint, copied):
    """As of a Marian model with separate vocabularies, whose settings name the padding of targets."""
    folder = copied("marian-separate")
    vocab_size = checkpoint("marian-separate")[1].config.vocab_size
    for file in ("config.json", "generation_config.json"):
        edit(folder / file, pad_token_id=vocab_size)
    refused(folder, f"pad_token_id is {vocab_size}")


@pytest.mark.parametrize("case", ["bart", "mbart", "nllb", "trocr"])  # their targets begin differently
def test_targets_that_differ_from_generate_are_refused(checkpoint, tmp_path, monkeypatch, case):
    make_pairs, told = exporter.make_pairs, []

    def refuse_after_proof(line):
        told.append(line)
        if line.startswith("the model equals"):
            raise KeyboardInterrupt

    def export():
        export_checkpoint(checkpoint(case)[0], tmp_path / "bundle", FP32, report=refuse_after_proof)

    with pytest.raises(KeyboardInterrupt):
        export()
    for change in (lambda ids: [*ids[:1], ids[1] ^ 1, *ids[2:]], lambda ids: ids[:2]):
        changed = lambda *given: [(source, change(ids)) for source, ids in make_pairs(*given)]  # noqa: B023, E731
        monkeypatch.setattr(exporter, "make_pairs", changed)
        with pytest.raises(ExportError, match="generate of transformers"):
            export()


V1 = "memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"
V2 = "memory.max", "memory.current", "memory.stat"


@pytest.mark.parametrize(
    ("names", "contents", "free"),
    [
        (V2, ("max\n", "900\n", "active_file 5\n"), 4096),
        (V2, ("1000", "900", "anon 500\nshmem 9\n"), 100),
        (V2, ("1000", "900", "file 309\nactive_file 200\ninactive_file 100\nslab_reclaimable 50\n"), 450),
        (V1, ("1000", "900", "active_file 1\ntotal_active_file 200\ntotal_inactive_file 100\n"), 400),
        (V1, ("9223372036854771712", "1", "active_file 5\n"), 4096),
    ],
)
def test_memory_that_the_kernel_can_reclaim_is_free(tmp_path, names, contents, free):
    """A container that has read many files has filled its limit with copies of them."""
    (tmp_path / "meminfo").write_text("MemTotal: 8 kB\nMemAvailable: 4 kB\n")
    (tmp_path / "memory").mkdir()
    for name, content in zip(names, contents, strict=True):
        (tmp_path / name).write_text(content)
    assert exporter.available_memory(tmp_path / "meminfo", tmp_path) == free
    assert exporter.available_memory(tmp_path / "none", tmp_path / "none") is None


@pytest.mark.parametrize("resource", ["memory", "disk"])
def test_too_little_room_is_refused_before_long_work(copied, monkeypatch, resource):
    if resource == "memory":
        monkeypatch.setattr(exporter, "available_memory", lambda: 1 << 20)
        match = r"1\.\d GB of memory, and 0\.0 GB"
    else:
        monkeypatch.setattr(exporter.shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
        match = r"0\.0 GB on disk"
    refused(copied("bart"), match)


def test_what_float32_explains_grows_with_depth_width_and_range():
    """The value for the sizes of Whisper tiny.en, by hand: 2^-24 √(20 · 1536) · 23.5 · √(2 ln 10^6)."""

    def sizes(num_layers, d_ff):
        stack = SimpleNamespace(num_layers=num_layers, d_ff=d_ff)
        return SimpleNamespace(encoder=stack, decoder=stack)

    logits = torch.linspace(-23.5, 0, 10**6).reshape(10, 100, 1000)
    tiny = reference.largest_rounding(sizes(4, 1536), [logits])
    assert tiny == pytest.approx(1.29e-3, rel=0.01)
    assert reference.largest_rounding(sizes(16, 1536), [logits]) == pytest.approx(2 * tiny)
    assert reference.largest_rounding(sizes(4, 6144), [logits]) == pytest.approx(2 * tiny)
    assert reference.largest_rounding(sizes(4, 1536), [2 * logits]) == pytest.approx(2 * tiny)


def test_settings_of_generate_come_along_and_unknown_ones_are_reported(imported, quick_checkpoint, tmp_path):
    imported("whisper")  # before another one's graphs are taken
    edited = {
        "bart": {"num_beams": 4, "length_penalty": 2.0, "max_length": 60, "do_sample": True},
        "whisper": {"alignment_heads": [[9, 0]], "language": "fr", "task": "sing"},
    }
    lines, generations = {}, {}
    for case, settings in edited.items():
        folder, lines[case] = shutil.copytree(quick_checkpoint(case), tmp_path / case), []
        edit(folder / "generation_config.json", **settings)
        manifest = export_checkpoint(folder, folder / "bundle", FP32, report=lines[case].append)
        generations[case] = manifest.generation
    generation = generations["bart"]
    assert (generation.beam_size, generation.length_penalty, generation.max_new_tokens) == (4, 2.0, 59)
    assert generation.length_penalty_formula == "power"
    assert "do_sample" in lines["bart"][0]
    for line, data in zip(lines["whisper"], ("[9, 0] [0, 3]", "'fr' detected", "'sing' tr"), strict=False):
        assert all(datum in line for datum in re.findall(r"\[.*?\]|\S+", data)), line


@pytest.mark.parametrize("case", ["nllb", "t5"])
def test_special_tokens_of_a_fine_tuning_are_reported(copied, case):
    folder = copied(case)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    marks = [f"<task{number}>" for number in range(7)]
    tokenizer.add_special_tokens({"extra_special_tokens": ["<extra_id_7>", "kor_Hang", "<unk>", *marks]})
    tokenizer.save_pretrained(folder)
    edit(folder / "config.json", vocab_size=len(tokenizer))
    lines = reported_before_weights(folder)
    names = [*marks[:5], "…"] if case == "nllb" else ["kor_Hang", *marks[:4], "…"]
    assert lines[0].endswith(": " + ", ".join(names))


def test_a_limit_on_sounds_is_refused_and_one_on_their_texts_is_not(quick_checkpoint, tmp_path):
    folder = quick_checkpoint("whisper")
    with pytest.raises(CheckpointError, match="--max-source-length"):
        export_checkpoint(folder, tmp_path / "bundle", FP32, limits=Limits(20, 0))
    manifest = export_checkpoint(folder, tmp_path / "bundle", FP32, limits=Limits(0, 24))
    assert manifest.max_target_length == 24


CONFIG, PROCESSOR = "config.json", "preprocessor_config.json"
ABSENT = object()  # None is written as null
SPECTROGRAM = {"feature_size": 12, "sampling_rate": 16_000}
OTHER_NUMBERS = (
    {"size": {"height": 32, "width": 64}},
    {"size": {"shortest_edge": 32}},
    {"do_center_crop": True, "crop_size": 24},
    {"do_resize": False},
    {"do_rescale": False},
    {"image_std": [0.5, 0.0, 0.5]},
    {"image_processor_type": "DonutImageProcessor"},
)


@pytest.mark.parametrize(
    ("case", "place", "settings", "match"),
    [
        ("t5", [CONFIG], {"d_ff": 48}, r"wi.weight .*\[40, 32\], .*\[48, 32\]"),
        ("t5", [CONFIG], {"feed_forward_proj": "laplace"}, "'laplace'"),
        ("t5", [CONFIG], {"d_kv": 12}, "12 .* multiple of 8"),  # by the operator of attention
        ("t5", [CONFIG], {"d_kv": ABSENT}, "lacks d_kv"),
        ("t5gemma", [CONFIG, "decoder"], {"rope_parameters": {"rope_type": "yarn"}}, "'yarn'"),
        ("t5gemma", [CONFIG, "decoder"], {"layer_types": ["chunked_attention"]}, "chunked_attention"),
        ("t5gemma", [CONFIG, "decoder"], {"attn_logit_softcapping": 9.0}, "attn_logit_softcapping differs"),
        ("t5gemma", [CONFIG, "decoder"], {"max_position_embeddings": ABSENT}, "lacks max_position_emb"),
        ("t5gemma", [CONFIG, "decoder"], {"attention_bias": True}, "attention_bias"),
        (
            "whisper",
            ["processor_config.json", "feature_extractor"],
            {"sampling_rate": 8_000},
            "_rate is 8000",
        ),
        ("whisper", [PROCESSOR], {"sampling_rate": 8_000}, "sampling_rate is 8000"),
        ("whisper", [PROCESSOR], {"hop_length": 80}, "hop_length is 80"),
        ("whisper", [PROCESSOR], {"n_fft": 512}, "n_fft is 512"),
        ("whisper", [PROCESSOR], {"feature_size": 80}, "feature_size is 80"),
        ("whisper", [PROCESSOR], {"dither": 1e-4}, "dither is 0.0001"),
        ("whisper", [PROCESSOR], {"do_normalize": True}, "do_normalize is True"),
        *(("trocr", [PROCESSOR], settings, "other numbers than .* 32 × 32") for settings in OTHER_NUMBERS),
        ("trocr", [PROCESSOR], {"resample": 5}, r"resample .* 5; .*0 \(nearest\), .*3 \(bicubic\)"),
        ("trocr", [PROCESSOR], {"image_mean": [None, None, None]}, "image_mean"),
        ("trocr", [PROCESSOR], {"rescale_factor": 0}, "rescale_factor"),
        ("trocr", [PROCESSOR], {"image_processor_type": "NoImageProcessor"}, "processor cannot be read"),
        ("trocr", [CONFIG, "encoder"], {"image_size": "x"}, "image_size .* x,"),
        ("trocr", [CONFIG, "encoder"], {"patch_size": 8.5}, "patch_size .* 8.5,"),
        ("trocr", [CONFIG, "encoder"], {"patch_size": 7}, "image_size is 32, .* 7 "),
        ("trocr", [CONFIG, "encoder"], {"num_channels": 1}, "num_channels is 1"),
        ("trocr", [CONFIG, "encoder"], {"num_hidden_layers": "x"}, "num_layers is 'x'"),
        ("trocr", [CONFIG, "encoder"], {"hidden_size": -48}, "config.json has a size"),
        ("trocr", [CONFIG, "encoder"], {"layer_norm_eps": "x"}, "epsilon .*'x'"),
        ("trocr", [CONFIG, "encoder"], {"model_type": "swin"}, "swin.*vit or deit, .*trocr"),
        ("trocr", [CONFIG, "decoder"], {"model_type": "gpt2"}, "gpt2.*vit or deit, .*trocr"),
        ("trocr", [CONFIG, "decoder"], {"decoder_layers": None}, "num_layers is None"),
        (
            "trocr",
            [CONFIG, "decoder"],
            {"d_model": 40, "decoder_attention_heads": 5},
            "asks for|has the shape",
        ),
        ("trocr", [CONFIG, "decoder"], {"cross_attention_hidden_size": None}, "enc_to_dec_proj"),
    ],
)
def test_settings_that_are_damaged_or_not_supported_are_refused(copied, case, place, settings, match):
    folder, (name, *half) = copied(case), place
    content = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
    part = content.setdefault(half[0], {}) if half else content
    part.update((SPECTROGRAM if case == "whisper" else {}) | settings)
    for setting in [one for one in settings if settings[one] is ABSENT]:
        del part[setting]
    (folder / name).write_text(json.dumps(content))
    refused(folder, match)


def test_biases_of_t5gemmas_attention_are_refused(copied):
    folder = copied("t5gemma")
    for half in ("encoder", "decoder"):
        edit(folder / CONFIG, half, attention_bias=True)
    refused(folder, "attention_bias")


def test_the_usual_spectrogram_is_accepted(copied):
    folder = copied("whisper")
    transformers.WhisperFeatureExtractor(feature_size=12).save_pretrained(folder)
    assert config_of(folder).media.num_bands == 12
    (folder / PROCESSOR).write_text("[]")
    refused(folder, PROCESSOR)


@pytest.mark.parametrize(
    "settings",
    [
        {"do_center_crop": True, "crop_size": 32},
        {"do_normalize": False},
        {"size": 32},
        {"rescale_factor": 1 / 127.5},
        *({"resample": number} for number in (0, 1, 3)),
    ],
)
def test_settings_of_pictures_that_change_nothing_or_are_known_are_accepted(copied, settings):
    folder = copied("trocr")
    edit(folder / PROCESSOR, **settings)
    pictures = config_of(folder).media
    expected = (0.0, 1.0) if settings.get("do_normalize") is False else (0.5, 0.5)
    scale = 1 / settings.get("rescale_factor", 1 / 255)
    assert (pictures.mean[0] / scale, pictures.deviation[0] / scale) == pytest.approx(expected)


def test_settings_of_generate_in_the_decoder_count_where_there_is_no_file_of_them(copied):
    folder = copied("trocr")
    (folder / "generation_config.json").unlink()
    edit(folder / CONFIG, num_beams=4, eos_token_id=None)
    ids = {"bos_token_id": 0, "decoder_start_token_id": 2, "eos_token_id": 2, "pad_token_id": 1}
    assert open_checkpoint(folder).generation == {**ids, "num_beams": 4}


def test_a_tuned_model_is_written_only_if_its_bundle_can_be(tmp_path, monkeypatch):
    monkeypatch.setattr(exporter, "write_published", lambda *_: pytest.fail("the model was written"))
    with pytest.raises(ExportError, match="--overwrite"):
        exporter.export_tuned(SimpleNamespace(), tmp_path, FP32)
