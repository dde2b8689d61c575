"""A test that hangs ends with the stacks of its threads, and the tests after it run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Final

TESTS: Final = Path(__file__).parents[1]

GRACE_S: Final = 5.0  # as long as a busy machine takes for the report of a test, and for the one after it

CONFTEST: Final = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
from support.hangs import HangWatch

def pytest_configure(config):
    config.pluginmanager.register(HangWatch(config, grace_s={GRACE_S}))
"""

# In a file each, with a test after it.
HANGING: Final = {
    "in_a_lock": """
        def test_hangs():
            threading.Thread(target=threading.Event().wait, daemon=True).start()
            threading.Event().wait()
    """,
    # `PyDLL` keeps the lock of the interpreter, so that no other thread runs while libc waits for a signal.
    "in_c_code": """
        def test_hangs():
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
            ctypes.PyDLL(None).pause()
    """,
    "again_in_tearing_down": """
        @pytest.fixture
        def hanging():
            yield
            threading.Event().wait()

        def test_hangs(hanging):
            threading.Event().wait()
    """,
}


def test_hanging_tests_fail_with_their_stacks_and_the_others_run(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\ntimeout = 1\n")
    for name, program in HANGING.items():
        lines = ["import ctypes, signal, threading", "import pytest", textwrap.dedent(program)]
        (tmp_path / f"test_{name}.py").write_text(
            "\n".join([*lines, "@pytest.mark.timeout(0)", "def test_after_it(): pass", ""])
        )
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-p", "pytest_timeout", "-n", "1", "-v"]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # the others take time to start
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    output = done.stdout + done.stderr
    assert done.returncode == 1, output
    for name in HANGING:
        assert f"PASSED test_{name}.py::test_after_it" in output, output
    by_signal = re.findall(r"^FAILED test_(\w+).py::test_hangs - Failed: Timeout", output, re.MULTILINE)
    by_process = re.findall(r"^worker 'gw\d' crashed while running 'test_(\w+).py::", output, re.MULTILINE)
    assert sorted(by_signal) == ["again_in_tearing_down", "in_a_lock"], output
    assert sorted(by_process) == ["again_in_tearing_down", "in_c_code"], output
    stacks = re.findall(r'^ *File ".*/test_(\w+)\.py", line \d+,? in (\w+)', output, re.MULTILINE)
    assert ("in_c_code", "test_hangs") in stacks and ("again_in_tearing_down", "hanging") in stacks, output
    assert "~ Stack of Thread" in output, output  # the thread beside the one that hangs in a lock
