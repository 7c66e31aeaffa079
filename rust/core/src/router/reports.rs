//! Reports of load from engines.
use super::ledger::Report;
use super::router::Router;
use crate::error::CoreError;
use crate::ids::Seconds;
use crate::indicators::{DeclaredIndicator, declared};

impl Router {
    /// Applies an engine's load report.
    ///
    /// # Errors
    /// `UnknownName`, or `BadValue` for an impossible number.
    pub fn engine_report(&mut self, name: &str, report: Report) -> Result<(), CoreError> {
        self.engine_report_with(name, report, [])
    }

    /// Applies an engine's load report with values of declared indicators.
    ///
    /// # Errors
    /// The errors of [`Router::engine_report`] and [`Router::report_declared`]. Nothing has changed
    /// then.
    pub fn engine_report_with<'a>(
        &mut self,
        name: &str,
        report: Report,
        extra: impl IntoIterator<Item = (&'a str, Option<f64>)>,
    ) -> Result<(), CoreError> {
        let id = self.state.fleet.find(name)?;
        for (what, value) in [
            ("waiting", report.waiting),
            ("running", report.running),
            ("kv_usage", report.kv_usage),
            ("prefill_tokens", report.prefill_tokens),
        ] {
            if let Some(v) = value.filter(|v| !v.is_finite() || *v < 0.0) {
                let what = format!("{what} in the load report of {name}");
                return Err(CoreError::bad_value(what, v, "a finite number, at least 0"));
            }
        }
        self.report_declared(name, extra, report.at)?;
        let at = self.clock(report.at);
        self.state.ledger.report(id.index(), Report { at, ..report });
        Ok(())
    }

    /// Sets the values of declared indicators for one instance, as of `at`. `None` removes the
    /// value, as if it had never been reported.
    ///
    /// # Errors
    /// `UnknownName` for an unknown instance or an undeclared indicator; `BadValue` for a value
    /// that is not finite. Nothing has changed then.
    pub fn report_declared<'a>(
        &mut self,
        name: &str,
        values: impl IntoIterator<Item = (&'a str, Option<f64>)>,
        at: Seconds,
    ) -> Result<(), CoreError> {
        let slot = self.state.fleet.find(name)?.index();
        let checked = |(indicator, value): (&str, Option<f64>)| {
            let decl = declared::find(indicator).ok_or_else(|| unknown_declared(indicator))?;
            match value.filter(|value| !value.is_finite()) {
                None => Ok((decl, value)),
                Some(bad) => {
                    let what = format!("{} in the load report of {name}", decl.name);
                    let expected = "a finite number, or none for a value that is no longer known";
                    Err(CoreError::bad_value(what, bad, expected))
                }
            }
        };
        let values: Vec<(&DeclaredIndicator, Option<f64>)> =
            values.into_iter().map(checked).collect::<Result<_, CoreError>>()?;
        let at = self.clock(at);
        values.iter().for_each(|(decl, value)| self.state.ledger.set_declared(slot, decl.id, *value, at));
        Ok(())
    }
}

fn unknown_declared(name: &str) -> CoreError {
    CoreError::unknown_name("declared indicator", name, declared::declared().iter().map(|decl| decl.name))
}
