"""A config that changes under a running gateway."""

import threading
import time

import pytest
from support import bad_configs, wait
from support.gateway import Config, Gateway, Start, config
from support.upstream import Exchange, Stubs, Upstream, hold
from support.wire import LAST_CHUNK, SSE_HEAD, chunk, request_bytes, response_bytes


def reloads(gateway: Gateway, result: str) -> float:
    return gateway.metrics().total("ciuicflow_config_reloads_total", result=result)


def reload_and_wait(gateway: Gateway, settings: Config | str, result: str = "success") -> None:
    before = reloads(gateway, result)
    gateway.reload(settings)
    wait.until(lambda: reloads(gateway, result) > before, what=f"a reload: {result}")


@pytest.mark.line(26)
@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_a_new_upstream_takes_over_without_closing_client_connections(
    start: Start, stubs: Stubs, loop: str
) -> None:
    old, new = stubs(), stubs()
    old.respond(response_bytes(b"old"))
    new.respond(response_bytes(b"new"))
    gateway = start(config(old), loop=loop)
    with gateway.connect() as client:
        assert client.exchange().body == b"old"
        reload_and_wait(gateway, config(new))
        assert client.exchange().body == b"new"
    wait.until(lambda: old.open_connections() == 0, what="connections to the old one close")
    assert gateway.metrics().find("ciuicflow_endpoint_up", endpoint=old.name) == []


@pytest.mark.line(26)
def test_a_changed_file_is_noticed_without_a_signal(start: Start, stubs: Stubs) -> None:
    old, new = stubs(), stubs()
    gateway = start(config(old))
    gateway.write_config(config(new))
    wait.until(lambda: gateway.fetch().status == 200 and new.requests, 10)


@pytest.mark.line(26)
def test_a_bad_file_changes_nothing_and_the_next_good_one_applies(
    start: Start, stubs: Stubs
) -> None:
    old, new = stubs(), stubs()
    old.respond(response_bytes(b"old"))
    new.respond(response_bytes(b"new"))
    gateway = start(config(old))
    for case in bad_configs.BAD:
        reload_and_wait(gateway, bad_configs.text(case), "failure")
        assert gateway.fetch().body == b"old"
    before = reloads(gateway, "failure")
    gateway.config_file.unlink()
    gateway.reload()
    wait.until(lambda: reloads(gateway, "failure") > before, what="a missing file is noticed")
    assert gateway.fetch().body == b"old"
    assert gateway.admin_get("/readyz").status == 200
    reload_and_wait(gateway, config(new))
    assert gateway.fetch().body == b"new"


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the log says of each bad file."""
    said = {}
    settings = config("http://127.0.0.1:1")
    with Gateway(settings, tmp_path_factory.mktemp("gateway")) as gateway:
        for case in bad_configs.BAD:
            before = len(gateway.log())
            gateway.reload(bad_configs.text(case))
            wait.until(lambda: "not reloaded" in gateway.log()[before:], what=case)  # noqa: B023
            said[case] = gateway.log()[before:]
    return said


@pytest.mark.line(26)
@pytest.mark.parametrize("case", bad_configs.BAD)
def test_the_log_says_what_is_wrong_with_a_bad_file(refusals: dict[str, str], case: str) -> None:
    assert bad_configs.BAD[case][1] in refusals[case]


@pytest.mark.line(26)
def test_what_cannot_change_without_a_restart_is_refused(start: Start, stubs: Stubs) -> None:
    stub = stubs()
    gateway = start(config(stub))
    reload_and_wait(gateway, {**config(stub), "listen": "127.0.0.1:1"}, "failure")
    assert gateway.fetch().status == 200


@pytest.mark.line(26)
def test_new_limits_apply(start: Start, stubs: Stubs) -> None:
    stub = stubs()
    gateway = start(config(stub))
    assert gateway.fetch("POST", "/", body=b"x" * 5000).status == 200
    reload_and_wait(gateway, config(stub, limits={"body_bytes": 2000}))
    assert gateway.fetch("POST", "/", body=b"x" * 5000).status == 413
    reload_and_wait(gateway, config(stub, timeouts={"response_s": 0.3}))
    stub.script(hold)
    assert gateway.fetch("POST", "/", body=b"x" * 5000).status == 504


@pytest.mark.line(26, 27)
@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
@pytest.mark.parametrize("change", ["removed", "renamed", "other models"])
def test_a_stream_outlives_its_endpoint(start: Start, stubs: Stubs, change: str, loop: str) -> None:
    def stream(exchange: Exchange) -> None:
        exchange.send(SSE_HEAD + chunk(b"data: 1\n\n"))
        wait.until(lambda: finish, 20)
        exchange.send(chunk(b"data: 2\n\n") + LAST_CHUNK)

    finish: list[bool] = []
    old, new = stubs(), stubs()
    old.script(stream)
    gateway = start(config(old), loop=loop)
    with gateway.connect() as client:
        client.send(request_bytes())
        client.until(b"data: 1\n\n")
        entries: dict[str, Upstream | Config] = {
            "removed": new,
            "renamed": {"url": old.url, "name": "renamed"},
            "other models": {"url": old.url, "models": ["other"]},
        }
        reload_and_wait(gateway, config(entries[change]))
        assert old.open_connections() == 1
        finish.append(True)
        assert b"data: 2\n\n" in client.until(LAST_CHUNK)
        assert client.exchange().status == 200  # and its connection goes on
    gateway.wait_idle()


@pytest.mark.line(26)
@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_a_hundred_reloads_under_load_cost_no_request(
    start: Start, stubs: Stubs, loop: str
) -> None:
    def stream(exchange: Exchange) -> None:
        exchange.send(SSE_HEAD)
        for number in range(5):
            exchange.send(chunk(b"data: %d\n\n" % number))
            time.sleep(0.005)
        exchange.send(LAST_CHUNK)

    def load() -> None:
        with gateway.connect() as client:
            while not stop:
                answer = client.exchange("POST", "/", body=b"{}")
                results.append((answer.status, answer.complete, answer.body))

    both = [stubs(), stubs(), stubs()]
    for stub in both:
        stub.script(stream)
    gateway = start(config(*both[:2]), loop=loop)
    descriptors = gateway.fd_count()
    stop: list[bool] = []
    results: list[tuple[int, bool, bytes]] = []
    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number in range(100):
        reload_and_wait(gateway, config(both[number % 3], both[(number + 1) % 3]))
    stop.append(True)
    for thread in threads:
        thread.join(20)
    whole = b"".join(b"data: %d\n\n" % number for number in range(5))
    assert len(results) > 50
    assert set(results) == {(200, True, whole)}
    gateway.wait_idle()
    wait.until(lambda: gateway.fd_count() <= descriptors + 12, what="descriptors stay bounded")
