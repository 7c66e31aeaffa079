//! Algorithm 1: bounded binary search for the split token at which both instances are busy for
//! equally long.
use super::predict::{Instance, parts};
use super::{Found, Load, Settings, Whole, Why};
use crate::estimate::StepTime;
use crate::ids::Seconds;
use crate::plan::Cuts;

/// Searches where to split `whole` between a first instance with load `first` and a second instance
/// (Libra, section 4.1, Algorithm 1).
///
/// The search starts at `phi = P / (P + D)`, the prompt's end, and halves the remaining range at
/// each of at most K probes: `s = ceil(phi (P + D))` tokens go to the first instance. T1 never
/// falls and T2 never grows with phi, except for one token at the prompt's end. The result is the
/// probe with the smallest gap, not the last probe. The search never allocates and evaluates about
/// K closed forms.
///
/// A split inside the prompt moves at least `min_tokens` that the second instance does not hold.
/// The first instance may hold all of them: then it computes nothing, and the split is a prefix
/// fetch.
pub fn search(
    whole: &Whole,
    first: &Load,
    second: &Load,
    step_first: &StepTime,
    step_second: &StepTime,
    settings: &Settings,
) -> Found {
    let (Some(first), Some(second)) = (Instance::new(first, step_first), Instance::new(second, step_second))
    else {
        return Found::whole(Why::Unknown);
    };
    if whole.expected_output_tokens == 0 {
        return Found::whole(Why::Unknown);
    }
    let (least, most) = match allowed(whole, settings) {
        Ok(range) => range,
        Err(why) => return Found::whole(why),
    };
    let pair = Pair::new(whole, first, second);
    let all = f64::from(whole.tokens());
    let (mut low, mut high) = (f64::from(least) / all, f64::from(most) / all);
    let mut phi = (f64::from(whole.prompt_tokens) / all).clamp(low, high);
    let mut best: Option<Probe> = None;
    let (mut probes, mut last) = (0, 0);
    while probes < settings.probes {
        let token = ((phi * all).ceil() as u32).clamp(least, most);
        if token == last {
            break;
        }
        (last, probes) = (token, probes + 1);
        let probe = pair.probe(whole, token);
        if best.is_none_or(|best| probe.gap() < best.gap()) {
            best = Some(probe);
        }
        if probe.gap() <= settings.epsilon * pair.own_seconds {
            break;
        }
        if probe.first < probe.second {
            low = phi;
        } else {
            high = phi;
        }
        phi = f64::midpoint(low, high);
    }
    let best = best.expect("settings.probes is at least 1, and no token is 0");
    pair.judge(whole, &best, probes, settings)
}

/// Returns the first and last token at which a split is allowed.
fn allowed(whole: &Whole, settings: &Settings) -> Result<(u32, u32), Why> {
    let (prompt, min_tokens) = (whole.prompt_tokens, settings.min_tokens.max(1));
    // The KV that the second instance holds need not be transferred.
    let least = whole.second_hit_tokens.min(prompt).saturating_add(min_tokens);
    // The last token's KV is never computed, so a part with that token alone would have no work.
    let most = whole.tokens().saturating_sub(min_tokens.max(2));
    let (least, most) = match settings.cuts {
        Cuts::Nowhere => return Err(Why::Unable),
        Cuts::PromptEnd if least <= prompt && prompt <= most => (prompt, prompt),
        Cuts::PromptEnd => return Err(Why::TooShort),
        Cuts::Output => (least.max(prompt), most),
        Cuts::Anywhere => (least, most),
    };
    if least <= most { Ok((least, most)) } else { Err(Why::TooShort) }
}

/// An evaluated split.
#[derive(Clone, Copy, Debug)]
struct Probe {
    token: u32,
    first: Seconds,
    second: Seconds,
}

impl Probe {
    fn gap(&self) -> Seconds {
        (self.first - self.second).abs()
    }
}

/// Two instances, with their seconds without the request and with the whole request.
struct Pair {
    first: Instance,
    second: Instance,
    idle: [Seconds; 2],
    loaded: [Seconds; 2],
    /// Seconds that the request adds, mean of both instances.
    own_seconds: Seconds,
}

