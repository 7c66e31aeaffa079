"""The tokenizer of a model: the one in use, and where the next one comes from."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from lmetric.config import PoolSettings
from lmetric.server.fleet.engine import Engine
from lmetric.tokens.errors import NotPredictable, TokenizerError
from lmetric.tokens.hub import configured_folder, find_folder, is_hub_id, why_not_downloaded

if TYPE_CHECKING:
    from lmetric.tokens.prompt import PromptTokenizer

log = structlog.get_logger("lmetric.fleet")


class Tokenizers:
    """The tokenizer of one model, from the configuration or from an engine's model.

    Without a usable tokenizer, prompts are matched as text.
    """

    def __init__(self, model: str, settings: PoolSettings) -> None:
        self._model = model
        self._settings = settings
        self.current: PromptTokenizer | None = None
        # Why `current` is None, or what the tokenizer lacks.
        self.note: str | None = "no engine has reported its model's folder yet"
        self.text_prompts: Counter[str] = Counter()  # by the reason for matching them as text
        # The Hub repository from which a background task downloads the tokenizer.
        self.wanted: str | None = None
        self._root: str | None = None  # the last root that an engine reported
        # The configured folder or Hub repository, until it is loaded.
        self._configured: str | None = None
        self._loading = asyncio.Lock()
        if settings.tokenizer == "off":
            self.note = "tokenizer: off"
        elif settings.tokenizer is not None:
            self._configured = settings.tokenizer
            self.note = "the tokenizer is not loaded yet"

    def load(self) -> None:
        """Loads the configured tokenizer, or records that it must be downloaded.

        Takes a second for a large vocabulary: a running server calls `follow`. Raises
        TokenizerError if it can neither be loaded nor downloaded.
        """
        if self._configured is not None:
            self._accept(self._configured, self._load_configured(self._configured))

    async def follow(self, root: str | None) -> None:
        """Loads the configured tokenizer, or the tokenizer of an engine's model.

        ``root``: the model's folder or name, if the engine reports it. A call with the same root
        does nothing. If there is no usable tokenizer, prompts are matched as text, and `note` has
        the reason. If it may be downloaded, `wanted` has the repository.
        """
        async with self._loading:
            await self._load_new(root)

    async def use_download(self, folder: Path) -> None:
        """Loads the tokenizer that was downloaded for `wanted`. Raises TokenizerError."""
        async with self._loading:
            tokenizer = await asyncio.to_thread(self._load, folder)
            self.wanted = None
            self._use(tokenizer)

    def count_text(self, why: NotPredictable) -> None:
        """Counts a prompt that is matched as text although the model matches tokens."""
        self.text_prompts[why.reason] += 1
        log.debug("a prompt is matched as text", model=self._model, reason=why.reason, why=str(why))

    def drop(self, reason: str) -> None:
        """Removes the tokenizer: prompts are matched as text from now on. Logs the reason."""
        self.current = None
        self.note = reason
        log.warning("prompts are matched as text", model=self._model, reason=reason)

    async def compare(self, engine: Engine, name: str, seconds: float) -> None:
        """Compares the tokenizer with an engine's own, on some prompts, once for each engine.

        ``name``: a model name that the engine serves. ``seconds``: time limit of each request.
        Raises UpstreamError if no connection is possible.
        """
        tokenizer = self.current
        if tokenizer is None or engine.compared is tokenizer:
            return
        from lmetric.server.fleet.token_check import compare

        await compare(tokenizer, engine, model=self._model, name=name, seconds=seconds)

    async def _load_new(self, root: str | None) -> None:
        if (setting := self._configured) is not None:
            try:
                self._accept(setting, await asyncio.to_thread(self._load_configured, setting))
            except TokenizerError as error:
                self._configured = None
                self.drop(str(error))
        if self._settings.tokenizer is not None or root is None or root == self._root:
            return
        self._root = root
        self.wanted = None
        folder = await asyncio.to_thread(find_folder, root, self._settings.tokenizer_revision)
        if folder is None and self.current is not None:
            return  # another engine's folder is in use
        if folder is None:
            if not is_hub_id(root):
                self.drop(f"the engine's model {root!r} is not a folder of this machine; set tokenizer")
            elif refused := self._why_not_downloaded(root):
                self.drop(f"the engine's model {refused}")
            else:
                self._want(root)
            return
        try:
            # Reading a large vocabulary takes a second.
            tokenizer = await asyncio.to_thread(self._load, folder)
        except TokenizerError as error:
            self.drop(str(error))
        else:
            self._use(tokenizer)

    def _load(self, folder: str | os.PathLike[str]) -> PromptTokenizer:
        from lmetric.tokens.prompt import PromptTokenizer

        settings = self._settings
        return PromptTokenizer.load(
            folder, chat_template=settings.chat_template, cache_bytes=settings.token_cache_bytes
        )

    def _load_configured(self, setting: str) -> PromptTokenizer | None:
        """Returns the configured tokenizer; None: it must be downloaded. Raises TokenizerError."""
        folder = configured_folder(setting, self._settings.tokenizer_revision)
        if folder is not None:
            return self._load(folder)
        if why := self._why_not_downloaded(setting):
            raise TokenizerError(f"tokenizer: {why}")
        return None

    def _accept(self, setting: str, tokenizer: PromptTokenizer | None) -> None:
        self._configured = None
        if tokenizer is not None:
            self._use(tokenizer)
        else:
            self._want(setting)

    def _why_not_downloaded(self, repository: str) -> str | None:
        """The reason why a tokenizer must not be downloaded; None: it may."""
        settings = self._settings
        return why_not_downloaded(repository, settings.tokenizer, settings.tokenizer_download)

    def _want(self, repository: str) -> None:
        self.wanted = repository
        self.current = None
        self.note = f"the tokenizer of {repository} is not downloaded yet"

    def _use(self, tokenizer: PromptTokenizer) -> None:
        self.current = tokenizer
        self.note = "; ".join(tokenizer.notes) or None
        note = {} if self.note is None else {"note": self.note}
        log.info("tokenizer loaded", model=self._model, folder=str(tokenizer.folder), **note)
