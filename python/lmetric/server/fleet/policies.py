"""The policies of a model. They can be replaced while requests are in flight."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lmetric._core import LmetricError, Router, check_policy, policy_table
from lmetric.config import CanaryConfig, PoolSettings, ShadowConfig
from lmetric.config.reload import POLICIES

if TYPE_CHECKING:
    from lmetric.policies import Policy, PolicyFunction
    from lmetric.server.fleet.policy_files import Stamps

Value = str | dict[str, Any]

_REGISTERED = frozenset(row["name"] for row in policy_table())


class Built(NamedTuple):
    """A policy in the form that the core router accepts."""

    policy: Policy | PolicyFunction | str
    knobs: dict[str, float] | None

    @property
    def formula(self) -> str | None:
        """The score expression; None: the policy is no expression."""
        return getattr(self.policy, "score", None)


def build(settings: PoolSettings, policy: Value, knobs: Mapping[str, float]) -> Built:
    """Builds a policy of the configuration; a Python policy gets its fallback.

    Raises LmetricError, also if these settings do not offer the policy.
    """
    value = _definition(settings, policy)
    built = _read(value, knobs)
    if isinstance(built, str):
        check_policy(built, dict(knobs), settings.offers)
        return Built(built, dict(knobs))
    check_policy(built, {}, settings.offers)
    from lmetric.policies import PolicyFunction

    if isinstance(built, PolicyFunction):
        from lmetric.server.fleet.policy_files import rehearse

        fallback = _read(settings.policy_fallback, {})
        if isinstance(fallback, str):
            check_policy(fallback, {}, settings.offers)
        assert not isinstance(fallback, PolicyFunction)
        rehearse(built, fallback)
        built = built.with_fallback(fallback, settings.policy_time_limit_seconds)
    return Built(built, None)


def _read(
    value: Value, knobs: Mapping[str, float], *, references: bool = True
) -> Policy | PolicyFunction | str:
    """Reads a policy as `Policy.from_config`, which registered policies do not need."""
    if isinstance(value, str) and (name := value.strip()) in _REGISTERED:
        return name
    from lmetric.policies import Policy

    return Policy.from_config(value, knobs=knobs, references=references)


def check(settings: PoolSettings, policy: Value, knobs: Mapping[str, float]) -> None:
    """Raises LmetricError if a policy must not be set over HTTP: code outside the configuration."""
    if not (isinstance(policy, str) and policy in settings.policies):
        _read(policy, knobs, references=False)


class Policies:
    """Both policies of a model's settings. Raises LmetricError if they are invalid."""

    def __init__(self, settings: PoolSettings) -> None:
        self.settings = settings
        self.find_files({})  # before they are read
        for value in settings.policies.values():
            build(settings, value, {})  # unused policies must be valid, too
        self.first = build(settings, settings.policy, settings.knobs)
        self.decode = build(settings, settings.decode_policy, settings.decode_knobs)
        self.shadow = _on_trial(settings, "shadow", settings.shadow)
        self.canary = _on_trial(settings, "canary", settings.canary)
        self.find_reads()

    def find_files(self, loaded: Stamps) -> None:
        """Finds the files of the policies. ``loaded``: stamps of files that are loaded already."""
        settings = self.settings
        canary = [settings.canary.policy] if settings.canary else []
        others = [settings.decode_policy, *([settings.shadow.policy] if settings.shadow else [])]
        found = [_files(settings, each) for each in ([settings.policy], canary, others)]
        now = _stamps([*itertools.chain(*found)])
        self.files = {file: loaded.get(file, stamp) for file, stamp in now.items()}
        self.seen = self.files  # at the last look; the load that followed may have failed
        # The code of the policies that a canary compares: that of first segments, and its own.
        stamps = [[self.files[file] for file in files] for files in found]
        self.policy_code = str(stamps[0])
        self.canary_code = str(([_definition(settings, each) for each in canary], stamps[1]))

    def find_reads(self) -> None:
        """Finds out whether the policies read indicators that cost time to compute."""
        self.reads_length_class = self.reads_priority = False
        for built in (self.first, self.decode, self.shadow, self.canary):
            self.also_reads(built)

    def also_reads(self, built: Built | None) -> None:
        """Adds the indicators of a further policy of the model."""
        reads = _reads(built and built.policy)
        self.reads_length_class |= "length_class" in reads
        self.reads_priority |= "priority" in reads

    def install(self, router: Router, before: Policies) -> None:
        """Sets these policies in the core router.

        Raises LmetricError; then ``before`` stays in use.
        """
        router.set_policy(self.first.policy, knobs=self.first.knobs)
        try:
            router.set_decode_policy(self.decode.policy, knobs=self.decode.knobs)
        except Exception:
            router.set_policy(before.first.policy, knobs=before.first.knobs)
            raise

    def equals(self, other: Policies) -> bool:
        """Returns whether both policies, their files and all that they read are equal."""
        return self.files == other.files and not self.changed_since(other)

    def changed_since(self, other: Policies) -> set[str]:
        """Returns the names of the settings (`POLICIES`) with other values than in ``other``."""
        own, theirs = self.settings, other.settings
        return {name for name in POLICIES if getattr(own, name) != getattr(theirs, name)}

    def differs(self, other: Policies) -> bool:
        """Returns whether first segments have another policy than in other settings."""
        own, theirs = self.settings, other.settings
        return _definition(own, own.policy) != _definition(theirs, theirs.policy) or own.knobs != theirs.knobs

    def keep_installed(self, before: Policies) -> Policies:
        """Returns a copy for a model with ``before``, which keeps its installed policies if equal.

        Else the model would show a policy that does not decide: a file may import others.
        """
        copied = copy(self)
        if before.equals(self):
            copied.first, copied.decode = before.first, before.decode
            copied.also_reads(copied.first)
            copied.also_reads(copied.decode)
        return copied


def _on_trial(settings: PoolSettings, key: str, config: ShadowConfig | CanaryConfig | None) -> Built | None:
    """Builds the policy of a shadow or a canary. Raises LmetricError, which names the key."""
    if config is None:
        return None
    try:
        return build(settings, config.policy, config.knobs)
    except LmetricError as error:
        raise type(error)(f"{key}.policy: {error}") from None


def _reads(policy: Policy | PolicyFunction | str | None) -> set[str]:
    """Returns the indicators that a policy and its fallback read.

    Built-in policies read none of them.
    """
    if policy is None or isinstance(policy, str):
        return set()
    return {*policy.reads} | _reads(getattr(policy, "fallback", None))


def _files(settings: PoolSettings, policies: Iterable[Value]) -> list[Path]:
    """Returns the files with these policies."""
    values = (_definition(settings, each) for each in policies)
    texts = [value for value in values if isinstance(value, str) and value.strip() not in _REGISTERED]
    if not texts:
        return []
    from lmetric import plugins

    return [file for file in map(plugins.file_of, texts) if file is not None]


def _stamps(files: Collection[Path]) -> Stamps:
    """Returns the stamps of files."""
    if not files:
        return {}
    from lmetric.server.fleet.policy_files import stamps

    return stamps(files)


def _definition(settings: PoolSettings, policy: Value) -> Value:
    """Returns the definition of a policy name in the configuration; other values unchanged."""
    return settings.policies.get(policy, policy) if isinstance(policy, str) else policy
