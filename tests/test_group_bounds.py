"""`bench/group_bounds.py`: groups of instances that bounds could leave out."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "bench" / "group_bounds.py"


def test_a_record_needs_more_groups_than_the_choice() -> None:
    command = [sys.executable, str(SCRIPT), "--instances", "256", "--seconds", "2"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed.startswith("256 instances, 4 groups: ")
    choice, record = (float(n) for n in re.findall(r"(?:needs|record) (\d+\.\d)", printed))
    assert 1 <= choice <= record <= 4
