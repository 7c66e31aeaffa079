"""Each example runs and says what it promises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lmetric.config import load_config

EXAMPLES = Path(__file__).parent.parent / "examples"
SAYS = {
    "embed_router.py": "turn 3: ",
    "custom_policy.py": "did you mean `p_token`?",
    "gateway.py": "in_flight=0",
}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_program_runs(path: Path) -> None:
    words = [sys.executable, str(path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert SAYS[path.name] in done.stdout


def test_later_turns_of_a_conversation_find_its_prefix() -> None:
    path = EXAMPLES / "embed_router.py"
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=60, check=True)
    turns = [line for line in done.stdout.splitlines() if line.startswith("turn")]
    assert ", 0 of 2300 tokens cached" in turns[0]
    assert all(", 2000 of 2300 tokens cached" in turn for turn in turns[1:])


def test_configuration_loads() -> None:
    config = load_config(EXAMPLES / "config.yaml", environ={})
    assert [model.name for model in config.models] == ["chat", "code"]
    assert config.pool_settings(config.models[1]).policy == "vllm"
