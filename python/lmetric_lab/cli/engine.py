"""``lmetric-router engine``: one emulated engine. Its options are the fields of `EngineOptions`."""

from __future__ import annotations

from collections.abc import Callable


def command() -> None:
    """Run one emulated engine, without a GPU.

    It has the HTTP API, metrics and KV events of vLLM. Step times come from a profile. The
    engine's clock can run faster than real time. Flags disable features or cause failures, to
    test clients and routers. When the engine is ready, it prints one JSON line with its address.
    SIGTERM and Ctrl-C stop it.

    With --api sglang, it has the endpoints, metrics and events of SGLang. They follow the SGLang
    sources and were never compared with a running SGLang.
    """


def build() -> Callable[..., None]:
    """The command with its options, whose import is slow."""
    from lmetric_lab.cli.generated import command_for
    from lmetric_lab.emulated import EngineOptions, run_engine

    return command_for(EngineOptions, run_engine, command.__doc__)
