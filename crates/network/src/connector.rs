//! Connections into a slot: sockets born in its netns.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpStream as StdTcpStream};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};

use nix::sched::{CloneFlags, setns};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::{mpsc, oneshot};
use tracing::error;

use crate::netns;
use crate::slot::GUEST_ADDRESS;

/// Requests waiting for the factory's thread; each takes some microseconds, so this is a burst, not a backlog.
const QUEUE: usize = 256;

/// A thread that makes sockets in namespaces it is handed. It ends when the last clone of this value is gone.
#[derive(Debug, Clone)]
pub(crate) struct SocketFactory {
    orders: mpsc::Sender<Order>,
}

#[derive(Debug)]
struct Order {
    netns: Arc<OwnedFd>,
    reply: oneshot::Sender<io::Result<OwnedFd>>,
}

impl SocketFactory {
    pub(crate) fn start() -> io::Result<Self> {
        let (orders, queue) = mpsc::channel(QUEUE);
        std::thread::Builder::new().name("netns-sockets".into()).spawn(move || serve(queue))?;
        Ok(Self { orders })
    }

    /// A non-blocking TCP socket that lives in `netns`.
    async fn socket(&self, netns: Arc<OwnedFd>) -> io::Result<OwnedFd> {
        let (reply, socket) = oneshot::channel();
        let gone = || io::Error::other("the thread that makes sockets has ended");
        self.orders.send(Order { netns, reply }).await.map_err(|_| gone())?;
        socket.await.map_err(|_| gone())?
    }
}

/// The thread: into the namespace, `socket(2)`, and back, since a thread that stays inside keeps a closed slot's
/// namespace alive.
fn serve(mut queue: mpsc::Receiver<Order>) {
    let home = match netns::own() {
        Ok(home) => home,
        Err(error) => return error!(%error, "cannot open own network namespace; no guest can be reached"),
    };
    while let Some(Order { netns, reply }) = queue.blocking_recv() {
        let made = setns(&netns, CloneFlags::CLONE_NEWNET).and_then(|()| {
            let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
            socket(AddressFamily::Inet, SockType::Stream, flags, None)
        });
        drop(netns);
        if let Err(error) = setns(&home, CloneFlags::CLONE_NEWNET) {
            error!(%error, "socket thread cannot leave a slot's network namespace");
        }
        // A receiver that is gone has given up connecting; its socket closes here.
        drop(reply.send(made.map_err(io::Error::from)));
    }
}

/// The way to one guest. Cheap to clone; stays usable, answering `NotConnected`, after its slot is closed.
#[derive(Debug, Clone)]
pub struct GuestConnector(Route);

#[derive(Debug, Clone)]
enum Route {
    Slot(Arc<Door>),
    Loopback,
}

/// The slot's side of its connectors: shutting it is what closing the slot means to them.
#[derive(Debug)]
pub(crate) struct Door {
    netns: Mutex<Option<Arc<OwnedFd>>>,
    sockets: SocketFactory,
}

impl Door {
    pub(crate) fn new(netns: Arc<OwnedFd>, sockets: SocketFactory) -> Self {
        Self { netns: Mutex::new(Some(netns)), sockets }
    }

    /// No further connection is made. Those that exist go on until their peers end them.
    pub(crate) fn shut(&self) {
        self.netns.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    fn netns(&self) -> Option<Arc<OwnedFd>> {
        self.netns.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl GuestConnector {
    pub(crate) fn new(door: Arc<Door>) -> Self {
        Self(Route::Slot(door))
    }

    /// A connector to this host's 127.0.0.1, for tests of whoever uses connectors.
    #[must_use]
    pub fn loopback() -> Self {
        Self(Route::Loopback)
    }

    /// Connects to a TCP port of the guest, with `TCP_NODELAY`.
    ///
    /// There is no deadline in here, since only the caller knows what it is waiting for; a guest that is still booting
    /// may take forever to answer. Errors: `ConnectionRefused` when nobody listens on the port, `NetworkUnreachable`
    /// when no VMM has the tap open, `NotConnected` when the slot is closed. Cancel safety: drop it at any time.
    pub async fn connect(&self, port: u16) -> io::Result<TcpStream> {
        let (socket, address) = match &self.0 {
            Route::Slot(door) => {
                let netns = door
                    .netns()
                    .ok_or_else(|| io::Error::new(io::ErrorKind::NotConnected, "the network slot is closed"))?;
                let socket = door.sockets.socket(netns).await?;
                (TcpSocket::from_std_stream(StdTcpStream::from(socket)), GUEST_ADDRESS)
            }
            Route::Loopback => (TcpSocket::new_v4()?, Ipv4Addr::LOCALHOST),
        };
        socket.set_nodelay(true)?;
        socket.connect(SocketAddr::from((address, port))).await
    }
}
