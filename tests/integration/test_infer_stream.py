"""`carpool infer --stream`, as a process, on a real redis-server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final

import pytest

from carpool_cli.local.embedded import EmbeddedRedis
from support.streaming import StreamingService, chunk, failure, final
from support.waiting import wait_until

MODEL: Final = "Writer"
RUN_S: Final = 60.0


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(append_only=False) as server:
        yield server


@pytest.fixture
def service(server: EmbeddedRedis) -> Iterator[StreamingService]:
    service = StreamingService(server.url, MODEL)
    yield service
    service.close()


@pytest.fixture
def infer(server: EmbeddedRedis) -> Iterator[Any]:
    """Starts `carpool infer --stream` with the given arguments."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str) -> subprocess.Popen[bytes]:
        environment: Mapping[str, str] = {**os.environ, "CARPOOL_REDIS_URL": server.url}
        command = [sys.executable, "-m", "carpool_cli", "infer", MODEL, *arguments, "--stream"]
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def outcome(process: subprocess.Popen[bytes]) -> tuple[int, bytes, bytes]:
    """Exit status, and the rest of what was printed on standard output and error."""
    stdout, stderr = process.communicate(timeout=RUN_S)
    return process.returncode, stdout, stderr


def read(process: subprocess.Popen[bytes], size: int) -> bytes:
    assert process.stdout is not None
    return process.stdout.read(size)


def test_texts_are_printed_end_to_end_as_they_come(infer: Any, service: StreamingService) -> None:
    process = infer("Once", "--priority", "7")
    (request,) = service.take()
    assert (request.body, request.fields["stream"], request.fields["priority"]) == (b'"Once"', "1", "7")
    for index, text in enumerate(["Once", " upon", "\na tïme"]):
        service.write(request, chunk(request, index, f'"{text}"'.replace("\n", "\\n").encode()))
        assert read(process, len(text.encode())).decode() == text
    service.write(request, final(request, b'"whatever"', index=3))
    assert outcome(process) == (0, b"\n", b"")


def test_other_values_are_a_line_of_json_each(infer: Any, service: StreamingService) -> None:
    process = infer("3")
    (request,) = service.take()
    bodies = (b"3", b'"text"', b'" and more"', b'{"\xc3\xb6": [1, null]}', b"null")
    service.write(request, *(chunk(request, index, body) for index, body in enumerate(bodies)))
    service.write(request, final(request, b"[]", index=len(bodies)))
    assert outcome(process) == (0, '3\ntext and more\n{"ö":[1,null]}\nnull\n'.encode(), b"")


def test_raw_bytes_are_printed_as_they_are(infer: Any, service: StreamingService) -> None:
    process = infer("Once", "--raw")
    (request,) = service.take()
    assert (request.content_type, request.body) == ("application/octet-stream", b"Once")
    service.write(request, chunk(request, 0, b"\x00\xff"), chunk(request, 1, b"a"))
    service.write(request, final(request, b"", index=2))
    assert outcome(process) == (0, b"\x00\xffa", b"")


def test_result_of_a_model_that_does_not_step_is_printed(infer: Any, service: StreamingService) -> None:
    process = infer("7")
    (request,) = service.take()
    service.write(request, final(request, b"49"))
    assert outcome(process) == (0, b"49\n", b"")


def test_error_in_mid_stream_is_printed_after_the_chunks(infer: Any, service: StreamingService) -> None:
    process = infer("Once")
    (request,) = service.take()
    service.write(request, chunk(request, 0, b'"Once"'), failure(request, "ABORTED", "it cannot go on"))
    assert outcome(process) == (1, b"Once\n", b"carpool infer: ABORTED: it cannot go on\n")


def test_timeout_is_for_the_whole_answer(infer: Any, service: StreamingService) -> None:
    def ask() -> Any:
        process = infer("Once", "--timeout", "0.3")
        wait_until(lambda: service.read() or process.poll() is not None, description="it is sent or too late")
        return process if service.read() else None

    process = wait_until(ask, description="a request is sent before its time is over")
    (request,) = service.take()
    service.write(request, chunk(request, 0, b'"Once"'))
    status, stdout, stderr = outcome(process)
    assert (status, stdout) in ((1, b"Once\n"), (1, b""))
    assert stderr.startswith(b"carpool infer: DEADLINE_EXCEEDED: no result within 0.3 s")


def test_interrupt_withdraws_the_request(infer: Any, service: StreamingService) -> None:
    process = infer("Once")
    (request,) = service.take()
    service.write(request, chunk(request, 0, b'"Once"'))
    assert read(process, 4) == b"Once"
    process.send_signal(signal.SIGINT)
    assert outcome(process) == (130, b"\n", b"")
    service.wait_for_withdrawal(request.correlation_id)


def test_closed_pipe_withdraws_the_request(infer: Any, service: StreamingService) -> None:
    process = infer("Once")
    (request,) = service.take()
    process.stdout.close()
    service.write(request, chunk(request, 0, b"1"))
    service.wait_for_withdrawal(request.correlation_id)
    process.wait(RUN_S)
    assert (process.returncode, process.stderr.read()) == (141, b"")
    process.stdout = None
