//! The requests that a request waits for: its previous turn, and for a join further ones, such as
//! the last turns of its subagents.
use super::{Workload, bad};
use lmetric_core::CoreError;
use lmetric_core::ids::Seconds;

/// The relation between requests and the requests that they wait for.
#[derive(Clone, Debug, Default)]
pub(crate) struct Waits {
    /// Number of requests that each request waits for.
    pub counts: Vec<u32>,
    /// Request `i` is waited for by `followers[offsets[i]..offsets[i + 1]]`, in order.
    offsets: Vec<u32>,
    followers: Vec<u32>,
}

impl Waits {
    /// Reads the columns of a trace with `n` requests.
    ///
    /// # Errors
    /// `BadValue` for a request that does not exist, waits for itself, is named twice, or waits in
    /// a circle.
    pub fn new(n: usize, previous: &[i64], joins: &[i64]) -> Result<Waits, CoreError> {
        if joins.len() % 2 == 1 {
            return bad("length of joins".into(), joins.len(), "an even number: pairs of requests");
        }
        let request = |what: String, index: i64, other: usize| match usize::try_from(index)
            .ok()
            .filter(|i| *i < n && *i != other)
        {
            Some(index) => Ok(index),
            None => bad(what, index, format!("another request (0 to {})", n - 1)),
        };
        let mut pairs = Vec::with_capacity(n + joins.len() / 2);
        for (i, &before) in previous.iter().enumerate().filter(|(_, before)| **before != -1) {
            pairs.push((request(format!("previous of request {i}"), before, i)?, i));
        }
        for (at, pair) in joins.chunks_exact(2).enumerate() {
            let i = request(format!("joins, first request of pair {at}"), pair[0], usize::MAX)?;
            pairs.push((request(format!("joins, second request of pair {at}"), pair[1], i)?, i));
        }
        pairs.sort_unstable();
        if let Some(twice) = pairs.windows(2).find(|pair| pair[0] == pair[1]) {
            let (before, i) = twice[0];
            let expected = "each request that it waits for once, in previous or in joins";
            return bad(format!("joins of request {i}"), format!("request {before} twice"), expected);
        }
        let mut waits = Waits { counts: vec![0; n], offsets: vec![0; n + 1], followers: Vec::new() };
        for &(before, i) in &pairs {
            waits.counts[i] += 1;
            waits.offsets[before + 1] += 1;
            waits.followers.push(i as u32);
        }
        (0..n).for_each(|i| waits.offsets[i + 1] += waits.offsets[i]);
        let reached = waits.order();
        if reached.len() < n {
            let mut known = vec![false; n];
            reached.iter().for_each(|&i| known[i] = true);
            let stuck = known.iter().position(|k| !k).unwrap_or(0);
            let before = pairs.iter().find(|(before, i)| *i == stuck && !known[*before]);
            return bad(
                format!("previous of request {stuck}"),
                before.map_or(-1, |(before, _)| *before as i64),
                "one that does not wait for it in turn",
            );
        }
        Ok(waits)
    }

    /// Returns the requests that wait for this request's end.
    pub fn followers(&self, request: usize) -> impl Iterator<Item = usize> {
        let range = self.offsets[request] as usize..self.offsets[request + 1] as usize;
        self.followers[range].iter().map(|&i| i as usize)
    }

    /// Returns the requests, each behind all requests that it waits for. Requests that wait in a
    /// circle, or for such a request, are missing.
    pub fn order(&self) -> Vec<usize> {
        let mut left = self.counts.clone();
        let mut order: Vec<usize> = (0..left.len()).filter(|&i| left[i] == 0).collect();
        let mut at = 0;
        while let Some(&i) = order.get(at) {
            order.extend(self.followers(i).filter(|&next| {
                left[next] -= 1;
                left[next] == 0
            }));
            at += 1;
        }
        order
    }
}

/// The requests of a run that still wait for others.
#[derive(Clone, Debug)]
pub(crate) struct Waiting {
    /// Number of requests that each request still waits for, and the latest end of the others.
    left: Vec<u32>,
    ended: Vec<Seconds>,
}

impl Waiting {
    pub fn new(workload: &Workload) -> Waiting {
        Waiting { left: workload.shape.waits.counts.clone(), ended: vec![0.0; workload.len()] }
    }

    /// Takes the end of a request. Returns the requests that wait for no other request any more,
    /// with their arrivals.
    pub fn end(
        &mut self,
        workload: &Workload,
        request: usize,
        end: Seconds,
    ) -> impl Iterator<Item = (Seconds, u32)> {
        workload.shape.waits.followers(request).filter_map(move |next| {
            self.left[next] -= 1;
            self.ended[next] = self.ended[next].max(end);
            let earliest = workload.arrival_seconds[next];
            let arrival = earliest.max(self.ended[next] + workload.think_seconds(next));
            (self.left[next] == 0).then_some((arrival, next as u32))
        })
    }
}
