"""`carpool rollback`: no requests go to one version of a model."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field
from pydantic_settings import CliPositionalArg

from carpool.settings import ConnectionSettings, read_settings
from carpool_cli.operator_name import this_operator
from carpool_cli.trial import end_trial
from carpool_cli.unload import unload


class RollbackSettings(ConnectionSettings):
    """Give none of a model's requests that ask for no version to one version; the others get them.

    It is the version that has a share, unless --version names another one. If nodes serve it (`carpool load
    --share`), it is unloaded. Else nothing is loaded or stopped, and requests that ask for a version still
    get that; `carpool share` shows what follows.
    """

    model: CliPositionalArg[str] = Field(description="the model's name")
    version: str = Field("", description="the version (default: the only one that has a share)")


def main(argv: Sequence[str]) -> int:
    """Change the shares, and print them. Returns 1 if it is not clear which version is meant."""
    settings = read_settings(RollbackSettings, argv, "carpool rollback")
    version = settings.version or None
    return end_trial(
        "rollback",
        settings,
        settings.model,
        version,
        on_nodes=lambda store, trial: unload(settings, store, trial.model, trial.version),
        otherwise=lambda traffic: traffic.roll_back(version, actor=this_operator()),
    )
