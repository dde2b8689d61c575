"""`carpool top` on a real stack: its numbers, and what it does to the terminal it is given."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from carpool.keys import Keys
from carpool.store.connection import Link
from carpool.store.directory import Directory
from carpool.wire.report import BatcherReport
from carpool_cli.top import look
from carpool_cli.top_page import figures
from support.stack import Stack
from support.waiting import wait_until

MODEL: Final = "Metered"  # batches of 8, of which 16 may wait, of a cost of 1000
KEYS: Final = Keys(MODEL)
ENTER, LEAVE, HOME = b"\x1b[?1049h", b"\x1b[?25h\x1b[?1049l", b"\x1b[H"
COLUMNS, ROWS = 76, 12
PAGE_S: Final = 20.0
NAMES: Final = itertools.count()


@pytest.fixture
def served(stack: Stack) -> Stack:
    """A stack of the test's own."""
    stack.serve("metered.py:Metered")
    return stack


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack for tests that leave it as it is."""
    with Stack(tmp_path_factory.mktemp("stack")) as stack:
        stack.serve("metered.py:Metered")
        yield stack


def command(*flags: str) -> list[str]:
    return [sys.executable, "-m", "carpool_cli", "top", *flags]


def environment(url: str, **more: str) -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("CARPOOL_")}
    return {**ours, "CARPOOL_REDIS_URL": url, **more}


def top(stack: Stack, *flags: str) -> str:
    """What `carpool top` prints."""
    done = subprocess.run(
        command(*flags), env=environment(stack.url), capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout


def said(stack: Stack) -> BatcherReport | None:
    """The batcher's status, as it is in Redis."""
    data = stack.redis.get(KEYS.report)
    return None if data is None else BatcherReport.decode(data)


def wait_for_status(stack: Stack, holds: Callable[[BatcherReport], object], what: str) -> BatcherReport:
    """The first status of which this holds."""
    found: list[BatcherReport] = []

    def look_again() -> bool:
        status = said(stack)
        found[:] = [status] if status is not None and holds(status) else []
        return bool(found)

    wait_until(look_again, description=f"the status says {what}", timeout_s=PAGE_S)
    return found[0]


def send_many(stack: Stack, number: int, body: Any = 1, **shared: str | int) -> None:
    names = [f"{next(NAMES)}" for _ in range(number)]
    stack.send_packed(MODEL, [{"correlation_id": name, "body": json.dumps(body)} for name in names], **shared)


# --- numbers -----------------------------------------------------------------------------------------------


def test_the_numbers_are_right_when_the_queue_is_full_and_after(served: Stack, tmp_path: Path) -> None:
    """Given a model held up by a gate, expect who is where and who was refused; then that all of it left."""
    gate = tmp_path / "gate"
    redis = served.redis
    served.send(MODEL, body=json.dumps({"gate": str(gate)}))
    wait_until(lambda: redis.xlen(KEYS.batches) == 1, description="the gate's batch is under way")
    send_many(served, 8)
    wait_until(lambda: redis.xlen(KEYS.batches) == 2, description="a full batch waits ahead")
    send_many(served, 16)
    send_many(served, 3)
    served.send(MODEL, body="1", cost=2000)
    served.send(MODEL, withdraw="nobody")
    wait_for_status(served, lambda one: sum(one.refused.values()) == 4, "that four were refused")

    (one,) = json.loads(top(served, "--once", "--json"))["models"]
    assert (one["model"], one["batcher"], one["model_processes"]) == (MODEL, True, 1)
    assert (one["waiting"], one["batches_in_flight"], one["requests_in_flight"]) == (16, 2, 9)
    assert one["oldest_s"] > 1.0
    assert {cause: of["total"] for cause, of in one["refused"].items()} == {
        "RESOURCE_EXHAUSTED/queue_size": 3,
        "INVALID_ARGUMENT/cost": 1,
    }
    assert (one["batches"], one["requests"]) == ({"idle": 1, "full": 1}, 9)
    assert (one["p50_ms"], one["learned"], one["requests_per_s"], one["reasons"]) == (None, None, 0.0, {})

    held_s = one["oldest_s"]
    gate.touch()
    status = wait_for_status(served, lambda said: not said.gauges.batches_in_flight, "that all is done")
    assert status.requests == 25
    page = top(served, "--once", "--model", MODEL)
    assert re.search(rf"^{MODEL} +0 +- +0 \(0\) +1 +0 ", page, re.MULTILINE), page
    assert "3 RESOURCE_EXHAUSTED/queue_size, 1 INVALID_ARGUMENT/cost" in page
    assert "l(n)" in page
    assert status.quantiles_us is not None
    assert status.quantiles_us[0] > 0.9e6 * held_s, "they waited for as long"


