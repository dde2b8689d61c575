"""Command lines: the help of each command, and errors that name the correction."""

from __future__ import annotations

import importlib
import io
import os
import pkgutil
import re
import sys
from pathlib import Path

import pytest

import carpool_cli
from carpool.errors import PermissionDeniedError, UnavailableError
from carpool.settings import (
    OF_COMMANDS,
    BatcherSettings,
    CarpoolSettings,
    CommonSettings,
    ConnectionSettings,
    ConsoleSettings,
    GatewaySettings,
    WorkerSettings,
    misspelt,
    read_environment,
    read_settings,
)
from carpool.store.connection import CommandError, LinkError, SignInError
from carpool_cli import infer, models
from carpool_cli.__main__ import main
from carpool_cli.commands import COMMANDS, listed
from carpool_cli.local.up import UpSettings
from carpool_cli.tuning.tune import TuneSettings

UNREACHABLE = LinkError("Redis at redis://redis:6379/0: no answer in time")
SIGNED_OUT = SignInError("Redis at redis://redis:6379/0: invalid username-password pair")
NO_PERMISSION = CommandError("NOPERM", "this user has no permissions to run the 'time' command")
NOT_ACCEPTED = PermissionDeniedError("Redis rejected HGET: this user has no permissions to run it")
FROM_THE_MODEL = UnavailableError("its database is down", correlation_id="a")


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Remove Carpool's settings from the environment, and run where there is no `.env`."""
    for name in [name for name in os.environ if name.startswith("CARPOOL_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path_factory.mktemp("empty"))


def run(*arguments: str) -> int:
    """Run a command; its exit status."""
    try:
        return main(arguments)
    except SystemExit as exits:
        assert isinstance(exits.code, int)
        return exits.code


@pytest.mark.parametrize("command", [command.name for command in COMMANDS.values() if command.module])
def test_each_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["help", command], [command, "--help"]):
        assert run(*arguments) == 0
        printed = capsys.readouterr()
        assert printed.out.startswith(f"usage: carpool {command} ")
        assert printed.err == ""
        assert not re.findall(r"--\S+ (?:str|int|float|Path|list\[|\{int|Literal|Optional)", printed.out)
        assert "(default: True)" not in printed.out, "of --no-...: it is not given"


def test_help_says_what_a_flag_takes(capsys: pytest.CaptureFixture[str]) -> None:
    run("help", "up")
    printed = capsys.readouterr().out
    for flag in ("redis-url URL", "set SETTING=VALUE", "drain-s SECONDS", "data-dir PATH", "replicas N|auto"):
        assert f"--{flag}" in printed
    run("help", "infer")
    assert "--timeout SECONDS" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["modles"], "did you mean models?"),
        (["zzz"], "commands: up, infer, result, check, models, "),
        (["up"], "MODEL"),
        (["up", "square", "--replcas", "2"], "did you mean --replicas?"),
        (["up", "square", "--replicas", "0"], "(or CARPOOL_REPLICAS) is '0': must be greater"),
        (["up", "square", "--redis-url", "localhost"], "must begin with redis://"),
        (["up", "square", "--redis-url", "redis://h:x/0"], "as in redis://127.0.0.1:6379/0"),
        (["up", "square", "--redis-url", "redis://127.0.0.1:1/0", "--redis-port", "7"], "omit one of them"),
        (["up", "square", "square"], "NAME=MODEL"),
        (["up", "square", "--log-level", "loud"], "--log-level"),
        (["infer", "square"], "BODY"),
        (["infer", "square", "--timeout", "3", "7", "--priority", "10"], "less than or equal to 9"),
        (["infer", "square", "7", "--priority", "10"], "less than or equal to 9"),
        (["demo", "--queries", "0"], "--queries (or CARPOOL_QUERIES)"),
    ],
)  # fmt: skip
def test_wrong_command_line_is_answered_with_a_correction(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""


def test_wrong_setting_in_the_environment_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CARPOOL_REPLICAS", "many")
    assert run("up", "square") == 2
    assert "CARPOOL_REPLICAS) is 'many'" in capsys.readouterr().err


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be with a mark", "utf-32"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_env_file_may_be_in_the_encodings_of_windows(encoding: str, end: str) -> None:
    mark = "\ufeff" if "with" in encoding else ""
    text = f"{mark}# für uns{end}CARPOOL_REPLICAS=3{end}".encode(encoding.partition(" ")[0])
    Path(".env").write_bytes(text)
    assert read_settings(WorkerSettings, ["square"], "worker").replicas == 3
    assert read_environment(ConnectionSettings).prefix == "carpool"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("CARPOOL_REPLICAS=3\n# für uns\n".encode("latin-1"), "is not UTF-8 text (byte 0xfc in line 2)"),
        ("CARPOOL_REPLICAS=3\n".encode("utf-16-le"), "has zero bytes"),
        ("CARPOOL_REPLICAS=3\n".encode("utf-16")[:-1], "begins like UTF-16 text, but is none"),
    ],
)
def test_env_file_in_another_encoding_is_named(
    content: bytes, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(".env").write_bytes(content)
    assert run("worker", "square") == 2
    assert f"carpool worker: {Path('.env').absolute()} {reason}" in capsys.readouterr().err
    with pytest.raises(ValueError, match=re.escape(f"{Path('.env').absolute()} {reason}")):
        read_environment(ConnectionSettings)
    assert run("worker", "--help") == 0


def test_variables_of_kubernetes_are_ignored_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("CARPOOL_HTTP_PORT", "CARPOOL_REDIS_PORT", "CARPOOL_HTTP_PORT_9464_TCP"):
        monkeypatch.setenv(name, "tcp://10.43.0.9:9464")
    assert read_settings(WorkerSettings, ["square"], "carpool worker").http_port is None
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith("carpool worker: CARPOOL_HTTP_PORT is ignored")
    assert "enableServiceLinks: false" in warning
    settings = read_settings(UpSettings, ["square"], "carpool up")
    assert (settings.http_port, settings.redis_port) == (None, None)
    assert len(capsys.readouterr().err.splitlines()) == 2
    read_settings(ConnectionSettings, [], "carpool models")
    assert capsys.readouterr().err == ""
    assert run("worker", "square", "--http-port", "tcp://10.43.0.9:9464") == 2  # a flag is somebody's wish


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("CARPOOL_REDIS_URI", "CARPOOL_REDIS_URL"),
        ("CARPOOL_REPLICA", "CARPOOL_REPLICAS"),
        ("CARPOOL_LOGLEVEL", "CARPOOL_LOG_LEVEL"),
        ("carpool_devices", "CARPOOL_DEVICE"),
        ("CARPOOL_LEASE_SM", "CARPOOL_LEASE_MS"),
    ],
)
def test_misspelt_variable_gets_a_hint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, meant: str
) -> None:
    monkeypatch.setenv(name, "7")
    read_settings(WorkerSettings, ["square"], "carpool worker")
    hint = f"carpool worker: nothing reads {name}; did you mean {meant}?\n"
    assert capsys.readouterr().err == hint
    monkeypatch.delenv(name)
    Path(".env").write_text(f"{name}=7\n")
    read_settings(WorkerSettings, ["square"], "carpool worker")
    assert capsys.readouterr().err == hint.replace(name, name.upper())
    monkeypatch.chdir("/")
    read_settings(WorkerSettings, ["square"], "carpool worker")
    assert capsys.readouterr().err == ""


