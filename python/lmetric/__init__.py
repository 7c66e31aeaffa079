"""lmetric: the request router for fleets of LLM engines."""
