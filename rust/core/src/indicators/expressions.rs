//! Expressions over indicators: the columns behind names, and evaluation over a snapshot.
use super::columns::Columns;
use super::declared::{self, DeclaredId};
use super::kernels::Kernels;
use super::snapshot::Snapshot;
use super::table::{COUNT, INDICATORS, Indicator, IndicatorSet, Scope};
use crate::expr::{self, CHUNK, Column, ExprError, Inputs, Program, Type};
use std::ops::Range;

/// The indicator behind a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Named {
    /// A built-in indicator.
    BuiltIn(Indicator),
    /// An indicator that a program or a configuration declares.
    Declared(DeclaredId),
}

impl Named {
    /// Finds the indicator with this name, in any case.
    pub fn find(name: &str) -> Option<Named> {
        let declared = || declared::find(name).map(|decl| Named::Declared(decl.id));
        Indicator::from_name(name).map(Named::BuiltIn).or_else(declared)
    }

    /// Returns the names of all indicators.
    pub fn names() -> impl Iterator<Item = &'static str> {
        let declared = declared::declared().into_iter().map(|decl| decl.name);
        INDICATORS.iter().map(|decl| decl.name).chain(declared)
    }

    /// Returns the indicator's name.
    pub fn name(self) -> &'static str {
        match self {
            Named::BuiltIn(id) => id.decl().name,
            Named::Declared(id) => id.decl().name,
        }
    }

    /// Returns the indicators that a program reads, in the order of its columns.
    #[inline]
    pub fn read_by(program: &Program) -> impl Iterator<Item = Named> {
        program.columns().iter().map(|column| match column.number() {
            number if number < COUNT => Named::BuiltIn(INDICATORS[number].id),
            number => Named::Declared(DeclaredId::new(number - COUNT)),
        })
    }

    /// Returns whether the indicator has one value for all instances.
    pub fn of_request(self) -> bool {
        matches!(self, Named::BuiltIn(id) if id.decl().scope == Scope::Request)
    }

    /// Returns the column of programs.
    fn column(self) -> Column {
        match self {
            Named::BuiltIn(id) if IndicatorSet::TEXTS.contains(id) => Column::Text(id as usize),
            Named::BuiltIn(id) if self.of_request() => Column::Request(id as usize),
            Named::BuiltIn(id) if IndicatorSet::COMPUTED.contains(id) => Column::Computed(id as usize),
            Named::BuiltIn(id) => Column::Stored(id as usize),
            Named::Declared(id) => Column::Stored(COUNT + id.index()),
        }
    }
}

struct Names;

impl expr::Names for Names {
    fn find(&self, name: &str) -> Option<Column> {
        Named::find(name).map(Named::column)
    }

    fn all(&self) -> Vec<&str> {
        Named::names().collect()
    }
}

/// Compiles an expression over indicators. `constants` maps names to values.
///
/// # Errors
/// Error with the position, and the nearest known name.
pub fn compile(
    text: &str,
    expect: impl Into<Option<Type>>,
    constants: &[(&str, f64)],
) -> Result<Program, ExprError> {
    Program::compile(text, expect, &Names, constants)
}

/// Reusable buffers of evaluations.
#[derive(Clone, Debug, Default)]
pub struct Scratch {
    programs: expr::Scratch,
    /// Indicators that kernels computed for one chunk.
    computed: Columns,
    /// Truth values of a policy's filter, one per slot.
    pub(crate) filter: Vec<f64>,
}

impl Scratch {
    /// Returns columns of [`CHUNK`] entries for the results of kernels and the request's
    /// indicators.
    #[inline]
    pub(crate) fn computed(&mut self) -> &mut Columns {
        if self.computed.slots() == 0 {
            self.computed = Columns::of(IndicatorSet::DERIVED);
            self.computed.resize(CHUNK);
        }
        &mut self.computed
    }
}

/// Kernels, and the columns of one chunk that they write.
struct Computing<'a> {
    kernels: &'a dyn Kernels,
    columns: &'a mut Columns,
}

impl expr::Kernels for Computing<'_> {
    fn fill(&mut self, columns: u64, slots: Range<usize>) {
        self.kernels.fill(IndicatorSet::from_bits(columns), slots, 0, self.columns);
    }

    fn column(&self, number: usize) -> &[f64] {
        self.columns.get(INDICATORS[number].id)
    }
}

/// Evaluates a program that [`compile`] made over all slots of a snapshot. `out` has one entry per
/// slot (1.0 and 0.0 for truth values).
///
/// # Panics
/// If `out` does not have one entry per slot.
pub fn evaluate(program: &Program, snapshot: &Snapshot<'_>, scratch: &mut Scratch, out: &mut [f64]) {
    let columns = snapshot.columns;
    let mut inputs = Inputs::new(snapshot.eligible);
    inputs.set_groups(columns.groups());
    for named in Named::read_by(program) {
        inputs.push(match named {
            Named::BuiltIn(id) if columns.kernels().is_some() && IndicatorSet::COMPUTED.contains(id) => &[],
            Named::BuiltIn(id) => columns.get(id),
            Named::Declared(id) => snapshot.declared(id),
        });
    }
    match columns.kernels() {
        Some(kernels) => {
            scratch.computed();
            let Scratch { programs, computed, .. } = scratch;
            let mut computing = Computing { kernels, columns: computed };
            program.evaluate(inputs, Some(&mut computing), programs, out);
        }
        None => program.evaluate(inputs, None, &mut scratch.programs, out),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Vec<Named> {
        Named::read_by(&compile(text, None, &[]).unwrap()).collect()
    }

    #[test]
    fn every_name_has_the_column_of_its_indicator() {
        for decl in INDICATORS {
            assert_eq!(read(&format!("{0} == {0}", decl.name.to_uppercase())), [Named::BuiltIn(decl.id)]);
        }
        let declared = declared::add("rack_watts", "W", None, None).unwrap();
        assert_eq!(read("bs + Rack_Watts"), [Named::BuiltIn(Indicator::Bs), Named::Declared(declared.id)]);
        let error = compile("bs + rack_wats", None, &[]).unwrap_err();
        assert!(error.message.contains("did you mean `rack_watts`?"), "{error}");
    }
}
