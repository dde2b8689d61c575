"""Parts of the benchmark grid that compute: profiles, soak, the floor's traces, process trees."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from grid import processes, profile, soak
from grid.__main__ import chosen
from grid.systems.floor import Recorded, in_order, trace
from grid.systems.floor import _Splitter as Splitter

# --- profile -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frame", "expected"),
    [
        ("decode (/somewhere/shared/carpool/wire/requests.py:12)", "carpool/wire/requests: decode"),
        ("Loop._run (carpool/lifecycle.py:200)", "carpool/lifecycle: Loop._run"),
        ("run (services/carpool_worker/model_process/main.py:3)", "carpool_worker/model_process/main: run"),
        ("_run_once (asyncio/base_events.py:1900)", "asyncio: _run_once"),
        ("read_response (redis/_parsers/hiredis.py:9)", "redis: read_response"),
        ("f (/x/lib/python3.11/site-packages/msgpack/fallback.py:9)", "msgpack: f"),
        ("select (/usr/lib/python3.11/selectors.py:468)", "selectors: select"),
    ],
)
def test_a_frame_is_named_by_its_module(frame: str, expected: str) -> None:
    assert profile.group(frame) == expected


def test_a_function_gets_the_samples_in_which_it_is_the_leaf() -> None:
    stacks = "main (a.py:1);work (a.py:2) 3\nmain (a.py:1) 1\nmain (a.py:1);work (a.py:9) 4"
    assert profile.shares(stacks) == {"a: work": 7 / 8, "a: main": 1 / 8}


def test_functions_of_a_module_are_added_up() -> None:
    costs = {"a: x": 1.0, "b: y": 2.5, "a: z": 2.0, "a: tiny": 0.01}
    assert profile.by_module(costs) == [("a", pytest.approx(3.01), "z 2.0, x 1.0"), ("b", 2.5, "y 2.5")]


def test_what_redis_does_not_report_is_the_rest() -> None:
    costs = profile.redis_costs({"evalsha": 3.0, "xread": 1.0, "xadd": 1.5, "xdel": 9.0}, 10.0)
    assert costs["XADD of requests"] == pytest.approx(0.5)
    assert costs["sockets, protocol, event loop"] == pytest.approx(5.5)


# --- soak --------------------------------------------------------------------------------------------------


def samples(mib_per_hour: float, warm_up_mib: float = 0.0) -> list[soak.Sample]:
    """An hour at a sample a minute, the first ten minutes with another memory."""
    return [
        soak.Sample(
            minute * 60.0,
            1000.0,
            {"batcher": 100.0 + mib_per_hour * minute / 60 - (warm_up_mib if minute < 10 else 0.0)},
        )
        for minute in range(60)
    ]


@pytest.mark.parametrize(
    ("mib_per_hour", "warm_up_mib", "expected"), [(20.0, 0.0, True), (2.0, 0.0, False), (0.0, 80.0, False)]
)
def test_memory_has_grown_if_it_rises_after_the_warm_up(
    mib_per_hour: float, warm_up_mib: float, expected: bool
) -> None:
    lines, has_grown = soak.verdict(samples(mib_per_hour, warm_up_mib))
    assert has_grown is expected
    assert ("GREW" in lines[0]) is expected


# --- the floor ---------------------------------------------------------------------------------------------

ID_A, ID_B, ID_C = b"1700000000000-0", b"1700000000001-12", b"1700000000002-0"


def test_replies_are_split_wherever_they_are_cut() -> None:
    replies = [b"+OK\r\n", b"*2\r\n$3\r\na\r\n\r\n*-1\r\n", b"$-1\r\n", b":7\r\n", b"*0\r\n"]
    data, splitter = b"".join(replies), Splitter()
    assert [reply for at in range(len(data)) for reply in splitter.feed(data[at : at + 1])] == replies


def batches_read(batch_id: bytes) -> bytes:
    """The reply to XREADGROUP: a batch, in which there is an entry ID."""
    return (
        b"*1\r\n*2\r\n$1\r\nb\r\n*1\r\n*2\r\n$15\r\n"
        + batch_id
        + b"\r\n*2\r\n$1\r\nx\r\n$15\r\n"
        + ID_A
        + b"\r\n"
    )


def test_a_read_comes_after_the_command_that_caused_it() -> None:
    read = Recorded([b"XREAD", b"BLOCK", b"9", b"STREAMS", b"b", b"0"], 0, b"*1\r\n", 2)
    script = Recorded([b"EVALSHA", b"x"], 1, b":1\r\n", 3)
    later = Recorded([b"EVALSHA", b"y"], 4, b":1\r\n", 5)
    assert in_order([read, script, later]) == [script, read, later]


def test_a_batch_is_read_between_its_dispatch_and_its_commit() -> None:
    """Although another script was sent before the batch was read, and its reply is seen after the commit."""
    read = Recorded([b"XREADGROUP", b"STREAMS", b"b", b">"], 0, batches_read(ID_C), 3)
    dispatch = Recorded([b"EVALSHA", b"x"], 1, b"$15\r\n" + ID_C + b"\r\n", 4)
    other = Recorded([b"EVALSHA", b"y"], 2, b"$15\r\n" + ID_A + b"\r\n", 7)
    commit = Recorded([b"EVALSHA", b"z"], 5, b":1\r\n", 6)
    assert in_order([read, dispatch, other, commit]) == [dispatch, read, commit, other]


def test_a_transaction_is_kept_together() -> None:
    """The proxy gives all of its commands the number of the reply to EXEC."""
    queued = [Recorded([name], at, b"+QUEUED\r\n", 9) for at, name in enumerate((b"MULTI", b"SET", b"XADD"))]
    other = Recorded([b"XADD", b"s", b"*"], 4, b"$15\r\n" + ID_B + b"\r\n", 5)
    executed = Recorded([b"EXEC"], 3, b"*2\r\n+OK\r\n$15\r\n" + ID_A + b"\r\n", 9)
    assert in_order([*queued, other, executed]) == [other, *queued, executed]
    removal = Recorded([b"EVALSHA", b"x", b"1", b"r:requests", ID_A], 10, b":1\r\n", 11)
    assert ID_A not in trace([*queued, executed, removal])


def test_what_belongs_to_no_request_is_not_replayed() -> None:
    assert in_order([Recorded([b"PING"], 0, b"+PONG\r\n", 1), Recorded([b"XREAD"], 2, b"*-1\r\n", 3)]) == []


def test_entry_ids_in_arguments_refer_to_replies() -> None:
    add = Recorded([b"XADD", b"s", b"*"], 0, b"$15\r\n" + ID_A + b"\r\n", 1)
    script = Recorded([b"EVALSHA", b"x", b"1", b"r:requests", b"<" + ID_A + b">", ID_B], 2, b":1\r\n", 3)
    written = trace([add, script])
    assert ID_A not in written  # Redis assigns another one in a replay
    assert ID_B in written  # no reply had it
    assert b"<" in written


def test_a_request_and_a_batch_with_the_same_id_are_not_confused() -> None:
    def recorded(batch_id: bytes) -> list[Recorded]:
        add = Recorded([b"XADD", b"s", b"*"], 0, b"$15\r\n" + ID_A + b"\r\n", 1)
        reply = b"$15\r\n" + batch_id + b"\r\n"
        dispatch = Recorded([b"EVALSHA", b"x", b"1", b"r:requests", ID_A], 2, reply, 3)
        commit = Recorded([b"EVALSHA", b"y", b"1", b"r:batches", batch_id], 4, b":1\r\n", 5)
        return [add, dispatch, commit]

    assert trace(recorded(ID_A)) == trace(recorded(ID_C))


def test_a_read_starts_where_the_last_one_of_its_stream_ended() -> None:
    read = Recorded([b"XREAD", b"BLOCK", b"5", b"STREAMS", b"s", ID_A], 0, b"*1\r\n", 1)
    written = trace([read])
    assert written.count(ID_A) == 1  # only as the first position of the stream
    assert b"BLOCK" not in written


# --- processes and the command line ------------------------------------------------------------------------


def test_descendants_get_the_role_of_their_name() -> None:
    code = (
        "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'input()']).pid, flush=True)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", f"{code}; input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        roots = {"worker": parent.pid}
        assert processes.by_role(roots, {}) == {"worker": [parent.pid, child]}
        assert processes.by_role(roots, {"worker": {"": "model"}}) == {
            "worker": [parent.pid],
            "model": [child],
        }
        assert processes.by_role(roots, {"worker": {"other": "model"}}) == {"worker": [parent.pid, child]}
        parent.communicate("\n")


def test_cpu_time_and_memory_of_this_process() -> None:
    assert processes.cpu_us(os.getpid()) > 0
    assert processes.memory_kib(os.getpid()) > 1000
    assert processes.memory_kib(os.getpid(), "VmHWM") >= processes.memory_kib(os.getpid())


def test_systems_are_chosen_by_patterns() -> None:
    items = {"carpool": 1, "carpool-256": 2, "mosec": 3}
    assert chosen("system", "carpool*", items) == [1, 2]
    assert chosen("system", "mosec, carpool", items) == [1, 3]
    with pytest.raises(SystemExit, match="no system matches 'tritn'"):
        chosen("system", "mosec,tritn", items)
