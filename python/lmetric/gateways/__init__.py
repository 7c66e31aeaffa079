"""The router's core as a plug-in of gateways.

A module per gateway; import it where that gateway runs. `lmetric.gateways.ray_serve` is for Ray
Serve.
"""
"""Routing inside other gateways, by the same core as `lmetric-router serve`."""
