"""What a Python model of Triton's imports as `triton_python_backend_utils`, with the names that it expects.

It is in `sys.modules` under that name in the process of such a model, and is nowhere installed. What is not
here raises an AttributeError that says what to do.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Awaitable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Final, NamedTuple, NoReturn, Protocol

import numpy as np

from carpool.wire.tensors import Array
from carpool_worker.triton.config import Config

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START: Final = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END: Final = 2
TRITONSERVER_RESPONSE_COMPLETE_FINAL: Final = 1

_NUMBERS: Final = {
    "TYPE_BOOL": 1,
    "TYPE_UINT8": 2,
    "TYPE_UINT16": 3,
    "TYPE_UINT32": 4,
    "TYPE_UINT64": 5,
    "TYPE_INT8": 6,
    "TYPE_INT16": 7,
    "TYPE_INT32": 8,
    "TYPE_INT64": 9,
    "TYPE_FP16": 10,
    "TYPE_FP32": 11,
    "TYPE_FP64": 12,
    "TYPE_STRING": 13,
}
_DTYPES: Final[dict[str, Any]] = {
    "TYPE_BOOL": np.bool_,
    "TYPE_UINT8": np.uint8,
    "TYPE_UINT16": np.uint16,
    "TYPE_UINT32": np.uint32,
    "TYPE_UINT64": np.uint64,
    "TYPE_INT8": np.int8,
    "TYPE_INT16": np.int16,
    "TYPE_INT32": np.int32,
    "TYPE_INT64": np.int64,
    "TYPE_FP16": np.float16,
    "TYPE_FP32": np.float32,
    "TYPE_FP64": np.float64,
    "TYPE_STRING": np.object_,
}
_CPU: Final = (1, 0)  # DLPack's device
# What else a request may have that calls a model, with the values that change nothing.
_IN_CALLS: Final[Mapping[str, tuple[Any, ...]]] = {
    "correlation_id": (0, ""),
    "model_version": (-1,),
    "flags": (0,),
    "preferred_memory": (None,),
    "trace": (None,),
}
_METRICS: Final = "use `from carpool import metrics`, as docs/models.md says"
_ABSENT: Final = {
    "MetricFamily": _METRICS,
    "Metric": _METRICS,
    "PreferredMemory": "tensors are in the memory of the CPU; leave it out",
    "TRITONSERVER_MEMORY_GPU": "tensors are in the memory of the CPU; leave it out",
    "TRITONSERVER_MEMORY_CPU": "tensors are in the memory of the CPU; leave it out",
    "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE": "write a decoupled model, or one that steps (docs/models.md)",
    "TRITONSERVER_REQUEST_RELEASE_ALL": "write a decoupled model, or one that steps (docs/models.md)",
    "InferenceTrace": "a request has its `traceparent` in `parameters()`",
    "load_model": "use `carpool load`",
    "unload_model": "use `carpool unload`",
    "is_model_ready": "use `carpool models`",
}
_MODULE: Final = "triton_python_backend_utils"


def __getattr__(name: str) -> NoReturn:
    if name.startswith("__"):  # Python asks for these
        raise AttributeError(name)
    remedy = _ABSENT.get(name, "docs/repository.md lists what there is")
    raise AttributeError(f"{_MODULE}.{name} has no counterpart: {remedy}")


# --- tensors ------------------------------------------------------------------------------------------------


class Tensor:
    """A tensor with a name, in the memory of the CPU. Elements of TYPE_STRING are bytes objects."""

    __slots__ = ("_array", "_name")

    def __init__(self, name: str, array: Array) -> None:
        if not isinstance(array, np.ndarray):
            raise TypeError(
                f"Tensor {name!r}: {type(array).__name__} is no array of numpy; use numpy.asarray"
            )
        self._name = name
        self._array = array

    def name(self) -> str:
        """As the configuration has it."""
        return self._name

    def as_numpy(self) -> Array:
        """The array itself."""
        return self._array

    def shape(self) -> list[int]:
        """All sizes, that of the batch included."""
        return list(self._array.shape)

    def triton_dtype(self) -> int | None:
        """The number of the datatype."""
        return numpy_to_triton_type(self._array.dtype.type)

    def is_cpu(self) -> bool:
        """Always."""
        return True

    def to_dlpack(self) -> Any:
        """A capsule for other frameworks, without a copy. Raises what numpy does, for example for texts."""
        return self.__dlpack__()

    def __dlpack__(self, *, stream: Any = None) -> Any:
        return self._array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> Tensor:
        """A tensor of another framework, without a copy: a capsule, or what has `__dlpack__`. It must be on
        the CPU: numpy raises otherwise."""
        source = tensor if hasattr(tensor, "__dlpack__") else _Capsule(tensor)
        return Tensor(name, np.from_dlpack(source))


class _Capsule:
    """A capsule of DLPack as numpy takes it."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_options: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU


