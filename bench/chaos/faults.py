"""The faults of an engine: each begins, lasts and ends."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from engines import EngineProcess, Mode

Change = Callable[[EngineProcess], Awaitable[None]]


@dataclass(frozen=True)
class Fault:
    """A fault of one engine. ``begin`` and ``end`` change the engine."""

    name: str
    what: str
    begin: Change
    end: Change


def _proxied(mode: Mode) -> tuple[Change, Change]:
    async def begin(engine: EngineProcess) -> None:
        await engine.proxy.set(mode)

    async def end(engine: EngineProcess) -> None:
        await engine.proxy.set("pass")

    return begin, end


async def _kill(engine: EngineProcess) -> None:
    await engine.kill()
    await engine.proxy.set("refuse")


async def _restart(engine: EngineProcess) -> None:
    await engine.start()
    await engine.proxy.set("pass")


async def _freeze(engine: EngineProcess) -> None:
    engine.freeze(True)


async def _thaw(engine: EngineProcess) -> None:
    engine.freeze(False)


async def _cut_once(engine: EngineProcess) -> None:
    engine.proxy.break_all()


async def _nothing(_: EngineProcess) -> None:
    return


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("none", "no fault", _nothing, _nothing),
        Fault("killed", "the engine's process is killed, and started again later", _kill, _restart),
        Fault("stopped", "the process is stopped (SIGSTOP), and continues later", _freeze, _thaw),
        Fault("cut off", "nothing passes, and connections stay open", *_proxied("silent")),
        Fault("refused", "nobody listens, and open connections are reset", *_proxied("refuse")),
        Fault("reset", "all connections are reset, new ones too", *_proxied("reset")),
        Fault("one reset", "all open connections are reset once", _cut_once, _nothing),
        Fault("slow", "each piece of an answer is 0.3 s late", *_proxied("slow")),
        Fault("garbage", "random bytes instead of answers", *_proxied("garbage")),
        Fault("half chunk", "answers end in the middle of a chunk", *_proxied("half chunk")),
        Fault("short body", "answers are shorter than their declared length", *_proxied("short")),
        Fault("status 500", "each request is answered with 500; /health is fine", *_proxied("500")),
        Fault("status 503", "each request is answered with 503; /health is fine", *_proxied("503")),
    )
}
