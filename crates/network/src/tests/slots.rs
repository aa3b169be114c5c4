//! Slots as such: made, found again, unmade.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Read};
use std::net::{Ipv4Addr, TcpListener};
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use futures::StreamExt;
use nix::sched::{CloneFlags, setns};
use rustix::thread::{CapabilitySet, CapabilitySets};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::name::Names;
use crate::netlink::Netlink;
use crate::*;

const PATIENCE: Duration = Duration::from_secs(20);

/// A node home and tag of its own; on drop, whatever a failed test left is removed.
struct Node {
    home: tempfile::TempDir,
    tag: String,
}

impl Node {
    /// `None`, said aloud, where slots cannot be made.
    fn new() -> Option<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        if !nix::unistd::geteuid().is_root() || !Path::new("/dev/net/tun").exists() {
            eprintln!("skipped: needs root and /dev/net/tun");
            return None;
        }
        let tag = format!("t{:04x}{:03x}", std::process::id() & 0xffff, COUNT.fetch_add(1, Ordering::Relaxed));
        Some(Self { home: tempfile::tempdir().expect("temp dir"), tag })
    }

    fn names(&self) -> Names {
        Names::new(&self.tag, self.home.path()).expect("valid tag")
    }

    fn config(&self) -> NetworkConfig {
        let mut config = NetworkConfig::new(self.home.path().to_owned(), self.tag.clone());
        // Beside a node that may run on this host with the default block.
        config.veth_cidr = "10.213.0.0/16".parse().expect("valid");
        config.egress.enabled = false; // this host's own network is not ours to change
        config
    }

    async fn pool(&self, low_watermark: usize) -> SlotPool {
        let config = NetworkConfig { low_watermark, ..self.config() };
        SlotPool::start(config).await.expect("start pool")
    }

    /// Links on the host and files of namespaces under our tag.
    async fn ledger(&self) -> BTreeSet<String> {
        let names = self.names();
        let host = Netlink::open(&tokio::runtime::Handle::current()).expect("netlink");
        let links = host.links().await.expect("list links").into_iter().map(|(_, name)| name);
        let files = fs::read_dir(names.dir()).into_iter().flatten();
        let files = files.map(|entry| entry.expect("entry").file_name().into_string().expect("utf-8"));
        let mounts = fs::read_to_string("/proc/self/mountinfo").expect("mountinfo");
        let dir = names.dir().display().to_string();
        let mounts = mounts.lines().filter(|line| line.contains(&dir)).map(str::to_owned);
        links.filter(|name| names.index_of_link(name).is_some()).chain(files).chain(mounts).collect()
    }

    async fn wait_until_clean(&self) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let left = self.ledger().await;
            if left.is_empty() {
                return;
            }
            assert!(Instant::now() < deadline, "left behind: {left:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let names = self.names();
        for entry in fs::read_dir(names.dir()).into_iter().flatten().flatten() {
            drop(netns::remove(&entry.path()));
        }
        let cleaner = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
            runtime.block_on(async {
                let host = Netlink::open(runtime.handle()).expect("netlink");
                for (_, name) in host.links().await.expect("list links") {
                    if names.index_of_link(&name).is_some() {
                        drop(host.delete(&name).await);
                    }
                }
            });
        });
        drop(cleaner.join());
    }
}

/// Runs `work` on a thread inside the namespace.
fn inside<T: Send + 'static>(slot: &Slot, work: impl FnOnce() -> T + Send + 'static) -> T {
    let netns = fs::File::open(slot.netns_path()).expect("open netns");
    let thread = std::thread::spawn(move || {
        setns(&netns, CloneFlags::CLONE_NEWNET).expect("enter netns");
        drop(netns);
        work()
    });
    thread.join().expect("thread")
}

/// Opens the tap as a VMM does, which has no capabilities. Ends those of the calling thread.
fn open_as_vmm() -> fs::File {
    let none = CapabilitySet::empty();
    let sets = CapabilitySets { effective: none, permitted: none, inheritable: none };
    rustix::thread::set_capabilities(None, sets).expect("drop capabilities");
    tap::open(TAP_NAME).expect("a VMM opens the tap by name")
}

