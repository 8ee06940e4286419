"""Addresses, buffers, TCP_INFO, and what is said when something is missing."""

import asyncio
import logging
import socket
import struct
import sys
import threading
from collections import deque
from pathlib import Path

import numpy as np
import pytest

from ciuicflow.testing.transport_suite import pattern, refused, take, within
from ciuicflow.transport import kernel_sockets, ucx_context
from ciuicflow.transport.address import join_host_port, split_host_port, split_uri
from ciuicflow.transport.base import (
    MAX_BUFFERS,
    ConnectFailed,
    InvalidMessage,
    Limits,
    ListenFailed,
    PeerViolation,
    TransportUnavailable,
    Truncated,
)
from ciuicflow.transport.buffers import advance, copy, cut, views_of
from ciuicflow.transport.stream import StreamConnection
from ciuicflow.transport.table import connect, listen
from ciuicflow.transport.tcp_info import TcpInfo, parse_tcp_info, read_tcp_info
from ciuicflow.transport.ucx_context import UcxReport
from ciuicflow.transport.ucx_path import mismatch
from ciuicflow.transport.wire import Kind, head


def test_addresses_are_split_and_joined() -> None:
    assert split_uri("tcp://127.0.0.1:7000") == ("tcp", "127.0.0.1:7000")
    assert split_host_port("[::1]:7000") == ("::1", 7000)
    assert join_host_port(("::1", 7000, 0, 0)) == "[::1]:7000"
    assert join_host_port(("127.0.0.1", 1)) == "127.0.0.1:1"


@pytest.mark.parametrize("address", ["", "host", ":1", "host:", "host:x", "host:70000", "host:²"])
def test_bad_addresses_are_refused(address: str) -> None:
    with pytest.raises(TransportUnavailable, match="HOST:PORT"):
        split_host_port(address)


async def test_unknown_scheme_names_the_known_ones() -> None:
    with pytest.raises(TransportUnavailable, match="inproc://, tcp://, ucx://"):
        await connect("rdma://127.0.0.1:1")
    with pytest.raises(TransportUnavailable, match=r"tcp://127\.0\.0\.1:7000"):
        await listen("127.0.0.1:1")


async def test_missing_ucxx_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ucxx", None)
    for attempt in (connect("ucx://127.0.0.1:1"), listen("ucx://127.0.0.1:0")):
        with pytest.raises(TransportUnavailable, match=r"pip install 'ciuicflow\[ucx-cu12\]'"):
            await attempt


async def test_taken_address_cannot_be_listened_on() -> None:
    for uri in ("tcp://127.0.0.1:0", "inproc://name"):
        listener = await listen(uri)
        with pytest.raises(ListenFailed):
            await listen(listener.uri)
        await listener.close()


def test_buffers_become_byte_views_without_the_empty_ones() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    views = views_of([b"ab", b"", array, np.zeros((0, 4))], writable=False)
    assert [view.nbytes for view in views] == [2, 24]
    assert bytes(views[1]) == array.tobytes()


@pytest.mark.parametrize(
    "wrong",
    [np.zeros((4, 4))[:, 1:3], np.zeros((4, 4)).T[:2], memoryview(b"abcd")[::-1], "text", None],
)
def test_what_is_not_contiguous_bytes_is_refused(wrong: object) -> None:
    with pytest.raises(InvalidMessage, match="buffer 1"):
        views_of([b"fine", wrong], writable=False)


def test_too_many_buffers_are_refused() -> None:
    with pytest.raises(InvalidMessage, match="1025 buffers"):
        views_of([b"x"] * (MAX_BUFFERS + 1), writable=False)


def test_views_are_advanced_cut_and_copied() -> None:
    views = deque([memoryview(b"abc"), memoryview(b"defg")])
    advance(views, 4)
    assert [bytes(view) for view in views] == [b"efg"]
    pieces = cut([memoryview(b"abc"), memoryview(b"defg")], [2, 3, 2])
    assert [[bytes(part) for part in piece] for piece in pieces] == [
        [b"ab"],
        [b"c", b"de"],
        [b"fg"],
    ]
    target = bytearray(7)
    copy((memoryview(b"abc"), memoryview(b"defg")), deque([memoryview(target)]))
    assert target == b"abcdefg"


def test_tcp_info_of_an_older_kernel_is_unknown_not_zero() -> None:
    raw = bytearray(200)
    struct.pack_into("=I", raw, 68, 1500)
    struct.pack_into("=I", raw, 148, 900)
    struct.pack_into("=II", raw, 192, 7, 2)
    assert parse_tcp_info(bytes(raw)) == TcpInfo(0.0015, 0.0009, 7, 2)
    assert parse_tcp_info(bytes(raw[:192])) == TcpInfo(0.0015, 0.0009)
    assert parse_tcp_info(bytes(raw[:104])) == TcpInfo(0.0015)
    assert parse_tcp_info(b"") == TcpInfo()


