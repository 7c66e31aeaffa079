"""Settings of the records on disk."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field, model_validator

from lmetric.config.kinds import Strict


class RecordsConfig(Strict):
    """Records on disk: one line of JSON per request, with its decision and its outcome."""

    path: Path | None = Field(
        None,
        description="folder for the files, of this router alone; null: the router keeps no records",
        json_schema_extra={"when": "you want to analyze or replay your traffic"},
    )
    sample: float = Field(
        1.0,
        gt=0,
        le=1,
        description="share of the requests to record. Requests of a session are recorded together. `whatif` "
        "needs all requests",
        json_schema_extra={"when": "records of all requests take too much space"},
    )
    # Most bytes of a file. All open files use at most a quarter of `total_bytes`. The router
    # deletes whole files, oldest first.
    file_bytes: ClassVar[int] = 64 << 20
    total_bytes: int = Field(
        1 << 30,
        ge=1 << 13,
        description="delete the oldest files above this total size of all files, bytes",
        json_schema_extra={"when": "records of more days should stay"},
    )
    # Records that wait for the writer; further records are lost and counted. The disk is too slow
    # for the rate of requests if as many wait.
    queue_records: ClassVar[int] = 4096
    # Memory of the prompts of waiting records, bytes.
    queue_bytes: ClassVar[int] = 64 << 20
    tenant_names: bool = Field(
        False,
        description="write tenants by name; false: as a keyed hash",
        json_schema_extra={"when": "readers of the records may know the tenants"},
    )
    request_ids: bool = Field(
        False,
        description="write the request ids of clients; false: leave them out",
        json_schema_extra={"when": "you match records with clients' logs"},
    )
    hash_key_file: Path | None = Field(
        None,
        description="file with the key of all hashes, one token of visible ASCII characters. Records under "
        "the same key share prefixes, sessions and tenants. Default: random at each start",
        json_schema_extra={"when": "you join records of several routers or starts"},
    )

    @model_validator(mode="after")
    def _several_files(self) -> Self:
        if self.total_bytes < 2 * self.file_bytes:
            raise ValueError(
                f"total_bytes ({self.total_bytes}) must be at least {2 * self.file_bytes}, for two files"
            )
        return self
