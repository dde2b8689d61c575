"""StreamReader: no entry is lost or read twice, however models move between its connections."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from typing import Any, Final

import pytest

from carpool.keys import Keys
from carpool.store import reader as reader_module
from carpool.store.connection import CommandError
from carpool.store.link_errors import LinkError
from carpool.store.reader import (
    ENTRY_BYTES_UNKNOWN,
    ENTRY_SIZES_KEPT,
    FULL_REPLIES,
    READ_BYTES,
    READ_BYTES_MIN,
    OversizedEntry,
    ReadResult,
    ReadSizes,
    StreamCursor,
    StreamReader,
    Subscription,
    _Watch,
    _Xread,
)
from carpool_cli.local.embedded import EmbeddedRedis
from support.planting import Renaming, must_notice_renames, must_show
from support.redis_client import redis_at
from support.waiting import wait_until

MODELS: Final = tuple(f"m{number}" for number in range(5))
STEPS: Final = 300
# Until what was added is read. Entries of models that became idle meanwhile are read one at a time, and each
# ends a wait at once.
READS_MAX: Final = 100
LATEST_STREAMS: Final[dict[str, StreamCursor]] = {}  # by name; for a planted fault


@pytest.fixture(scope="module")
def embedded() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(append_only=False) as server:
        yield server


@pytest.fixture
def redis(embedded: EmbeddedRedis) -> Iterator[Any]:
    client = redis_at(embedded.url, protocol=2)
    client.flushall()
    yield client
    client.close()


class Watched:
    """A model that is read, and what must be read of it."""

    def __init__(self, reader: StreamReader, model: str, redis: Any) -> None:
        self.deleted: set[bytes] = set()
        self.keys = Keys(model)
        self._reader = reader
        self._redis = redis
        self.begin()

    def begin(self) -> None:
        """Read the request stream from its start, and `settled` from here on."""
        self.expected = {
            "requests": [entry_id for entry_id, _ in self._redis.xrange(self.keys.requests)],
            "settled": [],
        }
        last = self._redis.xrevrange(self.keys.settled, count=1)
        self.subscription = self._reader.subscribe(self.keys, last[0][0] if last else b"0-0")
        for stream in (self.subscription.requests, self.subscription.settled):
            LATEST_STREAMS[stream.name] = stream

    def start_over(self) -> None:
        self._reader.end(self.subscription)
        self.begin()

    def add(self, kind: str) -> None:
        self.expected[kind].append(self._redis.xadd(getattr(self.keys, kind), {"a": "b"}))

    def delete_oldest(self) -> None:
        """Delete an entry, as a dispatch does. It may be read all the same."""
        for entry_id, _ in self._redis.xrange(self.keys.requests, count=1):
            self._redis.xdel(self.keys.requests, entry_id)
            self.deleted.add(entry_id)

    def check(self, result: ReadResult) -> None:
        """What was read is what comes next. Entries that were deleted may be missing."""
        arrived = result.arrived.get(self.subscription)
        for kind in ("requests", "settled") if arrived is not None else ():
            expected = self.expected[kind]
            for entry_id, _ in getattr(arrived, kind):
                while expected and expected[0] != entry_id and expected[0] in self.deleted:
                    expected.pop(0)
                assert expected, f"{entry_id} was read twice"
                assert entry_id == expected.pop(0), f"{entry_id} is not the next entry"

    @property
    def everything_was_read(self) -> bool:
        return all(entry_id in self.deleted for ids in self.expected.values() for entry_id in ids)


class RandomRun:
    """A reader, and steps that add, delete, read, move and start over at random."""

    def __init__(self, url: str, redis: Any, seed: int) -> None:
        self.choice = random.Random(seed)
        # With the longest, only an entry ends a wait: so each model must be read by a connection at any time.
        # But a new subscription is read from the next XREAD on, so none is made then.
        busy_block_ms, idle_block_ms = ((1, 2), (20, 40), (60_000, 60_000))[seed % 3]
        self.starts_over = busy_block_ms < 1000
        self.reader = StreamReader(url, "test", busy_block_ms=busy_block_ms, idle_block_ms=idle_block_ms)
        self.watched = [Watched(self.reader, model, redis) for model in MODELS]
        self.awaits_requests = True

    def step(self) -> None:
        one, number = self.choice.choice(self.watched), self.choice.random()
        if number < 0.25:
            one.add("requests")
        elif number < 0.33:
            one.add("settled")
        elif number < 0.41:
            one.delete_oldest()
        elif number < 0.66:
            self.reader.set_busy(one.subscription, self.choice.random() < 0.5)
        elif number < 0.69 and self.starts_over:
            one.start_over()
        elif number < 0.73:
            self.read_what_is_added_to(one)
        elif number < 0.76:
            self.read_what_is_settled_of(one)
        elif number < 0.80:
            one.subscription.awaits_settled = False
        elif number < 0.84:
            self.awaits_requests = not self.awaits_requests
        elif number < 0.87:
            self.read_what_settles_although_no_request_is_awaited(one)
        else:
            self.read(self.choice.choice((0.0, 0.0, 0.001, 0.03)))

    def read(self, timeout_s: float) -> None:
        result = self.reader.read(timeout_s, awaits_requests=self.awaits_requests)
        assert not result.failed
        for one in self.watched:
            one.check(result)

    def read_what_is_settled_of(self, one: Watched) -> None:
        """A request was read, and waits: so a batch that settles must end the wait."""
        self.read_what_is_added_to(one)
        one.subscription.awaits_settled = True
        self.read_what_is_added_to(one, "settled")

    def read_what_settles_although_no_request_is_awaited(self, one: Watched) -> None:
        """A request was read, and waits. A batch that settles ends the wait, and a request that was added
        before it is read with it."""
        self.reader.set_busy(one.subscription, True)
        self.read_what_is_added_to(one)
        one.subscription.awaits_settled = True
        self.awaits_requests = False
        one.add("requests")
        self.read(0.0)
        self.read_what_is_added_to(one, "settled")

    def read_what_is_added_to(self, one: Watched, kind: str = "requests") -> None:
        if kind == "requests":
            self.awaits_requests = True
        one.add(kind)
        for _ in range(READS_MAX):
            self.read(0.05)
            if one.everything_was_read:
                return
        raise AssertionError(f"nobody reads {one.keys.model}")


def run_at_random(url: str, redis: Any, seed: int) -> None:
    """Expect each entry to be read once, in order."""
    run = RandomRun(url, redis, seed)
    with closing(run.reader):  # also where a fault was planted
        for _ in range(STEPS):
            run.step()
        for one in run.watched:
            run.read_what_is_settled_of(one)


@pytest.mark.parametrize("seed", range(30))
def test_each_entry_is_read_once_and_in_order(embedded: EmbeddedRedis, redis: Any, seed: int) -> None:
    run_at_random(embedded.url, redis, seed)


def forget_the_cursor(self: StreamCursor, entries: list[Any], asked_after: bytes) -> list[Any]:
    self.after = entries[-1][0]
    return entries


def move_at_once(self: Any, subscription: Subscription) -> None:
    original_adopt(self, subscription)
    self.other.remove(subscription)


original_adopt: Final = _Watch.adopt


def deliver_to_the_latest(self: Any, reply: Any) -> list[tuple[StreamCursor, list[Any]]]:
    found = []
    for name, entries in reply:
        stream = LATEST_STREAMS[name.decode()]
        if entries := stream.unread(entries, stream.after):
            found.append((stream, entries))
    return found


def await_nothing_settled(self: Any, covered: list[tuple[Subscription, bool, bool]]) -> None:
    original_cover(self, [(subscription, reads, False) for subscription, reads, _ in covered])
    self._covered = covered


def do_not_follow_up(self: Any, covered: list[tuple[Subscription, bool, bool]]) -> None:
    original_cover(self, covered)
    del self._xreads[1:]


original_cover: Final = _Watch._cover
FAULTS: Final[dict[str, tuple[Any, str, Any]]] = {
    "a model that became busy is not read where no request is awaited": (_Watch, "covers_all", True),
    "both connections deliver the same entries": (StreamCursor, "unread", forget_the_cursor),
    "a model is left out before the other connection reads it": (_Watch, "covers", lambda *_: True),
    "a reply counts for a later subscription": (_Xread, "unread", deliver_to_the_latest),
    "an awaited batch that settles does not end a wait": (_Watch, "_cover", await_nothing_settled),
    "what settled is read only while it is awaited": (_Watch, "_cover", do_not_follow_up),
    "a model that was moved is read by its new connection only": (_Watch, "adopt", move_at_once),
}


def run_some_at_random(url: str, redis: Any) -> None:
    for seed in range(30):
        redis.flushall()
        run_at_random(url, redis, seed)


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_found(
    embedded: EmbeddedRedis, redis: Any, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(*FAULTS[fault])
    with must_show():
        run_some_at_random(embedded.url, redis)


@pytest.mark.parametrize("fault", FAULTS)
def test_renamed_code_is_not_taken_for_a_fault(
    embedded: EmbeddedRedis, redis: Any, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    Renaming(monkeypatch).setattr(*FAULTS[fault])
    with must_notice_renames():
        run_some_at_random(embedded.url, redis)


# --- connections and failures ------------------------------------------------------------------------------


def read_until(reader: StreamReader, subscription: Subscription) -> list[bytes]:
    """The IDs of the requests of this subscription that arrive next."""
    ids: list[bytes] = []

    def arrived() -> bool:
        result = reader.read(0.01)
        assert not result.failed
        if subscription in result.arrived:
            ids.extend(entry_id for entry_id, _ in result.arrived[subscription].requests)
        return bool(ids)

    wait_until(arrived, description="requests arrive")
    return ids


def test_idle_models_cost_nothing_while_a_busy_one_is_read(embedded: EmbeddedRedis, redis: Any) -> None:
    """Given 100 idle models and a busy one, expect XREADs over its two streams alone for each read."""
    reader = StreamReader(embedded.url, "test")
    busy = reader.subscribe(Keys("busy"), b"0-0")
    for number in range(100):
        reader.set_busy(reader.subscribe(Keys(f"idle{number}"), b"0-0"), False)
    for _ in range(3):
        redis.xadd(Keys("busy").requests, {"a": "b"})
        read_until(reader, busy)
    redis.config_resetstat()
    for _ in range(20):
        redis.xadd(Keys("busy").requests, {"a": "b"})
        assert len(read_until(reader, busy)) == 1
    names = [stream.name for xread in reader._busy._xreads for stream in xread.streams]
    assert names == [Keys("busy").requests, Keys("busy").settled]
    assert 40 <= redis.info("commandstats")["cmdstat_xread"]["calls"] <= 52
    reader.close()


def test_settled_is_read_with_the_next_request_unless_it_is_awaited(
    embedded: EmbeddedRedis, redis: Any
) -> None:
    reader = StreamReader(embedded.url, "test", busy_block_ms=60_000)
    keys = Keys("m")
    subscription = reader.subscribe(keys, b"0-0")
    assert reader.read(0.0) == ReadResult({}, {})
    settled = [redis.xadd(keys.settled, {"a": "b"})]
    assert reader.read(0.05) == ReadResult({}, {})
    request = redis.xadd(keys.requests, {"a": "b"})
    arrived = reader.read(5.0).arrived[subscription]
    assert [entry_id for entry_id, _ in arrived.requests] == [request]
    assert [entry_id for entry_id, _ in arrived.settled] == settled
    subscription.awaits_settled = True
    assert reader.read(0.0) == ReadResult({}, {})
    settled = [redis.xadd(keys.settled, {"a": "b"})]
    arrived = reader.read(5.0).arrived[subscription]
    assert [entry_id for entry_id, _ in arrived.settled] == settled
    reader.close()


def test_requests_that_are_not_awaited_are_read_with_the_next_batch_that_settles(
    embedded: EmbeddedRedis, redis: Any
) -> None:
    reader = StreamReader(embedded.url, "test", busy_block_ms=60_000)
    keys = Keys("m")
    subscription = reader.subscribe(keys, b"0-0")
    assert reader.read(0.0, awaits_requests=False) == ReadResult({}, {})
    requests = [redis.xadd(keys.requests, {"a": "b"}) for _ in range(3)]
    assert reader.read(0.05, awaits_requests=False) == ReadResult({}, {})
    settled = redis.xadd(keys.settled, {"a": "b"})
    arrived = reader.read(5.0, awaits_requests=False).arrived[subscription]
    assert [entry_id for entry_id, _ in arrived.requests] == requests
    assert [entry_id for entry_id, _ in arrived.settled] == [settled]
    # Nothing else arrived, so that nothing of the connection for requests waits in Redis. Once they are
    # awaited again, they are read at once
    request = redis.xadd(keys.requests, {"a": "b"})
    assert reader.read(0.05, awaits_requests=False) == ReadResult({}, {})
    arrived = reader.read(0.0).arrived[subscription]
    assert [entry_id for entry_id, _ in arrived.requests] == [request]
    reader.close()


def test_model_that_became_busy_is_read_although_no_request_is_awaited(
    embedded: EmbeddedRedis, redis: Any
) -> None:
    """The connection for batches that settle waits without it, and is not interrupted."""
    reader = StreamReader(embedded.url, "test", busy_block_ms=60_000)
    reader.subscribe(Keys("m"), b"0-0")
    assert reader.read(0.0, awaits_requests=False) == ReadResult({}, {})
    other = reader.subscribe(Keys("other"), b"0-0")
    other.awaits_settled = True
    assert reader.read(0.0, awaits_requests=False) == ReadResult({}, {})
    settled = redis.xadd(Keys("other").settled, {"a": "b"})
    arrived = reader.read(5.0, awaits_requests=False).arrived[other]
    assert [entry_id for entry_id, _ in arrived.settled] == [settled]
    reader.close()


def test_reader_knows_whether_there_may_be_more(
    embedded: EmbeddedRedis, redis: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "ENTRIES_MAX", 3)
    reader = StreamReader(embedded.url, "test")
    subscription = reader.subscribe(Keys("m"), b"0-0")
    for _ in range(5):
        redis.xadd(Keys("m").requests, {"a": "b"})
    for count, has_more in ((3, True), (2, False)):
        assert len(read_until(reader, subscription)) == count
        assert subscription.has_more == has_more
    for _ in range(3):
        redis.xadd(Keys("m").requests, {"a": "b"})
    assert len(read_until(reader, subscription)) == 3
    assert subscription.has_more
    wait_until(
        lambda: reader.read(0.01) and not subscription.has_more,
        description="a reply without this stream says that there is no more",
    )
    reader.close()


def test_model_that_cannot_be_read_is_found_and_the_others_are_read(
    embedded: EmbeddedRedis, redis: Any
) -> None:
    reader = StreamReader(embedded.url, "test", busy_block_ms=10, idle_block_ms=20)
    good, bad, idle = (reader.subscribe(Keys(model), b"0-0") for model in ("good", "bad", "idle"))
    reader.set_busy(idle, False)
    redis.set(Keys("bad").requests, "not a stream")
    failed: dict[Subscription, CommandError] = {}

    def has_failed() -> bool:
        failed.update(reader.read(0.01).failed)
        return bool(failed)

    wait_until(has_failed, description="the failure is found")
    assert list(failed) == [bad]
    assert failed[bad].code == "WRONGTYPE"
    for keys, subscription in ((Keys("good"), good), (Keys("idle"), idle)):
        assert read_until_added(redis, reader, keys, subscription)
    # And the model is read again once its key is a stream
    redis.delete(Keys("bad").requests)
    assert read_until_added(redis, reader, Keys("bad"), reader.subscribe(Keys("bad"), b"0-0"))
    reader.close()


def read_until_added(redis: Any, reader: StreamReader, keys: Keys, subscription: Subscription) -> bool:
    added = redis.xadd(keys.requests, {"a": "b"})
    return read_until(reader, subscription) == [added]


def test_error_whose_cause_has_gone_is_no_failure(
    embedded: EmbeddedRedis, redis: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a key that was no stream for a moment, expect that it is read again; twice is an error."""
    reader = StreamReader(embedded.url, "test")
    keys = Keys("m")
    subscription = reader.subscribe(keys, b"0-0")

    def read_what_is_no_stream() -> ReadResult:
        """Let Redis reject an XREAD, and remove the cause before the reply is received."""
        redis.set(keys.requests, "no stream")
        with monkeypatch.context() as patch:
            patch.setattr(reader_module, "readable_links", lambda _links, _timeout_s: [])
            reader.read(0.0)
        redis.delete(keys.requests)
        return reader.read(1.0)

    assert read_what_is_no_stream() == ReadResult({}, {})
    with pytest.raises(CommandError, match="WRONGTYPE"):
        wait_until(read_what_is_no_stream, description="the second error in a row")
    assert read_until_added(redis, reader, keys, subscription)
    reader.close()


