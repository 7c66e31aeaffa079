"""TLS: certificates, which may change while the router runs, for clients and engines."""