# --- requests and responses ---------------------------------------------------------------------------------


class TritonModelException(Exception):  # noqa: N818 (the name that models know)
    """What a model raises for all requests of a call."""


class TritonError:
    """Why one request failed. `code`: one of the constants."""

    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self._message = message
        self._code = code

    def message(self) -> str:
        """What is told to the client."""
        return self._message

    def code(self) -> int:
        """One of the constants."""
        return self._code


class InferenceResponse:
    """A response: output tensors, or an error."""

    __slots__ = ("_error", "_tensors")

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        if parameters:
            raise TypeError("InferenceResponse: parameters have no counterpart: return them as an output")
        if error is not None and not isinstance(error, TritonError):
            raise TypeError(
                f"InferenceResponse: error is a {type(error).__name__}, and must be a TritonError"
            )
        self._tensors = list(output_tensors)
        self._error = error

    def output_tensors(self) -> list[Tensor]:
        """Those that it was made with."""
        return self._tensors

    def has_error(self) -> bool:
        """Whether its request failed."""
        return self._error is not None

    def error(self) -> TritonError | None:
        """Why its request failed."""
        return self._error

    def parameters(self) -> str:
        """JSON: there are none."""
        return "{}"


class InferenceResponseSender:
    """Takes the responses of one request, from any thread, until one is final."""

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._responses: list[InferenceResponse] = []
        self.is_final = False
        self.was_cancelled = False

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response; with TRITONSERVER_RESPONSE_COMPLETE_FINAL it is the last one, or there is none."""
        if response is not None and not isinstance(response, InferenceResponse):
            raise TypeError(f"send: {type(response).__name__} is no InferenceResponse")
        with self._changed:
            if self.is_final:
                raise TritonModelException("send: the final response was sent already")
            if response is not None:
                self._responses.append(response)
            self.is_final = bool(flags & TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            self._changed.notify_all()

    def is_cancelled(self) -> bool:
        """Whether nobody waits for its responses any more."""
        return self.was_cancelled

    def take(self) -> tuple[list[InferenceResponse], bool]:
        """The responses that were not taken yet, and whether none follows."""
        with self._changed:
            taken, self._responses = self._responses, []
            return taken, self.is_final

    @property
    def has_news(self) -> bool:
        """Whether there is anything to take."""
        return bool(self._responses) or self.is_final


class Caller(Protocol):
    """What calls other models, for a request that is executed."""

    def call(self, request: InferenceRequest) -> InferenceResponse:
        """Send it, and wait for the response."""

    async def call_async(self, request: InferenceRequest) -> InferenceResponse:
        """The same without occupying the thread."""


CALLER: Final[ContextVar[Caller]] = ContextVar("caller")  # while `execute` is called with one request


class InferenceRequest:
    """A request as a model gets it; and one that it makes, to call another model."""

    _given: Given
    sender: InferenceResponseSender | None = None

    def __init__(
        self,
        *,
        model_name: str | bytes,
        inputs: Sequence[Tensor],
        requested_output_names: Sequence[str],
        request_id: str = "",
        timeout: int = 0,
        parameters: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> None:
        for name, value in others.items():
            if name not in _IN_CALLS or value not in _IN_CALLS[name]:
                raise AttributeError(
                    f"InferenceRequest: {name} has no counterpart in a call of another model; leave it out"
                )
        self._model = model_name.decode() if isinstance(model_name, bytes) else model_name
        self._given = Given(
            request_id,
            0,
            list(inputs),
            list(requested_output_names),
            0,
            timeout,
            dict(parameters or {}),
            threading.Condition(),
        )

    def exec(self, *, decoupled: bool = False) -> InferenceResponse:
        """Call the model, and wait. Its failure is a response with an error."""
        return self._caller(decoupled=decoupled).call(self)

    def async_exec(self, *, decoupled: bool = False) -> Awaitable[InferenceResponse]:
        """The same, to be awaited in an async `execute`."""
        return self._caller(decoupled=decoupled).call_async(self)

    def _caller(self, *, decoupled: bool) -> Caller:
        if decoupled:
            raise AttributeError(
                "InferenceRequest.exec: decoupled has no counterpart: without it, all responses come as one"
            )
        try:
            return CALLER.get()
        except LookupError:
            raise AttributeError(
                "InferenceRequest.exec has no counterpart here: it is called in `execute`, in its own "
                "thread, by model.py itself, of a model that is not decoupled and has no sequences"
            ) from None

    def model_name(self) -> str:
        """The model that it calls."""
        return self._model

    def inputs(self) -> list[Tensor]:
        """All of them; an optional one that was not sent is not there."""
        return self._given.inputs

    def request_id(self) -> str:
        """Carpool's correlation ID of the request."""
        return self._given.request_id

    def correlation_id(self) -> int | str:
        """The ID of its sequence: a number, if it is written as one; 0 without a sequence."""
        return self._given.correlation_id

    def requested_output_names(self) -> list[str]:
        """All outputs of the model."""
        return self._given.requested_output_names

    def flags(self) -> int:
        """TRITONSERVER_REQUEST_FLAG_SEQUENCE_START and _END."""
        return self._given.flags

    def timeout(self) -> int:
        """Microseconds until its deadline; 0 without one."""
        return self._given.timeout_us

    def parameters(self) -> str:
        """JSON: the fields of the request that are not Carpool's, as texts."""
        return json.dumps(self._given.parameters)

    @property
    def given_parameters(self) -> Mapping[str, Any]:
        """The same, as they are."""
        return self._given.parameters

    def is_cancelled(self) -> bool:
        """Whether nobody waits for its response any more."""
        return self.sender is not None and self.sender.is_cancelled()

    def get_response_sender(self) -> InferenceResponseSender:
        """What takes its responses."""
        if self.sender is None:
            self.sender = InferenceResponseSender(self._given.changed)
        return self.sender

    def __getattr__(self, name: str) -> NoReturn:
        remedy = "docs/repository.md lists what there is"
        if name == "set_release_flags":
            remedy = _ABSENT["TRITONSERVER_REQUEST_RELEASE_ALL"]
        raise AttributeError(f"InferenceRequest.{name} has no counterpart: {remedy}")


