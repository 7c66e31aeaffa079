//! Workloads: requests, and the chained hashes of their prompts' blocks, made once and shared by
//! all runs of a study.
use crate::hash;
use lmetric_core::CoreError;
use lmetric_core::ids::Seconds;
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_64;

mod ideal;
mod waits;

pub(crate) use waits::Waiting;
use waits::Waits;

/// A trace's requests as columns. `think_tokens`, `previous`, `think_seconds`, `sessions` and
/// `finish` are empty or as long as the others.
#[derive(Clone, Debug, Default)]
pub struct Trace<'a> {
    /// Arrival of each request, in seconds from the trace's start.
    pub arrival_seconds: &'a [Seconds],
    /// Prompt tokens, at least 1.
    pub input_tokens: &'a [i64],
    /// Output tokens. The prefill makes one in any case: 0 counts as 1.
    pub output_tokens: &'a [i64],
    /// Leading output tokens that are reasoning tokens: nobody reads them as they come.
    pub think_tokens: &'a [i64],
    /// Request `i` owns `hash_ids[hash_offsets[i]..hash_offsets[i + 1]]`.
    pub hash_offsets: &'a [i64],
    /// Names of blocks of `block_tokens` prompt tokens. Prompts share a block if the block and all
    /// blocks before it are equal.
    pub hash_ids: &'a [u64],
    /// Prompt tokens under one id (the last of a prompt may stand for fewer).
    pub block_tokens: u32,
    /// The request whose end each request waits for; -1: none.
    pub previous: &'a [i64],
    /// Further requests that requests wait for, as pairs in a flat list: a request, and a request
    /// whose end it waits for, too.
    pub joins: &'a [i64],
    /// Seconds from the last of these ends to the arrival, which is never earlier than
    /// `arrival_seconds`.
    pub think_seconds: &'a [Seconds],
    /// The conversation of each request; -1: none.
    pub sessions: &'a [i64],
    /// Why each answer ends: 0: stop, 1: tool calls, 2: length, -1: unknown.
    pub finish: &'a [i64],
}

/// Requests prepared for engines of one block size. Cloning shares everything except the arrivals.
#[derive(Clone, Debug)]
pub struct Workload {
    pub(crate) arrival_seconds: Vec<Seconds>,
    /// Speed of the users' think time, relative to the trace.
    speed: f64,
    pub(crate) shape: Arc<Shape>,
}

/// All columns of a workload except its arrivals.
#[derive(Debug, Default)]
pub(crate) struct Shape {
    pub block_tokens: u32,
    pub input_tokens: Vec<u32>,
    pub output_tokens: Vec<u32>,
    pub think_tokens: Vec<u32>,
    pub sessions: Vec<Option<u64>>,
    pub waits: Waits,
    /// For each request, a follower whose prompt begins with its prompt and answer (index + 1; 0:
    /// none).
    continued_by: Vec<u32>,
    pub think_seconds: Vec<Seconds>,
    finish: Vec<i8>,
    offsets: Vec<usize>,
    chain: Vec<u64>,
}

impl Shape {
    /// Returns the chained hashes of the blocks of a prompt, including its partial last block.
    pub fn chain(&self, request: usize) -> &[u64] {
        &self.chain[self.offsets[request]..self.offsets[request + 1]]
    }

    /// Returns the chained hashes of the full blocks of a prompt and its answer, as far as a
    /// follower's prompt names them; at least the prompt's.
    pub fn chain_with_answer(&self, request: usize) -> &[u64] {
        let tokens = match self.continued_by[request] {
            0 => return self.full_blocks(request, self.input_tokens[request]),
            // The last token has no KV.
            _ => self.input_tokens[request] + self.output_tokens[request] - 1,
        };
        self.full_blocks(self.continued_by[request] as usize - 1, tokens)
    }

    /// Returns the hashes of the full blocks among the first `tokens` tokens of a prompt.
    pub fn full_blocks(&self, request: usize, tokens: u32) -> &[u64] {
        let chain = self.chain(request);
        &chain[..chain.len().min((tokens / self.block_tokens) as usize)]
    }

