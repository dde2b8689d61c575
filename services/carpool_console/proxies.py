"""What a request's connection tells, and what a trusted proxy adds: the client's address, TLS, the user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ipaddress import ip_address, ip_network
from typing import Any, Final
from urllib.parse import urlsplit

_FORWARDED_CHARS_MAX: Final = 2000

Scope = Mapping[str, Any]
"""What ASGI tells of a request."""


class Proxies:
    """Whose headers hold. `networks`: addresses or networks of proxies; `user_header`: in which they name a
    user, or empty."""

    def __init__(self, networks: Sequence[str], user_header: str) -> None:
        self._networks = [ip_network(network) for network in networks]
        self._user_header = user_header.lower()

    def is_trusted(self, address: str) -> bool:
        """Whether a proxy has this address."""
        try:
            parsed = ip_address(address)
        except ValueError:
            return False
        mapped = getattr(parsed, "ipv4_mapped", None) or parsed
        return any(mapped in network for network in self._networks if network.version == mapped.version)

    def client_address(self, scope: Scope) -> str:
        """The address that a request is from: behind trusted proxies, the last one that none of them has."""
        address = _peer(scope)
        forwarded = ",".join(_lines(scope, "x-forwarded-for"))[-_FORWARDED_CHARS_MAX:].split(",")
        while forwarded and self.is_trusted(address):
            address = forwarded.pop().strip() or address
        return address

    def is_secure(self, scope: Scope) -> bool:
        """Whether the client's connection is encrypted, as far as is known."""
        if scope.get("scheme") == "https":
            return True
        told = ",".join(_lines(scope, "x-forwarded-proto")).rpartition(",")[2].strip().lower()
        return told == "https" and self.is_trusted(_peer(scope))

    def user(self, scope: Scope) -> str:
        """The user whom a trusted proxy names; empty if none does.

        A header that is there twice names nobody: a proxy may have added its own to that of the client.
        """
        if not self._user_header or not self.is_trusted(_peer(scope)):
            return ""
        lines = _lines(scope, self._user_header)
        return lines[0].strip() if len(lines) == 1 else ""


def _lines(scope: Scope, name: str) -> list[str]:
    """All headers of this name."""
    wanted = name.encode("latin-1")
    return [value.decode("latin-1") for key, value in scope.get("headers", ()) if key == wanted]


def _peer(scope: Scope) -> str:
    client = scope.get("client")
    return client[0] if client else ""


def is_same_origin(headers: Mapping[str, str], *, is_secure: bool) -> bool:
    """Whether a form was sent by a page of this server. Browsers send `Origin` with every POST.

    A proxy may end TLS and not say so, so an origin with https is accepted where it cannot be known.
    """
    try:
        origin = urlsplit(headers.get("origin", ""))
    except ValueError:  # such as `http://[`
        return False
    schemes = ("https",) if is_secure else ("http", "https")
    return (
        origin.scheme in schemes
        and bool(origin.netloc)
        and (origin.netloc.lower() == headers.get("host", "").lower())
    )


def local_path(path: str) -> str:
    """A path of this server to go to, or `/` if the text is none: it may come from anybody."""
    is_local = path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable()
    return path if is_local and len(path) <= _FORWARDED_CHARS_MAX else "/"
