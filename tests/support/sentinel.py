"""A Redis Sentinel as a process on this machine."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from redis import ConnectionError as RedisConnectionError
from redis import Redis

from carpool.lifecycle import command_that_dies_with_parent
from carpool_cli.local.embedded import free_port

HOST: Final = "127.0.0.1"


class Sentinel:
    """A sentinel that watches a primary under the name `main`, and takes it for dead after `down_after_ms`.

    `tls`: it speaks TLS only, with these options of redis-server. `authority` signed its certificate.
    """

    def __init__(
        self,
        binary: Path,
        home: Path,
        primary_port: int,
        *,
        down_after_ms: int = 500,
        tls: Sequence[str] = (),
        authority: str | None = None,
    ) -> None:
        self.port = free_port()
        configuration = home / "sentinel.conf"
        ports = f"port 0\ntls-port {self.port}\ntls-replication yes" if tls else f"port {self.port}"
        configuration.write_text(
            f"{ports}\nbind {HOST}\ndir {home}\n"
            f"sentinel monitor main {HOST} {primary_port} 1\n"
            f"sentinel down-after-milliseconds main {down_after_ms}\nsentinel failover-timeout main 3000\n"
        )
        self._process = subprocess.Popen(
            command_that_dies_with_parent(
                [str(binary), str(configuration), "--sentinel", *tls], reads_environment=False
            ),
            stdout=subprocess.DEVNULL,
        )
        self.redis: Any = Redis(HOST, self.port, ssl=bool(tls), ssl_ca_certs=authority)

    @property
    def url(self) -> str:
        return f"redis+sentinel://{HOST}:{self.port}/main"

    def take_for_dead_after(self, milliseconds: int) -> None:
        """Set this anew."""
        self.redis.execute_command("SENTINEL", "SET", "main", "down-after-milliseconds", milliseconds)

    def knows_replicas(self) -> bool:
        try:
            return bool(self.redis.execute_command("SENTINEL", "REPLICAS", "main"))
        except ConnectionError:
            return False

    def answers(self) -> bool:
        try:
            return bool(self.redis.ping())
        except RedisConnectionError:
            return False

    def primary_port(self) -> int:
        _, port = self.redis.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "main")
        return int(port)

    def stop(self) -> None:
        self.redis.close()
        self._process.kill()
        self._process.wait()
