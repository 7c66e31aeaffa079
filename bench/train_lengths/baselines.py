"""Baselines for learned predictors: statistics of the lengths of training requests."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lmetric.lengths.predictor import LengthsError
from train_lengths.samples import Samples

PROMPT_BUCKETS = 50
"""Number of quantiles of prompt lengths."""


class Survival:
    """Mean or median remaining tokens of requests with the same number of tokens so far.

    `answers`: output tokens of the training requests, shape (m,). The median has the smallest
    absolute error, so it is a fair baseline for a network trained on that error. The mean gives
    expected loads (SIBYL's survival function, conditioned on the length so far).
    """

    def __init__(self, answers: NDArray[np.float64]) -> None:
        if not len(answers):
            raise LengthsError("survival needs the answer of at least one request")
        self._answers = np.sort(np.asarray(answers, dtype=np.float64))
        self._sums = np.concatenate((np.cumsum(self._answers[::-1])[::-1], [0.0]))

    def mean(self, generated: NDArray[np.float64]) -> NDArray[np.float64]:
        """E[L - g | L > g], shape (n,), tokens; 0 past the longest answer."""
        at = np.searchsorted(self._answers, generated, side="right")
        alive = len(self._answers) - at
        return np.where(alive > 0, self._sums[at] / np.maximum(alive, 1) - generated, 0.0)

    def median(self, generated: NDArray[np.float64]) -> NDArray[np.float64]:
        """The median of L - g given L > g, shape (n,), tokens; 0 past the longest answer."""
        n = len(self._answers)
        at = np.searchsorted(self._answers, generated, side="right")
        low, high = (at + n - 1) // 2, (at + n) // 2
        middle = (self._answers[np.minimum(low, n - 1)] + self._answers[np.minimum(high, n - 1)]) / 2
        return np.where(at < n, middle - generated, 0.0)


def baselines(train: Samples, test: Samples) -> dict[str, NDArray[np.float64]]:
    """Predictions of remaining tokens for `test`, shape (n,) each, by the name of the baseline.

    - ``mean``: the mean answer, less what was generated, at least 0.
    - ``survival mean``, ``survival median``: see `Survival`.
    - ``survival by prompt``: the survival median of requests whose prompt is about as long
      (`PROMPT_BUCKETS` quantiles of prompt lengths); past the longest answer there, that of all.
    - ``session mean``: the mean of the conversation's earlier answers, less what was generated,
      while that is above 0; else, and in first turns, the survival median. Only with the column
      log_mean_answer_tokens.

    Raises `LengthsError` without the columns log_generated_tokens and log_prompt_tokens.
    """
    # Whole again after 32 bits: whether an answer of 20 tokens goes on past 20 hangs on it.
    generated = np.rint(np.expm1(test.column("log_generated_tokens").astype(np.float64)))
    of_train = np.expm1(train.column("log_generated_tokens").astype(np.float64)) + train.remaining
    _, first = np.unique(train.request_ids, return_index=True)
    answers = np.rint(of_train[first])
    survival = Survival(answers)
    by_survival = survival.median(generated)
    found = {
        "mean": np.maximum(answers.mean() - generated, 0.0),
        "survival mean": survival.mean(generated),
        "survival median": by_survival,
        "survival by prompt": _by_prompt(train.column("log_prompt_tokens")[first], answers, test, generated),
    }
    if "log_mean_answer_tokens" in test.feature_names:
        of_session = np.expm1(test.column("log_mean_answer_tokens").astype(np.float64)) - generated
        found["session mean"] = np.where(of_session > 0, of_session, by_survival)
    return found


def _by_prompt(
    prompts: NDArray[np.float32], answers: NDArray[np.float64], test: Samples, generated: NDArray[np.float64]
) -> NDArray[np.float64]:
    edges = np.unique(np.quantile(prompts, np.arange(1, PROMPT_BUCKETS) / PROMPT_BUCKETS))
    of_train = np.searchsorted(edges, prompts, side="right")
    of_test = np.searchsorted(edges, test.column("log_prompt_tokens"), side="right")
    found = Survival(answers).median(generated)
    for bucket in np.unique(of_train):
        rows = np.flatnonzero(of_test == bucket)
        here = Survival(answers[of_train == bucket]).median(generated[rows])
        found[rows] = np.where(here > 0, here, found[rows])
    return found
