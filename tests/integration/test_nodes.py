"""Nodes start and stop models of a repository, and replace versions while requests arrive: docs/nodes.md."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import pytest

from carpool.client.aio import AsyncClient
from carpool.keys import Keys
from carpool.process_names import worker_of
from support.command import carpool, running
from support.repository import (
    load,
    make_repository,
    nodes,
    serving,
    start_node,
    unload,
    wait_for_serving,
    worker_processes,
)
from support.stack import Stack
from support.waiting import Stopwatch, wait_until

PRODUCERS: Final = 3
RATE: Final = 100  # requests/s of each producer
INTERVAL_S: Final = 0.02
TAKEN_WITHIN_S: Final = 6.0


class Producers:
    """Three producers, each with a client and a thread, that send until the end of the block. They retry
    nothing. `answers`: the version that answered each request, by the number of the request."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=lambda: asyncio.run(self._run())) for _ in range(PRODUCERS)]
        self.answers: dict[int, str] = {}
        self._numbers = count(1)
        self.errors: list[BaseException] = []
        self.sent = 0

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)
        assert not any(thread.is_alive() for thread in self._threads)

    def wait_for(self, version: str, more: int = 50) -> None:
        """Wait until so many further answers are of this version."""
        target = self._counted(version) + more
        wait_until(
            lambda: self._counted(version) >= target or self.errors,
            description=f"{more} more answers of version {version}",
            timeout_s=60,
        )

    def _counted(self, version: str) -> int:
        return list(self.answers.values()).count(version)

    async def _run(self) -> None:
        async with AsyncClient(self._url) as client:
            tasks: set[asyncio.Task[None]] = set()
            while not self._stop.is_set():
                for _ in range(int(RATE * INTERVAL_S)):
                    self.sent = number = next(self._numbers)
                    tasks.add(task := asyncio.create_task(self._ask(client, number)))
                    task.add_done_callback(tasks.discard)
                await asyncio.sleep(INTERVAL_S)
            await asyncio.gather(*tasks)

    async def _ask(self, client: AsyncClient, number: int) -> None:
        try:
            version, _, answered = (await client.infer("echo", number, timeout=60)).partition(":")
            assert answered == str(number)
            self.answers[number] = version
        except BaseException as error:
            self.errors.append(error)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_repository(tmp_path_factory.mktemp("repository"), entries=("echo", "other", "pair"))
    (folder / "pair" / "carpool.toml").write_text("replicas = 2")
    return folder


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Iterator[Stack]:
    """A stack with a node that has room for two processes. Tests leave nothing loaded."""
    with Stack(tmp_path_factory.mktemp("stack")) as stack:
        stack.batcher()
        start_node(stack, repository, 2)
        yield stack


@pytest.fixture
def house(shared: Stack) -> Iterator[Stack]:
    yield shared
    for model in ("echo", "other", "pair"):
        carpool(shared.url, "unload", model)


def infer(stack: Stack, model: str = "echo") -> str:
    return carpool(stack.url, "infer", model, '"a"', check=True).stdout.strip()


def test_version_replaces_another_one_while_three_producers_send(house: Stack, gate: Path) -> None:
    """Given a house without room for both versions: expect that processes are exchanged one after the other,
    that no request fails, and that nothing of the old version answers once the command has ended."""
    loaded = load(house, "echo", "--version", "1", "--replicas", "2")
    assert loaded.stdout == "2 of 2 processes of echo version 1 serve\n"
    second = ("--version", "2", "--param", f"gate={gate}")
    fewest = 2
    with Producers(house.url) as producers:
        producers.wait_for("1")
        with running(house.url, "load", "echo", *second) as command:
            wait_for_serving(house, {"1": 1})  # with exactly one less than before, while one loads
            gate.touch()
            while (found := serving(house)) != {"2": 2}:
                fewest = min(fewest, sum(found.values()))
            done = command.end()
        assert done.returncode == 0, done.stderr
        asked_before = producers.sent
        producers.wait_for("2", 100)
    assert not producers.errors and len(producers.answers) == producers.sent
    assert {version for body, version in producers.answers.items() if body > asked_before} == {"2"}
    assert fewest >= 1
    assert load(house, "echo", *second).stderr == ""  # the same again: nothing changes
    (wanted,) = nodes(house)["wanted"]
    assert (wanted["version"], wanted["replicas"], wanted["state"]) == ("2", 2, "SERVING")


def used(stack: Stack) -> int:
    return sum(node["used"] for node in nodes(stack)["nodes"])


