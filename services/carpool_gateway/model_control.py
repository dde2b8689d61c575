"""Loads and unloads models of the repositories of nodes, and tells which models there are.

What is wanted is written to Redis, where nodes read it. It stays if the client or the gateway goes away.

Why: docs/decisions/0113.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from typing import Any, NamedTuple, TypeVar

import structlog

from carpool.client.producer import Producer
from carpool.errors import (
    AbortedError,
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
    UnimplementedError,
)
from carpool.wire.audit import Actor
from carpool.wire.nodes import START_A_NODE, OutcomeState, Snapshot, Wanted, choose_version
from carpool_gateway.answers import HttpError
from carpool_gateway.catalog import Catalog
from carpool_gateway.credentials import Key
from carpool_gateway.node_calls import NodeCalls
from carpool_gateway.oip.control import endpoint_for
from carpool_gateway.oip.documents import IndexEntry
from carpool_gateway.oip.index import index_of, unloading
from carpool_gateway.oip.load_config import LoadRequest
from carpool_gateway.oip.models import OfferedModel
from carpool_gateway.outcomes import Outcomes

_Made = TypeVar("_Made")


class _Written(NamedTuple):
    """A load that was written, by whom. `has_share`: it gets only a share of the traffic."""

    name: str
    generation: int
    has_share: bool
    actor: Actor


class ModelControl:
    """What clients may do with the models of nodes. All coroutines raise HttpError and CarpoolErrors.

    `timeout_s`: how long who loads or unloads waits for what becomes of it.
    """

    def __init__(
        self,
        nodes: NodeCalls,
        catalog: Catalog,
        producer: Producer,
        *,
        is_enabled: bool,
        timeout_s: float,
    ) -> None:
        self.is_enabled = is_enabled
        self._nodes = nodes
        self._catalog = catalog
        self._producer = producer
        self._timeout_s = timeout_s
        self._outcomes = Outcomes(nodes)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._writing = asyncio.Lock()  # while what is wanted is read, and something made of it is written
        self._log = structlog.get_logger()

    def check_enabled(self) -> None:
        """Raise UnimplementedError unless models can be loaded and unloaded."""
        if not self.is_enabled:
            raise UnimplementedError(
                "the gateway loads and unloads no models: it was started without --model-control"
            )

    def stop(self) -> None:
        """Answer all who wait: what they asked for goes on."""
        self._outcomes.stop()

    async def offered(self, name: str) -> OfferedModel | None:
        """A model as it is registered, if it is."""
        try:
            return await self._catalog.model(name)
        except (NotFoundError, InternalError):
            return None

    # --- loads ---------------------------------------------------------------------------------------------

    async def load(self, name: str, request: LoadRequest, key: Key) -> None:
        """Load a model; return when it serves. Until then, and if it fails, an earlier version serves on."""
        await self._detached(self._finish(self._load(name, request, key)))

    async def load_endpoint(self, entry: str, request: LoadRequest, key: Key) -> str:
        """Load an entry under its own name or, with other parameters than before, under one more; return the
        name when it serves."""
        return await self._detached(self._finish(self._load_endpoint(entry, request, key)))

    async def _finish(self, load: Coroutine[Any, Any, _Written]) -> str:
        """Write a load, and wait for what becomes of it. Returns the name of the model when it serves."""
        written = await load
        await self._wait_until_served(written)
        return written.name

    async def _load(self, name: str, request: LoadRequest, key: Key) -> _Written:
        async with self._writing:
            snapshot = await self._nodes.snapshot()
            before = _newest(snapshot.wanted, name)
            entry = name if before is None else before.entry  # that of an endpoint has another name
            is_more = request.adds_replica and before is not None and before.parameters == request.parameters
            return await self._write(name, entry, request, snapshot, key, same=before if is_more else None)

    async def _load_endpoint(self, entry: str, request: LoadRequest, key: Key) -> _Written:
        async with self._writing:
            snapshot = await self._nodes.snapshot()
            name = endpoint_for(entry, request.parameters, snapshot.wanted)
            if not key.is_for(name):
                raise HttpError(403, f"the key {key.name!r} is not for the model {name}")
            same = _newest(snapshot.wanted, name)  # it has these parameters
            return await self._write(name, entry, request, snapshot, key, same=same)

    async def _write(
        self,
        name: str,
        entry: str,
        request: LoadRequest,
        snapshot: Snapshot,
        key: Key,
        *,
        same: Wanted | None,
    ) -> _Written:
        """Write what is wanted: `same`, perhaps with one more replica, or what the request asks for."""
        if same is not None:
            version = same.version
            replicas = same.replicas + request.adds_replica
            generation = await self._nodes.set_replicas(same, replicas, actor=_actor(key))
        else:
            version = _version_of(snapshot, name, entry, request.version)
            generation = await self._nodes.load(
                name,
                entry,
                version,
                request.parameters,
                request.replicas,
                settings=request.settings,
                actor=_actor(key),
                declared_replicas=snapshot.declared_replicas(entry),
            )
        self._log.info("load requested", model=name, version=version, generation=generation, key=key.name)
        has_share = same is not None and same.share is not None
        return _Written(name, generation, has_share, _actor(key))

    async def _wait_until_served(self, written: _Written) -> None:
        """Wait for what becomes of a load. Raises the error that it is for the client."""
        name, generation, has_share, actor = written
        end_s = time.monotonic() + self._timeout_s
        outcome = await self._outcomes.of_load(name, generation, end_s)
        self._catalog.forget(name)
        if outcome.state is OutcomeState.SERVING:
            if not has_share and (await self._nodes.snapshot()).trial(name) is None:
                await self._nodes.end_shares(name, actor=actor)
            return
        if outcome.state is OutcomeState.FAILED:
            raise InternalError(f"load failed for model '{name}': {outcome.reason}")
        if outcome.state is OutcomeState.GONE:
            raise AbortedError(f"load failed for model '{name}': {outcome.reason}")
        if outcome.state is OutcomeState.WAITING:
            await self._nodes.fail(name, generation, outcome.reason)
            raise UnavailableError(f"load failed for model '{name}': {outcome.reason}")
        raise DeadlineExceededError(
            f"model {name!r} does not serve after {self._timeout_s:g} s: {outcome.reason}. The load goes on; "
            "/v2/repository/index tells how it ends"
        )

    # --- unloads -------------------------------------------------------------------------------------------

    async def unload(self, name: str, version: str | None, key: Key) -> None:
        """Unload a model, or this version of it; return when its processes have answered what they had, and
        have ended. Nothing happens if it is not loaded."""
        unloaded = await self._detached(self._unload(name, version, key))
        gone = await self._outcomes.of_unload(unloaded, time.monotonic() + self._timeout_s)
        self._catalog.forget(name)
        if not gone:
            raise DeadlineExceededError(
                f"model {name!r} still answers requests after {self._timeout_s:g} s; its processes end after "
                "that"
            )

    async def unload_replica(self, name: str, key: Key) -> None:
        """Take one replica of a model away, or with the last one the model; return at once."""
        await self._detached(self._unload_replica(name, key))

    async def _unload(self, name: str, version: str | None, key: Key) -> Sequence[Wanted]:
        """Write that a model is not wanted. Returns what was."""
        snapshot = await self._nodes.snapshot()
        wanted = [one for one in snapshot.wanted if one.model == name and version in (None, one.version)]
        if wanted:
            await self._nodes.unload(name, version, actor=_actor(key))
            if snapshot.trial(name) in (None, *wanted):
                await self._nodes.end_shares(name, actor=_actor(key))
            self._log.info("unload requested", model=name, version=version, key=key.name)
        elif name not in _known_to_nodes(snapshot) and await self._is_ready(name):
            raise InvalidArgumentError(
                f"failed to unload '{name}': it is served by workers that no node started; stop these"
            )
        return wanted

    async def _unload_replica(self, name: str, key: Key) -> None:
        async with self._writing:
            before = _newest((await self._nodes.snapshot()).wanted, name)
            if before is not None and before.replicas > 1:
                await self._nodes.set_replicas(before, before.replicas - 1, actor=_actor(key))
                self._log.info("replica taken away", model=name, replicas=before.replicas - 1, key=key.name)
            else:
                await self._unload(name, None, key)

    async def _is_ready(self, name: str) -> bool:
        try:
            return await self._catalog.is_ready(name)
        except (NotFoundError, InternalError):
            return False

    async def _detached(self, work: Coroutine[Any, Any, _Made]) -> _Made:
        """The result of some work, which is done also if the client goes away meanwhile."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return await asyncio.shield(task)

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # nobody may be left who would look: then asyncio would complain of it

    # --- the index -----------------------------------------------------------------------------------------

    async def index(self, key: Key) -> list[IndexEntry]:
        """The states of all models that the key is for: those of nodes, and those of other workers."""
        names = [name for name in await self._producer.models() if key.is_for(name)]
        registered = await self._catalog.index(names)
        rows = index_of(registered, await self._nodes.snapshot())
        return [row for row in rows if key.is_for(row.name)]


