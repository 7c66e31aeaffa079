"""The API for clients: requests, errors, keys, tenants."""
