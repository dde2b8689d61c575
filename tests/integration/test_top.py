"""`carpool top` on a real stack: its numbers, the batcher's reports, and its use of the terminal."""

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

from carpool.figures import figures, take_sample
from carpool.keys import Keys
from carpool.store.connection import Link
from carpool.store.directory import Directory
from carpool.wire.report import BatcherReport
from support.command import carpool, clean_environment
from support.stack import Stack
from support.waiting import EVENTUALLY_S, wait_until

MODEL: Final = "Metered"  # batches of 8, of which 16 may wait, of a cost of 1000
KEYS: Final = Keys(MODEL)
ENTER, RESTORE, HOME = b"\x1b[?1049h", b"\x1b[?25h\x1b[?1049l", b"\x1b[H"
COLUMNS, ROWS = 76, 24
TIMEOUT_S: Final = EVENTUALLY_S
NAMES: Final = itertools.count()


@pytest.fixture
def served(stack: Stack) -> Stack:
    """A stack for one test."""
    stack.serve("metered.py:Metered")
    return stack


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack for all tests that do not change it."""
    with Stack(tmp_path_factory.mktemp("stack")) as stack:
        stack.serve("metered.py:Metered")
        yield stack


def command(*flags: str) -> list[str]:
    return [sys.executable, "-m", "carpool_cli", "top", *flags]


def environment(url: str, **more: str) -> dict[str, str]:
    return {**clean_environment(), "CARPOOL_REDIS_URL": url, **more}


def top(stack: Stack, *flags: str) -> str:
    """Run `carpool top`; its output."""
    return carpool(stack.url, "top", *flags, check=True).stdout


def read_report(stack: Stack) -> BatcherReport | None:
    """The batcher's report in Redis."""
    data = stack.redis.get(KEYS.report)
    return None if data is None else BatcherReport.decode(data)


def wait_for_report(
    stack: Stack, condition: Callable[[BatcherReport], object], description: str
) -> BatcherReport:
    """The first report for which the condition holds."""
    found: list[BatcherReport] = []

    def is_found() -> bool:
        report = read_report(stack)
        found[:] = [report] if report is not None and condition(report) else []
        return bool(found)

    wait_until(is_found, description=f"a report: {description}", timeout_s=TIMEOUT_S)
    return found[0]


def send_many(stack: Stack, number: int, body: Any = 1, **shared: str | int) -> None:
    names = [f"{next(NAMES)}" for _ in range(number)]
    stack.send_packed(MODEL, [{"correlation_id": name, "body": json.dumps(body)} for name in names], **shared)


# --- numbers -----------------------------------------------------------------------------------------------


def test_numbers_are_right_with_a_full_queue_and_an_empty_one(served: Stack, tmp_path: Path) -> None:
    """Given a model blocked at a gate, expect the counts of each stage and of refusals; then all settled."""
    gate = tmp_path / "gate"
    redis = served.redis
    served.send(MODEL, body=json.dumps({"gate": str(gate)}))
    wait_until(lambda: redis.xlen(KEYS.batches) == 1, description="the blocked batch is in flight")
    send_many(served, 8)
    wait_until(lambda: redis.xlen(KEYS.batches) == 2, description="a full batch is dispatched ahead")
    send_many(served, 16)
    send_many(served, 3)
    served.send(MODEL, body="1", cost=2000)
    served.send(MODEL, withdraw="unknown")
    wait_for_report(served, lambda one: sum(one.refused.values()) == 4, "four refusals")

    (one,) = json.loads(top(served, "--once", "--json"))["models"]
    assert (one["model"], one["batcher"], one["model_processes"]) == (MODEL, True, 1)
    assert (one["waiting"], one["batches_in_flight"], one["requests_in_flight"]) == (16, 2, 9)
    assert one["oldest_s"] > 1.0
    assert {cause: of["total"] for cause, of in one["refused"].items()} == {
        "RESOURCE_EXHAUSTED/queue_size": 3,
        "INVALID_ARGUMENT/cost": 1,
    }
    assert (one["batches"], one["requests"]) == ({"idle": 1, "full": 1}, 9)
    assert (one["p50_ms"], one["learned"], one["requests_per_s"], one["reasons"]) == (None, {}, 0.0, {})

    oldest_s = one["oldest_s"]
    gate.touch()
    report = wait_for_report(served, lambda one: not one.gauges.batches_in_flight, "no batch in flight")
    assert report.requests == 25
    page = top(served, "--once", "--model", MODEL)
    assert re.search(rf"^{MODEL} +0 +- +0 \(0\) +1 +0 ", page, re.MULTILINE), page
    assert re.search(r"refused requests +3 RESOURCE_EXHAUSTED/queue_size +1 INVALID_ARGUMENT/cost\n", page), (
        page
    )
    assert "latency model     l(1) = " in page
    assert report.quantiles_us is not None
    assert report.quantiles_us[0] > 0.9e6 * oldest_s, "the latency includes the waiting time"


