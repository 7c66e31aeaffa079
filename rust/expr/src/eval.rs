//! Program evaluation. It allocates nothing once the buffers have grown, and loops over instances
//! have no branches.
use super::check::{Binary, Grouping, Reduction, Unary};
use super::program::{Pass, Program, Source, Stage, StepOp};
use super::{Column, nan_unless};
use multiversion::multiversion;
use smallvec::SmallVec;
use std::ops::Range;

/// Instances per chunk. The registers of a chunk fit into the L1 cache, and each chunk reuses them.
/// A chunk costs about 350 instructions beside its loops.
pub const CHUNK: usize = 512;

/// Partial sums of a mean. Their number is the same on every machine, so scores are too.
const LANES: usize = 8;

/// Reusable buffers of evaluations.
#[derive(Clone, Debug, Default)]
pub struct Scratch {
    buffers: Buffers,
    /// Columns that several passes of a program read, computed for all instances.
    shared: Vec<Vec<f64>>,
}

#[derive(Clone, Debug, Default)]
struct Buffers {
    registers: Vec<Vec<f64>>,
    scalars: Vec<f64>,
    /// Values over groups, one per instance.
    grouped: Vec<Vec<f64>>,
    /// State of each group: the value so far, and the number of instances.
    groups: Vec<(f64, f64)>,
}

/// Returns the slots in ranges of at most `size` (at least 1).
pub fn chunks(slots: usize, size: usize) -> impl Iterator<Item = Range<usize>> {
    (0..slots).step_by(size).map(move |start| start..slots.min(start + size))
}

/// Columns of [`Column::Computed`] that are computed for a chunk of instances at a time.
pub trait Kernels {
    /// Computes the columns whose bits are set in `columns`, for at most [`CHUNK`] instances.
    fn fill(&mut self, columns: u64, instances: Range<usize>);

    /// Returns the column with this number, filled in last. It starts with the first of the
    /// instances.
    fn column(&self, number: usize) -> &[f64];
}

/// The columns that a program reads.
pub struct Inputs<'a> {
    columns: SmallVec<[&'a [f64]; 8]>,
    eligible: &'a [bool],
    groups: &'a [u32],
}

impl<'a> Inputs<'a> {
    /// Creates inputs without columns, over `eligible.len()` instances. Reductions skip instances
    /// that are not eligible.
    #[inline]
    pub fn new(eligible: &'a [bool]) -> Inputs<'a> {
        Inputs { columns: SmallVec::new(), eligible, groups: &[] }
    }

    /// Adds the next of [`Program::columns`]: one number per instance, or a single number for
    /// [`Column::Request`] and [`Column::Text`]. Kernels compute a column that is empty.
    #[inline]
    pub fn push(&mut self, values: &'a [f64]) {
        self.columns.push(values);
    }

    /// Sets the group of each instance: a number below the number of instances, equal within a
    /// group. By default, each instance is its own group.
    #[inline]
    pub fn set_groups(&mut self, groups: &'a [u32]) {
        self.groups = groups;
    }
}

impl Program {
    /// Evaluates over all instances. `out` has one entry per instance (1.0 and 0.0 for truth
    /// values). Reductions (`min`, `max`, `mean`, `std`, `norm`) run over eligible instances and
    /// skip NaN. Without any value they are NaN.
    ///
    /// # Panics
    /// If `out` or a column that the program reads does not have one entry per instance, or a
    /// column is empty and there are no kernels.
    pub fn evaluate<'a>(
        &self,
        mut inputs: Inputs<'a>,
        mut kernels: Option<&mut dyn Kernels>,
        scratch: &'a mut Scratch,
        out: &mut [f64],
    ) {
        assert_eq!(out.len(), inputs.eligible.len(), "one entry an instance");
        assert_eq!(inputs.columns.len(), self.columns.len(), "every column that the program reads is set");
        if out.is_empty() {
            return;
        }
        let Scratch { buffers, shared } = scratch;
        buffers.scalars.clear();
        buffers.scalars.extend_from_slice(&self.scalars);
        if buffers.grouped.len() < self.grouped {
            buffers.grouped.resize(self.grouped, Vec::new());
        }
        while buffers.registers.len() < self.registers {
            buffers.registers.push(vec![0.0; CHUNK]);
        }
        if self.shared != 0
            && let Some(kernels) = &mut kernels
        {
            self.share(*kernels, out.len(), shared, &mut inputs);
        }
        run(self, &inputs, &mut kernels, buffers, out);
    }

