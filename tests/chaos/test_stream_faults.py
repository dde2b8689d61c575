"""Stepping models under faults: each chunk is written once, whatever is killed, frozen or cut off."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

import carpool
import carpool_worker
from carpool.keys import Keys
from support.models.stepping import text_of
from support.stack import Service, Stack, envelope, frozen, frozen_with_batch
from support.stream_load import StreamChecker, StreamLoad
from support.waiting import Stopwatch, ample_ms, wait_until

pytestmark = pytest.mark.chaos

CHAIN: Final = "stepping.py:Chain"
KEYS: Final = Keys("Chain")
LEASE: Final = ("--lease-ms", "600")
PATIENT_MS: Final = "600000"  # `reader_idle_ms` where no reader is to be given up
# Of workers that nothing happens to: none may lose its requests because this machine stands still.
LONG_LEASE: Final = ("--lease-ms", "30000")


def worker(stack: Stack, lease: tuple[str, ...] = LEASE, spec: str = CHAIN) -> Service:
    return stack.worker(spec, *lease)


def serve(stack: Stack, workers: int = 1, lease: tuple[str, ...] = LONG_LEASE) -> list[Service]:
    stack.batcher()
    services = [stack.worker(CHAIN, *lease, ready=False) for _ in range(workers)]
    for service in services:
        service.wait_for("worker ready")
    stack.wait_for_model("Chain", workers)
    return services


def assert_settled(stack: Stack, model: str = "Chain") -> None:
    """Nothing waits or is in flight, and nothing is kept of requests but what was written to readers."""
    stack.wait_until_idle(model)
    assert stack.pending(model) == 0
    assert list(stack.redis.scan_iter(match=Keys(model).progress("*"))) == []


def assert_all_ok(stack: Stack, checker: StreamChecker) -> None:
    assert checker.faults() == {}
    assert set(checker.statuses()) == {"OK"}
    assert_settled(stack)
    assert stack.redis.xlen(KEYS.dead) == 0


def send(stack: Stack, name: str, model: str = "Chain", *, stream: int = 1, **fields: Any) -> None:
    """Send a request whose body is made of the fields with the names of faults and of the output."""
    body = {key: fields.pop(key) for key in [*fields] if key in BODY_FIELDS}
    stack.send(model, correlation_id=name, body=json.dumps(body), stream=stream, **fields)


BODY_FIELDS: Final = ("length", "seed", "step_s", "gate", "kills_at", "kills_after", "raises_at")


def read_all(stack: Stack, name: str, model: str = "Chain") -> list[dict[str, Any]]:
    """All envelopes of a request, to its end."""
    found: list[dict[str, Any]] = []
    while not found or not found[-1]["final"]:
        found.append(stack.result(model, name))
    return found


def wait_for_chunks(stack: Stack, name: str, count: int, model: str = "Chain") -> None:
    """Wait until `count` chunks of a request are written, without reading them."""
    wait_until(
        lambda: stack.redis.llen(Keys(model).result(name)) >= count,
        description=f"{count} chunks of {name} are written",
    )


def wait_for_more_chunks(stack: Stack, name: str, more: int) -> None:
    """Wait until this number of further chunks of a request is written, or the request has ended. Reads none
    of them."""
    key = KEYS.result(name)
    count = stack.redis.llen(key) + more
    wait_until(
        lambda: stack.redis.llen(key) >= count or envelope(stack.redis.lindex(key, -1))["final"],
        description=f"{count} chunks of {name} are written",
    )


def wait_for_process(service: Service, deaths: int) -> None:
    """Wait until the model process was replaced this many times."""
    wait_until(
        lambda: len(service.events("model process replaced")) == deaths,
        description="the model process is replaced",
    )


def batch_of(stack: Stack, model: str = "Chain") -> dict[str, Any]:
    """The pending entry of the one request in flight."""
    (pending,) = stack.redis.xpending_range(Keys(model).batches, "workers", "-", "+", 10)
    found: dict[str, Any] = pending
    return found


# --- SIGKILL


def test_workers_are_killed_in_mid_generation(stack: Stack) -> None:
    victim = serve(stack, workers=2, lease=LEASE)[0]
    checker = StreamChecker()
    with StreamLoad(stack, "Chain", checker) as load:
        for _ in range(2):
            load.wait_for_more(5)
            with frozen_with_batch(stack, "Chain", victim):
                victim.kill()
            victim = worker(stack)
            load.wait_for_more(5)

    assert_all_ok(stack, checker)
    assert stack.events("batch reclaimed"), "no worker had a request when it was killed"


def test_model_process_is_killed_in_mid_generation(stack: Stack) -> None:
    """Its worker goes on with another process: nothing is redelivered, and nobody is to blame."""
    (service,) = serve(stack)
    checker = StreamChecker()
    with StreamLoad(stack, "Chain", checker) as load:
        for deaths in (1, 2):
            load.wait_for_more(5)
            (process,) = service.children()
            os.kill(process, signal.SIGKILL)
            wait_for_process(service, deaths)

    assert_all_ok(stack, checker)
    assert not stack.events("batch reclaimed")


def test_request_outlives_any_number_of_deaths_that_it_did_not_cause(stack: Stack) -> None:
    """Given requests that are generated while the process dies three times and the worker once."""
    (service,) = serve(stack, lease=LEASE)
    names = [f"r{number}" for number in range(3)]
    for name in names:
        send(stack, name, length=30, step_s=0.04, stream=int(name != "r2"))
    wait_for_chunks(stack, "r0", 1)
    for deaths in range(1, 4):
        wait_for_more_chunks(stack, "r0", 2)
        os.kill(service.children()[0], signal.SIGKILL)
        wait_for_process(service, deaths)
    wait_for_more_chunks(stack, "r0", 2)
    service.kill()
    worker(stack)
    for name in names:
        final = read_all(stack, name)[-1]
        assert (final["status"], final["body"]) == ("OK", text_of(name, 30)), final
    assert stack.redis.xlen(KEYS.dead) == 0


# --- SIGSTOP


def test_worker_frozen_past_its_lease_writes_no_chunk(stack: Stack) -> None:
    frozen_worker, other = serve(stack, workers=2, lease=LEASE)
    checker = StreamChecker()
    with StreamLoad(stack, "Chain", checker) as load:
        with frozen_with_batch(stack, "Chain", frozen_worker):
            other.wait_for("batch reclaimed")
            load.wait_for_more(5)
        frozen_worker.wait_for("request dropped, another worker has it")
        load.wait_for_more(10)

    assert_all_ok(stack, checker)
    assert frozen_worker.alive


# --- batchers


def test_active_batcher_is_killed_while_another_stands_by(stack: Stack) -> None:
    serve(stack)
    stack.batcher()
    checker = StreamChecker()
    with StreamLoad(stack, "Chain", checker) as load:
        load.wait_for_more(3)
        stack.active_batcher("Chain").kill()
        load.wait_for_more(30)  # more than there are slots: capacity was counted anew

    assert_all_ok(stack, checker)
    assert not stack.events("batch reclaimed")


def test_concurrently_active_batchers_dispatch_nothing_twice(stack: Stack) -> None:
    serve(stack)
    batchers = [*(service for service in stack.services if "batcher" in service.name), stack.batcher()]
    checker = StreamChecker()
    with StreamLoad(stack, "Chain", checker) as load:

        def were_both_active() -> bool:
            stack.redis.delete(KEYS.batcher)
            load.wait_for_more(2)
            return all(batcher.events("batcher active") for batcher in batchers)

        wait_until(were_both_active, description="both batchers were active")
        for _ in range(2):
            were_both_active()

    assert_all_ok(stack, checker)


# --- Redis


def test_connections_are_cut_and_scripts_are_forgotten(stack: Stack) -> None:
    """A reply to a fetch may be lost: then its requests come when their lease runs out."""
    (service,) = serve(stack, lease=("--lease-ms", "2000"))
    name = service.wait_for("worker ready")["worker"]
    checker = StreamChecker()
    with StreamLoad(stack, "Chain", checker) as load:
        for number in range(10):
            load.wait_for_more(1)
            stack.redis.script_flush()
            for connection in stack.redis.client_list():
                if connection["name"] in (f"{name}:commit", f"{name}:{('fetch', 'heartbeat')[number % 2]}"):
                    stack.redis.client_kill_filter(_id=connection["id"])

    assert_all_ok(stack, checker)
    assert service.events("loop failed, retrying")


def test_chunks_wait_while_redis_is_full_and_what_ends_gets_its_result(stack_on: Stack, gate: Path) -> None:
    stack = stack_on
    (service,) = serve(stack)
    send(stack, "gated", length=300, gate=str(gate), step_s=0.002)
    for name in ("short", "long"):
        send(stack, name, length=100 if name == "short" else 100_000, step_s=0.002)
    wait_for_chunks(stack, "long", 2)
    stack.redis.config_set("maxmemory", 1)
    service.wait_for("Redis is full, chunks wait")
    gate.touch()
    checker = StreamChecker()
    for name, length in (("short", 100), ("gated", 300)):
        checker.sent(name, {"length": length})
        for each in read_all(stack, name):
            checker.read(name, each)
    assert checker.faults() == {}
    assert any(each.get("chunks", 1) > 1 for each in checker.chunks("gated")), "no chunks were merged"
    assert stack.redis.exists(KEYS.progress(batch_of(stack)["message_id"].decode()))
    stack.redis.config_set("maxmemory", 0)
    written = stack.redis.llen(KEYS.result("long"))
    wait_for_chunks(stack, "long", written + 2)
    stack.send("Chain", withdraw="long")
    *chunks, final = read_all(stack, "long")
    assert final["status"] == "CANCELLED"
    assert [each["index"] for each in chunks] == list(range(len(chunks)))
    assert_settled(stack)


# --- readers


def test_reader_that_has_gone_is_given_up_and_its_slot_is_free(stack: Stack) -> None:
    serve(stack)
    stack.configure("Chain", max_batch_size="1", reader_idle_ms="700", stream_buffer="8")
    send(stack, "unread", length=10**9, step_s=0.002)
    send(stack, "next", length=3)
    assert read_all(stack, "next")[-1]["body"] == text_of("next", 3)
    *chunks, final = read_all(stack, "unread")
    assert (final["status"], "reader_idle_ms" in final["detail"]) == ("CANCELLED", True)
    assert [each["index"] for each in chunks] == list(range(len(chunks)))
    assert 8 <= len(chunks) <= 9 + 64  # those for a full list, and what was waiting at the end
    assert_settled(stack)


def test_slow_reader_gets_merged_chunks_and_holds_up_nobody(stack: Stack) -> None:
    serve(stack)
    stack.configure("Chain", stream_buffer="4", reader_idle_ms="30000")
    checker = StreamChecker()
    for name, length in (("slow", 400), ("fast", 400)):
        checker.sent(name, {"length": length})
        send(stack, name, length=length, step_s=0.001)
    wait_for_chunks(stack, "slow", 4)
    for each in read_all(stack, "fast"):
        checker.read("fast", each)
    for each in read_all(stack, "slow"):
        checker.read("slow", each)
    assert checker.faults() == {}
    assert len(checker.chunks("slow")) < 20
    assert sum(each.get("chunks", 1) for each in checker.chunks("slow")) == 400


def test_requests_are_withdrawn_while_they_end(stack: Stack) -> None:
    serve(stack, workers=2)
    checker = StreamChecker()
    with StreamLoad(stack, "Chain", checker, length_max=12, withdraws=True) as load:
        load.wait_for_more(120)

    assert checker.faults() == {}
    assert set(checker.statuses()) == {"OK", "CANCELLED"}
    assert_settled(stack)


def test_requests_expire_in_each_state(stack: Stack) -> None:
    """Given one slot: one request expires while it is generated, one while it waits in the process, and one
    while no worker has it."""
    (service,) = serve(stack)
    stack.configure("Chain", max_batch_size="1")
    stopwatch = Stopwatch()
    send(stack, "first", length=1)
    read_all(stack, "first")
    expiration_ms = ample_ms(stopwatch, 1500)  # enough for the first chunk, also on a busy machine
    sent = [("generated", 10**9, expiration_ms), ("waiting", 5, expiration_ms // 2)]
    requests = [
        {"correlation_id": name, "body": json.dumps({"length": length, "step_s": 0.002}), "expiration": ms}
        for name, length, ms in sent
    ]
    stack.send_packed("Chain", requests, stream=1)  # together, so that the one expires behind the other
    wait_for_chunks(stack, "generated", 1)
    *chunks, final = read_all(stack, "generated")
    assert final["status"] == "DEADLINE_EXCEEDED"
    assert "".join(each["body"] for each in chunks) == text_of("generated", len(chunks))
    (only,) = read_all(stack, "waiting")
    assert only["status"] == "DEADLINE_EXCEEDED"
    with frozen(service):
        send(stack, "nowhere", length=5, expiration=300)
        assert read_all(stack, "nowhere")[0]["status"] == "DEADLINE_EXCEEDED"
    send(stack, "last", length=3)
    assert read_all(stack, "last")[-1]["body"] == text_of("last", 3)
    assert_settled(stack)


def test_request_answered_while_its_worker_is_dead_is_not_generated_again(stack: Stack) -> None:
    """Also one whose stored body is not loaded any more because of that."""
    (service,) = serve(stack, lease=LEASE)
    body = json.dumps({"length": 10**9, "step_s": 0.002}).encode()
    stack.redis.set(KEYS.body("large"), body, px=60_000)
    stack.send("Chain", correlation_id="large", body_key="large", body_bytes=len(body), stream=1)
    send(stack, "small", length=10**9, step_s=0.002)
    for name in ("small", "large"):
        wait_for_chunks(stack, name, 1)
    service.kill()
    stack.send("Chain", withdraw="small large")
    for name in ("small", "large"):
        assert read_all(stack, name)[-1]["status"] == "CANCELLED"
    worker(stack)
    assert_settled(stack)
    assert not stack.redis.exists(KEYS.body("large"))
    send(stack, "last", length=3)
    assert read_all(stack, "last")[-1]["body"] == text_of("last", 3)
    for name in ("small", "large"):
        assert not stack.redis.exists(KEYS.result(name))


# --- SIGTERM


def test_worker_that_is_to_finish_streams_does_so_before_it_stops(stack: Stack) -> None:
    (service,) = serve(stack, lease=(*LONG_LEASE, "--finish-streams"))
    send(stack, "long", length=100, step_s=0.02)
    wait_for_chunks(stack, "long", 1)
    assert service.terminate() == 0
    assert read_all(stack, "long")[-1]["body"] == text_of("long", 100)
    assert_settled(stack)


def test_terminated_worker_hands_its_requests_over(stack: Stack) -> None:
    """They go on elsewhere although the lease is long, at the epoch that they had: nobody is a suspect."""
    first, _ = serve(stack, workers=2)
    checker = StreamChecker()
    with StreamLoad(stack, "Chain", checker) as load:
        load.wait_for_more(5)
        assert first.terminate() == 0
        assert first.events("worker stopped")[0]["clean"] is True
        load.wait_for_more(10)

    assert_all_ok(stack, checker)
    assert sum(event["requests"] for event in stack.events("requests handed over")) > 0
    assert stack.events("batch reclaimed")
    assert {batch["epoch"] for batch in stack.events("batch")} == {1}
    assert {batch["epoch"] for batch in stack.events("batch reclaimed")} == {1}


# --- requests that make a model fail


def send_with_poison(stack: Stack, model: str = "Chain", **poison: Any) -> None:
    """Send six good requests, and one that is not, while all are generated together. They are read one after
    another, while processes are replaced."""
    stack.configure(model, reader_idle_ms="60000")
    for number in range(6):
        send(stack, f"good{number}", model, length=20, step_s=0.01, stream=number % 2)
    send(stack, "bad", model, **{"length": 20, "step_s": 0.01, **poison})


def assert_good_ones_are_whole(stack: Stack, model: str = "Chain") -> None:
    checker = StreamChecker()
    for number in range(6):
        name = f"good{number}"
        checker.sent(name, {"length": 20}, is_streamed=bool(number % 2))
        for each in read_all(stack, name, model):
            checker.read(name, each)
    assert checker.faults() == {}
    assert set(checker.statuses()) == {"OK"}


@pytest.mark.parametrize("stream", [1, 0])
def test_request_that_kills_its_process_is_dead_lettered_alone(stack: Stack, stream: int) -> None:
    """One that is not streamed begins anew each time, so it does not come at once to where it kills."""
    serve(stack)
    send_with_poison(stack, kills_at=5, stream=stream)
    assert_good_ones_are_whole(stack)
    *chunks, final = read_all(stack, "bad")
    assert final["status"] == "ABORTED"
    assert "".join(each["body"] for each in chunks) == text_of("bad", 5 * stream)
    ((_, letter),) = stack.redis.xrange(KEYS.dead)
    assert (letter[b"correlation_id"], letter[b"attempts"]) == (b"bad", b"2")
    deaths = len(stack.events("model process died"))
    assert deaths == 2 if stream else 2 < deaths <= 6
    assert_settled(stack)


def test_request_that_kills_its_process_some_steps_after_each_beginning_is_given_up(stack: Stack) -> None:
    """It survives its first step alone each time, and the steps alone are doubled until it does not."""
    serve(stack)
    send_with_poison(stack, kills_after=3, length=10**9)
    assert_good_ones_are_whole(stack)
    *chunks, final = read_all(stack, "bad")
    assert final["status"] == "ABORTED"
    assert "".join(each["body"] for each in chunks) == text_of("bad", len(chunks))
    assert len(stack.events("model process died")) <= 8
    assert_settled(stack)


def test_request_on_which_the_model_raises_fails_alone(stack: Stack) -> None:
    serve(stack)
    send_with_poison(stack, raises_at=3)
    assert_good_ones_are_whole(stack)
    *chunks, final = read_all(stack, "bad")
    assert (final["status"], "chunk 3 is not possible" in final["detail"]) == ("INTERNAL", True)
    assert "".join(each["body"] for each in chunks) == text_of("bad", 3)
    assert not stack.events("model process died")


def test_model_that_cannot_go_on_from_chunks_aborts_what_was_sent(stack: Stack) -> None:
    stack.batcher()
    service = worker(stack, LONG_LEASE, "stepping.py:Forgetful")
    stack.wait_for_model("Forgetful")
    send(stack, "sent", "Forgetful", length=10**9, step_s=0.002)
    send(stack, "whole", "Forgetful", length=300, step_s=0.002, stream=0)
    wait_for_chunks(stack, "sent", 1, "Forgetful")
    os.kill(service.children()[0], signal.SIGKILL)
    assert read_all(stack, "sent", "Forgetful")[-1]["status"] == "ABORTED"
    (whole,) = read_all(stack, "whole", "Forgetful")
    assert (whole["status"], whole["body"]) == ("OK", text_of("whole", 300))
    assert_settled(stack, "Forgetful")


# --- another model under the same name


def test_batches_for_a_model_that_does_not_step_are_answered(stack: Stack) -> None:
    """Given a batch of four and one of one for a worker that is frozen, when a stepping model registers under
    its name and takes them, expect an answer to each request."""
    stack.batcher()
    echo = worker(stack, LONG_LEASE, "Chain=plain.py:Echo")
    stack.wait_for_model("Chain")
    with frozen(echo):
        bodies = [{"correlation_id": f"r{number}", "body": json.dumps({"length": 3})} for number in range(4)]
        stack.send_packed("Chain", bodies)
        wait_until(lambda: stack.redis.xlen(KEYS.batches) > 0, description="they are dispatched")
        stack.expire_lease("Chain", echo)
        worker(stack, LEASE)
        send(stack, "after", length=3)
        assert read_all(stack, "after")[-1]["body"] == text_of("after", 3)
        echo.kill()
    answers = [read_all(stack, f"r{number}")[-1] for number in range(4)]
    assert {(each["status"], each.get("body")) for each in answers} == {("ABORTED", None)}
    assert "does not step" in answers[0]["detail"]
    assert_settled(stack)


# --- planted faults, to show that the checker detects them


def replace(file: Path, pattern: str, replacement: str) -> None:
    """Replace the one part of a file that matches."""
    source, count = re.subn(pattern, replacement, file.read_text())
    assert count == 1
    file.write_text(source)


def faulty_package(home: Path, file: str, pattern: str, replacement: str) -> Path:
    """Make a directory with a copy of the package `carpool` in which a part of one script is replaced."""
    copied = home / "carpool"
    shutil.copytree(Path(carpool.__file__).parent, copied, ignore=shutil.ignore_patterns("__pycache__"))
    replace(copied / "store" / file, pattern, replacement)
    return home


def stream_with(stack: Stack, package: Path, name: str, length: int) -> Service:
    """Begin a request at a worker with a fault; return once it has written two chunks of it."""
    stack.batcher()
    service = stack.worker(CHAIN, *LONG_LEASE, faulty_package=package)
    stack.wait_for_model("Chain")
    send(stack, name, length=length, step_s=0.01)
    wait_for_chunks(stack, name, 2)
    return service


def checked(stack: Stack, name: str, length: int) -> dict[str, list[str]]:
    """Read a request to its end; return the faults that the checker finds."""
    checker = StreamChecker()
    checker.sent(name, {"length": length})
    for found in read_all(stack, name):
        checker.read(name, found)
    return checker.faults()


def test_checker_detects_chunks_written_without_the_count(stack: Stack, tmp_path: Path) -> None:
    """A script is repeated although it was carried out, as it is when its reply is lost."""
    faulty = faulty_package(tmp_path / "faulty", "lua/step.lua", r"if chunks == written then", "if true then")
    # What a caller does whose first call got no reply
    replace(faulty / "carpool" / "store" / "steps.py", r"( +\w+ = self\._link\.run\(_STEP, .*\n)", r"\1\1")
    stream_with(stack, faulty, "r", 20)
    assert "indexes" in checked(stack, "r", 20)


def test_checker_detects_chunks_merged_without_being_joined(stack: Stack, tmp_path: Path) -> None:
    """Only the last value of those for a slow reader is written."""
    faulty = tmp_path / "faulty"
    package = faulty / "carpool_worker"
    shutil.copytree(
        Path(carpool_worker.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__")
    )
    replace(package / "stepping" / "execution.py", r"\bconcatenated\(values\)", "values[-1]")
    stream_with(stack, faulty, "r", 20)
    stack.configure("Chain", stream_buffer="4")
    send(stack, "merged", length=100, step_s=0.001)
    stack.wait_until_idle("Chain")
    assert set(checked(stack, "merged", 100)) == {"chunks are not the output", "other chunks"}


def test_checker_detects_a_hand_over_that_raises_the_delivery_count(stack: Stack, tmp_path: Path) -> None:
    """What is handed over would be suspected, and a few deployments would raise the epoch without end."""
    faulty = faulty_package(
        tmp_path / "faulty",
        "lua/hand_over.lua",
        r"'RETRYCOUNT', tonumber\(ARGV\[i \+ 1\]\) - 1, ",
        "",
    )
    service = stream_with(stack, faulty, "r", 10**9)
    other = worker(stack, LONG_LEASE)
    assert service.terminate() == 0
    other.wait_for("batch reclaimed")
    stack.send("Chain", withdraw="r")
    assert read_all(stack, "r")[-1]["status"] == "CANCELLED"
    assert {batch["epoch"] for batch in stack.events("batch reclaimed")} == {2}


# --- memory


LONG: Final = 10_000  # values of a long conversation, and how long it may take: else it is shorter
LONG_S: Final = 60.0


def rss_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Memory:
    """What Redis, a worker and its model process use more than when this was made; the most of each."""

    def __init__(self, stack: Stack, service: Service) -> None:
        self._stack = stack
        self._pids = [service.pid, *service.children()]
        self._before = self._now()
        self.used_bytes = [0, 0, 0]

    def _now(self) -> list[int]:
        redis: int = self._stack.redis.info("memory")["used_memory"]
        return [redis, *map(rss_bytes, self._pids)]

    def look(self) -> None:
        used = [now - before for now, before in zip(self._now(), self._before, strict=True)]
        self.used_bytes = list(map(max, self.used_bytes, used))

    def __str__(self) -> str:
        names = ("Redis", "worker", "model process")
        used = zip(names, self.used_bytes, strict=True)
        return ", ".join(f"{name} +{used_bytes / 1e6:.1f} MB" for name, used_bytes in used)


def values_of(found: dict[str, Any]) -> list[int]:
    """The emitted values in a chunk: `values` says that they are a list."""
    values: list[int] = found["body"] if "values" in found else [found["body"]]
    return values


class Countdown(NamedTuple):
    """A stack that counts down, how far it does so in `LONG_S` on this machine, and after which time a reader
    has stopped."""

    stack: Stack
    service: Service
    length: int
    idle_ms: int


@pytest.fixture(scope="module")
def countdown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Countdown]:
    with Stack(tmp_path_factory.mktemp("countdown")) as stack:
        stack.batcher()
        service = worker(stack, LONG_LEASE, "stepping.py:countdown")
        stack.wait_for_model("countdown")
        stack.configure("countdown", reader_idle_ms=PATIENT_MS)
        stopwatch = Stopwatch()
        stack.send("countdown", correlation_id="warm", body="1000", stream=1)
        read_all(stack, "warm", "countdown")
        warm_s = stopwatch.elapsed_s
        yield Countdown(
            stack, service, min(LONG, int(1000 * LONG_S / warm_s)), max(1000, int(1000 * warm_s / 4))
        )


@pytest.mark.parametrize("pace", [1, 10])
def test_memory_of_a_long_conversation_is_bounded(countdown: Countdown, pace: int) -> None:
    """A reader that reads at once, and one that reads only when ten times as much is there."""
    stack, service, length, _ = countdown
    name = f"pace-{pace}"
    memory, values, envelopes_read = Memory(stack, service), list[int](), 0
    stack.send("countdown", correlation_id=name, body=str(length), stream=1)
    while True:
        if pace > 1:
            wait_until(
                lambda: (
                    stack.redis.llen(Keys("countdown").result(name)) >= 25 * pace
                    or not stack.redis.xlen(Keys("countdown").batches)
                ),
                description="more is written, or the request has ended",
            )
        for _ in range(25):
            found = stack.result("countdown", name)
            if found["final"]:
                break
            values += values_of(found)
            envelopes_read += 1
        memory.look()
        if found["final"]:
            break
    print(f"read at a pace of 1/{pace}: {memory}; {length} values in {envelopes_read} chunks")
    assert values == found["body"] == list(range(length, 0, -1))
    assert max(memory.used_bytes) < 32 * 1024 * 1024
    assert_settled(stack, "countdown")


def test_memory_of_a_conversation_whose_reader_stops_is_bounded(countdown: Countdown) -> None:
    stack, service, length, idle_ms = countdown
    memory = Memory(stack, service)
    values: list[int] = []

    def has_ended() -> bool:
        memory.look()
        return not stack.redis.xlen(Keys("countdown").batches)

    stack.configure("countdown", reader_idle_ms=str(idle_ms))
    try:
        stack.send("countdown", correlation_id="stops", body=str(10**9), stream=1)
        while len(values) < length // 5:
            values += values_of(stack.result("countdown", "stops"))
        wait_until(has_ended, description="the request is cancelled")
    finally:
        stack.configure("countdown", reader_idle_ms=PATIENT_MS)  # of the other tests of this stack
    *chunks, final = read_all(stack, "stops", "countdown")
    for found in chunks:
        values += values_of(found)
    print(f"read in part: {memory}; {len(values)} values in all")
    assert final["status"] == "CANCELLED"
    assert values == list(range(10**9, 10**9 - len(values), -1))
    assert max(memory.used_bytes) < 64 * 1024 * 1024
