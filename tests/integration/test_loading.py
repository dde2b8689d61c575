"""Models that are being loaded, for which clients wait; and requests that nobody reads."""

from __future__ import annotations

import json
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest

from carpool.client.aio import AsyncClient
from carpool.client.sync import Client
from carpool.errors import DeadlineExceededError, NotFoundError
from carpool.keys import Keys
from support.command import carpool
from support.stack import Service, Stack
from support.waiting import EVENTUALLY_S, Stopwatch, ample_ms, wait_until

# A worker that loads is not to be forgotten because it is held up.
LEASE: Final = ("--lease-ms", "30000")
SHORT_LEASE: Final = ("--lease-ms", "600")
SLOW: Final = """
import os, time
class Slow:
    def load(self, device):
        while not os.path.exists({gate!r}):
            time.sleep(0.01)
        if os.path.getsize({gate!r}):
            raise OSError("no weights")
    def predict(self, batch):
        return batch
"""


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """The model loads once this file exists; with any content, it cannot be loaded."""
    return tmp_path / "gate"


@pytest.fixture
def loading(stack: Stack, gate: Path, tmp_path: Path) -> Service:
    """A worker that loads Slow."""
    return load(stack, gate, tmp_path, LEASE)


def load(stack: Stack, gate: Path, tmp_path: Path, lease: tuple[str, str]) -> Service:
    (tmp_path / "slow.py").write_text(SLOW.format(gate=str(gate)))
    stack.batcher()
    worker = stack.worker(f"{tmp_path / 'slow.py'}:Slow", *lease, ready=False)
    wait_until(lambda: stack.redis.exists(Keys("Slow").loading), description="it tells that it loads")
    return worker


def models(stack: Stack) -> tuple[list[dict[str, Any]], str]:
    """What `carpool models --json` prints, and its warnings."""
    done = carpool(stack.url, "models", "--json", check=True)
    return json.loads(done.stdout), done.stderr


@pytest.mark.usefixtures("loading")
def test_request_waits_until_the_model_is_loaded(stack: Stack, gate: Path) -> None:
    ((state,), warnings) = models(stack)
    assert (state["model"], state["loading"], state["workers"], warnings) == ("Slow", True, 0, "")
    for only in ([], ["--model", "Slow"]):
        page = carpool(stack.url, "top", "--once", *only, check=True).stdout
        assert re.search(r"^Slow .* loading ", page, re.MULTILINE), page
        assert not re.search("is active|no model process", page), page
    stack.serve("plain.py:label")
    page = carpool(stack.url, "top", "--once", check=True).stdout
    assert re.findall(r"^(label|Slow) ", page, re.MULTILINE) == ["Slow", "label"]
    with Client(stack.url, timeout=EVENTUALLY_S) as client, ThreadPoolExecutor() as threads:
        inferred = threads.submit(client.infer, "Slow", 7)
        submitted = client.submit("Slow", 8)
        ready = threads.submit(client.wait_ready, "Slow", EVENTUALLY_S)
        streamed = threads.submit(lambda: list(client.stream("Slow", 9)))
        assert not (inferred.done() or submitted.done() or ready.done())
        gate.touch()
        assert (inferred.result(), submitted.result(), ready.result()) == (7, 8, None)
        assert streamed.result() == [9]
        client.wait_ready("Slow", EVENTUALLY_S)
    wait_until(lambda: not models(stack)[0][0]["loading"], description="it is loaded")


async def ample_timeout_s(client: AsyncClient) -> float:
    """A timeout in which Redis replies, also on a busy machine: long compared with connecting to it."""
    stopwatch = Stopwatch()
    await client.models()
    return ample_ms(stopwatch, 200) / 1000


@pytest.mark.usefixtures("loading")
async def test_a_timeout_is_for_loading_and_executing(stack: Stack) -> None:
    async with AsyncClient(stack.url) as client:
        timeout_s = await ample_timeout_s(client)
        with pytest.raises(DeadlineExceededError) as infer:
            await client.infer("Slow", 7, timeout=timeout_s)
        assert f"'Slow': a worker is loading it, for {timeout_s:g} s" in str(infer.value)
        with pytest.raises(DeadlineExceededError) as wait:
            await client.wait_ready("Slow", timeout=timeout_s)
        assert f"not ready after {timeout_s:g} s: a worker is loading it" in str(wait.value)


def test_model_that_cannot_be_loaded_is_not_found(stack: Stack, gate: Path, loading: Service) -> None:
    with Client(stack.url, timeout=EVENTUALLY_S) as client:
        submitted = client.submit("Slow", 7)
        written = gate.with_suffix(".written")
        written.write_text("broken")
        written.rename(gate)  # never seen without its content
        with pytest.raises(NotFoundError, match="no worker has registered a model 'Slow'"):
            submitted.result()
    wait_until(lambda: not loading.alive, description="its worker has ended")
    assert not stack.redis.exists(Keys("Slow").loading)


def test_worker_that_is_killed_while_it_loads_is_forgotten(stack: Stack, gate: Path, tmp_path: Path) -> None:
    load(stack, gate, tmp_path, SHORT_LEASE).kill()
    wait_until(lambda: not stack.redis.exists(Keys("Slow").loading), description="its lease ran out")


async def test_waiting_for_a_model_says_what_is_missing(stack: Stack) -> None:
    async with AsyncClient(stack.url) as client:
        timeout_s = await ample_timeout_s(client)
        with pytest.raises(DeadlineExceededError, match="no worker has registered it"):
            await client.wait_ready("square", timeout=timeout_s)
        stack.serve("square")
        await client.wait_ready("square", timeout=EVENTUALLY_S)
        stack.served_by("square").terminate()
        with pytest.raises(DeadlineExceededError, match="registered, but no worker serves it now"):
            await client.wait_ready("square", timeout=timeout_s)


def test_closed_terminal_stops_a_worker_as_sigterm_does(stack: Stack) -> None:
    stack.serve("square")
    worker = stack.served_by("square")
    worker.signal(signal.SIGHUP)
    wait_until(lambda: not worker.alive, description="it has stopped")
    assert worker.events("worker stopped")[0]["clean"]
    assert not stack.live_workers("square")


def test_requests_that_nobody_reads_are_shown(stack: Stack) -> None:
    stack.serve("square")
    for key in ("carpool:{sqare}:requests", "carpool:square:requests", "carpool:{other}:requests"):
        stack.redis.xadd(key, {"body": "7"})
    stack.send("square", body="7")
    states, warnings = models(stack)
    assert [state["model"] for state in states] == ["square"]
    # A batcher that was held up is told of, too.
    lines = sorted(line for line in warnings.splitlines() if "read by nobody" in line)
    assert len(lines) == 3
    assert "carpool:square:requests are read by nobody: the name of the model needs braces" in lines[0]
    assert "{other}:requests are read by nobody: no worker has registered a model 'other', and" in lines[1]
    assert "no worker has registered a model 'sqare'; did you mean 'square'?" in lines[2]
