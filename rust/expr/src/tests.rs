//! Programs compared with a naive interpreter, and errors of the checker.
use super::parse::{Function, Infix, Kind, Node, Prefix, parse};
use super::*;
use proptest::prelude::*;
use std::ops::Range;

const KNOBS: &[(&str, f64)] = &[("lam", 0.7), ("zero", 0.0), ("bad", f64::NAN)];

/// Names and their columns; the number of a column is its place here.
const NAMES: [(&str, Column); 11] = [
    ("bs", BS),
    ("q_bs", Q_BS),
    ("r_bs", R_BS),
    ("tokens", TOKENS),
    ("p_token", P_TOKEN),
    ("kv_usage", KV_USAGE),
    ("kv_hit", KV_HIT),
    ("prompt_tokens", PROMPT_TOKENS),
    ("expected_output_tokens", Column::Request(8)),
    ("tenant", TENANT),
    ("length_class", Column::Text(10)),
];
const BS: Column = Column::Stored(0);
const Q_BS: Column = Column::Computed(1);
const R_BS: Column = Column::Stored(2);
const TOKENS: Column = Column::Computed(3);
const P_TOKEN: Column = Column::Computed(4);
const KV_USAGE: Column = Column::Stored(5);
const KV_HIT: Column = Column::Stored(6);
const PROMPT_TOKENS: Column = Column::Request(7);
const TENANT: Column = Column::Text(9);

struct Table;

impl Names for Table {
    fn find(&self, name: &str) -> Option<Column> {
        NAMES.iter().find(|known| known.0.eq_ignore_ascii_case(name)).map(|known| known.1)
    }

    fn all(&self) -> Vec<&str> {
        NAMES.iter().map(|known| known.0).collect()
    }
}

fn compile(text: &str, expect: impl Into<Option<Type>>, knobs: &[(&str, f64)]) -> Result<Program, ExprError> {
    Program::compile(text, expect, &Table, knobs)
}

/// A fleet: columns in table order, and the eligible slots.
#[derive(Clone, Debug)]
struct Fleet {
    columns: Vec<Vec<f64>>,
    eligible: Vec<bool>,
    groups: Vec<u32>,
}

impl Fleet {
    fn new(columns: &[(Column, &[f64])], eligible: &[bool]) -> Fleet {
        let empty = vec![0.0; eligible.len()];
        let mut fleet =
            Fleet { columns: vec![empty; NAMES.len()], eligible: eligible.to_vec(), groups: Vec::new() };
        for (column, values) in columns {
            fleet.columns[column.number()][..values.len()].copy_from_slice(values);
        }
        fleet
    }

    fn get(&self, column: Column) -> &[f64] {
        &self.columns[column.number()]
    }

