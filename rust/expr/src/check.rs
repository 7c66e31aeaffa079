//! Tree to graph: resolves names, checks types, folds constants, shares equal subexpressions.
//!
//! The checker rejects all errors that are known before the first request, with their position.
//! Examples: unknown names, wrong types, division by a constant zero, and reductions over a value
//! that is the same for all instances. It also rejects logarithms of constants that are not
//! positive, and constants that are not finite.
use super::parse::{FUNCTIONS, Function, Infix, Kind, Node, Prefix};
use super::{Column, Names, Type, nearest, text_number};
use crate::error::ExprError;
use std::collections::HashMap;
use std::ops::Range;
use xxhash_rust::xxh3::xxh3_64;

/// Function of one number. Truth values are 1 and 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Unary {
    Negative,
    Not,
    Abs,
    Exp,
    Log,
    Sqrt,
    Square,
}

/// Function of two numbers. `Norm` is `x / max`, and 0 if `x` is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Binary {
    Add,
    Subtract,
    Multiply,
    Divide,
    Power,
    Less,
    LessEqual,
    Greater,
    GreaterEqual,
    Equal,
    NotEqual,
    And,
    Or,
    Minimum,
    Maximum,
    Norm,
}

/// Reduction over the eligible instances.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Reduction {
    Min,
    Max,
    Mean,
}

/// Reduction over the instances of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Grouping {
    Min,
    Max,
    Sum,
    Mean,
}

impl Unary {
    #[inline(always)]
    pub(crate) fn apply(self, x: f64) -> f64 {
        match self {
            Unary::Negative => -x,
            Unary::Not => 1.0 - x,
            Unary::Abs => x.abs(),
            Unary::Exp => x.exp(),
            Unary::Log => x.ln(),
            Unary::Sqrt => x.sqrt(),
            Unary::Square => x * x,
        }
    }
}

impl Binary {
    /// Applies the function with numpy's semantics: `minimum` and `maximum` propagate NaN,
    /// comparisons with NaN are false (`!=` is true).
    #[inline(always)]
    pub(crate) fn apply(self, x: f64, y: f64) -> f64 {
        let truth = |b: bool| if b { 1.0 } else { 0.0 };
        match self {
            Binary::Add => x + y,
            Binary::Subtract => x - y,
            Binary::Multiply | Binary::And => x * y,
            Binary::Divide => x / y,
            // Matches `x ** 2` with a literal 2, which is compiled to a square.
            Binary::Power => {
                if y == 2.0 {
                    x * x
                } else {
                    x.powf(y)
                }
            }
            Binary::Less => truth(x < y),
            Binary::LessEqual => truth(x <= y),
            Binary::Greater => truth(x > y),
            Binary::GreaterEqual => truth(x >= y),
            Binary::Equal => truth(x == y),
            Binary::NotEqual => truth(x != y),
            Binary::Or => {
                if x > y {
                    x
                } else {
                    y
                }
            }
            Binary::Minimum => {
                if (x < y) | x.is_nan() {
                    x
                } else {
                    y
                }
            }
            Binary::Maximum => {
                if (x > y) | x.is_nan() {
                    x
                } else {
                    y
                }
            }
            Binary::Norm => {
                if x == 0.0 {
                    0.0
                } else {
                    x / y
                }
            }
        }
    }
}

/// One value of the graph. Operands are indices of earlier values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Op {
    /// The bits of an `f64`.
    Constant(u64),
    Column(Column),
    Unary(Unary, usize),
    Binary(Binary, usize, usize),
    /// Operands: condition, then, otherwise.
    Where(usize, usize, usize),
    Reduce(Reduction, usize),
    /// One value per instance: the value of its group.
    Group(Grouping, usize),
}

impl Op {
    /// Returns the operands of the value.
    pub(crate) fn operands(self) -> impl Iterator<Item = usize> {
        let operands = match self {
            Op::Constant(_) | Op::Column(_) => [None; 3],
            Op::Unary(_, a) | Op::Reduce(_, a) | Op::Group(_, a) => [Some(a), None, None],
            Op::Binary(_, a, b) => [Some(a), Some(b), None],
            Op::Where(a, b, c) => [Some(a), Some(b), Some(c)],
        };
        operands.into_iter().flatten()
    }
}

/// A checked expression. Operands come before the values that use them.
#[derive(Clone, Debug, Default)]
pub(super) struct Graph {
    pub ops: Vec<Op>,
    /// Whether each value differs between instances.
    pub varies: Vec<bool>,
    pub root: usize,
    known: HashMap<Op, usize>,
}

impl Graph {
    pub(crate) fn constant(&self, id: usize) -> Option<f64> {
        match self.ops[id] {
            Op::Constant(bits) => Some(f64::from_bits(bits)),
            _ => None,
        }
    }

