"""``python -m lmetric_lab.tuned``: `lmetric-router` with constants that can be set.

Servers do not offer them. The demo sets times by the engines' clock, and tests make rare events
frequent.
"""

from lmetric import option_values
from lmetric.cli import main


def accept_constants() -> None:
    """Makes the constants of routing options settings of servers, in this process."""
    option_values.is_study = option_values.is_simulated


if __name__ == "__main__":
    accept_constants()
    main()
