"""`carpool share`: the shares of a model's traffic by version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import Field
from pydantic_settings import CliPositionalArg

from carpool.settings import ConnectionSettings, read_settings
from carpool.store.traffic import Traffic
from carpool.wire.traffic import parse_share
from carpool_cli.operator_name import this_operator
from carpool_cli.traffic import change_shares


class ShareSettings(ConnectionSettings):
    """Give versions of a model shares of the requests that ask for no version, such as 2=10%.

    The versions without a share divide the rest evenly. Which request goes where depends on its correlation
    ID, or its sequence ID: what is sent again, and each request of a sequence, goes to the same version.
    Without VERSION=SHARE, the shares are shown; with --none, there are none any more, and any worker takes
    each request. `carpool promote` and `carpool rollback` end such a trial.
    """

    model: CliPositionalArg[str] = Field(description="the model's name")
    change: CliPositionalArg[list[str]] = Field(
        [], description="VERSION=SHARE, in per cent; replaces all shares"
    )
    none: bool = Field(False, description="no version has a share")


def main(argv: Sequence[str]) -> int:
    """Set the shares, if any are given, and print them. Returns 1 if they are not valid."""
    settings = read_settings(ShareSettings, argv, "carpool share")

    def change(traffic: Traffic) -> Mapping[str, int]:
        if settings.none and settings.change:
            raise ValueError("--none: not together with VERSION=SHARE")
        if settings.none or settings.change:
            traffic.set(_shares(settings.change), actor=this_operator())
        return traffic.shares()

    return change_shares("share", settings, settings.model, change)


def _shares(words: Sequence[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for version, share in map(_share, words):
        if version in found:
            raise ValueError(f"version {version:.60} is given two shares")
        found[version] = share
    return found


def _share(text: str) -> tuple[str, int]:
    version, equals, share = text.rpartition("=")
    if not (version and equals):
        raise ValueError(f"{text!r:.60} is not VERSION=SHARE, such as 2=10%")
    return version, parse_share(share)