    /// Returns the index of a value equal to `op`, adding it if there is none.
    fn push(&mut self, op: Op) -> usize {
        if let Some(id) = self.known.get(&op) {
            return *id;
        }
        let varies = match op {
            Op::Column(column) => column.varies(),
            Op::Reduce(..) => false,
            _ => op.operands().any(|id| self.varies[id]),
        };
        self.ops.push(op);
        self.varies.push(varies);
        self.known.insert(op, self.ops.len() - 1);
        self.ops.len() - 1
    }

    /// Adds `op` as [`Graph::push`] does, and evaluates it at once if all operands are constants.
    fn fold(&mut self, op: Op) -> usize {
        if let Op::Binary(Binary::Divide, a, b) = op
            && let Some(factor) = self.constant(b).and_then(exact_reciprocal)
        {
            let factor = self.push(Op::Constant(factor.to_bits()));
            return self.fold(Op::Binary(Binary::Multiply, a, factor));
        }
        let value = match op {
            Op::Unary(unary, a) => self.constant(a).map(|a| unary.apply(a)),
            Op::Binary(binary, a, b) => {
                self.constant(a).zip(self.constant(b)).map(|(a, b)| binary.apply(a, b))
            }
            Op::Where(condition, then, otherwise) => {
                if let Some(condition) = self.constant(condition) {
                    return if condition != 0.0 { then } else { otherwise };
                }
                None
            }
            _ => None,
        };
        self.push(value.map_or(op, |value| Op::Constant(value.to_bits())))
    }
}

/// Returns `1 / x` for a power of two. Multiplying by it gives the same bits as dividing by `x`, in
/// a fraction of the time.
fn exact_reciprocal(x: f64) -> Option<f64> {
    let mantissa = x.to_bits() & ((1 << (f64::MANTISSA_DIGITS - 1)) - 1);
    (x.is_normal() && mantissa == 0).then_some(1.0 / x).filter(|reciprocal| reciprocal.is_normal())
}

/// Checks the tree of `text` and returns its type. The type must be `expect`, if given.
pub(super) fn check(
    text: &str,
    nodes: &[Node],
    expect: Option<Type>,
    names: &dyn Names,
    knobs: &[(&str, f64)],
) -> Result<(Graph, Type), ExprError> {
    let (graph, typed) = (Graph::default(), Vec::with_capacity(nodes.len()));
    let mut checker = Checker { text, nodes, names, knobs, graph, typed };
    for node in nodes {
        let typed = checker.node(node)?;
        if checker.graph.constant(typed.0).is_some_and(|c| !c.is_finite()) {
            return Err(checker.error(&node.span, "this constant is not a finite number"));
        }
        checker.typed.push(typed);
    }
    let root = nodes.len() - 1;
    let (value, result) = checker.typed[root];
    match (result, expect) {
        (Type::Text, _) => Err(checker.error(&nodes[root].span, TEXT)),
        (Type::Number, Some(Type::Bool)) => {
            Err(checker.error(&nodes[root].span, "a filter is a truth value, this is a number; compare it, as in `bs <= 8`"))
        }
        (Type::Bool, Some(Type::Number)) => Err(checker.error(
            &nodes[root].span,
            "a score is a number, this is a truth value; write `where(condition, 1, 0)`, or make it the filter",
        )),
        _ => Ok((Graph { root: value, ..checker.graph }, result)),
    }
}

/// Error for a text outside a comparison.
const TEXT: &str = "this is a text; compare it with another text, as in `tenant == \"acme\"`";

struct Checker<'a> {
    text: &'a str,
    nodes: &'a [Node],
    names: &'a dyn Names,
    knobs: &'a [(&'a str, f64)],
    graph: Graph,
    /// Value and type of each node of the tree.
    typed: Vec<(usize, Type)>,
}

