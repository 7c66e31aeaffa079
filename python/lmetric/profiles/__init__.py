"""Profiles: step times of a model on a GPU, as YAML files. This directory has the shipped
profiles."""

from __future__ import annotations

import difflib
import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from lmetric.validation import expected

_DIRECTORY = Path(__file__).parent


class ProfileError(ValueError):
    """A profile is missing or invalid. The message has the file, the field and what was
    expected."""


class DecodeThroughput(BaseModel):
    """Tokens/s of n decoding sequences together, ``alpha n^2 + beta n + gamma``, for any context.

    The curve falls beyond its peak at ``-beta / 2 alpha``. Source: SIBYL, Eq. 15.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    alpha: float = Field(lt=0, description="Curvature: below 0.")
    beta: float = Field(gt=0, description="Slope at no sequence.")
    gamma: float = Field(description="Tokens a second of no sequence, by the fit.")
    hold_peak: bool = Field(
        default=True,
        description="The curve stays at its peak beyond it. False: as in the paper; an engine stops forever "
        "if the curve is 0 or less.",
    )

    @model_validator(mode="after")
    def _one_sequence_moves(self) -> DecodeThroughput:
        if self.alpha + self.beta + self.gamma <= 0:
            raise ValueError("alpha + beta + gamma, the tokens/s of one sequence, must be above 0")
        return self


class Profile(BaseModel):
    """One engine's constants.

    A step takes ``fixed_seconds + decode_seconds_per_sequence x sequences +
    decode_seconds_per_context_token x their context tokens + prefill_seconds_per_token x tokens +
    prefill_seconds_per_attention_pair x pairs``; a prefill chunk of g tokens behind n tokens of
    context has g x (n + g / 2) pairs. With
    ``decode_throughput``, decodes of n sequences take ``n / throughput(n)`` instead.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    fixed_seconds: float = Field(gt=0, description="Seconds that every step takes.")
    decode_seconds_per_sequence: float = Field(ge=0, description="Seconds for each sequence that decodes.")
    decode_seconds_per_context_token: float = Field(
        ge=0, description="Seconds for each token of their context."
    )
    prefill_seconds_per_token: float = Field(ge=0, description="Seconds for each prompt token computed.")
    prefill_seconds_per_attention_pair: float = Field(
        ge=0, description="Seconds for each of its attention pairs."
    )
    max_batch_tokens: int = Field(gt=0, le=2**30, description="Most tokens of a step, decodes counted first.")
    max_sequences: int = Field(gt=0, le=2**30, description="Most sequences that run at once.")
    block_tokens: int = Field(gt=0, le=2**20, description="Tokens of a KV block.")
    cache_blocks: int = Field(gt=0, le=2**30, description="Blocks that the KV memory holds.")
    kv_bytes_per_token: int | None = Field(
        default=None, gt=0, le=2**40, description="KV cache of a token, for what a transfer takes."
    )
    decode_throughput: DecodeThroughput | None = Field(
        default=None, description="Decodes by a curve over the batch size, in place of the three constants."
    )
    source: str | None = Field(default=None, description="Where the constants come from.")
    note: str | None = Field(default=None, description="What to know before trusting them.")

    @model_validator(mode="after")
    def _every_decode_gets_its_token(self) -> Profile:
        if self.max_batch_tokens < self.max_sequences:
            raise ValueError(f"max_batch_tokens must be max_sequences ({self.max_sequences}) or more")
        return self

    def constants(self) -> dict[str, Any]:
        """The constants of the engine model: all fields except source and note."""
        return self.model_dump(exclude={"source", "note"}, exclude_none=True)

    def in_blocks_of(self, block_tokens: int) -> Profile:
        """The same engine with KV blocks of `block_tokens` tokens and the same capacity.

        The number of blocks is rounded down, to at least one.

        Raises:
            ProfileError: a size out of range.
        """
        tokens = self.cache_blocks * self.block_tokens
        changed = {"block_tokens": block_tokens, "cache_blocks": max(1, tokens // max(1, block_tokens))}
        return check_profile(self.model_dump() | changed, f"in blocks of {block_tokens} tokens")

    def slower(self, factor: float) -> Profile:
        """An engine whose steps take `factor` times as long, with the same memory; below 1, a
        faster one.

        Raises:
            ProfileError: a factor that is not above 0, or a profile with a decode throughput.
        """
        if not factor > 0 or self.decode_throughput is not None:
            got = f"factor {factor:g}" if self.decode_throughput is None else "a decode_throughput"
            raise ProfileError(
                f"slower profile: {got} is not valid; expected a factor above 0 and step times"
            )
        times = {name: getattr(self, name) * factor for name in type(self).model_fields if "_seconds" in name}
        return check_profile(self.model_dump() | times, f"{factor:g} times slower")


@cache  # a study with 100 runs asks 1,000 times
def shipped_profiles() -> tuple[str, ...]:
    """Names of the shipped profiles, in order."""
    return tuple(sorted(path.stem for path in _DIRECTORY.glob("*.yaml")))


_SHARE = re.compile(r"(\d+) +(\S.*)")


def fleet_profiles(text: str) -> list[tuple[int, str]]:
    """Instances and profiles of a fleet: ``"8 qwen3-30b-a3b-h20 + 8 qwen3-30b-a3b-h200"`` gives two
    pairs.

    The name of one profile, without a number, gives no pairs.

    Raises:
        ProfileError: a number of 0, or parts with and without a number.
    """
    found = [_SHARE.fullmatch(part.strip()) for part in text.split(" + ")]
    if not any(found) or Path(text).is_file():
        return []
    pairs = [(int(match[1]), match[2]) for match in found if match]
    if len(pairs) < len(found) or any(instances < 1 for instances, _ in pairs):
        raise ProfileError(
            f"profile {text!r} is not valid; expected a number of instances before each profile, "
            'such as "8 qwen3-30b-a3b-h20 + 8 qwen3-30b-a3b-h200"'
        )
    return pairs


def load_profile(name_or_path: str) -> Profile:
    """Loads a shipped profile by name, or a YAML file.

    Raises:
        ProfileError: no such profile, not YAML, an unknown or missing field, or a value out of
            range.
    """
    shipped = name_or_path in shipped_profiles()
    return _shipped(name_or_path) if shipped else _read(Path(name_or_path), str(name_or_path))


@cache  # each run of a study and each emulated engine loads one
def _shipped(name: str) -> Profile:
    return _read(_DIRECTORY / f"{name}.yaml", name)


def _read(path: Path, name: str) -> Profile:
    try:
        content: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        near = difflib.get_close_matches(name, shipped_profiles(), n=1)
        hint = f"did you mean {near[0]!r}?" if near else "`lmetric-router profiles` lists the names"
        raise ProfileError(
            f"profile {name!r}: neither a shipped profile nor a readable file; {hint}"
        ) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ProfileError(f"profile {path}: not YAML: {' '.join(str(error).split())}") from error
    return check_profile(content, str(path))


def check_profile(content: Any, where: str) -> Profile:
    """The profile with these fields. Raises `ProfileError` with `where`."""
    try:
        return Profile.model_validate(content)
    except ValidationError as error:
        problems = "; ".join(
            ": ".join(filter(None, (".".join(map(str, problem["loc"])), expected(problem))))
            for problem in error.errors()
        )
        raise ProfileError(f"profile {where}: {problems}") from error
