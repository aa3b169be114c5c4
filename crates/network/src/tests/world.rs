//! A host and an internet of the test's own, in namespaces, and guests that are namespaces behind a slot's tap.
//!
//! ```text
//!  guest netns       slot netns         "host" netns (the test's threads)      "internet" netns
//!  eth0 ──(pump)── tap0   veth0 ══════ av<tag>-<n>      up0 192.0.2.2 ════════ net0 192.0.2.1, servers, and a wire tap
//! ```

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, setsockopt, socket, sockopt};
use tokio::io::AsyncWriteExt as _;

use crate::name::Names;
use crate::netlink::Netlink;
use crate::{EgressConfig, GUEST_ADDRESS, GUEST_MAC, NetworkConfig, Slot, SlotPool, TAP_ADDRESS, TAP_NAME, tap};

pub(super) const HOST: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);
pub(super) const SERVER: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 1);
pub(super) const OTHER_SERVER: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 1);
pub(super) const METADATA: Ipv4Addr = Ipv4Addr::new(169, 254, 169, 254);
pub(super) const PRIVATE: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 1);
pub(super) const RESOLVER: Ipv4Addr = Ipv4Addr::new(192, 168, 7, 53);

/// What servers say on port 80.
pub(super) const GREETING: &str = "hello";

const ROUTER: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);

/// Longest wait for what is to arrive.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);

pub(super) struct World {
    pub(super) home: tempfile::TempDir,
    pub(super) tag: String,
    _internet: Arc<OwnedFd>,
    wire: OwnedFd,
}

/// Runs `test` on threads whose netns stands for a host; says so and passes where that cannot be.
pub(super) fn in_world(test: impl AsyncFnOnce(&World) + Send + 'static) {
    if !nix::unistd::geteuid().is_root() || !Path::new("/dev/net/tun").exists() {
        eprintln!("skipped: needs root and /dev/net/tun");
        return;
    }
    let host = std::thread::spawn(move || {
        unshare(CloneFlags::CLONE_NEWNET).expect("a netns for the host");
        if let Err(error) = crate::nft::Netfilter::open() {
            eprintln!("skipped: the kernel has no nf_tables: {error}");
            return;
        }
        // Its threads are in this namespace too.
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        runtime.expect("runtime").block_on(async {
            let world = World::new().await;
            test(&world).await;
            world.assert_clean().await;
        });
    });
    if let Err(panic) = host.join() {
        std::panic::resume_unwind(panic);
    }
}

