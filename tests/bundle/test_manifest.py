"""A bundle is refused whole when anything in it is wrong, and every problem is named."""

import hashlib
import io as stdlib_io
import json
import os
import re
import shutil
import subprocess
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from seq2seq_serve.bundle.manifest import (
    MAX_MANIFEST_BYTES,
    MAX_TOKENIZER_BYTES,
    BundleError,
    Choice,
    Extent,
    LengthBound,
    LengthRule,
    Manifest,
    Timestamps,
    TokenTemplate,
    VariantFiles,
    bundle_version,
    file_spec,
    io,
    load_bundle,
)
from seq2seq_serve.bundle.manifest.check import contradictions
from seq2seq_serve.bundle.names import FORMAT_VERSION, SOURCE_IDS, Axis, Form, Precision, Verb
from seq2seq_serve.training.config import BOS_ID, EOS_ID


@pytest.fixture
def damaged(bundle_path: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(bundle_path, tmp_path / "damaged"))


def edit(path: Path, *keys: str, value) -> None:
    """Write another value into the manifest."""
    manifest = json.loads((path / "manifest.json").read_text())
    place = manifest
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    write(path, manifest)


def write(path: Path, manifest: dict) -> None:
    """Write a manifest with a checksum that is right."""
    raw = json.dumps(manifest).encode()
    (path / "manifest.json").write_bytes(raw)
    (path / "manifest.sha256").write_text(f"{hashlib.sha256(raw).hexdigest()}  manifest.json\n")


def version_problem(version: object) -> str:
    return (
        f"format_version is {version!r}, and this program reads format_version {FORMAT_VERSION}: "
        "export the run again with this version of `python -m export`"
    )


def problems_of(path: Path) -> tuple[str, ...]:
    with pytest.raises(BundleError, match=re.escape(str(path))) as caught:
        load_bundle(path)
    for problem in caught.value.problems:
        assert problem in str(caught.value)
    return caught.value.problems


def only_problem(path: Path, *data: str) -> None:
    """A bundle has one problem, whose line has these names and values."""
    [problem] = problems_of(path)
    assert all(datum in problem for datum in data), problem


def test_a_whole_bundle_is_loaded_with_all_that_the_server_needs(bundle_path, random_trained):
    bundle = load_bundle(bundle_path)
    manifest, config = bundle.manifest, random_trained.config
    assert manifest.format_version == FORMAT_VERSION
    assert manifest.source_vocab_size == manifest.target_vocab_size == config.vocab_size
    assert (manifest.max_source_length, manifest.max_target_length) == (48, 48)
    assert manifest.template == TokenTemplate(start=(BOS_ID,), source_suffix=(EOS_ID,))
    assert manifest.special_ids.eos_ids == (EOS_ID,)
    assert manifest.variants.keys() == {Precision.FP32, Precision.INT8, Precision.INT4}
    for variant in manifest.variants.values():
        assert variant.graphs.keys() == set(Verb)
    text = "오늘은 금요일입니다"
    assert bundle.source_tokenizer.encode_source(text) == random_trained.tokenizer.encode_source(text)
    assert bundle.target_tokenizer.vocab_size == config.vocab_size


class InTwoPieces:
    """The second piece of the file comes first in memory."""

    def __init__(self, graphs, num_bytes):
        self.graphs, self.num_bytes = graphs, num_bytes + 100
        self.extents = [Extent(2500, self.num_bytes - 2500), Extent(num_bytes - 2500, 0)]
        self.seen = []

    def finish(self, content, wait):
        for num_bytes, part in ((1, content[-2500:-2499]), (2500, content[-2499:]), (None, content[:-2600])):
            wait(num_bytes or self.num_bytes - 100)
            self.seen.append(bytes(part))
            part[:] = bytes(len(part))  # what is checked may be written over
        return VariantFiles(self.graphs, memoryview(b"other weights"))


def test_weights_are_used_while_they_are_read(bundle_path, damaged, monkeypatch):
    monkeypatch.setattr(io, "_READ_BYTES", 1000)
    content, layouts = (bundle_path / "int8" / "weights.bin").read_bytes(), []

    def two_pieces(graphs, num_bytes):
        layouts.append(InTwoPieces(graphs, num_bytes))
        return layouts[-1]

    bundle = load_bundle(damaged)
    assert bundle.read_variant(Precision.INT8, two_pieces).weights == b"other weights"
    assert layouts[0].seen == [content[:1], content[1:2500], content[2500:]]
    broken = bytearray(content)
    broken[-1] ^= 1
    (damaged / "int8" / "weights.bin").write_bytes(broken)
    with pytest.raises(BundleError, match=r"weights\.bin was changed"):
        bundle.read_variant(Precision.INT8, two_pieces)


