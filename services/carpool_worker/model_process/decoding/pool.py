"""The threads that decode and encode. They take jobs in the order of frames."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from itertools import count
from typing import Final, Protocol

from carpool_worker.model_process.decoding.callers import Caller

Job = Callable[[Caller], None]
_LAST: Final = float("inf")


class Jobs(Protocol):
    """Where jobs are put."""

    def put(self, number: int, job: Job) -> None:
        """A job for the frame with this number. What it raises ends the process."""


class Inline:
    """Does each job at once, in this thread."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    def put(self, _number: int, job: Job) -> None:
        job(self._caller)


class Pool:
    """So many threads, each with a caller of its own, which it makes itself."""

    def __init__(self, threads: int, new_caller: Callable[[], Caller]) -> None:
        self._new_caller = new_caller
        self._jobs: queue.PriorityQueue[tuple[float, int, Job]] = queue.PriorityQueue()
        self._order = count()
        self._started: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._failed: Callable[[BaseException], None] = lambda _: None
        self._threads = [
            threading.Thread(target=self._run, name=f"decoder {number}", daemon=True)
            for number in range(threads)
        ]

    def start(self) -> None:
        """Start all. Raises what making a caller raised."""
        for thread in self._threads:
            thread.start()
        errors = [error for _ in self._threads if (error := self._started.get()) is not None]
        if errors:
            raise errors[0]

    def watch(self, failed: Callable[[BaseException], None]) -> None:
        """`failed` is told what a job raises."""
        self._failed = failed

    def put(self, number: int, job: Job) -> None:
        """See Jobs."""
        self._jobs.put((number, next(self._order), job))

    def close(self) -> None:
        """End all threads, after what is put already."""
        for _ in self._threads:
            self._jobs.put((_LAST, next(self._order), _nothing))
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        # A decoder process ends with the thread that started it, so that is this one.
        try:
            caller = self._new_caller()
        except BaseException as error:  # of a user's code
            self._started.put(error)
            return
        self._started.put(None)
        while True:
            number, _, job = self._jobs.get()
            if number == _LAST:
                break
            try:
                job(caller)
            except BaseException as error:  # an unforeseen case: the thread goes on, and the process ends
                self._failed(error)
            del job  # what it holds is not kept until the next one comes
        caller.close()


def _nothing(_caller: Caller) -> None:
    return None
