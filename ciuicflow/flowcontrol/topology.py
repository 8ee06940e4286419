"""Which endpoints there are, and which lane leads to those that serve a model."""

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from ciuicflow.endpoint import EndpointId
from ciuicflow.flowcontrol.actions import Endpoint
from ciuicflow.flowcontrol.entry import Entry
from ciuicflow.flowcontrol.lanes import Lane
from ciuicflow.flowcontrol.ledger import EndpointLedger
from ciuicflow.flowcontrol.tiers import TierConfig

_MAX_MODELS: Final = 1024  # names remembered; clients choose them where endpoints serve any


class Topology:
    """Keeps a ledger for each endpoint, and a lane for each set of endpoints."""

    def __init__(self) -> None:
        self.ledgers: dict[EndpointId, EndpointLedger] = {}
        """Those of removed endpoints stay, as down, until nothing is in flight there."""
        self._endpoints: tuple[Endpoint, ...] = ()
        self._lanes: dict[frozenset[EndpointId], Lane] = {}
        self._by_model: dict[str | None, Lane] = {}

    def configure(self, tiers: Sequence[TierConfig], opted_in_share: float) -> None:
        """Take over settings; lanes begin anew, without their entries."""
        self._tiers = tiers
        self._opted_in_share = opted_in_share
        self._lanes.clear()
        self._by_model.clear()
        for ledger in self.ledgers.values():
            ledger.set_opted_in_share(opted_in_share)

    @property
    def lanes(self) -> Iterable[Lane]:
        """All lanes."""
        return self._lanes.values()

    def lane(self, model: str | None) -> Lane | None:
        """Return the lane of a model; None if no endpoint serves it."""
        lane = self._by_model.get(model)
        if lane is None:
            key = self._serving(model)
            if not key:
                return None
            lane = self._lanes.get(key)
            if lane is None:
                lane = self._open(key, Lane(model, self._tiers))
            if len(self._by_model) >= _MAX_MODELS:
                self._by_model.clear()
            self._by_model[model] = lane
        return lane

    def by_urgency(self) -> list[Lane]:
        """Return lanes that have work; where they share an endpoint, the most urgent is first."""
        lanes = [lane for lane in self._lanes.values() if lane.waiting]
        if len(lanes) > 1:
            lanes.sort(key=Lane.urgency)
        return lanes

    def update(self, now: float, endpoints: Iterable[Endpoint]) -> list[Entry]:
        """Replace what is known of all endpoints; return entries that no endpoint serves now."""
        self._endpoints = tuple(endpoints)
        for endpoint in self._endpoints:
            ledger = self.ledgers.get(endpoint.id)
            if ledger is None:
                ledger = EndpointLedger(endpoint, self._opted_in_share, now)
                self.ledgers[endpoint.id] = ledger
            ledger.reconfigure(endpoint)
        self._forget_removed()
        return self._remap(now)

    def _open(self, key: frozenset[EndpointId], lane: Lane) -> Lane:
        self._lanes[key] = lane
        lane.ledgers = tuple(self.ledgers[id_] for id_ in sorted(key))
        return lane

    def _serving(self, model: str | None) -> frozenset[EndpointId]:
        """Return who serves a model; who is known to serve it comes before who may."""
        serving = [
            endpoint
            for endpoint in self._endpoints
            if model is None or endpoint.models is None or model in endpoint.models
        ]
        if model is not None:
            known = [endpoint for endpoint in serving if endpoint.models is not None]
            serving = known or serving
        return frozenset(endpoint.id for endpoint in serving)

    def _remap(self, now: float) -> list[Entry]:
        """Give each lane its endpoints anew, and move entries whose lane is another now."""
        lanes, self._lanes = list(self._lanes.values()), {}
        self._by_model.clear()
        for lane in lanes:
            key = self._serving(lane.model)
            if key and key not in self._lanes:
                self._open(key, lane)
        homeless = []
        for lane in lanes:
            for entry in [entry for queue in lane.queues for entry in queue.entries()]:
                target = self.lane(entry.model)
                if target is lane:
                    continue
                lane.remove(entry)
                if target is None:
                    homeless.append(entry)
                else:
                    target.push(now, entry)
        return homeless

    def _forget_removed(self) -> None:
        current = {endpoint.id for endpoint in self._endpoints}
        for id_, ledger in list(self.ledgers.items()):
            if id_ not in current:
                ledger.reconfigure(msgspec.structs.replace(ledger.endpoint, up=False))
                if not ledger.requests and not ledger.bypass_requests:
                    del self.ledgers[id_]
