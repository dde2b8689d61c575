"""`carpool dead`: requests that ended their process, listed, shown, sent again and dropped."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from carpool.keys import Keys
from support.command import Done, carpool, clean_environment
from support.forking import ForkServer
from support.stack import Stack
from support.waiting import wait_until

MODEL: Final = "Curable"
KEYS: Final = Keys(MODEL)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("served")) as stack:
        stack.serve("faulty.py:Curable")
        yield stack


@pytest.fixture
def stack(served: Stack) -> Iterator[Stack]:
    """The stack without dead letters, before and after the test."""
    yield served
    served.wait_until_idle(MODEL)
    served.redis.delete(KEYS.dead, KEYS.audit)
    for key in served.redis.scan_iter(KEYS.result("*")):
        served.redis.delete(key)


@pytest.fixture
def cause(tmp_path: Path) -> Path:
    path = tmp_path / "cause"
    path.touch()
    return path


def run(stack: Stack, *arguments: str) -> Done:
    return carpool(stack.url, "dead", *arguments)


def succeed(stack: Stack, *arguments: str) -> str:
    done = run(stack, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def listed(stack: Stack, *arguments: str) -> list[dict[str, Any]]:
    letters: list[dict[str, Any]] = json.loads(succeed(stack, "list", *arguments, "--json"))
    return letters


def done_by_operators(stack: Stack) -> list[tuple[str, dict[str, str]]]:
    """What stands in the audit, the newest first."""
    found = json.loads(carpool(stack.url, "audit", MODEL, "--json").stdout)
    return [(one["action"], one["details"]) for one in found]


def give_up(stack: Stack, cause: Path, correlation_id: str, **fields: str) -> str:
    """Send a request that ends its process each time, until it is given up. Returns the letter's ID."""
    before = stack.redis.xlen(KEYS.dead)
    stack.send(MODEL, body=json.dumps({"cause": str(cause)}), correlation_id=correlation_id, **fields)
    wait_until(lambda: stack.redis.xlen(KEYS.dead) > before, description="it is given up")
    ((letter_id, _),) = stack.redis.xrevrange(KEYS.dead, count=1)
    return str(letter_id.decode())


def write_letters(stack: Stack, *reasons: str) -> list[str]:
    """Dead letters as workers write them, of requests that would succeed now."""
    ids = []
    for number, reason in enumerate(reasons):
        fields: dict[str, str | int] = {
            "correlation_id": f"r{number}", "content_type": "application/json", "body": "1",
            "reason": reason, "attempts": 2, "entry_id": "1-1",
        }  # fmt: skip
        ids.append(stack.redis.xadd(KEYS.dead, fields).decode())
    return ids


def test_request_is_given_up_shown_and_sent_again(stack: Stack, cause: Path) -> None:
    letter_id = give_up(stack, cause, "a17", colour="red")
    (letter,) = listed(stack)
    assert (letter["model"], letter["id"], letter["correlation_id"]) == (MODEL, letter_id, "a17")
    assert "died" in letter["reason"] and letter["attempts"] == 2
    shown = json.loads(succeed(stack, "show", MODEL, letter_id, "--json"))
    assert shown["body"] == {"cause": str(cause)} and shown["colour"] == "red"
    assert succeed(stack, "show", MODEL, letter_id, "--raw") == json.dumps({"cause": str(cause)})
    assert "a17" in succeed(stack, "list") and "colour:" in succeed(stack, "show", MODEL, letter_id)

    cause.unlink()
    assert succeed(stack, "replay", MODEL, letter_id) == f"1 request of {MODEL} sent again\n"
    result = stack.result(MODEL, "a17")  # not the ABORTED that nobody had read
    assert (result["status"], listed(stack)) == ("OK", [])


def test_request_that_is_given_up_again_is_a_dead_letter_again(stack: Stack, cause: Path) -> None:
    letter_id = give_up(stack, cause, "stubborn")
    succeed(stack, "replay", MODEL, letter_id)
    wait_until(lambda: stack.redis.xlen(KEYS.dead) == 1, description="it is given up again")
    (letter,) = listed(stack)
    assert letter["id"] != letter_id and letter["correlation_id"] == "stubborn"
    assert stack.result(MODEL, "stubborn")["status"] == "ABORTED"


def test_reply_stream_gets_the_new_result(stack: Stack, cause: Path) -> None:
    letter_id = give_up(stack, cause, "streamed", reply_to="me")
    cause.unlink()
    succeed(stack, "replay", MODEL, letter_id)
    wait_until(lambda: len(stack.replies(MODEL, "me")) == 2, description="it has a second result")
    assert [reply["status"] for reply in stack.replies(MODEL, "me")] == ["ABORTED", "OK"]


def test_letter_is_sent_once_by_two_operators(stack: Stack) -> None:
    ids = write_letters(stack, *["x"] * 20)
    outputs: list[str] = []
    operators = [
        threading.Thread(target=lambda: outputs.append(run(stack, "replay", MODEL, "--all").stdout))
        for _ in range(2)
    ]
    for operator in operators:
        operator.start()
    for operator in operators:
        operator.join()
    assert sum(int(output.split()[0]) for output in outputs) == len(ids)
    for number in range(len(ids)):
        assert stack.result(MODEL, f"r{number}")["status"] == "OK"
    told = done_by_operators(stack)  # each has one entry, if it was fast enough to send any
    assert {action for action, _ in told} == {"dead replay"} and len(told) <= 2
    assert sum(int(details["letters"]) for _, details in told) == len(ids)
    stack.wait_until_idle(MODEL)
    assert list(stack.redis.scan_iter(KEYS.result("*"))) == []


