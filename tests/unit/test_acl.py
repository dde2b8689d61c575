"""`carpool acl`: the files it writes and keeps, and that every grant is used."""

from __future__ import annotations

import re
import stat
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Final

import pytest

from carpool.client import entries, packing, producer, transport
from carpool.keys import Keys
from carpool.store import (
    batcher,
    bound,
    connection,
    dead_letters,
    dead_pages,
    directory,
    eviction,
    kept,
    nodes,
    operations,
    reader,
    results,
    seats,
    steps,
    upkeep,
    worker,
)
from carpool.store.connection import Script, lua_source
from carpool_cli import acl
from carpool_cli.roles import ROLES, needs_of_file, patterns, rules, rules_of_caller


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CARPOOL_PREFIX", raising=False)


def run_acl(*flags: str) -> int:
    return acl.main(["--secrets", "passwords", "--output", "users.acl", *flags])


def passwords() -> dict[str, str]:
    return {role: (Path("passwords") / role / "password").read_text() for role in ROLES}


def hashes_of(role: str) -> list[str]:
    (line,) = re.findall(rf"^user {role} .*$", Path("users.acl").read_text(), re.MULTILINE)
    return re.findall(r"#([0-9a-f]{64})\b", line)


def hashed(password: str) -> str:
    return sha256(password.encode()).hexdigest()


# --- the file and the passwords


def test_each_role_gets_its_own_password_readable_only_by_its_owner() -> None:
    assert run_acl() == 0
    generated = passwords()
    assert len({*generated.values()}) == len(ROLES) == 8
    assert all(len(password) == 43 for password in generated.values())
    for role in ROLES:
        path = Path("passwords") / role / "password"
        assert stat.S_IMODE(path.stat().st_mode) == 0o400
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_file_has_a_user_for_each_role_and_no_password() -> None:
    run_acl()
    text = Path("users.acl").read_text()
    default, *others = text.splitlines(keepends=True)
    assert default == "user default off resetpass allkeys allchannels +@all\n"
    for role, password in passwords().items():
        assert hashes_of(role) == [hashed(password)]
        assert password not in text
    text = "".join(others)
    assert "nopass" not in text
    assert "+@" not in text
    assert "allkeys" not in text


def test_second_run_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    run_acl()
    before, text, inode = passwords(), Path("users.acl").read_text(), Path("users.acl").stat().st_ino
    capsys.readouterr()
    assert run_acl() == 0
    assert passwords() == before
    assert (Path("users.acl").read_text(), Path("users.acl").stat().st_ino) == (text, inode)
    printed = capsys.readouterr().out
    assert printed.count("is unchanged") == 8
    assert "users.acl is up to date" in printed


def test_password_of_a_new_role_does_not_change_the_others() -> None:
    run_acl()
    before = passwords()
    (Path("passwords") / "metrics" / "password").unlink()
    run_acl()
    after = passwords()
    assert {role for role in ROLES if before[role] != after[role]} == {"metrics"}


def test_password_written_by_the_operator_is_used() -> None:
    path = Path("passwords/worker/password")
    path.parent.mkdir(parents=True)
    path.write_text("  from a vault, with spaces\n")
    run_acl()
    assert hashes_of("worker") == [hashed("from a vault, with spaces")]


