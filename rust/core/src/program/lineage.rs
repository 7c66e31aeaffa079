//! Lineage of prompts: which known program a prompt continues, and how much of it is known.
//!
//! Block hashes are chained, so the hash of one block stands for everything before it. Each program
//! registers the hash at the end of each of its latest prompts (a *mark*) and hashes at fixed
//! positions (*checkpoints*, at most 6% apart). A prompt's known part is monotone: a program that
//! registered a checkpoint registered all checkpoints before it. So the checkpoints form a tree. A
//! walk from its root finds the known part within 6%, and the marks behind the last known
//! checkpoint give the exact end of a known prompt. A look-up costs some microseconds at any number
//! of programs.
use super::types::ProgramId;
use hashbrown::HashMap;
use serde::{Deserialize, Serialize};
use slotmap::{SecondaryMap, SlotMap, new_key_type};

/// Checkpoints are this many blocks apart up to `DENSE`, then grow by this ratio.
const STEP: u32 = 4;
const DENSE: u32 = 64;
const RATIO: f64 = 1.06;
/// Marks kept per program; the oldest are dropped first.
const MARKS: usize = 64;

/// Returns the checkpoint behind `blocks`, as a number of blocks.
fn next_checkpoint(blocks: u32) -> u32 {
    if blocks < DENSE {
        (blocks / STEP + 1) * STEP
    } else {
        ((f64::from(blocks) * RATIO) as u32).max(blocks + STEP)
    }
}

/// A known end of a prompt: the position behind its last block, and that block's hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "(u32, u64)", into = "(u32, u64)")] // each program has many
pub struct Mark {
    /// Blocks before the mark.
    pub blocks: u32,
    /// Hash of the last of these blocks.
    pub hash: u64,
}

impl From<(u32, u64)> for Mark {
    fn from((blocks, hash): (u32, u64)) -> Mark {
        Mark { blocks, hash }
    }
}

impl From<Mark> for (u32, u64) {
    fn from(mark: Mark) -> (u32, u64) {
        (mark.blocks, mark.hash)
    }
}

/// The registered part of a prompt.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Prompt {
    /// Number of its blocks.
    pub blocks: u32,
    /// Hashes at its checkpoints.
    pub checkpoints: Vec<u64>,
    /// Hash of its last block.
    pub end: u64,
}

/// Registered hashes of one program.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Path {
    /// The segment at whose end its latest prompt's last checkpoint is.
    end: Option<SegmentId>,
    /// Ends of its prompts, oldest first.
    marks: Vec<Mark>,
}

new_key_type! {
    struct SegmentId;
}

/// Checkpoints that follow each other and that the same programs registered.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Segment {
    /// Hashes at the checkpoints.
    hashes: Vec<u64>,
    /// Checkpoints before the segment, and the segment that ends there.
    start: usize,
    before: Option<SegmentId>,
    /// Number of programs that registered these checkpoints, and the latest of them.
    programs: u32,
    latest: ProgramId,
}

impl Segment {
    /// Returns the number of leading checkpoints that a prompt with these checkpoints passes.
    fn passed_by(&self, mut hashes: impl Iterator<Item = u64>) -> usize {
        self.hashes.iter().take_while(|own| hashes.next() == Some(**own)).count()
    }
}

/// The known part of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub struct Known {
    /// The longest known end of a prompt that this prompt passes through, and its program.
    pub mark: Option<(Mark, ProgramId)>,
    /// Leading blocks that some program has registered, at least; and the hash of the last of them.
    pub shared: Option<Mark>,
    /// A program that registered `shared`.
    pub sharer: Option<ProgramId>,
}

/// Registered hashes of all programs: a tree of segments. A program whose prompt no other program
/// shares costs one entry of the map.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Lineage {
    paths: SecondaryMap<ProgramId, Path>,
    segments: SlotMap<SegmentId, Segment>,
    /// The segment that begins with a checkpoint.
    begins: HashMap<u64, SegmentId>,
    /// Latest program whose prompt ended at a block.
    marks: HashMap<u64, ProgramId>,
    /// Positions of all checkpoints up to the longest prompt so far.
    positions: Vec<u32>,
}

impl Lineage {
    /// Returns the positions of all checkpoints of a prompt with this number of blocks.
    pub(super) fn positions(&mut self, blocks: u32) -> &[u32] {
        while self.positions.last().copied().unwrap_or(0) < blocks {
            self.positions.push(next_checkpoint(self.positions.last().copied().unwrap_or(0)));
        }
        &self.positions[..self.positions.partition_point(|&at| at <= blocks)]
    }

