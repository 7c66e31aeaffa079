//! Text to tree: lexer and precedence climbing.
//!
//! Precedence, from loose to tight: `|`, `&`, `~`, comparisons, `+ -`, `* /`, unary `-`, `**`
//! (right-associative). Comparisons bind tighter than `& | ~`, as they do for `and`, `or`, `not` in
//! Python. Python's own `&` binds tighter than `<=`. But every text that is well-typed with
//! Python's precedence means the same here, and the operators of the Python package add brackets.
use crate::error::ExprError;
use std::ops::Range;

/// Maximum length of an expression, in bytes.
pub const MAX_LENGTH: usize = 16 * 1024;
/// Maximum nesting depth of brackets, signs and powers.
pub const MAX_DEPTH: usize = 256;

/// Operators with one operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Prefix {
    Negative,
    Not,
}

/// Operators with two operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Infix {
    Or,
    And,
    Less,
    LessEqual,
    Greater,
    GreaterEqual,
    Equal,
    NotEqual,
    Add,
    Subtract,
    Multiply,
    Divide,
    Power,
}

impl Infix {
    /// Returns the binding power.
    fn power(self) -> u8 {
        match self {
            Infix::Or => 1,
            Infix::And => 2,
            Infix::Add | Infix::Subtract => 5,
            Infix::Multiply | Infix::Divide => 6,
            Infix::Power => 8,
            _ => COMPARISON,
        }
    }
}

const COMPARISON: u8 = 4;
const NEGATIVE: u8 = 7;

/// Functions by their numpy names, and the reductions over instances.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Function {
    Where,
    Minimum,
    Maximum,
    Clip,
    Log,
    Exp,
    Sqrt,
    Abs,
    Min,
    Max,
    Mean,
    Std,
    Norm,
    GroupMin,
    GroupMax,
    GroupSum,
    GroupMean,
}

/// Function names, functions and their parameters.
pub(super) const FUNCTIONS: &[(&str, Function, &[&str])] = &[
    ("where", Function::Where, &["condition", "then", "otherwise"]),
    ("minimum", Function::Minimum, &["a", "b"]),
    ("maximum", Function::Maximum, &["a", "b"]),
    ("clip", Function::Clip, &["x", "low", "high"]),
    ("log", Function::Log, &["x"]),
    ("exp", Function::Exp, &["x"]),
    ("sqrt", Function::Sqrt, &["x"]),
    ("abs", Function::Abs, &["x"]),
    ("min", Function::Min, &["x"]),
    ("max", Function::Max, &["x"]),
    ("mean", Function::Mean, &["x"]),
    ("std", Function::Std, &["x"]),
    ("norm", Function::Norm, &["x"]),
    ("group_min", Function::GroupMin, &["x"]),
    ("group_max", Function::GroupMax, &["x"]),
    ("group_sum", Function::GroupSum, &["x"]),
    ("group_mean", Function::GroupMean, &["x"]),
];

#[derive(Clone, Debug)]
pub(super) enum Kind {
    Number(f64),
    /// Text between quotes, with its position.
    Text(Range<usize>),
    /// Indicator or named constant, with the position of its name.
    Name(Range<usize>),
    Prefix(Prefix, usize),
    Infix(Infix, usize, usize),
    Call(Function, Vec<usize>),
}

#[derive(Clone, Debug)]
pub(super) struct Node {
    pub kind: Kind,
    /// Byte range in the text, including brackets.
    pub span: Range<usize>,
}

