//! Reading and writing the messages between routers: integers, texts and fixed numbers of bytes.
//!
//! Integers are LEB128, floats have 4 bytes in little-endian order, and texts have their length
//! before them.

/// Why bytes cannot be read.
#[derive(Debug, PartialEq)]
pub struct Malformed(pub String);

fn malformed<T>(problem: impl Into<String>) -> Result<T, Malformed> {
    Err(Malformed(problem.into()))
}

/// Writes an integer.
pub fn write_int(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// Writes bytes with their length.
pub fn write_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    write_int(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

/// Writes a number as a float of 4 bytes.
pub fn write_float(out: &mut Vec<u8>, number: f64) {
    out.extend_from_slice(&(number as f32).to_le_bytes());
}

/// The part of a message that is not read yet.
pub struct Reader<'a>(pub &'a [u8]);

impl<'a> Reader<'a> {
    /// Takes a number of bytes. `what` names them in errors.
    pub fn take(&mut self, bytes: usize, what: &str) -> Result<&'a [u8], Malformed> {
        let Some((taken, rest)) = self.0.split_at_checked(bytes) else {
            return malformed(format!("it ends in {what}"));
        };
        self.0 = rest;
        Ok(taken)
    }

    /// Reads a byte.
    pub fn byte(&mut self, what: &str) -> Result<u8, Malformed> {
        Ok(self.take(1, what)?[0])
    }

    /// Reads 8 bytes.
    pub fn word(&mut self, what: &str) -> Result<u64, Malformed> {
        Ok(u64::from_le_bytes(self.take(8, what)?.try_into().expect("8 bytes")))
    }

    /// Reads an integer below 2^63.
    pub fn int(&mut self, what: &str) -> Result<u64, Malformed> {
        let mut value = 0;
        for shift in (0..63).step_by(7) {
            let byte = self.byte(what)?;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        malformed(format!("{what} is not below 2^63"))
    }

    /// Reads a number of things that is at most `most`.
    pub fn count(&mut self, most: usize, what: &str) -> Result<usize, Malformed> {
        let count = self.int(&format!("the number of {what}"))?;
        match usize::try_from(count) {
            Ok(count) if count <= most => Ok(count),
            _ => malformed(format!("{count} {what}; expected at most {most}")),
        }
    }

    /// Reads a text of at most `most` bytes.
    pub fn text(&mut self, most: usize, what: &str) -> Result<&'a str, Malformed> {
        let length = self.count(most, &format!("bytes of {what}"))?;
        std::str::from_utf8(self.take(length, what)?).or_else(|_| malformed(format!("{what} is not UTF-8")))
    }

    /// Reads a float of 4 bytes.
    pub fn float(&mut self, what: &str) -> Result<f64, Malformed> {
        let bytes = self.take(4, what)?.try_into().expect("4 bytes");
        Ok(f64::from(f32::from_le_bytes(bytes)))
    }

    /// Checks that all bytes were read.
    pub fn end(&self) -> Result<(), Malformed> {
        if self.0.is_empty() { Ok(()) } else { malformed(format!("{} bytes after its end", self.0.len())) }
    }
}
