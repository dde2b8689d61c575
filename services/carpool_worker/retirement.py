"""When a model process is retired: replaced although it lives, because all that it executes fails. Time is an
argument.

A process whose accelerator or library is broken raises on every request. As it fails fast, it takes more
batches than others. Not all such errors are known by their texts (`model_process.broken_devices`), so what
counts is that nothing succeeds. That alone may have other causes:

- The bodies are bad. So the failures must be of several batches, of some time, and of more than one producer.
- The model is broken, as every other process of it will be. So this process must have succeeded before, or
  another one of this worker meanwhile. One that replaces it has not: it is not retired in its turn.
- The model depends on something that comes and goes. So the pause between two retirements doubles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from carpool.errors import INTERNAL
from carpool.messages import BatchedRun, Producer
from carpool_worker.execution import Execution, Frame
from carpool_worker.model_process.frames import Failure, OutcomeHeader

BATCHES_MIN: Final = 5
FAILING_S_MIN: Final = 5.0
PRODUCERS_MIN: Final = 2
PAUSE_S_MIN: Final = 60.0
PAUSE_S_MAX: Final = 3600.0


class LastSuccess:
    """When any process of a worker last executed something without an error; for all of its threads."""

    def __init__(self) -> None:
        self.at_s = float("-inf")


class Retirement:
    """Follows what one model process executes. `of_worker` is shared by the processes of a worker."""

    def __init__(self) -> None:
        self.of_worker = LastSuccess()
        self._has_succeeded = False  # this process, since it was started
        self._batches = 0  # that failed since the last success
        self._last_batch = ""  # of them
        self._producers: set[Producer] = set()
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
        self._batches = 0

    def observe_outcome(
        self, outcome: OutcomeHeader, execution: Execution, frame: Frame, now_s: float
    ) -> bool:
        """A frame was executed. Whether to retire the process now."""
        if outcome.executed or len(outcome.failures) < outcome.size:
            self.succeeded(now_s)
            return False
        if not any(map(_is_of_model, outcome.failures.values())):  # its bodies were refused
            return False
        runs = [execution.locate(position)[0] for position in frame.positions]
        return self._failed(execution.batch.id, runs, now_s)

    def observe_failure(self, failure: Failure, execution: Execution, now_s: float) -> bool:
        """A request of a stepping model has failed. Whether to retire the process now."""
        batch = execution.batch
        return _is_of_model(failure) and self._failed(batch.id, batch.runs, now_s)

    def succeeded(self, now_s: float) -> None:
        """Something was executed without an error."""
        self._has_succeeded = True
        self._batches = 0
        self.of_worker.at_s = now_s

    def _failed(self, batch_id: str, runs: Sequence[BatchedRun], now_s: float) -> bool:
        """The model raised on all requests of these runs. Whether to retire the process now."""
        if not self._batches:
            self._since_s, self._last_batch = now_s, ""
            self._producers.clear()
        if batch_id != self._last_batch:
            self._batches += 1
            self._last_batch = batch_id
        if len(self._producers) < PRODUCERS_MIN:
            self._producers.update([run.producer for run in runs])
        return self._is_due(now_s)

    def _is_due(self, now_s: float) -> bool:
        if self._batches < BATCHES_MIN or now_s - self._since_s < FAILING_S_MIN:
            return False
        if len(self._producers) < PRODUCERS_MIN:
            return False
        if not (self._has_succeeded or self.of_worker.at_s > self._since_s):
            return False
        return now_s - self._retired_at_s >= self._pause_s

    def retired(self, now_s: float) -> None:
        """The process was retired."""
        is_repeated = now_s - self._retired_at_s < 2 * self._pause_s
        self._pause_s = min(2 * self._pause_s, PAUSE_S_MAX) if is_repeated else PAUSE_S_MIN
        self._retired_at_s = now_s


def _is_of_model(failure: Failure) -> bool:
    status, _ = failure
    return status == INTERNAL
