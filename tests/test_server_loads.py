"""Servers load the modules of configured features only."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
import yaml

from lmetric.server.http.pages import administration
from lmetric.server.http.pages.call import ADMINISTRATION, is_administration
from lmetric.server.http.pages.table import PAGES
from test_server_process import RUN, engine, router
from tls_world import Authority, needs_openssl
from token_folders import byte_level, write_folder

SERVER = "lmetric.server"
WAYS = f"{SERVER}.execution.ways"
# Lines of `lmetric` in a plain server that has answered a request, and those that
# `import lmetric.server.app` loads. With a new feature, they stay.
MOST_LINES, MOST_IMPORTED_LINES = 25_500, 24_000


class Feature(NamedTuple):
    """A setting with the modules that only it loads, and others of this table."""

    values: dict[str, Any]
    modules: tuple[str, ...]


TRIALS = tuple(f"{SERVER}.fleet.{name}" for name in ("trials", "canary", "shadow"))
# Values in angle brackets stand for files of the test.
CONFIGURED = {
    "records.path": Feature(
        {"records": {"path": "<folder>"}},
        (
            *(f"{SERVER}.observe.recorder", f"{SERVER}.observe.record_writer"),
            "lmetric.record_schema",
        ),
    ),
    "replicas.urls": Feature(
        {"replicas": {"urls": ["http://127.0.0.1:9"]}},
        (
            *(f"{SERVER}.background.replicas", f"{SERVER}.background.addresses"),
            *(f"{SERVER}.background.key_exchange", f"{SERVER}.background.stored_search"),
            *(f"{SERVER}.http.pages.peers", f"{SERVER}.observe.key_store"),
            f"{SERVER}.upstream.request_errors",
        ),
    ),
    "replicas.redis_url": Feature(
        {"replicas": {"redis_url": "redis://127.0.0.1:9"}},
        (f"{SERVER}.background.redis_budgets", "redis"),
    ),
    "canary": Feature(
        {"canary": {"policy": "least_requests", "share": 0.1}},
        (*TRIALS, f"{SERVER}.fleet.canary_run", "lmetric.canary"),
    ),
    "shadow": Feature({"shadow": {"policy": "least_requests"}}, TRIALS),
    "admin.enabled": Feature(
        {"admin": True},
        (
            *(*TRIALS, f"{SERVER}.fleet.canary_run", f"{SERVER}.fleet.replacement"),
            f"{SERVER}.upstream.allowed",
            *(f"{SERVER}.http.pages.{name}" for name in ("administration", "admin", "canary", "keys")),
            *(f"{SERVER}.http.pages.{name}" for name in ("members", "usage", "workers")),
        ),
    ),
    "priority": Feature({"priority": "vtc"}, (f"{SERVER}.fleet.priority",)),
    "tls": Feature(
        {"tls": {"certificate_file": "<certificate>", "key_file": "<key>"}},
        (f"{SERVER}.tls.contexts", f"{SERVER}.http.tls_listener"),
    ),
    "engines[].tls": Feature({"engines": [{"url": "https://127.0.0.1:9"}]}, (f"{SERVER}.tls.contexts",)),
    "state_folder": Feature(
        {"state_folder": "<folder>"}, (f"{SERVER}.observe.state", f"{SERVER}.observe.key_store")
    ),
    "tracing": Feature(
        {"tracing": {"endpoint": "http://127.0.0.1:9"}},
        (f"{SERVER}.observe.tracing.export", f"{SERVER}.execution.trace", "opentelemetry"),
    ),
    "fallbacks": Feature(
        {"fallbacks": {"large": ["small"]}},
        (f"{SERVER}.http.falling_back", f"{SERVER}.execution.fallback"),
    ),
    "hedging": Feature({"hedging": {"after_seconds": 1.0}}, (f"{WAYS}.hedge",)),
    "hedge_after_seconds": Feature(
        {"models": [{"name": "tiny", "admission": {"classes": {"chat": {"hedge_after_seconds": 1.0}}}}]},
        (f"{WAYS}.hedge",),
    ),
    "split": Feature(
        {"policy": "planner", "model": "tiny", "experimental": True}, (f"{WAYS}.split", f"{WAYS}.pair")
    ),
    "role: prefill": Feature(
        {"engines": [{"url": "http://127.0.0.1:9", "role": "prefill"}], "model": "tiny"},
        (f"{WAYS}.split", f"{WAYS}.pair", f"{SERVER}.fleet.transfer"),
    ),
    "role: encode": Feature(
        {"engines": [{"url": "http://127.0.0.1:9", "role": "encode"}], "model": "tiny"},
        (f"{WAYS}.encode",),
    ),
    "rebalance": Feature(
        {"rebalance": "star", "model": "tiny"},
        ("lmetric.option_values", f"{SERVER}.fleet.rebalancer", f"{WAYS}.move"),
    ),
    "fleet_changes": Feature(
        {"fleet_changes": "warm", "model": "tiny"},
        (f"{SERVER}.fleet.rebalancer", f"{SERVER}.fleet.changes", f"{WAYS}.move"),
    ),
    "prefix_fetch": Feature({"prefix_fetch": True, "model": "tiny"}, (f"{WAYS}.copy",)),
    "policy": Feature(
        {"policy": "bs + 1"},
        ("lmetric.policies", "lmetric.expr", "lmetric.plugins"),
    ),
    "indicators": Feature({"indicators": {"heat": {"source": "header"}}}, ("lmetric.expr",)),
    "profile": Feature({"profile": "independent-sim"}, ("lmetric.profiles",)),
    "tokenizer": Feature(
        {"tokenizer": "<tokenizer>"}, ("lmetric.tokens.prompt", "lmetric.tokens.template", "jinja2")
    ),
    "log.access": Feature({"log": {"access": True}}, (f"{SERVER}.observe.access_log",)),
    "cors": Feature({"cors": {"origins": ["*"]}}, (f"{SERVER}.http.cors",)),
    "discovery": Feature(
        {"discovery": [{"file": "<engines>"}]},
        tuple(f"{SERVER}.discovery.{name}" for name in ("followed", "source", "file")),
    ),
}

# Loaded by the first call of a page: in a thread if it takes more than a few milliseconds.
CALLED = {
    "/": (f"{SERVER}.http.home",),
    "/metrics": (
        *(f"{SERVER}.observe.{name}" for name in ("families", "request_families", "exposition")),
        *(f"{SERVER}.observe.{name}" for name in ("instances", "admission", "build", "outliers")),
        *(f"{SERVER}.observe.{name}" for name in ("programs", "trials")),
    ),
    "/openapi.json": (f"{SERVER}.api.openapi", f"{SERVER}.http.pages.table"),
    "/debug/engines": (f"{SERVER}.http.pages.debug", f"{SERVER}.http.pages.engines"),
    "/debug/live": (
        f"{SERVER}.http.live",
        *(f"{SERVER}.observe.{name}" for name in ("live_view", "live_problems", "hot")),
    ),
    "/readiness": (f"{SERVER}.http.pages.sessions",),
}
# Loaded by other commands, by several processes and by the page of a decision. Also by files of
# policies, policies on trial, embedded engines, tokenizers of the Hub and compressed bodies.
OTHERS = (
    *("grpc", f"{SERVER}.epp.picker", f"{SERVER}.supervisor.supervisor", f"{SERVER}.worker.worker"),
    *("lmetric.why", f"{SERVER}.background.policy_watch", f"{SERVER}.fleet.policy_files"),
    *(f"{SERVER}.background.downloads", f"{SERVER}.embedded", f"{SERVER}.http.unpacking"),
    f"{WAYS}.parsed",  # by an engine that parses
    f"{SERVER}.api.error_codes",  # by many refused requests
    "lmetric.tokens.download",  # by a tokenizer of the Hub
    "lmetric.engines.connectors",  # by an engine that reports KV transfers
    "lmetric.engines.sglang",  # by an engine of this kind
    f"{SERVER}.fleet.subset",
    f"{SERVER}.fleet.engine_addresses",
    # By an engine whose tokenizer is known, and by a request for its model.
    *(f"{SERVER}.fleet.token_check", f"{SERVER}.http.tokenizing"),
    # By an engine with KV events or with rules for its address.
    *(f"{SERVER}.fleet.{name}" for name in ("kv_events", "kv_choice", "kv_backfill")),
)
# Loaded at the start: a failover must not need a file that an upgrade may have replaced meanwhile.
ALWAYS = ("plain", "chain", "abort")
OPTIONAL = {
    *(name for feature in CONFIGURED.values() for name in feature.modules),
    *(name for names in CALLED.values() for name in names),
    *OTHERS,
}

# The flags of `serve` show the options.
OF_FLAGS = {"lmetric.option_values"}

TOLD = """
import atexit, sys
def tell():
    files = {name: getattr(module, "__file__", None) or "" for name, module in sys.modules.items()}
    own = [file for name, file in files.items() if name.split(".")[0] == "lmetric" and file.endswith(".py")]
    print("lines:", sum(len(open(file).read().splitlines()) for file in own), file=sys.stderr)
    print("loaded:", *files, file=sys.stderr)
