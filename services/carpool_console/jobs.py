"""Jobs: actions that take longer than a request of a page, each on a thread, to be watched and stopped.

A job belongs to this process: if that ends, the job stops where it is, and says so in the log. What it did
until then is done.

Why: docs/decisions/0117.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import structlog

from carpool.shown import name_of

RUNNING_MAX: Final = 8
KEPT_MAX: Final = 100  # jobs that have ended


class JobState(NamedTuple):
    """A job as pages show it. `done` and `total` count what the job is about; `total` is None while it is
    unknown. `text`: what it does, or did. `ended_s` and `began_s` are wall clock times of this host."""

    id: str
    title: str
    model: str
    who: str
    began_s: float
    ended_s: float | None
    is_stopping: bool
    has_failed: bool
    done: int
    total: int | None
    text: str

    @property
    def is_running(self) -> bool:
        """Whether its thread has not ended."""
        return self.ended_s is None

    @property
    def state(self) -> str:
        """In a word."""
        if self.is_running:
            return "stopping" if self.is_stopping else "running"
        if self.has_failed:
            return "failed"
        return "stopped" if self.is_stopping else "done"


class Job:
    """What the function of a job sees of it, and reports to."""

    def __init__(self, title: str, model: str, who: str) -> None:
        self.id: Final = secrets.token_hex(8)
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._state = JobState(self.id, title, model, who, time.time(), None, False, False, 0, None, "starts")

    @property
    def state(self) -> JobState:
        """As it is now."""
        with self._lock:
            return self._state._replace(is_stopping=self._stopping.is_set())

    @property
    def is_stopping(self) -> bool:
        """Whether it shall stop. A function of a job looks after each thing it did."""
        return self._stopping.is_set()

    def pause(self, seconds: float) -> None:
        """Wait, but not when the job shall stop."""
        self._stopping.wait(seconds)

    def tell(self, text: str, done: int = 0, total: int | None = None) -> None:
        """How it goes."""
        with self._lock:
            self._state = self._state._replace(text=text, done=done, total=total)

    def stop(self) -> None:
        """Have it stop soon. What it did is done."""
        self._stopping.set()

    def end(self, text: str, *, has_failed: bool) -> None:
        """It has ended."""
        with self._lock:
            self._state = self._state._replace(text=text, has_failed=has_failed, ended_s=time.time())


class JobFailedError(Exception):
    """What a job is for was not done; the message says why."""


class TooManyJobsError(Exception):
    """So many run that no other one is begun; the message says what to do."""


Work = Callable[[Job], str]
"""Does what a job is for, and returns what was done, in a sentence. Raises JobFailedError, and what
`explain` of Jobs knows."""


class Jobs:
    """The jobs of this process. `explain`: an exception as a sentence for people, or None for one that is a
    defect, which is logged."""

    def __init__(self, explain: Callable[[Exception], str | None]) -> None:
        self._explain = explain
        self._log = structlog.get_logger()
        self._lock = threading.Lock()
        self._jobs: dict[str, Job] = {}
        self._threads: dict[str, threading.Thread] = {}
        self._is_closed = False

    def start(self, title: str, model: str, who: str, work: Work) -> Job:
        """Begin one. Raises TooManyJobsError, also while a job of the same title runs for the model."""
        job = Job(title, model, who)
        with self._lock:
            self._forget_ended()
            running = [one for one in self._jobs.values() if one.state.is_running]
            for one in running:
                if (one.state.title, one.state.model) == (title, model):
                    raise TooManyJobsError(f"{title}, of {model}, runs already; stop that job, or wait")
            if len(running) >= RUNNING_MAX or self._is_closed:
                raise TooManyJobsError(f"{len(running)} jobs run already; wait until one has ended")
            self._jobs[job.id] = job
            thread = threading.Thread(target=self._run, args=(job, work), name=f"job-{job.id}", daemon=True)
            self._threads[job.id] = thread
        thread.start()
        return job

    def _forget_ended(self) -> None:
        ended = [job.id for job in self._jobs.values() if not job.state.is_running]
        for job_id in ended[: max(0, len(ended) - KEPT_MAX)]:
            del self._jobs[job_id], self._threads[job_id]

    def _run(self, job: Job, work: Work) -> None:
        try:
            text, has_failed = work(job), False
        except Exception as error:
            explained = str(error) if isinstance(error, JobFailedError) else self._explain(error)
            text, has_failed = explained or f"a defect of the console: {name_of(error)}", True
            if explained is None:
                self._log.exception("job failed", title=job.state.title, model=job.state.model)
        job.end(text, has_failed=has_failed)
        of = job.state
        self._log.info("job ended", title=of.title, model=of.model, who=of.who, state=of.state, text=text)

    def get(self, job_id: str) -> Job | None:
        """The one with this ID, if it is known."""
        with self._lock:
            return self._jobs.get(job_id)

    def all(self) -> Sequence[JobState]:
        """The newest first."""
        with self._lock:
            return [job.state for job in reversed(self._jobs.values())]

    def close(self, within_s: float) -> None:
        """Have all of them stop, begin no others, and wait until they have ended, at most so long."""
        with self._lock:
            self._is_closed = True
            threads = list(self._threads.values())
            for job in self._jobs.values():
                if job.state.is_running:
                    job.stop()
        until_s = time.monotonic() + within_s
        for thread in threads:
            thread.join(max(0.0, until_s - time.monotonic()))
