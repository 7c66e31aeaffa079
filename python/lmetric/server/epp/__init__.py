"""The endpoint picker: the router behind a gateway (Envoy's `ext_proc`), which sends the requests.

The picker reads, routes, holds and refuses requests as `serve` does (`http/arrive.py`,
`http/place.py`), and the same state machine follows each answer. Only the ways to the client and to
the engine differ: both are messages of one gRPC stream (`stream.py`). Needs the extra `epp`.
"""
