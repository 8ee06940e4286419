"""The configuration: what is wrong is named with its path."""

from pathlib import Path
from typing import Any

import pytest

from ciuicflow.config import Address, ServerTls, Upstream, UpstreamUrl, decode, load
from ciuicflow.errors import ConfigError, StartError

URL = {"url": "http://127.0.0.1:8000"}

WRONG: dict[str, tuple[Any, str]] = {
    "not a mapping": ([], "$"),
    "no upstreams": ({}, "upstreams"),
    "empty upstreams": ({"upstreams": []}, "$.upstreams"),
    "unknown key": ({"upstreams": [URL], "listn": "x"}, "listn"),
    "unknown nested key": ({"upstreams": [URL], "limits": {"body": 1}}, "$.limits"),
    "wrong type": ({"upstreams": [URL], "timeouts": {"idle_s": "long"}}, "$.timeouts.idle_s"),
    "negative": ({"upstreams": [URL], "timeouts": {"idle_s": -1}}, "$.timeouts.idle_s"),
    "no scheme": ({"upstreams": [{"url": "127.0.0.1:8000"}]}, "$.upstreams[0].url"),
    "ftp": ({"upstreams": [URL, {"url": "ftp://h"}]}, "$.upstreams[1].url"),
    "no host": ({"upstreams": [{"url": "http://"}]}, "$.upstreams[0].url"),
    "user in URL": ({"upstreams": [{"url": "http://u:p@h"}]}, "$.upstreams[0].url"),
    "query in URL": ({"upstreams": [{"url": "http://h/?q"}]}, "$.upstreams[0].url"),
    "port too high": ({"upstreams": [{"url": "http://h:99999"}]}, "$.upstreams[0].url"),
    "space in URL": ({"upstreams": [{"url": "http://h/a b"}]}, "$.upstreams[0].url"),
    "same name twice": ({"upstreams": [URL, URL]}, "$.upstreams[1].name"),
    "itself": ({"upstreams": [URL], "listen": "127.0.0.1:8000"}, "$.upstreams[0].url"),
    "listen without port": ({"upstreams": [URL], "listen": "127.0.0.1"}, "$.listen"),
    "listen and admin": ({"upstreams": [URL], "listen": "h:1", "admin": "h:1"}, "$.admin"),
    "bare IPv6": ({"upstreams": [URL], "admin": "::1:90"}, "$.admin"),
    "unknown policy": ({"upstreams": [URL], "routing": "best"}, "$.routing"),
    "header injection": (
        {"upstreams": [{**URL, "probe_headers": {"X": "a\r\nb"}}]},
        "$.upstreams[0].probe_headers",
    ),
    "health path": ({"upstreams": [URL], "health": {"path": "health"}}, "$.health.path"),
}


@pytest.mark.parametrize(("data", "path"), WRONG.values(), ids=WRONG)
def test_a_wrong_value_is_refused_with_its_path(data: Any, path: str) -> None:
    with pytest.raises(ConfigError, match=r"\$") as caught:
        decode(data)
    assert path in str(caught.value)


def test_one_upstream_is_enough() -> None:
    config = decode({"upstreams": [URL]})
    assert (config.listen, config.admin) == ("127.0.0.1:8080", "127.0.0.1:9090")


def test_flags_override_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("upstreams: [{url: http://a}]\nlisten: 127.0.0.1:1\nrouting: round_robin\n")
    config = load(file, {"listen": "127.0.0.1:2", "upstreams": [{"url": "http://b"}]})
    assert (config.listen, config.routing) == ("127.0.0.1:2", "round_robin")
    assert [upstream.url for upstream in config.upstreams] == ["http://b"]


@pytest.mark.parametrize("text", ["a: [", "\x00", "just text", ""])
def test_a_file_that_is_no_mapping_is_refused_by_name(tmp_path: Path, text: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"c\.yaml"):
        load(file, {})


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        load(tmp_path / "nowhere", {})


@pytest.mark.parametrize("text", ["127.0.0.1:0", "[::1]:80", "localhost:65535"])
def test_addresses_read_back_as_written(text: str) -> None:
    assert str(Address.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "authority", "prefix"),
    [
        ("http://h", "h", ""),
        ("http://h:80/", "h", ""),
        ("https://h:443/beta/", "h", "/beta"),
        ("https://h:80", "h:80", ""),
        ("http://[::1]:8000/v1", "[::1]:8000", "/v1"),
    ],
)
def test_urls_are_taken_apart(text: str, authority: str, prefix: str) -> None:
    url = UpstreamUrl.parse(text)
    assert (url.authority, url.prefix) == (authority, prefix)


def test_only_https_upstreams_are_called_by_their_own_name_unless_configured() -> None:
    assert not Upstream(url="http://h").own_host
    assert Upstream(url="https://h").own_host
    assert Upstream(url="http://h", host="upstream").own_host
    assert not Upstream(url="https://h", host="preserve").own_host


@pytest.mark.parametrize(
    "text",
    ["listen: 2024-13-45", "x: " + "[" * 700 + "]" * 700],
    ids=["a date that is none", "nested too deep"],
)
def test_what_the_yaml_parser_stumbles_over_is_refused_by_name(tmp_path: Path, text: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("upstreams: [{url: http://a}]\n" + text)
    with pytest.raises(ConfigError, match=r"c\.yaml"):
        load(file, {})


def test_a_file_name_that_cannot_be_one_is_refused() -> None:
    upstream = Upstream(url="https://h", ca_file="a\0b")
    with pytest.raises(StartError, match="ca_file"):
        upstream.tls_context()
    with pytest.raises(StartError, match="certificate"):
        ServerTls(cert_file="a\0b", key_file="a\0b").context()


U = {"url": "http://h"}


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"upstreams": [U], "routing": "random"}, "power_of_two"),
        ({"upstreams": [U, {**U, "engine": "vlm"}]}, "vllm"),
        ({"upstreams": [U], "log": {"format": "xml"}}, "json"),
        ({"upstreams": [U], "flow": {"bypas_tier": "gold"}}, "bypass_tier"),
        ({"upstreams": [U], "flow": {"tiers": [{"nam": "gold"}]}}, "ttft_target_s"),
        ({"upstreams": [U], "flow": {"unknown_keys": {"acept": True}}}, "accept"),
        ({"upstreams": [U], "rooting": "round_robin"}, "routing"),
    ],
)
def test_a_wrong_word_is_refused_with_the_words_that_may_stand_there(
    data: dict[str, object], expected: str
) -> None:
    with pytest.raises(ConfigError, match=rf"expected .*\b{expected}\b"):
        decode(data)
