"""Training samples from a trace, with the features that a router knows of a running request.

A trace has no hidden states, which STAR's predictor reads (section 4.2). A predictor can learn only
from the length so far and the position in the conversation.

Run it: ``python -m train_lengths.from_trace TRACE --out SAMPLES.npz``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import typer
from numpy.typing import NDArray

from lmetric.lengths.predictor import LengthsError
from lmetric_lab.sim.traces import Trace, load_trace
from lmetric_lab.sim.traces.turns import previous_by_prefix
from train_lengths.command import run_command
from train_lengths.samples import Samples, save_samples

TRACE_FEATURES = (
    "log_generated_tokens",
    "log_prompt_tokens",
    "log_new_prompt_tokens",  # of the prompt, those that the turn before did not have; whole blocks
    "turn",  # log of the turns before this one in its conversation, as log1p
    "log_previous_answer_tokens",  # 0 in a first turn
    "log_mean_answer_tokens",  # of all turns before in the conversation; 0 in a first turn
    "log_seconds_since_previous",  # from arrival to arrival; 0 in a first turn
)
"""Columns of `samples_from_trace`; ``log`` is log1p. A trace's clock begins at 0: no time of
day."""


class Turns(NamedTuple):
    """The conversation of each request at its arrival; arrays of shape (n,), 0 in a first turn."""

    previous: NDArray[np.int64]  # index of the turn before, -1 in a first turn
    turns: NDArray[np.int64]  # turns before this one
    previous_answer_tokens: NDArray[np.float64]
    mean_answer_tokens: NDArray[np.float64]
    shared_tokens: NDArray[np.float64]  # of the prompt, in the turn before's prompt as well


def samples_from_trace(trace: Trace, *, every: int = 20, at_most: int = 32, seed: int = 0) -> Samples:
    """Samples of each request after 0, `every`, 2 x `every`, ... generated tokens (STAR, section
    4.4).

    Args:
        every: generated tokens between two samples; k = 20 in the paper.
        at_most: maximum number of samples per request, drawn at random. It limits the memory. Long
            answers then count less than in the paper.

    Raises:
        LengthsError: no request of the trace generates a token, or `every` or `at_most` is below 1.
    """
    for name, value in (("every", every), ("at_most", at_most)):
        if value < 1:
            raise LengthsError(f"{name} must be at least 1, got {value}")
    random = np.random.default_rng(seed)
    points = -(-trace.output_tokens // every)  # moments 0, every, ... below the answer's end
    counts = np.minimum(points, at_most)
    if not counts.sum():
        raise LengthsError(f"trace {trace.name}: no request in it generates a token")
    requests = np.repeat(np.arange(len(trace)), counts)
    generated = np.concatenate(
        [
            every * np.sort(random.choice(n, size=at_most, replace=False))
            if n > at_most
            else every * np.arange(n)
            for n in points.tolist()
        ]
    ).astype(np.float64)
    turns = find_turns(trace)
    since = np.where(
        turns.previous >= 0, trace.arrival_seconds - trace.arrival_seconds[np.maximum(turns.previous, 0)], 0.0
    )
    of_requests = np.column_stack(
        [
            trace.input_tokens.astype(np.float64),
            trace.input_tokens - turns.shared_tokens,
            turns.turns.astype(np.float64),
            turns.previous_answer_tokens,
            turns.mean_answer_tokens,
            since,
        ]
    )
    features = np.log1p(np.column_stack([generated, of_requests[requests]]))
    return Samples(
        features.astype(np.float32),
        (trace.output_tokens[requests] - generated).astype(np.float32),
        requests.astype(np.int64),
        TRACE_FEATURES,
        f"{trace.name}: {len(trace)} requests, every {every} tokens, at most {at_most} of one",
    )


def find_turns(trace: Trace) -> Turns:
    """Each request's turn before, from `Trace.previous`, else `Trace.sessions`, else from equal
    prefixes (`previous_by_prefix`).
    """
    n = len(trace)
    if trace.previous is not None:
        previous = trace.previous.copy()
    elif trace.sessions is not None:
        previous = _previous_in_session(trace.sessions)
    else:
        previous = previous_by_prefix(trace)
    turns = np.zeros(n, np.int64)
    total = np.zeros(n)
    shared = np.zeros(n)
    for index in np.flatnonzero(previous >= 0).tolist():
        before = int(previous[index])
        turns[index] = turns[before] + 1
        total[index] = total[before] + trace.output_tokens[before]
        shared[index] = _shared_tokens(trace, before, index)
    answers = np.where(previous >= 0, trace.output_tokens[np.maximum(previous, 0)], 0).astype(np.float64)
    return Turns(previous, turns, answers, total / np.maximum(turns, 1), shared)


def _previous_in_session(sessions: NDArray[np.int64]) -> NDArray[np.int64]:
    last: dict[int, int] = {}
    previous = np.full(len(sessions), -1, np.int64)
    for index, session in enumerate(sessions.tolist()):
        if session >= 0:
            previous[index] = last.get(session, -1)
            last[session] = index
    return previous


def _shared_tokens(trace: Trace, before: int, index: int) -> int:
    earlier, later = trace.blocks(before), trace.blocks(index)
    if not len(earlier):  # no prefixes: a turn repeats the previous one
        return int(min(trace.input_tokens[before], trace.input_tokens[index]))
    n = min(len(earlier), len(later))
    apart = np.flatnonzero(earlier[:n] != later[:n])
    blocks = int(apart[0]) if len(apart) else n
    return int(min(blocks * trace.block_tokens, trace.input_tokens[index]))


def command(
    trace: Annotated[
        Path, typer.Argument(help="Trace file in a format of docs/research/traces.md, or slice.")
    ],
    out: Annotated[Path, typer.Option(help="Output file with samples, .npz.")],
    every: Annotated[int, typer.Option(min=1, help="Generated tokens between two samples.")] = 20,
    at_most: Annotated[int, typer.Option(min=1, help="Maximum number of samples per request.")] = 32,
    seed: Annotated[int, typer.Option(min=0, help="Seed to choose samples of requests with more.")] = 0,
) -> None:
    """Make training samples of remaining lengths from a trace."""
    samples = samples_from_trace(load_trace(trace), every=every, at_most=at_most, seed=seed)
    save_samples(samples, out)
    typer.echo(f"{out}: {len(samples)} samples of {len(np.unique(samples.request_ids))} requests", err=True)


if __name__ == "__main__":
    run_command(command)
