//! The event table: maps an event and the state of the open segment to effects. [`super`] applies
//! the effects.
use crate::plan::Event;
use crate::router::ledger::Stage;
use crate::router::tickets::PlacedSegment;

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
    /// Returns the position of a segment in its request.
    pub fn of(placed: &PlacedSegment) -> Place {
        match placed.segment.to_token {
            None => Place::Last,
            Some(_) if placed.prefills_only() => Place::Prefill,
            Some(_) => Place::Part,
        }
    }
}

/// One effect of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// The KV index records the prompt for the instance (once per segment).
    RecordPrompt,
    /// The KV index expects the computed prompt on the instance, which holds it while it decodes.
    ExpectPrompt,
    /// The prompt joins the instance's prefill backlog, if it is not there yet.
    Enqueue,
    /// The segment leaves the engine's queue.
    Dequeue,
    /// The backlog is set to the number of prompt tokens that the engine has to compute.
    Rebook,
    /// The computed tokens leave the backlog.
    CountPrefilled,
    /// The prefix fetch is over; its tokens are counted and its cost is learned.
    LearnFetch,
    /// The prefix fetch is over or no longer needed; it stops counting at its holder.
    EndFetch,
    /// The segment decodes from now on; the prefill's cost is learned.
    BeginDecoding,
    /// The first token is counted and the time to first token recorded.
    CountFirstToken,
    /// Output tokens are counted.
    CountTokens,
    /// The context of the segment on its instance grows by its output tokens.
    Grow,
    /// The open segment is closed and the next segment opened. An unbound next segment gets an
    /// instance now.
    HandOver,
    /// The event is also applied to the segment that is open now.
    Again,
    /// The open segment ends at its current token, and the segment that the move bound is opened.
    CompleteMove,
    /// The ticket is closed as finished; lengths and durations are learned.
    Finish,
    /// The segment is placed on the best instance that has not failed it; if no instance is left,
    /// the ticket is closed as failed.
    PlaceAnew,
    /// The ticket is closed as failed.
    Fail,
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
        (Event::FirstToken, _) => &[RecordPrompt, EndFetch, BeginDecoding, CountFirstToken, ExpectPrompt],
        (Event::Sent, _) if decodes => &[RecordPrompt],
        (Event::Sent, _) => &[RecordPrompt, Enqueue],
        (Event::Fetched { .. }, _) => &[RecordPrompt, LearnFetch],
        (Event::Scheduled(_), _) if stage == Stage::Bound => &[RecordPrompt, Dequeue, Rebook],
        (Event::Scheduled(_), _) => &[RecordPrompt, Rebook],
        (Event::Prefilled(_), _) => &[RecordPrompt, CountPrefilled],
        (Event::Tokens(_), _) if decodes => &[RecordPrompt, CountTokens, Grow],
        (Event::Tokens(_), _) => &[RecordPrompt, CountTokens],
        (Event::Failed(failure), _) if !decodes && failure.may_move() => &[PlaceAnew],
        (Event::Failed(_) | Event::GaveUp(_), _) => &[Fail],
    }
}
