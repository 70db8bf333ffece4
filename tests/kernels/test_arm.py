"""The operators' computation on a 64-bit ARM processor, which an emulator stands for: the bits of x86-64."""

import os
import platform
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from seq2seq_serve import kernels
from tests.kernels.test_products import BITS, FACTOR, SIZES, expected_of, inputs_of, inputs_of_map, linear_of

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
WARNINGS = ("-Wall", "-Wextra", "-Wno-psabi", "-Werror")
FLAGS = ("-O3", "-std=gnu++17", "-ffp-contract=off", *WARNINGS)
HERE, SOURCES = Path(__file__).parent, Path(kernels.__file__).parent
# The kinds of products, and processors of the emulator that have them
PROCESSORS = {"dotprod": "max", "scalar": "cortex-a53"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        platform.machine() != "x86_64" or not all(map(shutil.which, (COMPILER, EMULATOR, "g++"))),
        reason=f"needs x86-64, g++, {COMPILER} and {EMULATOR} (Debian: g++-aarch64-linux-gnu and qemu-user)",
    ),
]


def compiled(path, compiler, *flags):
    subprocess.run(
        [compiler, *FLAGS, *flags, "-static", f"-I{SOURCES}", "-o", path, HERE / "on_arm.cpp"], check=True
    )
    return path


def output_of(*command, arrays=()):
    """The bytes that a program writes."""
    given = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)
    environment = {name: value for name, value in os.environ.items() if name != "SEQ2SEQ_ISA"}  # of x86-64
    done = subprocess.run(
        [*map(str, command)], input=given, stdout=subprocess.PIPE, check=True, env=environment
    )
    return done.stdout


@pytest.fixture(scope="module")
def programs(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("arm")
    return {
        "arm": compiled(folder / "arm", COMPILER),
        "native": compiled(folder / "native", "g++"),
        # It gives the same only if the sources leave no rounding to the compiler.
        "fusing": compiled(folder / "fusing", "g++", "-O1", "-ffp-contract=fast"),
    }


@pytest.fixture(params=PROCESSORS)
def run(request, programs):
    """Runs the program on one processor; returns the bytes that it writes."""
    command = EMULATOR, "-cpu", PROCESSORS[request.param], programs["arm"]
    assert output_of(*command, "instructions").decode().strip() == request.param
    return lambda *arguments, arrays=(): output_of(*command, *arguments, arrays=arrays)


def test_the_library_is_compiled_without_a_warning(tmp_path):
    command = [COMPILER, *FLAGS, "-fPIC", "-shared", "-o", tmp_path / "operators.so"]
    subprocess.run([*command, SOURCES / "operators.cpp", SOURCES / "moves.cpp"], check=True)


@BITS
@pytest.mark.parametrize("is_positive", [False, True])
@pytest.mark.parametrize(("N", "width", "num_outputs"), [*SIZES[:-1], (40, 256, 512)])
def test_products_have_the_bits_of_every_other_processor(N, width, num_outputs, is_positive, bits, run):
    _, constants = linear_of(width, num_outputs, bits, is_positive=is_positive)
    x = inputs_of(N, width)
    given = inputs_of_map(**constants)
    arrays = [given[name] for name in ("weight", "weight_scale", "bias")]
    name, factor = ("products", []) if bits == 8 else ("int4_products", [np.float32(FACTOR)])
    output = run(name, width, num_outputs, int(is_positive), N, arrays=[*factor, *arrays, x])
    expected = expected_of(x, constants, is_positive=is_positive)
    np.testing.assert_array_equal(np.frombuffer(output, np.float32).reshape(expected.shape), expected)


def normal(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def halves(*shape):
    return normal(*shape).astype(np.float16).astype(np.float32)


def attention(H, G, K, B=5, C=21, name="attention"):
    last, owners = np.array([0, 7, 8, 20, 15], np.int32), np.array([0, 1, 2, 3, 0])
    arrays = [normal(B, H, K), normal(B, G, C, K), normal(B, G, C, K)[::-1], last, owners]
    return (name, B, H, G, C, K), arrays


def candidates(N, V, K):
    logits = normal(N, V) * 4
    logits[:, V // 2 :] = logits[:, V // 2 :].round()  # many are equal
    return ("candidates", N, V, K), [logits]


def time_rules(N, V):
    first, last = V - 60, V - 5
    bounds = np.array([first, last, 3, V, first + 2, last])[:, None] + np.zeros((1, N), np.int64)
    return ("time_rules", N, V), [bounds, normal(N, V)]


def low_rank(width, num_outputs, R, N):
    """The weights are a multiple of 8 numbers; the second part has a smaller rank."""
    ranks = np.array([R, R - 1], np.int32)
    weights = normal(2 * R * (width + num_outputs))
    arrays = [weights, ranks, normal(N, width), normal(N, 2 * num_outputs)]
    return ("low_rank", width, num_outputs, R, N), arrays


@pytest.mark.parametrize(
    ("arguments", "arrays"),
    [
        attention(4, 4, 32),
        attention(8, 2, 64),
        attention(2, 2, 8),
        attention(6, 3, 24),
        attention(8, 2, 64, name="half_attention"),
        attention(6, 3, 24, name="half_attention"),
        (("linear", 70, 45, 11), [normal(45, 70), normal(45), normal(11, 70)]),
        (("linear", 2048, 48, 90), [normal(48, 2048), normal(48), normal(90, 2048)]),
        (("linear", 70, 45, 11), [halves(45, 70), normal(45), normal(11, 70)]),
        low_rank(64, 128, 8, 1),
        low_rank(200, 40, 5, 24),
        (("sources", 23, 2, 24), [normal(23, 3, 2, 24)]),
        (("norm", 5, 128), [normal(5, 128), normal(5, 128)[::-1], normal(128), normal(128)[::-1]]),
        candidates(3, 3001, 7),
        time_rules(3, 3001),
    ],
    ids=lambda given: "-".join(map(str, given)) if isinstance(given, tuple) else "",
)
def test_floats_have_the_same_bits_by_another_compiler_and_on_another_processor(
    arguments, arrays, run, programs
):
    """test_operators.py compares those of this processor with numpy."""
    expected = output_of(programs["native"], *arguments, arrays=arrays)
    assert any(expected)
    assert output_of(programs["fusing"], *arguments, arrays=arrays) == expected
    assert run(*arguments, arrays=arrays) == expected
