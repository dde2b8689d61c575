"""A Redis server for one measurement: empty, without persistence, on TCP and on a Unix socket."""

from __future__ import annotations

import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from carpool.lifecycle import command_that_dies_with_parent
from carpool.store.connection import Link
from carpool_cli.local.embedded import find_servers
from grid.setup import HOST

START_S_MAX: Final = 10.0


def free_port() -> int:
    """A port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


class RedisServer:
    """Starts with the block, and stops with it."""

    def __enter__(self) -> Self:
        self._directory = tempfile.TemporaryDirectory()
        port, path = free_port(), Path(self._directory.name) / "redis.sock"
        self.url, self.unix_url = f"redis://{HOST}:{port}/0", f"unix://{path}?db=0"
        options = {"port": str(port), "bind": HOST, "unixsocket": str(path), "save": "", "appendonly": "no"}
        arguments = [word for name, value in options.items() for word in (f"--{name}", value)]
        binary = find_servers()[0]
        self._process = subprocess.Popen(
            command_that_dies_with_parent([str(binary), *arguments], reads_environment=False),
            stdout=subprocess.DEVNULL,
        )
        self.version = self._wait_until_ready()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._directory.cleanup()

    @property
    def pid(self) -> int:
        return self._process.pid

    def info(self, section: str) -> dict[str, str]:
        """A section of INFO."""
        link = Link(self.url, name="bench")
        try:
            text = link.call("INFO", section).decode()
        finally:
            link.close()
        return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)

    def _wait_until_ready(self) -> str:
        end_s = time.monotonic() + START_S_MAX
        while True:
            try:
                return self.info("server")["redis_version"]
            except Exception:
                if time.monotonic() > end_s or self._process.poll() is not None:
                    raise
                time.sleep(0.02)
