"""Turns files of hidden states into training samples, and deletes them.

Run it: ``python -m train_lengths.collect FOLDER --hidden-size N --out SAMPLES.npz``, again and
again while an engine with `lmetric_vllm.HiddenStatesConnector` runs. A file is deleted when its
rows are on the disk. A run that was interrupted can be repeated: rows are never added twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from lmetric.lengths.predictor import LengthsError
from train_lengths.append import SamplesFile, locked_samples
from train_lengths.command import run_command
from train_lengths.samples import Samples
from train_lengths.states import FILE_NAME, States, read_states

BATCH_BYTES = 64 << 20
"""States in memory, plus one file; then they are appended."""


def state_features(width: int) -> tuple[str, ...]:
    """Columns of the samples: a state of `width` numbers, and lengths as log1p."""
    return (*(f"h{index}" for index in range(width)), "log_generated_tokens", "log_prompt_tokens")


def samples_of(states: States, request_id: int) -> Samples:
    """The samples of one request."""
    generated = np.arange(len(states.states)) * states.every
    prompt = np.full(len(generated), states.prompt_tokens)
    return Samples(
        np.column_stack((states.states, np.log1p(generated), np.log1p(prompt))).astype(np.float32),
        (states.answer_tokens - generated).astype(np.float32),
        np.full(len(generated), request_id, np.int64),
        state_features(states.states.shape[1]),
        "hidden states of an engine",
    )


def request_of(path: Path) -> int:
    """The number of a request in the samples: 63 bits of the name of its file."""
    return int(path.name[:16], 16) >> 1


def collect(folder: Path, out: Path, skipped: list[str], *, hidden_size: int) -> int:
    """Appends the states of the files in `folder` to the samples in `out`, and deletes the files.

    Args:
        skipped: gets the reason for each file that could not be used. Such files stay.
        hidden_size: numbers of a state. Files with another size are skipped.

    Returns the number of requests. Raises `LengthsError` if `out` is no samples file, has other
    features or would become too large, `OSError` if the folder or `out` cannot be used.
    """
    count = 0
    with locked_samples(out) as samples:
        for paths, parts in _batches(folder, samples, skipped, hidden_size=hidden_size):
            if parts:
                samples.append(parts)
            for path in paths:
                path.unlink(missing_ok=True)
            count += len(parts)
    return count


def _batches(
    folder: Path, samples: SamplesFile, skipped: list[str], *, hidden_size: int
) -> Iterator[tuple[list[Path], list[Samples]]]:
    """Files to delete, and their samples, to append before: about `BATCH_BYTES` at once."""
    paths: list[Path] = []
    parts: list[Samples] = []
    held = 0  # bytes of `parts`
    for path in sorted(path for path in folder.iterdir() if FILE_NAME.fullmatch(path.name)):
        if request_of(path) in samples.requests:  # a run ended before it deleted the file
            paths.append(path)
            continue
        try:
            part = samples_of(read_states(path, hidden_size), request_of(path))
        except FileNotFoundError:
            continue  # deleted since
        except (LengthsError, OSError) as error:
            skipped.append(str(error))
            continue
        paths.append(path)
        parts.append(part)
        held += part.features.nbytes
        if held >= BATCH_BYTES:
            yield paths, parts
            paths, parts, held = [], [], 0
    yield paths, parts


def command(
    folder: Annotated[Path, typer.Argument(help="The connector's shared_storage_path.")],
    hidden_size: Annotated[
        int, typer.Option(min=1, help="Numbers of a state: hidden_size in the model's config.json.")
    ],
    out: Annotated[Path, typer.Option(help="Samples file, .npz; rows are added if it exists.")],
) -> None:
    """Add the hidden states of finished requests to a samples file, and delete their files."""
    skipped: list[str] = []
    count = collect(folder, out, skipped, hidden_size=hidden_size)
    for reason in skipped:
        typer.echo(f"skipped: {reason}", err=True)
    typer.echo(f"{out}: {count} more requests; {len(skipped)} files skipped", err=True)


if __name__ == "__main__":
    run_command(command)
