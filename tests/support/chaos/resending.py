"""A proxy of HTTP that sends a request again, to the next gateway, when its connection breaks.

It also breaks connections itself: of some requests the one to the gateway, once the gateway has the request.
So does a proxy in use, when it is restarted, or loses patience.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Sequence
from http.client import HTTPConnection, HTTPException, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Final, Self

BROKEN_SHARE: Final = 0.2
_TRIES_MAX: Final = 20
_PAUSE_S: Final = 0.05
_ANSWER_S: Final = 10.0  # for which it waits for a gateway
_OF_ONE_CONNECTION: Final = ("connection", "transfer-encoding", "host", "content-length", "keep-alive")


class ResendingProxy:
    """Listens on `address` (`host:port`) for the time of a `with` block. `resent`: how many requests it has
    sent again."""

    def __init__(self, gateways: Sequence[str], seed: int) -> None:
        self.resent = 0
        self.gateways = gateways
        self.random = random.Random(seed)
        self.stopping = threading.Event()
        proxy = self

        class Handler(_Handler):
            of = proxy

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stopping.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    """One connection of a client."""

    of: ResendingProxy
    protocol_version = "HTTP/1.1"

    def handle(self) -> None:
        with contextlib.suppress(OSError):  # the client has gone
            super().handle()

    def log_message(self, *_: object) -> None:
        """Nothing is logged."""

    def do_POST(self) -> None:
        proxy = self.of
        body = self.rfile.read(int(self.headers.get("content-length", "0")))
        headers = {
            name: value for name, value in self.headers.items() if name.lower() not in _OF_ONE_CONNECTION
        }
        first = proxy.random.randrange(len(proxy.gateways))
        for tried in range(_TRIES_MAX):
            proxy.resent += tried > 0
            address = proxy.gateways[(first + tried) % len(proxy.gateways)]
            breaks = tried == 0 and proxy.random.random() < BROKEN_SHARE
            try:
                answer, content = self._forward(address, headers, body, breaks=breaks)
            except (OSError, HTTPException):
                if proxy.stopping.wait(_PAUSE_S):
                    return
            else:
                self._answer(answer, content)
                return
        self.send_error(502)

    do_GET = do_POST  # noqa: N815

    def _forward(
        self, address: str, headers: dict[str, str], body: bytes, *, breaks: bool
    ) -> tuple[HTTPResponse, bytes]:
        """The answer of a gateway. Raises OSError and HTTPException if the connection breaks."""
        with contextlib.closing(HTTPConnection(address, timeout=_ANSWER_S)) as connection:
            connection.request(self.command, self.path, body, headers)
            if breaks:
                raise ConnectionResetError
            answer = connection.getresponse()
            return answer, answer.read()

    def _answer(self, answer: HTTPResponse, content: bytes) -> None:
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in (*_OF_ONE_CONNECTION, "server", "date"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
