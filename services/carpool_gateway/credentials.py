"""API keys: the file that lists them, and the permissions of the one that a request presents.

    [[keys]]
    name = "web"
    sha256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"    # of the key
    tenant = "acme"                # optional: of all its requests
    scopes = ["infer"]             # optional: infer, load, metrics; without it infer
    models = ["classify", "eu-*"]  # optional: names, * stands for any letters; without it all models
    rate = 50                      # optional: requests a second; twice as many at once

The file has hashes, so that nobody who reads it can use the keys. A key is random and long, so one round of
SHA-256 is enough.
"""

from __future__ import annotations

import hmac
import math
import re
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from carpool.client.options import RequestOptions
from carpool.keys import CORRELATION_ID
from carpool_gateway.answers import HttpError

INFER: Final = "infer"
METRICS: Final = "metrics"
LOAD: Final = "load"  # to load and unload models
KEY_PREFIX: Final = b"carpool.key."  # of a subprotocol of WebSocket that is an API key
SCOPES: Final = (INFER, LOAD, METRICS)
_ALL: Final = ("*",)
_FIELDS: Final = frozenset(("name", "sha256", "tenant", "scopes", "models", "rate"))
_BURST_S: Final = 2.0  # of its rate, which a key may use at once
_SHA256: Final = re.compile("[0-9a-fA-F]{64}")
_UNAUTHENTICATED: Final = b"www-authenticate: Bearer\r\n"


@dataclass(slots=True, eq=False)
class Key:
    """What the holder of a key may do. `rate`: requests a second; infinity for no limit."""

    name: str
    digest: bytes
    tenant: str = ""
    scopes: frozenset[str] = frozenset((INFER,))
    models: tuple[str, ...] = _ALL
    rate: float = math.inf
    _tokens: float = field(default=-1.0, init=False)
    _counted_at_s: float = field(default=0.0, init=False)

    def check(self, scope: str, model: str = "") -> None:
        """Raise HttpError (403) unless the key has this scope, for this model if one is named."""
        if scope not in self.scopes:
            raise HttpError(403, f"the key {self.name!r} does not have the scope {scope}")
        if model and not self.is_for(model):
            raise HttpError(403, f"the key {self.name!r} is not for the model {model:.128}")

    def is_for(self, model: str) -> bool:
        """Whether the key is for this model."""
        return self.models == _ALL or any(fnmatchcase(model, one) for one in self.models)

    def set_tenant(self, options: RequestOptions) -> None:
        """If the key has a tenant, all its requests are that tenant's. Raises HttpError (403) if they name
        another."""
        if self.tenant:
            if options.get("tenant", self.tenant) != self.tenant:
                raise HttpError(403, f"the key {self.name!r} is of another tenant")
            options["tenant"] = self.tenant

    def count(self, requests: int, now_s: float) -> None:
        """Count requests against the rate. Raises HttpError (429) if there are too many; then none counts.

        A call that has more than fit at any time is let through when the key was idle, and paid for later.
        """
        if self.rate == math.inf:
            return
        size = self.rate * _BURST_S
        tokens = self._tokens if self._tokens != -1.0 else size
        tokens = min(size, tokens + (now_s - self._counted_at_s) * self.rate)
        self._counted_at_s = now_s
        self._tokens = tokens
        needed = min(float(requests), size)
        if tokens < needed:
            wait_s = math.ceil((needed - tokens) / self.rate)
            raise HttpError(
                429,
                f"the key {self.name!r} may send {self.rate:g} requests a second",
                headers=b"retry-after: %d\r\n" % wait_s,
            )
        self._tokens -= requests


ANYBODY: Final = Key("", b"", scopes=frozenset(SCOPES))  # may do everything


