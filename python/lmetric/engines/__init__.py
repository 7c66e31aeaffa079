"""Engines: wiring of real ones, and emulated ones that need no GPU."""
