"""No wait lasts for ever: whoever takes or sends nothing more is cut, all others go on."""

import json
import signal
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import trustme
from support import wait
from support.errors import assert_openai_error
from support.gateway import LOOPS, Config, Gateway, Start, config
from support.upstream import Exchange, Script, Stubs, Upstream
from support.wire import Message, message_bytes, request_bytes, response_bytes

TIMEOUTS = {
    "header_s": 0.5,
    "idle_s": 1,
    "body_s": 0.5,
    "response_s": 1,
    "stall_s": 1,
    "drain_s": 2,
}
HEALTH = {"interval_s": 60}
SETTINGS: Config = {"timeouts": TIMEOUTS, "health": HEALTH}

POST_20_MB = request_bytes("POST", "/", [(b"Content-Length", b"20000000")])
# What the kernel takes for a client that reads nothing lies between these, whatever its version.
UNREAD_SIZES = (2_500_000, 4_200_000)


def sized(exchange: Exchange) -> None:
    """Answer with as many bytes as the path says."""
    body = b"x" * int(exchange.request.target[1:])
    exchange.send(response_bytes(body))


def blamed(gateway: Gateway) -> float:
    """How many failures were put down to upstreams."""
    return gateway.metrics().total("ciuicflow_upstream_failures_total")


def clients(gateway: Gateway) -> int:
    return int(gateway.state()["client_connections"])


class TightUpstream(Upstream):
    """A stub whose kernel takes a few kilobytes only while the script does not read."""

    def loosen(self) -> None:
        """Let connections from now on be like others."""
        self.stop_listening()
        super().listen()

    def listen(self) -> None:
        super().listen()
        assert self._listener is not None
        self._listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2304)


@pytest.fixture
def tight() -> Iterator[TightUpstream]:
    stub = TightUpstream()
    with stub:  # mypy: `with ... as` would give the base class
        yield stub


@contextmanager
def stopped(gateway: Gateway) -> Iterator[None]:
    """Let the gateway do nothing for a while, so that what is sent to it comes in one read."""
    gateway.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        gateway.process.send_signal(signal.SIGCONT)


# -- answers that are not taken --------------------------------------------------------------


@pytest.mark.line(10, 22)
def test_an_answer_that_is_still_to_be_taken_leaves_no_deaf_connection(
    gateway: Gateway, upstream: Upstream
) -> None:
    """The last write of an answer may fill the client's buffer: the upstream is free then.

    At which size that happens, the kernel's buffers decide: many are tried. The larger the last
    read is, the likelier: the gateway is stopped while its bytes pile up.
    """
    written = threading.Event()
    tail_bytes = 400_000

    def pile_up(exchange: Exchange) -> None:
        data = response_bytes(b"x" * int(exchange.request.target[1:]))
        exchange.send(data[:-tail_bytes])
        time.sleep(0.01)  # the gateway passes that on
        sender = threading.Thread(target=exchange.send, args=[data[-tail_bytes:]])
        with stopped(gateway):
            sender.start()
            time.sleep(0.01)
        sender.join(5)
        written.set()

    for size in range(*UNREAD_SIZES, 40_000):
        written.clear()
        upstream.script(pile_up)
        with gateway.connect(receive_buffer=8192, timeout_s=5) as slow:
            slow.send(request_bytes("GET", f"/{size}"))
            assert written.wait(5)
            slow.response()
        upstream.script(sized)
        with gateway.connect(timeout_s=5) as other:
            answer = other.exchange("GET", "/5")
            assert (answer.status, answer.body) == (200, b"xxxxx"), size


@pytest.mark.line(1, 10)
@pytest.mark.parametrize("last", ["closing", "pipelined"])
def test_a_client_that_does_not_take_its_answer_is_cut(
    gateway: Gateway, upstream: Upstream, last: str
) -> None:
    """Also where all of the answer is written and only the kernel and the client still hold it."""
    upstream.script(sized)
    before = blamed(gateway)
    with ExitStack() as stack:
        for size in range(*UNREAD_SIZES, 50_000):
            client = stack.enter_context(gateway.connect(receive_buffer=8192))
            if last == "closing":
                client.send(request_bytes("GET", f"/{size}", [(b"Connection", b"close")]))
            else:
                client.send(request_bytes("GET", f"/{size}") + request_bytes("GET", "/300000"))
        wait.until(lambda: len(upstream.requests) >= 20, what="the requests arrive")
        wait.until(lambda: clients(gateway) == 0, 8, "all of them are cut")
        assert gateway.in_flight() == 0
        assert blamed(gateway) == before


