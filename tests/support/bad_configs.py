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
    "priority of an engine not named": (
        {"upstreams": [{**U, "send_priority": True}]},
        "$.upstreams[0].send_priority",
    ),
    "priority of an engine without": (
        {"upstreams": [{**U, "engine": "llamacpp", "send_priority": True}]},
        "$.upstreams[0].send_priority",
    ),
    "peer that is no network": ({"upstreams": [U], "trusted_peers": ["x"]}, "$.trusted_peers[0]"),
    "bypass in no tier": ({"upstreams": [U], "flow": {"bypass_tier": "x"}}, "$.flow.bypass_tier"),
    "tenant in no tier": (
        {"upstreams": [U], "flow": {"tenants": [{"name": "a", "keys_sha256": [], "tiers": ["x"]}]}},
        "$.flow.tenants[0].tiers",
    ),
    "key of two tenants": (
        {
            "upstreams": [U],
            "flow": {"tenants": [{"name": name, "keys_sha256": ["0" * 64]} for name in "ab"]},
        },
        "$.flow.tenants[1].keys_sha256",
    ),
    "key that is not hashed": (
        {"upstreams": [U], "flow": {"tenants": [{"name": "a", "keys_sha256": ["sk-1"]}]}},
        "$.flow.tenants[0].keys_sha256[0]",
    ),
    "floors above everything": (
        {
            "upstreams": [U],
            "flow": {
                "default_tier": "a",
                "tiers": [
                    {
                        "name": name,
                        "rank": rank,
                        "floor": 0.6,
                        "ttft_target_s": 1,
                        "itl_target_s": 1,
                        "max_wait_s": 1,
                    }
                    for rank, name in enumerate("ab")
                ],
            },
        },
        "$.flow",
    ),
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
