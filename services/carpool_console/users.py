"""Who may sign in: a TOML file of names, roles and hashes of passwords.

    [[users]]
    name = "ann"
    role = "operator"    # or viewer
    password = "scrypt$15$8$1$..."    # optional: without it a proxy signs the user in

The file is read again when it changes: who is removed from it, or gets another password or role, is signed
out. Passwords are made here, with 99 bits; scrypt is for a file that somebody copies.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import re
import secrets
import tempfile
import threading
import tomllib
from base64 import b64decode, b64encode
from collections.abc import Mapping
from hashlib import scrypt
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, get_args

Role = Literal["viewer", "operator"]
FIRST_USER: Final = "operator"
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,63}")
_LETTERS: Final = "abcdefghjkmnpqrstuvwxyz23456789"  # none that looks like another one
_GROUPS: Final = 4  # of a password ...
_GROUP_CHARS: Final = 5  # ... and the letters of each
_LOG2_N, _R, _P, _SALT_BYTES = 15, 8, 1, 16  # 32 MiB, and about 0.1 s
_DERIVED_BYTES: Final = 64
_MEMORY_BYTES_MAX: Final = 128 * 1024 * 1024
_FIELDS: Final = frozenset(("name", "role", "password"))
_HEAD: Final = "# Users of carpool console. Change it with: carpool console --add-user NAME --role ROLE\n"


class User(NamedTuple):
    """`password`: its hash; empty for a user whom only a proxy signs in."""

    name: str
    role: Role
    password: str = ""


def default_users_file() -> Path:
    """Where users are kept if no file is named."""
    return Path.home() / ".config" / "carpool" / "console-users.toml"


def new_password() -> str:
    """A random password, such as `k3f9x-m2w7q-pa8rt-h5vze`."""
    groups = ["".join(secrets.choice(_LETTERS) for _ in range(_GROUP_CHARS)) for _ in range(_GROUPS)]
    return "-".join(groups)


def hash_of(password: str) -> str:
    """What is kept of a password. It takes about 0.1 s."""
    salt = secrets.token_bytes(_SALT_BYTES)
    return _kept(salt, _derive(password, salt, _LOG2_N, _R, _P))


def hash_of_nothing() -> str:
    """A hash that no password has. To compare one with it takes as long as with any other."""
    return _kept(secrets.token_bytes(_SALT_BYTES), secrets.token_bytes(_DERIVED_BYTES))


def is_password(kept: str, password: str) -> bool:
    """Whether this is the password of which `kept` is the hash. Raises ValueError if `kept` is none."""
    numbers, salt, derived = _parts(kept)
    return hmac.compare_digest(_derive(password, salt, *numbers), derived)


def _kept(salt: bytes, derived: bytes) -> str:
    return "$".join(["scrypt", str(_LOG2_N), str(_R), str(_P), *map(_as_text, (salt, derived))])


def _derive(password: str, salt: bytes, log2_n: int, r: int, p: int) -> bytes:
    return scrypt(
        password.encode("utf-8", "surrogatepass"), salt=salt, n=1 << log2_n, r=r, p=p,
        maxmem=_MEMORY_BYTES_MAX, dklen=_DERIVED_BYTES,
    )  # fmt: skip


def _parts(kept: str) -> tuple[tuple[int, int, int], bytes, bytes]:
    try:
        kind, log2_n, r, p, salt, derived = kept.split("$")
        numbers = int(log2_n), int(r), int(p)
        if kind != "scrypt" or not (10 <= numbers[0] <= 16 and 1 <= numbers[1] <= 8 and 1 <= numbers[2] <= 4):
            raise ValueError("its parameters are not those of scrypt")
        return numbers, b64decode(salt, validate=True), b64decode(derived, validate=True)
    except ValueError as error:
        raise ValueError(f"password is no hash that `carpool console --add-user` writes: {error}") from None


def _as_text(data: bytes) -> str:
    return b64encode(data).decode()


class Users:
    """The users of a file, which need not exist yet. For any number of threads.

    Raises ValueError, which says what is wrong in the file, and OSError. `problem`: why it could not be read
    again when it changed last; the users before hold then.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem = ""
        self._lock = threading.Lock()
        self._read_at_ns = 0
        self._users: Mapping[str, User] = {}
        if path.exists():
            self._read()

    def find(self, name: str) -> User | None:
        """The user of this name, as the file has it now."""
        with self._lock:
            try:
                if self._changed_ns() != self._read_at_ns:
                    self._read()
            except (OSError, ValueError) as error:
                self.problem = f"{self.path}: {error}; the users before hold"
            return self._users.get(name)

    def put(self, user: User) -> bool:
        """Add a user, or change the one of this name. Returns whether it is new. Raises ValueError."""
        if not NAME.fullmatch(user.name):
            raise ValueError(
                f"{user.name!r:.80} is no valid name: letters, digits, '.', '_', '@', '+', '-', at most 64"
            )
        with self._lock:
            is_new = user.name not in self._users
            self._write({**self._users, user.name: user})
            return is_new

    def add_first(self) -> str:
        """If there is no file yet: add FIRST_USER, and return its password. Else return an empty text."""
        if self.path.exists():
            return ""
        password = new_password()
        self.put(User(FIRST_USER, "operator", hash_of(password)))
        return password

    def remove(self, name: str) -> bool:
        """Remove a user. Returns whether there was one of this name."""
        with self._lock:
            if name not in self._users:
                return False
            self._write({other: user for other, user in self._users.items() if other != name})
            return True

    @property
    def is_read_by_others(self) -> bool:
        """Whether other users of this machine may read the file."""
        with contextlib.suppress(OSError):
            return bool(self.path.stat().st_mode & 0o077)
        return False

    def _changed_ns(self) -> int:
        return self.path.stat().st_mtime_ns

    def _read(self) -> None:
        """Once for each change of the file; again and again while it cannot be read at all (OSError)."""
        changed_ns, data = self._changed_ns(), self.path.read_bytes()
        self._read_at_ns = changed_ns
        self._users = read_users(data.decode())
        self.problem = ""

    def _write(self, users: Mapping[str, User]) -> None:
        """All at once or not at all, readable for its owner only."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        tables = [
            f'\n[[users]]\nname = "{user.name}"\nrole = "{user.role}"\n'
            + (f'password = "{user.password}"\n' if user.password else "")
            for user in users.values()
        ]
        descriptor, written = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(_HEAD + "".join(tables))
                file.flush()
                os.fsync(file.fileno())
            Path(written).replace(self.path)
        except BaseException:
            Path(written).unlink(missing_ok=True)
            raise
        self._read()


def read_users(text: str) -> dict[str, User]:
    """The users of a file's text, by name. Raises ValueError, which names the user and what is wrong."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"is no TOML: {error}") from None
    if tables.keys() - {"users"} or not isinstance(tables.get("users", []), list):
        raise ValueError("must have tables [[users]], and nothing else")
    users: dict[str, User] = {}
    for at, table in enumerate(tables.get("users", []), 1):
        user = _user_of(table, f"user {at}")
        if user.name in users:
            raise ValueError(f"two users are named {user.name!r}")
        users[user.name] = user
    return users


def _user_of(table: Any, where: str) -> User:
    if not isinstance(table, dict) or not all(isinstance(value, str) for value in table.values()):
        raise ValueError(f"{where}: must be a table of texts")
    if unknown := table.keys() - _FIELDS:
        raise ValueError(f"{where} has {min(unknown)!r:.80}, which is none of {', '.join(sorted(_FIELDS))}")
    name, role, password = table.get("name", ""), table.get("role", ""), table.get("password", "")
    if not NAME.fullmatch(name):
        raise ValueError(
            f"{where}: name is {name!r:.80}: letters, digits, '.', '_', '@', '+', '-', at most 64"
        )
    if role not in get_args(Role):
        raise ValueError(f"{name}: role is {role!r:.80}: must be viewer or operator")
    if password:
        try:
            _parts(password)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return User(name, role, password)
