"""URLs of Redis. Only this module reads them, and it is strict: what could be read in two ways, and so lead
to another server or database than the one that was meant, is refused.

    redis://[USER:PASSWORD@]HOST[:PORT][/DATABASE][?OPTIONS]
    unix://[USER:PASSWORD@]/PATH[?OPTIONS]
    redis+sentinel://[USER:PASSWORD@]HOST[:PORT][,HOST[:PORT]...]/SERVICE[/DATABASE][?OPTIONS]
    redis+cluster://[USER:PASSWORD@]HOST[:PORT][,HOST[:PORT]...][?OPTIONS]

With `rediss` in place of `redis`, connections use TLS. An IPv6 address is in brackets. OPTIONS are
NAME=VALUE, joined by &; `_OPTIONS` has all that there are. User, password, path, service and the values of
options are percent-encoded.

No error quotes what may be a part of a password: no value, and no text of a part that could not be read.

Why: docs/decisions/0081.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

PORT: Final = 6379
SENTINEL_PORT: Final = 26379
DATABASE_MAX: Final = 2**31 - 1

# Name -> how each server is connected to, and what is named: a server (""), sentinels or nodes of a cluster.
_SCHEMES: Final = {
    "redis": ("redis", ""),
    "rediss": ("rediss", ""),
    "unix": ("unix", ""),
    "redis+sentinel": ("redis", "sentinel"),
    "rediss+sentinel": ("rediss", "sentinel"),
    "redis+cluster": ("redis", "cluster"),
    "rediss+cluster": ("rediss", "cluster"),
}
_SCHEME_ERROR: Final = (
    "must begin with redis://, rediss://, unix://, redis+sentinel:// or redis+cluster://, as in "
    "redis://127.0.0.1:6379/0"
)
_ENCODE: Final = (
    "special characters in a user name, a password or a path must be percent-encoded: # as %23, / as %2F, "
    "? as %3F, @ as %40, % as %25, a space as %20; or put the password into a file "
    "(CARPOOL_REDIS_PASSWORD_FILE)"
)
_HOST_ERRORS: Final = {
    "": "the host must be a name or an address, IPv6 in brackets, and the port after it a number from 1 to "
    "65535, as in redis://127.0.0.1:6379/0; " + _ENCODE,
    "sentinel": "each sentinel must be HOST or HOST:PORT: redis+sentinel://HOST:26379/SERVICE; " + _ENCODE,
    "cluster": "each node must be HOST or HOST:PORT: redis+cluster://HOST:6379,HOST:6379; " + _ENCODE,
}
_HOST_AND_PORT: Final = re.compile(r"(?:\[([^\[\]]+)\]|([\w.-]+))(?::([0-9]{1,5}))?")
_DATABASE: Final = re.compile("/?|/([0-9]{1,10})/?")
_CERT_REQS: Final = ("required", "optional", "none")
_BOOLEANS: Final = {
    **dict.fromkeys(("true", "yes", "on", "1", "t", "y"), True),
    **dict.fromkeys(("false", "no", "off", "0", "f", "n"), False),
}


class Parts(NamedTuple):
    """The parts of a URL as they are in it. `credentials` ends with its @; `path` begins with a slash; either
    may be empty."""

    scheme: str
    credentials: str
    hosts: str
    path: str
    query: str


class RedisUrl(NamedTuple):
    """What a URL says. Texts are decoded."""

    scheme: str  # redis, rediss (with TLS) or unix
    kind: str  # what the addresses are: "" for one server, sentinel, or cluster
    addresses: Sequence[tuple[str, int]]  # hosts without brackets, and ports; none for a Unix socket
    path: str  # of the Unix socket
    service: str  # of the sentinels
    database: int
    user: str
    password: str
    sentinel_user: str
    sentinel_password: str
    tls: Mapping[str, str | int | bool]  # the options that begin with ssl_

    @property
    def has_password(self) -> bool:
        """Whether any password is in it."""
        return bool(self.password or self.sentinel_password or "ssl_password" in self.tls)

    @property
    def has_credentials(self) -> bool:
        """Whether anything in it says who connects: a user, a password, or a certificate of the client."""
        users = self.user or self.sentinel_user
        return bool(users or self.has_password or {"ssl_certfile", "ssl_keyfile"} & self.tls.keys())

    def arguments(self) -> dict[str, Any]:
        """For a URL of one server: where a connection of redis-py leads, and how it signs in."""
        if self.scheme == "unix":
            where: dict[str, Any] = {"path": self.path}
        else:
            ((host, port),) = self.addresses
            where = {"host": host, "port": port}
        login = {"db": self.database, "username": self.user or None, "password": self.password or None}
        return {**where, **login, **self.tls}


def checked_url(url: str) -> str:
    """The URL, if it is one. Raises ValueError, whose message says what is wrong."""
    parse(url)
    return url


def parse(url: str) -> RedisUrl:
    """What a URL says. Raises ValueError, whose message says what is wrong and contains no password."""
    parts = split(url)
    scheme, kind = _SCHEMES[parts.scheme]
    options = _read_options(parts.query, _Context(scheme, kind))
    tls = {name: value for name, value in options.items() if name.startswith("ssl_")}
    user, _, password = parts.credentials.removesuffix("@").partition(":")
    path, service, database = _read_path(parts, kind)
    return RedisUrl(
        scheme,
        kind,
        _read_addresses(parts, kind),
        path,
        service,
        _one_database(database, options.get("db"), kind),
        _only("user names", _decoded(user), options.get("username")),
        _only("passwords", _decoded(password), options.get("password")),
        str(options.get("sentinel_username", "")),
        str(options.get("sentinel_password", "")),
        tls,
    )


def split(url: str) -> Parts:
    """The parts of a URL. Raises ValueError if it cannot be told where they begin and end."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in _SCHEMES:
        raise ValueError(_SCHEME_ERROR)
    if "#" in rest:
        raise ValueError(f"contains a #; {_ENCODE}")
    if not rest.isprintable() or any(map(str.isspace, rest)):
        raise ValueError(f"contains a space or a control character; {_ENCODE}")
    before, _, query = rest.partition("?")
    authority, slash, path = before.partition("/")
    if "@" in path or "@" in query:  # then / or ? is perhaps a part of the password
        raise ValueError(f"contains a / or a ? before the @, or an @ after them; {_ENCODE}")
    credentials, at, hosts = authority.rpartition("@")
    return Parts(scheme, credentials + at, hosts, slash + path, query)


