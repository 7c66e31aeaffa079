"""Connections of clients, and the pages that the router answers itself."""
