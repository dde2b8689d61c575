"""What the demo measures and how it is shown; and that it notices what is wrong."""

from __future__ import annotations

import asyncio
import io
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from carpool.client.aio import AsyncClient, Reply
from carpool.errors import InternalError
from carpool.wire.tensors import TensorSpec
from carpool_cli.demo.docsearch import DocSearch
from carpool_cli.demo.measure import Asked, Run, WorkerLog, ask, percentile, same_answer
from carpool_cli.demo.story import Story
from carpool_cli.local import paste
from carpool_cli.local.supervisor import Supervisor
from carpool_cli.screen import Progress, Screen, clip, count, duration, table

Answer = list[dict[str, Any]]


def answer(*scores: float, first: int = 0) -> Answer:
    """Passages named by number, with these scores."""
    return [
        {"score": score, "name": f"name {number}", "text": f"text {number}"}
        for number, score in enumerate(scores, first)
    ]


def reply(value: Any, batch_size: int = 1) -> Reply:
    return Reply(value, "id", batch_size, 0, 0)


# --- Answers compared


def test_an_answer_equals_itself() -> None:
    assert same_answer(answer(0.9, 0.5), answer(0.9, 0.5))
    assert same_answer([], [])


def test_rounding_and_ties_are_no_difference() -> None:
    nearly, expected = answer(0.9001, 0.5), answer(0.9, 0.5)
    assert same_answer(nearly, expected)
    tied = answer(0.5, 0.5)
    assert same_answer(tied[::-1], tied)
    just_missed = [*answer(0.9), *answer(0.5, first=7)]
    assert same_answer(just_missed, expected), "the sixth of five may tie with the fifth"


@pytest.mark.parametrize(
    "got",
    [
        answer(0.9),
        answer(0.9, 0.6),
        answer(0.9, 0.5)[::-1],
        answer(0.9, 0.5, first=7),
        [*answer(0.9, first=7), *answer(0.5, first=1)],
        [*answer(0.9), *answer(0.5)],
    ],
    ids=["too short", "a score", "the order", "all others", "another first", "one passage twice"],
)
def test_what_differs_is_seen(got: Answer) -> None:
    assert not same_answer(got, answer(0.9, 0.5))


# --- Requests timed


class FakeClient:
    """Answers with the square; notes how many requests were in flight at once."""

    def __init__(self) -> None:
        self.in_flight = self.most = 0

    async def request(self, _model: str, body: int) -> Reply:
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        await asyncio.sleep(0)
        self.in_flight -= 1
        if body == 13:
            raise InternalError("unlucky")
        return reply(body**2)


async def test_each_body_is_asked_once_and_answers_stay_in_order() -> None:
    client, steps = FakeClient(), []
    run = await ask(cast(AsyncClient, client), "square", range(50), 8, step=lambda: steps.append(1))
    assert client.most == 8
    assert len(steps) == len(run.asked) == 50
    assert [one.body for one in run.asked] == list(range(50))
    wrong = [one for one in run.asked if not isinstance(one.came, Reply)]
    assert [one.body for one in wrong] == [13]
    assert all(one.came.value == one.body**2 for one in run.asked if isinstance(one.came, Reply))


async def test_no_more_are_asked_once_the_time_is_up() -> None:
    run = await ask(cast(AsyncClient, FakeClient()), "square", range(50), 1, within_s=0.0)
    assert [one.body for one in run.asked] == [0]


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(number) for number in range(100, 0, -1)]
    assert [percentile(values, percent) for percent in (1, 50, 99, 100)] == [1.0, 50.0, 99.0, 100.0]
    assert percentile([7.0], 50) == percentile([7.0], 99) == 7.0


def test_the_mean_batch_counts_batches_not_requests() -> None:
    sizes = [4] * 4 + [2] * 2 + [1]
    run = Run([Asked(None, reply(None, size), 0.001) for size in sizes], 0.5)
    assert run.mean_batch == pytest.approx(7 / 3)
    assert run.per_second == 14.0


# --- A worker's log


def batch(size: int, reason: str) -> str:
    return json.dumps({"event": "batch", "size": size, "reason": reason}) + "\n"