def all_settings() -> set[type[CarpoolSettings]]:
    """Of all services and commands."""
    for module in pkgutil.walk_packages(carpool_cli.__path__, "carpool_cli."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    found, new = set[type[CarpoolSettings]](), {CarpoolSettings}
    while new:
        found |= new
        new = {child for parent in new for child in parent.__subclasses__()} - found
    return {kind for kind in found if kind.__module__.startswith("carpool")}


def test_variables_of_other_services_and_commands_get_no_hint() -> None:
    """Given one `.env` for all of them, and what tests, Compose and Kubernetes set."""
    kinds = all_settings()
    assert {CommonSettings, UpSettings} <= kinds
    fields = {field for kind in kinds for field in kind.model_fields}
    services = {
        *BatcherSettings.model_fields, *WorkerSettings.model_fields, *GatewaySettings.model_fields,
        *ConsoleSettings.model_fields,
    }  # fmt: skip
    assert fields - services == OF_COMMANDS, "settings.OF_COMMANDS is to have them all"
    others = [
        *("WORKER_IMAGE", "BATCHER_IMAGE", "TOOLS_IMAGE", "SERVED_MODEL", "MODEL_PROCESS", "REQUIRED"),
        *("CLIENTS_REQUIRED", "BENCH_MODEL", "BENCH_SETUP", "TEST_HOOKS", "CHECKOUT", "TEAM"),
        *("HTTP_SERVICE_HOST", "HTTP_SERVICE_PORT", "HTTP_SERVICE_PORT_METRICS", "REDIS_SERVICE_HOST"),
        *("HTTP_PORT_9464_TCP", "HTTP_PORT_9464_TCP_PROTO", "HTTP_PORT_9464_TCP_PORT", "REDIS_PORT_6379_TCP"),
        *("REDIS_PORT_6379_TCP_ADDR", "MODEL_SERVICE_HOST", "HTTP_HOST_SERVICE_HOST"),
    ]
    environment = {f"CARPOOL_{name.upper()}": "x" for name in (*fields, *others)}
    for kind in kinds:
        assert (
            misspelt(kind, environment | {"CARPOOL_HTTP_PORTS": "tcp://10.43.0.9:80", "LOG_LEVL": "x"}) == {}
        )


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "utf-8"])
def test_names_that_standard_output_cannot_encode_are_escaped(
    monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    """Given a model that returns them, and any encoding, expect no traceback."""
    Path("greets.py").write_text("def greets(batch):\n    return ['≥é' for _ in batch]\n", "utf-8")
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding))
    assert run("check", "greets.py:greets", '"≥"') == 0
    assert run("help", "infer") == 0
    sys.stdout.flush()
    assert b"usage: carpool infer" in printed.getvalue()