def test_rates_are_what_was_sent(shared: Stack) -> None:
    """Given 48 requests between two looks, expect as many, whatever time it took."""
    directory = Directory(Link(shared.url, name="test"), "carpool")
    wait_for_status(shared, lambda _: True, "something")
    before = look(directory, MODEL)[MODEL]
    assert before.status is not None
    for _ in range(6):
        send_many(shared, 8)
        shared.wait_until_idle(MODEL)
    requests = before.status.requests + 48
    wait_for_status(shared, lambda one: one.requests == requests, "that 48 left")
    found = figures(MODEL, before, look(directory, MODEL)[MODEL])
    directory.close()
    assert found.over_s is not None
    assert found.requests_per_s == pytest.approx(48 / found.over_s)
    assert found.batches_per_s == pytest.approx(6 / found.over_s)
    assert (found.fill, found.reasons) == (1.0, {"full": 1.0})


def test_another_batcher_begins_at_nothing(served: Stack) -> None:
    """Given a batcher that goes, expect its page to say so; and of the next one only what that one did."""
    send_many(served, 8)
    first = wait_for_status(served, lambda one: one.requests == 8, "that 8 left")
    served.active_batcher(MODEL).terminate()
    wait_until(lambda: not served.redis.exists(KEYS.batcher), description="the lease is given back")
    send_many(served, 5)
    page = top(served, "--once")
    assert re.search(rf"^{MODEL} +1 +\S+ \S+ +0 +1 +no batcher", page, re.MULTILINE), page

    served.batcher()
    second = wait_for_status(served, lambda one: one.batcher != first.batcher and one.requests, "what it did")
    assert (second.requests, second.batches) == (5, {"idle": 1})
    assert second.began_us > first.at_us


def wait_for_news(stack: Stack, after_us: int) -> int:
    """When the first status was said after that."""
    return wait_for_status(stack, lambda one: one.at_us > after_us, "something new").at_us


def test_a_status_is_said_once_a_second_and_expires(shared: Stack) -> None:
    moments_us = [wait_for_news(shared, after_us=0)]
    for _ in range(3):
        moments_us.append(wait_for_news(shared, after_us=moments_us[-1]))
    assert min(later - one for one, later in itertools.pairwise(moments_us)) >= 1_000_000
    assert 0 < shared.redis.pttl(KEYS.report) <= 5000


def test_it_is_said_when_redis_is_full(shared: Stack) -> None:
    before_us = wait_for_news(shared, after_us=0)
    shared.redis.config_set("maxmemory", 1)
    try:
        wait_for_news(shared, after_us=wait_for_news(shared, after_us=before_us))
    finally:
        shared.redis.config_set("maxmemory", 0)
    assert shared.events("report not published") == shared.events("batcher failed, starting over") == []


def test_a_batcher_that_may_not_say_it_batches_all_the_same(served: Stack) -> None:
    """Given an ACL file of before there was a status, expect a warning, and that the model is served."""
    served.redis.delete(KEYS.report)
    others = f"carpool:{{{MODEL}}}:"
    served.redis.execute_command(
        "ACL", "SETUSER", "default", "resetkeys", "~carpool:models", f"~{others}[^s]*", f"~{others}settled"
    )
    wait_until(lambda: served.events("report not published"), description="the batcher warns")
    sent = served.send(MODEL, body="1")
    assert served.result(MODEL, sent)["status"] == "OK"
    assert len(served.events("batcher active")) == 1
    assert len(served.events("report not published")) == 1


# --- the terminal ------------------------------------------------------------------------------------------


