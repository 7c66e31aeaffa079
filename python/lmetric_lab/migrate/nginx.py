"""Upstreams of an nginx configuration, read with crossplane (the extra ``nginx``)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lmetric.config import ConfigError, Ejection
from lmetric.defaults import DEFAULT_POLICY
from lmetric.extras import install
from lmetric_lab.migrate.draft import OLD_RULE, Draft

_Block = list[dict[str, Any]]

_NOT_NEEDED = "not needed: one process answers for every host name"
_REPEATED = "another line has this setting, too, and counts in its place"
_ELSEWHERE = "its block passes no requests to this upstream"
_PROXY = "the router sets its own headers and buffers"
_BLOCKS = {"events", "http", "server", "location", "upstream", "proxy_pass"}
_OWN = {
    "server_name": _NOT_NEEDED,
    "zone": "not needed: the router keeps the state of the engines by itself",
    "worker_processes": "not needed: one process serves all requests; `workers` adds others",
    "worker_connections": "not needed: `limits.max_connections` limits the connections of clients",
    "worker_rlimit_nofile": "not needed: the router raises its limit of open files by itself",
}
# Blocks with data instead of directives: their lines belong to the block.
_DATA = {"map", "geo", "split_clients", "types", "charset_map", "match"}


def translate(draft: Draft, file: Path, text: str) -> None:
    """Fills the draft from the upstream that the configuration uses first."""
    top = _parse(file)
    upstreams = {each["args"][0]: each["block"] for each, _ in _walk(top) if each["directive"] == "upstream"}
    if not upstreams:
        raise ConfigError(
            f"{file}: an nginx configuration without upstream; expected `upstream NAME {{ server HOST; }}`. "
            "If an included file has it, import that file. For one engine, use `serve --engine URL`"
        )
    scheme, name, base = "http", next(iter(upstreams)), ""
    around: tuple[_Block, ...] | None = None
    for each, blocks in _walk(top):
        if each["directive"] == "proxy_pass":
            parts = re.match(r"(https?)://([^/:$]+)(?::\d+)?(.*)", each["args"][0])
            if parts and parts[2] in upstreams:
                scheme, name, around = parts[1], parts[2], blocks
                base = _base(draft, each["args"][0], parts[3], _location(top, blocks))
                break
    _upstream(draft, upstreams[name], scheme, base)
    for other in upstreams.keys() - {name}:
        draft.remark(f"upstream {other}", "one fleet per import; write it as an entry of `models`")
    of_upstreams = {id(each) for block in upstreams.values() for each in block}
    _directives(draft, [each for each, _ in _walk(top) if id(each) not in of_upstreams], around)


def _parse(file: Path) -> _Block:
    try:
        import crossplane
    except ImportError:
        raise ConfigError(f"{file}: reading nginx files needs crossplane; run: {install('nginx')}") from None
    parsed = crossplane.parse(str(file), single=True, check_ctx=False, check_args=False)
    for error in parsed["errors"]:
        line = f":{error['line']}" if error.get("line") else ""
        raise ConfigError(f"{file}{line}: {str(error['error']).rpartition(' in ')[0] or error['error']}")
    block: _Block = parsed["config"][0]["parsed"]
    return block


def _walk(
    block: _Block, around: tuple[_Block, ...] = ()
) -> Iterator[tuple[dict[str, Any], tuple[_Block, ...]]]:
    """Yields the directives, each with the blocks that it is in, the inner block first."""
    around = (block, *around)
    for each in block:
        yield each, around
        if each["directive"] not in _DATA:
            yield from _walk(each.get("block") or [], around)


def _location(top: _Block, around: tuple[_Block, ...]) -> list[str]:
    """The arguments of the inner location around a directive."""
    owners = {id(each["block"]): each for each, _ in _walk(top) if "block" in each}
    found = (owners.get(id(block), {}) for block in around)
    return next((each["args"] for each in found if each.get("directive") == "location"), ["/"])


def _base(draft: Draft, proxy_pass: str, uri: str, location: list[str]) -> str:
    """The path in front of the clients' paths at the engines; none and a remark if there is no such
    path. nginx replaces the location's path by ``uri``."""
    if uri in ("", "$request_uri"):
        return ""
    path = location[-1]
    if location[0] not in ("~", "~*", "=") and "$" not in uri and uri.endswith(path):
        return uri.removesuffix(path)
    draft.remark(
        f"proxy_pass {proxy_pass}",
        f"it replaces {path} of the clients' paths; the router adds a path to the URL of each engine, as in "
        "http://HOST/PATH, or none",
    )
    return ""


