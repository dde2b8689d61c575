"""Settings: flags, then `CARPOOL_*` in the environment, then `.env`, then the defaults here.

Each is declared once, with its help. What is wrong is named together with what would be right.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from inspect import cleandoc
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NoReturn, Self, TypeVar
from urllib.parse import quote, urlencode, urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    CliApp,
    CliPositionalArg,
    NoDecode,
    SettingsConfigDict,
    SettingsError,
)

from carpool.address import without_password
from carpool.keys import DEFAULT_PREFIX


def _redis_url(url: str) -> str:
    if not url.startswith(("redis://", "rediss://", "unix://")):
        raise ValueError("must begin with redis://, rediss:// or unix://, as in redis://127.0.0.1:6379/0")
    try:
        _ = urlsplit(url).port
    except ValueError:  # which may quote a part of a password, where that holds a /
        raise ValueError(
            "what follows the host must be a port, as in redis://127.0.0.1:6379/0; a password with more than "
            "letters and digits in it is percent-encoded, or in a file (CARPOOL_REDIS_PASSWORD_FILE)"
        ) from None
    return url


def _readable(path: Path | None) -> Path | None:
    if path is not None:
        try:
            path.read_bytes()
        except OSError as error:
            raise ValueError(f"cannot be read: {error.strerror}") from None
    return path


def _prefix(prefix: str) -> str:
    if not prefix or any(character in "{} \t\n" for character in prefix):
        raise ValueError("must not be empty, nor hold braces or spaces")
    return prefix


def _listed(text: object) -> object:
    return [name for name in text.split(",") if name] if isinstance(text, str) else text


Listed = Annotated[list[str], NoDecode, BeforeValidator(_listed)]
RedisUrl = Annotated[str, AfterValidator(_redis_url)]
ReadableFile = Annotated[Path | None, BeforeValidator(lambda path: path or None), AfterValidator(_readable)]
Prefix = Annotated[str, AfterValidator(_prefix)]
LogLevel = Literal["debug", "info", "warning", "error"]


class CarpoolSettings(BaseSettings):
    """Where settings come from, and how they are named there."""

    model_config = SettingsConfigDict(
        env_prefix="CARPOOL_",
        env_file=".env",
        extra="ignore",
        cli_kebab_case=True,
        cli_implicit_flags="toggle",
        cli_hide_none_type=True,
    )


class RedisSettings(CarpoolSettings):
    """Where Redis is, who signs in, and whom to trust there. Once validated, all of it is in `redis_url`."""

    redis_url: RedisUrl | None = Field(None, description="where Redis is")
    redis_user: str = Field("", description="who signs in")
    redis_password_file: ReadableFile = Field(None, description="a file with the password in it")
    redis_ca_file: ReadableFile = Field(
        None, description="who vouches for a rediss:// server (default: whom this machine trusts)"
    )
    redis_cert_file: ReadableFile = Field(None, description="our own certificate, where Redis asks for one")
    redis_key_file: ReadableFile = Field(None, description="its key, if that is not in the same file")

    @model_validator(mode="after")
    def _in_one_url(self) -> Self:
        beside = [name for name in ("redis_user", "redis_password_file", *_TLS_FILES) if getattr(self, name)]
        if self.redis_url is not None:
            self.redis_url = _trusting(self._signed_in(self.redis_url), self)
        elif beside:
            flags = " and ".join(map(_flag, beside))
            raise ValueError(f"{flags} would be for a Redis that runs already; --redis-url names it")
        return self

    def _signed_in(self, url: str) -> str:
        """The URL with user and password in it, each from the one place that tells it."""
        user, password = self.redis_user, _password_in(self.redis_password_file)
        if not (user or password):
            return url
        parts = urlsplit(url)
        for name, ours, theirs in (
            ("redis_user", user, parts.username),
            ("redis_password_file", password, parts.password),
        ):
            if ours and theirs:
                raise ValueError(f"{_flag(name)} tells what the URL tells too; leave one out")
        user, password = quote(user, safe="") or parts.username or "", quote(password, safe="")
        who = f"{user}:{password or parts.password or ''}"
        return parts._replace(netloc=f"{who}@{parts.netloc.rpartition('@')[2]}").geturl()


# Setting -> what redis-py calls it in the query of a URL.
_TLS_FILES: Final = {
    "redis_ca_file": "ssl_ca_certs",
    "redis_cert_file": "ssl_certfile",
    "redis_key_file": "ssl_keyfile",
}


def _trusting(url: str, settings: RedisSettings) -> str:
    """The URL with the files of TLS in it."""
    files = {name: path for name in _TLS_FILES if (path := getattr(settings, name)) is not None}
    if not files:
        return url
    parts = urlsplit(url)
    if parts.scheme != "rediss":
        raise ValueError(f"{_flag(min(files))} is of no use without TLS: the URL must begin with rediss://")
    query = urlencode({_TLS_FILES[name]: str(path.resolve()) for name, path in files.items()})
    return parts._replace(query="&".join(filter(None, (parts.query, query)))).geturl()


def _password_in(path: Path | None) -> str:
    if path is None:
        return ""
    try:
        password = path.read_text().strip()
    except UnicodeDecodeError:
        raise ValueError(f"{_flag('redis_password_file')} is {path}: is not UTF-8 text") from None
    if not password:
        raise ValueError(f"{_flag('redis_password_file')} is {path}: holds no password")
    return password


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')} (or CARPOOL_{name.upper()})"


class ProducerSettings(RedisSettings):
    """What it takes to find the models."""

    redis_url: RedisUrl = Field("redis://127.0.0.1:6379/0", description="where Redis is")
    prefix: Prefix = Field(DEFAULT_PREFIX, description="what every key begins with")


class CommonSettings(ProducerSettings):
    """What every service needs."""

    http_host: str = Field("127.0.0.1", description="where to serve /metrics, /healthz and /readyz")
    http_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="on which port; 0 takes a free one, which the log names (default: none)",
    )
    log_level: LogLevel = Field("info", description="the least to log")


Policies = Annotated[
    Listed,
    Field(description="policies of your own that models may name: module:Name or path/file.py:Name, ..."),
]


class BatcherSettings(CommonSettings):
    """Group waiting requests into batches, for every registered model."""

    policies: Policies = Field([])


class WorkerSettings(CommonSettings):
    """Execute batches with a model."""

    model: CliPositionalArg[str] = Field(
        description="module:Name, path/file.py:Name, onnx:FILE, square or docsearch; NAME=... to name it"
    )
    replicas: Annotated[int, Field(ge=1, le=256)] | Literal["auto"] = Field(
        1, description="model processes; auto: one for each device"
    )
    device: str = Field("auto", description="auto, cpu, or cuda:0,cuda:1,...; given to the processes in turn")
    lease_ms: int = Field(5000, ge=200, le=600_000, description="a worker silent for so long counts as dead")
    drain_s: float = Field(30.0, ge=0, description="how long SIGTERM waits for what is in hand")


Settings = TypeVar("Settings", bound=BaseSettings)


def read_settings(kind: type[Settings], argv: Sequence[str], prog: str) -> Settings:
    """Settings of `kind` from flags, environment and `.env`. What is wrong is printed; then exits with 2."""
    try:
        return CliApp.run(kind, cli_args=list(argv), cli_settings_source=_source(kind, prog))
    except ValidationError as error:
        wrong = describe(error, kind, prog)
    except SettingsError as error:
        wrong = f"{prog}: {error}"
    print(wrong, file=sys.stderr)
    raise SystemExit(2)


def _source(kind: type[BaseSettings], prog: str) -> Any:
    from pydantic_settings import CliSettingsSource  # noqa: PLC0415 (only commands pay for it)

    parser = _Parser(
        prog=prog,
        description=cleandoc(kind.__doc__ or ""),
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )
    return CliSettingsSource(
        kind,
        root_parser=parser,
        add_argument_method=_add_argument,
        parse_args_method=_Parser.parse_intermixed_args,  # flags may stand between MODEL and BODY
    )


def _add_argument(parser: argparse.ArgumentParser, *names: Any, **options: Any) -> argparse.Action:
    """What has no flag may be in the environment instead, where argparse does not look: so to argparse it may
    be missing, and the settings say so if it is."""
    if not names[0].startswith("-"):
        options["nargs"] = "*" if options.get("nargs") in ("*", "+") else "?"
        options["default"] = argparse.SUPPRESS
    return parser.add_argument(*names, **options)


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Says nothing of a default that is nothing."""

    def _get_help_string(self, action: argparse.Action) -> str:
        words = action.help or ""
        for nothing in ("null", "", "\0", "False", "[]"):
            words = words.removesuffix(f" (default: {nothing})")
        return words


