"""The Python client's entries and results as columns, against an echo service on a real redis-server."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import count
from typing import Any, Final

import numpy as np
import pytest
import uvloop
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from carpool import AsyncClient, Client
from carpool.client.reading import ResultReader
from carpool.client.sinks import COLUMN_KEPT_BYTES_MAX, Gathering
from carpool.errors import DeadlineExceededError, InvalidArgumentError
from carpool.messages.requests import MSGPACK
from carpool.messages.results import ResultColumns
from carpool.rows import Rows
from carpool.wire.tensors import tensor_head
from carpool_cli.local.embedded import EmbeddedRedis
from support.echo import EchoService, read_entry
from support.planting import must_show
from support.transport import transport_of
from support.waiting import EVENTUALLY_S, Stopwatch, wait_until

MODEL: Final = "Echo"
TIMEOUT_S: Final = 240.0  # below the limit of a test: only what is lost waits for it
LOOPS: Final = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


class RedisWithSocket(EmbeddedRedis):
    """A server that listens on a Unix socket, too."""

    def _options(self, port: int) -> list[str]:
        return [*super()._options(port), "--unixsocket", str(self._home / "redis.sock")]

    @property
    def socket_url(self) -> str:
        return f"unix://{self._home / 'redis.sock'}?db=0"


@pytest.fixture(scope="module")
def server() -> Iterator[RedisWithSocket]:
    with RedisWithSocket(append_only=False) as server:
        yield server


@pytest.fixture(params=("tcp", "unix"))
def url(request: pytest.FixtureRequest, server: RedisWithSocket) -> str:
    return server.url if request.param == "tcp" else server.socket_url


@pytest.fixture
def service(server: RedisWithSocket) -> Iterator[EchoService]:
    with EchoService(server.url, MODEL) as service:
        yield service


@pytest.fixture
async def client(server: RedisWithSocket, service: EchoService) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(server.url, timeout=TIMEOUT_S) as client:
        await client.infer(MODEL, 0)  # opens the channel
        service.entries.clear()
        yield client


async def wait_in_thread(predicate: Callable[[], object], description: str) -> None:
    await asyncio.to_thread(wait_until, predicate, description=description)


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal, arrays with dtype and shape."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    return type(one) is type(other) and bool(one == other)


# --- property: each gets its own answer --------------------------------------------------------------------

KINDS: Final[dict[str, Callable[[int], Any]]] = {
    "vector": lambda n: np.arange(n, n + 8, dtype=np.float32),
    "matrix": lambda n: np.full((2, 2), n, np.int64),  # as many bytes as a vector
    "strided": lambda n: np.arange(n, n + 16, dtype=np.int64)[::2],
    "big-endian": lambda n: np.arange(n, n + 4, dtype=">i4"),
    "scalar": lambda n: np.array(n, np.uint32),
    "empty": lambda n: np.zeros((0, n % 3), np.float64),
    "ragged": lambda n: np.full(n % 5, n, np.int32),
    "strings": lambda n: np.array([f"text {n}", "b"]),
    "number": lambda n: n,
    "map": lambda n: {"n": n, "nested": [n, None, "ü" * (n % 3)], "array": np.full(3, n, np.int16)},
    "bytes": lambda n: n.to_bytes(8, "big"),
    "long bytes": lambda n: b"%d" % n * (n % 50),
    "large": lambda n: np.full(50_000, n, np.int32),
}
OPTIONS: Final[tuple[dict[str, Any], ...]] = (
    {},
    {},
    {"priority": 7},
    {"priority": 7, "lane": "de"},
    {"timeout": TIMEOUT_S + 5},
    {"fields": {"trace": "x"}},
    {"tenant": "acme", "cost": 3},
)
CALLS: Final = ("infer", "request", "submit", "infer_many", "map")

request_groups = st.lists(
    st.tuples(
        st.sampled_from(CALLS),
        st.sampled_from(sorted(KINDS)),
        st.sampled_from(OPTIONS),
        st.sampled_from((1, 1, 2, 3, 70, 150)),
        st.booleans(),  # whether the event loop runs before the next
    ),
    min_size=1,
    max_size=12,
)


def expected(body: Any) -> Any:
    """What comes back: an echo is little-endian, and strings are lists."""
    if isinstance(body, np.ndarray):
        return body.tolist() if body.dtype.kind == "U" else body.astype(body.dtype.newbyteorder("<"))
    return body


def options_read(options: dict[str, Any]) -> frozenset[tuple[str, str]]:
    """Options as the fields that a service reads, besides the expiration."""
    fields = {**options, **options.get("fields", {})}
    return frozenset(
        (name, str(fields[name])) for name in fields.keys() - {"fields", "timeout", "expiration"}
    )


async def call(client: AsyncClient, kind: str, bodies: list[Any], options: dict[str, Any]) -> list[Any]:
    """The results of these requests by one of the client's methods, in order."""
    if kind == "infer_many":
        alike = len({(body.dtype, body.shape) if isinstance(body, np.ndarray) else None for body in bodies})
        if alike == 1 and isinstance(bodies[0], np.ndarray) and bodies[0].dtype.kind != "U":
            array = await client.infer_many(MODEL, np.stack(bodies), in_flight=100, **options)
            return [array[at, ...] for at in range(len(array))]
        result: list[Any] = await client.infer_many(MODEL, bodies, in_flight=100, **options)
        return result
    if kind == "map":
        return [value async for value in client.map(MODEL, bodies, in_flight=100, **options)]
    if kind == "request":
        replies = await asyncio.gather(*[client.request(MODEL, body, **options) for body in bodies])
        assert {(reply.queue_us, reply.compute_us) for reply in replies} == {(1, 2)}
        return [reply.value for reply in replies]
    if kind == "submit":
        return list(await asyncio.gather(*[client.submit(MODEL, body, **options) for body in bodies]))
    return list(await asyncio.gather(*[client.infer(MODEL, body, **options) for body in bodies]))