    /// Finds the requests whose answers a follower's prompt holds. A follower holds the answer if
    /// its prompt is long enough and has the same full blocks of the prompt. If the prompt has no
    /// full block, the follower must be of the same session.
    fn continue_prompts(&mut self) {
        self.continued_by = (0..self.input_tokens.len())
            .map(|i| {
                let (prompt, total) = (self.input_tokens[i], self.input_tokens[i] + self.output_tokens[i]);
                let own = self.full_blocks(i, prompt).last();
                let continues = |next: usize| {
                    self.input_tokens[next] >= total
                        && match own {
                            Some(_) => self.full_blocks(next, prompt).last() == own,
                            None => self.sessions[i].is_some() && self.sessions[i] == self.sessions[next],
                        }
                };
                self.waits.followers(i).find(|&next| continues(next)).map_or(0, |next| next as u32 + 1)
            })
            .collect();
    }
}

fn bad<T>(what: String, got: impl ToString, expected: impl Into<String>) -> Result<T, CoreError> {
    Err(CoreError::BadValue { what, got: got.to_string(), expected: expected.into() })
}

impl Workload {
    /// Reads a trace for engines with blocks of `block_tokens` tokens. One of the two block sizes
    /// must divide the other.
    ///
    /// # Errors
    /// `BadValue` names the column, the request and the expected value.
    pub fn new(trace: &Trace<'_>, block_tokens: u32) -> Result<Workload, CoreError> {
        let n = trace.arrival_seconds.len();
        if n == 0 || n >= u32::MAX as usize {
            return bad("requests of the trace".into(), n, "at least one, below 2^32");
        }
        for (name, length, optional) in [
            ("input_tokens", trace.input_tokens.len(), false),
            ("output_tokens", trace.output_tokens.len(), false),
            ("hash_offsets", trace.hash_offsets.len().wrapping_sub(1), false),
            ("think_tokens", trace.think_tokens.len(), true),
            ("previous", trace.previous.len(), true),
            ("think_seconds", trace.think_seconds.len(), true),
            ("sessions", trace.sessions.len(), true),
            ("finish", trace.finish.len(), true),
        ] {
            if length != n && !(optional && length == 0) {
                return bad(format!("length of {name}"), length, format!("{n}, as arrival_seconds"));
            }
        }
        let (trace_block, engine_block) = (trace.block_tokens, block_tokens);
        if trace_block == 0
            || engine_block == 0
            || trace_block.max(engine_block) % trace_block.min(engine_block) != 0
        {
            return bad(
                "block_tokens".into(),
                format!("{engine_block} of the engine over {trace_block} of the trace"),
                "one that divides the other",
            );
        }
        check_arrivals(trace.arrival_seconds)?;
        let mut shape = Shape { block_tokens, ..Shape::default() };
        for (name, tokens, column) in [
            ("input_tokens", trace.input_tokens, &mut shape.input_tokens),
            ("output_tokens", trace.output_tokens, &mut shape.output_tokens),
        ] {
            let least = i64::from(name == "input_tokens");
            column.reserve_exact(n);
            for (i, &count) in tokens.iter().enumerate() {
                if count < least || count > 1 << 30 {
                    return bad(format!("{name} of request {i}"), count, format!("{least} to 2^30"));
                }
                column.push(count.max(1) as u32);
            }
        }
        shape.think_tokens = vec![0; n];
        for (i, &count) in trace.think_tokens.iter().enumerate() {
            let most = shape.output_tokens[i];
            match u32::try_from(count) {
                Ok(count) if count <= most => shape.think_tokens[i] = count,
                _ => {
                    return bad(
                        format!("think_tokens of request {i}"),
                        count,
                        format!("0 to {most}, its output tokens"),
                    );
                }
            }
        }
        shape.sessions = trace
            .sessions
            .iter()
            .map(|&s| u64::try_from(s).ok().map(|s| xxh3_64(&s.to_le_bytes())))
            .collect();
        shape.sessions.resize(n, None);
        shape.finish = vec![-1; n];
        for (i, &finish) in trace.finish.iter().enumerate() {
            match i8::try_from(finish) {
                Ok(finish @ -1..=2) => shape.finish[i] = finish,
                _ => {
                    let expected = "0 (stop), 1 (tool calls), 2 (length) or -1 (unknown)";
                    return bad(format!("finish of request {i}"), finish, expected);
                }
            }
        }
        shape.think_seconds = trace.think_seconds.to_vec();
        shape.think_seconds.resize(n, 0.0);
        if let Some(i) = shape.think_seconds.iter().position(|s| !(0.0..1e11).contains(s)) {
            return bad(format!("think_seconds of request {i}"), shape.think_seconds[i], "0 to 1e11 seconds");
        }
        shape.waits = Waits::new(n, trace.previous, trace.joins)?;
        shape.hash(trace)?;
        shape.continue_prompts();
        Ok(Workload { arrival_seconds: trace.arrival_seconds.to_vec(), speed: 1.0, shape: Arc::new(shape) })
    }

