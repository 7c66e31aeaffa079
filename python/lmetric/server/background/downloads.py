"""Downloads of tokenizers from the Hugging Face Hub."""

import asyncio
import time

import structlog

from lmetric.server.fleet.fleet import Fleet
from lmetric.server.fleet.pool import Pool
from lmetric.tokens import HubError, TokenizerError, fetch

log = structlog.get_logger("lmetric.tokens")

RETRY_SECONDS, RETRY_SECONDS_MAX = 10.0, 300.0  # pauses after failures: doubled up to the maximum


class Downloads:
    """Downloads the tokenizers that pools want. Prompts are matched as text meanwhile."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.running: dict[Pool, asyncio.Task[None]] = {}
        # By pool: the repository that failed, the time of its next download, and the next pause.
        self._failed: dict[Pool, tuple[str, float, float]] = {}

    async def begin(self) -> None:
        """Starts the downloads that are due."""
        now = time.monotonic()
        self._failed = {pool: failed for pool, failed in self._failed.items() if pool in self.fleet.pools}
        for pool in self.fleet.pools:
            if pool.tokenizers.wanted is None or pool in self.running:
                continue
            repository, due, _ = self._failed.get(pool, (None, 0.0, 0.0))
            if now >= due or repository != pool.tokenizers.wanted:
                name = f"tokenizer of {pool.name}"
                self.running[pool] = asyncio.create_task(
                    self._download(pool, pool.tokenizers.wanted), name=name
                )

    async def _download(self, pool: Pool, repository: str) -> None:
        try:
            log.warning(
                "downloading the tokenizer; prompts are matched as text until it is loaded",
                model=pool.name,
                repository=repository,
            )
            folder = await fetch(repository, pool.settings.tokenizer_revision)
            if pool.tokenizers.wanted == repository:
                await pool.tokenizers.use_download(folder)
                for engine in pool.engines.values():
                    engine.ask_again_at = 0.0  # the next check compares tokens and chooses the mode again
        except (HubError, TokenizerError, OSError) as error:
            failed, _, pause = self._failed.get(pool, (None, 0.0, RETRY_SECONDS))
            if failed != repository:
                pause = RETRY_SECONDS
            due = time.monotonic() + pause
            self._failed[pool] = (repository, due, min(2 * pause, RETRY_SECONDS_MAX))
            if pool.tokenizers.wanted == repository:
                pool.tokenizers.drop(f"{error} (next try in {pause:g} s)")
        finally:
            del self.running[pool]
