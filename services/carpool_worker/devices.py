"""Which device each model process gets."""

from __future__ import annotations

from pathlib import Path
from typing import Literal


def devices(names: str, replicas: int | Literal["auto"]) -> list[str]:
    """The device of each model process, assigned in turn from `names`.

    `names` is a list such as `cpu` or `cuda:0,cuda:1`, or `auto`: every GPU, the CPU if there is none. With
    `replicas` auto there is one process for each device.
    """
    if names == "auto":
        gpus = [path for path in Path("/dev").glob("nvidia*") if path.name[6:].isdigit()]
        available = [f"cuda:{index}" for index in range(len(gpus))] or ["cpu"]
    else:
        available = [name.strip() for name in names.split(",") if name.strip()] or ["cpu"]
    count = len(available) if replicas == "auto" else replicas
    return [available[index % len(available)] for index in range(count)]