def test_those_that_are_meant_are_dropped(stack: Stack) -> None:
    write_letters(stack, "no memory", "segmentation fault", *["no memory"] * 40)
    assert len(listed(stack, MODEL)) == 42
    assert len(listed(stack, "--reason", "memory")) == 41
    assert listed(stack, "--older-s", "3600") == []
    assert len(listed(stack, "--newer-s", "3600")) == 42
    assert succeed(stack, "drop", MODEL, "--all", "--reason", "memory") == f"41 requests of {MODEL} dropped\n"
    (letter,) = listed(stack)
    assert letter["reason"] == "segmentation fault"
    assert succeed(stack, "drop", MODEL, letter["id"]) == f"1 request of {MODEL} dropped\n"
    assert succeed(stack, "list") == "no dead letters found\n"
    second, first = done_by_operators(stack)[:2]
    assert first[0] == second[0] == "dead drop" and first[1]["letters"] == "41"
    assert second[1] == {"letters": "1", "first": letter["id"], "last": letter["id"]}


def test_letter_without_body_is_left(stack: Stack) -> None:
    fields = {"correlation_id": "r", "body_key": "k", "body_bytes": 9, "reason": "x", "attempts": 2}
    letter_id = stack.redis.xadd(KEYS.dead, {**fields, "entry_id": "1-1"}).decode()
    done = run(stack, "replay", MODEL, letter_id)
    assert done.returncode == 1 and "its body is gone" in done.stderr
    assert len(listed(stack)) == 1
    assert "gone" in succeed(stack, "show", MODEL, letter_id)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["replay", MODEL], "needs either IDs or --all"),
        (["drop", MODEL, "1-1", "--all"], "needs either IDs or --all"),
        (["drop"], "needs the name of a model"),
        (["show", MODEL], "the ID of one"),
        (["show", MODEL, "r17"], "'r17' is no ID"),
        (["list", MODEL, "1-1"], "takes no IDs"),
    ],
)
def test_wrong_arguments_are_explained(stack: Stack, arguments: list[str], error: str) -> None:
    done = run(stack, *arguments)
    assert done.returncode == 2 and error in done.stderr


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["drop", MODEL, "1-1"], "has no dead letter 1-1"),
        (["replay", "Unknown", "--all"], "is not registered"),
        (["list", "Unknown"], "is not registered"),
    ],
)
def test_what_does_not_exist_is_named(stack: Stack, arguments: list[str], error: str) -> None:
    done = run(stack, *arguments)
    assert done.returncode == 1 and error in done.stderr


# --- what a terminal would obey


EVIL: Final = "\x1b]52;c;cm0=\x07\x1b[2J\x9b31m\u202e\r\nfake: 0 dead letters"


def on_a_terminal(url: str, *arguments: str) -> bytes:
    """What a command writes that runs on a terminal."""
    ours, theirs = pty.openpty()
    variables = {**clean_environment(), "TERM": "xterm", "CARPOOL_REDIS_URL": url}
    with os.fdopen(theirs, "wb") as terminal:
        server = ForkServer.of_this_process()
        process = server.start("carpool_cli", arguments, Path.cwd(), variables, terminal, terminal)
    output = b""
    with contextlib.suppress(OSError):  # at the end
        while data := os.read(ours, 65536):
            output += data
    os.close(ours)
    process.wait()
    return output


def test_what_a_producer_chose_is_escaped_on_a_terminal_and_in_a_pipe(stack: Stack, cause: Path) -> None:
    letter_id = give_up(stack, cause, "a", note=EVIL, **{EVIL: "x"})
    (written,) = write_letters(stack, EVIL)
    stream, notice = f"carpool:{{{EVIL}}}:requests", f"carpool:{{{EVIL}}}:loading"
    stack.redis.xadd(stream, {"body": "1"})
    stack.redis.hset(notice, "worker", "w")
    try:
        for arguments in (
            ("dead", "show", MODEL, letter_id),
            ("dead", "show", MODEL, letter_id, "--json"),
            ("dead", "show", MODEL, written),
            ("dead", "list"),
            ("dead", "list", EVIL),
            ("models",),
            ("models", "--json"),
            ("config", EVIL),
            ("forget", EVIL),
            ("top", "--once"),
            ("top", "--model", EVIL),
        ):
            done = carpool(stack.url, *arguments)
            for output in (done.output, done.errors, on_a_terminal(stack.url, *arguments)):
                text = re.sub(r"\x1b\[[0-9;?]*m", "", output.decode().replace("\r\n", "\n"))  # colours
                obeyed = {letter for letter in text if letter != "\n" and not letter.isprintable()}
                assert not obeyed, (arguments, text)
                assert "\nfake" not in text, (arguments, text)
    finally:
        stack.redis.delete(stream, notice)


def test_raw_bytes_are_written_where_they_are_asked_for(stack: Stack) -> None:
    (letter_id,) = write_letters(stack, "x")
    letter = stack.redis.xrange(KEYS.dead)[0][1]
    evil_id = stack.redis.xadd(KEYS.dead, {**letter, b"body": EVIL.encode()}).decode()
    assert run(stack, "show", MODEL, evil_id, "--raw").output == EVIL.encode()
    assert "--raw writes them" in succeed(stack, "show", MODEL, evil_id)
    succeed(stack, "drop", MODEL, letter_id)
