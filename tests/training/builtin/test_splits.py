import hashlib
import os
import subprocess
import sys

import pytest

from seq2seq_serve.training.builtin import moving_shapes, shapes

GENERATORS = pytest.mark.parametrize("generate", [shapes.generate, moving_shapes.generate])
PROGRAM = """
from tests.training.builtin.test_splits import digest
from seq2seq_serve.training.builtin import moving_shapes, shapes
for module in (shapes, moving_shapes):
    print(digest(module.generate(3, 7, "test")))
"""


def digest(examples) -> str:
    """Returns a checksum of everything in the examples."""
    total = hashlib.sha256()
    for example in examples:
        for value in vars(example).values():
            total.update(value.tobytes() if hasattr(value, "tobytes") else repr(value).encode())
    return total.hexdigest()


def test_the_same_seed_gives_the_same_examples_whatever_the_hash_seed():
    digests = [digest(module.generate(3, 7, "test")) for module in (shapes, moving_shapes)]
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONHASHSEED": "5"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.split() == digests


@GENERATORS
def test_a_longer_run_begins_with_a_shorter_one(generate):
    long_run = generate(1_000_000, 3)  # which is lazy
    assert digest(next(long_run) for _ in range(4)) == digest(generate(4, 3))


@GENERATORS
def test_seeds_and_splits_give_different_examples(generate):
    runs = [generate(3, seed, split) for seed in (0, 1) for split in ("train", "dev", "test")]
    assert len({digest(run) for run in runs}) == 6
