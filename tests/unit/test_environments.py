"""Services and model processes in folders and environments that are a user's, and not made for them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from carpool_cli.local.supervisor import Service
from carpool_worker import process_handle
from carpool_worker.process_handle import ModelLoadError, ProcessHandle

LIBRARIES: Final = (
    "carpool", "carpool_batcher", "carpool_worker", "email", "hiredis", "logging", "msgpack", "numpy",
    "queue", "random", "redis", "secrets", "structlog", "types",
)  # fmt: skip
MODEL: Final = """
import argparse, os, sys, carpool_test_utils
options = argparse.ArgumentParser()
options.add_argument("--threshold", type=float, default=0.5)
assert options.parse_args().threshold == 0.5
assert os.environ["PROMETHEUS_MULTIPROC_DIR"] == "/nowhere/of/a/web/program"
class Model:
    def load(self, device):
        import numpy.random, secrets, tempfile  # these import others
        assert options.parse_args().threshold == 0.5
    def predict(self, batch): return batch
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a model, and files that are named like libraries."""
    monkeypatch.chdir(tmp_path)
    for name in LIBRARIES:
        Path(f"{name}.py").write_text(f"raise AssertionError('{name}.py of the user was imported')\n")
    Path("carpool_test_utils.py").touch()
    Path("model.py").write_text(MODEL)
    return tmp_path


@pytest.fixture
def of_web_program(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The variables of a web program, which a worker has removed from its own environment."""
    variables = {"PROMETHEUS_MULTIPROC_DIR": "/nowhere/of/a/web/program"}
    monkeypatch.setattr(process_handle, "OF_WEB_PROGRAMS", variables)
    return variables


@pytest.mark.usefixtures("folder", "of_web_program")
def test_model_process_is_not_disturbed_by_files_beside_its_model() -> None:
    for location in ("model.py:Model", "model:Model"):
        process = ProcessHandle(location, "cpu")
        process.start()
        process.close()


@pytest.mark.usefixtures("folder")
def test_model_that_requires_arguments_is_an_error_that_says_that_there_are_none() -> None:
    for text in (
        "import argparse as a; p = a.ArgumentParser(); p.add_argument('w'); p.parse_args()",
        "exit(3)",
    ):
        Path("model.py").write_text(f"{text}\ndef model(batch): return batch\n")
        process = ProcessHandle("model.py:model", "cpu")
        with pytest.raises(ModelLoadError, match=r"SystemExit: [23]\. .*It gets no arguments"):
            process.start()
        process.close()


def test_services_are_not_disturbed_by_the_working_directory_and_variables(folder: Path) -> None:
    """They fail for a wrong setting, after they have imported all that they need, and made metrics."""
    environment = os.environ | {
        "PROMETHEUS_MULTIPROC_DIR": str(folder / "missing"),
        "PYTHONOPTIMIZE": "2",
        "PYTHONWARNINGS": "error",
        "PYTHONIOENCODING": "latin-1",
        "LC_ALL": "C",
    }
    batcher = Service("batcher", ["carpool_batcher", "--policies", "model:missing"], environment, folder)
    worker = Service("worker", ["carpool_worker", "nö:such/thing"], environment, folder)
    for service in (batcher, worker):
        service.start()
    for service in (batcher, worker):
        assert service.wait_or_kill(30)
        assert service.log is not None
        log = service.log.read_text()
        assert "cannot start" in log, log
        assert "Traceback" not in log, log
    assert not list(folder.glob("*.db"))


def test_metrics_stay_in_the_process_that_has_the_variables_of_a_web_program(tmp_path: Path) -> None:
    program = (
        "from carpool_batcher.meter import BatcherMetrics\nfrom carpool_worker.meter import WorkerMetrics\n"
        "from carpool.prometheus import OF_WEB_PROGRAMS\nBatcherMetrics(), WorkerMetrics('m')\n"
        "import os; print(sorted(OF_WEB_PROGRAMS), [n for n in os.environ if 'multiproc' in n.lower()])"
    )
    names = ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir")
    environment = os.environ | dict.fromkeys(names, str(tmp_path))
    command = [sys.executable, "-P", "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"{sorted(names)} []\n"
    assert not list(tmp_path.iterdir())
