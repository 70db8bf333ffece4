import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed

from seq2seq_serve.training import ranks as ranks_module
from seq2seq_serve.training.checkpoint import checkpoint_path, list_checkpoints, load_checkpoint
from seq2seq_serve.training.ranks import Ranks, joined_ranks
from seq2seq_serve.training.run import RunFolder

ROOT = Path(__file__).parents[2]
SMALL = ["d_model=32", "d_ff=64", "num_heads=2", "batch_tokens=200", "num_averaged=1"]
# Without a cool-down, so that steps do not depend on where the run is to end.
RECIPE = ["eval_interval_steps=10", "checkpoint_interval_steps=10", "cooldown_share=0.0"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ON_CPU = ["--device", "cpu", "--threads", "1"]

# Rank 1 fails in the third step, where rank 0 waits for its gradients.

# The first process dies in the middle of the preparation, and after a restart the other one in a step.
DYING = """
import os, signal, sys
from seq2seq_serve.training.__main__ import main
from seq2seq_serve.training.loop import Trainer
from seq2seq_serve.training.run import RunFolder

step, write_config = Trainer.train_step, RunFolder.write_config
num_restarts, rank = (int(os.environ[name]) for name in ("TORCHELASTIC_RESTART_COUNT", "RANK"))

def dying_in_a_step(self, share):
    if num_restarts == 1 and rank == 1 and self.step == 25:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, share)

def dying_before_the_end_of_a_start(self, config):
    if num_restarts == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    write_config(self, config)

Trainer.train_step, RunFolder.write_config = dying_in_a_step, dying_before_the_end_of_a_start
sys.exit(main(sys.argv[1:]))
"""

# A process does not answer after two steps, in a method of the trainer, as if its machine were lost. SIGTERM
# ends it, because torchrun waits for half a minute before it kills.
SILENT = """
import signal, sys
from datetime import timedelta
from seq2seq_serve.training import ranks
from seq2seq_serve.training.__main__ import main
from seq2seq_serve.training.loop import Trainer

method = Trainer.{method}

def silent(self, *arguments):
    if self.ranks.rank == {rank} and self.step >= 2:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pause()
    return method(self, *arguments)

ranks._TIMEOUT = timedelta(seconds=10)
Trainer.{method} = silent
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def train(start_ranks):
    """Train the demo in that many processes, to the end; gives what each of them printed."""

    def train(size: int, *arguments: str) -> list[str]:
        ranks = start_ranks(size, "demo", *arguments)
        assert [rank.wait() for rank in ranks] == [0] * size, [rank.stderr for rank in ranks]
        assert not any("Warning" in rank.stderr for rank in ranks)
        return [rank.stdout for rank in ranks]

    return train


@pytest.fixture
def flags(corpus_files: list[str]) -> list[str]:
    return [*corpus_files, *ON_CPU]


def new_run(out: Path, flags: list[str], *settings: str) -> list[str]:
    return ["--out", str(out), *flags, "--set", *SMALL, *RECIPE, *settings]


def weights(out: Path, step: int) -> dict[str, Tensor]:
    return load_checkpoint(checkpoint_path(RunFolder(out).checkpoints, step)).model


def losses_of(out: Path) -> list[float]:
    return [line["loss"] for line in RunFolder(out).read_metrics()]


def differences(a: Path, b: Path, step: int) -> Tensor:
    one, other = weights(a, step), weights(b, step)
    assert one.keys() == other.keys()
    return torch.cat([(one[name] - other[name]).abs().flatten() for name in one])


def learnt_the_same(a: Path, b: Path) -> bool:
    """Whether two trainings of 20 steps, which move weights by 5e-3, differ by rounding only.

    Rounding differs by 1e-7. Where a gradient is almost 0, Adam makes 1e-4 of it, in a weight or two of
    52,160 on most machines, and in some 240 on an Intel with AMX: so the mean is compared, 5e-7 there.
    """
    apart = differences(a, b, 20)
    return bool(apart.mean() < 2e-6 and apart.max() < 1e-3)


@pytest.mark.slow
def test_two_processes_and_small_pieces_learn_what_one_process_learns(
    tmp_path: Path, flags: list[str], train
) -> None:
    flags = [*flags, "--max-steps", "20"]
    (one,) = train(1, *new_run(tmp_path / "one", flags, "dropout=0.0"))
    two = train(2, *new_run(tmp_path / "two", flags, "dropout=0.0", "micro_batch_tokens=40"))
    assert learnt_the_same(tmp_path / "one", tmp_path / "two")
    # What is shared says the same, and is said once.
    assert [len(each.splitlines()) for each in two] == [2, 0]
    assert len(one.splitlines()) == 2
    losses = [losses_of(tmp_path / name) for name in ("one", "two")]
    assert len(losses[0]) == 3  # of 20 steps of training, and of two evaluations
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
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


def test_sigterm_to_one_stops_all_processes_at_one_step_and_they_go_on_bit_for_bit(
    tmp_path: Path, flags: list[str], start_ranks, train
) -> None:
    settings = ["dropout=0.2", "max_steps=400", "eval_interval_steps=400", "checkpoint_interval_steps=200"]
    out = tmp_path / "run"
    ranks = start_ranks(2, "demo", *new_run(out, flags, *settings))
    metrics = RunFolder(out).metrics_file
    while not (metrics.is_file() and metrics.stat().st_size):  # training is under way
        assert ranks[0].process.is_alive(), ranks[0].stderr
        time.sleep(0.05)
    ranks[1].process.terminate()
    assert [rank.wait() for rank in ranks] == [128 + signal.SIGTERM] * 2
    (step,) = re.findall(r"interrupted at step (\d+)", "".join(rank.stderr for rank in ranks))
    assert f"continue with: torchrun ... -m training train demo --out {out} --resume" in ranks[0].stderr
    stopped_at = int(step)
    assert load_checkpoint(list_checkpoints(RunFolder(out).checkpoints)[-1]).step == stopped_at

    end = ["--max-steps", str(stopped_at + 20)]
    train(2, "--out", str(out), "--resume", *end, *ON_CPU)
    train(2, *new_run(tmp_path / "whole", [*flags, *end], "dropout=0.2"))
    assert not differences(out, tmp_path / "whole", stopped_at + 20).any()


@pytest.fixture
def torchrun(tmp_path: Path):
    """Run a script that changes the training, under torchrun itself; gives the finished process."""

    def torchrun(script: str, *arguments: str, max_restarts: int = 0) -> subprocess.CompletedProcess[str]:
        file = tmp_path / "script.py"
        file.write_text(script)
        options = [*TORCHRUN, "--max-restarts", str(max_restarts), str(file), "train", "demo"]
        command = [sys.executable, *options, *arguments]
        environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen(command, env=environment, **pipes)
        try:
            stdout, stderr = process.communicate(timeout=300)
        finally:
            # It ends its processes, which would survive if it were killed: each has a session of its own.
            process.terminate()
            process.communicate()
        return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)

    return torchrun


@pytest.mark.slow  # three trainings in processes of their own
def test_killed_processes_are_started_again_and_learn_bit_for_bit_the_same(
    tmp_path: Path, flags: list[str], torchrun, train
) -> None:
    settings = ["dropout=0.2", "max_steps=30"]
    restarted, whole = tmp_path / "restarted", tmp_path / "whole"
    done = torchrun(DYING, *new_run(restarted, flags, *settings), "--resume", max_restarts=2)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("has no run yet: starting one") == 2
    assert "continuing after step 20" in done.stderr
    train(2, *new_run(whole, flags, *settings))
    assert not differences(restarted, whole, 30).any()
    assert RunFolder(restarted).read_summary().dev_score == RunFolder(whole).read_summary().dev_score


@pytest.mark.slow  # it waits until the time of a collective is over
@pytest.mark.parametrize(("rank", "method"), [(1, "train_step"), (0, "_write_checkpoint")])
def test_a_process_that_does_not_answer_ends_the_others(
    tmp_path: Path, flags: list[str], torchrun, rank: int, method: str
) -> None:
    done = torchrun(SILENT.format(rank=rank, method=method), *new_run(tmp_path / "run", flags))
    assert done.returncode != 0
    assert "another process of this training failed, and has reported why if it could" in done.stderr


def test_an_error_is_raised_although_torchrun_wants_to_end_the_process_that_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Leaving the group lets the others fail, and torchrun then ends what has not exited yet."""
    received: list[int] = []
    for name, value in {
        "init_process_group": lambda *_, **__: None,
        "get_rank": lambda: 1,
        "get_world_size": lambda: 2,
        "new_group": lambda **_: None,
        "destroy_process_group": lambda: signal.raise_signal(signal.SIGTERM),
    }.items():
        monkeypatch.setattr(distributed, name, value)
    monkeypatch.setenv("WORLD_SIZE", "2")
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        with pytest.raises(ValueError, match="out of luck"), joined_ranks():
            raise ValueError("out of luck")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not received


def test_a_restart_on_several_machines_that_would_wait_in_vain_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    variables = {"USE_AGENT_STORE": "True", "MAX_RESTARTS": "3"}
    for name, value in variables.items():
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    with (
        pytest.raises(ValueError, match="set it where torchrun starts"),
        joined_ranks(),
    ):
        pass


def test_an_error_of_the_first_process_ends_all(tmp_path: Path, start_ranks) -> None:
    ranks = start_ranks(2, "demo", "--out", str(tmp_path), "--tsv", str(tmp_path / "none"), "--device", "cpu")
    assert [rank.wait() for rank in ranks] == [1, 1]
    assert "none: No such file or directory" in ranks[0].stderr
    assert "process 1: error: the first process failed, and has reported why" in ranks[1].stderr


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


@pytest.mark.parametrize(
    ("text", "is_lost"),
    [
        ("[third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1", True),
        ("[third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms", True),
        ("the peer review of this corpus timed out", False),
    ],
)
def test_only_errors_of_a_collective_are_another_processs_failure(text: str, is_lost: bool) -> None:
    assert ranks_module._is_lost_peer(RuntimeError(text)) == is_lost
