"""Control of a model: it is paused and resumed, its workers drained, its versions promoted."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from carpool.keys import Keys, NodesKeys
from carpool.store.connection import Link
from carpool.store.declarations import Declarations
from carpool.store.directory import Directory
from carpool.store.nodes import NodeStore
from carpool.store.operations import Operations
from carpool.store.traffic import Traffic
from carpool.store.workers import WorkerState, read_workers
from carpool.wire.orders import REASON_CHARS_MAX
from carpool.wire.registration import versions_of
from carpool.wire.traffic import parse_share
from carpool_console.access import RefusedError, console_of, done, form_of, operator, render, viewer
from carpool_console.acting import actor_of, ask, keys_of
from carpool_console.console import Console
from carpool_console.formats import plural


def routes(console: Console) -> list[Route]:
    """The page, and where its forms go."""
    return [
        Route("/models/{model}/control", _control, methods=["GET"]),
        Route("/models/{model}/pause", _pause, methods=["POST"]),
        Route("/models/{model}/resume", _resume, methods=["POST"]),
        Route("/models/{model}/drain", _drain, methods=["POST"]),
        Route("/models/{model}/undrain", _undrain, methods=["POST"]),
        Route("/models/{model}/share", _share, methods=["POST"]),
    ]


@viewer
def _control(request: Request) -> Response:
    keys = keys_of(request)
    with console_of(request).link(keys.registration) as link:
        _check_registered(link, keys)
        paused = Operations(link, keys.prefix, actor_of(request)).paused(keys.model)
        waiting = link.call("XLEN", keys.requests)
        workers = _workers(link, keys)
        shares = Traffic(link, keys).shares()
        declared = versions_of(list(Declarations(link, keys).read().by_worker.values()))
    versions = sorted({*filter(None, declared), *shares})
    return render(
        request,
        "control.html",
        title=f"Control of {keys.model}",
        model=keys.model,
        paused=paused,
        paused_told=paused.describe() if paused else "",
        waiting=waiting,
        workers=workers,
        versions=[(version, declared.get(version, 0), shares.get(version)) for version in versions],
        shares=shares,
        reason_chars_max=REASON_CHARS_MAX,
    )


def _check_registered(link: Link, keys: Keys) -> None:
    if keys.model not in Directory(link, keys.prefix).models():
        raise RefusedError(404, f"The model {keys.model} is not registered: no worker has served it.")


def _workers(link: Link, keys: Keys) -> list[WorkerState]:
    """Those that live."""
    return [worker for worker in read_workers(link, keys) if worker.alive]


# --- pause and resume --------------------------------------------------------------------------------------


@operator
def _pause(request: Request) -> Response:
    keys, form = keys_of(request), form_of(request)
    refuses, reason = form.get("refuses") == "yes", form.get("reason", "")
    effect = "Requests that come from now on are refused." if refuses else "Requests are accepted, and wait."
    told = [f"{effect} What is in flight is finished. Deadlines hold."]
    asked = ask(request, f"Pause {keys.model}?", "Pause", told)
    if asked is not None:
        return asked
    with console_of(request).link(keys.paused) as link:
        try:
            paused = Operations(link, keys.prefix, actor_of(request)).pause(
                keys.model, refuses=refuses, reason=reason
            )
        except ValueError as error:
            raise RefusedError(400, f"{error}.") from None
    return done(request, f"{keys.model} is {paused.describe()}.", _page(keys))


@operator
def _resume(request: Request) -> Response:
    keys = keys_of(request)
    with console_of(request).link(keys.paused) as link:
        waiting = link.call("XLEN", keys.requests)  # before: soon they wait no more
        before = Operations(link, keys.prefix, actor_of(request)).resume(keys.model)
    if before is None:
        return done(request, f"{keys.model} was not paused, so nothing was changed.", _page(keys))
    entries = plural(waiting, "entry") if waiting == 1 else f"{waiting:,} entries"
    return done(
        request,
        f"{keys.model} is resumed, with {entries} waiting. It was {before.describe()}.",
        _page(keys),
    )


# --- workers -----------------------------------------------------------------------------------------------


@operator
def _drain(request: Request) -> Response:
    keys, worker = keys_of(request), form_of(request).get("worker", "")
    with console_of(request).link(keys.drained) as link:
        others = sum(len(one.alive) for one in _workers(link, keys) if one.name != worker and not one.order)
    told = ["It takes no more batches, finishes what it has, and stays, until that is undone."]
    if not others:
        told.append(f"No other process of {keys.model} takes batches: requests will wait.")
    asked = ask(request, f"Drain {worker:.140}?", "Drain", told)
    if asked is not None:
        return asked
    with console_of(request).link(keys.drained) as link:
        try:
            drained = Operations(link, keys.prefix, actor_of(request)).drain(keys.model, worker)
        except ValueError as error:
            raise RefusedError(404, f"Nothing was done: {error}.") from None
    how = "" if drained.is_new else "was drained already: "
    return done(
        request,
        f"{worker} {how}is {drained.order.describe()}; it has {drained.processes:,} model processes, and "
        f"{drained.others:,} of other workers serve {keys.model}.",
        _page(keys),
    )


@operator
def _undrain(request: Request) -> Response:
    keys, worker = keys_of(request), form_of(request).get("worker", "")
    with console_of(request).link(keys.drained) as link:
        order = Operations(link, keys.prefix, actor_of(request)).undrain(keys.model, worker)
    if order is None:
        return done(request, f"{worker:.140} was not drained, so nothing was changed.", _page(keys))
    return done(request, f"{worker:.140} takes batches again; it was {order.describe()}.", _page(keys))


# --- versions ----------------------------------------------------------------------------------------------


@operator
def _share(request: Request) -> Response:
    """Give a version a share, all traffic (`promote`) or none (`rollback`); or no version has one (`none`).

    Only of versions that workers serve by themselves; those of nodes are promoted where nodes are.
    """
    keys, form = keys_of(request), form_of(request)
    version, action = form.get("version", ""), form.get("action", "")
    _check_no_trial(request, keys)
    with console_of(request).link(keys.shares) as link:
        _check_registered(link, keys)
        traffic, actor = Traffic(link, keys), actor_of(request)
        try:
            if action == "promote":
                shares = traffic.promote(version, actor=actor)
            elif action == "rollback":
                shares = traffic.roll_back(version, actor=actor)
            elif action in ("share", "none"):
                shares = {version: parse_share(form.get("share", ""))} if action == "share" else {}
                traffic.set(shares, actor=actor)
            else:
                raise RefusedError(
                    400, f"action: {action!r:.40} is none of promote, rollback, share and none."
                )
        except ValueError as error:
            raise RefusedError(400, f"Nothing was changed: {error}.") from None
    told = ", ".join(f"version {name} gets {share}%" for name, share in shares.items())
    told = told or "no version has a share, and any worker takes each request"
    return done(request, f"Of the requests of {keys.model} that ask for no version: {told}.", _page(keys))


def _check_no_trial(request: Request, keys: Keys) -> None:
    """Where nodes serve a version with a share, its processes and its share change together."""
    nodes = NodesKeys(keys.prefix)
    with console_of(request).link(nodes.wanted) as link:
        trial = NodeStore(link, keys.prefix).snapshot().trial(keys.model)
    if trial is not None:
        raise RefusedError(
            409,
            f"Nothing was changed: nodes serve {trial.title} with a share. Promote it, roll it back or load "
            "it with another share on the page Load.",
        )


def _page(keys: Keys) -> str:
    return f"/models/{keys.model}/control"
