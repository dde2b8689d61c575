"""`carpool tune` and `carpool simulate` beside a stack: they measure, disturb nothing, and say what works."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from types import MappingProxyType

import pytest

from carpool.keys import Keys
from carpool_cli.roles import ROLES, rules
from carpool_cli.tuning.arrivals import read_trace
from support.stack import Stack
from support.waiting import wait_until

SLEEPER = Path(__file__).parents[2] / "ops" / "bench" / "sleeper.py"  # 5 ms + 0.05 ms n
MODEL = "linear"
RUN_S = 120.0


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("stack")) as stack:
        stack.batcher()
        stack.worker(f"{MODEL}={SLEEPER}:Linear")
        stack.wait_for_model(MODEL)
        yield stack


def start(
    stack: Stack, home: Path, *words: str, signed_in: Mapping[str, str] = MappingProxyType({})
) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CARPOOL_")}
    return subprocess.Popen(
        [sys.executable, "-m", "carpool_cli", *words],
        cwd=home, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**environment, "CARPOOL_REDIS_URL": stack.url, **signed_in},
    )  # fmt: skip


@pytest.fixture
def signed_in(stack: Stack) -> Iterator[Callable[[str], dict[str, str]]]:
    """A user with a role's rights: the environment in which a command signs in as one."""

    def as_role(role: str) -> dict[str, str]:
        stack.redis.execute_command("ACL", "SETUSER", role, "reset", "on", f">{role}", *rules(role).split())
        return {"CARPOOL_REDIS_URL": stack.url.replace("redis://", f"redis://{role}:{role}@")}

    yield as_role
    stack.redis.acl_deluser(*ROLES)


def carpool(stack: Stack, home: Path, *words: str) -> str:
    process = start(stack, home, *words)
    stdout, stderr = process.communicate(timeout=RUN_S)
    assert process.returncode == 0, stderr
    return stdout


def settled(stack: Stack) -> dict[int, float]:
    """What batches took, in ms, by their size: as workers said, in the middle."""
    by_size: dict[int, list[float]] = {}
    for _, fields in stack.redis.xrange(Keys(MODEL).settled):
        if int(fields.get(b"size", 0)):
            by_size.setdefault(int(fields[b"size"]), []).append(int(fields[b"compute_us"]) / 1000)
    return {size: median(took_ms) for size, took_ms in by_size.items()}


def test_it_measures_searches_and_says_a_command_that_works(stack: Stack, tmp_path: Path) -> None:
    carpool(stack, tmp_path, "config", MODEL, "max_queue_delay_ms=40", "max_batch_size=64")
    said = carpool(
        stack, tmp_path, "tune", MODEL, "7", "--latency-ms", "30", "--rate", "500", "--rounds", "3"
    )

    announced = re.search(r"sending ([\d,]+) requests to linear, at most 64 at a time", said)
    assert announced is not None, said
    rows = [re.search(rf"{what}(.*)$", said, re.MULTILINE) for what in ("a batch of n =", r"in l\(n\), ms")]
    sizes, times_ms = ([float(word) for word in row[1].split()] for row in rows if row is not None)
    learned_ms = dict(zip(sizes, times_ms, strict=True))
    for size, took_ms in settled(stack).items():
        if size in (1, 64):
            assert learned_ms[size] == pytest.approx(took_ms, rel=0.15)
    assert 4.2 < learned_ms[1] < 9  # a sleep is never too short; on a busy machine it is too long
    assert "as it is" in said

    command = re.search(r"^  (carpool config linear .*)$", said, re.MULTILINE)
    assert command is not None, said
    carpool(stack, tmp_path, *shlex.split(command[1])[1:])
    lines = json.loads(carpool(stack, tmp_path, "config", MODEL, "--json"))
    assert float(lines["max_queue_delay_ms"]["value"]) < 40
    assert (tmp_path / "tune.png").exists() == ("The plot is in tune.png" in said)


def test_without_a_body_nothing_is_sent(stack: Stack, tmp_path: Path) -> None:
    stack.result(MODEL, stack.send(MODEL, body="7"))
    stack.wait_until_idle(MODEL)
    before = stack.redis.xinfo_stream(Keys(MODEL).settled)["last-generated-id"]
    said = carpool(stack, tmp_path, "tune", MODEL, "--latency-ms", "500", "--rate", "50", "--plot", "")
    assert "sending" not in said
    assert "plot" not in said
    assert stack.redis.xinfo_stream(Keys(MODEL).settled)["last-generated-id"] == before


def test_what_no_settings_can_keep_is_said_so(stack: Stack, tmp_path: Path) -> None:
    stack.result(MODEL, stack.send(MODEL, body="7"))
    process = start(stack, tmp_path, "tune", MODEL, "--latency-ms", "2")
    _, stderr = process.communicate(timeout=RUN_S)
    assert process.returncode == 2
    assert "no settings can bring 99 of 100 under 2" in stderr


@pytest.mark.parametrize("role", ["admin", "producer"])
def test_who_may_not_measure_is_told_who_may(
    stack: Stack, tmp_path: Path, signed_in: Callable[[str], dict[str, str]], role: str
) -> None:
    process = start(stack, tmp_path, "tune", MODEL, "7", "--latency-ms", "50", signed_in=signed_in(role))
    _, stderr = process.communicate(timeout=RUN_S)
    assert process.returncode == 1
    assert "no permissions" in stderr.lower()
    assert "Name with --redis-url a user who may both" in stderr


def test_an_admin_may_look_at_what_was_served(
    stack: Stack, tmp_path: Path, signed_in: Callable[[str], dict[str, str]]
) -> None:
    stack.result(MODEL, stack.send(MODEL, body="7"))
    words = ("tune", MODEL, "--latency-ms", "500", "--rate", "50", "--plot", "")
    process = start(stack, tmp_path, *words, signed_in=signed_in("admin"))
    _, stderr = process.communicate(timeout=RUN_S)
    assert process.returncode == 0, stderr


def test_arrivals_are_recorded_and_replayed(stack: Stack, tmp_path: Path) -> None:
    process = start(stack, tmp_path, "simulate", "--model", MODEL, "--record", "trace.txt", "--seconds", "2")

    def watched() -> bool:
        """Whether the recorder reads; until it has looked at the stream once it misses what comes."""
        names = [client["name"] for client in stack.redis.client_list() if client["cmd"] == "xread"]
        return any(name.startswith("carpool-simulate") for name in names)

    wait_until(watched, description="the recorder reads", timeout_s=RUN_S)
    # Each says when it arrived, as one does that was put back.
    began_ms = stack.redis.time()[0] * 1000 - 5000
    times_ms = [began_ms + 37 * number for number in range(20)]
    for at_ms in times_ms:
        stack.send(MODEL, body="7", arrival=at_ms)
    stdout, stderr = process.communicate(timeout=RUN_S)
    assert process.returncode == 0, stderr
    assert stdout == "20 arrivals in trace.txt\n"
    assert stderr.startswith(f"recording what arrives at {MODEL} for 2 s\n")
    assert read_trace(tmp_path / "trace.txt") == [37_000 * number for number in range(20)]
    said = carpool(
        stack,
        tmp_path,
        "simulate",
        "--model",
        MODEL,
        "--arrivals",
        "trace.txt",
        "--json",
        "max_queue_delay_ms=",
    )
    assert json.loads(said)["requests"] == 20
