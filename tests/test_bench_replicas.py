"""`bench/replicas.py`: load messages between the routers of a fleet."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "bench" / "replicas.py"


def printed(out: Path, *argv: str) -> str:
    command = [sys.executable, str(SCRIPT), *argv, "--out", str(out / "rows.json")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def rows(table: str) -> list[list[str]]:
    return [re.split(r" *\| *", line)[1:-1] for line in table.splitlines() if line.startswith("|")][2:]


def test_messages_grow_with_what_changed(tmp_path: Path) -> None:
    """The bytes depend on no machine: an engine takes as many in each message."""
    sizes = [
        int(row[2].replace(",", ""))
        for row in rows(printed(tmp_path, "messages", "--engines", "200", "400", "--rounds", "2"))
    ]
    (two, twenty, all_200), (four, forty, all_400) = sizes[:3], sizes[3:]
    assert two < four < twenty < forty < all_200 < all_400
    assert two < all_200 / 30


def test_all_routers_of_a_fleet_count_the_same_load(tmp_path: Path) -> None:
    text = printed(tmp_path, "fleet", "--routers", "4", "--engines", "64", "--rate", "5", "--seconds", "3")
    heading = re.match(r"4 routers, 64 engines, (\d+) requests in flight \((\d+) counted\)", text)
    assert heading is not None
    assert heading[1] == heading[2]
    assert int(heading[1]) > 0
    changes, whole = rows(text)
    assert (changes[0], whole[0]) == ("changes", "whole load")
    raw = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [f"{row['bytes']:,.0f}" for row in raw] == [changes[1], whole[1]]
