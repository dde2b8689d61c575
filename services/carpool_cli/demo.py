"""`carpool demo`: search in the documentation on this machine, request by request, measured and checked.

The main thread supervises the stack, as `carpool up` does; a second one tells the story, the only producer.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from pydantic import Field

from carpool.aio import AsyncClient, Reply
from carpool.errors import CarpoolError
from carpool.lifecycle import stop_on_signals
from carpool.logs import configure_logs
from carpool.settings import CarpoolSettings, read_settings
from carpool_cli import paste
from carpool_cli.embedded import EmbeddedRedisError
from carpool_cli.measure import Asked, Run, WorkerLog, ask, percentile, same_answer
from carpool_cli.report import Progress, Screen, clip, duration, table
from carpool_cli.supervisor import POLL_S, Plan, StartError, Supervisor
from carpool_cli.up import served
from carpool_worker.models.docsearch import DocSearch
from carpool_worker.models.docsearch_corpus import SHOWN_QUERIES, queries

SQUARES: Final = 880
ONE_AT_A_TIME: Final = 400  # queries at the most, ...
ONE_AT_A_TIME_S: Final = 10.0  # ... and seconds
CHECKED: Final = 50
SHOWN_ANSWERS: Final = 3
TIMEOUT_S: Final = 60.0
_WHY: Final = {
    "full": "as many as the model takes at once",
    "idle": "a worker was free",
    "delay": "the oldest had waited long enough",
    "deadline": "one was about to expire",
    "drain": "the batcher was leaving",
}


class DemoSettings(CarpoolSettings):
    """Search in the documentation on this machine: measured, checked, and gone when it ends.

    Starts Redis, a batcher and workers, sends real queries as single requests from one producer, and the same
    ones one at a time; shows answers, figures, and what a sample was compared with.
    """

    queries: int = Field(5000, ge=1, le=1_000_000, description="how many to send")
    in_flight: int = Field(256, ge=1, le=10_000, description="how many of them may be under way at once")
    keep: bool = Field(False, description="leave the stack up at the end, until Ctrl-C")


def main(argv: Sequence[str]) -> int:
    """Tell the story. 1 if anything in it was wrong."""
    settings = read_settings(DemoSettings, argv, "carpool demo")
    configure_logs("warning", "supervisor")
    stop = stop_on_signals()
    logs = Path(tempfile.mkdtemp(prefix="carpool-demo-"))
    supervisor = Supervisor(Plan(models=["docsearch", "square"], logs=logs))
    story = Story(settings, supervisor, Screen())
    try:
        problems = _supervise(supervisor, story, stop, settings.keep)
    except StartError as error:
        problems = [f"{error}: {_why(supervisor)}"]
    except EmbeddedRedisError as error:
        problems = [str(error)]
    finally:
        supervisor.stop()
    if problems is None:
        shutil.rmtree(logs, ignore_errors=True)
        return 130
    return _verdict(story, problems, logs)


def _supervise(supervisor: Supervisor, story: Story, stop: threading.Event, keep: bool) -> list[str] | None:
    """Keep the stack alive until the story is told, and on if it is to be kept. None if it was cut short."""
    supervisor.start()
    telling = threading.Thread(target=story.tell, name="demo", daemon=True)
    telling.start()
    while telling.is_alive() or (keep and not story.problems):
        if stop.wait(POLL_S):
            break
        for worker in supervisor.run_once():
            story.screen.say(served(worker, 1))
        if supervisor.serving:
            story.served.set()
    if telling.is_alive():
        story.screen.hush()
        return None
    return story.problems


def _why(supervisor: Supervisor) -> str:
    """What the workers' logs say of it."""
    logs = [WorkerLog(worker.log) for worker in supervisor.workers if worker.log is not None]
    return "; ".join(reason for log in logs if (reason := log.last_error())) or "its log does not say why"


def _verdict(story: Story, problems: list[str], logs: Path) -> int:
    screen = story.screen
    if not problems:
        shutil.rmtree(logs, ignore_errors=True)
        return 0
    screen.title("Something is wrong")
    for problem in problems:
        screen.say(f"  {problem}")
    screen.say(f"  The services' logs are in {logs}")
    return 1


