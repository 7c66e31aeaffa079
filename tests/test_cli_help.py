"""``--help``: groups, defaults and width, of every command."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import typer

from lmetric.cli.app import COMMANDS as NAMES
from lmetric.cli.app import GROUPS, build
from lmetric.cli.help import BASIC, DISAGGREGATION, EXPERIMENTAL, HELP_ALL, MAIN
from lmetric.cli.settings import _KEYS, _UNSET
from lmetric.config import ServerConfig
from lmetric.descriptions import descriptions
from lmetric_lab.emulated import EngineOptions
from lmetric_lab.sim.scenario import Scenario

GROUP: Any = typer.main.get_command(build(NAMES))


def commands() -> Iterator[tuple[str, Any]]:
    for name, command in GROUP.commands.items():
        nested = getattr(command, "commands", None)
        if nested is None:
            yield name, command
        else:
            yield from ((f"{name} {inner}", each) for inner, each in nested.items())


COMMANDS = dict(commands())


def help_of(name: str, *, everything: bool = True) -> str:
    """The help of a command; with all options if its first screen has some of them only."""
    command = COMMANDS[name]
    with command.make_context(name, [], resilient_parsing=True) as context:
        context.meta[HELP_ALL] = everything
        return str(command.get_help(context))


def entries(text: str) -> dict[str, str]:
    """The option entries of a help text, by first flag, each in one line."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("  -"):
            flag = re.split(r"[\s,]", line.strip())[0]
            found[flag] = line.strip()
        elif found and line.startswith(" " * 10):
            found[flag] += " " + line.strip()
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_80_columns_and_shows_each_default(name: str) -> None:
    text = help_of(name)
    assert max(map(len, text.splitlines())) <= 80
    switches = {
        opt
        for param in COMMANDS[name].params
        for opt in param.opts
        if getattr(param, "is_flag", False) and not param.secondary_opts
    }
    shown = entries(text)
    assert shown
    for flag, entry in shown.items():
        if flag not in switches | {"-h", "--help"}:
            assert re.search(r"\[.*(default: |required)", entry) or "with defaults" in entry, entry


def test_the_help_of_an_unset_setting_is_the_end_of_its_description() -> None:
    ends = {}
    for key in _KEYS.values():
        section: Any = ServerConfig
        for part in key.split("."):
            names = {field.alias or name: name for name, field in section.model_fields.items()}
            text = descriptions(section)[names[part]]
            field = section.model_fields[names[part]]
            section = next(iter(get_args(field.annotation)), field.annotation)
        _, found, words = text.rpartition("default: ")
        if found and not field.is_required() and field.get_default() in (None, [], {}):
            ends[key] = words.partition(";")[0]
    assert ends == _UNSET


@pytest.mark.parametrize("name", COMMANDS)
def test_long_help_has_groups_with_the_basics_first(name: str) -> None:
    text = help_of(name)
    sections = re.findall(r"^(\S.*):$", text, re.MULTILINE)
    options = [section for section in sections if section != "Arguments"]
    if len(entries(text)) <= 10:
        return
    assert options[0] == BASIC
    assert "Options" not in options
    last = [section for section in options if section in (DISAGGREGATION, EXPERIMENTAL)]
    assert options[len(options) - len(last) :] == last


def test_the_commands_are_listed_in_four_groups_and_not_cut() -> None:
    """UX C12: most lines ended in "..."."""
    with GROUP.make_context("lmetric-router", [], resilient_parsing=True) as context:
        text = str(GROUP.get_help(context))
    assert list(GROUPS) == ["Run", "Improve", "Try", "More"]
    for title, names in GROUPS.items():
        listed = text.partition(f"\n{title}:")[2].partition("\n\n")[0]
        assert all(f"\n  {name} " in listed for name in names), title
        assert "..." not in listed
    assert {name for names in GROUPS.values() for name in names} == GROUP.commands.keys()


