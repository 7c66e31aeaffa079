//! Where a plan cuts a request: at its prompt's end where roles say so, elsewhere where the split does.
use super::Router;
use super::decide::Turn;
use crate::error::CoreError;
use crate::fleet::Role;
use crate::ids::{InstanceId, Seconds};
use crate::plan::{Binding, Cuts, Segment};
use crate::receipt::Next;
use crate::request::Request;
use smallvec::SmallVec;

/// A segment that follows another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Follow {
    /// Its first token: where the one before it ends.
    pub from_token: u32,
    /// Where it runs; `None`: chosen when its turn comes.
    pub instance: Option<InstanceId>,
    /// Seconds until it is expected to start.
    pub start_seconds: Seconds,
}

/// What follows a first segment, in order.
pub(super) type Rest = SmallVec<[Follow; 2]>;

/// How requests are cut that no roles cut.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub enum Split {
    /// Not at all.
    #[default]
    None,
    /// Each at this fraction of its prompt and expected output, 0 to 1: to test engines and streams with.
    ForceAt(f64),
}

impl Split {
    /// # Errors
    /// `BadValue` for a setting out of its range.
    pub fn check(&self) -> Result<(), CoreError> {
        match self {
            Split::ForceAt(fraction) if !(*fraction > 0.0 && *fraction < 1.0) => Err(CoreError::BadValue {
                what: "split: fraction".into(),
                got: fraction.to_string(),
                expected: "more than 0 and less than 1".into(),
            }),
            _ => Ok(()),
        }
    }
}

impl Router {
    /// Sets how requests are cut from now on.
    ///
    /// # Errors
    /// `BadValue` for a setting out of its range.
    pub fn set_split(&mut self, split: Split) -> Result<(), CoreError> {
        split.check()?;
        self.split = split;
        Ok(())
    }

    /// How requests are cut.
    pub fn split(&self) -> Split {
        self.split
    }

    /// Says where an instance's engine can hand requests over and take them; a new one can anywhere.
    pub fn set_cuts(&mut self, id: InstanceId, cuts: Cuts) {
        self.cuts[id.index()] = cuts;
    }

    /// What follows a first segment on `first`; `failed`: slots that are not asked.
    pub(super) fn rest(
        &mut self,
        request: &Request<'_>,
        first: InstanceId,
        failed: &[u32],
        now: Seconds,
    ) -> Result<Rest, CoreError> {
        self.uncut = None;
        match self.fleet.role(first) {
            Role::Prefill => self.rest_of_prefill(request, first, now),
            Role::Both if self.split != Split::None => Ok(self.rest_of_split(request, first, failed, now)),
            _ => Ok(Rest::new()),
        }
    }

    fn rest_of_prefill(
        &mut self,
        request: &Request<'_>,
        first: InstanceId,
        now: Seconds,
    ) -> Result<Rest, CoreError> {
        if self.fleet.decoder_count() == 0 {
            return if self.config.colocate { Ok(Rest::new()) } else { Err(self.nobody(Turn::Later)) };
        }
        let handoff = self.expected_handoff(request, first, now);
        let instance = match self.config.binding {
            Binding::Early => Some(self.choose(request, Turn::Later, &[], Some(handoff), now)?),
            Binding::Late => None,
        };
        Ok(Rest::from_iter([Follow { from_token: request.prompt_tokens, instance, start_seconds: handoff }]))
    }

    /// The pair first, then the cut (Libra, section 4.1). Whatever stands against a cut leaves the request in one piece, with the reason.
    fn rest_of_split(
        &mut self,
        request: &Request<'_>,
        first: InstanceId,
        failed: &[u32],
        now: Seconds,
    ) -> Rest {
        if let Some(reason) = request.uncut {
            return self.leave_whole(reason);
        }
        if self.cuts[first.index()] == Cuts::Nowhere {
            return self.leave_whole("its instance cannot hand over");
        }
        let handoff = self.expected_handoff(request, first, now);
        let Ok(second) = self.choose(request, Turn::Peer(Some(first)), failed, Some(handoff), now) else {
            return self.leave_whole("no second instance takes over");
        };
        let able = self.cuts[first.index()].min(self.cuts[second.index()]);
        match self.cut(request, first, second, able, now) {
            Ok(from_token) => {
                Rest::from_iter([Follow { from_token, instance: Some(second), start_seconds: handoff }])
            }
            Err(reason) => self.leave_whole(reason),
        }
    }

    /// The token at which a request is cut between two instances whose engines are able to at `able`; or why it is not.
    fn cut(
        &mut self,
        request: &Request<'_>,
        _first: InstanceId,
        _second: InstanceId,
        able: Cuts,
        _now: Seconds,
    ) -> Result<u32, &'static str> {
        let prompt = request.prompt_tokens;
        let all = prompt.saturating_add(request.expected_output_tokens.unwrap_or(1));
        let wished = match self.split {
            Split::None => return Err("requests are not cut"),
            Split::ForceAt(fraction) => (f64::from(all) * fraction).ceil() as u32,
        };
        let token = able.nearest(wished, prompt).ok_or("its instances cannot hand over")?;
        // Each side has a token to compute: the last one is never computed, only made.
        if token == 0 || token + 1 >= all { Err("too short to be cut") } else { Ok(token) }
    }

    fn leave_whole(&mut self, reason: &str) -> Rest {
        self.uncut = Some(reason.into());
        Rest::new()
    }

    /// Whether the segment that a segment leads to is on an equal of its instance, and not on one that decodes only.
    pub(super) fn peers(&self, segment: &Segment) -> bool {
        self.fleet.role(segment.instance) != Role::Prefill
    }

    /// For the receipt: the first of what follows, as far as its instance is chosen.
    pub(super) fn next_in(&self, rest: &Rest) -> Option<Next> {
        let follow = rest.first()?;
        Some(self.next_of(follow.instance?, follow.start_seconds))
    }
}
