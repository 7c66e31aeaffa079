"""Traces and prompts rebuilt from them; whole fleets played on a simulated clock, in studies; reports."""
