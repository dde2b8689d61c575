"""What `carpool workers` and the operators' page know of workers, from replies of Redis."""

from __future__ import annotations

from typing import Any

import pytest

from carpool.keys import Keys
from carpool.store.connection import CommandError
from carpool.store.directory import ProcessMemory, What, further_commands, read_sample, sample_commands
from carpool.store.workers import HeldBatch, Members, commands_for, read_states
from carpool.wire.orders import About, DrainOrder, encode_about, read_about

KEYS = Keys("m")
LEASES = [b"h-1-aa/0", b"9000", b"h-1-aa/1", b"9000", b"h-2-bb/0", b"4000.5"]
MEMBERS = Members.of(5000, LEASES, [b"h-1-aa/1"], [b"2"])
DENIED = CommandError("NOPERM", "this user has no permissions")


def replies() -> dict[What, Any]:
    """To what is asked of these."""
    return {
        ("declared", ""): [b"h-1-aa", b'{"version": "2"}', b"h-2-bb", b"[" * 100_000],
        ("drained", ""): [b"h-2-bb", b'{"who": "ann", "since": 7}'],
        ("memory", "h-1-aa"): [
            b"about",
            encode_about(About(2000, 1500, ["cuda:0"], 7)).encode(),
            b"0",
            b"1024 8",
        ],
        ("memory", "h-2-bb"): [b"about", b"{}", b"0", b"of another version"],
        ("in hand", ""): [1, b"3000-1", b"3000-1", [[b"h-1-aa/0", b"1"]]],
        ("batches", ""): [[b"3000-1", b"h-1-aa/0", 5, 1]],
        ("in hand", "2"): [702, b"900-0", b"4000-0", [[b"h-1-aa/0", b"700"], [b"h-1-aa/1", b"2"]]],
        ("batches", "2"): [[b"900-0", b"h-1-aa/0", 5, 3], [b"1000-0", b"h-1-aa/0", 5, 1]],
    }


def test_workers_are_what_redis_tells_of_them() -> None:
    """Also where a user wrote a key, and where more batches are in hand than are read."""
    assert set(commands_for(KEYS, MEMBERS)) == set(replies())
    one, other = read_states("m", MEMBERS, replies())
    first, second = one.processes
    assert (one.name, one.host, one.version, one.state) == ("h-1-aa", "h", "2", "serving")
    assert (one.age_s(one.since_ms), one.last_beat_ms, one.deaths) == (3.0, 7500, 7)
    assert first.batches == [HeldBatch("900-0@2", 3), HeldBatch("1000-0@2", 1), HeldBatch("3000-1", 1)]
    assert (first.in_hand, one.age_s(first.oldest_ms)) == (701, 4.1)
    assert (first.memory, first.device, first.is_draining) == (ProcessMemory(1024, 8), "cuda:0", False)
    assert (second.in_hand, second.oldest_ms, second.is_draining) == (2, None, True)
    assert (second.memory, second.device) == (ProcessMemory(0, 0), "")
    assert (other.version, other.state, other.order) == ("", "lost", DrainOrder("ann", 7))
    assert (other.age_s(other.since_ms), other.last_beat_ms, other.deaths) == (None, None, 0)


@pytest.mark.parametrize("text", ["", "[]", '{"since": 1e999, "lease": 1, "devices": []}', "[" * 100_000])
def test_what_a_worker_does_not_tell_so_is_nothing(text: str) -> None:
    assert read_about(text) is None


def test_a_worker_of_an_older_version_tells_of_no_deaths() -> None:
    assert read_about('{"since": 2, "lease": 3, "devices": ["cpu"]}') == About(2, 3, ["cpu"], 0)


def test_what_may_not_be_read_is_not_told() -> None:
    states = read_states("m", MEMBERS, dict.fromkeys(replies(), DENIED))
    assert [(state.version, state.order, state.since_ms) for state in states] == [("", None, None)] * 2
    assert [process.in_hand for state in states for process in state.processes] == [0, 0, 0]


def test_a_sample_does_without_what_is_optional() -> None:
    """And the oldest request is asked for where no batcher reports it; what is large was not kept."""
    first: dict[str, Any] = dict.fromkeys(sample_commands(KEYS), 0)
    first |= {"requests": 3, "workers": LEASES, "versions": [b"2"], "report": None, "paused": DENIED}
    further = further_commands(KEYS, first, 5_000_000)
    assert list(further) == [("batches", "2"), ("memory", "h-1-aa"), ("oldest", "")]
    told = {
        ("batches", "2"): 4,
        ("memory", "h-1-aa"): replies()["memory", "h-1-aa"],
        ("oldest", ""): [[b"3000-0", [b"body", b"7", b"arrival", b"1000"]]],
    }
    sample = read_sample(first, told, 5_000_000)
    assert (sample.oldest_s, sample.batches_in_flight, sample.model_processes) == (4.0, 4, 2)
    assert (sample.memory, sample.paused, sample.process_deaths) == ([ProcessMemory(1024, 8)], None, 7)
    sample = read_sample(first, dict.fromkeys(told, DENIED), 5_000_000)
    assert (sample.oldest_s, sample.batches_in_flight, sample.memory) == (None, 0, [])
