"""Connections to engines: pools, single connections, fetches of whole answers."""
