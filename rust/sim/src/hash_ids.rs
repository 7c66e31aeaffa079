//! Hash IDs of JSON lines. Lines of agent traces consist almost only of them, and a JSON parser
//! would make an object of each.

/// The lists of hash IDs of a JSON value, and the value without them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HashIds {
    /// The JSON value, with the number of the list (from 0) in place of each list.
    pub rest: Vec<u8>,
    /// All lists, one behind the other.
    pub ids: Vec<u64>,
    /// The end of each list in `ids`.
    pub ends: Vec<usize>,
}

impl HashIds {
    /// Reads the values of all keys `hash_ids` of a JSON value.
    ///
    /// Returns `None` if one of them is no list of whole numbers from 0 to 2^64 - 1, or if the
    /// value has a backslash: an escaped key may be `hash_ids`, too. JSON that is invalid outside
    /// the lists stays invalid in `rest`.
    pub fn read(json: &[u8]) -> Option<HashIds> {
        let mut found = HashIds::default();
        let (mut at, mut copied) = (0, 0);
        while let Some(length) = json[at..].iter().position(|&byte| byte == b'"') {
            let begin = at + length + 1;
            let end = begin + json[begin..].iter().position(|&byte| byte == b'"' || byte == b'\\')?;
            if json[end] == b'\\' {
                return None;
            }
            at = end + 1;
            let colon = skip_space(json, at);
            if &json[begin..end] != b"hash_ids" || json.get(colon) != Some(&b':') {
                continue;
            }
            let list = skip_space(json, colon + 1);
            at = read_list(json, list, &mut found.ids)?;
            // A digit behind the list would become part of its number.
            if !matches!(json.get(skip_space(json, at)), Some(b',' | b'}')) {
                return None;
            }
            found.rest.extend_from_slice(&json[copied..list]);
            found.rest.extend_from_slice(found.ends.len().to_string().as_bytes());
            found.ends.push(found.ids.len());
            copied = at;
        }
        found.rest.extend_from_slice(&json[copied..]);
        Some(found)
    }
}

/// Returns the first place from `at` on that is not white space.
fn skip_space(json: &[u8], mut at: usize) -> usize {
    while matches!(json.get(at), Some(b' ' | b'\t' | b'\n' | b'\r')) {
        at += 1;
    }
    at
}

/// Appends the list at this place to `ids`. Returns the place behind it.
fn read_list(json: &[u8], at: usize, ids: &mut Vec<u64>) -> Option<usize> {
    if json.get(at) != Some(&b'[') {
        return None;
    }
    let mut at = skip_space(json, at + 1);
    if json.get(at) == Some(&b']') {
        return Some(at + 1);
    }
    loop {
        let begin = at;
        let mut id = 0u64;
        while let Some(digit) = json.get(at).map(|byte| byte.wrapping_sub(b'0')).filter(|&digit| digit < 10) {
            id = id.checked_mul(10)?.checked_add(u64::from(digit))?;
            at += 1;
        }
        if at == begin || (json[begin] == b'0' && at > begin + 1) {
            return None;
        }
        ids.push(id);
        at = skip_space(json, at);
        match json.get(at)? {
            b',' => at = skip_space(json, at + 1),
            b']' => return Some(at + 1),
            _ => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_leave_the_value() {
        let json =
            br#"{"a": [1, {"hash_ids" : [ 3,4 ,18446744073709551615], "b": "hash_ids"}], "hash_ids":[]}"#;
        let found = HashIds::read(json).unwrap();
        let rest = r#"{"a": [1, {"hash_ids" : 0, "b": "hash_ids"}], "hash_ids":1}"#;
        assert_eq!(String::from_utf8(found.rest).unwrap(), rest);
        assert_eq!((found.ids, found.ends), (vec![3, 4, u64::MAX], vec![3, 3]));
        let without = br#"{"hash": [1], "s": "] hash_ids: ["}"#;
        let kept = HashIds { rest: without.to_vec(), ..HashIds::default() };
        assert_eq!(HashIds::read(without), Some(kept));
    }

    #[test]
    fn other_values_are_left_to_a_parser() {
        for list in [
            "3",
            "null",
            "",
            "[",
            "[1",
            "[1,",
            "[1,]",
            "[,1]",
            "[1 2]",
            "[-1]",
            "[01]",
            "[1]5",
            "[1] 5",
            "[1].5",
            "[1.5]",
            "[1e3]",
            "[true]",
            "[[1]]",
            "[18446744073709551616]",
        ] {
            assert_eq!(HashIds::read(format!("{{\"hash_ids\": {list}}}").as_bytes()), None, "{list}");
        }
        for json in [r#"{"hash\u005fids": 0}"#, r#"{"hash_ids": [1], "a": "\""}"#, r#"{"a": "b"#] {
            assert_eq!(HashIds::read(json.as_bytes()), None, "{json}");
        }
    }
}