def _decoded(text: str) -> str:
    """A text without its percent-encoding."""
    if re.search("%(?![0-9a-fA-F]{2})", text):
        raise ValueError(f"contains a % without two hexadecimal digits; {_ENCODE}")
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        raise ValueError("contains percent-encoded bytes that are not UTF-8 text") from None


# --- servers ------------------------------------------------------------------------------------------------


def _read_addresses(parts: Parts, kind: str) -> list[tuple[str, int]]:
    if parts.scheme == "unix":
        if parts.hosts:
            raise ValueError(f"names no absolute path: unix:///run/redis.sock has three slashes; {_ENCODE}")
        return []
    if not parts.hosts:
        raise ValueError(
            f"names no host: {parts.scheme}://HOST:{SENTINEL_PORT if kind == 'sentinel' else PORT}"
        )
    if not kind and "," in parts.hosts:
        raise ValueError(
            "names several hosts: for sentinels it must begin with redis+sentinel://, for the nodes of a "
            "cluster with redis+cluster://"
        )
    return [_read_address(text, kind) for text in parts.hosts.split(",")]


def _read_address(text: str, kind: str) -> tuple[str, int]:
    """Host and port of HOST or HOST:PORT."""
    found = _HOST_AND_PORT.fullmatch(text)
    if found is None:
        raise ValueError(_HOST_ERRORS[kind])
    ipv6, name, digits = found.groups()
    host = _ipv6(ipv6) if ipv6 else name if _is_host_name(name) else ""
    port = int(digits) if digits else SENTINEL_PORT if kind == "sentinel" else PORT
    if not host or not 0 < port < 65_536:
        raise ValueError(_HOST_ERRORS[kind])
    return host, port


