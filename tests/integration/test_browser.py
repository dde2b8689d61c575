"""What docs/http.md says of pages, in a real browser: its programs read events and a WebSocket."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from typing import Any, Final
from urllib.parse import urlsplit

import pytest

from carpool.lifecycle import command_that_dies_with_parent
from support.browser import tool
from support.stack import Service, Stack
from support.waiting import EVENTUALLY_S

PAGE: Final = Path(__file__).parents[2] / "docs/http.md"
PROGRAMS: Final = re.findall(r"```javascript\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
REPORT: Final = """
const report = (found) => fetch("/report", { method: "POST", body: JSON.stringify(found) });
window.onerror = (message) => report({ error: String(message) });
window.onunhandledrejection = (event) => report({ error: String(event.reason) });
"""
START_S: Final = 60.0  # of a browser on a busy machine


class Site:
    """A web site with one page, whose other paths are those of a gateway: so they have the page's origin."""

    def __init__(self, gateway: str, program: str) -> None:
        self._gateway = urlsplit(gateway)
        self._page = f"<!doctype html><body><script type=module>{REPORT}{program}</script>".encode()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.reports: Queue[Any] = Queue()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(client,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, client: socket.socket) -> None:
        with client:
            data = b""
            while b"\r\n\r\n" not in data and (more := client.recv(65536)):
                data += more
            head, _, body = data.partition(b"\r\n\r\n")
            path = head.split(b" ")[1] if head else b"/none"
            if path == b"/report":
                size = int(re.search(rb"(?i)content-length: (\d+)", head)[1])  # type: ignore[index]
                while len(body) < size:
                    body += client.recv(65536)
                self.reports.put(json.loads(body))
                client.sendall(b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n")
            elif path == b"/":
                headers = b"Content-Type: text/html\r\nConnection: close\r\nContent-Length: %d" % len(
                    self._page
                )
                client.sendall(b"HTTP/1.1 200 OK\r\n%b\r\n\r\n%b" % (headers, self._page))
            elif path.startswith((b"/carpool/", b"/v2/")):
                if b"upgrade" not in head.lower():  # or the browser would send a report on this connection
                    data = re.sub(rb"(?i)connection: keep-alive", b"Connection: close", data, count=1)
                self._pass_on(client, data)
            elif head:
                client.sendall(b"HTTP/1.1 404 Not Found\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")

    def _pass_on(self, client: socket.socket, data: bytes) -> None:
        """Connect the client with the gateway."""
        with socket.create_connection((self._gateway.hostname, self._gateway.port)) as server:
            server.sendall(data)
            back = threading.Thread(target=_copy, args=(server, client))
            back.start()
            _copy(client, server)
            back.join()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(EVENTUALLY_S)


def _copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass


TEXT = " ".join(f"Once {number}" for number in range(40))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    tool()
    with Stack(tmp_path_factory.mktemp("stack")) as stack:
        stack.worker("writer=stepping.py:words")
        stack.batcher()
        stack.wait_for_model("writer")
        yield stack


@pytest.fixture(scope="module")
def gateway(shared: Stack) -> Service:
    return shared.gateway()


def run(gateway: Service, program: str, home: Path) -> Any:
    """What a page reports that has this program."""
    site = Site(gateway.url, program)
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    command = [tool(), *flags, f"--user-data-dir={home}", site.url]
    browser = subprocess.Popen(
        command_that_dies_with_parent(command),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return site.reports.get(timeout=START_S)
    finally:
        os.killpg(browser.pid, signal.SIGKILL)  # Debian's command is a script, which starts the browser
        browser.wait()
        site.close()


def test_a_page_reads_events(gateway: Service, tmp_path: Path) -> None:
    program = (
        PROGRAMS[0] + "report({ text: document.body.lastChild.textContent, all: document.body.innerText });"
    )
    found = run(gateway, program, tmp_path)
    assert found == {"text": "Once 39 ", "all": TEXT}


def test_a_page_talks_on_a_websocket(gateway: Service, tmp_path: Path) -> None:
    program = PROGRAMS[1].replace("localhost:8000", '" + location.host + "')
    ending = "console.log = (...told) => report({ told, all: document.body.innerText });"
    found = run(gateway, ending + program, tmp_path)
    assert "error" not in found, found
    assert found["told"][:2] == ["1", "has ended:"]
    assert found["told"][2]["responses"] == 40
    assert found["all"] == TEXT
