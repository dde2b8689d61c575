"""URLs of Redis Sentinel, and which server they lead to."""

from __future__ import annotations

import re
from typing import Any

import pytest

from carpool.redis_url import parse
from carpool.sentinel import Sentinels
from carpool.settings import ConnectionSettings, read_settings
from carpool.store.connection import Link, LinkError


def known(answers: dict[str, Any]) -> Any:
    def ask(url: str, command: tuple[str, ...]) -> Any:
        assert command == ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "main")
        answer = answers[url]
        if isinstance(answer, str):
            raise LookupError(answer)
        return answer

    return ask


def sentinels(url: str) -> Sentinels:
    found = Sentinels.of(url)
    assert found is not None
    return found


def test_url_of_a_server_names_no_sentinels() -> None:
    for url in ("redis://a:6379/0", "rediss://a", "unix:///tmp/redis.sock", "redis+other://a"):
        assert Sentinels.of(url) is None


def test_the_first_sentinel_that_knows_the_primary_counts() -> None:
    found = sentinels("redis+sentinel://a,b:7,c:8/main")
    assert found.urls == ["redis://a:26379?", "redis://b:7?", "redis://c:8?"]
    answers = {found.urls[0]: "refused", found.urls[1]: None, found.urls[2]: [b"10.0.0.1", b"6379"]}
    assert found.server_url(known(answers)) == "redis://10.0.0.1:6379/0?"


def test_credentials_database_and_options_are_those_of_the_server() -> None:
    found = sentinels("rediss+sentinel://me:p%40ss@[::1]:7/main/3?ssl_ca_certs=%2Fca&sentinel_password=s%2F1")
    assert found.urls == ["rediss://:s%2F1@[::1]:7?ssl_ca_certs=%2Fca"]
    url = found.server_url(known({found.urls[0]: [b"fe80::1", b"6380"]}))
    assert url == "rediss://me:p%40ss@[fe80::1]:6380/3?ssl_ca_certs=%2Fca"


def test_sentinels_get_neither_the_password_nor_the_database_of_the_server() -> None:
    found = sentinels("redis+sentinel://a/main?password=p%2Fss&db=3&sentinel_username=me&sentinel_password=s")
    assert found.urls == ["redis://me:s@a:26379?"]
    url = found.server_url(known({found.urls[0]: [b"10.0.0.1", b"6380"]}))
    server = parse(url)
    assert (server.user, server.password, server.database) == ("", "p/ss", 3)
    assert server.addresses == [("10.0.0.1", 6380)]


def test_error_says_what_each_sentinel_answered() -> None:
    found = sentinels("redis+sentinel://a,b/main")
    with pytest.raises(LookupError, match="refused; a sentinel does not know the service 'main'"):
        found.server_url(known({found.urls[0]: "refused", found.urls[1]: None}))


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("redis+sentinel://a:26379", "names no service"),
        ("redis+sentinel://a:x/main", "each sentinel must be HOST or HOST:PORT"),
        ("redis+sentinel://a,,b/main", "each sentinel must be HOST or HOST:PORT"),
    ],
)
def test_url_that_cannot_be_used_is_refused_at_once(
    url: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        read_settings(ConnectionSettings, ["--redis-url", url], "test")
    assert re.search(reason, capsys.readouterr().err)
    with pytest.raises(LinkError, match=reason):
        Link(url, name="test")


def test_settings_complete_a_url_of_sentinels(tmp_path: Any) -> None:
    password = tmp_path / "password"
    password.write_text("p/ss\n")
    arguments = ["--redis-url", "redis+sentinel://a:1,b:2/main", "--redis-user", "worker"]
    settings = read_settings(ConnectionSettings, [*arguments, "--redis-password-file", str(password)], "test")
    assert settings.redis_url == "redis+sentinel://worker:p%2Fss@a:1,b:2/main"