def _ipv6(text: str) -> str:
    """An IPv6 address, perhaps with a zone (fe80::1%25eth0); empty if it is none."""
    address, percent, zone = text.partition("%")
    zone = zone.removeprefix("25")
    try:
        socket.inet_pton(socket.AF_INET6, address)
    except OSError:
        return ""
    if not percent:
        return address
    return f"{address}%{zone}" if re.fullmatch(r"[\w.-]+", zone) else ""


def _is_host_name(name: str) -> bool:
    try:
        name.encode("idna")  # as the look-up of the name does: no label may be empty or too long
    except UnicodeError:
        return False
    return True


def _read_path(parts: Parts, kind: str) -> tuple[str, str, str]:
    """The path of a Unix socket, the service of sentinels, and what names the database."""
    if parts.scheme == "unix":
        path = _path(_decoded(parts.path))
        if path in ("", "/"):
            raise ValueError("names no path: unix:///run/redis.sock")
        return path, "", ""
    if kind != "sentinel":
        return "", "", parts.path
    service, slash, database = parts.path.removeprefix("/").partition("/")
    if not service:
        raise ValueError("names no service: redis+sentinel://HOST:26379/SERVICE")
    return "", _decoded(service), slash + database


def _one_database(path: str, option: str | int | bool | None, kind: str) -> int:
    """The database, which the path or the option `db` names."""
    found = _DATABASE.fullmatch(path)
    database = None if found is None or found[1] is None else int(found[1])
    if kind == "cluster" and (found is None or database or option):
        raise ValueError("Redis Cluster has database 0 only: redis+cluster://HOST:6379,HOST:6379")
    if found is None or (database or 0) > DATABASE_MAX:
        raise ValueError(
            f"the database after the last / must be a number, 0 or higher, as in redis://127.0.0.1:6379/0; "
            f"{_ENCODE}"
        )
    if database is not None and option is not None and database != option:
        raise ValueError("names two databases, one after the last / and one as db; remove one of them")
    return (database or 0) if option is None else int(option)


def _only(what: str, before_the_host: str, option: str | int | bool | None) -> str:
    if before_the_host and option is not None:
        raise ValueError(f"has two {what}, one before the @ and one in an option; remove one of them")
    return before_the_host if option is None else str(option)


# --- options ------------------------------------------------------------------------------------------------


class _Context(NamedTuple):
    """The URL that has an option: its scheme and kind, as in RedisUrl."""

    scheme: str
    kind: str


def _text(text: str) -> str:
    return text


def _path(text: str) -> str:
    if "\0" in text:
        raise ValueError("must be a path; it contains a zero byte")
    return text


def _number(text: str) -> int:
    if not re.fullmatch("[0-9]{1,10}", text) or int(text) > DATABASE_MAX:
        raise ValueError("must be a number, 0 or higher")
    return int(text)


def _without_effect(text: str) -> str:
    """How redis-py presents replies to the program that calls it: another program may share the URL."""
    return text


def _cert_reqs(text: str) -> str:
    if text not in _CERT_REQS:
        raise ValueError(
            "must be required, optional or none, in these words: CERT_NONE of Python is none, and so on"
        )
    return text


def _boolean(text: str) -> bool:
    if (value := _BOOLEANS.get(text.lower())) is None:
        raise ValueError("must be true or false")
    return value


def _min_version(text: str) -> int:
    if text not in ("771", "772"):
        raise ValueError("must be 771 (TLS 1.2) or 772 (TLS 1.3)")
    return int(text)


