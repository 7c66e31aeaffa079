"""An engine under examination."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lmetric.config import EngineConfig, KvEventsSetting, PoolSettings
from lmetric.doctor.client import StreamingClient
from lmetric.doctor.verdict import Outcome, Verdict
from lmetric.engines.adapter import Adapter, Capabilities
from lmetric.engines.connectors import CONNECTORS
from lmetric.server.fleet.kv_mode import flags_for
from lmetric.tokens.prompt import PromptTokenizer


@dataclass(frozen=True, slots=True)
class Target:
    """An engine to examine, with its configuration."""

    engine: EngineConfig
    model: str | None = None
    """The expected model; None: as the engine reports."""
    settings: PoolSettings = field(default_factory=PoolSettings)
    """Configured profile, block size, KV events and tokenizer. The engine reports the missing
    ones."""
    token_seconds: float | None = None
    """The goal for the 99th percentile of the time between tokens, seconds; None: no goal."""
    health_path: str = "/health"
    """The path of its health page; every status below 500 is healthy, as in the server."""


@dataclass(slots=True)
class Subject:
    """An engine under examination: its reports so far, and its verdicts."""

    target: Target
    client: StreamingClient
    adapter: Adapter | None = None
    capabilities: Capabilities = field(default_factory=lambda: Capabilities("unknown"))
    model: str = ""
    tokenizer: PromptTokenizer | None = None
    """The router's tokenizer for the model, if it has one."""
    verdicts: dict[str, Verdict] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The engine's name in the router."""
        return self.target.engine.label

    @property
    def role(self) -> str:
        """The configured role, or else the reported one."""
        return self.target.engine.role or self.capabilities.role or "both"

    @property
    def halves(self) -> bool:
        """Whether the engine serves only prefill or only decode."""
        told = self.capabilities.handover
        return told is not None and told.connector in CONNECTORS and CONNECTORS[told.connector].at_once

    @property
    def max_tokens(self) -> int:
        """Maximum tokens of a request; a small number if the engine reports none."""
        model = self.capabilities.base(self.model)
        return (model.max_model_len if model else None) or 2048

    def passed(self, check: str, seen: str) -> None:
        """Records that a check passed."""
        self.verdicts[check] = Verdict(check, Outcome.PASS, seen)

    def failed(self, check: str, cause: str, remedy: str | None = None) -> None:
        """Records that a check failed."""
        self.verdicts[check] = Verdict(check, Outcome.FAIL, cause, remedy)

    def not_offered(self, check: str, why: str, remedy: str | None = None) -> None:
        """Records that the engine does not offer a feature."""
        self.verdicts[check] = Verdict(check, Outcome.NOT_OFFERED, why, remedy)

    def broke(self, check: str, error: Exception) -> None:
        """Records that an answer, or a fault of the doctor, ended a check in an unforeseen way."""
        frames = traceback.extract_tb(error.__traceback__)
        at = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
        cause = f"the check ended with {type(error).__name__}: {str(error)[:200]}{at}"
        self.failed(check, cause, "look for odd answers of the engine, or report this")

    @contextlib.contextmanager
    def attempt(self, check: str) -> Iterator[None]:
        """Any error in this context becomes a verdict, so that it ends no other check."""
        try:
            yield
        except Exception as error:
            self.broke(check, error)

    def has(self, check: str) -> bool:
        """Whether a check passed."""
        verdict = self.verdicts.get(check)
        return verdict is not None and verdict.outcome is Outcome.PASS

    def flag(self, feature: str) -> str | None:
        """The flag of this kind of engine for a feature."""
        return self.flags.get(feature)

    @property
    def flags(self) -> Mapping[str, str]:
        """The flags of this kind of engine by feature, with the configured endpoints."""
        return flags_for(self.adapter.flags, self.events_setting) if self.adapter else {}

    @property
    def events_setting(self) -> KvEventsSetting:
        """The setting of its KV events: its own, or else its model's."""
        own = self.target.engine.kv_events
        return self.target.settings.kv_events if own is None else own