    /// Looks a prompt up by the chained hashes of its blocks.
    pub fn look_up(&mut self, chain: &[u64]) -> Known {
        let blocks = u32::try_from(chain.len()).unwrap_or(u32::MAX);
        self.positions(blocks);
        let places = &self.positions[..self.positions.partition_point(|&at| at <= blocks)];
        let at = |place: u32| chain[place as usize - 1];
        let (mut known, mut sharer) = (0, None);
        while let Some(place) = places.get(known)
            && let Some(id) = self.begins.get(&at(*place))
        {
            let segment = &self.segments[*id];
            known += segment.passed_by(places[known..].iter().map(|place| at(*place)));
            sharer = Some(segment.latest);
            if known < segment.start + segment.hashes.len() {
                break;
            }
        }
        let from = known.checked_sub(1).map(|last| places[last]);
        let shared = from.map(|place| Mark { blocks: place, hash: at(place) });
        // The mark lies behind the last known checkpoint, or is one of the earlier marks.
        let to = places.get(known).copied().unwrap_or(blocks + 1).min(blocks + 1);
        let in_range = |from: u32, to: u32| {
            (from.max(1)..to).rev().find_map(|place| {
                let program = *self.marks.get(&at(place))?;
                Some((Mark { blocks: place, hash: at(place) }, program))
            })
        };
        let mark = in_range(from.unwrap_or(1), to);
        Known { mark, shared, sharer }
    }

    /// Returns the end of a program's latest prompt; `None` if it has no whole block.
    pub fn last(&self, program: ProgramId) -> Option<Mark> {
        self.paths.get(program)?.marks.last().copied()
    }

    /// Returns the longest end of a prompt of a program that `chain` passes through.
    pub fn fork_point(&self, program: ProgramId, chain: &[u64]) -> Option<Mark> {
        let passes = |mark: &&Mark| chain.get(mark.blocks as usize - 1) == Some(&mark.hash);
        self.paths.get(program)?.marks.iter().rev().find(passes).copied()
    }

    /// Registers a prompt of a program, in place of the part of its path that the prompt leaves.
    pub fn register(&mut self, program: ProgramId, chain: &[u64]) {
        let blocks = u32::try_from(chain.len()).unwrap_or(u32::MAX);
        let hashes: Vec<u64> =
            self.positions(blocks).iter().map(|place| chain[*place as usize - 1]).collect();
        let end = chain.last().map(|&hash| Mark { blocks, hash });
        self.enter(program, &hashes, end, |mark, _| chain.get(mark.blocks as usize - 1) != Some(&mark.hash));
    }

    /// Registers a prompt of a peer's program. Of the ends of earlier prompts, those before the
    /// last checkpoint that both prompts share are kept.
    pub fn register_prompt(&mut self, program: ProgramId, prompt: &Prompt) {
        let end = (prompt.blocks > 0).then_some(Mark { blocks: prompt.blocks, hash: prompt.end });
        self.enter(program, &prompt.checkpoints, end, |mark, kept| mark.blocks > kept);
    }

    /// Returns whether a prompt has as many checkpoints as its length asks for.
    pub fn is_prompt(&mut self, prompt: &Prompt) -> bool {
        self.positions(prompt.blocks).len() == prompt.checkpoints.len()
    }

    /// Returns what is registered of a program's latest prompt.
    pub fn prompt(&self, program: ProgramId) -> Prompt {
        let Some(path) = self.paths.get(program) else { return Prompt::default() };
        let (mut checkpoints, mut at) = (Vec::new(), path.end);
        while let Some(id) = at {
            checkpoints.splice(0..0, self.segments[id].hashes.iter().copied());
            at = self.segments[id].before;
        }
        let end = path.marks.last().copied().unwrap_or(Mark { blocks: 0, hash: 0 });
        Prompt { blocks: end.blocks, checkpoints, end: end.hash }
    }

