"""Which engines there are: from the configuration, an administrator, files, DNS and Kubernetes.

A *source* tells of all engines it knows, again whenever that changes. `Members` makes one fleet of what all
of them tell; `Discovery` runs the sources. A further kind of source is one file with a class with `follow`.
"""

from lmetric.server.discovery.follow import Discovery
from lmetric.server.discovery.members import Members
from lmetric.server.discovery.source import Found, Sink, Source, SourceError

__all__ = ["Discovery", "Found", "Members", "Sink", "Source", "SourceError"]