def _upstream(draft: Draft, block: _Block, scheme: str, base: str) -> None:
    policy, note = "round_robin", None
    for each in block:
        what, args = each["directive"], each["args"]
        if what == "least_conn":
            policy = "least_requests"
        elif what == "random":
            policy = "power_of_two" if args[:1] == ["two"] else "random"
        elif what in ("ip_hash", "hash", "sticky"):
            policy, note = "session_affinity", "Clients name their session in the header x-session-id."
            draft.remark(" ".join([what, *args]), "sessions come in the header x-session-id")
        elif what == "least_time":
            draft.remark(" ".join([what, *args]), f"no such rule; see `{DEFAULT_POLICY}`")
        elif what.startswith("keepalive"):
            draft.remark(
                " ".join([what, *args]), "the router keeps connections by itself: `limits.idle_seconds`"
            )
        elif what in _OWN:
            draft.remark(" ".join([what, *args]), _OWN[what])
        elif what not in _BLOCKS:
            draft.remark(" ".join([what, *args]), "no equivalent known")
    draft.set("policy", policy, note)
    draft.note("policy", f"{OLD_RULE}.")
    limits: dict[str, list[Any]] = {"max_fails": [], "fail_timeout": [], "max_conns": []}
    for each in block:
        if each["directive"] == "server":
            _server(draft, each["args"], (scheme, base), limits)
    if fails := [int(value) for value in limits["max_fails"]]:
        if max(fails) > 0:
            draft.set("health.ejection.consecutive_failures", max(fails))
        else:
            draft.set("health.ejection.enabled", False)
    if times := [draft.seconds("fail_timeout", value) for value in limits["fail_timeout"]]:
        draft.set("health.ejection.base_seconds", min(max(times), Ejection.max_seconds))
        if max(times) > Ejection.max_seconds:
            draft.note("health", f"An ejection lasts at most {Ejection.max_seconds:g} s.")
    for count in dict.fromkeys(limits["max_conns"]):
        draft.remark(f"max_conns={count}", "`admission` limits the requests of an engine by its load")


def _server(draft: Draft, args: list[str], url: tuple[str, str], limits: dict[str, list[Any]]) -> None:
    """``url``: scheme, and the path in front of the clients' paths."""
    address, options, (scheme, base) = args[0], args[1:], url
    for flag in ("backup", "down"):
        if flag in options:
            draft.remark(
                f"server {address} {flag}", "left out: every engine gets requests while it is healthy"
            )
            return
    for option in options:
        key, _, value = option.partition("=")
        if key in limits:
            limits[key].append(value)
        elif key == "weight" and value != "1":
            draft.remark(f"server {address} {option}", "no weights: load decides")
        elif key != "weight":
            draft.remark(f"server {address} {option}", "no equivalent known")
    if address.startswith("unix:"):
        if base:
            draft.remark(f"server {address} with {base}", "an engine at a Unix socket has no path")
        else:
            draft.add_engine(address, "server")
        return
    port = "" if re.search(r":\d+$", address) else ":443" if scheme == "https" else ":80"
    draft.add_engine(f"{scheme}://{address}{port}{base}", "server")


def _directives(draft: Draft, directives: _Block, around: tuple[_Block, ...] | None) -> None:
    """The settings of the blocks around the `proxy_pass`, as nginx inherits them.

    Settings of other blocks are remarks. ``around``: the inner block first; None: no `proxy_pass`
    names the upstream, so all blocks count, the first setting of each name.
    """
    counting = directives if around is None else [each for block in around for each in block]
    there = {id(each) for each in counting}
    seen: dict[str, list[str]] = {}
    others: dict[str, None] = {}
    for each in [*counting, *(each for each in directives if id(each) not in there)]:
        what, args = each["directive"], each["args"]
        if what == "location" and args != ["/"]:
            draft.remark(" ".join([what, *args]), "the router serves the paths of engines, and only those")
        if what in _BLOCKS:
            continue
        if what in _OWN:
            draft.remark(" ".join([what, *args]), _OWN[what])
        elif what in _SETTINGS:
            if args[0] != "0" and what not in seen and id(each) in there:
                _SETTINGS[what](draft, what, args)
            elif args != seen.get(what):
                why = _REPEATED if id(each) in there else _ELSEWHERE
                draft.remark(" ".join([what, *args]), "0 is no limit here" if args[0] == "0" else why)
        elif what.startswith("proxy_"):
            draft.remark(what, _PROXY)
        else:
            others[what] = None
        if id(each) in there:
            seen.setdefault(what, args)
    if others:
        draft.remark(", ".join(others), "no equivalent known; check whether you need it")


def _listen(draft: Draft, _: str, args: list[str]) -> None:
    address = args[0]
    if len(args) > 1:
        draft.remark(f"listen {' '.join(args)}", "options of the socket; TLS is in `tls`, and HTTP is 1.1")
    if address.startswith("unix:"):
        draft.set("host", address)
        return
    parts = re.fullmatch(r"(?:(\[\S+\]|[^\s:\]]+):)?(\d+)", address)
    host, port = (parts[1], int(parts[2])) if parts else (address, 80)
    draft.set("port", port)
    draft.set("host", "0.0.0.0" if host in (None, "*") else host.strip("[]"))


def _read_timeout(draft: Draft, what: str, args: list[str]) -> None:
    seconds = draft.seconds(what, args[0])
    draft.set("timeouts.first_byte", seconds)
    draft.set("timeouts.between_chunks", seconds)


_SETTINGS: dict[str, Callable[[Draft, str, list[str]], None]] = {
    "listen": _listen,
    "proxy_connect_timeout": lambda draft, what, args: draft.set(
        "timeouts.connect", draft.seconds(what, args[0])
    ),
    "proxy_read_timeout": _read_timeout,
    "client_max_body_size": lambda draft, what, args: draft.set(
        "limits.max_body_bytes", draft.size_bytes(what, args[0])
    ),
    "proxy_next_upstream_tries": lambda draft, what, args: draft.set(
        "retries.attempts", int(draft.number(what, args[0], whole=True))
    ),
    "ssl_certificate": lambda draft, _, args: draft.set("tls.certificate_file", args[0]),
    "ssl_certificate_key": lambda draft, _, args: draft.set("tls.key_file", args[0]),
}
