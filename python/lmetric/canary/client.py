"""Commands to the canary of a running router, over HTTP, and their results for people."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import aiohttp
import orjson
from rich import box
from rich.table import Table

from lmetric._core import BadValueError, LmetricError
from lmetric.canary.comparison import ARMS
from lmetric.no_router import no_router

PATH = "/admin/canary"
TIMEOUT_SECONDS = 10.0

_NAMES = {
    "ttft_seconds": ("mean TTFT", "ms"),
    "tpot_seconds": ("mean TPOT", "ms"),
    "e2e_seconds": ("mean end-to-end", "ms"),
    "hit_ratio": ("hit rate", "%"),
    "error_rate": ("error rate", "%"),
}


class CanaryUnavailableError(LmetricError):
    """The router does not answer, or refuses the command."""


async def send(url: str, token: str | None, command: str, body: Mapping[str, Any] | None = None) -> Any:
    """Sends a command and returns the answer.

    Args:
        url: address of the router, such as ``http://127.0.0.1:8000``.
        token: the admin token; None: no credential.
        command: "status", "start", "promote" or "rollback".
        body: the fields of the command.

    Raises:
        BadValueError: the router refuses the fields.
        CanaryUnavailableError: no answer, or another error.
    """
    headers = {"authorization": f"Bearer {token}"} if token else {}
    target = url.rstrip("/") + PATH + ("" if command == "status" else f"/{command}")
    method = "GET" if command == "status" else "POST"
    try:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
            session.request(
                method, target, data=orjson.dumps(body or {}) if method == "POST" else None
            ) as answer,
        ):
            status, content = answer.status, await answer.read()
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
        raise CanaryUnavailableError(
            no_router(url, error, f"no answer within {TIMEOUT_SECONDS:g} s")
        ) from None
    try:
        found = orjson.loads(content)
        if status == 200:
            return found
        message = str(found["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        raise CanaryUnavailableError(
            f"{target}: status {status}: the answer is not from lmetric-router"
        ) from None
    if status == 400:
        raise BadValueError(message)
    hint = "; give --token" if status in (401, 403) and not token else ""
    raise CanaryUnavailableError(f"{message}{hint}")


def lines(state: Mapping[str, Any]) -> list[str | Table]:
    """Returns the state of a model's canary and shadow, for a terminal."""
    model, run = state["model"] or "any model", state["canary"]
    head = f"{model}: {state['state'].replace('_', ' ')}"
    if state["reason"] == "by command":
        head += " by command"
    ended = run is not None and run["ended_at"] is not None
    if ended:
        head += time.strftime(" at %Y-%m-%d %H:%M:%S UTC", time.gmtime(run["ended_at"]))
    if state["reason"] and state["reason"] != "by command":
        head += f", because {state['reason']}"
    found: list[str | Table] = [head]
    if run is not None:
        found += _ended(state, run) if ended else _running(state, run)
    if (shadow := state.get("shadow")) is not None:
        found.append(_shadow(shadow))
    return found


def _running(state: Mapping[str, Any], run: Mapping[str, Any]) -> list[str | Table]:
    stable, canary = (_policy(each) for each in (state["stable_policy"], run["policy"]))
    groups = " and ".join(f"{run['groups'][arm]:,}" for arm in ARMS)
    found: list[str | Table] = [
        f"stable {stable}, canary {canary}, share {run['share']:.0%}, salt {run['salt']}",
        f"{_counts(run)}, in {groups} groups of sessions or prefixes",
    ]
    if run["warmup_left_seconds"]:
        found.append(f"results count in {run['warmup_left_seconds']:.0f} s")
    return [*found, *(f"warning: {warning}" for warning in run["warnings"]), _table(run["metrics"])]


def _ended(state: Mapping[str, Any], run: Mapping[str, Any]) -> list[str | Table]:
    """Returns what decides requests now. Only a canary that failed still shows its results."""
    stable, canary = _policy(run["stable_policy"]), _policy(run["policy"])
    now = f"{_policy(state['stable_policy'])} decides all requests"
    if state["state"] == "promoted":
        return [f"{now}; before, it was {stable}", f"the canary {canary} had {_counts(run)}"]
    return [now, f"results of the canary {canary} until then, over {_counts(run)}:", _table(run["metrics"])]


def _counts(run: Mapping[str, Any]) -> str:
    return ", ".join(f"{run['requests'][arm]:,} {arm}" for arm in ARMS) + " requests"


def _policy(value: object) -> str:
    if isinstance(value, Mapping):
        return str(value.get("name") or value.get("score"))
    return str(value)


def _table(metrics: Mapping[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("metric")
    for name in ("stable", "canary", "canary - stable", "95% interval"):
        table.add_column(name, justify="right")
    table.add_column("")
    for name, row in metrics.items():
        title, unit = _NAMES[name]
        cells = [_number(row[arm], unit) for arm in ARMS]
        interval, verdict = "too few sessions", ""
        if row["interval"] is not None:
            low, high = row["interval"]
            interval = f"{_number(low, unit, sign=True).split()[0]} to {_number(high, unit, sign=True)}"
            worse = (low > 0) != (name == "hit_ratio")
            verdict = ("worse" if worse else "better") if row["clear"] else "no clear difference"
        table.add_row(title, *cells, _number(row["difference"], unit, sign=True), interval, verdict)
    return table


def _number(value: float | None, unit: str, *, sign: bool = False) -> str:
    if value is None:
        return "-"
    plus = "+" if sign else ""
    if unit == "%":
        return f"{100 * value:{plus}.2f} {'points' if sign else '%'}"
    return f"{1000 * value:{plus},.2f} ms"


def _shadow(shadow: Mapping[str, Any]) -> str:
    text = f"shadow {_policy(shadow['policy'])}: "
    if shadow["agreement"] is None:
        return text + ("no request yet" if not shadow["failed"] else f"failed {shadow['failed']:,} times")
    text += f"same engine for {shadow['agreement']:.1%} of {shadow['agreed'] + shadow['differed']:,} requests"
    for name, title, unit in (
        ("predicted_cached_tokens", "predicted cached tokens", ""),
        ("predicted_ttft_seconds", "predicted TTFT", "ms"),
    ):
        if (means := shadow[name]) is not None:
            own, other = (
                _number(means[each], unit) if unit else f"{means[each]:,.0f}" for each in ("router", "shadow")
            )
            text += f"; {title} {own} (router), {other} (shadow)"
    return text + (f"; failed {shadow['failed']:,} times" if shadow["failed"] else "")
