//! Planners: how requests are split that no roles split. Each is one file here and one row of
//! `planners!`.
use crate::error::CoreError;
use crate::ids::{InstanceId, Seconds};
use crate::indicators::Indicator;
use crate::plan::Cuts;
use crate::policy::{Knob, Knobs};
use crate::router::context::DecisionContext;
use crate::router::parts::{Follow, Turn};
use crate::router::settings::Split;
use crate::router::state::{Asked, Planner, State};
use crate::split::{Load, Whole};
use crate::suggest::nearest;

/// Each row is a file with its declaration `SPEC`, in the order of the docs page.
macro_rules! planners {
    ($($file:ident,)*) => {
        $(mod $file;)*
        static PLANNERS: &[&PlannerSpec] = &[$(&$file::SPEC,)*];
    };
}

planners! {
    libra,
    apart,
    force,
}

/// The declaration of a planner.
pub struct PlannerSpec {
    /// Its name in configuration.
    pub name: &'static str,
    /// What it does.
    pub about: &'static str,
    /// Where it was read: paper and section.
    pub source: &'static str,
    /// Its settings.
    pub settings: &'static [Knob],
    /// Whether the last token that an engine makes before a split in the answer counts, its KV
    /// being left to the next engine.
    pub keeps_tokens: bool,
    build: fn(&Knobs) -> Result<Box<dyn Planner>, CoreError>,
}

/// Declarations of all planners, in the order of the docs page.
pub fn specs() -> &'static [&'static PlannerSpec] {
    PLANNERS
}

/// Classes that lengths are kept of, 0.5 KiB each; the one used least recently leaves.
const CLASSES: u32 = 1024;

impl Split {
    /// The declaration of its planner; `None`: requests are not split.
    ///
    /// # Errors
    /// `UnknownName` with the nearest planner.
    pub fn spec(&self) -> Result<Option<&'static PlannerSpec>, CoreError> {
        let Some(name) = self.planner.as_deref() else { return Ok(None) };
        match PLANNERS.iter().find(|spec| spec.name == name) {
            Some(spec) => Ok(Some(spec)),
            None => Err(CoreError::UnknownName {
                kind: "split".into(),
                name: name.into(),
                nearest: nearest(name, PLANNERS.iter().map(|spec| spec.name)),
            }),
        }
    }

    /// See [`PlannerSpec::keeps_tokens`].
    pub fn keeps_tokens(&self) -> bool {
        matches!(self.spec(), Ok(Some(spec)) if spec.keeps_tokens)
    }

    /// All settings of the planner with their values, those that were not given at their defaults.
    ///
    /// # Errors
    /// `UnknownName` for a planner or a setting, `BadValue` for a setting out of its range.
    pub fn check(&self) -> Result<Vec<(&'static str, f64)>, CoreError> {
        let Some(spec) = self.spec()? else { return Ok(Vec::new()) };
        let settings = self.resolve(spec)?;
        (spec.build)(&settings)?;
        Ok(settings.iter().collect())
    }

    fn resolve(&self, spec: &PlannerSpec) -> Result<Knobs, CoreError> {
        Knobs::resolve(&format!("split {}", spec.name), spec.settings, &self.settings)
    }

    fn build(&self) -> Result<Option<Box<dyn Planner>>, CoreError> {
        let Some(spec) = self.spec()? else { return Ok(None) };
        Ok(Some((spec.build)(&self.resolve(spec)?)?))
    }
}

impl State {
    /// Sets how requests are split from now on that no roles split.
    ///
    /// # Errors
    /// `UnknownName` for a planner or a setting, `BadValue` for a setting out of its range.
    pub fn set_split(&mut self, split: Split) -> Result<(), CoreError> {
        let planner = split.build()?;
        let lengths = planner.as_ref().map_or(Ok(None), |planner| planner.lengths())?;
        if lengths.is_none() || self.lengths.is_none() {
            self.lengths = lengths;
        }
        if let Some(seconds) = planner.as_ref().and_then(|planner| planner.recent_seconds()) {
            self.ledger.set_recent(seconds);
        }
        (self.split, self.planner) = (split, planner);
        Ok(())
    }

    /// The second instance of a request, still without the token at which it begins; the request is
    /// left in one piece if there is none.
    fn second(&self, context: &mut DecisionContext, asked: &Asked<'_>) -> Option<(InstanceId, Follow)> {
        let Asked { request, first, failed, now } = *asked;
        let handoff = self.expected_handoff(context, request, first, now);
        let Ok(second) = self.choose(context, request, Turn::Peer(Some(first)), failed, Some(handoff), now)
        else {
            context.leave_whole("no second instance takes over");
            return None;
        };
        Some((second, self.follow(context, 0, Some(second), handoff)))
    }

    /// The request, and what two instances hold of it.
    fn whole(&self, context: &DecisionContext, asked: &Asked<'_>, second: InstanceId) -> Whole {
        let request = asked.request;
        Whole {
            prompt_tokens: request.prompt_tokens,
            first_hit_tokens: self.hit_tokens_on(context, asked, asked.first),
            second_hit_tokens: self.hit_tokens_on(context, asked, second),
            expected_output_tokens: request.expected_output_tokens.unwrap_or(1),
        }
    }

    /// Prompt tokens that an instance need not compute.
    fn hit_tokens_on(&self, context: &DecisionContext, asked: &Asked<'_>, id: InstanceId) -> u32 {
        self.saved_tokens(asked.request, context.hit_blocks[id.index()]) as u32
    }

    /// Where all of these instances' engines can hand over.
    fn cuts_of(&self, on: &[InstanceId]) -> Cuts {
        on.iter().map(|id| self.instances[id.index()].cuts).min().unwrap_or_default()
    }

    /// What is assigned to an instance.
    fn load_of(&self, id: InstanceId, now: Seconds) -> Load {
        let slot = id.index();
        let at = |indicator| self.ledger.get(indicator)[slot];
        Load {
            queued_prefill_tokens: self.ledger.queued_prefill_on(slot, now),
            queued_prefill_pairs: self.ledger.queued_pairs_on(slot),
            decoding: at(Indicator::DecodeBs) + at(Indicator::BoundBs),
            context_tokens: at(Indicator::Tokens),
            remaining_output_tokens: at(Indicator::RemainingTokens) + self.ledger.bound_remaining_on(slot),
        }
    }
}
