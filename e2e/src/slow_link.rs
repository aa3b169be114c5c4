//! A slow wire between a client and a server on this machine: a TCP forwarder that delays and paces what passes, and counts
//! it.
//!
//! ```text
//!   client ══▶ listener │ read ──▶ [ stamped: due = now + delay ] ──▶ wait until due ──▶ pace ──▶ write ══▶ server
//!          ◀══          │ write ◀── pace ◀── wait until due ◀── [ stamped ] ◀── read              ◀══
//! ```
//!
//! Each direction delays by half of the round-trip time, so that a request and its answer take one round trip, and one
//! budget of bytes per direction is shared by all connections, as on a wire. A connection is accepted at once, but the
//! server's side of it is opened one round trip later: a handshake costs what it costs. What is on its way is bounded by
//! the wire's own capacity, so a sender is slowed down as it would be, not buffered without end.

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, sleep, sleep_until};

/// Bytes that are moved at once. Small enough that several connections share the wire evenly.
const PIECE: usize = 16 << 10;
/// How far ahead of the clock bytes may be sent: timers are coarse, and a wire that sleeps too long would lose its time.
const BURST: Duration = Duration::from_millis(2);
/// Pieces on the way of one connection in one direction, at least: 16 MiB.
const MIN_IN_FLIGHT: usize = 1024;

/// How slow the wire is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Speed {
    /// From a byte's sending to an answer's arrival, with a server that takes no time.
    pub round_trip: Duration,
    /// Bytes per second in each direction, for all connections together; `None` for no limit.
    pub bandwidth: Option<u64>,
}

impl Speed {
    /// A registry in the same region: 20 ms, 50 MB/s.
    pub const REGION: Self = Self { round_trip: Duration::from_millis(20), bandwidth: Some(50_000_000) };
}

/// What has passed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Passed {
    /// Connections that were accepted.
    pub connections: u64,
    /// Bytes that arrived at the server.
    pub sent: u64,
    /// Bytes that arrived at clients.
    pub received: u64,
}

/// A slow wire to one server. Cut when dropped, with all connections.
#[derive(Debug)]
pub struct SlowLink {
    address: SocketAddr,
    counts: Arc<Counts>,
    task: JoinHandle<()>,
}

#[derive(Debug, Default)]
struct Counts {
    connections: AtomicU64,
    sent: AtomicU64,
    received: AtomicU64,
}

impl SlowLink {
    /// Listens on a free loopback port and forwards to `server`.
    pub async fn start(server: SocketAddr, speed: Speed) -> io::Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let address = listener.local_addr()?;
        let counts = Arc::new(Counts::default());
        let wires = Arc::new([Wire::new(speed), Wire::new(speed)]);
        let counted = Arc::clone(&counts);
        let task = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                tokio::select! {
                    accepted = listener.accept() => {
                        // Nobody connects any more, or too many files are open, which passes.
                        let Ok((client, _)) = accepted else { sleep(Duration::from_millis(10)).await; continue };
                        counted.connections.fetch_add(1, Relaxed);
                        let (wires, counts) = (Arc::clone(&wires), Arc::clone(&counted));
                        connections.spawn(async move {
                            sleep(speed.round_trip).await;
                            // Where no server is, the client's connection ends.
                            let Ok(server) = TcpStream::connect(server).await else { return };
                            connect(client, server, &wires, &counts).await;
                        });
                    }
                    Some(_) = connections.join_next() => {}
                }
            }
        });
        Ok(Self { address, counts, task })
    }

    /// Where clients connect to.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// What has passed so far.
    #[must_use]
    pub fn passed(&self) -> Passed {
        let Counts { connections, sent, received } = &*self.counts;
        Passed { connections: connections.load(Relaxed), sent: sent.load(Relaxed), received: received.load(Relaxed) }
    }
}

impl Drop for SlowLink {
    fn drop(&mut self) {
        // Its connections are in a set that goes with it.
        self.task.abort();
    }
}

/// Moves bytes both ways until both have ended or one has failed.
async fn connect(client: TcpStream, server: TcpStream, wires: &[Wire; 2], counts: &Counts) {
    // Delays are ours to make.
    let _ = client.set_nodelay(true);
    let _ = server.set_nodelay(true);
    let ((client_read, client_write), (server_read, server_write)) = (client.into_split(), server.into_split());
    let there = wires[0].carry(client_read, server_write, &counts.sent);
    let back = wires[1].carry(server_read, client_write, &counts.received);
    // A failure of either direction ends both, as a reset would.
    let _ = tokio::try_join!(there, back);
}

/// One direction of the wire.
#[derive(Debug)]
struct Wire {
    delay: Duration,
    bandwidth: Option<u64>,
    in_flight: usize,
    /// When the last byte that was let through will have left the wire.
    busy_until: Mutex<Instant>,
}

impl Wire {
    fn new(Speed { round_trip, bandwidth }: Speed) -> Self {
        let delay = round_trip / 2;
        // Twice what the wire holds while a byte travels: the pieces that are read may be small.
        let capacity = bandwidth.map_or(0, |bandwidth| (bandwidth as f64 * delay.as_secs_f64()) as usize);
        let in_flight = (2 * capacity / PIECE).max(MIN_IN_FLIGHT);
        Self { delay, bandwidth, in_flight, busy_until: Mutex::new(Instant::now()) }
    }