    /// Returns the same requests with arrivals and think times `speed` times as fast; everything
    /// else is shared.
    ///
    /// # Errors
    /// `BadValue` for a speed that is not above 0, or that leads to impossible times.
    pub fn faster(&self, speed: f64) -> Result<Workload, CoreError> {
        if !(speed > 0.0 && speed.is_finite()) {
            return bad("speed".into(), speed, "a finite number above 0");
        }
        let arrival_seconds: Vec<_> = self.arrival_seconds.iter().map(|at| at / speed).collect();
        check_arrivals(&arrival_seconds)?;
        Ok(Workload { arrival_seconds, speed: self.speed * speed, shape: self.shape.clone() })
    }

    /// Returns the seconds from the end of the previous answer to the request.
    pub(crate) fn think_seconds(&self, request: usize) -> Seconds {
        self.shape.think_seconds[request] / self.speed
    }

    /// Returns whether no prompt continues this request and its answer.
    pub fn is_final(&self, request: usize) -> bool {
        self.shape.continued_by[request] == 0
    }

    /// Returns why an answer ends, as in [`Trace::finish`].
    pub fn finish(&self, request: usize) -> i8 {
        self.shape.finish[request]
    }

    /// Returns the number of requests.
    pub fn len(&self) -> usize {
        self.arrival_seconds.len()
    }

    /// Returns false: a workload has a request.
    pub fn is_empty(&self) -> bool {
        self.arrival_seconds.is_empty()
    }

    /// Returns the tokens per block of the engines for which the prompts are cut.
    pub fn block_tokens(&self) -> u32 {
        self.shape.block_tokens
    }

    /// Returns the number of named blocks over all prompts.
    pub fn blocks(&self) -> usize {
        self.shape.chain.len()
    }
}

fn check_arrivals(arrivals: &[Seconds]) -> Result<(), CoreError> {
    match arrivals.iter().position(|at| !(0.0..1e11).contains(at)) {
        Some(i) => bad(
            format!("arrival_seconds of request {i}"),
            arrivals[i],
            "seconds from the trace's start, 0 to 1e11",
        ),
        None => Ok(()),
    }
}

