"""`config --changed` and `config --schema`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from lmetric.cli.app import build
from lmetric.config import ServerConfig, load_config
from lmetric.config.tuning import is_tuning
from lmetric.config.written import json_schema, render, render_changed

FILE = """
policy: linear
knobs: {lam: 0.5}
experimental: true
rebalance: {kind: star, forecast: curve}
engines: [{url: 'http://10.0.0.1:8000', name: first}]
timeouts: {connect: 1, drain: 30}
admin: true
"""


def test_init_prints_a_short_file_that_serve_accepts(tmp_path: Path) -> None:
    shown = CliRunner().invoke(build(["config"]), ["config", "init"])
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.count("\n") == 25
    file = tmp_path / "router.yaml"
    for text in (shown.stdout, re.sub(r"^# (?=( *\w+:)(?! router))", "", shown.stdout, flags=re.MULTILINE)):
        file.write_text(text)
        config = load_config(file, environ={"ADMIN_TOKEN": "secret"})
        assert [engine.url for engine in config.engines] == ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]
    assert config.auth is not None
    assert config.records is not None
    assert CliRunner().invoke(build(["config"]), ["config", "innit"]).exit_code == 2


def test_only_changed_settings_with_their_source(tmp_path: Path) -> None:
    file = tmp_path / "router.yaml"
    file.write_text(FILE)
    environ = {
        "LMETRIC__LOG__LEVEL": "debug",
        "LMETRIC__TIMEOUTS__ANSWER": "9",
        "LMETRIC__ADMIN__TOKEN": "secret-1",
    }
    config = load_config(file, {"port": 9000, "knobs": {"lam": 0.25}}, environ)
    text = render_changed(config)
    assert yaml.safe_load(text) == {
        "policy": "linear",
        "knobs": {"lam": 0.25},
        "experimental": True,
        "rebalance": {"kind": "star", "forecast": "curve"},
        "port": 9000,
        "engines": [{"url": "http://10.0.0.1:8000", "name": "first"}],
        "timeouts": {"connect": 1.0, "answer": 9.0},  # drain has its default
        "admin": {"enabled": True, "token": "**********"},
        "log": {"level": "debug"},
    }
    for line in (
        f"policy: linear  # {file}",
        "  lam: 0.25  # command line",
        "port: 9000  # command line",
        "  answer: 9.0  # LMETRIC__TIMEOUTS__ANSWER",
        "  level: debug  # LMETRIC__LOG__LEVEL",
    ):
        assert line in text.splitlines(), text
    del environ["LMETRIC__ADMIN__TOKEN"]
    plain = load_config(file, {"port": 9000, "knobs": {"lam": 0.25}, "admin.enabled": False}, environ)
    (tmp_path / "again.yaml").write_text(render_changed(plain))
    assert render(load_config(tmp_path / "again.yaml", environ={})) == render(plain)
    assert render_changed(load_config(environ={})) == "{}\n"


def test_changed_checks_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    app = build(["config"])
    done = CliRunner().invoke(app, ["config", "--changed", "--policy", "lmetrik"])
    assert (done.exit_code, done.stdout) == (1, "")  # main() turns the error into exit code 2
    assert "did you mean the policy 'lmetric'?" in str(done.exception)
    done = CliRunner().invoke(app, ["config", "--changed", "--port", "0"])
    assert done.stdout == "port: 0  # command line\n"


def test_the_schema_has_each_key_and_the_short_forms() -> None:
    done = CliRunner().invoke(build(["config"]), ["config", "--schema", "--policy", "lmetrik"])
    assert done.exit_code == 0
    schema = json.loads(done.stdout)
    assert schema == json.loads(json.dumps(json_schema()))
    assert schema["additionalProperties"] is False
    settings = {
        field.alias or name for name, field in ServerConfig.model_fields.items() if not is_tuning(field)
    }
    assert set(schema["properties"]) == settings | {"tuning"}
    tuning = schema["properties"]["tuning"]["properties"]
    assert tuning["admission"]["properties"].keys() == {"room_seconds"}
    assert not any(
        field.get("tuning") for each in schema["$defs"].values() for field in each["properties"].values()
    )
    assert all(each.get("description") for each in schema["properties"].values())
    assert schema["properties"]["port"]["default"] == 8080
    admin = schema["properties"]["admin"]["anyOf"]
    assert any(each.get("$ref") == "#/$defs/Admin" for each in admin)
    assert {"type": "boolean"} in admin or any({"type": "boolean"} in each.get("anyOf", []) for each in admin)
