//! A router with as many instances as it can have.
#[path = "common/router.rs"]
mod common;

use common::{chain, request};
use lmetric_core::fleet::Role;
use lmetric_core::ids::MAX_INSTANCES;
use lmetric_core::plan::Event;
use lmetric_core::router::{Router, RouterConfig};
use lmetric_core::{CoreError, Registry, Slot};

#[test]
fn the_last_slots_decide_as_the_first() {
    let policy = Registry::CORE.policy("lmetric", &[]).unwrap();
    let mut router = Router::new(policy, RouterConfig::default()).unwrap();
    for i in 0..MAX_INSTANCES {
        assert_eq!(router.add_instance(&format!("e{i}"), Role::Both, None).unwrap().index(), i);
    }
    let refused = router.add_instance("one more", Role::Both, None).unwrap_err();
    assert!(
        matches!(&refused, CoreError::BadValue { expected, .. } if expected.contains("16384")),
        "{refused}"
    );
    for slot in [0, 4095, 4096, 8192, MAX_INSTANCES - 1] {
        let holder = Slot(slot as u32);
        let prompt = chain(slot as u64 * 1000, 20);
        router.caches().write().gpu_mut().record(holder, &prompt);
        let decision = router.route(&request(&prompt), slot as f64).unwrap();
        assert_eq!(decision.segment.instance, holder);
        assert_eq!(decision.predicted_hit_tokens, 320);
        router.advance(decision.ticket, Event::FirstToken, slot as f64 + 0.1).unwrap();
        // A second holder in another part of the index is found as well.
        let other = Slot((slot as u32 + 5000) % MAX_INSTANCES as u32);
        router.caches().write().gpu_mut().record(other, &prompt);
        let mut hits = vec![0; MAX_INSTANCES];
        router.caches().read().gpu().match_prefix(&prompt, &mut hits);
        let found: Vec<usize> = (0..MAX_INSTANCES).filter(|slot| hits[*slot] == 20).collect();
        let mut expected = vec![holder.index(), other.index()];
        expected.sort_unstable();
        assert_eq!(found, expected);
    }
}
