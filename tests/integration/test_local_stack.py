"""The examples of docs/testing.md, in a pytest of their own; and what pytest costs without a fixture."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Final

ROOT: Final = Path(__file__).parents[2]
SOURCES: Final = [str(ROOT / name) for name in ("shared", "services")]


def example_files() -> dict[str, str]:
    """The files in the document, each of which begins with its name in a comment."""
    text = (ROOT / "docs/testing.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^    # (\w+\.py)\n((?:(?:    .*)?\n)+?)(?=\S|    # \w+\.py\n)", text, re.MULTILINE)
    return {name: dedent(code) for name, code in blocks}


def run(home: Path) -> subprocess.CompletedProcess[str]:
    """pytest in a new interpreter, with the plugin by name: an installed one would be found by itself."""
    (home / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    own = ("CARPOOL_", "PYTEST_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    environment |= {"PYTHONPATH": os.pathsep.join(SOURCES), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "carpool_testing.plugin"],
        cwd=home,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_examples_in_the_document(tmp_path: Path) -> None:
    files = example_files()
    assert set(files) == {"models.py", "test_models.py", "conftest.py", "test_stack.py"}
    for name, code in files.items():
        (tmp_path / name).write_text(code)
    done = run(tmp_path)
    tests = sum(len(re.findall(r"^def test_", code, re.MULTILINE)) for code in files.values())
    assert done.returncode == 0 and f"{tests} passed" in done.stdout, done.stdout + done.stderr


def test_a_stack_that_cannot_start_shows_its_logs(tmp_path: Path) -> None:
    (tmp_path / "models.py").write_text("raise OSError('no weights')\n")
    for name in ("conftest.py", "test_stack.py"):
        (tmp_path / name).write_text(example_files()[name])
    done = run(tmp_path)
    assert "no weights" in done.stdout and "1 error" in done.stdout, done.stdout


def test_without_models_it_is_said_how_to_name_them(tmp_path: Path) -> None:
    (tmp_path / "test_stack.py").write_text(example_files()["test_stack.py"])
    done = run(tmp_path)
    assert "define a fixture carpool_models" in done.stdout, done.stdout


def test_the_plugin_imports_nothing_before_a_fixture_is_used(tmp_path: Path) -> None:
    (tmp_path / "test_app.py").write_text(
        "import sys\n"
        "def test_one():\n"
        "    own = {name for name in sys.modules if name.startswith('carpool')}\n"
        "    assert own == {'carpool_testing', 'carpool_testing.plugin'}\n"
        "    assert not {'numpy', 'redis', 'msgpack'} & {*sys.modules}\n"
    )
    done = run(tmp_path)
    assert done.returncode == 0, done.stdout