/// Parses `text`. Operands come before the nodes that use them. The last node is the root.
pub(super) fn parse(text: &str) -> Result<Vec<Node>, ExprError> {
    if text.len() > MAX_LENGTH {
        let message = format!("the expression has {} bytes; at most {MAX_LENGTH} are read", text.len());
        return Err(ExprError::at(text, 0..0, message));
    }
    let tokens = lex(text)?;
    let mut parser = Parser { text, tokens, at: 0, depth: 0, nodes: Vec::new() };
    parser.expression(0)?;
    match parser.peek() {
        Token::End => Ok(parser.nodes),
        Token::Close => Err(parser.unexpected("this bracket was never opened")),
        Token::Comma => Err(parser.unexpected("a comma only stands between the arguments of a function")),
        _ => Err(parser.unexpected("an operator was expected before this")),
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Token {
    Number(f64),
    Text,
    Name,
    Infix(Infix),
    Not,
    Open,
    Close,
    Comma,
    End,
}

fn lex(text: &str) -> Result<Vec<(Token, Range<usize>)>, ExprError> {
    const SYMBOLS: &[(&str, Token)] = &[
        ("**", Token::Infix(Infix::Power)),
        ("<=", Token::Infix(Infix::LessEqual)),
        (">=", Token::Infix(Infix::GreaterEqual)),
        ("==", Token::Infix(Infix::Equal)),
        ("!=", Token::Infix(Infix::NotEqual)),
        ("<", Token::Infix(Infix::Less)),
        (">", Token::Infix(Infix::Greater)),
        ("+", Token::Infix(Infix::Add)),
        ("-", Token::Infix(Infix::Subtract)),
        ("*", Token::Infix(Infix::Multiply)),
        ("/", Token::Infix(Infix::Divide)),
        ("&", Token::Infix(Infix::And)),
        ("|", Token::Infix(Infix::Or)),
        ("~", Token::Not),
        ("(", Token::Open),
        (")", Token::Close),
        (",", Token::Comma),
    ];
    /// Syntax of other languages, and the hint for each.
    const FOREIGN: &[(&str, &str)] = &[
        ("//", "there is no whole-number division; write `/`"),
        ("&&", "write `&`"),
        ("||", "write `|`"),
        ("^", "write `**` for a power"),
        ("=", "write `==` to compare"),
        ("!", "write `~` for not"),
        ("?", "write `where(condition, then, otherwise)`"),
    ];
    let bytes = text.as_bytes();
    let run = |from: usize, of: fn(u8) -> bool| from + bytes[from..].iter().take_while(|b| of(**b)).count();
    let digits = |from| run(from, |b| b.is_ascii_digit());
    let (mut tokens, mut at) = (Vec::new(), 0);
    while at < bytes.len() {
        let start = at;
        let rest = &text[start..];
        let digit_after_dot = bytes[start] == b'.' && bytes.get(start + 1).is_some_and(u8::is_ascii_digit);
        if bytes[start].is_ascii_whitespace() {
            at += 1;
            continue;
        }
        let token = if bytes[start].is_ascii_digit() || digit_after_dot {
            at = digits(start);
            if bytes.get(at) == Some(&b'.') {
                at = digits(at + 1);
            }
            if matches!(bytes.get(at), Some(b'e' | b'E')) {
                let sign = usize::from(matches!(bytes.get(at + 1), Some(b'+' | b'-')));
                at = digits(at + 1 + sign);
            }
            let end = run(at, |b| b.is_ascii_alphanumeric() || b == b'_' || b == b'.');
            let number: Option<f64> = text[start..end].parse().ok();
            at = end;
            match number {
                Some(number) if number.is_finite() => Token::Number(number),
                Some(_) => return Err(ExprError::at(text, start..end, "this number is too large")),
                None => return Err(ExprError::at(text, start..end, "this is not a number")),
            }
        } else if matches!(bytes[start], b'"' | b'\'') {
            let Some(length) = rest[1..].find(char::from(bytes[start])) else {
                return Err(ExprError::at(text, start..text.len(), "this text is never closed"));
            };
            at = start + length + 2;
            Token::Text
        } else if bytes[start].is_ascii_alphabetic() || bytes[start] == b'_' {
            at = run(start, |b| b.is_ascii_alphanumeric() || b == b'_');
            Token::Name
        } else {
            let foreign = FOREIGN.iter().find(|(s, _)| rest.starts_with(s));
            let symbol = SYMBOLS.iter().find(|(s, _)| rest.starts_with(s));
            match (foreign, symbol) {
                (Some((wrong, advice)), symbol) if symbol.is_none_or(|(s, _)| s.len() < wrong.len()) => {
                    return Err(ExprError::at(text, start..start + wrong.len(), *advice));
                }
                (_, Some((symbol, token))) => {
                    at += symbol.len();
                    *token
                }
                _ => {
                    let c = rest.chars().next().expect("not at the end");
                    let message = format!("unexpected character {c:?}");
                    return Err(ExprError::at(text, start..start + c.len_utf8(), message));
                }
            }
        };
        tokens.push((token, start..at));
    }
    let end = text.trim_end().len();
    tokens.push((Token::End, end..end));
    Ok(tokens)
}

struct Parser<'a> {
    text: &'a str,
    tokens: Vec<(Token, Range<usize>)>,
    at: usize,
    depth: usize,
    nodes: Vec<Node>,
}

impl Parser<'_> {
    fn peek(&self) -> Token {
        self.tokens[self.at].0
    }

    fn span(&self) -> Range<usize> {
        self.tokens[self.at].1.clone()
    }

    /// Returns an error at the next token.
    fn unexpected(&self, message: &str) -> ExprError {
        let message = match &self.text[self.span()] {
            "and" => "write `&` for `and`",
            "or" => "write `|` for `or`",
            _ => message,
        };
        ExprError::at(self.text, self.span(), message)
    }

    fn push(&mut self, kind: Kind, span: Range<usize>) -> usize {
        self.nodes.push(Node { kind, span });
        self.nodes.len() - 1
    }

    /// Parses an expression whose operators all bind at least as tightly as `least`.
    fn expression(&mut self, least: u8) -> Result<usize, ExprError> {
        if self.depth == MAX_DEPTH {
            return Err(self.unexpected(&format!("nested deeper than {MAX_DEPTH}")));
        }
        self.depth += 1;
        let mut left = self.operand()?;
        while let Token::Infix(infix) = self.peek()
            && infix.power() >= least
        {
            self.at += 1;
            let power = infix.power();
            let right = self.expression(if infix == Infix::Power { power } else { power + 1 })?;
            let span = self.nodes[left].span.start..self.nodes[right].span.end;
            left = self.push(Kind::Infix(infix, left, right), span);
            if power == COMPARISON && matches!(self.peek(), Token::Infix(next) if next.power() == COMPARISON)
            {
                return Err(self.unexpected("comparisons do not chain; write `(a < b) & (b < c)`"));
            }
        }
        self.depth -= 1;
        Ok(left)
    }

    fn operand(&mut self) -> Result<usize, ExprError> {
        let (token, span) = self.tokens[self.at].clone();
        self.at += 1;
        match token {
            Token::Number(number) => Ok(self.push(Kind::Number(number), span)),
            Token::Text => Ok(self.push(Kind::Text(span.start + 1..span.end - 1), span)),
            Token::Name => match &self.text[span.clone()] {
                "not" => Err(ExprError::at(self.text, span, "write `~` for `not`")),
                _ if self.peek() == Token::Open => self.call(span),
                _ => Ok(self.push(Kind::Name(span.clone()), span)),
            },
            Token::Infix(Infix::Subtract) | Token::Not => {
                let (prefix, least) = if token == Token::Not {
                    (Prefix::Not, COMPARISON)
                } else {
                    (Prefix::Negative, NEGATIVE)
                };
                let operand = self.expression(least)?;
                let end = self.nodes[operand].span.end;
                Ok(self.push(Kind::Prefix(prefix, operand), span.start..end))
            }
            Token::Open => {
                let inner = self.expression(0)?;
                let end = self.close(span.clone())?;
                self.nodes[inner].span = span.start..end;
                Ok(inner)
            }
            Token::End if self.at == 1 => Err(ExprError::at(self.text, span, "the expression is empty")),
            Token::End => {
                Err(ExprError::at(self.text, span, "the expression ends where a value was expected"))
            }
            Token::Infix(_) | Token::Close | Token::Comma => {
                Err(ExprError::at(self.text, span, "a value was expected here"))
            }
        }
    }

    /// Consumes the closing bracket and returns its end.
    fn close(&mut self, open: Range<usize>) -> Result<usize, ExprError> {
        match self.peek() {
            Token::Close => {
                self.at += 1;
                Ok(self.tokens[self.at - 1].1.end)
            }
            Token::End => Err(ExprError::at(self.text, open, "this bracket is never closed")),
            _ => Err(self.unexpected("an operator or a closing bracket was expected here")),
        }
    }

    fn call(&mut self, name: Range<usize>) -> Result<usize, ExprError> {
        let text = &self.text[name.clone()];
        let Some((_, function, parameters)) = FUNCTIONS.iter().find(|(n, ..)| n.eq_ignore_ascii_case(text))
        else {
            let nearest = crate::nearest(text, FUNCTIONS.iter().map(|f| f.0));
            let hint = nearest.map_or(String::new(), |n| format!("; did you mean `{n}`?"));
            return Err(ExprError::at(self.text, name, format!("unknown function `{text}`{hint}")));
        };
        let open = self.span();
        self.at += 1;
        let mut arguments = Vec::new();
        if self.peek() != Token::Close {
            arguments.push(self.expression(0)?);
            while self.peek() == Token::Comma {
                self.at += 1;
                arguments.push(self.expression(0)?);
            }
        }
        let span = name.start..self.close(open)?;
        if arguments.len() != parameters.len() {
            let hint = match function {
                Function::Min if arguments.len() == 2 => "; `minimum(a, b)` is the smaller of two",
                Function::Max if arguments.len() == 2 => "; `maximum(a, b)` is the larger of two",
                _ => "",
            };
            let (given, call) = (arguments.len(), parameters.join(", "));
            let message =
                format!("`{text}({call})` takes {}, not {given}{hint}", arguments_of(parameters.len()));
            return Err(ExprError::at(self.text, span, message));
        }
        Ok(self.push(Kind::Call(*function, arguments), span))
    }
}

