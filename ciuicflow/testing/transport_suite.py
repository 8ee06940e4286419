"""What every transport must show. Run each of CHECKS against a Harness of the transport's URI.

A check is a coroutine function that raises AssertionError. It needs no test framework; it runs in
any event loop. `Harness.settled` is for transports that need a while to give everything back.
"""

import asyncio
import contextlib
import functools
import gc
import itertools
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Final

import msgspec

from ciuicflow.transport.base import (
    MAX_CONTROL_BYTES,
    ConnectFailed,
    Connection,
    ConnectionEnded,
    InvalidMessage,
    Limits,
    LocallyClosed,
    Message,
    PeerClosed,
    PeerReset,
    PeerTimeout,
    TooManySends,
    Transfer,
    Truncated,
)
from ciuicflow.transport.table import connect, listen

MIB: Final = 1 << 20
DEADLINE_S: Final = 10.0
"""For what must end at all; generous, since the machine may be busy."""
QUIET_S: Final = 0.2
"""Long enough to see that something does not happen."""


class Harness(msgspec.Struct, frozen=True):
    """A transport under test."""

    uri: str
    """To listen on: `tcp://127.0.0.1:0`, `inproc://`."""
    cycles: int = 200
    """Of connect and close, in the check for leaks."""
    on_network: bool = True
    """Whether strangers can reach the listener."""

    @contextlib.asynccontextmanager
    async def pair(
        self,
        limits: Limits = Limits(),  # noqa: B008 - immutable
    ) -> AsyncIterator[tuple[Connection, Connection]]:
        """Give a connection's two ends; both are aborted, if still open, and waited for."""
        listener = await listen(self.uri, limits)
        ends: list[Connection] = []
        try:
            near, far = await asyncio.gather(
                connect(listener.uri, DEADLINE_S, limits), within(listener.accept())
            )
            ends += [near, far]
            yield near, far
        finally:
            for end in ends:
                end.abort("the check is over")
            for end in ends:
                await within(end.wait_closed())
            await within(listener.close())


async def within(awaitable: Awaitable[Any], deadline_s: float = DEADLINE_S) -> Any:  # noqa: ANN401 - passes through
    """Await with a deadline."""
    async with asyncio.timeout(deadline_s):
        return await awaitable


@contextlib.contextmanager
def refused(*errors: type[Exception]) -> Iterator[None]:
    """Demand that the block raises one of the errors."""
    try:
        yield
    except errors:
        return
    raise AssertionError(f"no {' or '.join(error.__name__ for error in errors)}")


def pattern(size_bytes: int, seed: int = 0) -> bytes:
    """Return bytes that show where a piece was lost, doubled or moved."""
    return random.Random(seed).randbytes(size_bytes)


async def take(connection: Connection) -> tuple[bytes, bytes]:
    """Receive a message with its payload."""
    message: Message = await within(connection.receive())
    target = bytearray(message.payload_bytes)
    await within(connection.receive_into([target]))
    return message.control, bytes(target)


# Order and content.


async def messages_arrive_whole_and_in_order(harness: Harness) -> None:
    """Whatever their sizes, with all sends in flight at once."""
    sizes = [0, 1, 100_000, 70_000, 0, 65_536, 3, 300_000, 65_535, 9_000] * 3
    async with harness.pair() as (near, far):
        sent = [(f"message {n}".encode(), pattern(size, n)) for n, size in enumerate(sizes)]
        transfers = [near.send(control, [payload]) for control, payload in sent]
        assert [await take(far) for _ in sent] == sent
        for transfer in transfers:
            await within(transfer)


async def control_and_payload_may_be_empty(harness: Harness) -> None:
    """An empty message is a message; empty buffers among others change nothing."""
    async with harness.pair() as (near, far):
        near.send(b"")
        near.send(b"", [])
        near.send(b"x", [b"", b""])
        near.send(b"y", [b"", b"abc", b"", pattern(100_000), b""])
        assert await within(far.receive()) == Message(b"", 0)
        assert await within(far.receive()) == Message(b"", 0)
        assert await within(far.receive()) == Message(b"x", 0)
        await within(far.receive_into([]))
        assert await within(far.receive()) == Message(b"y", 100_003)
        head, tail = bytearray(3), bytearray(100_000)
        await within(far.receive_into([bytearray(0), head, tail]))
        assert (bytes(head), bytes(tail)) == (b"abc", pattern(100_000))


async def control_of_full_size_arrives(harness: Harness) -> None:
    """The largest control bytes that are allowed, with a payload right behind."""
    async with harness.pair() as (near, far):
        control, payload = pattern(MAX_CONTROL_BYTES), pattern(200_000)
        for _ in range(3):
            near.send(control, [payload])
            assert await take(far) == (control, payload)