/// Runs `work` on a thread of its own in `netns`.
pub(super) fn inside<T: Send + 'static>(
    netns: impl AsFd + Send + 'static,
    work: impl FnOnce() -> T + Send + 'static,
) -> T {
    let thread = std::thread::spawn(move || {
        setns(netns.as_fd(), CloneFlags::CLONE_NEWNET).expect("enter netns");
        work()
    });
    match thread.join() {
        Ok(done) => done,
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

fn fresh_netns() -> Arc<OwnedFd> {
    let thread = std::thread::spawn(|| {
        unshare(CloneFlags::CLONE_NEWNET).expect("a netns");
        Arc::new(crate::netns::own().expect("open it"))
    });
    thread.join().expect("thread")
}

fn netlink_in(netns: &Arc<OwnedFd>) -> Netlink {
    let runtime = tokio::runtime::Handle::current();
    inside(Arc::clone(netns), move || Netlink::open(&runtime).expect("netlink"))
}

impl World {
    async fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let tag = format!("e{:04x}{:03x}", std::process::id() & 0xffff, COUNT.fetch_add(1, Ordering::Relaxed));
        let internet = fresh_netns();
        let host = Netlink::open(&tokio::runtime::Handle::current()).expect("netlink");
        let far = netlink_in(&internet);
        host.add_veth("up0", "net0", internet.as_fd()).await.expect("uplink");
        for (netlink, link, address) in [(&host, "up0", HOST), (&far, "net0", ROUTER)] {
            for link in ["lo", link] {
                let index = netlink.index(link).await.expect("index");
                netlink.set_up(index).await.expect("up");
            }
            let index = netlink.index(link).await.expect("index");
            netlink.add_address(index, address, 24).await.expect("address");
        }
        host.add_default_route(host.index("up0").await.expect("index"), ROUTER).await.expect("route");
        let lo = far.index("lo").await.expect("index");
        for address in [SERVER, OTHER_SERVER, METADATA, PRIVATE, RESOLVER] {
            far.add_address(lo, address, 32).await.expect("address");
        }
        let (listener, udp, wire) = inside(Arc::clone(&internet), || {
            let listener = std::net::TcpListener::bind("0.0.0.0:80").expect("listen");
            listener.set_nonblocking(true).expect("nonblocking");
            // Each address by itself, so that answers come from where questions went.
            let places =
                [SERVER, OTHER_SERVER, METADATA, PRIVATE, RESOLVER].map(|address| [(address, 53), (address, 9)]);
            let udp = places.concat().into_iter().map(|place| UdpSocket::bind(place).expect("bind"));
            let udp: Vec<_> = udp.collect();
            (listener, udp, wire_tap())
        });
        let listener = tokio::net::TcpListener::from_std(listener).expect("listener");
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                tokio::spawn(async move {
                    _ = stream.write_all(GREETING.as_bytes()).await;
                    // An open connection is one that its client keeps.
                    _ = tokio::io::copy(&mut stream.split().0, &mut tokio::io::sink()).await;
                });
            }
        });
        for socket in udp {
            socket.set_nonblocking(true).expect("nonblocking");
            let socket = tokio::net::UdpSocket::from_std(socket).expect("socket");
            tokio::spawn(async move {
                let mut buffer = vec![0; 65536];
                while let Ok((length, from)) = socket.recv_from(&mut buffer).await {
                    _ = socket.send_to(&buffer[..length], from).await;
                }
            });
        }
        Self { home: tempfile::tempdir().expect("temp dir"), tag, _internet: internet, wire }
    }

    pub(super) fn config(&self, low_watermark: usize) -> NetworkConfig {
        let egress = EgressConfig { resolver: Some(RESOLVER), ..EgressConfig::default() };
        NetworkConfig { low_watermark, egress, ..NetworkConfig::new(self.home.path().to_owned(), self.tag.clone()) }
    }

    pub(super) async fn pool(&self) -> SlotPool {
        SlotPool::start(self.config(0)).await.expect("start pool")
    }

    pub(super) fn names(&self) -> Names {
        Names::new(&self.tag, self.home.path()).expect("valid tag")
    }

    /// Frames that the internet has seen since the last call.
    pub(super) fn seen(&self) -> Vec<Vec<u8>> {
        let mut frames = Vec::new();
        let mut buffer = vec![0; 65536];
        while let Ok(length) = recv(self.wire.as_raw_fd(), &mut buffer, MsgFlags::MSG_DONTWAIT) {
            frames.push(buffer[..length].to_vec());
        }
        frames
    }

    /// No packet to `address` that begins anything has been seen since the last look. What was sent before a guest's last answer
    /// has come; connections of before may still be at their farewells.
    pub(super) fn assert_unseen(&self, address: Ipv4Addr) {
        let begins = |frame: &&Vec<u8>| {
            let to = frame.len() > 34 && frame[12..14] == [8, 0] && frame[30..34] == address.octets();
            let goes_on = to && frame[23] == 6 && frame.get(47).is_some_and(|flags| flags & 0x12 != 0x02);
            to && !goes_on
        };
        let seen = self.seen();
        let seen: Vec<_> = seen.iter().filter(begins).collect();
        assert!(seen.is_empty(), "{address} was sent {seen:02x?}");
    }

    /// What is left on the host of anything that this world's node made.
    pub(super) async fn ledger(&self) -> BTreeSet<String> {
        let names = self.names();
        let host = Netlink::open(&tokio::runtime::Handle::current()).expect("netlink");
        let links = host.links().await.expect("list links").into_iter().map(|(_, name)| format!("link {name}"));
        let links = links.filter(|link| !["link lo", "link up0"].contains(&link.as_str()));
        let files = fs::read_dir(names.dir()).into_iter().flatten();
        let files = files.map(|entry| format!("file {}", entry.expect("entry").path().display()));
        let connections = fs::read_to_string("/proc/thread-self/net/nf_conntrack").unwrap_or_default();
        let connections: Vec<_> = connections
            .lines()
            .filter(|line| line.contains("src=10.12."))
            .map(|line| format!("noted {line}"))
            .collect();
        let tables = tables().into_iter().map(|name| format!("table {name}"));
        links.chain(files).chain(connections).chain(tables).collect()
    }

    async fn assert_clean(&self) {
        assert_eq!(self.ledger().await, BTreeSet::new(), "left behind");
    }
}

impl Drop for World {
    /// Of a failed test's namespaces nothing may stay; the rest goes with the host's.
    fn drop(&mut self) {
        for entry in fs::read_dir(self.names().dir()).into_iter().flatten().flatten() {
            drop(crate::netns::remove(&entry.path()));
        }
    }
}

/// Names of this namespace's tables, of whichever family.
fn tables() -> Vec<String> {
    let netfilter = crate::nft::Netfilter::open().expect("netfilter");
    let mut list = crate::nft::Writer::default();
    list.message(10 << 8 | 1, 0x300, 1, (0, 0), |_| {});
    netfilter.send(list.bytes()).expect("ask");
    let mut names = Vec::new();
    loop {
        let packet = netfilter.receive(MsgFlags::empty()).expect("answer").unwrap_or_default();
        for message in crate::nft::messages(&packet) {
            if message.kind == crate::nft::NLMSG_DONE {
                return names;
            }
            // The name is the first attribute.
            let name = message.body[8..].split(|byte| *byte == 0).next().unwrap_or_default();
            names.push(String::from_utf8_lossy(name).into_owned());
        }
    }
}

