//! Graph to program: values that are the same for all instances are computed once, other values in
//! passes over the instances.
//!
//! Each reduction is a separate pass, because later steps need its result. The score is the last
//! pass. A pass runs its steps on one chunk of instances at a time, so that intermediate values
//! stay in the L1 cache. Operands are read in place, without copies.
use super::check::{Binary, Graph, Grouping, Op, Reduction, Unary};
use super::{Column, Type};

/// Location of a step's operand.
#[derive(Clone, Copy, Debug)]
pub(super) enum Source {
    /// Index into [`Program::columns`], and the column's number.
    Column {
        place: usize,
        number: usize,
    },
    /// Result of a [`Stage::Group`].
    Grouped(usize),
    Register(usize),
    Scalar(usize),
}

/// Operation of a step.
#[derive(Clone, Copy, Debug)]
pub(super) enum StepOp {
    Unary(Unary, Source),
    Binary(Binary, Source, Source),
    /// The product of the first two, plus the third. Both results are rounded, as in two steps.
    MultiplyAdd(Source, Source, Source),
    /// The sum of the first two, times the third, likewise.
    AddMultiply(Source, Source, Source),
    /// Operands: condition, then, otherwise.
    Where(Source, Source, Source),
}

impl StepOp {
    fn operands(self) -> impl Iterator<Item = Source> {
        let operands = match self {
            StepOp::Unary(_, a) => [Some(a), None, None],
            StepOp::Binary(_, a, b) => [Some(a), Some(b), None],
            StepOp::MultiplyAdd(a, b, c) | StepOp::AddMultiply(a, b, c) | StepOp::Where(a, b, c) => {
                [Some(a), Some(b), Some(c)]
            }
        };
        operands.into_iter().flatten()
    }
}

/// One loop over the instances of a chunk.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    pub op: StepOp,
    /// Register of the result, never an operand's; `None`: the program's output.
    pub to: Option<usize>,
}

/// Steps over all instances, and the location of their result.
#[derive(Clone, Debug)]
pub(super) struct Pass {
    pub steps: Vec<Step>,
    pub result: Source,
    /// Numbers of the [`Column::Computed`] that the steps or the result read, and no other pass, as
    /// bits.
    pub computed: u64,
}

impl Pass {
    /// Returns whether the result is a column that no kernel computes.
    pub(crate) fn is_column(&self) -> bool {
        self.steps.is_empty() && self.computed == 0
    }
}

/// Computation of one scalar.
#[derive(Clone, Debug)]
pub(super) enum Stage {
    /// The only number of the column with this index in [`Program::columns`].
    Request(usize),
    Unary(Unary, usize),
    Binary(Binary, usize, usize),
    Where(usize, usize, usize),
    Reduce(Reduction, Pass),
    /// One value per instance, for all groups.
    Group(Grouping, Pass),
}

/// A checked expression, ready to run.
#[derive(Clone, Debug)]
pub struct Program {
    /// Initial scalars: constants, and NaN for scalars that a stage computes.
    pub(super) scalars: Vec<f64>,
    /// Stages in execution order, each with the index of its scalar (for [`Stage::Group`]: of its
    /// column).
    pub(super) stages: Vec<(Stage, usize)>,
    pub(super) output: Pass,
    /// Number of columns that [`Stage::Group`] computes.
    pub(super) grouped: usize,
    /// Number of registers that the passes need.
    pub(super) registers: usize,
    /// Columns that the program reads, in the order of their first use.
    pub(super) columns: Vec<Column>,
    /// Numbers of the [`Column::Computed`] that several passes read, as bits.
    pub(super) shared: u64,
    result: Type,
}

