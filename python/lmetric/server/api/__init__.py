"""The clients' API: requests, errors, keys, tenants."""