def test_nobody_waits_for_weights_whose_file_cannot_be_read(damaged, monkeypatch):
    class Unreadable(stdlib_io.BytesIO):
        num_reads = 0

        def readinto(self, part):
            self.num_reads += 1
            if self.num_reads == 2:
                raise OSError("the disk is gone")
            return super().readinto(part)

    path, opened = damaged / "int8" / "weights.bin", Path.open
    content = path.read_bytes()
    monkeypatch.setattr(io, "_READ_BYTES", 1000)

    def open_or_fail(self, *args, **options):
        return Unreadable(content) if self == path else opened(self, *args, **options)

    monkeypatch.setattr(Path, "open", open_or_fail)

    bundle = load_bundle(damaged, checks_content=False)
    with pytest.raises(OSError, match="the disk is gone"):
        bundle.read_variant(Precision.INT8, InTwoPieces)


def test_a_file_is_checked_whole_though_it_is_read_in_parts(bundle_path, damaged, monkeypatch):
    monkeypatch.setattr(io, "_READ_BYTES", 1000)
    files = load_bundle(damaged).read_variant(Precision.INT8)
    path = damaged / "int8" / "weights.bin"
    assert bytes(files.weights) == path.read_bytes()
    for place in (0, 1500, len(files.weights) - 1):
        content = bytearray((bundle_path / "int8" / "weights.bin").read_bytes())
        content[place] ^= 1
        path.write_bytes(content)
        with pytest.raises(BundleError, match=r"weights\.bin was changed"):
            load_bundle(damaged, checks_content=False).read_variant(Precision.INT8)


def test_a_copy_has_the_same_version_and_another_manifest_another_one(bundle_path, damaged):
    assert load_bundle(damaged).version == load_bundle(bundle_path).version
    edit(damaged, "provenance", "commit", value="another")
    assert load_bundle(damaged).version != load_bundle(bundle_path).version


FILES = ["tokenizer.json", "fp32/weights.bin", "int8/step.onnx"]


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="there is no sha256sum")
def test_the_checksum_is_one_that_sha256sum_reads(bundle_path, damaged):
    command = ["sha256sum", "--check", "--strict", "manifest.sha256"]
    assert subprocess.run(command, cwd=bundle_path, capture_output=True).returncode == 0
    (damaged / "manifest.sha256").unlink()
    assert problems_of(damaged) == ("manifest.sha256 is missing",)


@pytest.mark.parametrize("file", FILES)
def test_a_changed_byte_is_found(file, damaged):
    content = bytearray((damaged / file).read_bytes())
    content[len(content) // 2] ^= 1
    (damaged / file).write_bytes(content)
    assert any(
        re.fullmatch(rf"{file} was changed: its sha256 is .{{12}}…, not .{{12}}…", problem)
        for problem in problems_of(damaged)
    )


def test_a_folder_without_a_manifest_says_how_to_make_one(damaged):
    (damaged / "manifest.json").unlink()
    only_problem(damaged, "manifest.json", "`python -m export`")
    (damaged / "config.json").write_text('{"model_type": "marian"}')
    only_problem(damaged, "manifest.json", "`python -m export huggingface`")
    version = damaged.parent / "2"  # where a server takes a folder of versions, and `--draft` does not
    version.mkdir()
    (version / "manifest.json").touch()
    only_problem(damaged.parent, "manifest.json", "name one of the bundles")


def test_a_manifest_beyond_the_limit_is_refused_unread(damaged):
    """One of 200 MB took 2.9 GB to be refused."""
    os.truncate(damaged / "manifest.json", 200 << 20)
    tracemalloc.start()
    only_problem(damaged, "manifest.json", f" {MAX_MANIFEST_BYTES} ")
    assert bundle_version(damaged) == ""
    assert tracemalloc.get_traced_memory()[1] < 3 * MAX_MANIFEST_BYTES
    tracemalloc.stop()


def test_a_tokenizer_beyond_the_limit_is_refused_unread(damaged):
    size_bytes = MAX_TOKENIZER_BYTES + 1
    os.truncate(damaged / "tokenizer.json", size_bytes)
    for side in ("source_tokenizer", "target_tokenizer"):
        edit(damaged, side, "size_bytes", value=size_bytes)
    tracemalloc.start()
    only_problem(damaged, "tokenizer.json", f" {size_bytes} ", f" {MAX_TOKENIZER_BYTES} ")
    assert tracemalloc.get_traced_memory()[1] < 3 * MAX_MANIFEST_BYTES
    tracemalloc.stop()


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[: len(content) // 2],
        lambda content: content[:-20],
        lambda content: b"[" * 200_000,
        lambda content: b'{"kind": "\xff"}',
    ],
    ids=["empty", "half", "cut off", "nested beyond reason", "not UTF-8"],
)
def test_a_manifest_that_is_not_json_is_found(damage, damaged):
    (damaged / "manifest.json").write_bytes(damage((damaged / "manifest.json").read_bytes()))
    only_problem(damaged, "manifest.json is not JSON")