impl Program {
    pub(super) fn new(graph: &Graph, result: Type) -> Program {
        let mut used = vec![false; graph.ops.len()];
        used[graph.root] = true;
        for id in (0..=graph.root).rev() {
            if used[id] {
                graph.ops[id].operands().for_each(|operand| used[operand] = true);
            }
        }
        let scalar_of = vec![usize::MAX; graph.ops.len()];
        let mut builder =
            Builder { graph, scalar_of, columns: Vec::new(), grouped: Vec::new(), registers: 0 };
        let (mut scalars, mut stages) = (Vec::new(), Vec::new());
        for id in (0..=graph.root).filter(|id| used[*id]) {
            if let Op::Column(column) = graph.ops[id] {
                builder.columns.push(column);
            }
            if let Op::Group(grouping, a) = graph.ops[id] {
                stages.push((Stage::Group(grouping, builder.pass(a)), builder.grouped.len()));
                builder.grouped.push(id);
            }
            if graph.varies[id] {
                continue;
            }
            let scalar_of = &builder.scalar_of;
            let stage = match graph.ops[id] {
                Op::Constant(_) | Op::Group(..) => None,
                Op::Column(_) => Some(Stage::Request(builder.columns.len() - 1)),
                Op::Unary(unary, a) => Some(Stage::Unary(unary, scalar_of[a])),
                Op::Binary(binary, a, b) => Some(Stage::Binary(binary, scalar_of[a], scalar_of[b])),
                Op::Where(a, b, c) => Some(Stage::Where(scalar_of[a], scalar_of[b], scalar_of[c])),
                Op::Reduce(reduction, a) => Some(Stage::Reduce(reduction, builder.pass(a))),
            };
            builder.scalar_of[id] = scalars.len();
            stages.extend(stage.map(|stage| (stage, scalars.len())));
            scalars.push(graph.constant(id).unwrap_or(f64::NAN));
        }
        let mut output = builder.pass(graph.root);
        if let Some(last) = output.steps.last_mut() {
            last.to = None;
        }
        let shared = shared(&mut stages, &mut output);
        Program {
            scalars,
            stages,
            output,
            shared,
            grouped: builder.grouped.len(),
            registers: builder.registers,
            columns: builder.columns,
            result,
        }
    }

    /// Returns the type of the values.
    pub fn result(&self) -> Type {
        self.result
    }

    /// Returns the columns that the program reads, in the order of its [`super::Inputs`].
    #[inline]
    pub fn columns(&self) -> &[Column] {
        &self.columns
    }
}

/// Takes the columns that several passes read from the columns that each pass has computed.
fn shared(stages: &mut [(Stage, usize)], output: &mut Pass) -> u64 {
    let passes = stages.iter_mut().filter_map(|(stage, _)| match stage {
        Stage::Reduce(_, pass) | Stage::Group(_, pass) => Some(pass),
        _ => None,
    });
    let mut passes: Vec<&mut Pass> = passes.chain([output]).collect();
    let (mut read, mut shared) = (0, 0);
    for pass in &passes {
        shared |= read & pass.computed;
        read |= pass.computed;
    }
    passes.iter_mut().for_each(|pass| pass.computed &= !shared);
    shared
}

/// Returns the operation that a step can do before an operation, and the operands of both.
fn pair(graph: &Graph, id: usize) -> Option<(Binary, Binary, [usize; 2])> {
    match graph.ops[id] {
        Op::Binary(Binary::Add, a, b) => Some((Binary::Add, Binary::Multiply, [a, b])),
        Op::Binary(Binary::Multiply, a, b) => Some((Binary::Multiply, Binary::Add, [a, b])),
        _ => None,
    }
}

/// Returns, for each sum below `result`, the product that it computes in its own step, and for each
/// product the sum: one of its operands, which nothing else uses.
fn inner(graph: &Graph, result: usize) -> Vec<Option<usize>> {
    let mut uses = vec![0; result + 1];
    uses[result] = 1;
    for id in (0..=result).rev() {
        if uses[id] > 0 && !matches!(graph.ops[id], Op::Group(..)) {
            graph.ops[id].operands().filter(|id| graph.varies[*id]).for_each(|id| uses[id] += 1);
        }
    }
    let mut inner: Vec<Option<usize>> = Vec::with_capacity(result + 1);
    for id in 0..=result {
        let found = pair(graph, id).and_then(|(_, before, [a, b])| {
            [b, a].into_iter().find(|id| {
                graph.varies[*id]
                    && uses[*id] == 1
                    && inner[*id].is_none()
                    && pair(graph, *id).is_some_and(|(op, ..)| op == before)
            })
        });
        inner.push(found);
    }
    inner
}

