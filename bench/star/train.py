"""Trains the length predictors of figure `trained`, on lengths of a seed that the figures do not
use.

    python bench/star/train.py --train-python PYTHON

PYTHON is an interpreter with PyTorch. Each predictor reads a router's facts of a request
(`TRACE_FEATURES` of `train_lengths.from_trace`); its file is written to bench/star/predictors.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from world import PREDICTORS, TRAINED_ON, Stage, made

from common import ROOT
from train_lengths.from_trace import samples_from_trace
from train_lengths.samples import save_samples

SEED = 1000  # seed of the lengths; figures use 0 to 4
SECONDS = 6000.0


def main() -> None:
    """Trains all predictors."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train-python", type=Path, required=True, help="an interpreter with PyTorch")
    arguments = parser.parse_args()
    PREDICTORS.mkdir(exist_ok=True)
    for name, stage in TRAINED_ON.items():
        print(name, file=sys.stderr)
        long = Stage(stage.lengths, stage.cluster, stage.rate, SECONDS)
        with tempfile.TemporaryDirectory() as folder:
            samples = Path(folder, "samples.npz")
            save_samples(samples_from_trace(made(long, SEED).trace, at_most=6, seed=SEED), samples)
            command = [arguments.train_python, "-m", "train_lengths.train", samples, "--biases"]
            command += ["--out", PREDICTORS / f"{name}.npz", "--hidden", "64,16", "--epochs", "12"]
            environment = {"PYTHONPATH": f"{ROOT / 'python'}:{ROOT / 'bench'}", "OMP_NUM_THREADS": "1"}
            subprocess.run([*map(str, command)], env=os.environ | environment, check=True)


if __name__ == "__main__":
    main()
