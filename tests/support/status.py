"""The status server of a service: its probes and its metrics."""

from __future__ import annotations

import http.client

from support.stack import Service


def get(service: Service, path: str) -> tuple[int, str]:
    """HTTP status and body."""
    connection = http.client.HTTPConnection(service.status_url.removeprefix("http://"), timeout=10)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode().strip()
    finally:
        connection.close()
