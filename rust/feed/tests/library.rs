//! Reliability M8: version of the linked ZMQ library.

/// Reliability M8: libzmq is from 2023 or later (4.3.5, MPL-2.0; 4.3.4 is from 2021 and LGPL-3.0).
#[test]
fn libzmq_is_4_3_5_or_later() {
    assert!(zmq::version() >= (4, 3, 5), "libzmq {:?}", zmq::version());
}
