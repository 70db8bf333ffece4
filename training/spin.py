"""Shortens the spinning of torch's threads; import it before torch, whose threads read the environment once.

Threads that wait for each other spin. With libgomp's default they spin so long that, if another process takes
the core of one thread, all the other threads keep their cores busy without doing any work.
"""

import os

if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
