"""A version of a model takes the place of another one under load: docs/new_version.md."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final, Self

from carpool.client.aio import AsyncClient
from carpool.client.sinks import Reply
from carpool.keys import Keys
from support.command import carpool
from support.http import call
from support.stack import Service, Stack
from support.waiting import wait_until

MODEL: Final = "clf"
LEASE: Final = ("--lease-ms", "4500")  # kept by a worker that is held up for seconds
RATE: Final = 500  # requests/s
INTERVAL_S: Final = 0.02
IN_FLIGHT_MAX: Final = 2000  # on a machine that does not sustain that rate


class Producer:
    """Sends requests at RATE from a thread, until the end of the block. It retries nothing."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self.replies: list[Reply] = []  # in the order in which they came
        self.errors: list[BaseException] = []
        self.sent = 0
        self.rate = 0.0  # at which it could send

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(120)
        assert not self._thread.is_alive()

    @property
    def versions(self) -> Counter[str]:
        return Counter(reply.version for reply in self.replies)

    def wait_for(self, version: str, count: int = 200) -> None:
        """Wait until that many further replies are of this version."""
        target = self.versions[version] + count
        wait_until(
            lambda: self.versions[version] >= target or self.errors,
            description=f"{count} more replies of version {version}",
            timeout_s=60,
        )

    async def _run(self) -> None:
        async with AsyncClient(self._url) as client:
            tasks: set[asyncio.Task[None]] = set()
            began_s = due_s = time.monotonic()
            while not self._stop.is_set():
                if len(tasks) < IN_FLIGHT_MAX:
                    for _ in range(int(RATE * INTERVAL_S)):
                        tasks.add(task := asyncio.create_task(self._ask(client, self.sent)))
                        task.add_done_callback(tasks.discard)
                        self.sent += 1
                due_s = max(due_s + INTERVAL_S, time.monotonic() - INTERVAL_S)
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            self.rate = self.sent / (time.monotonic() - began_s)
            await asyncio.gather(*tasks)

    async def _ask(self, client: AsyncClient, number: int) -> None:
        try:
            reply = await client.request(MODEL, number, timeout=60)
            assert reply.value == f"{reply.version}:{number}"
            self.replies.append(reply)
        except BaseException as error:
            self.errors.append(error)


def test_version_takes_the_place_of_another_one_without_a_failed_request(stack: Stack) -> None:
    """Given 500 requests/s, and version 2 that takes the place of version 1, one worker of which is killed
    with a batch in hand: expect an answer to each request, and from version 2 after that."""
    stack.batcher()
    old = [stack.worker(f"{MODEL}=versions.py:V1") for _ in range(2)]
    stack.wait_for_model(MODEL, workers=2)
    with Producer(stack.url) as producer:
        producer.wait_for("1")
        held = stack.send(MODEL, body='"hold"')
        wait_until(lambda: holding(stack, old), description="a worker has it in hand")
        new = [stack.worker(f"{MODEL}=versions.py:V2") for _ in range(2)]
        assert registered(stack, "max_batch_size") == "4"  # suits both
        assert registered(stack, "version") == "2"  # registered last
        assert shown(stack) == {"1": 2, "2": 2}
        producer.wait_for("2")
        (holder,) = holding(stack, old)
        (other,) = [worker for worker in old if worker is not holder]
        assert other.terminate() == 0  # drained
        holder.kill()
        wait_until(lambda: registered(stack, "max_batch_size") == "64", description="settings of version 2")
        reclaimed = stack.result(MODEL, held)
        assert (reclaimed["body"], reclaimed["version"]) == ("2:hold", "2")
        before = producer.versions["1"]
        producer.wait_for("2", 1000)
    print(f"{producer.rate:.0f} requests/s, replies by version: {dict(producer.versions)}")
    assert not producer.errors
    assert len(producer.replies) == producer.sent
    assert producer.versions["1"] == before and set(producer.versions) == {"1", "2"}
    assert any(worker.events("batch reclaimed") for worker in new)
    assert shown(stack) == {"2": 2}
    assert not stack.redis.exists(Keys(MODEL).dead)


def test_where_the_version_is_shown(stack: Stack) -> None:
    stack.batcher()
    worker = stack.worker(f"{MODEL}=versions.py:V1", "--http-port", "0", *LEASE)
    gateway = stack.gateway()
    stack.wait_for_model(MODEL)
    answer = call(gateway.url, "POST", f"/carpool/v1/models/{MODEL}/infer", b"7")
    assert (answer.code, answer.headers["carpool-model-version"]) == (200, "1")
    assert call(gateway.url, "GET", f"/v2/models/{MODEL}").json["versions"] == ["1"]
    assert call(gateway.url, "GET", f"/v2/models/{MODEL}/versions/2").code == 404

    new = stack.worker(f"{MODEL}=versions.py:V2", *LEASE)
    changed = worker.wait_for("versions of the model changed")
    assert changed["versions"] == "1 (1 worker), 2 (1 worker)"
    table = carpool(stack.url, "models").stdout
    assert "version" in table.splitlines()[0] and "1, 2" in table
    new.kill()
    stack.expire_lease(MODEL, new)
    wait_until(lambda: registered(stack, "version") == "1", description="the version of the one that lives")
    assert shown(stack) == {"1": 1}
    ready, batches = worker.events("worker ready"), worker.events("batches")
    assert {event["version"] for event in (*ready, *batches)} == {"1"}
    metrics = call(worker.status_url, "GET", "/metrics").body.decode()
    assert f'carpool_model_info{{model="{MODEL}",version="1"}} 1.0' in metrics


def registered(stack: Stack, name: str) -> str | None:
    text: bytes | None = stack.redis.hget(Keys(MODEL).registration, name)
    return None if text is None else text.decode()


def shown(stack: Stack) -> Any:
    (state,) = json.loads(carpool(stack.url, "models", "--json").stdout)
    return state["versions"]


def holding(stack: Stack, workers: Sequence[Service]) -> list[Service]:
    """Which of the workers has the batch with the body "hold"."""
    batches = stack.redis.xrange(Keys(MODEL).batches)
    held = {batch_id for batch_id, fields in batches if any(b'"hold"' in part for part in fields.values())}
    return [worker for worker in workers if held & stack.batches_of(MODEL, worker)]
