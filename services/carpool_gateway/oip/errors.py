"""Why a request of this protocol is refused. The detail names the input, output or parameter, and the
element."""

from __future__ import annotations

from carpool.errors import InvalidArgumentError


class ProtocolError(InvalidArgumentError):
    """The request does not follow the protocol, or does not suit its model: `http_status` is 400."""

    http_status = 400


class TooLargeError(ProtocolError):
    """The request is larger than what the gateway or the model takes."""

    http_status = 413
