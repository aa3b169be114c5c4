//! Rules, as data: what nf_tables is told, and what tests ask.

use std::net::Ipv4Addr;

use ipnet::Ipv4Net;

use super::policy::EgressPolicy;
use crate::config::EgressConfig;
use crate::slot::{GUEST_ADDRESS, GUEST_MAC, TAP_NAME, VETH_NAME};

/// Protocol numbers (IANA).
const TCP: u8 = 6;
const UDP: u8 = 17;
/// Where resolvers listen.
const DNS: u16 = 53;

/// Protocols of frames (IEEE 802).
const ETHERTYPE_IPV4: u16 = 0x0800;
const ETHERTYPE_ARP: u16 = 0x0806;

/// Bits of a connection's state (`linux/netfilter/nf_conntrack_common.h`).
const INVALID: u32 = 1;
const ESTABLISHED: u32 = 1 << 1;
const RELATED: u32 = 1 << 2;

/// The chain that a policy fills.
pub(crate) const EGRESS: &str = "egress";
/// The chain that says no.
const REFUSE: &str = "refuse";

/// A table of nf_tables.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Table {
    pub(crate) family: Family,
    pub(crate) name: String,
    /// A chain comes before those that jump to it.
    pub(crate) chains: Vec<Chain>,
}

/// What a table's packets are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Family {
    /// IPv4.
    Ipv4,
    /// Frames as a device receives them.
    Netdev,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Chain {
    pub(crate) name: &'static str,
    /// Where packets come from by themselves; `None`: from other chains.
    pub(crate) hook: Option<Hook>,
    pub(crate) rules: Vec<Rule>,
}

/// Where a chain sees packets, and whether one that comes to its end goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Hook {
    /// Frames that the device receives; dropped at the end.
    Ingress {
        device: &'static str,
    },
    Input {
        accept: bool,
    },
    Forward {
        accept: bool,
    },
    Output {
        accept: bool,
    },
    /// Of the kind that translates addresses; accepted at the end.
    Postrouting,
}

