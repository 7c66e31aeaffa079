//! Gaps between the turns of agent programs: how likely a program returns, learned online by class.
//!
//! A gap lasts from the end of a program's answer to its next request. A class keeps a histogram of
//! the gaps on a logarithmic scale and the share of gaps without a return. Counts above the prior's
//! weight are halved once an hour, so old traffic is forgotten.
use crate::ids::Seconds;
use serde::{Deserialize, Serialize};

/// Number of bins, lower edge of the first bin and number of bins per factor of ten: 10 ms to
/// 10^6 s.
const BINS: usize = 80;
const LEAST: Seconds = 0.01;
const PER_DECADE: f64 = 10.0;
/// Seconds after which all counts are halved.
const HALF_LIFE: Seconds = 3600.0;

/// Weight of the prior in observed gaps, and the prior's gaps: log-normal with this median and
/// spread (the spread is that of tool calls in vllm#57103).
const PRIOR_GAPS: f64 = 8.0;
const PRIOR_MEDIAN: Seconds = 2.0;
const PRIOR_SIGMA: f64 = 1.5;

/// Why an engine ended an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub enum Finish {
    /// Not reported, or another reason.
    #[default]
    Unknown,
    /// The model called a tool: its client will usually send the result.
    ToolCalls,
    /// The model ended its answer.
    Stop,
    /// The answer reached its limit of tokens.
    Length,
}

impl Finish {
    /// All values, with their names in OpenAI's API.
    pub const NAMES: [(&'static str, Finish); 4] = [
        ("unknown", Finish::Unknown),
        ("tool_calls", Finish::ToolCalls),
        ("stop", Finish::Stop),
        ("length", Finish::Length),
    ];

    /// Returns the finish with this name; all other names are [`Finish::Unknown`].
    pub fn of(name: &str) -> Finish {
        Finish::NAMES.iter().find(|(known, _)| *known == name).map_or(Finish::Unknown, |(_, finish)| *finish)
    }

    /// Prior share of answers after which the program does not return.
    fn prior_ends(self) -> f64 {
        match self {
            Finish::Unknown | Finish::Length => 0.1,
            Finish::ToolCalls => 0.02,
            Finish::Stop => 0.3,
        }
    }
}

/// A class of gaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct GapClass {
    /// Whether the program has a long context (at least 8,192 tokens).
    pub long: bool,
    /// How the last answer ended.
    pub finish: Finish,
}

impl GapClass {
    const ALL: usize = 2 * Finish::NAMES.len();

    fn index(self) -> usize {
        self.finish as usize * 2 + usize::from(self.long)
    }
}

/// Statistics of one class.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Class {
    /// Gaps by length.
    #[serde(with = "long_array")]
    bins: [f64; BINS],
    /// Share of all gaps that are longer than each bin's lower edge; derived from `bins`.
    #[serde(with = "long_array")]
    survival: [f64; BINS + 1],
    returned: f64,
    ended: f64,
}

/// Gap statistics of all classes.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Gaps {
    classes: [Class; GapClass::ALL],
    decayed: Seconds,
}

/// Serde has no arrays of more than 32 numbers.
mod long_array {
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub fn serialize<S: Serializer>(numbers: &[f64], to: S) -> Result<S::Ok, S::Error> {
        numbers.serialize(to)
    }

    pub fn deserialize<'de, D: Deserializer<'de>, const N: usize>(from: D) -> Result<[f64; N], D::Error> {
        let numbers: Vec<f64> = Vec::deserialize(from)?;
        numbers.try_into().map_err(|other: Vec<f64>| D::Error::invalid_length(other.len(), &"another number"))
    }
}

fn edge(bin: usize) -> Seconds {
    LEAST * 10f64.powf(bin as f64 / PER_DECADE)
}

/// Returns the position of a gap on the scale of bins; its whole part is the bin.
fn place(seconds: Seconds) -> f64 {
    ((seconds.max(LEAST) / LEAST).log10() * PER_DECADE).min(BINS as f64 - 1e-9)
}

impl Class {
    fn new(finish: Finish) -> Class {
        let mut bins = [0.0; BINS];
        let density = |bin: usize| {
            let x = ((edge(bin) * 10f64.powf(0.5 / PER_DECADE)).ln() - PRIOR_MEDIAN.ln()) / PRIOR_SIGMA;
            (-0.5 * x * x).exp()
        };
        let sum: f64 = (0..BINS).map(density).sum();
        let returned = PRIOR_GAPS * (1.0 - finish.prior_ends());
        bins.iter_mut().enumerate().for_each(|(bin, count)| *count = returned * density(bin) / sum);
        let mut class = Class { bins, survival: [0.0; BINS + 1], returned, ended: PRIOR_GAPS - returned };
        class.derive();
        class
    }

    fn derive(&mut self) {
        let mut longer = 0.0;
        for bin in (0..BINS).rev() {
            longer += self.bins[bin];
            self.survival[bin] = longer / self.returned.max(1e-12);
        }
    }

    /// Returns the share of returning gaps that last longer than `seconds`.
    fn longer(&self, seconds: Seconds) -> f64 {
        let place = place(seconds);
        let bin = place as usize;
        let part = place - bin as f64;
        self.survival[bin] + part * (self.survival[bin + 1] - self.survival[bin])
    }

    fn ends(&self) -> f64 {
        self.ended / (self.returned + self.ended).max(1e-12)
    }
}

impl Default for Gaps {
    fn default() -> Gaps {
        let classes = std::array::from_fn(|index| Class::new(Finish::NAMES[index / 2].1));
        Gaps { classes, decayed: 0.0 }
    }
}

