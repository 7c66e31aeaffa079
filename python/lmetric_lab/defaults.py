"""Defaults that the commands of the laboratory show, separate from the modules that use them."""

import difflib
import errno
import os
from pathlib import Path

from lmetric.defaults import DEFAULT_POLICY
from lmetric_lab.public_traces import PUBLIC_TRACES

COMPARED = ("vllm", DEFAULT_POLICY)
"""The policies of simulations without an option."""

SLICE = Path(__file__).parent / "data" / "mooncake_conversation_slice.jsonl.gz"
"""The trace in the package; data/README.md describes its origin."""

CODING_AGENTS = SLICE.parent / "coding_agents.yaml"
"""The synthetic workload in the package; data/README.md describes its origin."""


_SHIPPED = {"slice": SLICE, "coding-agents": CODING_AGENTS}


def trace_path(name: str | Path, folder: Path = Path()) -> Path:
    """The file of a trace.

    `slice` and `coding-agents` are files in the package: a trace, and a synthetic workload. The
    file of a public trace is in the folder of public traces, and may have to be downloaded. Other
    names are files, relative to `folder`.
    """
    if (shipped := _SHIPPED.get(str(name))) is not None:
        return shipped
    public = PUBLIC_TRACES.get(str(name))
    return folder / name if public is None else public.path


def no_trace(path: Path) -> FileNotFoundError:
    """The error that a trace is neither a file nor a known name.

    It has the names, unless the path is clearly that of a file.
    """
    if path.suffix or len(path.parts) > 1:
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    names = [*_SHIPPED, *PUBLIC_TRACES]
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.5)
    hint = f"did you mean the trace {near[0]}? " if near else ""
    text = f"{os.strerror(errno.ENOENT)}; {hint}Names of traces: {', '.join(names)}"
    return FileNotFoundError(errno.ENOENT, text, str(path))


DEFAULT_PROFILE = "independent-sim"
"""The default profile of emulated engines and simulations; its `note` describes it."""

TOUR_ENGINES = 4
"""Engines of `demo` without an option."""

AGENTS_PROFILE = "qwen3-32b-h20"
"""The profile of demos with agents. Its prefill is slow against its decode, so that short contexts,
which the machine can tokenize, cost as much as the long contexts of coding agents elsewhere."""

ORDER_SLO = 0.1
"""Maximum step time of the local order `slo`, seconds. Source: Libra, section 6.1."""