class Given(NamedTuple):
    """What a request has: see InferenceRequest. `changed`: is told of its responses."""

    request_id: str
    correlation_id: int | str
    inputs: list[Tensor]
    requested_output_names: list[str]
    flags: int
    timeout_us: int
    parameters: Mapping[str, Any]
    changed: threading.Condition


class ReceivedRequest(InferenceRequest):
    """One that a model gets."""

    def __init__(self, given: Given) -> None:
        self._given = given


class Logger:
    """Lines for the log of the worker, with the name of the model."""

    INFO, WARNING, ERROR, VERBOSE = "info", "warning", "error", "debug"
    _LEVELS: Final = {
        INFO: logging.INFO,
        WARNING: logging.WARNING,
        ERROR: logging.ERROR,
        VERBOSE: logging.DEBUG,
    }

    @staticmethod
    def log(message: str, level: str = INFO) -> None:
        """A line at one of the four levels."""
        logging.getLogger(_MODULE).log(Logger._LEVELS[level], "%s", message)

    @staticmethod
    def log_info(message: str) -> None:
        """A line at `info`."""
        Logger.log(message, Logger.INFO)

    @staticmethod
    def log_warn(message: str) -> None:
        """A line at `warning`."""
        Logger.log(message, Logger.WARNING)

    @staticmethod
    def log_error(message: str) -> None:
        """A line at `error`."""
        Logger.log(message, Logger.ERROR)

    @staticmethod
    def log_verbose(message: str) -> None:
        """A line at `debug`."""
        Logger.log(message, Logger.VERBOSE)


# --- configurations -----------------------------------------------------------------------------------------


