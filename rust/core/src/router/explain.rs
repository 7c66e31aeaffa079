//! Writes a decision's receipt: all scores, and the terms of the best few.
use super::Router;
use crate::guard::Restriction;
use crate::ids::{InstanceId, Seconds};
use crate::indicators::{Indicator, Scope};
use crate::policy::Prefer;
use crate::receipt::{Candidate, Receipt, TERMS_KEPT};
use crate::request::Request;
use crate::wide::{lesser, wide};

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
        let mut best = Best::default();
        receipt.scores.resize(scores.len(), 0.0);
        let blocks = scores.chunks(BLOCK).zip(eligible.chunks(BLOCK)).zip(receipt.scores.chunks_mut(BLOCK));
        let mut scored = 0;
        for (i, ((scores, eligible), kept)) in blocks.enumerate() {
            let (count, least) = wide(|| keep(sign, scores, eligible, kept));
            scored += count;
            // Beyond the first blocks, hardly any has a score among the best few.
            if least < best.worst() {
                best.offer(sign, i * BLOCK, scores, eligible);
            }
        }
        let Best { kept: mut best } = best;
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

/// Slots looked at together.
const BLOCK: usize = 64;

/// Copies a block of scores into the receipt, NaN where left out; returns how many were not, and the least `sign * score`.
#[inline(always)]
fn keep(sign: f64, scores: &[f64], eligible: &[bool], kept: &mut [f32]) -> (usize, f64) {
    let (mut count, mut least) = (0, f64::INFINITY);
    for ((score, eligible), kept) in scores.iter().zip(eligible).zip(kept) {
        let good = *eligible & (score.abs() < f64::INFINITY);
        *kept = if good { *score as f32 } else { f32::NAN };
        let key = if good { sign * score } else { f64::INFINITY };
        least = lesser(key, least);
        count += usize::from(good);
    }
    (count, least)
}

/// The best few slots, best first, equals in slot order.
struct Best {
    kept: [(f64, u32); TERMS_KEPT],
}

impl Default for Best {
    fn default() -> Self {
        Best { kept: [(f64::INFINITY, u32::MAX); TERMS_KEPT] }
    }
}

impl Best {
    fn worst(&self) -> f64 {
        self.kept[TERMS_KEPT - 1].0
    }

    fn offer(&mut self, sign: f64, first: usize, scores: &[f64], eligible: &[bool]) {
        for (i, (score, _)) in
            scores.iter().zip(eligible).enumerate().filter(|(_, (s, e))| **e && s.is_finite())
        {
            let key = sign * score;
            if key < self.worst() {
                let mut place = TERMS_KEPT - 1;
                while place > 0 && key < self.kept[place - 1].0 {
                    self.kept[place] = self.kept[place - 1];
                    place -= 1;
                }
                self.kept[place] = (key, (first + i) as u32);
            }
        }
    }
}
