"""The files under deploy/ and docs/metrics.md against the program and the tools that read them."""

import configparser
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from ciuicflow.config import Config, Timeouts, Upstream, decode
from ciuicflow.observability.metrics import EndpointSample, Metrics
from ciuicflow.request import Outcome

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
METRICS_DOC = ROOT / "docs" / "metrics.md"
EXAMPLE = DEPLOY / "ciuicflow.yaml"
DRAIN_S = Timeouts().drain_s + Timeouts().settle_s

Families = dict[str, tuple[str, frozenset[str]]]


def read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


# Metrics


@pytest.fixture(scope="module")
def families() -> Families:
    """Return type and label names of every metric, by the name that it has on the page."""
    metrics = Metrics(
        endpoints=lambda: [
            EndpointSample(
                name="a", up=True, in_flight=1, idle=1, busy=1, limit_tokens=9, limit_requests=1
            )
        ],
        client_connections=int,
        log_lines_dropped=int,
        queue_depths=lambda: {"gold": 1},
    )
    metrics.tier("gold").first_token(0.1, now=1.0)
    metrics.traffic("bypass", "none").observe(Outcome.COMPLETED, 200, 0.1, now=1.0)
    metrics.upstream_failure("a", "connect")
    found: Families = {}
    for family in text_string_to_metric_families(metrics.render(1.0).decode()):
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = frozenset().union(*(sample.labels for sample in family.samples)) - {"le"}
        assert family.samples
        found[name] = (family.type, labels)
    return found


def documented() -> Iterator[tuple[str, str, frozenset[str], str, str]]:
    """Yield name, type, labels, meaning and advice of each row of the metric tables."""
    for row in METRICS_DOC.read_text().splitlines():
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        if row.startswith("| `ciuicflow_"):
            name, kind, labels, meaning, advice = cells
            split = frozenset(label.strip() for label in labels.split(",") if label)
            yield name.strip("`"), kind, split, meaning, advice


def test_every_metric_is_documented_with_its_type_and_labels(families: Families) -> None:
    rows = {name: (kind, labels) for name, kind, labels, _, _ in documented()}
    assert rows == families


def test_every_metrics_row_says_what_it_means_and_what_to_do() -> None:
    for name, _, _, meaning, advice in documented():
        assert len(meaning) >= 2, name
        assert len(advice) > 20, name


def test_every_outcome_is_documented() -> None:
    tables = METRICS_DOC.read_text().split("| Outcome |")[1].split("## ")[0]
    cells = [row.split("|")[1] for row in tables.splitlines() if row.startswith("| `")]
    assert sorted(re.findall(r"`(\w+)`", " ".join(cells))) == sorted(Outcome)


@pytest.mark.parametrize(
    "path",
    [METRICS_DOC, *sorted(path for path in DEPLOY.rglob("*") if path.is_file())],
    ids=lambda path: path.name,
)
def test_no_file_names_a_metric_that_does_not_exist(path: Path, families: Families) -> None:
    histograms = {name for name, (kind, _) in families.items() if kind == "histogram"}
    series = {name + suffix for name in histograms for suffix in ("_bucket", "_sum", "_count")}
    named = set(re.findall(r"\bciuicflow_[a-z0-9_]+", path.read_text()))
    assert named <= series | set(families)


