"""The benchmark's arithmetic: what it reads from wrk and /proc, and what it makes of it."""

import argparse
import json
import os
from pathlib import Path

import pytest

from ciuicflow.bench import arguments, loads, output, procfs, proxies, report, wrk
from ciuicflow.bench.http import rotated
from ciuicflow.bench.nginx import config_text
from ciuicflow.bench.procfs import Cores
from ciuicflow.bench.report import Report, Row, Sample, Spread
from ciuicflow.bench.stub import STREAM_EVENTS, Counts
from ciuicflow.bench.wrk import LoadFailed
from ciuicflow.errors import StartError

# -- wrk -----------------------------------------------------------------------------------------

NO_FAILURES = {"connect": 0, "read": 0, "write": 0, "status": 0, "timeout": 0}


def wrk_output(requests: int = 1000, **failures: int) -> str:
    result = {
        "requests": requests,
        "duration_us": 2_000_000,
        "p50_us": 810.0,
        "p99_us": 2400.5,
        "failures": {**NO_FAILURES, **failures},
    }
    return f"Running 2s test @ http://127.0.0.1:1/\n  Latency 1ms\n{json.dumps(result)}\n"


def test_the_figures_are_found_behind_what_wrk_prints_itself() -> None:
    result = wrk.parse(wrk_output())
    assert (result.per_s, result.p50_us, result.p99_us) == (500.0, 810.0, 2400.5)


def test_failed_requests_are_an_error_that_counts_them_by_kind() -> None:
    with pytest.raises(LoadFailed, match="of 1000 requests some failed: 7 read, 2 status"):
        wrk.parse(wrk_output(status=2, read=7))


def test_a_run_without_an_answer_is_an_error() -> None:
    with pytest.raises(LoadFailed, match="no request was answered"):
        wrk.parse(wrk_output(requests=0))


@pytest.mark.parametrize("printed", ["", "unable to connect to 127.0.0.1:1", '{"requests": 1}'])
def test_output_without_figures_is_an_error_that_shows_it(printed: str) -> None:
    with pytest.raises(LoadFailed, match="wrk printed no result"):
        wrk.parse(printed)


def test_a_missing_wrk_is_an_error_with_the_way_to_install_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StartError, match="apt-get install wrk"):
        wrk.require_wrk()


def test_only_the_paced_load_pauses() -> None:
    pausing = [load.name for load in loads.LOADS if "function delay" in wrk.script(load)]
    assert pausing == ["json-paced"]
    assert "math.random(10, 30)" in wrk.script(loads.BY_NAME["json-paced"])


def test_the_upload_is_a_body_of_one_mebibyte() -> None:
    assert 'wrk.body = string.rep("x", 1048576)\n' in wrk.script(loads.BY_NAME["upload"])


# -- /proc ---------------------------------------------------------------------------------------


def test_cpu_and_memory_are_read_behind_any_command_name() -> None:
    rest = "S 41 7 7 0 -1 4194560 900 0 0 0 150 50 9 9 20 0 2 0 12345 99999744 2048 184467"
    stat = procfs.parse_stat(f"42 (a) b (c)) {rest}")
    assert stat.parent == 41
    assert stat.cpu_s == 200 / os.sysconf("SC_CLK_TCK")
    assert stat.rss_bytes == 2048 * os.sysconf("SC_PAGE_SIZE")


def test_a_line_that_is_none_of_proc_is_an_error() -> None:
    with pytest.raises(ValueError, match="not a line of"):
        procfs.parse_stat("42 (a) S 1")


def test_a_core_is_at_work_in_user_nice_system_and_stolen_time() -> None:
    text = "cpu  9 9 9 9 9 9 9 9 0 0\ncpu1 10 20 30 4000 500 60 70 80 0 0\nintr 5\n"
    assert procfs.parse_core_stat(text, 1) == 140 / os.sysconf("SC_CLK_TCK")
    with pytest.raises(ValueError, match="does not know core 2"):
        procfs.parse_core_stat(text, 2)


def test_load_and_proxy_get_a_core_each_where_there_are_two() -> None:
    assert procfs.split_cores({5, 2, 3}) == Cores(load=2, proxy=5)
    assert procfs.split_cores({4}) == Cores(load=None, proxy=None)


