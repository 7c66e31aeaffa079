"""The demo without options: a simulated table, then agents in real time without false figures."""

from __future__ import annotations

import contextlib
import multiprocessing
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from lmetric_lab.cli.demo import live_sentence
from lmetric_lab.demo import CLOCK_SPEEDS, MACHINE_SHARE, LiveRun, simulated
from lmetric_lab.replay import Report
from lmetric_lab.sim.summary import Goodput, Spread

DEMO = [sys.executable, "-m", "lmetric.cli", "demo"]
ROW = re.compile(r"^ (round_robin|vllm|total_delay) +([\d.]+) s +(\d+)% +([\d.]+) s +(\d+)%", re.MULTILINE)


def run(*words: str) -> tuple[str, str]:
    done = subprocess.run([*DEMO, *words], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_the_table_is_always_the_same_and_the_default_is_the_best() -> None:
    out, said = run("--play", "0")
    rows = {name: tuple(map(float, values)) for name, *values in ROW.findall(out)}
    assert list(rows) == ["round_robin", "vllm", "total_delay"]
    assert "emulated engines" not in out + said  # nothing was played
    for each, (ttft, hit) in zip(simulated(list(rows)), ((0, 1), (2, 3)), strict=True):
        assert each.comparison.best.policy == "total_delay"
        for name, values in rows.items():
            shown = each.comparison[name].summary()
            assert shown.ttft_seconds is not None
            assert shown.hit_ratio is not None
            assert values[ttft] == pytest.approx(shown.ttft_seconds.mean, abs=0.01)
            assert values[hit] == pytest.approx(shown.hit_ratio * 100, abs=1)
        assert rows["total_delay"][hit] > rows["round_robin"][hit]
    assert "first tokens come sooner than with round robin: chat 65%, agents 60%" in " ".join(out.split())


def live(share: float | None) -> LiveRun:
    second = Spread(1.5, 1.5, 2.0, 2.0, 2.0, 2.0)
    report = Report(
        160, 160, 0, 0, False, 8.0, 9.0, second, second, second, 1, 1, 0.5, 1, 1.0, 1.0,
        Goodput(None, None, 1.0, 1.0, 1.0), {}, None, 0,
    )  # fmt: skip
    return LiveRun(5.0, report, share)


@pytest.mark.parametrize(("share", "figures"), [(0.1, True), (MACHINE_SHARE + 0.01, False), (None, False)])
def test_a_machine_that_cannot_keep_up_gets_no_figures(share: float | None, figures: bool) -> None:
    sentence = live_sentence(live(share))
    assert ("mean time to first token 1.50 s" in sentence) == figures
    assert ("cannot keep up with an engines' clock of 5x" in sentence) != figures


def _spin() -> None:
    while True:
        pass


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    context = multiprocessing.get_context("spawn")
    spinning = [context.Process(target=_spin, daemon=True) for _ in range(processes)]
    for each in spinning:
        each.start()
    try:
        yield
    finally:
        for each in spinning:
            each.kill()
            each.join()


@pytest.mark.nightly
def test_a_busy_machine_sees_no_false_verdict() -> None:
    """UX 2: on a busy machine, the demo ended with LMETRIC behind round robin."""
    quiet, _ = run("--play", "0")
    with busy(4):
        out, said = run("--play", "10")
    assert out.startswith(quiet)  # table and verdict do not depend on the machine
    rest = " ".join(out.removeprefix(quiet).split())
    assert "/ui" in rest
    if "No figures of the live part" in rest:
        assert said.count("their clock runs at") == len(CLOCK_SPEEDS)
        return
    assert re.search(r"Live, total_delay: \d+ requests", rest)
    assert "round_robin" not in rest
