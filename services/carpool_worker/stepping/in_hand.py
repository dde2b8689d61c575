"""The requests of a stepping model in the hands of a replica, and the settings for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import count

from carpool.keys import entry_of_batch
from carpool.messages.batches import Batch
from carpool.model_settings import ModelKind, ModelSettings
from carpool_worker.execution import Execution
from carpool_worker.stepping.execution import StepExecution


class InHand:
    """Requests in the order in which they came, each with a key that no other one has had."""

    def __init__(self, settings: ModelSettings, *, has_tensors: bool) -> None:
        """`has_tensors`: the model declares tensors."""
        self.settings = settings
        self._has_tensors = has_tensors
        self._requests: dict[int, StepExecution] = {}  # by key
        self._keys = count()
        self._settings_text = settings.for_workers(ModelKind.STEPPING)
        self._settings_of = (0, 0)  # ID of the batch that had these

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[StepExecution]:
        """Those that are in hand now, whatever is removed meanwhile."""
        return iter([*self._requests.values()])

    @property
    def batches(self) -> list[tuple[str, int]]:
        """ID and epoch of the batch of each of them. Other threads may ask for this at any time."""
        return [(one.execution.batch.id, one.execution.batch.epoch) for one in self]

    def get(self, key: int) -> StepExecution | None:
        """The request that has this key; None if it is not in hand any more."""
        return self._requests.get(key)

    def has(self, request: StepExecution) -> bool:
        """Whether it is in hand."""
        return self._requests.get(request.key) is request

    @property
    def begun(self) -> list[StepExecution]:
        """Those that the model process has."""
        return [request for request in self if request.is_sent and not request.has_ended]

    def new_key(self) -> int:
        """A key for something else that the model process is to generate."""
        return next(self._keys)

    def add(self, execution: Execution, now_s: float) -> StepExecution:
        """Take a batch, which is one request, and the settings that it has with it."""
        self._use_settings(execution.batch)
        bytes_max = self.settings.max_result_bytes
        request = StepExecution(execution, self.new_key(), now_s, bytes_max, has_tensors=self._has_tensors)
        self._requests[request.key] = request
        return request

    def begin_again(self, request: StepExecution, chunks: Sequence[bytes]) -> None:
        """Another process is to go on from these chunks: it knows the request by another key."""
        del self._requests[request.key]
        request.begin_again(self.new_key(), chunks)
        self._requests[request.key] = request

    def remove(self, requests: Iterable[StepExecution]) -> None:
        """These have ended, or another worker has them."""
        for request in requests:
            self._requests.pop(request.key, None)

    def _use_settings(self, batch: Batch) -> None:
        """The batch that was dispatched last says which settings are in effect: not one that is reclaimed
        later. One of a model that does not step has none."""
        milliseconds, _, number = entry_of_batch(batch.id).partition("-")
        dispatched = int(milliseconds), int(number)
        if not batch.settings or dispatched < self._settings_of:
            return
        self._settings_of = dispatched
        if batch.settings != self._settings_text:
            self._settings_text = batch.settings
            self.settings = self.settings.with_those_for_steps(batch.settings)
            for request in self:
                request.result_bytes_max = self.settings.max_result_bytes
