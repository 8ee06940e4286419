"""Records between an engine and its agent's process: length, then msgpack, over a socket pair."""

import struct
from typing import Final

import msgspec

from ciuicflow.runtime.kv_records import Command, Event, Setup

HEAD: Final = struct.Struct("!I")
_encoder: Final = msgspec.msgpack.Encoder()
commands: Final = msgspec.msgpack.Decoder(Command)
events: Final = msgspec.msgpack.Decoder(Event)
setups: Final = msgspec.msgpack.Decoder(Setup)


def pack(record: Command | Event | Setup) -> bytes:
    """Return the bytes of a record."""
    body = _encoder.encode(record)
    return HEAD.pack(len(body)) + body
