//! Learned expectations of output lengths.
use crate::request::Request;
use crate::router::state::State;
use std::borrow::Cow;

/// Minimum number of ended outputs of a caller's class before its lengths replace those of all
/// prompts of that size. With 8 outputs, one outlier moves the median by a sixteenth of its rank.
const MIN_OF_CLASS: u32 = 8;

/// Returns the classes whose outputs predict a request's output length: prompts of the same power
/// of two of tokens, and among them the caller's class, if given.
fn classes(prompt_tokens: u32, length_class: Option<u64>) -> (u64, Option<u64>) {
    let length = u64::from(u32::BITS - prompt_tokens.leading_zeros());
    // The top bit separates the two kinds of classes.
    let mixed = |class: u64| (class ^ length.wrapping_mul(0x9E37_79B9_7F4A_7C15)) | 1 << 63;
    (length, length_class.map(mixed))
}

impl State {
    /// Returns the request with its expected output length, if output lengths are learned. The
    /// request's own maximum is a poor estimate.
    pub fn estimated<'r>(&self, request: &'r Request<'r>) -> Cow<'r, Request<'r>> {
        let expected = self.lengths.as_ref().and_then(|lengths| {
            let (of_length, of_class) = classes(request.prompt_tokens, request.length_class);
            let of_class = of_class.and_then(|class| lengths.expected(class, MIN_OF_CLASS));
            let prior = lengths.prior_tokens();
            // One output is enough for a median, but not for a mean.
            let least = if prior.is_some() { MIN_OF_CLASS } else { 1 };
            of_class.or_else(|| lengths.expected(of_length, least)).or(prior)
        });
        match expected {
            Some(tokens) => {
                let most = request.expected_output_tokens.unwrap_or(u32::MAX);
                Cow::Owned(Request {
                    expected_output_tokens: Some(tokens.clamp(1, most.max(1))),
                    ..request.clone()
                })
            }
            None if self.lengths.is_some() => {
                Cow::Owned(Request { expected_output_tokens: None, ..request.clone() })
            }
            None => Cow::Borrowed(request),
        }
    }

    /// Learns from an output that ended by itself.
    pub fn learn_length(&mut self, prompt_tokens: u32, length_class: Option<u64>, output_tokens: u32) {
        if let Some(lengths) = &mut self.lengths {
            let (of_length, of_class) = classes(prompt_tokens, length_class);
            lengths.ended(of_length, output_tokens);
            of_class.iter().for_each(|class| lengths.ended(*class, output_tokens));
        }
    }
}
