//! The kernel's nf_tables, by netlink: whole tables and chains, each change one batch that is done as a whole or not at all.
//!
//! A batch is messages between a begin and an end; the kernel reads it in one `send`, answers each message that is wrong, and
//! changes nothing if one is. Numbers are big-endian, except what is compared with a register in host order (connection
//! states). Constants are of `linux/netfilter/nf_tables.h`.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::errno::Errno;
use nix::sys::socket::sockopt::{RcvBufForce, SndBufForce};
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, sendto, setsockopt, socket,
};

use crate::egress::{Chain, Family, Hook, Match, Rule, Table, Verdict};

/// Subsystems of nfnetlink.
const NFTABLES: u16 = 10;

/// Messages of a batch, in no subsystem.
const BATCH_BEGIN: u16 = 0x10;
const BATCH_END: u16 = 0x11;

// Messages of nf_tables.
const NEW_TABLE: u16 = 0;
const DELETE_TABLE: u16 = 2;
const NEW_CHAIN: u16 = 3;
const NEW_RULE: u16 = 6;
const DELETE_RULE: u16 = 8;

// Flags of netlink messages.
const REQUEST: u16 = 0x1;
const ACK: u16 = 0x4;
const CREATE: u16 = 0x400;
const APPEND: u16 = 0x800;

/// The type of netlink's own answers.
const NLMSG_ERROR: u16 = 2;
pub(crate) const NLMSG_DONE: u16 = 3;

/// Length of a netlink header, and of nfnetlink's after it.
const HEADER: usize = 16;
pub(crate) const NF_HEADER: usize = 4;

/// Register 1 of 16 bytes; 0 is the verdict's.
const REGISTER: u32 = 1;

/// Flag of an attribute that contains attributes.
const NESTED: u16 = 0x8000;

/// Room for a batch of the longest policy: about a thousand rules of 250 bytes, counted twice by the kernel.
const BUFFER: usize = 4 << 20;

/// A socket to nfnetlink of the netns it was made in.
#[derive(Debug)]
pub(crate) struct Netfilter {
    socket: OwnedFd,
}

impl Netfilter {
    /// Opens one in the calling thread's netns.
    pub(crate) fn open() -> io::Result<Self> {
        let flags = SockFlag::SOCK_CLOEXEC;
        let socket = socket(AddressFamily::Netlink, SockType::Raw, flags, SockProtocol::NetlinkNetFilter)?;
        bind(socket.as_raw_fd(), &NetlinkAddr::new(0, 0))?;
        setsockopt(&socket, SndBufForce, &BUFFER)?;
        setsockopt(&socket, RcvBufForce, &BUFFER)?;
        Ok(Self { socket })
    }

    /// Does all of a batch, or nothing. Blocking, for a moment.
    pub(crate) fn commit(&self, batch: Batch) -> io::Result<()> {
        let (bytes, last) = batch.finish();
        self.send(&bytes)?;
        // The kernel has answered before `send` returns: the last message, which asked for it, and each that is wrong.
        let mut answered = false;
        let mut refused = None;
        while let Some(answers) = self.receive(MsgFlags::MSG_DONTWAIT)? {
            for message in messages(&answers).filter(|message| message.kind == NLMSG_ERROR) {
                answered |= message.sequence == last;
                if let Some(errno) = message.error() {
                    refused.get_or_insert(errno);
                }
            }
        }
        match refused {
            Some(errno) => Err(errno.into()),
            None if answered => Ok(()),
            None => Err(io::Error::other("the kernel did not answer a batch of nf_tables")),
        }
    }

    pub(crate) fn send(&self, bytes: &[u8]) -> io::Result<()> {
        sendto(self.socket.as_raw_fd(), bytes, &NetlinkAddr::new(0, 0), MsgFlags::empty())?;
        Ok(())
    }

    /// The next packet of answers; `None` if there is none now.
    pub(crate) fn receive(&self, flags: MsgFlags) -> io::Result<Option<Vec<u8>>> {
        let mut buffer = vec![0; 64 << 10];
        match recv(self.socket.as_raw_fd(), &mut buffer, flags) {
            Ok(length) => {
                buffer.truncate(length);
                Ok(Some(buffer))
            }
            Err(Errno::EAGAIN) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }
}

/// A netlink message that was received.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Message<'a> {
    pub(crate) kind: u16,
    pub(crate) sequence: u32,
    /// What follows the netlink header.
    pub(crate) body: &'a [u8],
}

