"""Models, their engines, and the state of each engine."""
