//! Connections to publishers: over TCP or a Unix socket, opened by the router and opened again when
//! they end ([`Dial`]), or accepted ([`Listener`]). All are non-blocking; names are looked up on
//! threads of their own.
use crate::zmtp::{self, Item, Message, Reader, Talk};
use mio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use mio::{Interest, Registry, Token};
use std::cell::RefCell;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::os::unix::fs::FileTypeExt;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

/// Bytes read at a time.
pub(crate) const CHUNK_BYTES: usize = 64 << 10;
/// Time for a connection and its handshake, in seconds.
const HANDSHAKE_SECONDS: f64 = 10.0;
/// A peer that has been silent for this long, in seconds, gets a heartbeat. It is gone if it is
/// silent for as long again; libzmq answers for an idle engine.
const HEARTBEAT_SECONDS: f64 = 5.0;
/// Delay before a connection is opened again, in seconds. Doubles up to the maximum until a
/// handshake succeeds.
const RETRY_SECONDS: f64 = 0.1;
const MAX_RETRY_SECONDS: f64 = 2.0;
/// Threads that look up names. A name server that does not answer holds one for seconds.
const LOOKUPS: usize = 4;

thread_local! {
    /// Buffer that bytes are read to. A reader copies those that it needs.
    static CHUNK: RefCell<Box<[u8]>> = RefCell::new(vec![0; CHUNK_BYTES].into());
}

/// Address of a socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// Host (a name, or an IP address without brackets; `*` is every address) and port.
    Tcp(String, u16),
    /// Path of a Unix socket; a path that begins with `@` is a name in the abstract namespace.
    Ipc(String),
}

impl Endpoint {
    /// Reads an address such as `tcp://10.0.0.7:5557` or `ipc:///run/kv`. With `bind`, a port may
    /// be `*`: any free one.
    pub fn parse(text: &str, bind: bool) -> Option<Endpoint> {
        if let Some(path) = text.strip_prefix("ipc://") {
            return (!path.is_empty() && path != "*").then(|| Endpoint::Ipc(path.into()));
        }
        let (host, port) = text.strip_prefix("tcp://")?.rsplit_once(':')?;
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        let port = if bind && port == "*" { 0 } else { port.parse().ok()? };
        let known = !host.is_empty() && !host.contains(['/', ';', '[', ']']) && (bind || port > 0);
        known.then(|| Endpoint::Tcp(host.into(), port))
    }
}

/// Services of the thread for its connections.
pub struct Net {
    registry: Registry,
    questions: parking_lot::Mutex<Option<Sender<(usize, String, u16)>>>,
    answer: Arc<dyn Fn(usize, Vec<SocketAddr>) + Send + Sync>,
}

impl Net {
    /// `answer` gets the addresses of a name (none: it has none) for a token, on another thread.
    pub fn new(registry: Registry, answer: impl Fn(usize, Vec<SocketAddr>) + Send + Sync + 'static) -> Net {
        Net { registry, questions: Default::default(), answer: Arc::new(answer) }
    }

    /// Looks up a name. The threads start with the first name: most engines have addresses. Returns
    /// whether there will be an answer: not if no thread could start.
    fn look_up(&self, token: usize, host: &str, port: u16) -> bool {
        let mut questions = self.questions.lock();
        let sender = questions.get_or_insert_with(|| {
            let (sender, asked) = channel();
            let asked = Arc::new(parking_lot::Mutex::new(asked));
            for _ in 0..LOOKUPS {
                let (asked, answer) = (asked.clone(), self.answer.clone());
                let work = move || look_up(&asked, &*answer);
                // One thread is enough.
                let _ = std::thread::Builder::new().name("lmetric-names".into()).spawn(work);
            }
            sender
        });
        let is_sent = sender.send((token, host.into(), port)).is_ok();
        if !is_sent {
            *questions = None; // the next question starts threads
        }
        is_sent
    }
}

fn look_up(
    asked: &parking_lot::Mutex<Receiver<(usize, String, u16)>>,
    answer: &dyn Fn(usize, Vec<SocketAddr>),
) {
    loop {
        let question = asked.lock().recv();
        let Ok((token, host, port)) = question else { return };
        let found = (host.as_str(), port).to_socket_addrs();
        answer(token, found.map(Iterator::collect).unwrap_or_default());
    }
}

enum Stream {
    Tcp(TcpStream),
    Ipc(UnixStream),
}

impl Stream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => stream.read(into),
            Stream::Ipc(stream) => stream.read(into),
        }
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => stream.write(bytes),
            Stream::Ipc(stream) => stream.write(bytes),
        }
    }

    fn register(&mut self, registry: &Registry, token: usize) -> io::Result<()> {
        let both = Interest::READABLE | Interest::WRITABLE;
        match self {
            Stream::Tcp(stream) => registry.register(stream, Token(token), both),
            Stream::Ipc(stream) => registry.register(stream, Token(token), both),
        }
    }
}

