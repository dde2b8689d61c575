"""The `carpool` command, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

from support.stack import Stack


def carpool(stack: Stack, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command on a stack until it ends, with whatever status."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("CARPOOL_")}
    command = [sys.executable, "-m", "carpool_cli", *arguments]
    environment = {**ours, "CARPOOL_REDIS_URL": stack.url}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