    async fn carry(&self, mut from: OwnedReadHalf, mut to: OwnedWriteHalf, count: &AtomicU64) -> io::Result<()> {
        let (send, mut receive) = mpsc::channel::<(Instant, Vec<u8>)>(self.in_flight);
        let sending = async {
            loop {
                let mut piece = Vec::with_capacity(PIECE);
                if from.read_buf(&mut piece).await? == 0 {
                    // Without a sender, the other half knows the end.
                    drop(send);
                    return Ok::<_, io::Error>(());
                }
                self.pace(piece.len()).await;
                if send.send((Instant::now() + self.delay, piece)).await.is_err() {
                    return Ok(());
                }
            }
        };
        let arriving = async {
            while let Some((due, piece)) = receive.recv().await {
                sleep_until(due).await;
                to.write_all(&piece).await?;
                count.fetch_add(piece.len() as u64, Relaxed);
            }
            to.shutdown().await
        };
        tokio::try_join!(sending, arriving).map(|_| ())
    }

    /// Waits until `length` bytes have gone onto the wire.
    async fn pace(&self, length: usize) {
        let Some(bandwidth) = self.bandwidth else { return };
        let takes = Duration::from_secs_f64(length as f64 / bandwidth.max(1) as f64);
        let until = {
            let mut busy_until = self.busy_until.lock().unwrap_or_else(PoisonError::into_inner);
            *busy_until = (*busy_until).max(Instant::now()) + takes;
            *busy_until
        };
        if until > Instant::now() + BURST {
            sleep_until(until - BURST).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A server that sends back what it gets, and closes when it is closed.
    async fn echo() -> (SocketAddr, JoinHandle<()>) {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let task = tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                tokio::spawn(async move {
                    let (mut read, mut write) = stream.split();
                    let _ = tokio::io::copy(&mut read, &mut write).await;
                });
            }
        });
        (address, task)
    }

    async fn link(round_trip_millis: u64, bandwidth: Option<u64>) -> SlowLink {
        let (server, _) = echo().await;
        SlowLink::start(server, Speed { round_trip: Duration::from_millis(round_trip_millis), bandwidth })
            .await
            .unwrap()
    }

    async fn ask(stream: &mut TcpStream, bytes: &[u8]) -> Vec<u8> {
        let mut answer = vec![0; bytes.len()];
        let (mut read, mut write) = stream.split();
        let (sent, received) = tokio::join!(write.write_all(bytes), read.read_exact(&mut answer));
        sent.unwrap();
        received.unwrap();
        answer
    }

    #[tokio::test]
    async fn an_answer_takes_a_round_trip_and_a_connection_one_more() {
        let link = link(40, None).await;
        let begun = Instant::now();
        let mut stream = TcpStream::connect(link.address()).await.unwrap();
        assert_eq!(ask(&mut stream, b"hello").await, b"hello");
        assert!(begun.elapsed() >= Duration::from_millis(80), "{:?}", begun.elapsed());
        for _ in 0..3 {
            let begun = Instant::now();
            assert_eq!(ask(&mut stream, b"again").await, b"again");
            assert!(begun.elapsed() >= Duration::from_millis(40), "{:?}", begun.elapsed());
        }
        assert_eq!(link.passed(), Passed { connections: 1, sent: 20, received: 20 });
    }

    #[tokio::test]
    async fn bytes_take_their_time_whatever_the_number_of_connections() {
        let link = link(0, Some(2_000_000)).await;
        let bytes: Vec<u8> = (0..200_000u32).map(|number| (number % 251) as u8).collect();
        let begun = Instant::now();
        let mut connections = JoinSet::new();
        for _ in 0..3 {
            let (address, bytes) = (link.address(), bytes.clone());
            connections.spawn(async move {
                let mut stream = TcpStream::connect(address).await.unwrap();
                assert_eq!(ask(&mut stream, &bytes).await, bytes);
            });
        }
        while let Some(joined) = connections.join_next().await {
            joined.unwrap();
        }
        let (took, least) = (begun.elapsed(), Duration::from_millis(300) - 2 * BURST);
        assert!(took >= least, "600 kB went at 2 MB/s in {took:?}");
        assert_eq!(link.passed(), Passed { connections: 3, sent: 600_000, received: 600_000 });
    }

    #[tokio::test]
    async fn a_delay_alone_does_not_limit_what_is_on_the_way() {
        // Were each piece to wait for the one before, 64 of them would take six seconds.
        let link = link(100, None).await;
        let bytes = vec![7; 64 * PIECE];
        let mut stream = TcpStream::connect(link.address()).await.unwrap();
        ask(&mut stream, b"warm").await;
        let begun = Instant::now();
        assert_eq!(ask(&mut stream, &bytes).await, bytes);
        assert!(begun.elapsed() < Duration::from_secs(3), "{:?}", begun.elapsed());
    }

    #[tokio::test]
    async fn ends_are_passed_on_each_way() {
        let link = link(10, None).await;
        let mut stream = TcpStream::connect(link.address()).await.unwrap();
        stream.write_all(b"last words").await.unwrap();
        stream.shutdown().await.unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await.unwrap();
        assert_eq!(answer, b"last words", "what was sent before the end arrives, and so does the answer");
    }

    #[tokio::test]
    async fn without_a_server_or_a_link_connections_end() {
        let nobody = TcpListener::bind(("127.0.0.1", 0)).await.unwrap().local_addr().unwrap();
        let speed = Speed { round_trip: Duration::from_millis(1), bandwidth: None };
        let link = SlowLink::start(nobody, speed).await.unwrap();
        let mut stream = TcpStream::connect(link.address()).await.unwrap();
        assert_eq!(stream.read(&mut [0; 10]).await.unwrap_or(0), 0);
        let (server, _) = echo().await;
        let link = SlowLink::start(server, speed).await.unwrap();
        let mut stream = TcpStream::connect(link.address()).await.unwrap();
        assert_eq!(ask(&mut stream, b"hello").await, b"hello");
        drop(link);
        assert_eq!(stream.read(&mut [0; 10]).await.unwrap_or(0), 0);
    }
}
