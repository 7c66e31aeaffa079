//! Writes a decision's receipt: all scores, and the terms of the best few.
use super::Router;
use crate::guard::Restriction;
use crate::ids::{InstanceId, Seconds};
use crate::indicators::{Indicator, Scope};
use crate::policy::Prefer;
use crate::receipt::{Candidate, Receipt, TERMS_KEPT};
use crate::request::Request;

impl Router {
    pub(super) fn explain(
        &mut self,
        request: &Request<'_>,
        request_id: Option<&str>,
        chosen: InstanceId,
        predicted_hit_tokens: u32,
        now: Seconds,
    ) -> Receipt {
        let mut receipt = self.receipts.take();
        receipt.at = now;
        receipt.request_id = request_id.map(Into::into);
        receipt.prompt_tokens = request.prompt_tokens;
        receipt.prefer = self.scores.prefer;
        receipt.names = self.fleet.names().clone();
        receipt.predicted_hit_tokens = predicted_hit_tokens;
        receipt.report_age_seconds = self.books.reported_at(chosen.index()).map(|at| now - at);
        receipt.filter_waived = self.scores.filter_waived;
        receipt.reads.extend(self.reads.iter());
        receipt.tried.push(chosen.0);

        let eligible = &self.eligible;
        let scores = &self.scores.score;
        let sign = if receipt.prefer == Prefer::Max { -1.0 } else { 1.0 };
        // The best few by insertion: beyond the first few, hardly any slot gets past the first comparison.
        let mut best = [(f64::INFINITY, u32::MAX); TERMS_KEPT];
        let mut scored = 0;
        receipt.scores.extend(scores.iter().zip(eligible).enumerate().map(|(slot, (&score, &eligible))| {
            if !eligible || !score.is_finite() {
                return f32::NAN;
            }
            scored += 1;
            let key = score * sign;
            if key < best[TERMS_KEPT - 1].0 {
                let mut place = TERMS_KEPT - 1;
                while place > 0 && key < best[place - 1].0 {
                    best[place] = best[place - 1];
                    place -= 1;
                }
                best[place] = (key, slot as u32);
            }
            score as f32
        }));
        receipt.guard_excluded = match self.restriction {
            Restriction::Filtered(out) => out as u32,
            _ => 0,
        };
        receipt.balance_only = self.restriction == Restriction::BalanceOnly;
        let could = eligible.iter().filter(|e| **e).count();
        receipt.left_out = (could - scored) as u32;
        self.totals.left_out += u64::from(receipt.left_out);
        self.totals.filter_waived += u64::from(receipt.filter_waived);

        let chosen_key = scores[chosen.index()] * sign;
        receipt.margin = best
            .iter()
            .find(|(_, slot)| *slot != chosen.0 && *slot != u32::MAX)
            .map(|(key, _)| key - chosen_key);
        let live = best.iter().take_while(|(_, slot)| *slot != u32::MAX).count();
        // Among many equals the chosen one may have fallen off the end: it always has its place.
        if !best[..live].iter().any(|(_, slot)| *slot == chosen.0) {
            best[live - 1] = (chosen_key, chosen.0);
        }
        receipt.best.resize_with(live, Candidate::default);
        for (candidate, (key, slot)) in receipt.best.iter_mut().zip(best) {
            candidate.slot = slot;
            candidate.score = key * sign;
            candidate.terms.clear();
            candidate.terms.extend(receipt.reads.iter().map(|&id| self.term(id, slot as usize)));
        }
        receipt
    }

    fn term(&self, id: Indicator, slot: usize) -> f64 {
        let slot = if id.decl().scope == Scope::Request { 0 } else { slot };
        self.columns.get(id)[slot]
    }
}
