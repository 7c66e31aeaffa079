"""Both packages, the server and the core's router import downward only, and never in a circle.

Imports for types alone count, too.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from aiohttp.base_protocol import BaseProtocol
from aiohttp.web_protocol import RequestHandler

import lmetric.server
from lmetric._core import Request
from lmetric.server.http.connection import ClientConnection

PACKAGE = "lmetric.server"
ROOT = Path(lmetric.server.__file__).parent
# From the bottom; folders of one row do not import each other.
LAYERS = [
    {"api", "tls"},
    {"upstream"},
    {"fleet"},
    {"execution"},
    {"discovery", "observe", "worker"},
    {"background"},
    {"http"},
    {"embedded", "epp", "supervisor"},
    {"app"},
    {"process"},
]


def module(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts)


FILES = {module(file): file for file in ROOT.rglob("*.py") if file.name != "__init__.py"}


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(PACKAGE):
            base = node.module.removeprefix(PACKAGE).removeprefix(".")
            for alias in node.names:
                yield next((name for name in (f"{base}.{alias.name}", base) if name in FILES), base)


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@cache
def arrows() -> dict[str, set[str]]:
    """The files that each file imports."""
    return {
        name: {other for other in imported(tree_of(file)) if other in FILES} for name, file in FILES.items()
    }


def layer(name: str) -> int:
    folder = name.partition(".")[0]
    return next(number for number, folders in enumerate(LAYERS) if folder in folders)


def test_every_import_goes_down() -> None:
    up = [
        f"{name} -> {other}"
        for name, others in arrows().items()
        for other in others
        if name.partition(".")[0] != other.partition(".")[0] and layer(other) >= layer(name)
    ]
    assert up == []


def test_no_files_import_each_other_in_a_circle() -> None:
    try:
        TopologicalSorter(arrows()).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


MOST_PARAMETERS = 7
MOST_POSITIONAL = 3
# They pass arguments on, or any number of them: events, pages and their statuses.
FORWARDING = {"guarded", "in_request", "partial", "note", "on", "page"}
OF_RUST = {"begin", "chain", "reserve"}  # of `ResponseReader`, `Hasher` and `Budgets`
# Each request calls them: names would take 900 instructions (0.3% of a chat).
EACH_REQUEST = {"EngineAttempt", "attempt"}


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    given = function.args
    names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def test_functions_of_the_server_have_few_parameters() -> None:
    """One object, such as `Intent`, carries what belongs together."""
    many = [
        f"{name}.{node.name}"
        for name, file in FILES.items()
        for node in ast.walk(tree_of(file))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and parameters(node) > MOST_PARAMETERS
    ]
    assert many == []


def is_row(node: ast.AST) -> bool:
    """Whether a class is plain data, as the rows of a table are."""
    if not isinstance(node, ast.ClassDef):
        return False
    kinds = [ast.unparse(each) for each in (*node.bases, *node.decorator_list)]
    return any(kind in ("NamedTuple", "Struct") or kind.startswith("dataclass") for kind in kinds)


def test_calls_in_the_server_name_their_further_arguments() -> None:
    """An inserted parameter must not shift the others silently. Calls of Rust may be positional."""
    trees = {name: tree_of(file) for name, file in FILES.items()}
    defined = [
        node
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    ]
    rows = {node.name for node in defined if is_row(node)}
    own = {node.name for node in defined} - rows
    unnamed = []
    for name in trees:
        for node in ast.walk(trees[name]):
            if isinstance(node, ast.Call) and len(node.args) > MOST_POSITIONAL:
                called = getattr(node.func, "id", getattr(node.func, "attr", ""))
                if called in own - FORWARDING - OF_RUST - EACH_REQUEST:
                    unnamed.append(f"{name}:{node.lineno} {called}")
    assert "\n".join(unnamed) == ""


def test_files_of_the_front_end_are_short() -> None:
    lines = {name: len(file.read_text().splitlines()) for name, file in FILES.items()}
    assert [name for name, count in lines.items() if name.startswith("http.") and count > 450] == []


def test_the_positional_arguments_of_a_request_have_its_order() -> None:
    """`Request(...)` of the fast path is positional, because keywords take 4% of a chat."""
    assert list(inspect.signature(Request).parameters)[:25] == [
        *("token_ids", "text", "block_hashes", "prompt_tokens", "max_tokens", "session", "request_id"),
        *("lora_name", "cache_salt", "extra_tokens", "tenant", "tenant_weight", "handicap_seconds"),
        *("length_class", "reasoning_tokens", "allow_split", "split_reason", "allow_fetch", "fetch_reason"),
        *("priority", "instances", "session_final", "ttft_slo_seconds", "whole_answer", "images"),
    ]


# The rooms of each package, from the bottom: files and folders of one row do not import each
# other. The laboratory imports the router, never the reverse, but for three doors.
PYTHON = ROOT.parents[1]
ROUTER_ROOMS = [
    {"_core", "connection_errors", "defaults", "descriptions", "extras", "file_errors", "host_names"}
    | {"lean_imports", "printable", "reasons", "roles", "standard_streams", "timeline", "validation", "why"},
    {"host_resolver", "no_router"},
    {"canary", "engines", "expr", "option_errors", "plugins", "profiles", "record_schema", "tokens", "top"},
    {"lengths", "policies", "record_parquet", "top_screen"},
    {"options", "record_files"},
    {"option_values"},
    {"config", "records", "relay"},
    {"server"},
    {"doctor", "gateways", "worker_process"},
    {"cli"},
]
LAB_ROOMS = [
    {"errors", "machine", "packed", "ports", "slo", "tuned"},
    {"public_traces", "queueing"},
    {"defaults"},
    {"emulated"},
    {"embedded", "migrate", "sim"},
    {"replay"},
    {"calibrate", "demo"},
    {"whatif"},
    {"capacity"},
    {"cli"},
]
DOORS = {"lmetric/__init__.py", "lmetric/cli/app.py", "lmetric/engines/embedded.py"}


def dotted(file: Path) -> str:
    return ".".join(file.relative_to(PYTHON).with_suffix("").parts).removesuffix(".__init__")


HOUSE = {dotted(file): file for file in PYTHON.rglob("*.py")} | {"lmetric._core": Path("of Rust")}


def targets(tree: ast.AST) -> Iterator[str]:
    """The modules of both packages that a file imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in HOUSE else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@cache
