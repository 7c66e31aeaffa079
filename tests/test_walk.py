"""`bench/walk.py`: the files and functions that a request visits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

WALK = Path(__file__).parents[1] / "bench" / "walk.py"


def test_a_walk_lists_the_calls_of_its_request_alone() -> None:
    command = [sys.executable, str(WALK), "stream", "--json", "--names"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    walk = json.loads(done.stdout)["stream"]
    names = walk.pop("names")
    files = [each["file"] for each in names]
    assert files[0] == "server/http/connection.py"
    assert names[0]["function"] == "ClientConnection.data_received"
    assert not [file for file in files if file.startswith(("server/background", "server/discovery"))]
    assert walk["files"] == len(set(files))
    assert walk["functions"] == len(names) > walk["inner"] == sum(each["inner"] for each in names)
    assert walk["calls"] == sum(each["calls"] for each in names)
