//! Batches of old weights are dated on the engine's clock, also if that clock is set or drifts.
use lmetric_feed::weights::NewWeights;

const DAY: f64 = 86_400.0;

#[test]
fn nothing_is_old_before_an_announcement() {
    let mut weights = NewWeights::default();
    weights.note_delay(0.5, 1.0);
    assert_eq!(weights.old_before(), None);
}

#[test]
fn the_clocks_count_as_equal_before_the_first_batch() {
    let mut weights = NewWeights::default();
    weights.announce(DAY);
    assert_eq!(weights.old_before(), Some(DAY));
    weights.note_delay(-3600.0, 1.0); // the engine's clock is an hour ahead
    assert_eq!(weights.old_before(), Some(DAY + 3600.0));
}

#[test]
fn the_shortest_delay_counts() {
    let mut weights = NewWeights::default();
    for (delay, now) in [(10.5, 1.0), (10.25, 2.0), (11.0, 3.0)] {
        weights.note_delay(delay, now);
    }
    weights.announce(DAY);
    assert_eq!(weights.old_before(), Some(DAY - 10.25));
    weights.announce(2.0 * DAY);
    assert_eq!(weights.old_before(), Some(2.0 * DAY - 10.25));
}

#[test]
fn a_clock_that_is_set_back_is_followed_after_two_windows() {
    let mut weights = NewWeights::default();
    weights.note_delay(0.25, 1.0);
    weights.announce(DAY);
    // Set back by an hour: all delays are an hour longer from now on.
    for second in [5.0, 35.0] {
        weights.note_delay(3600.25, second);
        assert_eq!(weights.old_before(), Some(DAY - 0.25));
    }
    weights.note_delay(3600.25, 70.0);
    assert_eq!(weights.old_before(), Some(DAY - 3600.25));
}

#[test]
fn a_clock_that_is_set_ahead_is_followed_at_once() {
    let mut weights = NewWeights::default();
    weights.note_delay(0.25, 1.0);
    weights.announce(DAY);
    weights.note_delay(-3600.0, 2.0);
    assert_eq!(weights.old_before(), Some(DAY + 3600.0));
}
