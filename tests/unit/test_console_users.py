"""Users of the console, sessions, attempts to sign in, and what a proxy may tell."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from carpool_console.proxies import Proxies, is_same_origin, local_path
from carpool_console.sessions import (
    ADDRESSES_MAX,
    ATTEMPTS_FREE,
    FORGOTTEN_S,
    SESSIONS_MAX,
    SESSIONS_OF_USER_MAX,
    WAIT_S_MAX,
    Attempts,
    Sessions,
)
from carpool_console.users import (
    User,
    Users,
    hash_of,
    hash_of_nothing,
    is_password,
    new_password,
    read_users,
)

ANN = User("ann", "operator")


class FakeClock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


# --- users -------------------------------------------------------------------------------------------------


def test_a_password_is_kept_as_a_hash_that_only_it_matches() -> None:
    password = new_password()
    kept = hash_of(password)
    assert password not in kept
    assert is_password(kept, password)
    assert not is_password(kept, password[:-1])
    assert hash_of(password) != kept  # salted
    assert len({new_password() for _ in range(100)}) == 100


def test_the_hash_of_nothing_is_like_others_and_no_password_has_it() -> None:
    kept, of_nothing = hash_of("secret").split("$"), hash_of_nothing().split("$")
    assert of_nothing[:4] == kept[:4], "to compare takes as long"
    assert [*map(len, of_nothing)] == [*map(len, kept)]
    assert not is_password("$".join(of_nothing), "")


def test_users_are_written_for_their_owner_only_and_read_again(tmp_path: Path) -> None:
    users = Users(tmp_path / "deep" / "users.toml")
    assert users.put(ANN)
    assert not users.put(User("ann", "viewer"))
    assert users.put(User("bob@example.org", "viewer", hash_of("secret")))
    assert stat.S_IMODE(users.path.stat().st_mode) == 0o600
    assert not users.is_read_by_others
    assert [path.name for path in users.path.parent.iterdir()] == ["users.toml"]
    again = Users(users.path)
    assert again.find("ann") == User("ann", "viewer")
    bob = again.find("bob@example.org")
    assert bob is not None
    assert is_password(bob.password, "secret")
    assert users.remove("ann")
    assert not users.remove("ann")
    assert again.find("ann") is None, "the file is read again when it has changed"


def test_a_file_that_is_broken_later_leaves_the_users_before(tmp_path: Path) -> None:
    users = Users(tmp_path / "users.toml")
    users.put(ANN)
    users.path.write_text("[[users]")
    os.utime(users.path, ns=(1, 1))
    assert users.find("ann") == ANN
    assert "is no TOML" in users.problem
    users.path.chmod(0o640)
    assert users.is_read_by_others


def test_a_file_that_can_be_read_again_is_read_though_its_time_is_the_same(tmp_path: Path) -> None:
    """Such as one that was not readable until its mode was changed: that does not change the time."""
    users = Users(tmp_path / "users.toml")
    users.put(ANN)
    users.path.unlink()
    users.path.mkdir()  # unreadable, for root as well
    os.utime(users.path, ns=(1, 1))
    assert users.find("ann") == ANN
    assert users.problem
    users.path.rmdir()
    users.path.write_text("")
    os.utime(users.path, ns=(1, 1))
    assert users.find("ann") is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("users = 3", "must have tables [[users]]"),
        ("[other]", "must have tables [[users]]"),
        ('[[users]]\nname = "a b"\nrole = "viewer"', "user 1: name is 'a b'"),
        ('[[users]]\nname = "ann"\nrole = "admin"', "ann: role is 'admin': must be viewer or operator"),
        ('[[users]]\nname = "ann"\nrole = "viewer"\npassword = "secret"', "ann: password is no hash"),
        ('[[users]]\nname = "ann"\nrole = "viewer"\npassword = "scrypt$30$8$1$aaaa$aaaa"', "its parameters"),
        ('[[users]]\nname = "ann"\nrole = "viewer"\nkey = "x"', "user 1 has 'key'"),
        ('[[users]]\nname = "ann"\nrole = 3', "user 1: must be a table of texts"),
        (2 * '[[users]]\nname = "ann"\nrole = "viewer"\n', "two users are named 'ann'"),
    ],
)
def test_a_wrong_file_is_refused_by_name(text: str, reason: str) -> None:
    with pytest.raises(ValueError) as raised:
        read_users(text)
    assert reason in str(raised.value)


# --- sessions ----------------------------------------------------------------------------------------------


def test_a_session_ends_in_time_or_when_it_is_ended() -> None:
    clock = FakeClock()
    sessions = Sessions(100.0, clock)
    token, session = sessions.start(ANN)
    other, _ = sessions.start(ANN)
    assert sessions.find(token) is session
    assert sessions.find(f"{token}x") is None
    sessions.end(other)
    assert sessions.find(other) is None
    clock.now_s += 99
    assert sessions.find(token) is session
    clock.now_s += 1
    assert sessions.find(token) is None


def test_sessions_are_limited_and_the_oldest_one_ends_first() -> None:
    sessions = Sessions(100.0)
    users = [User(f"user{number}", "viewer") for number in range(SESSIONS_MAX + 1)]
    tokens = [sessions.start(user)[0] for user in users]
    assert sessions.find(tokens[0]) is None
    assert sessions.find(tokens[1]) is not None
    assert sessions.find(tokens[-1]) is not None


def test_who_signs_in_again_and_again_ends_the_own_sessions_only() -> None:
    sessions = Sessions(100.0)
    of_other, _ = sessions.start(User("bob", "operator"))
    tokens = [sessions.start(ANN)[0] for _ in range(SESSIONS_MAX)]
    assert sessions.find(of_other) is not None
    assert [token for token in tokens if sessions.find(token)] == tokens[-SESSIONS_OF_USER_MAX:]


def test_a_message_is_shown_once() -> None:
    _, session = Sessions(100.0).start(ANN)
    session.tell("square is paused")
    assert session.take_messages() == ["square is paused"]
    assert session.take_messages() == []


def test_an_address_waits_longer_with_each_attempt_that_fails() -> None:
    clock = FakeClock()
    attempts = Attempts(clock)
    for _ in range(ATTEMPTS_FREE - 1):
        attempts.failed("192.0.2.1")
        assert attempts.wait_s("192.0.2.1") == 0
    waits = []
    for _ in range(10):
        attempts.failed("192.0.2.1")
        waits.append(attempts.wait_s("192.0.2.1"))
    assert waits == sorted(waits)
    assert (waits[0], waits[-1]) == (1.0, WAIT_S_MAX)
    assert attempts.wait_s("192.0.2.2") == 0, "others need not wait"
    attempts.succeeded("192.0.2.1")
    assert attempts.wait_s("192.0.2.1") == 0


def test_attempts_are_forgotten_and_bounded() -> None:
    clock = FakeClock()
    attempts = Attempts(clock)
    for _ in range(ATTEMPTS_FREE + 3):
        attempts.failed("192.0.2.1")
    clock.now_s += FORGOTTEN_S + 1
    attempts.failed("192.0.2.1")
    assert attempts.wait_s("192.0.2.1") == 0
    for number in range(ATTEMPTS_FREE):
        attempts.failed(f"2001:db8::{number:x}")
    assert attempts.wait_s("2001:db8::ffff") > 0, "a client has a whole network of IPv6"
    for number in range(ADDRESSES_MAX):
        attempts.failed(f"10.0.{number // 250}.{number % 250}")
    assert attempts.wait_s("2001:db8::ffff") == 0, "the one that failed longest ago is forgotten"


# --- proxies -----------------------------------------------------------------------------------------------

PROXIES = Proxies(["10.0.0.0/8", "::1"], "X-Remote-User")


def request(address: str, scheme: str = "http", **headers: str) -> dict[str, object]:
    lines = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"client": (address, 1234), "scheme": scheme, "headers": lines}


TOLD = {"x_remote_user": "ann", "x_forwarded_for": "192.0.2.9", "x_forwarded_proto": "https"}


def test_only_a_trusted_proxy_tells_user_address_and_tls() -> None:
    trusted, other = request("10.1.2.3", **TOLD), request("192.0.2.1", **TOLD)
    assert PROXIES.user(trusted) == "ann"
    assert PROXIES.user(other) == ""
    assert PROXIES.client_address(trusted) == "192.0.2.9"
    assert PROXIES.client_address(other) == "192.0.2.1"
    assert PROXIES.is_secure(request("::1", **TOLD))
    assert PROXIES.is_secure(request("::ffff:10.1.2.3", **TOLD))
    assert not PROXIES.is_secure(other)
    assert PROXIES.is_secure(request("192.0.2.1", "https"))
    assert Proxies(["10.0.0.0/8"], "").user(trusted) == ""


def test_what_a_client_made_up_does_not_count() -> None:
    forged = request("10.1.2.3", x_forwarded_for="127.0.0.1, 192.0.2.9, 10.9.9.9")
    assert PROXIES.client_address(forged) == "192.0.2.9"
    assert PROXIES.client_address(request("10.1.2.3")) == "10.1.2.3"
    assert PROXIES.client_address({"client": None, "headers": []}) == ""
    by_both = request("10.1.2.3", x_forwarded_for="127.0.0.1", x_remote_user="operator")
    of_proxy = request("10.1.2.3", x_forwarded_for="192.0.2.9", x_remote_user="ann")
    by_both["headers"] = [*by_both["headers"], *of_proxy["headers"]]  # type: ignore[misc]
    assert PROXIES.client_address(by_both) == "192.0.2.9"
    assert PROXIES.user(by_both) == "", "which of the two is the proxy's is not known"


@pytest.mark.parametrize(
    ("origin", "is_secure", "same"),
    [
        ("http://console:8800", False, True),
        ("https://console:8800", False, True),  # a proxy ends TLS and does not say so
        ("https://console:8800", True, True),
        ("http://console:8800", True, False),
        ("http://console:8801", False, False),
        ("http://evil.example", False, False),
        ("null", False, False),
        ("", False, False),
        ("ftp://console:8800", False, False),
        ("http://[", False, False),
    ],
)
def test_origin_of_a_form(origin: str, is_secure: bool, same: bool) -> None:
    assert is_same_origin({"host": "Console:8800", "origin": origin}, is_secure=is_secure) is same


@pytest.mark.parametrize(
    "path", ["//evil.example", "/\\evil.example", "https://evil.example", "", "/a\nb", "/" + "a" * 3000]
)
def test_only_paths_of_this_server_are_gone_to(path: str) -> None:
    assert local_path(path) == "/"
    assert local_path("/models/square?q=1") == "/models/square?q=1"
