"""Settings of commands and services: from flags, then `CARPOOL_*` variables, then `.env`, then defaults.

Each setting is declared once, with its help text. An error names the setting, its value, and what is valid.

Why: docs/decisions/0033.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from inspect import cleandoc
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, NoReturn, Self, TypeVar, get_args
from urllib.parse import quote, urlencode

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    CliApp,
    CliPositionalArg,
    DotEnvSettingsSource,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from carpool.address import without_password
from carpool.keys import DEFAULT_PREFIX
from carpool.redis_url import checked_url, parse, split
from carpool.shown import complain
from carpool.text_files import encoding_of, has_mark, read_text
from carpool.tls_files import check_tls_files
from carpool.units import MILLISECONDS, number_in


def _usable_url(url: str) -> str:
    check_tls_files(url)
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
        raise ValueError("must not be empty or contain braces or spaces")
    return prefix


def _http_url(url: str) -> str:
    if url and not _HTTP_URL.fullmatch(url):
        raise ValueError("must be an address of HTTP, such as http://127.0.0.1:4318")
    return url


_HTTP_URL: Final = re.compile(r"https?://[^/\s]+(/\S*)?")


def _split_commas(value: object) -> object:
    return [name for name in value.split(",") if name] if isinstance(value, str) else value


def _split_lines(value: object) -> object:
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return [line.strip() for line in value.splitlines() if line.strip()]


def _split_texts(value: object) -> object:
    return value.removeprefix(_END_OF_TEXT).split(_END_OF_TEXT) if isinstance(value, str) else value


Listed = Annotated[list[str], NoDecode, BeforeValidator(_split_commas)]
_OF_LINES: Final = BeforeValidator(_split_lines)
Lines = Annotated[list[str], NoDecode, _OF_LINES]
"""The values of a flag that may be repeated. In a variable each is a line; or all are a JSON list."""
_END_OF_TEXT: Final = "\0"  # no argument can contain it
_OF_TEXTS: Final = BeforeValidator(_split_texts)
Texts = Annotated[list[str], NoDecode, _OF_TEXTS]
"""Positional arguments of any contents, commas included. A variable has one."""


def _seconds(value: object) -> object:
    milliseconds = number_in(MILLISECONDS, value) if isinstance(value, str) else None
    return value if milliseconds is None else milliseconds / 1000


def _milliseconds(value: object) -> object:
    milliseconds = number_in(MILLISECONDS, value) if isinstance(value, str) else None
    return value if milliseconds is None else milliseconds


def _devices(names: str) -> str:
    for name in filter(None, map(str.strip, names.split(","))):
        if not _DEVICE.fullmatch(name) and names != "auto":
            raise ValueError(f"{name!r} names no device; write auto, cpu, or cuda:0,cuda:1,... for GPUs")
    return names


_DEVICE: Final = re.compile("cpu|mps|(cuda|xpu|npu)(:[0-9]+)?")

Seconds = Annotated[float, BeforeValidator(_seconds)]
"""Seconds as a number, or a duration with its unit: 1.5, `1500ms`, `2min`."""
Milliseconds = Annotated[float, BeforeValidator(_milliseconds)]
"""Milliseconds as a number, or a duration with its unit: 20, `20ms`, `1.5s`."""
Devices = Annotated[
    str,
    AfterValidator(_devices),
    Field(description="devices, assigned to model processes in turn: auto, cpu, or cuda:0,cuda:1,..."),
]
Replicas = Annotated[int, Field(ge=1, le=256)] | Literal["auto"]
RedisUrl = Annotated[str, AfterValidator(checked_url)]
OptionalRedisUrl = Annotated[
    str | None, BeforeValidator(lambda url: url or None), AfterValidator(lambda url: url and _usable_url(url))
]
ReadableFile = Annotated[Path | None, BeforeValidator(lambda path: path or None), AfterValidator(_readable)]
OptionalPath = Annotated[Path | None, BeforeValidator(lambda path: path or None)]
OptionalPort = Annotated[
    Annotated[int, Field(ge=0, le=65535)] | None, BeforeValidator(lambda port: None if port == "" else port)
]
Prefix = Annotated[str, AfterValidator(_prefix)]
LogLevel = Literal["debug", "info", "warning", "error"]
OtlpEndpoint = Annotated[str, AfterValidator(_http_url)]


_ENV_FILE: Final = Path(".env")
# What Kubernetes tells each container of a Service: CARPOOL_HTTP_PORT=tcp://10.43.0.9:9464 of `carpool-http`.
_SERVICE_LINK: Final = re.compile("(tcp|udp|sctp)://.*")
_OF_SERVICE: Final = re.compile(r"_SERVICE_(HOST|PORT)(_\w+)?$|_PORT_\d+_(TCP|UDP|SCTP)(_\w+)?$")
SIMILARITY_MIN: Final = 0.85  # of a variable that nothing reads to the one that was probably meant
# What commands read beside the settings here: no mistake where another process finds it.
OF_COMMANDS: Final = frozenset(
    (
        "accept", "action", "alive", "all", "arrivals", "as_json", "before", "body", "calls", "cancel",
        "change", "console", "console_port", "content_type", "correlation_id", "cost", "count", "data_dir",
        "detail_of", "enqueue", "expiration_ms", "field", "force", "gateway", "gateway_port", "id", "ids",
        "in_flight", "intercept_ms", "keep", "lane", "latency_ms", "load", "newer_s", "noise", "none",
        "not_before", "older_s", "once", "output", "period_s", "plot", "poll_s", "priority", "queries",
        "rate", "raw", "reason", "record", "redis", "redis_port", "refuse", "reload", "request", "requests",
        "result_ttl", "rotate", "rounds", "scale", "seconds", "secrets", "seed", "sequence_end",
        "sequence_id", "sequence_index", "sequence_start", "share", "slope_ms", "start_s", "status", "stream",
        "tenant", "timeout", "timeout_s", "trip_ms", "trip_noise", "trip_slope_ms", "undo", "version", "wait",
        "workers",
    )
)  # fmt: skip


class CarpoolSettings(BaseSettings):
    """Base class: where settings are read from, and their names there."""

    model_config = SettingsConfigDict(
        env_prefix="CARPOOL_",
        extra="ignore",
        cli_kebab_case=True,
        cli_implicit_flags="toggle",
        cli_hide_none_type=True,
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Called by pydantic-settings, after it has read flags. Raises EnvFileError."""
        assert isinstance(env_settings, EnvSettingsSource)
        links = {name.lower() for name in _service_links(settings_cls, os.environ)}
        given = env_settings.env_vars
        env_settings.env_vars = {name: value for name, value in given.items() if name.lower() not in links}
        dotenv = _env_file(settings_cls)
        return init_settings, env_settings, *([] if dotenv is None else [dotenv]), file_secret_settings