def test_detail_of_a_model(shared: Stack, tmp_path: Path) -> None:
    """Its lanes and tenants, with names that a terminal must not obey, and its errors; also as JSON."""
    gate = tmp_path / "gate"
    shared.wait_until_idle(MODEL)
    shared.send(MODEL, body=json.dumps({"gate": str(gate)}))
    wait_until(lambda: shared.redis.xlen(KEYS.batches), description="the process is busy")
    for number in range(3):
        shared.send(MODEL, body="1", lane="wide\x1b[2J", tenant="acme", priority=number, cost=900)
    shared.send(MODEL, body="1", cost=2000)
    page = top(shared, MODEL, "--once")
    assert "\x1b" not in page
    assert re.search(r"^wide\\x1b\[2J +[123] ", page, re.MULTILINE), page
    assert re.search(r"^acme +[123] ", page, re.MULTILINE), page
    assert re.search(r"^cost +INVALID_ARGUMENT +\d+ .* ago +cost: # is over", page, re.MULTILINE), page
    (sample,) = [json.loads(line) for line in top(shared, MODEL, "--once", "--json").splitlines()]
    assert sample["detail"]["priorities"]
    gate.touch()
    shared.wait_until_idle(MODEL)


def test_rates_are_those_of_the_requests_sent(shared: Stack) -> None:
    """Given 48 requests between two samples, expect these figures, however long that took."""
    directory = Directory(Link(shared.url, name="test"), "carpool")
    shared.wait_until_idle(MODEL)
    wait_for_newer_report(shared, now_us(shared))  # it counts what other tests sent
    before = take_sample(directory, MODEL)[MODEL]
    assert before.report is not None
    for _ in range(6):
        send_many(shared, 8)
        shared.wait_until_idle(MODEL)
    requests = before.report.requests + 48
    wait_for_report(shared, lambda one: one.requests == requests, "48 requests dispatched")
    found = figures(MODEL, before, take_sample(directory, MODEL)[MODEL])
    directory.close()
    assert found.over_s is not None
    assert found.requests_per_s == pytest.approx(48 / found.over_s)
    assert found.batches_per_s == pytest.approx(6 / found.over_s)
    assert (found.fill, found.reasons) == (1.0, {"full": 1.0})


def test_new_batcher_counts_from_zero(served: Stack) -> None:
    """Given a stopped batcher, expect the page to show that; and of the next one only its own counts."""
    send_many(served, 8)
    first = wait_for_report(served, lambda one: one.requests == 8, "8 requests dispatched")
    served.active_batcher(MODEL).terminate()
    wait_until(lambda: not served.redis.exists(KEYS.batcher), description="the lease is released")
    send_many(served, 5)
    page = top(served, "--once")
    assert re.search(rf"^{MODEL} +1 +\S+ \S+ +0 +1 +no batcher", page, re.MULTILINE), page

    served.batcher()
    second = wait_for_report(
        served, lambda one: one.batcher != first.batcher and one.requests, "of another batcher, with requests"
    )
    assert (second.requests, second.batches) == (5, {"idle": 1})
    assert second.began_us > first.at_us


def now_us(stack: Stack) -> int:
    """The time on Redis's clock."""
    seconds, us = stack.redis.time()
    return 1_000_000 * int(seconds) + int(us)


def wait_for_newer_report(stack: Stack, after_us: int) -> int:
    """The time of the first report after `after_us`."""
    return wait_for_report(stack, lambda one: one.at_us > after_us, f"after {after_us}").at_us


def test_report_is_published_once_a_second_and_expires(shared: Stack) -> None:
    times_us = [wait_for_newer_report(shared, after_us=0)]
    for _ in range(3):
        times_us.append(wait_for_newer_report(shared, after_us=times_us[-1]))
    assert min(later - earlier for earlier, later in itertools.pairwise(times_us)) >= 1_000_000
    assert 0 < shared.redis.pttl(KEYS.report) <= 5000


def test_report_is_published_while_redis_is_full(shared: Stack) -> None:
    before_us = wait_for_newer_report(shared, after_us=0)
    shared.redis.config_set("maxmemory", 1)
    try:
        wait_for_newer_report(shared, after_us=wait_for_newer_report(shared, after_us=before_us))
    finally:
        shared.redis.config_set("maxmemory", 0)
    assert (
        shared.events("report for carpool top not published")
        == shared.events("batcher failed, starting over")
        == []
    )


