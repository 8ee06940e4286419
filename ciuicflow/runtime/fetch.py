"""Reading small bodies whole, within a bound."""

from typing import Final

import aiohttp

MAX_BODY_BYTES: Final = 16 << 20


async def read_whole(response: aiohttp.ClientResponse) -> bytes:
    """Return the body. Raises aiohttp.ClientPayloadError over MAX_BODY_BYTES.

    `content.read(n)` returns what happens to be there; `read()` knows no bound.
    """
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise aiohttp.ClientPayloadError(f"body over {MAX_BODY_BYTES} bytes")
    return bytes(body)
