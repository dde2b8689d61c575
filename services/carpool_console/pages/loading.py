"""Models of nodes: what is wanted, and loading, promoting, rolling back and unloading versions.

A load is followed by a job, until it serves or cannot: then shares that mean nothing any more are removed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from carpool.keys import MODEL_NAME, Keys, NodesKeys
from carpool.store.nodes import NodeStore
from carpool.store.rollouts import Following, Rollouts
from carpool.store.traffic import Traffic
from carpool.wire.audit import Actor
from carpool.wire.nodes import REPLICAS_MAX, Snapshot, Wanted, outcome_of
from carpool.wire.traffic import parse_share
from carpool_console.access import Form, RefusedError, console_of, done, form_of, operator, render, viewer
from carpool_console.acting import actor_of, ask
from carpool_console.console import Console
from carpool_console.formats import plural
from carpool_console.jobs import Job, JobFailedError, TooManyJobsError

_LOOK_S: Final = 0.3  # between two looks at how a load goes
_PAGE: Final = "/load"


def routes(console: Console) -> list[Route]:
    """The page, and where its forms go."""
    return [
        Route("/load", _nodes, methods=["GET"]),
        Route("/load", _load, methods=["POST"]),
        Route("/load/promote", _promote, methods=["POST"]),
        Route("/load/unload", _unload, methods=["POST"]),
    ]


@contextmanager
def _store(console: Console) -> Iterator[NodeStore]:
    with console.link(NodesKeys(console.prefix).wanted) as link:
        yield NodeStore(link, console.prefix)


@contextmanager
def _rollouts(console: Console, actor: Actor) -> Iterator[Rollouts]:
    @contextmanager
    def open_traffic(model: str) -> Iterator[Traffic]:
        keys = Keys(model, console.prefix)
        with console.link(keys.shares) as link:
            yield Traffic(link, keys)

    with _store(console) as store:
        yield Rollouts(store, open_traffic, actor)


@viewer
def _nodes(request: Request) -> Response:
    with _store(console_of(request)) as store:
        snapshot = store.snapshot()
    entries: dict[str, set[str]] = {}
    for node in snapshot.nodes:
        for entry, versions in node.entries.items():
            entries.setdefault(entry, set()).update(versions)
    reasons = [(node.name, *reason) for node in snapshot.nodes for reason in sorted(node.reasons.items())]
    return render(
        request,
        "load.html",
        title="Models of nodes",
        nodes=snapshot.nodes,
        wanted=[(one, snapshot.serving(one), _state(snapshot, one)) for one in snapshot.wanted],
        entries={entry: sorted(versions) for entry, versions in sorted(entries.items())},
        reasons=reasons,
        replicas_max=REPLICAS_MAX,
    )


def _state(snapshot: Snapshot, wanted: Wanted) -> str:
    if wanted.is_leaving:
        return "leaves when what replaces it serves"
    state, reason = outcome_of(snapshot, None, wanted.model, wanted.generation)
    return state.lower() if snapshot.serving(wanted) == wanted.replicas else f"{state.lower()}: {reason}"


# --- loads -------------------------------------------------------------------------------------------------


@operator
def _load(request: Request) -> Response:
    form = form_of(request)
    entry, version = form.get("entry", "").strip(), form.get("version", "").strip() or None
    model = form.get("model", "").strip() or entry
    if not MODEL_NAME.fullmatch(model):
        raise RefusedError(400, f"model: {model!r:.80} is no valid name of a model.")
    try:
        replicas, share = _number(form, "replicas"), _share(form)
        parameters = _parameters(form.get("parameters", ""))
        with _rollouts(console_of(request), actor_of(request)) as rollouts:
            generation = rollouts.load(model, version, parameters, replicas, share, entry=entry)
    except ValueError as error:
        raise RefusedError(400, f"Nothing was loaded: {error}.") from None
    return _follow(request, f"load {entry}", model, generation, with_share=share is not None)


@operator
def _promote(request: Request) -> Response:
    """The version that has a share gets all traffic, and the others are unloaded."""
    trial = _trial(request)
    told = [f"The other versions of {trial.model} are unloaded when {trial.title} serves in their place."]
    asked = ask(request, f"Promote {trial.title}?", "Promote", told)
    if asked is not None:
        return asked
    try:
        with _rollouts(console_of(request), actor_of(request)) as rollouts:
            generation = rollouts.take_over(trial)
    except ValueError as error:
        raise RefusedError(400, f"Nothing was promoted: {error}.") from None
    return _follow(request, f"promote version {trial.version}", trial.model, generation, with_share=False)


def _trial(request: Request) -> Wanted:
    model = form_of(request).get("model", "")
    with _store(console_of(request)) as store:
        trial = store.snapshot().trial(model)
    if trial is None:
        raise RefusedError(409, f"Nothing was promoted: no version of {model:.140} has a share on nodes.")
    return trial


def _follow(request: Request, title: str, model: str, generation: int, *, with_share: bool) -> Response:
    console, actor = console_of(request), actor_of(request)
    told = f"{model} is wanted as generation {generation}."
    try:
        job = console.jobs.start(
            title,
            model,
            actor.who,
            lambda job: _run(console, actor, job, model, generation, with_share=with_share),
        )
    except TooManyJobsError as error:
        return done(request, f"{told} It is not followed: {error}.", _PAGE)
    return done(request, told, f"/jobs/{job.id}")


def _run(console: Console, actor: Actor, job: Job, model: str, generation: int, *, with_share: bool) -> str:
    """What the job of a load does. It may be stopped: the model remains wanted then."""
    with _store(console) as store:
        following = Following(store, model, generation)
        while not job.is_stopping:
            progress = following.look(time.monotonic())
            job.tell(progress.text)
            if progress.has_ended:
                break
            job.pause(_LOOK_S)
        else:
            return f"not followed any longer; {model} remains wanted as generation {generation}"
    with _rollouts(console, actor) as rollouts:
        rollouts.finish(model, generation, with_share=with_share, has_failed=progress.has_failed)
    if progress.has_failed:
        raise JobFailedError(progress.text)
    return progress.text


@operator
def _unload(request: Request) -> Response:
    """Unload a model, or the form's `version` of it: a version with a share is rolled back by this."""
    form = form_of(request)
    model, version = form.get("model", ""), form.get("version", "") or None
    title = model if version is None else f"{model} version {version}"
    told = ["Its processes finish the batches that they have. Requests that nobody serves then wait."]
    asked = ask(request, f"Unload {title:.200}?", "Unload", told)
    if asked is not None:
        return asked
    with _rollouts(console_of(request), actor_of(request)) as rollouts:
        number = rollouts.unload(model, version)
    if not number:
        return done(request, f"{title:.200} is not loaded, so nothing was changed.", _PAGE)
    return done(request, f"{title} is wanted no more ({plural(number, 'generation')}).", _PAGE)


# --- fields ------------------------------------------------------------------------------------------------


def _number(form: Form, name: str) -> int | None:
    text = form.get(name, "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 6):
        raise ValueError(f"{name}: {text!r:.40} is no whole number")
    return int(text)


def _share(form: Form) -> int | None:
    text = form.get("share", "").strip()
    return parse_share(text) if text else None


def _parameters(text: str) -> dict[str, str]:
    """NAME=VALUE, one a line."""
    found: dict[str, str] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        name, equals, value = line.partition("=")
        if not (name and equals):
            raise ValueError(f"parameters: {line!r:.60} is not NAME=VALUE")
        if name in found:
            raise ValueError(f"parameters: {name:.60} is given twice")
        found[name] = value
    return found
