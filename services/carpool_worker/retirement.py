"""When a model process is retired: replaced although it lives, because all that it executes fails. Time is an
argument.

A process whose accelerator or library is broken raises on every request. As it fails fast, it takes more
batches than others. Not all such errors are known by their texts (`model_process.broken_devices`), so what
counts is that nothing succeeds. That alone may have other causes:

- The bodies are bad. Who sent them says nothing, because a producer has as many names as it wants. So when
  several batches have failed, for some time, the process gets an example: a request that a process of this
  worker has executed without an error. Only if the model raises on that, too, is the process to blame.
- The model is broken, as every other process of it will be. So this process must have succeeded before, or
  another one of this worker meanwhile. One that replaces it has not: it is not retired in its turn.
- The model depends on something that comes and goes. So the pause between two retirements doubles.

Why: docs/decisions/0068.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from carpool.errors import INTERNAL
from carpool_worker.execution import Example
from carpool_worker.model_process.frames import Failure, OutcomeHeader

BATCHES_MIN: Final = 5
FAILING_S_MIN: Final = 5.0
PAUSE_S_MIN: Final = 60.0
PAUSE_S_MAX: Final = 3600.0
EXAMPLE_S_MAX: Final = 60.0  # an older example is replaced by the next request that succeeds


class LastSuccess:
    """When any process of a worker last executed something without an error, and an example of it; for all of
    its threads."""

    def __init__(self) -> None:
        self.at_s = float("-inf")
        self.example: Example | None = None
        self._example_at_s = float("-inf")

    def wants_example(self, now_s: float) -> bool:
        """Whether a request that has just succeeded is to be the example."""
        return now_s - self._example_at_s >= EXAMPLE_S_MAX

    def take_example(self, example: Example | None, now_s: float) -> None:
        """Take another example. None: the request cannot be one; a later one may."""
        if example is not None:
            self.example, self._example_at_s = example, now_s


class Retirement:
    """Observes what one model process executes. `last_success` is shared by the processes of a worker.

    Once `due_example` is set, the process is to execute it, and `example_sent` and `observe_example` to be
    called.
    """

    def __init__(self) -> None:
        self.last_success = LastSuccess()
        self.tried: Example | None = None  # what the process was sent as an example, and has not executed yet
        self._has_succeeded = False  # this process, since it was started
        self._is_suspected = False
        self._batches = 0  # that failed since the last success
        self._last_batch = ""  # of them
        self._since_s = 0.0  # since when they failed
        self._retired_at_s = float("-inf")
        self._pause_s = 0.0  # after the last retirement

    @property
    def failed_batches(self) -> int:
        """How many batches have failed since the last success."""
        return self._batches

    def process_started(self) -> None:
        """Another process takes its place."""
        self._has_succeeded = False
        self._forget_failures()

    def observe_outcome(self, outcome: OutcomeHeader, batch_id: str, now_s: float) -> None:
        """A frame of a batch was executed."""
        if _has_succeeded(outcome):
            self.succeeded(now_s)
        elif _is_of_model(outcome.failures):  # else its bodies were refused
            self._failed(batch_id, now_s)

    def observe_failure(self, failure: Failure, batch_id: str, now_s: float) -> None:
        """A request of a stepping model has failed."""
        if _is_of_model({0: failure}):
            self._failed(batch_id, now_s)

    def succeeded(self, now_s: float) -> None:
        """Something was executed without an error."""
        self._has_succeeded = True
        self._forget_failures()
        self.last_success.at_s = now_s

    def _forget_failures(self) -> None:
        self._batches = 0
        self._is_suspected, self.tried = False, None

    def _failed(self, batch_id: str, now_s: float) -> None:
        """The model raised on all requests of a frame of this batch."""
        if not self._batches:
            self._since_s, self._last_batch = now_s, ""
        if batch_id != self._last_batch:
            self._batches += 1
            self._last_batch = batch_id
        self._is_suspected = self._is_suspect(now_s)

    def _is_suspect(self, now_s: float) -> bool:
        if self._batches < BATCHES_MIN or now_s - self._since_s < FAILING_S_MIN:
            return False
        if not (self._has_succeeded or self.last_success.at_s > self._since_s):
            return False
        return now_s - self._retired_at_s >= self._pause_s

    # --- the example ---------------------------------------------------------------------------------------

    @property
    def due_example(self) -> Example | None:
        """What the process is to execute now, to show whether it works at all; None if there is no reason."""
        return self.last_success.example if self._is_suspected and self.tried is None else None

    def example_sent(self, example: Example) -> None:
        """The process has the example."""
        self.tried = example

    def observe_example(self, failures: Mapping[int, Failure], now_s: float) -> bool:
        """The process executed the example. Whether to retire it now.

        If the example was refused, nothing is known, and other failures have to follow first.
        """
        if self.tried is None:  # something has succeeded meanwhile
            return False
        if _is_of_model(failures):
            return True
        if not failures:
            self.succeeded(now_s)
        self._forget_failures()
        return False

    def retired(self, now_s: float) -> None:
        """The process was retired."""
        is_repeated = now_s - self._retired_at_s < 2 * self._pause_s
        self._pause_s = min(2 * self._pause_s, PAUSE_S_MAX) if is_repeated else PAUSE_S_MIN
        self._retired_at_s = now_s


def _has_succeeded(outcome: OutcomeHeader) -> bool:
    """Whether anything in this frame was executed without an error of the model."""
    return outcome.executed_together > 0 or len(outcome.failures) < outcome.size


def _is_of_model(failures: Mapping[int, Failure]) -> bool:
    return any(status == INTERNAL for status, _ in failures.values())
