"""URLs of Redis: each is read as it was meant, or refused with a sentence that has no password."""

from __future__ import annotations

import re
from typing import Any, Final
from urllib.parse import quote, unquote

import pytest
import redis
import redis.asyncio
from hypothesis import given
from hypothesis import strategies as st

from carpool import AsyncClient, Client, InvalidArgumentError
from carpool.address import without_password
from carpool.redis_url import checked_url, parse
from carpool.store.async_link import AsyncLink
from carpool.store.connection import Link, LinkError

HOST: Final = "10.0.0.1"
SPECIAL: Final = "#?/@:%[]&=+,; \\\t'\"éａ0"
JUNK: Final = st.text(alphabet=SPECIAL, max_size=8)
PASSWORDS: Final = st.builds(lambda before, after: f"{before}s3cret{after}", JUNK, JUNK)


def read(url: str) -> tuple[str, list[tuple[str, int]], int, str, str]:
    found = parse(url)
    return found.scheme, list(found.addresses), found.database, found.user, found.password


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://h", ("redis", [("h", 6379)], 0, "", "")),
        ("redis://h:7/", ("redis", [("h", 7)], 0, "", "")),
        ("redis://h:7/3", ("redis", [("h", 7)], 3, "", "")),
        ("redis://h:7/3/", ("redis", [("h", 7)], 3, "", "")),
        ("redis://h:7?db=3", ("redis", [("h", 7)], 3, "", "")),
        ("redis://h:7/?db=3", ("redis", [("h", 7)], 3, "", "")),
        ("redis://h:7/3?db=3", ("redis", [("h", 7)], 3, "", "")),
        ("redis://h/0?", ("redis", [("h", 6379)], 0, "", "")),
        ("redis://h/0?protocol=2", ("redis", [("h", 6379)], 0, "", "")),
        ("redis://@h", ("redis", [("h", 6379)], 0, "", "")),
        ("redis://u@h", ("redis", [("h", 6379)], 0, "u", "")),
        ("redis://u:@h", ("redis", [("h", 6379)], 0, "u", "")),
        ("redis://:a:b@h", ("redis", [("h", 6379)], 0, "", "a:b")),
        ("redis://:a@b@h", ("redis", [("h", 6379)], 0, "", "a@b")),
        ("redis://%75:%23a%3Fb%2Fc%40d%25@h", ("redis", [("h", 6379)], 0, "u", "#a?b/c@d%")),
        ("redis://h?username=u&password=%23%2B", ("redis", [("h", 6379)], 0, "u", "#+")),
        ("redis://my_redis.example.:1", ("redis", [("my_redis.example.", 1)], 0, "", "")),
        ("redis://bücher.example:1", ("redis", [("bücher.example", 1)], 0, "", "")),
        ("rediss://[::1]:7/0", ("rediss", [("::1", 7)], 0, "", "")),
        ("redis://[fe80::1%25eth0]", ("redis", [("fe80::1%eth0", 6379)], 0, "", "")),
        ("redis://[fe80::1%eth0]", ("redis", [("fe80::1%eth0", 6379)], 0, "", "")),
        ("unix:///run/redis.sock?db=2", ("unix", [], 2, "", "")),
        ("unix://u:p@/run/redis.sock", ("unix", [], 0, "u", "p")),
        ("redis+sentinel://a,[::1]:7/main/2", ("redis", [("a", 26379), ("::1", 7)], 2, "", "")),
        ("rediss+cluster://u:p@a,b:7/0", ("rediss", [("a", 6379), ("b", 7)], 0, "u", "p")),
    ],
)
def test_url_is_read_as_it_was_meant(url: str, expected: Any) -> None:
    assert read(url) == expected
    assert checked_url(url) == url


def test_paths_and_services_are_decoded() -> None:
    assert parse("unix:///run/a%23b%3Fc%20d.sock").path == "/run/a#b?c d.sock"
    assert parse("redis+sentinel://a/my%20main/1").service == "my main"