    fn inputs(&self, program: &Program) -> Inputs<'_> {
        let mut inputs = Inputs::new(&self.eligible);
        inputs.set_groups(&self.groups);
        program.columns().iter().for_each(|column| inputs.push(self.get(*column)));
        inputs
    }

    fn eval(&self, program: &Program) -> Vec<f64> {
        let mut out = vec![f64::NAN; self.eligible.len()];
        program.evaluate(self.inputs(program), None, &mut Scratch::default(), &mut out);
        out
    }

    /// Evaluates with kernels instead of the columns that they can compute.
    fn eval_by_chunks(&self, program: &Program) -> Vec<f64> {
        let mut out = vec![f64::NAN; self.eligible.len()];
        let mut inputs = Inputs::new(&self.eligible);
        inputs.set_groups(&self.groups);
        for column in program.columns() {
            inputs.push(if matches!(column, Column::Computed(_)) { &[] } else { self.get(*column) });
        }
        let mut kernels = Copies { fleet: self, computed: vec![Vec::new(); NAMES.len()] };
        program.evaluate(inputs, Some(&mut kernels), &mut Scratch::default(), &mut out);
        out
    }

    /// Evaluates the tree node by node, for all slots.
    fn interpret(&self, text: &str, nodes: &[Node]) -> Vec<f64> {
        let slots = self.eligible.len();
        let mut values: Vec<Vec<f64>> = Vec::new();
        for node in nodes {
            let column = |a: usize| &values[a];
            let spread = |x: f64| vec![x; slots];
            let truth = |b: bool| f64::from(u8::from(b));
            let map = |a: usize, f: &dyn Fn(f64) -> f64| column(a).iter().map(|x| f(*x)).collect::<Vec<_>>();
            let zip = |a: usize, b: usize, f: &dyn Fn(f64, f64) -> f64| {
                column(a).iter().zip(column(b)).map(|(x, y)| f(*x, *y)).collect::<Vec<_>>()
            };
            let counted = |a: usize| {
                let counted = column(a).iter().zip(&self.eligible).filter(|(x, e)| **e && !x.is_nan());
                counted.map(|(x, _)| *x).collect::<Vec<f64>>()
            };
            let mean = |x: &[f64]| 0.0 + x.iter().sum::<f64>() / x.len() as f64;
            let largest = |x: &[f64]| 0.0 + x.iter().copied().reduce(f64::max).unwrap_or(f64::NAN);
            let smaller = |x: f64, y: f64| {
                if x.is_nan() || y.is_nan() {
                    f64::NAN
                } else if x < y {
                    x
                } else {
                    y
                }
            };
            let larger = |x: f64, y: f64| {
                if x.is_nan() || y.is_nan() {
                    f64::NAN
                } else if x > y {
                    x
                } else {
                    y
                }
            };
            let value = match &node.kind {
                Kind::Number(number) => spread(*number),
                Kind::Text(_) => unreachable!("the expressions here have no texts"),
                Kind::Name(name) => match Table.find(&text[name.clone()]) {
                    Some(column @ Column::Request(_)) => spread(self.get(column)[0]),
                    Some(column) => self.get(column).to_vec(),
                    None => spread(KNOBS.iter().find(|k| k.0 == &text[name.clone()]).unwrap().1),
                },
                Kind::Prefix(Prefix::Negative, a) => map(*a, &|x| -x),
                Kind::Prefix(Prefix::Not, a) => map(*a, &|x| truth(x == 0.0)),
                Kind::Infix(infix, a, b) => match infix {
                    Infix::Or => zip(*a, *b, &|x, y| truth(x != 0.0 || y != 0.0)),
                    Infix::And => zip(*a, *b, &|x, y| truth(x != 0.0 && y != 0.0)),
                    Infix::Less => zip(*a, *b, &|x, y| truth(x < y)),
                    Infix::LessEqual => zip(*a, *b, &|x, y| truth(x <= y)),
                    Infix::Greater => zip(*a, *b, &|x, y| truth(x > y)),
                    Infix::GreaterEqual => zip(*a, *b, &|x, y| truth(x >= y)),
                    Infix::Equal => zip(*a, *b, &|x, y| truth(x == y)),
                    Infix::NotEqual => zip(*a, *b, &|x, y| truth(x != y)),
                    Infix::Add => zip(*a, *b, &|x, y| x + y),
                    Infix::Subtract => zip(*a, *b, &|x, y| x - y),
                    Infix::Multiply => zip(*a, *b, &|x, y| x * y),
                    Infix::Divide => zip(*a, *b, &|x, y| x / y),
                    Infix::Power => zip(*a, *b, &|x, y| if y == 2.0 { x * x } else { x.powf(y) }),
                },
                Kind::Call(function, of) => match function {
                    Function::Where => {
                        let pick = |i: usize| column(of[if column(of[0])[i] != 0.0 { 1 } else { 2 }])[i];
                        (0..slots).map(pick).collect()
                    }
                    Function::Minimum => zip(of[0], of[1], &smaller),
                    Function::Maximum => zip(of[0], of[1], &larger),
                    Function::Clip => {
                        let bound =
                            |i: usize| smaller(larger(column(of[0])[i], column(of[1])[i]), column(of[2])[i]);
                        (0..slots).map(bound).collect()
                    }
                    Function::Log => map(of[0], &f64::ln),
                    Function::Exp => map(of[0], &f64::exp),
                    Function::Sqrt => map(of[0], &f64::sqrt),
                    Function::Abs => map(of[0], &f64::abs),
                    Function::Min => {
                        spread(0.0 + counted(of[0]).into_iter().reduce(f64::min).unwrap_or(f64::NAN))
                    }
                    Function::Max => spread(largest(&counted(of[0]))),
                    Function::Mean => spread(mean(&counted(of[0]))),
                    Function::Std => {
                        let counted = counted(of[0]);
                        let middle = mean(&counted);
                        let squares: Vec<f64> = counted.iter().map(|x| (x - middle) * (x - middle)).collect();
                        spread(mean(&squares).sqrt())
                    }
                    // Each instance is its own group.
                    Function::GroupMin | Function::GroupMax | Function::GroupSum | Function::GroupMean => {
                        column(of[0]).to_vec()
                    }
                    Function::Norm => {
                        let max = largest(&counted(of[0]));
                        map(of[0], &|x| if x == 0.0 { 0.0 } else { x / max })
                    }
                },
            };
            values.push(value);
        }
        values.pop().unwrap()
    }
}

