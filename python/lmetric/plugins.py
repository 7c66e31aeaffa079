"""Loads Python objects by reference: ``file.py:name``, ``package.module:name``, or an entry
point."""

import importlib
import importlib.util
import inspect
import itertools
import os
import re
import reprlib
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType

import numpy as np

from lmetric import _core

ENTRY_POINTS = "lmetric.policies"
"""Entry point group in which packages register policies."""

_FILE = re.compile(r"(?P<place>.+\.py):(?P<name>[A-Za-z_]\w*)", re.ASCII)
_MODULE = re.compile(r"(?P<place>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):(?P<name>[A-Za-z_]\w*)", re.ASCII)

_allowed: ContextVar[Collection[str] | None] = ContextVar("_allowed", default=None)
_numbers = itertools.count(1)
_imported: set[str] = set()


@contextmanager
def code_only_in(texts: Collection[str] | None) -> Iterator[None]:
    """Limits the context to code that these texts name; None: no limit.

    Any other reference raises BadValueError. Readers of data files use it.
    """
    token = _allowed.set(texts)
    try:
        yield
    finally:
        _allowed.reset(token)


def _check_allowed(text: str) -> None:
    allowed = _allowed.get()
    if allowed is not None and text not in allowed:
        raise _core.BadValueError(
            f"{text!r} is Python code, which a data file does not run by itself. If you trust it, pass "
            "--allow-code"
        )


def is_reference(text: str) -> bool:
    """Whether a text is a reference to an object in a file or module. Expressions have no colon."""
    return ":" in text and bool(_FILE.fullmatch(text.strip()) or _MODULE.fullmatch(text.strip()))


def lacks_name(text: str) -> bool:
    """Whether a text is a Python file without the name of an object in it."""
    return bool(re.fullmatch(r"[\w./~-]+\.py:?", text.strip()))


def file_of(text: str) -> Path | None:
    """The file with the object of a reference or entry point; None for other texts."""
    text = text.strip()
    if found := _FILE.fullmatch(text):
        return Path(found["place"])
    if not (found := _MODULE.fullmatch(text)):
        points = _points(text) if text.isidentifier() else ()
        found = _MODULE.fullmatch(points[0].value) if points else None
    try:
        spec = importlib.util.find_spec(found["place"]) if found else None
    except BaseException as error:  # of a parent package, whose code this runs; `load_object` reports it
        if is_ctrl_c(error):
            raise
        return None
    return Path(spec.origin) if spec is not None and spec.has_location and spec.origin else None


def load_object(text: str) -> object:
    """Loads the object of a reference. Each call runs the file again, or reloads the module.

    Raises:
        BadValueError: loading failed, or the name does not exist.
    """
    text = text.strip()
    _check_allowed(text)
    try:
        if found := _FILE.fullmatch(text):
            module = _run(Path(found["place"]))
        elif found := _MODULE.fullmatch(text):
            module = _import(found["place"])
        else:
            raise _core.BadValueError(f"{text!r} is not valid; expected file.py:name or package.module:name")
    except _core.LmetricError:
        raise
    except BaseException as error:
        if is_ctrl_c(error):
            raise
        raise _core.BadValueError(f"{text}: it cannot be loaded: {described(error)}") from error
    try:
        return getattr(module, found["name"])
    except AttributeError:
        names = [name for name in vars(module) if not name.startswith("_")]
        near = _core.nearest_name(found["name"], names)
        hint = f"; did you mean {near!r}?" if near else ""
        raise _core.BadValueError(f"{text}: {found['place']} has no {found['name']!r}{hint}") from None


def entry_point(name: str) -> object | None:
    """The object that an installed package registers under this name in `ENTRY_POINTS`, or None.

    Raises:
        BadValueError: loading failed, or several packages register the name.
    """
    found = _points(name)
    if not found:
        return None
    _check_allowed(name)
    if len(found) > 1:
        packages = ", ".join(sorted(str(point.dist and point.dist.name) for point in found))
        raise _core.BadValueError(f"policy {name!r}: several packages register this name: {packages}")
    try:
        loaded: object = found[0].load()
    except BaseException as error:
        if is_ctrl_c(error):
            raise
        raise _core.BadValueError(
            f"policy {name!r}: {found[0].value} cannot be loaded: {described(error)}"
        ) from error
    return loaded


