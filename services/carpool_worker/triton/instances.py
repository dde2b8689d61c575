"""Model processes and their devices, and versions, from a configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from carpool_worker.triton.config import Config

PROCESSES_MAX: Final = 1024
_CPU: Final = "cpu"
_FIRST_GPU: Final = "cuda:0"


def devices_of(
    config: Config, all_devices: Callable[[], Sequence[str]], problems: list[str]
) -> list[str] | None:
    """The device of each model process; None if nothing is said of them. `all_devices`: every GPU of this
    machine, or the CPU."""
    found: list[str] = []
    for index, group in enumerate(config["instance_group"]):
        try:
            found += _devices(group, all_devices)
        except ValueError as error:
            problems.append(f"instance_group {group['name'] or index}: {error}")
    if len(found) > PROCESSES_MAX:
        problems.append(f"instance_group: {len(found)} processes are more than {PROCESSES_MAX}")
        return None
    return found or None


def _devices(group: Mapping[str, Any], all_devices: Callable[[], Sequence[str]]) -> list[str]:
    count, kind, gpus = group["count"] or 1, group["kind"], group["gpus"]
    if not 1 <= count <= PROCESSES_MAX:
        raise ValueError(f"count: {count} must be 1 to {PROCESSES_MAX}")
    if any(gpu < 0 for gpu in gpus):
        raise ValueError(f"gpus: {gpus} must be numbers from 0 on")
    if kind in ("KIND_CPU", "KIND_MODEL"):
        if gpus:
            raise ValueError(f"gpus: {kind} has none; remove them, or write KIND_GPU")
        return [_CPU] * count
    listed, available = [f"cuda:{gpu}" for gpu in gpus], list(all_devices())
    if kind == "KIND_AUTO" and not set(listed) <= set(available):
        return [_CPU] * count
    if kind == "KIND_GPU" and available == [_CPU]:
        available = [_FIRST_GPU]  # that it is missing is told when the model is loaded
    return (listed or available) * count


def chosen_versions(config: Config, versions: Sequence[str], problems: list[str]) -> list[str]:
    """Of these versions, in ascending order, those that the policy makes available."""
    policy = config.get("version_policy", {})
    if "all" in policy:
        return list(versions)
    if "specific" in policy:
        wanted = [str(version) for version in policy["specific"]["versions"]]
        missing = [version for version in wanted if version not in versions]
        if missing or not wanted:
            problems.append(
                f"version_policy.specific: there is no version {', '.join(missing) or 'named'}; there are "
                f"{', '.join(versions) or 'none'}"
            )
        return [version for version in versions if version in wanted]
    newest = policy.get("latest", {}).get("num_versions") or 1
    return list(versions)[-newest:]