/// Kernels that copy the columns of a fleet.
struct Copies<'a> {
    fleet: &'a Fleet,
    computed: Vec<Vec<f64>>,
}

impl Kernels for Copies<'_> {
    fn fill(&mut self, columns: u64, instances: Range<usize>) {
        assert!(instances.len() <= CHUNK);
        for (number, (computed, values)) in self.computed.iter_mut().zip(&self.fleet.columns).enumerate() {
            computed.clear();
            if columns & 1 << number != 0 {
                computed.extend_from_slice(&values[instances.clone()]);
            }
        }
    }

    fn column(&self, number: usize) -> &[f64] {
        &self.computed[number]
    }
}

fn bits(values: &[f64]) -> Vec<u64> {
    values.iter().map(|value| if value.is_nan() { f64::NAN.to_bits() } else { value.to_bits() }).collect()
}

/// Equal up to the last bit: powers are not rounded the same in every implementation.
fn same(a: f64, b: f64) -> bool {
    let near = a.to_bits().abs_diff(b.to_bits()) <= 1;
    a == b && (a != 0.0 || a.signum() == b.signum()) || (a.is_nan() && b.is_nan()) || near
}

/// Random numbers, as text with all brackets. Means use columns of whole numbers only, whose sum
/// does not depend on the order, so that results can be compared to the last bit.
fn number() -> BoxedStrategy<String> {
    let column = || prop::sample::select(vec!["bs", "Q_BS", "tokens", "p_token", "kv_usage"]);
    let leaf = prop_oneof![
        4 => column().prop_map(str::to_string),
        1 => prop::sample::select(vec!["prompt_tokens", "expected_output_tokens", "lam"]).prop_map(str::to_string),
        2 => prop::sample::select(vec!["0", "1", "2", "0.5", "3e2", "7"]).prop_map(str::to_string),
        1 => (prop::sample::select(vec!["mean", "min", "max", "norm"]), column()).prop_map(|(f, c)| format!("{f}({c})")),
    ];
    leaf.prop_recursive(6, 48, 3, move |inner| {
        let sign = || prop::sample::select(vec!["+", "-", "*", "/", "**"]);
        let function = || prop::sample::select(vec!["-", "log", "exp", "sqrt", "abs"]);
        let comparison = || prop::sample::select(vec!["<", "<=", ">", ">=", "==", "!="]);
        let truth = (inner.clone(), comparison(), inner.clone()).prop_map(|(a, s, b)| format!("({a} {s} {b})"));
        let truth = (truth.clone(), prop::sample::select(vec!["", "&", "|", "~"]), truth).prop_map(|(a, s, b)| match s {
            "" => a,
            "~" => format!("~{a}"),
            _ => format!("({a} {s} {b})"),
        });
        prop_oneof![
            4 => (inner.clone(), sign(), inner.clone()).prop_map(|(a, s, b)| format!("({a} {s} {b})")),
            2 => (function(), inner.clone()).prop_map(|(f, a)| format!("{f}({a})")),
            2 => (truth, inner.clone(), inner.clone()).prop_map(|(c, a, b)| format!("where({c}, {a}, {b})")),
            1 => (prop::sample::select(vec!["minimum", "maximum"]), inner.clone(), inner.clone())
                .prop_map(|(f, a, b)| format!("{f}({a}, {b})")),
            1 => (inner.clone(), inner.clone(), inner.clone()).prop_map(|(a, b, c)| format!("clip({a}, {b}, {c})")),
            1 => (prop::sample::select(vec!["min", "max", "norm"]), inner, column())
                .prop_map(|(f, a, c)| format!("{f}({a} - {c})")),
        ]
    })
    .boxed()
}