def test_wait_that_someone_ended_is_an_error_of_the_connection(embedded: EmbeddedRedis, redis: Any) -> None:
    """Redis ends waits so when it becomes a replica. Its new connection goes on."""
    reader = StreamReader(embedded.url, "test")
    subscription = reader.subscribe(Keys("m"), b"0-0")

    def read_and_unblock_it() -> bool:
        reader.read(0.0)  # again, if its time was over before it could be unblocked
        names = {client["name"]: client["id"] for client in redis.client_list()}
        return bool(redis.execute_command("CLIENT", "UNBLOCK", names["test:reads"], "ERROR"))

    wait_until(read_and_unblock_it, description="the read is unblocked")
    with pytest.raises(LinkError, match="UNBLOCKED"):
        reader.read(1.0)
    assert read_until_added(redis, reader, Keys("m"), subscription)
    reader.close()


def test_reply_has_a_limited_number_of_bytes(
    embedded: EmbeddedRedis, redis: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given entries of 1 KB and a limit of 10 KB, expect about ten in each reply once their size is known."""
    monkeypatch.setattr(reader_module, "READ_BYTES", 10_000)
    monkeypatch.setattr(reader_module, "ENTRY_BYTES_UNKNOWN", 5_000)
    for _ in range(40):
        redis.xadd(Keys("m").requests, {"body": bytes(1000)})
    reader = StreamReader(embedded.url, "test")
    subscription = reader.subscribe(Keys("m"), b"0-0")
    assert [len(read_until(reader, subscription)) for _ in range(4)] == [2, 8, 9, 9]
    reader.close()


# --- entries of any size -----------------------------------------------------------------------------------

LARGE = 100_000


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than LARGE bytes are a surprise, and an entry may have twice as many, and a little more."""
    monkeypatch.setattr(reader_module, "READ_BYTES", LARGE // 2)
    monkeypatch.setattr(reader_module, "ENTRY_BYTES_UNKNOWN", 1000)
    monkeypatch.setattr(reader_module, "SURPRISE_BYTES", LARGE)
    monkeypatch.setattr(reader_module, "ENTRY_BYTES_MAX", 2 * LARGE + 1000)


def add_together(redis: Any, model: str, *sizes: int) -> list[bytes]:
    """Entries with bodies of these sizes, which one XREAD finds together."""
    pipeline = redis.pipeline(transaction=True)
    for size in sizes:
        pipeline.xadd(Keys(model).requests, {"body": bytes(size), "correlation_id": "c"})
    ids: list[bytes] = pipeline.execute()
    return ids


def read_small_entries(redis: Any, reader: StreamReader, model: str) -> Subscription:
    """Now the reader asks for many at a time."""
    subscription = reader.subscribe(Keys(model), b"0-0")
    for _ in range(3):
        redis.xadd(Keys(model).requests, {"a": "b"})
        read_until(reader, subscription)
    return subscription


@pytest.mark.usefixtures("small_limits")
def test_entries_that_are_suddenly_large_are_read_one_by_one(embedded: EmbeddedRedis, redis: Any) -> None:
    reader = StreamReader(embedded.url, "test")
    subscription = read_small_entries(redis, reader, "m")
    connected = redis.info("stats")["total_connections_received"]
    ids = add_together(redis, "m", *[LARGE] * 5)
    wait_until(lambda: not reader.read(1.0).arrived, description="the reply is too large")
    assert [read_until(reader, subscription) for _ in ids] == [[entry_id] for entry_id in ids]
    assert redis.info("stats")["total_connections_received"] == connected + 1  # the reply was not received
    added = add_together(redis, "m", *[1] * 6)  # and small ones soon together again
    assert [read_until(reader, subscription) for _ in range(3)] == [added[:1], added[1:2], added[2:]]
    reader.close()


@pytest.mark.usefixtures("small_limits")
def test_small_entries_before_a_large_one_are_read_with_few_surprises(
    embedded: EmbeddedRedis, redis: Any
) -> None:
    reader = StreamReader(embedded.url, "test")
    subscription = read_small_entries(redis, reader, "m")
    connected = redis.info("stats")["total_connections_received"]
    ids = add_together(redis, "m", *[1] * 30, LARGE + LARGE // 2)
    found: list[bytes] = []
    while found != ids:
        found += read_until(reader, subscription)
        assert found == ids[: len(found)]
    assert redis.info("stats")["total_connections_received"] <= connected + 3
    reader.close()


@pytest.mark.usefixtures("small_limits")
def test_oversized_entry_is_known_without_its_body(embedded: EmbeddedRedis, redis: Any) -> None:
    reader = StreamReader(embedded.url, "test")
    subscription = reader.subscribe(Keys("m"), b"0-0")
    before, large, after = add_together(redis, "m", 10, 2 * LARGE + 1000, 10)
    found: list[Any] = []

    def read() -> bool:
        arrived = reader.read(1.0).arrived.get(subscription)
        if arrived is not None:
            found.extend(arrived.oversized)
            found.extend(entry_id for entry_id, _ in arrived.requests)
        return len(found) == 3

    wait_until(read, description="all are read")
    size_bytes = 2 * LARGE + 1000 + len(b"bodycorrelation_idc")
    (oversized,) = [one for one in found if isinstance(one, OversizedEntry)]
    assert oversized == (large, [b"correlation_id", b"c"], b"body", size_bytes)
    assert {one for one in found if one is not oversized} == {before, after}
    reader.close()


@pytest.mark.usefixtures("small_limits")
def test_entry_that_does_not_fit_beside_others_is_read_later(embedded: EmbeddedRedis, redis: Any) -> None:
    reader = StreamReader(embedded.url, "test")
    models = ("a", "b")
    subscriptions = [reader.subscribe(Keys(model), b"0-0") for model in models]
    size = LARGE + LARGE // 2
    ids = {model: add_together(redis, model, size, size) for model in models}
    found: dict[str, list[bytes]] = {model: [] for model in models}

    def read() -> bool:
        arrived = reader.read(1.0).arrived
        for model, subscription in zip(models, subscriptions, strict=True):
            if subscription in arrived:
                found[model] += [entry_id for entry_id, _ in arrived[subscription].requests]
        assert sum(len(one.requests) for one in arrived.values()) <= 1
        return found == ids

    wait_until(read, description="all are read, each by itself")
    reader.close()


def test_a_reader_that_redis_cuts_off_asks_for_less(embedded: EmbeddedRedis, redis: Any) -> None:
    """Given a limit of Redis below what a reader asks for, expect its successors to lose few connections,
    and then to read all entries."""
    entries, mib = 40, 1 << 20
    add_together(redis, "m", *[mib] * entries)
    limit = redis.config_get("client-output-buffer-limit")
    redis.config_set("client-output-buffer-limit", f"normal {3 * mib} 0 0")
    sizes, losses, after, got = ReadSizes(), 0, b"0-0", 0
    while got < entries:
        reader = StreamReader(embedded.url, "test", sizes=sizes)
        subscription = reader.subscribe(Keys("m"), b"0-0")
        subscription.requests.rewind(after)
        try:
            while got < entries:
                for arrived in reader.read(5.0).arrived.values():
                    got += len(arrived.requests)
        except LinkError:
            losses += 1
            assert losses < 10, "it asks for too much again and again"
        after = subscription.requests.after
        reader.end(subscription)
        reader.close()
    redis.config_set("client-output-buffer-limit", limit["client-output-buffer-limit"])
    assert losses > 0


def test_what_a_reader_asks_for_grows_again() -> None:
    sizes = ReadSizes()
    for _ in range(100):
        sizes.connection_lost()
    assert sizes.read_bytes == READ_BYTES_MIN
    for _ in range(FULL_REPLIES * 100):
        sizes.full_reply()
    assert sizes.read_bytes == READ_BYTES


def test_sizes_of_entries_outlive_a_reader() -> None:
    sizes = ReadSizes()
    for number in range(2 * ENTRY_SIZES_KEPT):
        sizes.keep(f"m{number}", number)
    assert sizes.take(f"m{2 * ENTRY_SIZES_KEPT - 1}") == 2 * ENTRY_SIZES_KEPT - 1
    assert sizes.take("m0") == ENTRY_BYTES_UNKNOWN
