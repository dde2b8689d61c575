"""The demo: its measurements, its output, and the problems that it must notice."""

from __future__ import annotations

import asyncio
import io
import json
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args

import numpy as np
import pytest

from carpool.client.aio import AsyncClient, Reply
from carpool.errors import InternalError
from carpool.messages.batches import DispatchReason
from carpool.model_settings import ModelKind
from carpool.spoken import Spoken
from carpool.wire.tensors import TensorSpec
from carpool_cli.demo import listening, writing
from carpool_cli.demo.docsearch import DocSearch
from carpool_cli.demo.measure import SendingRun, TimedRequest, WorkerLog, percentile, same_answer, send_all
from carpool_cli.demo.report import REASON_MEANINGS, Measured, show_figures
from carpool_cli.demo.scenario import Scenario
from carpool_cli.local import paste
from carpool_cli.local.supervisor import Supervisor
from carpool_cli.screen import Progress, Screen, build_table, clip, count, duration, table

Answer = list[dict[str, Any]]


def answer(*scores: float, first: int = 0) -> Answer:
    """Passages named by number, with these scores."""
    return [
        {"score": score, "name": f"name {number}", "text": f"text {number}"}
        for number, score in enumerate(scores, first)
    ]


def reply(value: Any, batch_size: int = 1) -> Reply:
    return Reply(value, "id", batch_size, 0, 0)


# --- comparing answers


def test_answer_is_the_same_as_itself() -> None:
    assert same_answer(answer(0.9, 0.5), answer(0.9, 0.5))
    assert same_answer([], [])


def test_rounding_and_equal_scores_make_no_difference() -> None:
    rounded, expected = answer(0.9001, 0.5), answer(0.9, 0.5)
    assert same_answer(rounded, expected)
    tied = answer(0.5, 0.5)
    assert same_answer(tied[::-1], tied)
    other_last = [*answer(0.9), *answer(0.5, first=7)]
    assert same_answer(other_last, expected), "passages with the lowest score may differ"


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
    ids=["too short", "score", "order", "other passages", "other first passage", "a passage twice"],
)
def test_different_answers_are_not_the_same(got: Answer) -> None:
    assert not same_answer(got, answer(0.9, 0.5))


# --- timing requests


class FakeClient:
    """Answers with the square, except for 13; counts the requests in flight at once."""

    def __init__(self) -> None:
        self.in_flight = self.in_flight_max = 0

    async def request(self, _model: str, body: int) -> Reply:
        self.in_flight += 1
        self.in_flight_max = max(self.in_flight_max, self.in_flight)
        await asyncio.sleep(0)
        self.in_flight -= 1
        if body == 13:
            raise InternalError("unlucky")
        return reply(body**2)


async def test_each_body_is_sent_once_and_results_are_in_order() -> None:
    client, steps = FakeClient(), []
    run = await send_all(cast(AsyncClient, client), "square", range(50), 8, step=lambda: steps.append(1))
    assert client.in_flight_max == 8
    assert len(steps) == len(run.requests) == 50
    assert [one.body for one in run.requests] == list(range(50))
    failed = [one for one in run.requests if not isinstance(one.outcome, Reply)]
    assert [one.body for one in failed] == [13]
    assert all(one.outcome.value == one.body**2 for one in run.requests if isinstance(one.outcome, Reply))


async def test_no_more_requests_are_sent_once_the_time_is_over() -> None:
    run = await send_all(cast(AsyncClient, FakeClient()), "square", range(50), 1, within_s=0.0)
    assert [one.body for one in run.requests] == [0]


def test_percentiles_are_among_the_values() -> None:
    values = [float(number) for number in range(100, 0, -1)]
    assert [percentile(values, percent) for percent in (1, 50, 99, 100)] == [1.0, 50.0, 99.0, 100.0]
    assert percentile([7.0], 50) == percentile([7.0], 99) == 7.0


