"""What runs a bundle's graphs, and what is said where that is not CUDA."""

import dataclasses
import logging
import re
import subprocess
import sys
from pathlib import Path

import onnxruntime
import pytest

from seq2seq_serve.bundle.manifest import Bundle
from seq2seq_serve.bundle.names import Precision
from seq2seq_serve.server.config import ProviderPolicy
from seq2seq_serve.server.runner import device as device_module
from seq2seq_serve.server.runner.device import choose, describe_device, usable_variants

NO_CUDA = (
    "this ONNX Runtime has no CUDAExecutionProvider (for a GPU, install onnxruntime-gpu[cuda,cudnn] in "
    "place of onnxruntime)"
)
ADVICE = "export the model with --precision fp16, too, and let the server choose"


def holding(bundle: Bundle, kept: str) -> Bundle:
    """The bundle with graphs of these precisions only, whatever they really hold."""
    variants = dict.fromkeys(map(Precision, kept.split()), bundle.manifest.variants[Precision.FP32])
    return dataclasses.replace(bundle, manifest=dataclasses.replace(bundle.manifest, variants=variants))


@pytest.fixture
def works(monkeypatch):
    """Says whether CUDA works here."""
    return lambda is_so: monkeypatch.setattr(
        device_module, "cuda_problem", lambda _: "" if is_so else NO_CUDA
    )


@pytest.mark.parametrize(
    ("cuda", "held", "policy", "precision", "expected"),
    [
        (True, "fp32 fp16", "prefer", None, ("cuda", "fp16")),
        (True, "fp32 fp16", "require", "fp16", ("cuda", "fp16")),
        (True, "fp32 bf16", "prefer", None, ("cuda", "bf16")),
        (True, "fp32 int8 fp16", "cpu", None, ("cpu", "int8")),
        (False, "fp32 int8", "cpu", "fp32", ("cpu", "fp32")),
        (False, "fp32 int4 int8", "cpu", None, ("cpu", "int8")),
        (False, "fp32 int4", "cpu", None, ("cpu", "fp32")),
        (False, "fp32 int4", "cpu", "int4", ("cpu", "int4")),
        (False, "int4", "cpu", None, ("cpu", "int4")),
    ],
)
def test_the_preferred_usable_precision_is_chosen_without_a_remark(
    cuda, held, policy, precision, expected, random_bundle, works
):
    works(cuda)
    wanted = precision and Precision(precision)
    assert choose(holding(random_bundle, held), ProviderPolicy(policy), wanted) == (*expected, ())


@pytest.mark.parametrize("files", [[], ["/dev/null"]])
@pytest.mark.parametrize(
    ("cuda", "held", "precision", "expected", "reason"),
    [
        (False, "fp32 fp16", None, "fp32", NO_CUDA),
        (True, "fp32 int8", None, "int8", f"it runs fp16 and bf16 graphs, and not fp32 and int8: {ADVICE}"),
    ],
)
def test_where_cuda_is_preferred_a_remark_says_why_it_is_the_cpu_and_warns_if_there_is_a_gpu(
    cuda, held, precision, expected, reason, files, random_bundle, works, monkeypatch
):
    """Every plain start on a machine without a GPU logged a warning, or information that read so."""
    works(cuda)
    monkeypatch.setattr(device_module, "_GPU_FILES", list(map(Path, files)))
    wanted = precision and Precision(precision)
    why = (
        f", though CUDA is preferred: {reason}" if files else ": neither a GPU nor onnxruntime-gpu was found"
    )
    remark = logging.WARNING if files else logging.INFO, f"{random_bundle.path} runs on the CPU{why}"
    assert choose(holding(random_bundle, held), ProviderPolicy.PREFER, wanted) == ("cpu", expected, (remark,))


