"""`carpool health`: the health of a service, for container health checks and scripts."""

from __future__ import annotations

import http.client
from collections.abc import Sequence

from pydantic import Field

from carpool.settings import CarpoolSettings, Seconds, read_settings
from carpool.shown import complain, printable_lines


class HealthSettings(CarpoolSettings):
    """Check whether a service is ready. Exits with 0 if it is; else prints why, and exits with 1.

    The service must have been started with --http-port.
    """

    http_host: str = Field("127.0.0.1", description="the host of the service")
    http_port: int = Field(ge=1, le=65535, description="the --http-port of the service")
    alive: bool = Field(False, description="check that it is alive (/healthz) instead of ready (/readyz)")
    timeout_s: Seconds = Field(3.0, gt=0, description="seconds to wait for the answer")


def main(argv: Sequence[str]) -> int:
    """Print the answer of the service. Returns 1 if it is not ready or does not answer."""
    settings = read_settings(HealthSettings, argv, "carpool health")
    loopback = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 (addresses the service listens on)
    host = loopback.get(settings.http_host, settings.http_host)
    connection = http.client.HTTPConnection(host, settings.http_port, timeout=settings.timeout_s)
    try:
        connection.request("GET", "/healthz" if settings.alive else "/readyz")
        response = connection.getresponse()
        answer = response.read(10_000).decode("utf-8", "replace").strip()
    except (OSError, http.client.HTTPException) as error:
        complain(f"carpool health: nothing answers at {host}:{settings.http_port}: {error}")
        return 1
    finally:
        connection.close()
    if response.status != http.HTTPStatus.OK:
        complain(f"carpool health: not {'alive' if settings.alive else 'ready'}: {answer}")
        return 1
    print(printable_lines(answer))
    return 0