async def large_payload_arrives(harness: Harness) -> None:
    """64 MiB in one buffer."""
    async with harness.pair() as (near, far):
        payload = os.urandom(MIB) * 64
        transfer = near.send(b"large", [payload])
        assert await take(far) == (b"large", payload)
        await within(transfer)


async def payload_is_gathered_and_scattered(harness: Harness) -> None:
    """The receiver may split it in another way than the sender, at odd sizes."""
    rng = random.Random(1)
    async with harness.pair() as (near, far):
        for total in (1_000, 65_536, 777_777, 3 * MIB + 1):
            payload = bytearray(pattern(total, total))
            near.send(b"", split(payload, rng))
            await within(far.receive())
            target = bytearray(total)
            await within(far.receive_into(split(target, rng)))
            assert target == payload


async def many_small_buffers_arrive(harness: Harness) -> None:
    """As many buffers as are allowed, of 1 KiB; one more is refused."""
    async with harness.pair() as (near, far):
        payload = pattern(MIB)
        pieces = [memoryview(payload)[at : at + 1024] for at in range(0, MIB, 1024)]
        near.send(b"", pieces)
        assert await take(far) == (b"", payload)
        with refused(InvalidMessage):
            near.send(b"", [*pieces, b"x"])


def split(buffer: bytearray, rng: random.Random) -> list[memoryview]:
    """Cut a buffer into about ten views of odd sizes."""
    cuts = sorted({0, len(buffer), *(rng.randrange(len(buffer)) for _ in range(9))})
    view = memoryview(buffer)
    return [view[start:end] for start, end in itertools.pairwise(cuts)]


async def payload_flows_both_ways_at_once(harness: Harness) -> None:
    """Neither direction waits for the other."""
    async with harness.pair() as (near, far):
        payload = pattern(8 * MIB)
        for end in (near, far):
            end.send(b"big", [payload])
        near_got, far_got = await asyncio.gather(take(near), take(far))
        assert near_got == far_got == (b"big", payload)


# Claims.


async def several_claims_may_be_outstanding(harness: Harness) -> None:
    """Claims are made at the call; the transfers are awaited later."""
    async with harness.pair() as (near, far):
        payloads = [pattern(200_000, seed) for seed in range(8)]
        targets = [bytearray(200_000) for _ in payloads]
        sends = [near.send(b"", [payload]) for payload in payloads]
        claims = []
        for target in targets:
            await within(far.receive())
            claims.append(far.receive_into([target]))
        finished: list[Transfer] = []
        for transfer in (*claims, *sends):
            transfer.when_done(functools.partial(finished.append, transfer))
        for transfer in (*claims, *sends):
            await within(transfer)
            assert transfer.done
        await until(lambda: set(finished) == {*claims, *sends})
        assert targets == payloads


async def payload_can_be_discarded(harness: Harness) -> None:
    """And what follows arrives."""
    async with harness.pair() as (near, far):
        for size_bytes in (10, 50_000, 10 * MIB):
            near.send(b"no", [pattern(size_bytes)])
            near.send(b"yes", [pattern(70_000)])
            await within(far.receive())
            await within(far.discard())
            assert await take(far) == (b"yes", pattern(70_000))


async def payload_must_be_claimed_before_the_next_message(harness: Harness) -> None:
    """Otherwise `receive` refuses, and nothing is lost."""
    async with harness.pair() as (near, far):
        near.send(b"one", [b"payload"])
        near.send(b"two")
        await within(far.receive())
        with refused(InvalidMessage):
            await far.receive()
        await within(far.discard())
        assert await within(far.receive()) == Message(b"two", 0)


async def wrong_buffers_are_refused(harness: Harness) -> None:
    """Not contiguous, read-only, too large or too small: refused, and the connection works on."""
    async with harness.pair() as (near, far):
        with refused(InvalidMessage):
            near.send(b"", [memoryview(bytearray(100))[::2]])
        with refused(InvalidMessage):
            near.send(b"", ["text"])
        near.send(b"", [pattern(50)])
        await within(far.receive())
        for wrong in (memoryview(bytearray(100))[::2], bytes(50), bytearray(49), bytearray(51)):
            with refused(InvalidMessage):
                far.receive_into([wrong])
        target = bytearray(50)
        await within(far.receive_into([target]))
        assert target == pattern(50)


