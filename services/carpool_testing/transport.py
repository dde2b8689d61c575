"""What a producer has in place of its connections to Redis: models in this process.

It gets the commands that would be written to Redis. An XADD is an entry for the engine of its model, a SET
stores a body, and look-ups are answered from the models that there are. A turn of an engine runs in the event
loop of the producer, and executes one batch, or takes one step: chunks reach their readers in between.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from carpool.client.durability import Durability
from carpool.client.entries import Channel, OutgoingEntry, SequencesEnded
from carpool.client.packing import Packer, weakly
from carpool.client.producer import Producer
from carpool.errors import CarpoolError, InvalidArgumentError, UnavailableError, UnimplementedError
from carpool.keys import DEFAULT_PREFIX, Keys, models_key
from carpool_testing.engine import Engine, as_bytes, now_us
from carpool_testing.models import Models, new_engine

ADDRESS: Final = "models in this process"
_URL: Final = "redis://localhost"  # never connected to
_NO_REDIS: Final = (
    "results by ID (enqueue, result, status, cancel) are in Redis, and there is none here: test them with "
    "a stack, such as that of the fixture carpool_stack"
)


class LocalTransport:
    """As `carpool.client.transport.Transport`, to models by name."""

    is_full = False
    connection_error = None
    losses = 0

    def __init__(
        self,
        models: Models,
        on_results: Callable[[Sequence[bytes]], object],
        on_rejected: Callable[[OutgoingEntry, CarpoolError], None],
    ) -> None:
        self._on_rejected = on_rejected
        self._bodies: dict[str, bytes] = {}  # stored ones, by key
        self._turn: asyncio.Handle | None = None  # the next one
        self._closed = False
        self._engines: dict[str, Engine] = {}  # by name
        self._by_key: dict[str, Engine] = {}  # by the key of the request stream
        self._registered: dict[str, Engine] = {}  # by the key of the registration
        self._processes: set[str] = set()  # the keys of their processes
        try:
            models.check()
            for name in models.models:
                keys = Keys(name)
                engine = new_engine(name, models, keys, on_results, self._bodies, weakly(self._plan))
                self._engines[name] = engine
                self._by_key[keys.requests] = self._registered[keys.registration] = engine
                self._processes.add(keys.workers)
        except BaseException:
            self._unload()
            raise

    async def open(self, name: str) -> None:
        """Use this event loop. `name`: of the reply streams."""
        self._name = name
        self._loop = asyncio.get_running_loop()

    async def close(self) -> None:
        """Execute nothing more, and unload the models."""
        if not self._closed:
            await asyncio.gather(*self._cancel(), return_exceptions=True)
            self._unload()

    def abandon(self) -> None:
        """As `close`, without waiting."""
        if not self._closed:
            self._cancel()
            self._unload()

    def _cancel(self) -> list[asyncio.Task[None]]:
        self._closed = True
        if self._turn is not None:
            self._turn.cancel()
        return [task for engine in self._engines.values() for task in engine.cancel()]

    def disown(self) -> None:
        """This is the child of a fork: its parent goes on with the models."""
        self._closed = True

    def _unload(self) -> None:
        for engine in self._engines.values():
            engine.close()

    def add_channel(self, channel: Channel) -> None:
        """Results need no reading."""

    def drop_unawaited(self) -> None:
        """Nothing waits for a connection."""

    def full_error(self) -> UnavailableError:
        """Never raised."""
        raise AssertionError("there is no connection to wait for")

    # --- commands ------------------------------------------------------------------------------------------

    def send(self, entries: Iterable[OutgoingEntry | SequencesEnded]) -> None:
        """Have entries executed, soon."""
        for entry in entries:
            try:
                commands = entry.commands(self._name)
                self._receive(commands)
            except Exception as error:
                if not isinstance(entry, OutgoingEntry):
                    raise
                self._on_rejected(entry, InvalidArgumentError(f"the request cannot be encoded: {error}"))
            else:
                entry.sent = bool(commands)
        self._plan()

    def withdraw(self, channel: Channel, correlation_ids: Iterable[str]) -> None:
        """Withdraw requests that were sent."""
        names = " ".join(correlation_ids)
        if names and not self._closed:
            self._receive([("XADD", channel.keys.requests, "*", "withdraw", names)])
            self._plan()

    def _receive(self, commands: Sequence[Sequence[Any]]) -> None:
        for name, *arguments in commands:
            if name == "SET":
                key, body, *_ = arguments
                self._bodies[key] = as_bytes(body)
            elif name == "XADD":
                key, _, *fields = arguments
                self._by_key[key].receive([as_bytes(field) for field in fields])

    async def call_again(self, *command: Any, key: str = "") -> Any:
        """The reply to a look-up. Raises UnimplementedError for what a client asks of Redis alone."""
        match command:
            case ("PING",):
                return b"PONG"
            case ("SMEMBERS", names_key):
                assert names_key == models_key(DEFAULT_PREFIX)
                return [name.encode() for name in self._engines]
            case ("HGET", registration, "max_batch_size"):
                engine = self._registered.get(registration)
                return None if engine is None else str(engine.settings.max_batch_size).encode()
            case ("TIME",):
                return [b"%d" % part for part in divmod(time.time_ns() // 1000, 1_000_000)]
            case ("ZCARD" | "ZCOUNT", processes, *_):
                return int(processes in self._processes)
            case ("EXISTS", loading) if str(loading).endswith(":loading"):
                return 0
        raise UnimplementedError(_NO_REDIS)

    # --- turns ---------------------------------------------------------------------------------------------

    def _plan(self) -> None:
        """Plan the next turn."""
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        due = [at_us for engine in self._engines.values() if (at_us := engine.due_at_us) is not None]
        if due and not self._closed:
            wait_s = (min(due) - now_us()) / 1e6
            later = self._loop.call_later
            self._turn = (
                later(wait_s, self._take_turn) if wait_s > 0 else self._loop.call_soon(self._take_turn)
            )

    def _take_turn(self) -> None:
        self._turn = None
        try:
            for engine in list(self._engines.values()):
                due_us = engine.due_at_us
                if due_us is not None and due_us <= now_us() and not self._closed:
                    engine.turn()
        finally:
            self._plan()


class LocalProducer(Producer):
    """A producer for models in this process."""

    def __init__(self, models: Models, timeout_s: float | None) -> None:
        self._local_models = models
        self._unknown = [*models.models]
        super().__init__(_URL, DEFAULT_PREFIX, timeout_s, "none")

    @property
    def address(self) -> str:
        """In errors and warnings."""
        return ADDRESS

    async def connect(self) -> None:
        """All models are known from then on: the first requests to each share batches as later ones do."""
        await super().connect()
        unknown, self._unknown = self._unknown, []  # a look-up connects, too
        for model in unknown:
            await self.open_channel(model, self.timeout_s)

    def _new_packer(self, durability: Durability) -> Packer:
        return _LocalPacker(self._local_models, durability)


class _LocalPacker(Packer):
    def __init__(self, models: Models, durability: Durability) -> None:
        self._models = models
        super().__init__(_URL, models_key(DEFAULT_PREFIX), durability)

    def _new_transport(self, url: str, first_key: str, durability: Durability) -> Any:
        return LocalTransport(self._models, self.awaited.on_results, self.awaited.fail)