class EnvFileError(ValueError):
    """`.env` cannot be read. The message names it and its folder."""


def _env_file(kind: type[BaseSettings]) -> DotEnvSettingsSource | None:
    """What `.env` says of these settings; None without that file, because to look for each setting in nothing
    takes a tenth of the time in which settings are read. Raises EnvFileError."""
    path = _ENV_FILE.absolute()
    if not path.is_file():
        return None
    try:
        read_text(path)
        encoding = encoding_of(path.read_bytes()[:4])
    except OSError as error:
        raise EnvFileError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise EnvFileError(str(error)) from None
    return DotEnvSettingsSource(kind, _ENV_FILE, encoding)


def _service_links(kind: type[BaseSettings], environment: Mapping[str, str]) -> Iterable[str]:
    """The variables that are named like a port of these settings, and describe a Service instead."""
    for name, value in environment.items():
        field = name.lower().removeprefix("carpool_")
        if f"_{field}".endswith("_port") and field in kind.model_fields and _SERVICE_LINK.fullmatch(value):
            yield name


def _names_in_env_file(kind: type[BaseSettings]) -> Mapping[str, str]:
    """The variables that `.env` sets, with their values. Raises EnvFileError."""
    source = _env_file(kind)
    return {} if source is None else {name.upper(): value or "" for name, value in source.env_vars.items()}


