"""Models with parameters and settings from outside, on a whole stack; and a worker of a file of models."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any, Final

import pytest

from carpool.client.sync import Client
from support.command import carpool
from support.stack import Service, Stack
from support.waiting import EVENTUALLY_S, wait_until

MODELS: Final = """
from pathlib import Path
class Classifier:
    max_batch_size = 4
    def load(self, device, *, weights: Path, token: str = "", times: int = 1):
        self.found = [weights.read_text() * times, len(token), self.max_batch_size]
    def predict(self, batch):
        return [self.found for _ in batch]
class Counting:
    def __init__(self, *, numbers: list[int]):
        self.numbers = numbers
    def begin(self, requests):
        for request in requests:
            request.state = iter(self.numbers)
    def step(self, requests):
        for request in requests:
            number = next(request.state, None)
            request.finish() if number is None else request.emit(number)
"""
FILE: Final = """
[models.small]
object = "package.models:Classifier"
parameters = { weights = "small.txt" }
parameter_files = { token = "token" }
settings = { max_batch_size = 2 }
[models.count]
object = "package/models.py:Counting"
replicas = 2
[models.count.parameters]
numbers = [3, 1, 2]
"""
SECRET: Final = "s3cret-of-this-test"  # noqa: S105
LONG: Final = 1_000_000  # bytes: more than a socket takes at once


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "stack"
    (folder / "package").mkdir(parents=True)
    (folder / "package" / "__init__.py").touch()
    (folder / "package" / "models.py").write_text(MODELS)
    for name in ("small", "large"):
        (folder / f"{name}.txt").write_text(name)
    (folder / "token").write_text(f"{SECRET}\n")
    (folder / "carpool.toml").write_text(FILE)
    return folder


def of_models(stack: Stack) -> dict[str, Any]:
    """What `carpool models --json` has of each model."""
    return {state["model"]: state for state in json.loads(carpool(stack.url, "models", "--json").stdout)}


def test_one_class_with_different_parameters_is_two_models(stack: Stack, folder: Path) -> None:
    where = f"{folder / 'package' / 'models.py'}:Classifier"
    stack.batcher()
    secret = ("--param-file", f"token={folder / 'token'}")
    given = ("--param", f"weights={folder / 'small.txt'}", *secret, "--set", "max_batch_size=2")
    small = stack.worker(f"small={where}", *given, ready=False)
    (folder / "long").write_text("x" * LONG)
    of_large = (
        "--param",
        f"large.weights={folder / 'large.txt'}",
        "--param-file",
        f"token={folder / 'long'}",
    )
    large = stack.worker(f"large={where}", *of_large, ready=False)
    wrong = stack.worker(f"wrong={where}", "--param", "weight=1", "--param", "times=many", ready=False)
    for name in ("small", "large"):
        stack.wait_for_model(name)
    with Client(stack.url, timeout=30) as client:
        for worker, name, length, size in ((small, "small", len(SECRET), 2), (large, "large", LONG, 4)):
            assert client.infer(name, 1) == [name, length, size]
            (process,) = worker.children()
            os.kill(process, signal.SIGKILL)
            worker.wait_for("model process replaced")
            assert client.infer(name, 1) == [name, length, size]
    shown = {"weights": str(folder / "small.txt"), "token": "***", "times": "1"}
    assert of_models(stack)["small"]["parameters"] == shown
    page = carpool(stack.url, "models").stdout
    assert f"Parameters of small: weights={folder / 'small.txt'}, token=***, times=1\n" in page
    assert "max_batch_size" in carpool(stack.url, "config", "small").stdout
    assert stack.redis.hget("carpool:{small}:model", "max_batch_size") == b"2"
    reason = wrong.wait_for("model cannot be loaded")["reason"]
    assert reason == (
        "there is no parameter 'weight' (--param), did you mean weights?; "
        "the parameter weights is missing (--param weights=VALUE); "
        "the parameter times (--param) is 'many': must be a valid integer. "
        "Classifier takes weights: Path, token: str = '', times: int = 1"
    )
    assert wrong.process.wait(EVENTUALLY_S) == 1
    assert [service.terminate() for service in (small, large)] == [0, 0]
    for log in (small.log, large.log, wrong.log):
        assert SECRET not in log.read_text()


def start(stack: Stack, folder: Path) -> Service:
    worker = stack.worker(str(folder / "carpool.toml"), ready=False)
    stack.wait_for_model("small")
    stack.wait_for_model("count", workers=2)
    return worker


def test_worker_of_a_file_is_a_process_for_each_model(stack: Stack, folder: Path) -> None:
    stack.batcher()
    worker = start(stack, folder)
    with Client(stack.url, timeout=30) as client:
        assert client.infer("small", 1) == ["small", len(SECRET), 2]
        assert list(client.stream("count", 1)) == [3, 1, 2]
    assert of_models(stack)["count"]["parameters"] == {"numbers": "[3, 1, 2]"}
    assert worker.terminate() == 0
    assert {event["model"] for event in worker.events("worker stopped")} == {"small", "count"}
    worker = start(stack, folder)
    first, second = worker.children()
    os.kill(first, signal.SIGKILL)
    assert worker.process.wait(EVENTUALLY_S) == 1
    (ended,) = worker.events("worker of a model ended, stopping the others")
    assert ended["status"] == -signal.SIGKILL
    wait_until(lambda: not Path(f"/proc/{second}").exists(), description="the other one has ended")
    (stopped,) = worker.events("worker stopped")
    assert stopped["model"] != ended["model"]
    assert SECRET not in worker.log.read_text()
