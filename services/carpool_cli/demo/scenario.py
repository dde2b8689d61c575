"""The demo step by step: what it sends, prints and checks. It is the only producer of its stack."""

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
from carpool.spoken import Spoken
from carpool_cli.demo import listening, writing
from carpool_cli.demo.docsearch import DocSearch
from carpool_cli.demo.docsearch_corpus import SHOWN_QUERIES, queries
from carpool_cli.demo.measure import SendingRun, TimedRequest, WorkerLog, same_answer, send_all
from carpool_cli.demo.report import ANSWERS_SHOWN, Measured, show_answers, show_figures
from carpool_cli.demo.voice_activity import VoiceActivity
from carpool_cli.demo.writer import Writer
from carpool_cli.local import paste
from carpool_cli.local.embedded import HOST
from carpool_cli.local.supervisor import GATEWAY_PORT, Supervisor
from carpool_cli.screen import Progress, Screen, count, duration

READY_MADE: Final = ("docsearch", "square", writing.WRITER, listening.VOICE_ACTIVITY)
MODELS: Final = ("docsearch", "square", *writing.MODELS, *listening.MODELS)
SEQUENTIAL_QUERIES_MAX: Final = 400
SEQUENTIAL_S_MAX: Final = 10.0
CHECKED_QUERIES: Final = 50
SQUARES: Final = 880
TIMEOUT_S: Final = 60.0


