"""What the operators' page costs: the time of each page, and the CPU of Redis while ten people look.

    .venv/bin/python ops/bench/console.py [--models 200] [--letters 50000] [--waiting 1000000] [--viewers 10]

One model has a million waiting requests and no worker, one has 50,000 dead letters, and the others are
registered, have a live model process and no requests. A batcher serves all of them. First nobody looks, then
the viewers do, each at a page that updates itself as in a browser; what Redis uses more is theirs. Then each
page is asked for alone, one time after the other: how long that takes, and what it costs Redis and the
console. Everything is on one machine.
"""

from __future__ import annotations

import argparse
import http.client
import re
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlencode, urlsplit

import msgpack
from many_models import register_idle_models
from redis import Redis
from service_processes import CpuMeter, cpu_time_us, start, stop

from carpool.keys import Keys
from carpool_cli.local.embedded import EmbeddedRedis, free_port
from carpool_console.users import User, Users, hash_of

DEEP, LETTERS = Keys("deep"), Keys("letters")
UPDATE_S: Final = 2.0  # between two updates of a page in a browser
LIVE: Final = {"X-Carpool-Live": "1"}
BATCH: Final = 5000  # commands that are sent to Redis together
PACKED: Final = 1000  # requests of an entry
REASONS: Final = tuple(
    f"its model process or worker died {number} times while it was executed alone: no memory at 0x{number:x}"
    for number in range(2, 22)
)
# Pages of the console, each with what it is. LETTER and ID stand for a dead letter and a correlation ID.
PAGES: Final = {
    "models": "/",
    "one model": "/models/deep",
    "workers": "/workers",
    "nodes": "/nodes",
    "dead letters": "/models/letters/dead",
    "dead letters, the last page": "/models/letters/dead?page=LAST",
    "dead letters that match": "/models/letters/dead?q=0x1",
    "errors of dead letters": "/models/letters/dead/errors",
    "a dead letter": "/models/letters/dead/LETTER",
    "a request": "/find?model=deep&id=ID",
    "settings": "/models/deep/settings",
    "audit": "/audit",
}
WATCHED: Final = ("/", "/", "/", "/", "/models/deep", "/models/deep", "/models/letters", "/workers", "/nodes",
                  "/models/letters/dead")  # fmt: skip


