"""``python -m lmetric_lab.tuned``: `lmetric-router` with constants that can be set.

Servers do not offer them. The demo sets times by the engines' clock, and tests make rare events
frequent.
"""

from __future__ import annotations

from pydantic.fields import FieldInfo

from lmetric import options
from lmetric.cli import main

_is_study = options.is_study


def _is_refused(field: FieldInfo) -> bool:
    """Whether a setting is for simulations only."""
    return _is_study(field) and not options.is_constant(field)


if __name__ == "__main__":
    options.is_study = _is_refused
    main()
