"""A Redis server with an operator's configuration: a configuration file, an ACL file or TLS."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import time
from pathlib import Path
from typing import Final

from carpool_cli.local.embedded import EmbeddedRedis, EmbeddedRedisError
from support.waiting import wait_until

NO_PERSISTENCE: Final = ("--appendonly", "no", "--save", "")


def major(server: Path) -> int:
    """The major version of a Redis binary."""
    output = subprocess.run([server, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"v=(\d+)", output)
    assert found is not None, output
    return int(found[1])


class ConfiguredRedis(EmbeddedRedis):
    """A server that has only these `options`, a port (a free one, if none is given) and a socket.

    With `tls`, its port accepts only TLS. `url` is for the tests to connect; its `{port}` is filled in.
    """

    def __init__(
        self,
        home: Path,
        *options: str,
        binary: Path | None = None,
        url: str = "redis://127.0.0.1:{port}/0",
        tls: bool = False,
        port: int | None = None,
    ) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self.socket = home / "redis.sock"
        self._extra_options = options
        self._url = url
        self._tls = tls
        super().__init__(data_dir=home, binary=binary, port=port)

    @property
    def url(self) -> str:
        return self._url.format(port=self.port)

    def _options(self, port: int) -> list[str]:
        ports = ["--port", "0", "--tls-port", str(port)] if self._tls else ["--port", str(port)]
        location = ["--bind", "127.0.0.1", "--dir", str(self._home), "--unixsocket", str(self.socket)]
        return [*self._extra_options, *ports, *location]

    def _wait_until_ready(self, port: int, process: subprocess.Popen[bytes]) -> str:
        """Wait until it answers on its socket, if only that authentication is required."""
        until_s = time.monotonic() + self.start_timeout_s

        def ready() -> bool:
            return process.poll() is not None or self._answer() in (b"+PONG", b"-NOAUTH")

        wait_until(ready, description=f"{self.binary} answers", timeout_s=until_s - time.monotonic())
        if process.poll() is not None:
            raise EmbeddedRedisError(f"{self.binary} did not start. {self._end_of_log()}")
        return "as configured"

    def _answer(self) -> bytes:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            probe.connect(str(self.socket))
            probe.sendall(b"PING\r\n")
            return probe.recv(64).split()[0]
        return b""

    @property
    def log(self) -> str:
        """Its log."""
        return self._log.read_text(errors="replace")