@pytest.mark.parametrize("version", [1, FORMAT_VERSION + 1, "2", None])
def test_another_format_version_is_refused_with_both_numbers_and_what_to_do(version, damaged):
    edit(damaged, "format_version", value=version)
    # A newer manifest may have fields that this program does not know: they are not worth a word.
    edit(damaged, "future", value=True)
    assert problems_of(damaged) == (version_problem(version),)


def test_unknown_missing_and_wrong_fields_are_all_named(damaged):
    edit(damaged, "colour", value="red")
    edit(damaged, "special_ids", "eos_ids", value="two")
    edit(damaged, "variants", "int8", "graphs", "step", "file", value={"file": "int8/step.onnx"})
    manifest = json.loads((damaged / "manifest.json").read_text())
    del manifest["memory"]
    write(damaged, manifest)
    assert sorted(problems_of(damaged)) == [
        "manifest.json: colour is unknown",
        "manifest.json: memory is missing",
        "manifest.json: special_ids.eos_ids is 'two', and must be a list",
        "manifest.json: variants.int8.graphs.step.file.sha256 is missing",
        "manifest.json: variants.int8.graphs.step.file.size_bytes is missing",
    ]


@pytest.mark.parametrize(
    ("keys", "value", "problem"),
    [
        ("sizes d_head", 12, "sizes.d_head is 12"),
        ("frames start", [], "manifest.json: frames.start is []"),
        ("special_ids eos_ids", [], "manifest.json: special_ids.eos_ids is []"),
        ("target_vocab_size", 0, "manifest.json: target_vocab_size is 0"),
        ("max_source_length", 0, "manifest.json: max_source_length is 0"),
        ("max_target_length", 0, "max_target_length is 0"),
        ("memory stride", 0, "manifest.json: memory.stride is 0"),
        ("memory constant", 0, "manifest.json: memory.constant is 0"),
        ("variants", {}, "manifest.json: variants is {}"),
        ("generation suppressed_token_ids", [EOS_ID], "generation.suppressed_token_ids has all eos_ids"),
        ("generation forbidden_sequences", [[5, 6], [5]], "manifest.json: generation.forbidden_sequences.1"),
        ("target_vocab_size", 200, "tokenizer.json has tokens up to the id 299"),
        ("length_bound", {"ratio": 0, "constant": 5}, "manifest.json: length_bound.ratio is 0"),
        ("length_bound", {"ratio": 2, "constant": -1}, "manifest.json: length_bound.constant is -1"),
        ("variants fp32 graphs step file file", "../step.onnx", "../step.onnx lies outside the bundle"),
    ],
)
def test_a_wrong_value_is_named(keys, value, problem, damaged):
    edit(damaged, *keys.split(), value=value)
    only_problem(damaged, problem)


@pytest.mark.parametrize(
    ("record", "name"),
    [
        ("special_ids", "eos_ids"),
        ("frames", "start"),
        ("frames", "forced"),
        ("frames", "source_prefix"),
        ("frames", "source_suffix"),
        ("generation", "suppressed_token_ids"),
        ("generation", "begin_suppressed_token_ids"),
    ],
)
def test_a_token_outside_the_vocabulary_is_named(record, name, damaged, random_trained):
    vocab_size = random_trained.config.vocab_size
    for token_id in (vocab_size, -1):
        edit(damaged, record, name, value=[token_id])
        only_problem(damaged, f"{record}.{name} has the id {token_id},", str(vocab_size))


def test_a_choice_that_does_not_exist_is_named(damaged):
    edit(damaged, "frames", "forced", value=["target_language"])
    only_problem(damaged, "frames.forced", "'target_language'", "choices")
    edit(damaged, "choices", value={"target_language": {"ids": {"ko": 5}, "default": "en"}})
    only_problem(damaged, "choices.target_language has the default 'en'")


