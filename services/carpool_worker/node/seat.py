"""The process of a seat: a worker that serves one version of an entry, and tells its node so.

A node starts it as `python -m carpool_worker.node.seat PID DESCRIPTOR`, a socket: it reads an order there.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from carpool.lifecycle import die_with_parent, keep_freed_memory
from carpool.settings import WorkerSettings
from carpool_worker.devices import devices
from carpool_worker.node.seat_process import DRAINED, REASON_CHARS_MAX, SERVES, UNDRAINED, Order
from carpool_worker.repository.repository import Repository
from carpool_worker.served_model import ServedModel
from carpool_worker.serving import serve


def main(argv: Sequence[str]) -> int:
    """Serve until SIGTERM, then drain. `argv`: the node's PID, and the descriptor of the
    socket to it."""
    parent, descriptor = map(int, argv)
    die_with_parent(parent)
    keep_freed_memory()
    node = socket.socket(fileno=descriptor)
    with node.makefile("rb") as orders:
        order = Order.decode(orders.readline())

    def tell(text: str) -> None:
        node.sendall(f"{text}\n".encode())

    def fail(reason: str) -> None:
        tell(reason[:REASON_CHARS_MAX])

    try:
        model = _served_model(order)
    except (ValueError, OSError) as error:
        fail(str(error))
        return 1
    settings = WorkerSettings.model_construct(**order.settings)

    def follow(is_drained: bool) -> None:
        tell(DRAINED if is_drained else UNDRAINED)

    return serve(settings, model, on_serving=lambda: tell(SERVES), on_failure=fail, on_drain=follow)


def _served_model(order: Order) -> ServedModel:
    """Raises ValueError."""
    repository = Repository(Path(order.repository))
    served = repository.served_model(order.entry, order.version, order.parameters, as_name=order.model)
    declared = repository.declared(order.entry, order.version).device
    own = devices(declared, "auto") if declared else [order.device]
    configuration = replace(
        served.configuration,
        settings={**served.configuration.settings, **order.model_settings},
        settings_from={**served.configuration.settings_from, **dict.fromkeys(order.model_settings, "load")},
    )
    return replace(served, devices=[own[order.turn % len(own)]], configuration=configuration)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
