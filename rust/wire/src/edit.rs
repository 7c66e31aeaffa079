//! Changes of a JSON object's members. All other bytes stay as they are.

use std::borrow::Cow;
use std::ops::Range;

use memchr::memchr;

use crate::shape::string_end;
use crate::tree::Json;

/// One member of an object: its name, and the places of its name with quotes and of its value.
struct Member<'a> {
    name: Cow<'a, str>,
    quoted: Range<usize>,
    value: Range<usize>,
}

/// The members of the object that `json` holds, until the first byte that fits no member.
struct Scan<'a> {
    json: &'a [u8],
    at: usize,
}

impl<'a> Scan<'a> {
    fn new(json: &'a [u8]) -> Self {
        let at = memchr(b'{', json).map_or(json.len(), |at| at + 1);
        Self { json, at }
    }

    fn pass(&mut self, bytes: &[u8]) {
        while self.json.get(self.at).is_some_and(|byte| bytes.contains(byte)) {
            self.at += 1;
        }
    }

    /// Passes one value.
    fn value(&mut self) -> Range<usize> {
        let start = self.at;
        let mut depth = 0_usize;
        while let Some(&byte) = self.json.get(self.at) {
            match byte {
                b'"' => {
                    self.at = string_end(self.json, self.at + 1);
                    if depth == 0 {
                        return start..self.at;
                    }
                    continue;
                }
                b'[' | b'{' => depth += 1,
                b']' | b'}' if depth == 0 => break, // of the object
                b']' | b'}' => {
                    depth -= 1;
                    if depth == 0 {
                        self.at += 1;
                        return start..self.at;
                    }
                }
                b',' | b' ' | b'\t' | b'\n' | b'\r' if depth == 0 => break,
                _ => {}
            }
            self.at += 1;
        }
        start..self.at
    }
}

impl<'a> Iterator for Scan<'a> {
    type Item = Member<'a>;

    fn next(&mut self) -> Option<Member<'a>> {
        self.pass(b", \t\n\r");
        let start = self.at;
        if self.json.get(start) != Some(&b'"') {
            return None;
        }
        let end = string_end(self.json, start + 1);
        let Ok(Json::Text(name)) = Json::read(&self.json[start..end]) else { return None };
        self.at = end;
        self.pass(b": \t\n\r");
        Some(Member { name, quoted: start..end, value: self.value() })
    }
}

/// Returns an object without the members of these names, and with the members `front` (without
/// braces) at its begin. All other bytes stay. `object`: a body that [`crate::ApiRequest::read`]
/// accepts.
pub fn edited(object: &[u8], remove: &[&str], front: &[u8]) -> Vec<u8> {
    let out = Vec::with_capacity(object.len() + front.len() + 1);
    kept(object, front, out, |member| !remove.contains(&member.name.as_ref()))
}

/// Returns an object without the members whose values are longer than `longest` bytes.
pub fn short_members(object: &[u8], longest: usize) -> Vec<u8> {
    kept(object, b"", Vec::new(), |member| member.value.len() <= longest)
}

/// Returns an object whose values longer than `longest` bytes have short stand-ins of their kind. A
/// list keeps the kinds of its first two items.
pub fn outline(object: &[u8], longest: usize) -> Vec<u8> {
    let mut out = vec![b'{'];
    for member in Scan::new(object) {
        if out.len() > 1 {
            out.push(b',');
        }
        out.extend_from_slice(&object[member.quoted]);
        out.push(b':');
        let value = &object[member.value];
        match value.strip_prefix(b"[") {
            _ if value.len() <= longest => out.extend_from_slice(value),
            None => out.extend_from_slice(stand_in(value)),
            Some(json) => {
                let mut items = Scan { json, at: 0 };
                out.push(b'[');
                for number in 0..2 {
                    items.pass(b", \t\n\r");
                    let item = items.value();
                    if item.is_empty() {
                        break;
                    }
                    if number > 0 {
                        out.push(b',');
                    }
                    out.extend_from_slice(stand_in(&json[item]));
                }
                out.push(b']');
            }
        }
    }
    out.push(b'}');
    out
}

fn stand_in(value: &[u8]) -> &'static [u8] {
    match value.first() {
        Some(b'"') => b"\"\"",
        Some(b'[') => b"[]",
        Some(b'{') => b"{}",
        _ => b"0",
    }
}

fn kept(object: &[u8], front: &[u8], mut out: Vec<u8>, keep: impl Fn(&Member<'_>) -> bool) -> Vec<u8> {
    let members = Scan::new(object);
    let mut end = members.at;
    out.extend_from_slice(&object[..end]);
    out.extend_from_slice(front);
    let mut first = front.is_empty();
    for member in members {
        if keep(&member) {
            let gap = &object[end..member.quoted.start];
            if first {
                out.extend(gap.iter().filter(|byte| **byte != b','));
            } else {
                if !gap.contains(&b',') {
                    out.push(b',');
                }
                out.extend_from_slice(gap);
            }
            first = false;
            out.extend_from_slice(&object[member.quoted.start..member.value.end]);
        }
        end = member.value.end;
    }
    out.extend_from_slice(&object[end..]);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn edit(object: &str, remove: &[&str], front: &str) -> String {
        String::from_utf8(edited(object.as_bytes(), remove, front.as_bytes())).unwrap()
    }

    #[test]
    fn members_leave_and_come() {
        let object = r#" { "a" : [1, {"b": "}\""}] , "b":2,"c": -1.50e3 ,"\u0062": {"b":[]} } "#;
        assert_eq!(edit(object, &["b"], ""), r#" { "a" : [1, {"b": "}\""}],"c": -1.50e3 } "#);
        let front = r#""x":"y""#;
        assert_eq!(edit(object, &["a", "c"], front), r#" {"x":"y" , "b":2 ,"\u0062": {"b":[]} } "#);
        assert_eq!(edit(object, &["a", "b", "c"], ""), " { } ");
        assert_eq!(edit(object, &[], ""), object);
        assert_eq!(edit("{}", &["a"], r#""x":1"#), r#"{"x":1}"#);
        assert_eq!(edit("{ }", &[], ""), "{ }");
        assert_eq!(edit(r#"{"a":true}"#, &[], r#""x":1"#), r#"{"x":1,"a":true}"#);
    }

    #[test]
    fn long_values_have_stand_ins() {
        let outlined = |object: &str| String::from_utf8(outline(object.as_bytes(), 4)).unwrap();
        let object =
            r#" { "a" : "xxxxx", "b":[ 1 , "x" ,2,3],"c":{"d":[]},"e": true ,"f":123456,"g":[[1, 2]] } "#;
        assert_eq!(outlined(object), r#"{"a":"","b":[0,""],"c":{},"e":true,"f":0,"g":[[]]}"#);
        assert_eq!(outlined(r#"{"a":[      ],"b":["x,y"],"c":["",""]}"#), r#"{"a":[],"b":[""],"c":["",""]}"#);
        assert_eq!(outlined("{}"), "{}");
    }

    #[test]
    fn long_members_are_left_out() {
        let object = format!(r#"{{"a":"{}","b":[1,2],"c":null}}"#, "x".repeat(50));
        assert_eq!(short_members(object.as_bytes(), 10), br#"{"b":[1,2],"c":null}"#);
    }
}
