"""Execution of requests: sends them to engines, answers their clients, and ends each once."""
