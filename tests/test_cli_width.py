"""Tables fit 80 columns, in a terminal of that width and in a pipe."""

from __future__ import annotations

import inspect
import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from lmetric.cli.app import build
from lmetric.cli.show import print_table, tables, wrapped
from lmetric_lab.cli import demo
from lmetric_lab.defaults import AGENTS_PROFILE, DEFAULT_PROFILE
from lmetric_lab.demo import Setting
from lmetric_lab.replay import ProgramReport, Report
from lmetric_lab.sim.summary import Goodput, Spread

SIMULATE = ["simulate", "--requests", "60", "--instances", "4", "--policy"]
LONG = "where(bs > 4, p_token * (bs + 1), p_token * (bs + 2)) + 0.25 * q_bs"
COMMANDS = [
    ["policies"],
    ["policies", "sibyl"],
    ["indicators"],
    ["profiles"],
    ["profiles", "llama-3.1-70b-2xh200"],
    ["trace", "show", "slice"],
    [*SIMULATE, "vllm,lmetric"],
    [*SIMULATE, f"lmetric,{LONG}", "--seeds", "2", "--split", "none,libra", "--slo-ttft", "1"],
    [*SIMULATE, "planner", "--roles", "2P2D"],
    ["study", "study.yaml", "--no-report"],
    ["bench", "--instances", "4", "--prompt-tokens", "1000", "--iterations", "5", "--stored-pairs", "100"],
]


@pytest.mark.parametrize("columns", ["80", None])
@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_lines_fit(
    words: list[str], columns: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("study.yaml").write_text(
        f"traces: [{{path: slice, requests: 60}}]\npolicies: [vllm, lmetric, '{LONG}']\ninstances: 4\n"
        "loads: [0.25, 0.5, 0.75, 1, 1.5, 2, 3]\nseeds: [0, 1]\n"
    )
    done = CliRunner().invoke(build([words[0]]), words, env={"COLUMNS": columns})
    assert done.exit_code == 0, (done.stderr, done.exception)
    lines = done.stdout.splitlines()
    assert lines
    assert max(map(len, lines)) <= int(columns or 80), max(lines, key=len)


def defaults_of_the_demo() -> Setting:
    given = {name: each.default for name, each in inspect.signature(demo.command).parameters.items()}
    return Setting(
        policies=["round_robin", "vllm", "lmetric"],
        **{name: given[name] for name in ("engines", "speed", "requests")},
        profile=DEFAULT_PROFILE,
        clock_speed=demo.CLOCK_SPEED,
        max_input_tokens=None,
    )


def test_the_table_of_the_demo_is_one_table() -> None:
    second = Spread(12.34, 12.34, 123.45, 123.45, 123.45, 123.45)
    token = Spread(0.1234, 0.1, 0.5, 0.5567, 0.6, 0.6)
    report = Report(
        160, 160, 0, 0, False, 8.0, 9.0, second, token, second, 1, 1, 0.123, 1, 1.0, 1.0,
        Goodput(None, None, 1.0, 1.0, 1.0), {}, None, 0,
    )  # fmt: skip
    console = Console(width=80, record=True, file=io.StringIO())
    reports = dict.fromkeys(("round_robin", "vllm", "lmetric"), report)
    console.print(demo._summary(defaults_of_the_demo(), reports, 80))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("policy ") == 1


def test_the_demo_plays_at_most_a_minute() -> None:
    """UX: the demo played about two minutes."""
    setting = defaults_of_the_demo()
    seconds = setting.expected_seconds(setting.trace())
    assert 30 < seconds <= 60
    assert replace(setting, policies=["lmetric"]).expected_seconds(setting.trace()) == pytest.approx(
        seconds / 3
    )


def agents_in_the_demo() -> Setting:
    return replace(
        defaults_of_the_demo(), profile=AGENTS_PROFILE, clock_speed=demo.AGENTS_CLOCK_SPEED, agents=True
    )


def test_the_demo_of_agents_plays_below_two_minutes() -> None:
    setting = agents_in_the_demo()
    trace = setting.trace()
    assert 60 < setting.expected_seconds(trace) < 110
    memory = setting.memory(trace)
    # Every program fits into a cache alone, and no two caches hold them all.
    assert memory.cache_blocks * 16 > int((trace.input_tokens + trace.output_tokens).max())
    assert int(memory.min_computed_tokens.sum()) < int(trace.input_tokens.sum()) / 4


def test_the_table_of_agents_is_one_table() -> None:
    report = Report(
        347, 347, 0, 0, False, 10.0, 9.0, None, None, None, 1, 1, 0.123, 1, 1.0, 1.0,
        Goodput(None, None, 1.0, 1.0, 1.0), {}, None, 0,
        programs=ProgramReport(37, 0, 1234.5, 2345.6, 0.456, 1234.5),
    )  # fmt: skip
    setting = agents_in_the_demo()
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(demo._summary(setting, {arm.label: report for arm in setting.runs}, 80))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("policy ") == 1
    assert text.count("1234.5") == 6


def test_a_wide_table_becomes_several_with_the_same_first_columns() -> None:
    columns = ["policy", "load", *(f"column {number}" for number in range(12))]
    rows = [[name, "1.0", *(str(number * 1000.5) for number in range(12))] for name in ("vllm", "lmetric")]
    made = tables(columns, rows, 80, keys=2)
    heads = [[str(column.header) for column in each.columns] for each in made]
    assert len(heads) > 1
    assert all(head[:2] == ["policy", "load"] for head in heads)
    assert [name for head in heads for name in head[2:]] == columns[2:]
    assert len(tables(columns, rows, 400, keys=2)) == 1


def test_a_table_that_is_too_wide_leaves_out_spare_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """ux.md 3.18: `p99.9` had a table of its own."""
    for columns, tables_and_tails in (("80", (1, 0)), ("100", (1, 1))):
        monkeypatch.setenv("COLUMNS", columns)
        names = ["TTFT, s", "mean", "p50", "p90", "p99", "p99.9"]
        print_table(names, [["lmetric", *["14.374 ±0.095"] * 5]], spare=("p99.9",))
        text = capsys.readouterr().out
        head, _, below = text.partition("Left out")
        assert (head.count("TTFT, s"), head.count("p99.9")) == tables_and_tails
        assert below == ("" if tables_and_tails[1] else " for lack of columns: p99.9.\n")


def test_text_wraps_below_its_start() -> None:
    assert wrapped("one two three", 12, head="name: ") == "name: one\n      two\n      three"
    assert wrapped("http://a-rather-long-address", 10) == "http://a-rather-long-address"