def test_times_that_a_target_cannot_have_are_named(damaged, random_trained):
    times = {"first_id": 50, "last_id": 60, "step_seconds": 0.02, "off_id": 9}
    edit(damaged, "frames", "start", value=[7, 8, 9])
    edit(damaged, "timestamps", value=times)
    assert load_bundle(damaged).manifest.timestamps == Timestamps(50, 60, 0.02, 9, None)
    for name, value, problem in (
        ("off_id", 8, "timestamps.off_id is 8"),
        ("step_seconds", 0.0, "manifest.json: timestamps.step_seconds is 0.0"),
        ("last_id", 1000, "timestamps.last_id has the id 1000"),
        ("last_id", 49, "timestamps.last_id is 49"),
    ):
        edit(damaged, "timestamps", value=times | {name: value})
        only_problem(damaged, problem)
    edit(damaged, "timestamps", value=times)
    edit(damaged, "frames", "start", value=[9])
    only_problem(damaged, "timestamps.off_id is 9")


def test_sentences_are_padded_with_zero(damaged):
    """Batches of stories, in the runner and from callers, have zeros after the words."""
    edit(damaged, "special_ids", "pad_id", value=3)
    load_bundle(damaged)
    edit(damaged, "sources", SOURCE_IDS, value="sentences")
    assert any("special_ids.pad_id is 3" in problem for problem in problems_of(damaged))


def test_a_model_whose_targets_are_full_before_their_first_token_is_refused(damaged):
    edit(damaged, "frames", "start", value=[5, 6, 7])
    edit(damaged, "frames", "forced", value=[8])
    edit(damaged, "max_target_length", value=3)
    only_problem(damaged, "max_target_length is 3", "at least 4")
    edit(damaged, "max_target_length", value=4)
    load_bundle(damaged)


@pytest.fixture(scope="module")
def whisper_manifest(whisper_path) -> Manifest:
    return load_bundle(whisper_path / "bundle").manifest


def changed(manifest: Manifest, *, template: dict | None = None, **changes) -> list[str]:
    """The contradictions of a manifest with other values."""
    return contradictions(replace(manifest, template=replace(manifest.template, **template or {}), **changes))


def test_a_sound_is_the_only_source_and_has_a_fixed_size_or_windows(whisper_manifest):
    assert changed(whisper_manifest) == []
    problems = changed(whisper_manifest, sources={"sound": Form.SOUND, "question": Form.TEXT})
    assert "sound, question" in problems[0]
    rule, varying = whisper_manifest.memory, Axis.SOUND_LENGTH
    fixed = replace(rule, axis=None)
    assert with_sound(whisper_manifest, (12, 64), fixed) == [], "of earlier versions"
    for axes, memory in (
        ((12, "source_length"), rule),
        ((varying, 64), rule),
        ((12, 64), rule),
        ((12, varying), fixed),
        ((12, varying), replace(rule, axis=0)),
        ((12, varying), replace(rule, constant=None)),
    ):
        [problem] = with_sound(whisper_manifest, axes, memory)
        assert f"fp32: sources.sound is a sound of {axes}, and" in problem


def with_sound(manifest: Manifest, axes: tuple, memory: LengthRule) -> list[str]:
    variant = manifest.variants[Precision.FP32]
    encode = variant.graphs[Verb.ENCODE]
    inputs = tuple(
        replace(spec, axes=(*spec.axes[:1], *axes)) if spec.name == "sound" else spec
        for spec in encode.inputs
    )
    graphs = variant.graphs | {Verb.ENCODE: replace(encode, inputs=inputs)}
    return changed(manifest, variants={Precision.FP32: replace(variant, graphs=graphs)}, memory=memory)


def test_a_shorter_sound_takes_fewer_positions(whisper_manifest):
    rule = whisper_manifest.memory
    assert (rule.memory_length({}), rule.whole_length) == (32, 64)
    for num_frames, expected in ((64, 32), (33, 17), (2, 1), (1, 1)):
        assert rule.memory_length_of({"sound": np.zeros((12, num_frames))}) == expected
    assert replace(rule, axis=None).memory_length_of({"sound": np.zeros((12, 64))}) == 32


def test_a_language_is_detected_only_among_the_start_tokens(whisper_manifest):
    start, language = whisper_manifest.template.start, "source_language"
    assert language in start
    for name in ("forced", "source_prefix", "source_suffix"):
        [problem] = changed(whisper_manifest, template={name: (language,)})
        assert problem.startswith(f"frames.{name} has the place 'source_language'")
    for wrong in ((language, *start[2:]), (*start[:2], language, *start[2:])):
        [problem] = changed(whisper_manifest, template={"start": wrong})
        assert problem.startswith(f"frames.start is {wrong}")
    spoken = replace(whisper_manifest.choices[language], default="ko")
    choices = whisper_manifest.choices | {language: spoken}
    assert changed(whisper_manifest, template={"start": (language, *start[2:])}, choices=choices) == []
    choices = {language: whisper_manifest.choices[language], "task": Choice({"sing": 5})}
    assert changed(whisper_manifest, template={"forced": ("task",)}, choices=choices) == [], (
        "a request names everything else"
    )


