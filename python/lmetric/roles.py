"""The role of an instance."""

from typing import Literal

PlacedRole = Literal["both", "prefill", "decode"]
"""The work of an instance that the core router places requests on: whole requests, only prefills,
or only decodes."""

Role = Literal[PlacedRole, "encode"]
"""The work of an instance. `encode`: it encodes images, sound and video for the others, and gets no
request of a client."""
