"""Compares two versions of an engine's sources: the names that the router depends on.

    python bench/engine_versions.py vllm OLD NEW

OLD and NEW are unpacked wheels (the folder `vllm` or `sglang`). No engine code runs: names come
from syntax trees. `bench/results/engine_versions_ENGINE.csv` gets a row for each name that was
added, removed or changed. `router` is `yes` for names that the router or its documentation uses; a
name that the router uses and both versions lack is `missing`.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from lmetric.engines.sglang import Sglang
from lmetric.engines.vllm import Vllm
from result_files import Row, write_table

ROOT = Path(__file__).resolve().parent.parent
Names = Iterator[tuple[str, str]]  # a name, and its type, default or signature
Reader = Callable[[ast.AST], Names]
_CONNECTORS = "distributed/kv_transfer/kv_connector/v1"
_SCHEDULER = (  # what lmetric-vllm extends or calls
    *(
        "AsyncScheduler.__init__",
        "Scheduler.add_request",
        "Scheduler.schedule",
        "Scheduler.update_from_output",
    ),
    *("Scheduler._preempt_request", "Scheduler._free_request", "Scheduler.get_request_counts"),
    *("KVCacheManager.prefix_cache_lookup_enabled", "KVCacheCoordinator.find_longest_cache_hit"),
)


def fields(node: ast.AST) -> Names:
    """Annotated fields of a class, with type and default, without descriptions."""
    for each in node.body if isinstance(node, ast.ClassDef) else ():
        if isinstance(each, ast.AnnAssign) and isinstance(node, ast.ClassDef):
            for call in ast.walk(each):
                if isinstance(call, ast.Call):
                    call.keywords = [
                        word for word in call.keywords if word.arg not in ("description", "help")
                    ]
            yield f"{node.name}.{ast.unparse(each.target)}", ast.unparse(each).partition(": ")[2]


def functions(node: ast.AST) -> Names:
    """Functions of a class or module, with their signatures."""
    owner = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
    for each in node.body if isinstance(node, ast.ClassDef | ast.Module) else ():
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            yield owner + each.name, f"({ast.unparse(each.args)})"


def routes(node: ast.AST) -> Names:
    """The path of an HTTP route, with its method."""
    path = node.args[0] if isinstance(node, ast.Call) and node.args else None
    if isinstance(node, ast.Call) and isinstance(path, ast.Constant) and str(path.value).startswith("/"):
        verb = ast.unparse(node.func).rpartition(".")[2]
        if re.fullmatch("get|post|put|delete|websocket|Mount|(add_)?api_route", verb):
            yield str(path.value), verb


def keys(node: ast.AST) -> Names:
    """Keys of a dictionary that are read with `.get` or `[...]`, or written."""
    found: list[ast.expr | None] = list(node.keys) if isinstance(node, ast.Dict) else []
    if isinstance(node, ast.Subscript):
        found = [node.slice]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
        found = list(node.args[:1])
    elif isinstance(node, ast.Call) and ast.unparse(node.func) == "dict":
        yield from ((str(word.arg), "") for word in node.keywords)
    names = [each.value for each in found if isinstance(each, ast.Constant)]
    yield from ((name, "") for name in names if isinstance(name, str) and name.isidentifier())


def metrics(node: ast.AST) -> Names:
    """The name of a metric."""
    if isinstance(node, ast.Constant) and re.fullmatch(r"(vllm|sglang):\w+", str(node.value)):
        yield str(node.value), ""


def flags(node: ast.AST) -> Names:
    """Flags of the command line: the fields of a class of arguments, with type and default."""
    yield from (("--" + name.partition(".")[2].replace("_", "-"), value) for name, value in fields(node))
    if isinstance(node, ast.Constant) and re.fullmatch(r"--[a-z][a-z-]+", str(node.value)):
        yield str(node.value), ""


def _own(pattern: str, file: str, start: str = "", end: str = "\0") -> set[str]:
    """Names in a file of this repository, between `start` and `end`."""
    text = (ROOT / file).read_text()
    return set(re.findall(pattern, text[text.index(start) :].partition(end)[0]))


def areas(engine: str) -> Iterator[tuple[str, Reader, set[str], str]]:
    """Name, reader, names that the router uses, and files of each area of an engine."""
    feed, page, path = "rust/feed/src/event.rs", "docs/reference/engines.md", r"""["'](/[a-z0-9_/]+)["'?]"""
    paths = _own(path, f"python/lmetric/engines/{engine}.py")
    if engine == "sglang":
        yield "events", fields, set(), "srt/disaggregation/kv_events.py"
        yield "fields", fields, set(), "srt/entrypoints/**/protocol.py srt/managers/io_struct.py"
        yield "paths", routes, paths, "srt/entrypoints/**/*.py srt/utils/common.py"
        yield "metrics", metrics, {Sglang.prefix + each for each in Sglang.gauges}, "srt/observability/*.py"
        used = _own("--[a-z-]+", page, "## SGLang", "## Data") - {"--api"}
        yield "flags", flags, used, "srt/server_args.py srt/arg_groups/**/*.py"
        return
    stored = {f"BlockStored.{name}" for name in _own(r'"(\w+)"', feed, "const STORED", "];")}
    removed = {f"BlockRemoved.{name}" for name in _own(r'"(\w+)"', feed, "const REMOVED", "];")}
    yield "events", fields, stored | removed, "distributed/kv_events.py config/kv_events.py"
    yield "events", functions, set(), "distributed/kv_events.py"
    yield "hashes", functions, set(), "v1/core/kv_cache_[cpu]*.py v1/core/block_pool.py"
    sent = _own(r'"((?:do_)?remote_\w+)"', "python/lmetric/engines/handover.py")
    sent |= _own(r'"((?:do_)?remote_\w+)"', "python/lmetric/engines/connectors.py")
    yield "transfer", keys, sent, f"{_CONNECTORS}/nixl/*.py {_CONNECTORS}/offloading/*.py"
    yield "fields", fields, set(), "entrypoints/**/protocol.py"
    paths |= _own(path, "python/lmetric/server/api/paths.py")
    yield "paths", routes, paths, "entrypoints/**/*.py"
    yield "metrics", metrics, {Vllm.prefix + each for each in Vllm.gauges}, "v1/**/*.py distributed/**/*.py"
    used = {each.replace("--no-", "--") for each in _own("--[a-z-]+[a-z]", page, "## vLLM", "### Names")}
    yield "flags", flags, used, "engine/arg_utils.py entrypoints/*/cli_args.py"
    yield "scheduler", functions, set(_SCHEDULER), "v1/core/sched/*.py v1/core/kv_cache_[cm]*.py"


def names_of(source: Path, read: Reader, patterns: str) -> dict[str, str]:
    """The names of an area. Raises ValueError if `source` has no file of the area."""
    files = sorted({path for pattern in patterns.split() for path in source.glob(pattern)})
    if not files:
        raise ValueError(f"{source} has no file {patterns}; expected the folder of an unpacked engine")
    found: dict[str, set[str]] = {}
    for file in files:
        for name, value in (pair for node in ast.walk(ast.parse(file.read_text())) for pair in read(node)):
            found.setdefault(name, set()).add(value)
    return {name: " | ".join(sorted(values - {""})) for name, values in found.items()}


def compare(engine: str, old: Path, new: Path) -> list[Row]:
    """The rows of the table."""
    rows: list[Row] = []
    for area, read, used, patterns in areas(engine):
        before, after = names_of(old, read, patterns), names_of(new, read, patterns)
        for name in sorted(before.keys() | after.keys() | used):
            was, now = before.get(name), after.get(name)
            if was is None or was != now:
                kinds = {(True, True): "missing", (True, False): "added", (False, True): "removed"}
                change = kinds.get((was is None, now is None), "changed")
                row = {"area": area, "name": name, "change": change, "router": "yes" if name in used else ""}
                rows.append(row | {"old": was or "", "new": now or ""})
    return rows


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[1] not in ("vllm", "sglang"):
        sys.exit(__doc__)
    table = compare(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
    write_table(ROOT / "bench" / "results" / f"engine_versions_{sys.argv[1]}.csv", table)
