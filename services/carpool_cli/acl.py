"""`carpool acl`: writes a password for each role, and the ACL file with the permissions of each in Redis."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Final, Literal

from pydantic import Field

from carpool.keys import DEFAULT_PREFIX, Keys
from carpool.settings import CarpoolSettings, Prefix, read_settings
from carpool.shown import complain
from carpool.text_files import read_text
from carpool_cli.roles import CALLER, ROLES, rules, rules_of_caller

PASSWORD_BYTES: Final = 32
PASSWORD_LENGTH_MIN: Final = 16
Notify = Callable[[str], None]
_WITHOUT_SELECTORS: Final = (
    "Redis 6 cannot limit a command to some of a role's keys: a producer, for example, may read and trim "
    "the request stream. With Redis 7 or later, omit --redis 6."
)


class AclSettings(CarpoolSettings):
    """Write Redis's ACL file: one user for each role, with the permissions that the role needs and no others.

    The roles are producer, batcher, worker, gateway, control, metrics, console and admin; no other user can
    connect.
    The password of a role is in SECRETS/ROLE/password, and is generated if that file does not exist. Each is
    in a directory of its own, so that it can be given to that role alone. Running the command again changes
    nothing.

    Models that call others sign in as a producer (--model-redis-url of their worker). With --calls the file
    has one more user, `model`, which may send to the models that are named, and to no others.

    To rotate a password: run with --rotate ROLE, run `ACL LOAD` in Redis, and restart that role. Then run
    without --rotate, and `ACL LOAD` again: the old password works until that second `ACL LOAD`.
    """

    secrets: Path = Field(description="directory of the password files, each in ROLE/password")
    output: str = Field(description="the ACL file to write (Redis's `aclfile`), or - to print it")
    prefix: Prefix = Field(DEFAULT_PREFIX, description="prefix of every Redis key")
    redis: Literal["6", "7"] = Field(
        "7", description="oldest Redis version to support; only 7 can limit each command to its own keys"
    )
    calls: str = Field(
        "",
        description="models that other models call, such as detect,classify: adds a user `model` for these",
    )
    rotate: (
        Literal["producer", "batcher", "worker", "gateway", "control", "metrics", "console", "admin", "model"]
        | None
    ) = Field(None, description="the role that gets a new password in addition to its present one")


def main(argv: Sequence[str]) -> int:
    """Write the missing passwords and the file, and print what was done. Returns 1 if that fails."""
    settings = read_settings(AclSettings, argv, "carpool acl")
    printing = settings.output == "-"

    def notify(message: str) -> None:
        print(message, file=sys.stderr if printing else sys.stdout)

    try:
        called = _called(settings)
        roles = [*ROLES, *([CALLER] if called else [])]
        passwords = {role: _password(settings.secrets / role / "password", notify) for role in roles}
        hashes = {role: [_hash(password)] for role, password in passwords.items()}
        successor = secrets.token_urlsafe(PASSWORD_BYTES)
        if settings.rotate:
            hashes[settings.rotate].append(_hash(successor))
        text = acl_file(hashes, settings.prefix, called, selectors=settings.redis == "7")
        if printing:
            print(text, end="")
        else:
            notify(_save(Path(settings.output), text, len(roles)))
        if settings.rotate:  # last, so that a role that reads the new password can already sign in with it
            path = settings.secrets / settings.rotate / "password"
            _write(path, successor, 0o400)
            notify(
                f"{path} has a new password; the old one works until you run this without --rotate, and "
                "then ACL LOAD."
            )
    except (OSError, ValueError) as error:
        complain(f"carpool acl: {error}")
        return 1
    if settings.redis == "6":
        notify(_WITHOUT_SELECTORS)
    return 0


def _called(settings: AclSettings) -> list[str]:
    """The models of --calls. Raises ValueError."""
    called = settings.calls.replace(",", " ").split()
    for model in called:
        try:
            Keys(model, settings.prefix)
        except ValueError as error:
            raise ValueError(f"--calls: {error}") from None
    if settings.rotate == CALLER and not called:
        raise ValueError("--rotate model: there is such a user only with --calls")
    return called


def acl_file(
    hashes: Mapping[str, Sequence[str]], prefix: str, called: Sequence[str] = (), *, selectors: bool
) -> str:
    """The text of the file. `hashes` has, for each role, the hashes of the passwords it may sign in with.
    `called`: the models to which the user CALLER may send, if there is one."""
    # The default user is off: no client can sign in as it. But Redis replays its append-only file as this
    # user, and checks its permissions at each EXEC, which is how scripts are recorded. Without permissions,
    # all that scripts have written would be lost (redis/redis#14541).
    lines = ["user default off resetpass allkeys allchannels +@all"]
    for role, role_hashes in hashes.items():
        passwords = " ".join(f"#{digest}" for digest in role_hashes)
        if role == CALLER:
            allowed = rules_of_caller(called, prefix, selectors=selectors)
        else:
            allowed = rules(role, prefix, selectors=selectors)
        lines.append(f"user {role} on {passwords} {allowed}")
    return "\n".join(lines) + "\n"  # without comments, which Redis does not accept in this file


def _hash(password: str) -> str:
    """The hash that Redis uses: plain SHA-256, which is safe only for a password that cannot be guessed."""
    return sha256(password.encode()).hexdigest()


def _password(path: Path, notify: Notify) -> str:
    """The password in the file, which is written with a new one if it does not exist."""
    try:
        password = read_text(path).strip()
    except FileNotFoundError:
        password = secrets.token_urlsafe(PASSWORD_BYTES)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write(path, password, 0o400)
        notify(f"{path} was generated: 256 random bits.")
        return password
    if len(password) < PASSWORD_LENGTH_MIN:
        raise ValueError(
            f"{path} has a password of {len(password)} characters, which can be guessed from its hash; "
            f"use {PASSWORD_LENGTH_MIN} or more, or remove the file to have one generated"
        )
    notify(f"{path} is unchanged.")
    return password


def _save(path: Path, text: str, users: int) -> str:
    """Write the ACL file unless it has this text already. Returns what was done."""
    with suppress(FileNotFoundError):
        if path.read_bytes() == text.encode():
            return f"{path} is up to date."
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(path, text, 0o644)  # Redis runs as another user and must read it; it has only hashes
    return f"{path} was written: {users} users. A running Redis loads it with ACL LOAD."


def _write(path: Path, text: str, mode: int) -> None:
    """Replace the file in one step: no reader sees half of it, and it never has wider permissions."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(
            os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8"
        ) as file:
            os.fchmod(file.fileno(), mode)  # independent of the umask
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