# -- loads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("load", "after", "units"),
    [
        ("json", Counts(answers=12, events=99, body_bytes=99), 10),
        ("stream", Counts(answers=99, events=100 + STREAM_EVENTS // 2), 0.5),
        ("upload", Counts(answers=99, body_bytes=3 << 20), 2),
        ("open", Counts(events=4100), 4000),
    ],
)
def test_work_is_what_the_upstream_has_done_parts_included(
    load: str, after: Counts, units: float
) -> None:
    before = Counts(answers=2, events=100, body_bytes=1 << 20)
    assert loads.BY_NAME[load].units(before, after) == units


def test_the_command_line_offers_every_load() -> None:
    assert set(arguments.SCENARIOS) == set(loads.BY_NAME)


def test_every_target_is_the_first_of_some_round() -> None:
    orders = [rotated(["direct", "nginx", "gateway"], number) for number in range(4)]
    assert [order[0] for order in orders] == ["direct", "nginx", "gateway", "direct"]
    assert all(sorted(order) == ["direct", "gateway", "nginx"] for order in orders)


# -- the result ----------------------------------------------------------------------------------


def sample(load: str, target: str, number: int, **figures: float) -> Sample:
    rss_bytes = 2**20 if target != "direct" else None
    return Sample(
        load=load, target=target, round=number, per_s=1000, rss_bytes=rss_bytes, **figures
    )


def rows_of(samples: list[Sample]) -> dict[str, Row]:
    built = report.build({"rounds": 3}, samples)
    return {row.target: row for row in built.rows}


def three_rounds(load: str = "json") -> list[Sample]:
    """Rounds on a machine that gets slower: only ratios within a round mean anything."""
    cpu = [(10.0, 11.0), (20.0, 24.0), (80.0, 84.0)]
    samples = []
    for number, (nginx, gateway) in enumerate(cpu):
        samples += [
            sample(load, "direct", number, p50_us=100, p99_us=200 * (number + 1)),
            sample(load, "nginx", number, cpu_us=nginx, p50_us=110, p99_us=300 * (number + 1)),
            sample(load, "gateway", number, cpu_us=gateway, p50_us=140, p99_us=290.0),
        ]
    return samples


def test_ratios_are_taken_within_a_round_before_the_median() -> None:
    rows = rows_of(three_rounds())
    assert rows["gateway"].cpu_us == Spread(24.0, 11.0, 84.0)
    assert rows["gateway"].cpu_ratio == Spread(1.1, 1.05, 1.2)
    assert rows["nginx"].cpu_ratio is None
    assert rows["direct"].cpu_us is None


def test_added_latency_is_beyond_the_direct_way_of_the_same_round() -> None:
    rows = rows_of(three_rounds())
    assert rows["gateway"].added_p50_us == Spread(40.0, 40.0, 40.0)
    assert rows["nginx"].added_p99_us == Spread(200.0, 100.0, 300.0)
    assert rows["gateway"].p99_beyond_us == Spread(-310.0, -610.0, -10.0)
    assert rows["direct"].added_p99_us is None


def test_a_round_that_lacks_the_other_side_is_left_out_of_the_ratio() -> None:
    samples = [s for s in three_rounds() if (s.target, s.round) != ("nginx", 1)]
    ratio = rows_of(samples)["gateway"].cpu_ratio
    assert ratio is not None
    assert ratio.max == pytest.approx(1.1)


def test_without_nginx_there_is_no_ratio_and_no_bar() -> None:
    built = report.build({}, [s for s in three_rounds() if s.target != "nginx"])
    assert built.bars == []
    assert all(row.cpu_ratio is None for row in built.rows)


def test_a_bar_holds_up_to_its_limit() -> None:
    (bar,) = report.build({}, three_rounds("stream")).bars
    assert (bar.target, bar.limit, bar.figure.median, bar.holds) == ("gateway", 1.25, 1.1, True)
    slow = [
        sample("stream", "nginx", 0, cpu_us=10.0),
        sample("stream", "gateway", 0, cpu_us=12.6),
    ]
    (bar,) = report.build({}, slow).bars
    assert not bar.holds


def test_a_later_p99_than_nginx_misses_the_bar() -> None:
    (bar,) = report.build({}, three_rounds("json-8")).bars
    assert bar.holds
    (bar,) = report.build(
        {},
        [sample("json-8", "nginx", 0, p99_us=200.0), sample("json-8", "gateway", 0, p99_us=201.0)],
    ).bars
    assert not bar.holds


def test_other_builds_have_bars_but_the_price_of_the_log_has_none() -> None:
    others = [
        sample("json", name, 0, cpu_us=12.0) for name in ("gateway .venv-c", proxies.WITH_LOG)
    ]
    built = report.build({}, [sample("json", "nginx", 0, cpu_us=10.0), *others])
    assert [bar.target for bar in built.bars] == ["gateway .venv-c"]
    assert [row.cpu_ratio for row in built.rows[1:]] == [Spread(1.2, 1.2, 1.2)] * 2


def test_memory_of_a_held_stream_has_a_bar_without_nginx_too() -> None:
    held = sample("open", "gateway", 0, stream_bytes=40961.0, cpu_us=5.0)
    (bar,) = report.build({}, [held]).bars
    assert not bar.holds


# -- what is shown -------------------------------------------------------------------------------


def test_a_row_shows_medians_and_the_ratio_with_its_range() -> None:
    assert output.cells(rows_of(three_rounds())["gateway"]) == (
        *("gateway", "1000", "0.140", "0.290", "+0.040", "-0.110"),
        *("24.0", "1.10 (1.05 to 1.20)", "1.0 MiB"),
    )
    assert output.cells(rows_of(three_rounds())["direct"])[4:] == ("-",) * 5


def test_a_held_row_shows_the_memory_of_each_stream() -> None:
    held = rows_of([sample("open", "gateway", 0, stream_bytes=5120.0)])["gateway"]
    assert output.cells(held)[-1] == "5.0 KiB each"


def test_the_plain_table_lines_up() -> None:
    rows = [output.cells(row) for row in rows_of(three_rounds()).values()]
    title, head, *lines = output.plain_table("json: title", rows)[:-1]
    assert title == "json: title"
    assert {len(line) for line in (head, *lines)} == {len(head)}
    assert [line.split()[0] for line in lines] == ["direct", "nginx", "gateway"]


def test_a_bar_is_one_line_with_verdict_and_limit() -> None:
    (bar,) = report.build({}, three_rounds()).bars
    shown = (
        "holds   json, gateway: CPU per request, times nginx's: 1.10 (1.05 to 1.20), at most 1.15"
    )
    assert output.bar_line(bar) == shown


@pytest.mark.parametrize(("others", "is_said"), [(0.04, False), (0.31, True)])
def test_a_busy_machine_is_said(
    others: float, is_said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    output.show(report.build({"rounds": 3}, [sample("json", "gateway", 0, others=others)]))
    assert ("took 31% (31% to 31%) of the proxies' core" in capsys.readouterr().out) == is_said


@pytest.mark.parametrize("has_rich", [True, False])
def test_the_result_is_shown_with_and_without_rich(
    has_rich: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "_is_installed", lambda module: has_rich)
    if has_rich:
        pytest.importorskip("rich")
    output.show(report.build({"rounds": 2}, three_rounds()))
    shown = capsys.readouterr().out
    assert "1.10 (1.05 to 1.20)" in shown
    assert "…" not in shown
    assert "fewer than 3 rounds" in shown


def test_what_the_machine_lacks_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    output.announce(Cores(None, None), 60, 4.0, has_nginx=False)
    said = capsys.readouterr().err
    assert "60 measurements, about 5 min" in said
    assert "only one core" in said
    assert "apt-get install nginx" in said
    output.announce(Cores(0, 1), 60, 4.0, has_nginx=True)
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_saved_report_can_be_read_back_and_plotted(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    built = report.build({"rounds": 3}, three_rounds())
    output.save(built, tmp_path / "bench.json")
    saved = json.loads((tmp_path / "bench.json").read_bytes())
    assert [row["target"] for row in saved["rows"]] == ["direct", "nginx", "gateway"]
    assert len(saved["samples"]) == 9
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_is_plotted_where_no_cpu_was_measured(tmp_path: Path) -> None:
    plot = pytest.importorskip("ciuicflow.bench.plot")
    empty = Report(about={}, others=None, rows=[], bars=[], samples=[])
    assert not plot.draw(empty, tmp_path / "bench.png")


def test_a_place_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for bad in (tmp_path / "file" / "out.json", tmp_path):
        with pytest.raises(StartError, match=r"cannot (make the folder of|write)"):
            output.prepare(bad)
    output.prepare(tmp_path / "new" / "out.json")
    assert (tmp_path / "new").is_dir()


# -- what is compared ----------------------------------------------------------------------------


def test_another_interpreter_is_named_after_its_environment() -> None:
    recipe = proxies.other_gateway("/some/where/.venv-compiled/bin/python")
    assert recipe.label == "gateway .venv-compiled"
    assert recipe.python == ("/some/where/.venv-compiled/bin/python", "-P")


def test_the_gateway_with_its_log_is_priced_under_one_load_only() -> None:
    recipe = proxies.Recipe(proxies.WITH_LOG)
    assert [load.name for load in loads.LOADS if recipe.is_for(load)] == ["json"]


def test_nginx_buffers_nothing_and_logs_nothing(tmp_path: Path) -> None:
    text = config_text(8000, 8080, tmp_path)
    for line in (
        *("worker_processes 1;", "access_log off;", "keepalive 128;", "proxy_buffering off;"),
        *("proxy_request_buffering off;", "client_max_body_size 64m;"),
        *("server 127.0.0.1:8000;", "listen 127.0.0.1:8080 backlog=4096;"),
    ):
        assert line in text


@pytest.mark.parametrize("flags", [["--rounds", "0"], ["--seconds", "0"], ["--seconds", "nan"]])
def test_senseless_lengths_are_refused(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    arguments.add_bench(parser.add_subparsers())
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(["bench", "http", *flags])
    assert "expected" in capsys.readouterr().err