@pytest.mark.parametrize("group", GROUPS)
def test_the_page_of_commands_has_the_groups_of_the_help(group: str) -> None:
    page = (Path(__file__).parents[1] / "docs/reference/cli.md").read_text()
    section = page.split(f"\n## {group}\n")[1].split("\n## ")[0]
    first_cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    assert {name for cell in first_cells for name in re.findall(r"`([\w-]+)`", cell)} == GROUPS[group].keys()


@pytest.mark.parametrize("name", ["serve", "epp", "config"])
def test_the_help_of_the_server_is_one_screen_and_names_the_rest(name: str) -> None:
    text = help_of(name, everything=False)
    assert len(text.splitlines()) <= 35
    assert "--help-all" in text
    known = {param.name for param in COMMANDS[name].params} | {"help"}
    assert name == "config" or set(MAIN) - known == {"changed", "schema"}
    assert len(help_of(name).splitlines()) > 70


def test_serve_shows_the_defaults_of_the_configuration() -> None:
    shown = entries(help_of("serve"))
    config = ServerConfig()
    for flag, value in (
        ("--host", config.host),
        ("--port", config.port),
        ("--policy", config.policy),
        ("--decode-policy", config.decode_policy),
        ("--migration-by", config.migration_by),
        ("--log-level", config.log.level),
    ):
        assert shown[flag].endswith(f"[default: {value}]")
    assert "theta=1.0" in shown["--programs-settings"]
    assert "max_kv_usage=1.0" in entries(help_of("simulate"))["--prefix-fetch-settings"]


def test_simulate_shows_the_defaults_of_the_function() -> None:
    """The flags are None if not given, so their help texts state the defaults of the function."""
    shown = entries(help_of("simulate"))
    defaults = {name: field.default for name, field in Scenario.model_fields.items()}
    for flag, name in (
        ("--binding", "binding"),
        ("--prefill", "prefill"),
        ("--local-order", "local_order"),
        ("--order-slo", "order_slo_seconds"),
        ("--preempt", "preempt"),
        ("--report-period", "report_period_seconds"),
        ("--event-delay", "event_delay_seconds"),
        ("--token-stride", "token_stride"),
        ("--routers", "routers"),
        ("--signals", "signals"),
        ("--admission", "admission"),
        ("--index", "index"),
        ("--profile", "profile"),
        ("--rebalance", "rebalance"),
        ("--priority", "priority"),
    ):
        value = defaults[name]
        words = f"{value:g}" if isinstance(value, float) else str(value)
        assert re.search(rf"\[default: {re.escape(words)}[;\]]", shown[flag]), shown[flag]


@pytest.mark.parametrize("name", ["simulate", "whatif", "report", "bench", "demo"])
def test_commands_that_compare_show_the_default_policy(name: str) -> None:
    (shown,) = re.findall(r"\[default: ([^\]]*)\]", entries(help_of(name))["--policy"])
    assert set(shown.split(", ")) - {"round_robin", "vllm"} == {ServerConfig().policy}


def test_engine_has_a_group_and_a_default_for_each_field() -> None:
    text = help_of("engine")
    shown = entries(text)
    for name, field in EngineOptions.model_fields.items():
        group, about, default = EngineOptions.help_of(name)
        entry = shown["--" + name.replace("_", "-")]
        assert f"{group}:\n" in text
        assert "".join(about.split()) in "".join(entry.split())
        if not isinstance(field.default, bool):
            assert f"[default:{''.join(default.split())}" in "".join(entry.split())


def test_help_loads_no_large_module() -> None:
    code = (
        "import sys; from lmetric.cli import main; sys.argv = ['lmetric-router', '--help']\n"
        "try: main()\n"
        "except SystemExit: print('modules:', *sys.modules)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    loaded = set(told.rpartition("modules: ")[2].split())
    assert "lmetric.cli.app" in loaded
    assert (
        loaded & {"aiohttp", "asyncio", "numpy", "orjson", "pydantic", "structlog", "uvloop", "yaml"} == set()
    )