impl Checker<'_> {
    fn error(&self, place: &Range<usize>, message: impl Into<String>) -> ExprError {
        ExprError::at(self.text, place.clone(), message)
    }

    fn node(&mut self, node: &Node) -> Result<(usize, Type), ExprError> {
        match &node.kind {
            Kind::Number(number) => Ok((self.graph.push(Op::Constant(number.to_bits())), Type::Number)),
            Kind::Text(text) => {
                let number = text_number(xxh3_64(self.text[text.clone()].as_bytes()));
                Ok((self.graph.push(Op::Constant(number.to_bits())), Type::Text))
            }
            Kind::Name(name) => {
                let value = self.name(name)?;
                let text = matches!(self.graph.ops[value], Op::Column(Column::Text(_)));
                Ok((value, if text { Type::Text } else { Type::Number }))
            }
            Kind::Prefix(Prefix::Negative, a) => {
                let a = self.number(*a, "-")?;
                Ok((self.graph.fold(Op::Unary(Unary::Negative, a)), Type::Number))
            }
            Kind::Prefix(Prefix::Not, a) => {
                let a = self.truth(*a, "~")?;
                Ok((self.graph.fold(Op::Unary(Unary::Not, a)), Type::Bool))
            }
            Kind::Infix(infix, a, b) => self.infix(*infix, *a, *b),
            Kind::Call(function, arguments) => self.call(*function, arguments, &node.span),
        }
    }

    fn name(&mut self, span: &Range<usize>) -> Result<usize, ExprError> {
        let name = &self.text[span.clone()];
        let knob = self.knobs.iter().find(|(knob, _)| knob.eq_ignore_ascii_case(name));
        match (self.names.find(name), knob) {
            (Some(_), Some(_)) => Err(self
                .error(span, format!("`{name}` is an indicator and a named constant; rename the constant"))),
            (Some(column), None) => Ok(self.graph.push(Op::Column(column))),
            (None, Some((_, value))) if !value.is_finite() => {
                Err(self.error(span, format!("`{name}` is {value}, which is not a finite number")))
            }
            (None, Some((_, value))) => Ok(self.graph.push(Op::Constant(value.to_bits()))),
            (None, None) if FUNCTIONS.iter().any(|f| f.0.eq_ignore_ascii_case(name)) => {
                Err(self.error(span, format!("`{name}` is a function; it needs arguments in brackets")))
            }
            (None, None) => {
                let known = self.names.all().into_iter().chain(self.knobs.iter().map(|knob| knob.0));
                let hint = nearest(name, known).map_or(String::new(), |n| format!("; did you mean `{n}`?"));
                Err(self.error(span, format!("unknown name `{name}`{hint}")))
            }
        }
    }

    /// Returns the value of node `id`, which must be a number.
    fn number(&self, id: usize, of: &str) -> Result<usize, ExprError> {
        match self.typed[id] {
            (value, Type::Number) => Ok(value),
            (_, Type::Text) => Err(self.error(&self.nodes[id].span, TEXT)),
            _ => Err(self.error(
                &self.nodes[id].span,
                format!(
                    "`{of}` takes numbers, this is a truth value; `where(condition, 1, 0)` makes it a number"
                ),
            )),
        }
    }

    /// Returns the value of node `id`, which must be a truth value.
    fn truth(&self, id: usize, of: &str) -> Result<usize, ExprError> {
        match self.typed[id] {
            (value, Type::Bool) => Ok(value),
            (_, Type::Text) => Err(self.error(&self.nodes[id].span, TEXT)),
            _ => Err(self.error(
                &self.nodes[id].span,
                format!("`{of}` takes truth values, this is a number; compare it, as in `bs <= 8`"),
            )),
        }
    }

    fn infix(&mut self, infix: Infix, a: usize, b: usize) -> Result<(usize, Type), ExprError> {
        let (binary, sign, of) = match infix {
            Infix::Or => (Binary::Or, "|", Type::Bool),
            Infix::And => (Binary::And, "&", Type::Bool),
            Infix::Less => (Binary::Less, "<", Type::Number),
            Infix::LessEqual => (Binary::LessEqual, "<=", Type::Number),
            Infix::Greater => (Binary::Greater, ">", Type::Number),
            Infix::GreaterEqual => (Binary::GreaterEqual, ">=", Type::Number),
            Infix::Equal => (Binary::Equal, "==", Type::Number),
            Infix::NotEqual => (Binary::NotEqual, "!=", Type::Number),
            Infix::Add => (Binary::Add, "+", Type::Number),
            Infix::Subtract => (Binary::Subtract, "-", Type::Number),
            Infix::Multiply => (Binary::Multiply, "*", Type::Number),
            Infix::Divide => (Binary::Divide, "/", Type::Number),
            Infix::Power => (Binary::Power, "**", Type::Number),
        };
        let compares = matches!(infix, Infix::Equal | Infix::NotEqual);
        let (x, y) = match of {
            Type::Number if compares && [a, b].iter().all(|id| self.typed[*id].1 == Type::Text) => {
                (self.typed[a].0, self.typed[b].0)
            }
            Type::Number => (self.number(a, sign)?, self.number(b, sign)?),
            _ => (self.truth(a, sign)?, self.truth(b, sign)?),
        };
        if infix == Infix::Divide && self.graph.constant(y) == Some(0.0) {
            return Err(self.error(&self.nodes[b].span, "division by zero: this is always 0"));
        }
        // numpy also squares by multiplication.
        let op = match (infix, self.graph.constant(y)) {
            (Infix::Power, Some(2.0)) => Op::Unary(Unary::Square, x),
            _ => Op::Binary(binary, x, y),
        };
        let arithmetic =
            matches!(infix, Infix::Add | Infix::Subtract | Infix::Multiply | Infix::Divide | Infix::Power);
        Ok((self.graph.fold(op), if arithmetic { Type::Number } else { Type::Bool }))
    }

    fn call(
        &mut self,
        function: Function,
        arguments: &[usize],
        span: &Range<usize>,
    ) -> Result<(usize, Type), ExprError> {
        let name = FUNCTIONS.iter().find(|f| f.1 == function).map_or("", |f| f.0);
        if function == Function::Where {
            let condition = self.truth(arguments[0], "where")?;
            let (then, otherwise) = (arguments[1], arguments[2]);
            if self.typed[then].1 != self.typed[otherwise].1 {
                return Err(self.error(
                    &self.nodes[otherwise].span,
                    "`where` chooses between two numbers or two truth values, not one of each",
                ));
            }
            let op = Op::Where(condition, self.typed[then].0, self.typed[otherwise].0);
            return Ok((self.graph.fold(op), self.typed[then].1));
        }
        let values = arguments.iter().map(|a| self.number(*a, name)).collect::<Result<Vec<_>, _>>()?;
        let x = values[0];
        let place = &self.nodes[arguments[0]].span;
        let constant = self.graph.constant(x);
        let reduces = matches!(
            function,
            Function::Min
                | Function::Max
                | Function::Mean
                | Function::Std
                | Function::Norm
                | Function::GroupMin
                | Function::GroupMax
                | Function::GroupSum
                | Function::GroupMean
        );
        if reduces && !self.graph.varies[x] {
            let message = format!("`{name}` runs over the instances, but this is the same for all of them");
            return Err(self.error(place, message));
        }
        let graph = &mut self.graph;
        let value = match function {
            Function::Log if constant.is_some_and(|x| x <= 0.0) => {
                return Err(self.error(
                    place,
                    format!("logarithm of {}: it needs a number above 0", constant.unwrap_or(0.0)),
                ));
            }
            Function::Sqrt if constant.is_some_and(|x| x < 0.0) => {
                return Err(self.error(
                    place,
                    format!("square root of {}: it needs a number from 0", constant.unwrap_or(0.0)),
                ));
            }
            Function::Log => graph.fold(Op::Unary(Unary::Log, x)),
            Function::Sqrt => graph.fold(Op::Unary(Unary::Sqrt, x)),
            Function::Exp => graph.fold(Op::Unary(Unary::Exp, x)),
            Function::Abs => graph.fold(Op::Unary(Unary::Abs, x)),
            Function::Minimum => graph.fold(Op::Binary(Binary::Minimum, x, values[1])),
            Function::Maximum => graph.fold(Op::Binary(Binary::Maximum, x, values[1])),
            Function::Clip => {
                let (low, high) = (values[1], values[2]);
                if let (Some(l), Some(h)) = (graph.constant(low), graph.constant(high))
                    && l > h
                {
                    return Err(self
                        .error(span, format!("`clip` from {l} to {h}: the lower bound is above the upper")));
                }
                let raised = graph.fold(Op::Binary(Binary::Maximum, x, low));
                graph.fold(Op::Binary(Binary::Minimum, raised, high))
            }
            Function::Min => graph.push(Op::Reduce(Reduction::Min, x)),
            Function::Max => graph.push(Op::Reduce(Reduction::Max, x)),
            Function::Mean => graph.push(Op::Reduce(Reduction::Mean, x)),
            Function::GroupMin => graph.push(Op::Group(Grouping::Min, x)),
            Function::GroupMax => graph.push(Op::Group(Grouping::Max, x)),
            Function::GroupSum => graph.push(Op::Group(Grouping::Sum, x)),
            Function::GroupMean => graph.push(Op::Group(Grouping::Mean, x)),
            Function::Norm => {
                let max = graph.push(Op::Reduce(Reduction::Max, x));
                graph.push(Op::Binary(Binary::Norm, x, max))
            }
            // Population standard deviation, as in numpy.
            Function::Std => {
                let mean = graph.push(Op::Reduce(Reduction::Mean, x));
                let deviation = graph.push(Op::Binary(Binary::Subtract, x, mean));
                let square = graph.push(Op::Unary(Unary::Square, deviation));
                let variance = graph.push(Op::Reduce(Reduction::Mean, square));
                graph.push(Op::Unary(Unary::Sqrt, variance))
            }
            Function::Where => unreachable!("handled above"),
        };
        Ok((value, Type::Number))
    }
}