fn arguments_of(count: usize) -> String {
    if count == 1 { "1 argument".into() } else { format!("{count} arguments") }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the tree as text with all brackets.
    fn show(text: &str) -> String {
        let nodes = parse(text).unwrap();
        let mut shown: Vec<String> = Vec::new();
        for node in &nodes {
            let name = format!("{:?}", node.kind);
            shown.push(match &node.kind {
                Kind::Number(n) => n.to_string(),
                Kind::Name(name) | Kind::Text(name) => text[name.clone()].to_string(),
                Kind::Prefix(_, a) => format!("{}({})", &name[7..10], shown[*a]),
                Kind::Infix(op, a, b) => format!("({} {op:?} {})", shown[*a], shown[*b]),
                Kind::Call(f, arguments) => {
                    let arguments: Vec<_> = arguments.iter().map(|a| shown[*a].clone()).collect();
                    format!("{f:?}({})", arguments.join(", "))
                }
            });
        }
        shown.pop().unwrap()
    }

    #[test]
    fn precedence_is_pythons_with_and_or_not_for_the_signs() {
        assert_eq!(show("a + b * c - d"), "((a Add (b Multiply c)) Subtract d)");
        assert_eq!(show("-a ** -b ** 2"), "Neg((a Power Neg((b Power 2))))");
        assert_eq!(show("a <= 8 & b > 1 | c == 0"), "(((a LessEqual 8) And (b Greater 1)) Or (c Equal 0))");
        assert_eq!(show("~a < b & ~(c)"), "(Not((a Less b)) And Not(c))");
        assert_eq!(
            show("clip(a, -1e-3, .5) / WHERE(a<b, 1., 2E3)"),
            "(Clip(a, Neg(0.001), 0.5) Divide Where((a Less b), 1, 2000))"
        );
    }

    #[test]
    fn errors_name_the_place() {
        for (text, message, place) in [
            ("", "empty", ""),
            ("  ", "empty", ""),
            ("bs +", "ends where a value", ""),
            ("bs + * 2", "a value was expected", "*"),
            ("(bs + 1", "never closed", "("),
            ("log(bs", "never closed", "("),
            ("bs + 1)", "never opened", ")"),
            ("bs 1", "operator was expected", "1"),
            ("(bs 1)", "operator or a closing bracket", "1"),
            ("bs, 1", "comma", ","),
            ("1 < bs < 3", "do not chain", "<"),
            ("bs == q_bs != 3", "do not chain", "!="),
            ("bs = 3", "`==`", "="),
            ("bs && 1", "`&`", "&&"),
            ("bs ^ 2", "`**`", "^"),
            ("bs // 2", "whole-number", "//"),
            ("bs and 1", "write `&`", "and"),
            ("not bs", "write `~`", "not"),
            ("bs × 2", "unexpected character '×'", "×"),
            ("1e999", "too large", "1e999"),
            ("1.2.3", "not a number", "1.2.3"),
            ("8x", "not a number", "8x"),
            ("lgo(bs)", "did you mean `log`", "lgo"),
            ("min(bs, 2)", "`minimum(a, b)`", "min(bs, 2)"),
            ("clip(bs)", "takes 3 arguments, not 1", "clip(bs)"),
            ("log()", "takes 1 argument, not 0", "log()"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.message.contains(message), "{text}: {error}");
            assert_eq!(&error.text[error.start..error.end], place, "{text}: {error}");
        }
    }

    #[test]
    fn depth_and_length_are_bounded() {
        let nested = |n: usize| format!("{}bs{}", "(".repeat(n), ")".repeat(n));
        assert!(parse(&nested(MAX_DEPTH - 1)).is_ok());
        assert!(parse(&nested(MAX_DEPTH)).unwrap_err().message.contains("nested deeper than 256"));
        assert!(parse(&format!("{}bs", "-".repeat(8_000))).unwrap_err().message.contains("nested"));
        assert!(parse(&format!("bs{}", " ** bs".repeat(2_000))).unwrap_err().message.contains("nested"));
        assert!(parse(&nested(100_000)).unwrap_err().message.contains("at most 16384"));
        assert!(parse(&format!("bs{}", "+1".repeat(8_000))).is_ok());
    }
}
