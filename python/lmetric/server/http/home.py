"""The page at /, the index of /debug, and the list of recent decisions.

Browsers get HTML, other clients JSON, both made from the same object. The pages load nothing from
other hosts and run no script. They contain only what the request's credentials may read
(docs/how-to/access.md).
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable, Iterable, Mapping
from html import escape
from itertools import islice
from typing import Any

import orjson
from aiohttp import web

from lmetric._core import __version__
from lmetric.server.api.errors import ApiError, bad
from lmetric.server.api.own_pages import OwnPage
from lmetric.server.fleet.model import Model
from lmetric.server.fleet.summary import summary
from lmetric.server.http.frontend import Frontend
from lmetric.server.http.pages.call import only_value
from lmetric.server.http.running import DRAINING
from lmetric.server.observe.startup import sample_request, url_of

ABOUT = "Routes requests of the OpenAI API to LLM engines, by their prefix caches and their load."
DECISIONS_LISTED = 20
_SINCE = " since %Y-%m-%d %H:%M:%S UTC"
MAX_DECISIONS_LISTED = 200
_LISTED = (
    *("at_seconds", "request_id", "policy", "instance"),
    *("prompt_tokens", "predicted_cached_tokens", "cached_tokens", "output_tokens"),
    *("ttft_seconds", "e2e_seconds", "outcome"),
)
_STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 64rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin: 1.8rem 0 .4rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; }
th, td { padding: .3rem 1rem .3rem 0; border-bottom: 1px solid #8884; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; }
pre { padding: .7rem; background: #8882; border-radius: .3rem; }
.warning { border-left: .25rem solid #d70; padding-left: .7rem; margin: .5rem 0; }
.muted { opacity: .7; }
"""
_HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "vary": "accept",
}


async def home(front: Frontend, request: web.BaseRequest, linked: Iterable[OwnPage]) -> web.Response:
    """Answers /: what this is, its API paths and pages, and the state of the fleet."""
    admin = front.access.is_admin(request.headers)
    try:
        models = [*front.fleet.catalog.listed(front.access.caller(request))]
    except ApiError:  # no valid API key
        models = None
    open_to = {
        "open": True,
        "metrics": admin or not front.config.admin.protect_metrics,
        "tenant": models is not None,
        "admin": admin,
    }
    pages = {
        page.path: page.link
        for page in linked
        if open_to[page.access] and not (page.path == "/ui" and front.live is None)
    }
    state = summary(front.fleet, names=admin)
    shown: dict[str, Any] = {
        "name": "lmetric-router",
        "about": ABOUT,
        "ready": front.running.phase < DRAINING and front.fleet.ready(),
        **state,
        "api_paths": sorted(front.arrivals.paths),
        "pages": pages,
    }
    if models:
        name = request.transport.get_extra_info("sockname") if request.transport else None
        url = url_of(front.config, name[1] if isinstance(name, tuple) else front.config.port)
        shown["curl"] = sample_request(url, models[0], front.admission.identity.on)
    if admin:
        shown["version"] = __version__
        shown["fleet"] = [
            {
                "engine": engine.name,
                "model": engine.model.name if engine.model else None,
                "role": engine.role,
                "state": "usable" if (why := engine.unusable) is None else why.reason,
                "mode": engine.mode.name if engine.identified else None,
                "reason": engine.mode.reason if engine.identified else None,
                "running": engine.running,
            }
            for engine in front.fleet.engines_by_name()
        ]
    return await asyncio.to_thread(_page, request, shown, _home)


def debug_index(request: web.BaseRequest, links: Mapping[str, str]) -> web.Response:
    """Answers /debug: the debug pages."""
    return _page(request, {"pages": links}, lambda shown: _section("Debug pages", _links(shown["pages"])))


async def decisions(front: Frontend, query: str) -> list[dict[str, Any]]:
    """Returns the latest decisions of each model, newest first. Raises ApiError (400).

    With several workers, these are the decisions of all workers that answer. ``query``: `limit=N`,
    the number of decisions per model.
    """
    text = only_value(query, "limit", str(DECISIONS_LISTED))
    is_number = text.isascii() and text.isdigit() and len(text) < 10
    if not (is_number and 1 <= int(text) <= MAX_DECISIONS_LISTED):
        raise bad(f"the query must be empty or limit=N (1 to {MAX_DECISIONS_LISTED})", "limit")
    limit = int(text)
    others = [] if front.worker is None else await front.worker.decisions(limit)
    listed: list[dict[str, Any]] = []
    for model in list(front.fleet.models):  # 200 decisions take some ms: a model for each turn
        of_others = [orjson.loads(found.get(model.name, b"[]")) for found in others]
        # The workers' clocks are one clock of the machine.
        by_time = heapq.merge(_latest(model, limit), *of_others, key=lambda each: -each["at_seconds"])
        listed += islice(by_time, limit)
        await asyncio.sleep(0)
    return listed