class _Parser(argparse.ArgumentParser):
    """Answers a wrong flag with the one that was meant, not with all there are."""

    def error(self, message: str) -> NoReturn:
        lines = [f"{self.prog}: {message}"]
        flags = [flag for action in self._actions for flag in action.option_strings]
        for word in message.split() if message.startswith("unrecognized") else ():
            meant = difflib.get_close_matches(word.partition("=")[0], flags, n=1)
            if meant and word.startswith("-"):
                lines.append(f"    did you mean {meant[0]}?")
        self.exit(2, "\n".join([*lines, f"    {self.prog} --help says what there is", ""]))


def describe(error: ValidationError, kind: type[BaseSettings], prog: str) -> str:
    """Each wrong setting: its names as a flag and in the environment, its value, and what would be right."""
    lines = []
    for problem in error.errors():
        message = problem["msg"].removeprefix("Value error, ")
        if not problem["loc"]:  # not one setting is wrong, but several do not go together
            lines.append(f"{prog}: {message}")
            continue
        name = str(problem["loc"][0])
        if problem["type"] == "missing":
            positional = "_CliPositionalArg" in str(kind.model_fields[name].metadata)
            called = f"{name.upper()} is" if positional else f"{_flag(name).partition(' ')[0]} is"
            lines.append(f"{prog}: {called} missing (or CARPOOL_{name.upper()} in the environment)")
        else:
            given = problem["input"] if name != "redis_url" else without_password(str(problem["input"]))
            lines.append(f"{prog}: {_flag(name)} is {str(given)!r:.80}: {message}")
        field = kind.model_fields.get(name)
        if field is not None and field.description:
            lines.append(f"    {field.description}")
    return "\n".join(lines)