def _actor(key: Key) -> Actor:
    """Who holds a key, for the audit."""
    return Actor(f"{key.tenant}/{key.name}" if key.tenant else key.name, "gateway")


def _newest(wanted: Sequence[Wanted], name: str) -> Wanted | None:
    """What is wanted of a model, and not about to be replaced."""
    found = [one for one in wanted if one.model == name and not one.is_leaving]
    return max(found, key=lambda one: one.generation, default=None)


def _version_of(snapshot: Snapshot, name: str, entry: str, version: str | None) -> str:
    """The version to load. Raises UnavailableError without nodes, and NotFoundError, which begins with words
    for which clients look."""
    if not snapshot.nodes:
        raise UnavailableError(f"failed to load '{name}': no node runs; {START_A_NODE}")
    try:
        if not any(entry in node.entries for node in snapshot.nodes):
            raise ValueError(f"no node has an entry {entry!r}")  # others are not for all eyes
        return choose_version(snapshot, entry, version)
    except ValueError as error:
        raise NotFoundError(
            f"failed to load '{name}', failed to poll from model repository: {error}"
        ) from None


def _known_to_nodes(snapshot: Snapshot) -> set[str]:
    """The models that nodes serve, are to serve, or finish."""
    return {wanted.model for wanted in snapshot.wanted} | {model for model, _ in unloading(snapshot)}
