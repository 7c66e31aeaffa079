"""Settings of the records on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from lmetric.config.kinds import Positive, Strict


class RecordsConfig(Strict):
    """Records on disk: one line of JSON per request, with its decision and its outcome."""

    path: Path | None = Field(
        None, description="folder for the files, of this router alone; null: the router keeps no records"
    )
    sample: float = Field(
        1.0,
        gt=0,
        le=1,
        description="share of the requests to record. Requests of a session are recorded together. `whatif` "
        "needs all requests",
    )
    file_bytes: int = Field(64 << 20, ge=1 << 12, description="start a new file at this size, bytes")
    total_bytes: int = Field(
        1 << 30, ge=1 << 13, description="delete the oldest files above this total size of all files, bytes"
    )
    queue_records: Positive = Field(
        4096,
        description="maximum number of records that wait for the writer; further ones are lost and counted",
    )
    queue_bytes: int = Field(
        64 << 20, ge=1 << 16, description="maximum memory of the prompts of waiting records, bytes"
    )
    tenant_names: bool = Field(False, description="write tenants by name; false: as a keyed hash")
    request_ids: bool = Field(False, description="write the request ids of clients; false: leave them out")
    hash_key_file: Path | None = Field(
        None,
        description="file with the key of all hashes, one token of visible ASCII characters. Records under "
        "the same key share prefixes, sessions and tenants. Default: random at each start",
    )

    @model_validator(mode="after")
    def _several_files(self) -> Self:
        if self.total_bytes < 2 * self.file_bytes:
            raise ValueError(
                f"total_bytes ({self.total_bytes}) must be at least twice file_bytes ({self.file_bytes})"
            )
        return self
