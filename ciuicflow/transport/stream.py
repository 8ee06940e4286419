"""Messages over a non-blocking stream socket: the way of every byte of tcp, and of ucx's control.

Own readiness callbacks, because asyncio's transports join what `writelines` gets (Python 3.11) and
have no scatter read: here `sendmsg` gathers from, and `recvmsg_into` scatters to, the callers' own
memory. The same code serves asyncio and uvloop.
"""

import socket
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Final

from ciuicflow.transport.base import (
    ConnectionEnded,
    Limits,
    LocallyClosed,
    Message,
    PathStatistics,
    PeerClosed,
    PeerReset,
    PeerTimeout,
    PeerViolation,
    Transfer,
    Truncated,
)
from ciuicflow.transport.buffers import advance, size_of
from ciuicflow.transport.connection import MessageConnection
from ciuicflow.transport.tcp_info import TcpInfo, read_tcp_info
from ciuicflow.transport.wire import Decoder, Frame, Kind, head

_IOV: Final = 64
# One goes into a socket's buffer at most, and other connections get their turn in between.
_FLUSH_BYTES: Final = 4 * 1024 * 1024
_DRAIN_BYTES: Final = 64 * 1024
_RESET_ON_CLOSE: Final = b"\1\0\0\0\0\0\0\0"  # struct linger {on, 0 s}: close sends RST


