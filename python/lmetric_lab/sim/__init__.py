"""Traces, prompts of traces, simulated fleets, studies and reports."""
