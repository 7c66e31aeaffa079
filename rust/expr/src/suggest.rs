//! Suggestions for misspelled names.

/// Returns the known name nearest to `name` by edit distance, if it is near enough to be a likely
/// typo. Ignores case and dashes.
pub fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<String> {
    let lower = name.to_lowercase().replace('-', "_");
    known
        .into_iter()
        .map(|known| (strsim::levenshtein(&lower, &known.to_lowercase()), known))
        .filter(|(distance, known)| *distance <= 1 + known.len().max(name.len()) / 3)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, known)| known.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearest_finds_the_slip_and_nothing_far() {
        let known = ["p_token", "bs", "kv_hit"];
        assert_eq!(nearest("ptoken", known).as_deref(), Some("p_token"));
        assert_eq!(nearest("KV-HIT", known).as_deref(), Some("kv_hit"));
        assert_eq!(nearest("temperature", known), None);
    }
}
