"""A client of gRPC for tests, over a real channel.

with Rpc(gateway) as rpc:
    response = rpc.infer("Noop", ("numbers", array))
    assert np.array_equal(response["numbers"], array)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Final, Self

import grpc
import numpy as np

from carpool.wire.tensors import from_bytes, to_bytes
from carpool_gateway.oip.elements import from_binary, to_binary
from carpool_gateway.rpc.messages import HEALTH, INFERENCE
from support.stack import Service
from support.waiting import EVENTUALLY_S

Array = np.ndarray[Any, Any]
Metadata = Sequence[tuple[str, str]]
_DATATYPES: Final = {"f4": "FP32", "f8": "FP64", "f2": "FP16", "b1": "BOOL"}


def datatype_of(array: Array) -> str:
    kind, bits = array.dtype.kind, array.dtype.itemsize * 8
    return _DATATYPES.get(array.dtype.str[1:]) or f"{'INT' if kind == 'i' else 'UINT'}{bits}"


def tensor(name: str, elements: Array | list[list[bytes]]) -> tuple[str, str, list[int], bytes]:
    """An input: its name, datatype, shape and raw data. Elements of BYTES are in lists."""
    if isinstance(elements, list):
        flat = [element for row in elements for element in row]
        return name, "BYTES", [len(elements), len(elements[0])], bytes(to_binary(flat))
    datatype = datatype_of(elements)
    return name, datatype, list(elements.shape), bytes(to_bytes(elements, datatype))


def infer_request(
    model: str,
    *inputs: tuple[str, Array | list[list[bytes]]],
    parameters: dict[str, Any] | None = None,
    **fields: Any,
) -> Any:
    """A ModelInferRequest."""
    request = INFERENCE["ModelInferRequest"](model_name=model, **fields)
    for name, elements in inputs:
        _, datatype, shape, data = tensor(name, elements)
        request.inputs.add(name=name, datatype=datatype, shape=shape)
        request.raw_input_contents.append(data)
    for name, value in (parameters or {}).items():
        kind = {bool: "bool", int: "int64", str: "string", float: "double"}[type(value)]
        setattr(request.parameters[name], f"{kind}_param", value)
    return request


def outputs_of(response: Any) -> dict[str, Any]:
    """The outputs of a ModelInferResponse: arrays, and lists of bytes."""
    found: dict[str, Any] = {}
    for output, data in zip(response.outputs, response.raw_output_contents, strict=True):
        shape = tuple(output.shape)
        if output.datatype == "BYTES":
            found[output.name] = from_binary(memoryview(data), "BYTES", int(np.prod(shape)), output.name)
        else:
            found[output.name] = from_bytes(output.datatype, shape, data)
    return found


class Rpc:
    """A channel to a gateway."""

    def __init__(self, gateway: Service | str, **options: Any) -> None:
        address = gateway if isinstance(gateway, str) else gateway.wait_for("gateway started")["grpc"]
        self.channel = grpc.insecure_channel(
            address, options=[("grpc.max_receive_message_length", -1), *options.items()]
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.channel.close()

    def method(self, name: str, definitions: Any = INFERENCE) -> Any:
        """A method of a service that takes and returns one message."""
        described = {one.name: one for one in definitions.file.service[0].method}[name]
        return self.channel.unary_unary(
            f"/{definitions.service}/{name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=definitions[described.output_type.rpartition(".")[2]].FromString,
        )

    def call(
        self, method: str, /, *, metadata: Metadata = (), timeout: float = EVENTUALLY_S, **fields: Any
    ) -> Any:
        """Call a method with the fields of its message; returns the answer. Raises grpc.RpcError."""
        described = {one.name: one for one in INFERENCE.file.service[0].method}[method]
        request = INFERENCE[described.input_type.rpartition(".")[2]](**fields)
        return self.method(method)(request, timeout=timeout, metadata=metadata)

    def infer(
        self,
        model: str,
        *inputs: tuple[str, Array | list[list[bytes]]],
        metadata: Metadata = (),
        timeout: float | None = EVENTUALLY_S,
        **more: Any,
    ) -> dict[str, Any]:
        """The outputs of a request. Raises grpc.RpcError."""
        request = infer_request(model, *inputs, **more)
        return outputs_of(self.method("ModelInfer")(request, timeout=timeout, metadata=metadata))

    def check(self, service: str = "") -> str:
        """The standard health of a service."""
        answer = self.method("Check", HEALTH)(
            HEALTH["HealthCheckRequest"](service=service), timeout=EVENTUALLY_S
        )
        return str(type(answer).ServingStatus.Name(answer.status))

    def stream(self, requests: Iterable[Any], metadata: Metadata = (), timeout: float = EVENTUALLY_S) -> Any:
        """The responses on a stream, as an iterator that can be cancelled."""
        return self.channel.stream_stream(
            f"/{INFERENCE.service}/ModelStreamInfer",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=INFERENCE["ModelStreamInferResponse"].FromString,
        )(iter(requests), timeout=timeout, metadata=metadata)


def ids_and_errors(responses: Iterator[Any]) -> list[tuple[str, str]]:
    return [(response.infer_response.id, response.error_message) for response in responses]
