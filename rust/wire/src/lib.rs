//! Reads HTTP/1.1 response bytes as they come: heads, body framing, SSE events.