def test_a_choice_that_no_request_has_is_refused(whisper_manifest):
    """A request could not name it, and failed with INTERNAL."""
    choices = {**whisper_manifest.choices, "style": Choice({"formal": 5})}
    [problem] = changed(whisper_manifest, choices=choices)
    assert "'style'" in problem


def test_a_bound_grows_with_the_source_and_leaves_a_token_at_least(damaged):
    edit(damaged, "length_bound", value={"ratio": 1.5, "constant": 4})
    bound = load_bundle(damaged).manifest.length_bound
    assert bound == LengthBound(1.5, 4)
    assert [bound.max_new_tokens(length) for length in (1, 2, 10)] == [5, 7, 19]
    assert LengthBound(0.1, 0).max_new_tokens(1) == 1


def test_a_bundle_without_a_graph_is_refused(damaged):
    manifest = json.loads((damaged / "manifest.json").read_text())
    del manifest["variants"]["int8"]["graphs"]["decode"]
    write(damaged, manifest)
    only_problem(damaged, "int8: ", "no decode graph")
    del manifest["variants"]["int8"]["graphs"]["step"]
    write(damaged, manifest)
    only_problem(damaged, "int8 ", "graphs step")


def test_memory_that_no_source_fills_is_refused(damaged):
    edit(damaged, "memory", "source", value="pixels")
    assert {problem.partition(": ")[2].partition(",")[0] for problem in problems_of(damaged)} == {
        "memory.source is 'pixels'"
    }


def test_sources_that_the_graphs_do_not_read_are_refused(damaged):
    edit(damaged, "sources", "source_ids", value="picture")
    edit(damaged, "sources", "question", value="text")
    assert {problem.partition(": ")[2].rpartition(", and")[0] for problem in problems_of(damaged)} == {
        "sources are source_ids, question",
        "sources.source_ids is picture, which is uint8 of 3 axes",
    }


def test_state_that_encode_does_not_begin_is_refused_and_so_is_a_decode_graph_beside_it(damaged):
    manifest = json.loads((damaged / "manifest.json").read_text())
    step = manifest["variants"]["int8"]["graphs"]["step"]
    state = {"name": "state_h", "dtype": "float32", "axes": ["batch", 8], "role": "state"}
    step["inputs"].append(state)
    step["outputs"].append(state | {"name": "state_h_out"})
    write(damaged, manifest)
    first, second = problems_of(damaged)
    assert "['state_h']" in first
    assert "leave decode out" in second


def test_a_link_that_leads_outside_is_refused(damaged, tmp_path):
    (damaged / "tokenizer.json").rename(tmp_path / "elsewhere.json")
    (damaged / "tokenizer.json").symlink_to(tmp_path / "elsewhere.json")
    assert "tokenizer.json lies outside the bundle" in problems_of(damaged)


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"\xff\xfe", b'{"version": "9.0"}'])
def test_a_damaged_tokenizer_is_named(content, damaged):
    (damaged / "tokenizer.json").write_bytes(content)
    for side in ("source_tokenizer", "target_tokenizer"):
        edit(damaged, side, value=vars(file_spec(damaged, "tokenizer.json")))
    only_problem(damaged, "tokenizer.json: not a tokenizer file")


def test_all_problems_are_listed_at_once(damaged):
    edit(damaged, "sizes", "d_head", value=12)
    edit(damaged, "special_ids", "eos_ids", value=[10_000])
    (damaged / "tokenizer.json").write_bytes(b"{}")
    (damaged / "fp32" / "step.onnx").unlink()
    content = bytearray((damaged / "int8" / "weights.bin").read_bytes())
    content[0] ^= 255
    (damaged / "int8" / "weights.bin").write_bytes(content)
    problems = problems_of(damaged)
    for pattern in (
        "sizes.d_head is 12",
        "special_ids.eos_ids has the id 10000",
        "tokenizer.json has 2 bytes",
        "fp32/step.onnx is missing",
        "int8/weights.bin was changed",
    ):
        assert sum(pattern in problem for problem in problems) == 1, pattern
    assert len(problems) == 5
