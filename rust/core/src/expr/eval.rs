//! Program evaluation. It allocates nothing once the buffers have grown, and loops over instances
//! have no branches.
use super::check::{Binary, Grouping, Reduction, Unary};
use super::program::{Pass, Program, Source, Stage, StepOp};
use crate::indicators::{CHUNK, Columns, Indicator, IndicatorSet, Kernels, Snapshot};
use multiversion::multiversion;
use smallvec::SmallVec;
use std::ops::Range;

/// Partial sums of a mean. Their number is the same on every machine, so scores are too.
const LANES: usize = 8;

/// Reusable buffers of an evaluation.
#[derive(Clone, Debug, Default)]
pub struct Scratch {
    registers: Vec<Vec<f64>>,
    scalars: Vec<f64>,
    /// Values over groups, one per slot.
    grouped: Vec<Vec<f64>>,
    /// State of each group: the value so far, and the number of instances.
    groups: Vec<(f64, f64)>,
    /// Indicators that kernels computed for one chunk.
    computed: Columns,
    /// Indicators that several passes of a program read, computed for all slots.
    shared: Vec<Vec<f64>>,
    /// Truth values of a policy's filter, one per slot.
    pub(crate) filter: Vec<f64>,
}

impl Scratch {
    /// Returns columns of [`CHUNK`] entries for the results of kernels and the request's
    /// indicators.
    pub(crate) fn computed(&mut self) -> &mut Columns {
        if self.computed.slots() == 0 {
            self.computed = Columns::of(IndicatorSet::DERIVED);
            self.computed.resize(CHUNK);
        }
        &mut self.computed
    }
}

/// Returns the slots in ranges of at most `size` (at least 1).
fn chunks(slots: usize, size: usize) -> impl Iterator<Item = Range<usize>> {
    (0..slots).step_by(size).map(move |start| start..slots.min(start + size))
}

