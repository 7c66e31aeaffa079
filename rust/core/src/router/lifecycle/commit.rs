//! Commits of plans: ticket, decision record, and ledger entries of the segments.
use super::writer::Lifecycle;
use crate::program::Work;
use crate::receipt::Receipt;
use crate::request::{Arm, Request};
use crate::router::decision::Decision;
use crate::router::parts::Chosen;
use crate::router::tickets::{TicketId, TicketState};

impl Lifecycle<'_> {
    /// Opens the ticket of a planned request and adds its segments to the ledger. The ticket has no
    /// chain yet ([`Lifecycle::keep_chain`]). `receipt`: decision record of the first choice.
    pub fn commit(&mut self, request: &Request<'_>, chosen: Chosen, mut receipt: Box<Receipt>) -> Decision {
        let Lifecycle { state, context, requests, now } = self;
        let now = *now;
        let first = chosen.first;
        let (hit, tier) = state.reusable_tokens(request, context.blocks_on(first.index()));
        let matched = context.hit_blocks.iter().copied().max().unwrap_or(0);
        let (scores, eligible) = (&context.first.scores, &context.first.eligible);
        if state.first_of(request.arm).guarded {
            state.guard.observe(now, request.chain, matched, scores, eligible, first);
        }
        let (leg, later) = state.legs_of(context, request, &chosen, now);
        requests.totals.left_out += u64::from(receipt.left_out);
        requests.totals.filter_waived += u64::from(receipt.filter_waived);
        receipt.next = state.next_in(&chosen.rest);
        receipt.cuts.extend(chosen.rest.iter().map(|follow| follow.from_token));
        receipt.uncut = chosen.uncut;
        receipt.unpulled = request.unpulled.filter(|_| state.pulls.is_some()).map(Into::into);
        receipt.pull = chosen.pull.as_ref().map(|pulling| state.pull_told(pulling));
        let rate = || state.mean_prefill_rate();
        let (priority, place) = match &mut requests.ordering {
            Some(ordering) => {
                ordering.prioritise(rate, &request.tenant, request.prompt_tokens, hit as u32, now)
            }
            None => (None, None),
        };
        receipt.priority = priority;
        receipt.balance = chosen.balance;
        receipt.program = request.arrival.and_then(|id| requests.admission.note(id, now));
        let id = requests.receipts.push(receipt);
        let (segment, next) = (leg.segment, later.first().map(|leg| leg.segment));
        let ticket = requests.tickets.open(TicketState {
            leg,
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
            may_be_cut: request.uncut.is_none(),
            may_be_pulled_for: request.unpulled.is_none(),
            instances: request.instances.cloned(),
            session: request.session,
            tenant: request.tenant,
            lora: request.lora,
            priority: request.priority,
            turn: requests.turns.as_mut().map(|turns| turns.arrived(request, now)).unwrap_or_default(),
            arrival: request.arrival,
            whole_answer: request.whole_answer,
            place,
            arm: request.arm,
            failed: Vec::new(),
            lost: Vec::new(),
        });
        if let Some(demand) = &mut requests.demand {
            demand.note(request.chain, request.prompt_tokens, request.tokens_per_block, now);
        }
        requests.totals.split += u64::from(segment.to_token.is_some_and(|_| state.peers(&segment)));
        requests.totals.decisions += 1;
        match (&mut state.canary, request.arm) {
            (Some(canary), Arm::Canary) => canary.made += 1,
            _ => state.first.made += 1,
        }
        if let Some(id) = request.arrival {
            let work = || {
                let new_tokens = f64::from(request.prompt_tokens) - hit;
                let seconds = state.computing_seconds(first.index(), hit, new_tokens, &mut None);
                Work { new_tokens, hit_tokens: hit, seconds }
            };
            requests.admission.computes(id, work, now);
            requests.admission.placed(id, segment.instance, now);
        }
        self.open_legs(ticket);
        let pull = chosen.pull.map(|pulling| pulling.pull);
        let (predicted_hit_tokens, predicted_tier_tokens) = (hit as u32, tier as u32);
        Decision { id, ticket, segment, next, pull, predicted_hit_tokens, predicted_tier_tokens, priority }
    }

    /// Sets the chain of a ticket's prompt.
    pub fn keep_chain(&mut self, ticket: TicketId, chain: Vec<u64>) {
        if let Ok(state) = self.requests.tickets.get(ticket) {
            state.chain = chain;
        }
    }
}