impl Pair {
    fn new(whole: &Whole, first: Instance, second: Instance) -> Pair {
        let all = whole.tokens();
        let idle = [first.seconds(&Default::default()), second.seconds(&Default::default())];
        let loaded = [first.seconds(&parts(whole, all).0), second.seconds(&parts(whole, 0).1)];
        let own_seconds = (loaded[0] - idle[0] + loaded[1] - idle[1]) / 2.0;
        Pair { first, second, idle, loaded, own_seconds }
    }

    fn probe(&self, whole: &Whole, token: u32) -> Probe {
        let (first, second) = parts(whole, token);
        Probe { token, first: self.first.seconds(&first), second: self.second.seconds(&second) }
    }

    /// Decides if the best split pays: when the pair is done, against the whole request on the
    /// better instance.
    fn judge(&self, whole: &Whole, best: &Probe, probes: u32, settings: &Settings) -> Found {
        let moved = f64::from(best.token.saturating_sub(whole.second_hit_tokens));
        let transfer = settings.transfer_fixed_seconds + settings.transfer_seconds_per_token * moved;
        let handed_over = self.first.until_done(&parts(whole, best.token).0) + transfer;
        // The second part starts after the KV transfer. Until then, its instance does its other
        // work.
        let waits = (handed_over - self.idle[1]).max(0.0);
        let seconds_cut = best.first.max(best.second + waits);
        let [on_first, on_second] = [self.loaded[0].max(self.idle[1]), self.loaded[1].max(self.idle[0])];
        let seconds_whole = on_first.min(on_second);
        let pays = settings.min_gain.is_none_or(|gain| seconds_cut < seconds_whole - gain * self.own_seconds);
        let why = match (pays, best.gap() <= settings.epsilon * self.own_seconds) {
            (false, _) => Why::NoGain,
            (true, true) => Why::Balanced,
            (true, false) => Why::Nearest,
        };
        Found {
            cut_token: pays.then_some(best.token),
            phi: f64::from(best.token) / f64::from(whole.tokens()),
            probes,
            seconds_first: best.first,
            seconds_second: best.second,
            seconds_cut,
            seconds_whole,
            whole_on_second: on_second < on_first,
            why,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::predict::tests::round;
    use super::*;
    use proptest::prelude::*;

    const ALIKE: Whole = Whole {
        prompt_tokens: 1024,
        first_hit_tokens: 0,
        second_hit_tokens: 0,
        expected_output_tokens: 1024,
    };

    /// Returns the setup of Figure 5 (Qwen2.5-32B on A100). 5.6 requests/s prefill 1,024 tokens,
    /// and 1.7 decode 1,024 tokens after them. Both sides reach 2.5 if the split is at 1358. Solved
    /// by hand for 20 ms a step, no cost per sequence, 2,048 tokens a step.
    ///
    /// - The second side has `1024 u + 1024 x 1535.5 b = 1 / 1.7` and
    ///   `690 u + 690 x 1702.5 b = 1 / 2.5`. This gives b = 3.15e-8 s a context token and
    ///   u = 5.26e-4 s: 20 ms shared by 38 sequences.
    /// - The first side, which only prefills, has `1024 c + 20 ms x 1024 / 2017 = 1 / 5.6`. This
    ///   gives c = 1.645e-4.
    /// - For 334 decodes, `1 / 2.5 - 1024 c - 334 x 1191.5 b` leaves 20 ms shared by 30.5. The
    ///   first side's batch is smaller, because requests stay there for fewer tokens. With one
    ///   batch size for both sides, no constants fit all four figures.
    fn figure_5() -> (StepTime, Load, Load) {
        let step = StepTime {
            fixed_seconds: 0.02,
            decode_seconds_per_sequence: 0.0,
            decode_seconds_per_context_token: 3.15e-8,
            prefill_seconds_per_token: 1.645e-4,
            prefill_seconds_per_attention_pair: 0.0,
            max_batch_tokens: 2048.0,
            max_sequences: f64::INFINITY,
        };
        (step, Load { decoding: 29.5, ..Load::default() }, Load { decoding: 37.0, ..Load::default() })
    }

    #[test]
    fn the_balance_of_figure_5() {
        let (step, first, second) = figure_5();
        let pair =
            Pair::new(&ALIKE, Instance::new(&first, &step).unwrap(), Instance::new(&second, &step).unwrap());
        let rates = |token| {
            let probe = pair.probe(&ALIKE, token);
            (1.0 / probe.first, 1.0 / probe.second)
        };
        let (prefill, decode) = rates(1024);
        assert!((prefill - 5.6).abs() < 0.05 && (decode - 1.7).abs() < 0.02, "{prefill} {decode}");
        let (prefill, decode) = rates(1358);
        assert!((prefill - 2.5).abs() < 0.01 && (decode - 2.5).abs() < 0.01, "{prefill} {decode}");
        // Probes at 1024, 1536, 1280, 1408 and 1344, with a gap within 5% of the request's own
        // seconds.
        let as_printed = Settings { min_gain: None, min_tokens: 1, ..Settings::default() };
        let found = search(&ALIKE, &first, &second, &step, &step, &as_printed);
        assert_eq!(
            (found.why, found.probes, found.cut_token.map(|s| s.abs_diff(1344) <= 1)),
            (Why::Balanced, 5, Some(true))
        );
        // A finer search ends where the rates are equal.
        let finer = Settings { probes: 12, epsilon: 0.001, ..as_printed };
        let found = search(&ALIKE, &first, &second, &step, &step, &finer);
        assert!(found.cut_token.unwrap().abs_diff(1358) <= 3, "{found:?}");
    }

    #[test]
    fn a_lone_request_is_not_cut_and_one_among_others_is() {
        let step = round();
        let settings = Settings::default();
        let idle = Load::default();
        let found = search(&ALIKE, &idle, &idle, &step, &step, &settings);
        assert_eq!((found.cut_token, found.why), (None, Why::NoGain));
        // An idle pair gains nothing: both parts take as long as the whole, and the second part
        // starts when the first ends.
        assert!(found.seconds_cut >= found.seconds_whole);
        let busy = Load {
            decoding: 32.0,
            context_tokens: 48_000.0,
            remaining_output_tokens: 32.0 * 1024.0,
            ..Load::default()
        };
        let found = search(&ALIKE, &busy, &busy, &step, &step, &settings);
        assert_eq!((found.why, found.cut_token.is_some()), (Why::Balanced, true), "{found:?}");
        assert!(found.seconds_cut < found.seconds_whole);
        // The second instance waits if the transfer takes longer than its other work.
        let slow = Settings { transfer_fixed_seconds: 60.0, ..settings };
        assert_eq!(search(&ALIKE, &busy, &busy, &step, &step, &slow).why, Why::NoGain);
        // If one instance has far more work, the request stays whole on the other instance.
        let more = Load { remaining_output_tokens: 1e6, ..busy };
        let found = search(&ALIKE, &busy, &more, &step, &step, &settings);
        assert_eq!((found.cut_token, found.whole_on_second), (None, false));
        let found = search(&ALIKE, &more, &busy, &step, &step, &settings);
        assert_eq!((found.cut_token, found.whole_on_second), (None, true));
    }

    #[test]
    fn cuts_lie_where_engines_and_caches_let_them() {
        let (step, first, second) = figure_5();
        let any = Settings { min_gain: None, ..Settings::default() };
        let cut = |whole: &Whole, cuts| {
            let found = search(whole, &first, &second, &step, &step, &Settings { cuts, ..any });
            (found.cut_token, found.probes)
        };
        assert_eq!(cut(&ALIKE, Cuts::PromptEnd), (Some(1024), 1));
        // Long prompt, short answer: the balance lies inside the prompt.
        let long = Whole { prompt_tokens: 8192, expected_output_tokens: 64, ..ALIKE };
        let inside = cut(&long, Cuts::Anywhere).0.unwrap();
        assert!((3000..5000).contains(&inside), "{inside}");
        assert_eq!(cut(&long, Cuts::Output).0, Some(8192));
        // The prefix that the second instance holds is not transferred.
        let held = Whole { second_hit_tokens: 8000, ..long };
        assert!(cut(&held, Cuts::Anywhere).0.unwrap() >= 8032);
        for (whole, cuts, why) in [
            (ALIKE, Cuts::Nowhere, Why::Unable),
            (Whole { prompt_tokens: 20, expected_output_tokens: 20, ..ALIKE }, Cuts::Anywhere, Why::TooShort),
            (Whole { expected_output_tokens: 20, ..ALIKE }, Cuts::PromptEnd, Why::TooShort),
            (Whole { expected_output_tokens: 0, ..ALIKE }, Cuts::Anywhere, Why::Unknown),
        ] {
            let found = search(&whole, &first, &second, &step, &step, &Settings { cuts, ..any });
            assert_eq!((found.cut_token, found.why, found.probes), (None, why, 0));
        }
        let bad = Load { decoding: f64::NAN, ..first };
        assert_eq!(search(&ALIKE, &bad, &second, &step, &step, &any).why, Why::Unknown);
    }

    prop_compose! {
        fn load()(queued in 0.0..20_000f64, decoding in 0.0..200f64, context in 0.0..4000f64, remaining in 0.0..1000f64) -> Load {
            Load {
                queued_prefill_tokens: queued,
                queued_prefill_pairs: queued * 500.0,
                decoding,
                context_tokens: decoding * context,
                remaining_output_tokens: decoding * remaining,
            }
        }
    }

    prop_compose! {
        fn whole()(prompt in 1..20_000u32, output in 1..4000u32, a in 0.0..1f64, b in 0.0..1f64) -> Whole {
            let hit = |share: f64| (f64::from(prompt) * share) as u32;
            Whole { prompt_tokens: prompt, first_hit_tokens: hit(a), second_hit_tokens: hit(b), expected_output_tokens: output }
        }
    }

    proptest! {
        #[test]
        fn the_first_side_grows_and_the_second_shrinks(whole in whole(), a in load(), b in load(), x in 0.0..1f64, y in 0.0..1f64) {
            let pair = Pair::new(&whole, Instance::new(&a, &round()).unwrap(), Instance::new(&b, &round()).unwrap());
            let last = whole.tokens() - 1;
            let token = |phi: f64| 1 + ((f64::from(last) - 1.0).max(0.0) * phi) as u32;
            let (low, high) = (token(x.min(y)), token(x.max(y)));
            let (before, after) = (pair.probe(&whole, low), pair.probe(&whole, high));
            prop_assert!(before.first <= after.first * (1.0 + 1e-12));
            // At the prompt's end, the second side makes one token more: the first token, which a
            // prefill makes at no cost.
            let one = 0.01 + 1e-4 + 1e-6 * f64::from(whole.tokens());
            let seam = if low < whole.prompt_tokens && high >= whole.prompt_tokens { one } else { 0.0 };
            prop_assert!(after.second <= before.second * (1.0 + 1e-12) + seam);
        }

        #[test]
        fn a_cut_found_is_a_balance_or_the_nearest(whole in whole(), a in load(), b in load(), printed: bool) {
            let settings = Settings { min_gain: (!printed).then_some(0.05), ..Settings::default() };
            let found = search(&whole, &a, &b, &round(), &round(), &settings);
            prop_assert!(found.probes <= settings.probes);
            let Some(token) = found.cut_token else { return Ok(()) };
            let least = whole.second_hit_tokens + settings.min_tokens;
            prop_assert!(least <= token && token + settings.min_tokens <= whole.tokens());
            prop_assert!(printed || found.seconds_cut < found.seconds_whole);
            let pair = Pair::new(&whole, Instance::new(&a, &round()).unwrap(), Instance::new(&b, &round()).unwrap());
            let gap = (found.seconds_first - found.seconds_second).abs();
            if found.why == Why::Balanced {
                prop_assert!(gap <= 0.05 * pair.own_seconds);
                return Ok(());
            }
            // Six probes leave an interval of 1/32 of the range: the result is at most that far
            // from balance, or at the range's end.
            let width = (whole.tokens() - settings.min_tokens - least) / 32 + 2;
            let gap_at = |t: u32| {
                let probe = pair.probe(&whole, t);
                probe.first - probe.second
            };
            let (low, high) = (token.saturating_sub(width).max(least), (token + width).min(whole.tokens() - settings.min_tokens));
            let crossed = gap_at(low) <= 0.0 && gap_at(high) >= 0.0;
            let ends = gap_at(least) >= -0.03 || gap_at(whole.tokens() - settings.min_tokens) <= 0.03;
            prop_assert!(crossed || ends, "{found:?}");
        }
    }
}