def house_arrows() -> dict[str, set[str]]:
    found = {
        name: {other for other in targets(tree_of(file)) if other in HOUSE and other != name}
        for name, file in HOUSE.items()
        if name != "lmetric._core"
    }
    del found["lmetric"]  # the table of names, a door
    return found


def test_every_import_of_a_package_goes_down() -> None:
    rows = {"lmetric": ROUTER_ROOMS, "lmetric_lab": LAB_ROOMS}

    def place(name: str) -> tuple[str, str, int]:
        package, _, rest = name.partition(".")
        room = rest.partition(".")[0]
        return package, room, next(row for row, rooms in enumerate(rows[package]) if room in rooms)

    up = []
    for name, others in house_arrows().items():
        if name == "lmetric_lab":
            continue
        package, room, row = place(name)
        for other in others - {"lmetric"}:
            its_package, its_room, its_row = place(other)
            same = package == its_package
            if (same and its_room != room and its_row >= row) or (not same and package == "lmetric"):
                up.append(f"{name} -> {other}")
    assert up == []


def test_no_files_of_the_packages_import_each_other_in_a_circle() -> None:
    try:
        TopologicalSorter(house_arrows()).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_the_router_names_the_laboratory_at_three_doors_only() -> None:
    naming = {
        str(file.relative_to(PYTHON))
        for file in (PYTHON / "lmetric").rglob("*.py")
        if re.search(r"\blmetric_lab\.", re.sub(r"`[^`]*`", "", file.read_text()))
    }
    assert naming == DOORS


# The core's router, from the top, as the table in its `mod.rs` has it.
ROUTER = Path(__file__).parents[1] / "rust" / "core" / "src" / "router"
_ROW = re.compile(r"^//! \| (`.*?`) \|", re.MULTILINE)
ROUTER_LAYERS = [set(re.findall(r"`(\w+)`", row)) for row in _ROW.findall((ROUTER / "mod.rs").read_text())][
    ::-1
]
_RUST_USE = re.compile(r"^(?:pub(?:\([^)]*\))? )?use ((?:\w+::)*)(\w+|\{[^}]*\});", re.MULTILINE)


def rust_module(file: Path) -> tuple[str, ...]:
    parts = file.relative_to(ROUTER).with_suffix("").parts
    return parts[:-1] if parts[-1] == "mod" else parts


RUST = {
    rust_module(file): file
    for file in ROUTER.rglob("*.rs")
    if file not in (ROUTER / "mod.rs", ROUTER / "plan" / "tests.rs")
}


def rust_imports(name: tuple[str, ...], file: Path) -> Iterator[tuple[str, ...]]:
    """The imports of a router file from the router; () is the router's `mod.rs`."""
    code = file.read_text().partition("#[cfg(test)]")[0]
    here = name if file.name == "mod.rs" else name[:-1]
    for path, last in _RUST_USE.findall(code):
        words = tuple(path.split("::")[:-1])
        if words[:2] == ("crate", "router"):
            base: tuple[str, ...] = words[2:]
        elif words[:1] == ("super",):
            base = (name[:-1] if file.name == "mod.rs" else here) + words[1:]
        else:
            continue
        for each in re.findall(r"\w+", last):
            longest = [base[:n] for n in range(len(base), 0, -1)]
            yield next((m for m in ((*base, each), *longest) if m in RUST), ())


