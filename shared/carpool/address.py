"""Addresses of Redis: how logs and errors show them, and in URLs that name several servers."""

from __future__ import annotations

import re
from typing import Final

# Hosts with or without ports, or the path of a Unix socket, at the begin of what is shown.
_HOSTS: Final = re.compile(r"(?:(?:\[[^\]]*\]|[^][:/?#,]+)(?::\d*)?(?:,|(?=[/?#]|$)))+|/(?!/)")


def without_password(url: str) -> str:
    """The URL without credentials, and without its query, where redis-py accepts a password too."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        scheme, rest = "", url
    credentials, at, host = rest.rpartition("@")
    # A ? in a password or an @ in the query: the end of the password is unknown. And an @ may be missing.
    if "?" in credentials or not (at or _HOSTS.match(host)):
        host = "..."
    return f"{scheme}{separator}{host.partition('?')[0]}"


def bracketed(host: str) -> str:
    """A host as it is in a URL: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host
