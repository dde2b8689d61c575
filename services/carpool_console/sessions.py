"""Who is signed in: sessions in memory, and attempts to sign in, which are limited."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from ipaddress import IPv6Address, ip_address
from typing import Final

from carpool_console.users import User

SESSIONS_MAX: Final = 1000
SESSIONS_OF_USER_MAX: Final = 50  # so that nobody ends those of others by signing in again and again
MESSAGES_MAX: Final = 20
ATTEMPTS_FREE: Final = 5  # of one address, that fail before it has to wait
WAIT_S_MAX: Final = 60.0
FORGOTTEN_S: Final = 900.0
ADDRESSES_MAX: Final = 4096
_NETWORK_BITS: Final = 64  # of an address of IPv6: one client has that many

Clock = Callable[[], float]


@dataclass(slots=True, eq=False)
class Session:
    """A user who is signed in, as the file of users had it then. `csrf`: what each form must bring back.

    `is_of_proxy`: a proxy signed the user in, by its header.
    """

    user: User
    ends_s: float
    is_of_proxy: bool = False
    csrf: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    _messages: list[str] = field(default_factory=list)

    def tell(self, message: str) -> None:
        """Show this on the next page."""
        self._messages = [*self._messages, message][-MESSAGES_MAX:]

    def take_messages(self) -> list[str]:
        """What is to be shown, once."""
        messages, self._messages = self._messages, []
        return messages


class Sessions:
    """All sessions, by the hash of the token that the browser keeps. For any number of threads."""

    def __init__(self, lasts_s: float, clock: Clock = time.monotonic) -> None:
        self._lasts_s = lasts_s
        self._clock = clock
        self._lock = threading.Lock()
        self._sessions: dict[bytes, Session] = {}  # oldest first

    def start(self, user: User, *, is_of_proxy: bool = False) -> tuple[str, Session]:
        """A new session and its token. If the user has too many, the oldest of these ends; if all users
        have, the oldest of all."""
        token, session = secrets.token_urlsafe(32), Session(user, self._clock() + self._lasts_s, is_of_proxy)
        with self._lock:
            now_s = self._clock()
            self._sessions = {key: one for key, one in self._sessions.items() if one.ends_s > now_s}
            own = [key for key, one in self._sessions.items() if one.user.name == user.name]
            for key in own[: max(0, len(own) - SESSIONS_OF_USER_MAX + 1)]:
                del self._sessions[key]
            while len(self._sessions) >= SESSIONS_MAX:
                del self._sessions[next(iter(self._sessions))]
            self._sessions[_key(token)] = session
        return token, session

    def find(self, token: str) -> Session | None:
        """The session of this token, unless it has ended."""
        with self._lock:
            session = self._sessions.get(_key(token))
        return session if session is not None and session.ends_s > self._clock() else None

    def end(self, token: str) -> None:
        """Sign out."""
        with self._lock:
            self._sessions.pop(_key(token), None)


def _key(token: str) -> bytes:
    return sha256(token.encode("utf-8", "replace")).digest()


@dataclass(slots=True)
class _Failures:
    number: int = 0
    until_s: float = 0.0  # before which no attempt is looked at
    last_s: float = 0.0


class Attempts:
    """Attempts to sign in that failed, by address. After some, an address waits longer with each.

    Names are not counted: else anybody could keep a user from signing in.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failures: dict[str, _Failures] = {}  # the one that failed last is last

    def wait_s(self, address: str) -> float:
        """For how long this address has to wait before its next attempt; 0 if it need not."""
        with self._lock:
            failures = self._failures.get(_network(address))
            return 0.0 if failures is None else max(0.0, failures.until_s - self._clock())

    def failed(self, address: str) -> None:
        """An attempt failed."""
        network, now_s = _network(address), self._clock()
        with self._lock:
            failures = self._failures.pop(network, _Failures())
            if now_s - failures.last_s > FORGOTTEN_S:
                failures = _Failures()
            failures.number += 1
            failures.last_s = now_s
            if (over := failures.number - ATTEMPTS_FREE) >= 0:
                failures.until_s = now_s + min(WAIT_S_MAX, 2.0 ** min(over, 10))
            while len(self._failures) >= ADDRESSES_MAX:
                del self._failures[next(iter(self._failures))]
            self._failures[network] = failures

    def succeeded(self, address: str) -> None:
        """Somebody signed in."""
        with self._lock:
            self._failures.pop(_network(address), None)


def _network(address: str) -> str:
    try:
        parsed = ip_address(address)
    except ValueError:
        return address
    if isinstance(parsed, IPv6Address) and parsed.ipv4_mapped is None:
        return str(int(parsed) >> (128 - _NETWORK_BITS))
    return str(parsed)
