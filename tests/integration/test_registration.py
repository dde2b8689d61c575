"""What a worker registers about its model, in a real Redis."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pytest
from structlog.testing import capture_logs

from carpool.keys import Keys
from carpool.model_settings import ModelSettings
from carpool.store.connection import Link
from carpool.store.directory import Directory
from carpool.store.worker import WorkerStore
from carpool.wire.registration import decode_inputs, encode_registration
from carpool.wire.tensors import TensorSpec
from carpool_cli.local.embedded import EmbeddedRedis
from carpool_worker.registrar import Registrar

KEYS: Final = Keys("m")
TENSOR = TensorSpec("x", "FP32", (3,))
LEASE_MS: Final = 600_000


@pytest.fixture
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(append_only=False) as server:
        yield server


@pytest.fixture
def link(server: EmbeddedRedis) -> Iterator[Link]:
    link = Link(server.url, name="test")
    yield link
    link.close()


def test_model_without_tensors_that_takes_the_name_of_another_declares_none(link: Link) -> None:
    store, directory = WorkerStore(link, Keys("m")), Directory(link, "carpool")
    store.register(encode_registration(ModelSettings().as_text(), [TENSOR], [TENSOR]))
    registered, _ = directory.settings("m")
    assert (decode_inputs(registered), "outputs" in registered) == ([TENSOR], True)
    store.register(encode_registration(ModelSettings().as_text(), [], [TENSOR]))
    registered, _ = directory.settings("m")
    assert (decode_inputs(registered), "outputs" in registered) == ([], True)
    store.register(encode_registration(ModelSettings().as_text(), [], []))
    registered, _ = directory.settings("m")
    assert registered == encode_registration(ModelSettings().as_text(), [], [])


# --- several workers ---------------------------------------------------------------------------------------


class OfWorker:
    """A worker without a model process. It has a connection of its own."""

    def __init__(self, link: Link, name: str, size: int) -> None:
        self.name = name
        self.store = WorkerStore(link, KEYS)
        declared = encode_registration(ModelSettings(max_batch_size=size).as_text(), [], [])
        self.registrar = Registrar(name, declared)
        self.registrar.register(self.store)
        self.store.join(f"{name}/0", LEASE_MS)

    def follow(self) -> list[str]:
        """What it logs at a heartbeat."""
        with capture_logs() as logged:
            self.registrar.follow(self.store)
        return [
            entry["event"] + (f": {found}" if (found := entry.get("differing")) else "") for entry in logged
        ]

    def leave(self) -> None:
        self.store.leave(f"{self.name}/0")
        self.store.declarations.remove(self.name)

    def die(self, link: Link) -> None:
        """Its lease has run out."""
        link.call("ZADD", KEYS.workers, 1, f"{self.name}/0")


def registered_size(link: Link) -> str:
    return Directory(link, "carpool").settings("m")[0]["max_batch_size"]


def told(link: Link) -> int:
    """How often the batcher was told to look."""
    return int(link.call("XLEN", KEYS.settled))


DIFFERING: Final = (
    "workers declare different settings, the tightest apply: max_batch_size: 4 (1 worker), 64 (1 worker)"
)


def test_settings_suit_all_workers_that_live(link: Link) -> None:
    old = OfWorker(link, "old", 4)
    assert (old.follow(), registered_size(link)) == ([], "4")
    new = OfWorker(link, "new", 64)
    assert registered_size(link) == "4"
    assert new.follow() == old.follow() == [DIFFERING]
    assert new.follow() == old.follow() == []
    before = told(link)
    old.die(link)
    assert (new.follow(), registered_size(link)) == (["workers declare the same settings again"], "64")
    assert told(link) == before + 1
    old.store.join("old/0", LEASE_MS)  # it was only paused
    assert (new.follow(), registered_size(link)) == ([DIFFERING], "4")
    new.leave()
    assert (old.follow(), registered_size(link)) == (["workers declare the same settings again"], "4")


def test_worker_registers_its_own_settings_if_those_before_it_are_gone(link: Link) -> None:
    OfWorker(link, "gone", 64).leave()
    OfWorker(link, "dead", 2).die(link)
    OfWorker(link, "new", 16).follow()
    assert registered_size(link) == "16"


def test_what_gone_workers_declared_is_forgotten_and_what_is_lost_is_declared_again(link: Link) -> None:
    worker, killed = OfWorker(link, "one", 4), OfWorker(link, "killed", 4)
    link.call("ZREM", KEYS.workers, "killed/0")  # as workers do long after its lease ran out
    worker.follow()
    assert link.call("HKEYS", KEYS.declared) == [b"one"]
    assert link.call("PTTL", KEYS.declared) > 0
    link.call("DEL", KEYS.declared)
    worker.follow()
    assert link.call("HKEYS", KEYS.declared) == [b"one"]
    assert killed.registrar.batch_size_max == 4


def test_worker_whose_declaration_is_gone_is_taken_to_declare_what_is_registered(link: Link) -> None:
    """Until its next heartbeat: a user removed the key."""
    other = OfWorker(link, "other", 4)
    new = OfWorker(link, "new", 64)
    assert registered_size(link) == "4"
    link.call("DEL", KEYS.declared)
    new.follow()
    assert registered_size(link) == "4"
    other.leave()
    new.follow()
    assert registered_size(link) == "64"


def test_a_worker_takes_larger_batches_than_it_declares_only_if_an_operator_says_so(link: Link) -> None:
    worker = OfWorker(link, "worker", 8)
    sizes = []
    for override in ("64", "4", "many"):
        link.call("HSET", KEYS.overrides, "max_batch_size", override)
        worker.follow()
        sizes.append(worker.registrar.batch_size_max)
    assert sizes == [64, 8, 8]


def test_leases_do_not_depend_on_what_redis_refuses_of_declarations(link: Link) -> None:
    worker = OfWorker(link, "worker", 8)
    link.call("DEL", KEYS.declared)
    link.call("SET", KEYS.declared, "of a user")
    assert worker.follow() == ["settings of other workers are not followed, retrying"]
    assert worker.follow() == []
    other = OfWorker(link, "other", 16)
    assert (other.follow(), registered_size(link)) == ([], "16")  # it said so when it registered
    link.call("DEL", KEYS.declared)
    worker.follow()
    assert link.call("HKEYS", KEYS.declared) == [b"worker"]
