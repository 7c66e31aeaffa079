//! The event table: maps an event and the state of the open segment to effects. [`super`] applies
//! the effects.
use crate::plan::{Event, Failure, Usage};
use crate::router::ledger::Stage;
use crate::router::tickets::Leg;

/// The position of the open segment in its request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// No segment follows; the open segment runs to the end of the request.
    Last,
    /// The next segment produces the first output token: the open segment ends with the prompt.
    Prefill,
    /// The next segment begins after the first output token.
    Part,
}

impl Place {
    /// All values, with their names for the open segment.
    pub const NAMES: [(&'static str, Place); 3] =
        [("last segment", Place::Last), ("prefill segment", Place::Prefill), ("other segment", Place::Part)];

    /// Returns the position of a segment in its request.
    pub fn of(leg: &Leg) -> Place {
        match leg.segment.to_token {
            None => Place::Last,
            Some(_) if leg.prefills_only() => Place::Prefill,
            Some(_) => Place::Part,
        }
    }
}

macro_rules! effect_enum {
    ($($name:ident $about:literal,)*) => {
        /// One effect of an event.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Effect { $(#[doc = $about] $name),* }

        impl Effect {
            /// All effects, with their names and descriptions.
            pub const ALL: &[(Effect, &str, &str)] = &[$((Effect::$name, stringify!($name), $about)),*];

            /// Returns the name.
            pub fn name(self) -> &'static str {
                match self { $(Effect::$name => stringify!($name)),* }
            }
        }
    };
}

effect_enum! {
    RecordPrompt "The KV index records the prompt for the instance (once per segment).",
    Enqueue "The prompt joins the instance's prefill backlog, if it is not there yet.",
    Dequeue "The segment leaves the engine's queue.",
    Rebook "The backlog is set to the number of prompt tokens that the engine has to compute.",
    CountPrefilled "The computed tokens leave the backlog.",
    LearnFetch "The prefix fetch is over; its tokens are counted and its cost is learned.",
    EndFetch "The prefix fetch is over or no longer needed; it stops counting at its holder.",
    BeginDecoding "The segment decodes from now on; the prefill's cost is learned.",
    CountFirstToken "The first token is counted and the time to first token recorded.",
    CountTokens "Output tokens are counted.",
    Grow "The context of the segment on its instance grows by its output tokens.",
    HandOver "The open segment is closed and the next segment opened. An unbound next segment gets an instance now.",
    Again "The event is also applied to the segment that is open now.",
    CompleteMove "The open segment ends at its current token, and the segment that the move bound is opened.",
    Finish "The ticket is closed as finished; lengths and durations are learned.",
    PlaceAnew "The segment is placed on the best instance that has not failed it; if no instance is left, the ticket is closed as failed.",
    Fail "The ticket is closed as failed.",
}

/// Returns the effects of an event, in order, for a request whose open segment is in `stage` and
/// `place`.
pub fn effects(event: &Event, place: Place, stage: Stage) -> &'static [Effect] {
    use Effect::*;
    let decodes = stage == Stage::Decoding;
    match (event, place) {
        (Event::Moved, _) => &[CompleteMove],
        (Event::Finished(_), Place::Prefill | Place::Part) => &[RecordPrompt, HandOver],
        (Event::Finished(_), Place::Last) | (Event::Ended(_), _) => &[RecordPrompt, Finish],
        // Both segments run at once: the token comes from the next segment.
        (Event::FirstToken, Place::Prefill) => &[RecordPrompt, HandOver, Again],
        (Event::FirstToken, _) if decodes => &[RecordPrompt, EndFetch, CountFirstToken],
        (Event::FirstToken, _) => &[RecordPrompt, EndFetch, BeginDecoding, CountFirstToken],
        (Event::Sent, _) if decodes => &[RecordPrompt],
        (Event::Sent, _) => &[RecordPrompt, Enqueue],
        (Event::Pulled { .. }, _) => &[RecordPrompt, LearnFetch],
        (Event::Scheduled(_), _) if stage == Stage::Bound => &[RecordPrompt, Dequeue, Rebook],
        (Event::Scheduled(_), _) => &[RecordPrompt, Rebook],
        (Event::Prefilled(_), _) => &[RecordPrompt, CountPrefilled],
        (Event::Tokens(_), _) if decodes => &[RecordPrompt, CountTokens, Grow],
        (Event::Tokens(_), _) => &[RecordPrompt, CountTokens],
        (Event::Failed(failure), _) if !decodes && failure.may_move() => &[PlaceAnew],
        (Event::Failed(_) | Event::GaveUp(_), _) => &[Fail],
    }
}

/// Groups values with equal `of`: joined names (`any` for all values) and one of the values.
fn grouped<T: Copy, K: PartialEq>(all: &[(&'static str, T)], of: impl Fn(T) -> K) -> Vec<(String, T)> {
    let mut groups: Vec<(Vec<&str>, T)> = Vec::new();
    for (name, value) in all {
        match groups.iter_mut().find(|(_, first)| of(*first) == of(*value)) {
            Some((names, _)) => names.push(name),
            None => groups.push((vec![name], *value)),
        }
    }
    let joined = |names: &[&str]| if names.len() == all.len() { "any".into() } else { names.join(", ") };
    groups.into_iter().map(|(names, value)| (joined(&names), value)).collect()
}

/// Returns the event table and the effects' descriptions in Markdown.
pub fn markdown() -> String {
    let stages = [("queued", Stage::Bound), ("prefilling", Stage::Scheduled), ("decoding", Stage::Decoding)];
    let events = [
        ("sent", Event::Sent),
        ("prefix fetch over", Event::Pulled { tokens: 0, seconds: 0.0 }),
        ("scheduled", Event::Scheduled(None)),
        ("prefilled", Event::Prefilled(1)),
        ("first token", Event::FirstToken),
        ("tokens", Event::Tokens(1)),
        ("finished", Event::Finished(Usage::default())),
        ("ended early", Event::Ended(Usage::default())),
        ("moved", Event::Moved),
        ("failed, another instance may serve", Event::Failed(Failure::Reset)),
        ("failed, no instance may serve", Event::Failed(Failure::Cancelled)),
        ("gave up", Event::GaveUp(Failure::Reset)),
    ];
    let mut page =
        String::from("| event | open segment | its stage | effects |\n| --- | --- | --- | --- |\n");
    for (event_name, event) in events {
        // Group positions with equal effects in each stage, then stages with equal effects.
        let at = |place, stage| effects(&event, place, stage);
        let places = grouped(&Place::NAMES, |place| stages.map(|(_, stage)| at(place, stage)));
        for (place_names, place) in places {
            for (stage_names, stage) in grouped(&stages, |stage| at(place, stage)) {
                let names = at(place, stage).iter().map(|effect| effect.name());
                let names = names.collect::<Vec<_>>().join(", ");
                page += &format!("| {event_name} | {place_names} | {stage_names} | {names} |\n");
            }
        }
    }
    page += "\n| effect | what it does |\n| --- | --- |\n";
    for (_, name, about) in Effect::ALL {
        page += &format!("| {name} | {about} |\n");
    }
    page
}
