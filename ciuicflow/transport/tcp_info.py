"""What Linux tells of a TCP socket: struct tcp_info (include/uapi/linux/tcp.h)."""

import socket
import struct
import sys
from typing import Final

import msgspec

_LENGTH: Final = 200
_RTT_US: Final = 68
_BYTES_ACKED: Final = 120  # Linux >= 4.1
_MIN_RTT_US: Final = 148  # Linux >= 4.6
_DELIVERED: Final = 192  # and delivered_ce behind it: Linux >= 4.18
_NO_SAMPLE: Final = 0xFFFFFFFF


class TcpInfo(msgspec.Struct, frozen=True, gc=False):
    """The fields that congestion control reads; None: this kernel does not tell."""

    rtt_s: float | None = None
    min_rtt_s: float | None = None
    delivered_segments: int | None = None
    delivered_ce_segments: int | None = None


def read_tcp_info(sock: socket.socket) -> TcpInfo:
    """Ask the kernel; nothing is known of a socket that is closed or not TCP."""
    return parse_tcp_info(_raw(sock))


def read_bytes_acked(sock: socket.socket) -> int:
    """Return how many bytes the peer's kernel has taken; 0 where the kernel does not tell."""
    return int.from_bytes(_raw(sock)[_BYTES_ACKED : _BYTES_ACKED + 8], sys.byteorder)


def _raw(sock: socket.socket) -> bytes:
    try:
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LENGTH)
    except (OSError, AttributeError):  # AttributeError: not Linux
        return b""


def parse_tcp_info(raw: bytes) -> TcpInfo:
    """Read what the kernel returned, which is shorter on older ones."""
    rtt_us = _u32(raw, _RTT_US)
    min_rtt_us = _u32(raw, _MIN_RTT_US)
    return TcpInfo(
        rtt_us / 1e6 if rtt_us else None,
        min_rtt_us / 1e6 if min_rtt_us not in (None, 0, _NO_SAMPLE) else None,
        _u32(raw, _DELIVERED),
        _u32(raw, _DELIVERED + 4),
    )


def _u32(raw: bytes, offset: int) -> int | None:
    if len(raw) < offset + 4:
        return None
    value: int = struct.unpack_from("=I", raw, offset)[0]
    return value
