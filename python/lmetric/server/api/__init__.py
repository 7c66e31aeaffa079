"""What clients send and get: requests, errors, keys, tenants."""
