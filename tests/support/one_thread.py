"""Lets numpy compute in one thread, as it must where other processes use all CPUs.

OpenBLAS has a thread for each CPU. All of them spin until the last one has computed its part: beside other
tests, a product of small matrices then takes five times the CPU time. numpy itself has no setting for this,
and the variable that OpenBLAS reads would be inherited by the services of the tests.
"""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path

import numpy as np


def compute_in_one_thread() -> None:
    """For the OpenBLAS in numpy's wheel. Another library computes as before."""
    for library in Path(np.__file__).parents[1].glob("numpy.libs/libscipy_openblas*"):
        with contextlib.suppress(AttributeError):
            ctypes.CDLL(str(library)).scipy_openblas_set_num_threads64_(1)
