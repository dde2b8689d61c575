"""Folders of models for nodes, and nodes as processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from support.command import Done, carpool
from support.stack import Service, Stack
from support.waiting import EVENTUALLY_S, wait_until

# It answers with its version and the body. Parameters make it wait while it loads, or fail.
_ECHO: Final = """
import time
from pathlib import Path


class Echo:
    max_batch_size = 64

    def load(self, device: str, *, reason: str = "", gate: str = "", label: str = "") -> None:
        while gate and not Path(gate).exists():
            time.sleep(0.01)
        if reason:
            raise RuntimeError(reason)
        self.label = label

    def predict(self, batch: list[str]) -> list[str]:
        time.sleep(0.002)
        return [f"VERSION{self.label}:{body}" for body in batch]
"""


def make_repository(folder: Path, *, entries: tuple[str, ...] = ("echo",), versions: int = 3) -> Path:
    """A folder of such models, with versions from 1 on."""
    for entry in entries:
        for version in range(1, versions + 1):
            path = folder / entry / str(version)
            path.mkdir(parents=True)
            (path / "model.py").write_text(_ECHO.replace("VERSION", str(version)))
    return folder


def start_node(stack: Stack, repository: Path, room: int, *flags: str) -> Service:
    """A node, once it has reported."""
    node = stack.worker("--repository", str(repository), "--room", str(room), *flags, ready=False)
    name = node.wait_for("node started")["node"]
    wait_until(
        lambda: any(one["name"] == name for one in nodes(stack)["nodes"]), description="the node reports"
    )
    return node


def nodes(stack: Stack) -> Any:
    """What `carpool nodes --json` prints."""
    return json.loads(carpool(stack.url, "nodes", "--json", check=True).stdout)


def serving(stack: Stack, model: str = "echo") -> dict[str, int]:
    """How many processes serve each version of a model."""
    found: dict[str, int] = {}
    for node in nodes(stack)["nodes"]:
        for seat in node["seats"]:
            if seat["model"] == model and seat["state"] == "SERVING":
                found[seat["version"]] = found.get(seat["version"], 0) + 1
    return found


def wait_for_serving(
    stack: Stack, expected: dict[str, int], model: str = "echo", timeout_s: float = EVENTUALLY_S
) -> None:
    """Wait until exactly so many processes serve each version."""
    wait_until(
        lambda: serving(stack, model) == expected,
        description=f"{expected} processes serve {model}",
        timeout_s=timeout_s,
    )


def load(stack: Stack, model: str, *flags: str, check: bool = True) -> Done:
    """`carpool load`."""
    return carpool(stack.url, "load", model, *flags, check=check)


def unload(stack: Stack, model: str, *flags: str) -> Done:
    """`carpool unload`."""
    return carpool(stack.url, "unload", model, *flags, check=True)


def worker_processes(node: Service) -> list[int]:
    """The worker processes of a node."""
    return [pid for pid in node.children() if Path(f"/proc/{pid}").exists()]
