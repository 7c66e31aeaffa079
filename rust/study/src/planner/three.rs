//! Splits of a reasoning request into three parts: prefill, reasoning, answer (Libra, section 4.4
//! and Table 7).
//!
//! Nobody reads the reasoning tokens as they come. So their instance may take longer per token,
//! while the answer keeps its token SLO. The paper gives no more detail. This planner makes no
//! answer token on the reasoning instance. So the second boundary is at the end of the reasoning or
//! before it (late reasoning tokens may go with the answer). The first boundary is at or before the
//! second. Within these limits the boundaries balance the load, as between two parts.
//!
//! With three instances, each part has its own ([`search_three`]). With two, the request comes
//! back: prefill and answer on the first, reasoning on the second ([`search_return`]). Its KV then
//! moves twice, the second time only the reasoning tokens.
//!
//! Both searches ignore whether a split pays: they split for the SLO, not for the load. For a
//! request that is in no danger of missing the SLO, use [`lmetric_core::split::search`].
use lmetric_core::estimate::StepTime;
use lmetric_core::ids::Seconds;
use lmetric_core::plan::Cuts;
use lmetric_core::split::predict::{Instance, Part};
use lmetric_core::split::{Load, Settings, Whole, Why};

/// An instance that may take a part.
#[derive(Clone, Copy, Debug)]
pub struct Placed<'a> {
    /// Its current work.
    pub load: &'a Load,
    /// Its speed.
    pub step: &'a StepTime,
    /// Leading prompt tokens that it holds.
    pub hit_tokens: u32,
}

/// Segment boundaries of a request in three parts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Three {
    /// Tokens before the first and before the second boundary; `None`: not split.
    pub cut_tokens: Option<[u32; 2]>,
    /// Seconds until each instance has done all its work; [`search_return`]: the first, the second,
    /// NaN.
    pub seconds: [Seconds; 3],
    /// Seconds of the second part once it begins; 0 if the request is not split.
    pub think_seconds: Seconds,
    /// Pairs of boundaries tried.
    pub probes: u32,
    /// Reason for the result. `Nearest`: the boundaries are at the ends of the stages or of the
    /// allowed range, or K probes found no better ones.
    pub why: Why,
}

impl Three {
    fn whole(why: Why) -> Three {
        Three { cut_tokens: None, seconds: [f64::NAN; 3], think_seconds: 0.0, probes: 0, why }
    }
}

