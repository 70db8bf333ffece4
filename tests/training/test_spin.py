import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("given", "spin_count"),
    [({}, "2000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None")],
)
def test_threads_spin_shortly_unless_the_environment_says_otherwise(
    given: dict[str, str], spin_count: str
) -> None:
    rest = {name: value for name, value in os.environ.items() if not name.startswith(("GOMP_", "OMP_"))}
    code = "import training.__main__, os; print(os.environ.get('GOMP_SPINCOUNT'))"
    done = subprocess.run([sys.executable, "-c", code], env=rest | given, capture_output=True, text=True)
    assert done.stdout.strip() == spin_count
