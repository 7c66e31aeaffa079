"""A run of a canary: how it splits requests, and their results."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from copy import copy
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from lmetric._core import Request
from lmetric.canary import ARMS, METRICS, Comparison, Outcome, Splitter
from lmetric.canary.comparison import MIN_GROUPS
from lmetric.config import CanaryConfig

if TYPE_CHECKING:
    from lmetric.server.fleet.policies import Built, Policies

TEXT_BYTES_PER_TOKEN = 4
MIN_ERRORS = 5  # failed requests of the canary before a rollback because of errors
# The automatic rollback reads two metrics, which share the chance of a false alarm.
ALARM_CHANCE = 0.05 / 2
# Above this share of the requests in one group of keys, the split is not fair.
LARGEST_GROUP = 0.2


class CanaryRequest(Struct, frozen=True, gc=False):
    """A request of a canary's comparison."""

    run: Run
    canary: bool  # its arm
    bucket: int


class Update(Struct):
    """The results of one worker's requests of a canary, for the other workers."""

    salt: str  # of its run
    code: str  # that its run compares
    results: list[tuple[bool, int, Outcome]]  # arm and bucket of each
    keys: dict[str, int]
    alarm: tuple[str, str] | None = None  # cause and reason if this worker rolled it back


class End(Struct, frozen=True):
    """The end of a canary's comparison.

    Attributes:
        at: time of the last command or rollback, Unix time in seconds.
        seconds: length of the canary.
        stable_policy: the policy of the stable arm.
    """

    at: float
    seconds: float
    stable_policy: str | dict[str, Any]