class Terminal:
    """A terminal with `carpool top` in it."""

    def __init__(self, url: str, *flags: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self._theirs = theirs
        self._before = termios.tcgetattr(theirs)
        more = environment(url, TERM="xterm")
        more = {name: value for name, value in more.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            command(*flags), env=more, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
        )
        self.output = b""

    @property
    def pages(self) -> list[list[str]]:
        """The lines of each page so far, without what paints them; the last may be half drawn."""
        _, *drawn = self.output.split(HOME)
        plain = [re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", one).decode() for one in drawn]
        return [one.split("\r\n") for one in plain]

    def read_until(self, holds: Callable[[], object]) -> None:
        """Read what it writes, until this holds."""
        ends_s = time.monotonic() + PAGE_S
        while not holds():
            assert time.monotonic() < ends_s, f"in vain; so far: {self.output[-3000:]!r}"
            if select.select([self._ours], [], [], 0.1)[0]:
                self.output += os.read(self._ours, 65536)

    def end(self, number: signal.Signals) -> int:
        """Send a signal, read the rest; the exit status."""
        self.process.send_signal(number)
        self.read_until(lambda: self.process.poll() is not None)
        while select.select([self._ours], [], [], 0)[0]:
            self.output += os.read(self._ours, 65536)
        assert termios.tcgetattr(self._theirs) == self._before
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)


@contextmanager
def terminal(url: str, *flags: str) -> Iterator[Terminal]:
    one = Terminal(url, *flags)
    try:
        yield one
    finally:
        one.close()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_the_page_is_drawn_in_place_and_the_terminal_given_back(
    shared: Stack, number: signal.Signals, status: int
) -> None:
    with terminal(shared.url) as shown:
        shown.read_until(lambda: len(shown.pages) > 1)
        assert shown.output.startswith(ENTER)
        before = wait_for_status(shared, lambda _: True, "something").refused
        shared.send(MODEL, body="1", cost=2000)
        refused = f"{before.get('INVALID_ARGUMENT/cost', 0) + 1} INVALID_ARGUMENT/cost"
        shown.read_until(lambda: refused in "\n".join(shown.pages[-1]))
        assert shown.end(number) == status
        assert shown.output.endswith(LEAVE)
        assert shown.output.count(ENTER) == shown.output.count(LEAVE) == 1
        whole = shown.pages[:-1]
        assert {len(page) for page in whole} == {ROWS}
        assert max(len(line) for page in whole for line in page) <= COLUMNS
        assert {page[0] for page in whole} == {f"carpool top  {shared.url}  1 model"}


def test_redis_goes_away_and_the_page_says_so(served: Stack) -> None:
    with terminal(served.url) as shown:
        shown.read_until(lambda: len(shown.pages) > 1)
        served.server.stop()
        shown.read_until(lambda: shown.pages[-1][1:2] and "Redis is away" in shown.pages[-1][1])
        shown.read_until(lambda: any(line.startswith(MODEL) for line in shown.pages[-1]))
        assert shown.end(signal.SIGINT) == 0
        assert b"Traceback" not in shown.output


def test_an_unforeseen_end_gives_the_terminal_back_too(served: Stack) -> None:
    """Given a model that is forgotten while it is watched, expect the reason on the terminal as it was."""
    with terminal(served.url, "--model", MODEL) as shown:
        shown.read_until(lambda: len(shown.pages) > 1)
        served.served_by(MODEL).kill()
        served.redis.srem("carpool:models", MODEL)
        shown.read_until(lambda: shown.process.poll() is not None)
        shown.read_until(lambda: b"is registered" in shown.output)
        assert shown.process.returncode == 1
        assert LEAVE in shown.output
        assert shown.output.index(LEAVE) < shown.output.index(b"no model 'Metered' is registered")


def test_json_goes_on_line_by_line(shared: Stack) -> None:
    with subprocess.Popen(
        command("--json"), env=environment(shared.url), stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        try:
            lines = [json.loads(running.stdout.readline()) for _ in range(2)]
        finally:
            running.terminate()
    assert [one["models"][0]["model"] for one in lines] == [MODEL, MODEL]
