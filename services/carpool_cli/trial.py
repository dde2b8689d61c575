"""What `carpool promote` and `rollback` have in common: a version that has a share of the traffic is to get
all of it, or none. Where nodes serve it, what gets nothing any more is unloaded, too.
"""

from __future__ import annotations

from collections.abc import Callable

from carpool.settings import ConnectionSettings
from carpool.shown import complain
from carpool.store.connection import CommandError, LinkError
from carpool.store.nodes import NodeStore
from carpool.wire.nodes import Wanted
from carpool_cli.load import open_link
from carpool_cli.refused import explain
from carpool_cli.traffic import Change, change_shares


def end_trial(
    command: str,
    settings: ConnectionSettings,
    model: str,
    version: str | None,
    *,
    on_nodes: Callable[[NodeStore, Wanted], int],
    otherwise: Change,
) -> int:
    """End the trial of a version; None for the only one that has a share. Returns the exit status.

    `on_nodes` does it for a version that nodes serve with a share, and returns the exit status; `otherwise`
    changes the shares.
    """
    link = open_link(settings, command)
    try:
        store = NodeStore(link, settings.prefix)
        trial = store.snapshot().trial(model)
        if trial is not None and version in (None, trial.version):
            return on_nodes(store, trial)
    except (LinkError, CommandError) as error:
        complain(f"carpool {command}: {explain(error)}")
        return 1
    except ValueError as error:  # for example, no node has its version any more
        complain(f"carpool {command}: {error}")
        return 1
    finally:
        link.close()
    return change_shares(command, settings, model, otherwise)
