"""Which coding a client gets for what it accepts, and what is not worth compressing."""

from __future__ import annotations

import gzip
import random
import zlib

import pytest

from carpool_gateway.compression import chosen_coding, compress


@pytest.mark.parametrize(
    ("accepted", "coding"),
    [
        (b"", ""),
        (b"gzip", "gzip"),
        (b"GZIP", "gzip"),
        (b"x-gzip", "gzip"),
        (b"deflate", "deflate"),
        (b"gzip, deflate", "gzip"),
        (b"gzip;q=0.5, deflate", "deflate"),
        (b"deflate;q=0.5, gzip;q=0.5", "gzip"),
        (b"*", "gzip"),
        (b"gzip;q=0, *", "deflate"),
        (b"gzip;q=0", ""),
        (b"*;q=0", ""),
        (b"identity", ""),
        (b"identity;q=1, gzip;q=0.5", ""),
        (b"identity;q=0.5, gzip ; q=0.8", "gzip"),
        (b"br, zstd", ""),
        (b"gzip;q=abc", ""),
        (b";;,\xff,q=1", ""),
    ],
)
def test_coding_that_a_client_accepts(accepted: bytes, coding: str) -> None:
    assert chosen_coding(accepted) == coding


@pytest.mark.parametrize("size", [2000, 100_000])
def test_bodies_are_compressed_if_that_pays(size: int) -> None:
    body = b"[1,2,3]" * (size // 7)
    for coding, decompress in (("gzip", gzip.decompress), ("deflate", zlib.decompress)):
        compressed = compress(body, coding)
        assert compressed is not None
        assert len(compressed) < len(body) / 10
        assert decompress(compressed) == body
    assert compress(random.Random(size).randbytes(size), "gzip") is None
