"""What a service and its client must know. It is passed through the environment of their processes."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import Final, Self

_VARIABLE: Final = "CARPOOL_BENCH_SETUP"
HOST: Final = "127.0.0.1"


@dataclass(frozen=True)
class Setup:
    """How a system is set up for one workload."""

    model: str  # a name in `models.MODELS`
    batch_size: int  # the largest batch
    wait_ms: float  # how long a batch that is not full waits, for systems that have such a setting
    redis_url: str
    port: int  # free, for systems that listen on one
    client: str = ""  # which client to use, for systems that have several
    uvloop: bool = False  # the producer's event loop
    tools: str = ""  # a directory with programs that the client uses

    @classmethod
    def from_environment(cls) -> Self:
        """The setup of this process."""
        return cls(**json.loads(os.environ[_VARIABLE]))

    def environment(self) -> dict[str, str]:
        """The variable that carries it."""
        return {_VARIABLE: json.dumps(asdict(self))}

    @property
    def http_url(self) -> str:
        return f"http://{HOST}:{self.port}"
