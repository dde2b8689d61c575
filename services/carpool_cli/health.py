"""`carpool health`: is the service on this port well? For health checks of containers, and for scripts."""

from __future__ import annotations

import http.client
import sys
from collections.abc import Sequence

from pydantic import Field

from carpool.settings import CarpoolSettings, read_settings


class HealthSettings(CarpoolSettings):
    """Ask a batcher or a worker on this machine whether it is ready. Exits with 0 if it is, with 1 if not.

    What is wrong is printed. A batcher or worker answers where it was started with --http-port.
    """

    http_host: str = Field("127.0.0.1", description="where to ask")
    http_port: int = Field(ge=1, le=65535, description="on which port")
    alive: bool = Field(False, description="ask only whether it should go on, not whether it serves now")
    timeout_s: float = Field(3.0, gt=0, description="how long to wait for the answer")


def main(argv: Sequence[str]) -> int:
    """Ask, and say what the service said."""
    settings = read_settings(HealthSettings, argv, "carpool health")
    everywhere = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 (what the service listens on)
    host = everywhere.get(settings.http_host, settings.http_host)
    connection = http.client.HTTPConnection(host, settings.http_port, timeout=settings.timeout_s)
    try:
        connection.request("GET", "/healthz" if settings.alive else "/readyz")
        response = connection.getresponse()
        said = response.read(10_000).decode("utf-8", "replace").strip()
    except (OSError, http.client.HTTPException) as error:
        print(f"carpool health: nothing answers at {host}:{settings.http_port}: {error}", file=sys.stderr)
        return 1
    finally:
        connection.close()
    if response.status != http.HTTPStatus.OK:
        print(f"carpool health: not {'alive' if settings.alive else 'ready'}: {said}", file=sys.stderr)
        return 1
    print(said)
    return 0
