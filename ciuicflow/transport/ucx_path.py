"""A UCX endpoint to one peer: who both sides are, tags, and the ownership of buffers.

The endpoint is made from the peer's worker address, which needs no rdma_cm, with error handling on:
without it UCX may use shared memory, but a send to a dead peer then never ends (measured), and its
buffers could never be given back.
"""

import asyncio
import itertools
import logging
from collections.abc import Coroutine, Iterator
from typing import Any, Final

import msgspec

from ciuicflow.transport import kernel_sockets, ucx_context
from ciuicflow.transport.base import ConnectFailed
from ciuicflow.transport.kernel_sockets import KernelSocket
from ciuicflow.transport.tcp_info import TcpInfo
from ciuicflow.transport.ucx_context import UcxReport

log = logging.getLogger(__name__)

_PROBE_BYTES: Final = 64 * 1024
_STUCK_S: Final = 10.0
_CONNECTIONS: Final = itertools.count(1)
_SEGMENTS: Final = 1 << 32


class UcxHello(msgspec.Struct, frozen=True):
    """What one side must know to send to the other.

    The worker address is trusted: UCX ends the process over one that is garbage (measured).
    """

    report: UcxReport
    worker_address: bytes
    tag: int
    """Segment number n is to be sent with the tag `tag << 32 | n % 2**32`."""


class UcxPath:
    """Sends and receives segments; owns every buffer until UCX reports completion.

    Its tasks are never cancelled: UCX would go on with the bytes, but nobody would know when it has
    finished.
    """

    def __init__(
        self,
        endpoint: Any,  # noqa: ANN401 - UCXX has no types
        ours: UcxHello,
        theirs: UcxHello,
        sockets_before: frozenset[KernelSocket],
    ) -> None:
        self._endpoint = endpoint
        self._sockets_before = sockets_before
        self._tag = ucx_context.load_ucxx().types.Tag
        self._send_tags = _tags(theirs.tag)
        self._receive_tags = _tags(ours.tag)
        self._tasks: set[asyncio.Task[None]] = set()
        self._socket: KernelSocket | None = None
        self._versions = {ours.report.version, theirs.report.version}
        self._rdma_on_both = ours.report.rdma and theirs.report.rdma
        self.lanes: tuple[str, ...] = ()
        """TRANSPORT/DEVICE of each lane; known after `probe`."""

    def send(self, view: memoryview) -> "asyncio.Task[None]":
        """Start to send a segment; the task is done when UCX has completed it."""
        tag = self._tag(next(self._send_tags))
        return self._start(self._endpoint.send(view, tag=tag, force_tag=True))

    def receive(self, view: memoryview) -> "asyncio.Task[None]":
        """Post a receive for a segment; the task is done when UCX has completed it."""
        tag = self._tag(next(self._receive_tags))
        return self._start(self._endpoint.recv(view, tag=tag, force_tag=True))

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._over)
        return task

    def _over(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # whoever started it has its own callback, or has gone

    async def probe(self, peer: str) -> None:
        """Send bytes both ways and report the lanes; raises ConnectFailed.

        The first transfer sets the lanes up (54-170 ms, measured): better now than later.
        """
        sent, received = memoryview(bytearray(_PROBE_BYTES)), memoryview(bytearray(_PROBE_BYTES))
        done, _ = await asyncio.wait({self.send(sent), self.receive(received)})
        for task in done:
            if task.exception() is not None:
                raise ConnectFailed(f"UCX cannot reach {peer}: {task.exception()}")
        self.lanes = ucx_context.lanes_of(self._endpoint.ucp_endpoint)
        if any(lane.startswith("tcp/") for lane in self.lanes):
            self._socket = self._find_socket()
        self._say(peer)

    def _find_socket(self) -> KernelSocket | None:
        """Find UCX's own socket: the one that is new and that the probe went through.

        None where several are: more rails than one, or other connections made meanwhile.
        """
        new = kernel_sockets.connected() - self._sockets_before
        carrying = [each for each in new if each.bytes_acked() >= _PROBE_BYTES]
        return carrying[0] if len(carrying) == 1 else None

    def tcp_info(self) -> TcpInfo:
        """Return what the kernel tells of UCX's socket; unknown where UCX uses something else."""
        return TcpInfo() if self._socket is None else self._socket.info()

    def _say(self, peer: str) -> None:
        facts = {"peer": peer, "lanes": ",".join(self.lanes) or "unknown"}
        log.info("UCX path", extra=facts)
        if len(self._versions) > 1:
            log.warning(
                "peers have different UCX versions: %s", sorted(self._versions), extra=facts
            )
        rdma = any(ucx_context.is_rdma(lane) for lane in self.lanes)
        if self._rdma_on_both and self.lanes and not rdma:
            log.warning("both sides have RDMA, but UCX does not use it between them", extra=facts)

    async def close(self) -> None:
        """Cut the endpoint off, and wait until UCX has let go of every buffer."""
        try:
            await asyncio.to_thread(self._endpoint.abort)  # takes locks of the progress thread
        except Exception:
            log.exception("a UCX endpoint did not close cleanly")
        while self._tasks:
            await asyncio.wait(set(self._tasks), timeout=_STUCK_S)
            if self._tasks:
                log.error("UCX still holds buffers", extra={"requests": len(self._tasks)})


def say_hello(report: UcxReport) -> UcxHello:
    """Make the hello of a new connection."""
    address = ucx_context.load_ucxx().get_worker_address().tobytes()
    return UcxHello(report, address, next(_CONNECTIONS) % _SEGMENTS)


def read_hello(details: bytes) -> UcxHello:
    """Read a peer's hello; raises ConnectFailed."""
    try:
        return msgspec.json.decode(details, type=UcxHello)
    except msgspec.MsgspecError as error:
        raise ConnectFailed(f"the peer's UCX hello makes no sense: {error}") from None


def mismatch(ours: UcxReport, theirs: UcxReport) -> str:
    """Say why two sides cannot work together; empty: they can.

    With unlike TCP segment sizes UCX resets the connection in the first transfer (measured).
    """
    if ours.tcp_segments_bytes != theirs.tcp_segments_bytes:
        return (
            "UCX_TCP_TX_SEG_SIZE and UCX_TCP_RX_SEG_SIZE must be the same on both sides: "
            f"{ours.tcp_segments_bytes} and {theirs.tcp_segments_bytes} bytes"
        )
    return ""


async def open_path(ours: UcxHello, theirs: UcxHello) -> UcxPath:
    """Make the endpoint; raises ConnectFailed."""
    ucxx = ucx_context.load_ucxx()
    sockets_before = kernel_sockets.connected()
    try:
        address = ucxx.get_ucx_address_from_buffer(theirs.worker_address)
        endpoint = await ucxx.create_endpoint_from_worker_address(
            address, endpoint_error_handling=True
        )
    except (ucxx.exceptions.UCXError, IndexError) as error:  # IndexError: an empty address
        raise ConnectFailed(f"UCX cannot reach the peer: {error}") from error
    return UcxPath(endpoint, ours, theirs, sockets_before)


def _tags(number: int) -> Iterator[int]:
    return (number << 32 | count % _SEGMENTS for count in itertools.count())
