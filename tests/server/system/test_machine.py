import os
import resource

import pytest

from seq2seq_serve.server.system.machine import raise_file_limit, usable_cpus, usable_memory


@pytest.fixture(autouse=True)
def _eight_cpus(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)


@pytest.mark.parametrize(
    ("quota", "num_cpus"),
    [
        ("max 100000", 8),
        ("200000 100000", 2),
        ("150000 100000", 1),
        ("50000 100000", 1),
        ("6400000 100000", 8),
    ],
)
def test_a_quota_of_cgroup_2_bounds_the_cpus(quota, num_cpus, tmp_path):
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    assert usable_cpus(tmp_path) == num_cpus


@pytest.mark.parametrize(("quota", "num_cpus"), [("-1", 8), ("300000", 3), ("1000", 1)])
def test_a_quota_of_cgroup_1_bounds_the_cpus(quota, num_cpus, tmp_path):
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert usable_cpus(tmp_path) == num_cpus


def test_without_an_affinity_the_machine_counts(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert usable_cpus(tmp_path) == 5


@pytest.mark.parametrize("name", ["memory.max", "memory/memory.limit_in_bytes"])
def test_a_container_bounds_the_memory(name, tmp_path):
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("1048576\n")
    assert usable_memory(tmp_path) == 2**20 * 9 // 10
    file.write_text(f"{2**63 - 4096}\n")
    assert usable_memory(tmp_path) == usable_memory(tmp_path / "nothing") > 2**20


@pytest.mark.parametrize(("hard", "limit"), [(4096, 4096), (64, 64), (resource.RLIM_INFINITY, 2**20)])
def test_as_many_files_may_be_open_as_the_hard_limit_allows(hard, limit, monkeypatch):
    given = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (32, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: given.append(limits))
    assert raise_file_limit() == limit
    assert given == [(limit, hard)]


def test_a_limit_of_files_that_cannot_be_raised_stays(monkeypatch, caplog):
    def refuse(_, limits):
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert raise_file_limit() == 1024
    assert "the limit of 1024 open files and sockets cannot be raised: not allowed" in caplog.text
