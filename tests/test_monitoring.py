"""The files for Prometheus and Grafana: rules, their unit tests, and the dashboard.

Each metric and label in them must exist. promtool and Prometheus run the files if they are
installed (Debian: `apt install prometheus`), or if TEST_PROMETHEUS names a folder with both.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from grafana_foundation_sdk.models.prometheus import Dataquery

from lmetric.server.observe.hot import HOT_MORE, HOT_SHOWN, HOT_TIMES
from server_world import world

ROOT = Path(__file__).parent.parent
RULES = ROOT / "deploy" / "prometheus" / "rules.yaml"
RULES_TEST = ROOT / "deploy" / "prometheus" / "rules_test.yaml"
DASHBOARD = ROOT / "deploy" / "grafana" / "lmetric-router.json"
# Labels that Prometheus adds: the last two on Kubernetes.
TARGET_LABELS = {"job", "instance", "exported_instance", "le", "namespace", "service"}
# Panels of parts that a plain fleet does not use.
WITHOUT_SAMPLES = {
    *("Age of load reports", "KV cache in use", "Ejections", "Hedges", "Retries", "Priorities"),
    *(
        "Splits, fetches and migrations",
        "Streams whose engine failed",
        "Refused requests",
        "Waiting requests",
    ),
    *("Expected wait", "Index accuracy", "Healthy engines", "Spans"),
    *("Shadow: predicted TTFT", "Canary: TTFT difference"),
    *("Wanted engines", "Rounds of capacity advice", "Age of the capacity advice"),
}
SERIES = re.compile(r"\b(lmetric_[a-z_]+|process_[a-z_]+)(?:\{([^}]*)\})?")


def program(name: str) -> str:
    """Returns the path of a program of Prometheus. Skips the test if it is not installed."""
    folders = os.pathsep.join(filter(None, (os.environ.get("TEST_PROMETHEUS"), os.environ["PATH"])))
    found = shutil.which(name, path=folders)
    if found is None:
        pytest.skip(f"{name} is not installed: apt install prometheus, or set TEST_PROMETHEUS")
    return found


def known() -> dict[str, set[str]]:
    """Returns the labels of each series by its name, from the generated page."""
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    series = {}
    for name, kind, labels in re.findall(r"^- `(\w+)` \((\w+)(?:; ([^)]*))?\)", page, re.MULTILINE):
        ends = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
        series.update({name + end: set(re.findall(r"`(\w+)`", labels)) for end in ends})
    return series


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return found


def queries() -> Iterator[tuple[str, str]]:
    """Yields the queries of the dashboard with the titles of their panels."""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def expressions() -> list[str]:
    variables = [each["definition"] for each in dashboard()["templating"]["list"] if "definition" in each]
    return [*(rule["expr"] for rule in rules()), *(query for _, query in queries()), *variables]


def test_every_metric_and_label_exists() -> None:
    series, used = known(), set()
    assert len(series) > 100
    for expression in expressions():
        plain = re.sub(r"\w+:lmetric_\w+:\w+", "", expression)  # recorded series
        names = {name for name, _ in SERIES.findall(plain)}
        assert names <= series.keys(), f"{names - series.keys()} in {expression}"
        used |= names
        for name, matchers in SERIES.findall(plain):
            labels = set(re.findall(r"(\w+)\s*(?:=~|!=|!~|=)", matchers))
            assert labels <= series[name] | TARGET_LABELS, f"{labels} of {name} in {expression}"
        by = {label.strip() for group in re.findall(r"by \(([^)]*)\)", plain) for label in group.split(",")}
        labels = set().union(*(series[name] for name in names))
        assert by <= labels | TARGET_LABELS, f"{by} in {expression}"
    assert len(used) > 50


def test_every_recorded_series_in_use_is_recorded() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    used = {name for text in expressions() for name in re.findall(r"\b\w+:lmetric_\w+:\w+", text)}
    assert used <= recorded
    assert len(recorded) > 10


def test_every_alert_has_a_test_that_fires_and_one_that_does_not() -> None:
    tests = yaml.safe_load(RULES_TEST.read_text())["tests"]
    expected: dict[str, set[bool]] = {}
    for each in tests:
        for alert in each.get("alert_rule_test", ()):
            expected.setdefault(alert["alertname"], set()).add(bool(alert["exp_alerts"]))
    alerts = [rule for rule in rules() if "alert" in rule]
    assert expected == {rule["alert"]: {True, False} for rule in alerts}
    for rule in alerts:
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        assert rule["annotations"]["summary"]


def test_every_alert_has_a_runbook_that_fits_on_a_screen() -> None:
    page = (ROOT / "docs" / "how-to" / "monitoring.md").read_text()
    sections = dict(re.findall(r"^### (Lmetric\w+)\n\n((?:- .*\n)+)", page, re.MULTILINE))
    alerts = [rule for rule in rules() if "alert" in rule]
    assert list(sections) == [rule["alert"] for rule in alerts]
    for rule in alerts:
        name = rule["alert"]
        # The address of the section: the headline in lower case.
        assert rule["annotations"]["runbook_url"] == f"docs/how-to/monitoring.md#{name.lower()}"
        parts = re.findall(r"^- \*\*(\w+)\.\*\* \S", sections[name], re.MULTILINE)
        assert parts == ["Sign", "Cause", "Check", "Fix"], name
        assert len(sections[name].split()) <= 110, name


def test_the_page_has_the_bounds_of_hot_engines() -> None:
    page = (ROOT / "docs" / "how-to" / "monitoring.md").read_text()
    bounds = f"over {HOT_TIMES:g} times the mean batch of their role, and at least {HOT_MORE:g} requests more"
    assert f'"Hot" lists at most {HOT_SHOWN} usable engines: those with {bounds}' in page


def test_the_shown_command_gives_all_runbooks_another_address() -> None:
    page = ROOT / "docs" / "how-to" / "monitoring.md"
    (command,) = re.findall(r"^\$ (sed .*) > rules.yaml$", page.read_text(), re.MULTILINE)
    done = subprocess.run(shlex.split(command), cwd=ROOT, capture_output=True, text=True, check=True)
    before = {rule["alert"]: rule for rule in rules() if "alert" in rule}
    after = [rule for group in yaml.safe_load(done.stdout)["groups"] for rule in group["rules"]]
    alerts = [rule for rule in after if "alert" in rule]
    assert [rule["alert"] for rule in alerts] == list(before)
    for rule in alerts:
        old = before[rule["alert"]]
        address = f"https://wiki.example/lmetric#{rule['alert'].lower()}"
        assert rule == {**old, "annotations": {**old["annotations"], "runbook_url": address}}


def test_the_panels_do_not_overlap() -> None:
    cells: set[tuple[int, int]] = set()
    panels = dashboard()["panels"]
    for panel in panels:
        at = panel["gridPos"]
        own = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not own & cells, panel["title"]
        assert at["x"] + at["w"] <= 24
        cells |= own
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_grafana_knows_every_field_of_the_dashboard() -> None:
    """Grafana's own types keep each field that they know, and drop the others."""
    register_default_plugins()
    told = dashboard()
    read = Dashboard.from_json(dashboard())
    kept = json.loads(JSONEncoder().encode(read))
    for variable in told["templating"]["list"]:
        variable.pop("definition", None)  # Grafana writes it, but its types lack it
    assert {type(target) for panel in read.panels or () for target in getattr(panel, "targets", ())} == {
        Dataquery
    }
    assert list(missing(told, kept)) == []


