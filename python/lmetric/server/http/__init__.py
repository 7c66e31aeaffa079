"""Clients' connections, and the pages that the router answers itself."""
