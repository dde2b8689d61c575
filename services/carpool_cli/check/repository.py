"""`carpool check --repository DIR`: all that is wrong with the models of a folder.

What the files say is read first. Each version that may be served is then loaded, in a model process of its
own as a worker starts it, so that no model sees the modules of another one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from carpool.shown import complain
from carpool_cli.screen import Screen, count
from carpool_worker.process_handle import ModelLoadError, ProcessHandle
from carpool_worker.repository.repository import Repository
from carpool_worker.served_model import ServedModel

_NOT_CONNECTED: Final = "redis://127.0.0.1:6379/0"  # a model that calls others connects with its first call


def check_repository(screen: Screen, folder: Path, device: str | None) -> int:
    """Print a sentence for each problem. Returns 1 if there are any. Raises ValueError for no repository."""
    os.environ.setdefault("CARPOOL_MODEL_REDIS_URL", _NOT_CONNECTED)
    repository = Repository(folder)
    problems = repository.problems()
    names, found = sorted({*repository.names(), *problems}), 0
    for name in names:
        sentences = problems.get(name) or [*_loading_problems(screen, repository, name, device)]
        found += len(sentences)
        for sentence in sentences:
            screen.print(f"{name}: {sentence}")
    if not names:
        screen.print(
            f"{folder} has no models: each is a folder, with a folder for each version, such as echo/1"
        )
        return 1
    screen.print(f"{count(len(names), 'model', 'models')}, {count(found, 'problem', 'problems')}")
    return 1 if found else 0


def _loading_problems(screen: Screen, repository: Repository, name: str, device: str | None) -> Iterator[str]:
    """Load all versions, and tell of those that cannot be."""
    for version in repository.versions(name):
        served = repository.served_model(name, version, {})
        on = device or served.devices[0]
        try:
            _load(served, on)
        except ModelLoadError as error:
            if error.trace:  # raised by the user's own code
                complain(error.trace.rstrip())
            yield f"version {version} cannot be loaded: {error}"
        else:
            screen.print(f"{name}: version {version} loaded on {on}")


def _load(served: ServedModel, device: str) -> None:
    os.environ["CARPOOL_SERVED_MODEL"] = served.name
    process = ProcessHandle(served.location, device, configuration=served.configuration)
    try:
        process.start()
    finally:
        process.close()