atexit.register(tell)
"""


async def _run(*pages: str) -> tuple[int, set[str]]:
    """The lines and the modules of a server that has answered a request and its pages."""
    async with (
        engine(metrics=b"vllm:num_requests_running 0\n") as fake,
        router("--engine", fake.url, run=TOLD + RUN) as r,
        aiohttp.ClientSession() as client,
    ):
        await r.listening()
        body = {"model": "tiny", "prompt": "a", "max_tokens": 2}
        async with client.post(r.url + "/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            await answer.read()
        for page in pages:
            async with client.get(r.url + page) as shown:
                assert shown.status == 200, await shown.text()
        r.process.send_signal(signal.SIGTERM)
        assert await r.ended() == 0
        lines = re.search(r"^lines: (\d+)$", r.log[-1], re.MULTILINE)
        loaded = re.search(r"^loaded: (.*)$", r.log[-1], re.MULTILINE)
        assert lines is not None
        assert loaded is not None
        return int(lines[1]), set(loaded[1].split())


async def test_a_plain_server_loads_no_optional_feature() -> None:
    lines, loaded = await _run("/health")
    assert {f"{WAYS}.{way}" for way in ALWAYS} <= loaded
    assert loaded & OPTIONAL - OF_FLAGS == set()
    assert "rich" not in loaded  # structlog loads it if it can
    assert lines <= MOST_LINES


def test_the_server_is_small_to_import() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TOLD + "import lmetric.server.app"], capture_output=True, text=True, check=True
    )
    assert 20_000 < int(done.stderr.split()[1]) <= MOST_IMPORTED_LINES


async def test_pages_load_what_only_they_need() -> None:
    _, loaded = await _run(*CALLED)
    assert loaded >= {name for names in CALLED.values() for name in names}


ROLES = """
import sys
from execution_world import Setup

