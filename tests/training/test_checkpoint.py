import dataclasses
import os
import re
from pathlib import Path

import pytest
import torch

from seq2seq_serve.training.checkpoint import (
    BestScore,
    Checkpoint,
    average_weights,
    checkpoint_path,
    load_checkpoint,
    newest_checkpoint,
    save_checkpoint,
    save_tensors,
    write_atomically,
)


def checkpoint(step: int, value: float = 1.0) -> Checkpoint:
    return Checkpoint(
        step=step,
        model={"weight": torch.full((300, 30), value), "bias": torch.tensor([value])},
        optimizer={
            "state": {0: {"exp_avg": torch.ones(3)}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.98)}],
        },
        epoch=2,
        batch_index=5,
        best=BestScore(step=3, dev_score=12.5, num_worse_since=1),
        seconds=1.5,
    )


def test_a_checkpoint_comes_back_whole(tmp_path: Path) -> None:
    saved = checkpoint(7)
    loaded = load_checkpoint(save_checkpoint(tmp_path, saved))
    for field in dataclasses.fields(Checkpoint):
        if field.name not in ("model", "optimizer"):
            assert getattr(loaded, field.name) == getattr(saved, field.name)
    assert torch.equal(loaded.model["weight"], saved.model["weight"])
    assert loaded.optimizer["param_groups"] == saved.optimizer["param_groups"]
    assert loaded.best == BestScore(3, 12.5, 1)


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    path = checkpoint_path(tmp_path, 1)
    with pytest.raises(ValueError, match=re.escape(f"{path}: no such checkpoint")):
        load_checkpoint(path)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_half_written_checkpoint_is_named(tmp_path: Path, share: float) -> None:
    path = save_checkpoint(tmp_path, checkpoint(1))
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ValueError, match=re.escape(f"{path}: damaged or half-written checkpoint")):
        load_checkpoint(path)


def test_a_changed_byte_is_found(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, checkpoint(1))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="damaged or half-written"):
        load_checkpoint(path)


def test_a_file_with_code_in_it_is_refused_and_not_run(tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (tmp_path / "was run",))

    path = checkpoint_path(tmp_path, 1)
    torch.save(Payload(), path)
    with pytest.raises(ValueError, match="damaged or half-written"):
        load_checkpoint(path)
    assert not (tmp_path / "was run").exists()


def test_other_torch_files_are_refused(tmp_path: Path) -> None:
    path = checkpoint_path(tmp_path, 1)
    torch.save({"weights": torch.ones(1)}, path)
    with pytest.raises(ValueError, match="not a checkpoint of format 1"):
        load_checkpoint(path)
    save_tensors(path, {"model": {}})
    with pytest.raises(ValueError, match="the checkpoint lacks step, optimizer, epoch"):
        load_checkpoint(path)


def test_the_newest_readable_checkpoint_is_taken_and_damaged_ones_are_reported(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) == (None, [])
    for step in (5, 10, 15):
        save_checkpoint(tmp_path, checkpoint(step))
    checkpoint_path(tmp_path, 15).write_bytes(b"half")
    (tmp_path / "step-00000020.pt.tmp").write_bytes(b"half")
    found, problems = newest_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 10
    (problem,) = problems
    assert "step-00000015.pt: damaged" in problem


def test_when_no_checkpoint_can_be_read_all_are_named(tmp_path: Path) -> None:
    for step in (5, 10):
        checkpoint_path(tmp_path, step).write_bytes(b"half")
    with pytest.raises(ValueError, match=r"no checkpoint can be read: .*00000010.*00000005"):
        newest_checkpoint(tmp_path)


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, lambda stream: stream.write(b"old"))

    def fail(stream: object) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, fail)
    assert path.read_bytes() == b"old"


def test_average_is_the_mean_of_the_weights(tmp_path: Path) -> None:
    paths = [
        save_checkpoint(tmp_path, checkpoint(step, value)) for step, value in ((1, 1.0), (2, 2.0), (3, 6.0))
    ]
    average = average_weights(paths)
    assert average["weight"].dtype == torch.float32
    torch.testing.assert_close(average["weight"], torch.full((300, 30), 3.0))
    torch.testing.assert_close(average_weights(paths[:2])["bias"], torch.tensor([1.5]))


def test_averages_are_sums_in_float64(tmp_path: Path) -> None:
    paths = [
        save_checkpoint(tmp_path, checkpoint(step, value))
        for step, value in ((1, 2.0**25), (2, 3.0), (3, -(2.0**25)))
    ]
    torch.testing.assert_close(average_weights(paths)["bias"], torch.tensor([1.0]))


def test_a_file_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, synced = tmp_path / "file", []
    monkeypatch.setattr(os, "fsync", lambda _: synced.append(path.exists()))
    write_atomically(path, lambda stream: stream.write(b"new"))
    assert synced == [False, True]  # the content, then its name
    assert path.read_bytes() == b"new"


def test_checkpoints_of_another_model_are_not_averaged(tmp_path: Path) -> None:
    first = save_checkpoint(tmp_path, checkpoint(1))
    other = save_checkpoint(tmp_path, dataclasses.replace(checkpoint(2), model={"weight": torch.ones(2)}))
    with pytest.raises(ValueError, match=r"step-00000002\.pt: its weights have other names or shapes"):
        average_weights([first, other])
    with pytest.raises(ValueError, match="no checkpoint to average"):
        average_weights([])
