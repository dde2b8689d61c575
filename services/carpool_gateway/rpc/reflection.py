"""The standard service for reflection, in both of its versions: tools such as grpcurl ask it what there is to
call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import grpc.aio
from google.protobuf.message import DecodeError

from carpool.errors import InvalidArgumentError
from carpool_gateway.rpc.calls import Call
from carpool_gateway.rpc.definitions import Definitions

_NOT_FOUND: Final = 5


class ReflectionService:
    """Answers calls about these services. `own`: the messages of the version in which it is asked."""

    def __init__(self, own: Definitions, offered: Sequence[Definitions]) -> None:
        self._own = own
        self._services = [one.service for one in offered]
        self._by_file = {one.file.name: one.file.SerializeToString() for one in offered}
        self._by_name = {name: self._by_file[one.file.name] for one in offered for name in one.names()}

    async def info(self, call: Call) -> None:
        """Answer each question on a stream. Raises InvalidArgumentError."""
        while (message := await call.context.read()) is not grpc.aio.EOF:
            try:
                request = self._own["ServerReflectionRequest"].FromString(message)
            except DecodeError:
                raise InvalidArgumentError("the message is no ServerReflectionRequest") from None
            await call.context.write(self._answer(request).SerializeToString())

    def _answer(self, request: Any) -> Any:
        answer = self._own["ServerReflectionResponse"](valid_host=request.host, original_request=request)
        asked, file = request.WhichOneof("choice"), None
        if asked == "list_services":
            for name in self._services:
                answer.list_services_response.service.add(name=name)
            return answer
        if asked == "file_by_filename":
            file = self._by_file.get(request.file_by_filename)
        elif asked == "file_containing_symbol":
            file = self._by_name.get(request.file_containing_symbol)
        if file is not None:
            answer.file_descriptor_response.file_descriptor_proto.append(file)
        else:
            answer.error_response.error_code = _NOT_FOUND
            answer.error_response.error_message = "there is no such file, symbol or extension"
        return answer
