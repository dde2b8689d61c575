"""Bodies of requests that come compressed."""

from __future__ import annotations

from carpool_gateway.answers import HttpError
from carpool_gateway.exchange import Exchange
from carpool_gateway.limits import ENCODINGS, Limits, inflate


def check_encoding(exchange: Exchange) -> None:
    """Refuse a body that is compressed in another way than those that are known (415)."""
    encoding = exchange.headers.get(b"content-encoding")
    if encoding is not None and encoding.lower() not in (*ENCODINGS, b"identity"):
        raise HttpError(
            415, "Content-Encoding: gzip, deflate, or none", headers=b"accept-encoding: gzip, deflate\r\n"
        )


async def decompress(exchange: Exchange, limits: Limits) -> None:
    """Replace a compressed body by what is in it. Raises HttpError."""
    if exchange.headers.get(b"content-encoding", b"identity").lower() != b"identity":
        exchange.body = await inflate(exchange.body, limits.body_bytes, exchange.take)
