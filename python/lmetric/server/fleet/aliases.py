"""Aliases: names of the configuration that stand for models."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from hashlib import blake2b
from math import inf, log

from lmetric.server.fleet.problem import Problem

_WHOLE = 2.0**64


class Aliases:
    """The aliases of a configuration. ``targets``: weights by model name, for each alias."""

    def __init__(self, targets: Mapping[str, Mapping[str, float]]) -> None:
        self._targets = targets
        self.names = targets.keys()

    def targets(self, alias: str) -> list[str]:
        """Returns the models of an alias, those with the highest weights first."""
        weights = self._targets[alias]
        return sorted(weights, key=weights.__getitem__, reverse=True)

    def served(self, alias: str, known: Collection[str]) -> list[str]:
        """Returns the models of an alias that engines serve, those with the highest weights first.

        ``known``: the names that engines serve.
        """
        return [name for name in self.targets(alias) if name in known]

    def choose(self, alias: str, known: Collection[str], key: Callable[[], bytes]) -> str:
        """Returns the model of a request.

        Equal keys get the same model, on every router, and the models get keys by their weights
        (rendezvous hashing). A model that no engine serves gets none if another one is served; only
        its own keys move. ``known``: the names that engines serve.
        """
        weights = self._targets[alias]
        served = self.served(alias, known) or list(weights)
        if len(served) == 1:
            return served[0]
        base = blake2b(key(), digest_size=32).digest()
        return max(served, key=lambda name: _rank(name, weights[name], base))

    def problems(self, known: Collection[str]) -> Iterator[Problem]:
        """Yields the aliases that no request, or not each, can use. ``known``: as in `choose`."""
        for alias, weights in self._targets.items():
            if alias in known:
                cause = "an alias has the name of a model, so it has no effect"
                fix = "rename it in aliases, or serve that model under another name"
                yield Problem("alias", cause, f"engines serve {alias!r}", fix)
                continue
            missing = [name for name in weights if name not in known]
            if missing:
                cause = "an alias names a model that no engine serves"
                reason = f"{alias}: no engine serves {', '.join(missing)}"
                fix = "start an engine with that model, or correct the alias"
                yield Problem("alias", cause, reason, fix, is_bad=len(missing) == len(weights))


def _rank(name: str, weight: float, base: bytes) -> float:
    """Returns the rank of a model: the highest of all is the model with a probability of its weight
    over all weights."""
    digest = blake2b(name.encode("utf-8", "surrogateescape"), key=base, digest_size=8).digest()
    share = (int.from_bytes(digest, "little") + 0.5) / _WHOLE
    return inf if share >= 1.0 else -weight / log(share)
