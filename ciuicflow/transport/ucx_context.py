"""The one UCX context of this process: settings, life time, and what this UCX can do.

UCX is set up as measured (README.md): Python futures on, since an await otherwise spins the
event loop; TCP segments of 512 KiB, since endpoints that report dead peers otherwise get 8 KiB ones
(1.5 instead of 6.4 GB/s); several rails, since importing ucxx limits them to one. What the operator
has set in the environment stays.
"""

import asyncio
import concurrent.futures
import ctypes
import importlib
import logging
import os
import sys
import threading
from pathlib import Path
from typing import Any, Final

import msgspec

from ciuicflow.transport.base import TransportUnavailable

log = logging.getLogger(__name__)

_DEFAULTS: Final = {
    "UCX_TCP_TX_SEG_SIZE": "512K",
    "UCX_TCP_RX_SEG_SIZE": "512K",
    "UCX_MAX_RNDV_RAILS": "4",
    "UCX_LOG_FILE": "stderr",  # by default UCX warns on stdout, where our ready line goes
}
_INSTALL: Final = (
    "ucx:// needs UCXX: pip install 'ciuicflow[ucx-cu12]' or 'ciuicflow[ucx-cu13]', "
    "or use tcp://, which needs nothing"
)
_RDMA: Final = ("rc", "dc", "ud", "srd", "gga")
"""How names of UCX's RDMA transports start: rc_verbs, rc_mlx5, dc_mlx5, ud_mlx5, srd (EFA)."""
_INFINIBAND: Final = Path("/sys/class/infiniband")


def is_rdma(name: str) -> bool:
    """Whether a transport, or a lane, is RDMA."""
    return name.startswith(_RDMA)


class UcxReport(msgspec.Struct, frozen=True):
    """What the UCX of this process is and may use; exchanged with every peer."""

    version: str
    transports: tuple[str, ...]
    tcp_segments_bytes: tuple[int, int]
    """Sent and received at once over TCP: both sides must have the same."""
    rails: str

    @property
    def rdma(self) -> bool:
        """Whether an RDMA transport is usable here."""
        return any(map(is_rdma, self.transports))


class _Shared:
    """How many use the context, from which event loop; UCXX keeps the context itself."""

    def __init__(self) -> None:
        self.users = 0
        self.loop: asyncio.AbstractEventLoop | None = None
        self.report: UcxReport | None = None
        self.resetting: concurrent.futures.Future[None] | None = None
        self.guarded = False


_SHARED: Final = _Shared()
_RESETTER: Final = concurrent.futures.ThreadPoolExecutor(1, "ucx-reset")


def load_ucxx() -> Any:  # noqa: ANN401 - UCXX has no types
    """Import UCXX with our settings; raises TransportUnavailable, saying what to install."""
    if "ucxx" not in sys.modules:
        for name, value in _DEFAULTS.items():
            os.environ.setdefault(name, value)
    try:
        return importlib.import_module("ucxx")
    except ImportError as error:
        raise TransportUnavailable(f"{_INSTALL} ({error})") from error


async def acquire() -> UcxReport:
    """Start UCX, or share it where it runs already; call `release` once for each call.

    Raises TransportUnavailable.
    """
    while _SHARED.resetting is not None:
        await asyncio.wait({asyncio.wrap_future(_SHARED.resetting)})
    loop = asyncio.get_running_loop()
    if _SHARED.users and _SHARED.loop is not loop:
        raise TransportUnavailable("UCX is in use by another event loop of this process")
    if not _SHARED.users:
        _SHARED.report = _start()
        _SHARED.loop = loop
    _SHARED.users += 1
    assert _SHARED.report is not None
    return _SHARED.report


def release() -> None:
    """Stop using UCX; it shuts down, in a thread of its own, once nobody uses it."""
    _SHARED.users -= 1
    if not _SHARED.users:
        _SHARED.resetting = _RESETTER.submit(_reset)  # takes a second: its notifier is asleep


def in_use() -> bool:
    """Whether somebody uses UCX, or its shutdown still runs."""
    return _SHARED.users > 0 or _SHARED.resetting is not None


