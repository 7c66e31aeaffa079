"""The process of the capacity twin: ``python -m lmetric_lab.capacity.worker``.

The router writes lines of JSON to its input: first the settings, then one line per round. The
process answers each round with one line. It ends with its input. It has a low priority, so
that the router and engines on this machine come first.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from lmetric._core import LmetricError
from lmetric.record_files import Records
from lmetric_lab.capacity.goals import Question, read_types
from lmetric_lab.capacity.tail import Tail
from lmetric_lab.capacity.twin import Twin
from lmetric_lab.sim.pools import Roles
from lmetric_lab.sim.setups import PolicyChoice, split_policies
from lmetric_lab.slo import Goal
from lmetric_lab.whatif.check import Limits

NICE = 10
MOST_MODELS = 16  # with advice; others are refused


def question_of(settings: Mapping[str, Any]) -> Question:
    """The question in the settings ``capacity`` of a router. Raises LmetricError."""
    policies = split_policies(list(settings["policies"]))
    return Question(
        Goal.of(settings["slo"]),
        read_types([f"{name}={price}" for name, price in settings["prices"].items()],
                   [f"{name}={value}" for name, value in settings["types"].items()]),
        startup_seconds=settings["startup"],
        every_seconds=settings["interval"],
        headroom=settings["headroom"],
        min_engines=settings["min_engines"],
        max_engines=settings["max_engines"],
        policies=tuple(choice for text in policies for choice in PolicyChoice.parse(text)),
        roles=tuple(map(Roles.of, settings["roles"])),
        transfer=settings["transfer"],
    )  # fmt: skip


def limits_of(settings: Mapping[str, Any]) -> Limits:
    """The largest errors of a good fit."""
    error = settings["max_error"]
    return Limits() if error is None else Limits(error, error, error)


class Worker:
    """The twins of all models, and the records that they read."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._question = question_of(settings)
        self._tail = Tail(Path(settings["path"]), settings["window"])
        self._twins: dict[str, Twin] = {}

    def round(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a round: by model, the advice or the reason of a refusal.

        ``request``: ``now``, Unix time; ``running``: requests without a record by model; ``code``:
        Python policies in the router's configuration, the only ones that records may run.
        """
        now, running, code = float(request["now"]), request["running"], request["code"]
        try:
            records = self._tail.read(now)
        except (LmetricError, OSError) as error:
            return {"models": {name: {"refused": str(error)} for name in running}}
        return {
            "models": {
                name: self._model(name, records, now, int(count), code) for name, count in running.items()
            }
        }

    def _model(
        self, name: str, records: Records, now: float, running: int, code: list[str]
    ) -> dict[str, Any]:
        if name not in self._twins and len(self._twins) >= MOST_MODELS:
            return {"refused": f"only {MOST_MODELS} models get advice"}
        settings = self._settings
        twin = self._twins.setdefault(
            name,
            Twin(
                self._question,
                limits_of(settings),
                settings["window"],
                settings["max_batch_tokens"],
                settings["max_sequences"],
                settings["cache_blocks"],
                settings["kv_bytes_per_token"],
            ),
        )
        twin.code = code
        try:
            advice = twin.advise(records.of(name), now, running=running)
        except LmetricError as error:
            return {"refused": "; ".join([str(error), *records.notes])}
        return {"advice": replace(advice, notes=(*records.notes, *advice.notes))}


def serve(source: BinaryIO, write: Callable[[bytes], Any]) -> None:
    """Answers rounds until the input ends."""
    worker: Worker | None = None
    for line in source:
        message = orjson.loads(line)
        if worker is None:
            worker = Worker(message)
            continue
        answer = worker.round(message) | {"round": message["round"]}
        write(
            orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_SERIALIZE_DATACLASS) + b"\n"
        )


def main() -> None:
    """Runs the process on its standard input and output."""
    with contextlib.suppress(OSError):
        os.nice(NICE)
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # nothing else may write to the router
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        serve(sys.stdin.buffer, out.write)


if __name__ == "__main__":
    main()
