//! In-place MessagePack reader for the few shapes that engines' events use. It does no I/O and does
//! not recurse. A length field never reserves room for more elements than bytes remain.
use rmp::Marker;

/// Reason why bytes cannot be decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The message ends within a value.
    #[error("the message ends within a value")]
    Truncated,
    /// The value is of another kind than expected. The text names the expected kind.
    #[error("{0} expected, another kind of value found")]
    Unexpected(&'static str),
    /// The message takes more work than this limit, in steps.
    #[error(
        "a batch takes more than {0} steps: an event, a block, 64 tokens, 16 extra keys and 256 \
         bytes are a step each"
    )]
    TooMuch(u64),
}

/// Result of decoding.
pub type Decoded<T> = Result<T, DecodeError>;

/// Returns a string of its bytes.
pub fn utf8(bytes: &[u8]) -> Decoded<&str> {
    std::str::from_utf8(bytes).map_err(|_| DecodeError::Unexpected("a text"))
}

/// Reads values from the front of a message.
#[derive(Clone, Copy, Debug)]
pub struct Reader<'a> {
    rest: &'a [u8],
}

/// Kind of a value, before its content is read.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Head {
    Nil,
    Bool,
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    /// Length in bytes.
    Text(usize),
    Bytes(usize),
    /// Number of values (array) or pairs (map).
    Array(usize),
    Map(usize),
}

impl<'a> Reader<'a> {
    /// Creates a reader of the whole message.
    pub fn new(message: &'a [u8]) -> Reader<'a> {
        Reader { rest: message }
    }

    /// Returns the unread part of the message.
    pub fn rest(&self) -> &'a [u8] {
        self.rest
    }