async def oversize_control_is_refused(harness: Harness) -> None:
    """Nothing is sent, and the connection works on."""
    async with harness.pair() as (near, far):
        with refused(InvalidMessage):
            near.send(bytes(MAX_CONTROL_BYTES + 1))
        near.send(b"fine")
        assert await within(far.receive()) == Message(b"fine", 0)


# Bounds.


async def outstanding_sends_are_bounded(harness: Harness) -> None:
    """A receiver that does not read holds the sender back, and gets everything in the end."""
    limits = Limits(outstanding=8)
    payload = pattern(MIB)
    async with harness.pair(limits) as (near, far):
        sent = 0
        with refused(TooManySends):
            while sent < 1000:
                near.send(sent.to_bytes(4), [payload])
                sent += 1
                await asyncio.sleep(0.002)
        await asyncio.sleep(QUIET_S)
        assert near.statistics().outstanding <= limits.outstanding
        for number in range(sent):
            assert await take(far) == (number.to_bytes(4), payload)
        await until(lambda: near.statistics().outstanding == 0)
        assert near.statistics().messages_sent == sent


async def small_messages_are_held_back_as_well(harness: Harness) -> None:
    """Messages without a payload do not pile up in the memory of a receiver that does not read."""
    async with harness.pair() as (near, far):
        before_bytes = resident_bytes()
        sent = 0
        control = bytes(32 * 1024)
        with refused(TooManySends):
            while sent < 4000:  # 125 MiB
                near.send(control)
                sent += 1
                await asyncio.sleep(0)
        await asyncio.sleep(QUIET_S)
        assert resident_bytes() - before_bytes < 32 * MIB
        for _ in range(sent):
            assert await within(far.receive()) == Message(control, 0)


async def connecting_again_and_again_leaks_nothing(harness: Harness) -> None:
    """Neither descriptors nor tasks, whichever side closes, politely or not."""

    async def cycle(number: int) -> None:
        near, far = await asyncio.gather(
            connect(listener.uri, DEADLINE_S), within(listener.accept())
        )
        first, second = (near, far) if number % 2 else (far, near)
        first.send(b"hello", [bytes(100)])
        assert await take(second) == (b"hello", bytes(100))
        if number % 3:
            await within(first.close())
        else:
            first.abort()
        await within(first.wait_closed())
        await within(second.wait_closed())

    listener = await listen(harness.uri)
    try:
        await cycle(0)
        gc.collect()
        before, tasks = len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())
        for number in range(harness.cycles):
            await cycle(number)
        await asyncio.sleep(QUIET_S)
        assert len(os.listdir("/proc/self/fd")) <= before + 2
        assert len(asyncio.all_tasks()) <= tasks
    finally:
        await within(listener.close())


# Cancellation.


async def cancelled_receive_loses_nothing(harness: Harness) -> None:
    """Waiting for a message can be given up at any moment."""
    async with harness.pair() as (near, far):
        for number in range(5):
            with refused(TimeoutError):
                await within(far.receive(), 0.01)
            near.send(bytes([number]), [pattern(70_000)])
            assert await take(far) == (bytes([number]), pattern(70_000))


async def cancelled_wait_lets_the_transfer_go_on(harness: Harness) -> None:
    """The transfer finishes by itself, can be awaited again, and the connection works on."""
    async with harness.pair() as (near, far):
        payload, target = pattern(32 * MIB), bytearray(32 * MIB)
        send = near.send(b"", [payload])
        await within(far.receive())
        claim = far.receive_into([target])
        for transfer in (send, claim):
            waiting = asyncio.ensure_future(wait_for(transfer))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait({waiting})
        await within(claim)
        await within(send)
        assert target == payload
        near.send(b"next", [payload])
        assert await take(far) == (b"next", payload)


async def second_receiver_is_refused(harness: Harness) -> None:
    """Only one task may wait in `receive`."""
    async with harness.pair() as (near, far):
        first = asyncio.ensure_future(far.receive())
        await asyncio.sleep(0)
        with refused(InvalidMessage):
            await far.receive()
        near.send(b"x")
        assert await within(first) == Message(b"x", 0)


async def wait_for(transfer: Transfer) -> None:
    """Await a transfer, as a coroutine."""
    await transfer


# The end.


async def close_delivers_what_is_outstanding(harness: Harness) -> None:
    """Then the peer learns that it is over, and that it was in order."""
    async with harness.pair() as (near, far):
        payload = pattern(4 * MIB)
        sends = [near.send(b"last", [payload]) for _ in range(4)]
        closing = asyncio.ensure_future(near.close(DEADLINE_S))
        for _ in range(4):
            assert await take(far) == (b"last", payload)
        with refused(PeerClosed):
            await within(far.receive())
        await within(closing)
        for send in sends:
            await within(send)
        assert isinstance(await within(near.wait_closed()), LocallyClosed)
        assert isinstance(await within(far.wait_closed()), PeerClosed)