def test_tcp_info_of_other_sockets_is_unknown() -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        assert read_tcp_info(sock) == TcpInfo()


@pytest.mark.parametrize(
    ("text", "size_bytes"), [("512K", 524288), ("8k", 8192), ("1MB", 1 << 20), ("9", 9), ("inf", 0)]
)
def test_ucx_sizes_are_read(monkeypatch: pytest.MonkeyPatch, text: str, size_bytes: int) -> None:
    monkeypatch.setenv("UCX_TCP_TX_SEG_SIZE", text)
    assert ucx_context._bytes_of("UCX_TCP_TX_SEG_SIZE") == size_bytes


def report(*transports: str, segments: tuple[int, int] = (1, 1), rails: str = "4") -> UcxReport:
    return UcxReport("1.21.0", transports, segments, rails)


def test_unlike_segment_sizes_do_not_match() -> None:
    assert mismatch(report(), report()) == ""
    assert "UCX_TCP_TX_SEG_SIZE" in mismatch(report(), report(segments=(1, 2)))


@pytest.mark.parametrize(
    ("transports", "rdma"), [(("tcp", "self"), False), (("rc_mlx5", "tcp"), True), (("srd",), True)]
)
def test_rdma_is_never_silently_lost(
    transports: tuple[str, ...],
    rdma: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(ucx_context, "_INFINIBAND", tmp_path)
    assert report(*transports).rdma is rdma
    with caplog.at_level(logging.WARNING):
        ucx_context._say(report(*transports))
    assert ("cannot use them" in caplog.text) is not rdma


def test_single_rail_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    ucx_context._say(report(rails="1"))
    assert "UCX_MAX_RNDV_RAILS=1" in caplog.text


async def test_garbage_after_the_handshake_is_a_violation() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    connection = StreamConnection(ours, Limits(), local="a", peer="b")
    theirs.send(b"\x63" * 64)
    with pytest.raises(PeerViolation):
        await within(connection.receive())
    theirs.close()


async def test_stream_that_ends_within_a_message_is_truncated() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    connection = StreamConnection(ours, Limits(), local="a", peer="b")
    theirs.send(head(Kind.MESSAGE, 4, 100) + b"ctrl" + b"x" * 60)
    assert (await within(connection.receive())).payload_bytes == 100
    claim = connection.receive_into([bytearray(100)])
    theirs.close()
    with pytest.raises(Truncated):
        await within(claim)


def test_inproc_joins_the_loops_of_two_threads() -> None:
    uris: deque[str] = deque()
    listening = threading.Event()

    async def echo() -> None:
        listener = await listen("inproc://")
        uris.append(listener.uri)
        listening.set()
        connection = await within(listener.accept())
        for _ in range(20):
            control, payload = await take(connection)
            connection.send(control, [payload])
        await within(connection.wait_closed())
        await listener.close()

    async def call() -> None:
        connection = await connect(uris[0])
        for number in range(20):
            transfer = connection.send(bytes([number]), [pattern(50_000, number)])
            assert await take(connection) == (bytes([number]), pattern(50_000, number))
            await within(transfer)
        await within(connection.close())

    thread = threading.Thread(target=asyncio.run, args=(echo(),))
    thread.start()
    assert listening.wait(10)
    asyncio.run(call())
    thread.join(10)
    assert not thread.is_alive()


async def test_names_of_inproc_are_free_again_after_close() -> None:
    for _ in range(2):
        listener = await listen("inproc://again")
        await listener.close()


async def test_connect_to_a_closed_port_fails_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    with refused(ConnectFailed):
        await within(connect(f"tcp://127.0.0.1:{port}", 30.0), 5.0)


def test_sockets_of_a_library_are_found_and_forgotten() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        before = kernel_sockets.connected()
        with socket.create_connection(server.getsockname()) as sock:
            sock.send(b"x" * 100)
            accepted, _ = server.accept()
            assert accepted.recv(100, socket.MSG_WAITALL)
            (near,) = [
                each
                for each in kernel_sockets.connected() - before
                if each.descriptor == sock.fileno()
            ]
            assert near.bytes_acked() >= 100
            assert near.info().rtt_s is not None
            sock.send(b"still open")
            accepted.close()
        assert near.bytes_acked() == 0
        assert near.info() == TcpInfo()
