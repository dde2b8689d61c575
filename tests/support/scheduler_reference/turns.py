"""Whether tenants take fair turns, over all lanes."""

from __future__ import annotations

from support.scheduler_reference.drawn import Item
from support.scheduler_reference.expectations import Expectations


class TurnChecks(Expectations):
    """Checks who is served before whom: see `_check_fairness`."""

    def _check_fairness(self, batch: list[Item], lane: str, taken: int) -> None:
        """Whether turns are consistent: no tenant is served before another one that has been served less.

        What each tenant was served is counted by rank, over all lanes, less an unknown start. If the first of
        two is served while the second could be, it is not ahead of it by more than the difference of their
        starts: `leads` has the most by which it was. That of the second, the other way round, is at most the
        negative of it. A tenant that could not be served for a while may have a later start from then on.
        """
        rank = self._rank_of(batch[0])
        waiting = {r.tenant for r in self.waiting if self._rank_of(r) == rank}
        lanes = {r.lane for r in self.waiting if self._rank_of(r) == rank}
        ready = {one for one in lanes if one == lane or self._can_dispatch(one, taken)}
        could_be = {r.tenant for r in self.waiting if self._rank_of(r) == rank and r.lane in ready}
        self.held_off |= {(rank, tenant) for tenant in waiting - could_be}
        self._check_turn(rank, batch[0].tenant, could_be)
        payer, payer_rank, is_chosen = batch[0].tenant, rank, len(lanes) > 1
        for request in batch:
            rank, tenant = self._rank_of(request), request.tenant
            in_lane = {r.tenant for r in self._in_lane(lane) if self._rank_of(r) == rank}
            self._check_turn(rank, tenant, in_lane)
            self.served[rank, tenant] = self.served.get((rank, tenant), 0.0) + self._share(request, tenant)
            if (rank, tenant) in self.held_off:
                self.held_off.remove((rank, tenant))
                self._forget_leads({(rank, tenant)})
            del self.waiting[request]
            self.delayed.discard(request)
            self._forget_leads()
        if is_chosen:  # before other lanes: the tenant pays for the whole batch
            of_others = sum(self._share(r, payer) for r in batch if r.tenant != payer)
            self.served[payer_rank, payer] += of_others

    def _check_turn(self, rank: int, tenant: str, could_be: set[str]) -> None:
        """A tenant is served. These are those that could be."""
        for other in could_be - {tenant}:
            ahead = self.served.get((rank, tenant), 0.0) - self.served.get((rank, other), 0.0)
            lead = self.leads[rank, tenant, other] = max(ahead, self.leads.get((rank, tenant, other), ahead))
            limit = -self.leads.get((rank, other, tenant), -lead)
            assert lead <= limit + 1e-6, f"unfair: {tenant!r} is served before {other!r}"

    def _share(self, request: Item, payer: str) -> float:
        """What a request counts for the turns of the tenant that pays for it."""
        settings = self.scheduler.settings
        size, cost_max = settings.max_batch_size, settings.max_batch_cost or settings.max_batch_size
        cost_min = max(1, cost_max // size) if size > 1 else 1
        return min(max(request.cost, cost_min), cost_max) / settings.tenant_weights.get(payer, 1)
