"""Fixtures for pytest: `carpool_stack`, a small real stack, and `carpool_client`, a Client of it.

pytest imports this module wherever Carpool is installed, also where no test uses it. So nothing
else is imported before a fixture is used.

Why: docs/decisions/0102.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from carpool import Client
    from carpool_testing.stack import TestStack


@pytest.fixture(scope="session")
def carpool_models() -> Sequence[str]:
    """The models of `carpool_stack`, written as for `carpool up`. Override it in a conftest.py."""
    pytest.fail(
        "carpool_stack needs models: define a fixture carpool_models with scope='session' that returns a "
        "list such as ['app/models.py:Classifier'], written as for `carpool up`",
        pytrace=False,
    )


@pytest.fixture(scope="session")
def carpool_stack(
    carpool_models: Sequence[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TestStack]:
    """A Redis server, a batcher and a worker for each of `carpool_models`, for all tests of a session."""
    from carpool_testing.stack import TestStack  # noqa: PLC0415

    with TestStack(carpool_models, tmp_path_factory.mktemp("carpool")) as stack:
        yield stack


@pytest.fixture
def carpool_client(carpool_stack: TestStack) -> Iterator[Client]:
    """A Client of `carpool_stack`, connected."""
    from carpool import Client  # noqa: PLC0415

    with Client(carpool_stack.url) as client:
        yield client
