"""User, password and certificates beside the URL: all end in the URL, and none in what is shown."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import pytest
import redis

from carpool.address import without_password
from carpool.settings import BatcherSettings, read_settings
from carpool_cli.local.up import UpSettings

SECRET: Final = "odd:@/?#%&+ ünd"  # noqa: S105 (all that a URL minds)


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A directory with a password and an authority in it, and no setting anywhere."""
    for name in [name for name in os.environ if name.startswith("CARPOOL_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    Path("password").write_text(f"{SECRET}\n")
    Path("a b.crt").write_text("an authority")
    return tmp_path


def url(*flags: str) -> str:
    return read_settings(BatcherSettings, flags, "carpool batcher").redis_url


def as_redis_reads_it(*flags: str) -> dict[str, object]:
    pool = redis.ConnectionPool.from_url(url(*flags))
    return dict(pool.connection_kwargs)


def test_nothing_beside_the_url_leaves_it_as_it_is() -> None:
    for one in ("redis://h", "redis://u:p%40@h:1/2?x=y", "unix:///run/redis.sock?db=1", "rediss://[::1]:1/0"):
        assert url("--redis-url", one) == one


@pytest.mark.parametrize(
    ("place", "host"),
    [
        ("redis://h:7/0", "h"),
        ("rediss://[::1]:7/0", "::1"),
        ("unix:///run/redis.sock", None),
        ("unix:///run/redis.sock?x=y", None),
    ],
)
def test_user_and_password_arrive_as_they_are(place: str, host: str | None) -> None:
    read = as_redis_reads_it(
        "--redis-url", place, "--redis-user", "who@ is", "--redis-password-file", "password"
    )
    assert (read["username"], read["password"], read.get("host")) == ("who@ is", SECRET, host)
    if host is None:
        assert read["path"] == "/run/redis.sock"


def test_the_url_may_name_the_user_and_a_file_the_password() -> None:
    read = as_redis_reads_it("--redis-url", "redis://worker@h", "--redis-password-file", "password")
    assert (read["username"], read["password"]) == ("worker", SECRET)


def test_the_environment_and_a_dot_env_say_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    Path(".env").write_text("CARPOOL_REDIS_PASSWORD_FILE=password\n")
    monkeypatch.setenv("CARPOOL_REDIS_USER", "worker")
    assert as_redis_reads_it()["password"] == SECRET
    monkeypatch.setenv("CARPOOL_REDIS_PASSWORD_FILE", "")  # how the supervisor says: not that of `.env`
    assert "password" not in as_redis_reads_it()


def test_files_of_tls_arrive_by_their_whole_path(here: Path) -> None:
    files = ("--redis-ca-file", "a b.crt", "--redis-cert-file", "a b.crt", "--redis-key-file", "password")
    read = as_redis_reads_it("--redis-url", "rediss://h/0?ssl_min_version=771", *files)
    assert read["ssl_ca_certs"] == read["ssl_certfile"] == str(here / "a b.crt")
    assert read["ssl_keyfile"] == str(here / "password")
    assert read["ssl_min_version"] == 771


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            ["--redis-password-file", "none"],
            "CARPOOL_REDIS_PASSWORD_FILE) is 'none': cannot be read: No such",
        ),
        (["--redis-password-file", "."], "cannot be read: Is a directory"),
        (["--redis-password-file", "empty"], "CARPOOL_REDIS_PASSWORD_FILE) is empty: holds no password"),
        (["--redis-ca-file", "none", "--redis-url", "rediss://h"], "CARPOOL_REDIS_CA_FILE) is 'none'"),
        (["--redis-ca-file", "a b.crt"], "CARPOOL_REDIS_CA_FILE) is of no use without TLS"),
        (["--redis-user", "x", "--redis-url", "redis://y@h"], "CARPOOL_REDIS_USER) tells what the URL tells"),
        (
            ["--redis-password-file", "password", "--redis-url", "redis://:s3cret@h"],
            "CARPOOL_REDIS_PASSWORD_FILE) tells what the URL tells",
        ),
        (["--redis-url", "redis://:s3cret/x@h:6379"], "percent-encoded"),
        (["--redis-url", "http://:s3cret@h"], "must begin with redis://"),
    ],
)
def test_what_is_wrong_is_named_and_no_password_shown(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("empty").touch()
    with pytest.raises(SystemExit):
        url(*flags)
    said = capsys.readouterr().err
    assert says in said
    assert "s3cret" not in said
    assert SECRET not in said


def test_up_signs_in_only_where_redis_runs_already(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_settings(UpSettings, ["square", "--redis-user", "x"], "carpool up")
    assert "--redis-url names it" in capsys.readouterr().err
    flags = ["square", "--redis-url", "redis://h", "--redis-user", "x"]
    assert read_settings(UpSettings, flags, "carpool up").redis_url == "redis://x:@h"


@pytest.mark.parametrize(
    "shown",
    [
        "redis://u:s3cret@h:1/0",
        "redis://:s3cret?x@h:1/0",
        "redis://:s3cret/x@h:1/0",
        "redis://:a@s3cret@h:1/0",
        "redis://h:1/0?password=s3cret",
        "redis://h:1/0?password=x@s3cret",
        "redis://u@h:1/0?password=s3cret@x",
        "unix:///run/redis.sock?password=s3cret",
        "s3cret@h",
        "redis://:s3cret://x@h",
    ],
)
def test_a_url_that_is_shown_holds_no_password(shown: str) -> None:
    assert "s3cret" not in without_password(shown)
