"""Fits the network of STAR's section 4 with PyTorch. The result needs only NumPy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lmetric.extras import install
from lmetric.lengths.network import PAPER_HIDDEN, MlpPredictor, error_table, layer_shapes
from lmetric.lengths.predictor import LengthsError
from train_lengths.samples import Samples, split_by_request

if TYPE_CHECKING:
    import torch

GENERATED = "log_generated_tokens"
"""If this feature exists, the error table also uses it."""


@dataclass(frozen=True, slots=True)
class Training:
    """Settings of a training. Values in the paper (section 4.4): L1 loss, AdamW, up to 100 epochs,
    patience 10 by the validation MAE, rates of 1e-4 to 1e-3, batches of 16 to 128. It names no
    weight decay (PyTorch's default).
    """

    hidden: tuple[int, ...] = PAPER_HIDDEN
    biases: bool = False  # Eq. 2 has none
    epochs: int = 100
    patience: int = 10
    batch_size: int = 128
    learning_rate: float = 5e-4
    weight_decay: float = 0.01
    seed: int = 0  # of the split, the first weights and the order of samples
    device: str = "auto"  # or what torch.device takes

    def check(self) -> None:
        """Raise `LengthsError` for an invalid value."""
        if not self.hidden or min(self.hidden) < 1:
            raise LengthsError(f"hidden must be at least one width, each at least 1, got {self.hidden}")
        for name in ("epochs", "patience", "batch_size"):
            if getattr(self, name) < 1:
                raise LengthsError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.learning_rate < float("inf"):
            raise LengthsError(f"learning_rate must be above 0, got {self.learning_rate:g}")
        if not 0 <= self.weight_decay < float("inf"):
            raise LengthsError(f"weight_decay must be at least 0, got {self.weight_decay:g}")
        if self.seed < 0:
            raise LengthsError(f"seed must be at least 0, got {self.seed}")


@dataclass(frozen=True, slots=True)
class Fitted:
    """A predictor and the results of its training. Errors are mean absolute errors in tokens."""

    predictor: MlpPredictor
    epochs: int  # run
    best_epoch: int  # from 1; its weights were kept
    validation_mae: float
    test_mae: float  # on requests that neither fitting nor stopping nor the error table saw
    test_mean_sigma: float  # the predictor's own estimate of its test error
    samples: tuple[int, int, int]  # train, validation, test


def need_torch() -> None:
    """Raises `LengthsError` with the remedy if PyTorch is not installed."""
    if find_spec("torch") is None:
        raise LengthsError(
            f"training needs PyTorch; run: {install('train')} "
            "(pytorch.org has builds without CUDA, which are much smaller)"
        )


def fit(samples: Samples, training: Training, say: Callable[[str], None] = lambda _: None) -> Fitted:
    """Fit a predictor to `samples`, split by request; `say` gets a line an epoch.

    The same samples and training give the same predictor on the same device by the same PyTorch and
    threads. Raises `LengthsError` if there are too few samples, the loss is not finite, or PyTorch
    is missing.
    """
    training.check()
    need_torch()
    split = split_by_request(samples.request_ids, training.seed)
    train, validation = samples.at(split.train), samples.at(split.validation)
    mean, scale = _normalisation(train.features)
    target_scale = float(np.mean(train.remaining)) or 1.0
    learner = _Learner(training, (mean, scale, target_scale), len(samples.feature_names))
    best, best_epoch, kept = float("inf"), 0, learner.parameters()
    epoch = 0
    for epoch in range(1, training.epochs + 1):
        loss = learner.epoch(train)
        mae = float(np.mean(np.abs(learner.predict(validation.features) - validation.remaining)))
        say(f"epoch {epoch}: train {loss:.1f}, validation {mae:.1f} tokens off")
        if not (np.isfinite(loss) and np.isfinite(mae)):
            raise LengthsError(f"epoch {epoch}: the loss is no finite number; try a smaller learning_rate")
        if mae < best:
            best, best_epoch, kept = mae, epoch, learner.parameters()
        elif epoch - best_epoch >= training.patience:
            break
    weights, biases = kept
    predictor = _with_errors(
        MlpPredictor(
            feature_names=samples.feature_names,
            feature_mean=mean,
            feature_scale=scale,
            target_scale=target_scale,
            weights=weights,
            biases=biases,
            errors=error_table(
                np.zeros(1, np.float32), np.zeros(1, np.float32), np.zeros((1, 1), np.float32)
            ),
            source=f"{samples.source}; {len(train)} samples, seed {training.seed}, epoch {best_epoch}",
        ),
        validation,
    )
    test = samples.at(split.test)
    remaining, sigma = predictor.predict(test.features)
    return Fitted(
        predictor,
        epochs=epoch,
        best_epoch=best_epoch,
        validation_mae=best,
        test_mae=float(np.mean(np.abs(remaining - test.remaining))),
        test_mean_sigma=float(np.mean(sigma)),
        samples=(len(train), len(validation), len(test)),
    )


def _normalisation(features: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Mean and deviation of each column. Constant columns stay unchanged."""
    deviation = features.std(axis=0, dtype=np.float64)
    constant = deviation < 1e-6 * (1 + np.abs(features).max(axis=0))
    mean = np.where(constant, 0.0, features.mean(axis=0, dtype=np.float64))
    return mean.astype(np.float32), np.where(constant, 1.0, deviation).astype(np.float32)


def _with_errors(predictor: MlpPredictor, held_out: Samples) -> MlpPredictor:
    from dataclasses import replace

    remaining, _ = predictor.predict(held_out.features)
    names = held_out.feature_names
    table = error_table(
        remaining,
        np.abs(remaining - held_out.remaining),
        held_out.features,
        feature=names.index(GENERATED) if GENERATED in names else -1,
    )
    return replace(predictor, errors=table)


class _Learner:
    """The network in PyTorch. Samples stay in NumPy: a batch at a time goes to the device."""

    def __init__(
        self,
        training: Training,
        normalisation: tuple[NDArray[np.float32], NDArray[np.float32], float],
        features: int,
    ) -> None:
        import torch

        self._torch = torch
        self._training = training
        self._mean, self._scale, self._target_scale = normalisation
        self._device = _device(training.device)
        generator = torch.Generator().manual_seed(training.seed)
        layers: list[Any] = []
        for outputs, inputs in layer_shapes(features, training.hidden):
            layer = torch.nn.Linear(inputs, outputs, bias=training.biases)
            # He's weights, as ReLU wants: PyTorch's default shrinks the signal with each layer.
            torch.nn.init.kaiming_normal_(layer.weight, nonlinearity="relu", generator=generator)
            if training.biases:
                torch.nn.init.zeros_(layer.bias)
            layers += [layer, torch.nn.ReLU()]
        self._layers = layers[:-1:2]
        self._network = torch.nn.Sequential(*layers[:-1]).to(self._device)
        self._optimiser = torch.optim.AdamW(
            self._network.parameters(), lr=training.learning_rate, weight_decay=training.weight_decay
        )
        self._random = np.random.default_rng([training.seed, 1])

    def epoch(self, samples: Samples) -> float:
        """One pass over `samples` in random order; the mean absolute error on the way, tokens."""
        torch, size = self._torch, self._training.batch_size
        order = self._random.permutation(len(samples))
        total = 0.0
        for start in range(0, len(order), size):
            rows = order[start : start + size]
            wanted = torch.from_numpy(samples.remaining[rows] / self._target_scale).to(self._device)
            loss = torch.nn.functional.l1_loss(self._forward(samples.features[rows]), wanted)
            self._optimiser.zero_grad()
            loss.backward()
            self._optimiser.step()
            total += loss.item() * len(rows)
        return total / len(order) * self._target_scale

    def predict(self, features: NDArray[np.float32]) -> NDArray[np.float32]:
        """Remaining tokens, shape (n,), at least 0."""
        parts = []
        with self._torch.no_grad():
            for start in count(step=4096):
                if start >= len(features):
                    break
                parts.append(self._forward(features[start : start + 4096]).cpu().numpy())
        return np.maximum(np.concatenate(parts) * self._target_scale, 0).astype(np.float32)

    def parameters(self) -> tuple[tuple[NDArray[np.float32], ...], tuple[NDArray[np.float32], ...]]:
        """Copies of the weights and biases, as `MlpPredictor` has them."""
        weights = tuple(layer.weight.detach().cpu().numpy().copy() for layer in self._layers)
        if not self._training.biases:
            return weights, ()
        return weights, tuple(layer.bias.detach().cpu().numpy().copy() for layer in self._layers)

    def _forward(self, features: NDArray[np.float32]) -> torch.Tensor:
        values = self._torch.from_numpy((features - self._mean) / self._scale).to(self._device)
        return self._network(values)[:, 0]


def _device(name: str) -> torch.device:
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (AssertionError, RuntimeError, NotImplementedError) as error:
        raise LengthsError(f"device {name!r}: {str(error).splitlines()[0]}") from None
    return device