/// Finds boundaries for three instances. The first `think_tokens` of the D expected output tokens
/// are reasoning tokens. Does not read `whole`'s hits.
///
/// The outer search moves the first boundary from the prompt's end, the inner search the second
/// from the end of reasoning: at most K x K probes.
pub fn search_three(whole: &Whole, think_tokens: u32, on: [Placed<'_>; 3], settings: &Settings) -> Three {
    let [Some(first), Some(second), Some(third)] = on.map(|placed| Instance::new(placed.load, placed.step))
    else {
        return Three::whole(Why::Unknown);
    };
    let stages = match Stages::of(whole, think_tokens, on[1].hit_tokens, settings) {
        Ok(stages) => stages,
        Err(why) => return Three::whole(why),
    };
    let part = |i: usize, from, to| Part::of(whole.prompt_tokens, whole.tokens(), on[i].hit_tokens, from, to);
    let own = second.seconds(&part(1, 0, whole.tokens())) - second.seconds(&Part::default());
    let tolerance = settings.epsilon * own;
    let mut probes = 0;
    let outer = bisect(stages.first, whole.prompt_tokens, tolerance, settings.probes, |s| {
        let seconds_first = first.seconds(&part(0, 0, s));
        let rest = (s.saturating_add(stages.least).max(stages.second.0), stages.second.1);
        let inner = bisect(rest, stages.second.1, tolerance, settings.probes, |t| {
            probes += 1;
            (second.seconds(&part(1, s, t)), third.seconds(&part(2, t, whole.tokens())), ())
        });
        (seconds_first, inner.first.max(inner.second), inner)
    });
    let inner = outer.extra;
    let seconds = [outer.first, inner.first, inner.second];
    let balanced = (outer.first - outer.second).abs().max((inner.first - inner.second).abs()) <= tolerance;
    let why = if balanced { Why::Balanced } else { Why::Nearest };
    let think_seconds = second.until_done(&part(1, outer.token, inner.token));
    Three { cut_tokens: Some([outer.token, inner.token]), seconds, think_seconds, probes, why }
}

/// Finds boundaries for two instances: prefill, maybe the first reasoning tokens, and the answer on
/// the first, reasoning on the second.
///
/// The answer begins at the end of the reasoning. The number of reasoning tokens on the first
/// instance before the transfer sets the balance.
pub fn search_return(whole: &Whole, think_tokens: u32, on: [Placed<'_>; 2], settings: &Settings) -> Three {
    let [Some(first), Some(second)] = on.map(|placed| Instance::new(placed.load, placed.step)) else {
        return Three::whole(Why::Unknown);
    };
    let stages = match Stages::of(whole, think_tokens, on[1].hit_tokens, settings) {
        Ok(stages) => stages,
        Err(why) => return Three::whole(why),
    };
    let part = |i: usize, from, to| Part::of(whole.prompt_tokens, whole.tokens(), on[i].hit_tokens, from, to);
    let own = second.seconds(&part(1, 0, whole.tokens())) - second.seconds(&Part::default());
    let (end, tolerance) = (stages.second.1, settings.epsilon * own);
    let answer = part(0, end, whole.tokens());
    let mut probes = 0;
    let found = bisect(stages.first, whole.prompt_tokens, tolerance, settings.probes, |s| {
        probes += 1;
        (first.seconds(&part(0, 0, s).and(&answer)), second.seconds(&part(1, s, end)), ())
    });
    let balanced = (found.first - found.second).abs() <= tolerance;
    Three {
        cut_tokens: Some([found.token, end]),
        seconds: [found.first, found.second, f64::NAN],
        think_seconds: second.until_done(&part(1, found.token, end)),
        probes,
        why: if balanced { Why::Balanced } else { Why::Nearest },
    }
}

/// Ranges of both boundaries.
struct Stages {
    first: (u32, u32),
    second: (u32, u32),
    least: u32,
}

impl Stages {
    fn of(whole: &Whole, think_tokens: u32, second_hit: u32, settings: &Settings) -> Result<Stages, Why> {
        let least = settings.min_tokens.max(1);
        let (prompt, all) = (whole.prompt_tokens, whole.tokens());
        let end = prompt.saturating_add(think_tokens);
        if whole.expected_output_tokens == 0 {
            return Err(Why::Unknown);
        }
        // An engine that transfers only at the prompt's end has no second boundary.
        if settings.cuts < Cuts::Output {
            return Err(Why::Unable);
        }
        if think_tokens < least || all < end.saturating_add(least.max(2)) {
            return Err(Why::TooShort);
        }
        let floor = if settings.cuts == Cuts::Output { prompt } else { 0 };
        let first = (second_hit.min(prompt).saturating_add(least).max(floor), end - least);
        // Reasoning tokens that go with the answer: as many as leave the second instance its
        // minimum, but the prompt stays with the first two.
        let second = (prompt.saturating_add(1), end);
        if first.0 <= first.1 { Ok(Stages { first, second, least }) } else { Err(Why::TooShort) }
    }
}

struct Best<T> {
    token: u32,
    first: Seconds,
    second: Seconds,
    extra: T,
}

/// Returns the token in `range`, from `start`, at which the two times of `at` are nearest, by at
/// most `probes` halvings. The first time grows with the token.
fn bisect<T>(
    range: (u32, u32),
    start: u32,
    tolerance: Seconds,
    probes: u32,
    mut at: impl FnMut(u32) -> (Seconds, Seconds, T),
) -> Best<T> {
    let (mut low, mut high) = (range.0.min(range.1), range.1);
    let mut token = start.clamp(low, high);
    let (first, second, extra) = at(token);
    let mut best = Best { token, first, second, extra };
    let (mut first, mut second) = (first, second);
    for _ in 1..probes.max(1) {
        if (first - second).abs() <= tolerance {
            break;
        }
        if first < second {
            low = token;
        } else {
            high = token;
        }
        // Upwards, as `ceil` does.
        let next = low + (high - low).div_ceil(2);
        if next == token {
            break;
        }
        token = next;
        let probe = at(token);
        (first, second) = (probe.0, probe.1);
        if (first - second).abs() < (best.first - best.second).abs() {
            best = Best { token, first, second, extra: probe.2 };
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round() -> StepTime {
        StepTime {
            fixed_seconds: 0.01,
            decode_seconds_per_sequence: 1e-4,
            decode_seconds_per_context_token: 1e-6,
            prefill_seconds_per_token: 1e-4,
            prefill_seconds_per_attention_pair: 1e-8,
            max_batch_tokens: 512.0,
            max_sequences: f64::INFINITY,
        }
    }

    const THINKS: Whole =
        Whole { prompt_tokens: 512, first_hit_tokens: 0, second_hit_tokens: 0, expected_output_tokens: 1536 };

    fn on<'a>(load: &'a Load, step: &'a StepTime) -> Placed<'a> {
        Placed { load, step, hit_tokens: 0 }
    }

    #[test]
    fn three_equal_instances_share_a_think_equally() {
        let (step, load) = (round(), Load { decoding: 15.0, ..Load::default() });
        let placed = on(&load, &step);
        let settings = Settings { probes: 12, ..Settings::default() };
        let found = search_three(&THINKS, 1400, [placed; 3], &settings);
        let [s, t] = found.cut_tokens.unwrap();
        assert_eq!(found.why, Why::Balanced);
        // The prompt costs little: it takes reasoning tokens with it, and so does the answer of 136
        // tokens.
        assert!(512 < s && s < t && t < 512 + 1400, "{found:?}");
        let (least, most) = found.seconds.iter().fold((f64::MAX, 0f64), |(a, b), &x| (a.min(x), b.max(x)));
        // Together they take the time of one part, and a token made again at each boundary.
        let one = Instance::new(&load, &step).unwrap().seconds(&Part::of(512, 2048, 0, 0, 2048));
        assert!((found.seconds.iter().sum::<f64>() / one - 1.0).abs() < 0.01);
        assert!(most - least <= 2.0 * 0.05 * one, "{found:?}");
        assert!(found.probes <= 144);
    }

    #[test]
    fn no_answer_token_is_made_where_thoughts_are() {
        let (step, idle) = (round(), Load::default());
        let busy = Load { decoding: 20.0, remaining_output_tokens: 20_000.0, ..Load::default() };
        // The third has so much work that balance would put the answer on the second, too.
        let found = search_three(
            &THINKS,
            200,
            [on(&idle, &step), on(&idle, &step), on(&busy, &step)],
            &Settings::default(),
        );
        let [s, t] = found.cut_tokens.unwrap();
        assert_eq!((t, found.why), (712, Why::Nearest));
        assert!(s < t);
    }

    #[test]
    fn with_two_instances_the_answer_comes_back() {
        let (step, load) = (round(), Load { decoding: 15.0, ..Load::default() });
        let settings = Settings { probes: 12, epsilon: 0.01, ..Settings::default() };
        // 512 prompt and 336 answer tokens here leave 1,200 reasoning tokens; the first instance
        // takes some of them.
        let found = search_return(&THINKS, 1200, [on(&load, &step); 2], &settings);
        let [s, t] = found.cut_tokens.unwrap();
        assert_eq!((t, found.why), (1712, Why::Balanced));
        assert!((513..1712).contains(&s), "{found:?}");
        assert!((found.seconds[0] - found.seconds[1]).abs() < 0.02 * found.seconds[0]);
        // A busy second instance gets the fewest reasoning tokens allowed.
        let busy = Load { remaining_output_tokens: 30_000.0, ..load };
        let settings = Settings { probes: 16, ..settings };
        let found = search_return(&THINKS, 1200, [on(&load, &step), on(&busy, &step)], &settings);
        assert_eq!((found.cut_tokens, found.why), (Some([1680, 1712]), Why::Nearest));
    }

    #[test]
    fn what_cannot_be_cut_in_three_is_not() {
        let (step, load) = (round(), Load::default());
        let placed = on(&load, &step);
        let settings = Settings::default();
        let why =
            |whole: Whole, think, settings: &Settings| search_three(&whole, think, [placed; 3], settings).why;
        assert_eq!(why(THINKS, 10, &settings), Why::TooShort);
        assert_eq!(why(THINKS, 1536, &settings), Why::TooShort);
        assert_eq!(why(THINKS, 700, &Settings { cuts: Cuts::PromptEnd, ..settings }), Why::Unable);
        assert_eq!(why(Whole { expected_output_tokens: 0, ..THINKS }, 0, &settings), Why::Unknown);
        let bad = Load { context_tokens: f64::NAN, ..load };
        let found = search_return(&THINKS, 700, [placed, on(&bad, &step)], &settings);
        assert_eq!((found.cut_tokens, found.why), (None, Why::Unknown));
    }
}