fn fleet() -> impl Strategy<Value = Fleet> {
    let value = || prop_oneof![6 => (0..6i32).prop_map(f64::from), 1 => (0..100_000i32).prop_map(f64::from), 1 => Just(f64::NAN)];
    let slot = (proptest::array::uniform6(value()), proptest::bool::weighted(0.8));
    let size = prop_oneof![4 => 1..20usize, 1 => 500..1200usize];
    size.prop_flat_map(move |n| proptest::collection::vec(slot.clone(), n)).prop_map(|slots| {
        let ids = [BS, Q_BS, TOKENS, P_TOKEN, KV_USAGE, PROMPT_TOKENS];
        let columns: Vec<Vec<f64>> = (0..6).map(|c| slots.iter().map(|s| s.0[c]).collect()).collect();
        let pairs: Vec<(Column, &[f64])> = ids.into_iter().zip(columns.iter().map(Vec::as_slice)).collect();
        Fleet::new(&pairs, &slots.iter().map(|s| s.1).collect::<Vec<_>>())
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, ..ProptestConfig::default() })]

    #[test]
    fn evaluation_equals_a_naive_interpreter(text in number(), fleet in fleet()) {
        let nodes = parse(&text).unwrap();
        match compile(&text, Type::Number, KNOBS) {
            Ok(program) => {
                let (fast, naive) = (fleet.eval(&program), fleet.interpret(&text, &nodes));
                prop_assert_eq!(bits(&fast), bits(&fleet.eval_by_chunks(&program)), "{}", &text);
                for (slot, (a, b)) in fast.iter().zip(&naive).enumerate() {
                    prop_assert!(same(*a, *b), "{text}\nslot {slot}: {a} is not {b}\n{program:?}");
                }
            }
            // Random constants can produce `1 / 0`; no other errors are expected.
            Err(error) => {
                let known = ["division by zero", "not a finite number", "logarithm of", "square root of", "lower bound"];
                prop_assert!(known.iter().any(|k| error.message.contains(k)), "{error}");
            }
        }
    }

    #[test]
    fn deviations_equal_the_naive_ones(fleet in fleet()) {
        let text = "std(bs * 0.3 + tokens) + mean(bs / 7)";
        let program = compile(text, Type::Number, &[]).unwrap();
        let (fast, naive) = (fleet.eval(&program)[0], fleet.interpret(text, &parse(text).unwrap())[0]);
        prop_assert!((fast - naive).abs() <= 1e-12 * naive.abs() || (fast.is_nan() && naive.is_nan()), "{fast} {naive}");
    }

    #[test]
    fn two_means_equal_those_of_programs(fleet in fleet(), absent: bool) {
        let columns = [TOKENS, P_TOKEN].map(|column| {
            let values = fleet.get(column).iter().map(|x| if x.is_nan() && !absent { 0.7 } else { x / 3.0 });
            values.collect::<Vec<f64>>()
        });
        let fleet = Fleet::new(&[(TOKENS, &columns[0]), (P_TOKEN, &columns[1])], &fleet.eligible);
        let program = |text| fleet.eval(&compile(text, Type::Number, &[]).unwrap())[0];
        let mut sums = Sums::default();
        for part in chunks(fleet.eligible.len(), 16) {
            sums.add([0, 1].map(|which| &columns[which][part.clone()]), &fleet.eligible[part]);
        }
        let made = sums.means([&columns[0], &columns[1]], &fleet.eligible);
        prop_assert_eq!(bits(&made), bits(&[program("mean(tokens)"), program("mean(p_token)")]));
    }

    #[test]
    fn no_text_panics(text in "[a-c0-9(),.+*/<>=&|~ -]{0,40}|\\PC{0,20}|(bs|min|\\(|\\)|,|\\+|~|<|1e|\\.| ){0,30}") {
        if let Err(error) = compile(&text, Type::Number, &[]) {
            let _ = error.to_string();
        }
    }
}

