"""Config files that must be refused, and the words that the refusal must contain."""

from __future__ import annotations

from typing import Any

import yaml

U = {"url": "http://127.0.0.1:8000"}

BAD: dict[str, tuple[Any, str]] = {
    "no upstreams": ({}, "upstreams"),
    "empty upstreams": ({"upstreams": []}, "$.upstreams"),
    "upstreams of a wrong type": ({"upstreams": "http://a"}, "$.upstreams"),
    "no url": ({"upstreams": [{"name": "a"}]}, "$.upstreams[0]"),
    "second url is none": ({"upstreams": [U, {"url": "nonsense"}]}, "$.upstreams[1]"),
    "other scheme": ({"upstreams": [{"url": "ftp://127.0.0.1"}]}, "$.upstreams[0]"),
    "port too high": ({"upstreams": [{"url": "http://127.0.0.1:99999"}]}, "$.upstreams[0]"),
    "unknown key": ({"upstreams": [U], "upstream": 1}, "upstream"),
    "unknown inner key": ({"upstreams": [U], "limits": {"bodybytes": 1}}, "$.limits"),
    "word for a number": ({"upstreams": [U], "limits": {"uri_bytes": "x"}}, "$.limits.uri_bytes"),
    "negative time": ({"upstreams": [U], "timeouts": {"idle_s": -1}}, "$.timeouts.idle_s"),
    "time is not a number": (
        {"upstreams": [U], "timeouts": {"idle_s": float("nan")}},
        "$.timeouts.idle_s",
    ),
    "endless time": (
        {"upstreams": [U], "timeouts": {"stall_s": float("inf")}},
        "$.timeouts.stall_s",
    ),
    "zero threshold": ({"upstreams": [U], "health": {"fail_threshold": 0}}, "$.health"),
    "health path without a slash": ({"upstreams": [U], "health": {"path": "x"}}, "$.health.path"),
    "health path that injects": (
        {"upstreams": [U], "health": {"path": "/a\r\nX: 1"}},
        "$.health.path",
    ),
    "unknown routing": ({"upstreams": [U], "routing": "random"}, "$.routing"),
    "unknown log format": ({"upstreams": [U], "log": {"format": "xml"}}, "$.log.format"),
    "listen without a port": ({"upstreams": [U], "listen": "127.0.0.1"}, "listen"),
    "listen of a wrong type": ({"upstreams": [U], "listen": 8080}, "$.listen"),
    "half of tls": ({"upstreams": [U], "tls": {"cert_file": "a.pem"}}, "$.tls"),
    "two of one name": ({"upstreams": [{**U, "name": "a"}, {**U, "name": "a"}]}, "upstreams"),
    "a list": ([1, 2], "mapping"),
    "not YAML": ("{upstreams: [", "YAML"),
    "tab in YAML": ("upstreams:\n\t- url: http://a", "YAML"),
    "python object in YAML": ("!!python/object/apply:os.system ['true']", "YAML"),
    "no text": ("\x00\x01\x02", "YAML"),
    "empty": ("", "upstreams"),
}


def text(case: str) -> str:
    """The file of a case."""
    content = BAD[case][0]
    return content if isinstance(content, str) else yaml.safe_dump(content)
