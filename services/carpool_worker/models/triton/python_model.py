"""A `TritonPythonModel` as a model of Carpool's: a call of `execute` for each batch."""

from __future__ import annotations

import asyncio
import inspect
import json
import keyword
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from carpool.errors import Unhealthy
from carpool.plugins import UnusableError
from carpool.text_files import read_text
from carpool_worker.model_process.loaded import BoundSequence, RequestInfo
from carpool_worker.models.triton.backend_utils import CALLER, InferenceRequest
from carpool_worker.models.triton.calls import CalledModels, Caller
from carpool_worker.models.triton.requests import Exchange, Result, id_value, together
from carpool_worker.models.triton.warmup import warm_up
from carpool_worker.triton.config import Config
from carpool_worker.triton.translation import Translated


class Described(NamedTuple):
    """A class of a user, and what is known of it. `entry`: the folder of its configuration."""

    python_class: Any
    config: Config
    translated: Translated
    entry: Path
    name: str
    version: str


class PythonModel:
    """What all of these models have. `settings` are attributes, as of any model.

    `load` takes the parameters of the configuration, whose values are texts, and calls `initialize`.
    """

    def __init__(self, described: Described) -> None:
        self.__name__ = described.name  # for errors
        self._described = described
        self._model: Any = None
        self._changed = threading.Condition()  # is told of responses that are sent
        translated = described.translated
        controls = translated.sequences.controls if translated.sequences is not None else ()
        self._exchange = Exchange(translated.tensors, controls)
        self.inputs = [one.spec() for one in translated.tensors.inputs]
        self.outputs = [one.spec(self._labels(one.label_file)) for one in translated.tensors.outputs]
        for name, value in translated.settings.items():
            setattr(self, name, value)
        self.load = _with_parameters(self._load, described.config["parameters"])

    def _labels(self, file: str) -> list[str]:
        return read_text(self._described.entry / file).splitlines() if file else []

    def _load(self, device: str, parameters: Mapping[str, str]) -> None:
        """Make the object, and call its `initialize`."""
        described = self._described
        config = {**described.config, "parameters": {**described.config["parameters"]}}
        config["parameters"] |= {name: {"string_value": value} for name, value in parameters.items()}
        self._model = described.python_class()
        initialize = getattr(self._model, "initialize", None)
        if initialize is not None:
            initialize(_arguments(described, config, device))

    def unload(self) -> None:
        """Call `finalize`, if the model has it."""
        finalize = getattr(self._model, "finalize", None)
        if finalize is not None:
            finalize()


class PlainModel(PythonModel):
    """One that has no sequences: each batch is a call of `execute`. An async one executes several at
    a time."""

    def __init__(self, described: Described) -> None:
        super().__init__(described)
        is_async = inspect.iscoroutinefunction(getattr(described.python_class, "execute", None))
        self.predict: Callable[..., Any] = self._predict_async if is_async else self._predict

    def _load(self, device: str, parameters: Mapping[str, str]) -> None:
        super()._load(device, parameters)
        samples = self._described.config["model_warmup"]
        if samples:
            warm_up(samples, self._described.entry, self._described.translated.tensors, self.predict)

    def _predict(self, batch: Any, requests: Sequence[RequestInfo]) -> Any:
        given = self._exchange.requests(batch, requests, self._changed)
        return together(self._exchange.results(given, self._model.execute(given), self._changed))

    async def _predict_async(self, batch: Any, requests: Sequence[RequestInfo]) -> Any:
        given = self._exchange.requests(batch, requests, self._changed)
        return together(self._exchange.results(given, await self._model.execute(given), self._changed))


