"""How child processes end."""

from __future__ import annotations

import signal
import subprocess


def wait_or_kill(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    """Wait until a process has ended, and kill it after `timeout_s`. Whether it ended by itself."""
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False
    return True


def exit_cause(code: int) -> str:
    """An exit code for logs and errors: `exit code 1`, or the name of the signal that ended the process."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
