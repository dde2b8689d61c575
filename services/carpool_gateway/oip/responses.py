"""The response to an infer request: JSON, followed by the binary data of those outputs that are wanted so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from carpool.parts import Buffer
from carpool_gateway.oip.elements import to_binary, to_json
from carpool_gateway.oip.models import VERSION
from carpool_gateway.oip.results import OutputTensor

JSON = "application/json"
BINARY = "application/octet-stream"


class Response(NamedTuple):
    """`header_length`: the value of the header HEADER_LENGTH; None: no byte is binary, and there is no such
    header. `parts`: the body, end to end."""

    parts: Sequence[Buffer]
    header_length: int | None

    @property
    def content_type(self) -> str:
        """JSON, or BINARY if there is binary data."""
        return JSON if self.header_length is None else BINARY


def encode_response(
    model_name: str, request_id: str, outputs: Sequence[OutputTensor], model_version: str = VERSION
) -> Response:
    """The response with these outputs, in their order. `request_id`: empty: none was sent.

    Raises ProtocolError for an output that cannot be written in JSON.
    """
    written: list[dict[str, Any]] = []
    binary: list[Buffer] = []
    for name, datatype, shape, data, is_binary in outputs:
        output: dict[str, Any] = {"name": name, "datatype": datatype, "shape": shape}
        if is_binary:
            part = to_binary(data)
            output["parameters"] = {"binary_data_size": len(part)}
            if len(part):
                binary.append(part)
        else:
            output["data"] = msgspec.Raw(to_json(data, datatype, f"output {name!r}"))
        written.append(output)
    response: dict[str, Any] = {"id": request_id} if request_id else {}
    response |= {"model_name": model_name, "model_version": model_version, "outputs": written}
    header = msgspec.json.encode(response)
    return Response([header, *binary], len(header) if binary else None)
