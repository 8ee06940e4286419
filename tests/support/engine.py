"""An upstream as a process of its own, to be killed and started again; it keeps a ledger.

Run as `python engine.py PORT LEDGER`. Each line of the ledger is written before the next byte
goes out: `R id sha256` a request came whole, `A id` its answer begins, `E id` it was written.
Answers follow from the request alone, so a client can check every byte.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
from collections.abc import Iterator

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nX-Id: %s\r\n"


def stream_parts(request_id: bytes, body: bytes) -> Iterator[bytes]:
    """The events of a streamed answer, as the client must see them joined."""
    digest = hashlib.sha256(request_id + body).hexdigest().encode()
    for number in range(8):
        yield b"data: {%s:%d:%s}\n\n" % (request_id, number, digest[number * 8 :])
    yield b"data: [DONE]\n\n"


def plain_body(request_id: bytes, body: bytes) -> bytes:
    """A plain answer of some kilobytes."""
    digest = hashlib.sha256(request_id + body).hexdigest().encode()
    return b'{"id":"%s","text":"%s"}' % (request_id, digest * 64)


class Engine:
    """Serves keep-alive connections; writes the ledger."""

    def __init__(self, ledger: str) -> None:
        self._ledger = os.open(ledger, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def _note(self, mark: bytes, *words: bytes) -> None:
        os.write(self._ledger, b" ".join((mark, *words)) + b"\n")

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        try:
            while await self._serve_one(reader, writer):
                pass
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        lines = [line.partition(b": ") for line in head.split(b"\r\n")[1:-2]]
        fields = {name.lower(): value for name, _, value in lines}
        request_id = fields.get(b"x-id")
        if request_id is None:  # a probe
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            return True
        body = await _read_body(reader, fields)
        self._note(b"R", request_id, hashlib.sha256(body).hexdigest().encode())
        await asyncio.sleep(0.002)
        self._note(b"A", request_id)
        if fields.get(b"x-shape") == b"stream":
            head = HEAD % (b"text/event-stream", request_id)
            writer.write(head + b"Transfer-Encoding: chunked\r\n\r\n")
            pause_s = float(fields.get(b"x-pause", b"0.003"))
            for part in stream_parts(request_id, body):
                writer.write(b"%x\r\n%s\r\n" % (len(part), part))
                await writer.drain()
                await asyncio.sleep(pause_s)
            writer.write(b"0\r\n\r\n")
        else:
            answer = plain_body(request_id, body)
            head = HEAD % (b"application/json", request_id)
            writer.write(head + b"Content-Length: %d\r\n\r\n" % len(answer) + answer)
        await writer.drain()
        self._note(b"E", request_id)
        return True


async def _read_body(reader: asyncio.StreamReader, fields: dict[bytes, bytes]) -> bytes:
    if b"transfer-encoding" not in fields:
        return await reader.readexactly(int(fields.get(b"content-length", b"0")))
    parts = []
    while size := int(await reader.readuntil(b"\r\n"), 16):
        parts.append(await reader.readexactly(size))
        await reader.readexactly(2)
    await reader.readexactly(2)
    return b"".join(parts)


async def main(port: int, ledger: str) -> None:
    """Listen, say on which port, and serve until killed."""
    engine = Engine(ledger)
    server = await asyncio.start_server(engine.serve, "127.0.0.1", port, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2]))
