//! What leaves a slot, seen from both sides.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures::StreamExt as _;

use super::world::*;
use crate::{EgressPolicy, GUEST_ADDRESS, GUEST_MAC, Slot, SlotPool, TAP_ADDRESS, TAP_MAC};

fn policy(allow_out: &[&str], deny_out: &[&str], internet: Option<bool>) -> EgressPolicy {
    let texts = |list: &[&str]| list.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
    EgressPolicy::new(&texts(allow_out), &texts(deny_out), internet).expect("valid policy")
}

async fn slot_with(pool: &SlotPool, policy: &EgressPolicy) -> (Slot, Guest) {
    let slot = pool.acquire().await.expect("acquire");
    slot.set_policy(policy).await.expect("set policy");
    let guest = Guest::of(&slot).await;
    (slot, guest)
}

/// Refused at once, by TCP, UDP and ICMP; nothing arrives.
fn assert_denied(world: &World, guest: &Guest, address: Ipv4Addr) {
    world.seen();
    let started = Instant::now();
    let tcp = guest.greeted(address).expect_err("TCP");
    assert_eq!(tcp.kind(), io::ErrorKind::ConnectionRefused, "{address}: {tcp}");
    let udp = guest.echoed(address, 9, b"out").expect_err("UDP");
    assert_eq!(udp.kind(), io::ErrorKind::HostUnreachable, "{address}: {udp}");
    guest.pinged(address).expect_err("ICMP");
    assert!(started.elapsed() < PATIENCE, "{address}: refused, not lost");
    world.assert_unseen(address);
}

fn assert_allowed(guest: &Guest, address: Ipv4Addr) {
    assert_eq!(guest.greeted(address).expect("TCP"), GREETING);
    guest.echoed(address, 9, b"out").expect("UDP");
    guest.pinged(address).expect("ICMP");
}

#[test]
fn a_guest_reaches_the_internet_and_neither_private_networks_nor_metadata_nor_the_host() {
    in_world(async |world| {
        let pool = world.pool().await;
        let (slot, guest) = slot_with(&pool, &EgressPolicy::default()).await;
        let (neighbour_slot, neighbour) = slot_with(&pool, &EgressPolicy::default()).await;
        world.seen();
        assert_allowed(&guest, SERVER);
        assert_allowed(&neighbour, OTHER_SERVER);
        // They leave with the host's address.
        let sources: BTreeSet<_> = (world.seen().iter())
            .filter(|frame| frame.len() > 34 && frame[12..14] == [8, 0] && frame[30..34] == SERVER.octets())
            .map(|frame| Ipv4Addr::new(frame[26], frame[27], frame[28], frame[29]))
            .collect();
        assert_eq!(sources, [HOST].into());
        guest.echoed(RESOLVER, 53, b"name?").expect("its resolver, though that is in a private network");
        assert_denied(world, &guest, RESOLVER); // at other ports
        let host_listener = std::net::TcpListener::bind("0.0.0.0:80").expect("listen on the host");
        let (host_end, inner_end) = (Ipv4Addr::new(10, 12, 0, 2), Ipv4Addr::new(10, 12, 0, 3));
        let own_end = Ipv4Addr::new(10, 12, 0, 1);
        for denied in [METADATA, PRIVATE, HOST, own_end, host_end, inner_end, TAP_ADDRESS] {
            assert_denied(world, &guest, denied);
        }
        drop(host_listener);
        drop((guest, neighbour));
        slot.close().await.expect("close");
        neighbour_slot.close().await.expect("close");
        pool.close().await.expect("close pool");
    });
}

#[test]
fn nothing_leaves_without_a_policy_or_without_internet_access() {
    in_world(async |world| {
        let pool = world.pool().await;
        let slot = pool.acquire().await.expect("acquire");
        let guest = Guest::of(&slot).await;
        let assert_nothing_leaves = |answered: bool| {
            world.seen();
            if answered {
                for address in [SERVER, METADATA, HOST] {
                    assert_denied(world, &guest, address);
                }
                guest.echoed(RESOLVER, 53, b"name?").expect_err("not even names");
            } else {
                // Nobody routes, so nobody answers.
                guest.run(|| {
                    let socket = UdpSocket::bind("0.0.0.0:0").expect("bind");
                    for address in [SERVER, METADATA, HOST, RESOLVER] {
                        socket.send_to(b"out", (address, 53)).expect("send");
                    }
                });
            }
        };
        assert_nothing_leaves(false);
        slot.set_policy(&policy(&[], &[], Some(false))).await.expect("set policy");
        assert_nothing_leaves(true);
        slot.set_policy(&policy(&[], &["192.0.2.0/24"], Some(false))).await.expect("set policy");
        assert_nothing_leaves(true);
        world.assert_unseen(RESOLVER);
        // The wire is one that carries.
        slot.set_policy(&EgressPolicy::default()).await.expect("set policy");
        assert_allowed(&guest, SERVER);
        drop(guest);
        slot.close().await.expect("close");
        pool.close().await.expect("close pool");
    });
}