model = Setup().model()
engine = model.engines["e0"]
assert sys.argv[1] not in sys.modules
engine.parses = True
model.set_role(engine)
assert sys.argv[1] in sys.modules
"""


def test_an_engine_that_parses_loads_its_way() -> None:
    """Before the core router may choose it for a stream."""
    subprocess.run([sys.executable, "-c", ROLES, f"{WAYS}.parsed"], check=True, cwd=Path(__file__).parent)


START = """
import asyncio, json, os, sys
from lmetric.config import load_config
from lmetric.server.app import Server

async def start(path):
    server = Server(load_config(path, environ={}))
    await server.start()
    loaded = [*sys.modules]
    await server.stop()
    return loaded

for name, path in json.loads(sys.argv[1]).items():
    if os.fork() == 0:  # a child has only what the parent and this feature load
        loaded = asyncio.run(start(path))
        with open(sys.argv[2], "a") as told:
            told.write(json.dumps([name, loaded]) + "\\n")
        os._exit(0)
    assert os.wait()[1] == 0, name
"""


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The modules of a server with each feature of the table, and of a plain one."""
    folder = tmp_path_factory.mktemp("loads")
    pair = Authority(folder).issue("router")
    files = {
        "<certificate>": str(pair.certificate),
        "<key>": str(pair.key),
        "<tokenizer>": str(write_folder(folder / "tokenizer", byte_level())),
        "<engines>": str(folder / "engines.yaml"),
    }
    Path(files["<engines>"]).write_text("[]")
    paths = {}
    for number, (name, feature) in enumerate({**CONFIGURED, "": Feature({}, ())}.items()):
        values = {"port": 0, "engines": [{"url": "http://127.0.0.1:9"}], **feature.values}
        text = yaml.safe_dump(values).replace("<folder>", str(folder / str(number)))
        for mark, file in files.items():
            text = text.replace(mark, file)
        path = folder / f"{number}.yaml"
        path.write_text(text)
        paths[name] = str(path)
    told = folder / "told"
    subprocess.run([sys.executable, "-c", START, json.dumps(paths), told], stdout=sys.stderr, check=True)
    return {name: set(loaded) for name, loaded in map(json.loads, told.read_text().splitlines())}


@needs_openssl
@pytest.mark.parametrize("name", CONFIGURED)
def test_a_configured_feature_is_loaded_at_the_start(started: dict[str, set[str]], name: str) -> None:
    assert started[name] >= set(CONFIGURED[name].modules)
    assert started[""] & set(CONFIGURED[name].modules) == set()


HIDDEN = """
import asyncio, sys
from lmetric.config import ConfigError, load_config
from lmetric.server.app import Server

sys.modules[sys.argv[2]] = None
try:
    asyncio.run(Server(load_config(sys.argv[1], environ={})).start())
except ConfigError as error:
    print("refused:", error)
"""


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [("replicas.redis_url", "redis.asyncio", "redis>="), ("tracing", "opentelemetry.sdk", "opentelemetry-")],
)
def test_a_feature_without_its_package_fails_at_the_start(
    tmp_path: Path, name: str, package: str, extra: str
) -> None:
    config = tmp_path / "router.yaml"
    values = {"port": 0, "engines": [{"url": "http://127.0.0.1:9"}], **CONFIGURED[name].values}
    config.write_text(yaml.safe_dump(values))
    run = [sys.executable, "-c", HIDDEN, config, package]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("refused:")]
    assert "pip install" in line
    assert extra in line


def test_the_paths_of_administrators_are_those_of_their_pages() -> None:
    assert sorted(ADMINISTRATION) == sorted(path for path in administration.PAGES if "{" not in path)
    assert all(is_administration(path) for path in administration.PAGES)
    assert not any(is_administration(path) for path in PAGES if path not in administration.PAGES)