def rust_arrows() -> dict[tuple[str, ...], set[tuple[str, ...]]]:
    found = {name: set(rust_imports(name, file)) - {name} for name, file in RUST.items()}
    for name in found:  # a folder's `mod.rs` is made of its files
        found[name] |= {other for other in found if len(other) > len(name) and other[: len(name)] == name}
    return found


def test_every_import_of_the_core_router_goes_down() -> None:
    def layer_of(name: tuple[str, ...]) -> int:
        rows = (number for number, row in enumerate(ROUTER_LAYERS) if name and name[0] in row)
        return next(rows, len(ROUTER_LAYERS))

    assert {name[0] for name in RUST} == set().union(*ROUTER_LAYERS)
    up = [
        f"{'.'.join(name)} -> {'.'.join(other) or 'mod.rs'}"
        for name, others in rust_arrows().items()
        for other in others
        if other[:1] != name[:1] and layer_of(other) >= layer_of(name)
    ]
    assert up == []


def test_no_files_of_the_core_router_import_each_other_in_a_circle() -> None:
    try:
        TopologicalSorter(rust_arrows()).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(".".join(name) for name in error.args[1]))


# Features that follow requests as listeners, and the data of them that the core's router keeps.
FEATURES = {"admission", "guard", "priority", "program", "rebalance", "warm"}
FEATURE_DATA = {
    *("guard::slots::Restriction", "guard::slots::SlotSet", "priority::Priority", "priority::vtc::Place"),
    "program::capacity::FullCache",
}


def test_the_core_of_the_router_names_no_feature() -> None:
    """Settings name all features; listeners and the rows above them may."""
    row_of_listeners = next(row for row, names in enumerate(ROUTER_LAYERS) if "listeners" in names)
    below = set().union(*ROUTER_LAYERS[:row_of_listeners]) - {"settings"}
    named = set()
    for file in (file for name, file in RUST.items() if name[0] in below):
        for path, last in _RUST_USE.findall(file.read_text().partition("#[cfg(test)]")[0]):
            words = path.split("::")
            if words[0] == "crate" and words[1] in FEATURES:
                named |= {"::".join([*words[1:-1], each]) for each in re.findall(r"\w+", last)}
            elif words[0] == "crate" and last in FEATURES:
                named.add(last)
    assert named == FEATURE_DATA


# Code lines of the core outside the folders of features: what must be read to change a decision,
# beside the public names of the crates below.
MAX_DECISION_LINES = 9_352
# Parts that only features use: the feed of engines' events, messages between routers, levels.
OF_FEATURES = {"codec", "feed", "levels"}
BESIDE_DECISIONS = FEATURES | OF_FEATURES | {"board", "budget"}
BESIDE_ROUTING = {ROUTER / "calls", ROUTER / "listeners"}


def code_lines(file: Path) -> int:
    """Lines that are not empty, not only a comment, and not part of unit tests."""
    code = re.sub(r"#\[cfg\(test\)\]\n(pub\(crate\) )?mod \w+;\n", "", file.read_text())
    code = re.split(r"#\[cfg\(test\)\]\n(?:pub\(crate\) )?mod \w+ \{", code)[0]
    return sum(line.strip() != "" and not line.strip().startswith("//") for line in code.splitlines())


def decision_files() -> list[Path]:
    core = ROUTER.parent
    return [
        file
        for file in core.rglob("*.rs")
        if not file.stem.startswith("tests")
        and file.relative_to(core).parts[0].removesuffix(".rs") not in BESIDE_DECISIONS
        and not BESIDE_ROUTING.intersection(file.parents)
    ]


def test_the_code_in_the_way_of_a_decision_does_not_grow() -> None:
    """Lower the limit with each change that removes lines."""
    assert sum(code_lines(file) for file in decision_files()) <= MAX_DECISION_LINES


def test_no_decision_uses_what_only_features_use() -> None:
    """Decisions and the feed share the index alone, behind its own lock."""
    part = re.compile(rf"\b(?:{'|'.join(OF_FEATURES)})::")
    used = {file for file in decision_files() if part.search(re.sub(r"//.*", "", file.read_text()))}
    assert used == set()


def test_no_decision_makes_a_call_of_a_feature() -> None:
    """`calls` may stay unread. The files below `router` cannot call it: imports go down."""
    files = (ROUTER / "calls").rglob("*.rs")
    beside = {name for file in files for name in re.findall(r"\bfn (\w+)", file.read_text())}
    decisions = [ROUTER / "decide.rs", ROUTER / "stages.rs", ROUTER / "router.rs"]
    called = {name for file in decisions for name in re.findall(r"\bself\.(\w+)\(", file.read_text())}
    assert {"clock", "prepared", "read_workers"} <= called
    assert called & beside == set()