#[test]
fn lists_decide_in_their_order_and_never_over_the_node() {
    in_world(async |world| {
        let pool = world.pool().await;
        let (slot, guest) = slot_with(&pool, &policy(&["198.51.100.0/24"], &["0.0.0.0/0"], None)).await;
        assert_allowed(&guest, SERVER);
        assert_denied(world, &guest, OTHER_SERVER);
        guest.echoed(RESOLVER, 53, b"name?").expect("resolver");

        slot.set_policy(&policy(&[], &["198.51.100.1"], None)).await.expect("set policy");
        assert_denied(world, &guest, SERVER);
        assert_allowed(&guest, OTHER_SERVER);

        slot.set_policy(&policy(&["203.0.113.1"], &[], Some(false))).await.expect("set policy");
        assert_denied(world, &guest, SERVER);
        assert_allowed(&guest, OTHER_SERVER);
        guest.echoed(RESOLVER, 53, b"name?").expect("resolver");

        slot.set_policy(&policy(&["0.0.0.0/0", "169.254.169.254", "10.0.0.0/8", "192.0.2.2"], &[], None))
            .await
            .expect("set");
        for address in [METADATA, PRIVATE, HOST] {
            assert_denied(world, &guest, address);
        }

        // As long as lists may be; none is beside another.
        let long =
            |first: u8| (0..512).map(|n| format!("{first}.{}.{}.0/24", n / 128, n % 128 * 2)).collect::<Vec<_>>();
        let mut deny = long(204);
        deny[511] = SERVER.to_string();
        slot.set_policy(&EgressPolicy::new(&long(205), &deny, None).expect("valid")).await.expect("set policy");
        assert_denied(world, &guest, SERVER);
        assert_allowed(&guest, OTHER_SERVER);
        drop(guest);
        slot.close().await.expect("close");
        pool.close().await.expect("close pool");
    });
}

/// An IPv4 packet with UDP to port 9 in an Ethernet frame, after an empty virtio-net header.
struct Forged {
    from_mac: [u8; 6],
    ethertype: u16,
    source: Ipv4Addr,
    options: Vec<u8>,
    /// Flags and offset of a fragment.
    fragment: u16,
    payload: Vec<u8>,
}

impl Default for Forged {
    fn default() -> Self {
        let payload = [&[0x30, 0x39, 0, 9, 0, 14, 0, 0][..], b"forged"].concat();
        Self { from_mac: GUEST_MAC, ethertype: 0x0800, source: GUEST_ADDRESS, options: vec![], fragment: 0, payload }
    }
}

impl Forged {
    /// What a guest may send.
    fn honest() -> Self {
        let payload = [&[0x30, 0x39, 0, 9, 0, 14, 0, 0][..], b"honest"].concat();
        Self { payload, ..Self::default() }
    }

    fn frame(&self, to: Ipv4Addr) -> Vec<u8> {
        let header = 20 + self.options.len();
        let mut ip = vec![0x40 | (header / 4) as u8, 0];
        ip.extend_from_slice(&((header + self.payload.len()) as u16).to_be_bytes());
        ip.extend_from_slice(&[0x12, 0x34]);
        ip.extend_from_slice(&self.fragment.to_be_bytes());
        ip.extend_from_slice(&[64, 17, 0, 0]);
        ip.extend_from_slice(&self.source.octets());
        ip.extend_from_slice(&to.octets());
        ip.extend_from_slice(&self.options);
        let sum: u32 = ip.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
        let sum = !((sum & 0xffff) + (sum >> 16)) as u16;
        ip[10..12].copy_from_slice(&sum.to_be_bytes());
        let mut frame = vec![0; 10];
        frame.extend_from_slice(&TAP_MAC);
        frame.extend_from_slice(&self.from_mac);
        frame.extend_from_slice(&self.ethertype.to_be_bytes());
        frame.extend_from_slice(&ip);
        frame.extend_from_slice(&self.payload);
        frame
    }
}

