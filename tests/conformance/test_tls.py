"""TLS on either side: the same behaviour, and no fall back to anything weaker."""

import hashlib
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme
from support import wait
from support.errors import assert_openai_error
from support.gateway import Gateway, Start, config, run
from support.raw import Client, fetch
from support.upstream import Exchange, Stubs, Upstream
from support.wire import (
    LAST_CHUNK,
    SSE_HEAD,
    chunk,
    message_bytes,
    request_bytes,
    response_bytes,
)


@dataclass
class Pki:
    """A certificate authority, a certificate of it, and their files."""

    authority: trustme.CA
    ca_file: str
    cert_file: str
    key_file: str

    def server(self, *names: str) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.authority.issue_cert(*(names or ("127.0.0.1", "localhost"))).configure_cert(context)
        return context

    def client(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.ca_file)


def make_pki(directory: Path) -> Pki:
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1", "localhost")
    files = [str(directory / name) for name in ("ca.pem", "cert.pem", "key.pem")]
    authority.cert_pem.write_to_path(files[0])
    Path(files[1]).write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
    certificate.private_key_pem.write_to_path(files[2])
    return Pki(authority, *files)


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return make_pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module")
def module_stub(pki: Pki) -> Iterator[Upstream]:
    """In this module the stub speaks TLS."""
    with Upstream(tls=pki.server()) as stub:
        yield stub