#[test]
fn the_papers_expressions_give_what_they_say() {
    let fleet = Fleet::new(
        &[
            (P_TOKEN, &[100.0, 50.0, 10.0, 1.0]),
            (BS, &[1.0, 3.0, 4.0, 2.0]),
            (Q_BS, &[0.0, 1.0, 2.0, 0.0]),
            (R_BS, &[1.0, 2.0, 2.0, 2.0]),
            (KV_HIT, &[0.0, 0.5, 1.0, 1.0]),
        ],
        &[true, true, true, false],
    );
    let eval = |text, expect| fleet.eval(&compile(text, expect, KNOBS).unwrap());
    assert_eq!(eval("P_TOKEN * (BS + 1)", Type::Number), [200.0, 200.0, 50.0, 3.0]);
    assert_eq!(eval("4 * q_bs + r_bs", Type::Number), [1.0, 6.0, 10.0, 2.0]);
    let linear = eval("lam * (1 - kv_hit) + (1 - lam) * norm(bs)", Type::Number);
    let expected = [0.7 + 0.3 * 0.25, 0.7 * 0.5 + 0.3 * 0.75, 0.3, 0.3 * 0.5];
    assert!(linear.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-15), "{linear:?}");
    assert_eq!(eval("bs - min(bs) <= 2", Type::Bool), [1.0, 1.0, 0.0, 1.0]);
    assert_eq!(eval("norm(bs - bs) + std(q_bs - q_bs)", Type::Number), [0.0; 4]);
}

#[test]
fn reductions_without_a_value_are_nan() {
    let fleet = Fleet::new(&[(BS, &[1.0, f64::NAN])], &[false, true]);
    let eval = |text| fleet.eval(&compile(text, Type::Number, &[]).unwrap())[0];
    assert!(["min(bs)", "max(bs)", "mean(bs)", "std(bs)"].into_iter().all(|text| eval(text).is_nan()));
    Fleet::new(&[], &[]).eval(&compile("bs", Type::Number, &[]).unwrap());
}

#[test]
fn what_can_be_known_before_is_an_error_with_its_place() {
    for (text, message, place) in [
        ("p_tokn + 1", "unknown name `p_tokn`; did you mean `p_token`?", "p_tokn"),
        ("lamb * bs", "did you mean `lam`?", "lamb"),
        ("bs + nan", "unknown name `nan`", "nan"),
        ("bs * bad", "`bad` is NaN, which is not a finite number", "bad"),
        ("min + 1", "`min` is a function", "min"),
        ("bs / (1 - 1)", "division by zero", "(1 - 1)"),
        ("bs / zero", "division by zero", "zero"),
        ("log(zero) + bs", "logarithm of 0", "zero"),
        ("sqrt(-4)", "square root of -4", "-4"),
        ("bs + 1e300 * 1e300", "not a finite number", "1e300 * 1e300"),
        ("zero ** -1", "not a finite number", "zero ** -1"),
        ("exp(1e4)", "not a finite number", "exp(1e4)"),
        ("(bs < 3) + 1", "`+` takes numbers, this is a truth value", "(bs < 3)"),
        ("-(bs < 3)", "`-` takes numbers", "(bs < 3)"),
        ("(bs < 3) < 1", "`<` takes numbers", "(bs < 3)"),
        ("log(bs < 3)", "`log` takes numbers", "bs < 3"),
        ("where(bs, 1, 2)", "`where` takes truth values", "bs"),
        ("where(bs > 1, 1, bs > 2)", "not one of each", "bs > 2"),
        ("where(bs & (bs > 1), 1, 2)", "`&` takes truth values, this is a number", "bs"),
        ("~bs", "`~` takes truth values", "bs"),
        ("bs < 3", "a score is a number", "bs < 3"),
        ("min(3)", "the same for all of them", "3"),
        ("norm(prompt_tokens)", "the same for all of them", "prompt_tokens"),
        ("max(min(bs))", "the same for all of them", "min(bs)"),
        ("clip(bs, 3, 1)", "the lower bound is above", "clip(bs, 3, 1)"),
    ] {
        let error = compile(text, Type::Number, KNOBS).unwrap_err();
        assert!(error.message.contains(message), "{text}: {error}");
        assert_eq!(&error.text[error.start..error.end], place, "{text}: {error}");
    }
    let error = compile("bs + 1", Type::Bool, &[]).unwrap_err();
    assert!(error.message.contains("a filter is a truth value"), "{error}");
    let error = compile("bs", Type::Number, &[("BS", 1.0)]).unwrap_err();
    assert!(error.message.contains("rename the constant"), "{error}");
}

