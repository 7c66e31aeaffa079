//! Output lengths as a listener: lengths of ended outputs, by class, predict those of new requests.
use super::listener::{Ended, Listener};
use crate::estimate::OutputLength;
use crate::request::Request;

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

/// Learned expectations of output lengths.
pub struct Lengths(pub OutputLength);

impl Lengths {
    /// Returns the request with its expected output length. The request's own maximum is a poor
    /// estimate.
    pub fn estimated<'r>(&self, request: &Request<'r>) -> Request<'r> {
        let (of_length, of_class) = classes(request.prompt_tokens, request.length_class);
        let of_class = of_class.and_then(|class| self.0.expected(class, MIN_OF_CLASS));
        let prior = self.0.prior_tokens();
        // One output is enough for a median, but not for a mean.
        let least = if prior.is_some() { MIN_OF_CLASS } else { 1 };
        let expected = of_class.or_else(|| self.0.expected(of_length, least)).or(prior);
        let most = request.expected_output_tokens.unwrap_or(u32::MAX).max(1);
        Request { expected_output_tokens: expected.map(|tokens| tokens.clamp(1, most)), ..request.clone() }
    }
}

impl Listener for Lengths {
    /// Learns from an output that ended by itself or at its limit.
    fn ended(&mut self, ended: &Ended<'_>) {
        if ended.finished && ended.made > 0 {
            let (of_length, of_class) = classes(ended.ticket.prompt_tokens, ended.ticket.length_class);
            for class in of_class.into_iter().chain([of_length]) {
                match ended.usage.at_limit() {
                    true => self.0.cut(class, ended.made),
                    false => self.0.ended(class, ended.made),
                }
            }
        }
    }
}