def _start() -> UcxReport:
    ucxx = load_ucxx()
    try:
        ucxx.init(progress_mode="thread", enable_python_future=True)
    except (RuntimeError, ucxx.exceptions.UCXError) as error:
        raise TransportUnavailable(f"UCX does not start: {error}") from error
    if not _SHARED.guarded:
        _SHARED.guarded = True
        threading.Thread(target=_stop_with_process, args=(ucxx,), daemon=True).start()
    report = UcxReport(
        version=".".join(map(str, ucxx.get_ucx_version())),
        transports=tuple(sorted(ucxx.get_active_transports())),
        tcp_segments_bytes=(_bytes_of("UCX_TCP_TX_SEG_SIZE"), _bytes_of("UCX_TCP_RX_SEG_SIZE")),
        rails=os.environ.get("UCX_MAX_RNDV_RAILS", "unknown"),
    )
    _say(report)
    return report


def _say(report: UcxReport) -> None:
    facts = {
        "ucx": report.version,
        "transports": ",".join(report.transports),
        "tcp_segments_bytes": report.tcp_segments_bytes,
        "rails": report.rails,
        "rdma": report.rdma,
    }
    log.info("UCX started", extra=facts)
    devices = sorted(path.name for path in _INFINIBAND.iterdir()) if _INFINIBAND.is_dir() else []
    if devices and not report.rdma:
        log.warning(
            "this host has RDMA devices, but this UCX cannot use them: install a UCX >= 1.19 "
            "with verbs and set RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true",
            extra=facts | {"devices": ",".join(devices)},
        )
    if report.rails == "1":
        log.warning("UCX_MAX_RNDV_RAILS=1: a payload uses one device only", extra=facts)


def _reset() -> None:
    try:
        load_ucxx().reset()
    except Exception:  # the next start works all the same
        log.exception("UCX did not shut down cleanly")
    finally:
        _SHARED.resetting = None


def _stop_with_process(ucxx: Any) -> None:  # noqa: ANN401 - UCXX has no types
    """Let a process end that forgot to close: UCXX's notifier thread would keep it for ever."""
    threading.main_thread().join()
    ucxx.stop_notifier_thread()


def _bytes_of(variable: str) -> int:
    """Read a size as UCX writes it: 8192, 512K, 1M; 0: something else, such as inf."""
    text = os.environ.get(variable, "8K").strip().upper().removesuffix("B")
    factor = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
    digits = text[:-1] if factor > 1 else text
    return int(digits) * factor if digits.isdigit() else 0


# Which transports an endpoint uses: ucp_ep_query, which UCXX does not offer (ucp.h, UCX >= 1.12).


class _Entry(ctypes.Structure):
    _fields_ = (("transport", ctypes.c_char_p), ("device", ctypes.c_char_p))


class _Transports(ctypes.Structure):
    _fields_ = (
        ("entries", ctypes.POINTER(_Entry)),
        ("count", ctypes.c_uint),
        ("entry_size", ctypes.c_size_t),
    )


class _EndpointAttributes(ctypes.Structure):
    _fields_ = (
        ("field_mask", ctypes.c_uint64),
        ("name", ctypes.c_char * 32),
        ("local", ctypes.c_char * 128),  # struct sockaddr_storage
        ("remote", ctypes.c_char * 128),
        ("transports", _Transports),
        ("user_data", ctypes.c_void_p),
    )


_FIELD_TRANSPORTS: Final = 1 << 3
_MAX_LANES: Final = 64


def lanes_of(endpoint_handle: int) -> tuple[str, ...]:
    """Return TRANSPORT/DEVICE of each lane of an endpoint; empty: this UCX does not tell."""
    try:
        query = ctypes.CDLL("libucp.so.0").ucp_ep_query  # the one that UCXX has loaded
    except (OSError, AttributeError):
        return ()
    query.argtypes = (ctypes.c_void_p, ctypes.POINTER(_EndpointAttributes))
    query.restype = ctypes.c_int8
    entries = (_Entry * _MAX_LANES)()
    room = _Transports(entries, _MAX_LANES, ctypes.sizeof(_Entry))
    attributes = _EndpointAttributes(field_mask=_FIELD_TRANSPORTS, transports=room)
    if query(endpoint_handle, ctypes.byref(attributes)) != 0:
        return ()
    used = entries[: attributes.transports.count]
    return tuple(f"{entry.transport.decode()}/{entry.device.decode()}" for entry in used)
