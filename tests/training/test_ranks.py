import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch import Tensor

from benchmarks.serving import free_ports
from training.checkpoint import checkpoint_path, list_checkpoints, load_checkpoint
from training.ranks import Ranks
from training.run import RunFolder

SMALL = ["d_model=32", "d_ff=64", "num_heads=2", "batch_tokens=200", "num_averaged=1"]
RECIPE = ["eval_interval_steps=10", "checkpoint_interval_steps=10"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

# Rank 1 fails in the third step, where rank 0 waits for its gradients.
FAILING = """
import sys
from training.__main__ import main
from training.loop import Trainer

step = Trainer.train_step

def failing(self, share):
    if self.ranks.rank == 1 and self.step == 2:
        raise ValueError("out of luck")
    return step(self, share)

Trainer.train_step = failing
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def flags(corpus_files: list[str]) -> list[str]:
    return [*corpus_files, "--device", "cpu", "--threads", "1"]


def train(
    out: Path, flags: list[str], settings: list[str], launcher: tuple[str, ...] | list[str] = ()
) -> str:
    done = subprocess.run(
        command_of(out, flags, settings, launcher), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    return done.stdout


def train_on_two_machines(out: Path, flags: list[str], settings: list[str]) -> list[str]:
    """What each of them says; both are this one, and meet at a port."""
    (port,) = free_ports(1)
    machine = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    command = command_of(out, flags, settings, [*machine, *meeting])
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)
    ]
    answers = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], answers
    return [output for output, _ in answers]


def command_of(
    out: Path, flags: list[str], settings: list[str], launcher: tuple[str, ...] | list[str]
) -> list[str]:
    command = [sys.executable, *launcher, "-m", "training", "train", "demo", "--out", str(out), *flags]
    return command if "--resume" in flags else [*command, "--set", *SMALL, *RECIPE, *settings]


def weights(out: Path, step: int) -> dict[str, Tensor]:
    return load_checkpoint(checkpoint_path(RunFolder(out).checkpoints, step)).model


def losses_of(out: Path) -> list[float]:
    return [line["loss"] for line in RunFolder(out).read_metrics()]


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def test_two_machines_and_small_pieces_learn_what_one_process_learns(
    tmp_path: Path, flags: list[str]
) -> None:
    flags = [*flags, "--max-steps", "20"]
    one = train(tmp_path / "one", flags, ["dropout=0.0"])
    two = train_on_two_machines(tmp_path / "two", flags, ["dropout=0.0", "micro_batch_tokens=40"])
    # Rounding differs by 1e-7, of which Adam makes more where a gradient is almost 0; 20 steps move by 5e-3.
    assert largest_difference(weights(tmp_path / "one", 20), weights(tmp_path / "two", 20)) < 1e-5
    # What is shared says the same, and is said once.
    assert sorted(len(each.splitlines()) for each in two) == [0, 2]
    assert len(one.splitlines()) == 2
    losses = [losses_of(tmp_path / name) for name in ("one", "two")]
    assert len(losses[0]) == 3  # of 20 steps of training, and of two evaluations
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    # Adam hides by how much gradients are scaled, and their clipping does not.
    norms = [
        [
            line["gradient_norm"]
            for line in RunFolder(tmp_path / name).read_metrics()
            if line["kind"] == "train"
        ]
        for name in ("one", "two")
    ]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_a_run_goes_on_with_another_number_of_processes(tmp_path: Path, flags: list[str]) -> None:
    train(tmp_path / "whole", [*flags, "--max-steps", "20"], ["dropout=0.0"])
    train(tmp_path / "parts", [*flags, "--max-steps", "10"], ["dropout=0.0"], TORCHRUN)
    train(tmp_path / "parts", ["--resume", "--max-steps", "20", "--device", "cpu", "--threads", "1"], [])
    assert largest_difference(weights(tmp_path / "whole", 20), weights(tmp_path / "parts", 20)) < 1e-5


def test_sigterm_stops_all_processes_at_one_step_and_they_go_on_bit_for_bit(
    tmp_path: Path, flags: list[str]
) -> None:
    settings = ["dropout=0.2", "max_steps=400", "eval_interval_steps=400", "checkpoint_interval_steps=200"]
    out = tmp_path / "run"
    arguments = ["-m", "training", "train", "demo", "--out", str(out), *flags, "--set", *SMALL, *RECIPE]
    command = [sys.executable, *TORCHRUN, *arguments, *settings]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        metrics = RunFolder(out).metrics_file
        while not (metrics.is_file() and metrics.stat().st_size):  # training is under way
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=120)
    assert process.returncode != 0
    (step,) = set(re.findall(r"interrupted at step (\d+)", errors))
    assert errors.count(f"go on with: torchrun ... -m training train demo --out {out} --resume") == 1
    stopped_at = int(step)
    assert load_checkpoint(list_checkpoints(RunFolder(out).checkpoints)[-1]).step == stopped_at

    end = ["--max-steps", str(stopped_at + 20)]
    train(out, ["--resume", *end, "--device", "cpu", "--threads", "1"], [], TORCHRUN)
    train(tmp_path / "whole", [*flags, *end], ["dropout=0.2"], TORCHRUN)
    assert (
        largest_difference(weights(out, stopped_at + 20), weights(tmp_path / "whole", stopped_at + 20)) == 0
    )


def test_who_fails_says_why_and_the_others_end(tmp_path: Path, flags: list[str]) -> None:
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    command = [
        sys.executable,
        *TORCHRUN,
        str(script),
        "train",
        "demo",
        "--out",
        str(tmp_path / "run"),
        *flags,
    ]
    environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [*command, *flags, "--set", *SMALL, *RECIPE],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert done.returncode != 0
    assert "process 1: error: out of luck" in done.stderr
    assert "another process of this training failed, and has said why" in done.stderr
    assert "Traceback" not in done.stderr.split("ChildFailedError")[0].split("elastic")[0]


def test_what_the_first_process_refuses_ends_all(tmp_path: Path, flags: list[str]) -> None:
    command = [
        sys.executable,
        *TORCHRUN,
        "-m",
        "training",
        "train",
        "demo",
        "--out",
        str(tmp_path),
        "--resume",
    ]
    done = subprocess.run([*command, "--device", "cpu"], capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert "has no run to go on with: leave out --resume" in done.stderr
    assert "process 1: error: the first process failed, and has said why" in done.stderr


def test_one_process_has_everything_to_itself() -> None:
    ranks = Ranks()
    assert ranks.is_first
    assert ranks.gather(ranks.share([3, 1, 2])) == [3, 1, 2]
    assert ranks.total([1.5, 2]) == [1.5, 2]
    assert ranks.largest(7) == 7
    assert ranks.first(lambda: "done") == "done"


def test_shares_are_disjoint_and_even() -> None:
    shares = [Ranks(rank, 3).share(range(8)) for rank in range(3)]
    assert shares == [[0, 3, 6], [1, 4, 7], [2, 5]]
