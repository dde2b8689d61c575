"""What the demo sends, shows and checks, in its order. It is the stack's only producer."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, Final

from carpool.client.aio import AsyncClient, Reply
from carpool.errors import CarpoolError
from carpool.keys import DEFAULT_PREFIX
from carpool_cli.demo.docsearch import DocSearch
from carpool_cli.demo.docsearch_corpus import SHOWN_QUERIES, queries
from carpool_cli.demo.measure import Asked, Run, WorkerLog, ask, percentile, same_answer
from carpool_cli.local import paste
from carpool_cli.local.supervisor import Supervisor
from carpool_cli.screen import Progress, Screen, clip, count, duration, table

MODELS: Final = ("docsearch", "square")
ONE_AT_A_TIME: Final = 400  # queries at the most, ...
ONE_AT_A_TIME_S: Final = 10.0  # ... and seconds
CHECKED: Final = 50
SHOWN_ANSWERS: Final = 3
SQUARES: Final = 880
TIMEOUT_S: Final = 60.0

_WHY: Final = {
    "full": "as many as the model takes at once",
    "idle": "a worker was free",
    "delay": "the oldest had waited long enough",
    "deadline": "one was about to expire",
    "drain": "the batcher was leaving",
}


class Story:
    """`tell` runs on a thread of its own; what it finds wrong is in `problems` when it returns."""

    def __init__(
        self, supervisor: Supervisor, screen: Screen, number: int, in_flight: int, *, keep: bool
    ) -> None:
        self.served = threading.Event()  # to be set once every model is
        self.problems: list[str] = []
        self.keep = keep
        self._supervisor = supervisor
        self._screen = screen
        self._number = number
        self._in_flight = min(in_flight, number)
        self._began_s = time.monotonic()
        self._requests = 0
        self._checked = ""

    def tell(self) -> None:
        """All of it."""
        try:
            self._introduce()
            questions, direct = self._prepare()
            self.served.wait()
            asyncio.run(self._tell(questions, direct))
        except Exception as error:  # this is a thread: nobody else would hear of it
            self.problems.append(str(error) if isinstance(error, CarpoolError) else repr(error))

    async def _tell(self, questions: list[str], direct: DocSearch) -> None:
        url = self._supervisor.url
        async with AsyncClient(url, prefix=DEFAULT_PREFIX, timeout=TIMEOUT_S) as client:
            together, reasons = await self._ask_together(client, questions)
            singly = await self._ask_singly(client, questions)
            await self._show_answers(client)
            directly_s = self._check(together, direct)
            self._show_figures(together, singly, directly_s, reasons)
            await self._squares(client)
        if not self.problems:
            self._end(url)

    # --- the beginning -------------------------------------------------------------------------------------

    def _introduce(self) -> None:
        screen, redis = self._screen, self._supervisor.redis
        assert redis is not None
        server = f"{redis.server.binary.name} {redis.server.version}"
        screen.say(screen.bold(f"Carpool {version('carpool')}: search in the documentation on this machine"))
        screen.say(f"\n{server}, a batcher and two workers start, on {os.cpu_count()} cores.")
        screen.say("docsearch indexes the docstrings of Python's standard library; those of the packages")
        screen.say("installed beside it are read for queries meanwhile.")

    def _prepare(self) -> tuple[list[str], DocSearch]:
        """The queries, and the model itself, in this process, to compare answers with."""
        questions = queries(self._number)
        direct = DocSearch()
        direct.load("cpu")
        return questions, direct

    # --- the queries ---------------------------------------------------------------------------------------

    async def _ask_together(self, client: AsyncClient, questions: list[str]) -> tuple[Run, Counter[str]]:
        """All of them, and why their batches left."""
        self._screen.title(
            f"{self._number:,} queries, each a request of its own, {self._in_flight} in flight"
        )
        path = next(worker.log for worker in self._supervisor.workers if worker.model == "docsearch")
        assert path is not None
        log = WorkerLog(path)
        log.skip()
        run = await self._ask(client, "docsearch", questions, self._in_flight)
        return run, await log.reasons(len(questions))

    async def _ask_singly(self, client: AsyncClient, questions: list[str]) -> Run:
        some = questions[:ONE_AT_A_TIME]
        self._screen.title(f"The same queries, the first {len(some)}, one at a time")
        return await self._ask(client, "docsearch", some, 1, within_s=ONE_AT_A_TIME_S)

    async def _show_answers(self, client: AsyncClient) -> None:
        screen = self._screen
        screen.title(f"What is found: the nearest {SHOWN_ANSWERS} of five")
        run = await ask(client, "docsearch", SHOWN_QUERIES, len(SHOWN_QUERIES))
        self._see_results(run)
        for one in run.asked:
            screen.say(f"\n  {one.body}")
            for answer in one.came.value[:SHOWN_ANSWERS] if isinstance(one.came, Reply) else ():
                line = f"    {answer['score']:.2f}  {clip(answer['name'], 28):28}  {answer['text']}"
                screen.say(clip(line, screen.columns))

    def _check(self, run: Run, direct: DocSearch) -> list[float]:
        """Compare a sample with direct computation. How long (s) each of those took."""
        sample = run.asked[:: max(1, len(run.asked) // CHECKED)][:CHECKED]
        wrong, took_s = [], []
        for one in sample:
            started_s = time.perf_counter()
            (expected,) = direct.predict([one.body])
            took_s.append(time.perf_counter() - started_s)
            if isinstance(one.came, Reply) and not same_answer(one.came.value, expected):
                wrong.append(one)
        self._complain("not what direct computation gives", wrong)
        self._checked = f"{len(sample) - len(wrong)} of {len(sample)}"
        return took_s

    def _show_figures(
        self, together: Run, singly: Run, directly_s: list[float], reasons: Counter[str]
    ) -> None:
        screen = self._screen
        screen.title("What it took: from sending a request to having its result")
        rows = [("", "requests/s", "mean batch", "p50", "p99")]
        for name, run in ((f"{self._in_flight} in flight", together), ("one at a time", singly)):
            latency = duration(run.percentile_s(50)), duration(run.percentile_s(99))
            rows.append((name, f"{run.per_second:,.0f}", f"{run.mean_batch:.1f}", *latency))
        alone_per_second = len(directly_s) / sum(directly_s)
        latency = duration(percentile(directly_s, 50)), duration(percentile(directly_s, 99))
        rows.append(("the model alone, one at a time", f"{alone_per_second:,.0f}", "1.0", *latency))
        for line in table(rows):
            screen.say(f"  {line}")
        over_singly, over_alone = (
            together.per_second / other for other in (singly.per_second, alone_per_second)
        )
        screen.say(
            f"\n  {over_singly:.1f} times as many a second as one at a time, {over_alone:.1f} times as many "
            "as the model alone.\n  Why the batches left:"
        )
        for reason, number in reasons.most_common():
            screen.say(f"    {number:5,}  {reason:8}  {screen.dim(_WHY.get(reason, ''))}".rstrip())

    # --- the squares ---------------------------------------------------------------------------------------

    async def _squares(self, client: AsyncClient) -> None:
        self._screen.title(f"{SQUARES} squares, by a model that sleeps 1 ms x log(n + 1) for a batch of n")
        singly = await self._ask(client, "square", range(SQUARES), 1)
        together = await self._ask(client, "square", range(SQUARES), SQUARES)
        both = (*singly.asked, *together.asked)
        wrong = [one for one in both if isinstance(one.came, Reply) and one.came.value != one.body**2]
        self._complain("not the square", wrong)
        self._screen.say(
            f"  One at a time {duration(singly.took_s)}; together, {together.mean_batch:.0f} in a batch, "
            f"{duration(together.took_s)}: {singly.took_s / together.took_s:.0f} times as fast."
        )

    # --- the end -------------------------------------------------------------------------------------------

    def _end(self, url: str) -> None:
        screen, carpool = self._screen, paste.command("carpool")
        took = duration(time.monotonic() - self._began_s)
        screen.title(f"{self._requests:,} requests, as many results, nothing wrong, in {took}")
        screen.say(f"  Compared with direct computation: {self._checked} queries and every square are equal.")
        if not self.keep:
            screen.say(f"  {carpool} demo --keep   leaves the stack up, with lines to paste to it")
            screen.say(f"  {carpool} up MODEL      serves a model of your own")
            return
        screen.say(f"\n{screen.bold('Serving')} at {url} until Ctrl-C. To paste elsewhere:\n")
        for model in MODELS:
            for line in paste.lines(url, model):
                screen.say(f"  {line}")
            screen.say()

    # --- every time ----------------------------------------------------------------------------------------

    async def _ask(
        self, client: AsyncClient, model: str, bodies: Sequence[Any], in_flight: int, **options: float
    ) -> Run:
        """Ask with a progress bar, say what it took, and see that each request has a result."""
        progress = Progress(self._screen, len(bodies))
        run = await ask(client, model, bodies, in_flight, step=progress.step, **options)
        progress.end()
        self._screen.say(f"  {len(run.asked):,} in {duration(run.took_s)}: {run.per_second:,.0f} requests/s")
        self._see_results(run)
        return run

    def _see_results(self, run: Run) -> None:
        self._requests += len(run.asked)
        self._complain("no result", [one for one in run.asked if not isinstance(one.came, Reply)])

    def _complain(self, what: str, wrong: Sequence[Asked]) -> None:
        """Note requests with which something is wrong, and name the first."""
        if wrong:
            first = wrong[0]
            said = f", {first.came}" if isinstance(first.came, CarpoolError) else ""
            self.problems.append(
                f"{what}: {count(len(wrong), 'request')}; the first: {first.body!r:.80}{said}"
            )
