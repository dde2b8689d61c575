"""What tests of the Open Inference Protocol share: models, requests as clients write them, and an echo."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgpack

from carpool.model_settings import ModelKind
from carpool.wire.bodies import decode_body, encode_result_body
from carpool.wire.registration import encode_registration
from carpool.wire.tensors import TensorSpec
from carpool_gateway.oip.models import OfferedModel
from carpool_gateway.oip.plans import Plan, plan
from carpool_gateway.oip.requests import InferRequest, decode_request
from carpool_gateway.oip.responses import Response, RowResult, encode_response, join_results


def offered(
    inputs: Sequence[TensorSpec] = (),
    outputs: Sequence[TensorSpec] = (),
    kind: ModelKind = ModelKind.PLAIN,
    **settings: str,
) -> OfferedModel:
    """A model that declares these tensors."""
    return OfferedModel.of("m", encode_registration(settings, inputs, outputs, kind))


def identity(datatype: str, shape: Sequence[int] = (-1,), name: str = "x") -> OfferedModel:
    """A model with one input and one output, which are alike."""
    spec = TensorSpec(name, datatype, tuple(shape))
    return offered([spec], [spec])


def tensor(
    data: Any, datatype: str = "FP32", shape: Sequence[int] | None = None, name: str = "x", **more: Any
) -> dict[str, Any]:
    """An input in JSON; by default one row."""
    return {"name": name, "datatype": datatype, "shape": shape or [1, len(data)], "data": data, **more}


def written(*inputs: Mapping[str, Any], **more: Any) -> bytes:
    """A request in JSON."""
    return json.dumps({"inputs": list(inputs), **more}).encode()


def with_binary(*tensors: tuple[str, str, Sequence[int], bytes], **more: Any) -> tuple[bytes, bytes]:
    """The body of a request whose inputs are binary data, and the length of its JSON as a header has it."""
    inputs = [
        {
            "name": name,
            "datatype": datatype,
            "shape": list(shape),
            "parameters": {"binary_data_size": len(data)},
        }
        for name, datatype, shape, data in tensors
    ]
    header = written(*inputs, **more)
    return header + b"".join(data for *_, data in tensors), str(len(header)).encode()


def bodies_of(planned: Plan) -> list[bytes]:
    """The bodies of a plan, one by one."""
    return [planned.bodies[at] for at in range(len(planned.bodies))]


def values_of(planned: Plan) -> list[Any]:
    """What a model that declares nothing would get."""
    return [decode_body(planned.content_type, body) for body in bodies_of(planned)]


def packed(value: Any) -> RowResult:
    """A result in msgpack."""
    return RowResult("OK", "application/msgpack", encode_result_body("application/msgpack", value))


def echo(model: OfferedModel, body: bytes, header_length: bytes | None = None) -> Response:
    """The response of a model that returns its body."""
    request = decode_request(body, header_length)
    planned = plan(model, request)
    return respond(model, request, planned, bodies_of(planned))


def respond(model: OfferedModel, request: InferRequest, planned: Plan, bodies: Sequence[bytes]) -> Response:
    """The response with these results, all OK, in the content type that was asked for."""
    results = [RowResult("OK", planned.accept or planned.content_type, body) for body in bodies]
    return encode_response(model.name, request.id, join_results(model, planned, results))


def document(response: Response) -> dict[str, Any]:
    """The JSON of a response."""
    parsed: dict[str, Any] = json.loads(bytes(response.parts[0]))
    return parsed


def binary_part(response: Response) -> bytes:
    """What follows it."""
    return b"".join(response.parts[1:])


def unpacked(body: bytes) -> Any:
    """A body in msgpack, with its tensors as maps."""
    return msgpack.unpackb(body)


def as_one(model: OfferedModel) -> bytes:
    """A request for `generate` that suits a model which declares no inputs."""
    assert not model.declares_inputs
    return b'{"body": 1}'
