//! Periods of budgets: their numbers, and when they end.
use crate::ids::Seconds;

/// Length of a period.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Period {
    /// A second.
    Second,
    /// A minute.
    Minute,
    /// An hour.
    Hour,
    /// A day, of 23 to 25 hours in a calendar.
    Day,
    /// A calendar month, or 30 days if the window is rolling.
    Month,
}

const DAY: f64 = 86_400.0;

impl Period {
    /// All periods, by name.
    pub const NAMES: [(&'static str, Period); 5] = [
        ("second", Period::Second),
        ("minute", Period::Minute),
        ("hour", Period::Hour),
        ("day", Period::Day),
        ("month", Period::Month),
    ];

    /// Returns the length of a rolling period.
    pub fn seconds(self) -> Seconds {
        match self {
            Period::Second => 1.0,
            Period::Minute => 60.0,
            Period::Hour => 3600.0,
            Period::Day => DAY,
            Period::Month => 30.0 * DAY,
        }
    }
}

/// A time zone: its offsets from UTC in seconds, each from a Unix time on. The first one also holds
/// before its time, the last one for ever.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Zone(Vec<(Seconds, f64)>);

impl Zone {
    /// Creates a zone. No offsets: UTC.
    pub fn new(mut offsets: Vec<(Seconds, f64)>) -> Zone {
        offsets.sort_by(|a, b| a.0.total_cmp(&b.0));
        Zone(offsets)
    }

    fn offset(&self, at: Seconds) -> f64 {
        let next = self.0.partition_point(|(from, _)| *from <= at);
        self.0.get(next.saturating_sub(1)).map_or(0.0, |(_, offset)| *offset)
    }

    /// Returns the offset that counts for the borders of a period. An hour never comes twice, so
    /// periods up to an hour ignore whole hours of the offset.
    fn offset_for(&self, period: Period, at: Seconds) -> f64 {
        let offset = self.offset(at);
        if matches!(period, Period::Day | Period::Month) { offset } else { offset.rem_euclid(3600.0) }
    }

    /// Returns the number of the calendar period at a Unix time. Numbers count up by one.
    pub fn number(&self, period: Period, now: Seconds) -> i64 {
        let local = now + self.offset_for(period, now);
        match period {
            Period::Month => month_of((local / DAY).floor() as i64),
            _ => (local / period.seconds()).floor() as i64,
        }
    }

    /// Returns the Unix time at which the calendar period at `now` ends.
    pub fn end(&self, period: Period, now: Seconds) -> Seconds {
        let next = self.number(period, now) + 1;
        let local = match period {
            Period::Month => first_day(next) as f64 * DAY,
            _ => next as f64 * period.seconds(),
        };
        // The offset may change before the end.
        let guess = local - self.offset_for(period, now);
        (local - self.offset_for(period, guess)).max(now)
    }
}

/// Returns the number of the month that has a day. Days and months count from January 1970.
/// Algorithm: Howard Hinnant, `civil_from_days`.
fn month_of(day: i64) -> i64 {
    let shifted = day + 719_468; // days since 0000-03-01
    let era = shifted.div_euclid(146_097);
    let of_era = shifted.rem_euclid(146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * of_year + 2) / 153; // from March on
    12 * (400 * era + year_of_era - 1970) + month + 2
}

/// Returns the first day of a month. Algorithm: Howard Hinnant, `days_from_civil`.
fn first_day(month: i64) -> i64 {
    let from_march = month - 2;
    let (year, month) = (1970 + from_march.div_euclid(12), from_march.rem_euclid(12));
    let (era, of_era) = (year.div_euclid(400), year.rem_euclid(400));
    let of_year = (153 * month + 2) / 5;
    era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn months_begin_on_their_first_days() {
        assert_eq!((first_day(0), first_day(1), first_day(2)), (0, 31, 59));
        assert_eq!(first_day(12 * 54 + 2), 19_783); // 2024-03-01, after a leap day
        let mut month = month_of(-800_000);
        for day in -800_000..800_000 {
            if month_of(day) != month {
                month += 1;
                assert_eq!((month_of(day), first_day(month)), (month, day));
            }
        }
    }

    /// Berlin in 2024: one hour in winter, two from March 31, 01:00 UTC, to October 27, 01:00 UTC.
    #[test]
    fn a_day_has_23_or_25_hours_when_the_offset_changes() {
        let (spring, autumn) = (1_711_846_800.0, 1_729_990_800.0);
        let zone = Zone::new(vec![(0.0, 3600.0), (spring, 7200.0), (autumn, 3600.0)]);
        for (change, hours) in [(spring, 23.0), (autumn, 25.0)] {
            let start = zone.end(Period::Day, change - DAY / 2.0);
            let end = zone.end(Period::Day, start);
            assert_eq!((end - start) / 3600.0, hours);
            assert_eq!(zone.number(Period::Day, start), zone.number(Period::Day, end - 1.0));
            assert_eq!(zone.number(Period::Day, start) + 1, zone.number(Period::Day, end));
            let hour = zone.number(Period::Hour, change - 1.0);
            assert_eq!(zone.number(Period::Hour, change), hour + 1);
        }
    }

    #[test]
    fn hours_follow_offsets_of_half_an_hour() {
        let india = Zone::new(vec![(0.0, 19_800.0)]);
        assert_eq!(india.end(Period::Hour, 0.0), 1800.0);
        assert_eq!(Zone::default().end(Period::Month, 86_400.0), 31.0 * DAY);
    }
}
