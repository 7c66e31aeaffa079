"""The log event at the end of the start: URL, policy, engines with their modes, a first request."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from lmetric._core import __version__
from lmetric.config import ServerConfig, is_loopback, unix_path
from lmetric.printable import printable
from lmetric.server.fleet.fleet import Fleet
from lmetric.server.fleet.summary import summary

LISTENING = "listening"
NAMED = 4  # most engines named in a line of the block
_ANY_ADDRESS = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "127.0.0.1"}


def url_of(config: ServerConfig, port: int) -> str:
    """Returns the URL of the router for clients on this machine; of a unix socket, unix:/path."""
    if unix_path(config.host) is not None:
        return config.host
    return url_at("http" if config.tls is None else "https", config.host, port)


def url_at(scheme: str, host: str, port: int) -> str:
    """Returns the URL of an address to listen on, for clients on this machine."""
    host = _ANY_ADDRESS.get(host, host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def sample_request(url: str, model: str, keys_needed: bool) -> str:
    """Returns a shell command that sends one request."""
    body = json.dumps({"model": model, "prompt": "Hello", "max_tokens": 16}, ensure_ascii=False)
    key = ' -H "authorization: Bearer $API_KEY"' if keys_needed else ""
    socket = unix_path(url)
    if socket is not None:
        url = f"--unix-socket {shlex.quote(socket)} http://localhost"
    return f"curl {url}/v1/completions{key} -H 'content-type: application/json' -d {shlex.quote(body)}"


def startup_report(config: ServerConfig, fleet: Fleet, port: int, keys_needed: bool) -> dict[str, Any]:
    """Returns the fields of the event `listening`.

    `open`: whether other machines can send requests without a key.
    """
    url = url_of(config, port)
    report = {"version": __version__, "url": url, "host": config.host, "port": port}
    report |= {"policy": config.policy, **summary(fleet, names=True)}
    report["open"] = not keys_needed and unix_path(config.host) is None and not is_loopback(config.host)
    report["configured"] = bool(config.models)
    report["workers"] = config.worker_count
    report["page"] = f"{url}/ui" if config.ui.enabled and unix_path(config.host) is None else None
    report["curl"] = sample_request(url, fleet.models[0].name, keys_needed) if fleet.models else None
    return report


def startup_block(event: Mapping[str, Any]) -> str:
    """Returns the event `listening` as lines of text."""
    modes = ", ".join(f"{count} {mode}" for mode, count in sorted(event["modes"].items()))
    usable = f"{event['usable']} of {event['engines']} usable"
    rows = [("URL", event["url"])]
    if not event["models"]:  # no engine has reported its model
        rows.append(("policy", str(event["policy"])))
    several = len(event["models"]) > 1
    for model in event["models"]:
        decode = f", decode policy {model['decode_policy']}" if model["decode_policy"] else ""
        engines = f" ({model['engines']} of {event['engines']} engines)" if several else ""
        rows.append(("model", f"{model['model']}{engines}"))
        rows.append(("policy", f"{model['policy']}{decode}, hot-spot guard {model['guard']}"))
    if event["page"] is not None:
        rows.append(("page", event["page"]))
    rows.append(("engines", f"{usable}: {modes}" if modes else usable))
    if (workers := event["workers"]) > 1:
        rows.append(("workers", str(workers)))
    for problem in event["warnings"]:
        names, count = problem["names"], problem["engines"]
        more = f" and {count - NAMED} more" if count > NAMED else ""
        who = f"{', '.join(sorted(names)[:NAMED])}{more}: " if names else ""
        rows.append(("WARNING", f"{who}{problem['what']}: {problem['reason']}"))
        if problem["fix"] is not None:
            rows.append(("", f"fix: {problem['fix']}"))
    if several and not event["configured"]:
        rows.append(("NOTE", "the engines serve several models, and each request must name one"))
        rows.append(("", "fix: if that is not intended, start them with the same --served-model-name"))
    if event["open"]:
        rows.append(("NOTE", "there are no API keys: whoever reaches this port can use the engines"))
        rows.append(("", "fix: set auth.keys_file or auth.jwt, or listen on loopback (--host 127.0.0.1)"))
    if event["curl"] is not None:
        rows.append(("try", event["curl"]))
    lines = [f"  {name:<8} {printable(text)}" for name, text in rows]
    where = f"{event['host'] or '*'}, port {event['port']}" if event["port"] else event["url"]
    title = f"lmetric-router {event['version']} listens on {where}"
    return "\n".join([title, *lines])
