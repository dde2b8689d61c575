"""A producer whose requests and results are bytes: its connections, and the models that it finds.

`AsyncClient` is built on it, and so is a front end of another protocol, which passes bodies on as they come:

    producer = Producer(url, prefix, timeout_s, durability)
    channel = await producer.open_channel(model, timeout_s)
    body, sink, future = encoded(content_type, data), EnvelopeSink(), loop.create_future()
    correlation_id = producer.packer.add(channel, body, fields, timeout_s, sink, future)
    producer.packer.withdraw(correlation_id, future)  # nobody wants the result any more
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar
from weakref import WeakSet

from carpool.address import without_password
from carpool.backoff import with_jitter
from carpool.client.durability import Durability
from carpool.client.entries import MAX_ENTRY_REQUESTS, Channel
from carpool.client.lookup import POLL_S, ModelLookup
from carpool.client.packing import Packer, weakly
from carpool.client.transport import failure
from carpool.errors import (
    CarpoolError,
    DeadlineExceededError,
    InvalidArgumentError,
    PermissionDeniedError,
    UnavailableError,
)
from carpool.keys import DEFAULT_PREFIX, Keys, models_key
from carpool.store.connection import Argument, CommandError, LinkError, Script
from carpool.tls_files import check_tls_files

T = TypeVar("T")

_LOADED_PAUSE_S: Final = 0.1
SERVED_S: Final = 1.0  # for which it holds that a worker serves a model
_FORKED: Final = "this process was forked from the one that sent the request"


class Producer:
    """The options are those of AsyncClient. It must be closed.

    `timeout_s`: of requests without their own, and of look-ups.
    `channels`: those of the models that were used, by name.
    `fails_inherited`: whether requests fail in the child of a fork, where no result of them comes.
    """

    def __init__(
        self, url: str | None, prefix: str | None, timeout_s: float | None, durability: str, /
    ) -> None:
        self.url, self.prefix = _connection(url, prefix)
        self.channels: dict[str, Channel] = {}
        self.fails_inherited = True
        self.durability = Durability.parse(durability)
        self.packer = self._new_packer(self.durability)
        self.timeout_s = timeout_s
        self._models = ModelLookup(weakly(self.call), self.prefix)
        self._lookups: set[asyncio.Future[None]] = set()  # of models, under way
        self._opening: asyncio.Future[None] | None = None
        self._pid = os.getpid()  # of the process that has the connections

    def _new_packer(self, durability: Durability) -> Packer:
        return Packer(self.url, models_key(self.prefix), durability)

    @property
    def address(self) -> str:
        """The URL without user name and password."""
        return without_password(self.url)

    async def connect(self) -> None:
        """Connect now, if it is not connected. Raises UnavailableError if Redis cannot be reached, and
        UnimplementedError if it cannot give the durability."""
        self.packer.check_open()
        if self._opening is None:
            self._pid = os.getpid()
            self._opening = self.packer.open()
            _CONNECTED.add(self)
        self.packer.check_loop()
        opening = self._opening
        if opening.done() and not opening.cancelled() and opening.exception() is None:
            return
        try:
            await asyncio.shield(opening)
        except LinkError:
            if self._opening is opening:
                self._opening = None  # the next call tries again
            raise

    async def close(self) -> None:
        """Disconnect. Requests without a result fail with UnavailableError, but are not withdrawn: those that
        were sent with UnconfirmedError."""
        if self.packer.is_closed:
            return
        if self._opening is not None:
            self.packer.check_loop()
        await self.packer.close()

    def abandon(self) -> bool:
        """As `close`, without waiting, on any thread. Returns False if nothing is open in this process."""
        if self._opening is None or self.packer.is_closed or self._pid != os.getpid():
            return False
        with suppress(RuntimeError):  # the event loop is closed: then nothing of it is open
            self.packer.loop.call_soon_threadsafe(self.packer.abandon)
        return True

    async def flush(self) -> None:
        """Wait until Redis has accepted all requests that were added before, as the durability demands.
        Raises UnavailableError."""
        self.packer.check_open()
        await asyncio.sleep(0)  # requests to models that were not used before begin with a look-up
        while self._lookups:
            await asyncio.wait(self._lookups)
            await asyncio.sleep(0)
        self.packer.send_collected()
        await self.call("PING")  # replied to after all that was written before

    def on_fork(self) -> None:
        """This is the child of a fork, and the connections are its parent's. What awaits results on an event
        loop that the child goes on with fails."""
        if self._opening is None:  # it could not connect, so it may still do so in each process
            return
        self.packer.disown()
        if self.fails_inherited:
            self.packer.fail_all(_FORKED)

    # --- models --------------------------------------------------------------------------------------------

    async def models(self) -> list[str]:
        """Names of the registered models. Raises UnavailableError."""
        return await self._models.models()

    async def wait_ready(self, model: str, timeout_s: float | None) -> None:
        """Wait until a worker can execute requests of a model. Raises DeadlineExceededError."""
        await self._in_time(self._models.wait_ready(model, timeout_s), timeout_s)

    async def check_registered(self, model: str) -> None:
        """Raise CarpoolErrors unless the model is registered; one that a worker is loading is waited for."""
        if model not in self.channels:
            await self._in_time(self._models.batch_size(model, self.timeout_s), self.timeout_s)

    async def check_served(self, model: str, timeout_s: float | None) -> None:
        """Raise UnavailableError unless a worker serves a model now."""
        await self._in_time(self._models.check_served(model), timeout_s)

    async def find_channel(
        self, model: str, timeout_s: float | None, served: ServedChannels | None = None
    ) -> tuple[Channel, float]:
        """The channel of a model that is new to this producer, and for how many seconds it was waited for: 0
        unless a worker is loading the model. With `served`, a worker must serve it. Raises CarpoolErrors.

        What is asked for begins with the call: see `left_of`.
        """
        started_s = time.monotonic()
        channel = await self.open_channel(model, timeout_s)
        if served is not None:
            await self.check_served(model, timeout_s)
            served.confirm(model)
        waited_s = time.monotonic() - started_s
        return channel, waited_s if waited_s > POLL_S else 0.0

    async def open_channel(self, model: str, timeout_s: float | None) -> Channel:
        """Look up a model, and read its results from now on. A model that a worker is loading is waited for.
        Raises CarpoolErrors: NotFoundError if there is no such model."""
        lookup: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lookups.add(lookup)
        try:
            size = await self._in_time(self._models.batch_size(model, timeout_s), timeout_s)
        finally:
            self._lookups.discard(lookup)
            lookup.cancel()
        channel = self.channels.get(model)
        if channel is None:
            keys, requests_max = Keys(model, self.prefix), max(1, min(size, MAX_ENTRY_REQUESTS))
            replies = keys.replies(self.packer.name).encode()
            channel = self.channels[model] = Channel(keys, replies, requests_max)
            self.packer.transport.add_channel(channel)
        return channel

    async def _in_time(self, lookup: Coroutine[Any, Any, T], timeout_s: float | None) -> T:
        """The result of a look-up, which itself takes no longer than `timeout_s` as long as Redis replies."""
        try:
            async with asyncio.timeout(None if timeout_s is None else timeout_s + 2 * POLL_S):
                return await lookup
        except TimeoutError as late:
            if isinstance(late, CarpoolError):
                raise
            cause = self.packer.connection_cause()
            raise DeadlineExceededError(f"Redis did not reply within {timeout_s:g} s{cause}") from None

    # --- commands ------------------------------------------------------------------------------------------

    async def call(self, *command: Argument, key: str = "") -> Any:
        """Redis's reply to a command, which is repeated if a connection is lost. `key`: of a cluster, one of
        its keys, unless that is the first argument. Raises UnavailableError."""
        reply = await self._reply(*command, key=key)
        if isinstance(reply, CommandError):
            raise failure(f"Redis rejected {command[0]!s}", reply)
        return reply

    async def run(self, script: Script, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        """As `call`, for a script that batchers load, because a producer may load none. If Redis does not
        know it (yet, or any more), this waits for `timeout_s`."""
        loop = asyncio.get_running_loop()
        end_s = math.inf if self.timeout_s is None else loop.time() + self.timeout_s
        while True:
            reply = await self._reply("EVALSHA", script.sha, len(keys), *keys, *args, key=keys[0])
            if not (isinstance(reply, CommandError) and reply.code == "NOSCRIPT"):
                break
            if loop.time() + _LOADED_PAUSE_S > end_s:
                raise UnavailableError(
                    f"no batcher has loaded the script {script.name} into Redis within {self.timeout_s:g} s: "
                    "is one running?"
                )
            await asyncio.sleep(with_jitter(_LOADED_PAUSE_S))
        if isinstance(reply, CommandError):
            raise failure(f"Redis rejected the script {script.name}", reply)
        return reply

    async def _reply(self, *command: Argument, key: str = "") -> Any:
        transport = self.packer.transport
        try:
            async with asyncio.timeout(self.timeout_s):
                await self.connect()
                return await transport.call_again(*command, key=key)
        except TimeoutError:
            raise transport.connection_error or UnavailableError(
                f"Redis did not reply to {command[0]!s} within {self.timeout_s:g} s"
            ) from None


class ServedChannels:
    """The channels of models that a worker served a moment ago. Of others `get` returns None, so that it is
    looked whether one does."""

    def __init__(self, channels: Mapping[str, Channel]) -> None:
        self._channels = channels
        self._until_s: dict[str, float] = {}

    def get(self, model: str) -> Channel | None:
        """The channel of a model, if it was served within SERVED_S."""
        return self._channels.get(model) if self._until_s.get(model, 0.0) > time.monotonic() else None

    def __getitem__(self, model: str) -> Channel:
        return self._channels[model]

    def confirm(self, model: str) -> None:
        """A worker serves it now."""
        self._until_s[model] = time.monotonic() + SERVED_S


_CONNECTED: Final[WeakSet[Producer]] = WeakSet()


def _on_fork() -> None:
    for producer in list(_CONNECTED):
        producer.on_fork()


os.register_at_fork(after_in_child=_on_fork)


def _connection(url: str | None, prefix: str | None) -> tuple[str, str]:
    """The address of Redis, with user name, password and TLS files, and the prefix of all keys.

    A URL that is given is all there is to say, so that credentials go to no other server than theirs. Without
    one, all settings are read as services and commands read them: from CARPOOL_* variables, then `.env`, then
    defaults. In a model process there is only what its worker gives to it. Raises InvalidArgumentError, which
    names what is wrong, and PermissionDeniedError.
    """
    if not url and "CARPOOL_MODEL_PROCESS" in os.environ:
        url = os.environ.get("CARPOOL_REDIS_URL")
        if not url:
            raise PermissionDeniedError(
                "a model does not get the credentials of its worker; for a model that sends requests, start "
                "the worker with CARPOOL_MODEL_REDIS_URL (--model-redis-url), the address of Redis with a "
                "user of the role producer, or give the client a URL"
            )
    elif not url:
        return _from_settings(prefix)
    try:
        check_tls_files(url)
    except ValueError as error:
        raise InvalidArgumentError(f"url: {error}") from None
    return url, prefix or os.environ.get("CARPOOL_PREFIX") or DEFAULT_PREFIX


def _from_settings(prefix: str | None) -> tuple[str, str]:
    # Imported here, because its import takes 80 ms, half as long as that of a client.
    from carpool.settings import ConnectionSettings, read_environment  # noqa: PLC0415

    try:
        settings = read_environment(ConnectionSettings)
    except ValueError as error:
        raise InvalidArgumentError(str(error)) from None
    return settings.redis_url, prefix or settings.prefix
