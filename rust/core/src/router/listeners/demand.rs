//! The prompts of recent requests as a listener ([`crate::warm`]): each placed prompt is
//! remembered.
use super::listener::{Listener, Placement};
use crate::record::DecisionRecord;
use crate::router::tickets::Kept;
use crate::warm::Demand;

impl Listener for Demand {
    fn placed(&mut self, placement: &Placement<'_>, _: &mut DecisionRecord, _: &mut Kept) {
        let request = placement.request;
        self.note(request.chain, request.prompt_tokens, request.tokens_per_block, placement.now);
    }
}
