"""Request targets: passed on untouched, and never a way to anywhere but the upstream."""

import pytest
from support.gateway import Gateway
from support.upstream import Upstream
from support.wire import message_bytes

UNTOUCHED = [
    "/",
    "/v1/chat/completions",
    "/chat/completions?stream=true&x=%20y+z&empty=&&=",
    "//double//slash",
    "/a/../b/./c",
    "/%2e%2e/%2Fencoded%00",
    "/semi;colon=1/comma,(paren)'quote'!$&*+=:@~",
    "/?q=http://other.example/",
    "/http://other.example:80/",
    "/beta/completions?",
    "/long/" + "x" * 8000,
]


@pytest.mark.line(13)
@pytest.mark.parametrize("target", UNTOUCHED, ids=lambda target: target[:32])
def test_a_target_is_passed_on_untouched(gateway: Gateway, upstream: Upstream, target: str) -> None:
    assert gateway.fetch("GET", target).status == 200
    assert upstream.request.target == target.encode()


@pytest.mark.line(13, 20)
def test_options_asterisk_is_forwarded(gateway: Gateway, upstream: Upstream) -> None:
    assert gateway.fetch("OPTIONS", "*").status == 200
    assert upstream.request.start == b"OPTIONS * HTTP/1.1"


def own_authorities(gateway: Gateway) -> dict[str, str]:
    return {
        "admin": f"127.0.0.1:{gateway.admin[1]}",
        "admin by name": f"localhost:{gateway.admin[1]}",
        "itself": f"127.0.0.1:{gateway.listen[1]}",
        "elsewhere": "127.0.0.1:1",
        "no port": "other.example",
    }


@pytest.mark.line(15)
@pytest.mark.parametrize("where", ["admin", "admin by name", "itself", "elsewhere", "no port"])
@pytest.mark.parametrize("scheme", ["http", "https", "HTTP"])
def test_absolute_form_goes_to_the_upstream_or_nowhere(
    gateway: Gateway, upstream: Upstream, where: str, scheme: str
) -> None:
    """RFC 9112 section 3.2.2: origin servers accept it; its authority replaces Host."""
    authority = own_authorities(gateway)[where]
    answer = gateway.fetch("GET", f"{scheme}://{authority}/metrics?x=1")
    assert b"ciuicflow_requests_total" not in answer.body
    if answer.status == 200:
        assert upstream.request.target == b"/metrics?x=1"
        assert upstream.request.all("host") == [authority.encode()]
    else:
        assert answer.status == 400
        assert upstream.requests == []


@pytest.mark.line(15)
@pytest.mark.parametrize("where", ["admin", "itself", "elsewhere"])
def test_host_chooses_nothing(gateway: Gateway, upstream: Upstream, where: str) -> None:
    authority = own_authorities(gateway)[where].encode()
    with gateway.connect() as client:
        client.send(message_bytes(b"GET /metrics HTTP/1.1", [(b"Host", authority)]))
        assert client.response().body == b"ok"
    assert upstream.request.all("host") == [authority]  # preserved: the default for http upstreams


@pytest.mark.line(15)
@pytest.mark.parametrize("where", ["admin", "itself", "elsewhere", "no port"])
def test_connect_opens_no_tunnel(gateway: Gateway, upstream: Upstream, where: str) -> None:
    authority = own_authorities(gateway)[where]
    if where == "no port":
        authority += ":443"
    with gateway.connect() as client:
        client.send(f"CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n".encode())
        answer = client.response("CONNECT")
    assert 400 <= answer.status < 600
    assert upstream.requests == []


@pytest.mark.line(15)
@pytest.mark.parametrize("path", ["/metrics", "/healthz", "/readyz", "/flow/state"])
def test_admin_paths_on_the_data_port_are_the_upstreams(
    gateway: Gateway, upstream: Upstream, path: str
) -> None:
    assert gateway.fetch("GET", path).body == b"ok"
    assert upstream.request.target == path.encode()