def misspelt(kind: type[BaseSettings], environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that nothing of Carpool reads, and those of these settings that were probably meant."""
    services = (BatcherSettings, WorkerSettings, GatewaySettings, ConsoleSettings)
    known = {*kind.model_fields, *(name for one in services for name in one.model_fields), *OF_COMMANDS}
    found: dict[str, str] = {}
    for name, value in environment.items():
        field = name.lower().removeprefix("carpool_")
        if field == name.lower() or field in known or _is_of_service(name, value):
            continue
        for meant in difflib.get_close_matches(field, kind.model_fields, n=1, cutoff=SIMILARITY_MIN):
            found[name] = f"CARPOOL_{meant.upper()}"
    return found


def _is_of_service(name: str, value: str) -> bool:
    """Whether Kubernetes sets this variable, of a Service whose name begins with `carpool-`."""
    return bool(_OF_SERVICE.search(name) or _SERVICE_LINK.fullmatch(value))


class RedisSettings(CarpoolSettings):
    """Address of Redis, credentials and TLS files. After validation, `redis_url` contains all of them."""

    redis_url: RedisUrl | None = Field(None, description="address of Redis")
    redis_user: str = Field("", description="user name for Redis")
    redis_password_file: ReadableFile = Field(None, description="file with the password for Redis")
    redis_ca_file: ReadableFile = Field(
        None, description="CA certificates for a rediss:// server (default: those of the system)"
    )
    redis_cert_file: ReadableFile = Field(
        None, description="client certificate, if Redis requires one (mutual TLS)"
    )
    redis_key_file: ReadableFile = Field(
        None, description="private key of the client certificate, if it is in another file"
    )

    @model_validator(mode="after")
    def _complete_url(self) -> Self:
        given = [name for name in ("redis_user", "redis_password_file", *_TLS_FILES) if getattr(self, name)]
        if self.redis_url is not None:
            in_url = parse(self.redis_url).tls
            names = {option: _flag(name) for name, option in _TLS_FILES.items()}
            names |= {option: f"the option {option} of {_flag('redis_url')}" for option in in_url}
            self.redis_url = _with_tls_files(self._with_credentials(self.redis_url), self)
            check_tls_files(self.redis_url, names)
        elif given:
            flags = " and ".join(map(_flag, given))
            raise ValueError(
                f"{flags} can only be used with a running Redis; give its address with --redis-url"
            )
        return self

    def _with_credentials(self, url: str) -> str:
        """The URL with user name and password. Each may come from the URL or a setting, but not from both."""
        user, password = self.redis_user, _password_in(self.redis_password_file)
        if not (user or password):
            return url
        given, parts = parse(url), split(url)
        for name, value, value_in_url, noun in (
            ("redis_user", user, given.user, "user name"),
            ("redis_password_file", password, given.password, "password"),
        ):
            if value and value_in_url:
                raise ValueError(f"{_flag(name)}: the URL has a {noun} too; remove one of them")
        user_in_url, _, password_in_url = parts.credentials.removesuffix("@").partition(":")
        credentials = f"{quote(user, safe='') or user_in_url}:{quote(password, safe='') or password_in_url}"
        rest = url.removeprefix(f"{parts.scheme}://{parts.credentials}")
        return f"{parts.scheme}://{credentials}@{rest}"


# Setting -> its name for redis-py, in the query of a URL.
_TLS_FILES: Final = {
    "redis_ca_file": "ssl_ca_certs",
    "redis_cert_file": "ssl_certfile",
    "redis_key_file": "ssl_keyfile",
}


def _with_tls_files(url: str, settings: RedisSettings) -> str:
    """The URL with the paths of the TLS files in its query."""
    files = {name: path for name in _TLS_FILES if (path := getattr(settings, name)) is not None}
    if not files:
        return url
    checked = parse(url)
    if checked.scheme != "rediss":
        raise ValueError(f"{_flag(min(files))} needs TLS: the URL must begin with rediss://")
    for name, path in files.items():
        if has_mark(path.read_bytes()[:4]):  # OpenSSL, which reads it, then finds nothing in it
            raise ValueError(
                f"{_flag(name)} is {path}: it begins with a byte-order mark; save it as ASCII, or as UTF-8 "
                "without one"
            )
        if _TLS_FILES[name] in checked.tls:
            raise ValueError(f"{_flag(name)}: the URL has {_TLS_FILES[name]} too; remove one of them")
    query = urlencode({_TLS_FILES[name]: str(path.resolve()) for name, path in files.items()})
    return f"{url.removesuffix('?')}{'&' if split(url).query else '?'}{query}"


def _password_in(path: Path | None) -> str:
    if path is None:
        return ""
    try:
        password = read_text(path).strip()
    except ValueError as error:
        raise ValueError(f"{_flag('redis_password_file')}: {error}") from None
    if not password:
        raise ValueError(f"{_flag('redis_password_file')} is {path}: the file is empty")
    return password


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')} (or CARPOOL_{name.upper()})"


class ConnectionSettings(RedisSettings):
    """What a producer needs to reach the models."""

    redis_url: RedisUrl = Field("redis://127.0.0.1:6379/0", description="address of Redis")
    prefix: Prefix = Field(DEFAULT_PREFIX, description="prefix of every Redis key")


class CommonSettings(ConnectionSettings):
    """What every service needs."""

    http_host: str = Field("127.0.0.1", description="address of /metrics, /healthz and /readyz")
    http_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description=(
            "port of /metrics, /healthz and /readyz; 0 picks a free one and logs it (default: not served)"
        ),
    )
    log_level: LogLevel = Field("info", description="minimum log level")
    otlp_endpoint: OtlpEndpoint = Field(
        "",
        description="address of a collector of traces, such as http://127.0.0.1:4318 (default: no traces)",
    )


Policies = Annotated[
    Listed,
    Field(description="custom policies that models may use: module:Name or path/file.py:Name, ..."),
]


class ModelOptions(NamedTuple):
    """What a command line says of its models beside their names, as it is written there."""

    param: Sequence[str] = ()
    param_file: Sequence[str] = ()
    set: Sequence[str] = ()

    @property
    def environment(self) -> dict[str, str]:
        """The variables that tell another process the same."""
        return {f"CARPOOL_{name.upper()}": json.dumps(words) for name, words in self._asdict().items()}


NO_OPTIONS: Final = ModelOptions()


class ModelSource(CarpoolSettings):
    """What models are loaded with."""

    param: Lines = Field(
        [], description="NAME=VALUE: a parameter of the model; of several models MODEL.NAME=VALUE; repeatable"
    )
    param_file: Lines = Field(
        [],
        description="NAME=FILE: a parameter that is the text of a file, and never shown; or a TOML FILE of "
        "several; of several models MODEL.NAME=FILE or MODEL=FILE; repeatable",
    )
    set: Lines = Field(
        [],
        description="SETTING=VALUE: a setting, in place of what the model declares; of several models "
        "MODEL.SETTING=VALUE; repeatable",
    )

    @property
    def options(self) -> ModelOptions:
        """All of this."""
        return ModelOptions(self.param, self.param_file, self.set)

    def given(self, name: str) -> Any:
        """The value of a setting that somebody set; None for a default."""
        return getattr(self, name) if name in self.model_fields_set else None


_OF_ONE_MODEL: Final = ("param", "param_file", "set", "replicas")  # of a worker without a repository


class BatcherSettings(CommonSettings):
    """Group waiting requests into batches, for every registered model."""

    policies: Policies = Field([])


class WorkerSettings(ModelSource, CommonSettings):
    """Execute batches with a model, or with each model of a file; or with those models of a folder that are
    wanted (`carpool load`).
    """

    model: CliPositionalArg[str] = Field(
        "",
        description="module:Name, path/file.py:Name, hf:FOLDER, st:FOLDER, onnx:FILE, square, docsearch, "
        "writer or voice-activity; NAME=MODEL serves it under another name; FILE.toml has models, with "
        "parameters and settings, and FILE.toml:NAME is one of them; repository:DIR/NAME is one of a folder",
    )
    repository: OptionalPath = Field(
        None, description="in place of MODEL: a folder of models, of which those are served that are loaded"
    )
    room: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="of a repository: the most model processes that run here (default: as many as GPUs, or "
        "else as CPUs)",
    )
    replicas: Replicas = Field(1, description="number of model processes; auto: one per device")
    device: Devices = "auto"
    lease_ms: Annotated[int, BeforeValidator(_milliseconds)] = Field(
        5000,
        ge=200,
        le=600_000,
        description=(
            "ms without a heartbeat after which a worker is taken for dead, and its batches are reclaimed"
        ),
    )
    drain_s: Seconds = Field(
        30.0, ge=0, description="seconds after SIGTERM in which to finish the batches that were fetched"
    )
    load_s_max: Seconds | None = Field(
        None, gt=0, description="seconds in which the model must be loaded (default: no limit)"
    )
    finish_streams: bool = Field(
        False,
        description="after SIGTERM finish the requests of a stepping model; else they are handed over "
        "to other workers",
    )
    model_redis_url: OptionalRedisUrl = Field(
        None,
        description="address of Redis for a model that sends requests itself, with a user of the role "
        "producer (default: that of the worker, if it names no user, password or client certificate)",
    )

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if self.repository is None:
            if not self.model:
                raise ValueError(
                    "MODEL is missing; give it here, or set CARPOOL_MODEL in the environment; or name a "
                    "folder of models with --repository"
                )
            if self.room is not None:
                raise ValueError("--room is for a worker with --repository; omit it (or CARPOOL_ROOM)")
            return self
        of_one = {"model": "MODEL", **{name: _flag(name) for name in _OF_ONE_MODEL}}
        for name, shown in of_one.items():
            if name in self.model_fields_set and getattr(self, name):
                raise ValueError(
                    f"{shown} is for a worker of one model; with --repository (or CARPOOL_REPOSITORY) give "
                    "it to `carpool load`"
                )
        return self

    @property
    def url_for_models(self) -> str:
        """The address of Redis that model processes get; empty for none. Not with the worker's credentials:
        its role may write results and states of all models."""
        if self.model_redis_url:
            return self.model_redis_url
        return "" if parse(self.redis_url).has_credentials else self.redis_url


class GatewaySettings(CommonSettings):
    """Serve all models over HTTP, and over gRPC if it has a port.

    Without a file of keys it listens on an address of this machine only.
    """

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 picks a free one and logs it")
    grpc_port: OptionalPort = Field(
        None, description="port for gRPC clients of Triton and KServe; 0 picks a free one (default: none)"
    )
    grpc_connection_s_max: Seconds = Field(
        0.0,
        ge=0,
        description="seconds after which a connection of gRPC ends; what is under way on it is cut off later "
        "by the longest timeout and 2 min (default: never)",
    )
    keys: ReadableFile = Field(
        None, description="TOML file of keys, of which each request needs one (default: none is needed)"
    )
    anonymous: bool = Field(
        False, description="listen without keys also on addresses that other machines reach"
    )
    request_timeout_s: Seconds = Field(
        30.0,
        gt=0,
        description="seconds for a request that names none; texts at /v1 have the most that one may name",
    )
    request_timeout_s_max: Seconds = Field(300.0, gt=0, description="seconds that a request may name")
    body_bytes_max: int = Field(64 * 1024 * 1024, ge=1, description="bytes of a body, decompressed")
    memory_bytes_max: int = Field(
        1024 * 1024 * 1024, ge=1, description="bytes of all bodies that are read or have no result"
    )
    connections_max: int = Field(4096, ge=1, description="connections of clients")
    drain_s: Seconds = Field(30.0, ge=0, description="seconds after SIGTERM in which to answer requests")
    origins: Listed = Field(
        [],
        description="web sites whose pages may open WebSockets, such as https://a.example; else its own",
    )
    server_name: str = Field(
        "carpool", description="name of the server in /v2: some programs that use Triton insist on triton"
    )
    model_control: bool = Field(
        False,
        description="let clients load and unload models of the repositories of nodes (keys: scope load)",
    )
    load_timeout_s: Seconds = Field(
        300.0, gt=0, description="seconds in which a model is to serve or to be gone; the client is told then"
    )
    access_log: bool = Field(
        False, description="log every request; else those that fail with 5xx, and at the level debug all"
    )
    trace_ratio: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of the requests without a trace of their own for which one is recorded, 0 to 1",
    )

    @model_validator(mode="after")
    def _check_traces(self) -> Self:
        if self.trace_ratio and not self.otlp_endpoint:
            raise ValueError(
                f"{_flag('trace_ratio')} records traces, which need a collector: give its address with "
                f"{_flag('otlp_endpoint')}"
            )
        return self


def _networks(names: list[str]) -> list[str]:
    for name in names:
        try:
            ip_network(name)
        except ValueError:
            raise ValueError(f"{name!r:.80} is no network, such as 10.0.0.7 or 10.0.0.0/8") from None
    return names


class ConsoleSettings(CommonSettings):
    """Serve the operators' page: which models are in trouble, why, and what to do about it.

    Everybody signs in. The first start prints the password of the first user, once; --add-user adds others.
    """

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8800, ge=0, le=65535, description="port to listen on; 0 picks a free one and logs it")
    users: OptionalPath = Field(
        None,
        description="TOML file of users and hashes of their passwords, which is made if there is none "
        "(default: ~/.config/carpool/console-users.toml)",
    )
    add_user: str = Field("", description="add this user, or give it a new password, print that, and exit")
    remove_user: str = Field("", description="remove this user, and exit; running consoles end its sessions")
    role: Literal["viewer", "operator"] = Field("viewer", description="of --add-user: an operator may act")
    read_only: bool = Field(False, description="let nobody act, whatever the role")
    session_s: Seconds = Field(43_200.0, gt=0, description="seconds after which one has to sign in again")
    trusted_proxy: Annotated[Listed, AfterValidator(_networks)] = Field(
        [],
        description="addresses or networks of proxies whose X-Forwarded-For, X-Forwarded-Proto and "
        "--trusted-header hold (default: none)",
    )
    trusted_header: str = Field(
        "",
        description="header in which a trusted proxy names the user it has signed in, such as X-Remote-User; "
        "the role is that of the file of users, or --trusted-role (default: none)",
    )
    trusted_role: Literal["viewer", "operator", "none"] = Field(
        "viewer", description="role of users that a proxy names and the file of users does not have"
    )

    @model_validator(mode="after")
    def _header_needs_proxy(self) -> Self:
        if self.trusted_header and not self.trusted_proxy:
            raise ValueError("--trusted-header needs --trusted-proxy: else anybody could name a user")
        return self


Settings = TypeVar("Settings", bound=BaseSettings)


def read_settings(kind: type[Settings], argv: Sequence[str], prog: str) -> Settings:
    """Settings of `kind`. If any is wrong, prints what and why to standard error, and exits with status 2."""
    try:
        settings = CliApp.run(kind, cli_args=list(argv), cli_settings_source=_source(kind, prog))
    except ValidationError as error:
        complain(describe(error, kind, prog))
    except (SettingsError, EnvFileError) as error:
        complain(f"{prog}: {error}")
    else:
        for name, meant in misspelt(kind, {**_names_in_env_file(kind), **os.environ}).items():
            complain(f"{prog}: nothing reads {name}; did you mean {meant}?")
        for name in _service_links(kind, os.environ):
            complain(
                f"{prog}: {name} is ignored: {os.environ[name]!r:.80} is what Kubernetes tells of a Service. "
                "Set `enableServiceLinks: false` in the pod's spec, or rename the Service"
            )
        return settings
    raise SystemExit(2)


def read_environment(kind: type[Settings]) -> Settings:
    """Settings of `kind` without flags, for a library. Raises ValueError, whose message is that of a command
    with these settings."""
    try:
        return kind()
    except ValidationError as error:
        raise ValueError(describe(error, kind, "settings")) from None


def _source(kind: type[BaseSettings], prog: str) -> Any:
    from pydantic_settings import CliSettingsSource  # noqa: PLC0415 (an import that only commands need)

    parser = _Parser(
        prog=prog,
        description=cleandoc(kind.__doc__ or ""),
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )
    return CliSettingsSource(
        kind,
        root_parser=parser,
        add_argument_method=partial(_add_argument, kind),
        parse_args_method=_Parser.parse_intermixed_args,  # flags may stand between MODEL and BODY
    )


class _AddLine(argparse.Action):
    """Adds a value to those of a repeated flag. pydantic-settings joins and splits lists at commas, which
    values may have."""

    def __call__(
        self, _parser: object, namespace: argparse.Namespace, value: Any, _flag: str | None = None
    ) -> None:
        before = getattr(namespace, self.dest, None)
        setattr(namespace, self.dest, f"{before}\n{value}" if isinstance(before, str) else value)


class _KeepTexts(argparse.Action):
    """Keeps positional arguments apart, which pydantic-settings would join with commas."""

    def __call__(
        self, _parser: object, namespace: argparse.Namespace, values: Any, _flag: str | None = None
    ) -> None:
        if values:
            setattr(namespace, self.dest, "".join(_END_OF_TEXT + value for value in values))


def _add_argument(
    kind: type[BaseSettings], parser: argparse.ArgumentParser, *names: Any, **options: Any
) -> argparse.Action:
    """Add an argument. Positional ones are optional for argparse, which does not read the environment: there
    they may be set too, and validation reports any that is missing."""
    if not names[0].startswith("-"):
        options["nargs"] = "*" if options.get("nargs") in ("*", "+") else "?"
        options["default"] = argparse.SUPPRESS
    field = kind.model_fields.get(options.get("dest", names[0]))
    if field is not None and _OF_LINES in field.metadata:
        options["action"] = _AddLine
    if field is not None and _OF_TEXTS in field.metadata:
        options["action"] = _KeepTexts
    if field is not None and names[0].startswith("-") and "metavar" in options:
        is_url = names[0].endswith("-url")
        options["metavar"] = "URL" if is_url else _metavar(field, options["metavar"])
    return parser.add_argument(*names, **options)


_NAMED_VALUE: Final = re.compile("[A-Z]+=[A-Z]+")  # as a description begins with it
# What a help text calls the value of a flag, in place of a type of Python.
_METAVARS: Final[Mapping[str, str]] = {
    "str": "TEXT", "int": "N", "float": "NUMBER", "Path": "PATH", "list[str]": "NAMES",
    "{int,auto}": "N|auto",
}  # fmt: skip


def _metavar(field: FieldInfo, type_name: str) -> str:
    """What a help text calls the value of a flag. `type_name`: what pydantic-settings calls it."""
    if named := _NAMED_VALUE.match(field.description or ""):
        return named[0]
    for reader, unit in ((_seconds, "SECONDS"), (_milliseconds, "MS")):
        if _is_read_by(reader, field):
            return unit
    return _METAVARS.get(type_name, type_name)


def _is_read_by(function: Any, kind: Any) -> bool:
    """Whether a type, or one of its alternatives, has this function as a validator."""
    if isinstance(kind, FieldInfo):
        return _is_read_by(function, kind.annotation) or _are_read_by(function, kind.metadata)
    return _are_read_by(function, getattr(kind, "__metadata__", ())) or any(
        _is_read_by(function, part) for part in get_args(kind)
    )


def _are_read_by(function: Any, metadata: Iterable[Any]) -> bool:
    return any(getattr(one, "func", None) is function for one in metadata)


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Leaves out defaults that mean that nothing is set: for a flag such as --no-gateway, that is True."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        for empty in ("null", "", "\0", "False", "True", "[]"):
            text = text.removesuffix(f" (default: {empty})")
        return text


class _Parser(argparse.ArgumentParser):
    """Suggests the flag that was probably meant, instead of printing the usage of all."""

    def error(self, message: str) -> NoReturn:
        lines = [f"{self.prog}: {message}"]
        flags = [flag for action in self._actions for flag in action.option_strings]
        for argument in message.split() if message.startswith("unrecognized") else ():
            similar = difflib.get_close_matches(argument.partition("=")[0], flags, n=1)
            if similar and argument.startswith("-"):
                lines.append(f"    did you mean {similar[0]}?")
        self.exit(2, "\n".join([*lines, f"    {self.prog} --help lists all arguments", ""]))


def describe(error: ValidationError, kind: type[BaseSettings], prog: str) -> str:
    """Each wrong setting: its flag, its environment variable, its value, what is valid, and its help text."""
    lines = []
    for problem in error.errors():
        message = problem["msg"].removeprefix("Value error, ").replace("Input should", "must", 1)
        if not problem["loc"]:  # several settings contradict each other
            lines.append(f"{prog}: {message}")
            continue
        name = str(problem["loc"][0])
        if problem["type"] == "missing":
            positional = "_CliPositionalArg" in str(kind.model_fields[name].metadata)
            shown = name.upper() if positional else _flag(name).partition(" ")[0]
            lines.append(
                f"{prog}: {shown} is missing; give it here, or set CARPOOL_{name.upper()} in the environment"
            )
        else:
            is_url = name.endswith("redis_url")
            value = without_password(str(problem["input"])) if is_url else problem["input"]
            lines.append(f"{prog}: {_flag(name)} is {str(value)!r:.80}: {message}")
        field = kind.model_fields.get(name)
        if field is not None and field.description:
            lines.append(f"    {field.description}")
    return "\n".join(lines)
