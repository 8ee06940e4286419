"""The endpoints in use: their ledger entries, their pools, and how a reload changes the set."""

import ssl
from collections.abc import Iterator

from ciuicflow.config import Config, Upstream
from ciuicflow.endpoint import EndpointId, EndpointState
from ciuicflow.engines.table import ADAPTERS
from ciuicflow.flowcontrol.actions import Endpoint as FlowEndpoint
from ciuicflow.gateway.deadlines import Deadlines
from ciuicflow.gateway.headers import RequestHead, upstream_head
from ciuicflow.gateway.inbox import Inbox
from ciuicflow.gateway.pool import Pool


class Endpoint:
    """One upstream: its settings, its ledger entry and its connections."""

    def __init__(
        self, upstream: Upstream, config: Config, deadlines: Deadlines, inbox: Inbox
    ) -> None:
        self.upstream = upstream
        self.address = upstream.address
        tls = upstream.tls_context()
        self.tls: ssl.SSLContext | bool = tls or True  # as aiohttp wants it
        self.state = EndpointState(EndpointId(upstream.id))
        self.pool = Pool(self.address, tls, config, deadlines, inbox)
        self.adopt(upstream)

    def adopt(self, upstream: Upstream) -> None:
        """Take over reloaded settings that need no new connections."""
        self.upstream = upstream
        if upstream.models is not None:
            self.state.models = frozenset(upstream.models)
        self._own_host = upstream.own_host
        self._prefix = self.address.prefix.encode()
        self._authority = self.address.authority.encode()

        self.priority_order = (
            ADAPTERS[upstream.engine].priority_order if upstream.send_priority else None
        )

    def request_head(
        self, head: RequestHead, lines: bytes | None = None, *, chunked: bool = True
    ) -> bytes:
        """Build the head that this upstream gets.

        `lines` are field lines instead of the head's own; not `chunked`: they hold a length.
        """
        own_host = self._own_host or not head.has_host
        host = self._authority if own_host else None
        return upstream_head(head, self._prefix, host, lines, chunked=chunked)

    def for_flow(self, *, up: bool) -> FlowEndpoint:
        """Return what flow control must know of it now."""
        return FlowEndpoint(
            id=self.state.id,
            models=self.state.models,
            up=up,
            max_requests=self.upstream.max_requests,
            max_tokens=self.upstream.max_tokens,
        )


class EndpointTable:
    """All endpoints by id, in the order of the configuration."""

    def __init__(self, config: Config, deadlines: Deadlines, inbox: Inbox) -> None:
        self._deadlines = deadlines
        self._inbox = inbox
        self._by_id: dict[EndpointId, Endpoint] = {}
        self.states: tuple[EndpointState, ...] = ()
        self.sole: Endpoint | None = None  # where there is just one
        self.adopt(self.prepare(config), config)

    def __getitem__(self, endpoint_id: EndpointId) -> Endpoint:
        """Return the endpoint with this id."""
        return self._by_id[endpoint_id]

    def __iter__(self) -> Iterator[Endpoint]:
        """Go through the endpoints."""
        return iter(self._by_id.values())

    def __len__(self) -> int:
        """Count them."""
        return len(self._by_id)

    @property
    def models_known(self) -> bool:
        """Whether it can matter which model a request names."""
        return any(state.models is not None for state in self.states)

    def prepare(self, config: Config) -> dict[EndpointId, Endpoint]:
        """Return the endpoints of a configuration, those that stay among them.

        Changes nothing in use. Raises StartError.
        """
        fresh: dict[EndpointId, Endpoint] = {}
        for upstream in config.upstreams:
            known = self._by_id.get(EndpointId(upstream.id))
            if known is not None and _same_connections(known.upstream, upstream):
                fresh[known.state.id] = known
            else:
                fresh[EndpointId(upstream.id)] = Endpoint(
                    upstream, config, self._deadlines, self._inbox
                )
        return fresh

    def adopt(self, fresh: dict[EndpointId, Endpoint], config: Config) -> None:
        """Use these endpoints from now on; running exchanges of retired ones end normally."""
        for upstream in config.upstreams:
            endpoint = fresh[EndpointId(upstream.id)]
            endpoint.adopt(upstream)
            endpoint.pool.configure(config)
        kept = set(map(id, fresh.values()))
        for endpoint in self._by_id.values():
            if id(endpoint) not in kept:
                endpoint.pool.close()
        self._by_id = fresh
        self.states = tuple(endpoint.state for endpoint in fresh.values())
        self.sole = next(iter(fresh.values())) if len(fresh) == 1 else None

    def for_flow(self) -> list[FlowEndpoint]:
        """Return what flow control must know of the endpoints now.

        One that is down counts as up where no other could serve its models: a wrong verdict never
        refuses what could have been served, here as without flow control.
        """
        return [endpoint.for_flow(up=self._usable(endpoint.state)) for endpoint in self]

    def _usable(self, state: EndpointState) -> bool:
        return state.up or not any(
            other.up
            and (
                state.models is None
                or other.models is None
                or not other.models.isdisjoint(state.models)
            )
            for other in self.states
        )

    def close(self) -> None:
        """Close all idle connections."""
        for endpoint in self:
            endpoint.pool.close()


def _same_connections(old: Upstream, new: Upstream) -> bool:
    """Whether connections and ledger of the one can serve the other."""
    return (old.url, old.ca_file, old.verify, old.models is None) == (
        new.url,
        new.ca_file,
        new.verify,
        new.models is None,
    )