#[test]
fn an_error_shows_the_text_with_carets_under_the_place() {
    let error = compile("bs *\n\tkv_hits", Type::Number, &[]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "unknown name `kv_hits`; did you mean `kv_hit`?\n  bs *  kv_hits\n        ^^^^^^^"
    );
    let long = format!("{}kv_hits{}", "bs + ".repeat(100), " + bs".repeat(100));
    let shown = compile(&long, Type::Number, &[]).unwrap_err().to_string();
    assert!(shown.lines().all(|line| line.chars().count() < 140), "{shown}");
    assert!(
        shown.lines().nth(1).unwrap().chars().skip(63).collect::<String>().starts_with("kv_hits"),
        "{shown}"
    );
    assert!(shown.ends_with(&format!("{}^^^^^^^", " ".repeat(63))), "{shown}");
}

#[test]
fn only_what_the_outcome_needs_is_read() {
    let reads = |text| compile(text, Type::Number, KNOBS).unwrap().columns().to_vec();
    assert_eq!(reads("where(lam > 1, tokens, bs) + prompt_tokens"), [BS, PROMPT_TOKENS]);
    assert_eq!(reads("lam + 1"), []);
}

#[test]
fn texts_are_compared_with_texts_only() {
    let compile = |text: &str| compile(text, None, KNOBS);
    let number = text_number(xxhash_rust::xxh3::xxh3_64(b"acme"));
    let mut fleet = Fleet::new(&[], &[true, true]);
    for (tenant, text, expected) in [
        (number, "tenant == \"acme\"", 1.0),
        (number, "TENANT != 'acme'", 0.0),
        (number, "'other' == tenant", 0.0),
        (number, "tenant == \"acme \"", 0.0),
        (f64::NAN, "tenant == 'acme'", 0.0),
        (f64::NAN, "tenant != 'acme'", 1.0),
    ] {
        fleet.columns[TENANT.number()][0] = tenant;
        assert_eq!(fleet.eval(&compile(text).unwrap()), [expected; 2], "{text}");
    }
    for (text, message, place) in [
        ("tenant + 1", "this is a text", "tenant"),
        ("bs == 'acme'", "this is a text", "'acme'"),
        ("tenant == 3", "this is a text", "tenant"),
        ("tenant < 'b'", "this is a text", "tenant"),
        ("'acme'", "this is a text", "'acme'"),
        ("tenant == 'acme", "never closed", "'acme"),
        ("min(tenant)", "this is a text", "tenant"),
        ("~tenant", "this is a text", "tenant"),
    ] {
        let error = compile(text).unwrap_err();
        assert!(error.message.contains(message), "{text}: {error}");
        assert_eq!(&text[error.start..error.end], place, "{text}");
    }
}

#[test]
fn groups_reduce_over_their_instances() {
    const ABSENT: f64 = f64::NAN;
    let slots = 300; // more than a chunk
    let groups: Vec<u32> = (0..slots).map(|slot| slot % 3).collect();
    let bs: Vec<f64> = (0..slots).map(|slot| if slot == 0 { ABSENT } else { f64::from(slot) }).collect();
    let eligible: Vec<bool> = (0..slots).map(|slot| slot % 3 != 1).collect();
    for (text, expected) in [
        ("group_max(bs)", [297.0, 298.0, 299.0]),
        ("group_min(bs)", [3.0, 1.0, 2.0]),
        ("group_sum(bs)", [14_850.0, 14_950.0, 15_050.0]),
        ("group_mean(bs)", [150.0, 149.5, 150.5]),
        ("2 * group_max(bs + 1) - group_min(bs)", [593.0, 597.0, 598.0]),
        ("group_max(group_sum(bs) / 2)", [7_425.0, 7_475.0, 7_525.0]),
        ("group_max(kv_usage)", [ABSENT; 3]),
        // A reduction over eligible instances, of values over groups.
        ("bs - bs + max(group_min(bs))", [3.0; 3]),
    ] {
        let program = compile(text, Type::Number, KNOBS).unwrap();
        let absent = vec![ABSENT; slots as usize];
        let fleet = Fleet::new(&[(BS, &bs), (KV_USAGE, &absent)], &eligible);
        let out = Fleet { groups: groups.clone(), ..fleet }.eval(&program);
        for (slot, out) in out.iter().enumerate().skip(1) {
            let expected = expected[slot % 3];
            assert!(*out == expected || (out.is_nan() && expected.is_nan()), "{text} of {slot}: {out}");
        }
    }
    let error = compile("group_max(prompt_tokens)", None, KNOBS).unwrap_err();
    assert!(error.message.contains("the same for all"), "{error}");
}