async def each_gets_its_own_answer(url: str, groups: list[tuple[str, str, Any, int, bool]]) -> None:
    numbers = count()
    async with AsyncClient(url, timeout=TIMEOUT_S) as client:
        tasks, sent = [], []
        for kind, body_kind, options, size, pause in groups:
            bodies = [KINDS[body_kind](number) for number, _ in zip(numbers, range(size), strict=False)]
            sent.append(bodies)
            tasks.append(asyncio.ensure_future(call(client, kind, bodies, options)))
            if pause:
                await asyncio.sleep(0)
        results = await asyncio.gather(*tasks)
        for group, bodies, values in zip(groups, sent, results, strict=True):
            assert len(values) == len(bodies)
            for body, value in zip(bodies, values, strict=True):
                assert same(value, expected(body)), (group, body, value)


@pytest.mark.parametrize("loop", sorted(LOOPS))
def test_each_request_gets_its_own_answer(server: RedisWithSocket, url: str, loop: str) -> None:
    seeds = count()

    # Not shrunk: an example that fails may wait for its timeouts.
    @settings(
        max_examples=15,
        phases=(Phase.explicit, Phase.generate),
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(request_groups, st.sampled_from((1, 8, 64, 1000)))
    def check(groups: list[tuple[str, str, Any, int, bool]], max_batch_size: int) -> None:
        options = Counter(options_read(each) for _, _, each, size, _ in groups for _ in range(size))
        service = EchoService(server.url, MODEL, seed=next(seeds), max_batch_size=max_batch_size)
        with service, asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
            runner.run(each_gets_its_own_answer(url, groups))
        echoes = [echo for entry in service.entries for echo in read_entry(entry)]
        assert Counter(options_read(echo.fields) for echo in echoes) == options

    check()


@pytest.mark.parametrize("fault", ["rows in another order", "one row for all"])
def test_the_property_notices_faults(server: RedisWithSocket, fault: str) -> None:
    groups: list[tuple[str, str, Any, int, bool]] = [
        ("infer", "vector", {}, 150, False),
        ("infer_many", "matrix", {}, 150, False),
    ]
    for group in groups:
        with (
            EchoService(server.url, MODEL, fault=fault),
            must_show(),
            asyncio.Runner() as runner,
        ):
            runner.run(each_gets_its_own_answer(server.url, [group]))


# --- what is sent ------------------------------------------------------------------------------------------


async def test_equal_layouts_share_columns(client: AsyncClient, service: EchoService) -> None:
    rows = np.arange(640, dtype=np.float32).reshape(64, 10)
    stopwatch = Stopwatch()
    results = await asyncio.gather(*[client.infer(MODEL, row, priority=6) for row in rows])
    longest_ms = 1000 * stopwatch.elapsed_s  # from the calls until the entry was sent
    np.testing.assert_array_equal(results, rows)
    (entry,) = service.entries
    assert entry.keys() == {
        *(b"content_type", b"reply_to", b"reply_columns", b"expiration"),
        *(b"priority", b"correlation_ids", b"row_head", b"rows"),
    }
    assert entry[b"rows"] == rows.tobytes()
    assert entry[b"row_head"] == tensor_head("FP32", (10,), 40)
    assert 0 <= 1000 * TIMEOUT_S - int(entry[b"expiration"]) <= longest_ms + 1


async def test_different_requests_share_an_entry_in_their_order(
    client: AsyncClient, service: EchoService
) -> None:
    """Columns do not change the order of requests, on which `preserve_ordering` depends."""
    bodies = [np.zeros(2), np.ones(2), {"a": 1}, "text", np.zeros(3), np.ones(3), np.full(2, 5.0)]
    await asyncio.gather(*[client.infer(MODEL, body) for body in bodies])
    (entry,) = service.entries
    numbers = [int(echo.correlation_id.rpartition("-")[2]) for echo in read_entry(entry)]
    assert numbers == list(range(numbers[0], numbers[0] + len(bodies)))


async def test_entries_have_at_most_max_batch_size_requests(
    client: AsyncClient, service: EchoService
) -> None:
    await asyncio.gather(*[client.infer(MODEL, np.zeros(4)) for _ in range(100)])
    await client.infer_many(MODEL, np.zeros((130, 4)))
    assert [len(read_entry(entry)) for entry in service.entries] == [64, 36, 64, 64, 2]


async def test_cancelled_requests_are_withdrawn(client: AsyncClient, service: EchoService) -> None:
    """Also those that are cancelled in the iteration of the event loop in which they are sent."""
    service.paused.set()
    futures = [client.submit(MODEL, np.full(4, number)) for number in range(6)]
    futures[2].cancel()
    futures[5].cancel()
    await wait_in_thread(lambda: len(service.withdrawn) == 2, "two are withdrawn")
    service.paused.clear()
    results = await asyncio.gather(*futures, return_exceptions=True)
    assert [result[0] for result in results if isinstance(result, np.ndarray)] == [0, 1, 3, 4]
    ids = [echo.correlation_id for echo in read_entry(service.entries[0])]
    assert service.withdrawn == {ids[2], ids[5]}


# --- infer_many --------------------------------------------------------------------------------------------


async def test_infer_many_returns_one_array(client: AsyncClient) -> None:
    array = np.arange(3000, dtype=np.float32).reshape(500, 3, 2)
    result = await client.infer_many(MODEL, array, in_flight=128)
    assert isinstance(result, np.ndarray)
    assert same(result, array)
    numbers = np.arange(500)
    assert same(await client.infer_many(MODEL, numbers), numbers)
    assert await client.infer_many(MODEL, array[:0]) == []
    assert await client.infer_many(MODEL, (number for number in range(5))) == [0, 1, 2, 3, 4]


async def test_infer_many_returns_a_list_where_layouts_differ(client: AsyncClient) -> None:
    assert await client.infer_many(MODEL, np.array(["a", "b"])) == ["a", "b"]
    bodies = [np.zeros(2), np.zeros(3), 5]
    results = await client.infer_many(MODEL, bodies)
    assert all(map(same, results, bodies))


async def test_gathering_of_rows_and_other_values_is_a_list() -> None:
    gathering = Gathering(ResultReader(), asyncio.get_running_loop(), size=5, keep_errors=False)
    assert gathering.reserve(5) == range(5)
    columns = ResultColumns(["b", "d"], MSGPACK, Rows(b"", bytes(4), 2), 1, 1, 1)
    gathering.put_rows([1, 3], np.array([[1, 1], [3, 3]]), columns)
    gathering.put_value(0, "text", {})
    gathering.put_value(2, np.zeros(3), {})
    gathering.put_value(4, np.array([4, 4]), {})
    await gathering.wait(0)
    wanted = ["text", np.array([1, 1]), np.zeros(3), np.array([3, 3]), np.array([4, 4])]
    results = gathering.results()
    assert isinstance(results, list)
    assert all(map(same, results, wanted))


async def test_infer_many_limits_requests_in_flight(client: AsyncClient, service: EchoService) -> None:
    service.paused.set()
    task = asyncio.ensure_future(client.infer_many(MODEL, np.zeros((10_000, 2)), in_flight=150))
    await wait_in_thread(lambda: len(service.entries) == 2, "what may be in flight was sent")
    service.paused.clear()
    assert (await task).shape == (10_000, 2)
    assert service.answered == 10_001


async def test_errors_of_rows(server: RedisWithSocket) -> None:
    def refuse(body: bytes) -> str | None:
        value = np.frombuffer(body[-8:], np.int64)[0]
        return f"value {value}" if value % 10 == 3 else None

    array = np.arange(200).reshape(100, 2)
    with EchoService(server.url, MODEL, refuse=refuse):
        async with AsyncClient(server.url, timeout=TIMEOUT_S) as client:
            with pytest.raises(InvalidArgumentError, match="value"):
                await client.infer_many(MODEL, array)
            results = await client.infer_many(MODEL, array, return_exceptions=True)
            assert isinstance(results, list)
            for row, result in zip(array, results, strict=True):
                if row[1] % 10 == 3:
                    assert isinstance(result, InvalidArgumentError)
                    assert result.detail == f"value {row[1]}"
                else:
                    assert same(result, row)
            with pytest.raises(InvalidArgumentError, match="correlation_id"):
                await client.infer_many(MODEL, array, correlation_id="one")
            with pytest.raises(InvalidArgumentError, match="dimensions"):
                await client.infer_many(MODEL, np.array(5))


@pytest.mark.parametrize("end", ["cancelled", "timeout"])
async def test_infer_many_that_ends_early_withdraws_or_expires(
    client: AsyncClient, service: EchoService, end: str
) -> None:
    service.paused.set()
    timeout = 0.2 if end == "timeout" else 10
    task = asyncio.ensure_future(client.infer_many(MODEL, np.zeros((100, 2)), timeout=timeout))
    await wait_in_thread(lambda: len(service.entries) >= 2, "all were sent")
    ids = {echo.correlation_id for entry in service.entries[:2] for echo in read_entry(entry)}
    if end == "timeout":
        with pytest.raises(DeadlineExceededError, match=r"within 0\.2 s"):
            await task
    else:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await wait_in_thread(lambda: service.withdrawn == ids, "all are withdrawn")
    assert not client._packer.awaited
    service.paused.clear()
    assert await client.infer(MODEL, 5) == 5


# --- connections, memory, threads --------------------------------------------------------------------------


@pytest.mark.parametrize("loop", sorted(LOOPS))
def test_reconnection_loses_nothing(server: RedisWithSocket, loop: str) -> None:
    """Entries that may not have arrived are sent again, without the requests that have their results."""
    rows = np.arange(20_000, dtype=np.float32).reshape(10_000, 2)

    async def check() -> None:
        async with AsyncClient(server.url, timeout=TIMEOUT_S) as client:
            many = asyncio.ensure_future(client.infer_many(MODEL, rows))
            single = asyncio.gather(*[client.infer(MODEL, row) for row in rows[:200]])
            for _ in range(5):
                await wait_in_thread(progress(), "there are more answers")
                for connection in connections(client):
                    connection.abort()
            assert same(await many, rows)
            np.testing.assert_array_equal(await single, rows[:200])
            assert not client._packer.awaited

    def connections(client: AsyncClient) -> list[Any]:
        links = transport_of(client)._writer, transport_of(client)._reader
        return [link._transport for link in links if link._transport is not None]

    def progress() -> Callable[[], bool]:
        before = service.answered
        return lambda: service.answered > before or service.answered >= len(rows) + 200

    with EchoService(server.url, MODEL) as service, asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(check())


async def test_what_did_not_arrive_is_sent_again_unless_it_was_cancelled(
    client: AsyncClient, service: EchoService, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Any] = []
    writer = transport_of(client)._writer
    monkeypatch.setattr(writer, "write", written.extend)
    futures = [client.submit(MODEL, np.full(3, number)) for number in range(5)]
    many = asyncio.ensure_future(client.infer_many(MODEL, np.arange(200).reshape(100, 2)))
    while len(written) < 3:
        await asyncio.sleep(0)
    futures[3].cancel()
    await asyncio.sleep(0)
    writer._transport.abort()
    assert same(await many, np.arange(200).reshape(100, 2))
    results = await asyncio.gather(*futures, return_exceptions=True)
    assert [result[0] for result in results if isinstance(result, np.ndarray)] == [0, 1, 2, 4]
    assert service.answered == 105, "the one of the fixture, 4 and 100"


async def test_a_layout_is_not_mistaken_for_another(client: AsyncClient) -> None:
    """Rows of equal length whose dtype or shape differ."""
    for _ in range(20):
        for body in (np.zeros(8, np.float32), np.ones((2, 2), np.int64), np.ones((4, 1), np.int64)):
            results = await asyncio.gather(*[client.infer(MODEL, body) for _ in range(10)])
            assert all(same(result, body) for result in results)


async def test_a_result_keeps_little_more_than_itself(client: AsyncClient) -> None:
    """A program that keeps one result of many must not keep all of them."""
    kept = []
    for size in (10, 5000, 100_000):
        results = await asyncio.gather(*[client.infer(MODEL, np.full(size, n)) for n in range(30)])
        kept += [value for value in results if not value.flags.owndata]
    assert kept, "small results are views"
    for value in kept:
        base = value
        while isinstance(base.base, np.ndarray):
            base = base.base
        assert base.nbytes <= max(COLUMN_KEPT_BYTES_MAX, value.nbytes)


@pytest.mark.parametrize("loop", sorted(LOOPS))
def test_blocking_client_has_infer_many(
    url: str, service: EchoService, loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("carpool.client.loop_thread.new_event_loop", LOOPS[loop])
    array = np.arange(600).reshape(200, 3)
    with Client(url, timeout=TIMEOUT_S) as client:
        assert type(client._open.thread.loop).__module__.startswith("uvloop") == (loop == "uvloop")
        assert same(client.infer_many(MODEL, array), array)
        assert client.infer_many(MODEL, iter("abc")) == ["a", "b", "c"]
        futures = [client.submit(MODEL, number) for number in range(100)]
        assert [future.result(EVENTUALLY_S) for future in futures] == [*range(100)]
        assert list(client.map(MODEL, range(100))) == [*range(100)]
        with pytest.raises(TypeError, match="no such option"):
            client.infer(MODEL, 1, colour="red")  # type: ignore[call-arg]
    assert any(b"rows" in entry and b"row_head" not in entry for entry in service.entries), (
        "requests submitted one after another share an entry"
    )
