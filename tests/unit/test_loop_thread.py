"""The thread of a `Client`: waits for it end, and its event loop suits what threads are."""

from __future__ import annotations

import asyncio
import gc
import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from carpool import AsyncClient, Client
from carpool.client import loop_thread
from carpool.client.loop_thread import LoopThread, RequestFuture, new_event_loop, new_queue
from carpool.client.sinks import resolve_future
from carpool.errors import (
    InvalidArgumentError,
    NoResultError,
    PermissionDeniedError,
    UnavailableError,
    UnconfirmedError,
)
from carpool.settings import WorkerSettings, read_settings
from support.pem import CERTIFICATE, KEY

URL = "redis://127.0.0.1:1/0"


@pytest.fixture
def ended() -> list[str]:
    return []


@pytest.fixture
def thread(ended: list[str]) -> Iterator[LoopThread]:
    thread = LoopThread(ended.append)
    thread.start()
    yield thread
    thread.stop()
    thread.join(30)


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


def raise_system_exit(*_: object) -> None:
    raise SystemExit("a callback has had enough")


def test_all_that_wait_fail_with_the_reason_when_the_thread_dies(
    thread: LoopThread, ended: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    waiting = thread.run(forever())
    assert thread.call(raise_system_exit)
    with pytest.raises(
        UnavailableError, match=r"thread has ended \(SystemExit: a callback .*make a new client"
    ):
        waiting.result()
    with pytest.raises(UnavailableError, match="SystemExit"):
        thread.run(forever())
    thread.join(30)
    assert ended == [thread.why_ended]
    assert not thread.call(print)


def test_requests_of_a_client_fail_when_its_thread_dies(caplog: pytest.LogCaptureFixture) -> None:
    client = Client("redis://127.0.0.1:1/0", timeout=None)
    thread = client._open
    blocked = threading.Event()
    thread.thread.call(blocked.wait)
    submitted, stream = client.submit("square", 7), client.stream("square", 7)
    thread.thread.call(raise_system_exit)
    blocked.set()
    waits: list[Callable[[], object]] = [submitted.result, lambda: next(stream)]
    waits.append(lambda: client.infer("square", 1))
    for wait in waits:
        with pytest.raises(UnavailableError):
            wait()
    thread.thread.join(30)
    with pytest.raises(UnavailableError, match="SystemExit"):
        client.submit("square", 7).result()
    client.close()


def test_callback_that_raises_ends_nothing(thread: LoopThread, caplog: pytest.LogCaptureFixture) -> None:
    first, second = RequestFuture(thread, None), RequestFuture(thread, None)
    first.add_done_callback(raise_system_exit)
    for future in (first, second):
        thread.call(resolve_future, future, 7)
    assert (first.result(), second.result(), thread.why_ended) == (7, 7, "")
    assert "a callback of a future raised" in caplog.text


def test_wait_ends_although_the_thread_is_blocked(
    thread: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_thread, "GRACE_S", 0.01)
    blocked = threading.Event()
    thread.call(blocked.wait)
    future = RequestFuture(thread, 0.01)
    for wait in (future.result, future.exception, lambda: thread.next_item(new_queue(), 0.01)):
        with pytest.raises(NoResultError, match="no word of the client's thread: something blocks it"):
            wait()
    blocked.set()


def test_error_of_the_request_is_not_taken_for_the_end_of_the_wait(thread: LoopThread) -> None:
    async def late() -> None:
        raise NoResultError("its own")

    with pytest.raises(NoResultError, match="its own"):
        thread.run(late(), 10.0).result()


def test_thread_that_would_wait_for_itself_is_told_so(thread: LoopThread) -> None:
    seen: Future[Any] = Future()

    def wait_on_the_thread() -> None:
        try:
            RequestFuture(thread, None).result()
        except RuntimeError as error:
            seen.set_result(str(error))

    thread.call(wait_on_the_thread)
    assert "the client's own thread would wait for itself" in seen.result(30)


def test_fork_is_told_that_the_request_is_not_its_own(
    thread: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    future = RequestFuture(thread, None)
    monkeypatch.setattr(thread, "_pid", os.getppid())
    with pytest.raises(UnconfirmedError, match="was forked"):
        future.result()


def test_cancelled_call_is_cancelled_on_the_thread(thread: LoopThread) -> None:
    begun, cancelled = threading.Event(), threading.Event()

    async def call() -> None:
        begun.set()
        try:
            await forever()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    future = thread.run(call())
    assert begun.wait(30)
    assert future.cancel()
    assert cancelled.wait(30)
    assert thread.is_idle


def test_unused_client_has_neither_thread_nor_descriptors() -> None:
    gc.collect()
    before, threads = len(list(Path("/proc/self/fd").iterdir())), threading.active_count()
    clients, others = [Client(URL) for _ in range(10)], [AsyncClient(URL) for _ in range(10)]
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    for client in clients[:5]:
        assert client.timed_out == 0
        client.close()
    del client, clients, others
    assert threading.active_count() == threads


def test_client_is_unavailable_if_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_loop() -> None:
        raise OSError("Too many open files")

    monkeypatch.setattr(loop_thread, "new_event_loop", no_loop)
    for call in (lambda: Client(URL).infer("m", 1), lambda: Client(URL).models()):
        with pytest.raises(UnavailableError, match="cannot be started: Too many open files"):
            call()


# --- where a library has replaced parts of the standard library -------------------------------------------


def replaced(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """As gevent does, which replaces its own parts of these modules and keeps the original ones."""
    fake = SimpleNamespace(
        is_module_patched=lambda module: module in modules,
        get_original=lambda module, name: getattr(importlib.import_module(module), name),
    )
    monkeypatch.setitem(sys.modules, "gevent.monkey", fake)


def test_event_loop_suits_what_threads_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def kind() -> str:
        loop = new_event_loop()
        loop.close()
        return f"{type(loop).__module__.partition('.')[0]} {type(loop).__name__}"

    assert kind() == "uvloop Loop"
    replaced(monkeypatch, "threading", "select", "queue")
    assert kind() == "carpool _GreenletLoop"
    replaced(monkeypatch, "select", "queue")
    assert kind() == "uvloop Loop"
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert kind() == "carpool _NativeLoop"


def test_loops_of_greenlets_run_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another loop runs in the same thread while this one waits for its sockets, as greenlets do."""
    replaced(monkeypatch, "threading")
    outer, inner = new_event_loop(), new_event_loop()
    seen: list[object] = []

    async def work(loop: asyncio.AbstractEventLoop) -> None:
        seen.append(asyncio.get_running_loop() is loop)

    selector: Any = outer._selector  # type: ignore[attr-defined]
    select = outer._select  # type: ignore[attr-defined]

    def switch(timeout: float | None = None) -> Any:
        if not inner.is_closed():
            inner.run_until_complete(work(inner))
            inner.close()
        return select(timeout)

    outer._select = switch  # type: ignore[attr-defined]
    assert selector.select == outer._select_as_no_loop  # type: ignore[attr-defined]
    outer.run_until_complete(work(outer))
    outer.close()
    assert seen == [True, True]


def test_loop_of_real_threads_finds_names(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced(monkeypatch, "select")
    monkeypatch.setitem(sys.modules, "uvloop", None)
    loop = new_event_loop()
    found = loop.run_until_complete(loop.getaddrinfo("localhost", 7))
    loop.close()
    assert {address[1] for *_, address in found} == {7}


# --- a client in a model process --------------------------------------------------------------------------


def test_client_of_a_model_reads_only_what_its_worker_gives(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(".env").write_text("CARPOOL_REDIS_URL=redis://worker:secret@10.0.0.1/0\n")
    monkeypatch.delenv("CARPOOL_REDIS_URL", raising=False)
    assert AsyncClient().address == "redis://10.0.0.1/0"
    monkeypatch.setenv("CARPOOL_MODEL_PROCESS", "1")
    for kind in (Client, AsyncClient):
        with pytest.raises(PermissionDeniedError, match=r"CARPOOL_MODEL_REDIS_URL \(--model-redis-url\)"):
            kind()
    monkeypatch.setenv("CARPOOL_REDIS_URL", "redis://producer:p@10.0.0.2/0")
    monkeypatch.setenv("CARPOOL_PREFIX", "mine")
    client = AsyncClient()
    assert (client.address, client._producer.prefix) == ("redis://10.0.0.2/0", "mine")
    monkeypatch.setenv("CARPOOL_REDIS_URL", "nowhere")
    with pytest.raises(InvalidArgumentError, match="url: must begin with"):
        AsyncClient()


@pytest.mark.parametrize(
    ("url", "given"),
    [
        ("redis://10.0.0.1:7/1", True),
        ("unix:///run/redis.sock?db=1", True),
        ("rediss://10.0.0.1?ssl_ca_certs=/etc/worker.crt", True),
        ("redis://worker@10.0.0.1", False),
        ("redis://:secret@10.0.0.1", False),
        ("redis://10.0.0.1?password=secret", False),
        ("redis+sentinel://10.0.0.1/main?sentinel_password=secret", False),
        ("rediss://10.0.0.1?ssl_certfile=/etc/worker.crt&ssl_keyfile=/etc/worker.key", False),
    ],
)
def test_worker_gives_no_credentials_to_its_model(url: str, given: bool, tmp_path: Path) -> None:
    (tmp_path / "worker.crt").write_text(CERTIFICATE)
    (tmp_path / "worker.key").write_text(KEY)
    url = url.replace("/etc", str(tmp_path))
    flags = ["square", "--redis-url", url]
    assert read_settings(WorkerSettings, flags, "worker").url_for_models == (url if given else "")
    own = "redis://producer:p@10.0.0.1/0"
    settings = read_settings(WorkerSettings, [*flags, "--model-redis-url", own], "worker")
    assert settings.url_for_models == own


def test_wrong_address_for_models_is_refused_without_its_password(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_settings(WorkerSettings, ["square", "--model-redis-url", "redis://u:s3cret@h:x/0"], "worker")
    error = capsys.readouterr().err
    assert "--model-redis-url (or CARPOOL_MODEL_REDIS_URL)" in error and "s3cret" not in error