async def both_may_close_at_once(harness: Harness) -> None:
    """Neither waits for the other's deadline."""
    async with harness.pair() as (near, far):
        await within(asyncio.gather(near.close(), far.close()), 4.0)
        assert near.closed
        assert far.closed


async def close_has_a_deadline(harness: Harness) -> None:
    """A peer that does not take what is outstanding gets a reset."""
    async with harness.pair() as (near, far):
        send = near.send(b"", [pattern(32 * MIB)])
        with refused(PeerTimeout):
            await within(near.close(QUIET_S))
        with refused(LocallyClosed):
            await within(send)
        with refused(PeerReset, Truncated):
            await within(far.receive())
            await within(far.receive_into([bytearray(32 * MIB)]))


async def abort_ends_everything_on_both_sides(harness: Harness) -> None:
    """Every transfer and every waiting receive ends, with the reason, and nothing works after."""
    async with harness.pair() as (near, far):
        sends = [near.send(b"", [pattern(32 * MIB)]) for _ in range(2)]
        receiving = asyncio.ensure_future(near.receive())
        await asyncio.sleep(0.01)
        near.abort()
        everything: list[Awaitable[Any]] = [*sends, receiving]
        for waiting in everything:
            with refused(LocallyClosed):
                await within(waiting)
        with refused(LocallyClosed):
            await near.receive()
        with refused(LocallyClosed):
            near.send(b"late")
        assert near.closed
        await within(near.close())
        await drain(far)
        assert isinstance(await within(far.wait_closed()), PeerReset | Truncated)


async def drain(connection: Connection) -> None:
    """Take what still arrives, until the connection ends."""
    with contextlib.suppress(ConnectionEnded):
        while True:
            await within(connection.receive())
            await within(connection.discard())


async def peer_abort_amid_a_payload_ends_the_claim(harness: Harness) -> None:
    """With a typed error, soon; and nothing writes into the buffer from then on."""
    async with harness.pair() as (near, far):
        transfer = near.send(b"", [pattern(MIB) * 64])
        message = await within(far.receive())
        target = bytearray(message.payload_bytes)
        near.abort()
        claim = far.receive_into([target])
        with refused(PeerReset, Truncated):
            await within(claim)
        with refused(LocallyClosed):
            await within(transfer)
        seen = target[::4096]
        await asyncio.sleep(QUIET_S)
        assert seen == target[::4096]


async def own_abort_amid_a_payload_frees_the_buffer(harness: Harness) -> None:
    """When the claim has ended, nothing writes into its buffer any more."""
    async with harness.pair() as (near, far):
        near.send(b"", [pattern(MIB) * 64])
        message = await within(far.receive())
        target = bytearray(message.payload_bytes)
        claim = far.receive_into([target])
        await asyncio.sleep(0)
        far.abort()
        with contextlib.suppress(LocallyClosed):  # in one process it may have been quicker
            await within(claim)
        seen = target[::4096]
        await asyncio.sleep(QUIET_S)
        assert seen == target[::4096]
        assert isinstance(await within(near.wait_closed()), PeerReset | Truncated)


async def idle_connection_stays(harness: Harness) -> None:
    """Silence of the drivers is not silence of the transports."""
    limits = Limits(heartbeat_s=0.05, silence_s=0.4, stall_s=0.4)
    async with harness.pair(limits) as (near, far):
        await asyncio.sleep(1.0)
        near.send(b"still here")
        assert await within(far.receive()) == Message(b"still here", 0)


# Counts.


async def statistics_count_exactly(harness: Harness) -> None:
    """Control and payload bytes, on both sides; unclaimed and refused ones not."""
    async with harness.pair() as (near, far):
        sizes = [(3, 0), (0, 5), (10, 100_000), (100, 65_536), (7, 3 * MIB + 1)]
        transfers = [near.send(bytes(c), [bytes(p)]) for c, p in sizes]
        for _ in sizes:
            await take(far)
        for transfer in transfers:
            await within(transfer)
        with refused(InvalidMessage):
            near.send(bytes(MAX_CONTROL_BYTES + 1))
        total = sum(control + payload for control, payload in sizes)
        sent, received = near.statistics(), far.statistics()
        assert (sent.messages_sent, sent.bytes_sent, sent.outstanding) == (len(sizes), total, 0)
        assert (received.messages_received, received.bytes_received) == (len(sizes), total)
        assert (sent.messages_received, sent.bytes_received) == (0, 0)
        assert (received.messages_sent, received.bytes_sent) == (0, 0)
        assert sent.scheme == received.scheme == harness.uri.partition(":")[0]
        assert (sent.local, sent.peer) == (received.peer, received.local)
        assert all("/" in lane for lane in sent.lanes)
        near.abort()
        assert near.statistics().bytes_sent == total  # known after the end as well