@pytest.mark.parametrize(
    ("cuda", "held", "policy", "precision", "message"),
    [
        (False, "fp32 fp16", "require", None, f"CUDA is required: {NO_CUDA}"),
        (
            True,
            "fp32 fp16",
            "require",
            "fp32",
            "CUDA is required: it runs fp16 and bf16 graphs, and not fp32",
        ),
        (True, "fp16", "cpu", None, "fp16 graphs do not run on the CPU, which takes int8, fp32 and int4"),
        (
            False,
            "fp32 fp16",
            "prefer",
            "fp16",
            f"fp16 graphs do not run on the CPU, which takes int8, fp32 and int4; and not on CUDA: {NO_CUDA}",
        ),
        (True, "fp32 int8", "prefer", "fp16", "the bundle has no fp16 graphs; it has fp32, int8"),
    ],
)
def test_a_precision_that_cannot_run_is_refused_by_name(
    cuda, held, policy, precision, message, random_bundle, works
):
    works(cuda)
    wanted = precision and Precision(precision)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        choose(holding(random_bundle, held), ProviderPolicy(policy), wanted)


def test_a_build_without_cuda_runs_the_graphs_of_the_cpu(random_bundle, monkeypatch):
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    precisions = [Precision.INT8, Precision.FP32, Precision.INT4]
    assert usable_variants(random_bundle) == [("cpu", precision) for precision in precisions]
    with pytest.raises(ValueError, match=re.escape(f"CUDA is required: {NO_CUDA}")):
        choose(holding(random_bundle, "fp16"), ProviderPolicy.REQUIRE, None)


def test_a_cuda_build_without_a_device_falls_back_to_the_cpu_with_a_remark(random_bundle, monkeypatch):
    """The CPU build stands in: it too cannot allocate on CUDA."""
    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("CUDA may work here")
    full_names = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: full_names)
    bundle = holding(random_bundle, "fp32 fp16")
    assert usable_variants(bundle) == [("cpu", Precision.FP32)]
    *chosen, [(_, remark)] = choose(bundle, ProviderPolicy.PREFER, None)
    assert chosen == ["cpu", Precision.FP32]
    assert "CUDAExecutionProvider does not work here: " in remark
    with pytest.raises(ValueError, match="CUDA is required: CUDAExecutionProvider does not work here"):
        choose(bundle, ProviderPolicy.REQUIRE, None)


def test_a_device_can_be_tried_again_once_the_graphs_of_the_process_share_threads():
    """In a process of its own, which keeps its pool: where a model was served, CUDA seemed not to work."""
    retry = "share_threads(1); OnnxDevice(CPU, num_threads=1).weightless('greedy')"
    subprocess.run(
        [sys.executable, "-c", f"from seq2seq_serve.server.runner.device import *; {retry}"], check=True
    )


@pytest.fixture
def cuda_build(monkeypatch):
    """ONNX Runtime as if it had CUDA; the process that tries it still runs the code of the test."""
    full_names = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: full_names)
    device_module._try_once.cache_clear()
    yield monkeypatch
    device_module._try_once.cache_clear()


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import time; time.sleep(60)", "it did not answer for 0 seconds"),
        ("import sys; sys.exit('no   room')", "a process that tried it ended with 1: no room"),
        ("print('not JSON')", "a process that tried it ended with 0: "),
        ('print(\'["its problem", ""]\')', "its problem"),
    ],
)
def test_a_failed_trial_of_cuda_says_why_and_is_repeated_until_one_succeeds(
    code, reason, random_bundle, cuda_build
):
    bundle = holding(random_bundle, "fp32 fp16")
    cuda_build.setattr(device_module, "_TRY", code)
    if "sleep" in code:
        cuda_build.setattr(device_module, "_TRY_SECONDS", 0.3)
    with pytest.raises(ValueError, match=re.escape(f"does not work here: {reason} (")):
        choose(bundle, ProviderPolicy.REQUIRE, None)
    cuda_build.setattr(device_module, "_TRY", 'print(\'["", "A GPU, 8 GiB"]\')')
    cuda_build.setattr(device_module, "_TRY_SECONDS", 60.0)
    assert choose(bundle, ProviderPolicy.REQUIRE, None) == ("cuda", Precision.FP16, ())
    cuda_build.setattr(device_module, "_TRY", code)  # a success is kept
    assert choose(bundle, ProviderPolicy.REQUIRE, None) == ("cuda", Precision.FP16, ())
    assert describe_device("cuda", Precision.FP16, None) == "cuda (A GPU, 8 GiB)"
