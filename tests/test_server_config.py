"""The configuration: one schema, four sources, and errors that name the position."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from lmetric import Router
from lmetric.config import ConfigError, KvEvents, ServerConfig, load_config
from lmetric.config.kinds import Strict
from lmetric.config.written import render
from lmetric.descriptions import descriptions
from lmetric.options import LibraSplit, Star
from lmetric.server.api.issued import IssuedKeys
from lmetric.server.api.keys import Keys


def load(text: str, tmp_path: Path, overrides: Any = None, environ: Any = None) -> ServerConfig:
    file = tmp_path / "router.yaml"
    file.write_text(text or "{}")  # an empty file is refused
    return load_config(file, overrides, environ or {})


def test_the_file_is_read_once() -> None:
    """A pipe cannot be read again, and a file may be written meanwhile."""
    reading, writing = os.pipe()
    os.write(writing, b"null")
    os.close(writing)
    try:
        assert load_config(Path(f"/dev/fd/{reading}"), environ={}).port == ServerConfig().port
    finally:
        os.close(reading)


def test_flag_over_environment_over_file_over_default(tmp_path: Path) -> None:
    environ = {"LMETRIC__PORT": "2", "LMETRIC__TIMEOUTS__CONNECT": "7", "LMETRIC__HOST": "::1", "HOME": "/"}
    config = load("port: 1\nhost: a\ntimeouts: {drain: 9}", tmp_path, {"port": 3, "model": None}, environ)
    assert (config.port, config.host, config.timeouts.connect, config.timeouts.drain) == (3, "::1", 7.0, 9.0)
    assert config.timeouts.between_chunks == ServerConfig().timeouts.between_chunks
    engines = load("", tmp_path, None, {"LMETRIC__ENGINES": "[{url: 'http://h:1'}]"}).engines
    assert [engine.label for engine in engines] == ["h:1"]
    assert load("log: {json: true}", tmp_path, {"log.json": False}).log.json_lines is False
    mixed = load("policy: {score: bs}\nknobs: {a: 1}", tmp_path, {"policy": "linear", "knobs": {"lam": 0.5}})
    assert (mixed.policy, mixed.knobs) == ("linear", {"a": 1, "lam": 0.5})


@pytest.mark.parametrize(
    ("text", "overrides", "environ", "says"),
    [
        ("prot: 1", {}, {}, "router.yaml:1: prot = 1: unknown key; did you mean 'port'?"),
        (
            "timeouts: {conect: 3}",
            {},
            {},
            "router.yaml:1: timeouts.conect = 3: unknown key; did you mean 'connect'?",
        ),
        (
            "models: [{name: a, engins: []}]",
            {},
            {},
            "models[0].engins = []: unknown key; did you mean 'engines'?",
        ),
        (
            "host: a\ntimeouts:\n  drain: 1\n  conect: 3",
            {},
            {},
            "router.yaml:4: timeouts.conect = 3: unknown",
        ),
        (
            "host: a\nengines:\n- url: 'http://a'\n- url: 'http://b'\n  naem: c",
            {},
            {},
            "router.yaml:5: engines[1].naem = 'c': unknown key; did you mean 'name'?",
        ),
        ("log: {json: maybe}", {}, {}, "router.yaml:1: log.json = 'maybe': expected true or false"),
        ("limits: 3", {}, {}, "router.yaml:1: limits = 3: expected a mapping"),
        (
            "host: a\nlimits: {max_connections: many}",
            {"port": "x"},
            {},
            "command line: port = 'x': expected an",
        ),
        ("engines: [{uri: 'http://h'}]", {}, {}, "router.yaml:1: engines[0].uri"),
        ("port: x", {}, {}, "router.yaml:1: port = 'x': expected an integer"),
        ("", {"port": 99999}, {}, "command line: port = 99999: expected at most 65535"),
        (
            "",
            {"timeouts.connect": "-1"},
            {},
            "command line: timeouts.connect = '-1': expected above 0",
        ),
        ("", {}, {"LMETRIC__PRT": "1"}, "LMETRIC__PRT: prt = '1': unknown key; did you mean 'port'?"),
        ("", {}, {"LMETRIC__ENGINES": "[{"}, "LMETRIC__ENGINES: not readable as YAML"),
        ("engines: [{url: 'http://h/v1'}]", {}, {}, "leave out the /v1"),
        ("engines: [{url: 'h:8000'}]", {}, {}, "an engine's URL looks like http://host:port"),
        ("engines: [{url: 'http://h', name: 'a b'}]", {}, {}, "engines[0].name = 'a b'"),
        ("engines: [{url: 'http://h'}, {url: 'http://h'}]", {}, {}, "two engines are named 'h'"),
        ("models: [{name: a}, {name: b, adapters: [a]}]", {}, {}, "two models are named 'a'"),
        ("port: 1\nport: 2", {}, {}, "router.yaml:2: duplicate key 'port'"),
        ("port: [\n", {}, {}, "router.yaml:2: "),
        ("- 1", {}, {}, "expected a mapping, found list"),
        ("1: 2", {}, {}, "key 1 is not a name"),
        ("aliases: {4: m}", {}, {}, "router.yaml: key 4 in aliases is not a name; put it in quotes"),
        ("aliases: {on: m}", {}, {}, "router.yaml: key True in aliases is not a name; put it in quotes"),
        ("cors: {origins: [crash]}", {}, {}, "cors.origins[0] = 'crash'"),
        ("kv_events: sometimes", {}, {}, "kv_events = 'sometimes': expected auto, off, or a mapping"),
        ("kv_events: {endpont: a}", {}, {}, "unknown key; did you mean 'endpoint'?"),
        ("kv_events: {endpoint: 'tcp://*'}", {}, {}, "kv_events.endpoint = 'tcp://*': a ZMQ endpoint"),
        (
            "kv_events: {endpoint: 'tcp://:5557'}",
            {},
            {},
            "kv_events.endpoint = 'tcp://:5557': a ZMQ endpoint",
        ),
        ("kv_events: {endpoint: 'tcp://h:٣'}", {}, {}, "kv_events.endpoint = 'tcp://h:٣': a ZMQ endpoint"),
        ("workers: '٣'", {}, {}, "workers = '٣': expected a number of processes from 1 to 8"),
        ("log: {json_lines: true}", {}, {}, "log.json_lines = True: unknown key; did you mean 'json'?"),
        (
            "discovery: [{kubernetes: {selector: s, port: '٣'}}]",
            {},
            {},
            "discovery[0].kubernetes.port = '٣': a port is a number",
        ),
        ("kv_events: {bind: true}", {}, {}, "bind needs an endpoint"),
        ("engines: [{url: 'http://h', kv_events: {topic: 3}}]", {}, {}, "engines[0].kv_events.topic = 3"),
    ],
)
def test_errors_name_the_place(text: str, overrides: Any, environ: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(text, tmp_path, overrides, environ)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "admin: {tokn: hunter2}",
        "enginess: [{url: 'http://h', api_key: hunter2}]",
        "engines: [{url: 'http://h', apikey: hunter2}]",
        "replicas: {redis_ur: 'redis://:hunter2@h'}",
        "secrets: {a: [hunter2]}",
        "engines: [{url: 'http://h', bearer: hunter2}]",
        "engines: [{url: 'http://u:hunter2@a:1'}]",
        "engines: [{url: 'http://:hunter2@a:1'}]",
        "engines: [{url: 'http://hunter2@a:1'}]",
        "engines: [{url: 'http://@a:1'}]",
        "engines: [{url: 'http://u:hunter2/x@a:1'}]",
        "engines: [{url: 'http://u:[hunter2]@a:1'}]",
        "replicas: {urls: ['http://:hunter2@a:1']}",
        "tracing: {endpoint: 'http://:hunter2@a:1'}",
        "auth: {jwt: [{issuer: i, audience: a, tenant_claim: t, jwks: 'https://:hunter2@a/k'}]}",
        "auth: {jwt: [{issuer: i, audience: a, tenant_claim: t, jwks: 'https://u:[hunter2]@a/k'}]}",
    ],
)
def test_secrets_in_wrong_places_are_not_shown(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown key|has no user|without user|URL looks like") as caught:
        load(text, tmp_path)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "end", ["s3cret/x@host:6379/0", "[s3cret/x@host", "[s3cret]@host", "s3cret\u2100@host"]
)
def test_errors_about_a_redis_url_do_not_show_its_password(end: str) -> None:
    with pytest.raises(
        ConfigError, match=r"a Redis URL looks like .*; write special char.* as %XX"
    ) as caught:
        load_config(None, {"replicas.redis_url": f"redis://router:{end}"}, environ={})
    assert "s3cret" not in str(caught.value)


def test_kv_events_in_each_form(tmp_path: Path) -> None:
    # YAML reads off as false.
    for text, meant in (("kv_events: off", "off"), ("kv_events: 'off'", "off"), ("kv_events: auto", "auto")):
        config = load(text, tmp_path)
        assert config.kv_events == meant
        assert load(render(config), tmp_path) == config
    engine = "{url: 'http://h', kv_events: {endpoint: 'tcp://*:5557', bind: true}}"
    config = load(f"models: [{{name: a, kv_events: off, engines: [{engine}]}}]", tmp_path)
    [model] = config.models
    assert (config.pool_settings(model).kv_events, config.kv_events) == ("off", "auto")
    assert isinstance(model.engines[0].kv_events, KvEvents)
    assert load(render(config), tmp_path) == config


@pytest.mark.parametrize("value", ["bogus", 7, ["off"]])
def test_a_wrong_kv_events_names_each_form(tmp_path: Path, value: Any) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(f"engines: ['http://127.0.0.1:1']\nkv_events: {value}\n")
    with pytest.raises(
        ConfigError, match=r"expected auto, off, or a mapping of endpoint, .*without_tokenizer"
    ):
        load_config(file)


def test_an_engine_may_be_its_url(tmp_path: Path) -> None:
    """ux.md 3.16: the error was "Input should be a valid dictionary or instance of ..."."""
    config = load("engines: [http://a:1, {url: 'http://b:2', name: b}]", tmp_path)
    assert [(engine.url, engine.label) for engine in config.engines] == [
        ("http://a:1", "a:1"),
        ("http://b:2", "b"),
    ]
    with pytest.raises(ConfigError, match=r"engines\[0\]\.url = 'a:1': an engine's URL looks like"):
        load("engines: ['a:1']", tmp_path)


def test_missing_file_and_all_errors_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "none.yaml", environ={})
    with pytest.raises(ConfigError) as caught:
        load("prot: 1\nlog: {level: loud}", tmp_path)
    assert len(str(caught.value).splitlines()) == 2


def test_secrets_are_masked_everywhere(tmp_path: Path) -> None:
    config = load("engines: [{url: 'http://h:1', api_key: sekret}]", tmp_path)
    assert "sekret" not in render(config) + repr(config)
    with pytest.raises(ConfigError) as caught:
        load("engines: [{url: 'http://h:1', api_key: [sekret]}]", tmp_path)
    assert "sekret" not in str(caught.value)


def test_the_rendered_configuration_is_one(tmp_path: Path) -> None:
    # A model that inherits `policy` once showed, and so got, the default.
    config = load("policy: round_robin\nmodels: [{name: a}, {name: b, policy: lmetric}]", tmp_path)
    again = load(render(config), tmp_path)
    assert again == config
    assert [again.pool_settings(model).policy for model in again.models] == ["round_robin", "lmetric"]
    config = load("models: [{name: a, policy: {score: bs}, engines: [{url: 'http://h:1'}]}]", tmp_path)
    assert load(render(config), tmp_path) == config
    sources = "{file: a}, {dns: {name: n, port: 1}}, {kubernetes: {selector: s, port: http}}"
    config = load(f"discovery: [{sources}, {{kubernetes: {{selector: t, port: '80'}}}}]", tmp_path)
    assert load(render(config), tmp_path) == config
    assert [source.kubernetes.port for source in config.discovery if source.kubernetes] == ["http", 80]


def test_every_setting_is_described() -> None:
    def walk(section: type[BaseModel], path: str) -> None:
        described = descriptions(section)
        for name, field in section.model_fields.items():
            assert described.get(name), f"{path}{name}"
            if isinstance(field.annotation, type) and issubclass(field.annotation, Strict):
                walk(field.annotation, f"{path}{name}.")

    walk(ServerConfig, "")
    from lmetric.config import (
        DiscoverySource,
        DnsSource,
        EngineConfig,
        KubernetesSource,
        ModelConfig,
    )

    walk(EngineConfig, "engines.")
    walk(DiscoverySource, "discovery.")
    walk(DnsSource, "discovery.dns.")
    walk(KubernetesSource, "discovery.kubernetes.")
    walk(ModelConfig, "models.")


def test_pool_settings_fall_back_to_the_top_level(tmp_path: Path) -> None:
    config = load(
        "policy: linear\nknobs: {lam: 1}\nblock_size: 32\nmodels: [{name: a, policy: bs}, {name: b}]",
        tmp_path,
    )
    own, other = (config.pool_settings(model) for model in config.models)
    assert (own.policy, own.knobs, own.block_size) == ("bs", {}, 32)
    assert (other.policy, other.knobs) == ("linear", {"lam": 1})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no keys in it"),
        ("sk-secret: 3", "entry 1: expected a key and a tenant"),
        ("sha256:abc: t", "entry 1: expected 64 hexadecimal digits after sha256:"),
        ("[1]", "expected a mapping"),
        ("sk-secret: a\nsk-other: b\nsk-secret: c\n", "keys.yaml:3: duplicate key"),
    ],
)
def test_key_files(text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says) as caught:
        Keys.load(file, IssuedKeys(stored=False))
    assert "sk-" not in str(caught.value).removeprefix(str(file))


def test_documented_yaml_keys_are_not_words_that_yaml_reads_otherwise() -> None:
    """`on`, `yes`, `no`: YAML reads them as booleans."""

    def keys(value: Any) -> Any:
        if isinstance(value, dict):
            for key, inner in value.items():
                yield key
                yield from keys(inner)

    for key in keys(ServerConfig().model_dump(mode="json")):
        assert yaml.safe_load(key) == key


FORECASTS = ("given", "bins_2", "bins_4", "bins_6", "llm_native", "pia", "mu_serve", "tetri_infer")


@pytest.mark.parametrize("place", ["", "models: [{name: m, "], ids=["top level", "model"])
@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("split", "{kind: libra, parts: 3}", "split.parts = 3: it is for simulations only .* remove it"),
        (
            "split",
            "{kind: libra, lengths_given: true}",
            "split.lengths_given = True: it is for simulations",
        ),
        *(
            (
                "rebalance",
                f"{{kind: star, forecast: {name}}}",
                f"rebalance.forecast = '{name}': {name} is for simulations only",
            )
            for name in FORECASTS
        ),
        (
            "rebalance",
            "{kind: star, forecast_seed: 1}",
            "rebalance.forecast_seed = 1: it is for simulations only",
        ),
        *(
            ("rebalance", kind, f"rebalance = '{kind}': it is for simulations only .* none, star$")
            for kind in ("star_oracle", "star_current", "llumnix")
        ),
        (
            "rebalance",
            "{kind: star, forecast: curve, forecast_seed: 0}",
            "rebalance.forecast_seed = 0: it is",
        ),
        ("programs", "thunder_agent", "programs = 'thunder_agent': it is for simulations only"),
        ("programs", "{kind: admit, gap_error: 1.0}", "programs.gap_error = 1.0: it is for simulations only"),
        ("split", "{kind: force, fraction: 0.5}", "split = 'force': it is for simulations only"),
        ("prefix_fetch", "{pinned: false}", "prefix_fetch.pinned = False: it is for simulations only"),
    ],
)
def test_what_only_a_simulation_knows_is_refused(
    key: str, value: str, says: str, place: str, tmp_path: Path
) -> None:
    """Fidelity gap 5: the server refuses simulator settings that it does not support."""
    with pytest.raises(ConfigError, match=f"{re.escape('models[0].') if place else ''}{says}") as caught:
        load(f"{place}{key}: {value}{'}]' if place else ''}", tmp_path)
    assert f"router.yaml:1: {'models[0].' if place else ''}{key}" in str(caught.value)
    kept = load("split: libra\nrebalance: {kind: star, forecast: curve}", tmp_path)
    assert (kept.split, kept.rebalance) == (LibraSplit(), Star())


def test_the_simulator_keeps_what_only_it_knows() -> None:
    """Fidelity gap 5: the simulator keeps simulated forecasts and plans of three segments."""
    for forecast in ("curve", *FORECASTS):
        Router().configure(rebalance=Star(forecast=forecast))
    Router().configure(rebalance=Star(forecast="given"))
    Router().configure(split=LibraSplit(parts=3.0))
