"""``lmetric-router engine``: one emulated vLLM. Its options are the fields of `EngineOptions`."""

from __future__ import annotations

from collections.abc import Callable


def command() -> None:
    """Run one emulated engine: vLLM's HTTP API, metrics and KV events without a GPU.

    Step times come from a profile, on a clock that may run faster than the wall's. Flags take features away
    or make it fail, for tests of what stands in front of it. When it is ready it prints one JSON line with
    its address. SIGTERM and Ctrl-C stop it.

    With --api sglang it has SGLang's pages, metrics and events: a stand-in written from SGLang's sources,
    never held against a running one.
    """


def build() -> Callable[..., None]:
    """The command with its options, which take a while to import."""
    from lmetric.cli.generated import command_for
    from lmetric.engines.emulated import EngineOptions, run_engine

    return command_for(EngineOptions, run_engine, command.__doc__)
