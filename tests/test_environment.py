"""Settings from the environment, and secrets that refer to it.

Findings: Kubernetes service links; bugs 35, `${NAME}` was sent as the key itself; Python 6.10, a
token that begins with a bracket was read as YAML. Security L: `api_key` with a line break.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel, SecretStr, ValidationError

from lmetric.config import ConfigError, EngineConfig, ServerConfig, load_config, read_secret
from lmetric.config.files import SECRETS as SECRET_NAMES
from lmetric.config.kinds import Strict
from lmetric.config.load import _SERVICE_LINK, ENV_PREFIX, _is_secret
from lmetric.server.api.issued import IssuedKeys
from lmetric.server.api.keys import Keys
from test_server_process import router


def service_links(service: str, port: int, name: str = "http") -> dict[str, str]:
    """The variables that a kubelet adds for a Service (pkg/kubelet/envvars)."""
    own = service.upper().replace("-", "_")
    address = "10.96.0.12"
    url = f"tcp://{address}:{port}"
    return {
        f"{own}_SERVICE_HOST": address,
        f"{own}_SERVICE_PORT": str(port),
        f"{own}_SERVICE_PORT_{name.upper().replace('-', '_')}": str(port),
        f"{own}_PORT": url,
        f"{own}_PORT_{port}_TCP": url,
        f"{own}_PORT_{port}_TCP_PROTO": "tcp",
        f"{own}_PORT_{port}_TCP_PORT": str(port),
        f"{own}_PORT_{port}_TCP_ADDR": address,
    }


SERVICES = ["lmetric-router", "lmetric", "lmetric-routers", "lmetric--router", "lmetric-epp", "lmetricx"]
LINKS = {name: value for each in SERVICES for name, value in service_links(each, 8080, "http-0").items()}


async def test_a_router_starts_with_the_variables_of_services() -> None:
    """In a pod of a namespace with Services named like this router."""
    async with router("--embedded", "1", environ=LINKS) as process:
        await process.listening()
        assert not [line for line in process.log if "environment variables" in line]


def test_no_variable_of_a_service_is_a_setting_or_a_warning() -> None:
    assert len(LINKS) == 48
    config = load_config(environ=LINKS)
    assert config == load_config(environ={})
    assert config.ignored_variables == ()


def keys(section: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """All keys that a variable can set."""
    for name, field in section.model_fields.items():
        here = (*path, field.alias or name)
        yield here
        for inner in [field.annotation, *get_args(field.annotation)]:
            if isinstance(inner, type) and issubclass(inner, Strict):
                yield from keys(inner, here)


def test_no_setting_has_the_variable_of_a_service() -> None:
    names = [ENV_PREFIX + "__".join(path).upper() for path in keys(ServerConfig)]
    assert "LMETRIC__EPP__PORT" in names
    assert not [name for name in names if _SERVICE_LINK.fullmatch(name)]
    assert all(_SERVICE_LINK.fullmatch(name) for name in LINKS)


def test_other_variables_are_named_and_typing_errors_are_errors() -> None:
    config = load_config(
        environ={"LMETRIC_TIMEOUTS__CONNECT": "1", "LMETRICS": "2", "LMETRIC_TRACE_DIR": "x"}
    )
    assert config.ignored_variables == ("LMETRICS", "LMETRIC_TIMEOUTS__CONNECT")
    assert config.timeouts.connect == ServerConfig().timeouts.connect
    with pytest.raises(ConfigError, match="LMETRIC__PRT: prt = '1': unknown key; did you mean 'port'"):
        load_config(environ={"LMETRIC__PRT": "1"})


async def test_a_start_names_the_ignored_variables() -> None:
    environ = {"LMETRIC_LOG__LEVEL": "debug", "LMETRIC_PORT": "9000", "LMETRIC__LOG__LEVEL": "warning"}
    async with router("--engine", "http://127.0.0.1:9", environ=environ) as process:
        await process.listening()
        (line,) = [line for line in process.log if "environment variables ignored" in line]
        assert "LMETRIC_LOG__LEVEL" in line
        assert "LMETRIC_PORT" in line
        assert "LMETRIC__LOG" not in line


def load(text: str, folder: Path, **environ: str) -> ServerConfig:
    file = folder / "router.yaml"
    file.write_text(text)
    return load_config(file, None, environ)


SECRETS: dict[str, Any] = {
    "engines: [{url: 'http://h', api_key: VALUE}]": lambda it: it.engines[0].api_key,
    "models: [{name: m, engines: [{url: 'http://h', api_key: VALUE}]}]": (
        lambda it: it.models[0].engines[0].api_key
    ),
    "discovery: [{file: a, api_key: VALUE}]": lambda it: it.discovery[0].api_key,
    "admin: {token: VALUE}": lambda it: it.admin.token,
    "replicas: {token: VALUE}": lambda it: it.replicas.token,
    "tracing: {token: VALUE}": lambda it: it.tracing.token,
    "auth: {salt_secret: VALUE}": lambda it: it.auth.salt_secret,
}


SHAPES = ["$NAME", "os.environ/NAME", "$(NAME)", "{{ NAME }}", "sk-${NAME}", "${NAME:-x}", "{{NAME}}"]


def secret_keys(section: type[BaseModel], seen: set[type[BaseModel]]) -> Iterator[tuple[str, str]]:
    """Section and key of each secret in the schema."""
    seen.add(section)
    for name, field in section.model_fields.items():
        if _is_secret(field.annotation):
            yield section.__name__, name
        for inner in sections(field.annotation):
            if inner not in seen:
                yield from secret_keys(inner, seen)


def sections(kind: Any) -> Iterator[type[BaseModel]]:
    if isinstance(kind, type) and issubclass(kind, Strict):
        yield kind
    for part in get_args(kind):
        yield from sections(part)


def test_the_table_of_this_module_has_all_secrets() -> None:
    found = set(secret_keys(ServerConfig, set()))
    assert found == {
        ("EngineConfig", "api_key"), ("DiscoverySource", "api_key"), ("Admin", "token"),
        ("ReplicasConfig", "token"), ("ReplicasConfig", "redis_url"), ("TracingConfig", "token"),
        ("Auth", "salt_secret"),
    }  # fmt: skip
    assert {name for _, name in found} == SECRET_NAMES


@pytest.mark.parametrize("text", SECRETS)
def test_a_secret_may_name_a_variable(text: str, tmp_path: Path) -> None:
    read = SECRETS[text]
    quoted = text.replace("VALUE", "'${THE_KEY}'")
    config = load(quoted, tmp_path, THE_KEY="[s3cret$x]")
    assert read(config).get_secret_value() == "[s3cret$x]"
    for environ in ({}, {"THE_KEY": ""}):
        with pytest.raises(ConfigError, match=r"router.yaml: .*: the variable THE_KEY is not set") as caught:
            load(quoted, tmp_path, **environ)
        assert "s3cret" not in str(caught.value)
    with pytest.raises(ConfigError, match="visible ASCII"):
        load(quoted, tmp_path, THE_KEY="a\r\nX-Evil: 1")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("text", SECRETS)
def test_other_references_are_refused_with_the_way_that_works(text: str, shape: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(text.replace("VALUE", f"'{shape}'"), tmp_path, NAME="s3cret")
    assert "s3cret" not in str(caught.value)
    part = shape == "sk-${NAME}"
    expected = "${NAME} must be the whole value" if part else "write ${NAME} as the whole value"
    assert expected in str(caught.value)


def test_variables_and_flags_may_name_a_variable_too() -> None:
    assert load_config(environ={"LMETRIC__ADMIN__TOKEN": "${T}", "T": "x"}).admin.token == SecretStr("x")
    flagged = load_config(None, {"admin.token": "${T}"}, {"T": "x"})
    assert flagged.admin.token == SecretStr("x")
    with pytest.raises(ConfigError, match=r"LMETRIC__ADMIN__TOKEN: admin\.token: the variable T is not set"):
        load_config(environ={"LMETRIC__ADMIN__TOKEN": "${T}"})


def test_references_outside_of_secrets_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model: \$\{M\} is expanded only in .* or set LMETRIC__MODEL"):
        load("model: ${M}", tmp_path, M="x")
    with pytest.raises(ConfigError, match=r"engines\[0\].name: \$\{M\} is expanded only in secrets"):
        load("engines: [{url: 'http://h', name: '${M}'}]", tmp_path, M="x")


@pytest.mark.parametrize("secret", ["[abc", "{abc", "{a: b}", "[1]"])
def test_a_secret_may_begin_with_a_bracket(secret: str, tmp_path: Path) -> None:
    if " " in secret:
        with pytest.raises(ConfigError, match="visible ASCII"):
            load_config(environ={"LMETRIC__ADMIN__TOKEN": secret})
        return
    for config in (
        load_config(environ={"LMETRIC__ADMIN__TOKEN": secret}),
        load_config(None, {"admin.token": secret}, {}),
    ):
        assert config.admin.token == SecretStr(secret)


def test_texts_are_not_read_as_yaml_and_lists_are() -> None:
    assert load_config(environ={"LMETRIC__MODEL": "[x]"}).model == "[x]"
    assert load_config(environ={"LMETRIC__PATHS": "[/a, /b]"}).paths == ["/a", "/b"]
    assert load_config(environ={"LMETRIC__POLICY": "{score: bs}"}).policy == {"score": "bs"}
    assert load_config(environ={"LMETRIC__TENANTS__A": "{weight: 2}"}).tenants["a"].weight == 2


@pytest.mark.parametrize("content", ["${NAME}", "$NAME", "{{NAME}}", "a b", ""])
def test_files_with_secrets_and_keys_hold_no_references(content: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(content)
    with pytest.raises(ConfigError, match="the content is not a token"):
        read_secret(None, file)
    file.write_text("$a.b[]\n")
    assert read_secret(None, file) == "$a.b[]"
    if content and " " not in content:
        file.write_text(f"'{content}': tenant\n")
        with pytest.raises(ConfigError, match="entry 1: the key looks like a reference"):
            Keys.load(file, IssuedKeys(stored=False))


def test_engines_of_others_expand_no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of engines and administrators must not read the router's environment."""
    monkeypatch.setenv("SECRET_OF_ROUTER", "x")
    for key in ("${SECRET_OF_ROUTER}", "$SECRET_OF_ROUTER", "a\r\nX-Evil: 1", "a b", "", "\u00e9"):
        with pytest.raises(ValidationError):
            EngineConfig.model_validate({"url": "http://h", "api_key": key})


@pytest.mark.parametrize(
    "url", ["http://h/ a", "http://h\n:1", "http://h/\r\nX-Evil: 1", "http://h /", "http://\u00e9"]
)
def test_urls_have_no_spaces_and_line_breaks(url: str) -> None:
    for section in (
        {"engines": [{"url": url}]}, {"replicas": {"urls": [url]}}, {"tracing": {"endpoint": url}},
        {"cors": {"origins": [url]}},
    ):  # fmt: skip
        with pytest.raises(ValidationError, match="visible ASCII"):
            ServerConfig.model_validate(section)
    with pytest.raises(ValidationError):
        ServerConfig.model_validate({"health": {"path": "/" + url}})
