"""Routing inside other gateways, by the same core as `lmetric-router serve`."""