def alert_rules() -> list[dict[str, Any]]:
    groups = read_yaml(PROMETHEUS / "alerts.yml")["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_every_alert_says_what_happened_and_what_to_do() -> None:
    for rule in alert_rules():
        assert set(rule["annotations"]) == {"summary", "description", "next_step"}, rule["alert"]
        assert rule["labels"]["severity"] in {"warning", "critical"}


def test_every_alert_has_a_case_in_which_it_fires() -> None:
    fired = set()
    for case in read_yaml(PROMETHEUS / "alerts_test.yml")["tests"]:
        for query in case.get("promql_expr_test", []):
            for sample in query["exp_samples"]:
                fired.update(re.findall(r'alertname="(\w+)"', sample["labels"]))
    assert fired == {rule["alert"] for rule in alert_rules()}


def test_labels_in_alerts_have_values_that_occur(families: Families) -> None:
    for rule in alert_rules():
        for name, matchers in re.findall(r"(ciuicflow_\w+)\{([^}]*)\}", rule["expr"]):
            labels = re.findall(r"(\w+)\s*[!=]~?", matchers)
            assert set(labels) <= families[name][1] | {"job", "instance"}, rule["alert"]
            for pattern in re.findall(r'outcome[!=]~"([^"]*)"', matchers):
                for word in pattern.split("|"):
                    assert any(re.fullmatch(word, outcome) for outcome in Outcome), word


@pytest.mark.parametrize(
    "command",
    [
        ["check", "config", "prometheus.yml"],
        ["check", "rules", "alerts.yml"],
        ["test", "rules", "alerts_test.yml"],
    ],
    ids=" ".join,
)
def test_promtool_accepts(command: list[str]) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed; it comes with Prometheus")
    done = subprocess.run(
        [promtool, *command],
        cwd=PROMETHEUS,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


# The example configuration


def with_off_keys() -> Any:
    """Return the example's data with the keys behind a bare # switched on."""
    return yaml.safe_load(re.sub(r"(?m)^(\s*)#(?=\S)", r"\1", EXAMPLE.read_text()))


def keys_of(data: Any) -> Iterator[str]:
    """Yield the dotted path of every key, list items without their position."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield key
            yield from (f"{key}.{path}" for path in keys_of(value))
    elif isinstance(data, list):
        for item in data:
            yield from keys_of(item)


def keys_of_type(kind: msgspec.inspect.Type) -> Iterator[str]:
    """Yield the dotted path of every field of a record and of the records in it."""
    if isinstance(kind, msgspec.inspect.StructType):
        for field in kind.fields:
            yield field.encode_name
            yield from (f"{field.encode_name}.{path}" for path in keys_of_type(field.type))
    elif isinstance(kind, msgspec.inspect.UnionType):
        for member in kind.types:
            yield from keys_of_type(member)
    elif isinstance(kind, msgspec.inspect.ListType | msgspec.inspect.VarTupleType):
        yield from keys_of_type(kind.item_type)


def test_the_example_shows_the_defaults() -> None:
    shown = decode(read_yaml(EXAMPLE))
    assert shown == Config(upstreams=[Upstream(url="http://127.0.0.1:8000")])


def test_the_example_has_every_key_and_no_other() -> None:
    data = with_off_keys()
    decode(data)
    header = "upstreams.probe_headers.Authorization"
    known = set(keys_of_type(msgspec.inspect.type_info(Config)))
    assert set(keys_of(data)) - {header} == known


def test_check_accepts_the_example() -> None:
    command = [sys.executable, "-m", "ciuicflow", "check", str(EXAMPLE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    assert "ok" in done.stdout


# Container, compose, systemd


def container_steps() -> list[tuple[str, str]]:
    """Return instruction and arguments of each step of the Containerfile."""
    text = re.sub(r"(?m)^#.*\n", "", (DEPLOY / "Containerfile").read_text()).replace("\\\n", " ")
    return [
        (word, rest.strip())
        for word, _, rest in (s.partition(" ") for s in text.splitlines())
        if word
    ]


def test_the_container_copies_files_that_exist_and_are_sent() -> None:
    sent = set(re.findall(r"(?m)^!(.+)$", (DEPLOY / "Containerfile.dockerignore").read_text()))
    copied = set()
    for word, rest in container_steps():
        if word == "COPY" and not rest.startswith("--from"):
            copied.update(rest.split()[:-1])
    assert copied == sent
    assert all((ROOT / name).exists() for name in copied)


def test_the_container_is_not_root_and_drains_on_stop() -> None:
    steps = dict(container_steps())
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", steps["USER"])
    assert steps["STOPSIGNAL"] == "SIGTERM"
    assert steps["ENTRYPOINT"].startswith('["ciuicflow", "serve"')  # exec form: it gets the signal
    assert "/healthz" in steps["HEALTHCHECK"]


def test_the_container_ships_what_the_project_supports() -> None:
    floor = re.search(r'requires-python = ">=3\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    images = {rest.split()[0] for word, rest in container_steps() if word == "FROM"}
    assert images == {"python:3.12-slim"}
    assert floor is not None
    assert int(floor[1]) <= 12


def test_compose_starts_gateway_and_prometheus() -> None:
    services = read_yaml(DEPLOY / "compose.yaml")["services"]
    assert set(services) == {"gateway", "prometheus"}
    assert int(services["gateway"]["stop_grace_period"].removesuffix("s")) > DRAIN_S
    assert "${CIUICFLOW_UPSTREAM:?" in services["gateway"]["command"][1]
    for volume in services["prometheus"]["volumes"]:
        if volume.startswith("."):
            assert (DEPLOY / volume.split(":")[0]).is_file()


def test_compose_shows_operators_ports_to_this_host_only() -> None:
    services = read_yaml(DEPLOY / "compose.yaml")["services"]
    for service in services.values():
        for port in service["ports"]:
            assert port.startswith(("127.0.0.1:", "${CIUICFLOW_LISTEN:-127.0.0.1:8080}:")), port


def test_prometheus_scrapes_the_service_of_compose() -> None:
    (job,) = read_yaml(PROMETHEUS / "prometheus.yml")["scrape_configs"]
    assert job["job_name"] == "ciuicflow"
    assert job["static_configs"] == [{"targets": ["gateway:9090"]}]


@pytest.fixture(scope="module")
def unit() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign] # systemd's keys have case
    parser.read(DEPLOY / "ciuicflow.service")
    return parser["Service"]


def test_the_systemd_unit_reloads_drains_and_gives_up_on_a_bad_configuration(
    unit: configparser.SectionProxy,
) -> None:
    assert unit["ExecReload"] == "/bin/kill -HUP $MAINPID"
    assert int(unit["TimeoutStopSec"]) > DRAIN_S
    assert (unit["Restart"], unit["RestartPreventExitStatus"]) == ("on-failure", "2")
    assert (
        int(unit["LimitNOFILE"])
        > 2 * Config(upstreams=[Upstream(url="http://a")]).limits.connections
    )


def test_the_systemd_unit_is_locked_down(unit: configparser.SectionProxy) -> None:
    assert unit["DynamicUser"] == "yes"
    assert unit["ProtectSystem"] == "strict"
    assert unit["NoNewPrivileges"] == "yes"
    assert unit["CapabilityBoundingSet"] == ""


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed; it comes with systemd")
    text = (DEPLOY / "ciuicflow.service").read_text()
    copy = tmp_path / "ciuicflow.service"
    copy.write_text(text.replace("/opt/ciuicflow/bin/ciuicflow", sys.executable))
    done = subprocess.run(
        [analyze, "verify", copy], capture_output=True, text=True, timeout=50, check=False
    )
    complaints = [line for line in done.stderr.splitlines() if "ciuicflow" in line]
    assert (done.returncode, complaints) == (0, [])
