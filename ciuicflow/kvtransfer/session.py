"""What sender and receiver have in common: the greeting, signs of life, and the end of a session.

A session is one connection to one incarnation of the peer; a machine has one after another. Times
are seconds of a monotonic clock. After `Close` nothing the peer says is heard any more, and all
transfers of the session have failed; what still moves their bytes must end before they are freed.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping

from ciuicflow.kvtransfer.actions import Action, Close, Established, SendControl
from ciuicflow.kvtransfer.layout import Geometry, LayerRange
from ciuicflow.kvtransfer.outcomes import FailReason
from ciuicflow.kvtransfer.settings import SessionConfig
from ciuicflow.kvtransfer.ticket import Shard
from ciuicflow.kvtransfer.timers import Timers
from ciuicflow.kvtransfer.wire import Error, Frame, Heartbeat, Hello, Message

COMPLETED = "completed"
"""The outcome of transfers that did not fail."""


def make_hello(
    agent: str,
    incarnation: int,
    geometry: Geometry,
    window_bytes: int,
    settings: Mapping[str, str],
) -> Hello:
    """Return the greeting of an agent."""
    return Hello(
        agent=agent,
        incarnation=incarnation,
        fingerprint=geometry.fingerprint,
        geometry=geometry,
        window_bytes=window_bytes,
        settings=dict(settings),
    )


class Session(ABC):
    """Base of `Sender` and `Receiver`."""

    def __init__(self, hello: Hello, config: SessionConfig) -> None:
        self.hello = hello
        self.peer: Hello | None = None
        """The greeting of the peer that we are connected to."""
        self.outcomes: Counter[tuple[str, str]] = Counter()
        """How many transfers of each tier had each outcome."""
        self._config = config
        self._connected = False
        self._closing = False
        self._heard_s = 0.0
        self._said_s = 0.0
        self._layers: tuple[LayerRange, ...] = ()
        self._timers = Timers()

    @property
    def _open(self) -> bool:
        """Whether messages about transfers can be sent."""
        return self.peer is not None and not self._closing

    # What happens.

    def on_connect(self, now: float) -> list[Action]:
        """A connection is there. ValueError if the last one was not said to be gone."""
        if self._connected:
            raise ValueError("on_connect: the last connection was not said to be gone")
        self._connected = True
        self._closing = False
        self._heard_s = now
        actions: list[Action] = []
        self._say(now, self.hello, actions)
        return actions

    def on_frame(self, now: float, frame: Frame) -> list[Action]:
        """The peer says something; all of it, in the order in which it came."""
        actions: list[Action] = []
        if not self._connected or self._closing:
            return actions
        self._heard_s = now
        if isinstance(frame.message, Error):
            error = frame.message
            detail = f"the peer says: {error.reason}: {error.detail}"
            self._close(now, FailReason.PEER_ERROR, detail, actions)
        elif self.peer is None:
            self._greet(now, frame, actions)
        elif frame.incarnation != self.peer.incarnation:
            detail = f"a message of incarnation {frame.incarnation} after {self.peer.incarnation}"
            self._close(now, FailReason.STALE, detail, actions)
        else:
            self._handle(now, frame.message, actions)
        return actions

    def on_wire_error(self, now: float, detail: str) -> list[Action]:
        """Control bytes could not be decoded."""
        actions: list[Action] = []
        if self._connected and not self._closing:
            self._close(now, FailReason.PROTOCOL, detail, actions)
        return actions

    def heard(self, now: float) -> None:
        """Bytes of a payload are coming in: a sign of life during a long one."""
        self._heard_s = now

    def on_disconnect(self, now: float, detail: str = "connection lost") -> list[Action]:
        """The connection is gone: no message comes or goes on it any more."""
        actions: list[Action] = []
        was_open = self._open
        self._connected = False
        self.peer = None
        if was_open:
            self._fail_all(now, FailReason.PEER_LOST, detail, actions)
        self._gone(now, actions)
        return actions

    def tick(self, now: float) -> list[Action]:
        """Do what is due."""
        actions: list[Action] = []
        while (key := self._timers.pop_due(now)) is not None:
            self._expire(now, key, actions)
        if self._connected and not self._closing:
            if now >= self._heard_s + self._config.dead_after_s:
                detail = f"nothing heard for {now - self._heard_s:.3f} s"
                self._close(now, FailReason.PEER_DEAD, detail, actions)
            elif now >= self._said_s + self._config.heartbeat_s:
                self._say(now, Heartbeat(), actions)
        return actions

    def next_timeout(self, now: float) -> float | None:
        """Return when `tick` is due; None: not before something happens."""
        due_s = self._timers.next()
        if self._connected and not self._closing:
            alive_s = min(
                self._heard_s + self._config.dead_after_s, self._said_s + self._config.heartbeat_s
            )
            due_s = alive_s if due_s is None else min(due_s, alive_s)
        return due_s

    # What a machine adds.

    @abstractmethod
    def _handle(self, now: float, message: Message, actions: list[Action]) -> None:
        """Take in a message of an established session."""

    @abstractmethod
    def _established(self, now: float, actions: list[Action]) -> None:
        """The session may be used."""

    @abstractmethod
    def _expire(self, now: float, key: str, actions: list[Action]) -> None:
        """The timer of a transfer is due."""

    @abstractmethod
    def _fail_all(self, now: float, reason: FailReason, detail: str, actions: list[Action]) -> None:
        """Every transfer of the session has failed; nothing can be said about it."""

    @abstractmethod
    def _gone(self, now: float, actions: list[Action]) -> None:
        """The session is over: free what nothing moves any more."""

    # Parts.

    def _greet(self, now: float, frame: Frame, actions: list[Action]) -> None:
        hello = frame.message
        if not isinstance(hello, Hello) or frame.incarnation != hello.incarnation:
            self._close(now, FailReason.PROTOCOL, "the first message was no greeting", actions)
            return
        refusal = self._refusal(hello)
        if refusal is not None:
            self._close(now, FailReason.REFUSED, refusal, actions)
            return
        self.peer = hello
        self._layers = self.hello.geometry.shared_layers(hello.geometry)
        actions.append(Established(hello))
        self._established(now, actions)

    def _refusal(self, hello: Hello) -> str | None:
        """Say what is wrong with the peer, as seen from here."""
        difference = self.hello.geometry.difference(hello.geometry)
        if difference is not None:
            return f"geometry differs: {difference}"
        if hello.fingerprint != self.hello.fingerprint:
            return "the fingerprint is not that of the geometry: different versions of the agent"
        ours, theirs = self.hello.settings, hello.settings
        for name in sorted(ours | theirs):
            if ours.get(name) != theirs.get(name):
                return (
                    f"setting {name} differs: ours is {ours.get(name)!r}, "
                    f"the peer's is {theirs.get(name)!r}"
                )
        return None

    def _stale(self, ours: Shard, theirs: Shard) -> str | None:
        """Say why a ticket is not for this session, or not for this agent."""
        sides = [(ours, self.hello)]
        if self.peer is not None and not self._closing:
            sides.append((theirs, self.peer))
        for shard, hello in sides:
            if shard.agent != hello.agent:
                return f"the ticket names agent {shard.agent}, this is {hello.agent}"
            geometry = hello.geometry
            held = geometry.dp.rank, geometry.pp.rank, geometry.tp.rank
            if (shard.dp, shard.pp, shard.tp) != held:
                return (
                    f"{shard.agent} holds the shard (dp, pp, tp) = {held}, not that of the ticket"
                )
            if shard.incarnation not in (0, hello.incarnation):
                return f"{shard.agent} was restarted: incarnation {hello.incarnation} now"
        return None

    def _say(self, now: float, message: Message, actions: list[Action]) -> None:
        self._said_s = now
        actions.append(SendControl(Frame(self.hello.incarnation, message)))

    def _close(self, now: float, reason: FailReason, detail: str, actions: list[Action]) -> None:
        """Give up the session."""
        if reason is not FailReason.PEER_ERROR:
            self._say(now, Error(reason, detail[:1024]), actions)
        actions.append(Close(reason, detail))
        self._closing = True
        self._fail_all(now, reason, detail, actions)

    def _break(self, now: float, detail: str, actions: list[Action]) -> None:
        """The peer broke the protocol."""
        self._close(now, FailReason.PROTOCOL, detail, actions)
