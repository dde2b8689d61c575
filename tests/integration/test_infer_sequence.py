"""`carpool infer --sequence-...`, as a process, on a real redis-server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Final

import pytest

from carpool_cli.local.embedded import EmbeddedRedis
from support.command import Done, Running, carpool, running
from support.streaming import StreamingService, failure, final

MODEL: Final = "Vad"


@pytest.fixture
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(append_only=False) as server:
        yield server


@pytest.fixture
def service(server: EmbeddedRedis) -> Iterator[StreamingService]:
    service = StreamingService(server.url, MODEL)
    yield service
    service.close()


def infer(server: EmbeddedRedis, *arguments: str) -> AbstractContextManager[Running]:
    return running(server.url, "infer", MODEL, *arguments)


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
    with infer(server, "7", "--sequence-id", "mic7", *flags) as command:
        (request,) = service.take()
        sent = {name: value for name, value in request.fields.items() if name.startswith("sequence")}
        assert sent == {"sequence_id": "mic7", **fields}
        service.write(request, final(request, b"49"))
        assert command.end() == Done(0, b"49\n", b"")


def test_broken_sequence_is_an_error(server: EmbeddedRedis, service: StreamingService) -> None:
    with infer(server, "7", "--sequence-id", "mic7") as command:
        (request,) = service.take()
        service.write(request, failure(request, "ABORTED", "begin it again with sequence_start"))
        printed = b"carpool infer: ABORTED: begin it again with sequence_start\n"
        assert command.end() == Done(1, b"", printed)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sequence-start"], "sequence_start: only together with sequence_id"),
        (["--sequence-id", "a b"], "sequence_id: 'a b' must have 1 to 128 characters"),
        (["--sequence-id", "a", "--stream"], "--stream: a request of a sequence has one result"),
    ],
)
def test_what_has_no_meaning_is_not_sent(
    server: EmbeddedRedis, service: StreamingService, arguments: list[str], message: str
) -> None:
    done = carpool(server.url, "infer", MODEL, "7", *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert message in done.stderr
    assert service.read() == []
