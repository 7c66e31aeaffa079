"""Settings of the records on disk."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Self

from pydantic import model_validator

from lmetric.config.kinds import Strict, setting


class RecordsConfig(Strict):
    """Records on disk: one line of JSON per request, with its decision and its outcome."""

    path: Path | None = setting(None, when="you want to analyze or replay your traffic")
    """folder for the files, of this router alone; null: the router keeps no records"""
    sample: float = setting(1.0, gt=0, le=1, when="records of all requests take too much space")
    """share of the requests to record. Requests of a session are recorded together. `whatif` needs
    all requests"""
    # Most bytes of a file. All open files use at most a quarter of `total_bytes`. The router
    # deletes whole files, oldest first.
    file_bytes: ClassVar[int] = 64 << 20
    total_bytes: int = setting(1 << 30, ge=1 << 13, when="records of more days should stay")
    """delete the oldest files above this total size of all files, bytes"""
    # Records that wait for the writer; further records are lost and counted. The disk is too slow
    # for the rate of requests if as many wait.
    queue_records: ClassVar[int] = 4096
    # Memory of the prompts of waiting records, bytes.
    queue_bytes: ClassVar[int] = 64 << 20
    tenant_names: bool = setting(False, when="readers of the records may know the tenants")
    """write tenants by name; false: as a keyed hash"""
    request_ids: bool = setting(False, when="you match records with clients' logs")
    """write the request ids of clients; false: leave them out"""
    hash_key_file: Path | None = setting(None, when="you join records of several routers or starts")
    """file with the key of all hashes, one token of visible ASCII characters. Records under the
    same key share prefixes, sessions and tenants. Default: random at each start"""

    @model_validator(mode="after")
    def _several_files(self) -> Self:
        if self.total_bytes < 2 * self.file_bytes:
            raise ValueError(
                f"total_bytes ({self.total_bytes}) must be at least {2 * self.file_bytes}, for two files"
            )
        return self