class Viewer:
    """A connection of somebody who has signed in."""

    def __init__(self, url: str, name: str, password: str) -> None:
        address = urlsplit(url)
        self._connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=60)
        form = urlencode({"name": name, "password": password, "next": "/"})
        headers = {"Content-Type": "application/x-www-form-urlencoded", "Origin": url}
        self._connection.request("POST", "/sign-in", form, headers)
        answer = self._connection.getresponse()
        answer.read()
        if answer.status != http.HTTPStatus.SEE_OTHER:
            raise RuntimeError(f"{name} cannot sign in: {answer.status}")
        self._cookie = answer.headers["Set-Cookie"].partition(";")[0]

    def get(self, path: str, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
        """Ask for a page. Returns the status and the page."""
        for is_last in (False, True):
            try:
                self._connection.request("GET", path, headers={"Cookie": self._cookie, **(headers or {})})
                answer = self._connection.getresponse()
                return answer.status, answer.read()
            except ConnectionError:  # the console ends connections that are not used
                if is_last:
                    raise
                self._connection.close()
        raise AssertionError("unreachable")

    def look(self, path: str, until_s: float) -> None:
        """Keep a page up to date, as in a browser."""
        while time.monotonic() < until_s:
            began_s = time.monotonic()
            self.get(path, LIVE)
            time.sleep(max(0.0, UPDATE_S - (time.monotonic() - began_s)))


class Cost(NamedTuple):
    """What a page takes, in milliseconds; `console_ms` and `redis_ms` are CPU time."""

    p50_ms: float
    p99_ms: float
    console_ms: float
    redis_ms: float
    kib: float


# --- what Redis has ----------------------------------------------------------------------------------------


def fill(redis: Any, letters: int, waiting: int) -> None:
    """Write the dead letters, and the waiting requests, in packed entries."""
    redis.hset(DEEP.overrides, mapping={"max_queue_size": 2 * waiting, "max_queue_bytes": 1 << 33})
    _in_pipelines(redis, _letters(letters))
    _in_pipelines(redis, _requests(waiting))


def _letters(number: int) -> Iterator[tuple[Any, ...]]:
    for at in range(number):
        yield (
            "XADD", LETTERS.dead, "*", "correlation_id", f"c{at}", "content_type", "application/json",
            "body", '{"text": "%s"}' % ("x" * 200), "reason", REASONS[at % len(REASONS)], "attempts", 2,
            "entry_id", "1-1",
        )  # fmt: skip


def _requests(number: int) -> Iterator[tuple[Any, ...]]:
    for first in range(0, number, PACKED):
        requests = [
            {"correlation_id": f"c{at}", "body": "1", "lane": f"lane{at % 7}", "tenant": f"tenant{at % 31}"}
            for at in range(first, min(first + PACKED, number))
        ]
        yield ("XADD", DEEP.requests, "*", "requests", msgpack.packb(requests))


def _in_pipelines(redis: Any, commands: Iterator[tuple[Any, ...]]) -> None:
    while chunk := list(islice(commands, BATCH // 10)):
        pipeline = redis.pipeline(transaction=False)
        for command in chunk:
            pipeline.execute_command(*command)
        pipeline.execute()


# --- what is measured --------------------------------------------------------------------------------------


def measure_pages(
    viewer: Viewer, pages: Sequence[tuple[str, str]], rounds: int, pids: dict[str, int], idle_percent: float
) -> None:
    """Ask for each page, print what it takes. `idle_percent`: what others use of Redis all the time."""
    print(f"{'page':29} {'p50/ms':>8} {'p99/ms':>8} {'console/ms':>11} {'Redis/ms':>9} {'KiB':>6}")
    for title, path in pages:
        status, _ = viewer.get(path)
        if status != http.HTTPStatus.OK:
            print(f"{title:29} answered {status}")
            continue
        cost = _measure_page(viewer, path, rounds, pids, idle_percent)
        print(
            f"{title:29} {cost.p50_ms:8.1f} {cost.p99_ms:8.1f} {cost.console_ms:11.1f} {cost.redis_ms:9.2f} "
            f"{cost.kib:6.0f}",
            flush=True,
        )


def _measure_page(viewer: Viewer, path: str, rounds: int, pids: dict[str, int], idle_percent: float) -> Cost:
    took_ms, size = [], 0
    meter = CpuMeter(pids)
    for _ in range(rounds):
        began_s = time.perf_counter()
        _, page = viewer.get(path)
        took_ms.append((time.perf_counter() - began_s) * 1e3)
        size = len(page)
    used = meter.stop()
    took_ms.sort()
    p50_ms, p99_ms = (took_ms[len(took_ms) * percent // 100] for percent in (50, 99))
    console_ms, redis_ms = (used[name] / rounds / 1e3 for name in ("console", "redis"))
    redis_ms = max(0.0, redis_ms - idle_percent / 100 * sum(took_ms) / rounds)
    return Cost(p50_ms, p99_ms, console_ms, redis_ms, size / 1024)


def percent_of_core(pids: dict[str, int], seconds: float) -> dict[str, float]:
    """What processes use in this time, in per cent of a core."""
    meter = CpuMeter(pids)
    time.sleep(seconds)
    return {name: used_us / seconds / 1e4 for name, used_us in meter.stop().items()}


def wait_until_idle(pids: dict[str, int]) -> None:
    """Until the batcher has read what waits."""
    while percent_of_core({"batcher": pids["batcher"]}, 2.0)["batcher"] > 30.0:
        pass


def wait_until_indexed(viewer: Viewer, letters: int) -> float:
    """Look at dead letters until the console knows all of them. Returns the seconds that took."""
    began_s = time.monotonic()
    while f"{letters:,} dead letters, page 1 of ".encode() not in viewer.get("/models/letters/dead")[1]:
        time.sleep(0.05)
    return time.monotonic() - began_s


def pages_of(redis: Any, letters: int) -> list[tuple[str, str]]:
    """The pages, with IDs in place of their names."""
    ((letter, _),) = redis.xrevrange(LETTERS.dead, count=1)
    places = {"LETTER": letter.decode(), "ID": "c7", "LAST": str(-(-letters // 50))}
    return [
        (title, re.sub("LETTER|ID|LAST", lambda found: places[found[0]], path))
        for title, path in PAGES.items()
    ]


def main() -> None:
    """Fill a Redis, and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=int, default=200)
    parser.add_argument("--letters", type=int, default=50_000)
    parser.add_argument("--waiting", type=int, default=1_000_000)
    parser.add_argument("--viewers", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=30.0, help="how long the viewers look")
    parser.add_argument("--rounds", type=int, default=100, help="how often each page is asked for")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home, EmbeddedRedis(append_only=False) as server:
        redis: Any = Redis.from_url(server.url, protocol=2)
        log = Path(home, "log").open("wb")  # noqa: SIM115 (until the services have ended)
        register_idle_models(server.url, options.models - 2)
        for keys in (DEEP, LETTERS):
            redis.sadd("carpool:models", keys.model)
            redis.hset(keys.registration, mapping={"max_batch_size": 64})
        fill(redis, options.letters, options.waiting)
        users, port = Path(home, "users.toml"), free_port()
        Users(users).put(User("viewer", "operator", hash_of("a password of the benchmark")))
        flags = ("--users", str(users), "--port", str(port))
        services = [
            start(server.url, log, "carpool_batcher"),
            start(server.url, log, "carpool_console", *flags),
        ]
        try:
            pids = {"redis": server.pid, "batcher": services[0].pid, "console": services[1].pid}
            _measure(redis, f"http://127.0.0.1:{port}", pids, options)
        finally:
            stop(services)
            log.close()
            redis.close()


def _measure(redis: Any, url: str, pids: dict[str, int], options: argparse.Namespace) -> None:
    while True:
        try:
            viewers = [Viewer(url, "viewer", "a password of the benchmark") for _ in range(options.viewers)]
            break
        except ConnectionRefusedError:
            time.sleep(0.1)
    wait_until_idle(pids)
    took_s = wait_until_indexed(viewers[0], options.letters)
    print(f"{options.letters:,} dead letters are read in {took_s:.1f} s when somebody looks first")
    time.sleep(12)  # nobody looks any more, and the console and the batcher know
    alone = percent_of_core(pids, options.seconds)
    until_s = time.monotonic() + options.seconds + 5
    threads = [
        threading.Thread(target=viewer.look, args=(WATCHED[at % len(WATCHED)], until_s))
        for at, viewer in enumerate(viewers)
    ]
    for thread in threads:
        thread.start()
    time.sleep(3)
    watched = percent_of_core(pids, options.seconds)
    for thread in threads:
        thread.join()
    print(f"CPU in % of a core   nobody looks   {options.viewers} look   more")
    for name in pids:
        print(f"{name:20} {alone[name]:12.2f} {watched[name]:10.2f} {watched[name] - alone[name]:6.2f}")
    rss_mib = (
        int(re.findall(r"VmRSS:\s+(\d+)", Path(f"/proc/{pids['console']}/status").read_text())[0]) / 1024
    )
    print(f"memory of the console: {rss_mib:.0f} MiB")
    pages = pages_of(redis, options.letters)
    measure_pages(viewers[0], pages, options.rounds, pids, alone["redis"])
    print(f"CPU of Redis so far: {cpu_time_us(pids['redis']) / 1e6:.1f} s")


if __name__ == "__main__":
    main()