@pytest.mark.parametrize("weak", ["", "hunter2", "123456789012345"])
def test_password_that_can_be_guessed_is_rejected(weak: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path("passwords/worker/password")
    path.parent.mkdir(parents=True)
    path.write_text(weak)
    assert run_acl() == 1
    assert "passwords/worker/password" in capsys.readouterr().err
    assert not Path("users.acl").exists()


def test_rotation_keeps_the_old_password_until_the_next_run() -> None:
    run_acl()
    before = passwords()
    run_acl("--rotate", "worker")
    after = passwords()
    assert {role for role in ROLES if before[role] != after[role]} == {"worker"}
    assert sorted(hashes_of("worker")) == sorted([hashed(before["worker"]), hashed(after["worker"])])
    run_acl()
    assert hashes_of("worker") == [hashed(after["worker"])]
    assert passwords() == after


def test_failed_rotation_does_not_change_the_password(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_acl()
    before = passwords()
    Path("users.acl").unlink()
    Path("users.acl").mkdir()
    assert run_acl("--rotate", "worker") == 1
    assert "users.acl" in capsys.readouterr().err
    assert passwords() == before


def test_printing_writes_only_the_rules_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    run_acl()
    capsys.readouterr()
    assert acl.main(["--secrets", "passwords", "--output", "-"]) == 0
    assert capsys.readouterr().out == Path("users.acl").read_text()


def test_failed_write_does_not_change_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    run_acl()
    before = Path("users.acl").read_text()

    def fail(_: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", fail)
    assert run_acl("--redis", "6") == 1
    assert Path("users.acl").read_text() == before
    assert {path.name for path in Path().iterdir()} == {"users.acl", "passwords"}


# --- the rules


def test_key_patterns_are_those_of_every_model_of_the_prefix_only() -> None:
    for name, pattern in patterns("a*b[c]").items():
        assert pattern.startswith(r"a\*b\[c\]:"), name
    assert patterns("p")["requests"] == Keys("x", "p").requests.replace("{x}", "{*}")


@pytest.mark.parametrize("selectors", [False, True])
def test_user_of_models_that_call_others_may_send_to_these_only(selectors: bool) -> None:
    """Given the names of two models, expect the keys of a producer, of these models."""
    keys = set(re.findall(r"~(\S+?)[) ]", rules_of_caller(["a", "b"], "p", selectors=selectors) + " "))
    of_producer = set(re.findall(r"~(\S+?)[) ]", rules("producer", "p", selectors=selectors) + " "))
    assert keys == {key.replace("{*}", f"{{{model}}}") for key in of_producer for model in "ab"}


def test_user_of_models_that_call_others_is_added(capsys: pytest.CaptureFixture[str]) -> None:
    run_acl("--calls", "detect,classify")
    assert "user model on #" in Path("users.acl").read_text()
    assert run_acl("--calls", "no/model") == 1
    assert "--calls: " in capsys.readouterr().err
    assert run_acl("--rotate", "model") == 1
    assert "--rotate model: there is such a user only with --calls" in capsys.readouterr().err


def test_selectors_give_each_command_its_own_keys() -> None:
    root, *selectors = re.split(r" (?=\()", rules("producer", selectors=True))
    assert "~" not in root
    assert "(~carpool:{*}:requests +xadd +xdel)" in selectors
    assert "(~carpool:{*}:replies:* +xread +xtrim)" in selectors
    plain = rules("producer")
    assert "(" not in plain
    assert set(re.findall(r"[+~]\S+", plain)) == set(
        re.findall(r"[+~][^\s)]+", rules("producer", selectors=True))
    )


STORES: Final = {
    "producer": (kept,),
    "gateway": (kept,),
    "control": (nodes, directory),  # beside what the role gateway has
    "batcher": (batcher, reader, results, upkeep),
    "worker": (worker, steps, bound, seats, results, dead_letters),
    "console": (nodes, directory, operations, dead_pages),
    "admin": (nodes, directory, operations, dead_pages),
}


def scripts_of(role: str) -> list[Script]:
    """The scripts that a role's store runs."""
    return [value for module in STORES[role] for value in vars(module).values() if isinstance(value, Script)]


@pytest.mark.parametrize("role", ["batcher", "worker"])
def test_service_has_no_permission_that_its_code_does_not_use(role: str) -> None:
    """Each granted command is in one of its scripts, or in its store."""
    of_connection = {"ping", "client|setname", "cluster|slots", "eval", "evalsha"}
    sources = [source(module) for module in (*STORES[role], directory, eviction)]
    sources += [script.source for script in scripts_of(role)]
    used = set(re.findall(r"""["']([A-Z]{2,})["']""", "".join(sources)))
    needed = commands(role) - of_connection
    granted = {command.partition("|")[0].upper() for command in needed}
    assert granted <= used


def test_producer_has_every_permission_that_the_client_uses() -> None:
    used = {
        command.lower()
        for command in re.findall(
            r'\("([A-Z]{3,})",', "".join(map(source, (producer, packing, entries, transport)))
        )
    }
    assert used - {"client"} <= commands("producer")
    assert used - {"client"} <= commands("gateway")


# What a head grants, although its file has no such command.
UNUSED: Final = {"sequence": {"hdel"}}
# What a script of this role has, and does not call.
NOT_CALLED: Final = {("batcher", "ownership")}
LUA: Final = Path(str(connection.__file__)).parent / "lua"
FILES: Final = sorted(str(path.relative_to(LUA).with_suffix("")) for path in LUA.rglob("*.lua"))


def commands_in(text: str) -> set[str]:
    """The commands that a Lua file gives to Redis."""
    found = set()
    for first, following in re.findall(r"redis\.p?call\((unpack\(\w+\)|[^,)]+)(?:, '([A-Z]+)')?", text):
        if table := re.fullmatch(r"unpack\((\w+)\)", first):
            names = re.findall(rf"local {table[1]} = {{ '([A-Z]+)'", text)
        else:
            names = re.findall(r"'([A-Z]+)'", first)
        assert names, f"no command in {first}"
        is_container = names[0] in {"MEMORY", "XGROUP", "XINFO"}
        found |= {f"{name}|{following}".lower() if is_container else name.lower() for name in names}
    return found - {"time"}  # which has no key


def needs(role: str, file: str) -> set[tuple[str, str]]:
    """Keys and commands that the head of a file grants to a role."""
    lines = needs_of_file(role, file)
    return {(key, name) for keys, names in lines for key in keys.split() for name in names.split()}


@pytest.mark.parametrize("file", FILES)
def test_head_of_each_lua_file_grants_what_it_uses_and_no_more(file: str) -> None:
    text = lua_source(file)
    granted = {name for role in STORES for _, name in needs(role, file)}
    assert commands_in(text) == granted - UNUSED.get(file, set())
    roles = ",".join(re.findall(r"^-- GRANT (\S+)", text, re.MULTILINE)).split(",") if granted else []
    assert len(roles) == sum(len(needs_of_file(role, file)) for role in STORES), "a line cannot be read"


@pytest.mark.parametrize("role", STORES)
def test_service_has_what_its_scripts_need_and_runs_all_that_grant_it_something(role: str) -> None:
    """Otherwise a rare command would fail, and in production only."""
    files = {file for script in scripts_of(role) for file in script.files if commands_in(lua_source(file))}
    files -= {file for of, file in NOT_CALLED if of == role}
    assert files == {file for file in FILES if needs(role, file)}
    of_scripts = {need for file in files for need in needs(role, file)}
    granted = {
        (key, name) for grant in ROLES[role] for key in grant.keys.split() for name in grant.commands.split()
    }
    assert of_scripts <= granted
    others = ROLES["gateway"] if role == "control" else ()
    of_others = {key for grant in others for key in grant.keys.split() if "evalsha" in grant.commands.split()}
    assert {key for key, name in granted if name == "evalsha"} == {key for key, _ in of_scripts} | of_others


def source(module: ModuleType) -> str:
    return Path(str(module.__file__)).read_text()


def commands(role: str) -> set[str]:
    return {command for grant in ROLES[role] for command in grant.commands.split()}


def test_each_grant_has_a_reason() -> None:
    assert all(len(grant.why) > 8 for grants in ROLES.values() for grant in grants)