class Scenario:
    """`run` runs on a thread of its own. When it has returned, `problems` lists what was wrong."""

    def __init__(
        self, supervisor: Supervisor, screen: Screen, number: int, in_flight: int, *, keep: bool
    ) -> None:
        self.all_served = threading.Event()  # to be set once every model is served
        self.problems: list[str] = []
        self.keep = keep
        self._supervisor = supervisor
        self._screen = screen
        self._number = number
        self._in_flight = min(in_flight, number)
        self._started_s = time.monotonic()
        self._requests = 0
        self._checked = ""

    def run(self) -> None:
        """Run everything."""
        try:
            self._introduce()
            texts, direct_model = self._prepare()
            self.all_served.wait()
            asyncio.run(self._run(texts, direct_model))
        except (
            Exception
        ) as error:  # the main thread reads `problems`; it would not see an exception of this one
            self.problems.append(str(error) if isinstance(error, CarpoolError) else repr(error))

    async def _run(self, texts: list[str], direct_model: DocSearch) -> None:
        url = self._supervisor.url
        async with AsyncClient(url, prefix=DEFAULT_PREFIX, timeout=TIMEOUT_S) as client:
            concurrent, reasons = await self._send_concurrently(client, texts)
            sequential = await self._send_sequentially(client, texts)
            await self._show_answers(client)
            direct_s = self._compare_sample(concurrent, direct_model)
            show_figures(Measured(self._in_flight, concurrent, sequential, direct_s, reasons), self._screen)
            await self._send_squares(client)
            await self._write_texts(client)
            await self._listen(client)
        if not self.problems:
            self._conclude(url)

    # --- preparing -----------------------------------------------------------------------------------------

    def _introduce(self) -> None:
        screen, redis = self._screen, self._supervisor.redis
        assert redis is not None
        server = f"{redis.server.binary.name} {redis.server.version}"
        screen.print(f"Carpool {version('carpool')}: documentation search on this machine", style="bold")
        screen.print(
            f"\nStarting {server}, a batcher and {len(MODELS)} workers on {os.cpu_count()} CPU cores."
        )
        screen.print(
            "The model docsearch indexes the docstrings of Python's standard library. Docstrings of the"
        )
        screen.print("other installed packages become the queries.")

    def _prepare(self) -> tuple[list[str], DocSearch]:
        """The queries, and the model in this process, to compare answers with."""
        texts = queries(self._number)
        direct_model = DocSearch()
        direct_model.load("cpu")
        return texts, direct_model

    # --- the queries ---------------------------------------------------------------------------------------

    async def _send_concurrently(
        self, client: AsyncClient, texts: list[str]
    ) -> tuple[SendingRun, Counter[str]]:
        """Send all queries; also returns the dispatch reasons of their batches."""
        self._screen.title(
            f"{self._number:,} queries, each a request of its own, {self._in_flight} in flight"
        )
        log = self._log_of("docsearch")
        log.skip()
        run = await self._send(client, "docsearch", texts, self._in_flight)
        return run, await log.reasons(len(texts))

    async def _send_sequentially(self, client: AsyncClient, texts: list[str]) -> SendingRun:
        first = texts[:SEQUENTIAL_QUERIES_MAX]
        self._screen.title(f"The first {len(first)} of these queries, one at a time")
        return await self._send(client, "docsearch", first, 1, within_s=SEQUENTIAL_S_MAX)

    async def _show_answers(self, client: AsyncClient) -> None:
        self._screen.title(f"Some answers: the best {ANSWERS_SHOWN} of the five passages found")
        run = await send_all(client, "docsearch", SHOWN_QUERIES, len(SHOWN_QUERIES))
        self._check_results(run)
        show_answers(run.requests, self._screen)

    def _compare_sample(self, run: SendingRun, direct_model: DocSearch) -> list[float]:
        """Compare a sample of the results with direct calls of the model. Returns the durations of these."""
        sample = run.requests[:: max(1, len(run.requests) // CHECKED_QUERIES)][:CHECKED_QUERIES]
        wrong, durations_s = [], []
        for request in sample:
            started_s = time.perf_counter()
            (expected,) = direct_model.predict([request.body])
            durations_s.append(time.perf_counter() - started_s)
            if isinstance(request.outcome, Reply) and not same_answer(request.outcome.value, expected):
                wrong.append(request)
        self._add_problem("result differs from a direct call of the model", wrong)
        self._checked = f"{len(sample) - len(wrong)} of {len(sample)}"
        return durations_s

    # --- the squares ---------------------------------------------------------------------------------------

    async def _send_squares(self, client: AsyncClient) -> None:
        self._screen.title(f"{SQUARES} squares, by a model that sleeps 1 ms x log(n + 1) for a batch of n")
        sequential = await self._send(client, "square", range(SQUARES), 1)
        concurrent = await self._send(client, "square", range(SQUARES), SQUARES)
        wrong = [
            request
            for request in (*sequential.requests, *concurrent.requests)
            if isinstance(request.outcome, Reply) and request.outcome.value != request.body**2
        ]
        self._add_problem("result is not the square", wrong)
        self._screen.print(
            f"  One at a time: {duration(sequential.duration_s)}. All at once, in batches of "
            f"{concurrent.mean_batch:.0f} on average: {duration(concurrent.duration_s)}, "
            f"{sequential.duration_s / concurrent.duration_s:.0f} times as fast."
        )

    # --- the texts -----------------------------------------------------------------------------------------

    async def _write_texts(self, client: AsyncClient) -> None:
        screen, bodies = self._screen, writing.orders()
        screen.title(
            f"A text by a small language model, as it is written, while {writing.TEXTS} others are written"
        )
        screen.write(f"\n  {writing.SHOWN_PROMPT}")
        in_steps = await writing.write_in_steps(client, bodies, screen.write)
        screen.print("\n")
        whole = await writing.write_whole(client, bodies)
        writing.show_writing(in_steps, whole, screen)
        self._requests += len(in_steps.texts) + len(whole.texts)
        wrong = [written for written in in_steps.texts if written.text != written.output]
        if wrong:
            first = f"the first: {wrong[0].text!r:.80}"
            self.problems.append(f"chunks differ from the output: {count(len(wrong), 'text')}; {first}")

    # --- the microphones -----------------------------------------------------------------------------------

    async def _listen(self, client: AsyncClient) -> None:
        screen = self._screen
        screen.title(f"Is somebody speaking? {listening.MICROPHONES} microphones, each a sequence of frames")
        if not listening.MODELS:
            screen.print(f"  Left out: install the packages with pip install 'PATH[{listening.EXTRA}]'")
            return
        sent = listening.microphones()
        direct_model = VoiceActivity()
        direct_model.load("cpu")
        log = self._log_of(listening.VOICE_ACTIVITY)
        log.skip()
        together = await listening.listen(client, sent, at_once=True)
        reasons = await log.reasons(len(together.latencies_s))
        alone = await listening.listen(client, sent[: listening.ALONE], at_once=False)
        direct = listening.listen_directly(direct_model, sent[: listening.SHOWN])
        listening.show_pictures(sent, together, screen)
        listening.show_listening(together, alone, direct, reasons, screen)
        self._requests += len(together.latencies_s) + len(alone.latencies_s)
        for heard in (together, alone):
            if wrong := listening.differing(heard, direct):
                numbers = ", ".join(str(number + 1) for number in wrong)
                self.problems.append(f"microphones differ from direct calls of the model: {numbers}")

    # --- the end -------------------------------------------------------------------------------------------

    def _conclude(self, url: str) -> None:
        screen, carpool = self._screen, paste.command("carpool")
        took = duration(time.monotonic() - self._started_s)
        screen.title(f"{self._requests:,} requests, each with a result, in {took}")
        microphones = ",\n  and microphones are heard as by direct calls" if listening.MODELS else ""
        screen.print(
            f"  Checked: {self._checked} sampled results equal those of direct calls, every square is\n"
            f"  correct, the chunks of every text make up its output{microphones}."
        )
        if not self.keep:
            screen.print(f"  {carpool} demo --keep   keeps the stack running, and prints commands to try")
            screen.print(f"  {carpool} up MODEL      serves a model of your own")
            self._print_curl()
            return
        screen.title(f"Serving at {url} until Ctrl-C. Commands to try in another terminal:\n")
        for worker in self._supervisor.workers:
            if worker.model not in READY_MADE:
                continue
            gateway = self._supervisor.gateway
            http = gateway.url if gateway is not None else ""
            for line in paste.lines(
                url,
                worker.model,
                inputs=worker.inputs,
                kind=worker.kind,
                gateway_url=http,
                spoken=worker.spoken,
            ):
                screen.print(f"  {line}")
            screen.print()
        if self._supervisor.console is not None:
            screen.print(self._supervisor.console.told)

    def _print_curl(self) -> None:
        """A command that shows a text as it is written."""
        screen, carpool = self._screen, paste.command("carpool")
        url, spoken = f"http://{HOST}:{GATEWAY_PORT}", Spoken((Writer.speaks,))
        curl = paste.spoken_curl(writing.WRITER, spoken, url, is_stream=True)
        screen.print(
            f"  {carpool} up {writing.WRITER}     then, in another terminal, a text as it is written:"
        )
        screen.print(f"  {curl}")

    def _log_of(self, model: str) -> WorkerLog:
        path = next(worker.log for worker in self._supervisor.workers if worker.model == model)
        assert path is not None
        return WorkerLog(path)

    # --- sending and checking ------------------------------------------------------------------------------

    async def _send(
        self, client: AsyncClient, model: str, bodies: Sequence[Any], in_flight: int, **options: float
    ) -> SendingRun:
        """Send requests with a progress bar, print the throughput, and check that each has a result."""
        progress = Progress(self._screen, len(bodies), "requests")
        run = await send_all(client, model, bodies, in_flight, step=progress.step, **options)
        progress.end()
        self._screen.print(
            f"  {len(run.requests):,} in {duration(run.duration_s)}: {run.per_second:,.0f} requests/s"
        )
        self._check_results(run)
        return run

    def _check_results(self, run: SendingRun) -> None:
        self._requests += len(run.requests)
        failed = [request for request in run.requests if not isinstance(request.outcome, Reply)]
        self._add_problem("no result", failed)

    def _add_problem(self, problem: str, wrong: Sequence[TimedRequest]) -> None:
        """Add a problem if there are requests that have it, and name the first of them."""
        if wrong:
            first = wrong[0]
            error = f", {first.outcome}" if isinstance(first.outcome, CarpoolError) else ""
            self.problems.append(
                f"{problem}: {count(len(wrong), 'request')}; the first: {first.body!r:.80}{error}"
            )