class Run:
    """One canary from its start on: how it splits requests, and their results.

    ``policies``: of the model.
    """

    arms = ARMS

    def __init__(self, config: CanaryConfig, now: float, policies: Policies) -> None:
        self.config = config
        self.code = self.code_of(policies)  # another worker may have loaded other code
        self.salt = config.salt or secrets.token_hex(8)
        self.splitter = Splitter(self.salt, config.share)
        self.comparison = Comparison()
        self.started = now  # seconds on the monotonic clock
        self.counts_from = now + config.warmup_seconds
        self.keys: Counter[str] = Counter()  # requests by the kind of their key
        self.own_keys: Counter[str] = Counter()  # of them, those that other workers do not know
        self.end: End | None = None

    def code_of(self, policies: Policies) -> str:
        """Returns the code that it compares under these policies, the same text in all workers.

        A canary that a command started keeps its own code, which is not part of it.
        """
        own = policies.canary_code if self.config == policies.settings.canary else ""
        return policies.policy_code + own

    def make_stable(self, built: Built, before: Policies) -> Policies:
        """Returns a model's policies with the canary's one for all requests. Loads nothing.

        ``built``: the policy that ran as the canary. Its file may have changed since.
        """
        changes = {"policy": self.config.policy, "knobs": self.config.knobs}
        policies = copy(before)
        policies.settings, policies.first = before.settings.model_copy(update=changes), built
        policies.find_files(before.files)
        policies.find_reads()
        return policies

    def finish(self, stable_policy: str | dict[str, Any]) -> None:
        """Records that the canary ends now, or that its promotion is undone now."""
        seconds = time.monotonic() - self.started if self.end is None else self.end.seconds
        self.end = End(time.time(), seconds, stable_policy)

    def nothing(self) -> Update:
        """Returns an update of the other workers without results."""
        return Update(self.salt, self.code, [], {})

    def too_few(self) -> str | None:
        """Returns why there are no results to promote; None: there are some."""
        if self.comparison.differences():
            return None
        groups = dict(zip(ARMS, self.comparison.groups, strict=True))
        return (
            f"no results to promote: {groups['stable']} sessions in the "
            f"stable arm and {groups['canary']} in the canary's; at least {MIN_GROUPS} in each are needed. "
            "Wait for more requests, or set the policy with PUT /admin/policy"
        )

    def draw(self, request: Request) -> CanaryRequest | None:
        """Returns the arm of a request; None: no policy decides it."""
        if request.instances is not None and len(request.instances) == 1:
            return None
        session = request.session
        if session is not None:
            kind, key = "session", b"session " + session.encode("utf-8", "surrogateescape")
        else:
            kind, key = "prefix", self._prefix(request)
        self.keys[kind] += 1
        self.own_keys[kind] += 1
        place = self.splitter.place(key)
        return CanaryRequest(self, place.canary, place.bucket)

    def _prefix(self, request: Request) -> bytes:
        domain = f"prefix {request.tenant} {request.lora_name} {request.cache_salt} ".encode(
            "utf-8", "surrogateescape"
        )
        tokens, length = request.token_ids, self.config.prefix_tokens
        if tokens is not None:
            return domain + tokens[:length].tobytes()
        text = request.text or b""
        head = text[: TEXT_BYTES_PER_TOKEN * length]
        return domain + (head.encode("utf-8", "surrogateescape") if isinstance(head, str) else head)

    def alarm(self) -> tuple[str, str] | None:
        """Returns the metric for which the canary is surely worse, and a sentence."""
        config, requests = self.config, self.comparison.requests
        if min(requests) < config.min_requests:
            return None
        found = {each.metric: each for each in self.comparison.differences(ALARM_CHANCE)}
        ttft, errors = found.get("ttft_seconds"), found.get("error_rate")
        if ttft is not None and config.rollback_ttft_increase is not None:
            least = ttft.always[0] / ttft.stable if ttft.stable > 0 else 0.0
            if least > config.rollback_ttft_increase:
                return "ttft", (
                    f"its mean TTFT is higher by at least {least:.0%}, above rollback_ttft_increase "
                    f"({config.rollback_ttft_increase:.0%})"
                )
        if errors is not None and config.rollback_error_increase is not None:
            least = errors.always[0]
            if self.comparison.errors[1] >= MIN_ERRORS and least > config.rollback_error_increase:
                return "errors", (
                    f"its error rate is higher by at least {least:.1%} of the requests, above "
                    f"rollback_error_increase ({config.rollback_error_increase:.1%})"
                )
        return None

    def shown(self, now: float) -> dict[str, Any]:
        """Returns its settings and results for people."""
        comparison = self.comparison
        rows: dict[str, Any] = {
            name: {
                "about": METRICS[name],
                **dict(zip(ARMS, values, strict=True)),
                "difference": None,
                "interval": None,
                "always": None,
                "clear": False,
            }
            for name, values in comparison.values().items()
        }
        for each in comparison.differences():
            rows[each.metric] |= {
                "difference": each.value,
                "interval": list(each.interval),
                "always": list(each.always),
                "clear": each.excludes_zero,
            }
        return {
            **self.config.model_dump(exclude={"salt"}),
            "salt": self.salt,
            "ended_at": None if self.end is None else self.end.at,
            "seconds": now - self.started if self.end is None else self.end.seconds,
            "stable_policy": None if self.end is None else self.end.stable_policy,
            "warmup_left_seconds": max(0.0, self.counts_from - now) if self.end is None else 0.0,
            "requests": dict(zip(ARMS, comparison.requests, strict=True)),
            "errors": dict(zip(ARMS, comparison.errors, strict=True)),
            "groups": dict(zip(ARMS, comparison.groups, strict=True)),
            "keys": dict(self.keys),
            "metrics": rows,
            "warnings": self._warnings(),
        }

    def _warnings(self) -> list[str]:
        found = []
        if sum(self.comparison.requests) >= self.config.min_requests:
            share = self.comparison.largest_group
            if share > LARGEST_GROUP:
                found.append(
                    f"{share:.0%} of the requests have the same session or prefix, so the arms are not "
                    "comparable: send a session ID with each request, in the header x-session-id"
                )
        return found
