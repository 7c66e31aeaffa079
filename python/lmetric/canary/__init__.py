"""Compares two policies on live traffic: which requests are in which arm, and the difference.

`Splitter` puts requests into arms. `Comparison` collects results and gives differences with
intervals. Neither does I/O, so recorded requests can be compared, too.
"""

from lmetric.canary.comparison import ARMS, METRICS, Comparison, Difference, Outcome
from lmetric.canary.split import BUCKETS, Place, Splitter

__all__ = ["ARMS", "BUCKETS", "METRICS", "Comparison", "Difference", "Outcome", "Place", "Splitter"]