def missing(told: Any, kept: Any, place: str = "") -> Iterator[str]:
    """Yields the places where ``kept`` lacks a field of ``told``, or has another value."""
    if isinstance(told, dict) and isinstance(kept, dict):
        for name, value in told.items():
            yield from missing(value, kept.get(name), f"{place}/{name}")
    elif isinstance(told, list) and isinstance(kept, list) and len(told) == len(kept):
        for index, (one, other) in enumerate(zip(told, kept, strict=True)):
            yield from missing(one, other, f"{place}/{index}")
    elif told != kept:
        yield place


def test_promtool_accepts_the_rules() -> None:
    for command in (["check", "rules", RULES.name], ["test", "rules", RULES_TEST.name]):
        done = subprocess.run(
            [program("promtool"), *command], cwd=RULES.parent, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


async def test_promtool_accepts_the_metrics() -> None:
    promtool = program("promtool")
    async with world(1) as w:
        await w.post({"prompt": "hello", "stream": True})
        _, text = await w.get("/metrics")
    command = [promtool, "check", "metrics"]
    done = await asyncio.to_thread(subprocess.run, command, input=text, capture_output=True, check=False)
    problems = [line for line in done.stderr.decode().splitlines() if "process_" not in line]
    assert not problems
    assert done.returncode == 0


@pytest.mark.nightly
async def test_a_real_prometheus_reads_everything(tmp_path: Path) -> None:
    """It scrapes a router, evaluates all rules, and answers all queries of the dashboard."""
    prometheus = program("prometheus")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    async with world(
        2,
        policy="lmetric",
        admission={"classes": {"fast": {}}},
        records={"path": tmp_path / "records"},
        shadow={"policy": "vllm"},
        canary={"policy": "vllm", "share": 0.5, "warmup_seconds": 0},
    ) as w:
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(RULES)],
            "scrape_configs": [
                {
                    "job_name": "lmetric-router",
                    "static_configs": [{"targets": [f"127.0.0.1:{w.server.port}"]}],
                }
            ],
        }
        file = tmp_path / "prometheus.yaml"
        file.write_text(yaml.safe_dump(config))
        log = (tmp_path / "log").open("w")
        process = await asyncio.create_subprocess_exec(
            prometheus,
            f"--config.file={file}",
            f"--storage.tsdb.path={tmp_path / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--enable-feature=exemplar-storage",
            stdout=log,
            stderr=log,
        )
        try:

            async def ask(path: str, **query: str) -> Any:
                try:
                    async with w.client.get(
                        f"http://127.0.0.1:{port}/api/v1/{path}", params=query
                    ) as response:
                        return await response.json()
                except aiohttp.ClientConnectionError:
                    return {"status": "down", "data": {}}

            async def samples(query: str) -> list[Any]:
                answer = await ask("query", query=query)
                assert answer["status"] in ("success", "down"), f"{query}: {answer}"
                return list(answer["data"].get("result", ()))

            count = 0
            for number in range(60):
                body = {"prompt": f"{number} hello", "stream": True}
                await w.post(body, headers={"x-slo-class": "fast"})
                found = await samples("count_over_time(up[1m])")
                count = int(found[0]["value"][1]) if found else 0
                if count >= 6:
                    break
                await asyncio.sleep(0.5)
            assert count >= 6, (tmp_path / "log").read_text()
            (target,) = (await ask("targets"))["data"]["activeTargets"]
            assert (target["health"], target["lastError"]) == ("up", "")
            for group in (await ask("rules"))["data"]["groups"]:
                for rule in group["rules"]:
                    assert rule["health"] == "ok", rule
            shown = dict.fromkeys((title for title, _ in queries()), False)
            for title, query in queries():
                query = re.sub(r'"\$\w+"', '".*"', query).replace("$__rate_interval", "1m")
                shown[title] |= bool(await samples(query))
            assert {title for title, found in shown.items() if not found} <= WITHOUT_SAMPLES
            engines = await samples("lmetric_instance_healthy == 1")
            names = {(each["metric"]["instance"], each["metric"]["exported_instance"]) for each in engines}
            assert names == {(f"127.0.0.1:{w.server.port}", "e0"), (f"127.0.0.1:{w.server.port}", "e1")}
        finally:
            process.terminate()
            await process.wait()
            log.close()
