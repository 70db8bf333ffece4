"""The operators' computation on a 64-bit ARM processor, which an emulator stands for."""

import os
import platform
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from seq2seq_serve import kernels
from tests.kernels.test_products import SIZES, expected_of, inputs_of, linear_of

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
FLAGS = ("-O3", "-std=gnu++17", "-ffp-contract=fast", "-Wall", "-Wextra", "-Wno-psabi", "-Werror")
HERE, SOURCES = Path(__file__).parent, Path(kernels.__file__).parent
# The kinds of products, and processors of the emulator that have them
PROCESSORS = {"dotprod": "max", "scalar": "cortex-a53"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        platform.machine() == "aarch64" or not (shutil.which(COMPILER) and shutil.which(EMULATOR)),
        reason=f"needs {COMPILER} and {EMULATOR} (Debian: g++-aarch64-linux-gnu and qemu-user)",
    ),
]


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("arm") / "operators"
    command = [COMPILER, *FLAGS, "-static", f"-I{SOURCES}", "-o", path, HERE / "on_arm.cpp"]
    subprocess.run(command, check=True)
    return path


@pytest.fixture(params=PROCESSORS)
def run(request, program):
    """Runs the program on one processor; returns the bytes that it writes."""

    def run(*arguments, arrays=()):
        command = [EMULATOR, "-cpu", PROCESSORS[request.param], program, *map(str, arguments)]
        given = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)
        environment = {
            name: value for name, value in os.environ.items() if name != "SEQ2SEQ_ISA"
        }  # of x86-64
        done = subprocess.run(command, input=given, stdout=subprocess.PIPE, check=True, env=environment)
        return done.stdout

    assert run("instructions").decode().strip() == request.param
    return run


def test_the_library_is_compiled_without_a_warning(tmp_path):
    command = [COMPILER, *FLAGS, "-fPIC", "-shared", "-o", tmp_path / "operators.so"]
    subprocess.run([*command, SOURCES / "operators.cpp", SOURCES / "moves.cpp"], check=True)


@pytest.mark.parametrize("is_positive", [False, True])
@pytest.mark.parametrize(("N", "width", "num_outputs"), [*SIZES[:-1], (40, 256, 512)])
def test_products_have_the_bits_of_every_other_processor(N, width, num_outputs, is_positive, run):
    _, constants = linear_of(width, num_outputs, is_positive=is_positive)
    x = inputs_of(N, width)
    arrays = [constants[name] for name in ("weight", "weight_scale", "bias")]
    output = run("products", width, num_outputs, int(is_positive), N, arrays=[*arrays, x])
    expected = expected_of(x, constants, is_positive=is_positive)
    np.testing.assert_array_equal(np.frombuffer(output, np.float32).reshape(expected.shape), expected)


@pytest.mark.parametrize(("H", "G", "K"), [(4, 4, 32), (8, 2, 64), (2, 2, 8), (6, 3, 24)])
def test_attention(H, G, K, run):
    last, C = np.array([0, 7, 8, 20, 15], np.int32), 21
    rng, B = np.random.default_rng(K), len(last)
    queries, keys, values = (
        rng.standard_normal(shape).astype(np.float32) for shape in ((B, H, K), (B, G, C, K), (B, G, C, K))
    )
    owners = np.array([0, 1, 2, 3, 0])
    output = run("attention", B, H, G, C, K, arrays=[queries, keys, values, last, owners])
    for row, owner in enumerate(owners):
        live = slice(last[row] + 1)
        of_heads = [
            np.repeat(array[owner, :, live].astype(np.float64), H // G, 0) for array in (keys, values)
        ]
        expected = attended(queries[row][:, None].astype(np.float64), *of_heads)[:, 0]
        found = np.frombuffer(output, np.float32).reshape(B, H, K)[row]
        np.testing.assert_allclose(found, expected, atol=5e-6)


def test_attention_of_a_source(run):
    S, H, K = 23, 2, 24
    packed = np.random.default_rng(0).standard_normal((S, 3, H, K)).astype(np.float32)
    query, key, value = packed.astype(np.float64).transpose(1, 2, 0, 3)
    output = np.frombuffer(run("sources", S, H, K, arrays=[packed]), np.float32).reshape(S, H, K)
    np.testing.assert_allclose(output, attended(query, key, value).swapaxes(0, 1), atol=5e-6)


def attended(query, key, value):
    """Attention `(H, T, K)` of queries `(H, T, K)` to keys and values `(H, S, K)`."""
    scores = query @ key.swapaxes(1, 2) * 0.3
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    return weights / weights.sum(axis=2, keepdims=True) @ value


def test_norm(run):
    N, D = 5, 128
    rng = np.random.default_rng(0)
    x, residual, weight, bias = (
        rng.standard_normal(shape).astype(np.float32) for shape in ((N, D), (N, D), D, D)
    )
    total = x.astype(np.float64) + residual
    centred = total - total.mean(axis=1, keepdims=True)
    expected = centred / np.sqrt(centred.var(axis=1, keepdims=True) + 1e-5) * weight + bias
    output = np.frombuffer(run("norm", N, D, arrays=[x, residual, weight, bias]), np.float32)
    np.testing.assert_allclose(output.reshape(N, D), expected, atol=5e-6)


def test_candidates(run):
    N, V, K = 3, 3001, 7
    logits = np.random.default_rng(0).standard_normal((N, V)).astype(np.float32) * 4
    logits[:, V // 2 :] = logits[:, V // 2 :].round()  # many are equal
    output = run("candidates", N, V, K, arrays=[logits])
    scores = np.frombuffer(output[: 4 * N * K], np.float32).reshape(N, K)
    ids = np.frombuffer(output[4 * N * K :], np.int64).reshape(N, K)
    np.testing.assert_array_equal(ids, np.argsort(-logits, axis=1, kind="stable")[:, :K])
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    exact = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(scores, np.take_along_axis(exact, ids, 1), atol=5e-6)
