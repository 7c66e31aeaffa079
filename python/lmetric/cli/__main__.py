"""``python -m lmetric.cli``: the command line where the script is not on the path."""

from lmetric.cli import main

main()
