//! A request that thinks before it answers, in three parts: prefill, think, answer (Libra, section 4.4 and Table 7).
//!
//! Nobody reads the thoughts as they come, so the instance that makes them may let a token take longer, while the answer's goes by its token SLO. The paper says
//! no more. What follows here: no answer token is made where thoughts are, so the second cut is at the end of thinking or before it (late
//! thoughts may go with the answer), and the first is at or before the second; within that the cuts balance, as between two.
//!
//! With three instances, each part has its own ([`search_three`]). With two, the request comes back: prefill and answer on the first, thinking on the
//! second ([`search_return`]). Its KV moves twice then, the second time only what was thought.
//!
//! Neither asks whether a cut pays: the SLO is why it is cut, not the load. A request that is in no danger of missing it is better left to [`lmetric_core::split::search`].
use lmetric_core::estimate::StepTime;
use lmetric_core::ids::Seconds;
use lmetric_core::plan::Cuts;
use lmetric_core::split::predict::{Instance, Part};
use lmetric_core::split::{Load, Settings, Whole, Why};

/// An instance that may take a part.
#[derive(Clone, Copy, Debug)]
pub struct Placed<'a> {
    /// What it has to do.
    pub load: &'a Load,
    /// Its speed.
    pub step: &'a StepTime,
    /// Leading prompt tokens that it holds.
    pub hit_tokens: u32,
}

/// Cuts of a request into three.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Three {
    /// Tokens before the first and before the second cut; `None`: not cut.
    pub cut_tokens: Option<[u32; 2]>,
    /// Seconds until each instance has done all that it has; [`search_return`]: the first, the second, NaN.
    pub seconds: [Seconds; 3],
    /// Seconds that the second part takes once it begins; 0 where it is not cut.
    pub think_seconds: Seconds,
    /// Pairs of cuts looked at.
    pub probes: u32,
    /// Why. `Nearest`: the cuts are at the ends of the stages or of what is allowed, or K probes found no better.
    pub why: Why,
}

impl Three {
    fn whole(why: Why) -> Three {
        Three { cut_tokens: None, seconds: [f64::NAN; 3], think_seconds: 0.0, probes: 0, why }
    }
}

/// Cuts for three instances; of D expected output tokens the first `think_tokens` are thoughts. `whole`'s hits are not read.
///
/// The outer search moves the first cut from the prompt's end, the inner one the second from the end of thinking: at most K x K probes.
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

/// Cuts for two instances: prefill, maybe the first thoughts, and the answer on the first, thinking on the second.
///
/// The answer begins where thinking ends; what balances is how many thoughts the first instance has before it hands over.
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

/// Where both cuts may lie.
struct Stages {
    first: (u32, u32),
    second: (u32, u32),
    least: u32,
}

impl Stages {
    fn of(whole: &Whole, think_tokens: u32, second_hit: u32, settings: &Settings) -> Result<Stages, Why> {
        let least = settings.least_tokens.max(1);
        let (prompt, all) = (whole.prompt_tokens, whole.tokens());
        let end = prompt.saturating_add(think_tokens);
        if whole.expected_output_tokens == 0 {
            return Err(Why::Unknown);
        }
        // An engine that hands over only at the prompt's end has no second cut.
        if settings.cuts < Cuts::Output {
            return Err(Why::Unable);
        }
        if think_tokens < least || all < end.saturating_add(least.max(2)) {
            return Err(Why::TooShort);
        }
        let floor = if settings.cuts == Cuts::Output { prompt } else { 0 };
        let first = (second_hit.min(prompt).saturating_add(least).max(floor), end - least);
        // Thoughts that go with the answer: as many as leave the second instance its least, but the prompt stays with the first two.
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

/// The token in `range`, from `start`, at which the two times that `at` gives are nearest, by at most `probes` halvings; the first of them grows with the token.
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
        // The prompt costs little: it takes thoughts with it, and so does the answer of 136 tokens.
        assert!(512 < s && s < t && t < 512 + 1400, "{found:?}");
        let (least, most) = found.seconds.iter().fold((f64::MAX, 0f64), |(a, b), &x| (a.min(x), b.max(x)));
        // Together they take what one would take, and a token made again at each cut.
        let one = Instance::new(&load, &step).unwrap().seconds(&Part::of(512, 2048, 0, 0, 2048));
        assert!((found.seconds.iter().sum::<f64>() / one - 1.0).abs() < 0.01);
        assert!(most - least <= 2.0 * 0.05 * one, "{found:?}");
        assert!(found.probes <= 144);
    }

    #[test]
    fn no_answer_token_is_made_where_thoughts_are() {
        let (step, idle) = (round(), Load::default());
        let busy = Load { decoding: 20.0, remaining_output_tokens: 20_000.0, ..Load::default() };
        // The third has so much to do that balance would put the answer on the second, too.
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
        // 512 prompt and 336 answer tokens here leave 1,200 thoughts, of which the first takes some.
        let found = search_return(&THINKS, 1200, [on(&load, &step); 2], &settings);
        let [s, t] = found.cut_tokens.unwrap();
        assert_eq!((t, found.why), (1712, Why::Balanced));
        assert!((513..1712).contains(&s), "{found:?}");
        assert!((found.seconds[0] - found.seconds[1]).abs() < 0.02 * found.seconds[0]);
        // A busy second one gets the fewest thoughts that it may.
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