@pytest.mark.line(14)
@pytest.mark.parametrize("pieces", ["apart", "with the head"])
@pytest.mark.parametrize(
    "body",
    [
        b"5;a=" + b"b" * 5000 + b"\r\nhello\r\n0\r\n\r\n",
        b"0" * 20 + b"5\r\nhello\r\n0\r\n\r\n",
        b"5\r\nhello\r\n0\r\nX: " + b"y" * 17_000 + b"\r\n\r\n",
    ],
    ids=["long extension", "leading zeros", "large trailer"],
)
def test_chunks_that_cannot_be_taken_apart_end_uncleanly(
    gateway: Gateway, upstream: Upstream, body: bytes, pieces: str
) -> None:
    head = message_bytes(b"HTTP/1.1 200 OK", [(b"Transfer-Encoding", b"chunked")])

    def answer(exchange: Exchange) -> None:
        if pieces == "apart":
            exchange.send(head)
            time.sleep(0.05)
            exchange.send(body)
        else:
            exchange.send(head + body)

    upstream.script(answer)
    with gateway.connect(timeout_s=3) as client:
        client.send(b"GET / HTTP/1.0\r\nHost: a\r\n\r\n")
        client.rest()
        assert client.end == "reset"
    gateway.wait_idle()
    assert "Traceback" not in gateway.log()


# -- uploads ---------------------------------------------------------------------------------


@pytest.mark.line(18, 24)
def test_an_upload_that_goes_on_is_no_upstream_timeout(
    gateway: Gateway, upstream: Upstream
) -> None:
    before = blamed(gateway)
    with gateway.connect() as client:
        client.send(request_bytes("POST", "/", [(b"Content-Length", b"30")]))
        client.drip([b"x"] * 30, 0.06)  # longer than response_s
        assert client.response("POST").status == 200
    assert upstream.request.body == b"x" * 30
    assert blamed(gateway) == before


@pytest.mark.line(22)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_second_try_takes_up_an_upload_that_was_held_back(
    start: Start, tight: TightUpstream, loop: str
) -> None:
    """The pooled connection takes no more, the client is held back, the connection dies."""
    broken = threading.Event()

    def answer(exchange: Exchange) -> None:
        exchange.send(response_bytes())
        if exchange.request.target == b"/first":
            broken.wait(5)  # the next request on this connection is not read
            exchange.reset()

    tight.script(answer)
    gateway = start(config(tight, timeouts={**TIMEOUTS, "response_s": 3}, health=HEALTH), loop=loop)
    body = b"z" * 250_000
    with gateway.connect(timeout_s=6) as client:
        assert client.exchange("GET", "/first").body == b"ok"
        client.send(request_bytes("POST", "/", [(b"Content-Length", b"%d" % len(body))]))
        client.drip([body[at : at + 10_000] for at in range(0, 200_000, 10_000)], 0.01)
        tight.loosen()
        broken.set()
        time.sleep(0.2)
        client.send(body[200_000:])
        assert client.response("POST").status == 200
    assert tight.requests[-1].body == body
    assert gateway.metrics().total("ciuicflow_retries_total") == 1


@pytest.mark.line(16, 18)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_large_pipelined_upload_is_collected(start: Start, stubs: Stubs, loop: str) -> None:
    """More than may be held back comes in one read, while the request before it is answered."""

    def answer(exchange: Exchange) -> None:
        if exchange.request.target == b"/wait":
            answered.wait(10)
        exchange.send(response_bytes())

    upstreams = [stubs(), stubs()]
    for stub in upstreams:
        stub.script(answer)
    entries: list[Config] = [
        {"url": stub.url, "models": [model]} for stub, model in zip(upstreams, "ab", strict=True)
    ]
    timeouts = {**TIMEOUTS, "body_s": 2, "response_s": 5}
    gateway = start(config(*entries, timeouts=timeouts, health=HEALTH), loop=loop)
    answered = threading.Event()
    upload = request_bytes("POST", "/", body=b'{"model":"a","x":"%s"}' % (b"y" * 600_000))
    with gateway.connect(timeout_s=5) as client:
        for _ in range(4):  # the kernel learns that much may come at once
            assert client.exchange("POST", "/", body=b"x" * 4_000_000).status == 200
        client.send(request_bytes("GET", "/wait"))
        wait.until(lambda: any(r.target == b"/wait" for s in upstreams for r in s.requests))
        client.send(upload[:60_000])
        time.sleep(0.05)
        with stopped(gateway):
            sent = client.push(upload[60_000:], 0.2)
        time.sleep(0.05)
        answered.set()
        client.send(upload[60_000 + sent :])
        assert client.response().status == 200
        assert client.response("POST").status == 200


