//! Prompts of whole blocks for tests of the router, and a step-time model for hand-computed times.
#![allow(dead_code)]
use lmetric_core::estimate::StepTime;
use lmetric_core::request::Request;

pub const STEP: StepTime = StepTime {
    fixed_seconds: 0.01,
    decode_seconds_per_sequence: 1e-4,
    decode_seconds_per_context_token: 1e-6,
    prefill_seconds_per_token: 1e-4,
    prefill_seconds_per_attention_pair: 1e-8,
    max_batch_tokens: 512.0,
    max_sequences: f64::INFINITY,
};

/// Returns the chain of a prompt of `blocks` blocks with the symbols `first, first + 1, ...`.
pub fn chain(first: u64, blocks: usize) -> Vec<u64> {
    (0..blocks as u64).map(|i| (first + i).wrapping_mul(0x9E37_79B9_7F4A_7C15)).collect()
}

/// Returns a prompt of these blocks, 16 tokens each, plus one token.
pub fn request(chain: &[u64]) -> Request<'_> {
    let prompt_tokens = chain.len() as u32 * 16 + 1;
    Request { chain, prompt_tokens, tokens_per_block: 16.0, ..Request::default() }
}