    fn take(&mut self, bytes: usize) -> Decoded<&'a [u8]> {
        let (taken, rest) = self.rest.split_at_checked(bytes).ok_or(DecodeError::Truncated)?;
        self.rest = rest;
        Ok(taken)
    }

    fn number<const N: usize>(&mut self) -> Decoded<[u8; N]> {
        let (taken, rest) = self.rest.split_first_chunk::<N>().ok_or(DecodeError::Truncated)?;
        self.rest = rest;
        Ok(*taken)
    }

    fn length<const N: usize>(&mut self) -> Decoded<usize> {
        Ok(self.number::<N>()?.iter().fold(0, |n, byte| n << 8 | usize::from(*byte)))
    }

    #[inline(always)]
    fn head(&mut self) -> Decoded<Head> {
        let [marker] = self.number::<1>()?;
        Ok(match Marker::from_u8(marker) {
            Marker::FixPos(n) => Head::Unsigned(n.into()),
            Marker::U8 => Head::Unsigned(u8::from_be_bytes(self.number()?).into()),
            Marker::U16 => Head::Unsigned(u16::from_be_bytes(self.number()?).into()),
            Marker::U32 => Head::Unsigned(u32::from_be_bytes(self.number()?).into()),
            Marker::U64 => Head::Unsigned(u64::from_be_bytes(self.number()?)),
            Marker::FixNeg(n) => Head::Signed(n.into()),
            Marker::I8 => Head::Signed(i8::from_be_bytes(self.number()?).into()),
            Marker::I16 => Head::Signed(i16::from_be_bytes(self.number()?).into()),
            Marker::I32 => Head::Signed(i32::from_be_bytes(self.number()?).into()),
            Marker::I64 => Head::Signed(i64::from_be_bytes(self.number()?)),
            Marker::Null => Head::Nil,
            Marker::True | Marker::False => Head::Bool,
            Marker::F32 => Head::Float(f32::from_be_bytes(self.number()?).into()),
            Marker::F64 => Head::Float(f64::from_be_bytes(self.number()?)),
            Marker::FixStr(n) => Head::Text(n.into()),
            Marker::Str8 => Head::Text(self.length::<1>()?),
            Marker::Str16 => Head::Text(self.length::<2>()?),
            Marker::Str32 => Head::Text(self.length::<4>()?),
            Marker::Bin8 => Head::Bytes(self.length::<1>()?),
            Marker::Bin16 => Head::Bytes(self.length::<2>()?),
            Marker::Bin32 => Head::Bytes(self.length::<4>()?),
            Marker::FixArray(n) => Head::Array(n.into()),
            Marker::Array16 => Head::Array(self.length::<2>()?),
            Marker::Array32 => Head::Array(self.length::<4>()?),
            Marker::FixMap(n) => Head::Map(n.into()),
            Marker::Map16 => Head::Map(self.length::<2>()?),
            Marker::Map32 => Head::Map(self.length::<4>()?),
            // An extension is a type byte followed by its data.
            Marker::FixExt1 => Head::Bytes(2),
            Marker::FixExt2 => Head::Bytes(3),
            Marker::FixExt4 => Head::Bytes(5),
            Marker::FixExt8 => Head::Bytes(9),
            Marker::FixExt16 => Head::Bytes(17),
            Marker::Ext8 => Head::Bytes(self.length::<1>()? + 1),
            Marker::Ext16 => Head::Bytes(self.length::<2>()? + 1),
            Marker::Ext32 => Head::Bytes(self.length::<4>()? + 1),
            Marker::Reserved => return Err(DecodeError::Unexpected("a value")),
        })
    }

    /// Reads the head of the next value if `of` accepts it; otherwise consumes nothing.
    fn expect<T>(&mut self, what: &'static str, of: impl FnOnce(Head) -> Option<T>) -> Decoded<T> {
        let before = *self;
        let value = self.head().and_then(|head| of(head).ok_or(DecodeError::Unexpected(what)));
        if value.is_err() {
            *self = before;
        }
        value
    }

    /// Skips a value and everything in it.
    pub fn skip(&mut self) -> Decoded<()> {
        let mut left = 1u64;
        while left > 0 {
            left -= 1;
            match self.head()? {
                Head::Text(n) | Head::Bytes(n) => drop(self.take(n)?),
                Head::Array(n) => left += n as u64,
                Head::Map(n) => left += 2 * n as u64,
                _ => {}
            }
        }
        Ok(())
    }

    /// Returns the encoded bytes of the next value and skips it.
    pub fn raw(&mut self) -> Decoded<&'a [u8]> {
        let before = self.rest;
        self.skip()?;
        Ok(&before[..before.len() - self.rest.len()])
    }

    /// Returns whether the next value is nil, and consumes it if so.
    pub fn nil(&mut self) -> bool {
        let is = self.rest.first() == Some(&Marker::Null.to_u8());
        self.rest = &self.rest[usize::from(is)..];
        is
    }

    /// Reads the head of an array and returns its length; the values follow.
    pub fn array(&mut self) -> Decoded<usize> {
        self.expect("an array", |head| if let Head::Array(n) = head { Some(n) } else { None })
    }

    /// Reads the head of a map and returns its number of pairs; keys and values follow.
    pub fn map(&mut self) -> Decoded<usize> {
        self.expect("a map", |head| if let Head::Map(n) = head { Some(n) } else { None })
    }

    /// Reads a string's bytes, which may not be UTF-8.
    #[inline]
    pub fn text_bytes(&mut self) -> Decoded<&'a [u8]> {
        // Names of fields and most values are short texts.
        if let [marker @ 0xa0..0xc0, rest @ ..] = self.rest
            && let Some((taken, rest)) = rest.split_at_checked(usize::from(marker & 0x1f))
        {
            self.rest = rest;
            return Ok(taken);
        }
        let n = self.expect("a text", |head| if let Head::Text(n) = head { Some(n) } else { None })?;
        self.take(n)
    }

    /// Reads a string.
    pub fn text(&mut self) -> Decoded<&'a str> {
        let before = *self;
        utf8(self.text_bytes()?).inspect_err(|_| *self = before)
    }

    /// Reads a string or nil.
    pub fn optional_text(&mut self) -> Decoded<Option<&'a str>> {
        if self.nil() { Ok(None) } else { self.text().map(Some) }
    }

    /// Reads an integer of at least 0.
    pub fn unsigned(&mut self) -> Decoded<u64> {
        self.expect("a whole number", |head| match head {
            Head::Unsigned(n) => Some(n),
            Head::Signed(n) => u64::try_from(n).ok(),
            _ => None,
        })
    }

    /// Reads an integer of either sign.
    pub fn signed(&mut self) -> Decoded<i64> {
        self.expect("a whole number", |head| match head {
            Head::Unsigned(n) => i64::try_from(n).ok(),
            Head::Signed(n) => Some(n),
            _ => None,
        })
    }

    /// Reads a number.
    pub fn float(&mut self) -> Decoded<f64> {
        self.expect("a number", |head| match head {
            Head::Unsigned(n) => Some(n as f64),
            Head::Signed(n) => Some(n as f64),
            Head::Float(n) => Some(n),
            _ => None,
        })
    }

    /// Reads an engine's block hash: an integer of either sign, or a digest. Only the last 8 bytes
    /// of a digest count; vLLM's integer hashes are these 8 bytes.
    #[inline]
    pub fn hash(&mut self) -> Decoded<u64> {
        if let [0xcf, rest @ ..] = self.rest
            && let Some((number, rest)) = rest.split_first_chunk()
        {
            self.rest = rest;
            return Ok(u64::from_be_bytes(*number));
        }
        let before = *self;
        match self.head()? {
            Head::Unsigned(n) => Ok(n),
            Head::Signed(n) => Ok(n as u64),
            Head::Bytes(n) if n > 0 => {
                let digest = self.take(n)?;
                let last = &digest[n.saturating_sub(8)..];
                Ok(last.iter().fold(0, |hash, byte| hash << 8 | u64::from(*byte)))
            }
            _ => {
                *self = before;
                Err(DecodeError::Unexpected("a block hash"))
            }
        }
    }

    /// Reads an array of block hashes and appends them to `out`.
    pub fn hashes(&mut self, out: &mut Vec<u64>) -> Decoded<()> {
        let n = self.array()?;
        out.reserve(n.min(self.rest.len()));
        for _ in 0..n {
            out.push(self.hash()?);
        }
        Ok(())
    }

    /// Reads an array of token ids and appends them to `out`.
    pub fn tokens(&mut self, out: &mut Vec<u32>) -> Decoded<()> {
        let n = self.array()?;
        out.reserve(n.min(self.rest.len()));
        // A copy of the reader stays in registers.
        let mut ahead = *self;
        for _ in 0..n {
            // The common sizes come first: most of an event is token ids.
            let token = match *ahead.rest {
                [0xcd, high, low, ref rest @ ..] => {
                    ahead.rest = rest;
                    u32::from(high) << 8 | u32::from(low)
                }
                [byte @ ..0x80, ref rest @ ..] => {
                    ahead.rest = rest;
                    u32::from(byte)
                }
                [0xce, a, b, c, d, ref rest @ ..] => {
                    ahead.rest = rest;
                    u32::from_be_bytes([a, b, c, d])
                }
                _ => {
                    self.rest = ahead.rest;
                    let token = self.unsigned()?;
                    ahead.rest = self.rest;
                    u32::try_from(token).map_err(|_| DecodeError::Unexpected("a token id below 2^32"))?
                }
            };
            out.push(token);
        }
        self.rest = ahead.rest;
        Ok(())
    }
}