/// A socket that receives every frame of the calling thread's netns.
fn wire_tap() -> OwnedFd {
    let flags = SockFlag::SOCK_CLOEXEC;
    let wire = socket(AddressFamily::Packet, SockType::Raw, flags, SockProtocol::EthAll).expect("packet socket");
    setsockopt(&wire, sockopt::RcvBufForce, &(16 << 20)).expect("buffer");
    wire
}

/// A network stack behind a slot's tap.
pub(super) struct Guest {
    netns: Arc<OwnedFd>,
    _stop: io::PipeWriter,
    pump: Option<JoinHandle<()>>,
}

impl Guest {
    pub(super) async fn of(slot: &Slot) -> Self {
        let netns = fresh_netns();
        let outer = vmm_side(slot);
        let inner = inside(Arc::clone(&netns), || tap::open("eth0").expect("open the guest's device"));
        let (end, stop) = io::pipe().expect("pipe");
        let pump = std::thread::spawn(move || pump(&outer, &inner, &end));
        let netlink = netlink_in(&netns);
        let eth0 = netlink.index("eth0").await.expect("index");
        netlink.set_mac(eth0, &GUEST_MAC).await.expect("mac");
        for index in [netlink.index("lo").await.expect("index"), eth0] {
            netlink.set_up(index).await.expect("up");
        }
        netlink.add_address(eth0, GUEST_ADDRESS, 30).await.expect("address");
        netlink.add_default_route(eth0, TAP_ADDRESS).await.expect("route");
        Self { netns, _stop: stop, pump: Some(pump) }
    }

    pub(super) fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> T {
        inside(Arc::clone(&self.netns), work)
    }

    /// The greeting of a server.
    pub(super) fn greeted(&self, address: Ipv4Addr) -> io::Result<String> {
        self.connect(address, 80).and_then(|mut stream| {
            let mut greeting = [0; GREETING.len()];
            stream.read_exact(&mut greeting)?;
            Ok(String::from_utf8_lossy(&greeting).into_owned())
        })
    }

    pub(super) fn connect(&self, address: impl Into<IpAddr>, port: u16) -> io::Result<TcpStream> {
        let address = SocketAddr::new(address.into(), port);
        self.run(move || {
            let stream = TcpStream::connect_timeout(&address, PATIENCE)?;
            stream.set_read_timeout(Some(PATIENCE))?;
            Ok(stream)
        })
    }

    /// Sends a datagram and waits for the same in return.
    pub(super) fn echoed(&self, address: Ipv4Addr, port: u16, datagram: &[u8]) -> io::Result<()> {
        let sent = datagram.to_vec();
        self.run(move || {
            let socket = UdpSocket::bind("0.0.0.0:0")?;
            socket.connect((address, port))?;
            socket.set_read_timeout(Some(PATIENCE))?;
            socket.send(&sent)?;
            let mut received = vec![0; 65536];
            let length = socket.recv(&mut received)?;
            assert_eq!(received[..length], sent);
            Ok(())
        })
    }

    /// Sends an echo request and waits for its answer.
    pub(super) fn pinged(&self, address: Ipv4Addr) -> io::Result<()> {
        self.run(move || {
            fs::write("/proc/sys/net/ipv4/ping_group_range", "0 0")?;
            let socket = socket(AddressFamily::Inet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, SockProtocol::Icmp)?;
            let socket = UdpSocket::from(socket);
            socket.connect((address, 0))?;
            socket.set_read_timeout(Some(PATIENCE))?;
            socket.send(&[8, 0, 0, 0, 0, 1, 0, 1])?;
            socket.recv(&mut [0; 64])?;
            Ok(())
        })
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // The pump sees the end of the pipe.
        let (_, closed) = io::pipe().expect("pipe");
        drop(std::mem::replace(&mut self._stop, closed));
        if let Some(pump) = self.pump.take() {
            drop(pump.join());
        }
    }
}

/// The tap as a VMM has it.
pub(super) fn vmm_side(slot: &Slot) -> File {
    let netns = File::open(slot.netns_path()).expect("open netns");
    inside(netns, || tap::open(TAP_NAME).expect("open the tap"))
}

/// Carries frames, with their virtio-net headers, both ways until `end` is closed.
fn pump(mut outer: &File, mut inner: &File, end: &io::PipeReader) {
    let mut frame = vec![0; 128 << 10];
    loop {
        let mut ready = [
            PollFd::new(outer.as_fd(), PollFlags::POLLIN),
            PollFd::new(inner.as_fd(), PollFlags::POLLIN),
            PollFd::new(end.as_fd(), PollFlags::POLLIN),
        ];
        poll(&mut ready, PollTimeout::NONE).expect("poll");
        let [from_outer, from_inner, ended] = ready.map(|fd| fd.any().unwrap_or(true));
        if ended {
            return;
        }
        // A device that is not up yet refuses frames, which are lost as on any wire.
        if from_outer && let Ok(length) = outer.read(&mut frame) {
            _ = inner.write(&frame[..length]);
        }
        if from_inner && let Ok(length) = inner.read(&mut frame) {
            _ = outer.write(&frame[..length]);
        }
    }
}
