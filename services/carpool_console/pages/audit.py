"""The audit: who changed what, when, of all models and of nodes."""

from __future__ import annotations

import heapq
import re
from collections.abc import Sequence
from typing import Final, NamedTuple
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from carpool.keys import Keys, NodesKeys
from carpool.store.audit import recent_actions
from carpool.store.connection import CommandError
from carpool.wire.audit import Action
from carpool_console.access import RefusedError, console_of, render, viewer
from carpool_console.acting import keys_named
from carpool_console.console import Console

PAGE_ACTIONS: Final = 50
NODES: Final = ".nodes"  # in place of a model; no model has this name
_LOOKED_AT_MAX: Final = 5000  # entries of all audits that are looked at for those of one person
_ID: Final = re.compile(r"\d{1,20}-\d{1,20}")


class Told(NamedTuple):
    """An action, and the model that it was about; empty for nodes."""

    model: str
    action: Action


def routes(console: Console) -> list[Route]:
    """The page."""
    return [Route("/audit", _audit, methods=["GET"])]


@viewer
def _audit(request: Request) -> Response:
    console = console_of(request)
    model, who, before = (request.query_params.get(name, "").strip() for name in ("model", "who", "before"))
    if before and not _ID.fullmatch(before):
        raise RefusedError(400, f"before: {before!r:.60} is no ID of an action.")
    rows = [row.model for row in console.reader.overview().rows]
    streams: dict[str, Keys | NodesKeys] = {name: Keys(name, console.prefix) for name in rows}
    streams[NODES] = NodesKeys(console.prefix)
    if model:
        streams = {model: _keys(request, model)}
    found, problem, horizon = _read(console, streams, who, before)
    page, older = newest(found, PAGE_ACTIONS, horizon)
    following = {"model": model, "who": who, "before": older}
    return render(
        request,
        "audit.html",
        title=f"Audit of {model}" if model and model != NODES else "Audit",
        model=model,
        nodes=NODES,
        who=who,
        models=rows,
        told=page,
        problem=problem,
        older=urlencode({name: text for name, text in following.items() if text}) if older else "",
    )


def _keys(request: Request, model: str) -> Keys | NodesKeys:
    return NodesKeys(console_of(request).prefix) if model == NODES else keys_named(request, model)


def _read(
    console: Console, streams: dict[str, Keys | NodesKeys], who: str, before: str
) -> tuple[list[Sequence[Told]], str, str]:
    """Of each audit the newest actions; why some could not be read; and the ID before which audits have
    actions that were not looked at for those of one person, empty if there are none."""
    count = max(PAGE_ACTIONS + 1, _LOOKED_AT_MAX // len(streams)) if who else PAGE_ACTIONS + 1
    found: list[Sequence[Told]] = []
    problem = ""
    ends: list[str] = []
    for name, keys in streams.items():
        with console.link(keys.audit) as link:
            try:
                actions = recent_actions(link, keys, count, before or None)
            except CommandError as error:  # a user wrote the key
                problem = f"The audit of {name} cannot be read: {error}"
                continue
        if who and len(actions) == count:
            ends.append(actions[-1].id)
        told = [Told("" if name == NODES else name, one) for one in actions if who in ("", one.who)]
        found.append(told)
    return found, problem, max(ends, key=_order_of, default="")


def newest(found: Sequence[Sequence[Told]], count: int, horizon: str = "") -> tuple[list[Told], str]:
    """The newest of several lists, each the newest first, but none from before `horizon`; and the ID before
    which the next page begins, empty if there is none. Actions with the same ID stay together, so that none
    is left out."""
    page: list[Told] = []
    for told in heapq.merge(*found, key=lambda one: _order_of(one.action.id), reverse=True):
        if horizon and _order_of(told.action.id) < _order_of(horizon):
            break
        if len(page) >= count and told.action.id != page[-1].action.id:
            return page, page[-1].action.id
        page.append(told)
    return page, horizon


def _order_of(action_id: str) -> tuple[int, int]:
    at_ms, _, number = action_id.partition("-")
    return int(at_ms), int(number or 0)
