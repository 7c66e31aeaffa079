//! The error type.
use std::fmt;
use std::ops::Range;

/// An error in an expression, with its position.
#[derive(Debug, Clone, PartialEq)]
pub struct ExprError {
    /// Description of the error, with the expected form.
    pub message: String,
    /// The expression, on one line.
    pub text: String,
    /// Byte offset of the start of the invalid part.
    pub start: usize,
    /// Byte offset of the end of the invalid part.
    pub end: usize,
}

impl ExprError {
    /// Creates an error about a part of an expression.
    pub(crate) fn at(text: &str, place: Range<usize>, message: impl Into<String>) -> ExprError {
        ExprError { message: message.into(), text: text.to_string(), start: place.start, end: place.end }
    }
}

impl std::error::Error for ExprError {}

impl fmt::Display for ExprError {
    /// Writes the message, the surrounding text, and carets under the invalid part.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const AROUND: usize = 60;
        let (before, rest) = self.text.split_at(self.start.min(self.text.len()));
        let (place, after) = rest.split_at(self.end.saturating_sub(self.start).min(rest.len()));
        let head: String = match before.char_indices().rev().nth(AROUND) {
            Some((cut, c)) => format!("…{}", &before[cut + c.len_utf8()..]),
            None => before.to_string(),
        };
        let cut = |text: &str| match text.char_indices().nth(AROUND) {
            Some((cut, _)) => format!("{}…", &text[..cut]),
            None => text.to_string(),
        };
        let (place, tail) = (cut(place), cut(after));
        let carets = "^".repeat(place.chars().count().max(1));
        let indent = " ".repeat(head.chars().count());
        write!(f, "{}\n  {head}{place}{tail}\n  {indent}{carets}", self.message)
    }
}
