"""`lmetric-router doctor` on emulated engines: every verdict, green and red; for real ones see tests/real."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from lmetric.cli.app import build
from lmetric.config import EngineConfig, PoolSettings
from lmetric.doctor import CHECKS, Examination, Level, Target, examine
from lmetric.engines.embedded import EmbeddedEngines
from lmetric.engines.emulated import EngineOptions
from lmetric.engines.emulated.text import CHAT_TEMPLATE, TOKENIZER_PATH

EVENTS = {"kv_events_endpoint": "tcp://127.0.0.1:*", "kv_events_replay_endpoint": "tcp://127.0.0.1:*"}

EVENTS_RED = ["kv_events", "block_hashes"]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """The emulated engines' tokenizer and template, as a model's folder has them."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(TOKENIZER_PATH.read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    return folder


async def examined(options: dict[str, Any], url: str | None = None, **settings: Any) -> Examination:
    """One emulated engine with these options, examined under these settings."""
    async with EmbeddedEngines(1, EngineOptions(clock_speed=20, **EVENTS | options)) as engines:
        target = Target(EngineConfig(url=engines.urls[0]), None, PoolSettings(**settings))
        (found,) = await examine([target])
        return found


def outcomes(found: Examination) -> dict[str, str]:
    return {name: str(verdict.outcome) for name, verdict in found.verdicts.items()}


async def test_all_green(tokenizer: Path) -> None:
    found = await examined({}, tokenizer=str(tokenizer))
    assert outcomes(found) == dict.fromkeys(CHECKS, "pass"), found
    assert found.level is Level.EXACT
    assert not any(found.wanting(level) for level in Level)


@pytest.mark.parametrize(
    ("options", "settings", "wanting", "says"),
    [
        ({"kv_events": False}, {}, EVENTS_RED, "--kv-events-config"),
        ({"cached_tokens": False}, {}, ["cached_tokens"], "--enable-prompt-tokens-details"),
        ({"metrics": False}, {}, ["load", "cancel"], "--disable-log-stats"),
        ({}, {"block_size": 32}, ["block_hashes"], "16 tokens"),
        ({}, {"kv_events": {"topic": "other"}}, EVENTS_RED, "topic 'other'"),
        ({}, {"kv_events": {"endpoint": "tcp://127.0.0.1:9"}}, EVENTS_RED, "nobody listens"),
        ({}, {"kv_events": "off"}, EVENTS_RED, "off in the configuration"),
        ({}, {"tokenizer": "off"}, ["tokenizer"], "off"),
        ({"tokenize": False}, {}, ["prefix_cache", "cached_tokens", *EVENTS_RED, "tokenizer"], "/tokenize"),
        ({"fail_status": 500}, {}, list(CHECKS)[1:-2], "told to fail"),
    ],
)  # fmt: skip
async def test_what_is_wrong_is_red_and_nothing_else(
    tokenizer: Path, options: dict[str, Any], settings: dict[str, Any], wanting: list[str], says: str
) -> None:
    found = await examined(options, **{"tokenizer": str(tokenizer)} | settings)
    assert found.wanting(Level.EXACT) == wanting, found
    first = found.verdicts[wanting[0]]
    assert says in f"{first.seen} {first.remedy}"


async def test_a_tokenizer_of_another_model(tokenizer: Path) -> None:
    file = tokenizer / "tokenizer_config.json"
    file.write_text(json.dumps({"chat_template": CHAT_TEMPLATE.replace("assistant", "the assistant")}))
    found = await examined({}, tokenizer=str(tokenizer))
    assert found.wanting(Level.EXACT) == ["tokenizer"]
    assert found.level is Level.APPROXIMATE


async def test_an_engine_that_connects_to_us(tokenizer: Path, unused_tcp_port: int) -> None:
    endpoint = f"tcp://127.0.0.1:{unused_tcp_port}"
    options = {"kv_events_endpoint": endpoint}
    silent = await examined(options, tokenizer=str(tokenizer))
    assert silent.wanting(Level.EXACT) == ["kv_events", "block_hashes"]
    assert endpoint in silent.verdicts["kv_events"].seen
    heard = await examined(options, tokenizer=str(tokenizer), kv_events={"endpoint": endpoint, "bind": True})
    assert heard.wanting(Level.EXACT) == []


def test_the_command(tokenizer: Path, unused_tcp_port: int, tmp_path: Path) -> None:
    dead = f"http://127.0.0.1:{unused_tcp_port}"
    app = build(["doctor"])
    shown = CliRunner().invoke(app, ["doctor", dead])
    assert shown.exit_code == 1
    assert "FAIL reachable: no connection: Connect" in shown.output
    said = CliRunner().invoke(app, ["doctor", "--json", "--require", "load", dead])
    assert said.exit_code == 1
    found = json.loads(said.stdout)
    assert (found["require"], found["good"]) == ("load", False)
    assert found["engines"][0]["good_for"] is None
    file = tmp_path / "router.yaml"
    file.write_text(yaml.safe_dump({"engines": [{"url": dead, "name": "first"}]}))
    named = CliRunner().invoke(app, ["doctor", "--config", str(file)])
    assert named.exit_code == 1
    assert "first" in named.stdout