class KeyRing:
    """The keys of a file, which is read again when it changes; without one, everybody may do everything.

    Raises ValueError, which names what is wrong in the file, and OSError.
    """

    def __init__(self, path: Path | None, origins: Sequence[str] = ()) -> None:
        """`origins`: web sites whose pages may use a gateway without keys."""
        self._path = path
        self._origins = origins
        self._changed_ns = 0
        self._keys: Sequence[Key] = ()
        if path is not None:
            self._read(path)

    def reload(self) -> bool:
        """Read the file again if it has changed. Returns whether it had. Raises as the constructor does; then
        the keys stay as they are until it changes again."""
        if self._path is None or self._path.stat().st_mtime_ns == self._changed_ns:
            return False
        self._read(self._path)
        return True

    def _read(self, path: Path) -> None:
        self._changed_ns = path.stat().st_mtime_ns
        self._keys = read_keys(path.read_text("utf-8"))

    def find(self, headers: Mapping[bytes, bytes]) -> Key:
        """The key that a request presents: `Authorization: Bearer KEY`, `X-API-Key: KEY`, or, because pages
        cannot set headers of a WebSocket, `Sec-WebSocket-Protocol: carpool.key.KEY`. Raises HttpError.

        All keys are compared, each in constant time: how long it takes tells nothing of them.
        """
        if self._path is None:
            _check_origin(headers, self._origins)
            return ANYBODY
        presented = headers.get(b"x-api-key")
        if presented is None:
            kind, _, presented = headers.get(b"authorization", b"").partition(b" ")
            if not kind and (offered := headers.get(b"sec-websocket-protocol")) is not None:
                kind, presented = b"bearer", _key_in(offered)
            if kind.lower() != b"bearer" or not presented:
                raise HttpError(
                    401,
                    "a key is needed: Authorization: Bearer KEY, or X-API-Key: KEY",
                    headers=_UNAUTHENTICATED,
                )
        digest, found = sha256(presented.strip()).digest(), None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        if found is None:
            raise HttpError(401, "the key is not known here", headers=_UNAUTHENTICATED)
        return found


def _key_in(offered: bytes) -> bytes:
    """The API key among the subprotocols that a client of WebSocket offers; empty if there is none."""
    names = [name.strip() for name in offered.split(b",")]
    return next((name.removeprefix(KEY_PREFIX) for name in names if name.startswith(KEY_PREFIX)), b"")


def _check_origin(headers: Mapping[bytes, bytes], origins: Sequence[str]) -> None:
    """Refuse what a page of another site sends (403). Where no key is needed, any page that is looked at on
    this machine could use the models."""
    origin = headers.get(b"origin")
    if origin is None or is_loopback(urlsplit(origin.decode("latin-1")).hostname or ""):
        return
    if origin.decode("latin-1").lower() not in origins:
        raise HttpError(403, "a page of another site may not use a gateway without keys")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches that address."""
    if host.lower() == "localhost" or host.lower().endswith(".localhost"):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def read_keys(text: str) -> list[Key]:
    """The keys of a file's text. Raises ValueError, which names the key and what is wrong."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"is no TOML: {error}") from None
    if tables.keys() - {"keys"} or not isinstance(tables.get("keys"), list) or not tables["keys"]:
        raise ValueError("must have tables [[keys]], and nothing else")
    keys = [_key_of(table, at) for at, table in enumerate(tables["keys"], 1)]
    for name in {key.name for key in keys}:
        if sum(key.name == name for key in keys) > 1:
            raise ValueError(f"two keys are named {name!r}")
    if len({key.digest for key in keys}) < len(keys):
        raise ValueError("two keys have the same sha256")
    return keys


def _key_of(table: Any, at: int) -> Key:
    if not isinstance(table, dict):
        raise ValueError("must have tables [[keys]], and nothing else")
    name = table.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError(f"key {at}: name must be text")
    for unknown in table.keys() - _FIELDS:
        raise ValueError(f"key {name!r}: {unknown!r} is not known; there are {', '.join(sorted(_FIELDS))}")
    digest, tenant, rate = table.get("sha256"), table.get("tenant", ""), table.get("rate", math.inf)
    if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise ValueError(f"key {name!r}: sha256 must be 64 hexadecimal digits")
    if not isinstance(tenant, str) or (tenant and not CORRELATION_ID.fullmatch(tenant)):
        raise ValueError(
            f"key {name!r}: tenant must have letters, digits, '.', '_', ':', '-', and at most 128"
        )
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not rate > 0:
        raise ValueError(f"key {name!r}: rate must be a number above 0")
    scopes, models = _texts(table, name, "scopes", (INFER,)), _texts(table, name, "models", _ALL)
    for scope in scopes:
        if scope not in SCOPES:
            raise ValueError(f"key {name!r}: there is no scope {scope!r}, but {', '.join(SCOPES)}")
    return Key(name, bytes.fromhex(digest), tenant, frozenset(scopes), models, float(rate))


def _texts(table: Mapping[str, Any], name: str, field_name: str, default: tuple[str, ...]) -> tuple[str, ...]:
    value = table.get(field_name, default)
    if not isinstance(value, list | tuple) or not all(isinstance(one, str) and one for one in value):
        raise ValueError(f"key {name!r}: {field_name} must be a list of texts")
    return tuple(value)


def now_s() -> float:
    """The clock of `Key.count`."""
    return time.monotonic()