def test_argument_that_is_no_utf_8_gets_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    """Its bytes arrive as lone surrogates, also those of UTF-8 in the C locale."""
    Path(".env").write_text("CARPOOL_REDIS_URL=redis://127.0.0.1:1\n")
    assert run("config", "square", "--prefix", "\udcc3\udca9") == 2
    assert capsys.readouterr().err.startswith("carpool config: an argument or a variable is not UTF-8 text: ")


def test_durations_may_have_a_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARPOOL_LEASE_MS", "2s")
    worker = read_settings(WorkerSettings, ["square", "--drain-s", "1.5min", "--load-s-max=500ms"], "worker")
    assert (worker.lease_ms, worker.drain_s, worker.load_s_max) == (2000, 90.0, 0.5)
    assert read_settings(infer.InferSettings, ["square", "7", "--timeout", "2min"], "infer").timeout == 120
    assert read_settings(TuneSettings, ["square", "--latency-ms", "1.5s"], "tune").latency_ms == 1500
    assert read_settings(WorkerSettings, ["square", "--drain-s", "1.5"], "worker").drain_s == 1.5


@pytest.mark.parametrize("value", ["5 sec", "none", "5GiB", "0.5 s s"])
def test_duration_that_is_none_is_refused(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("worker", "square", "--drain-s", value) == 2
    assert "CARPOOL_DRAIN_S" in capsys.readouterr().err


def test_port_of_redis_may_be_any_free_one() -> None:
    assert read_settings(UpSettings, ["square", "--redis-port", "0"], "up").plan().redis_port is None
    assert read_settings(UpSettings, ["square", "--redis-port", "7000"], "up").plan().redis_port == 7000


@pytest.mark.parametrize("arguments", [[], ["help"], ["--help"], ["help", "help"]])
def test_help_lists_all_commands(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 0
    printed = capsys.readouterr()
    assert listed(indent=2) in printed.out
    assert printed.err == ""


def test_version_is_that_of_the_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("version") == run("--version") == 0
    assert capsys.readouterr().out.startswith("carpool 0.")


@pytest.mark.parametrize(
    ("error", "printed", "advises"),
    [
        (UNREACHABLE, str(UNREACHABLE), True),
        (SIGNED_OUT, str(SIGNED_OUT), False),
        (NO_PERMISSION, f"PERMISSION_DENIED: {NO_PERMISSION}", False),
    ],
    ids=["unreachable", "wrong password", "NOPERM"],
)
def test_models_advises_to_start_a_stack_only_if_redis_cannot_be_reached(
    error: Exception,
    printed: str,
    advises: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(models, "read_models", fail)
    assert run("models") == 1
    _check_advice(capsys.readouterr().err, f"carpool models: {printed}", advises=advises)


@pytest.mark.parametrize(
    ("error", "advises"),
    [(UNREACHABLE, True), (NOT_ACCEPTED, False), (FROM_THE_MODEL, False)],
    ids=["unreachable", "NOPERM", "the model's own UNAVAILABLE"],
)
def test_infer_advises_to_start_a_stack_only_if_redis_cannot_be_reached(
    error: Exception, advises: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(infer, "_print_result", fail)
    assert run("infer", "square", "7") == 1
    _check_advice(capsys.readouterr().err, f"carpool infer: {error}", advises=advises)


def _check_advice(printed: str, message: str, *, advises: bool) -> None:
    assert printed.startswith(f"{message}\n")
    assert ("carpool up" in printed) is advises
