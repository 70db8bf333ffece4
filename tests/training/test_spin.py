import os
import subprocess
import sys

import pytest


def spin_count_after(code: str, given: dict[str, str]) -> str:
    rest = {name: value for name, value in os.environ.items() if not name.startswith(("GOMP_", "OMP_"))}
    program = f"{code}\nimport os; print(os.environ.get('GOMP_SPINCOUNT'))"
    done = subprocess.run([sys.executable, "-c", program], env=rest | given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("given", "spin_count"),
    [({}, "2000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None")],
)
def test_threads_spin_shortly_unless_the_environment_says_otherwise(
    given: dict[str, str], spin_count: str
) -> None:
    assert spin_count_after("import seq2seq_serve.training.spin", given) == spin_count


def test_a_training_sets_it_before_it_imports_torch() -> None:
    code = """
import contextlib, sys
sys.modules["torch"] = None
with contextlib.suppress(ImportError):
    import seq2seq_serve.training.__main__
"""
    assert spin_count_after(code, {}) == "2000"
