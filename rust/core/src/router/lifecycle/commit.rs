//! Commits of plans. In order:
//!
//! 1. The decision record gets the plan: follow-up segments, cuts, prefix fetch, reasons.
//! 2. The listeners follow the placement, in the order of [`Listeners`](crate::router::listeners).
//!    They add priority, program and other parts to the decision record.
//! 3. The decision record is stored.
//! 4. The ticket is opened, with its segments and the listeners' data.
//! 5. Totals and the policies' own counts grow.
//! 6. The ledger counts all segments, and the prefix fetch counts at its holder.
//!
//! The index follows when the request is sent (`record_prompt` in `events.rs`). Other workers see
//! the load when the router is released (`shared.rs`).
use super::writer::Lifecycle;
use crate::record::DecisionRecord;
use crate::request::Request;
use crate::router::decision::Decision;
use crate::router::listeners::{Listener, Placement};
use crate::router::parts::Chosen;
use crate::router::tickets::{Kept, TicketId, TicketState};

impl Lifecycle<'_> {
    /// Opens the ticket of a planned request and adds its segments to the ledger. The ticket has no
    /// chain yet ([`Lifecycle::keep_chain`]). `record`: decision record of the first choice.
    pub fn commit(
        &mut self,
        request: &Request<'_>,
        chosen: Chosen,
        mut record: Box<DecisionRecord>,
    ) -> Decision {
        let Lifecycle { state, context, requests, listeners, now } = self;
        let now = *now;
        let first = chosen.first;
        let (hit, tier) = state.reusable_tokens(request, context.matched.blocks_on(first.index()));
        let (placed, later) = state.segments_of(context, request, &chosen, now);
        record.next = state.next_in(&chosen.rest);
        record.cuts.extend(chosen.rest.iter().map(|follow| follow.from_token));
        record.split_reason = chosen.split_reason;
        record.fetch_reason = request.fetch_reason.filter(|_| state.fetches.is_some()).map(Into::into);
        record.fetch = chosen.fetch.as_ref().map(|planned| state.fetch_record(planned));
        record.balance = chosen.balance;
        let mut kept = Kept::default();
        let placement = Placement { state, context, request, first, hit_tokens: hit, now };
        listeners.placed(&placement, &mut record, &mut kept);
        let DecisionRecord { priority, left_out, filter_waived, .. } = *record;
        let id = requests.records.push(record);
        let (segment, next) = (placed.segment, later.first().map(|placed| placed.segment));
        let ticket = requests.tickets.open(TicketState {
            open: placed,
            later,
            handed_over: None,
            decision: id,
            decided_at: now,
            tokens_per_block: request.tokens_per_block,
            chain: Vec::new(),
            prompt_tokens: request.prompt_tokens,
            expected_output_tokens: request.expected_output_tokens,
            think_tokens: request.think_tokens,
            length_class: request.length_class,
            may_be_cut: request.split_reason.is_none(),
            may_fetch: request.fetch_reason.is_none(),
            instances: request.instances.cloned(),
            session: request.session,
            tenant: request.tenant,
            lora: request.lora,
            priority: request.priority,
            arrival: request.arrival,
            whole_answer: request.whole_answer,
            kept,
            arm: request.arm,
            failed: Vec::new(),
            lost: Vec::new(),
        });
        requests.totals.split += u64::from(segment.to_token.is_some_and(|_| state.peers(&segment)));
        requests.totals.left_out += u64::from(left_out);
        requests.totals.filter_waived += u64::from(filter_waived);
        requests.totals.decisions += 1;
        state.count_decision(request.arm);
        self.open_segments(ticket);
        let fetch = chosen.fetch.map(|planned| planned.fetch);
        let (predicted_hit_tokens, predicted_tier_tokens) = (hit as u32, tier as u32);
        Decision { id, ticket, segment, next, fetch, predicted_hit_tokens, predicted_tier_tokens, priority }
    }

    /// Sets the chain of a ticket's prompt.
    pub fn keep_chain(&mut self, ticket: TicketId, chain: Vec<u64>) {
        if let Ok(state) = self.requests.tickets.get(ticket) {
            state.chain = chain;
        }
    }
}
