"""What the gateway takes from clients at most: bytes, seconds, connections."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from typing import Final, NamedTuple

from carpool_gateway.answers import RETRY_AFTER, HttpError

MIB: Final = 1024 * 1024
ENCODINGS: Final = (b"gzip", b"x-gzip", b"deflate")
_INLINE_BYTES_MAX: Final = 1024  # of a compressed body; it has 1 MiB at most, which takes 2 ms
_GZIP_OR_ZLIB: Final = 32 + zlib.MAX_WBITS
_RAW: Final = -zlib.MAX_WBITS


class Limits(NamedTuple):
    """Bytes, seconds and numbers that no client may exceed.

    `head_s`: from the first byte of a request to the end of its headers; `body_s`: from there to the end of
    its body; `idle_s`: between two requests; `write_s`: for a client to read an answer.
    `memory_bytes`: of all bodies together that are being read, or whose requests have no result, and of
    answers that clients read slowly.
    `chunks`: of a body in `Transfer-Encoding: chunked`.
    `rows`: requests in one call of `infer_many`.
    `unread_bytes`: of chunks of a stream that its client reads slowly.
    `window`: requests without an end on one WebSocket. `ping_s`: without a sign of life of its client.
    `grpc_connection_s`: of a connection of gRPC, until it is to end; 0: without a limit.
    """

    head_bytes: int = 32 * 1024
    headers: int = 100
    body_bytes: int = 64 * MIB
    chunks: int = 65_536
    memory_bytes: int = 1024 * MIB
    rows: int = 1024
    unread_bytes: int = 16 * MIB
    window: int = 64
    ping_s: float = 20.0
    connections: int = 4096
    head_s: float = 10.0
    body_s: float = 60.0
    idle_s: float = 75.0
    write_s: float = 120.0
    timeout_s: float = 300.0
    grpc_connection_s: float = 0.0


class BodyMemory:
    """Counts the bytes of all bodies and answers that are held."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self.held_bytes = 0

    @property
    def is_full(self) -> bool:
        """Whether as many bytes are held as may be, or more."""
        return self.held_bytes >= self._bytes_max

    def take(self, size: int) -> None:
        """Add to the bytes in memory. Raises HttpError, and adds nothing, if they would be too many."""
        if self.held_bytes + size > self._bytes_max:
            raise HttpError(
                503,
                f"the gateway holds bodies of {self.held_bytes} bytes, and may hold {self._bytes_max}: try "
                "again",
                headers=RETRY_AFTER,
            )
        self.held_bytes += size

    def hold(self, size: int) -> None:
        """Add to the bytes in memory, which are there already: from their limit on, no more are taken."""
        self.held_bytes += size

    def release(self, size: int) -> None:
        """They are no longer held."""
        self.held_bytes -= size


def too_large(bytes_max: int) -> HttpError:
    """The error of a body that has more bytes than that."""
    return HttpError(
        413, f"the body has more than {bytes_max} bytes; put it into object storage, and send its name"
    )


async def inflate(body: bytes, bytes_max: int, take: Callable[[int], None]) -> bytes:
    """A body of gzip or deflate, decompressed. `take` is called with the sizes of its parts as it grows.

    What is called deflate has a zlib header or, from some programs, none. Raises HttpError: 400 if it is
    damaged, 413 if it has more than `bytes_max`, and what `take` raises.
    """
    decompressor = zlib.decompressobj(_wbits_of(body))
    parts: list[bytes] = []
    size, rest = 0, body
    while not decompressor.eof:
        try:
            if len(body) <= _INLINE_BYTES_MAX:
                part = decompressor.decompress(rest, MIB)
            else:  # other requests are not to wait for it; zlib releases the GIL
                part = await asyncio.to_thread(decompressor.decompress, rest, MIB)
        except zlib.error as error:
            raise HttpError(400, f"the body cannot be decompressed: {error}") from None
        size += len(part)
        if size > bytes_max:
            raise too_large(bytes_max)
        take(len(part))
        parts.append(part)
        rest = decompressor.unconsumed_tail
        if not part and not rest:
            break
    if not decompressor.eof:
        raise HttpError(400, "the body cannot be decompressed: its end is missing")
    if decompressor.unused_data:
        raise HttpError(400, "the body cannot be decompressed: something follows its end")
    return b"".join(parts)


def _wbits_of(body: bytes) -> int:
    is_zlib = len(body) >= 2 and body[0] & 15 == 8 and (body[0] << 8 | body[1]) % 31 == 0
    return _GZIP_OR_ZLIB if is_zlib or body[:2] == b"\x1f\x8b" else _RAW
