"""`carpool infer --sequence-...`, as a process, on a real redis-server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Final

import pytest

from carpool_cli.local.embedded import EmbeddedRedis
from support.streaming import StreamingService, failure, final

MODEL: Final = "Vad"
RUN_S: Final = 60.0


@pytest.fixture
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(append_only=False) as server:
        yield server


@pytest.fixture
def service(server: EmbeddedRedis) -> Iterator[StreamingService]:
    service = StreamingService(server.url, MODEL)
    yield service
    service.close()


def infer(server: EmbeddedRedis, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "carpool_cli", "infer", MODEL, *arguments],
        env={**os.environ, "CARPOOL_REDIS_URL": server.url},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.mark.parametrize(
    ("flags", "fields"),
    [
        (["--sequence-start"], {"sequence_start": "1"}),
        (["--sequence-index", "3"], {"sequence_index": "3"}),
        (
            ["--sequence-start", "--sequence-end", "--sequence-index", "0"],
            {"sequence_start": "1", "sequence_end": "1", "sequence_index": "0"},
        ),
        ([], {}),
    ],
)
def test_fields_of_a_sequence_are_sent(
    server: EmbeddedRedis, service: StreamingService, flags: list[str], fields: dict[str, str]
) -> None:
    process = infer(server, "7", "--sequence-id", "mic7", *flags)
    (request,) = service.take()
    sent = {name: value for name, value in request.fields.items() if name.startswith("sequence")}
    assert sent == {"sequence_id": "mic7", **fields}
    service.write(request, final(request, b"49"))
    assert process.communicate(timeout=RUN_S) == (b"49\n", b"")


def test_broken_sequence_is_an_error(server: EmbeddedRedis, service: StreamingService) -> None:
    process = infer(server, "7", "--sequence-id", "mic7")
    (request,) = service.take()
    service.write(request, failure(request, "ABORTED", "begin it again with sequence_start"))
    assert process.communicate(timeout=RUN_S) == (
        b"",
        b"carpool infer: ABORTED: begin it again with sequence_start\n",
    )
    assert process.returncode == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sequence-start"], b"sequence_start: only together with sequence_id"),
        (["--sequence-id", "a b"], b"sequence_id: 'a b' must have 1 to 128 characters"),
        (["--sequence-id", "a", "--stream"], b"--stream: a request of a sequence has one result"),
    ],
)
def test_what_has_no_meaning_is_not_sent(
    server: EmbeddedRedis, service: StreamingService, arguments: list[str], message: bytes
) -> None:
    process = infer(server, "7", *arguments)
    stdout, stderr = process.communicate(timeout=RUN_S)
    assert (process.returncode, stdout) == (1, b"")
    assert message in stderr
    assert service.read() == []
