"""Defaults that the command line shows, separate from the modules that use them (slow imports)."""

DEFAULT_POLICY = "total_delay"
"""The policy of servers, gateways and simulations if none is chosen. Documentation:
docs/explanation/default_policy.md."""

TRACE_DIR = "LMETRIC_TRACE_DIR"
"""Environment variable of the laboratory, not a setting: the folder of public traces."""

CLIENT_ANSWER_BYTES = 64 << 20
"""Limit of an answer that `serve` or `Relay.read` holds whole for its client: far above the longest
answers, some MiB."""

PLANNER = "planner"
"""The policy for decode placement and prefix fetches, which are both on by default with it.

Documentation: docs/research/planner.md.
"""
