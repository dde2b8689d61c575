"""The faults: what is inflicted, how long recovery may take, and whether the promise covers it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from redis import Redis

from support.chaos.producers import ProducerProcess
from support.chaos.run import KEYS, LEASE_S, MODEL, Run
from support.stack import frozen
from support.waiting import wait_until

BATCHER_S: Final = 3.0
# A batch whose process died is executed one request at a time, to find the one that is the cause.
PROCESS_S: Final = 0.5 + 32 * 0.02
WORKER_S: Final = LEASE_S + 1
CONNECTION_S: Final = 15.0
FLOOD_SPEED: Final = 10
FLOOD_ENTRIES: Final = 3000


class Fault(NamedTuple):
    """`inflict` inflicts it once and sees to what it broke. `bound_s`: how long recovery may take; None: that
    says nothing here. `is_covered`: whether Carpool promises that no accepted request is lost."""

    inflict: Callable[[Run], None]
    bound_s: float | None
    is_covered: bool = True
    always_on_disk: bool = False


def kill_batcher(run: Run) -> None:
    victim = run.active_batcher()
    victim.kill()
    run.recovers()
    run.replace(victim)


def freeze_batcher(run: Run) -> None:
    """Until another has taken over, and has answered requests."""
    with frozen(run.active_batcher()):
        run.recovers()
        run.wait_for_load()


def kill_both_batchers(run: Run) -> None:
    for victim in list(run.batchers):
        victim.kill()
    for victim in list(run.batchers):
        run.replace(victim)
    run.recovers()


def kill_worker(run: Run) -> None:
    victim = run.any_worker()
    victim.kill()
    run.settles()
    run.replace(victim)


def freeze_worker(run: Run) -> None:
    """Past its lease, with a batch that another worker then takes over."""
    with frozen(run.any_worker()):
        run.settles()


def terminate_worker(run: Run) -> None:
    victim = run.any_worker()
    victim.terminate(30)
    run.settles()
    run.replace(victim)


def kill_model_process(run: Run) -> None:
    (process,) = run.any_worker().children()
    os.kill(process, signal.SIGKILL)
    run.settles()


def freeze_model_process(run: Run) -> None:
    """It is replaced after `max_execution_ms`."""
    run.stack.redis.hset(KEYS.config, "max_execution_ms", 1000)
    run.stack.redis.xadd(KEYS.settled, {"config": "max_execution_ms", "size": 0})
    wait_until(lambda: run.stack.events("settings changed"), description="the setting is in force")
    run.wait_for_load()
    (process,) = run.any_worker().children()
    os.kill(process, signal.SIGSTOP)
    run.settles()


def kill_producer(run: Run) -> None:
    victim = run.random.choice(run.producers)
    victim.kill()
    victim.start()
    victim.wait_for_more(5)


def flood(run: Run) -> None:
    """A producer at ten times the pace, until the queue is full."""
    run.stack.redis.hset(KEYS.config, "max_queue_size", 2000)
    run.stack.redis.xadd(KEYS.settled, {"config": "max_queue_size", "size": 0})
    flooding = ProducerProcess(run.stack.url, MODEL, "flood", run.home, FLOOD_SPEED)
    run.producers.append(flooding)
    flooding.wait_for_more(FLOOD_ENTRIES)
    flooding.kill()


def restart_redis(run: Run) -> None:
    """SIGKILL, and a start from its append-only file."""
    os.kill(run.stack.server.pid, signal.SIGKILL)
    run.stack.server.restart()
    run.recovers()


def freeze_redis(seconds: float) -> Callable[[Run], None]:
    def inflict(run: Run) -> None:
        os.kill(run.stack.server.pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(run.stack.server.pid, signal.SIGCONT)
        run.recovers()

    return inflict


def kill_connections(run: Run) -> None:
    run.stack.redis.client_kill_filter(_type="normal", skipme=True)
    run.recovers()


def flush_scripts(run: Run) -> None:
    run.stack.redis.script_flush()
    run.recovers()


def fill_memory(run: Run) -> None:
    """Redis refuses what needs memory for a while. What is accepted is finished all the same."""
    redis = run.stack.redis
    redis.config_set("maxmemory", max(1, redis.info("memory")["used_memory"] - 1))
    wait_until(lambda: redis.xlen(KEYS.requests) == 0, description="what was accepted is dispatched")
    redis.config_set("maxmemory", 0)
    run.recovers()


def revoke_permissions(run: Run) -> None:
    """The user of all services and producers may do nothing for a second."""
    run.stack.redis.execute_command("ACL", "SETUSER", "chaos", "on", "nopass", "~*", "&*", "+@all")
    url = run.stack.url.replace("redis://", "redis://chaos:x@")
    with_permissions: Any = Redis.from_url(url, protocol=2)
    with_permissions.execute_command("ACL", "SETUSER", "default", "-@all")
    time.sleep(1.0)
    with_permissions.execute_command("ACL", "SETUSER", "default", "+@all")
    with_permissions.close()
    run.recovers()


def anything(run: Run) -> None:
    """One of the others that leave Redis's data alone, at random."""
    run.random.choice(_MIXED)(run)


_MIXED: Final = (
    kill_batcher, freeze_batcher, kill_worker, freeze_worker, kill_model_process, kill_producer,
    kill_connections, flush_scripts, fill_memory,
)  # fmt: skip

FAULTS: Final[dict[str, Fault]] = {
    "the active batcher is killed": Fault(kill_batcher, BATCHER_S),
    "both batchers are killed, and started": Fault(kill_both_batchers, BATCHER_S),
    "the active batcher stands still past its lease": Fault(freeze_batcher, BATCHER_S),
    "a worker is killed": Fault(kill_worker, WORKER_S),
    "a worker stands still past its lease": Fault(freeze_worker, WORKER_S),
    "a worker is terminated": Fault(terminate_worker, WORKER_S),
    "a model process is killed": Fault(kill_model_process, PROCESS_S),
    "a model process stands still (max_execution_ms 1000)": Fault(freeze_model_process, 1 + PROCESS_S),
    "a producer is killed, and sends again": Fault(kill_producer, None),
    "a producer at ten times the pace": Fault(flood, None),
    "Redis is killed, appendfsync always": Fault(restart_redis, CONNECTION_S, always_on_disk=True),
    "Redis is killed, appendfsync everysec": Fault(restart_redis, CONNECTION_S, is_covered=False),
    "Redis stands still for 5 s": Fault(freeze_redis(5.0), CONNECTION_S),
    "Redis stands still for 30 s": Fault(freeze_redis(30.0), CONNECTION_S),
    "all connections are closed": Fault(kill_connections, BATCHER_S),
    "SCRIPT FLUSH": Fault(flush_scripts, BATCHER_S),
    "the memory of Redis is full": Fault(fill_memory, BATCHER_S),
    "permissions are revoked for a second": Fault(revoke_permissions, BATCHER_S),
    "any of these, at random": Fault(anything, CONNECTION_S),
}