# Crates below the core. To change a decision, only their public names must be read.
BELOW_THE_CORE = ["estimate", "expr", "kv"]
_RUST_PUBLIC = re.compile(
    r"^ *pub (?:const |unsafe )*(?:fn|struct|enum|trait|type|const|mod) (\w+)", re.MULTILINE
)


@pytest.mark.parametrize("crate", BELOW_THE_CORE)
def test_each_public_name_of_a_crate_below_the_core_is_used_outside(crate: str) -> None:
    """`unreachable_pub` in the crate's root refuses `pub` for hidden names."""
    rust = ROUTER.parents[2]
    own = rust / crate / "src"
    assert "#![warn(unreachable_pub)]" in (own / "lib.rs").read_text()
    others = [file.read_text() for file in rust.rglob("*.rs") if own not in file.parents]
    used = {word for text in others for word in re.findall(r"\w+", text)}
    texts = [file.read_text() for file in own.rglob("*.rs")]
    returned = {
        word for text in texts for type_ in re.findall("-> (.+)", text) for word in re.findall(r"\w+", type_)
    }
    shown = {name for text in texts for name in _RUST_PUBLIC.findall(text)}
    assert shown - used - returned == set()


# Of each circle, the files are one thing: the type `Part` of the KV index, and the columns of
# indicators with the trait that computes them.
ONE_THING = [{"copy", "lru", "part", "search"}, {"columns", "kernels"}]
RUST_HOME = ROUTER.parents[2]


def unfolded(tree: str) -> Iterator[str]:
    """The paths of a `use`: `a::{b, c::d}` is `a::b` and `a::c::d`."""
    head, brace, rest = tree.partition("{")
    if not brace:
        yield tree.partition(" as ")[0]
        return
    depth = start = 0
    inside = rest.rpartition("}")[0] + ","
    for place, sign in enumerate(inside):
        depth += (sign == "{") - (sign == "}")
        if sign == "," and depth == 0:
            yield from (head + path for path in unfolded(inside[start:place].strip()))
            start = place + 1


def crate_arrows(source: Path) -> dict[tuple[str, ...], set[tuple[str, ...]]]:
    """The files of a crate that each file names, outside of tests. A `mod.rs` is made of its files;
    a file may use its own `mod.rs`."""
    files = {}
    for file in source.rglob("*.rs"):
        parts = file.relative_to(source).with_suffix("").parts
        if parts != ("lib",) and not file.stem.startswith("tests"):
            files[parts[:-1] if parts[-1] == "mod" else parts] = file
    found = {}
    for name, file in files.items():
        code = re.split(r"#\[cfg\(test\)\]\n(?:pub(?:\([^)]*\))? )?mod \w+ \{", file.read_text())[0]
        code = re.sub(r"//[^\n]*", "", code)
        uses = re.compile(r"\buse ([^;]*);")
        paths = [path for tree in uses.findall(code) for path in unfolded(" ".join(tree.split()))]
        paths += re.findall(r"\b(?:crate|super)(?:::\w+)+", uses.sub("", code))
        found[name] = {other for other in files if other[:-1] == name}
        for words in (path.split("::") for path in paths):
            if words[0] not in ("crate", "self", "super"):
                continue
            up = words.count("super")
            base = () if words[0] == "crate" else name[: len(name) - up]
            full = (*base, *words[max(up, 1) :])
            longest = (full[:n] for n in range(len(full), 0, -1) if full[:n] in files)
            other = next(longest, name)
            if name[: len(other)] != other:
                found[name].add(other)
    return found


@pytest.mark.parametrize("crate", sorted(file.parent.name for file in RUST_HOME.glob("*/Cargo.toml")))
def test_no_files_of_a_crate_name_each_other_in_a_circle(crate: str) -> None:
    arrows = crate_arrows(RUST_HOME / crate / "src")
    assert arrows
    for name, others in arrows.items():
        same = [{(*name[:-1], stem) for stem in stems} for stems in ONE_THING if name[-1] in stems]
        others.difference_update(*same)
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join("/".join(name) for name in error.args[1]))


def test_files_of_the_core_router_are_short() -> None:
    lines = {
        ".".join(name): len(file.read_text().partition("#[cfg(test)]")[0].splitlines())
        for name, file in RUST.items()
    }
    assert [name for name, count in lines.items() if count > 420] == []


def test_aiohttp_has_what_the_short_way_uses() -> None:
    """`ClientConnection` reads attributes that aiohttp does not document."""
    assert issubclass(ClientConnection, RequestHandler)
    assert "_messages" in RequestHandler.__slots__
    assert {"_loop", "_reading_paused", "_buffer_paused"} <= set(BaseProtocol.__slots__)
    assert callable(BaseProtocol._pause_transport_reading)
    assert callable(BaseProtocol._resume_transport_reading)
