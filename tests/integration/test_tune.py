"""`carpool tune` and `carpool simulate` with a live model: they measure it, and give advice that works."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from carpool.keys import Keys
from carpool_cli.roles import ROLES, rules
from carpool_cli.tuning.arrivals import read_trace
from carpool_cli.tuning.curve import curve_of
from support.command import carpool, running
from support.stack import Stack
from support.waiting import wait_until

SLEEPER = Path(__file__).parents[2] / "ops" / "bench" / "sleeper.py"  # 5 ms + 0.05 ms n
MODEL = "linear"
RUN_S = 280.0  # `carpool tune` computes for 6 s on a quiet machine; a test may take 300 s


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("stack")) as stack:
        stack.batcher()
        stack.worker(f"{MODEL}={SLEEPER}:Linear")
        stack.wait_for_model(MODEL)
        yield stack


@pytest.fixture
def as_role(stack: Stack) -> Iterator[Callable[[str], str]]:
    """Make a Redis user with the permissions of a role, and return the URL to connect as that user."""

    def make(role: str) -> str:
        stack.redis.execute_command("ACL", "SETUSER", role, "reset", "on", f">{role}", *rules(role).split())
        return stack.url.replace("redis://", f"redis://{role}:{role}@")

    yield make
    stack.redis.acl_deluser(*ROLES)


def run(stack: Stack, home: Path, *arguments: str) -> str:
    """What a command prints, which must succeed."""
    return carpool(stack.url, *arguments, folder=home, check=True, timeout_s=RUN_S).stdout


def last_settled(stack: Stack) -> str:
    """The ID of the last entry that tells of a settled batch."""
    return str(stack.redis.xinfo_stream(Keys(MODEL).settled)["last-generated-id"].decode())


def settled_after(stack: Stack, last_id: str) -> list[tuple[int, int]]:
    """The size and execution time in us of each batch settled after that one, as the worker measured it."""
    entries = stack.redis.xrange(Keys(MODEL).settled, f"({last_id}")
    sized = [fields for _, fields in entries if int(fields.get(b"size", 0))]
    return [(int(fields[b"size"]), int(fields[b"compute_us"])) for fields in sized]


def test_admin_measures_the_model_and_gets_a_command_that_works(
    stack: Stack, tmp_path: Path, as_role: Callable[[str], str]
) -> None:
    # With such a delay others are much better, however long a lone request takes on a busy machine: at this
    # rate batches are full no sooner, and one process has time to spare. At lower rates batches are smaller,
    # and a simulation takes longer.
    run(stack, tmp_path, "config", MODEL, "max_queue_delay_ms=90", "max_batch_size=64")
    before = last_settled(stack)
    arguments = ("tune", MODEL, "7", "--latency-ms", "100", "--rate", "700", "--rounds", "3")
    output = carpool(as_role("admin"), *arguments, folder=tmp_path, check=True, timeout_s=RUN_S).stdout

    announced = re.search(r"sending ([\d,]+) requests to linear, at most 64 at a time", output)
    assert announced is not None, output
    headers = ("batch size n", r"execution time l\(n\), ms")
    rows = [re.search(rf"{header}(.*)$", output, re.MULTILINE) for header in headers]
    sizes, times_ms = (
        [cell for cell in row[1].split() if not cell.endswith("?")] for row in rows if row is not None
    )
    assert "256?" in output, "batches of more than 64 were not observed"
    assert re.search(r"^(700 requests/s need \d+|One|No number of) model process", output, re.MULTILINE)
    _, *executed = settled_after(stack, before)  # the first is that of one-time work
    curve = curve_of(executed)
    measured_ms = {f"{size:.0f}": us / 1000 for size, us in zip(curve.sizes, curve.times_us, strict=True)}
    for size, time_ms in zip(sizes, times_ms, strict=True):
        assert float(time_ms) == pytest.approx(measured_ms[size], rel=0.02), size
    assert float(times_ms[0]) >= 5.05  # as long as it sleeps
    assert re.search(r"^  [* ] present ", output, re.MULTILINE)

    command = re.search(r"^  (carpool config linear .*)$", output, re.MULTILINE)
    assert command is not None, output
    _, *config = shlex.split(command[1])
    _, _, *changes = config
    run(stack, tmp_path, *config)
    lines = json.loads(run(stack, tmp_path, "config", MODEL, "--json"))
    assert changes
    for name, value in (change.split("=") for change in changes):
        assert str(lines[name]["value"]) == value
    assert (tmp_path / "tune.png").exists() == ("The plot is in tune.png" in output)


def knows_round_trips(output: str) -> str:
    """What `carpool simulate` printed, if it says what round trips a batcher reported; else ''."""
    found = re.search(r"The round trip is as its batcher saw it: \d+\.\d ms for half", output)
    return output if found else ""


def test_simulate_calls_a_guess_one(stack: Stack, tmp_path: Path) -> None:
    run(stack, tmp_path, "config", MODEL, "max_batch_size=32", "max_queue_delay_ms=", "policy=")
    for _ in range(64):  # all that it looks at
        assert stack.result(MODEL, stack.send(MODEL, body="7"))["batch_size"] == 1
    arguments = ("simulate", "--model", MODEL, "--rate", "1000", "--requests", "2000")
    output = wait_until(
        lambda: knows_round_trips(run(stack, tmp_path, *arguments)),
        description="the batcher has reported round trips",
    )
    assert re.match(r".*, measured l\(1\) = \S+ ms, guessed l\(32\) = \S+ ms\n", output), output
    assert "Only 64 batches of 1 were observed; `carpool tune linear BODY" in output
    found = json.loads(run(stack, tmp_path, *arguments, "--json"))
    assert found["observed"] == {"smallest": 1, "largest": 1, "batches": 64}
    assert found["guessed_batches"] > 0.5
    given = run(stack, tmp_path, *arguments, "--intercept-ms", "5", "--slope-ms", "0.05", "--trip-ms", "1")
    assert "guess" not in given and "assumed" not in given


def test_without_body_no_request_is_sent_and_a_latency_that_cannot_be_kept_is_reported(
    stack: Stack, tmp_path: Path
) -> None:
    stack.result(MODEL, stack.send(MODEL, body="7"))
    stack.wait_until_idle(MODEL)
    before = last_settled(stack)
    done = carpool(stack.url, "tune", MODEL, "--latency-ms", "2", folder=tmp_path, timeout_s=RUN_S)
    assert done.returncode == 2
    assert "sending" not in done.stdout
    assert last_settled(stack) == before
    assert "no settings can keep 99% of the requests within 2 ms" in done.stderr


def test_tune_without_permission_names_the_role_it_needs(
    tmp_path: Path, as_role: Callable[[str], str]
) -> None:
    arguments = ("tune", MODEL, "7", "--latency-ms", "50")
    done = carpool(as_role("producer"), *arguments, folder=tmp_path, timeout_s=RUN_S)
    assert done.returncode == 1
    assert "no permissions" in done.stderr.lower()
    assert "all other commands that read or change a stack need admin" in " ".join(done.stderr.split())


def test_arrivals_are_recorded_and_replayed(stack: Stack, tmp_path: Path) -> None:
    def is_recording() -> bool:
        """Whether the recorder reads the stream; requests before that are not recorded."""
        names = [client["name"] for client in stack.redis.client_list() if client["cmd"] == "xread"]
        return any(name.startswith("carpool-simulate") for name in names)

    arguments = ("--record", "trace.txt", "--seconds", "5")
    with running(stack.url, "simulate", "--model", MODEL, *arguments, folder=tmp_path) as recorder:
        wait_until(is_recording, description="the recorder reads", timeout_s=RUN_S)
        # Each has its time of arrival in a field, as a request that was put back, and waits at a takeover.
        stack.redis.set(Keys(MODEL).batcher, "another")
        wait_until(
            lambda: stack.events("batcher no longer active, lease lost"), description="it lost the lease"
        )
        began_ms = stack.redis.time()[0] * 1000 - 5000
        times_ms = [began_ms + 37 * number for number in range(20)]
        for at_ms in times_ms:
            stack.send(MODEL, body="7", arrival=at_ms)
        stack.redis.delete(Keys(MODEL).batcher)
        done = recorder.end(RUN_S)
        assert done.returncode == 0, done.stderr
        assert done.stdout == "wrote 20 arrivals to trace.txt\n"
        assert done.stderr.startswith(f"recording the arrivals of {MODEL} for 5 s\n")
    assert read_trace(tmp_path / "trace.txt") == [37_000 * number for number in range(20)]
    output = run(
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
    assert json.loads(output)["requests"] == 20
