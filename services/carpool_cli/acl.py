"""`carpool acl`: a password for each role, and the file that tells Redis what each may do."""

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

from carpool.keys import DEFAULT_PREFIX
from carpool.settings import CarpoolSettings, Prefix, read_settings
from carpool_cli.roles import ROLES, rules

PASSWORD_BYTES: Final = 32
PASSWORD_LENGTH_MIN: Final = 16
Say = Callable[[str], None]
_WITHOUT_SELECTORS: Final = (
    "By rules that Redis 6 understands, a role may do everything it does to every key it has: a producer may "
    "also read and trim what waits. Where Redis is 7 or later, leave --redis 6 out."
)


class AclSettings(CarpoolSettings):
    """Write Redis's ACL file: a user for each role, who may do what that role does and nothing else.

    The roles are producer, batcher, worker, metrics and admin; nobody else gets in. The password of a role is
    in SECRETS/ROLE/password, and is made there if it is not: each is in a directory of its own, to be given
    to that role alone. Running it again changes nothing.

    To rotate a password: --rotate ROLE, `ACL LOAD`, restart that role; then run it again without, and
    `ACL LOAD` once more. Until then the old password is good too.
    """

    secrets: Path = Field(description="the directory in which each role has one, for its password")
    output: str = Field(description="the file to write, Redis's `aclfile`; - prints it")
    prefix: Prefix = Field(DEFAULT_PREFIX, description="what every key begins with")
    redis: Literal["6", "7"] = Field(
        "7", description="which Redis must understand it; 7 gives each command its own keys, 6 cannot"
    )
    rotate: Literal["producer", "batcher", "worker", "metrics", "admin"] | None = Field(
        None, description="the role that gets a new password, beside the one it has"
    )


def main(argv: Sequence[str]) -> int:
    """Write what is missing, and say what was done. 1 if something cannot be read or written."""
    settings = read_settings(AclSettings, argv, "carpool acl")
    printing = settings.output == "-"

    def say(sentence: str) -> None:
        print(sentence, file=sys.stderr if printing else sys.stdout)

    try:
        passwords = {role: _password(settings.secrets / role / "password", say) for role in ROLES}
        hashes = {role: [_hash(password)] for role, password in passwords.items()}
        successor = secrets.token_urlsafe(PASSWORD_BYTES)
        if settings.rotate:
            hashes[settings.rotate].append(_hash(successor))
        text = acl_file(hashes, settings.prefix, selectors=settings.redis == "7")
        if printing:
            print(text, end="")
        else:
            say(_save(Path(settings.output), text))
        if settings.rotate:  # last: whoever reads the new password can sign in with it
            path = settings.secrets / settings.rotate / "password"
            _write(path, successor, 0o400)
            say(f"{path} holds a new password; the old one is good until the next run.")
    except (OSError, ValueError) as error:
        print(f"carpool acl: {error}", file=sys.stderr)
        return 1
    if settings.redis == "6":
        say(_WITHOUT_SELECTORS)
    return 0


def acl_file(hashes: Mapping[str, Sequence[str]], prefix: str, *, selectors: bool) -> str:
    """The whole file. `hashes` are those of the passwords with which each role may sign in."""
    # Off, it is nobody who signs in. But Redis replays its append-only file as this user, and asks at each
    # EXEC, which scripts are written down as, what it may: if nothing, then all that scripts did is undone
    # (redis/redis#14541).
    lines = ["user default off resetpass allkeys allchannels +@all"]
    for role, known in hashes.items():
        words = " ".join(f"#{one}" for one in known)
        lines.append(f"user {role} on {words} {rules(role, prefix, selectors=selectors)}")
    return "\n".join(lines) + "\n"  # no comments: Redis takes none in this file


def _hash(password: str) -> str:
    """As Redis does it: plain SHA-256, which only a password that cannot be guessed withstands."""
    return sha256(password.encode()).hexdigest()


def _password(path: Path, say: Say) -> str:
    """The password in the file, which is made if it is not there."""
    try:
        password = path.read_text().strip()
    except FileNotFoundError:
        password = secrets.token_urlsafe(PASSWORD_BYTES)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write(path, password, 0o400)
        say(f"{path} was made: 256 random bits.")
        return password
    if len(password) < PASSWORD_LENGTH_MIN:
        raise ValueError(
            f"{path} holds a password of {len(password)} characters, which can be guessed from its hash; "
            f"put {PASSWORD_LENGTH_MIN} or more there, or remove the file to have one made"
        )
    say(f"{path} is kept.")
    return password


def _save(path: Path, text: str) -> str:
    """Write the ACL file unless it says the same already; what was done."""
    with suppress(FileNotFoundError):
        if path.read_text() == text:
            return f"{path} is as it should be."
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(path, text, 0o644)  # Redis has a user of its own, and there are only hashes in it
    return f"{path} was written: {len(ROLES)} users. A Redis that runs takes it over with ACL LOAD."


def _write(path: Path, text: str, mode: int) -> None:
    """All of it or nothing: nobody finds half a file, nor one that others may read for a moment."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
            os.fchmod(file.fileno(), mode)  # whatever the umask
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
