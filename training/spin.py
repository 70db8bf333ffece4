"""Imported before torch by a process that trains: torch's threads read the environment when they start.

Threads that wait for each other spin, by libgomp's default for so long that one thread whose core another
process has keeps all the others' cores busy with nothing.
"""

import os

if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
