"""Asking an upstream beside the data path: one way to send it, and small bodies read whole."""

import ssl
from collections.abc import Mapping
from typing import Final

import aiohttp

MAX_BODY_BYTES: Final = 16 << 20


def get(
    session: aiohttp.ClientSession,
    url: str,
    *,
    headers: Mapping[str, str],
    tls: ssl.SSLContext | bool,
    timeout_s: float,
) -> "aiohttp.client._RequestContextManager":
    """Send a GET that must be over, its body included, within the timeout; follow nothing."""
    return session.get(
        url,
        headers=headers,
        ssl=tls,
        allow_redirects=False,
        timeout=aiohttp.ClientTimeout(total=timeout_s),
    )


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
