"""Payloads as flat byte views: checked, advanced and copied. Pure."""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

from ciuicflow.transport.base import MAX_BUFFERS, MAX_PAYLOAD_BYTES, Buffer, InvalidMessage

_NOT_CONTIGUOUS: Final = (
    "buffer {} of the payload is not C-contiguous; copy it first (numpy.ascontiguousarray)"
)


def views_of(payload: Sequence[Buffer], *, writable: bool) -> list[memoryview]:
    """Return the payload's buffers as byte views, without the empty ones.

    Contiguity is checked here for every transport: UCX would silently send other bytes (measured).
    Raises InvalidMessage.
    """
    if len(payload) > MAX_BUFFERS:
        raise InvalidMessage(f"{len(payload)} buffers in one payload; {MAX_BUFFERS} are possible")
    views = [_view_of(buffer, index, writable) for index, buffer in enumerate(payload)]
    total_bytes = size_of(views)
    if total_bytes > MAX_PAYLOAD_BYTES:
        raise InvalidMessage(f"payload of {total_bytes} bytes; at most {MAX_PAYLOAD_BYTES}")
    return [view for view in views if view.nbytes]


def _view_of(buffer: Buffer, index: int, writable: bool) -> memoryview:
    try:
        view = memoryview(buffer)
        if not view.c_contiguous:
            raise InvalidMessage(_NOT_CONTIGUOUS.format(index))
        if view.nbytes:
            view = view.cast("B")  # a shape with a zero in it cannot be cast
    except (TypeError, ValueError, BufferError) as error:
        raise InvalidMessage(f"buffer {index} of the payload has no plain bytes: {error}") from None
    if writable and view.readonly:
        raise InvalidMessage(f"buffer {index} of the payload is read-only")
    return view


def size_of(views: Iterable[memoryview]) -> int:
    """Return the bytes of all views."""
    return sum(view.nbytes for view in views)


def advance(views: deque[memoryview], size_bytes: int) -> None:
    """Drop the first `size_bytes` from the front of `views`."""
    while size_bytes:
        first = views[0]
        if first.nbytes > size_bytes:
            views[0] = first[size_bytes:]
            return
        size_bytes -= first.nbytes
        views.popleft()


def copy(sources: Iterable[memoryview], targets: deque[memoryview]) -> None:
    """Copy all of `sources` to the front of `targets`, which are advanced past it."""
    for source in sources:
        left = source
        while left.nbytes:
            target = targets[0]
            size_bytes = min(left.nbytes, target.nbytes)
            target[:size_bytes] = left[:size_bytes]
            left = left[size_bytes:]
            advance(targets, size_bytes)


def cut(views: Iterable[memoryview], sizes: Iterable[int]) -> list[list[memoryview]]:
    """Cut `views` into consecutive pieces of the given sizes, each one or more views."""
    rest = deque(views)
    pieces = []
    for size_bytes in sizes:
        piece = []
        while size_bytes:
            part = rest[0][:size_bytes]
            advance(rest, part.nbytes)
            piece.append(part)
            size_bytes -= part.nbytes
        pieces.append(piece)
    return pieces
