"""Calls of other models from within `execute`: `InferenceRequest(...).exec()`, on behalf of one request.

A call's tensors have the batch first if the called model has it, which its configuration says, in the same
repository. Each row is a request of its own, as everywhere here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from carpool.errors import (
    ABORTED,
    CANCELLED,
    INVALID_ARGUMENT,
    NOT_FOUND,
    UNAVAILABLE,
    UNIMPLEMENTED,
    CarpoolError,
    InternalError,
    InvalidArgumentError,
)
from carpool.text_files import read_text
from carpool.wire.tensors import Array
from carpool_worker.models.triton.backend_utils import (
    InferenceRequest,
    InferenceResponse,
    Tensor,
    TritonError,
)
from carpool_worker.triton.config import read_config
from carpool_worker.triton.tensors import tensors_of

_CODES: Final = {
    INVALID_ARGUMENT: TritonError.INVALID_ARG,
    NOT_FOUND: TritonError.NOT_FOUND,
    UNAVAILABLE: TritonError.UNAVAILABLE,
    UNIMPLEMENTED: TritonError.UNSUPPORTED,
    ABORTED: TritonError.ALREADY_EXISTS,
    CANCELLED: TritonError.CANCELLED,
}


class Called(NamedTuple):
    """A model that is called. `inputs`: how many it has, 0 if that is not known; `outputs`: their names."""

    has_batch: bool
    inputs: int = 0
    outputs: tuple[str, ...] = ()


class CalledModels:
    """What configurations say of the models that are called, each read once."""

    def __init__(self, repository: Path) -> None:
        self._repository = repository
        self._known: dict[str, Called] = {}

    def get(self, name: str) -> Called:
        """One without a configuration has the batch first. Raises InternalError for a configuration that
        does not tell."""
        if name not in self._known:
            self._known[name] = self._read(name)
        return self._known[name]

    def _read(self, name: str) -> Called:
        file = self._repository / name / "config.pbtxt"
        if "/" in name or not file.is_file():
            return Called(has_batch=True)
        try:
            config = read_config(read_text(file), str(file))
        except (OSError, ValueError) as error:
            raise InternalError(f"{name} cannot be called: {error}") from None
        problems: list[str] = []
        tensors = tensors_of(config, problems)
        if not tensors.has_batch and not tensors.inputs:
            raise InternalError(f"{name} cannot be called: {file}: input: is missing; declare all of them")
        return Called(tensors.has_batch, len(tensors.inputs), tuple(one.name for one in tensors.outputs))


class Caller:
    """Calls models on behalf of one request. `client`: that of the request, as in `clients`."""

    def __init__(self, client: Any, models: CalledModels) -> None:
        self._client = client
        self._models = models

    def call(self, request: InferenceRequest) -> InferenceResponse:
        """The response of the model, an error included."""
        try:
            called, bodies = self._asked(request)
            results = self._client.infer_many(request.model_name(), bodies, **_options(request))
            return _response(request, called, results)
        except CarpoolError as error:
            return _failed(error)

    async def call_async(self, request: InferenceRequest) -> InferenceResponse:
        """The same, for an async `execute`."""
        try:
            called, bodies = self._asked(request)
            results = await self._client.infer_many(request.model_name(), bodies, **_options(request))
            return _response(request, called, results)
        except CarpoolError as error:
            return _failed(error)

    def _asked(self, request: InferenceRequest) -> tuple[Called, list[Any]]:
        """The called model, and a body for each row. Raises CarpoolErrors."""
        called = self._models.get(request.model_name())
        arrays = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        if not called.has_batch:
            rows = [arrays]
        else:
            counts = {len(array) if array.ndim else 0 for array in arrays.values()}
            if len(counts) != 1 or counts == {0}:
                raise InvalidArgumentError(
                    f"inputs of {request.model_name()}: their shapes must begin with the batch, of one size"
                )
            rows = [{name: array[row] for name, array in arrays.items()} for row in range(counts.pop())]
        if max(called.inputs, len(arrays)) == 1:
            return called, [next(iter(row.values())) for row in rows]
        return called, rows


def _options(request: InferenceRequest) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if request.timeout():
        options["timeout"] = request.timeout() / 1e6
    if request.given_parameters:
        options["fields"] = {name: str(value) for name, value in request.given_parameters.items()}
    return options


def _response(request: InferenceRequest, called: Called, results: Sequence[Any]) -> InferenceResponse:
    """The outputs that were asked for. Raises InternalError if the model has others."""
    wanted = request.requested_output_names()
    names = called.outputs or (tuple(results[0]) if isinstance(results[0], dict) else tuple(wanted[:1]))
    missing = [name for name in wanted if name not in names]
    if missing:
        raise InternalError(f"{request.model_name()} has no output {missing[0]!r}; it has {', '.join(names)}")
    tensors = []
    for name in wanted:
        rows = [result[name] if isinstance(result, dict) else result for result in results]
        array = _array(rows)
        tensors.append(Tensor(name, array if called.has_batch else array[0, ...]))
    return InferenceResponse(tensors)


def _array(rows: Sequence[Any]) -> Array:
    """Values of results, a row for each. Texts are bytes objects, as in any tensor of Triton's."""
    if all(isinstance(row, np.ndarray) and row.dtype.kind not in "OUS" for row in rows):
        return np.stack(rows)
    lists = [row.tolist() if isinstance(row, np.ndarray) else row for row in rows]
    array = np.array(lists, object)
    flat = [one.encode() if isinstance(one, str) else one for one in array.ravel().tolist()]
    if all(isinstance(one, bytes) for one in flat):
        encoded = np.empty(len(flat), object)
        encoded[:] = flat
        return encoded.reshape(array.shape)
    return np.array(lists)


def _failed(error: CarpoolError) -> InferenceResponse:
    code = _CODES.get(error.status, TritonError.INTERNAL)
    return InferenceResponse(error=TritonError(error.detail, code))
