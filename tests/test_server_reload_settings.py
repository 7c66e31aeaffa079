"""A reload applies settings while requests run: what changes, what stays, and who may ask."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml
from pydantic import BaseModel
from structlog.testing import capture_logs

from lmetric import LmetricError
from lmetric.config import (
    ConfigError,
    Limits,
    ServerConfig,
    Timeouts,
    UniqueKeys,
    load_config,
    needs_restart,
)
from lmetric.config.reload import RELOADED, reloads
from lmetric.server.app import Reloads
from server_world import FakeEngine, Request, World, hang, plain, world
from tls_world import Authority, needs_openssl, subject_of
from waiting import until


class Reloaded:
    """A world whose configuration is a file."""

    def __init__(self, w: World, values: dict[str, Any], file: Path) -> None:
        self.w = w
        self._values = values
        self._file = file
        self.reloads = Reloads(w.server, self.read)
        w.server.front.reread = self.reloads.reload

    async def change(self, **values: Any) -> dict[str, Any]:
        """Writes settings and reloads. Returns the changes."""
        self._values |= values
        self._file.write_text(yaml.safe_dump(self._values))
        return await self.reload()

    async def reload(self) -> dict[str, Any]:
        return await self.w.server.apply(self.w.server.prepare(self.read()))

    def read(self) -> ServerConfig:
        return load_config(self._file, environ={})


# As in a file without timeouts: `world` has its own.
TIMEOUTS = {"connect": Timeouts().connect}


@contextlib.asynccontextmanager
async def reloaded(folder: Path, *engines: FakeEngine, **config: Any) -> AsyncIterator[Reloaded]:
    config["timeouts"] = TIMEOUTS | config.get("timeouts", {})
    async with world(list(engines) or 1, model="tiny", **config) as w:
        listed = [{"url": engine.url, "name": engine.name} for engine in w.engines]
        values = {"port": 0, "engines": listed, "policy": "round_robin", "experimental": True}
        yield Reloaded(
            w, {**values, "model": "tiny", "load": {"interval": None}, **config}, folder / "c.yaml"
        )


async def test_timeouts_change_for_new_requests_and_not_for_running_ones(tmp_path: Path) -> None:
    async with reloaded(tmp_path, FakeEngine(behave=hang)) as r:
        first = asyncio.create_task(r.w.post())
        await r.w.engines[0].asked(1)
        assert (await r.change(timeouts={"answer": 0.2}))["changed"] == ["timeouts"]
        status, _, answer = await r.w.post()
        assert (status, answer["error"]["code"]) == (504, "timeout")
        assert "no answer within 0.2 s" in answer["error"]["message"]
        assert not first.done(), "it began under the old limit"
        first.cancel()


async def test_retries_change(tmp_path: Path) -> None:
    async def busy(engine: FakeEngine, _: Request, writer: asyncio.StreamWriter) -> bool:
        writer.write(plain(503, {"error": {"message": "busy"}}))
        return True

    engines = [FakeEngine(behave=busy) for _ in range(3)]
    async with reloaded(tmp_path, *engines, health={"down_after": 100}) as r:
        await r.w.post()
        assert sum(len(engine.requests) for engine in engines) == 3
        await r.change(retries={"attempts": 1})
        await r.w.post()
        assert sum(len(engine.requests) for engine in engines) == 4


async def test_limits_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with reloaded(tmp_path, FakeEngine(behave=hang)) as r:
        front = r.w.server.front
        await r.change(limits={"max_concurrent_requests": 1, "max_body_bytes": 200, "max_connections": 3})
        assert (await r.w.post({"model": "tiny", "prompt": "a" * 300}))[0] == 413
        first = asyncio.create_task(r.w.post())
        await r.w.engines[0].asked(1)
        status, _, answer = await r.w.post()
        assert (status, answer["error"]["code"]) == (503, "too_many")
        assert front.clients.max_connections == 3
        monkeypatch.setattr(Limits, "max_connections_per_engine", 1)
        await r.change(limits={"max_connections": 4})
        status, _, answer = await r.w.post()
        assert (status, answer["error"]["code"]) == (503, "status")
        first.cancel()
        await r.w.settled()


async def test_health_checks_change(tmp_path: Path) -> None:
    async with reloaded(tmp_path, health={"interval": 0.05}) as r:
        engine = r.w.server.fleet.models[0].engines["e0"]
        await r.change(health={"interval": 0.05, "path": "/nowhere", "down_after": 1})
        await until(lambda: engine.upstream and engine.healthy)
        r.w.engines[0].health = 500
        await asyncio.sleep(0.3)
        assert engine.healthy, "it is asked at another path"
        await r.change(health={"interval": 0.05, "down_after": 1})
        await until(lambda: not engine.healthy)


async def test_load_reports_can_be_turned_on(tmp_path: Path) -> None:
    page = b"vllm:num_requests_running 3\nvllm:num_requests_waiting 1\nvllm:kv_cache_usage_perc 0.5\n"
    async with reloaded(tmp_path, FakeEngine(metrics=page)) as r:
        engine = r.w.server.fleet.models[0].engines["e0"]
        assert not engine.load_reports
        await r.change(load={"interval": 0.05}, indicators={"more": {"source": "vllm:num_requests_running"}})
        await until(lambda: engine.load_reports or engine.load_error)


async def test_log_errors_cors_and_paths_change(tmp_path: Path) -> None:
    async with reloaded(tmp_path) as r:
        assert (await r.w.post(path="/own"))[0] == 404
        await r.change(
            log={"access": True, "level": "debug"},
            errors={"show_engines": False},
            cors={"origins": ["http://a.example"]},
            paths=["/own"],
        )
        with capture_logs() as logs:
            status, headers, _ = await r.w.post(path="/own", headers={"origin": "http://a.example"})
        assert status == 200
        assert "x-lmetric-instance" not in headers
        assert headers["access-control-allow-origin"] == "http://a.example"
        assert [line["path"] for line in logs if line["event"] == "request"] == ["/own"]


async def test_engines_come_and_go_and_streams_stay(tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def waits(engine: FakeEngine, _: Request, writer: asyncio.StreamWriter) -> bool:
        await gate.wait()
        writer.write(plain(200, {"choices": []}))
        return True

    other = FakeEngine(name="e1")
    await other.start()
    async with reloaded(tmp_path, FakeEngine(behave=waits)) as r:
        first = asyncio.create_task(r.w.post())
        await r.w.engines[0].asked(1)
        await r.change(engines=[{"url": other.url, "name": "e1"}])
        await until(lambda: r.w.server.fleet.ready())
        assert (await r.w.post())[1]["x-lmetric-instance"] == "e1"
        assert [engine.name for engine in r.w.server.fleet.engines()] == ["e0", "e1"]
        gate.set()
        assert (await first)[0] == 200
        await until(lambda: [engine.name for engine in r.w.server.fleet.engines()] == ["e1"])
    await other.stop()


async def test_a_bad_configuration_changes_nothing(tmp_path: Path) -> None:
    async with reloaded(tmp_path, admin=True) as r:
        before, good = r.w.server.config, dict(r._values)
        for values, said in (
            ({"policy": "p_token * (bsx + 1)"}, "bsx"),
            ({"engine_tls": {"ca_file": "/nowhere.pem"}}, "/nowhere.pem"),
            ({"auth": {"keys_file": "/nowhere.yaml"}, "admin": {"token": "adm"}}, "/nowhere.yaml"),
            ({"forwarded": {"trusted_proxies": ["10.0.0.0/8"]}}, "trusted proxies"),
            ({"timeouts": {"connect": -1}}, "timeouts.connect"),
        ):
            r._values = dict(good)
            with pytest.raises(LmetricError, match=said):
                await r.change(**({"retries": {"attempts": 9}} | values))
            assert r.w.server.config is before
        assert (await r.w.post())[0] == 200


TWO = {
    "experimental": False,
    "policy": "round_robin",
    "engines": [],
    "models": [
        {"name": "tiny", "engines": [{"url": "http://127.0.0.1:1"}]},
        {"name": "other", "engines": [{"url": "http://127.0.0.1:2"}]},
    ],
}


def of_models(*policies: dict[str, Any]) -> dict[str, Any]:
    models: list[dict[str, Any]] = [*TWO["models"]]  # type: ignore[misc]
    return {"models": [model | own for model, own in zip(models, policies, strict=True)]}


@pytest.mark.parametrize(
    "bad", [{"policy": "lmetric_seconds"}, {"shadow": "lmetric_seconds"}, {"canary": "lmetric_seconds"}]
)
async def test_a_policy_that_one_model_refuses_changes_no_model(tmp_path: Path, bad: dict[str, str]) -> None:
    """python.md 6.5: model 1 kept its new policy if the router of model 2 refused its own.

    Only the core knows that a policy is experimental.
    """
    async with world(0, **TWO, timeouts=TIMEOUTS) as w:
        r = Reloaded(w, {**TWO, "port": 0, "load": {"interval": None}}, tmp_path / "c.yaml")
        first, second = w.server.fleet.models
        before = w.server.config

        def shown() -> list[Any]:
            return [
                (model.policies, model.router.stats()["policy"], model.guard, model.try_policies().shown())
                for model in (first, second)
            ]

        unchanged = shown()
        if "policy" not in bad:
            key, name = next(iter(bad.items()))
            bad = {key: {"policy": name}}  # type: ignore[dict-item]
        with pytest.raises(LmetricError, match=r"lmetric_seconds.*experimental"):
            await r.change(**of_models({"policy": "lmetric"}, bad), health={"ejection": {"base_seconds": 9}})
        assert shown() == unchanged
        assert w.server.config is before
        assert (await r.change(**of_models({"policy": "lmetric"}, {})))["changed"] == ["health", "models"]
        assert [model.policies.settings.policy for model in (first, second)] == ["lmetric", "round_robin"]


async def test_the_policy_of_all_models_is_named_as_such(tmp_path: Path) -> None:
    """Models with a section that sets no policy have it."""
    async with world(0, **TWO, timeouts=TIMEOUTS) as w:
        r = Reloaded(w, {**TWO, "port": 0, "load": {"interval": None}}, tmp_path / "c.yaml")
        assert (await r.change(policy="least_requests"))["changed"] == ["policy"]
        assert [each.policies.settings.policy for each in w.server.fleet.models] == ["least_requests"] * 2


async def test_a_model_whose_section_is_gone_stays_as_it_is(tmp_path: Path) -> None:
    async with world(0, **TWO, timeouts=TIMEOUTS) as w:
        r = Reloaded(w, {**TWO, "port": 0, "load": {"interval": None}}, tmp_path / "c.yaml")
        first, second = w.server.fleet.models
        await r.change(**of_models({"policy": "vllm", "admission": {"max_waiting": 50}}, {}))
        (_, kept) = of_models({}, {"policy": "least_requests"})["models"]
        assert (await r.change(models=[kept]))["restart_needed"] == ["models"]
        assert first.policies.settings.policy == "vllm"
        assert first.policies.settings.admission is not None
        assert second.policies.settings.policy == "least_requests"
        # The policy of a section that needs a restart must be valid, too.
        with pytest.raises(LmetricError, match="nonsense"):
            await r.change(models=[kept, {"name": "further", "policy": "nonsense"}])


async def test_unchanged_policies_are_not_installed_again(tmp_path: Path) -> None:
    """python.md 6.5: each reload replaced and logged every policy."""
    file = tmp_path / "mine.py"
    file.write_text("def score(bs):\n    return bs\n")
    async with reloaded(tmp_path) as r:
        (model,) = r.w.server.fleet.models
        await r.change(policy=f"{file}:score")
        with capture_logs() as lines:
            await r.change(retries={"attempts": 2})
            await r.change(retries={"attempts": 2})
        assert [line["event"] for line in lines].count("policies replaced") == 0
        assert model.policies.settings.policy == f"{file}:score"
        file.write_text("def score(q_bs):\n    return q_bs\n")
        with capture_logs() as lines:
            await r.change()
        assert [line["event"] for line in lines].count("policies replaced") == 1


async def test_ejection_changes(tmp_path: Path) -> None:
    """python.md 6.2: the reference and the report promise it."""

    async def fails(engine: FakeEngine, _: Request, writer: asyncio.StreamWriter) -> bool:
        writer.write(plain(500, {"error": {"message": "broken"}}))
        return True

    engines = [FakeEngine(), FakeEngine(behave=fails)]
    async with reloaded(tmp_path, *engines) as r:
        await r.change(health={"ejection": {"enabled": False}})
        engine = r.w.server.fleet.models[0].engines["e1"]
        for _ in range(20):
            assert (await r.w.post())[0] == 200
        assert engine.service.state == "HEALTHY"
        assert (await r.change(health={"ejection": {"consecutive_failures": 2}}))["changed"] == ["health"]
        for _ in range(8):
            await r.w.post()
        assert engine.service.state == "EJECTED"


async def test_reloads_read_in_a_thread_and_merge(tmp_path: Path) -> None:
    """Security F15: a file with 10,000 keys froze the loop for 1.6 s, and each signal read it."""
    async with reloaded(tmp_path, admin=True) as r:
        await r.change()
        readers: list[int] = []
        go = threading.Event()

        def read() -> ServerConfig:
            readers.append(threading.get_ident())
            assert go.wait(30)
            return r.read()

        reloads = Reloads(r.w.server, read)
        r.w.server.front.reread = reloads.reload
        first = asyncio.create_task(reloads.reload())
        await until(lambda: bool(readers))
        for _ in range(100):
            reloads.on_signal()
        second = asyncio.create_task(reloads.reload())
        assert (await r.w.post())[0] == 200, "the router serves meanwhile"
        go.set()
        assert (await first)["changed"] == []
        assert (await second)["changed"] == []
        assert len(readers) == 2, "one for all requests that came while the first one read"
        assert threading.get_ident() not in readers
        assert (await r.w.post({}, "/admin/reload"))[0] == 200
        assert len(readers) == 3


async def test_keys_are_read_by_the_scanner_of_libyaml(tmp_path: Path) -> None:
    """Security F15. The Python scanner takes about eight times as long."""
    assert any(base.__name__ == "CParser" for base in UniqueKeys.__mro__)


async def test_administrators_reload(tmp_path: Path) -> None:
    async with reloaded(tmp_path, admin={"enabled": True, "token": "adm"}) as r:
        (tmp_path / "c.yaml").write_text(
            yaml.safe_dump(r._values | {"retries": {"attempts": 7}, "index_bytes": 9 << 20})
        )
        assert (await r.w.post({}, "/admin/reload"))[0] == 401
        status, _, answer = await r.w.post({}, "/admin/reload", {"authorization": "Bearer adm"})
        assert (status, answer["changed"], answer["restart_needed"]) == (200, ["retries"], ["index_bytes"])
        assert r.w.server.config.retries.attempts == 7
        (tmp_path / "c.yaml").write_text("port: [")
        status, _, answer = await r.w.post({}, "/admin/reload", {"authorization": "Bearer adm"})
        assert (status, answer["error"]["code"]) == (400, "bad_configuration")
        r.w.server.front.reread = None
        status, _, answer = await r.w.post({}, "/admin/reload", {"authorization": "Bearer adm"})
        assert (status, answer["error"]["code"]) == (409, "no_reload")


@needs_openssl
async def test_tls_changes(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    first, second = authority.issue("first"), authority.issue("second")
    async with reloaded(tmp_path, tls=first.files) as r:
        context = authority.client()
        assert await subject_of(r.w.server.port, context) == "first"
        assert (await r.change(tls=second.files))["changed"] == ["tls"]
        assert await subject_of(r.w.server.port, context) == "second"
        await r.change(tls={**second.files, "client_ca_file": str(authority.file)})
        reader, writer = await asyncio.open_connection("127.0.0.1", r.w.server.port, ssl=context)
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        with pytest.raises((OSError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        writer.close()
        with pytest.raises(ConfigError, match=r"/nowhere\.pem"):
            await r.change(tls={**second.files, "key_file": "/nowhere.pem"})
        assert (await r.change(tls=None))["restart_needed"] == ["tls"]
        assert await subject_of(r.w.server.port, authority.client(first)) == "second"


def keys(section: type[BaseModel], path: str = "") -> list[str]:
    return [f"{path}{name}" for name in section.model_fields]


def test_the_table_names_settings() -> None:
    known = {*keys(ServerConfig)}
    for key in RELOADED:
        assert key.split(".")[0] in known, key
    assert reloads("timeouts.connect")
    assert reloads("engines[].url")
    assert reloads("models[].engines[].tls")
    assert reloads("discovery[].api_key")
    for key in ("host", "port", "models[].name", "discovery[].dns", "seed", "replicas.urls"):
        assert not reloads(key), key


def test_changes_that_need_a_restart_are_named() -> None:
    old = ServerConfig.model_validate({"models": [{"name": "a", "engines": [{"url": "http://a"}]}]})
    for values, wanted in (
        ({"models": [{"name": "a", "engines": [{"url": "http://b"}], "policy": "round_robin"}]}, []),
        ({"models": [{"name": "b", "engines": [{"url": "http://a"}]}]}, ["models"]),
        ({"models": [{"name": "a", "block_size": 1}]}, ["models"]),
        ({"models": [{"name": "a"}], "port": 1, "replicas": {"token": "t"}}, ["port", "replicas"]),
        ({"models": [{"name": "a"}], "timeouts": {"drain": 1}, "limits": {"idle_seconds": 1}}, []),
    ):
        assert needs_restart(old, ServerConfig.model_validate(values)) == wanted
    assert orjson.dumps(sorted(RELOADED))