@pytest.mark.line(1, 18)
def test_an_upload_that_is_answered_early_leaves_no_busy_connection(
    start: Start, tight: TightUpstream, loop: str
) -> None:
    """The upstream has answered, reads no more and does not close: what is left is dropped."""
    ask, over = threading.Event(), threading.Event()

    def refuse(exchange: Exchange) -> None:
        ask.wait(5)
        exchange.send(response_bytes(b"no", "413 Content Too Large"))
        over.wait(15)

    tight.script(refuse, head_only=True)
    gateway = start(config(tight, timeouts=TIMEOUTS, health=HEALTH), loop=loop)
    try:
        with gateway.connect() as client:
            client.send(POST_20_MB)
            client.push(b"x" * 1_000_000, 0.1)
            ask.set()
            assert client.response("POST").status == 413
        wait.until(
            lambda: gateway.state()["endpoints"][0]["busy_connections"] == 0,
            4,
            "the upstream connection is given up",
        )
    finally:
        over.set()


@pytest.mark.line(18)
def test_json_of_any_depth_is_answered(start: Start, stubs: Stubs) -> None:
    """Which model it names cannot be told, so any endpoint may judge it."""
    entries: list[Config] = [{"url": stubs().url, "models": [model]} for model in "ab"]
    gateway = start(config(*entries, timeouts=TIMEOUTS, health=HEALTH))
    nested = b"[" * 100_000 + b"]" * 100_000
    with gateway.connect(timeout_s=3) as client:
        for body in (b'{"x":%s}' % nested, b'{"model":%s}' % nested, nested):
            assert client.exchange("POST", "/v1/chat/completions", body=body).status == 200


@pytest.mark.line(17)
def test_an_http_1_0_client_gets_no_continue_while_it_waits(
    gateway: Gateway, upstream: Upstream
) -> None:
    with gateway.connect() as client:
        client.send(b"POST / HTTP/1.0\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n")
        assert client.wait_end(0.4) is None
        assert client.received == b""
        client.send(b"body")
        answer = client.response("POST")
    assert (answer.informational, answer.status) == ([], 200)
    assert upstream.request.body == b"body"


# -- answers with a head that promises what cannot be ----------------------------------------


@pytest.mark.line(15)
def test_a_switch_of_protocols_in_mid_request_is_refused(
    gateway: Gateway, upstream: Upstream
) -> None:
    """Where the tunnel would begin cannot be told before the body is complete."""
    fields = [(b"Connection", b"Upgrade"), (b"Upgrade", b"foo")]

    def switch(exchange: Exchange) -> None:
        exchange.send(message_bytes(b"HTTP/1.1 101 Switching Protocols", fields))
        exchange.peer_closed_after(5)

    upstream.script(switch, head_only=True)
    with gateway.connect() as client:
        client.send(request_bytes("POST", "/", [*fields, (b"Content-Length", b"4")]) + b"ab")
        assert_openai_error(client.response("POST"), 502)
        client.send_ignoring_close(b"cdTUNNEL")
    gateway.wait_idle()
    assert b"TUNNEL" not in upstream.received


@pytest.mark.line(14)
def test_no_content_has_no_transfer_coding(gateway: Gateway, upstream: Upstream) -> None:
    """RFC 9112 section 6.1. A client that believed the field would wait for chunks."""
    coded = [(b"Transfer-Encoding", b"chunked"), (b"X-Kept", b"1")]
    upstream.respond(message_bytes(b"HTTP/1.1 204 No Content", coded))
    with gateway.connect() as client:
        for _ in range(2):
            answer = client.exchange()
            assert (answer.status, answer.get("transfer-encoding")) == (204, None)
            assert answer.get("x-kept") == b"1"
        upstream.respond(response_bytes())
        assert client.exchange().body == b"ok"