/// Plays the guest: takes its address on the slot's loopback and listens there.
async fn guest_listener(slot: &Slot) -> TcpListener {
    let handles = netns::open(slot.netns_path().to_owned()).await.expect("open").expect("a netns");
    let lo = handles.netlink.index("lo").await.expect("lo");
    handles.netlink.add_address(lo, GUEST_ADDRESS, 32).await.expect("add the guest's address");
    inside(slot, || TcpListener::bind((GUEST_ADDRESS, 0)).expect("listen"))
}

/// Echoes one connection until its end.
fn echo_once(listener: TcpListener) -> std::thread::JoinHandle<()> {
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("accept");
        io::copy(&mut stream.try_clone().expect("clone"), &mut stream).expect("echo");
    })
}

async fn assert_echo(connector: &GuestConnector, port: u16) {
    let mut stream = connector.connect(port).await.expect("connect");
    assert!(stream.nodelay().expect("nodelay"));
    stream.write_all(b"ping").await.expect("write");
    stream.shutdown().await.expect("shutdown");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.expect("read");
    assert_eq!(answer, "ping");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_connects_to_its_guest_and_is_wholly_gone_after_close() {
    let Some(node) = Node::new() else { return };
    let pool = node.pool(0).await;
    let slot = pool.acquire().await.expect("acquire");
    assert_eq!(slot.guest_mac(), [0x06, 0x00, 0xa9, 0xfe, 0x00, 0x15]);
    assert_eq!(slot.gateway(), Ipv4Addr::new(169, 254, 0, 22));

    let listener = guest_listener(&slot).await;
    let port = listener.local_addr().expect("address").port();
    let connector = slot.connector();
    let echo = echo_once(listener);
    assert_echo(&connector, port).await;
    echo.join().expect("echo");
    let refused = connector.connect(port).await.expect_err("nobody listens any more");
    assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);

    slot.close().await.expect("close");
    let closed = connector.connect(port).await.expect_err("closed");
    assert_eq!(closed.kind(), io::ErrorKind::NotConnected);
    assert_eq!(node.ledger().await, BTreeSet::new());
    pool.close().await.expect("close pool");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_forwards_nothing_and_has_no_ipv6() {
    let Some(node) = Node::new() else { return };
    let pool = node.pool(0).await;
    let slot = pool.acquire().await.expect("acquire");
    let (forward, routes, addresses) = inside(&slot, || {
        let own = |name: &str| fs::read_to_string(Path::new("/proc/thread-self/net").join(name)).unwrap_or_default();
        let forward = fs::read_to_string("/proc/sys/net/ipv4/ip_forward").expect("ip_forward");
        (forward, own("ipv6_route"), own("if_inet6"))
    });
    assert_eq!(forward.trim(), "0");
    assert_eq!(addresses, "");
    // The kernel lists its built-in "unreachable" entry on lo.
    let routes: Vec<_> = routes.lines().filter(|route| !route.ends_with(" lo")).collect();
    assert_eq!(routes, Vec::<&str>::new());
    slot.close().await.expect("close");
    pool.close().await.expect("close pool");
}

#[tokio::test(flavor = "multi_thread")]
async fn connecting_fails_at_once_without_a_vmm_and_reaches_the_tap_with_one() {
    let Some(node) = Node::new() else { return };
    let pool = node.pool(0).await;
    let slot = pool.acquire().await.expect("acquire");
    let connector = slot.connector();

    let started = Instant::now();
    let error = connector.connect(49983).await.expect_err("no VMM has the tap open");
    assert_eq!(error.kind(), io::ErrorKind::NetworkUnreachable);
    assert!(started.elapsed() < Duration::from_millis(500), "{:?}", started.elapsed());

    let mut vmm = inside(&slot, open_as_vmm);
    // The kernel takes its time to tell that the link has come up, the more so the more links come and go.
    let connecting = tokio::spawn(async move {
        while let Err(error) = connector.connect(49983).await {
            assert_eq!(error.kind(), io::ErrorKind::NetworkUnreachable);
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    let frame = tokio::task::spawn_blocking(move || {
        let mut frame = [0; 2048];
        // The kernel may say other things first (IGMP), so look for the SYN.
        loop {
            let length = vmm.read(&mut frame).expect("read frame");
            let ethernet = &frame[10..length]; // after the virtio-net header
            if ethernet[12..14] == [0x08, 0x00] && ethernet[23] == 6 {
                return ethernet.to_vec();
            }
        }
    });
    let frame = tokio::time::timeout(PATIENCE, frame).await.expect("a frame in time").expect("reader");
    assert_eq!(frame[..6], GUEST_MAC, "addressed without an ARP exchange");
    assert_eq!(frame[30..34], GUEST_ADDRESS.octets());
    assert_eq!(frame[36..38], 49983_u16.to_be_bytes());
    connecting.abort();
    slot.close().await.expect("close");
    pool.close().await.expect("close pool");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_killed_node_left_is_adopted_or_swept_and_no_other_node_is_touched() {
    let (Some(node), Some(neighbour)) = (Node::new(), Node::new()) else { return };
    let other = neighbour.pool(0).await;
    let theirs = other.acquire().await.expect("acquire");

    let dead = node.pool(0).await;
    let kept = dead.acquire().await.expect("acquire");
    let listener = guest_listener(&kept).await;
    let port = listener.local_addr().expect("address").port();
    let record = kept.record();
    let lost = dead.acquire().await.expect("acquire");
    let lost_record = lost.record();
    let lost_path = lost.netns_path().to_owned();
    // Killed: no destructor runs.
    std::mem::forget((kept, lost));
    std::mem::forget(dead);
    // And one whose creation was cut short right after its file was made.
    let names = node.names();
    fs::write(names.netns_path(7), "").expect("write");

    let pool = node.pool(0).await;
    let fresh = pool.acquire().await.expect("acquire");
    assert!(![&record, &lost_record].contains(&&fresh.record()), "a number in use was handed out");
    let adopted = pool.adopt(&record).await.expect("adopt");
    assert_echo(&adopted.connector(), {
        drop(echo_once(listener));
        port
    })
    .await;
    let twice = pool.adopt(&record).await.expect_err("adopted already");
    assert!(matches!(twice, AdoptSlotError::NotOurs { .. }), "{twice}");
    let foreign = pool.adopt(&theirs.record()).await.expect_err("another node's");
    assert!(matches!(foreign, AdoptSlotError::NotOurs { .. }), "{foreign}");

    let swept = pool.sweep(&[]).await;
    let indexes: Vec<u32> = swept.removed.iter().map(|record| record.index).collect();
    assert_eq!((indexes, swept.failed.len()), (vec![lost_record.index, 7], 0));
    assert!(!lost_path.exists());
    assert!(fresh.netns_path().exists() && adopted.netns_path().exists() && theirs.netns_path().exists());

    for slot in [fresh, adopted, theirs] {
        slot.close().await.expect("close");
    }
    assert_eq!(node.ledger().await, BTreeSet::new());
    assert_eq!(neighbour.ledger().await, BTreeSet::new());
    pool.close().await.expect("close pool");
    other.close().await.expect("close pool");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disowned_slot_is_adopted_by_the_successor_unless_part_of_it_is_gone() {
    let Some(node) = Node::new() else { return };
    let first = node.pool(0).await;
    let whole = first.acquire().await.expect("acquire").disown();
    let broken = first.acquire().await.expect("acquire").disown();
    first.close().await.expect("close pool");
    netns::remove(&node.names().netns_path(broken.index)).expect("break it");

    let pool = node.pool(0).await;
    let text = serde_json::to_string(&whole).expect("serialize");
    let slot = pool.adopt(&serde_json::from_str(&text).expect("deserialize")).await.expect("adopt");
    let error = pool.adopt(&broken).await.expect_err("its namespace is gone");
    assert!(matches!(error, AdoptSlotError::Gone { .. }), "{error}");
    slot.close().await.expect("close");
    node.wait_until_clean().await; // the reaper takes the rest of the broken one
    pool.close().await.expect("close pool");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_keeps_its_slot_from_one_pool_to_the_next_and_nobody_else_gets_it() {
    let Some(node) = Node::new() else { return };
    let first = node.pool(2).await;
    let slot = first.acquire().await.expect("acquire");
    let vmm = inside(&slot, open_as_vmm);
    let listener = guest_listener(&slot).await;
    let port = listener.local_addr().expect("address").port();
    let connector = slot.connector();
    let record = slot.disown();
    let closed = connector.connect(port).await.expect_err("the former owner's way in is shut");
    assert_eq!(closed.kind(), io::ErrorKind::NotConnected);
    let later = first.acquire().await.expect("acquire").disown();
    first.close().await.expect("close pool");
    let left: BTreeSet<_> = [&record, &later].map(|left| node.names().link(left.index)).into();
    assert!(left.is_subset(&node.ledger().await), "a closing pool leaves alone what it disowned");

    let second = node.pool(2).await;
    let slot = second.adopt(&record).await.expect("adopt");
    assert_eq!(second.sweep(std::slice::from_ref(&later)).await, Swept::default());
    let mut fresh = Vec::new();
    for _ in 0..6 {
        let slot = second.acquire().await.expect("acquire");
        assert!(![&record, &later].contains(&&slot.record()), "a number in use was handed out");
        fresh.push(slot);
    }
    let echo = echo_once(listener);
    assert_echo(&slot.connector(), port).await;
    echo.join().expect("echo");
    assert_eq!((slot.guest_mac(), slot.guest_address()), (GUEST_MAC, GUEST_ADDRESS));
    fresh.push(second.adopt(&later).await.expect("what a sweep kept is there"));

    drop(vmm);
    fresh.push(slot);
    for slot in fresh {
        slot.close().await.expect("close");
    }
    let error = second.adopt(&record).await.expect_err("closed");
    assert!(matches!(error, AdoptSlotError::Gone { .. }), "{error}");
    second.close().await.expect("close pool");
    assert_eq!(node.ledger().await, BTreeSet::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_that_cannot_be_looked_at_is_left_for_another_try() {
    let Some(node) = Node::new() else { return };
    let first = node.pool(0).await;
    let record = first.acquire().await.expect("acquire").disown();
    first.close().await.expect("close pool");
    let pool = node.pool(0).await;
    let path = node.names().netns_path(record.index);
    let aside = path.with_extension("aside");
    let move_mount = |from: &Path, to: &Path| {
        fs::write(to, "").expect("make the place");
        nix::mount::mount(Some(from), to, None::<&str>, nix::mount::MsFlags::MS_BIND, None::<&str>).expect("bind");
        netns::remove(from).expect("remove");
    };
    move_mount(&path, &aside);
    std::os::unix::fs::symlink(&path, &path).expect("a link to itself");
    let error = pool.adopt(&record).await.expect_err("its file cannot be opened");
    assert!(matches!(error, AdoptSlotError::Inspect { .. }), "{error}");
    fs::remove_file(&path).expect("remove the link");
    move_mount(&aside, &path);
    pool.adopt(&record).await.expect("adopt").close().await.expect("close");
    pool.close().await.expect("close pool");
    assert_eq!(node.ledger().await, BTreeSet::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_pool_keeps_fresh_slots_ready_and_removes_them_at_close() {
    let Some(node) = Node::new() else { return };
    let pool = node.pool(2).await;
    for round in 0..3 {
        let deadline = Instant::now() + PATIENCE;
        while pool.waiting() < 2 {
            assert!(Instant::now() < deadline, "round {round}: {} waiting", pool.waiting());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let started = Instant::now();
        let slot = pool.acquire().await.expect("acquire");
        assert!(started.elapsed() < Duration::from_millis(50), "{:?}", started.elapsed());
        slot.close().await.expect("close");
    }
    pool.close().await.expect("close pool");
    assert!(matches!(pool.acquire().await, Err(CreateSlotError::Closed)));
    assert_eq!(node.ledger().await, BTreeSet::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn more_slots_wait_after_somebody_found_none_and_fewer_after_a_calm_time() {
    let Some(node) = Node::new() else { return };
    let config = NetworkConfig { low_watermark: 1, calm: Duration::from_millis(300), ..node.config() };
    let pool = SlotPool::start(config).await.expect("start pool");
    let waits = async |count: usize| {
        let deadline = Instant::now() + PATIENCE;
        while pool.waiting() != count {
            assert!(Instant::now() < deadline, "{} waiting, not {count}", pool.waiting());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    waits(1).await;
    let taken = [pool.acquire().await.expect("the one"), pool.acquire().await.expect("there was none")];
    waits(2).await;
    waits(1).await;
    for slot in taken {
        slot.close().await.expect("close");
    }
    pool.close().await.expect("close pool");
    assert_eq!(node.ledger().await, BTreeSet::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn slots_dropped_or_given_up_while_being_made_do_not_leak() {
    let Some(node) = Node::new() else { return };
    let pool = node.pool(0).await;
    drop(pool.acquire().await.expect("acquire"));
    for _ in 0..4 {
        let cut_short = tokio::time::timeout(Duration::from_millis(1), pool.acquire()).await;
        drop(cut_short);
    }
    pool.close().await.expect("close pool");
    assert_eq!(node.ledger().await, BTreeSet::new());

    let pool = node.pool(2).await;
    let deadline = Instant::now() + PATIENCE;
    while pool.waiting() < 2 {
        assert!(Instant::now() < deadline);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    drop(pool); // the seat belt
    node.wait_until_clean().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_that_cannot_be_made_says_why_and_leaves_nothing() {
    let Some(node) = Node::new() else { return };
    let pool = node.pool(0).await;
    let in_the_way = node.names().netns_path(0);
    fs::create_dir(&in_the_way).expect("mkdir");
    let error = pool.acquire().await.expect_err("its path is taken");
    assert!(matches!(&error, CreateSlotError::Kernel { object, .. } if *object == in_the_way.display().to_string()));
    fs::remove_dir(&in_the_way).expect("rmdir");
    let slot = pool.acquire().await.expect("the next number is free");
    slot.close().await.expect("close");
    node.wait_until_clean().await;
    pool.close().await.expect("close pool");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_slots_eight_at_a_time_are_unique_and_leave_nothing() {
    let Some(node) = Node::new() else { return };
    let pool = node.pool(2).await;
    let seen = std::sync::Mutex::new(BTreeSet::new());
    let rounds = futures::stream::iter(0..100).map(async |_| {
        let started = Instant::now();
        let slot = pool.acquire().await.expect("acquire");
        let acquired = started.elapsed();
        assert!(seen.lock().expect("lock").insert(slot.record().index), "number reused while others are free");
        let listener = inside(&slot, || TcpListener::bind((TAP_ADDRESS, 0)).expect("listen on the tap's address"));
        drop(listener);
        let started = Instant::now();
        slot.close().await.expect("close");
        (acquired, started.elapsed())
    });
    let started = Instant::now();
    let (mut acquired, mut closed): (Vec<_>, Vec<_>) = rounds.buffer_unordered(8).unzip::<_, _, Vec<_>, Vec<_>>().await;
    let total = started.elapsed();
    acquired.sort();
    closed.sort();
    println!(
        "100 slots, 8 at a time: {total:.0?}; acquire p50 {:.1?} p95 {:.1?}; close p50 {:.1?} p95 {:.1?}",
        acquired[50], acquired[95], closed[50], closed[95]
    );
    pool.close().await.expect("close pool");
    assert_eq!(node.ledger().await, BTreeSet::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn one_at_a_time_slots_are_made_and_connected_quickly() {
    let Some(node) = Node::new() else { return };
    let pool = node.pool(0).await;
    let mut made = Vec::new();
    for _ in 0..10 {
        let started = Instant::now();
        let slot = pool.acquire().await.expect("acquire");
        made.push(started.elapsed());
        slot.close().await.expect("close");
    }
    let slot = pool.acquire().await.expect("acquire");
    let listener = guest_listener(&slot).await;
    let port = listener.local_addr().expect("address").port();
    let connector = slot.connector();
    let mut connected = Vec::new();
    for _ in 0..50 {
        let started = Instant::now();
        let stream = connector.connect(port).await.expect("connect");
        connected.push(started.elapsed());
        drop(stream);
        drop(listener.accept().expect("accept"));
    }
    made.sort();
    connected.sort();
    println!(
        "make p50 {:.1?} max {:.1?}; connect p50 {:.0?} p95 {:.0?}",
        made[5], made[9], connected[25], connected[47]
    );
    drop(listener);
    slot.close().await.expect("close");
    pool.close().await.expect("close pool");
}