impl Message<'_> {
    /// What an answer complains of.
    pub(crate) fn error(&self) -> Option<Errno> {
        let code = self.body.first_chunk().map_or(-(Errno::EPROTO as i32), |code| i32::from_ne_bytes(*code));
        (code != 0).then(|| Errno::from_raw(code.saturating_neg()))
    }
}

/// The messages of a packet; what is cut short is left out.
pub(crate) fn messages(packet: &[u8]) -> impl Iterator<Item = Message<'_>> {
    let mut rest = packet;
    std::iter::from_fn(move || {
        let header: &[u8; HEADER] = rest.first_chunk()?;
        let length = u32::from_ne_bytes([header[0], header[1], header[2], header[3]]) as usize;
        let kind = u16::from_ne_bytes([header[4], header[5]]);
        let sequence = u32::from_ne_bytes([header[8], header[9], header[10], header[11]]);
        let body = rest.get(HEADER..length)?;
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some(Message { kind, sequence, body })
    })
}

/// Netlink messages on their way to the kernel.
#[derive(Debug, Default)]
pub(crate) struct Writer {
    bytes: Vec<u8>,
}

impl Writer {
    /// A message with nfnetlink's header; `write` adds its attributes.
    pub(crate) fn message(
        &mut self,
        kind: u16,
        flags: u16,
        sequence: u32,
        (family, resource): (u8, u16),
        write: impl FnOnce(&mut Self),
    ) {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(&[0; 4]);
        self.bytes.extend_from_slice(&kind.to_ne_bytes());
        self.bytes.extend_from_slice(&(REQUEST | flags).to_ne_bytes());
        self.bytes.extend_from_slice(&sequence.to_ne_bytes());
        self.bytes.extend_from_slice(&[0; 4]); // from us
        self.bytes.extend_from_slice(&[family, 0]);
        self.bytes.extend_from_slice(&resource.to_be_bytes());
        write(self);
        let length = (self.bytes.len() - start) as u32;
        self.bytes[start..start + 4].copy_from_slice(&length.to_ne_bytes());
    }

