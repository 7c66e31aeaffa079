"""Traces, prompts rebuilt from them, and reports over per-request records."""
