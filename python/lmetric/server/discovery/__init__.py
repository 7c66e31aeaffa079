"""Service discovery: engines from the configuration, an administrator, files, DNS and Kubernetes.

A *source* reports all engines it knows, and reports them again after each change. `Members` merges
the reports into one fleet; `Discovery` runs the sources. To add a kind of source, write a class
with `follow`.
"""

from lmetric.server.discovery.follow import Discovery
from lmetric.server.discovery.members import Members
from lmetric.server.discovery.source import Found, Sink, Source, SourceError

__all__ = ["Discovery", "Found", "Members", "Sink", "Source", "SourceError"]