impl Gaps {
    /// Records a gap that ended with a request. `forgotten`: [`Gaps::ended`] was called for it.
    pub fn returned(&mut self, class: GapClass, seconds: Seconds, forgotten: bool) {
        let class = &mut self.classes[class.index()];
        class.bins[place(seconds) as usize] += 1.0;
        class.returned += 1.0;
        if forgotten {
            class.ended = (class.ended - 1.0).max(0.0);
        }
        class.derive();
    }

    /// Records a program that did not return.
    pub fn ended(&mut self, class: GapClass) {
        self.classes[class.index()].ended += 1.0;
    }

    /// Halves the counts once an hour. A class with few gaps keeps them: without traffic, there is
    /// nothing better to learn from.
    pub fn decay(&mut self, now: Seconds) {
        if now - self.decayed < HALF_LIFE {
            return;
        }
        self.decayed = now;
        for class in self.classes.iter_mut().filter(|class| class.returned + class.ended > PRIOR_GAPS) {
            class.bins.iter_mut().for_each(|count| *count *= 0.5);
            class.returned *= 0.5;
            class.ended *= 0.5;
        }
    }

    /// Returns the probability that a program returns, `since` seconds after its answer:
    /// `(1 - q) S / ((1 - q) S + q)`, with `q` the share of gaps without a return and `S` the share
    /// of the others that last longer than `since`.
    pub fn returns(&self, class: GapClass, since: Seconds) -> f64 {
        let class = &self.classes[class.index()];
        let (ends, longer) = (class.ends(), class.longer(since));
        let stays = (1.0 - ends) * longer;
        if stays + ends > 0.0 { stays / (stays + ends) } else { 0.0 }
    }

    /// Returns the probability that a program returns within `seconds` from now, `since` seconds
    /// after its answer.
    pub fn returns_within(&self, class: GapClass, since: Seconds, seconds: Seconds) -> f64 {
        let of = &self.classes[class.index()];
        let (ends, longer, later) = (of.ends(), of.longer(since), of.longer(since + seconds));
        let all = (1.0 - ends) * longer + ends;
        if all > 0.0 { (1.0 - ends) * (longer - later) / all } else { 0.0 }
    }

    /// Returns the learned share of gaps without a return and the number of gaps behind it, prior
    /// included.
    pub fn share_ended(&self, class: GapClass) -> (f64, f64) {
        let class = &self.classes[class.index()];
        (class.ends(), class.returned + class.ended)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probabilities_follow_the_formula() {
        let class = GapClass { long: true, finish: Finish::ToolCalls };
        let mut gaps = Gaps::default();
        // 900 gaps of 1 s, 90 of 100 s, 10 programs that end: the prior of 8 hardly counts.
        (0..900).for_each(|_| gaps.returned(class, 1.0, false));
        (0..90).for_each(|_| gaps.returned(class, 100.0, false));
        (0..10).for_each(|_| gaps.ended(class));
        assert!((gaps.returns(class, 0.0) - 0.99).abs() < 0.002);
        // After 10 s: 90 come back, 10 do not.
        assert!((gaps.returns(class, 10.0) - 0.9).abs() < 0.02, "{}", gaps.returns(class, 10.0));
        assert!(gaps.returns(class, 250.0) < 0.2);
        assert!((gaps.returns_within(class, 0.0, 30.0) - 0.9).abs() < 0.01);
        assert!((gaps.returns_within(class, 50.0, 100.0) - 0.9).abs() < 0.05);
        // Another class knows nothing of it.
        let other = GapClass { long: true, finish: Finish::Stop };
        assert!((gaps.share_ended(other).0 - 0.3).abs() < 1e-9);
    }

    #[test]
    fn a_late_return_takes_its_end_back() {
        let class = GapClass::default();
        let mut gaps = Gaps::default();
        let before = gaps.share_ended(class);
        gaps.ended(class);
        gaps.returned(class, 500.0, true);
        assert_eq!(gaps.share_ended(class).1, before.1 + 1.0);
        assert!(gaps.share_ended(class).0 < before.0);
    }

    #[test]
    fn counts_decay() {
        let class = GapClass::default();
        let mut gaps = Gaps::default();
        (0..100).for_each(|_| gaps.ended(class));
        let (before, counts) = gaps.share_ended(class);
        gaps.decay(HALF_LIFE);
        let (after, halved) = gaps.share_ended(class);
        assert!((before - after).abs() < 1e-12);
        assert!((halved - counts / 2.0).abs() < 1e-9);
    }

    #[test]
    fn a_class_without_traffic_keeps_what_it_has_learned() {
        let class = GapClass::default();
        let (mut prior, mut learned) = (Gaps::default(), Gaps::default());
        (0..992).for_each(|_| learned.ended(class));
        let before = learned.share_ended(class).0;
        for hour in 1..=60 {
            prior.decay(f64::from(hour) * HALF_LIFE);
            learned.decay(f64::from(hour) * HALF_LIFE);
        }
        assert!((prior.share_ended(class).0 - 0.1).abs() < 1e-9, "{:?}", prior.share_ended(class));
        assert!((learned.share_ended(class).0 - before).abs() < 1e-9, "{:?}", learned.share_ended(class));
    }

    #[test]
    fn extreme_gaps_stay_in_the_bins() {
        let mut gaps = Gaps::default();
        for seconds in [0.0, 1e-9, 1e6, 1e12] {
            gaps.returned(GapClass::default(), seconds, false);
            let p = gaps.returns(GapClass::default(), seconds);
            assert!((0.0..=1.0).contains(&p), "{p}");
        }
    }
}
