"""Models that call others: what their requests inherit, how errors come back, and that they wait together."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from textwrap import dedent
from typing import Any, Final

import pytest

from carpool import AsyncClient
from carpool.errors import (
    CarpoolError,
    DeadlineExceededError,
    InvalidArgumentError,
    NoResultError,
    UnavailableError,
    UnimplementedError,
)
from carpool.keys import Keys
from conftest import SERVERS
from support.command import carpool
from support.stack import RESULT_S, Stack
from support.waiting import wait_until

DOCUMENT: Final = Path(__file__).parents[2] / "docs" / "composition.md"
NAMES: Final = ("Ask", "AskRaising", "AskPlain", "Picky", "Seen", "Hold", "Meet")
MODELS: Final = tuple(f"calling.py:{name}" for name in NAMES)
BOTH: Final = pytest.mark.parametrize("ask", ["Ask", "AskPlain"])


@pytest.fixture
def stack(stacks: Callable[[Path], Stack]) -> Stack:
    """A stack shared by this module."""
    stack = stacks(SERVERS[0])
    stack.serve(*MODELS)
    return stack


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(stack.url, timeout=RESULT_S) as client:
        yield client


async def eventually(predicate: Callable[[], object], description: str) -> None:
    await asyncio.to_thread(wait_until, predicate, description=description)


def asked(model: str, body: Any) -> dict[str, Any]:
    return {"model": model, "body": body}


# --- results and what is inherited -------------------------------------------------------------------------


@BOTH
async def test_model_asks_another_one(client: AsyncClient, ask: str) -> None:
    """Given many requests in few batches, expect the results of each, of one question and of several."""
    ones = client.infer_many(ask, [asked("Picky", number) for number in range(50)])
    several = client.infer(ask, {"model": "Picky", "bodies": [1, 2, 3]})
    assert list(await asyncio.gather(ones, several)) == [[2 * number for number in range(50)], [2, 4, 6]]


@BOTH
async def test_request_of_a_model_inherits_from_its_own(client: AsyncClient, ask: str) -> None:
    """Given a request that is sent twice, expect that what it asks is asked under the same ID."""
    fields = {"traceparent": "00-1-2-3", "own": "1"}
    seen = [
        await client.infer(ask, asked("Seen", 1), correlation_id="outer-1", tenant="gold", fields=fields)
        for _ in range(2)
    ]
    inner_id = seen[0].pop("id")
    assert inner_id.startswith("outer-1.") and seen[1].pop("id") == inner_id
    assert seen == 2 * [{"tenant": "gold", "traceparent": "00-1-2-3", "called_by": ask}]


async def test_names_of_all_models_that_wait_are_known(client: AsyncClient) -> None:
    seen = await client.infer("Ask", asked("AskPlain", asked("Seen", 1)))
    assert seen["called_by"] == "Ask AskPlain"


# --- errors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ask", ["Ask", "AskRaising", "AskPlain"])
async def test_error_fails_its_own_request_and_names_the_stage(client: AsyncClient, ask: str) -> None:
    """Given that the third of five asks what is refused, expect that the others have their results."""
    bodies = [asked("Picky", "x" if number == 2 else number) for number in range(5)]
    *results, _ = await client.infer_many(ask, [*bodies, asked("Picky", 9)], return_exceptions=True)
    error = results.pop(2)
    assert isinstance(error, InvalidArgumentError)
    assert error.detail == f"{ask} -> Picky: not a number"
    assert results == [0, 2, 6, 8]


async def test_error_names_each_model_that_it_came_through(client: AsyncClient) -> None:
    with pytest.raises(InvalidArgumentError, match="Ask -> AskPlain -> Picky: not a number"):
        await client.infer("Ask", asked("AskPlain", asked("Picky", "x")))


async def test_model_that_would_wait_for_itself_is_refused(client: AsyncClient) -> None:
    with pytest.raises(
        UnimplementedError, match="Ask -> AskPlain -> Ask: a model cannot call one that waits"
    ):
        await client.infer("Ask", asked("AskPlain", asked("Ask", 1)))


async def test_missing_model_is_no_fault_of_the_producer(client: AsyncClient) -> None:
    with pytest.raises(UnavailableError, match="Ask -> nowhere: no worker has registered a model 'nowhere'"):
        await client.infer("Ask", asked("nowhere", 1))


# --- deadlines and withdrawals -----------------------------------------------------------------------------


async def occupied(stack: Stack, client: AsyncClient, log: Path, gate: Path) -> asyncio.Future[list[Any]]:
    """Occupy the process of `Hold` with two requests, one of which is dispatched ahead: others wait."""
    busy = [client.submit("Hold", [name, str(log), str(gate)]) for name in ("first", "second")]
    await eventually(lambda: stack.redis.xlen(Keys("Hold").batches) == 2, "two batches are in flight")
    return asyncio.gather(*busy)


@BOTH
async def test_deadline_holds_through_both_stages(
    client: AsyncClient, stack: Stack, ask: str, gate: Path, tmp_path: Path
) -> None:
    """Given that the second model is busy, expect that it never executes what late requests asked, and that
    they are told which model they waited for. On a busy machine the batcher may answer one first."""
    log, waiting = tmp_path / "log", Keys("Hold").requests
    busy = await occupied(stack, client, log, gate)
    details = ""
    for number in range(20):
        with pytest.raises(DeadlineExceededError) as late:
            await client.infer(ask, asked("Hold", [f"late-{number}", str(log), str(gate)]), timeout=2.0)
        details += f"{late.value.detail}\n"
        if f"{ask} -> Hold: " in details:
            break
    assert f"{ask} -> Hold: " in details
    await eventually(lambda: not stack.redis.xlen(waiting), "what it asked has expired")
    gate.touch()
    await busy
    await client.infer("Hold", ["last", str(log), str(gate)])
    assert log.read_text().split() == ["first", "second", "last"]


async def test_withdrawing_a_request_withdraws_what_it_asked(
    client: AsyncClient, stack: Stack, gate: Path, tmp_path: Path
) -> None:
    """Given a request that is executed, and asks a busy model, expect that this gets the withdrawal."""
    log, waiting = tmp_path / "log", Keys("Hold").requests
    busy = await occupied(stack, client, log, gate)
    unwanted = client.submit("Ask", asked("Hold", ["unwanted", str(log), str(gate)]))
    await eventually(lambda: stack.redis.xlen(waiting), "what it asked waits")
    unwanted.cancel()
    await eventually(lambda: not stack.redis.xlen(waiting), "it does not wait any more")
    gate.touch()
    await busy
    stack.wait_until_idle("Ask")
    assert log.read_text().split() == ["first", "second"]


# --- several batches at a time -----------------------------------------------------------------------------


async def test_process_executes_several_batches_at_a_time(client: AsyncClient, tmp_path: Path) -> None:
    """Given requests that wait for each other, each in a batch of its own, expect that all have results."""
    results = await asyncio.gather(*[client.infer("Meet", [4, str(tmp_path / "go")]) for _ in range(4)])
    assert results == [4, 4, 4, 4]


async def test_death_of_the_process_costs_no_request(tmp_path: Path) -> None:
    """Given a process that dies while it executes three batches, expect that each is executed again."""
    go = tmp_path / "go"
    with Stack(tmp_path / "stack") as stack:
        stack.serve("calling.py:Meet")
        async with AsyncClient(stack.url, timeout=RESULT_S) as client:
            sent = [client.submit("Meet", [9, str(go)]) for _ in range(3)]
            await eventually(Path(f"{go}.3").exists, "three batches are executed")
            (process,) = stack.served_by("Meet").children()
            go.touch()
            os.kill(process, signal.SIGKILL)
            assert len(await asyncio.gather(*sent)) == 3


# --- the document ------------------------------------------------------------------------------------------


def test_examples_of_the_document(tmp_path: Path) -> None:
    """docs/composition.md: its programs are served, and its commands print what it says."""
    blocks = re.findall(r"(?:^    .*\n|^\n(?=\n*    ))+", DOCUMENT.read_text(), re.MULTILINE)
    examples = [dedent(block).strip("\n") for block in blocks]
    with Stack(tmp_path / "stack") as stack:
        stack.batcher()
        for program in (example for example in examples if example.startswith("# ")):
            (tmp_path / program.partition("\n")[0].removeprefix("# ")).write_text(program)
        for commands in (example for example in examples if example.startswith("$ ")):
            up, infer, printed = commands.removeprefix("$ ").split("\n")
            workers = [stack.worker(f"{tmp_path}/{spec}", ready=False) for spec in up.split()[2:]]
            for worker in workers:
                worker.wait_for("worker ready")
            done = carpool(stack.url, *shlex.split(infer)[2:])
            assert done.stdout.strip() == printed, done.stderr
            for worker in workers:
                worker.kill()


# --- no worker ---------------------------------------------------------------------------------------------


async def test_request_without_a_worker_says_so(tmp_path: Path) -> None:
    """Given a worker that was killed, expect that a client which waits is told why in the end, and one which
    does not at once."""
    with Stack(tmp_path) as stack:
        stack.serve("square")
        async with AsyncClient(stack.url) as client, AsyncClient(stack.url, require_worker=True) as hasty:
            assert await hasty.infer("square", 2) == 4
            stack.served_by("square").kill()
            await eventually(lambda: not stack.live_workers("square"), "its lease has run out")
            with pytest.raises(
                UnavailableError, match="'square': it is registered, but no worker serves it now"
            ):
                await asyncio.wait_for(_until_raised(hasty), RESULT_S)
            with pytest.raises(DeadlineExceededError, match="; no worker serves") as raised:
                await client.infer("square", 3, timeout=0.5)
            entry_id = stack.send("square", body="3", expiration=200)
            detail = stack.result("square", entry_id)["detail"]
            assert detail == "expired: still waiting 200 ms after its arrival; no worker serves its model now"
            for service in stack.services:
                service.kill()  # the batcher, too: only the client can tell
            with pytest.raises(
                NoResultError, match=r"no result within 0\.3 s; no worker serves 'square' now"
            ):
                await client.infer("square", 3, timeout=0.3)
            assert raised.value.status == "DEADLINE_EXCEEDED"


async def _until_raised(client: AsyncClient) -> None:
    """Send until the client has noticed, which it looks for once a second; none of these waits for long."""
    while True:
        try:
            await client.infer("square", 3, timeout=0.1)
        except UnavailableError:
            raise
        except CarpoolError:
            continue
