"""Reasons why requests end with an error."""

BY_CLIENT = "the client "
"""Begins each reason that neither an engine nor a policy caused."""