def test_load_that_fails_says_why_and_leaves_what_served(house: Stack) -> None:
    load(house, "echo", "--version", "1")
    for _ in range(2):  # it is tried again when it is asked for again
        failed = load(house, "echo", "--version", "2", "--param", "reason=no weights", check=False)
        assert failed.returncode == 1
        assert "carpool load: echo is not loaded: RuntimeError: no weights\n" in failed.stderr
        assert serving(house) == {"1": 1} and infer(house) == '"1:a"'
    misspelt = load(house, "echo", "--param", "colour=red", check=False)
    assert misspelt.returncode == 1 and "colour" in misspelt.stderr
    table = carpool(house.url, "nodes").stdout
    assert "echo version 2 could not be loaded on" in table and "RuntimeError: no weights" in table
    wait_for_serving(house, {"1": 1})


def test_other_parameters_are_a_new_generation_and_other_replicas_are_not(house: Stack) -> None:
    load(house, "echo", "--version", "1")
    (first,) = nodes(house)["wanted"]
    load(house, "echo", "--version", "1", "--replicas", "2")
    (more,) = nodes(house)["wanted"]
    assert more["generation"] == first["generation"] and serving(house) == {"1": 2}
    load(house, "echo", "--version", "1", "--replicas", "1")
    wait_for_serving(house, {"1": 1})
    load(house, "echo", "--version", "1", "--param", "label=x")
    (labelled,) = nodes(house)["wanted"]
    assert labelled["generation"] > first["generation"] and labelled["parameters"] == {"label": "x"}
    assert infer(house) == '"1x:a"'


def test_an_entry_declares_how_many_processes_it_has(house: Stack) -> None:
    assert load(house, "pair", "--version", "1").stdout == "2 of 2 processes of pair version 1 serve\n"
    assert load(house, "pair", "--replicas", "1").stdout == "1 of 1 processes of pair version 3 serve\n"
    assert load(house, "pair", "--version", "2").stdout == "1 of 1 processes of pair version 2 serve\n"


def test_full_house_says_what_lacks_and_a_name_may_differ_from_its_entry(house: Stack) -> None:
    load(house, "other", "--version", "1", "--replicas", "2")
    assert load(house, "nothing", check=False).stderr == (
        "carpool load: no node has the entry 'nothing' in its repository; there are: echo, other, pair\n"
    )
    lacking = load(house, "echo", "--version", "1", check=False)
    assert lacking.returncode == 1 and "has 0 of 2 free" in lacking.stderr
    assert [wanted["model"] for wanted in nodes(house)["wanted"]] == ["other"]  # nothing remains of it
    load(house, "other", "--version", "1", "--replicas", "1")
    load(house, "another=echo")
    assert infer(house, "another") == '"3:a"'  # the newest
    carpool(house.url, "unload", "another", check=True)


def test_later_one_of_two_loads_wins_and_the_earlier_command_ends(house: Stack, gate: Path) -> None:
    load(house, "echo", "--version", "1")
    with running(house.url, "load", "echo", "--version", "2", "--param", f"gate={gate}") as earlier:
        wait_until(lambda: used(house) == 2, description="version 2 loads")
        assert load(house, "echo", "--version", "3").returncode == 0
        ended = earlier.end()
    assert ended.returncode == 1
    assert "carpool load: echo does not serve: generation" in ended.stderr
    assert "(version 3) was loaded instead" in ended.stderr
    wait_for_serving(house, {"3": 1})


def test_version_with_a_share_serves_beside_the_other_one_until_it_gets_everything(house: Stack) -> None:
    load(house, "echo", "--version", "1")
    broken = load(house, "echo", "--version", "2", "--share", "10%", "--param", "reason=no", check=False)
    assert broken.returncode == 1 and shares(house) == {}
    load(house, "echo", "--version", "2", "--share", "10%")
    assert serving(house) == {"1": 1, "2": 1} and shares(house) == {"2": "10"}
    assert carpool(house.url, "rollback", "echo", check=True).stdout == "echo version 2 is unloaded\n"
    assert serving(house) == {"1": 1} and shares(house) == {}
    load(house, "echo", "--version", "2", "--share", "20")
    load(house, "echo", "--version", "1", "--replicas", "1")  # what serves already: nothing changes
    assert serving(house) == {"1": 1, "2": 1} and shares(house) == {"2": "20"}
    unknown = carpool(house.url, "promote", "echo", "--version", "3")
    assert unknown.returncode == 0 and "100%  version 3, which no worker has" in unknown.stdout
    carpool(house.url, "share", "echo", "2=20", check=True)
    promoted = carpool(house.url, "promote", "echo", check=True)
    assert promoted.stdout == "1 of 1 processes of echo version 2 serve\n"
    assert serving(house) == {"2": 1} and shares(house) == {}