/// Waits until the internet has seen a packet to `address`; returns all frames until then.
fn wait_for(world: &World, address: Ipv4Addr) -> Vec<Vec<u8>> {
    let deadline = Instant::now() + PATIENCE;
    let mut seen = Vec::new();
    loop {
        seen.extend(world.seen());
        if seen.iter().any(|frame| frame.len() > 34 && frame[30..34] == address.octets()) {
            return seen;
        }
        assert!(Instant::now() < deadline, "nothing came to {address}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn frames_that_are_not_the_guests_own_go_nowhere() {
    in_world(async |world| {
        let pool = world.pool().await;
        let slot = pool.acquire().await.expect("acquire");
        slot.set_policy(&EgressPolicy::default()).await.expect("set policy");
        let mut vmm = vmm_side(&slot);
        let mut send = |forged: Forged, to| vmm.write_all(&forged.frame(to)).expect("write a frame");
        send(Forged::honest(), SERVER);
        wait_for(world, SERVER);

        let neighbour = Ipv4Addr::new(10, 12, 0, 3);
        for source in [neighbour, SERVER, HOST, Ipv4Addr::LOCALHOST, Ipv4Addr::UNSPECIFIED, TAP_ADDRESS] {
            send(Forged { source, ..Forged::default() }, SERVER);
        }
        let mut mac = GUEST_MAC;
        mac[5] ^= 1;
        send(Forged { from_mac: mac, ..Forged::default() }, SERVER);
        for ethertype in [0x86dd, 0x8100, 0x88a8, 0x8847, 0x0806] {
            send(Forged { ethertype, ..Forged::default() }, SERVER);
        }
        // Loose source routing by way of the metadata address, and a harmless option.
        let route = vec![0x83, 7, 4, 169, 254, 169, 254, 0];
        send(Forged { options: route, ..Forged::default() }, SERVER);
        send(Forged { options: vec![1; 4], ..Forged::default() }, SERVER);
        // IPv6 proper.
        let mut frame = vec![0; 10];
        frame.extend_from_slice(&[&TAP_MAC[..], &GUEST_MAC, &[0x86, 0xdd, 0x60, 0, 0, 0, 0, 0, 59, 64]].concat());
        frame.extend_from_slice(&[[0xfe; 16], [0xff; 16]].concat());
        vmm.write_all(&frame).expect("write a frame");
        let mut send = |forged: Forged, to| vmm.write_all(&forged.frame(to)).expect("write a frame");
        send(Forged::honest(), OTHER_SERVER);
        let seen = wait_for(world, OTHER_SERVER);
        let forged = seen.iter().find(|frame| frame.windows(6).any(|part| part == b"forged"));
        assert_eq!(forged, None);
        world.assert_unseen(METADATA);
        drop(vmm);
        slot.close().await.expect("close");
        pool.close().await.expect("close pool");
    });
}

#[test]
fn fragments_are_judged_as_the_packet_that_they_are_parts_of() {
    in_world(async |world| {
        let pool = world.pool().await;
        let slot = pool.acquire().await.expect("acquire");
        slot.set_policy(&EgressPolicy::default()).await.expect("set policy");
        let mut vmm = vmm_side(&slot);
        // To the resolver's port 53 says the first part; the part that follows says 9 over it, or comes alone.
        let first = [&[0x30, 0x39, 0, 53, 0, 24, 0, 0][..], b"forged.."].concat();
        let over = [&[0x30, 0x39, 0, 9, 0, 24, 0, 0][..], b"forged.."].concat();
        let more = 0x2000;
        for (fragment, payload) in [(more, first), (more, over), (1, b"forged..forged..".to_vec())] {
            vmm.write_all(&Forged { fragment, payload, ..Forged::default() }.frame(RESOLVER)).expect("write a frame");
        }
        vmm.write_all(&Forged { fragment: 2, ..Forged::default() }.frame(METADATA)).expect("write a frame");
        vmm.write_all(&Forged::default().frame(SERVER)).expect("write a frame");
        let seen = wait_for(world, SERVER);
        for frame in seen.iter().filter(|frame| frame[30..34] == RESOLVER.octets() && frame[23] == 17) {
            assert_eq!(frame[36..38], [0, 53], "{frame:02x?}");
        }
        assert!(seen.iter().all(|frame| frame[30..34] != METADATA.octets()));
        drop(vmm);

        let guest = Guest::of(&slot).await;
        let long = vec![7; 6000];
        guest.echoed(RESOLVER, 53, &long).expect("a long question, in parts");
        guest.echoed(SERVER, 9, &long).expect("a long datagram, in parts");
        let denied = guest.echoed(RESOLVER, 9, &long).expect_err("not at another port");
        assert_eq!(denied.kind(), io::ErrorKind::HostUnreachable, "{denied}");
        drop(guest);
        slot.close().await.expect("close");
        pool.close().await.expect("close pool");
    });
}

#[test]
fn a_vmm_in_the_slot_reaches_its_guest_alone() {
    in_world(async |world| {
        let pool = world.pool().await;
        let (slot, guest) = slot_with(&pool, &EgressPolicy::default()).await;
        let listener = guest.run(|| std::net::TcpListener::bind((GUEST_ADDRESS, 7)).expect("listen"));
        world.seen();
        let netns = File::open(slot.netns_path()).expect("open netns");
        inside(netns, || {
            for address in [SERVER, HOST, METADATA] {
                let socket = UdpSocket::bind("0.0.0.0:0").expect("bind");
                assert!(socket.send_to(b"out", (address, 9)).is_err(), "{address}");
                TcpStream::connect_timeout(&(address, 80).into(), Duration::from_millis(50)).expect_err("no way out");
            }
        });
        let connected = slot.connector().connect(7).await.expect("the node reaches its guest");
        drop(listener.accept().expect("accept"));
        drop(connected);
        assert_allowed(&guest, OTHER_SERVER);
        let seen = world.seen();
        assert!(seen.iter().all(|frame| frame.len() < 34 || frame[30..34] != SERVER.octets()));
        drop((guest, listener));
        slot.close().await.expect("close");
        pool.close().await.expect("close pool");
    });
}

#[test]
fn a_replaced_policy_holds_at_once_keeps_open_connections_and_has_no_gap() {
    in_world(async |world| {
        let pool = world.pool().await;
        // Both deny 203.0.113.1; the rest alternates.
        let policies = [
            policy(&[], &["203.0.113.1", "198.51.100.7"], None),
            policy(&["198.51.100.0/24"], &["0.0.0.0/0"], Some(true)),
        ];
        let (slot, guest) = slot_with(&pool, &policies[0]).await;
        let mut open = guest.connect(SERVER, 80).expect("connect");
        world.seen();
        let (done, sent) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let load = {
            let (done, sent) = (Arc::clone(&done), Arc::clone(&sent));
            guest.run(|| {
                let sockets: Vec<_> = (0..64).map(|_| UdpSocket::bind("0.0.0.0:0").expect("bind")).collect();
                std::thread::spawn(move || {
                    // Each from another port, so that each is new.
                    for socket in sockets.iter().cycle() {
                        if done.load(Ordering::Relaxed) {
                            return;
                        }
                        _ = socket.send_to(b"gap", (OTHER_SERVER, 9));
                        sent.fetch_add(1, Ordering::Relaxed);
                    }
                })
            })
        };
        let mut rounds = 0;
        while rounds < 100 || sent.load(Ordering::Relaxed) < 10_000 {
            slot.set_policy(&policies[rounds % 2]).await.expect("set policy");
            rounds += 1;
        }
        done.store(true, Ordering::Relaxed);
        load.join().expect("load");
        println!("{rounds} changes under {} datagrams", sent.load(Ordering::Relaxed));
        assert_eq!(guest.greeted(SERVER).expect("allowed by both"), GREETING);
        world.assert_unseen(OTHER_SERVER);

        slot.set_policy(&policy(&[], &[], Some(false))).await.expect("set policy");
        assert_denied(world, &guest, SERVER);
        let mut greeting = [0; GREETING.len()];
        open.read_exact(&mut greeting).expect("an open connection goes on");
        open.write_all(b"still here").expect("write");
        drop((open, guest));
        slot.close().await.expect("close");
        pool.close().await.expect("close pool");
    });
}

#[test]
fn a_policy_outlives_its_server_and_the_hosts_table_its_slots() {
    in_world(async |world| {
        let first = world.pool().await;
        let (slot, guest) = slot_with(&first, &policy(&["198.51.100.0/24"], &[], Some(false))).await;
        let record = slot.disown();
        first.close().await.expect("close pool");
        assert!(world.ledger().await.contains(&format!("table {}", world.names().table())));
        assert_allowed(&guest, SERVER);
        assert_denied(world, &guest, OTHER_SERVER);

        // The successor denies more, to all.
        let mut config = world.config(0);
        config.egress.always_denied.push("198.51.100.0/24".parse().expect("valid"));
        let second = SlotPool::start(config).await.expect("start pool");
        let slot = second.adopt(&record).await.expect("adopt");
        assert_denied_by_host(world, &guest, SERVER);
        slot.set_policy(&policy(&["0.0.0.0/0"], &[], Some(false))).await.expect("set policy");
        assert_denied(world, &guest, SERVER);
        assert_allowed(&guest, OTHER_SERVER);
        let record = slot.disown();
        second.close().await.expect("close pool");

        // And the next one has no egress at all.
        let mut config = world.config(0);
        config.egress.enabled = false;
        let third = SlotPool::start(config).await.expect("start pool");
        let slot = third.adopt(&record).await.expect("adopt");
        slot.set_policy(&EgressPolicy::default()).await.expect("set policy");
        world.seen();
        guest.run(|| {
            let socket = UdpSocket::bind("0.0.0.0:0").expect("bind");
            socket.send_to(b"out", (OTHER_SERVER, 9)).expect("send");
        });
        let record = slot.disown();
        third.close().await.expect("close pool");

        let last = world.pool().await;
        let slot = last.adopt(&record).await.expect("adopt");
        slot.set_policy(&EgressPolicy::default()).await.expect("set policy");
        assert_eq!(guest.greeted(SERVER).expect("as ever"), GREETING);
        world.assert_unseen(OTHER_SERVER);
        drop(guest);
        slot.close().await.expect("close");
        last.close().await.expect("close pool");
    });
}

/// Refused by the host, though the slot allows it.
fn assert_denied_by_host(world: &World, guest: &Guest, address: Ipv4Addr) {
    world.seen();
    guest.greeted(address).expect_err("TCP");
    guest.echoed(address, 9, b"out").expect_err("UDP");
    world.assert_unseen(address);
}

#[test]
fn two_hundred_slots_that_were_used_leave_nothing_behind() {
    in_world(async |world| {
        let pool = SlotPool::start(world.config(4)).await.expect("start pool");
        let cycles = futures::stream::iter(0..200).map(async |round| {
            let slot = pool.acquire().await.expect("acquire");
            slot.set_policy(&EgressPolicy::default()).await.expect("set policy");
            if round % 8 == 0 {
                let guest = Guest::of(&slot).await;
                let connected = guest.connect(SERVER, 80).expect("connect");
                guest.echoed(RESOLVER, 53, b"name?").expect("resolver");
                std::mem::forget(connected); // noted by the host for days
            }
            slot.close().await.expect("close");
        });
        cycles.buffer_unordered(4).collect::<Vec<_>>().await;
        pool.close().await.expect("close pool");
        // The world looks at what is left: links, files of namespaces, connections, tables.
    });
}

#[test]
fn connections_that_the_host_noted_for_a_slot_do_not_meet_the_next_one() {
    in_world(async |world| {
        let pool = world.pool().await;
        let (slot, guest) = slot_with(&pool, &EgressPolicy::default()).await;
        let (other, other_guest) = slot_with(&pool, &EgressPolicy::default()).await;
        let kept = other_guest.connect(SERVER, 80).expect("connect");
        let lost = guest.connect(SERVER, 80).expect("connect");
        let noted = |ledger: &BTreeSet<String>, source: &str| {
            ledger.iter().filter(|line| line.starts_with("noted") && line.contains(&format!("src={source} "))).count()
        };
        let before = world.ledger().await;
        assert_eq!((noted(&before, "10.12.0.1"), noted(&before, "10.12.0.3")), (1, 1), "{before:?}");
        drop(guest);
        slot.close().await.expect("close");
        let after = world.ledger().await;
        assert_eq!((noted(&after, "10.12.0.1"), noted(&after, "10.12.0.3")), (0, 1), "{after:?}");
        drop((kept, lost, other_guest));
        other.close().await.expect("close");
        pool.close().await.expect("close pool");
    });
}
