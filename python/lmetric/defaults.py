"""Defaults that the command line shows without loading what they belong to."""

from pathlib import Path
from typing import Literal

SLICE = Path(__file__).parent / "data" / "mooncake_conversation_slice.jsonl.gz"
"""The trace in the package; data/README.md says where it is from."""

DEFAULT_PROFILE = "independent-sim"
"""What engines and simulations run on unless told otherwise; its note says what it is."""

Reschedule = Literal["none", "star", "star_current", "star_oracle", "llumnix"]
"""How running requests are moved; see docs/architecture.md, "Moves"."""

ORDER_SLO = 0.1
"""Seconds that a step may take under the local order `slo`: Libra's, section 6.1."""

Priority = Literal["none", "uniboost", "vtc"]
"""What the engines' queues are ordered by; see docs/priorities.md."""

PLANNER = "planner"
"""The policy that is made for requests that go on elsewhere behind their prompts, and for prefixes that are
pulled: where nothing else is said, both are on with it; see docs/planner.md."""


Pull = Literal["none", "on"]
"""Whether instances fetch prefixes from each other; see docs/simulator.md, "Prefix pull"."""


def default_pull(policy: str) -> Pull:
    """Whether prefixes are pulled under this policy where nothing is said."""
    return "on" if policy == PLANNER else "none"


def default_split(policy: str) -> str:
    """How requests are cut under this policy where nothing is said."""
    return "apart" if policy == PLANNER else "none"
