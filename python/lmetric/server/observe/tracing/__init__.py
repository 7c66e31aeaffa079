"""Traces of requests: W3C trace context in and out, and spans for an OpenTelemetry collector.

Only a router with the setting `tracing` imports this package.
"""