def shares(stack: Stack) -> dict[str, str]:
    found = stack.redis.hgetall(Keys("echo").shares)
    return {version.decode(): share.decode() for version, share in found.items()}


def test_requests_wait_for_a_model_that_is_unloaded(house: Stack) -> None:
    load(house, "echo", "--version", "1")
    assert infer(house) == '"1:a"'
    assert unload(house, "echo").stdout == "echo is unloaded\n"
    assert used(house) == 0
    again = carpool(house.url, "unload", "echo")
    assert again.returncode == 1 and "echo is not loaded; loaded: nothing is" in again.stderr
    with running(house.url, "infer", "echo", '"b"') as waiting:
        wait_until(lambda: house.redis.xlen("carpool:{echo}:requests") == 1, description="it waits")
        assert "generation" in load(house, "echo", "--version", "2", "--no-wait").stdout
        assert waiting.end().stdout.strip() == '"2:b"'


def test_seats_of_a_node_that_is_killed_are_taken_and_of_one_that_stops_at_once(
    stack: Stack, repository: Path
) -> None:
    stack.batcher()
    first, second = (start_node(stack, repository, 2) for _ in range(2))
    load(stack, "echo", "--version", "1", "--replicas", "2")
    wait_for_serving(stack, {"1": 2})
    assert len(worker_processes(first)) == len(worker_processes(second)) == 1
    (worker,) = worker_processes(second)
    with Producers(stack.url) as producers:
        producers.wait_for("1")
        second.kill()
        stopwatch = Stopwatch()
        wait_until(lambda: not Path(f"/proc/{worker}").exists(), description="its worker has ended")
        wait_until(lambda: len(worker_processes(first)) == 2, description="its seat is taken")
        assert stopwatch.passed_s < TAKEN_WITHIN_S
        wait_for_serving(stack, {"1": 2})
        third = start_node(stack, repository, 2)
        assert first.terminate() == 0
        wait_for_serving(stack, {"1": 2})
        assert len(worker_processes(third)) == 2
    assert not producers.errors and len(producers.answers) == producers.sent


def test_worker_that_ends_is_started_again_and_a_frozen_node_gives_way(
    stack: Stack, repository: Path
) -> None:
    stack.batcher()
    node = start_node(stack, repository, 1)
    load(stack, "echo", "--version", "1")
    (worker,) = worker_processes(node)
    os.kill(worker, 9)
    wait_until(lambda: worker_processes(node) not in ([], [worker]), description="another one is started")
    wait_for_serving(stack, {"1": 1})
    node.freeze()
    other = start_node(stack, repository, 1)
    wait_until(lambda: len(worker_processes(other)) == 1, description="the other one has the seat")
    node.thaw()
    node.wait_for("seat taken by another node")
    wait_until(lambda: worker_processes(node) == [], description="it has given way")
    assert infer(stack) == '"1:a"'


def test_node_refuses_what_is_for_a_worker_of_one_model(tmp_path: Path) -> None:
    url = "redis://127.0.0.1:1"
    both = carpool(url, "worker", "square", "--repository", str(tmp_path))
    assert both.returncode == 2 and "MODEL is for a worker of one model" in both.stderr
    parameter = carpool(url, "worker", "--repository", str(tmp_path), "--param", "a=1")
    assert parameter.returncode == 2 and "`carpool load`" in parameter.stderr
    assert carpool(url, "worker", "--room", "2").returncode == 2
    missing = carpool(url, "worker", "--repository", str(tmp_path / "nothing"))
    assert missing.returncode == 1 and "is no folder" in missing.stderr + missing.stdout


def test_new_interpreters_serve_as_forked_ones(tmp_path: Path, repository: Path) -> None:
    with Stack(tmp_path, fresh=True) as stack:
        stack.batcher()
        start_node(stack, repository, 1)
        began_s = time.monotonic()
        load(stack, "echo", "--version", "1")
        print(f"loaded after {time.monotonic() - began_s:.1f} s")
        assert infer(stack) == '"1:a"'


def test_seat_whose_worker_is_drained_is_shown_as_draining(house: Stack) -> None:
    load(house, "echo", "--version", "1", "--replicas", "1")
    (process,) = house.live_workers("echo")
    carpool(house.url, "drain", worker_of(process), check=True)
    wait_until(lambda: not serving(house), description="its seat is not shown as serving")
    assert "echo 1 (draining)" in carpool(house.url, "nodes", check=True).stdout
    carpool(house.url, "drain", worker_of(process), "--undo", check=True)
    wait_for_serving(house, {"1": 1})
