"""What the kernel is asked of a connection, also when that is gone already."""

import asyncio
import socket
from typing import Any

from ciuicflow.gateway import tcp


class Transport(asyncio.BaseTransport):
    """Has just the socket."""

    def __init__(self, sock: socket.socket | None) -> None:
        super().__init__()
        self._sock = sock

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._sock if name == "socket" else default


def test_a_transport_without_a_socket_counts_as_left() -> None:
    gone = Transport(None)
    assert tcp.peer_has_left(gone)
    assert tcp.bytes_acked(gone) == 0
    tcp.reset_on_close(gone)


def test_a_closed_socket_counts_as_left() -> None:
    sock = socket.socket()
    sock.close()
    assert tcp.peer_has_left(Transport(sock))


def test_a_peer_that_closed_behind_unread_bytes_has_left() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
        with server:
            transport = Transport(server)
            assert not tcp.peer_has_left(transport)
            client.sendall(b"unread")
            client.close()
            server.settimeout(5)
            server.recv(1, socket.MSG_PEEK)
            for _ in range(1000):  # the FIN follows the bytes at once on loopback
                if tcp.peer_has_left(transport):
                    break
            assert tcp.peer_has_left(transport)