def test_mean_batch_is_the_mean_over_batches_not_requests() -> None:
    sizes = [4] * 4 + [2] * 2 + [1]
    run = SendingRun([TimedRequest(None, reply(None, size), 0.001) for size in sizes], 0.5)
    assert run.mean_batch == pytest.approx(7 / 3)
    assert run.per_second == 14.0


# --- a worker's log


def summary(requests: int, **reasons: int) -> str:
    return json.dumps({"event": "batches", "requests": requests, "reasons": reasons}) + "\n"


async def test_reasons_are_counted_from_the_skipped_position(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    log.write_text(summary(3, full=1))
    reader = WorkerLog(log)
    reader.skip()
    with log.open("a") as more:
        more.write(summary(128, full=2) + "Traceback\n" + summary(66, full=1, idle=1) + '{"event": "ba')
    assert await reader.reasons(194) == {"full": 3, "idle": 1}


async def test_late_log_line_is_awaited_for_a_limited_time(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    log.write_text(summary(1, idle=1))
    counting = asyncio.ensure_future(WorkerLog(log).reasons(3))
    await asyncio.sleep(0)
    with log.open("a") as more:
        more.write(summary(2, full=1))
    assert await counting == {"idle": 1, "full": 1}
    assert await WorkerLog(log).reasons(4, within_s=0.01) == {"idle": 1, "full": 1}


def test_last_error_is_that_of_the_last_error_line(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    log.write_text(summary(1, idle=1))
    assert WorkerLog(log).last_error() is None
    log.write_text('{"level": "error", "reason": "one"}\n{"level": "error", "reason": "two"}\nend\n')
    assert WorkerLog(log).last_error() == "two"


# --- output


def test_table_aligns_names_to_the_left_and_numbers_to_the_right() -> None:
    assert table([("", "a"), ("long name", "1"), ("b", "1,000")]) == [
        "               a",
        "long name      1",
        "b          1,000",
    ]


def test_durations_and_counts_have_readable_units() -> None:
    seconds = [0.00085, 0.00123, 0.0123, 0.123, 1.23, 200.0]
    assert [*map(duration, seconds)] == ["850 µs", "1.23 ms", "12.3 ms", "123 ms", "1.2 s", "3 min 20 s"]
    assert [count(1, "query", "queries"), count(2000, "request")] == ["1 query", "2,000 requests"]
    assert [clip("long text", 9), clip("long text", 5)] == ["long text", "long…"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Terminal()


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("carpool_cli.screen._REDRAW_INTERVAL_S", 0.0)
    monkeypatch.setattr("carpool_cli.screen._LINE_INTERVAL_S", 0.0)
    pipe = io.StringIO()
    for stream in (terminal, pipe):
        screen = Screen(stream)
        progress = Progress(screen, 4, "requests")
        progress.step()
        progress.end()
        screen.print("done")
    bar = terminal.getvalue()
    assert "━" in bar
    assert " 1 of 4 requests, " in bar
    assert bar.rindex("\x1b[?25l") < bar.rindex("\x1b[?25h"), "the cursor is visible again"
    assert bar.endswith("\x1b[1A\x1b[2Kdone\n"), "the line of the bar is erased and used again"
    assert re.fullmatch(r"  1 of 4 requests, [0-9,]+/s\ndone\n", pipe.getvalue())


def test_cursor_is_visible_while_a_bar_is_shown(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a command that is killed would leave a terminal without one."""
    monkeypatch.setattr("carpool_cli.screen._REDRAW_INTERVAL_S", 0.0)
    progress = Progress(Screen(terminal), 4, "requests")
    progress.step()
    assert terminal.getvalue().rindex("\x1b[?25l") < terminal.getvalue().rindex("\x1b[?25h")
    progress.end()


def test_styles_are_for_terminals_without_no_color(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def printed(stream: io.StringIO) -> str:
        screen = Screen(stream)
        screen.title("x")
        screen.print_table(build_table([("name", "value"), ("a", "1")]))
        return stream.getvalue()

    assert "\x1b[1mx\x1b[0m" in printed(terminal)
    plain = "\nx\nname  value\na         1\n"
    assert printed(io.StringIO()) == plain
    monkeypatch.setenv("NO_COLOR", "1")
    assert printed(Terminal()) == plain
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert printed(Terminal()) == plain


def test_force_color_does_not_put_escape_codes_into_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    pipe = io.StringIO()
    Screen(pipe).title("x")
    assert pipe.getvalue() == "\nx\n"


def test_nothing_is_wrapped_or_cut_in_a_pipe() -> None:
    pipe = io.StringIO()
    screen = Screen(pipe)
    long = "word " * 100
    screen.print(long.strip())
    screen.print_table(
        build_table([("name", "value", "meaning"), ("n" * 200, "1" * 200, long)], has_prose=True)
    )
    text, _, row = pipe.getvalue().splitlines()
    assert text == long.strip()
    assert row == f"{'n' * 200}  {'1' * 200}  {long.strip()}"


def test_narrow_terminal_wraps_prose_and_cuts_no_number(terminal: Terminal) -> None:
    rows = [("name", "value", "meaning"), ("a", "1" * 30, "some words that wrap")]
    Screen(terminal).print_table(build_table(rows, has_prose=True))
    plain = re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue()).splitlines()
    assert plain[1].split()[:2] == ["a", "1" * 30]
    assert " ".join(" ".join(plain[1:]).split()[2:]) == "some words that wrap"
    wide = Terminal()
    Screen(wide).print_table(build_table([("name", "value"), ("n" * 50, "1" * 50)]))
    assert "n" * 50 + "  " + "1" * 50 in wide.getvalue(), "wider than the terminal, but whole"


def test_table_fits_if_its_prose_can_wrap(terminal: Terminal) -> None:
    rows = [("name", "value", "meaning"), ("a", "1" * 30, "some words that wrap " * 9)]
    wide = [("name", "value", "meaning"), ("a", "1" * 40, "some words that wrap " * 9)]
    assert Screen(terminal).fits(build_table(rows, has_prose=True))
    assert not Screen(terminal).fits(build_table(wide, has_prose=True))
    assert Screen(io.StringIO()).fits(build_table(wide, has_prose=True))


def test_muted_screen_writes_nothing() -> None:
    pipe = io.StringIO()
    screen = Screen(pipe)
    screen.mute()
    screen.print("x")
    assert pipe.getvalue() == ""


def test_each_dispatch_reason_is_explained() -> None:
    assert set(REASON_MEANINGS) == set(get_args(DispatchReason))


def test_figures_compare_the_runs_and_explain_the_reasons() -> None:
    pipe = io.StringIO()
    concurrent = SendingRun([TimedRequest(None, reply(None, 4), 0.02)] * 8, 0.1)
    sequential = SendingRun([TimedRequest(None, reply(None, 1), 0.01)] * 4, 0.2)
    reasons = Counter(full=3, idle=1, other=1)
    show_figures(Measured(8, concurrent, sequential, [0.05, 0.05], reasons), Screen(pipe))
    lines = pipe.getvalue().splitlines()
    assert [line.split() for line in lines[2:5]] == [
        ["", "requests/s", "mean", "batch", "p50", "p99"][1:],
        ["8", "in", "flight", "80", "4.0", "20", "ms", "20", "ms"],
        ["one", "at", "a", "time", "20", "1.0", "10", "ms", "10", "ms"],
    ]
    assert (
        "the throughput is 4.0 times that of one request at a time,\n  and 4.0 times that" in pipe.getvalue()
    )
    assert [line.split()[:2] for line in lines[-3:]] == [["3", "full"], ["1", "idle"], ["1", "other"]]
    assert lines[-2].endswith(REASON_MEANINGS["idle"])


def test_commands_fit_the_address_and_contain_no_password() -> None:
    plain = paste.lines("redis://127.0.0.1:6379/0", "square")
    assert plain[0].endswith("infer square 7")
    assert plain[1].startswith('redis-cli BLPOP "carpool:{square}:result:$(redis-cli XADD ')
    assert "Client()" in plain[2]
    streamed, *_ = paste.lines("redis://127.0.0.1:6379/0", "m", kind=ModelKind.STEPPING)
    assert streamed.endswith("infer m hello --stream")
    assert "redis-cli -p 7000 " in paste.lines("redis://127.0.0.1:7000/0", "square")[1]
    assert "redis-cli -s /tmp/r.sock " in paste.lines("unix:///tmp/r.sock", "square")[1]
    assert "redis-cli -u rediss://example.org/0 " in paste.lines("rediss://example.org/0", "square")[1]
    assert 'prefix="mine"' in paste.lines("redis://127.0.0.1:6379/0", "square", "mine")[2]
    assert "redis-cli -n 2 " in paste.lines("redis://127.0.0.1?db=2", "square")[1]
    assert "redis-cli -s '/tmp/a b.sock' -n 1 " in paste.lines("unix:///tmp/a%20b.sock?db=1", "square")[1]
    for url in ("redis://:hush@example.org/0", "redis://example.org/0?password=hush"):
        secret = paste.lines(url, "square")
        assert paste.needs_environment(url)
        assert "hush" not in "".join(secret)
        assert 'redis-cli -u "$CARPOOL_REDIS_URL" ' in secret[1]


@pytest.mark.parametrize("kind", [kind for kind in ModelKind if kind.has_sequences])
def test_commands_for_a_model_of_sequences_send_a_whole_one(kind: ModelKind) -> None:
    infer, redis_cli, python = paste.lines("redis://127.0.0.1:6379/0", "m", kind=kind)
    assert infer.endswith("infer m hello --sequence-id try --sequence-start --sequence-end")
    assert "'*' sequence_id try sequence_start 1 sequence_end 1 body " in redis_cli
    assert ', sequence_id="try", sequence_start=True, sequence_end=True)' in python


def test_the_command_for_curl_speaks_openais_api_if_the_model_does() -> None:
    def curl(name: str, spoken: Spoken, kind: ModelKind = ModelKind.PLAIN) -> list[str]:
        return shlex.split(
            paste.lines("redis://127.0.0.1", name, kind=kind, gateway_url="http://x", spoken=spoken)[1]
        )

    *command, body, url = curl("writer", Spoken(("completions",)), ModelKind.STEPPING)
    assert (command, url) == (["curl", "-N", "-d"], "http://x/v1/completions")
    assert json.loads(body) == {"model": "writer", "prompt": "Return the", "stream": True}
    *_, body, url = curl("m", Spoken(("chat", "embeddings")), ModelKind.STEPPING)
    assert (url, json.loads(body)["messages"][0]["role"]) == ("http://x/v1/chat/completions", "user")
    *_, body, url = curl("m", Spoken(("embeddings",)))
    assert (url, json.loads(body)) == ("http://x/v1/embeddings", {"model": "m", "input": "hello"})
    infer = paste.lines("redis://127.0.0.1", "m", spoken=Spoken(("embeddings",)))[0]
    assert infer.endswith("""infer m '{"input": "hello"}' --redis-url redis://127.0.0.1""")


def commands(*inputs: TensorSpec) -> list[str]:
    return paste.lines("redis://127.0.0.1:6379/0", "m", inputs=inputs)


def test_commands_send_the_tensors_that_the_model_declares() -> None:
    flags = TensorSpec("flags", "BOOL", (-1,))
    infer, redis_cli, python = commands(flags)
    assert infer.endswith("infer m '[false, false]'")
    assert "body '[false, false]')" in redis_cli
    assert """infer("m", numpy.zeros((2,), "bool"))""" in python
    infer, _, python = commands(flags, TensorSpec("text", "BYTES", ()), TensorSpec("half", "BF16", (1, 2)))
    body = shlex.split(infer)[-1]
    assert json.loads(body) == {"flags": [False, False], "text": "hello", "half": [[0, 0]]}
    assert """"text": "hello", "half": numpy.zeros((1, 2), "float32")}""" in python


def test_commands_are_short_for_large_tensors() -> None:
    infer, redis_cli, python = commands(TensorSpec("pixels", "FP32", (3, 224, 224)))
    assert max(map(len, (infer, redis_cli, python))) < 1000
    assert infer.endswith("carpool infer m -")
    assert "redis-cli -x XADD 'carpool:{m}:requests' '*' body)" in redis_cli
    (only,) = commands(TensorSpec("pixels", "FP32", (3, 2048, 2048)))
    assert "numpy.zeros((3, 2048, 2048)" in only


# --- problems


class FakeModel:
    """Gives every query the same answer."""

    def predict(self, batch: Sequence[str]) -> list[Answer]:
        return [answer(0.9, 0.5) for _ in batch]


@pytest.fixture
def scenario() -> Scenario:
    supervisor = cast(Supervisor, SimpleNamespace(workers=[], url=""))
    return Scenario(supervisor, Screen(io.StringIO()), 100, 8, keep=False)


def run_with(outcomes: Sequence[Any]) -> SendingRun:
    return SendingRun(
        [TimedRequest(f"query {number}", one, 0.001) for number, one in enumerate(outcomes)], 1.0
    )


def check(scenario: Scenario, run: SendingRun) -> list[str]:
    scenario._check_results(run)
    scenario._compare_sample(run, cast(DocSearch, FakeModel()))
    return scenario.problems


def test_correct_results_are_no_problem(scenario: Scenario) -> None:
    assert check(scenario, run_with([reply(answer(0.9, 0.5))] * 100)) == []


def test_wrong_result_is_a_problem(scenario: Scenario) -> None:
    right, wrong = reply(answer(0.9, 0.5)), reply(answer(0.9, 0.5, first=7))
    (problem,) = check(scenario, run_with([right, right, wrong, right]))
    assert problem == "result differs from a direct call of the model: 1 request; the first: 'query 2'"


def test_missing_result_is_a_problem(scenario: Scenario) -> None:
    (problem,) = check(
        scenario, run_with([reply(answer(0.9, 0.5)), InternalError("oh"), InternalError("no")])
    )
    assert problem == "no result: 2 requests; the first: 'query 1', INTERNAL: oh"


async def test_chunks_that_are_not_the_output_are_a_problem(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def write(*_: object) -> writing.Writing:
        return writing.Writing(
            [writing.Written("ab", [0.1, 0.2], "ab"), writing.Written("c", [0.1], "cd")], 1.0
        )

    monkeypatch.setattr(writing, "write_in_steps", write)
    monkeypatch.setattr(writing, "write_whole", write)
    await scenario._write_texts(cast(AsyncClient, FakeClient()))
    assert scenario.problems == ["chunks differ from the output: 1 text; the first: 'c'"]


def test_orders_are_of_many_lengths_and_always_the_same() -> None:
    bodies = writing.orders()
    assert bodies == writing.orders()
    assert len(bodies) == 1 + writing.TEXTS
    assert len({body["length"] for body in bodies}) > 20


async def test_wrong_square_is_a_problem(scenario: Scenario) -> None:
    class WrongClient(FakeClient):
        async def request(self, model: str, body: int) -> Reply:
            return reply(50) if body == 7 else reply(body**2)

    await scenario._send_squares(cast(AsyncClient, WrongClient()))
    assert scenario.problems == ["result is not the square: 2 requests; the first: 7"]


# --- microphones


def listening_of(*microphones: Sequence[float]) -> listening.Listening:
    heard = [np.array(values, np.float32) for values in microphones]
    return listening.Listening(heard, [0.001] * sum(map(len, heard)), 0.01)


def test_microphones_are_always_the_same_and_somebody_speaks_at_each() -> None:
    first, second = listening.microphones(3), listening.microphones(3)
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one.frames, other.frames)
        assert one.frames.shape == (listening.FRAMES, 512)
        assert np.abs(one.frames).max() <= 1
        loud, quiet = one.frames[one.is_speech], one.frames[~one.is_speech]
        assert len(loud) and len(quiet)
        assert np.abs(loud).max() > 10 * np.abs(quiet).max()


def test_picture_shows_the_higher_of_two_probabilities() -> None:
    heard = np.array([0, 0.05, 0.5, 0.1, 0.99, 0, 1, 1], np.float32)
    assert listening.picture(heard) == "·▄██"


def test_microphones_that_differ_are_found() -> None:
    direct = listening_of([0.5, 0.6], [0.1, 0.2])
    assert listening.differing(direct, direct) == []
    assert listening.differing(listening_of([0.5, 0.6], [0.1, 0.2], [0.9, 0.9]), direct) == []
    assert listening.differing(listening_of([0.5, 0.6], [0.1, 0.2001]), direct) == [1]
    assert listening.differing(listening_of([0.4, 0.6]), direct) == [0]


def test_pictures_say_how_often_speech_is_heard() -> None:
    pipe = io.StringIO()
    sent = [listening.Microphone(np.zeros((4, 512), np.float32), np.array([False, False, True, True]))] * 2
    listening.show_pictures(sent, listening_of([0, 0, 1, 1], [0, 1, 1, 0]), Screen(pipe))
    lines = pipe.getvalue().splitlines()
    assert lines[:2] == ["  microphone 1  ·█", "  microphone 2  ██"]
    assert "above 50% in" in lines[3] and lines[4].startswith("  75% of the frames in which somebody speaks")
    assert lines[4].endswith("and in 25% of the others.")


def test_ways_of_listening_are_beside_each_other() -> None:
    pipe = io.StringIO()
    together, alone = listening_of([0.5] * 10, [0.5] * 10), listening_of([0.5] * 5)
    listening.show_listening(together, alone, alone, Counter(full=3, idle=2), Screen(pipe))
    lines = [line.split() for line in pipe.getvalue().splitlines()]
    assert lines[1] == ["2", "microphones", "at", "once", "2,000", "4.0", "500", "µs", "1", "ms", "1", "ms"]
    assert lines[2][-8:] == ["500", "1.0", "2", "ms", "1", "ms", "1", "ms"]
    assert "so 64 can be heard at this rate" in pipe.getvalue()


async def test_microphone_that_differs_from_direct_calls_is_a_problem(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def listen(_client: object, sent: Sequence[object], *, at_once: bool) -> listening.Listening:
        return listening_of([0.1, 0.2], [0.9, 0.8] if at_once else [0.9, 0.2])

    log = tmp_path / "worker.log"
    log.write_text("")
    scenario._supervisor.workers.append(cast(Any, SimpleNamespace(model="voice-activity", log=log)))
    quiet = listening.Microphone(np.zeros((2, 512), np.float32), np.array([True, False]))
    monkeypatch.setattr(listening, "MODELS", ("voice-activity",))
    monkeypatch.setattr(listening, "microphones", lambda: [quiet, quiet])
    monkeypatch.setattr(listening, "listen", listen)
    monkeypatch.setattr(listening, "listen_directly", lambda *_: listening_of([0.1, 0.2], [0.9, 0.8]))
    monkeypatch.setattr(WorkerLog, "reasons", no_reasons)
    monkeypatch.setattr("carpool_cli.demo.scenario.VoiceActivity", FakeVoiceActivity)
    await scenario._listen(cast(AsyncClient, FakeClient()))
    assert scenario.problems == ["microphones differ from direct calls of the model: 2"]


class FakeVoiceActivity:
    def load(self, device: str) -> None:
        """Nothing to load."""


async def no_reasons(_log: WorkerLog, _requests: int) -> Counter[str]:
    return Counter()


async def test_without_the_packages_the_microphones_are_left_out(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = io.StringIO()
    scenario._screen = Screen(pipe)
    monkeypatch.setattr(listening, "MODELS", ())
    await scenario._listen(cast(AsyncClient, FakeClient()))
    assert "pip install 'PATH[voice]'" in pipe.getvalue()
    assert scenario.problems == []
