"""The weights of a model's engines: their names, and the versions that trainers announce.

Engines that share a served name are one model with one index of caches. If a name stands for two
models, clients get answers of either, and the router predicts wrong hits.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

import structlog

from lmetric.server.fleet.engine import Engine

log = structlog.get_logger("lmetric.fleet")

_CACHED = re.compile(r"models--(?:[^/]*--)?([^/]+)/snapshots/")


def weights_of(root: str) -> str:
    """Returns the name of a model's weights: the last part of a folder or of a name at a hub.

    Engines may have the same weights in different folders. Different names are only a sign of
    different weights, because engines report no hash of them.
    """
    cached = _CACHED.search(root)
    return (cached[1] if cached else root.rstrip("/").rpartition("/")[2]).lower()


class Weights:
    """The weights that the engines of a model report (`root` in `/v1/models`).

    ``due``: whether an engine has come, or has reported another list of models.
    """

    def __init__(self, model: str, engines: Mapping[str, Engine]) -> None:
        self._model = model
        self._engines = engines
        self._usual = ""
        self._others: dict[str, str] = {}
        self.due = False

    def look(self) -> tuple[str, dict[str, str]]:
        """Returns the root of most engines, and other roots by engine. Logs the new ones."""
        if self.due:
            self.due = False
            before, self._others = self._others, self._find()
            for name, root in self._others.items():
                if before.get(name) != root:
                    log.warning(
                        "the engine may have other weights than most engines of its model",
                        engine=name,
                        model=self._model,
                        weights=root,
                        usual=self._usual,
                    )
        others = {name: root for name, root in self._others.items() if name in self._engines}
        return self._usual, others

    def _find(self) -> dict[str, str]:
        roots = {
            name: root
            for name, engine in self._engines.items()
            if engine.misfit is None and (root := engine.capabilities.root(self._model))
        }
        counts = Counter(weights_of(root) for root in roots.values())
        if len(counts) < 2:
            return {}
        ((usual, _),) = counts.most_common(1)
        self._usual = next(root for root in roots.values() if weights_of(root) == usual)
        return {name: root for name, root in roots.items() if weights_of(root) != usual}