class ModelConfig:
    """A configuration that `auto_complete_config` completes. It may not contradict what is given already."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def as_dict(self) -> Config:
        """The configuration, as `args["model_config"]` has it."""
        return self._config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Raises ValueError if a larger one is given."""
        if self._config["max_batch_size"] > max_batch_size:
            raise ValueError(
                f"set_max_batch_size: {max_batch_size} is less than config.pbtxt has, "
                f"{self._config['max_batch_size']}"
            )
        self._config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Raises ValueError if `sequence_batching` is given."""
        if "sequence_batching" in self._config:
            raise ValueError("set_dynamic_batching: config.pbtxt has sequence_batching")
        self._config.setdefault("dynamic_batching", empty_batching())

    def add_input(self, tensor: Mapping[str, Any]) -> None:
        """`name`, `data_type`, `dims`, and `optional` if it is. Raises ValueError."""
        self._add("input", tensor, ("name", "data_type", "dims", "optional"))

    def add_output(self, tensor: Mapping[str, Any]) -> None:
        """`name`, `data_type` and `dims`. Raises ValueError."""
        self._add("output", tensor, ("name", "data_type", "dims"))

    def set_model_transaction_policy(self, policy: Mapping[str, Any]) -> None:
        """`decoupled`. Raises ValueError for another value than is given."""
        given = self._config.get("model_transaction_policy", {}).get("decoupled")
        decoupled = policy.get("decoupled", False)
        if policy.keys() - {"decoupled"} or given not in (None, decoupled):
            raise ValueError(
                f"set_model_transaction_policy: {dict(policy)} does not go with {given} in config.pbtxt; it "
                "takes 'decoupled'"
            )
        self._config["model_transaction_policy"] = {"decoupled": decoupled}

    def _add(self, kind: str, tensor: Mapping[str, Any], known: Sequence[str]) -> None:
        missing = [name for name in known[:3] if name not in tensor]
        unknown = sorted(tensor.keys() - set(known))
        if missing or unknown:
            wrong = f"lacks {', '.join(missing)}" if missing else f"has {', '.join(unknown)}"
            raise ValueError(f"add_{kind}: {dict(tensor)} {wrong}; it takes {', '.join(known)}")
        for given in self._config[kind]:
            if given["name"] == tensor["name"]:
                for name in tensor:
                    if given.get(name) not in (tensor[name], "TYPE_INVALID", []):
                        raise ValueError(
                            f"add_{kind}: {tensor['name']}: {name} {tensor[name]} is {given.get(name)} in "
                            "config.pbtxt"
                        )
                given.update(tensor)
                return
        self._config[kind].append(dict(tensor))


def empty_batching() -> dict[str, Any]:
    """`dynamic_batching {}`."""
    return {
        "preferred_batch_size": [],
        "max_queue_delay_microseconds": 0,
        "preserve_ordering": False,
        "priority_levels": 0,
        "default_priority_level": 0,
        "priority_queue_policy": {},
    }


# --- functions ----------------------------------------------------------------------------------------------


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """An input of a request; None if it has none of this name."""
    return next((tensor for tensor in inference_request.inputs() if tensor.name() == name), None)


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """An output of a response; None if it has none of this name."""
    return next((tensor for tensor in inference_response.output_tensors() if tensor.name() == name), None)


def get_input_config_by_name(model_config: Config, name: str) -> dict[str, Any] | None:
    """What a configuration says of an input; None if it has none of this name."""
    return next((one for one in model_config.get("input", ()) if one["name"] == name), None)


def get_output_config_by_name(model_config: Config, name: str) -> dict[str, Any] | None:
    """What a configuration says of an output; None if it has none of this name."""
    return next((one for one in model_config.get("output", ()) if one["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: Config) -> bool:
    """Whether a model of this configuration sends any number of responses."""
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """A dtype of numpy for the name of a datatype, such as TYPE_FP32. Raises KeyError."""
    return _DTYPES[triton_type_string]


def triton_to_numpy_type(data_type: int) -> Any:
    """A dtype of numpy for the number of a datatype; None for an unknown one."""
    return next((_DTYPES[name] for name, number in _NUMBERS.items() if number == data_type), None)


def numpy_to_triton_type(data_type: Any) -> int | None:
    """The number of a datatype for a dtype of numpy; None for an unknown one."""
    if data_type in (np.bytes_, np.str_):
        return _NUMBERS["TYPE_STRING"]
    return next((_NUMBERS[name] for name, dtype in _DTYPES.items() if dtype == data_type), None)
