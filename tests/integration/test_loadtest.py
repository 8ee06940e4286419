"""The load test as a command, for a few seconds, on real processes."""

import gzip
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SYSTEMS = ("bare", "flow_off", "priority")


def _loadtest(*arguments: str) -> subprocess.CompletedProcess[str]:
    # The load test itself is not installed; what it starts is.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    return subprocess.run(
        [sys.executable, "-m", "loadtest", *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=55, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a quick overload with clients that leave."""
    out = tmp_path_factory.mktemp("loadtest")
    flags = ("--quick", "--engine", "slot_bound", "--aborts", "0.2", "--systems", ",".join(SYSTEMS))
    done = _loadtest("overload", *flags, "--out", str(out))
    assert done.returncode in (0, 3), done.stderr  # 3: the machine was too busy for good figures
    assert "bare" in done.stdout
    return out


def _result(results: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((results / "overload-slot_bound.json").read_text())
    return result


def test_each_planned_request_is_accounted_for_once_per_system(results: Path) -> None:
    (run,) = _result(results)["runs"]
    with gzip.open(results / "overload-slot_bound.requests.jsonl.gz", "rt") as lines:
        requests = [json.loads(line) for line in lines]
    assert run["planned"] > 20
    for system in SYSTEMS:
        mine = [request for request in requests if request["system"] == system]
        assert [request["id"] for request in mine] == list(range(run["planned"]))
        assert run["outcomes"][system] == Counter(request["outcome"] for request in mine)
        assert run["outcomes"][system]["completed"] > 0
        assert run["outcomes"][system].get("failed", 0) == 0


def test_all_systems_get_the_same_requests_at_the_same_times(results: Path) -> None:
    with gzip.open(results / "overload-slot_bound.requests.jsonl.gz", "rt") as lines:
        requests = [json.loads(line) for line in lines]
    plans = [
        [(r["id"], r["at_s"], r["tier"], r["tenant"]) for r in requests if r["system"] == system]
        for system in SYSTEMS
    ]
    assert plans[0] == plans[1] == plans[2]


def test_each_system_has_figures_and_the_run_its_proof(results: Path) -> None:
    result = _result(results)
    (run,) = result["runs"]
    assert run["generator_cpu"] > 0
    assert run["lag_p99_s"] >= 0
    for system in SYSTEMS:
        stats = result["systems"][system]
        assert stats["useful_tokens_per_s"] > 0
        assert stats["cpu"]["engine"] > 0
        assert stats["groups"]["opted_in"]["offered"] > 10
    assert {"median", "name"} <= set(result["figures"][0])
    assert (results / "overload-slot_bound.txt").read_text().startswith("overload on slot_bound")
    assert (results / "overload-slot_bound.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("no-such",), "unknown scenario"),
        (("--engine", "no-such"), "'no-such' is none of slot_bound"),
        (("trace",), "needs --trace FILE"),
        (("--seeds", "0"), "at least 1"),
    ],
)
def test_a_wrong_command_line_is_explained(arguments: tuple[str, ...], words: str) -> None:
    done = _loadtest(*arguments)
    assert done.returncode == 2
    assert words in done.stderr


def test_help_teaches_the_scenarios() -> None:
    done = _loadtest("--help")
    assert done.returncode == 0
    for scenario in ("overload", "bypass", "spike", "speed", "tenants", "headroom", "llama"):
        assert scenario in done.stdout
