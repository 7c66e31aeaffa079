"""Trains a predictor of remaining lengths: ``python -m train_lengths.train SAMPLES --out
PREDICTOR.npz``.

Source: STAR, sections 4.2 and 4.4. `train_lengths.fit` documents the settings.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from lmetric.lengths.files import save_predictor
from lmetric.lengths.network import PAPER_HIDDEN
from train_lengths.command import run_command
from train_lengths.fit import Fitted, Training, fit, need_torch
from train_lengths.samples import load_samples

DEFAULTS = Training()


def command(
    samples: Annotated[
        Path, typer.Argument(help="Samples file, .npz: features, remaining, request_ids, feature_names.")
    ],
    out: Annotated[Path, typer.Option(help="Output file of the predictor, .npz.")],
    onnx: Annotated[Path | None, typer.Option(help="Also write the predictor as .onnx (needs onnx).")] = None,
    hidden: Annotated[str, typer.Option(help="Widths of the hidden layers.")] = ",".join(
        map(str, PAPER_HIDDEN)
    ),
    biases: Annotated[bool, typer.Option(help="Use layers with biases (the paper has none).")] = False,
    epochs: Annotated[int, typer.Option(min=1, help="At most.")] = DEFAULTS.epochs,
    patience: Annotated[
        int, typer.Option(min=1, help="Stop after N epochs without a better validation error.")
    ] = DEFAULTS.patience,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples per step.")] = DEFAULTS.batch_size,
    learning_rate: Annotated[float, typer.Option(help="AdamW's.")] = DEFAULTS.learning_rate,
    weight_decay: Annotated[float, typer.Option(help="AdamW's.")] = DEFAULTS.weight_decay,
    seed: Annotated[int, typer.Option(min=0, help="Seed of split, first weights and order.")] = DEFAULTS.seed,
    device: Annotated[
        str, typer.Option(help="cpu, cuda, ...; auto: a GPU if there is one.")
    ] = DEFAULTS.device,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Train a predictor of remaining output tokens on samples, split by request."""
    need_torch()
    for flag, path in (("--out", out), ("--onnx", onnx)):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise typer.BadParameter(f"{path}: cannot be written", param_hint=flag)
    if onnx is not None:
        from lmetric.lengths.onnx_file import need_onnx

        need_onnx()
    training = Training(
        _widths(hidden), biases, epochs, patience, batch_size, learning_rate, weight_decay, seed, device
    )
    fitted = fit(load_samples(samples), training, lambda line: typer.echo(line, err=True))
    save_predictor(fitted.predictor, out)
    if onnx is not None:
        from lmetric.lengths.onnx_file import write_onnx

        write_onnx(fitted.predictor, onnx)
    if as_json:
        typer.echo(json.dumps(_as_data(fitted), indent=2))
    else:
        _print(fitted, out)


def _widths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(width) for width in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r}: wanted e.g. 2048,512,64", param_hint="--hidden") from None


def _as_data(fitted: Fitted) -> dict[str, Any]:
    train, validation, test = fitted.samples
    return {
        "parameters": fitted.predictor.parameters,
        "epochs": fitted.epochs,
        "best_epoch": fitted.best_epoch,
        "samples": {"train": train, "validation": validation, "test": test},
        "validation_mae_tokens": fitted.validation_mae,
        "test_mae_tokens": fitted.test_mae,
        "test_mean_sigma_tokens": fitted.test_mean_sigma,
        "source": fitted.predictor.source,
    }


def _print(fitted: Fitted, out: Path) -> None:
    train, validation, test = fitted.samples
    typer.echo(
        f"{out}: {fitted.predictor.parameters:,} parameters, epoch {fitted.best_epoch} of {fitted.epochs}"
    )
    typer.echo(
        f"samples: {train} to train, {validation} to validate, {test} to test; no request in two of them"
    )
    typer.echo(
        f"mean absolute error, tokens: validation {fitted.validation_mae:.1f}, test {fitted.test_mae:.1f} "
        f"(expected by the predictor: {fitted.test_mean_sigma:.1f})"
    )


if __name__ == "__main__":
    run_command(command)
