"""User name, password and TLS files of Redis: all end up in the URL, and no password in any output."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final
from urllib.parse import urlencode

import pytest
import redis

from carpool import Client
from carpool.address import without_password
from carpool.errors import InvalidArgumentError
from carpool.redis_url import parse
from carpool.settings import BatcherSettings, WorkerSettings, read_settings
from carpool_cli.local.up import UpSettings
from support.pem import CERTIFICATE, ENCRYPTED_KEY, KEY, OTHER_KEY, PASSWORD

SECRET: Final = "odd:@/?#%&+ ünd"  # noqa: S105 (characters that are special in URLs)


@pytest.fixture(autouse=True)
def working_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A working directory with a password file and a CA file, and an environment without settings."""
    for name in [name for name in os.environ if name.startswith("CARPOOL_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    Path("password").write_text(f"{SECRET}\n")
    Path("a b.crt").write_text(CERTIFICATE)
    Path("a.key").write_text(KEY)
    Path("other.key").write_text(OTHER_KEY)
    Path("encrypted.key").write_text(ENCRYPTED_KEY)
    Path("both.pem").write_text(CERTIFICATE + KEY)
    Path("no.pem").write_text("no certificate\n")
    return tmp_path


def url(*flags: str) -> str:
    return read_settings(BatcherSettings, flags, "carpool batcher").redis_url


def redis_arguments(*flags: str) -> dict[str, object]:
    pool = redis.ConnectionPool.from_url(url(*flags))
    return dict(pool.connection_kwargs)


def test_url_alone_is_unchanged() -> None:
    for given in (
        "redis://h",
        "redis://u:p%40@h:1/2?protocol=2",
        "unix:///run/redis.sock?db=1",
        "rediss://[::1]:1/0",
    ):
        assert url("--redis-url", given) == given


@pytest.mark.parametrize(
    ("given", "host"),
    [
        ("redis://h:7/0", "h"),
        ("rediss://[::1]:7/0", "::1"),
        ("unix:///run/redis.sock", None),
        ("unix:///run/redis.sock?db=2", None),
    ],
)
def test_special_characters_in_user_and_password_are_kept(given: str, host: str | None) -> None:
    read = redis_arguments(
        "--redis-url", given, "--redis-user", "us@ er", "--redis-password-file", "password"
    )
    assert (read["username"], read["password"], read.get("host")) == ("us@ er", SECRET, host)
    if host is None:
        assert read["path"] == "/run/redis.sock"


def test_user_may_come_from_the_url_and_password_from_a_file() -> None:
    read = redis_arguments("--redis-url", "redis://worker@h", "--redis-password-file", "password")
    assert (read["username"], read["password"]) == ("worker", SECRET)


def test_user_and_password_may_also_come_from_options_of_the_url() -> None:
    read = parse(url("--redis-url", "redis://h/2?username=worker", "--redis-password-file", "password"))
    assert (read.user, read.password, read.database) == ("worker", SECRET, 2)


def test_tls_file_is_added_to_options(working_directory: Path) -> None:
    for given in ("rediss://h", "rediss://h/0?", "rediss://u:p%3F@h/0?ssl_cert_reqs=none"):
        read = parse(url("--redis-url", given, "--redis-ca-file", "a b.crt"))
        assert read.tls["ssl_ca_certs"] == str(working_directory / "a b.crt")
        assert read.tls.get("ssl_cert_reqs") == ("none" if "none" in given else None)


def test_environment_overrides_dot_env(monkeypatch: pytest.MonkeyPatch) -> None:
    Path(".env").write_text("CARPOOL_REDIS_PASSWORD_FILE=password\n")
    monkeypatch.setenv("CARPOOL_REDIS_USER", "worker")
    assert redis_arguments()["password"] == SECRET
    monkeypatch.setenv("CARPOOL_REDIS_PASSWORD_FILE", "")  # as the supervisor overrides the one in `.env`
    assert "password" not in redis_arguments()


def test_tls_files_have_absolute_paths(working_directory: Path) -> None:
    files = ("--redis-ca-file", "a b.crt", "--redis-cert-file", "a b.crt", "--redis-key-file", "a.key")
    read = redis_arguments("--redis-url", "rediss://h/0?ssl_min_version=771", *files)
    assert read["ssl_ca_certs"] == read["ssl_certfile"] == str(working_directory / "a b.crt")
    assert read["ssl_keyfile"] == str(working_directory / "a.key")
    assert read["ssl_min_version"] == 771


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            ["--redis-password-file", "none"],
            "CARPOOL_REDIS_PASSWORD_FILE) is 'none': cannot be read: No such",
        ),
        (["--redis-password-file", "."], "cannot be read: Is a directory"),
        (["--redis-password-file", "empty"], "CARPOOL_REDIS_PASSWORD_FILE) is empty: the file is empty"),
        (["--redis-ca-file", "none", "--redis-url", "rediss://h"], "CARPOOL_REDIS_CA_FILE) is 'none'"),
        (
            ["--redis-ca-file", "a b.crt"],
            "CARPOOL_REDIS_CA_FILE) needs TLS: the URL must begin with rediss://",
        ),
        (
            ["--redis-user", "x", "--redis-url", "redis://y@h"],
            "CARPOOL_REDIS_USER): the URL has a user name too; remove one",
        ),
        (
            ["--redis-password-file", "password", "--redis-url", "redis://:s3cret@h"],
            "CARPOOL_REDIS_PASSWORD_FILE): the URL has a password too; remove one",
        ),
        (
            ["--redis-password-file", "password", "--redis-url", "redis://h?password=s3cret"],
            "CARPOOL_REDIS_PASSWORD_FILE): the URL has a password too; remove one",
        ),
        (
            ["--redis-ca-file", "a b.crt", "--redis-url", "rediss://h?ssl_ca_certs=ca.crt"],
            "CARPOOL_REDIS_CA_FILE): the URL has ssl_ca_certs too; remove one",
        ),
        (["--redis-url", "redis://:s3cret/x@h:6379"], "percent-encoded"),
        (["--redis-url", "redis://h/0?socket_timeout=1&password=s3cret"], "socket_timeout"),
        (["--redis-url", "http://:s3cret@h"], "must begin with redis://"),
    ],
)
def test_error_names_the_setting_and_shows_no_password(
    flags: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("empty").touch()
    with pytest.raises(SystemExit):
        url(*flags)
    printed = capsys.readouterr().err
    assert expected in printed
    assert "s3cret" not in printed
    assert SECRET not in printed


UNUSABLE: Final = [
    ({"ca": "no.pem"}, "{ca} is {folder}/no.pem, which has no certificate in PEM form"),
    ({"cert": "no.pem", "key": "a.key"}, "{cert} is {folder}/no.pem, which has no certificate in PEM form"),
    ({"cert": "a b.crt", "key": "no.pem"}, "{key} is {folder}/no.pem, which has no private key in PEM form"),
    ({"cert": "a b.crt"}, "{cert} is {folder}/a b.crt, which has no private key in PEM form"),
    (
        {"cert": "a b.crt", "key": "other.key"},
        "which has not the key of the certificate in {folder}/a b",
    ),
    (
        {"cert": "a b.crt", "key": "encrypted.key"},
        "{key} is {folder}/encrypted.key, which has no private key",
    ),
    ({"key": "a.key"}, "{key} is the key of a certificate that is not given: name it with {cert}"),
]
OPTIONS: Final = {"ca": "ssl_ca_certs", "cert": "ssl_certfile", "key": "ssl_keyfile"}


@pytest.mark.parametrize(("files", "expected"), UNUSABLE)
def test_tls_file_that_cannot_be_used_is_an_error_that_names_the_setting(
    files: dict[str, str], expected: str, working_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [text for name, file in files.items() for text in (f"--redis-{name}-file", file)]
    with pytest.raises(SystemExit):
        url("--redis-url", "rediss://h", *flags)
    called = {
        name: f"--redis-{name}-file (or CARPOOL_REDIS_{name.upper()}_FILE)" for name in ("ca", "cert", "key")
    }
    assert expected.format(folder=working_directory, **called) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("files", "expected"),
    [*UNUSABLE, ({"ca": "none"}, "{ca} is {folder}/none, which cannot be read: No such file or directory")],
)
def test_tls_file_of_a_url_that_cannot_be_used_is_an_error_that_names_the_option(
    files: dict[str, str], expected: str, working_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = urlencode({OPTIONS[name]: working_directory / file for name, file in files.items()})
    message = expected.format(
        folder=working_directory, **{name: f"the option {option}" for name, option in OPTIONS.items()}
    )
    with pytest.raises(InvalidArgumentError, match=re.escape(message)):
        Client(f"rediss://h?{options}")
    for flag in ("--redis-url", "--model-redis-url"):
        with pytest.raises(SystemExit):
            read_settings(WorkerSettings, ["square", flag, f"rediss://h?{options}"], "carpool worker")
        assert flag in capsys.readouterr().err


def test_tls_files_that_can_be_used(working_directory: Path) -> None:
    assert "both.pem" in url("--redis-url", "rediss://h", "--redis-cert-file", "both.pem")
    encrypted = f"rediss://h?ssl_keyfile={working_directory}/encrypted.key&ssl_password={PASSWORD}"
    assert "ssl_certfile" in url("--redis-url", encrypted, "--redis-cert-file", "a b.crt")
    assert url("--redis-url", f"rediss://h?ssl_ca_path={working_directory}")


def test_up_accepts_credentials_only_with_a_url(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_settings(UpSettings, ["square", "--redis-user", "x"], "carpool up")
    assert "give its address with --redis-url" in capsys.readouterr().err
    flags = ["square", "--redis-url", "redis://h", "--redis-user", "x"]
    assert read_settings(UpSettings, flags, "carpool up").redis_url == "redis://x:@h"


@pytest.mark.parametrize(
    "given",
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
        "redis://:s3cret",
        "redis://:s3cret/0",
        "redis+sentinel://:s3cret/main",
    ],
)
def test_url_without_password_has_no_password(given: str) -> None:
    assert "s3cret" not in without_password(given)