/// Why a connection has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// It was never up.
    Unreachable,
    /// The peer does not speak the protocol.
    Refused(String),
    /// It was up, and the peer is gone.
    Lost,
    /// It was up, and the peer has broken a rule.
    Broken(String),
}

/// Event of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Nothing until the next signal.
    Idle,
    /// Nothing yet, but there may be more to read.
    Busy,
    /// The handshake is over.
    Ready,
    /// A message: see `message`.
    Message,
    /// It has ended.
    Ended(End),
}

/// A connection to a publisher.
pub struct Connection {
    stream: Stream,
    talk: Talk,
    reader: Reader,
    output: Vec<u8>,
    /// Something has arrived since the last check.
    is_alive: bool,
    /// When to check whether the peer lives.
    check_at: f64,
    end: Option<End>,
}

impl Connection {
    fn new(mut stream: Stream, talk: Talk, net: &Net, token: usize, now: f64) -> io::Result<Connection> {
        stream.register(&net.registry, token)?;
        Ok(Connection {
            stream,
            talk,
            reader: Reader::new(talk),
            output: talk.opening(),
            is_alive: true,
            check_at: now + HANDSHAKE_SECONDS,
            end: None,
        })
    }

    /// Returns whether the handshake is over.
    pub fn is_ready(&self) -> bool {
        self.reader.is_ready()
    }

    /// Returns when [`Connection::next`] has something to do without a signal.
    pub fn deadline(&self) -> f64 {
        self.check_at
    }

    /// Reads until `limit` bytes wait, or nothing more has arrived.
    pub fn read_ahead(&mut self, limit: usize) {
        while self.reader.waiting_bytes() < limit && self.read() {}
    }

    /// Returns what has arrived. Reads at most [`CHUNK_BYTES`].
    pub fn next(&mut self, now: f64) -> Event {
        let was_ready = self.is_ready();
        // Bytes that arrived before the end come first.
        match self.reader.read() {
            Ok(Item::Message) => return Event::Message,
            Ok(Item::Ready) => {
                self.check_at = now + HEARTBEAT_SECONDS;
                self.talk.message(&mut self.output);
                return Event::Ready;
            }
            Ok(Item::Nothing) => {
                // After the bytes so far: the peer waits for the answers to its heartbeats.
                if let Err(end) = self.send() {
                    self.end.get_or_insert(end);
                }
                if self.end.is_none() && self.read() {
                    return Event::Busy;
                }
                self.reader.shrink();
                if self.end.is_none() && now >= self.check_at {
                    self.check(now);
                }
            }
            Err(reason) => {
                self.end = Some(if was_ready { End::Broken(reason) } else { End::Refused(reason) });
            }
        }
        self.end.clone().map_or(Event::Idle, Event::Ended)
    }

    /// Returns the message of the last [`Event::Message`].
    pub fn message(&self) -> Message<'_> {
        self.reader.message()
    }

    /// Sends a heartbeat, or notes that the last one was not answered.
    fn check(&mut self, now: f64) {
        self.check_at = now + HEARTBEAT_SECONDS;
        if !self.is_ready() {
            self.end = Some(End::Unreachable);
        } else if !self.reader.answers_heartbeats() {
            // Its silence means nothing.
        } else if !std::mem::take(&mut self.is_alive) {
            self.end = Some(End::Lost);
        } else if self.output.is_empty() {
            zmtp::ping(&mut self.output);
            self.end = self.send().err();
        }
    }

    /// Sends what waits.
    fn send(&mut self) -> Result<(), End> {
        if self.output.is_empty() {
            self.output.append(self.reader.replies());
        }
        while !self.output.is_empty() {
            match self.stream.write(&self.output) {
                Ok(sent) => drop(self.output.drain(..sent)),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if is_later(&error) => break,
                Err(error) => return Err(self.ended(was_open(&error))),
            }
        }
        Ok(())
    }

    /// Reads a chunk. Returns whether there was something; if not, the connection may have ended.
    fn read(&mut self) -> bool {
        CHUNK.with_borrow_mut(|chunk| {
            loop {
                match self.stream.read(chunk) {
                    Ok(0) => self.end = Some(self.ended(true)),
                    Ok(length) => {
                        self.is_alive = true;
                        self.reader.push(&chunk[..length]);
                        return true;
                    }
                    Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                    Err(error) if is_later(&error) => {}
                    Err(error) => self.end = Some(self.ended(was_open(&error))),
                }
                return false;
            }
        })
    }

    /// Returns why it has ended. `was_open`: the peer had accepted it.
    fn ended(&self, was_open: bool) -> End {
        match was_open {
            _ if self.is_ready() => End::Lost,
            true => End::Refused("a connection ended before ZMTP's handshake".into()),
            false => End::Unreachable,
        }
    }
}