class StreamConnection(MessageConnection):
    """A connection whose payload travels inline in the stream."""

    def __init__(
        self, sock: socket.socket, limits: Limits, *, local: str, peer: str, scheme: str = "tcp"
    ) -> None:
        super().__init__(limits)
        self._sock = sock
        self._scheme, self._local, self._peer = scheme, local, peer
        self._decoder = Decoder()
        self._taking: tuple[Transfer, int] | None = None
        self._out: deque[memoryview] = deque()
        self._marks: deque[tuple[int, Transfer | None, int]] = deque()
        """Where in the stream which message ends: position, its transfer, its size."""
        self._queued_bytes = 0
        self._written_bytes = 0
        self._reading = self._writing = False
        self._said_goodbye = self._parted = False
        now = self._loop.time()
        self._heard_s = self._moved_s = self._wrote_s = now
        self._resume()
        self._timer = self._loop.call_later(limits.heartbeat_s, self._tick)

    # Sending: `_out` has the bytes in order, `_marks` says whose they are.

    def _start_send(self, control: bytes, views: list[memoryview], transfer: Transfer) -> None:
        start = head(Kind.MESSAGE, len(control), size_of(views)) + control
        self._queue((memoryview(start), *views), transfer, len(control) + size_of(views))

    def _queue(
        self, views: tuple[memoryview, ...], transfer: Transfer | None = None, size_bytes: int = 0
    ) -> None:
        if not self._out:
            self._moved_s = self._loop.time()
        self._out.extend(views)
        self._queued_bytes += size_of(views)
        self._marks.append((self._queued_bytes, transfer, size_bytes))
        if not self._writing:
            self._flush()

    def _flush(self) -> None:
        """Write until the socket is full; what is done then belongs to its owner again."""
        budget_bytes = _FLUSH_BYTES
        while self._out and budget_bytes > 0 and self._reason is None:
            try:
                size_bytes = self._sock.sendmsg(islice(self._out, _IOV))
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                self._broken(error)
                return
            advance(self._out, size_bytes)
            self._written_bytes += size_bytes
            budget_bytes -= size_bytes
            self._moved_s = self._wrote_s = self._loop.time()
            self._settle()
        self._watch_writable(bool(self._out))
        if self._said_goodbye and not self._out and self._reason is None:
            self._shut_down_writing()

    def _settle(self) -> None:
        while self._marks and self._marks[0][0] <= self._written_bytes:
            _, transfer, size_bytes = self._marks.popleft()
            if transfer is not None:
                self._sent(transfer, size_bytes)

    def _watch_writable(self, on: bool) -> None:
        if on == self._writing or self._reason is not None:
            return
        self._writing = on
        if on:
            self._loop.add_writer(self._sock, self._flush)
        else:
            self._loop.remove_writer(self._sock)

    # Receiving: the decoder says where the next bytes go.

    def _on_readable(self) -> None:
        if self._closing:
            self._drain()
            return
        views = self._decoder.wanted()
        if not views or len(self._inbox) >= self._limits.outstanding:
            self._pause()  # back-pressure: the kernel's buffers fill, then the sender waits
            return
        try:
            if len(views) == 1:
                size_bytes = self._sock.recv_into(views[0])
            else:
                size_bytes = self._sock.recvmsg_into(views)[0]
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._broken(error)
            return
        if not size_bytes:
            self._end(_end_of_stream(cut=not self._decoder.between_frames))
            return
        self._heard_s = self._loop.time()
        self._decode(lambda: self._decoder.received(size_bytes))

    def _decode(self, step: Callable[[], list[Frame]]) -> None:
        try:
            frames = step()
            if self._taking is not None and not self._decoder.claimed:
                (transfer, size_bytes), self._taking = self._taking, None
                self._got(transfer, size_bytes)
            for frame in frames:
                self._on_frame(frame)
        except PeerViolation as violation:
            self._end(violation)

    def _on_frame(self, frame: Frame) -> None:
        if frame.kind is Kind.MESSAGE:
            self._put(Message(frame.control, frame.payload_bytes))
        elif frame.kind is Kind.CLOSE:
            self._parted = True
            self._end(PeerClosed("the peer closed the connection"))
        elif frame.kind is Kind.ASIDE:
            raise PeerViolation("a payload outside the stream; this transport has no other way")

    def _taken(self, message: Message) -> None:
        if not message.payload_bytes:
            self._resume()

    def _start_claim(
        self, views: list[memoryview] | None, size_bytes: int, transfer: Transfer
    ) -> None:
        self._taking = transfer, size_bytes
        self._decode(lambda: self._decoder.skip() if views is None else self._decoder.claim(views))
        self._resume()

    def _pause(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._sock)

    def _resume(self) -> None:
        if not self._reading and self._reason is None:
            self._reading = True
            self._heard_s = self._loop.time()
            self._loop.add_reader(self._sock, self._on_readable)

    # Deadlines.

    def _tick(self) -> None:
        """Notice a dead or hung peer, and let the peer notice that this side lives."""
        limits, now = self._limits, self._loop.time()
        self._timer = self._loop.call_later(limits.heartbeat_s, self._tick)
        if self._reading and now - self._heard_s > limits.silence_s:
            self._on_readable()  # this loop may have been held up, with bytes waiting
            if self._reading and now - self._heard_s > limits.silence_s:
                self._end(PeerTimeout(f"the peer was silent for {limits.silence_s:g} s"))
        elif self._out and now - self._moved_s > limits.stall_s:
            self._end(PeerTimeout(f"the peer took nothing for {limits.stall_s:g} s"))
        elif (
            not self._out
            and not self._said_goodbye
            and now - self._wrote_s > limits.heartbeat_s / 2
        ):
            self._queue((memoryview(head(Kind.HEARTBEAT)),))

    # The end.

    def _say_goodbye(self) -> None:
        """Send CLOSE and the end of the stream; the peer answers with its own end."""
        self._said_goodbye = True
        self._queue((memoryview(head(Kind.CLOSE)),))
        self._resume()

    def _shut_down_writing(self) -> None:
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError as error:
            self._broken(error)

    def _drain(self) -> None:
        """Drop what the peer still sends, so that our last bytes are not lost to a reset."""
        try:
            if self._sock.recv(_DRAIN_BYTES):
                self._heard_s = self._loop.time()
            elif self._said_goodbye and not self._out:
                self._parted = True
                self._end(LocallyClosed("closed"))
            else:
                self._end(PeerReset("the peer ended before it had taken everything"))
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self._broken(error)

    def _broken(self, error: OSError) -> None:
        self._end(PeerReset(f"the peer is gone: {error.strerror or error}"))

    def _tear_down(self, reason: ConnectionEnded) -> None:
        self._timer.cancel()
        self._pause()
        if self._writing:
            self._loop.remove_writer(self._sock)
        if not self._parted:
            self._reset_on_close()
        self._sock.close()
        self._out.clear()
        marks, self._marks = self._marks, deque()
        for _, transfer, _ in marks:
            if transfer is not None:
                self._unsent(transfer)
        if self._taking is not None:
            (transfer, _), self._taking = self._taking, None
            self._not_got(transfer)
        self._release()

    def _reset_on_close(self) -> None:
        try:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        except OSError:
            pass  # reset already

    def statistics(self) -> PathStatistics:
        """Return counts and the kernel's view of the socket."""
        info = self._path_info()
        return PathStatistics(
            scheme=self._scheme,
            local=self._local,
            peer=self._peer,
            lanes=self._lanes(),
            messages_sent=self._messages_sent,
            messages_received=self._messages_received,
            bytes_sent=self._bytes_sent,
            bytes_received=self._bytes_received,
            outstanding=self._outstanding,
            smoothed_rtt_s=info.rtt_s,
            min_rtt_s=info.min_rtt_s,
            delivered_segments=info.delivered_segments,
            delivered_ce_segments=info.delivered_ce_segments,
        )

    def _lanes(self) -> tuple[str, ...]:
        return (f"tcp/{self._local}",)

    def _path_info(self) -> TcpInfo:
        return read_tcp_info(self._sock)


def _end_of_stream(*, cut: bool) -> ConnectionEnded:
    if cut:
        return Truncated("the peer's bytes ended within a message")
    return PeerReset("the peer ended without closing")
