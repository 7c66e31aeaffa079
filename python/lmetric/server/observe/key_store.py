"""The file of issued API keys, in the folder `state_folder`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import structlog

from lmetric._core import LmetricError
from lmetric.server.api.issued import IssuedKey, IssuedKeys, KeyTable, decode

FILE = "keys.json"

log = structlog.get_logger("lmetric.keys")


class KeyStore:
    """Issued keys with their file. ``folder``: of the file; None: memory only."""

    def __init__(self, folder: Path | None, keys: IssuedKeys) -> None:
        self.keys = keys
        self._folder = folder
        self._turn = asyncio.Lock()

    def read(self) -> None:
        """Adds the records of the file. A broken file is renamed.

        Raises ConfigError if the folder is not usable.
        """
        if self._folder is not None:
            from lmetric.server.observe.state import StateFiles

            StateFiles(self._folder, FILE, dict, restore=self._restore).read()

    def _restore(self, content: bytes) -> None:
        self.keys.merge(decode(content).keys)

    async def change(self, keys: Sequence[IssuedKey]) -> list[IssuedKey]:
        """Writes and applies new records and revocations. Returns the changed records.

        They are on disk when this returns, so a key that was shown survives a crash. Revocations
        apply before, and even if the file cannot be written: that raises LmetricError, and new keys
        are not valid.
        """
        # The caller may be canceled, but a write goes on in its thread.
        return await asyncio.shield(asyncio.create_task(self._change(keys), name="API keys"))

    async def _change(self, keys: Sequence[IssuedKey]) -> list[IssuedKey]:
        async with self._turn:
            refused = self.keys.refused
            changed = self.keys.merge(key for key in keys if key.revoked)
            if self._folder is not None:
                path = self._folder / FILE
                try:
                    await asyncio.to_thread(_write, path, [*self.keys.all(), *keys])
                except OSError as error:
                    log.error("cannot write the file of API keys", path=str(path), reason=error.strerror)
                    raise LmetricError(f"cannot write {path}: {error.strerror}") from None
            changed += self.keys.merge(keys)
            if self.keys.refused != refused:
                log.error("there are too many API keys; those of other routers are not valid here")
            return changed


def _write(path: Path, keys: list[IssuedKey]) -> None:
    from lmetric.server.observe.state import replace_file

    replace_file(path, KeyTable(keys).encode())
