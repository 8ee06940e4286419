"""A reload applies as a whole or not at all, and whatever the file holds, the next one counts."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from support import wait
from support.gateway import LOOPS, Config, Gateway, Start, config, run
from support.upstream import Stubs

# Files that break more than a parser's own rules, and what must be said of them.
ODD: dict[str, tuple[str, str]] = {
    "a date that is none": ("{good}listen: 2024-13-45\n", "YAML"),
    "nested too deep": ("{good}x: " + "[" * 700 + "]" * 700, "YAML"),
    "zero in a file name": ('{good}  - {{url: "https://h", ca_file: "a\\0b"}}\n', "ca_file"),
}


def odd_text(case: str, good: Config) -> str:
    """The good file, spoilt; its list of upstreams comes last, so that one more can follow."""
    text = yaml.safe_dump({**good, "upstreams": None}).replace("upstreams: null\n", "")
    (upstream,) = good["upstreams"]
    return ODD[case][0].format(good=f"{text}upstreams:\n  - url: {upstream['url']}\n")


def reloads(gateway: Gateway, result: str) -> float:
    return gateway.metrics().total("ciuicflow_config_reloads_total", result=result)


def reload_and_wait(gateway: Gateway, settings: Config | str, result: str = "success") -> None:
    before = reloads(gateway, result)
    gateway.reload(settings)
    wait.until(lambda: reloads(gateway, result) > before, what=f"a reload: {result}")


def post_status(gateway: Gateway, size: int) -> int:
    return gateway.fetch("POST", "/", body=b"x" * size).status


@pytest.mark.line(26)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_refused_file_changes_nothing_at_all(
    start: Start, stubs: Stubs, tmp_path: Path, loop: str
) -> None:
    stub = stubs()
    gateway = start(config(stub, limits={"body_bytes": 1024}), loop=loop)
    broken = tmp_path / "broken.pem"
    broken.write_text("no certificate\n")
    for ca_file in (tmp_path / "nowhere.pem", broken):
        bad = {"url": "https://h", "ca_file": str(ca_file)}
        settings = config(stub, bad, limits={"body_bytes": 4096}, timeouts={"response_s": 0.1})
        reload_and_wait(gateway, settings, "failure")
        wait.until(lambda: str(ca_file) in gateway.log(), what="the file is named")  # noqa: B023
        assert post_status(gateway, 2000) == 413
        assert len(gateway.state()["endpoints"]) == 1
    reload_and_wait(gateway, config(stub, limits={"body_bytes": 4096}))
    assert post_status(gateway, 2000) == 200


@pytest.mark.line(26)
@pytest.mark.parametrize("case", ODD)
def test_an_odd_file_is_reported_and_the_next_one_applies(
    start: Start, stubs: Stubs, case: str
) -> None:
    stub = stubs()
    gateway = start(config(stub))
    reload_and_wait(gateway, odd_text(case, config(stub)), "failure")
    wait.until(lambda: ODD[case][1] in gateway.log(), what="the log says what is wrong")
    reload_and_wait(gateway, config(stub, limits={"body_bytes": 1024}))
    assert post_status(gateway, 2000) == 413


@pytest.mark.line(26)
@pytest.mark.parametrize("case", ODD)
def test_the_file_is_still_watched_after_an_odd_one(start: Start, stubs: Stubs, case: str) -> None:
    stub = stubs()
    gateway = start(config(stub))
    gateway.write_config(odd_text(case, config(stub)))
    wait.until(lambda: "not reloaded" in gateway.log(), what="the odd file is noticed")
    gateway.write_config(config(stub, limits={"body_bytes": 1024}))
    wait.until(lambda: post_status(gateway, 2000) == 413, what="the good file is noticed")


@pytest.mark.line(26)
@pytest.mark.parametrize("loop", LOOPS)
def test_models_are_known_before_a_second_upstream_takes_requests(
    start: Start, stubs: Stubs, loop: str
) -> None:
    one, other = stubs(models=("ma",)), stubs(models=("mb",))
    health = {"interval_s": 60}  # what a reload does not learn is not learnt in time
    gateway = start(config(one, health=health), loop=loop)
    assert gateway.fetch("POST", "/", body=b'{"model":"any"}').status == 200
    reload_and_wait(gateway, config(one, other, health=health))
    one.reset()
    for _ in range(4):
        for model in (b"ma", b"ma", b"mb"):
            assert gateway.fetch("POST", "/", body=b'{"model":"%s"}' % model).status == 200
    assert {request.body for request in one.requests} == {b'{"model":"ma"}'}
    assert {request.body for request in other.requests} == {b'{"model":"mb"}'}
    assert gateway.fetch("POST", "/", body=b'{"model":"any"}').status == 404


# -- the command that checks a file ----------------------------------------------------------


@pytest.fixture
def check_status(tmp_path: Path) -> Any:
    """Run `ciuicflow check` on a file with this text; its exit status and what it says."""

    def check(text: str) -> tuple[int, str]:
        file = tmp_path / "checked.yaml"
        file.write_text(text)
        result = run("check", str(file))
        return result.returncode, result.stderr

    return check


@pytest.mark.parametrize("case", ODD)
def test_check_refuses_an_odd_file(check_status: Any, case: str) -> None:
    status, said = check_status(odd_text(case, config("http://127.0.0.1:1")))
    assert status in (1, 2)
    assert ODD[case][1] in said
    assert "Traceback" not in said


@pytest.mark.parametrize("part", ["certificate", "ca_file"])
def test_check_names_a_missing_file(check_status: Any, tmp_path: Path, part: str) -> None:
    missing = str(tmp_path / "missing.pem")
    if part == "certificate":
        settings = config(
            "http://127.0.0.1:1", tls={"cert_file": missing, "key_file": str(tmp_path / "key.pem")}
        )
    else:
        settings = config({"url": "https://h", "ca_file": missing})
    status, said = check_status(yaml.safe_dump(settings))
    assert status in (1, 2)
    assert missing in said
    assert "Traceback" not in said