/// Returns whether the error is one of a connection that was open.
fn was_open(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe)
}

/// Returns whether a socket asks for another try after its next signal.
fn is_later(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::NotConnected)
}

enum State {
    /// To be opened at this time.
    Waiting(f64),
    /// Its name is being looked up.
    LookingUp,
    Open(Box<Connection>),
}

/// A connection that the router opens, and opens again after its end.
pub struct Dial {
    endpoint: Endpoint,
    talk: Talk,
    /// Token that its socket signals.
    token: usize,
    /// Attempts since the last handshake.
    tries: u32,
    state: State,
}

impl Dial {
    /// Creates a connection that [`Dial::next`] opens.
    pub fn new(endpoint: Endpoint, talk: Talk, token: usize) -> Dial {
        Dial { endpoint, talk, token, tries: 0, state: State::Waiting(f64::NEG_INFINITY) }
    }

    /// Says something else, on another connection. A delay or a look-up of its name goes on. A
    /// connection without a handshake counts as a failed attempt.
    pub fn say(&mut self, talk: Talk) {
        self.talk = talk;
        if let State::Open(connection) = &self.state {
            if connection.is_ready() {
                self.state = State::Waiting(f64::NEG_INFINITY);
            } else {
                self.wait(connection.deadline() - HANDSHAKE_SECONDS);
            }
        }
    }

    /// Returns whether the handshake is over.
    pub fn is_ready(&self) -> bool {
        matches!(&self.state, State::Open(connection) if connection.is_ready())
    }

    /// Returns when [`Dial::next`] has something to do without a signal.
    pub fn deadline(&self) -> Option<f64> {
        match &self.state {
            State::Waiting(at) => Some(*at),
            State::LookingUp => None,
            State::Open(connection) => Some(connection.deadline()),
        }
    }

    /// Returns what has arrived, as [`Connection::next`] does; opens the connection if it is due.
    pub fn next(&mut self, net: &Net, now: f64) -> Event {
        if let State::Waiting(at) = self.state
            && now >= at
        {
            self.open(net, now);
        }
        let State::Open(connection) = &mut self.state else { return Event::Idle };
        let event = connection.next(now);
        match &event {
            Event::Ready => self.tries = 0,
            Event::Ended(_) => self.wait(now),
            Event::Idle | Event::Busy | Event::Message => {}
        }
        event
    }

    /// Returns the message of the last [`Event::Message`].
    pub fn message(&self) -> Message<'_> {
        match &self.state {
            State::Open(connection) => connection.message(),
            State::Waiting(_) | State::LookingUp => Message::default(),
        }
    }

    /// Reads ahead, as [`Connection::read_ahead`] does.
    pub fn read_ahead(&mut self, limit: usize) {
        if let State::Open(connection) = &mut self.state {
            connection.read_ahead(limit);
        }
    }

    /// Handles the answer to a look-up of its name.
    pub fn found(&mut self, addresses: &[SocketAddr], net: &Net, now: f64) {
        if !matches!(self.state, State::LookingUp) {
            return;
        }
        // The next attempt tries the next address.
        match addresses.get(self.tries as usize % addresses.len().max(1)) {
            Some(address) => self.open_tcp(*address, net, now),
            None => self.wait(now),
        }
    }

    fn open(&mut self, net: &Net, now: f64) {
        match &self.endpoint {
            Endpoint::Tcp(host, port) => match host.parse::<IpAddr>() {
                Ok(host) => self.open_tcp(SocketAddr::new(host, *port), net, now),
                Err(_) if net.look_up(self.token, host, *port) => self.state = State::LookingUp,
                Err(_) => self.wait(now),
            },
            Endpoint::Ipc(path) => {
                let stream = unix_address(path).and_then(|address| UnixStream::connect_addr(&address));
                self.opened(stream.map(Stream::Ipc), net, now);
            }
        }
    }

    fn open_tcp(&mut self, address: SocketAddr, net: &Net, now: f64) {
        self.opened(TcpStream::connect(address).map(Stream::Tcp), net, now);
    }

    fn opened(&mut self, stream: io::Result<Stream>, net: &Net, now: f64) {
        match stream.and_then(|stream| Connection::new(stream, self.talk, net, self.token, now)) {
            Ok(connection) => self.state = State::Open(Box::new(connection)),
            Err(_) => self.wait(now),
        }
    }

    fn wait(&mut self, now: f64) {
        let seconds = RETRY_SECONDS * f64::from(1 << self.tries.min(10));
        self.tries = self.tries.saturating_add(1);
        self.state = State::Waiting(now + seconds.min(MAX_RETRY_SECONDS));
    }
}

