"""Defaults that the command line shows without loading what they belong to."""

from pathlib import Path

SLICE = Path(__file__).parent / "data" / "mooncake_conversation_slice.jsonl.gz"
"""The trace in the package; data/README.md says where it is from."""


def trace_path(name: str | Path, folder: Path = Path()) -> Path:
    """The file of a trace: of `slice` the one in the package, else `name`, relative to `folder`."""
    return SLICE if str(name) == "slice" else folder / name


DEFAULT_PROFILE = "independent-sim"
"""What engines and simulations run on unless told otherwise; its note says what it is."""

ORDER_SLO = 0.1
"""Seconds that a step may take under the local order `slo`: Libra's, section 6.1."""

PLANNER = "planner"
"""The policy that is made for requests that go on elsewhere behind their prompts, and for prefixes that are
pulled: where nothing else is said, both are on with it; see docs/planner.md."""