struct Builder<'a> {
    graph: &'a Graph,
    /// Index of the scalar that holds each value that is the same for all instances.
    scalar_of: Vec<usize>,
    columns: Vec<Column>,
    /// Values over groups, in column order.
    grouped: Vec<usize>,
    registers: usize,
}

impl Builder<'_> {
    /// Builds the steps that compute `result` for every instance.
    fn pass(&mut self, result: usize) -> Pass {
        let graph = self.graph;
        let inner = inner(graph, result);
        // The operand of a group reduction belongs to another pass.
        let vectors = |id: usize| {
            let here = !matches!(graph.ops[id], Op::Group(..));
            let first = inner[id];
            let of_first = first.into_iter().flat_map(|first| graph.ops[first].operands());
            let operands = graph.ops[id].operands().filter(move |operand| Some(*operand) != first);
            operands.chain(of_first).filter(move |operand| here && graph.varies[*operand])
        };
        // Last use of each value: its register is free after that. The result's register is never
        // free.
        let mut last_use = vec![None; result + 1];
        last_use[result] = Some(usize::MAX);
        for id in (0..=result).rev() {
            if last_use[id].is_some() && graph.varies[id] {
                vectors(id).for_each(|operand| last_use[operand] = last_use[operand].max(Some(id)));
            }
        }
        let mut register_of = vec![usize::MAX; result + 1];
        let (mut free, mut used, mut steps) = (Vec::new(), 0, Vec::new());
        let source = |id: usize, register_of: &[usize]| match graph.ops[id] {
            Op::Column(column) if column.varies() => {
                let place = self.columns.iter().position(|each| *each == column);
                Source::Column { place: place.expect("operands come first"), number: column.number() }
            }
            Op::Group(..) => {
                let place = self.grouped.iter().position(|each| *each == id);
                Source::Grouped(place.expect("operands come first"))
            }
            _ if graph.varies[id] => Source::Register(register_of[id]),
            _ => Source::Scalar(self.scalar_of[id]),
        };
        for id in 0..=result {
            if last_use[id].is_none() || !graph.varies[id] {
                continue;
            }
            let of = |id| source(id, &register_of);
            let op = match graph.ops[id] {
                Op::Unary(unary, a) => StepOp::Unary(unary, of(a)),
                Op::Binary(binary, a, b) => match inner[id] {
                    Some(first) => {
                        let (before, _, [x, y]) = pair(graph, first).expect("a sum or a product");
                        let (x, y, other) = (of(x), of(y), of(if a == first { b } else { a }));
                        match before {
                            Binary::Multiply => StepOp::MultiplyAdd(x, y, other),
                            _ => StepOp::AddMultiply(x, y, other),
                        }
                    }
                    None => StepOp::Binary(binary, of(a), of(b)),
                },
                Op::Where(a, b, c) => StepOp::Where(of(a), of(b), of(c)),
                Op::Constant(_) | Op::Column(_) | Op::Reduce(..) | Op::Group(..) => continue,
            };
            let register = free.pop().unwrap_or_else(|| {
                used += 1;
                used - 1
            });
            steps.push(Step { op, to: Some(register) });
            register_of[id] = register;
            for operand in vectors(id) {
                if last_use[operand] == Some(id) && register_of[operand] != usize::MAX {
                    free.push(std::mem::replace(&mut register_of[operand], usize::MAX));
                }
            }
        }
        let result = source(result, &register_of);
        self.registers = self.registers.max(used);
        let mut computed = 0;
        for read in steps.iter().flat_map(|step| step.op.operands()).chain([result]) {
            if let Source::Column { place, number } = read
                && matches!(self.columns[place], Column::Computed(_))
            {
                computed |= 1 << number;
            }
        }
        Pass { steps, result, computed }
    }
}