enum Door {
    Tcp(TcpListener),
    Ipc(UnixListener),
}

/// A socket that publishers connect to.
pub struct Listener {
    door: Door,
}

impl Listener {
    /// Binds an address. A socket at the path of a Unix socket is replaced, no other file is.
    ///
    /// # Errors
    /// The system's, if it refuses.
    pub fn bind(endpoint: &Endpoint, net: &Net, token: usize) -> io::Result<Listener> {
        let mut door = match endpoint {
            Endpoint::Tcp(host, port) if host == "*" => {
                let [any_v6, any_v4] = [IpAddr::from([0u16; 8]), IpAddr::from([0u8; 4])];
                // A system without IPv6 has only the second.
                let listener = TcpListener::bind(SocketAddr::new(any_v6, *port));
                Door::Tcp(listener.or_else(|_| TcpListener::bind(SocketAddr::new(any_v4, *port)))?)
            }
            Endpoint::Tcp(host, port) => {
                let addresses = (host.as_str(), *port).to_socket_addrs()?;
                let mut result = Err(io::Error::from(ErrorKind::AddrNotAvailable));
                for address in addresses {
                    result = TcpListener::bind(address);
                    if result.is_ok() {
                        break;
                    }
                }
                Door::Tcp(result?)
            }
            Endpoint::Ipc(path) => {
                let is_file = !path.starts_with('@');
                if is_file && std::fs::symlink_metadata(path).is_ok_and(|file| file.file_type().is_socket()) {
                    std::fs::remove_file(path)?;
                }
                let listener = UnixListener::bind_addr(&unix_address(path)?)?;
                Door::Ipc(listener)
            }
        };
        match &mut door {
            Door::Tcp(listener) => net.registry.register(listener, Token(token), Interest::READABLE)?,
            Door::Ipc(listener) => net.registry.register(listener, Token(token), Interest::READABLE)?,
        }
        Ok(Listener { door })
    }

    /// Accepts a publisher, whose socket signals `token`.
    ///
    /// # Errors
    /// `WouldBlock` if none waits; others if the system refuses, for example for lack of files.
    pub fn accept(&self, net: &Net, token: usize, now: f64) -> io::Result<Connection> {
        let stream = match &self.door {
            Door::Tcp(listener) => Stream::Tcp(listener.accept()?.0),
            Door::Ipc(listener) => Stream::Ipc(listener.accept()?.0),
        };
        Connection::new(stream, Talk::Subscribe, net, token, now)
    }
}

pub(crate) fn unix_address(path: &str) -> io::Result<std::os::unix::net::SocketAddr> {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::SocketAddr;
    match path.strip_prefix('@') {
        Some(name) => SocketAddr::from_abstract_name(name),
        None => SocketAddr::from_pathname(path),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An engine that makes the feed ask all the time does not fill the queue of names.
    #[test]
    fn a_name_is_looked_up_once_at_a_time() {
        let poll = mio::Poll::new().expect("a poll");
        let (answers, answered) = channel();
        let net = Net::new(poll.registry().try_clone().expect("a registry"), move |token, _| {
            let _ = answers.send(token);
        });
        let mut dial = Dial::new(Endpoint::Tcp("localhost".into(), 1), Talk::Ask(0), 7);
        for from in 0..100 {
            assert_eq!(dial.next(&net, 0.0), Event::Idle);
            dial.say(Talk::Ask(from));
        }
        drop(net); // the threads end after the last question
        assert_eq!(answered.iter().collect::<Vec<_>>(), [7]);
    }

    #[test]
    fn another_request_without_a_handshake_tries_the_next_address() {
        let poll = mio::Poll::new().expect("a poll");
        let net = Net::new(poll.registry().try_clone().expect("a registry"), |_, _| ());
        // Connections are made, and nobody speaks.
        let doors = ["127.0.0.1:0"; 2].map(|door| std::net::TcpListener::bind(door).expect("a port"));
        let addresses = doors.each_ref().map(|door| door.local_addr().expect("an address"));
        let mut dial = Dial::new(Endpoint::Tcp("localhost".into(), 1), Talk::Ask(0), 7);
        for (now, door) in [(0.0, &doors[0]), (2.0, &doors[1]), (4.0, &doors[0])] {
            dial.next(&net, now);
            dial.found(&addresses, &net, now);
            drop(door.accept().expect("a connection"));
            // Asked all the time, it tries again after its delay.
            for _ in 0..100 {
                dial.say(Talk::Ask(1));
                dial.next(&net, now);
            }
            assert!(dial.deadline().is_some_and(|at| at > now && at <= now + MAX_RETRY_SECONDS));
        }
    }
}