/// What happens to packets that match all of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Rule {
    pub(crate) matches: Vec<Match>,
    pub(crate) verdict: Verdict,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Match {
    /// The device that it came by; a name that ends in `*` stands for all that begin so.
    From(String),
    /// The device that it leaves by.
    To(String),
    /// The device that it leaves by is none of these.
    NotTo(String),
    /// Any of these states.
    State(u32),
    Source(Ipv4Net),
    NotSource(Ipv4Net),
    Destination(Ipv4Net),
    Protocol(u8),
    /// Of TCP and UDP.
    Port(u16),
    EtherType(u16),
    EtherSource([u8; 6]),
    /// IPv4 without options.
    PlainHeader,
    /// An ARP message about Ethernet and IPv4 whose sender is this one.
    ArpSender([u8; 6], Ipv4Addr),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    Accept,
    Drop,
    /// Goes on in that chain, and does not come back.
    Goto(&'static str),
    /// Answered with a TCP reset.
    Reset,
    /// Answered with ICMP: administratively prohibited.
    Prohibited,
    /// Leaves with the address of the device that it leaves by.
    Masquerade,
}

fn rule(matches: impl Into<Vec<Match>>, verdict: Verdict) -> Rule {
    Rule { matches: matches.into(), verdict }
}

fn chain(name: &'static str, hook: impl Into<Option<Hook>>, rules: impl Into<Vec<Rule>>) -> Chain {
    Chain { name, hook: hook.into(), rules: rules.into() }
}

/// Refused, so that whoever waits for an answer need not. Without bound for TCP; the kernel answers some packets a second by ICMP.
fn refuse() -> Chain {
    let rules = [rule([Match::Protocol(TCP)], Verdict::Reset), rule([], Verdict::Prohibited)];
    chain(REFUSE, None, rules)
}

/// Steps 2 to 4 of the order: the same for all sandboxes of a node.
fn node_rules(node: &EgressConfig, resolver: bool) -> Vec<Rule> {
    let resolver = node.resolver.filter(|_| resolver).into_iter().flat_map(|address| {
        [UDP, TCP].map(|protocol| {
            let to = Match::Destination(address.into());
            rule([to, Match::Protocol(protocol), Match::Port(DNS)], Verdict::Accept)
        })
    });
    let denied = node.denied().into_iter();
    resolver.chain(denied.map(|net| rule([Match::Destination(net)], Verdict::Goto(REFUSE)))).collect()
}

/// Steps 2 to 8 of the order, for new connections.
pub(crate) fn policy_rules(policy: &EgressPolicy, node: &EgressConfig) -> Vec<Rule> {
    let of = |list: &[super::Destination], verdict| {
        let nets: Vec<Ipv4Net> = list.iter().map(super::Destination::net).collect();
        let nets = Ipv4Net::aggregate(&nets).into_iter();
        nets.map(move |net| rule([Match::Destination(net)], verdict)).collect::<Vec<_>>()
    };
    let mut rules = node_rules(node, !policy.is_sealed());
    rules.extend(of(&policy.allow_out, Verdict::Accept));
    rules.extend(of(&policy.deny_out, Verdict::Goto(REFUSE)));
    rules.push(rule([], if policy.has_internet() { Verdict::Accept } else { Verdict::Goto(REFUSE) }));
    rules
}

/// The tables in a slot's netns, with `egress` in its place.
pub(crate) fn slot_tables(egress: Vec<Rule>) -> Vec<Table> {
    let from = |device: &str| Match::From(device.to_owned());
    let to = |device: &str| Match::To(device.to_owned());
    let going_on = || rule([Match::State(ESTABLISHED | RELATED)], Verdict::Accept);
    let frames = [
        rule(
            [
                Match::EtherType(ETHERTYPE_IPV4),
                Match::EtherSource(GUEST_MAC),
                Match::PlainHeader,
                Match::Source(GUEST_ADDRESS.into()),
            ],
            Verdict::Accept,
        ),
        rule(
            [
                Match::EtherType(ETHERTYPE_ARP),
                Match::EtherSource(GUEST_MAC),
                Match::ArpSender(GUEST_MAC, GUEST_ADDRESS),
            ],
            Verdict::Accept,
        ),
    ];
    let input = [
        rule([from("lo")], Verdict::Accept),
        going_on(), // answers to the node
        rule([from(TAP_NAME)], Verdict::Goto(REFUSE)),
    ];
    // The VMM is in here too: it speaks to its guest, or answers.
    let output = [rule([to("lo")], Verdict::Accept), rule([to(TAP_NAME)], Verdict::Accept), going_on()];
    let forward = [
        going_on(),
        rule([Match::State(INVALID)], Verdict::Drop), // it would leave with an address that is not translated
        rule([from(TAP_NAME), to(VETH_NAME)], Verdict::Goto(EGRESS)),
    ];
    let link = chain("guest", Hook::Ingress { device: TAP_NAME }, frames);
    let chains = vec![
        refuse(),
        // What comes to its end goes on to that of `forward`, which is a drop.
        chain(EGRESS, None, egress),
        chain("input", Hook::Input { accept: false }, input),
        chain("output", Hook::Output { accept: false }, output),
        chain("forward", Hook::Forward { accept: false }, forward),
        chain("leave", Hook::Postrouting, [rule([to(VETH_NAME)], Verdict::Masquerade)]),
    ];
    let table = |family, chains| Table { family, name: SLOT_TABLE.to_owned(), chains };
    vec![table(Family::Netdev, vec![link]), table(Family::Ipv4, chains)]
}

/// The name of the tables in a slot's netns.
pub(crate) const SLOT_TABLE: &str = "aenv";

/// The table on the host. `links` are all of ours, with a `*`; `slots` their inner addresses. What is not of our links is not
/// looked at.
pub(crate) fn host_tables(name: String, links: &str, slots: Ipv4Net, node: &EgressConfig) -> Vec<Table> {
    let from = || Match::From(links.to_owned());
    let to = || Match::To(links.to_owned());
    let going_on = |way: Match| rule([way, Match::State(ESTABLISHED | RELATED)], Verdict::Accept);
    let guests = "guests";
    let mut leaving = vec![
        rule([Match::State(INVALID)], Verdict::Drop),
        rule([to()], Verdict::Goto(REFUSE)), // a neighbour
        rule([Match::NotSource(slots)], Verdict::Drop),
    ];
    leaving.extend(node_rules(node, true));
    leaving.push(rule([], Verdict::Accept));
    let forward = [
        going_on(from()),
        rule([from()], Verdict::Goto(guests)),
        going_on(to()),
        rule([to()], Verdict::Drop), // nobody comes in this way
    ];
    // The host itself may be the resolver.
    let mut input = vec![going_on(from())];
    let resolver = node_rules(node, true).into_iter().filter(|rule| rule.verdict == Verdict::Accept);
    input.extend(resolver.map(|of| Rule { matches: [vec![from()], of.matches].concat(), ..of }));
    input.push(rule([from()], Verdict::Goto(REFUSE)));
    let leave = [rule([Match::Source(slots), Match::NotTo(links.to_owned())], Verdict::Masquerade)];
    let chains = vec![
        refuse(),
        chain(guests, None, leaving),
        chain("input", Hook::Input { accept: true }, input),
        chain("forward", Hook::Forward { accept: true }, forward),
        chain("leave", Hook::Postrouting, leave),
    ];
    vec![Table { family: Family::Ipv4, name, chains }]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    use crate::egress::Destination;

    /// A packet as chains of the IPv4 family see it.
    #[derive(Debug, Clone)]
    struct Packet {
        from: &'static str,
        to: &'static str,
        state: u32,
        source: Ipv4Addr,
        destination: Ipv4Addr,
        protocol: u8,
        port: u16,
    }

    /// Bit of a new connection (`NF_CT_STATE_BIT`).
    const NEW: u32 = 1 << 3;

    fn is_device(pattern: &str, name: &str) -> bool {
        pattern.strip_suffix('*').map_or(pattern == name, |beginning| name.starts_with(beginning))
    }

    fn matches(of: &Match, packet: &Packet) -> bool {
        match of {
            Match::From(device) => is_device(device, packet.from),
            Match::To(device) => is_device(device, packet.to),
            Match::NotTo(device) => !is_device(device, packet.to),
            Match::State(bits) => packet.state & bits != 0,
            Match::Source(net) => net.contains(&packet.source),
            Match::NotSource(net) => !net.contains(&packet.source),
            Match::Destination(net) => net.contains(&packet.destination),
            Match::Protocol(number) => packet.protocol == *number,
            Match::Port(port) => packet.port == *port,
            Match::EtherType(_) | Match::EtherSource(_) | Match::PlainHeader | Match::ArpSender(..) => {
                unreachable!("of frames")
            }
        }
    }

    /// The end of a packet, as the kernel walks the rules.
    fn walk(table: &Table, name: &str, packet: &Packet) -> Verdict {
        let chain = |name: &str| table.chains.iter().find(|chain| chain.name == name).expect("a chain of the table");
        let at_end = match chain(name).hook {
            Some(Hook::Input { accept } | Hook::Forward { accept } | Hook::Output { accept }) if !accept => {
                Verdict::Drop
            }
            _ => Verdict::Accept,
        };
        let mut rules = chain(name).rules.iter();
        loop {
            let Some(rule) = rules.next() else { return at_end };
            if !rule.matches.iter().all(|of| matches(of, packet)) {
                continue;
            }
            match rule.verdict {
                Verdict::Goto(next) => rules = chain(next).rules.iter(),
                verdict => return verdict,
            }
        }
    }

    fn is_refusal(verdict: Verdict) -> bool {
        matches!(verdict, Verdict::Reset | Verdict::Prohibited)
    }

    /// The order as the contract has it, in other words than the rules.
    fn may_leave(policy: &EgressPolicy, node: &EgressConfig, packet: &Packet) -> bool {
        let is_in = |list: &[Destination]| list.iter().any(|entry| entry.net().contains(&packet.destination));
        if packet.state != NEW {
            return packet.state != INVALID;
        }
        let asks = Some(packet.destination) == node.resolver && packet.port == 53 && [6, 17].contains(&packet.protocol);
        let sealed = policy.internet == Some(false) && policy.allow_out.is_empty();
        if asks && !sealed {
            return true;
        }
        let denied = node.internal.iter().chain(&node.always_denied).any(|net| net.contains(&packet.destination));
        let link = u32::from(packet.destination) & !3 == u32::from(Ipv4Addr::new(169, 254, 0, 20));
        if denied || link {
            return false;
        }
        is_in(&policy.allow_out) || !is_in(&policy.deny_out) && policy.internet != Some(false)
    }

    fn node(resolver: Option<Ipv4Addr>) -> EgressConfig {
        let internal = vec!["10.12.0.0/16".parse().expect("valid")];
        EgressConfig { internal, resolver, ..EgressConfig::default() }
    }

    /// Few enough addresses to meet each other often.
    fn address() -> impl Strategy<Value = Ipv4Addr> {
        prop_oneof![
            (0_u8..4, 0_u8..4).prop_map(|(c, d)| Ipv4Addr::new(198, 51, c, d)),
            (20_u8..24).prop_map(|d| Ipv4Addr::new(169, 254, 0, d)),
            prop_oneof![Just([10, 12, 0, 1]), Just([10, 0, 0, 53]), Just([169, 254, 169, 254]), Just([8, 8, 8, 8])]
                .prop_map(Ipv4Addr::from),
            any::<u32>().prop_map(Ipv4Addr::from),
        ]
    }

    prop_compose! {
        fn destination()(address in address(), prefix in prop_oneof![0_u8..=32, 22_u8..=32]) -> Destination {
            Destination::try_from(format!("{address}/{prefix}")).expect("valid")
        }
    }

    prop_compose! {
        fn policy()(
            allow_out in prop::collection::vec(destination(), 0..5),
            deny_out in prop::collection::vec(destination(), 0..5),
            internet in prop::option::of(any::<bool>()),
        ) -> EgressPolicy {
            EgressPolicy { allow_out, deny_out, internet }
        }
    }

    prop_compose! {
        fn leaving()(
            state in prop_oneof![3 => Just(NEW), 1 => Just(ESTABLISHED), 1 => Just(RELATED), 1 => Just(INVALID)],
            destination in address(),
            protocol in prop_oneof![Just(1), Just(6), Just(17), any::<u8>()],
            port in prop_oneof![Just(53), Just(80), any::<u16>()],
        ) -> Packet {
            Packet { from: "tap0", to: "veth0", state, source: GUEST_ADDRESS, destination, protocol, port }
        }
    }

    proptest! {
        #[test]
        fn the_rules_decide_as_the_order_says(policy in policy(), packet in leaving(), resolver in prop::option::of(address())) {
            let node = node(resolver);
            let tables = slot_tables(policy_rules(&policy, &node));
            let verdict = walk(&tables[1], "forward", &packet);
            prop_assert_eq!(verdict == Verdict::Accept, may_leave(&policy, &node, &packet), "{:?}", verdict);
            if verdict != Verdict::Accept {
                let answer = if packet.protocol == 6 { Verdict::Reset } else { Verdict::Prohibited };
                prop_assert_eq!(verdict, if packet.state == INVALID { Verdict::Drop } else { answer });
            }
        }

        #[test]
        fn a_slot_without_a_policy_lets_nothing_new_leave(packet in leaving()) {
            let verdict = walk(&slot_tables(Vec::new())[1], "forward", &packet);
            prop_assert_eq!(verdict == Verdict::Accept, packet.state & (ESTABLISHED | RELATED) != 0);
        }

        #[test]
        fn the_host_lets_no_more_through_than_the_widest_policy(packet in leaving()) {
            let node = node(Some(Ipv4Addr::new(10, 0, 0, 53)));
            let slots = "10.12.0.0/16".parse().expect("valid");
            let host = &host_tables("aenv-x".to_owned(), "avx-*", slots, &node)[0];
            let source = Ipv4Addr::new(10, 12, 0, 3);
            let packet = Packet { from: "avx-1", to: "eth0", source, ..packet };
            let widest = may_leave(&EgressPolicy::default(), &node, &packet);
            prop_assert_eq!(walk(host, "forward", &packet) == Verdict::Accept, widest);
            // Neither with another slot's address, nor to another slot, nor to the host.
            if packet.state == NEW {
                let stranger = Packet { source: Ipv4Addr::new(203, 0, 113, 9), ..packet.clone() };
                prop_assert_eq!(walk(host, "forward", &stranger), Verdict::Drop);
                let neighbour = Packet { to: "avx-2", ..packet.clone() };
                prop_assert!(is_refusal(walk(host, "forward", &neighbour)));
                let asks = Some(packet.destination) == node.resolver && packet.port == 53
                    && [TCP, UDP].contains(&packet.protocol);
                prop_assert_eq!(is_refusal(walk(host, "input", &packet)), !asks);
                let others = Packet { from: "eth0", to: "docker0", ..packet.clone() };
                prop_assert_eq!(walk(host, "forward", &others), Verdict::Accept);
                let inward = Packet { from: "eth0", to: "avx-1", ..packet };
                prop_assert_eq!(walk(host, "forward", &inward), Verdict::Drop);
            }
        }
    }

    #[test]
    fn a_guest_speaks_to_nobody_in_its_slot_and_the_vmm_only_to_its_guest() {
        let table = &slot_tables(policy_rules(&EgressPolicy::default(), &node(None)))[1];
        let new = Packet {
            from: "tap0",
            to: "",
            state: NEW,
            source: GUEST_ADDRESS,
            destination: crate::TAP_ADDRESS,
            protocol: 6,
            port: 80,
        };
        assert!(is_refusal(walk(table, "input", &new)));
        assert_eq!(walk(table, "input", &Packet { from: "veth0", ..new.clone() }), Verdict::Drop);
        let out = Packet { from: "", ..new };
        assert_eq!(walk(table, "output", &Packet { to: "tap0", ..out.clone() }), Verdict::Accept);
        assert_eq!(walk(table, "output", &Packet { to: "veth0", ..out }), Verdict::Drop);
        let between = Packet { from: "veth0", to: "tap0", ..new_packet() };
        assert_eq!(walk(table, "forward", &between), Verdict::Drop);
    }

    fn new_packet() -> Packet {
        let (source, destination) = (Ipv4Addr::new(198, 51, 100, 1), GUEST_ADDRESS);
        Packet { from: "tap0", to: "veth0", state: NEW, source, destination, protocol: 17, port: 9 }
    }
}
