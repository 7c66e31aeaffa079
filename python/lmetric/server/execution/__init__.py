"""Requests on their way: sent to engines, answered to clients, and ended once."""