async def test_reasons_are_counted_from_where_it_was_skipped_to(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    log.write_text(batch(3, "full"))
    reader = WorkerLog(log)
    reader.skip()
    with log.open("a") as more:
        more.write(batch(64, "full") + "Traceback\n" + batch(64, "full") + batch(2, "idle") + '{"event": "ba')
    assert await reader.reasons(130) == {"full": 2, "idle": 1}


async def test_a_line_that_is_late_is_waited_for_and_one_that_never_comes_is_not(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    log.write_text(batch(1, "idle"))
    counting = asyncio.ensure_future(WorkerLog(log).reasons(3))
    await asyncio.sleep(0)
    with log.open("a") as more:
        more.write(batch(2, "full"))
    assert await counting == {"idle": 1, "full": 1}
    assert await WorkerLog(log).reasons(4, within_s=0.01) == {"idle": 1, "full": 1}


def test_the_last_error_is_the_reason(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    log.write_text(batch(1, "idle"))
    assert WorkerLog(log).last_error() is None
    log.write_text('{"level": "error", "reason": "one"}\n{"level": "error", "reason": "two"}\nend\n')
    assert WorkerLog(log).last_error() == "two"


# --- What is shown


def test_a_table_has_names_to_the_left_and_numbers_to_the_right() -> None:
    assert table([("", "a"), ("long name", "1"), ("b", "1,000")]) == [
        "               a",
        "long name      1",
        "b          1,000",
    ]


def test_times_and_counts_are_for_a_person() -> None:
    seconds = [0.00085, 0.00123, 0.0123, 0.123, 1.23, 200.0]
    assert [*map(duration, seconds)] == ["850 µs", "1.23 ms", "12.3 ms", "123 ms", "1.2 s", "3 min 20 s"]
    assert [count(1, "query", "queries"), count(2000, "request")] == ["1 query", "2,000 requests"]
    assert [clip("long text", 9), clip("long text", 5)] == ["long text", "long…"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_is_redrawn_on_a_terminal_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("carpool_cli.screen._REDRAW_S", 0.0)
    monkeypatch.setattr("carpool_cli.screen._REPEAT_S", 0.0)
    shown = []
    for stream in (Terminal(), io.StringIO()):
        progress = Progress(Screen(stream), 4)
        progress.step()
        progress.end()
        shown.append(stream.getvalue())
    assert shown[0].startswith("\r  #######.......................  1 of 4, ")
    assert shown[0].endswith("\r\x1b[K")
    assert shown[1].startswith("  1 of 4, ")
    assert "\r" not in shown[1]


def test_colour_is_for_terminals_that_want_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert Screen(Terminal()).bold("x") == "\x1b[1mx\x1b[0m"
    assert Screen(io.StringIO()).bold("x") == "x"
    monkeypatch.setenv("NO_COLOR", "1")
    assert Screen(Terminal()).bold("x") == "x"


def test_lines_to_paste_fit_the_address_and_hold_no_password() -> None:
    plain = paste.lines("redis://127.0.0.1:6379/0", "square")
    assert plain[0].endswith("infer square 7")
    assert plain[1].startswith('redis-cli BLPOP "carpool:{square}:result:$(redis-cli XADD ')
    assert "Client()" in plain[2]
    assert "redis-cli -p 7000 " in paste.lines("redis://127.0.0.1:7000/0", "square")[1]
    assert "redis-cli -s /tmp/r.sock " in paste.lines("unix:///tmp/r.sock", "square")[1]
    assert "redis-cli -u rediss://example.org/0 " in paste.lines("rediss://example.org/0", "square")[1]
    assert 'prefix="mine"' in paste.lines("redis://127.0.0.1:6379/0", "square", "mine")[2]
    secret = paste.lines("redis://:hush@example.org/0", "square")
    assert paste.needs_environment("redis://:hush@example.org/0")
    assert "hush" not in "".join(secret)
    assert 'redis-cli -u "$CARPOOL_REDIS_URL" ' in secret[1]


def pasted(*inputs: TensorSpec) -> list[str]:
    return paste.lines("redis://127.0.0.1:6379/0", "m", inputs=inputs)


def test_lines_to_paste_send_what_the_model_declares() -> None:
    flags = TensorSpec("flags", "BOOL", (-1,))
    infer, redis_cli, python = pasted(flags)
    assert infer.endswith("infer m '[false, false]'")
    assert "body '[false, false]')" in redis_cli
    assert """infer("m", numpy.zeros((2,), "bool"))""" in python
    infer, _, python = pasted(flags, TensorSpec("text", "BYTES", ()), TensorSpec("half", "BF16", (1, 2)))
    body = shlex.split(infer)[-1]
    assert json.loads(body) == {"flags": [False, False], "text": "hello", "half": [[0, 0]]}
    assert """"text": "hello", "half": numpy.zeros((1, 2), "float32")}""" in python


def test_lines_to_paste_are_short_however_large_the_tensors() -> None:
    infer, redis_cli, python = pasted(TensorSpec("pixels", "FP32", (3, 224, 224)))
    assert max(map(len, (infer, redis_cli, python))) < 1000
    assert infer.endswith("carpool infer m -")
    assert "redis-cli -x XADD 'carpool:{m}:requests' '*' body)" in redis_cli
    (only,) = pasted(TensorSpec("pixels", "FP32", (3, 2048, 2048)))
    assert "numpy.zeros((3, 2048, 2048)" in only


# --- What is wrong is noticed


class FakeModel:
    """Gives every query the same answer."""

    def predict(self, batch: Sequence[str]) -> list[Answer]:
        return [answer(0.9, 0.5) for _ in batch]


@pytest.fixture
def story() -> Story:
    supervisor = cast(Supervisor, SimpleNamespace(workers=[], url=""))
    return Story(supervisor, Screen(io.StringIO()), 100, 8, keep=False)


def asked(came: Sequence[Any]) -> Run:
    return Run([Asked(f"query {number}", one, 0.001) for number, one in enumerate(came)], 1.0)


def check(story: Story, run: Run) -> list[str]:
    story._see_results(run)
    story._check(run, cast(DocSearch, FakeModel()))
    return story.problems


def test_right_answers_are_no_problem(story: Story) -> None:
    assert check(story, asked([reply(answer(0.9, 0.5))] * 100)) == []


def test_a_wrong_answer_is_a_problem(story: Story) -> None:
    right, wrong = reply(answer(0.9, 0.5)), reply(answer(0.9, 0.5, first=7))
    (problem,) = check(story, asked([right, right, wrong, right]))
    assert problem == "not what direct computation gives: 1 request; the first: 'query 2'"


def test_a_result_that_is_missing_is_a_problem(story: Story) -> None:
    (problem,) = check(story, asked([reply(answer(0.9, 0.5)), InternalError("oh"), InternalError("no")]))
    assert problem == "no result: 2 requests; the first: 'query 1', INTERNAL: oh"


async def test_a_wrong_square_is_a_problem(story: Story) -> None:
    class Wrong(FakeClient):
        async def request(self, model: str, body: int) -> Reply:
            return reply(50) if body == 7 else reply(body**2)

    await story._squares(cast(AsyncClient, Wrong()))
    assert story.problems == ["not the square: 2 requests; the first: 7"]
