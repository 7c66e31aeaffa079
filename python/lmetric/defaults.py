"""Defaults that the command line shows without loading what they belong to."""

DEFAULT_PROFILE = "independent-sim"
"""What engines and simulations run on unless told otherwise; its note says what it is."""
