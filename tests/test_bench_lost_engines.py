"""`bench/chaos/lost_engines.py`: streams through two workers while engines are lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "bench" / "chaos" / "lost_engines.py"
MOST_TURN_MS = 10.0  # of CPU time, p99


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_ten_minutes_of_lost_engines_lose_no_stream(tmp_path: Path) -> None:
    """The script fails if a stream of 2,000 at once is lost, or if a request is left."""
    file = tmp_path / "lost.json"
    subprocess.run([sys.executable, str(SCRIPT), "--seconds", "600", "--out", str(file)], check=True)
    found = json.loads(file.read_text())
    assert found["engines_lost"] > 50
    assert found["turn"]["p99_ms"] <= MOST_TURN_MS
