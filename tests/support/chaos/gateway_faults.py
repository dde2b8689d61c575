"""The faults of gateways: what is inflicted, how long recovery may take, and whether each request that has an
Idempotency-Key is executed once."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, NamedTuple

from support.chaos.faults import MIXED, network
from support.chaos.gateway_run import GatewayRun
from support.chaos.servers import ServersOf, alone, beside_a_network
from support.proxy import Direction

ELSEWHERE_S: Final = 2.0  # at another gateway: a batch or two, and a client's pauses
HERE_S: Final = 15.0  # at the same one: it connects again
OUTAGE_S: Final = 5.0


class GatewayFault(NamedTuple):
    """`inflict` inflicts it once and sees to what it broke. `bound_s`: how long recovery may take.
    `executes_once`: whether a request that has an Idempotency-Key is executed once; workers are left alone.
    `resends`: clients use a proxy that sends requests again. `has_readers`: streams are read meanwhile.
    `times`: how often it is inflicted in a run."""

    inflict: Callable[[GatewayRun], None]
    bound_s: float
    executes_once: bool = True
    resends: bool = False
    has_readers: bool = False
    servers: ServersOf = alone
    times: int = 3


def kill_gateway(run: GatewayRun) -> None:
    victim = run.any_gateway()
    run.recovers_elsewhere(victim, lambda: run.kill(victim))
    run.restart(victim)


def terminate_gateway(run: GatewayRun) -> None:
    victim = run.any_gateway()
    at = run.gateways.index(victim)
    assert run.terminate(victim) == 0
    run.restart(victim)
    run.recovers_here(run.gateways[at])


def freeze_gateway(run: GatewayRun) -> None:
    victim = run.any_gateway()
    try:
        run.recovers_elsewhere(victim, victim.freeze)
        time.sleep(OUTAGE_S)
    finally:
        victim.thaw()


def cut_off(run: GatewayRun) -> None:
    """Connections to Redis stay open, and carry nothing."""
    with network(run).hold(*Direction):
        time.sleep(OUTAGE_S)
    run.recovers_here(run.gateways[0])


def cut_replies(run: GatewayRun) -> None:
    network(run).cut()
    run.recovers_here(run.gateways[0])


def anything(run: GatewayRun) -> None:
    """One of these that leave the network alone, or of the other faults that do, at random."""
    run.random.choice((kill_gateway, freeze_gateway, terminate_gateway, *MIXED))(run)


GATEWAY_FAULTS: Final[dict[str, GatewayFault]] = {
    "a gateway is killed": GatewayFault(kill_gateway, ELSEWHERE_S),
    "a gateway is terminated": GatewayFault(terminate_gateway, HERE_S),
    "a gateway stands still for 5 s": GatewayFault(freeze_gateway, ELSEWHERE_S),
    "a gateway is cut off from Redis for 5 s": GatewayFault(cut_off, HERE_S, servers=beside_a_network),
    "replies of Redis to a gateway are cut in the middle": GatewayFault(
        cut_replies, HERE_S, servers=beside_a_network
    ),
    "a gateway is killed, behind a proxy that sends requests again": GatewayFault(
        kill_gateway, ELSEWHERE_S, resends=True
    ),
    "any of these of gateways, and of those above that leave the network alone, at random": GatewayFault(
        anything, HERE_S, executes_once=False, has_readers=True, times=12
    ),
}