impl Shape {
    /// Chains the trace's ids over blocks of the engine's size: several ids make a block, or an id
    /// makes several blocks.
    fn hash(&mut self, trace: &Trace<'_>) -> Result<(), CoreError> {
        let (trace_block, block) = (u64::from(trace.block_tokens), u64::from(self.block_tokens));
        let (per_block, per_id) = ((block / trace_block).max(1) as usize, (trace_block / block).max(1));
        self.offsets.push(0);
        let mut bytes = Vec::new();
        for i in 0..self.input_tokens.len() {
            let tokens = self.input_tokens[i];
            let range = usize::try_from(trace.hash_offsets[i])
                .ok()
                .zip(usize::try_from(trace.hash_offsets[i + 1]).ok());
            let Some(ids) = range.and_then(|(from, to)| trace.hash_ids.get(from..to)) else {
                let got = format!("{} to {}", trace.hash_offsets[i], trace.hash_offsets[i + 1]);
                return bad(
                    format!("hash_offsets of request {i}"),
                    got,
                    format!("a range within 0 to {}", trace.hash_ids.len()),
                );
            };
            let tokens = u64::from(tokens);
            if ids.len() as u64 > tokens.div_ceil(trace_block) {
                let expected = format!("at most {} for {tokens} tokens", tokens.div_ceil(trace_block));
                return bad(format!("hash_ids of request {i}"), format!("{} ids", ids.len()), expected);
            }
            // A block with a name for its front only equals no other block, unless the prompt ends
            // in it.
            let covered = ids.len() as u64 * trace_block;
            let named = if covered < tokens { covered / block } else { tokens.div_ceil(block) } as usize;
            let end = self.chain.len() + named;
            let mut previous = hash::root(None);
            let known = self.begin_chain(i, trace, ids, (per_block, per_id as usize), named);
            if known > 0 {
                previous = self.chain[self.chain.len() - 1];
            }
            'ids: for group in ids.chunks(per_block).skip(known) {
                for part in 0..per_id {
                    if self.chain.len() == end {
                        break 'ids;
                    }
                    bytes.clear();
                    bytes.extend_from_slice(&previous.to_le_bytes());
                    group.iter().for_each(|id| bytes.extend_from_slice(&id.to_le_bytes()));
                    bytes.extend_from_slice(&part.to_le_bytes());
                    previous = xxh3_64(&bytes);
                    self.chain.push(previous);
                }
            }
            self.offsets.push(self.chain.len());
        }
        self.chain.shrink_to_fit();
        Ok(())
    }

    /// Begins the chain of a request, of up to `most` blocks, with the blocks that it shares with
    /// the prompt before it: most of an agent's prompt. `ids`: of the request; `(per_block,
    /// per_id)`: ids per block and blocks per id. Returns the groups of `per_block` ids that are
    /// done.
    fn begin_chain(
        &mut self,
        request: usize,
        trace: &Trace<'_>,
        ids: &[u64],
        (per_block, per_id): (usize, usize),
        most: usize,
    ) -> usize {
        let before = trace.previous.get(request).and_then(|&before| usize::try_from(before).ok());
        let Some(before) = before.filter(|&before| before < request) else { return 0 };
        let range = trace.hash_offsets[before] as usize..trace.hash_offsets[before + 1] as usize;
        let equal = trace.hash_ids[range].iter().zip(ids).take_while(|(a, b)| a == b).count();
        let (from, to) = (self.offsets[before], self.offsets[before + 1]);
        let groups = (equal / per_block).min((to - from).min(most) / per_id);
        self.chain.extend_from_within(from..from + groups * per_id);
        groups
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn workload(block_tokens: u32, prompts: &[(i64, &[u64])]) -> Result<Workload, CoreError> {
        workload_behind(block_tokens, prompts, &[])
    }

    fn workload_behind(
        block_tokens: u32,
        prompts: &[(i64, &[u64])],
        previous: &[i64],
    ) -> Result<Workload, CoreError> {
        let input: Vec<i64> = prompts.iter().map(|p| p.0).collect();
        let ids: Vec<u64> = prompts.iter().flat_map(|p| p.1.iter().copied()).collect();
        let mut offsets = vec![0];
        prompts.iter().for_each(|p| offsets.push(offsets.last().unwrap() + p.1.len() as i64));
        let (arrivals, output) = (vec![0.0; input.len()], vec![1; input.len()]);
        let trace = Trace {
            arrival_seconds: &arrivals,
            input_tokens: &input,
            output_tokens: &output,
            hash_offsets: &offsets,
            hash_ids: &ids,
            block_tokens: 8,
            previous,
            ..Trace::default()
        };
        Workload::new(&trace, block_tokens)
    }

    proptest! {
        #[test]
        fn a_chain_that_begins_with_another_is_equal_to_a_chain_of_its_own(
            prompts in prop::collection::vec((0i64..70, 0usize..8, 0usize..8, 0u64..2), 1..8),
        ) {
            // Prompts with a few ids of a family, then ids of their own.
            let ids: Vec<Vec<u64>> = prompts
                .iter()
                .enumerate()
                .map(|(i, &(_, common, own, family))| {
                    let common = (0..common as u64).map(|id| 10 * family + id);
                    common.chain((0..own as u64).map(|id| 1000 + 10 * i as u64 + id)).collect()
                })
                .collect();
            let prompts: Vec<(i64, &[u64])> =
                prompts.iter().zip(&ids).map(|(p, ids)| (p.0.max(8 * ids.len() as i64 - 7).max(1), &ids[..])).collect();
            let previous: Vec<i64> = (0..prompts.len() as i64).map(|i| i - 1).collect();
            for block in [2, 8, 24] {
                let alone = workload(block, &prompts).unwrap();
                let behind = workload_behind(block, &prompts, &previous).unwrap();
                prop_assert_eq!(&alone.shape.chain, &behind.shape.chain);
                prop_assert_eq!(&alone.shape.offsets, &behind.shape.offsets);
            }
        }
    }

    fn shared(w: &Workload, a: usize, b: usize) -> usize {
        w.shape.chain(a).iter().zip(w.shape.chain(b)).take_while(|(x, y)| x == y).count()
    }

    #[test]
    fn chains_cover_what_came_before_at_any_block_size() {
        // The second prompt differs from the first in its second id only, the third in its first.
        let prompts: [(i64, &[u64]); 3] = [(30, &[1, 2, 3, 4]), (30, &[1, 9, 3, 4]), (30, &[9, 2, 3, 4])];
        for (block, blocks, common) in [(8, 4, 1), (2, 15, 4), (16, 2, 0), (32, 1, 0)] {
            let w = workload(block, &prompts).unwrap();
            assert_eq!(w.shape.chain(0).len(), blocks, "blocks of {block}");
            assert_eq!((shared(&w, 0, 1), shared(&w, 0, 2)), (common, 0), "blocks of {block}");
        }
        // Fewer ids than blocks: the rest has no name.
        assert_eq!(workload(4, &[(30, &[1, 2])]).unwrap().shape.chain(0).len(), 4);
        assert_eq!(workload(4, &[(30, &[])]).unwrap().shape.chain(0).len(), 0);
        assert_eq!(workload(16, &[(30, &[1, 2, 3])]).unwrap().shape.chain(0).len(), 1);
        assert_eq!(workload(16, &[(24, &[1, 2, 3])]).unwrap().shape.chain(0).len(), 2);
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let message = |r: Result<Workload, CoreError>| r.unwrap_err().to_string();
        assert!(message(workload(12, &[(30, &[1])])).contains("12 of the engine over 8 of the trace"));
        assert!(message(workload(8, &[(8, &[1]), (8, &[1, 2])])).contains("hash_ids of request 1"));
        assert!(message(workload(8, &[(0, &[])])).contains("input_tokens of request 0"));
        let trace = Trace {
            arrival_seconds: &[0.0; 3],
            input_tokens: &[1; 3],
            output_tokens: &[1; 3],
            hash_offsets: &[0; 4],
            block_tokens: 8,
            previous: &[-1, 2, 1],
            ..Trace::default()
        };
        let thinks =
            message(Workload::new(&Trace { think_tokens: &[0, 2, 0], previous: &[], ..trace.clone() }, 8));
        assert!(thinks.contains("think_tokens of request 1"), "{thinks}");
        let circle = message(Workload::new(&trace, 8));
        assert!(circle.contains("previous of request 1"), "{circle}");
        let chained = Trace { previous: &[-1, 0, 1], ..trace };
        assert!(Workload::new(&chained, 8).is_ok());
    }
}
