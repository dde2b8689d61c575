"""Model processes that are replaced because of their age: nothing fails, and others go on meanwhile."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from carpool.client import Client
from carpool.keys import DEFAULT_PREFIX
from carpool.store.connection import Link
from carpool.store.directory import Directory
from support.http import call
from support.models.ageing import MIB
from support.stack import Stack
from support.waiting import wait_until

REPLACED: Final = "model process replaced"
REQUESTS_MAX: Final = 5000  # in which a process that is replaced after 20 has been replaced several times
OLD: Final = "model process has reached a limit, another takes its place"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("ageing")) as started:
        started.batcher()
        yield started


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[Client]:
    with Client(stack.url, timeout=60.0) as connected:
        yield connected


def test_no_request_fails_while_processes_are_replaced_many_times(stack: Stack, client: Client) -> None:
    """Two replicas under load, each of which is replaced after 20 requests: one at a time."""
    worker = stack.worker("ageing.py:Renewed", "--replicas", "2", "--http-port", "0")
    pids: set[int] = set()
    sent = 0
    while len(pids) < 8:
        pids.update(client.infer_many("Renewed", range(64), in_flight=16))  # any error ends this
        sent += 64
    wait_until(
        lambda: own_metrics(worker.status_url).get('executed_total{model="Renewed"}') == f"{sent}.0",
        description="each request was executed, and none twice",
    )
    begun = [e for e in worker.events() if e["event"] in (REPLACED, OLD)]
    kinds = [event["event"] == REPLACED for event in begun]
    # Each begins after the one before has taken its place: never two at a time.
    assert kinds[: 2 * (len(kinds) // 2)] == [False, True] * (len(kinds) // 2)
    assert not worker.events("model process died")
    assert {event["loads"] for event in begun if "loads" in event} == {"beside it"}
    text = call(worker.status_url, "GET", "/metrics").body.decode()
    assert 'carpool_model_processes_replaced_total{model="Renewed",reason="requests"}' in text
    memory = [line for line in text.splitlines() if line.startswith("carpool_model_process_memory_bytes{")]
    assert len(memory) == 2 and all(float(line.split()[-1]) > 10 * MIB for line in memory)
    directory = Directory(Link(stack.url, name="test"), DEFAULT_PREFIX)
    wait_until(
        lambda: [process.resident > 10 * MIB for process in directory.sample("Renewed").memory] == [True] * 2,
        description="`carpool top` can show what both processes take",
    )
    directory.close()


@pytest.mark.parametrize(("device", "loads"), [("cpu", "beside it"), ("cuda:0", "afterwards")])
def test_an_async_process_is_replaced_between_its_executions(
    stack: Stack, client: Client, tmp_path: Path, device: str, loads: str
) -> None:
    """Given a model that executes several batches at a time, calls another one whose processes are replaced,
    too, and has a parameter that no pipe takes at once. The first process has no space beside it on a GPU."""
    name, salt = f"Async-{device[:3]}", tmp_path / "salt"
    salt.write_text("x" * 1_000_000)
    stack.worker("Inner=ageing.py:Renewed")
    spec = f"{name}=ageing.py:RenewedAsync"
    worker = stack.worker(spec, "--device", device, "--param-file", f"salt={salt}", "--http-port", "0")
    results: list[list[int]] = []

    def bodies() -> Iterator[int]:
        """Until enough processes have been seen: there is always something to execute."""
        yield from itertools.takewhile(lambda _: len({pid for pid, *_ in results}) < 5, range(REQUESTS_MAX))

    for result in client.map(name, bodies(), in_flight=24):  # any error ends this
        results.append(result)
    assert len(results) < REQUESTS_MAX
    assert max(together for _, together, *_ in results) == 4
    assert {length for *_, length in results} == {1_000_000}
    expected = {f'{metric}_total{{model="{name}"}}': f"{len(results)}.0" for metric in ("begun", "ended")}
    wait_until(
        lambda: expected.items() <= own_metrics(worker.status_url).items(),
        description="each request was executed once, and all processes have told what they counted",
    )
    assert {event["loads"] for event in worker.events(OLD)} == {loads}
    assert len(worker.events(REPLACED)) >= 4
    assert not worker.events("model process died")


def test_a_leaking_model_stays_under_its_limit(stack: Stack, client: Client) -> None:
    """It keeps 1 MiB of each request; the one that it executes when the limit is reached may be above."""
    worker = stack.worker("ageing.py:Leaking")
    seen: dict[int, int] = {}
    for pid, resident_bytes in client.map("Leaking", itertools.count(), in_flight=1):
        seen[pid] = max(seen.get(pid, 0), resident_bytes)
        if len(seen) >= 4:
            break
    assert {event["reason"] for event in worker.events(OLD)} == {"memory"}
    assert max(seen.values()) < (140 + 8) * MIB
    assert not worker.events("model process died")


def test_memory_of_decoder_processes_counts(stack: Stack, client: Client) -> None:
    stack.worker("ageing.py:LeakingDecoder")
    pids = client.map("LeakingDecoder", range(REQUESTS_MAX), in_flight=4)
    first = next(pids)
    assert any(pid != first for pid in pids)


def test_slots_of_a_stepping_model_run_out_before_its_process_is_replaced(
    stack: Stack, client: Client
) -> None:
    """It could not go on from chunks, which readers have seen: so each stream comes from one process."""
    worker = stack.worker("ageing.py:Steps")
    pids: set[int] = set()
    while len(pids) < 4:
        for chunks in map(list, [client.stream("Steps", 30) for _ in range(8)]):
            assert len(chunks) == 30 and len(set(chunks)) == 1
            pids.update(chunks)
    assert len(worker.events(REPLACED)) >= 3


def test_a_model_that_cannot_be_loaded_again_keeps_its_process(
    stack: Stack, client: Client, tmp_path: Path
) -> None:
    model = tmp_path / "once.py"
    model.write_text(
        "import os, pathlib\n"
        "class Once:\n"
        "    max_requests_per_process = 3\n"
        "    def load(self, device):\n"
        "        pathlib.Path(__file__).with_name('loaded').touch(exist_ok=False)\n"
        "    def predict(self, batch):\n"
        "        return [os.getpid() for _ in batch]\n"
    )
    worker = stack.worker(f"{model}:Once")
    wait_until(
        lambda: (
            client.infer("Once", 1),
            worker.events("model cannot be loaded again, keeping the old process"),
        )[1],
        description="the next process has failed to load the model",
        timeout_s=60.0,
    )
    assert len({client.infer("Once", number) for number in range(10)}) == 1
    assert worker.terminate() == 0


def test_a_process_without_space_beside_it_leaves_first(stack: Stack, client: Client, tmp_path: Path) -> None:
    """As a model that takes a GPU of which nothing is known."""
    worker = stack.worker("Gpu=ageing.py:Renewed", "--device", "cuda:0,cuda:1", "--replicas", "2")
    pids: set[int] = set()
    for pid in client.map("Gpu", itertools.count(), in_flight=8):
        pids.add(pid)
        if len(pids) >= 5:
            break
    old = worker.events(OLD)
    assert {event["loads"] for event in old} == {"afterwards"}
    assert not worker.events("model process died")


def test_a_bound_model_is_refused_the_settings(stack: Stack, tmp_path: Path) -> None:
    model = tmp_path / "bound.py"
    model.write_text(
        "class Bound:\n"
        "    binds_sequences = True\n"
        "    max_requests_per_process = 3\n"
        "    def predict(self, batch):\n"
        "        return batch\n"
    )
    worker = stack.worker(f"{model}:Bound", ready=False)
    event = worker.wait_for("model cannot be loaded")
    assert "max_requests_per_process: a process of a bound model has the states" in event["reason"]


def test_metrics_of_a_model_are_exported_by_its_worker(stack: Stack, client: Client) -> None:
    """Also what was counted by processes that have been replaced since."""
    worker = stack.worker("ageing.py:Measuring", "--http-port", "0")
    pids: set[int] = set()
    sent = 0
    while len(pids) < 3:
        pids.update(client.infer_many("Measuring", ["a", "abc", "abcde"]))
        sent += 3
    words = 'words_total{language="en",model="Measuring"}'
    lines = wait_until(
        lambda: found if (found := own_metrics(worker.status_url)).get(words) == f"{sent}.0" else None,
        description="all processes have told what they counted",
    )
    assert lines is not None and lines['longest{model="Measuring",replica="0"}'] == "5.0"
    assert lines['letters_count{model="Measuring"}'] == lines['letters_bucket{le="+Inf",model="Measuring"}']
    steps = stack.worker("ageing.py:measured_steps", "--http-port", "0")
    assert client.infer("measured_steps", 5) == [*range(5)]
    wait_until(
        lambda: own_metrics(steps.status_url).get('steps_taken_total{model="measured_steps"}') == "5.0",
        description="the process has told of all steps, though nothing follows",
    )


def own_metrics(url: str) -> dict[str, str]:
    """Those that Carpool and Python have not."""
    text = call(url, "GET", "/metrics").body.decode()
    found: dict[str, str] = {}
    for line in text.splitlines():
        if not line.startswith(("#", "carpool_", "python_", "process_")):
            name, _, value = line.rpartition(" ")
            head, brace, labels = name.partition("{")
            found[head + brace + ",".join(sorted(labels.rstrip("}").split(","))) + "}" * bool(brace)] = value
    return found
