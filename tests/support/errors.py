"""The shape of the errors that the gateway makes itself."""

from __future__ import annotations

import json
from typing import Any

from support.wire import Message


def assert_openai_error(answer: Message, status: int) -> dict[str, Any]:
    """Insist on `{"error": {message, type, param, code}}`; return the inner object."""
    assert answer.status == status
    assert (answer.get("content-type") or b"").startswith(b"application/json")
    document = json.loads(answer.body)
    assert set(document) == {"error"}
    error: dict[str, Any] = document["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    return error
