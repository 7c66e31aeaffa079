"""`bench/walk.py`: the files and functions that a request visits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# Files of features that the router of the walk does not use.
UNUSED = (
    *("server/api/jwks.py", "server/api/jwt.py", "server/api/issued.py", "server/api/key_source.py"),
    *("server/fleet/aliases.py", "server/fleet/levels.py", "server/http/falling_back.py"),
    *("server/observe/budgets.py", "server/execution/fallback.py"),
)
# The most files and functions that a request of a kind visits.
MOST = {"chat": (26, 65), "stream": (28, 78), "migration": (43, 197)}
WALK = Path(__file__).parents[1] / "bench" / "walk.py"
PACKAGE = WALK.parents[1] / "python" / "lmetric"
PAGE = WALK.parents[1] / "docs" / "research" / "performance.md"


@pytest.mark.parametrize("kind", MOST)
def test_a_walk_lists_the_calls_of_its_request_alone(kind: str) -> None:
    command = [sys.executable, str(WALK), kind, "--json", "--names"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    walk = json.loads(done.stdout)[kind]
    names = walk.pop("names")
    files = [each["file"] for each in names]
    assert files[0] == "server/http/connection.py"
    assert names[0]["function"] == "ClientConnection.data_received"
    assert not [file for file in files if file.startswith(("server/background", "server/discovery"))]
    assert not [file for file in files if file in UNUSED]
    assert all((PACKAGE / file).is_file() for file in UNUSED)
    most_files, most_functions = MOST[kind]
    assert most_files >= walk["files"] == len(set(files))
    assert most_functions >= walk["functions"] == len(names)
    assert walk["functions"] > walk["inner"] == sum(each["inner"] for each in names)
    assert walk["calls"] == sum(each["calls"] for each in names)


def test_the_page_has_the_figures_of_a_plain_chat() -> None:
    files, functions = MOST["chat"]
    assert f"(a plain chat: {files}, {functions}) | `python bench/walk.py`" in PAGE.read_text()