# -- lists of models in several segments -----------------------------------------------------


class Lister(Upstream):
    """A stub whose script answers for the list of models too."""

    def _is_probe(self, request: Message) -> bool:
        return request.target == b"/health"


@pytest.mark.line(6)
@pytest.mark.parametrize("cut_at", [0, 20], ids=["behind the head", "in the body"])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_list_of_models_is_read_whole(start: Start, cut_at: int, loop: str) -> None:
    def lister(model: str) -> Script:
        listing = json.dumps({"object": "list", "data": [{"id": model, "object": "model"}]})
        head, _, body = response_bytes(listing.encode()).partition(b"\r\n\r\n")

        def answer(exchange: Exchange) -> None:
            if exchange.request.target != b"/v1/models":
                exchange.send(response_bytes(model.encode()))
                return
            exchange.send(head + b"\r\n\r\n" + body[:cut_at])
            time.sleep(0.05)
            exchange.send(body[cut_at:])

        return answer

    with Lister() as one, Lister() as other:
        one.script(lister("ma"))
        other.script(lister("mb"))
        gateway = start(config(one, other, timeouts=TIMEOUTS, health=HEALTH), loop=loop)
        assert [e["models"] for e in gateway.state()["endpoints"]] == [["ma"], ["mb"]]
        for model in (b"ma", b"mb", b"mb", b"ma"):
            answer = gateway.fetch("POST", "/v1/x", body=b'{"model":"%s"}' % model)
            assert (answer.status, answer.body) == (200, model)
        listed = json.loads(gateway.fetch("GET", "/v1/models").body)
        assert [entry["id"] for entry in listed["data"]] == ["ma", "mb"]


# -- TLS -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def tls(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The gateway's section."""
    certificate = authority.issue_cert("127.0.0.1", "localhost")
    file = tmp_path_factory.mktemp("pki") / "both.pem"
    certificate.private_key_and_cert_chain_pem.write_to_path(file)
    return {"cert_file": str(file), "key_file": str(file)}


@pytest.mark.line(21)
@pytest.mark.parametrize("loop", LOOPS)
def test_silent_handshakes_are_cut(
    start: Start, stubs: Stubs, tls: dict[str, str], loop: str
) -> None:
    gateway = start(config(stubs(), tls=tls, timeouts=TIMEOUTS), loop=loop)
    with gateway.connect() as silent, gateway.connect() as slow:
        slow.send(b"\x16\x03\x01")  # the first bytes of a record
        assert silent.wait_end(3) is not None
        assert slow.wait_end(1) is not None


@pytest.mark.line(4, 15)
@pytest.mark.parametrize("loop", LOOPS)
def test_nothing_follows_an_answer_that_broke_off(
    start: Start, stubs: Stubs, tls: dict[str, str], authority: trustme.CA, loop: str
) -> None:
    """TLS leaves a moment between the broken end and the close: no request is taken in it."""
    received = threading.Event()
    upstream = stubs()

    def part(exchange: Exchange) -> None:
        if exchange.request.target == b"/two":
            exchange.send(response_bytes(b"SECOND"))
            return
        exchange.send(b"HTTP/1.1 200 OK\r\n\r\npart")
        received.wait(5)
        exchange.reset()

    context = ssl.create_default_context()
    authority.configure_trust(context)
    upstream.script(part)
    gateway = start(config(upstream, tls=tls, timeouts=TIMEOUTS), loop=loop)
    for _ in range(5):
        received.clear()
        with gateway.connect(tls=context, timeout_s=3) as client:
            client.send(request_bytes("GET", "/one"))
            client.until(b"part")
            received.set()
            time.sleep(0.01)
            client.send_ignoring_close(request_bytes("GET", "/two"))
            try:
                assert client.rest() == b""
            except ssl.SSLError:
                pass  # cut in the middle of a record, as it must be
            assert client.end != "fin"
    assert [request.target for request in upstream.requests] == [b"/one"] * 5