/// The columns that a program reads, and the kernels that compute others by chunks.
#[derive(Clone)]
pub struct Inputs<'a> {
    kernels: Option<&'a dyn Kernels>,
    /// Indicators that kernels compute by chunks.
    computed: IndicatorSet,
    columns: SmallVec<[(Indicator, &'a [f64]); 4]>,
    declared: SmallVec<[&'a [f64]; 4]>,
    eligible: &'a [bool],
    groups: &'a [u32],
}

impl<'a> Inputs<'a> {
    /// Creates inputs without columns, over `eligible.len()` slots.
    pub fn new(eligible: &'a [bool]) -> Inputs<'a> {
        Inputs {
            kernels: None,
            computed: IndicatorSet::EMPTY,
            columns: SmallVec::new(),
            declared: SmallVec::new(),
            eligible,
            groups: &[],
        }
    }

    /// Sets the values of `id`: one per slot, or a single value if the indicator belongs to the
    /// request.
    pub fn set(&mut self, id: Indicator, values: &'a [f64]) {
        self.columns.push((id, values));
    }

    /// Returns the values of `id`. A program reads few columns, so a linear search is fast.
    #[inline(always)]
    fn column(&self, id: Indicator) -> &'a [f64] {
        let set = self.columns.iter().find(|(of, _)| *of == id);
        set.expect("every column that the program reads is set").1
    }

    /// Returns whether kernels compute an indicator by chunks.
    #[inline(always)]
    fn computes(&self, id: Indicator) -> bool {
        self.computed.contains(id)
    }

    /// Computes the indicators that a pass reads, for the slots of a chunk.
    #[inline(always)]
    fn compute(&self, pass: &Pass, slots: Range<usize>, out: &mut Columns) {
        if let Some(kernels) = self.kernels.filter(|_| pass.computed != IndicatorSet::EMPTY) {
            kernels.fill(pass.computed, slots, 0, out);
        }
    }

    /// Sets the group of each slot: a number below the number of slots, equal within a group. By
    /// default, each instance is its own group.
    pub fn set_groups(&mut self, groups: &'a [u32]) {
        self.groups = groups;
    }

    /// Adds the values of a declared indicator, one per slot. Call it for each of
    /// [`Program::declared`], in that order.
    pub fn push_declared(&mut self, values: &'a [f64]) {
        self.declared.push(values);
    }
}

impl Program {
    /// Evaluates over all slots. `out` has one entry per slot (1.0 and 0.0 for truth values).
    /// Reductions (`min`, `max`, `mean`, `std`, `norm`) run over eligible slots and skip NaN.
    /// Without any value they are NaN.
    ///
    /// # Panics
    /// If `out` does not have one entry per slot.
    pub fn eval(&self, snapshot: &Snapshot<'_>, scratch: &mut Scratch, out: &mut [f64]) {
        let mut shared = std::mem::take(&mut scratch.shared);
        let mut inputs = Inputs::new(snapshot.eligible);
        if let Some(kernels) = snapshot.columns.kernels() {
            self.share(kernels, snapshot.slots(), scratch.computed(), &mut shared);
            inputs.kernels = Some(kernels);
            inputs.computed = IndicatorSet::COMPUTED.without(self.shared);
            self.shared.iter().zip(&shared).for_each(|(id, column)| inputs.set(id, column));
        }
        for id in &self.columns {
            if inputs.kernels.is_none() || !IndicatorSet::COMPUTED.contains(*id) {
                inputs.set(*id, snapshot.columns.get(*id));
            }
        }
        inputs.set_groups(snapshot.columns.groups());
        for id in &self.declared {
            inputs.push_declared(snapshot.declared(*id));
        }
        self.eval_inputs(&inputs, scratch, out);
        drop(inputs);
        scratch.shared = shared;
    }

    /// Computes the indicators that several passes read, once for all slots.
    fn share(&self, kernels: &dyn Kernels, slots: usize, computed: &mut Columns, shared: &mut Vec<Vec<f64>>) {
        if self.shared == IndicatorSet::EMPTY {
            return;
        }
        let count = self.shared.iter().count();
        if shared.len() < count {
            shared.resize(count, Vec::new());
        }
        shared.iter_mut().for_each(Vec::clear);
        for chunk in chunks(slots, CHUNK) {
            kernels.fill(self.shared, chunk.clone(), 0, computed);
            for (id, column) in self.shared.iter().zip(&mut *shared) {
                column.extend_from_slice(&computed.get(id)[..chunk.len()]);
            }
        }
    }

    /// Evaluates over separate columns instead of a snapshot, like [`Program::eval`].
    ///
    /// # Panics
    /// If `out` or a column that the program reads does not have one entry per slot.
    pub fn eval_inputs(&self, inputs: &Inputs<'_>, scratch: &mut Scratch, out: &mut [f64]) {
        assert_eq!(out.len(), inputs.eligible.len(), "one entry a slot");
        if out.is_empty() {
            return;
        }
        scratch.scalars.clear();
        scratch.scalars.extend_from_slice(&self.scalars);
        if scratch.grouped.len() < self.grouped {
            scratch.grouped.resize(self.grouped, Vec::new());
        }
        while scratch.registers.len() < self.registers {
            scratch.registers.push(vec![0.0; CHUNK]);
        }
        if inputs.kernels.is_some() {
            scratch.computed();
        }
        run(self, inputs, scratch, out);
    }
}

#[multiversion(targets("x86_64+avx2"))]
fn run(program: &Program, inputs: &Inputs<'_>, scratch: &mut Scratch, out: &mut [f64]) {
    let Scratch { registers, scalars, grouped, groups, computed, .. } = scratch;
    for (stage, to) in &program.stages {
        scalars[*to] = match stage {
            Stage::Group(grouping, pass) => {
                let mut values = std::mem::take(&mut grouped[*to]);
                evaluate(pass, inputs, scalars, grouped, registers, computed, &mut values);
                over_groups(*grouping, inputs.groups, groups, &mut values);
                grouped[*to] = values;
                continue;
            }
            Stage::Request(id) => inputs.column(*id)[0],
            Stage::Unary(unary, a) => unary.apply(scalars[*a]),
            Stage::Binary(binary, a, b) => binary.apply(scalars[*a], scalars[*b]),
            Stage::Where(condition, then, otherwise) => {
                scalars[if scalars[*condition] != 0.0 { *then } else { *otherwise }]
            }
            Stage::Reduce(reduction, pass) => {
                reduce(*reduction, pass, inputs, scalars, grouped, registers, computed)
            }
        };
    }
    let slots = out.len();
    for range in chunks(slots, CHUNK) {
        let chunk = Chunk::new(&program.output, inputs, scalars, grouped, computed, range.clone());
        let out = &mut out[range];
        chunk.steps(&program.output, registers, out);
        if program.output.steps.is_empty() {
            match chunk.lanes(program.output.result, registers) {
                Lanes::Vector(values) => out.copy_from_slice(values),
                Lanes::Scalar(value) => out.fill(value),
            }
        }
    }
}

#[inline(always)]
fn reduce(
    reduction: Reduction,
    pass: &Pass,
    inputs: &Inputs<'_>,
    scalars: &[f64],
    grouped: &[Vec<f64>],
    registers: &mut [Vec<f64>],
    computed: &mut Columns,
) -> f64 {
    let slots = inputs.eligible.len();
    let mut state = match reduction {
        Reduction::Min => [f64::INFINITY; LANES],
        Reduction::Max => [f64::NEG_INFINITY; LANES],
        Reduction::Mean => [0.0; LANES],
    };
    let mut counts = [0.0; LANES];
    // A column needs no registers.
    let size = if pass.is_column() { slots.max(1) } else { CHUNK };
    for range in chunks(slots, size) {
        let chunk = Chunk::new(pass, inputs, scalars, grouped, computed, range.clone());
        chunk.steps(pass, registers, &mut []);
        if let Lanes::Vector(values) = chunk.lanes(pass.result, registers) {
            let eligible = &inputs.eligible[range];
            match reduction {
                Reduction::Min => {
                    fold(values, eligible, &mut state, &mut counts, |m, x| if x < m { x } else { m })
                }
                Reduction::Max => {
                    fold(values, eligible, &mut state, &mut counts, |m, x| if x > m { x } else { m })
                }
                Reduction::Mean => fold(values, eligible, &mut state, &mut counts, |sum, x| sum + x),
            }
        }
    }
    let count: f64 = counts.iter().sum();
    if count == 0.0 {
        return f64::NAN;
    }
    // Adding 0 turns -0.0 into 0.0, so the result does not depend on the order.
    0.0 + match reduction {
        Reduction::Min => state.into_iter().fold(f64::INFINITY, f64::min),
        Reduction::Max => state.into_iter().fold(f64::NEG_INFINITY, f64::max),
        Reduction::Mean => state.iter().sum::<f64>() / count,
    }
}

/// Writes the result of a pass for each slot.
fn evaluate(
    pass: &Pass,
    inputs: &Inputs<'_>,
    scalars: &[f64],
    grouped: &[Vec<f64>],
    registers: &mut [Vec<f64>],
    computed: &mut Columns,
    out: &mut Vec<f64>,
) {
    let slots = inputs.eligible.len();
    out.clear();
    for range in chunks(slots, CHUNK) {
        let end = range.end;
        let chunk = Chunk::new(pass, inputs, scalars, grouped, computed, range);
        chunk.steps(pass, registers, &mut []);
        match chunk.lanes(pass.result, registers) {
            Lanes::Vector(values) => out.extend_from_slice(values),
            Lanes::Scalar(value) => out.resize(end, value),
        }
    }
}

/// Gives each instance the value of its group, over all instances of the group that have a value,
/// eligible or not. `known` is scratch space.
fn over_groups(grouping: Grouping, groups: &[u32], known: &mut Vec<(f64, f64)>, values: &mut [f64]) {
    if groups.is_empty() {
        return;
    }
    let start = match grouping {
        Grouping::Min => f64::INFINITY,
        Grouping::Max => f64::NEG_INFINITY,
        Grouping::Sum | Grouping::Mean => 0.0,
    };
    known.clear();
    known.resize(values.len(), (start, 0.0));
    for (value, group) in values.iter().zip(groups).filter(|(value, _)| !value.is_nan()) {
        let (so_far, count) = &mut known[*group as usize];
        *so_far = match grouping {
            Grouping::Min => so_far.min(*value),
            Grouping::Max => so_far.max(*value),
            Grouping::Sum | Grouping::Mean => *so_far + value,
        };
        *count += 1.0;
    }
    for (value, group) in values.iter_mut().zip(groups) {
        let (outcome, count) = known[*group as usize];
        *value = match grouping {
            _ if count == 0.0 => f64::NAN,
            Grouping::Mean => outcome / count,
            _ => outcome,
        };
    }
}

/// Returns `x` if `keep`, else NaN, without a branch: a number with all bits set is NaN.
#[inline(always)]
pub(crate) fn nan_unless(keep: bool, x: f64) -> f64 {
    f64::from_bits(x.to_bits() | u64::from(keep).wrapping_sub(1))
}

/// Folds the eligible values that are not NaN: slot `i` goes to lane `i % LANES`.
#[inline(always)]
fn fold(
    values: &[f64],
    eligible: &[bool],
    state: &mut [f64; LANES],
    counts: &mut [f64; LANES],
    f: impl Fn(f64, f64) -> f64,
) {
    let (values, values_rest) = values.as_chunks::<LANES>();
    let (eligible, eligible_rest) = eligible.as_chunks::<LANES>();
    let eight = |values: &[f64; LANES],
                 eligible: &[bool; LANES],
                 state: &mut [f64; LANES],
                 counts: &mut [f64; LANES]| {
        for lane in 0..LANES {
            let x = nan_unless(eligible[lane], values[lane]);
            let next = f(state[lane], x);
            state[lane] = if x.is_nan() { state[lane] } else { next };
            counts[lane] += if x.is_nan() { 0.0 } else { 1.0 };
        }
    };
    // Local copies stay in CPU registers.
    let (mut lanes, mut counted) = (*state, *counts);
    values.iter().zip(eligible).for_each(|(x, e)| eight(x, e, &mut lanes, &mut counted));
    if !values_rest.is_empty() {
        let (mut x, mut e) = ([f64::NAN; LANES], [false; LANES]);
        x[..values_rest.len()].copy_from_slice(values_rest);
        e[..values_rest.len()].copy_from_slice(eligible_rest);
        eight(&x, &e, &mut lanes, &mut counted);
    }
    (*state, *counts) = (lanes, counted);
}

/// An operand over the instances of a chunk.
#[derive(Clone, Copy)]
enum Lanes<'a> {
    Vector(&'a [f64]),
    Scalar(f64),
}

/// The chunk of instances that a pass works on.
struct Chunk<'a, 'i> {
    inputs: &'a Inputs<'i>,
    scalars: &'a [f64],
    grouped: &'a [Vec<f64>],
    computed: &'a Columns,
    start: usize,
    end: usize,
}

impl<'a, 'i> Chunk<'a, 'i> {
    /// Returns a chunk, with the indicators that the pass reads computed.
    #[inline(always)]
    fn new(
        pass: &Pass,
        inputs: &'a Inputs<'i>,
        scalars: &'a [f64],
        grouped: &'a [Vec<f64>],
        computed: &'a mut Columns,
        slots: Range<usize>,
    ) -> Chunk<'a, 'i> {
        let Range { start, end } = slots;
        inputs.compute(pass, slots, computed);
        Chunk { inputs, scalars, grouped, computed, start, end }
    }

    #[inline(always)]
    fn lanes<'r>(&'r self, source: Source, registers: &'r [Vec<f64>]) -> Lanes<'r> {
        match source {
            Source::Column(id) if self.inputs.computes(id) => {
                Lanes::Vector(&self.computed.get(id)[..self.end - self.start])
            }
            Source::Column(id) => Lanes::Vector(&self.inputs.column(id)[self.start..self.end]),
            Source::Declared(place) => Lanes::Vector(&self.inputs.declared[place][self.start..self.end]),
            Source::Grouped(place) => Lanes::Vector(&self.grouped[place][self.start..self.end]),
            Source::Register(register) => Lanes::Vector(&registers[register][..self.end - self.start]),
            Source::Scalar(scalar) => Lanes::Scalar(self.scalars[scalar]),
        }
    }

    #[inline(always)]
    fn steps(&self, pass: &Pass, registers: &mut [Vec<f64>], out: &mut [f64]) {
        for step in &pass.steps {
            // The target register is moved out temporarily, so that the operand registers can be
            // read.
            let mut register = step.to.map_or_else(Vec::new, |to| std::mem::take(&mut registers[to]));
            let to = match step.to {
                Some(_) => &mut register[..self.end - self.start],
                None => &mut *out,
            };
            let lanes = |source| self.lanes(source, registers);
            match step.op {
                StepOp::Unary(op, a) => unary(op, lanes(a), to),
                StepOp::Binary(op, a, b) => binary(op, lanes(a), lanes(b), to),
                StepOp::MultiplyAdd(a, b, c) => multiply_add(lanes(a), lanes(b), lanes(c), to),
                StepOp::Where(condition, then, otherwise) => {
                    choose(lanes(condition), lanes(then), lanes(otherwise), to);
                }
            }
            if let Some(to) = step.to {
                registers[to] = register;
            }
        }
    }
}

/// Runs `$body` with `$op` as a compile-time constant, so that each operator has its own loop.
macro_rules! specialise {
    ($value:expr, $Op:ident [$($name:ident)*], $op:ident => $body:expr) => {
        match $value { $($Op::$name => { let $op = $Op::$name; $body })* }
    };
}

#[inline(always)]
fn unary(op: Unary, a: Lanes<'_>, out: &mut [f64]) {
    specialise!(op, Unary [Negative Not Abs Exp Log Sqrt Square], op => match a {
        Lanes::Vector(a) => out.iter_mut().zip(a).for_each(|(o, a)| *o = op.apply(*a)),
        Lanes::Scalar(a) => out.fill(op.apply(a)),
    });
}

#[inline(always)]
fn binary(op: Binary, a: Lanes<'_>, b: Lanes<'_>, out: &mut [f64]) {
    specialise!(op, Binary [
        Add Subtract Multiply Divide Power Less LessEqual Greater GreaterEqual Equal NotEqual And Or Minimum Maximum Norm
    ], op => match (a, b) {
        (Lanes::Vector(a), Lanes::Vector(b)) => {
            out.iter_mut().zip(a).zip(b).for_each(|((o, a), b)| *o = op.apply(*a, *b));
        }
        (Lanes::Vector(a), Lanes::Scalar(b)) => out.iter_mut().zip(a).for_each(|(o, a)| *o = op.apply(*a, b)),
        (Lanes::Scalar(a), Lanes::Vector(b)) => out.iter_mut().zip(b).for_each(|(o, b)| *o = op.apply(a, *b)),
        (Lanes::Scalar(a), Lanes::Scalar(b)) => out.fill(op.apply(a, b)),
    });
}

#[inline(always)]
fn multiply_add(a: Lanes<'_>, b: Lanes<'_>, c: Lanes<'_>, out: &mut [f64]) {
    match (a, b, c) {
        (Lanes::Vector(a), Lanes::Vector(b), Lanes::Vector(c)) => {
            // Indexed, because four zipped slices are not vectorized.
            let (a, b, c) = (&a[..out.len()], &b[..out.len()], &c[..out.len()]);
            (0..out.len()).for_each(|i| out[i] = a[i] * b[i] + c[i]);
        }
        (Lanes::Vector(a), Lanes::Vector(b), Lanes::Scalar(c)) => {
            out.iter_mut().zip(a).zip(b).for_each(|((o, a), b)| *o = a * b + c);
        }
        (Lanes::Vector(a), Lanes::Scalar(b), Lanes::Vector(c))
        | (Lanes::Scalar(b), Lanes::Vector(a), Lanes::Vector(c)) => {
            out.iter_mut().zip(a).zip(c).for_each(|((o, a), c)| *o = a * b + c);
        }
        (Lanes::Vector(a), Lanes::Scalar(b), Lanes::Scalar(c))
        | (Lanes::Scalar(b), Lanes::Vector(a), Lanes::Scalar(c)) => {
            out.iter_mut().zip(a).for_each(|(o, a)| *o = a * b + c);
        }
        // A product that is the same for all instances has no step of its own.
        (Lanes::Scalar(a), Lanes::Scalar(b), c) => binary(Binary::Add, Lanes::Scalar(a * b), c, out),
    }
}

#[inline(always)]
fn choose(condition: Lanes<'_>, then: Lanes<'_>, otherwise: Lanes<'_>, out: &mut [f64]) {
    let pick = |c: f64, a: f64, b: f64| if c != 0.0 { a } else { b };
    match (condition, then, otherwise) {
        (Lanes::Scalar(c), a, b) => match if c != 0.0 { a } else { b } {
            Lanes::Vector(values) => out.copy_from_slice(values),
            Lanes::Scalar(value) => out.fill(value),
        },
        (Lanes::Vector(c), Lanes::Vector(a), Lanes::Vector(b)) => {
            // Indexed, because four zipped slices are not vectorized.
            let (c, a, b) = (&c[..out.len()], &a[..out.len()], &b[..out.len()]);
            (0..out.len()).for_each(|i| out[i] = pick(c[i], a[i], b[i]));
        }
        (Lanes::Vector(c), Lanes::Vector(a), Lanes::Scalar(b)) => {
            out.iter_mut().zip(c).zip(a).for_each(|((o, c), a)| *o = pick(*c, *a, b));
        }
        (Lanes::Vector(c), Lanes::Scalar(a), Lanes::Vector(b)) => {
            out.iter_mut().zip(c).zip(b).for_each(|((o, c), b)| *o = pick(*c, a, *b));
        }
        (Lanes::Vector(c), Lanes::Scalar(a), Lanes::Scalar(b)) => {
            out.iter_mut().zip(c).for_each(|(o, c)| *o = pick(*c, a, b));
        }
    }
}
