"""The role of an instance."""

from typing import Literal

Role = Literal["both", "prefill", "decode"]
"""The work of an instance: whole requests, only prefills, or only decodes."""
