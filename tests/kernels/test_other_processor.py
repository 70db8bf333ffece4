"""The whole library on a processor with AVX2 and without AVX-512 and VNNI, which an emulator stands for."""

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from seq2seq_serve import kernels

EMULATOR = "qemu-x86_64", "-cpu", "Haswell-noTSX"
ANSWERS = """
import json, sys
from seq2seq_serve import kernels, load
answers = []
for precision in "int8", "fp32":
    with load(sys.argv[1], precision=precision, provider="cpu", threads=1, max_slots=8) as model:
        for beam_size in 1, 4:
            options = {"beam_size": beam_size, "log_probabilities": True}
            for answer in model.generate(["하나 둘 셋 넷", "다섯"], **options):
                best = answer.hypotheses[0]
                answers.append([list(best.token_ids), list(best.log_probabilities)])
print(json.dumps([kernels.instructions(), answers]))
"""

pytestmark = [
    pytest.mark.slow,  # 20 seconds: an emulator runs Python and ONNX Runtime
    pytest.mark.skipif(
        platform.machine() != "x86_64" or shutil.which(EMULATOR[0]) is None or kernels.library() is None,
        reason=f"needs {EMULATOR[0]} (Debian: qemu-user), x86-64, and the compiled operators",
    ),
]


def test_greedy_search_and_beams_have_the_same_bits(trained_run):
    environment = {name: value for name, value in os.environ.items() if name != "SEQ2SEQ_ISA"}
    environment["PYTHONPATH"] = str(Path(kernels.__file__).parent.parent)

    def answers(*emulator):
        command = [*emulator, sys.executable, "-c", ANSWERS, trained_run.bundle]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment, text=True)
        return json.loads(done.stdout)

    instructions, found = answers(*EMULATOR)
    assert instructions == "avx2"
    assert found == answers()[1]
