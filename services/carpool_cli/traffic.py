"""What `carpool share`, `promote` and `rollback` have in common: they change shares, and show them."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping

from carpool.keys import Keys
from carpool.settings import ConnectionSettings
from carpool.shown import complain, printable_lines
from carpool.store.connection import CommandError, Link, LinkError
from carpool.store.directory import Directory
from carpool.store.traffic import Traffic
from carpool.wire.registration import versions_of
from carpool_cli.models import describe_unregistered, read_declared
from carpool_cli.refused import explain

Change = Callable[[Traffic], Mapping[str, int]]
"""Changes the shares, and returns them. Raises ValueError."""


def change_shares(command: str, settings: ConnectionSettings, model: str, change: Change) -> int:
    """Change the shares of a model, and print them. Returns 1 if it is unknown, or Redis fails."""
    link = Link(settings.redis_url, name=f"carpool-{command}-{os.getpid()}")
    try:
        keys = Keys(model, settings.prefix)
        models = Directory(link, settings.prefix).models()
        if model not in models:
            raise ValueError(describe_unregistered(model, models))
        shares = change(Traffic(link, keys))
        print(printable_lines(_describe(model, shares, versions_of(read_declared(link, keys)))))
    except (LinkError, CommandError) as error:
        complain(f"carpool {command}: {explain(error)}")
        return 1
    except ValueError as error:
        complain(f"carpool {command}: {error}")
        return 1
    finally:
        link.close()
    return 0


def _describe(model: str, shares: Mapping[str, int], workers: Collection[str]) -> str:
    """Which version gets what of the requests that ask for none."""
    if not shares:
        return f"{model}: no version has a share; any worker takes each request"
    lines = [f"{model}: of the requests that ask for no version"]
    for version, share in shares.items():
        missing = "" if version in workers else ", which no worker has now: the others get its share"
        lines.append(f"  {share:3}%  version {version}{missing}")
    others = sorted(version for version in workers if version and version not in shares)
    rest = 100 - sum(shares.values())
    if others:
        lines.append(f"  {rest:3}%  version{'s' if len(others) > 1 else ''} {', '.join(others)}")
    elif rest:
        lines.append(f"  {rest:3}%  no other version has a worker: those with shares get it")
    return "\n".join(lines)
