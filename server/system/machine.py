"""CPU, memory and file limits of this process (cgroup, affinity, rlimit)."""

from __future__ import annotations

import logging
import math
import os
import resource
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_MAX_FILES = 2**20  # Linux's own limit, for an infinite hard limit

_log = logging.getLogger(__name__)


def usable_cpus(cgroup: Path = _CGROUP) -> int:
    """Returns the number of CPUs that this process may use, at least 1.

    Args:
        cgroup: Folder of the control group's files: `cpu.max` of version 2, or those of version 1.
    """
    has_affinity = hasattr(os, "sched_getaffinity")  # Linux
    num_cpus = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(1, math.floor(min(num_cpus, _quota(cgroup))))


def usable_memory(cgroup: Path = _CGROUP) -> int:
    """Returns the bytes for models: nine tenths of the machine's memory or of the container's limit.

    Args:
        cgroup: Folder of the control group's files: `memory.max` of version 2, or that of version 1.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            limits.append(int((cgroup / name).read_text()))
        except (OSError, ValueError):
            continue  # it does not exist, or contains "max"
    return min(limits) * 9 // 10  # the rest is for the process itself


def raise_file_limit() -> int:
    """Lets this process open as many files and sockets as its hard limit allows, and returns their number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MAX_FILES if hard == resource.RLIM_INFINITY else hard
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    except (OSError, ValueError) as error:
        _log.warning("the limit of %d open files and sockets cannot be raised: %s", soft, error)
        return soft
    return most


def _quota(cgroup: Path) -> float:
    """Returns the number of CPUs that the container may use; infinity without a limit."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (cgroup / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (cgroup / "cpu" / "cpu.cfs_period_us").read_text()
        except OSError:
            return math.inf
    return math.inf if quota in ("max", "-1") else int(quota) / int(period)
