"""Planners: build the next step of a request, one module for each way to run it. They do no I/O."""