class CallingModel(PythonModel):
    """One that calls other models: `execute` gets one request at a time, on whose behalf it calls. An async
    one gets all of a batch side by side."""

    def __init__(self, described: Described) -> None:
        super().__init__(described)
        is_async = inspect.iscoroutinefunction(getattr(described.python_class, "execute", None))
        self._called = CalledModels(described.entry.parent)
        self.predict: Callable[..., Any] = self._predict_async if is_async else self._predict

    def _load(self, device: str, parameters: Mapping[str, str]) -> None:
        if self._described.config["model_warmup"]:
            raise UnusableError("model_warmup: has no counterpart in a model that calls others; remove it")
        super()._load(device, parameters)

    def _predict(self, batch: Any, requests: Sequence[RequestInfo], clients: Sequence[Any]) -> Sequence[Any]:
        given = self._exchange.requests(batch, requests, self._changed)
        results: list[Any] = []
        for request, client in zip(given, clients, strict=True):
            token = CALLER.set(Caller(client, self._called))
            try:
                results += self._exchange.results([request], self._model.execute([request]), self._changed)
            except Unhealthy:
                raise
            except Exception as error:  # it is its own: the others are not called again
                results.append(error)
            finally:
                CALLER.reset(token)
        return results

    async def _predict_async(
        self, batch: Any, requests: Sequence[RequestInfo], clients: Sequence[Any]
    ) -> Sequence[Any]:
        given = self._exchange.requests(batch, requests, self._changed)
        found = await asyncio.gather(*map(self._execute_one, given, clients), return_exceptions=True)
        for one in found:
            if isinstance(one, Unhealthy):
                raise one
        return found

    async def _execute_one(self, request: InferenceRequest, client: Any) -> Result:
        CALLER.set(Caller(client, self._called))  # of this task alone
        (result,) = self._exchange.results([request], await self._model.execute([request]), self._changed)
        return result


class BoundModel(PythonModel):
    """One that keeps the states of its sequences: all requests of a sequence reach the same object.

    `execute` gets the requests that there are, and none for other sequences.
    """

    binds_sequences = True

    def start(self, sequence: BoundSequence) -> None:
        """Raises InvalidArgumentError for an ID that the model's input cannot hold."""
        sequences = self._described.translated.sequences
        for control in sequences.controls if sequences is not None else ():
            if control.kind == "CORRID":
                id_value(control, sequence.sequence_id)

    def predict(self, batch: Any, requests: Sequence[RequestInfo | None]) -> list[Any]:
        """A row for each slot; those that are not ready have any result, which is ignored."""
        ready = [slot for slot, request in enumerate(requests) if request is not None]
        found: dict[int, Result] = {}
        for begin in range(0, len(ready), self._described.translated.rows):
            slots = ready[begin : begin + self._described.translated.rows]
            infos = [info for slot in slots if (info := requests[slot]) is not None]
            given = self._exchange.requests(_rows(batch, slots), infos, self._changed)
            results = self._exchange.results(given, self._model.execute(given), self._changed)
            found |= zip(slots, results, strict=True)
        ignored = next(iter(found.values()))
        return [found.get(slot, ignored) for slot in range(len(requests))]


def _rows(batch: Any, slots: Sequence[int]) -> Any:
    if isinstance(batch, Mapping):
        return {name: array[list(slots)] for name, array in batch.items()}
    return batch[list(slots)]


def _arguments(described: Described, config: Config, device: str) -> dict[str, str]:
    """What `initialize` gets: all texts."""
    kind, _, number = device.partition(":")
    is_of_model = any(group["kind"] == "KIND_MODEL" for group in config["instance_group"])
    return {
        "model_config": json.dumps(config),
        "model_instance_kind": "MODEL" if is_of_model else "GPU" if kind == "cuda" else "CPU",
        "model_instance_device_id": number or "0",
        "model_instance_name": f"{described.name}_0",
        "model_repository": str(described.entry),
        "model_version": described.version,
        "model_name": described.name,
    }


def _with_parameters(load: Callable[[str, Mapping[str, str]], None], parameters: Mapping[str, Any]) -> Any:
    """A `load` whose signature declares these parameters, so that they can be given, and are shown."""

    def call(device: str, **given: str) -> None:
        load(device, given)

    keywords = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value["string_value"], annotation=str)
        for name, value in parameters.items()
        if name.isidentifier() and not keyword.iskeyword(name) and name != "device"
    ]
    device = inspect.Parameter("device", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=str)
    call.__signature__ = inspect.Signature([device, *keywords])  # type: ignore[attr-defined]
    return call
