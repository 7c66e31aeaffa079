//! The lowest of a column of scores, in one pass without branches.
use super::nan_unless;
use multiversion::multiversion;

/// Slots per word of a bit set, and per minimum that [`set_of_lowest`] writes.
pub const WORD: usize = 64;

/// Makes the scores of ineligible slots NaN, and sets the bits of the slots whose `sign * score` is
/// finite and lowest. Without such a score, no bit is set. Writes the lowest finite key of each
/// word to `minima`. Returns the number of finite scores. `score` and `eligible` have one entry per
/// slot.
#[multiversion(targets("x86_64+avx2"))]
pub fn set_of_lowest(
    sign: f64,
    score: &mut [f64],
    eligible: &[bool],
    minima: &mut Vec<f64>,
    set: &mut Vec<u64>,
) -> usize {
    minima.clear();
    // The compiler knows the length of whole words, which saves a third of the instructions.
    let (words, rest) = score.as_chunks_mut::<WORD>();
    let (marks, marks_rest) = eligible.as_chunks::<WORD>();
    let mut count = 0;
    for (s, e) in words.iter_mut().zip(marks) {
        count += mask_word(sign, s, e, minima);
    }
    if !rest.is_empty() {
        count += mask_word(sign, rest, marks_rest, minima);
    }
    let lowest = minima.iter().fold(f64::INFINITY, |lowest, minimum| lower(*minimum, lowest));
    set.clear();
    for (s, minimum) in words.iter().zip(&*minima) {
        set.push(bits_of(sign, s, *minimum, lowest));
    }
    if let ([_, ..], Some(minimum)) = (&*rest, minima.last()) {
        set.push(bits_of(sign, rest, *minimum, lowest));
    }
    count as usize
}

/// Returns the bits of up to 64 slots whose `sign * score` is finite and `lowest`, given their
/// `minimum`.
#[inline(always)]
fn bits_of(sign: f64, score: &[f64], minimum: f64, lowest: f64) -> u64 {
    if minimum != lowest || lowest == f64::INFINITY {
        return 0;
    }
    score.iter().enumerate().fold(0, |bits, (bit, s)| bits | u64::from(sign * s == lowest) << bit)
}

#[inline(always)]
fn lower(x: f64, minimum: f64) -> f64 {
    if x < minimum { x } else { minimum }
}

/// Makes the scores of ineligible slots NaN, for up to 64 slots, and appends the lowest finite
/// `sign * score` to `minima`; infinity if there is none. Returns the number of finite scores.
#[inline(always)]
fn mask_word(sign: f64, score: &mut [f64], eligible: &[bool], minima: &mut Vec<f64>) -> u64 {
    // Mostly all slots are eligible, and then nothing must be written.
    let (count, mut minimum) = match eligible.iter().fold(0, |some, e| some | u8::from(!e)) == 0 {
        true => lowest_of_word::<true>(sign, score, eligible),
        false => lowest_of_word::<false>(sign, score, eligible),
    };
    // Infinity loses by itself. Only negative infinity needs a second pass, and it is rare.
    if minimum == f64::NEG_INFINITY {
        let finite = score.iter().filter(|x| x.is_finite());
        minimum = finite.fold(f64::INFINITY, |minimum, x| lower(sign * x, minimum));
    }
    minima.push(minimum);
    count
}

/// Makes the scores of ineligible slots NaN, unless `ALL` are eligible. Returns the number of
/// finite scores, and the lowest `sign * score`, ignoring NaN; infinity if there is none. Eight
/// running minima let the compiler use vector registers.
#[inline(always)]
fn lowest_of_word<const ALL: bool>(sign: f64, score: &mut [f64], eligible: &[bool]) -> (u64, f64) {
    let (scores, score_rest) = score.as_chunks_mut::<8>();
    let (eligibles, eligible_rest) = eligible.as_chunks::<8>();
    let (mut eight, mut counts) = ([f64::INFINITY; 8], [0u64; 8]);
    for (s, e) in scores.iter_mut().zip(eligibles) {
        for lane in 0..8 {
            if !ALL {
                s[lane] = nan_unless(e[lane], s[lane]);
            }
            counts[lane] += u64::from(s[lane].is_finite());
            eight[lane] = lower(sign * s[lane], eight[lane]);
        }
    }
    let (mut count, mut lowest) =
        (counts.iter().sum(), eight.into_iter().fold(f64::INFINITY, |m, x| lower(x, m)));
    for (s, e) in score_rest.iter_mut().zip(eligible_rest) {
        *s = nan_unless(*e, *s);
        count += u64::from(s.is_finite());
        lowest = lower(sign * *s, lowest);
    }
    (count, lowest)
}

/// Returns the lowest of eight numbers, none of them NaN.
#[inline(always)]
pub fn lowest_of_eight(eight: [f64; 8]) -> f64 {
    let four: [f64; 4] = std::array::from_fn(|lane| lower(eight[lane], eight[lane + 4]));
    lower(lower(four[0], four[2]), lower(four[1], four[3]))
}
