"""Shares of a model's traffic by version: the hash `carpool:{MODEL}:shares` <-> whole per cents.

A share concerns requests that ask for no version. The versions without a share divide the rest evenly. A
version with a share of 0 gets none of them while another one has workers. Without any share, all versions
take them as they come.

Which version a request gets depends on its correlation ID, or its sequence ID, and nothing else: a request
that is sent again goes to the same version, and a sequence stays with it. As the share of one version grows,
it keeps the requests that it had.

Why: docs/decisions/0112.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Collection, Mapping
from typing import Final

from carpool.keys import MODEL_VERSION, Keys

ALL: Final = 100  # per cent
_POSITIONS: Final = 1 << 32  # of the hash of a name

Shares = Mapping[str, int]
"""Per cents by version, each from 0 to 100, together at most 100."""

Command = tuple[str | int, ...]


def parse_share(text: str) -> int:
    """A share as people write it, such as `10%` or `10`. Raises ValueError."""
    number = text.strip().removesuffix("%").strip()
    if not (number.isascii() and number.isdigit() and int(number) <= ALL):
        raise ValueError(f"share {text!r}: must be a whole number from 0 to {ALL}, in per cent, such as 10%")
    return int(number)


def check_shares(shares: Shares) -> None:
    """Raises ValueError if these are not names of versions, or no shares."""
    for version, share in shares.items():
        if not MODEL_VERSION.fullmatch(version):
            raise ValueError(
                f"version {version!r}: must be 1 to 128 letters, digits and characters of . _ : + -"
            )
        if not 0 <= share <= ALL:
            raise ValueError(f"share {share} of version {version}: must be 0 to {ALL} per cent")
    if sum(shares.values()) > ALL:
        total = " + ".join(f"{share}%" for share in shares.values())
        raise ValueError(f"shares: {total} are more than {ALL}% together")


def read_shares(texts: Mapping[str, str]) -> dict[str, int]:
    """The shares in a hash, in the order of their versions. Fields that are no shares are left out, and so
    are those with which all are more than everything: a user wrote them."""
    shares: dict[str, int] = {}
    for version, text in sorted(texts.items()):
        try:
            candidate = {**shares, version: parse_share(text)}
            check_shares(candidate)
        except ValueError:
            continue
        shares = candidate
    return shares


def read_shares_command(keys: Keys) -> Command:
    """The command that reads the hash."""
    return "HGETALL", keys.shares


def chosen(shares: Shares, version: str | None) -> str:
    """The version that `promote` and `rollback` are about: the given one, or the only one with a share.
    Raises ValueError."""
    if version is not None:
        return version
    if len(shares) == 1:
        return next(iter(shares))
    found = ", ".join(f"{name} {share}%" for name, share in shares.items()) or "no version has a share"
    raise ValueError(f"which version? {found}; name one with --version")


def promoted(shares: Shares, version: str | None = None) -> dict[str, int]:
    """The shares with which all traffic goes to one version. Raises ValueError."""
    return {chosen(shares, version): ALL}


def rolled_back(shares: Shares, version: str | None = None) -> dict[str, int]:
    """The shares with which no traffic goes to one version. Raises ValueError."""
    return {chosen(shares, version): 0}


class Division:
    """How requests that ask for no version are divided among versions that have workers.

    `versions`: those that get any, in the order of the positions of names. Empty: any worker takes them.
    """

    def __init__(self, shares: Shares, living: Collection[str]) -> None:
        """`living`: the versions that have workers; '' for workers that name none, which is never chosen."""
        self.versions: list[str] = []
        self._ends: list[int] = []  # of the positions of each version
        named = sorted(version for version in living if version)
        if not shares or not named:
            return
        others = [version for version in named if version not in shares]
        parts = {version: float(shares[version]) for version in named if shares.get(version)}
        rest = ALL - sum(parts.values())
        parts |= {version: rest / len(others) for version in others if rest > 0}
        parts = parts or dict.fromkeys(named, 1.0)
        total, end = sum(parts.values()), 0.0
        for version, part in parts.items():
            end += part
            self.versions.append(version)
            self._ends.append(round(end / total * _POSITIONS))

    def __bool__(self) -> bool:
        return bool(self.versions)

    def __eq__(self, other: object) -> bool:
        """Whether each name gets the same version."""
        return isinstance(other, Division) and (self.versions, self._ends) == (other.versions, other._ends)

    def __hash__(self) -> int:
        return hash((tuple(self.versions), tuple(self._ends)))

    def version_of(self, name: str) -> str:
        """The version that the request, or the sequence, of this name gets. About 1 us."""
        if len(self.versions) == 1:
            return self.versions[0]
        position = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest())
        return self.versions[min(bisect_right(self._ends, position), len(self.versions) - 1)]
