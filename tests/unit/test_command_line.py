"""Command lines: each command's help, and what is wrong, named with what would be right."""

from __future__ import annotations

import os

import pytest

from carpool_cli.__main__ import main


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """None of Carpool's in the environment, and no `.env` where we are."""
    for name in [name for name in os.environ if name.startswith("CARPOOL_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path_factory.mktemp("empty"))


def run(*words: str) -> int:
    """The exit status."""
    try:
        return main(words)
    except SystemExit as exits:
        assert isinstance(exits.code, int)
        return exits.code


@pytest.mark.parametrize("command", ["up", "infer", "models", "top", "demo", "worker", "batcher"])
def test_each_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["help", command], [command, "--help"]):
        assert run(*words) == 0
        said = capsys.readouterr()
        assert said.out.startswith(f"usage: carpool {command} ")
        assert said.err == ""


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["modles"], "did you mean models?"),
        (["zzz"], "up, infer, models"),
        (["up"], "MODEL"),
        (["up", "square", "--replcas", "2"], "did you mean --replicas?"),
        (["up", "square", "--replicas", "0"], "(or CARPOOL_REPLICAS) is '0': Input should be greater"),
        (["up", "square", "--redis-url", "localhost"], "must begin with redis://"),
        (["up", "square", "--redis-url", "redis://h:x/0"], "as in redis://127.0.0.1:6379/0"),
        (["up", "square", "--redis-url", "redis://127.0.0.1:1/0", "--redis-port", "7"], "leave one out"),
        (["up", "square", "square"], "NAME=..."),
        (["up", "square", "--log-level", "loud"], "--log-level"),
        (["infer", "square"], "BODY"),
        (["infer", "square", "--timeout", "3", "7", "--priority", "10"], "less than or equal to 9"),
        (["infer", "square", "7", "--priority", "10"], "less than or equal to 9"),
        (["demo", "--queries", "0"], "--queries (or CARPOOL_QUERIES)"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_what_would_be_right(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*words) == 2
    said = capsys.readouterr()
    assert says in said.err
    assert said.out == ""


def test_a_wrong_setting_in_the_environment_is_named_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CARPOOL_REPLICAS", "many")
    assert run("up", "square") == 2
    assert "CARPOOL_REPLICAS) is 'many'" in capsys.readouterr().err


def test_the_version_is_the_distribution_s(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("version") == run("--version") == 0
    assert capsys.readouterr().out.startswith("carpool 0.")