@pytest.fixture(scope="module")
def module_gateway(
    module_stub: Upstream, pki: Pki, loop: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    """TLS on both sides."""
    settings = config(
        {"url": module_stub.url, "ca_file": pki.ca_file},
        tls={"cert_file": pki.cert_file, "key_file": pki.key_file},
        timeouts={"header_s": 1},
    )
    with Gateway(settings, tmp_path_factory.mktemp("gateway"), loop=loop) as gateway:
        yield gateway


@pytest.fixture
def client(gateway: Gateway, pki: Pki) -> Iterator[Client]:
    with gateway.connect(tls=pki.client()) as client:
        yield client


def test_a_large_body_passes_unchanged(client: Client, upstream: Upstream) -> None:
    body = bytes(range(251)) * 20_000
    assert client.exchange("POST", "/", body=body).body == b"ok"
    assert hashlib.sha256(upstream.request.body).digest() == hashlib.sha256(body).digest()


def test_connections_are_reused(client: Client, upstream: Upstream) -> None:
    for _ in range(5):
        assert client.exchange("POST", "/", body=b"x" * 1000).body == b"ok"
    assert len(upstream.connections) == 1


def test_only_http_1_1_is_negotiated(gateway: Gateway, pki: Pki) -> None:
    for offered, chosen in ((["h2", "http/1.1"], "http/1.1"), (["http/1.1"], "http/1.1")):
        context = pki.client()
        context.set_alpn_protocols(offered)
        with gateway.connect(tls=context) as client:
            assert isinstance(client.sock, ssl.SSLSocket)
            assert client.sock.selected_alpn_protocol() == chosen
            assert client.exchange().status == 200


def test_the_client_can_verify_the_gateway(gateway: Gateway) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        gateway.connect(tls=ssl.create_default_context())


@pytest.mark.line(5)
def test_events_pass_at_once(client: Client, upstream: Upstream) -> None:
    def stream(exchange: Exchange) -> None:
        exchange.send(SSE_HEAD)
        for number in range(10):
            event = b"data: %d\n\n" % number
            exchange.send(chunk(event))
            wait.until(lambda event=event: event in client.received)  # type: ignore[misc]  # loop
        exchange.send(LAST_CHUNK)

    upstream.script(stream)
    client.send(request_bytes())
    assert client.response().complete


@pytest.mark.line(4)
@pytest.mark.parametrize("end", [Exchange.reset, Exchange.close], ids=["reset", "no close_notify"])
def test_a_break_of_the_upstream_is_an_unclean_end(
    client: Client, upstream: Upstream, end: object
) -> None:
    def break_off(exchange: Exchange) -> None:
        exchange.send(SSE_HEAD + chunk(b"data: 1\n\n"))
        wait.until(lambda: b"data: 1" in client.received)
        assert callable(end)
        end(exchange)

    upstream.script(break_off)
    client.send(request_bytes())
    answer = client.response()
    assert (answer.complete, answer.body) == (False, b"data: 1\n\n")


@pytest.mark.line(4)
def test_an_upstream_that_ends_without_close_notify_was_cut(
    client: Client, upstream: Upstream
) -> None:
    """RFC 9112 section 9.8: a body that ends with the connection is incomplete then."""

    def until_close(exchange: Exchange) -> None:
        exchange.send(message_bytes(b"HTTP/1.1 200 OK", [], b"half of it"))
        exchange.close()  # a FIN under TLS

    upstream.script(until_close)
    client.send(request_bytes())
    assert not client.response().complete


@pytest.mark.line(1)
@pytest.mark.parametrize("leave", [Client.close, Client.abort], ids=["close", "abort"])
def test_a_client_that_leaves_is_noticed(
    gateway: Gateway, upstream: Upstream, pki: Pki, leave: object
) -> None:
    def hold(exchange: Exchange) -> None:
        exchange.send(SSE_HEAD + chunk(b"data: 1\n\n"))
        exchange.peer_closed_after()

    upstream.script(hold)
    client = gateway.connect(tls=pki.client())
    client.send(request_bytes())
    client.until(b"data: 1\n\n")
    assert callable(leave)
    leave(client)
    wait.until(lambda: upstream.open_connections() == 0)
    gateway.wait_idle()


@pytest.mark.line(10)
def test_a_slow_reader_costs_little_memory(gateway: Gateway, upstream: Upstream, pki: Pki) -> None:
    moved = [0]

    def flood(exchange: Exchange) -> None:
        exchange.send(message_bytes(b"HTTP/1.1 200 OK", [(b"Content-Length", b"64000000")]))
        for _ in range(640):
            exchange.send(b"x" * 100_000)
            moved[0] += 100_000

    upstream.script(flood)
    with gateway.connect(tls=pki.client(), receive_buffer=65536, timeout_s=20) as client:
        before = gateway.rss_bytes()
        client.send(request_bytes())
        client.until(b"\r\n\r\n")
        wait.until(lambda: moved[0] > 0 and wait.holds(lambda seen=moved[0]: moved[0] == seen, 0.3))  # type: ignore[misc]
        assert moved[0] < 60_000_000
        assert gateway.rss_bytes() - before < 10_000_000
        assert client.digest(64_000_000) == hashlib.sha256(b"x" * 64_000_000).digest()


@pytest.mark.line(14)
def test_a_clean_end_is_a_clean_end(client: Client, upstream: Upstream) -> None:
    """With close_notify: otherwise the client must take the answer for cut off."""
    client.send(b"GET / HTTP/1.0\r\n\r\n")
    assert client.response().body == b"ok"
    client.rest()
    assert client.end == "fin"


@pytest.mark.line(21)
def test_plain_http_and_garbage_get_nowhere(gateway: Gateway, upstream: Upstream) -> None:
    for raw in (request_bytes(), b"\x16\x03\x01\xff\xff" + b"x" * 100, b"\x00" * 50):
        with Client(gateway.listen, timeout_s=5) as plain:
            plain.send_ignoring_close(raw)
            assert plain.wait_end(8) is not None
            assert b"200" not in plain.received[:20]
    assert upstream.requests == []


@pytest.mark.line(21)
def test_a_handshake_that_never_comes_does_not_block_others(
    gateway: Gateway, upstream: Upstream, pki: Pki
) -> None:
    silent = [socket.create_connection(gateway.listen) for _ in range(20)]
    started = time.monotonic()
    assert fetch(gateway.listen, tls=pki.client()).status == 200
    assert time.monotonic() - started < 2
    for sock in silent:
        sock.close()


# -- the upstream's certificate --------------------------------------------------------------------


@pytest.mark.parametrize("case", ["unknown authority", "wrong name"])
def test_an_upstream_that_cannot_be_verified_gets_no_request(
    start: Start, stubs: Stubs, pki: Pki, case: str
) -> None:
    stub = stubs(tls=pki.server() if case == "unknown authority" else pki.server("other.example"))
    entry = {"url": stub.url}
    if case == "wrong name":
        entry["ca_file"] = pki.ca_file
    gateway = start(config(entry))
    assert_openai_error(gateway.fetch("POST", "/", body=b"secret"), 503)
    assert stub.requests == []
    unverified = start(config({**entry, "verify": False}))
    assert unverified.fetch("POST", "/", body=b"secret").status == 200


@pytest.mark.line(13)
def test_an_https_upstream_is_called_by_its_own_name(start: Start, stubs: Stubs, pki: Pki) -> None:
    names: list[str | None] = []
    context = pki.server()
    context.sni_callback = lambda _sock, name, _context: names.append(name)
    stub = stubs(tls=context)
    url = f"https://localhost:{stub.port}"
    start(config({"url": url, "ca_file": pki.ca_file})).fetch()
    start(config({"url": url, "ca_file": pki.ca_file, "host": "preserve"})).fetch()
    hosts = [request.get("host") for request in stub.requests]
    assert hosts == [f"localhost:{stub.port}".encode(), b"test.example"]
    assert set(names) == {"localhost"}


def test_a_plain_upstream_behind_https_is_a_503_and_no_hang(start: Start, stubs: Stubs) -> None:
    stub = stubs()
    gateway = start(config(f"https://127.0.0.1:{stub.port}", timeouts={"connect_s": 1}))
    assert_openai_error(gateway.fetch(), 503)
    assert stub.requests == []


@pytest.mark.line(3)
def test_a_handshake_that_hangs_is_bounded(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"https://127.0.0.1:{mute.getsockname()[1]}"
        gateway = start(config(url, timeouts={"connect_s": 0.5}))
        started = time.monotonic()
        assert_openai_error(gateway.fetch(), 503)
        assert time.monotonic() - started < 4


# -- the gateway's certificate ---------------------------------------------------------------------


@pytest.mark.parametrize("case", ["missing", "no PEM", "another key"])
def test_a_bad_certificate_is_exit_1(tmp_path: Path, pki: Pki, case: str) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (tmp_path / "empty.pem").write_text("nothing\n")
    cert, key = {
        "missing": (str(tmp_path / "nowhere.pem"), pki.key_file),
        "no PEM": (str(tmp_path / "empty.pem"), pki.key_file),
        "another key": (pki.cert_file, make_pki(other).key_file),
    }[case]
    listen = [f"{name}: 127.0.0.1:0\n" for name in ("listen", "admin")]
    file = tmp_path / "c.yaml"
    file.write_text(
        "".join(listen)
        + "upstreams: [{url: http://127.0.0.1:1}]\n"
        + f"tls: {{cert_file: {cert}, key_file: {key}}}\n"
    )
    result = run("serve", "--config", str(file))
    assert result.returncode == 1, result.stderr
    assert cert in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.line(26)
def test_a_renewed_certificate_is_taken_up_by_a_reload(
    start: Start, stubs: Stubs, tmp_path: Path
) -> None:
    stub = stubs()
    stub.respond(response_bytes())
    old = make_pki(tmp_path)
    settings = config(stub, tls={"cert_file": old.cert_file, "key_file": old.key_file})
    gateway = start(settings)
    assert fetch(gateway.listen, tls=old.client()).status == 200
    new = make_pki(tmp_path)  # writes the same files
    gateway.reload(settings)
    wait.until(lambda: gateway.metrics().total("ciuicflow_config_reloads_total", result="success"))
    assert fetch(gateway.listen, tls=new.client()).status == 200
