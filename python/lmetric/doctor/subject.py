"""An engine under examination."""

from __future__ import annotations

from dataclasses import dataclass, field

from lmetric.config import EngineConfig, PoolSettings
from lmetric.doctor.client import StreamingClient
from lmetric.doctor.verdict import Outcome, Verdict
from lmetric.engines.adapter import Adapter, Capabilities
from lmetric.engines.handover import CONNECTORS
from lmetric.tokens import PromptTokenizer


@dataclass(frozen=True, slots=True)
class Target:
    """An engine to examine, as a configuration names it."""

    engine: EngineConfig
    model: str | None = None
    """The model it should serve; None: it is asked."""
    settings: PoolSettings = field(default_factory=PoolSettings)
    """Block size, KV events and tokenizer, where configured; for what is not, the engine is asked."""


@dataclass(slots=True)
class Subject:
    """What is known of it so far, and the verdicts on it."""

    target: Target
    client: StreamingClient
    adapter: Adapter | None = None
    capabilities: Capabilities = field(default_factory=lambda: Capabilities("unknown"))
    model: str = ""
    tokenizer: PromptTokenizer | None = None
    """The router's, where it has one."""
    verdicts: dict[str, Verdict] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """As the router calls it."""
        return self.target.engine.label

    @property
    def role(self) -> str:
        """As the configuration says, else as it tells."""
        return self.target.engine.role or self.capabilities.role or "both"

    @property
    def halves(self) -> bool:
        """Whether it serves nothing but halves of requests."""
        told = self.capabilities.handover
        return told is not None and told.connector in CONNECTORS and CONNECTORS[told.connector].at_once

    @property
    def max_tokens(self) -> int:
        """Tokens that a request may have; a modest number where the engine does not tell."""
        model = self.capabilities.base(self.model)
        return (model.max_model_len if model else None) or 2048

    def passed(self, check: str, seen: str) -> None:
        """It does."""
        self.verdicts[check] = Verdict(check, Outcome.PASS, seen)

    def failed(self, check: str, cause: str, remedy: str | None = None) -> None:
        """It does not, or does wrong."""
        self.verdicts[check] = Verdict(check, Outcome.FAIL, cause, remedy)

    def not_offered(self, check: str, why: str, remedy: str | None = None) -> None:
        """It does not say that it would."""
        self.verdicts[check] = Verdict(check, Outcome.NOT_OFFERED, why, remedy)

    def has(self, check: str) -> bool:
        """Whether that check passed."""
        verdict = self.verdicts.get(check)
        return verdict is not None and verdict.outcome is Outcome.PASS

    def flag(self, feature: str) -> str | None:
        """What to set on this kind of engine for that feature."""
        return self.adapter.flags.get(feature) if self.adapter else None