class Story:
    """What is sent, shown and checked, in its order. `tell` runs on a thread of its own."""

    def __init__(self, settings: DemoSettings, supervisor: Supervisor, screen: Screen) -> None:
        self.screen = screen
        self.served = threading.Event()  # everything is
        self.problems: list[str] = []
        self._settings = settings
        self._supervisor = supervisor
        self._began_s = time.monotonic()
        self._requests = 0
        self._checked = "none"

    def tell(self) -> None:
        """All of it; whatever goes wrong is in `problems`."""
        try:
            self._introduce()
            questions, direct = self._prepare()
            self.served.wait()
            asyncio.run(self._with_client(questions, direct))
        except CarpoolError as error:
            self.problems.append(str(error))
        except Exception as error:  # this is a thread: nobody else would hear of it
            self.problems.append(f"{type(error).__name__}: {error}")

    # --- the beginning -------------------------------------------------------------------------------------

    def _introduce(self) -> None:
        screen = self.screen
        screen.say(screen.bold(f"Carpool {version('carpool')}: search in the documentation on this machine"))
        redis = self._supervisor.redis
        assert redis is not None
        server = f"{redis.server.binary.name} {redis.server.version}"
        screen.say(f"\n{server}, a batcher and two workers start, on {os.cpu_count()} cores.")
        screen.say(
            "docsearch indexes the docstrings of Python's standard library; meanwhile queries are taken"
        )
        screen.say("from those of the packages installed beside it.")

    def _prepare(self) -> tuple[list[str], DocSearch]:
        """The queries, and the model itself, in this process, to compare answers with."""
        questions = queries(self._settings.queries)
        direct = DocSearch()
        direct.load("cpu")
        return questions, direct

    async def _with_client(self, questions: list[str], direct: DocSearch) -> None:
        url = self._supervisor.url
        async with AsyncClient(url, prefix="carpool", timeout=TIMEOUT_S) as client:
            together, reasons = await self._ask_together(client, questions)
            singly = await self._ask_singly(client, questions)
            await self._show_answers(client)
            directly = self._check(together, direct)
            self._show_figures(together, singly, directly, reasons)
            await self._squares(client)
        self._end(url)

    # --- the queries ---------------------------------------------------------------------------------------

    async def _ask_together(self, client: AsyncClient, questions: list[str]) -> tuple[Run, Counter[str]]:
        """All of them, and why their batches left."""
        in_flight = min(self._settings.in_flight, len(questions))
        self.screen.title(f"{len(questions):,} queries, each a request of its own, {in_flight} in flight")
        log = self._log_of("docsearch")
        log.skip()
        run = await self._ask(client, "docsearch", questions, in_flight)
        return run, await log.reasons(len(questions))

    async def _ask_singly(self, client: AsyncClient, questions: list[str]) -> Run:
        some = questions[:ONE_AT_A_TIME]
        self.screen.title(f"The same queries, the first {len(some):,}, one at a time")
        return await self._ask(client, "docsearch", some, 1, within_s=ONE_AT_A_TIME_S)

    async def _ask(
        self, client: AsyncClient, model: str, bodies: Sequence[Any], in_flight: int, **options: float
    ) -> Run:
        """Ask with a progress bar, and see that each request has a result."""
        progress = Progress(self.screen, len(bodies))
        run = await ask(client, model, bodies, in_flight, step=progress.step, **options)
        progress.end()
        self.screen.say(f"  {len(run.asked):,} in {duration(run.took_s)}: {run.per_second:,.0f} requests/s")
        self._see_results(run)
        return run

    def _see_results(self, run: Run) -> None:
        """Each request is to have one."""
        self._requests += len(run.asked)
        self._complain("have no result", [one for one in run.asked if not isinstance(one.came, Reply)])

    async def _show_answers(self, client: AsyncClient) -> None:
        screen = self.screen
        screen.title(f"What is found: the nearest {SHOWN_ANSWERS} of five")
        run = await ask(client, "docsearch", SHOWN_QUERIES, len(SHOWN_QUERIES))
        self._see_results(run)
        for one in run.asked:
            screen.say(f"\n  {one.body}")
            for answer in one.came.value[:SHOWN_ANSWERS] if isinstance(one.came, Reply) else ():
                line = f"    {answer['score']:.2f}  {clip(answer['name'], 28):28}  {answer['text']}"
                screen.say(clip(line, screen.columns))

    def _check(self, run: Run, direct: DocSearch) -> list[float]:
        """Compare a sample with direct computation. How long each of those took (s)."""
        sample = run.asked[:: max(1, len(run.asked) // CHECKED)][:CHECKED]
        wrong, took_s = [], []
        for one in sample:
            started_s = time.perf_counter()
            (expected,) = direct.predict([one.body])
            took_s.append(time.perf_counter() - started_s)
            if isinstance(one.came, Reply) and not same_answer(one.came.value, expected):
                wrong.append(one)
        self._complain("differ from direct computation", wrong)
        self._checked = (
            f"{len(sample) - len(wrong)} of {len(sample)} compared with direct computation are equal"
        )
        return took_s

    def _show_figures(self, together: Run, singly: Run, directly: list[float], reasons: Counter[str]) -> None:
        screen = self.screen
        screen.title("What it took: from sending a request to having its result")
        rows = [("", "requests/s", "mean batch", "p50", "p99")]
        in_flight = min(self._settings.in_flight, len(together.asked))
        for name, run in ((f"{in_flight} in flight", together), ("one at a time", singly)):
            latency = duration(run.percentile_s(50)), duration(run.percentile_s(99))
            rows.append((name, f"{run.per_second:,.0f}", f"{run.mean_batch:.1f}", *latency))
        latency = duration(percentile(directly, 50)), duration(percentile(directly, 99))
        rows.append(("one at a time, without Carpool", f"{len(directly) / sum(directly):,.0f}", "", *latency))
        for line in table(rows):
            screen.say(f"  {line}")
        ratio = together.per_second / singly.per_second
        screen.say(
            f"\n  In batches, {ratio:.1f} times as many a second as one at a time. Why each batch left:"
        )
        for reason, number in reasons.most_common():
            screen.say(f"    {number:5,}  {reason:8}  {screen.dim(_WHY.get(reason, ''))}".rstrip())

    # --- the squares ---------------------------------------------------------------------------------------

    async def _squares(self, client: AsyncClient) -> None:
        self.screen.title(f"{SQUARES} squares, by a model that sleeps 1 ms x log(n + 1) for a batch of n")
        numbers = range(SQUARES)
        singly = await self._ask(client, "square", numbers, 1)
        together = await self._ask(client, "square", numbers, SQUARES)
        for one in (*singly.asked, *together.asked):
            if isinstance(one.came, Reply) and one.came.value != one.body * one.body:
                self._complain("has a wrong square", [one])
        self.screen.say(
            f"  One at a time {duration(singly.took_s)}; together, {together.mean_batch:.0f} in a batch, "
            f"{duration(together.took_s)}: {singly.took_s / together.took_s:.0f} times as fast."
        )

    # --- the end -------------------------------------------------------------------------------------------

    def _end(self, url: str) -> None:
        screen = self.screen
        if self.problems:
            return
        took = duration(time.monotonic() - self._began_s)
        screen.title(f"{self._requests:,} requests, as many results, nothing wrong, in {took}")
        screen.say(f"  Of the queries, {self._checked}; of the squares, all.")
        if not self._settings.keep:
            carpool = paste.command("carpool")
            screen.say(
                f"  {carpool} demo --keep leaves the stack up, with lines to paste into redis-cli and Python."
            )
            screen.say(f"  {carpool} up module:Name serves a model of your own.")
            return
        screen.say(f"  The stack stays up at {url} until Ctrl-C. To paste elsewhere:\n")
        for model in ("docsearch", "square"):
            for _, line in paste.lines(url, model):
                screen.say(f"  {line}")
            screen.say()

    def _log_of(self, model: str) -> WorkerLog:
        log = next(worker.log for worker in self._supervisor.workers if worker.model == model)
        assert log is not None
        return WorkerLog(log)

    def _complain(self, what: str, wrong: Sequence[Asked]) -> None:
        """Note the requests with which something is wrong, and name the first."""
        if wrong:
            first = wrong[0]
            said = f", {first.came}" if isinstance(first.came, CarpoolError) else ""
            self.problems.append(f"{len(wrong):,} requests {what}; the first: {first.body!r:.80}{said}")
