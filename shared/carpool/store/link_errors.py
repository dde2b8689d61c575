"""What goes wrong with a connection to Redis, or with a command, and what to do about it."""

from __future__ import annotations

import re
from typing import Final

from carpool.address import without_password
from carpool.errors import UnavailableError
from carpool.shown import name_of


class LinkError(UnavailableError):
    """The connection to Redis failed. It is not known whether a command that was sent took effect."""


class SignInError(LinkError):
    """Redis does not accept the user name and password, or there are none and it wants them."""


class UnsupportedServerError(LinkError):
    """The server is too old for Carpool. As LinkError it is tried again: another may come in its place."""


class CommandError(Exception):
    """Redis replied with an error. `code` is its first word: NOSCRIPT, OOM, NOGROUP, WRONGTYPE, ..."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


# Errors of the connection and not of the command: Redis loads its data, runs a script for long, is (now) a
# replica, has lost its cluster, has given a slot away or is about to, or the user's password was changed. To
# connect again, perhaps to another server under this name, and to repeat the command is right for all of
# them. Not so for what an operator has to mend: OOM, MISCONF (the disk), NOREPLICAS.
LINK_ERROR_CODES: Final = frozenset(
    {
        *("LOADING", "BUSY", "READONLY", "UNBLOCKED", "MASTERDOWN", "NOAUTH", "WRONGPASS"),
        *("CLUSTERDOWN", "MOVED", "ASK", "TRYAGAIN"),
    }
)
_SIGNED_OUT: Final = re.compile(
    "NOAUTH|WRONGPASS|Authentication required|invalid username-password|invalid password"
)


# How Redis 6 reports an error of a command in a script; later ones begin with the command's own code.
_ERROR_IN_SCRIPT: Final = re.compile(
    r"ERR Error running script \(call to f_\w+\): @user_script:\d+: (?:@user_script: \d+: )?-?([A-Z]+) "
)
# EXEC of a transaction that Redis refuses as it is executed, not while its commands are sent.
_ERROR_OF_EXEC: Final = re.compile(r"EXECABORT Transaction discarded because of: ([A-Z]+) ")


def command_error(text: str) -> CommandError:
    """The error of a reply. Its code is that of the cause, in a script or of a transaction."""
    cause = _ERROR_IN_SCRIPT.match(text) or _ERROR_OF_EXEC.match(text)
    return CommandError(text.split(" ", 1)[0] if cause is None else cause[1], text)


# Scheme of the URL, pattern of the error, what to do about it. The first that matches is used.
_REMEDIES: Final = (
    ("rediss:", "mismatch", "connect by a host name that is in its certificate"),
    (
        "rediss:",
        "CERTIFICATE_VERIFY_FAILED",
        "set CARPOOL_REDIS_CA_FILE to the certificate of the CA that signed it, or add ?ssl_ca_certs=FILE",
    ),
    ("rediss:", "Timeout connecting", "if this port does not use TLS, the URL must begin with redis://"),
    (
        "rediss:",
        "CERTIFICATE_REQUIRED|EOF occurred|Broken pipe|reset by peer|closed by server",
        "if it requires a client certificate, set CARPOOL_REDIS_CERT_FILE and CARPOOL_REDIS_KEY_FILE, "
        "or add ?ssl_certfile=FILE&ssl_keyfile=FILE to the URL",
    ),
    ("redis:", "reset by peer|closed by server", "if this port uses TLS, the URL must begin with rediss://"),
    (
        "",
        "Authentication required",
        "set CARPOOL_REDIS_USER and CARPOOL_REDIS_PASSWORD_FILE, or use a URL with USER:PASSWORD@ (a client "
        "that is given a URL reads no settings)",
    ),
    (
        "",
        "invalid username-password|invalid password|WRONGPASS",
        "the user name or the password is wrong, or one of them is missing: see CARPOOL_REDIS_USER and "
        "CARPOOL_REDIS_PASSWORD_FILE, or the URL",
    ),
    ("", "'select'", "`carpool acl` allows database 0 only: give each installation its own prefix instead"),
)  # fmt: skip


def link_error(url: str, error: Exception, *, connecting: bool = False) -> LinkError:
    """`connecting`: the connection was not established yet, so the settings may be wrong: add a remedy."""
    is_late = isinstance(error, BlockingIOError) or (isinstance(error, TimeoutError) and not connecting)
    reason = "no answer in time" if is_late else str(error)
    for scheme, pattern, remedy in _REMEDIES if connecting else ():
        if url.startswith(scheme) and re.search(pattern, reason):
            reason = f"{reason.rstrip('.')}; {remedy}"
            break
    kind = SignInError if _SIGNED_OUT.search(str(error)) else LinkError
    return kind(f"Redis at {without_password(url)}: {reason}")


# The arguments of a command that Redis does not know.
_ARGUMENTS: Final = re.compile(r",? with args beginning with.*", re.DOTALL)


def reason_of(error: BaseException, role: str) -> str:
    """The error as a service logs it; of a missing permission also which `role` it needs.

    Its text only if Redis or the system wrote it: any other may quote a body.
    """
    if isinstance(error, CommandError) and error.code == "NOPERM":
        return (
            f"{error}: a {role} needs the role {role} (CARPOOL_REDIS_USER, CARPOOL_REDIS_PASSWORD_FILE), "
            "with the rules that this version's `carpool acl` writes"
        )
    if isinstance(error, CommandError):
        return _ARGUMENTS.sub("", str(error))
    return (str(error) if isinstance(error, OSError) else "") or name_of(error)
