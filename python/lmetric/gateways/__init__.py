"""Routing inside other gateways, by the same core as `lmetric-router serve`.

A module per gateway; import it where that gateway runs.
"""
