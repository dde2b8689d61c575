"""From a batch to the requests that a `TritonPythonModel` gets, and from its responses to results."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from carpool.errors import (
    AbortedError,
    CancelledRequestError,
    CarpoolError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
    UnimplementedError,
)
from carpool.wire.tensors import Array
from carpool_worker.model_process.loaded import RequestInfo
from carpool_worker.models.triton.backend_utils import (
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_END,
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_START,
    Given,
    InferenceRequest,
    InferenceResponse,
    InferenceResponseSender,
    ReceivedRequest,
    Tensor,
    TritonError,
)
from carpool_worker.triton.scheduling import Control
from carpool_worker.triton.tensors import Tensors

Row = Array | dict[str, Array]
Result = Row | CarpoolError

_ERRORS: Final[Mapping[int, type[CarpoolError]]] = {
    TritonError.NOT_FOUND: NotFoundError,
    TritonError.INVALID_ARG: InvalidArgumentError,
    TritonError.UNAVAILABLE: UnavailableError,
    TritonError.UNSUPPORTED: UnimplementedError,
    TritonError.ALREADY_EXISTS: AbortedError,
    TritonError.CANCELLED: CancelledRequestError,
}
_DTYPES: Final = {
    "UINT64": np.uint64,
    "INT64": np.int64,
    "UINT32": np.uint32,
    "INT32": np.int32,
    "FP32": np.float32,
    "BOOL": np.bool_,
    "BYTES": np.object_,
}


class Exchange:
    """What is alike for all requests of a model: its tensors, and the inputs that say where in its sequence a
    request is."""

    def __init__(self, tensors: Tensors, controls: Sequence[Control] = ()) -> None:
        self._inputs, self._outputs, self._has_batch = tensors.inputs, tensors.outputs, tensors.has_batch
        self._names = [tensor.name for tensor in tensors.outputs]
        self._controls = controls

    def requests(
        self, batch: Array | Mapping[str, Array], infos: Sequence[RequestInfo], changed: threading.Condition
    ) -> list[InferenceRequest]:
        """A request for each row. `batch`: the rows of the only input, or of all by name. `changed`: is told
        of responses."""
        arrays = batch if isinstance(batch, Mapping) else {self._inputs[0].name: batch}
        by_model = [(one.name, one.to_model(arrays[one.name])) for one in self._inputs if one.name in arrays]
        requests = []
        for row, info in enumerate(infos):
            inputs = [
                Tensor(name, array[row : row + 1] if self._has_batch else array[row])
                for name, array in by_model
            ]
            requests.append(self._request(inputs, info, changed))
        return requests

    def _request(
        self, inputs: list[Tensor], info: RequestInfo, changed: threading.Condition
    ) -> InferenceRequest:
        shape = (1, 1) if self._has_batch else (1,)
        inputs += [Tensor(one.name, _control_value(one, info).reshape(shape)) for one in self._controls]
        flags = TRITONSERVER_REQUEST_FLAG_SEQUENCE_START * info.sequence_start
        flags |= TRITONSERVER_REQUEST_FLAG_SEQUENCE_END * info.sequence_end
        left_s = info.time_left_s
        return ReceivedRequest(
            Given(
                request_id=info.correlation_id,
                correlation_id=_sequence_id(info),
                inputs=inputs,
                requested_output_names=self._names,
                flags=flags,
                timeout_us=0 if left_s is None else max(1, int(left_s * 1e6)),
                parameters={name: value.decode("utf-8", "replace") for name, value in info.fields.items()},
                changed=changed,
            )
        )

    def result(self, response: InferenceResponse) -> Result:
        """The result of a response: its only output, or all by name; an error for one that has one, or not
        all outputs."""
        error = response.error()
        if error is not None:
            return _ERRORS.get(error.code(), InternalError)(
                error.message() or "the model failed without a message"
            )
        found = {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
        if found.keys() != set(self._names):
            return InternalError(
                f"the model's response has the outputs {', '.join(found) or 'none'}, and the configuration "
                f"{', '.join(self._names)}"
            )
        rows: dict[str, Array] = {}
        for one in self._outputs:
            array = found[one.name]
            if self._has_batch and array.shape[:1] != (1,):
                return InternalError(
                    f"output {one.name!r} has the shape {list(array.shape)}, and must begin with 1, the batch"
                )
            try:
                rows[one.name] = one.from_model(array if self._has_batch else array[np.newaxis])[0, ...]
            except ValueError:
                return InternalError(
                    f"output {one.name!r} has the shape {list(array.shape)}, and the configuration "
                    f"{list(one.model_shape)}"
                )
        return rows if len(rows) > 1 else next(iter(rows.values()))

    def results(
        self, requests: Sequence[InferenceRequest], returned: Any, changed: threading.Condition
    ) -> list[Result]:
        """The results of a call of `execute`. Raises InternalError if there is not one response for each."""
        if returned is None:
            returned = [_awaited(request.sender, changed) for request in requests]
        if not isinstance(returned, list | tuple) or len(returned) != len(requests):
            count = len(returned) if isinstance(returned, list | tuple) else f"a {type(returned).__name__}"
            raise InternalError(f"the model returned {count}, and must return {len(requests)} responses")
        wrong = [type(one).__name__ for one in returned if not isinstance(one, InferenceResponse)]
        if wrong:
            raise InternalError(f"the model returned a {wrong[0]} in place of an InferenceResponse")
        return [self.result(response) for response in returned]


def together(results: Sequence[Result]) -> Any:
    """Results as `predict` returns them: stacked where that is possible, else a list."""
    first = results[0]
    if isinstance(first, np.ndarray):
        return _stacked(results) if all(isinstance(one, np.ndarray) for one in results) else list(results)
    if not all(isinstance(one, dict) for one in results):
        return list(results)
    assert isinstance(first, dict)
    columns = {name: _stacked([one[name] for one in results if isinstance(one, dict)]) for name in first}
    is_stacked = all(isinstance(column, np.ndarray) for column in columns.values())
    return columns if is_stacked else list(results)


def _stacked(arrays: Sequence[Any]) -> Any:
    """Arrays of one shape and dtype as one, with a row for each; others as a list."""
    first = arrays[0]
    is_alike = all(one.shape == first.shape and one.dtype == first.dtype for one in arrays)
    return np.stack(arrays) if is_alike else list(arrays)


def _awaited(sender: InferenceResponseSender | None, changed: threading.Condition) -> InferenceResponse:
    """The one response that was sent, or is sent by another thread. Raises InternalError."""
    if sender is None:
        raise InternalError(
            "the model returned nothing, and did not ask for a response sender of each request"
        )
    with changed:
        changed.wait_for(lambda: sender.is_final)
    responses, _ = sender.take()
    if len(responses) != 1:
        raise InternalError(
            f"the model sent {len(responses)} responses to a request, and must send one; others need "
            "model_transaction_policy { decoupled: true }"
        )
    return responses[0]


def _sequence_id(info: RequestInfo) -> int | str:
    if info.sequence_id is None:
        return 0
    return int(info.sequence_id) if info.sequence_id.isdecimal() else info.sequence_id


def _control_value(control: Control, info: RequestInfo) -> Array:
    dtype = _DTYPES[control.datatype]
    if control.kind != "CORRID":
        false, true = control.values or (0, 1)
        is_true = {"START": info.sequence_start, "END": info.sequence_end, "READY": True}[control.kind]
        return np.array([true if is_true else false], dtype)
    return id_value(control, info.sequence_id or "")


def id_value(control: Control, sequence_id: str) -> Array:
    """The ID of a sequence for a control input. Raises InvalidArgumentError for one that it cannot hold."""
    dtype = _DTYPES[control.datatype]
    if control.datatype == "BYTES":
        return np.array([sequence_id.encode()], object)
    if not sequence_id.isdecimal() or int(sequence_id) > np.iinfo(dtype).max:
        raise InvalidArgumentError(
            f"sequence_id: {sequence_id!r:.60} must be a number that {control.datatype} holds, for the "
            f"input {control.name}"
        )
    return np.array([int(sequence_id)], dtype)