@pytest.mark.parametrize(
    ("url", "pattern"),
    [
        # A password that was not percent-encoded.
        ("redis://:#s3cret@10.0.0.1:6390/0", "contains a #.*percent-encoded: # as %23"),
        ("redis://:6379#s3cret@10.0.0.1:6390/0", "contains a #"),
        ("redis://default:9#s3cret@10.0.0.1", "contains a #"),
        ("redis://:12?s3cret@10.0.0.1:6390/0", "a / or a .* before the @.*percent-encoded"),
        ("redis://:12/s3cret@10.0.0.1:6390/0", "a / or a .* before the @.*percent-encoded"),
        ("unix://:12/s3cret@/run/redis.sock", "a / or a .* before the @.*percent-encoded"),
        ("redis+sentinel://:#s3cret@10.0.0.1/main", "contains a #"),
        ("redis+cluster://:12/s3cret@10.0.0.1", "percent-encoded"),
        ("redis+cluster://:12?s3cret@10.0.0.1", "percent-encoded"),
        ("redis://10.0.0.1?password=s3cret@x", "an @ after them.*percent-encoded"),
        ("redis://10.0.0.1?password=s3cret#x", "contains a #"),
        ("redis://10.0.0.1?password=s3cret+x", "password contains a .*write . as %2B"),
        ("redis://:s3cret%@10.0.0.1", "hexadecimal digits.*percent-encoded"),
        ("redis://:s3cret%zz@10.0.0.1", "hexadecimal digits"),
        ("redis://:s3cret%ff@10.0.0.1", "not UTF-8"),
        ("redis://:s3cret x@10.0.0.1", "a space or a control character.*percent-encoded"),
        ("redis://:s3cret\n@10.0.0.1", "a space or a control character"),
        ("redis://:s3cret", "the port after it a number.*percent-encoded"),
        ("redis://10.0.0.1?password=a&s3cret=b", "option number 2 after the . is unknown; there are db,"),
        ("redis://10.0.0.1?password=a&hush=b", "option number 2 after the . is unknown; there are db,"),
        ("redis://10.0.0.1?password=a&s3cret", "option number 2 after the . is unknown; there are db,"),
        ("redis://10.0.0.1?password=a&", "option number 2 after the ."),
        ("redis://:s3cret@10.0.0.1?password=x", "two passwords"),
        ("redis://u:s3cret@10.0.0.1?username=x", "two user names"),
        # Servers.
        ("http://10.0.0.1", "must begin with redis://"),
        ("10.0.0.1:6379", "must begin with redis://"),
        ("REDIS://10.0.0.1", "must begin with redis://"),
        (" redis://10.0.0.1", "must begin with redis://"),
        ("redis://10.0.0.1/0 ", "contains a space"),
        ("redis:/10.0.0.1", "must begin with redis://"),
        ("redis://", "names no host"),
        ("redis:///10.0.0.1:6390", "names no host: redis://HOST"),
        ("rediss://?db=1", "names no host: rediss://HOST"),
        ("redis://u:s3cret@/0", "names no host"),
        ("redis+sentinel:///main", "names no host"),
        ("redis://10.0.0.1,10.0.0.2:6390", r"several hosts.*redis\+cluster"),
        ("redis://10.0.0.1:", "a number from 1 to 65535"),
        ("redis://10.0.0.1:0", "a number from 1 to 65535"),
        ("redis://10.0.0.1:70000", "a number from 1 to 65535"),
        ("redis://10.0.0.1:+1", "a number from 1 to 65535"),
        ("redis://10.0.0.1:٣", "a number from 1 to 65535"),
        ("redis://10.0.0.1\\:6390", "the host must be"),
        ("redis://10.0..1", "the host must be"),
        ("redis://%31", "the host must be"),
        ("redis://[10.0.0.1]:6390", "IPv6 in brackets"),
        ("redis://::1", "IPv6 in brackets"),
        ("redis://[::1", "IPv6 in brackets"),
        ("redis://[::1%25]", "IPv6 in brackets"),
        ("redis+sentinel://a,,b/main", "each sentinel must be HOST or HOST:PORT"),
        ("redis+sentinel://a", "names no service"),
        ("redis+sentinel://a//1", "names no service"),
        ("redis+cluster://a,b:x", "each node must be HOST or HOST:PORT"),
        ("unix://tmp/redis.sock", "three slashes"),
        ("unix://", "names no path"),
        ("unix:///", "names no path"),
        ("unix:///tmp/a#b.sock", "contains a #"),
        ("unix:///tmp/a?b.sock", "the path must be percent-encoded as %3F"),
        ("unix:///tmp/a%00b", "zero byte"),
        # Databases.
        ("redis://10.0.0.1/prod", "the database after the last / must be a number"),
        ("redis://10.0.0.1/1/2", "the database after the last / must be a number"),
        ("redis://10.0.0.1/-1", "the database after the last / must be a number"),
        ("redis://10.0.0.1/1x", "the database after the last / must be a number"),
        ("redis://10.0.0.1//1", "the database after the last / must be a number"),
        ("redis://10.0.0.1/%31", "the database after the last / must be a number"),
        ("redis://10.0.0.1/4294967296", "the database after the last / must be a number"),
        ("redis://10.0.0.1/1?db=2", "two databases"),
        ("redis://10.0.0.1?db=-1", "option db must be a number"),
        ("redis+sentinel://a/main/prod", "the database after the last / must be a number"),
        ("redis+sentinel://a/main/1?db=2", "two databases"),
        ("redis+cluster://a/1", "has database 0 only"),
        ("redis+cluster://a?db=1", "has database 0 only"),
        # Options.
        ("redis://10.0.0.1?socket_timeout=0.2", "option socket_timeout is not supported.*timeouts"),
        ("redis://10.0.0.1?host=evil", "option host is not supported: name the server before the ."),
        (
            "redis://10.0.0.1?protokoll=3",
            "option protokoll is unknown; did you mean protocol.; there are db,",
        ),
        ("redis://10.0.0.1?DB=3", "option DB is unknown; did you mean db"),
        ("redis://10.0.0.1?db", "option db has no value: write db=VALUE"),
        ("redis://10.0.0.1?db=", "option db must not be empty"),
        ("redis://10.0.0.1?db=1&db=1", "option db is given twice"),
        ("redis://10.0.0.1?ssl_cert_reqs=none", "option ssl_cert_reqs needs TLS"),
        ("redis://10.0.0.1?sentinel_password=s3cret", "is for sentinels"),
        ("rediss://10.0.0.1?ssl_cert_reqs=maybe", "ssl_cert_reqs must be required, optional or none"),
        ("rediss://10.0.0.1?ssl_cert_reqs=CERT_NONE", "in these words: CERT_NONE of Python is none"),
        ("rediss+sentinel://10.0.0.1/s?ssl_cert_reqs=None", "ssl_cert_reqs must be required, optional"),
        ("rediss://10.0.0.1?ssl_check_hostname=maybe", "ssl_check_hostname must be true or false"),
        ("rediss://10.0.0.1?ssl_min_version=TLSv1_2", "ssl_min_version must be 771"),
        ("rediss+cluster://10.0.0.1?ssl_validate_ocsp=1", "option ssl_validate_ocsp is unknown"),
    ],
)
def test_what_could_mean_something_else_is_refused(url: str, pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern) as raised:
        checked_url(url)
    assert "s3cret" not in str(raised.value)
    assert "s3cret" not in without_password(url)


