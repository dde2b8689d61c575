"""The image of the batcher has no numpy (docs/decisions/0035), so its commands must start without it."""

from __future__ import annotations

import subprocess
import sys

import pytest

WITHOUT_NUMPY = "import sys; sys.modules['numpy'] = None; "  # as if it were not installed


@pytest.mark.parametrize("module", ["carpool_batcher.__main__", "carpool_cli.health", "carpool_cli.__main__"])
def test_it_starts(module: str) -> None:
    program = f"{WITHOUT_NUMPY}import {module}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_needs_numpy_is_noticed() -> None:
    program = f"{WITHOUT_NUMPY}import carpool.wire.tensors"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "numpy" in done.stderr