def has_entry_point(name: str) -> bool:
    """Whether an installed package registers this name in `ENTRY_POINTS`. Loads nothing."""
    return bool(_points(name))


def _points(name: str) -> tuple[EntryPoint, ...]:
    """The entry points of a name."""
    return tuple(each for each in _all_points(tuple(map(_changed, sys.path))) if each.name == name)


def _changed(folder: str) -> tuple[str, int]:
    """A folder and the time of its last change; 0: it does not exist."""
    try:
        return folder, os.stat(folder or ".").st_mtime_ns
    except OSError:
        return folder, 0


@lru_cache(maxsize=1)
def _all_points(folders: tuple[tuple[str, int], ...]) -> tuple[EntryPoint, ...]:
    """The entry points of all packages in the folders: a look-up reads all their metadata."""
    return tuple(entry_points(group=ENTRY_POINTS))


def _run(file: Path) -> ModuleType:
    name = f"lmetric_plugin_{next(_numbers)}_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None  # the file name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses need the entry
    try:
        _execute(module, file)
    finally:
        del sys.modules[name]
    return module


def _execute(module: ModuleType, file: Path) -> None:
    # The loader could use stale byte code, because it compares times in whole seconds.
    exec(compile(file.read_bytes(), str(file), "exec"), vars(module))


def _import(name: str) -> ModuleType:
    """Imports a module, or runs it again as a new one.

    Functions of the old one keep their names: they may decide meanwhile, and other threads may load
    the module, too.
    """
    old = sys.modules.get(name) if name in _imported else None
    if old is None:
        _imported.add(name)
        return importlib.import_module(name)
    spec = importlib.util.find_spec(name)
    assert spec is not None  # it was imported
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    for each, value in vars(old).items():
        if isinstance(value, ModuleType) and sys.modules.get(f"{name}.{each}") is value:
            setattr(module, each, value)  # a package has the modules in it
    if spec.origin is not None and spec.origin.endswith(".py"):
        _execute(module, Path(spec.origin))
    else:
        spec.loader.exec_module(module)
    sys.modules[name] = module
    package, _, last = name.rpartition(".")
    if (parent := sys.modules.get(package)) is not None:
        setattr(parent, last, module)
    return module


def is_ctrl_c(error: BaseException) -> bool:
    """Whether an error of a user's code is Ctrl-C, which Python raises in the main thread only.

    All others are errors of the code: `sys.exit` of a script, or the panic of an extension.
    """
    # A server handles the signal itself: there, only the code can raise this error.
    handled = signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    in_main = threading.current_thread() is threading.main_thread()
    return isinstance(error, KeyboardInterrupt) and in_main and not handled


def described(error: BaseException) -> str:
    """Type and text of an error, and the last line of the file's code in its traceback.

    The core calls it, too.
    """
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    where = f" ({frame.tb_frame.f_code.co_filename}:{frame.tb_lineno})" if frame is not None else ""
    if isinstance(error, OSError | SyntaxError | ImportError):
        where = ""
    return f"{type(error).__name__}: {error}{where}"


def bad_scores(fn: Callable[..., object], result: object, instances: int) -> str:
    """Describes a wrong result of a policy function, with file and line.

    The core calls it.
    """
    found = f"{reprlib.repr(result)} ({type(result).__name__})"
    with suppress(TypeError, ValueError):
        scores = np.asarray(result, np.float64)
        found = f"{len(scores)} scores for {instances} instances" if scores.ndim == 1 else found
    fn = inspect.unwrap(fn)
    code = getattr(fn, "__code__", None) or getattr(type(fn).__call__, "__code__", None)
    where = "" if code is None else f" ({code.co_filename}:{code.co_firstlineno})"
    return f"it returned {found}; expected {instances} numbers, one score per instance{where}"