def test_batcher_without_permission_to_report_still_batches(served: Stack) -> None:
    """Given an ACL file without the key of the report, expect a warning, and that the model is served."""
    served.redis.delete(KEYS.report)
    prefix = f"carpool:{{{MODEL}}}:"
    served.redis.execute_command(
        "ACL",
        "SETUSER",
        "default",
        "resetkeys",
        "~carpool:models",
        f"~{prefix}[^s]*",
        f"~{prefix}settled",
        f"~{prefix}shares",
        f"~{prefix}stats",
    )
    wait_until(lambda: served.events("report for carpool top not published"), description="the batcher warns")
    sent = served.send(MODEL, body="1")
    assert served.result(MODEL, sent)["status"] == "OK"
    assert len(served.events("batcher active")) == 1
    assert len(served.events("report for carpool top not published")) == 1


# --- the terminal ------------------------------------------------------------------------------------------


class Terminal:
    """A pseudo-terminal in which `carpool top` runs."""

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
        """The lines of each page so far, without escape codes; the last page may be incomplete."""
        pages = self.output.split(HOME)[1:]
        plain = [re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", page).decode(errors="replace") for page in pages]
        return [page.split("\r\n") for page in plain if page]

    def read_until(self, condition: Callable[[], object]) -> None:
        """Read its output until the condition holds."""
        ends_s = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < ends_s, f"timed out; output so far: {self.output[-3000:]!r}"
            if select.select([self._ours], [], [], 0.1)[0]:
                self.output += os.read(self._ours, 65536)

    def end(self, number: signal.Signals) -> int:
        """Send a signal and read the rest of the output; the exit status."""
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
def top_in_terminal(url: str, *flags: str) -> Iterator[Terminal]:
    terminal = Terminal(url, *flags)
    try:
        yield terminal
    finally:
        terminal.close()


def refused_for_cost(page: list[str]) -> int:
    """How many requests were refused for their cost, as a page says; it says nothing of none."""
    found = re.search(r"(\d+) INVALID_ARGUMENT/cost", "\n".join(page))
    return int(found[1]) if found else 0


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_page_is_redrawn_in_place_and_the_terminal_is_restored(
    shared: Stack, number: signal.Signals, status: int
) -> None:
    with top_in_terminal(shared.url) as shown:
        shown.read_until(lambda: len(shown.pages) > 1)
        assert shown.output.startswith(ENTER)
        before = refused_for_cost(shown.pages[0])
        shared.send(MODEL, body="1", cost=2000)
        shown.read_until(lambda: refused_for_cost(shown.pages[-1]) > before)
        assert shown.end(number) == status
        assert shown.output.endswith(RESTORE)
        assert shown.output.count(ENTER) == shown.output.count(RESTORE) == 1
        complete = shown.pages[:-1]
        assert {len(page) for page in complete} == {ROWS}
        assert max(len(line) for page in complete for line in page) <= COLUMNS
        assert {page[0].rstrip() for page in complete} == {f"carpool top  {shared.url}  1 model"}


def test_page_shows_that_redis_does_not_answer(served: Stack) -> None:
    with top_in_terminal(served.url) as shown:
        shown.read_until(lambda: len(shown.pages) > 1)
        served.server.stop()
        shown.read_until(lambda: shown.pages[-1][1:2] and "Redis does not answer" in shown.pages[-1][1])
        shown.read_until(lambda: any(line.startswith(MODEL) for line in shown.pages[-1]))
        assert shown.end(signal.SIGINT) == 0
        assert b"Traceback" not in shown.output


def test_terminal_is_restored_after_an_error(served: Stack) -> None:
    """Given a model that is removed while it is shown, expect the error on the restored terminal."""
    with top_in_terminal(served.url, "--model", MODEL) as shown:
        shown.read_until(lambda: len(shown.pages) > 1)
        served.served_by(MODEL).kill()
        served.redis.srem("carpool:models", MODEL)
        shown.read_until(lambda: shown.process.poll() is not None)
        shown.read_until(lambda: b"is not registered" in shown.output)
        assert shown.process.returncode == 1
        assert RESTORE in shown.output
        assert shown.output.index(RESTORE) < shown.output.index(b"model 'Metered' is not registered")


def test_json_is_printed_line_by_line(shared: Stack) -> None:
    with subprocess.Popen(
        command("--json"), env=environment(shared.url), stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        try:
            lines = [json.loads(running.stdout.readline()) for _ in range(2)]
        finally:
            running.terminate()
    assert [one["models"][0]["model"] for one in lines] == [MODEL, MODEL]
