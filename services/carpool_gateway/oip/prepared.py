"""Infer requests from decoding to response. Those that differ in their numbers alone are decoded and planned
once.

A program sends the same JSON, or the same fields of a message, with each request, and other numbers as binary
data. What these decide for a model is kept, as is the beginning of the response. Only requests with one input
of numbers are alike in this way; all others take the whole way each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from carpool.errors import OK
from carpool.messages.requests import MSGPACK
from carpool.parts import Buffer
from carpool.rows import Rows
from carpool_gateway.oip.models import OfferedModel
from carpool_gateway.oip.plans import Plan, plan
from carpool_gateway.oip.requests import InferRequest, InputTensor, decode_request
from carpool_gateway.oip.responses import OutputTensor, Response, RowResult, encode_response, join_results

JSON_BYTES_MAX: Final = 1024  # of a request that is kept
KEPT_MAX: Final = 1024
_LENGTH_DIGITS_MAX: Final = 4  # of a number up to JSON_BYTES_MAX


Encode = Callable[[str, str, Sequence[OutputTensor], str], Response]
"""As `responses.encode_response`."""


class _AlikeResults(NamedTuple):
    """Results of a version that differ in the numbers behind `head` alone, and what is before these in the
    response."""

    head: bytes
    body_bytes: int
    before: bytes
    version: str

    def response(self, results: Sequence[RowResult]) -> Response | None:
        """The response, if the results are such ones."""
        head, body_bytes, before, version = self
        parts: list[Buffer] = [before]
        start = len(head)
        for status, content_type, body, _, of_version in results:
            is_alike = len(body) == body_bytes and status == OK and content_type == MSGPACK
            if not is_alike or body[:start] != head or of_version != version:
                return None
            parts.append(body[start:])
        return Response(parts, len(before))


class Prepared:
    """A request for a model: what is to be sent, and how its response is made."""

    __slots__ = ("_alike", "_encode", "_is_kept", "model", "plan", "request")

    def __init__(
        self, model: OfferedModel, request: InferRequest, planned: Plan, encode: Encode = encode_response
    ) -> None:
        self.model = model
        self.request = request
        self.plan = planned
        self._encode = encode
        self._alike: _AlikeResults | None = None
        self._is_kept = False

    def keep(self) -> None:
        """It is used again: hold no body, and remember what responses have in common."""
        self._is_kept = True
        self.request = self.request._replace(inputs=())
        bodies = self.plan.bodies
        assert isinstance(bodies, Rows)
        self.plan = self.plan._replace(bodies=Rows(bodies.head, b"", bodies.width))

    def bodies_of(self, numbers: bytes | memoryview) -> Rows:
        """The bodies of a request that is alike, but for these numbers."""
        kept = self.plan.bodies
        assert isinstance(kept, Rows)
        return Rows(kept.head, numbers, kept.width)

    def respond(self, results: Sequence[RowResult]) -> Response:
        """The response to these results, one for each row. Raises CarpoolErrors."""
        if self._alike is not None and (response := self._alike.response(results)) is not None:
            return response
        outputs = join_results(self.model, self.plan, results)
        version = (results[0].version if results else "") or self.model.version  # rows may be of several
        response = self._encode(self.model.name, self.request.id, outputs, version)
        if self._is_kept:
            self._alike = _alike(outputs, results, response)
        return response


def _alike(
    outputs: Sequence[OutputTensor], results: Sequence[RowResult], response: Response
) -> _AlikeResults | None:
    """What results have in common with these, if they are one tensor of numbers, wanted as binary data."""
    if len(outputs) != 1 or not outputs[0].binary or outputs[0].datatype == "BYTES":
        return None
    body, data = results[0].body, outputs[0].data
    assert not isinstance(data, list)
    width = len(data) // len(results)
    # In a msgpack map that Carpool writes, data is last.
    if not width or results[0].content_type != MSGPACK or body[-width:] != data[:width]:
        return None
    return _AlikeResults(bytes(body[:-width]), len(body), bytes(response.parts[0]), results[0].version)


class KeptRequests(dict[tuple[str, bytes, int], Prepared]):
    """Prepared requests with one input of numbers, by what they have in common with others: the name of the
    model, all but the numbers, and a length. At most KEPT_MAX. One whose `model` is not the same object as
    the model is out of date."""

    def add(self, key: tuple[str, bytes, int], prepared: Prepared) -> None:
        """Keep a request that has one input, of numbers whose length is all that has to suit."""
        prepared.keep()
        if len(self) >= KEPT_MAX:
            self.clear()
        self[key] = prepared


class Preparer:
    """Prepares requests of HTTP."""

    def __init__(self) -> None:
        self._kept = KeptRequests()

    def prepare(
        self, model: OfferedModel, body: bytes, header_length: bytes | None
    ) -> tuple[Prepared, Rows | list[bytes]]:
        """A request, and the bodies of its rows. `header_length`: see `decode_request`. Raises
        ProtocolError."""
        if not header_length or not header_length.isdigit() or len(header_length) > _LENGTH_DIGITS_MAX:
            return _fresh(model, body, header_length)
        json_bytes = int(header_length)
        if not 0 < json_bytes <= min(JSON_BYTES_MAX, len(body)):
            return _fresh(model, body, header_length)
        key = (model.name, body[:json_bytes], len(body))
        prepared = self._kept.get(key)
        if prepared is not None and prepared.model is model:
            return prepared, prepared.bodies_of(body[json_bytes:])
        prepared, bodies = _fresh(model, body, header_length)
        inputs = prepared.request.inputs
        if is_one_of_numbers(inputs) and "binary_data_size" in inputs[0].parameters:
            self._kept.add(key, prepared)
        return prepared, bodies


def _fresh(
    model: OfferedModel, body: bytes, header_length: bytes | None
) -> tuple[Prepared, Rows | list[bytes]]:
    request = decode_request(body, header_length)
    planned = plan(model, request)
    return Prepared(model, request, planned), planned.bodies


def is_one_of_numbers(inputs: Sequence[InputTensor]) -> bool:
    """Whether this is one input, whose binary data nothing but its length has to suit."""
    return len(inputs) == 1 and inputs[0].datatype not in ("BOOL", "BYTES") and len(inputs[0].data) > 0
