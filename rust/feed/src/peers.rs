//! Connections of a socket, from the events of its monitor.
//!
//! An event about a handshake does not name its connection, and a port scan, or a peer of another
//! protocol, opens and ends connections without a handshake. So a handshake counts for the oldest
//! connection without one, until an event about a failed handshake proves otherwise.
use zmq::SocketEvent;

/// Events to monitor.
pub(crate) const EVENTS: [SocketEvent; 8] = [
    SocketEvent::ACCEPTED,
    SocketEvent::CONNECTED,
    SocketEvent::CONNECT_RETRIED,
    SocketEvent::DISCONNECTED,
    SocketEvent::HANDSHAKE_SUCCEEDED,
    SocketEvent::HANDSHAKE_FAILED_NO_DETAIL,
    SocketEvent::HANDSHAKE_FAILED_PROTOCOL,
    SocketEvent::HANDSHAKE_FAILED_AUTH,
];

/// Change of a socket's connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// A publisher has connected.
    Connected,
    /// A publisher's connection has ended.
    Lost,
    /// A connection without a handshake has ended.
    Refused,
    /// libzmq connects again.
    Retried,
}

/// Connections of one socket.
#[derive(Debug, Default)]
pub(crate) struct Peers {
    /// Descriptors in the order of their connections, and whether the handshake is over.
    open: Vec<(u32, bool)>,
    /// The next connection to end has failed its handshake.
    failed: bool,
}

impl Peers {
    /// Returns the number of connections with a handshake.
    pub fn connected(&self) -> usize {
        self.open.iter().filter(|(_, connected)| *connected).count()
    }

    /// Reads the first frame of a monitor's message: the event's number, and its value.
    pub fn read(&mut self, frame: &[u8]) -> Option<Change> {
        let event = u16::from_ne_bytes(*frame.first_chunk()?);
        let value = u32::from_ne_bytes(*frame.get(2..)?.first_chunk()?);
        self.event(EVENTS.into_iter().find(|known| known.to_raw() == event)?, value)
    }

    fn event(&mut self, event: SocketEvent, value: u32) -> Option<Change> {
        let waiting = |(_, connected): &&mut (u32, bool)| !*connected;
        match event {
            SocketEvent::ACCEPTED | SocketEvent::CONNECTED => self.open.push((value, false)),
            SocketEvent::CONNECT_RETRIED => return Some(Change::Retried),
            SocketEvent::HANDSHAKE_SUCCEEDED => {
                self.open.iter_mut().find(waiting)?.1 = true;
                return Some(Change::Connected);
            }
            SocketEvent::DISCONNECTED => {
                let failed = std::mem::take(&mut self.failed);
                let at = self.open.iter().position(|(descriptor, _)| *descriptor == value)?;
                let (_, connected) = self.open.remove(at);
                if !connected {
                    return Some(Change::Refused);
                }
                // The handshake was another connection's.
                let other = self.open.iter_mut().find(waiting).filter(|_| failed);
                return Some(other.map_or(Change::Lost, |other| {
                    other.1 = true;
                    Change::Refused
                }));
            }
            _ => self.failed = true,
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use SocketEvent::*;

    /// rust 7.12: a port scan does not count as the end of an engine's connection.
    #[test]
    fn only_the_ends_of_publishers_connections_count() {
        let mut peers = Peers::default();
        let mut tell = |event, value| (peers.event(event, value), peers.connected());
        assert_eq!(tell(ACCEPTED, 9), (None, 0)); // a scanner that waits
        assert_eq!(tell(ACCEPTED, 10), (None, 0)); // an engine
        assert_eq!(tell(HANDSHAKE_SUCCEEDED, 0), (Some(Change::Connected), 1));
        assert_eq!(tell(HANDSHAKE_FAILED_NO_DETAIL, 0), (None, 1));
        assert_eq!(tell(DISCONNECTED, 9), (Some(Change::Refused), 1));
        for _ in 0..3 {
            assert_eq!(tell(ACCEPTED, 9), (None, 1));
            assert_eq!(tell(HANDSHAKE_FAILED_PROTOCOL, 0), (None, 1));
            assert_eq!(tell(DISCONNECTED, 9), (Some(Change::Refused), 1));
            assert_eq!(tell(ACCEPTED, 9), (None, 1)); // garbage may end without such an event
            assert_eq!(tell(DISCONNECTED, 9), (Some(Change::Refused), 1));
        }
        assert_eq!(tell(DISCONNECTED, 77), (None, 1)); // unknown
        assert_eq!(tell(DISCONNECTED, 10), (Some(Change::Lost), 0));
        assert_eq!(tell(ACCEPTED, 10), (None, 0));
        assert_eq!(tell(HANDSHAKE_SUCCEEDED, 0), (Some(Change::Connected), 1));
    }
}