    /// Computes the columns that several passes read, once for all instances.
    fn share<'a>(
        &self,
        kernels: &mut dyn Kernels,
        instances: usize,
        shared: &'a mut Vec<Vec<f64>>,
        inputs: &mut Inputs<'a>,
    ) {
        let columns = self.columns.iter().enumerate().filter_map(|(place, column)| match column {
            Column::Computed(number) if self.shared & 1 << number != 0 => Some((place, *number)),
            _ => None,
        });
        let count = self.shared.count_ones() as usize;
        if shared.len() < count {
            shared.resize(count, Vec::new());
        }
        shared.iter_mut().for_each(Vec::clear);
        for chunk in chunks(instances, CHUNK) {
            kernels.fill(self.shared, chunk.clone());
            for ((_, number), values) in columns.clone().zip(&mut *shared) {
                values.extend_from_slice(&kernels.column(number)[..chunk.len()]);
            }
        }
        columns.zip(&*shared).for_each(|((place, _), values)| inputs.columns[place] = values);
    }
}

#[multiversion(targets("x86_64+avx2"))]
fn run(
    program: &Program,
    inputs: &Inputs<'_>,
    kernels: &mut Option<&mut dyn Kernels>,
    scratch: &mut Buffers,
    out: &mut [f64],
) {
    let Buffers { registers, scalars, grouped, groups } = scratch;
    for (stage, to) in &program.stages {
        scalars[*to] = match stage {
            Stage::Group(grouping, pass) => {
                let mut values = std::mem::take(&mut grouped[*to]);
                evaluate(pass, inputs, scalars, grouped, registers, kernels, &mut values);
                over_groups(*grouping, inputs.groups, groups, &mut values);
                grouped[*to] = values;
                continue;
            }
            Stage::Request(place) => inputs.columns[*place][0],
            Stage::Unary(unary, a) => unary.apply(scalars[*a]),
            Stage::Binary(binary, a, b) => binary.apply(scalars[*a], scalars[*b]),
            Stage::Where(condition, then, otherwise) => {
                scalars[if scalars[*condition] != 0.0 { *then } else { *otherwise }]
            }
            Stage::Reduce(reduction, pass) => {
                reduce(*reduction, pass, inputs, scalars, grouped, registers, kernels)
            }
        };
    }
    let slots = out.len();
    for range in chunks(slots, CHUNK) {
        let chunk = Chunk::new(&program.output, inputs, scalars, grouped, kernels, range.clone());
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
    kernels: &mut Option<&mut dyn Kernels>,
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
        let chunk = Chunk::new(pass, inputs, scalars, grouped, kernels, range.clone());
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
    kernels: &mut Option<&mut dyn Kernels>,
    out: &mut Vec<f64>,
) {
    let slots = inputs.eligible.len();
    out.clear();
    for range in chunks(slots, CHUNK) {
        let end = range.end;
        let chunk = Chunk::new(pass, inputs, scalars, grouped, kernels, range);
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

/// Sums of two columns over the eligible instances, in lanes as [`fold`] has them, from chunk to
/// chunk. One loop over both takes 1.3 times the time of one.
#[derive(Clone, Copy, Default)]
pub struct Sums {
    sums: [[f64; LANES]; 2],
    count: usize,
}

impl Sums {
    /// Adds the next instances. All chunks but the last have a multiple of 8 instances.
    ///
    /// # Panics
    /// If a column does not have one number per instance.
    pub fn add(&mut self, columns: [&[f64]; 2], eligible: &[bool]) {
        add(self, columns, eligible);
    }

    /// Returns the means, equal to `mean` in expressions, of the columns that were added.
    pub fn means(&self, columns: [&[f64]; 2], eligible: &[bool]) -> [f64; 2] {
        [0, 1].map(|which| {
            let mean = 0.0 + self.sums[which].iter().sum::<f64>() / self.count as f64;
            if mean.is_nan() { known_mean(columns[which], eligible) } else { mean }
        })
    }
}

#[multiversion(targets("x86_64+avx2"))]
fn add(sums: &mut Sums, [a, b]: [&[f64]; 2], eligible: &[bool]) {
    let count = eligible.iter().filter(|eligible| **eligible).count();
    let (a, a_rest) = a[..eligible.len()].as_chunks::<LANES>();
    let (b, b_rest) = b[..eligible.len()].as_chunks::<LANES>();
    let is_all = count == eligible.len();
    let (eligible, rest) = eligible.as_chunks::<LANES>();
    let [mut a_sums, mut b_sums] = sums.sums;
    for ((a, b), eligible) in a.iter().zip(b).zip(eligible) {
        for lane in 0..LANES {
            // The others count as 0.0, which changes no sum: none is -0.0. Mostly there are none.
            let keep = if is_all { u64::MAX } else { u64::from(eligible[lane]).wrapping_neg() };
            a_sums[lane] += f64::from_bits(a[lane].to_bits() & keep);
            b_sums[lane] += f64::from_bits(b[lane].to_bits() & keep);
        }
    }
    for (lane, _) in rest.iter().enumerate().filter(|(_, eligible)| **eligible) {
        a_sums[lane] += a_rest[lane];
        b_sums[lane] += b_rest[lane];
    }
    *sums = Sums { sums: [a_sums, b_sums], count: sums.count + count };
}

/// Returns the mean of the eligible values that are not NaN.
fn known_mean(values: &[f64], eligible: &[bool]) -> f64 {
    let (mut sums, mut counts) = ([0.0; LANES], [0.0; LANES]);
    fold(values, eligible, &mut sums, &mut counts, |sum, x| sum + x);
    0.0 + sums.iter().sum::<f64>() / counts.iter().sum::<f64>()
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
    kernels: Option<&'a dyn Kernels>,
    start: usize,
    end: usize,
}

impl<'a, 'i> Chunk<'a, 'i> {
    /// Returns a chunk, with the columns that the pass reads computed.
    #[inline(always)]
    fn new(
        pass: &Pass,
        inputs: &'a Inputs<'i>,
        scalars: &'a [f64],
        grouped: &'a [Vec<f64>],
        kernels: &'a mut Option<&mut dyn Kernels>,
        slots: Range<usize>,
    ) -> Chunk<'a, 'i> {
        let Range { start, end } = slots;
        if pass.computed != 0
            && let Some(kernels) = kernels
        {
            kernels.fill(pass.computed, slots);
        }
        Chunk { inputs, scalars, grouped, kernels: kernels.as_deref(), start, end }
    }

    #[inline(always)]
    fn lanes<'r>(&'r self, source: Source, registers: &'r [Vec<f64>]) -> Lanes<'r> {
        match source {
            Source::Column { place, number } => {
                let values = self.inputs.columns[place];
                Lanes::Vector(if values.is_empty() {
                    let kernels = self.kernels.expect("a column without values is computed");
                    &kernels.column(number)[..self.end - self.start]
                } else {
                    &values[self.start..self.end]
                })
            }
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
                StepOp::MultiplyAdd(a, b, c) => both(lanes(a), lanes(b), lanes(c), to, |a, b, c| a * b + c),
                StepOp::AddMultiply(a, b, c) => both(lanes(a), lanes(b), lanes(c), to, |a, b, c| (a + b) * c),
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

/// Computes two operations in one loop. `of` may get its first two operands exchanged.
#[inline(always)]
fn both(a: Lanes<'_>, b: Lanes<'_>, c: Lanes<'_>, out: &mut [f64], of: impl Fn(f64, f64, f64) -> f64) {
    match (a, b, c) {
        (Lanes::Vector(a), Lanes::Vector(b), Lanes::Vector(c)) => {
            // Indexed, because four zipped slices are not vectorized.
            let (a, b, c) = (&a[..out.len()], &b[..out.len()], &c[..out.len()]);
            (0..out.len()).for_each(|i| out[i] = of(a[i], b[i], c[i]));
        }
        (Lanes::Vector(a), Lanes::Vector(b), Lanes::Scalar(c)) => {
            out.iter_mut().zip(a).zip(b).for_each(|((o, a), b)| *o = of(*a, *b, c));
        }
        (Lanes::Vector(a), Lanes::Scalar(b), Lanes::Vector(c))
        | (Lanes::Scalar(b), Lanes::Vector(a), Lanes::Vector(c)) => {
            out.iter_mut().zip(a).zip(c).for_each(|((o, a), c)| *o = of(*a, b, *c));
        }
        (Lanes::Vector(a), Lanes::Scalar(b), Lanes::Scalar(c))
        | (Lanes::Scalar(b), Lanes::Vector(a), Lanes::Scalar(c)) => {
            out.iter_mut().zip(a).for_each(|(o, a)| *o = of(*a, b, c));
        }
        (Lanes::Scalar(a), Lanes::Scalar(b), Lanes::Vector(c)) => {
            out.iter_mut().zip(c).for_each(|(o, c)| *o = of(a, b, *c));
        }
        (Lanes::Scalar(a), Lanes::Scalar(b), Lanes::Scalar(c)) => out.fill(of(a, b, c)),
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