async def latest_decisions(models: Iterable[Model], limit: int) -> dict[str, bytes]:
    """Returns this process's latest decisions as JSON: ``limit`` of each model, newest first.

    As bytes, so that the supervisor passes them on unread.
    """
    found = {}
    for model in list(models):
        found[model.name] = orjson.dumps(list(_latest(model, limit)))
        await asyncio.sleep(0)
    return found


def _latest(model: Model, limit: int) -> Iterable[dict[str, Any]]:
    last = model.router.stats(instances=False)["last_decision"]
    for number in range(last, max(last - limit, 0), -1):
        record: Mapping[str, Any] | None = model.router.explain(number)
        if record is None:
            return  # older records are gone
        shown = {name: record[name] for name in _LISTED if record[name] is not None}
        yield {"id": model.labels.label(number, ""), "model": model.name, **shown}


def _page(request: web.BaseRequest, data: Any, body: Callable[[Any], str]) -> web.Response:
    if "text/html" not in request.headers.get("accept", ""):
        text = orjson.dumps(data, option=orjson.OPT_INDENT_2)
        return web.Response(body=text, content_type="application/json", headers=_HEADERS)
    html = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>lmetric-router</title>'
        '<meta name="viewport" content="width=device-width">'
        f"<style>{_STYLE}</style></head>\n<body><h1>lmetric-router</h1>\n{body(data)}</body></html>\n"
    )
    return web.Response(body=html.encode(), content_type="text/html", charset="utf-8", headers=_HEADERS)


def _section(title: str, body: str) -> str:
    return f"<h2>{escape(title)}</h2>\n{body}\n"


def _table(columns: tuple[str, ...], rows: Iterable[Mapping[str, Any]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    cells = ("".join(f"<td>{_text(row[name])}</td>" for name in columns) for row in rows)
    body = "".join(f"<tr>{row}</tr>\n" for row in cells)
    return f"<table><tr>{head}</tr>\n{body}</table>"


def _text(value: object) -> str:
    return "–" if value is None else escape(str(value))


def _links(pages: Mapping[str, str]) -> str:
    rows = (
        f'<tr><td><a href="{escape(path)}">{escape(path)}</a></td><td>{escape(text)}</td></tr>'
        for path, text in pages.items()
    )
    return f"<table>{''.join(rows)}</table>"


def _home(shown: Mapping[str, Any]) -> str:
    """Returns the page at / as HTML."""
    modes = ", ".join(f"{count} {mode}" for mode, count in shown["modes"].items())
    state = "Ready" if shown["ready"] else "Not ready"
    parts = [
        f'<p class="muted">{escape(shown["about"])}</p>',
        f"<p><strong>{state}</strong>: {shown['usable']} of {shown['engines']} engines usable"
        f"{escape(f' ({modes})') if modes else ''}.</p>",
    ]
    for each in shown["warnings"]:
        who = (
            ", ".join(each["names"])
            if "names" in each
            else f"{each['engines']} engine" + "s" * (each["engines"] > 1)
        )
        fix = f"<br>Fix: {escape(each['fix'])}" if each["fix"] else ""
        who = f"{who}: " if each["engines"] else ""
        since = "" if each["since"] is None else time.strftime(_SINCE, time.gmtime(each["since"]))
        text = f"{who}{each['what']}{since}: {each.get('reason', each['cause'])}"
        parts.append(f'<p class="warning">{escape(text)}{fix}</p>')
    if "curl" in shown:
        parts.append(_section("First request", f"<pre>{escape(shown['curl'])}</pre>"))
    if "fleet" in shown:
        parts.append(_section("Models", _table(("model", "policy", "guard", "tokenizer"), shown["models"])))
        columns = ("engine", "model", "role", "state", "mode", "reason", "running")
        parts.append(_section("Engines", _table(columns, shown["fleet"])))
    parts.append(_section("Pages", _links(shown["pages"])))
    parts.append(_section("API paths (POST)", f"<pre>{escape(chr(10).join(shown['api_paths']))}</pre>"))
    parts.append(
        _section(
            "Documentation",
            "<p>The folder <code>docs</code> of the project; <code>lmetric-router serve --help</code>.</p>",
        )
    )
    if "version" in shown:
        parts.append(f'<p class="muted">Version {escape(shown["version"])}</p>')
    else:
        parts.append('<p class="muted">With the admin token, this page also shows engines and models.</p>')
    return "\n".join(parts)
