"""`GET /v1/models` of several upstreams: one list, each model once, fields as sent."""

import asyncio
import logging
from typing import Any, Final
from urllib.parse import unquote_to_bytes

import aiohttp
import msgspec

from ciuicflow.gateway.endpoints import Endpoint
from ciuicflow.gateway.headers import RequestHead, field_value
from ciuicflow.runtime.fetch import get, read_whole

log = logging.getLogger(__name__)

_PATHS: Final = (b"/v1/models", b"/models")  # DeepSeek's API has both


class Listing(msgspec.Struct, frozen=True):
    """An answer to a request for models."""

    status: int
    body: bytes


def is_model_list(head: RequestHead) -> bool:
    """Whether the request asks for all models."""
    return head.method == b"GET" and head.target.partition(b"?")[0] in _PATHS


def model_in_path(target: bytes) -> str | None:
    """Return the model that a path such as /v1/models/deepseek-chat names, or None."""
    path = target.partition(b"?")[0]
    for prefix in _PATHS:
        if path.startswith(prefix + b"/"):
            return unquote_to_bytes(path[len(prefix) + 1 :]).decode("utf-8", "replace") or None
    return None


def union(listings: list[dict[str, Any]]) -> bytes:
    """Join lists of models by id; of models listed twice, the first stays. Pure."""
    models: dict[str, Any] = {}
    for listing in listings:
        for model in listing["data"]:
            models.setdefault(model["id"], model)
    return msgspec.json.encode({**listings[0], "data": list(models.values())})


class ModelLister:
    """Asks all endpoints at once, with the caller's own credentials."""

    def __init__(self, session: aiohttp.ClientSession, timeout_s: float) -> None:
        self._session = session
        self.timeout_s = timeout_s

    async def union(self, head: RequestHead, endpoints: list[Endpoint]) -> Listing | None:
        """Return the union; where nobody lists any, the first refusal; None: nobody answers."""
        answers = await asyncio.gather(*(self._ask(head, endpoint) for endpoint in endpoints))
        there = [answer for answer in answers if answer is not None]
        listings = [decoded for answer in there if (decoded := _decode(answer)) is not None]
        if listings:
            return Listing(200, union(listings))
        return there[0] if there else None

    async def _ask(self, head: RequestHead, endpoint: Endpoint) -> Listing | None:
        headers = dict(endpoint.upstream.probe_headers)
        authorization = field_value(head.lines, b"authorization")
        if authorization:
            headers["Authorization"] = authorization.decode("latin-1")
        try:
            async with get(
                self._session,
                f"{endpoint.address}{head.target.decode('ascii')}",
                headers=headers,
                tls=endpoint.tls,
                timeout_s=self.timeout_s,
            ) as response:
                body = await read_whole(response)
                return Listing(response.status, body)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            log.warning(
                "endpoint does not list its models",
                extra={"endpoint": endpoint.state.id, "reason": repr(error)},
            )
            return None


def _decode(listing: Listing) -> dict[str, Any] | None:
    """Return the list, or None where the answer holds none."""
    if listing.status != 200:
        return None
    try:
        decoded = msgspec.json.decode(listing.body)
        if isinstance(decoded, dict) and all(
            isinstance(model["id"], str) for model in decoded["data"]
        ):
            return decoded
    except (msgspec.DecodeError, KeyError, TypeError, RecursionError):
        pass
    return None
