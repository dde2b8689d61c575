"""Producers of whose latest requests nearly none were executed: `validate` refused them, they could not be
decoded, or the model raised on them.

Such requests take hardly any time. If batches were expected to take as long as if all of their requests were
executed, a flood of them would make others wait, and be refused early, for time that is not used. A request
of such a producer is doubtful: it is dispatched in its turn, and no time is planned for it. Once some of what
a producer sends was executed, time is planned for it again.

`learned.executed_share` is for what cannot be told by producer: requests that fail now and then, and many
producers that each send few.

Why: docs/decisions/0077.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from carpool.messages.requests import Producer, Run
from carpool.messages.settled import ExecutedOf
from carpool.producer_ratios import ProducerRatios

UNEXECUTED_RATIO_MIN: Final = 0.9  # of a producer's requests in its latest batches: these were not executed


class DoubtfulProducers:
    """How many of each producer's latest requests were not executed, as a ratio; of all others none."""

    def __init__(self) -> None:
        self._ratios = ProducerRatios()

    def __len__(self) -> int:
        """Of how many producers something is remembered."""
        return len(self._ratios)

    def is_doubtful(self, producer: Producer) -> bool:
        """Whether what it sends now is not expected to be executed."""
        return self._ratios.of(producer) >= UNEXECUTED_RATIO_MIN

    def remembered(self, runs: Iterable[Run]) -> Sequence[Producer]:
        """The producers of these runs of whom something is remembered. O(1) if that is so of none at all."""
        if not self._ratios:
            return ()
        return list({run.producer for run in runs} & self._ratios.remembered())

    def observe(self, remembered: Iterable[Producer], of_producers: Iterable[ExecutedOf]) -> None:
        """A batch was executed that had requests of these `remembered` producers; `of_producers` has those of
        whom not all were executed."""
        unexecuted: Mapping[Producer, float] = {
            of_one.producer: 1 - of_one.executed / max(1, of_one.requests) for of_one in of_producers
        }
        for producer in unexecuted.keys() | set(remembered):
            self._ratios.observe(producer, unexecuted.get(producer, 0.0))


def executable_size(runs: Iterable[Run]) -> int:
    """The number of requests that the model is expected to execute in a batch of these runs."""
    return sum([len(run.correlation_ids) for run in runs if not run.is_doubtful])
