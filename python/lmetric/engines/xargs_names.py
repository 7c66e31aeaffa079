"""Names and bounds of the fields of `lmetric.engines.xargs` that the router writes or checks."""

MOST_SLO_MS = 60_000
"""Longest time between two tokens, milliseconds."""
HANDICAP = "boost_handicap_seconds"
"""The handicap of the request's tenant, set by the router."""
GAMMA = "boost_gamma"
"""The gamma that the router learned over all engines, 1/s."""