_OPTIONS: Final[Mapping[str, Callable[[str], str | int | bool]]] = {
    "db": _number,
    "username": _text,
    "password": _text,
    "sentinel_username": _text,
    "sentinel_password": _text,
    **dict.fromkeys(("decode_responses", "encoding", "encoding_errors", "protocol"), _without_effect),
    "ssl_ca_certs": _path,  # a file
    "ssl_ca_path": _path,  # a folder
    "ssl_certfile": _path,
    "ssl_keyfile": _path,
    "ssl_password": _text,  # of the key
    "ssl_cert_reqs": _cert_reqs,
    "ssl_check_hostname": _boolean,
    "ssl_min_version": _min_version,
    "ssl_ciphers": _text,
}
_SECRETS: Final = frozenset({"password", "sentinel_password", "ssl_password"})

# Options of redis-py that Carpool does not have, and why.
_REFUSED: Final = {
    **dict.fromkeys(
        (
            *("timeout", "socket_timeout", "socket_connect_timeout", "socket_keepalive", "socket_read_size"),
            *("health_check_interval", "retry_on_timeout", "retry_on_error"),
        ),
        "is not supported: Carpool has its own timeouts and retries; remove it",
    ),
    **dict.fromkeys(
        ("client_name", "max_connections", "lib_name", "lib_version"),
        "is not supported: Carpool names and counts its connections itself; remove it",
    ),
    **dict.fromkeys(
        ("host", "port", "path"),
        "is not supported: name the server before the ?, as in redis://127.0.0.1:6379/0",
    ),
}


def _read_options(query: str, context: _Context) -> dict[str, str | int | bool]:
    """The values of the options by name."""
    options: dict[str, str | int | bool] = {}
    for at, option in enumerate(query.split("&") if query else (), 1):
        name, equals, value = option.partition("=")
        # After a password that contains an &, what looks like a name may be a part of it.
        is_shown = re.fullmatch("[a-zA-Z_]{1,40}", name) and not _SECRETS & options.keys()
        shown = f"the option {name}" if is_shown or name in _OPTIONS else f"option number {at} after the ?"
        if name in options:
            raise ValueError(f"{shown} is given twice")
        if error := _misplaced(name, context, hint=bool(is_shown)):
            raise ValueError(f"{shown} {error}")
        if not equals:
            raise ValueError(f"{shown} has no value: write {name}=VALUE")
        try:
            options[name] = _read_value(name, value)
        except ValueError as error_of_value:
            raise ValueError(f"{shown} {error_of_value}") from None
    return options


def _misplaced(name: str, context: _Context, *, hint: bool = False) -> str:
    """Why such a URL has no such option; empty if it may have it. `hint`: say which may be meant."""
    if name in _REFUSED:
        return _REFUSED[name]
    if name not in _OPTIONS:
        known = [option for option in _OPTIONS if not _misplaced(option, context)]
        in_path = "; a ? in the path must be percent-encoded as %3F" if context.scheme == "unix" else ""
        similar = _similar(name, known) if hint else ""
        return f"is unknown{similar}{in_path}; there are {', '.join(known)}"
    if name.startswith("ssl_") and context.scheme != "rediss":
        return "needs TLS: the URL must begin with rediss://"
    if name.startswith("sentinel_") and context.kind != "sentinel":
        return "is for sentinels: the URL must begin with redis+sentinel://"
    return ""


def _similar(name: str, known: Sequence[str]) -> str:
    import difflib  # noqa: PLC0415 (2 ms, and needed for an error only)

    similar = difflib.get_close_matches(name.lower(), known, n=1)
    return f"; did you mean {similar[0]}?" if similar else ""


def _read_value(name: str, text: str) -> str | int | bool:
    if not text:
        raise ValueError("must not be empty")
    if "+" in text and name in _SECRETS:
        raise ValueError("contains a +, which could be a space: write + as %2B, a space as %20")
    return _OPTIONS[name](_decoded(text.replace("+", " ")))
