//! Connections that the host has noted for a slot's address: they are forgotten with the slot, since a later one gets its address.
//!
//! Constants are of `linux/netfilter/nfnetlink_conntrack.h`.

use std::io;
use std::net::Ipv4Addr;

use nix::errno::Errno;
use nix::sys::socket::MsgFlags;

use crate::nft::{NF_HEADER, NLMSG_DONE, Netfilter, Writer, messages};

/// Messages of the connection tracker: list, and delete.
const LIST: u16 = 1 << 8 | 1;
const DELETE: u16 = 1 << 8 | 2;

/// A list is asked for.
const DUMP: u16 = 0x300;
const ACK: u16 = 0x4;
const NLMSG_ERROR: u16 = 2;

const IPV4: u8 = 2;

// Attributes of a connection, and inside them.
const TUPLE_ORIGINAL: u16 = 1;
const ZONE: u16 = 18;
const FILTER: u16 = 25;
const TUPLE_IP: u16 = 1;
const IP_SOURCE: u16 = 1;

/// Of a filter: which fields of the original tuple count. Kernels before 5.8 list all, and we look ourselves.
const FILTER_ORIGINAL: u16 = 1;
const BY_SOURCE: u32 = 1;

/// Most rounds of list and delete: a connection that is being made may slip through one.
const ROUNDS: usize = 3;

/// Forgets every connection that `source` began. Returns how many. Blocking.
pub(crate) fn forget(netfilter: &Netfilter, source: Ipv4Addr) -> io::Result<usize> {
    let mut forgotten = 0;
    for _ in 0..ROUNDS {
        let found = list(netfilter, source)?;
        if found.is_empty() {
            break;
        }
        for connection in found {
            forgotten += usize::from(delete(netfilter, &connection)?);
        }
    }
    Ok(forgotten)
}

/// What names a connection: attributes, as the kernel told them.
struct Connection {
    tuple: Vec<u8>,
    zone: Option<Vec<u8>>,
}

fn list(netfilter: &Netfilter, source: Ipv4Addr) -> io::Result<Vec<Connection>> {
    let mut writer = Writer::default();
    writer.message(LIST, DUMP, 1, (IPV4, 0), |list| {
        list.nested(TUPLE_ORIGINAL, |tuple| {
            tuple.nested(TUPLE_IP, |ip| ip.attribute(IP_SOURCE, &source.octets()));
        });
        list.nested(FILTER, |filter| {
            filter.attribute(FILTER_ORIGINAL, &BY_SOURCE.to_ne_bytes());
            filter.attribute(FILTER_ORIGINAL + 1, &0_u32.to_ne_bytes());
        });
    });
    netfilter.send(writer.bytes())?;
    let mut found = Vec::new();
    loop {
        let packet = netfilter.receive(MsgFlags::empty())?.unwrap_or_default();
        for message in messages(&packet) {
            match message.kind {
                NLMSG_DONE => return Ok(found),
                NLMSG_ERROR => return message.error().map_or(Ok(found), |errno| Err(errno.into())),
                _ => {}
            }
            let body = message.body.get(NF_HEADER..).unwrap_or_default();
            let Some(tuple) = find(body, TUPLE_ORIGINAL) else { continue };
            let address = find(tuple, TUPLE_IP).and_then(|ip| find(ip, IP_SOURCE));
            if address == Some(&source.octets()) {
                found.push(Connection { tuple: tuple.to_owned(), zone: find(body, ZONE).map(<[u8]>::to_owned) });
            }
        }
    }
}

/// False if it was gone already.
fn delete(netfilter: &Netfilter, connection: &Connection) -> io::Result<bool> {
    let mut writer = Writer::default();
    writer.message(DELETE, ACK, 2, (IPV4, 0), |delete| {
        delete.nested(TUPLE_ORIGINAL, |tuple| tuple.raw(&connection.tuple));
        if let Some(zone) = &connection.zone {
            delete.attribute(ZONE, zone);
        }
    });
    netfilter.send(writer.bytes())?;
    let packet = netfilter.receive(MsgFlags::empty())?.unwrap_or_default();
    let answer = messages(&packet).find(|message| message.kind == NLMSG_ERROR);
    match answer.and_then(|message| message.error()) {
        None => Ok(true),
        Some(Errno::ENOENT) => Ok(false),
        Some(errno) => Err(errno.into()),
    }
}

/// The value of the first attribute of a kind.
fn find(mut attributes: &[u8], kind: u16) -> Option<&[u8]> {
    /// Of an attribute's kind: what is not a flag.
    const KIND: u16 = 0x3fff;
    loop {
        let header: &[u8; 4] = attributes.first_chunk()?;
        let length = usize::from(u16::from_ne_bytes([header[0], header[1]]));
        let value = attributes.get(4..length)?;
        if u16::from_ne_bytes([header[2], header[3]]) & KIND == kind {
            return Some(value);
        }
        attributes = attributes.get(length.next_multiple_of(4)..)?;
    }
}