    pub(crate) fn attribute(&mut self, kind: u16, value: &[u8]) {
        // Values of ours are some hundred bytes at most.
        self.bytes.extend_from_slice(&((4 + value.len()) as u16).to_ne_bytes());
        self.bytes.extend_from_slice(&kind.to_ne_bytes());
        self.bytes.extend_from_slice(value);
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    fn number(&mut self, kind: u16, value: u32) {
        self.attribute(kind, &value.to_be_bytes());
    }

    fn text(&mut self, kind: u16, value: &str) {
        self.attribute(kind, &[value.as_bytes(), &[0]].concat());
    }

    pub(crate) fn nested(&mut self, kind: u16, write: impl FnOnce(&mut Self)) {
        let start = self.bytes.len();
        self.attribute(kind | NESTED, &[]);
        write(self);
        let length = (self.bytes.len() - start) as u16; // a rule's: below 4 KiB
        self.bytes[start..start + 2].copy_from_slice(&length.to_ne_bytes());
    }

    /// Attributes that are written already.
    pub(crate) fn raw(&mut self, attributes: &[u8]) {
        self.bytes.extend_from_slice(attributes);
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// An expression of a rule.
    fn expression(&mut self, name: &str, write: impl FnOnce(&mut Self)) {
        self.nested(1, |element| {
            element.text(1, name);
            element.nested(2, write);
        });
    }

    /// Compares the register with `value`.
    fn compare(&mut self, value: &[u8], equal: bool) {
        self.expression("cmp", |cmp| {
            cmp.number(1, REGISTER);
            cmp.number(2, u32::from(!equal));
            cmp.nested(3, |data| data.attribute(1, value));
        });
    }

    fn mask(&mut self, mask: [u8; 4]) {
        self.expression("bitwise", |bitwise| {
            bitwise.number(1, REGISTER);
            bitwise.number(2, REGISTER);
            bitwise.number(3, 4);
            bitwise.nested(4, |data| data.attribute(1, &mask));
            bitwise.nested(5, |data| data.attribute(1, &[0; 4]));
        });
    }

    /// Loads bytes of the packet.
    fn load(&mut self, base: Base, offset: u32, length: u32) {
        self.expression("payload", |payload| {
            payload.number(1, REGISTER);
            payload.number(2, base as u32);
            payload.number(3, offset);
            payload.number(4, length);
        });
    }

    fn meta(&mut self, key: u32) {
        self.expression("meta", |meta| {
            meta.number(1, REGISTER);
            meta.number(2, key);
        });
    }

    fn device(&mut self, key: u32, name: &str, equal: bool) {
        self.meta(key);
        match name.strip_suffix('*') {
            Some(beginning) => self.compare(beginning.as_bytes(), equal),
            None => {
                let mut whole = [0; 16]; // IFNAMSIZ
                let length = name.len().min(15);
                whole[..length].copy_from_slice(&name.as_bytes()[..length]);
                self.compare(&whole, equal);
            }
        }
    }

    fn network(&mut self, offset: u32, net: ipnet::Ipv4Net, equal: bool) {
        match net.prefix_len() {
            0 if equal => {} // all
            length => {
                self.load(Base::Network, offset, 4);
                if length < 32 {
                    self.mask(net.netmask().octets());
                }
                self.compare(&net.network().octets(), equal);
            }
        }
    }

    fn matching(&mut self, of: &Match) {
        match of {
            Match::From(device) => self.device(6, device, true),
            Match::To(device) => self.device(7, device, true),
            Match::NotTo(device) => self.device(7, device, false),
            Match::State(bits) => {
                self.expression("ct", |ct| {
                    ct.number(1, REGISTER);
                    ct.number(2, 0);
                });
                self.mask(bits.to_ne_bytes());
                self.compare(&[0; 4], false);
            }
            Match::Source(net) => self.network(12, *net, true),
            Match::NotSource(net) => self.network(12, *net, false),
            Match::Destination(net) => self.network(16, *net, true),
            Match::Protocol(number) => {
                self.meta(16);
                self.compare(&[*number], true);
            }
            Match::Port(port) => {
                self.load(Base::Transport, 2, 2);
                self.compare(&port.to_be_bytes(), true);
            }
            Match::EtherType(kind) => {
                self.meta(1);
                self.compare(&kind.to_be_bytes(), true);
            }
            Match::EtherSource(mac) => {
                self.load(Base::Link, 6, 6);
                self.compare(mac, true);
            }
            Match::PlainHeader => {
                self.load(Base::Network, 0, 1);
                self.compare(&[0x45], true);
            }
            Match::ArpSender(mac, address) => {
                self.load(Base::Network, 0, 6);
                self.compare(&[0, 1, 8, 0, 6, 4], true); // of Ethernet and IPv4, and their lengths
                self.load(Base::Network, 8, 10);
                self.compare(&[&mac[..], &address.octets()].concat(), true);
            }
        }
    }

    fn verdict(&mut self, verdict: Verdict) {
        let code = |code: i32, chain: Option<&str>, writer: &mut Self| {
            writer.expression("immediate", |immediate| {
                immediate.number(1, 0);
                immediate.nested(2, |data| {
                    data.nested(2, |verdict| {
                        verdict.attribute(1, &code.to_be_bytes());
                        if let Some(chain) = chain {
                            verdict.text(2, chain);
                        }
                    });
                });
            });
        };
        match verdict {
            Verdict::Drop => code(0, None, self),
            Verdict::Accept => code(1, None, self),
            Verdict::Goto(chain) => code(-4, Some(chain), self),
            Verdict::Reset => self.expression("reject", |reject| {
                reject.number(1, 1);
                reject.attribute(2, &[0]);
            }),
            Verdict::Prohibited => self.expression("reject", |reject| {
                reject.number(1, 0);
                reject.attribute(2, &[13]); // ICMP_PKT_FILTERED
            }),
            Verdict::Masquerade => self.expression("masq", |_| {}),
        }
    }
}

/// What an offset counts from.
#[derive(Debug, Clone, Copy)]
enum Base {
    Link = 0,
    Network = 1,
    Transport = 2,
}

/// Changes to be made together.
#[derive(Debug)]
pub(crate) struct Batch {
    changes: Vec<Change>,
}

#[derive(Debug)]
enum Change {
    /// Begins the table, if there is none.
    Table(Family, String),
    /// Removes the table, which there is.
    RemoveTable(Family, String),
    Chain(Family, String, &'static str, Option<Hook>),
    /// Removes all rules of a chain.
    Empty(Family, String, &'static str),
    Rule(Family, String, &'static str, Rule),
}

impl Batch {
    pub(crate) fn new() -> Self {
        Self { changes: Vec::new() }
    }

    /// Has `tables` be as they are here, whatever they were.
    pub(crate) fn replace_tables(mut self, tables: Vec<Table>) -> Self {
        for Table { family, name, chains } in tables {
            self = self.remove_table(family, &name);
            self.changes.push(Change::Table(family, name.clone()));
            let heads =
                chains.iter().map(|Chain { name: chain, hook, .. }| Change::Chain(family, name.clone(), chain, *hook));
            self.changes.extend(heads);
            for Chain { name: chain, rules, .. } in chains {
                let rules = rules.into_iter().map(|rule| Change::Rule(family, name.clone(), chain, rule));
                self.changes.extend(rules);
            }
        }
        self
    }

    /// Removes a table if there is one.
    pub(crate) fn remove_table(mut self, family: Family, name: &str) -> Self {
        // One that is not there cannot be removed; made first, it is.
        self.changes.push(Change::Table(family, name.to_owned()));
        self.changes.push(Change::RemoveTable(family, name.to_owned()));
        self
    }

    /// Has a chain, which there is, have these rules.
    pub(crate) fn replace_rules(mut self, family: Family, table: &str, chain: &'static str, rules: Vec<Rule>) -> Self {
        self.changes.push(Change::Empty(family, table.to_owned(), chain));
        let rules = rules.into_iter().map(|rule| Change::Rule(family, table.to_owned(), chain, rule));
        self.changes.extend(rules);
        self
    }

    /// The bytes, and the number of the message that is answered in any case.
    fn finish(self) -> (Vec<u8>, u32) {
        let mut writer = Writer::default();
        writer.message(BATCH_BEGIN, 0, 0, (0, NFTABLES), |_| {});
        let last = self.changes.len() as u32;
        for (sequence, change) in (1..).zip(&self.changes) {
            let ack = if sequence == last { ACK } else { 0 };
            let mut message = |family: &Family, kind: u16, flags: u16, write: &dyn Fn(&mut Writer)| {
                let kind = NFTABLES << 8 | kind;
                writer.message(kind, flags | ack, sequence, (family.number(), 0), write);
            };
            match change {
                Change::Table(family, name) => message(family, NEW_TABLE, CREATE, &|table| {
                    table.text(1, name);
                    table.number(2, 0);
                }),
                Change::RemoveTable(family, name) => message(family, DELETE_TABLE, 0, &|table| table.text(1, name)),
                Change::Chain(family, table, name, hook) => message(family, NEW_CHAIN, CREATE, &|chain| {
                    chain.text(1, table);
                    chain.text(3, name);
                    if let Some(hook) = hook {
                        hook.write(chain);
                    }
                }),
                Change::Empty(family, table, chain) => message(family, DELETE_RULE, 0, &|rule| {
                    rule.text(1, table);
                    rule.text(2, chain);
                }),
                Change::Rule(family, table, chain, of) => message(family, NEW_RULE, CREATE | APPEND, &|rule| {
                    rule.text(1, table);
                    rule.text(2, chain);
                    rule.nested(4, |expressions| {
                        of.matches.iter().for_each(|of| expressions.matching(of));
                        expressions.verdict(of.verdict);
                    });
                }),
            }
        }
        writer.message(BATCH_END, 0, last + 1, (0, NFTABLES), |_| {});
        (writer.bytes, last)
    }
}

impl Family {
    fn number(self) -> u8 {
        match self {
            Self::Ipv4 => 2,
            Self::Netdev => 5,
        }
    }
}

impl Hook {
    fn write(self, chain: &mut Writer) {
        // Numbers and priorities of filters (0) and of source translation (100) are the kernel's.
        let (number, priority, accept, kind) = match self {
            Self::Ingress { .. } => (0, -150, false, "filter"),
            Self::Input { accept } => (1, 0, accept, "filter"),
            Self::Forward { accept } => (2, 0, accept, "filter"),
            Self::Output { accept } => (3, 0, accept, "filter"),
            Self::Postrouting => (4, 100, true, "nat"),
        };
        chain.nested(4, |hook| {
            hook.number(1, number);
            hook.attribute(2, &i32::to_be_bytes(priority));
            if let Self::Ingress { device } = self {
                hook.text(3, device);
            }
        });
        chain.number(5, u32::from(accept));
        chain.text(7, kind);
    }
}
