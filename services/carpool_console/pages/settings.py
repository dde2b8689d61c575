"""Settings of a model: values, sources and meanings; overrides, and changes of these taken back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from carpool.keys import Keys
from carpool.model_settings import ModelSettings
from carpool.store.audit import recent_actions
from carpool.store.connection import Link
from carpool.store.directory import Directory
from carpool.store.overrides import (
    ConfigError,
    ConfiguredSetting,
    configure,
    describe_policy,
    resolve,
    verdict,
)
from carpool.wire.audit import Action
from carpool_console.access import RefusedError, console_of, done, form_of, operator, render, viewer
from carpool_console.acting import actor_of, ask, keys_of
from carpool_console.console import Console
from carpool_console.undo import changes_back

HISTORY_MAX: Final = 20  # changes that the page shows
_AUDIT_LOOKED_AT: Final = 200  # actions among which these are found


class Registered(NamedTuple):
    """The settings of a model. `problem`: why its overrides are not valid; `settings` are without them."""

    settings: dict[str, ConfiguredSetting]
    of_model: dict[str, str]
    overrides: dict[str, str]
    problem: str


def routes(console: Console) -> list[Route]:
    """The pages, and where their forms go."""
    return [
        Route("/models/{model}/settings", _all, methods=["GET"]),
        Route("/models/{model}/settings", _change, methods=["POST"]),
        Route("/models/{model}/settings/undo", _undo, methods=["POST"]),
        Route("/models/{model}/settings/{setting}", _one, methods=["GET"]),
    ]


@viewer
def _all(request: Request) -> Response:
    keys = keys_of(request)
    with console_of(request).link(keys.registration) as link:
        found = _read(link, keys)
        policy = found.settings["policy"].value
        note = describe_policy(policy, Directory(link, keys.prefix).sample(keys.model).active_report)
        history = _history(link, keys)
    return render(
        request,
        "settings.html",
        title=f"Settings of {keys.model}",
        model=keys.model,
        settings=found.settings,
        defaults=ModelSettings().as_text(),
        unreadable={} if not found.problem else found.overrides,
        problem=found.problem,
        note=note,
        history=history,
    )


@viewer
def _one(request: Request) -> Response:
    keys, name = keys_of(request), request.path_params["setting"]
    if name not in ModelSettings.names():
        raise RefusedError(404, f"There is no setting {name!r:.80}.")
    with console_of(request).link(keys.registration) as link:
        found = _read(link, keys)
        history = [action for action in _history(link, keys) if name in action.details]
    return render(
        request,
        "setting.html",
        title=f"{name} of {keys.model}",
        model=keys.model,
        name=name,
        setting=found.settings[name],
        default=ModelSettings().as_text()[name],
        of_model=found.of_model[name],
        override=found.overrides.get(name),
        history=history,
    )


def _read(link: Link, keys: Keys) -> Registered:
    """Raises RefusedError if the model is not registered."""
    registered, overrides = Directory(link, keys.prefix).settings(keys.model)
    if not registered:
        raise RefusedError(404, f"The model {keys.model} is not registered: no worker has served it.")
    of_model = ModelSettings.from_mapping(registered).as_text()
    try:
        return Registered(resolve(registered, overrides), of_model, overrides, "")
    except ValueError as error:
        return Registered(resolve(registered, {}), of_model, overrides, str(error))


def _history(link: Link, keys: Keys) -> list[Action]:
    actions = recent_actions(link, keys, _AUDIT_LOOKED_AT)
    return [action for action in actions if action.action == "config"][:HISTORY_MAX]


@operator
def _change(request: Request) -> Response:
    """Override a setting by the form's `value`, or remove its override (`remove`)."""
    form = form_of(request)
    name, value = form.get("name", ""), form.get("value", "").strip()
    if form.get("remove") == "yes":
        return _configure(request, [f"{name}="])
    if not value:
        raise RefusedError(
            400, f"{name:.80}: there is no value. To use the model's own, remove the override."
        )
    return _configure(request, [f"{name}={value}"])


@operator
def _undo(request: Request) -> Response:
    """Take back the change with the form's `action`, unless a setting was changed since."""
    keys, action_id = keys_of(request), form_of(request).get("action", "")
    with console_of(request).link(keys.registration) as link:
        action = next((one for one in _history(link, keys) if one.id == action_id), None)
        _, overrides = Directory(link, keys.prefix).settings(keys.model)
    if action is None:
        raise RefusedError(404, "This change is not among the last ones.")
    try:
        changes = changes_back(action.details, overrides)
    except ValueError as error:
        raise RefusedError(409, f"Nothing was changed: {error}.") from None
    told = [
        f"The override of {change[:-1]} is removed." if change.endswith("=") else f"{change:.200}"
        for change in changes
    ]
    asked = ask(request, f"Take back this change of {action.who:.100}?", "Take back", told)
    return asked or _configure(request, changes)


def _configure(request: Request, changes: Sequence[str]) -> Response:
    """Make the changes, and say what the settings are now and what the active batcher thinks of them."""
    keys = keys_of(request)
    with console_of(request).link(keys.registration) as link:
        directory = Directory(link, keys.prefix)
        try:
            configured = configure(directory, keys.model, changes, actor=actor_of(request))
        except ConfigError as error:
            raise RefusedError(400, f"{error}.") from None
        policy = configured.settings["policy"].value
        report = verdict(directory, keys.model, policy)
    sentences = [
        f"{name} is {configured.settings[name].value:.200} ({configured.settings[name].source}); "
        f"before: {before}."
        for name, before in configured.before.items()
    ]
    if report is None:
        sentences.append("No batcher is active that could tell whether it takes them.")
    else:
        sentences.append(describe_policy(policy, report) or "The active batcher takes them.")
    return done(request, " ".join(sentences), f"/models/{keys.model}/settings")
