"""Tests that share fixtures run together, and those that wait run beside those that compute."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Final

from support.scheduling import COMPUTING, WAITING

TESTS: Final = Path(__file__).parents[1]

CONFTEST: Final = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
from support.scheduling import Scheduling

def pytest_configure(config):
    config.pluginmanager.register(Scheduling())
"""
SHARING: Final = """
import pytest

@pytest.fixture(scope="module", params=["a", "b"])
def shared(request): ...

@pytest.fixture(params=["x", "y"])
def server(request): ...

@pytest.fixture(scope="module")
def stacks(): ...

@pytest.mark.parametrize("number", range(4))
def test_with_a_parameter(shared, number): ...

@pytest.mark.parametrize("number", range(3))
def test_on_each_server(stacks, server, number): ...
"""
ALONE: Final = """
import pytest

@pytest.mark.parametrize("number", range(20))
def test_alone(tmp_path, number): ...
"""
TREE: Final = {
    "conftest.py": CONFTEST,
    "chaos/test_chaos.py": ALONE,
    "integration/test_sharing.py": SHARING,
    "simulation/test_machine.py": ALONE,
    "unit/test_short.py": ALONE,
}


def run(folder: Path, processes: int) -> list[tuple[str, str]]:
    """Run the tests above; return the process and the name of each, in order."""
    for name, program in TREE.items():
        path = folder / "tests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(program)
    (folder / "pytest.ini").write_text("[pytest]\ntestpaths = tests\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "xdist",
        "-n",
        str(processes),
        "--dist",
        "loadgroup",
        "-v",
    ]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return re.findall(r"^\[(gw\d)\].* PASSED tests/(.*?) *$", done.stdout, re.MULTILINE)


def group(name: str) -> str:
    """What a test must be together with."""
    if "test_sharing" not in name:
        return name.partition("::")[0]
    kind = "shared" if "test_with_a_parameter" in name else "server"
    found = re.search(r"\b[abxy]\b", name.partition("[")[2])
    assert found is not None
    return f"{kind} {found[0]}"


def test_groups_stay_together_and_what_waits_runs_beside_what_computes(tmp_path: Path) -> None:
    ran = run(tmp_path, processes=3)
    assert len(ran) == 20 + 2 * 4 + 2 * 3 + 20 + 20

    processes: defaultdict[str, set[str]] = defaultdict(set)
    for process, name in ran:
        processes[group(name)].add(process)
    assert (
        [len(processes[f"shared {n}"]) for n in "ab"]
        == [len(processes[f"server {n}"]) for n in "xy"]
        == [1, 1]
    )
    assert len(processes["unit/test_short.py"]) == 1

    others = {name.split("/")[0] for process, name in ran if process == "gw2"}
    assert others <= {*WAITING}, "it collects nothing else"

    first = [name.split("/")[0] for process, name in ran if process == "gw0"]
    second = [name.split("/")[0] for process, name in ran if process == "gw1"]
    assert first[0] == "simulation" and second[0] == "chaos"
    for ours, folders in ((first, COMPUTING), (second, WAITING)):  # until the other process helps
        of_ours = [folders.index(folder) for folder in ours if folder in folders]
        assert of_ours == sorted(of_ours)


def test_the_largest_groups_are_first_in_their_folder(tmp_path: Path) -> None:
    (tmp_path / "tests" / "integration").mkdir(parents=True)
    (tmp_path / "tests" / "integration" / "test_alone.py").write_text(ALONE.replace("20", "1"))
    ran = run(tmp_path, processes=1)
    integration = [name for _, name in ran if name.startswith("integration")]
    assert integration[-1].startswith("integration/test_alone.py")
    assert [group(name)[:6] for name in integration] == ["shared"] * 8 + ["server"] * 6 + ["integr"]