@pytest.mark.parametrize("required", ["required", "optional", "none"])
def test_verification_of_certificates_is_an_option_of_all_schemes_with_tls(required: str) -> None:
    for scheme, path in (("rediss", ""), ("rediss+sentinel", "/main"), ("rediss+cluster", "")):
        tls = parse(f"{scheme}://h{path}?ssl_cert_reqs={required}&ssl_check_hostname=No").tls
        assert tls == {"ssl_cert_reqs": required, "ssl_check_hostname": False}


@given(PASSWORDS)
def test_no_password_leads_to_another_server(password: str) -> None:
    """A URL with a password that is not encoded is refused, or means this password and this server."""
    for url in (
        f"redis://:{password}@{HOST}:6390/1",
        f"rediss://u:{password}@{HOST}:6390/1",
        f"redis+sentinel://:{password}@{HOST}:6390/main/1",
        f"redis+cluster://:{password}@{HOST}:6390",
        f"redis://{HOST}:6390/1?password={password}",
    ):
        try:
            found = parse(url)
        except ValueError as error:
            assert "s3cret" not in f"{error} {without_password(url)}"
        else:
            assert list(found.addresses) == [(HOST, 6390)]
            assert found.password == unquote(password)
            assert without_password(url).split("://")[1].startswith(f"{HOST}:6390")


@given(PASSWORDS, PASSWORDS)
def test_any_password_can_be_percent_encoded(user: str, password: str) -> None:
    user_in_url, in_url = quote(user, safe=""), quote(password, safe="")
    for url in (
        f"redis://{user_in_url}:{in_url}@{HOST}",
        f"redis+cluster://{user_in_url}:{in_url}@{HOST}",
        f"redis://{HOST}?password={in_url}&username={user_in_url}",
    ):
        assert read(url) == ("redis", [(HOST, 6379)], 0, user, password)
        assert without_password(url).endswith(f"://{HOST}")


def test_connections_lead_where_the_url_says() -> None:
    url = "rediss://u:%23p@[::1]:7/3?ssl_cert_reqs=none&ssl_ca_certs=/etc/ca.crt&ssl_min_version=772"
    sync = Link(url, name="test")._connection
    asyncio_ = AsyncLink(url, name="test", on_reply=lambda _: None, on_lost=lambda _: None)._connection
    for connection in (sync, asyncio_):
        assert (connection.host, connection.port, connection.db) == ("::1", 7, 3)
        assert (connection.username, connection.password, connection.protocol) == ("u", "#p", 2)
        assert (connection.cert_reqs, connection.ca_certs) == (0, "/etc/ca.crt")
    assert isinstance(sync, redis.SSLConnection) and isinstance(asyncio_, redis.asyncio.SSLConnection)
    local = Link("unix:///run/a%23b.sock?db=1", name="test")._connection
    assert (local.path, local.db) == ("/run/a#b.sock", 1)


def test_clients_and_links_refuse_a_url_before_they_connect() -> None:
    url = "redis://:12/s3cret@10.0.0.1:6390"
    for kind in (Client, AsyncClient):
        with pytest.raises(InvalidArgumentError, match=r"url: .*percent-encoded") as refused:
            kind(url)
        assert "s3cret" not in str(refused.value)
    with pytest.raises(LinkError, match=r"Redis at redis://10.0.0.1:6390: .*percent-encoded") as failed:
        Link(url, name="test")
    assert not re.search("s3cret|:12", str(failed.value))


@pytest.mark.parametrize(
    "options", ["decode_responses=True", "decode_responses=False", "encoding=latin-1", "protocol=3"]
)
def test_how_redis_py_presents_replies_to_another_program_has_no_effect(options: str) -> None:
    assert parse(f"redis://10.0.0.1/1?{options}") == parse("redis://10.0.0.1/1")