    /// Registers a prompt by the hashes at its checkpoints and its end. `left`: whether the prompt
    /// leaves a path before a mark; its second argument is the last checkpoint that both share.
    fn enter(
        &mut self,
        program: ProgramId,
        hashes: &[u64],
        end: Option<Mark>,
        left: impl Fn(&Mark, u32) -> bool,
    ) {
        let mut path = self.paths.remove(program).unwrap_or_default();
        let (segment, known) = self.leave(path.end, hashes);
        path.end = self.add(program, segment, hashes, known);
        let kept = known.checked_sub(1).map_or(0, |last| self.positions[last]);
        let marks = &mut self.marks;
        path.marks.retain(|mark| {
            let gone = left(mark, kept);
            if gone {
                forget(marks, mark.hash, program);
            }
            !gone
        });
        if let Some(mark) = end {
            if path.marks.last() != Some(&mark) {
                if path.marks.len() == MARKS {
                    forget(marks, path.marks.remove(0).hash, program);
                }
                path.marks.push(mark);
            }
            marks.insert(mark.hash, program);
        }
        self.paths.insert(program, path);
    }

    /// Takes a program off the segments from `end` back to where a prompt with the checkpoints
    /// `hashes` leaves them. Returns the segment that ends there, and the checkpoints before.
    fn leave(&mut self, mut end: Option<SegmentId>, hashes: &[u64]) -> (Option<SegmentId>, usize) {
        while let Some(id) = end {
            let segment = &mut self.segments[id];
            let same = segment.passed_by(hashes.iter().skip(segment.start).copied());
            let place = segment.start + same;
            if same == segment.hashes.len() {
                return (end, place);
            }
            if same > 0 {
                if segment.programs == 1 {
                    segment.hashes.truncate(same);
                    return (end, place);
                }
                let kept = self.split(id, same);
                self.segments[id].programs -= 1;
                return (Some(kept), place);
            }
            end = segment.before;
            segment.programs -= 1;
            if segment.programs == 0 {
                self.begins.remove(&segment.hashes[0]);
                self.segments.remove(id);
            }
        }
        (None, 0)
    }

    /// Adds a program to the segments with the checkpoints `hashes` behind `end`. Returns the last.
    fn add(
        &mut self,
        program: ProgramId,
        mut end: Option<SegmentId>,
        hashes: &[u64],
        mut known: usize,
    ) -> Option<SegmentId> {
        while let Some(hash) = hashes.get(known) {
            // A peer's prompt may have a hash at another place than other prompts.
            let fits = |id: &SegmentId| {
                let segment = &self.segments[*id];
                (segment.start, segment.before) == (known, end)
            };
            let Some(mut id) = self.begins.get(hash).copied().filter(fits) else {
                let rest = &hashes[known..];
                match end.map(|end| &mut self.segments[end]) {
                    // No program follows it.
                    Some(last) if (last.programs, last.latest) == (1, program) => last.hashes.extend(rest),
                    _ => {
                        let (start, before) = (known, end);
                        let new =
                            Segment { hashes: rest.to_vec(), start, before, programs: 1, latest: program };
                        let id = self.segments.insert(new);
                        self.begins.insert(*hash, id);
                        end = Some(id);
                    }
                }
                return end;
            };
            let segment = &self.segments[id];
            let same = segment.passed_by(hashes[known..].iter().copied());
            if same < segment.hashes.len() {
                id = self.split(id, same);
            }
            let segment = &mut self.segments[id];
            (segment.programs, segment.latest) = (segment.programs + 1, program);
            (end, known) = (Some(id), known + same);
        }
        end
    }

    /// Splits a segment behind `same` checkpoints. Returns the first part, which is new.
    fn split(&mut self, id: SegmentId, same: usize) -> SegmentId {
        let segment = &mut self.segments[id];
        let rest = segment.hashes.split_off(same);
        let hashes = std::mem::replace(&mut segment.hashes, rest);
        let (begin, next) = (hashes[0], segment.hashes[0]);
        let Segment { start, before, programs, latest, .. } = *segment;
        segment.start += same;
        let first = self.segments.insert(Segment { hashes, start, before, programs, latest });
        self.segments[id].before = Some(first);
        self.begins.insert(begin, first);
        self.begins.insert(next, id);
        first
    }

    /// Removes a program's hashes.
    pub fn remove(&mut self, program: ProgramId) {
        let Some(path) = self.paths.remove(program) else { return };
        self.leave(path.end, &[]);
        for mark in path.marks {
            forget(&mut self.marks, mark.hash, program);
        }
    }

    /// Returns the number of registered hashes.
    #[cfg(test)]
    pub fn registered(&self) -> usize {
        self.begins.len() + self.segments.len() + self.marks.len() + self.paths.len()
    }
}

fn forget(marks: &mut HashMap<u64, ProgramId>, hash: u64, program: ProgramId) {
    if marks.get(&hash) == Some(&program) {
        marks.remove(&hash);
    }
}
