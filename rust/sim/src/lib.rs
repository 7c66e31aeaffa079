//! The engine model: continuous batching, chunked prefill, block prefix cache.