# Connecting.


async def nobody_there_is_a_clear_failure(harness: Harness) -> None:
    """A listener that has closed takes nobody in, and its accept ends."""
    listener = await listen(harness.uri)
    accepting = asyncio.ensure_future(listener.accept())
    await asyncio.sleep(0)
    await within(listener.close())
    with refused(LocallyClosed):
        await within(accepting)
    with refused(ConnectFailed):
        await within(connect(listener.uri, 2.0))


async def connections_outlive_their_listener(harness: Harness) -> None:
    """Closing a listener cuts off only those whom nobody had accepted."""
    listener = await listen(harness.uri)
    near, far = await asyncio.gather(connect(listener.uri), within(listener.accept()))
    waiting = await connect(listener.uri)
    await asyncio.sleep(QUIET_S)
    await within(listener.close())
    near.send(b"x", [pattern(100_000)])
    assert await take(far) == (b"x", pattern(100_000))
    assert isinstance(await within(waiting.wait_closed()), PeerReset)
    near.abort()
    await within(near.wait_closed())
    await within(far.wait_closed())


async def strangers_do_not_disturb(harness: Harness) -> None:
    """Garbage, silence and port scans: cut off, while peers connect as before."""
    if not harness.on_network:
        return
    listener = await listen(harness.uri, Limits(handshake_s=0.3))
    host, _, port = listener.uri.partition("://")[2].rpartition(":")
    strangers = [await asyncio.open_connection(host, int(port)) for _ in range(4)]
    for (_, writer), data in zip(
        strangers,
        (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"CIUIC-KV\xff\xff\xff\xff", b""),
        strict=True,
    ):
        writer.write(data)
    for reader, writer in strangers:
        with contextlib.suppress(ConnectionError):
            assert await within(reader.read()) == b""
        writer.close()
    near, far = await asyncio.gather(connect(listener.uri), within(listener.accept()))
    near.send(b"peer")
    assert await within(far.receive()) == Message(b"peer", 0)
    for end in (near, far):
        end.abort()
        await within(end.wait_closed())
    await within(listener.close())


async def listener_that_says_nothing_is_a_clear_failure(harness: Harness) -> None:
    """Connecting has one deadline, the handshake included."""
    if not harness.on_network:
        return
    silent = await asyncio.start_server(lambda _reader, writer: held.append(writer), "127.0.0.1", 0)
    held: list[asyncio.StreamWriter] = []
    port = silent.sockets[0].getsockname()[1]
    scheme = harness.uri.partition(":")[0]
    with refused(ConnectFailed):
        await within(connect(f"{scheme}://127.0.0.1:{port}", QUIET_S))
    for writer in held:
        writer.close()
    silent.close()
    await within(silent.wait_closed())


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition, with a deadline."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.005)


def resident_bytes() -> int:
    """Return this process's resident memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


Check = Callable[[Harness], Awaitable[None]]

CHECKS: Final[tuple[Check, ...]] = (
    messages_arrive_whole_and_in_order,
    control_and_payload_may_be_empty,
    control_of_full_size_arrives,
    large_payload_arrives,
    payload_is_gathered_and_scattered,
    many_small_buffers_arrive,
    payload_flows_both_ways_at_once,
    several_claims_may_be_outstanding,
    payload_can_be_discarded,
    payload_must_be_claimed_before_the_next_message,
    wrong_buffers_are_refused,
    oversize_control_is_refused,
    outstanding_sends_are_bounded,
    small_messages_are_held_back_as_well,
    connecting_again_and_again_leaks_nothing,
    cancelled_receive_loses_nothing,
    cancelled_wait_lets_the_transfer_go_on,
    second_receiver_is_refused,
    close_delivers_what_is_outstanding,
    both_may_close_at_once,
    close_has_a_deadline,
    abort_ends_everything_on_both_sides,
    peer_abort_amid_a_payload_ends_the_claim,
    own_abort_amid_a_payload_frees_the_buffer,
    idle_connection_stays,
    statistics_count_exactly,
    nobody_there_is_a_clear_failure,
    connections_outlive_their_listener,
    strangers_do_not_disturb,
    listener_that_says_nothing_is_a_clear_failure,
)
