"""Downloads of tokenizers from the Hugging Face Hub."""

import asyncio
import time

import structlog

from lmetric.server.fleet.fleet import Fleet
from lmetric.server.fleet.model import Model
from lmetric.tokens.download import HubError, fetch
from lmetric.tokens.errors import TokenizerError

log = structlog.get_logger("lmetric.tokens")

RETRY_SECONDS, RETRY_SECONDS_MAX = 10.0, 300.0  # pauses after failures: doubled up to the maximum


class Downloads:
    """Downloads the tokenizers that models want. Prompts are matched as text meanwhile."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.running: dict[Model, asyncio.Task[None]] = {}
        # By model: the repository that failed, the time of its next download, and the next pause.
        self._failed: dict[Model, tuple[str, float, float]] = {}

    async def begin(self) -> None:
        """Starts the downloads that are due."""
        now = time.monotonic()
        self._failed = {model: failed for model, failed in self._failed.items() if model in self.fleet.models}
        for model in self.fleet.models:
            if model.tokenizers.wanted is None or model in self.running:
                continue
            repository, due, _ = self._failed.get(model, (None, 0.0, 0.0))
            if now >= due or repository != model.tokenizers.wanted:
                name = f"tokenizer of {model.name}"
                self.running[model] = asyncio.create_task(
                    self._download(model, model.tokenizers.wanted), name=name
                )

    async def _download(self, model: Model, repository: str) -> None:
        try:
            log.warning(
                "downloading the tokenizer; prompts are matched as text until it is loaded",
                model=model.name,
                repository=repository,
            )
            folder = await fetch(repository, model.settings.tokenizer_revision)
            if model.tokenizers.wanted == repository:
                await model.tokenizers.use_download(folder)
                for engine in model.engines.values():
                    engine.ask_again_at = 0.0  # the next check compares tokens and chooses the mode again
        except (HubError, TokenizerError, OSError) as error:
            failed, _, pause = self._failed.get(model, (None, 0.0, RETRY_SECONDS))
            if failed != repository:
                pause = RETRY_SECONDS
            due = time.monotonic() + pause
            self._failed[model] = (repository, due, min(2 * pause, RETRY_SECONDS_MAX))
            if model.tokenizers.wanted == repository:
                model.tokenizers.drop(f"{error} (next try in {pause:g} s)")
        finally:
            del self.running[model]
