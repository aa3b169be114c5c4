//! What a pool is told: where its files are, whose names it uses, how many slots wait.

use std::fmt;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use ipnet::Ipv4Net;
use serde::{Deserialize, Serialize};

use crate::slot::{GUEST_ADDRESS, PREFIX_LENGTH};

/// Settings of a [`SlotPool`](crate::SlotPool).
#[derive(Debug, Clone)]
pub struct NetworkConfig {
    /// Runtime directory of the node; the namespaces are bind-mounted under `<run_dir>/netns/`.
    pub run_dir: PathBuf,
    /// Tells this node's kernel names from those of other nodes on the host: 1 to 8 characters `a-z0-9`, stable over
    /// restarts, different for each node home.
    pub tag: String,
    /// Where the veth pairs get their addresses, two per slot. Must be free on this host.
    pub veth_cidr: Ipv4Block,
    /// Fresh slots kept waiting, so that a sandbox need not wait for the kernel.
    pub low_watermark: usize,
    /// Most fresh slots kept: so many when they are taken faster than they are made.
    pub high_watermark: usize,
    /// How long nobody must have found none waiting until half as many are kept, down to the low watermark.
    pub calm: Duration,
    /// What may leave.
    pub egress: EgressConfig,
}

/// The usual time of calm: longer than the pauses within one piece of work.
const CALM: Duration = Duration::from_secs(60);

impl NetworkConfig {
    /// The usual settings for a node with this runtime directory and tag.
    #[must_use]
    pub fn new(run_dir: PathBuf, tag: String) -> Self {
        Self {
            run_dir,
            tag,
            veth_cidr: Ipv4Block::DEFAULT_VETH,
            low_watermark: 4,
            high_watermark: 16,
            calm: CALM,
            egress: EgressConfig::default(),
        }
    }
}

/// What may leave any slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EgressConfig {
    /// Whether anything may. If not, nothing of the host is touched for it, and slots forward nothing, whatever their policy.
    pub enabled: bool,
    /// Whether the host's `ip_forward` is switched on if it is off.
    pub set_ip_forward: bool,
    /// Refused to all guests, before any policy is asked.
    pub always_denied: Vec<Ipv4Net>,
    /// Addresses of slots, refused likewise; those of `veth_cidr` are added.
    pub internal: Vec<Ipv4Net>,
    /// The guests' resolver, which they may ask even if it is in a network that they are denied.
    pub resolver: Option<Ipv4Addr>,
}

impl Default for EgressConfig {
    fn default() -> Self {
        let always_denied = ALWAYS_DENIED.map(|(first, prefix)| Ipv4Net::new_assert(first, prefix));
        Self {
            enabled: true,
            set_ip_forward: true,
            always_denied: always_denied.to_vec(),
            internal: Vec::new(),
            resolver: None,
        }
    }
}

/// Loopback, private networks (RFC 1918), shared address space (RFC 6598), and link-local, where clouds have their metadata.
const ALWAYS_DENIED: [(Ipv4Addr, u8); 6] = [
    (Ipv4Addr::new(10, 0, 0, 0), 8),
    (Ipv4Addr::new(100, 64, 0, 0), 10),
    (Ipv4Addr::new(127, 0, 0, 0), 8),
    (Ipv4Addr::new(169, 254, 0, 0), 16),
    (Ipv4Addr::new(172, 16, 0, 0), 12),
    (Ipv4Addr::new(192, 168, 0, 0), 16),
];

/// The network that guest and tap share.
pub const GUEST_LINK: Ipv4Net = Ipv4Net::new_assert(Ipv4Addr::new(169, 254, 0, 20), PREFIX_LENGTH);

impl EgressConfig {
    /// All that is refused to all guests.
    pub(crate) fn denied(&self) -> Vec<Ipv4Net> {
        debug_assert!(GUEST_LINK.contains(&GUEST_ADDRESS));
        let mut denied = self.internal.clone();
        denied.push(GUEST_LINK);
        denied.extend(&self.always_denied);
        Ipv4Net::aggregate(&denied)
    }
}

/// What guests use as their resolver when the host knows none.
const DEFAULT_RESOLVER: Ipv4Addr = Ipv4Addr::new(8, 8, 8, 8);

/// The first IPv4 resolver of a `resolv.conf` that guests could reach: not on loopback.
#[must_use]
pub fn resolver_of(resolv_conf: &str) -> Option<Ipv4Addr> {
    let servers = resolv_conf.lines().filter_map(|line| {
        let mut words = line.split_ascii_whitespace();
        (words.next() == Some("nameserver")).then(|| words.next()?.parse().ok()).flatten()
    });
    servers.into_iter().find(|address: &Ipv4Addr| !address.is_loopback() && !address.is_unspecified())
}

/// The host's resolver for guests. Where the usual file names a stub on loopback, systemd-resolved tells the real ones beside it.
#[must_use]
pub fn host_resolver() -> Ipv4Addr {
    let files = ["/etc/resolv.conf", "/run/systemd/resolve/resolv.conf"];
    let found = files.iter().filter_map(|file| resolver_of(&std::fs::read_to_string(file).ok()?)).next();
    found.unwrap_or(DEFAULT_RESOLVER)
}

/// A block of IPv4 addresses, written `10.12.0.0/16`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Ipv4Block {
    first: Ipv4Addr,
    prefix: u8,
}

impl Ipv4Block {
    /// `10.11.0.0/16`.
    pub const DEFAULT_HOST_INTERACTION: Self = Self { first: Ipv4Addr::new(10, 11, 0, 0), prefix: 16 };

    /// `10.12.0.0/16`: 32768 slots.
    pub const DEFAULT_VETH: Self = Self { first: Ipv4Addr::new(10, 12, 0, 0), prefix: 16 };

    /// The block as a network.
    #[must_use]
    pub fn net(self) -> Ipv4Net {
        Ipv4Net::new_assert(self.first, self.prefix)
    }

    /// How many addresses.
    #[must_use]
    pub fn size(self) -> u64 {
        1 << (32 - self.prefix)
    }

    /// How many veth pairs (a /31 each) fit.
    pub(crate) fn pairs(self) -> u32 {
        // prefix <= 31 by construction, so this is 1 at least.
        1 << (31 - u32::from(self.prefix))
    }

    /// The host's and the inner address of pair `index`, which must be below `pairs()`.
    pub(crate) fn pair(self, index: u32) -> (Ipv4Addr, Ipv4Addr) {
        debug_assert!(index < self.pairs());
        let base = u32::from(self.first) + 2 * index;
        (Ipv4Addr::from(base), Ipv4Addr::from(base + 1))
    }
}

/// Why a text is not an [`Ipv4Block`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} is not an IPv4 block (expected ADDRESS/PREFIX with prefix 1 to 31 and no bits beyond it, as in 10.12.0.0/16)"
)]
pub struct ParseIpv4BlockError {
    text: String,
}

impl FromStr for Ipv4Block {
    type Err = ParseIpv4BlockError;

    fn from_str(text: &str) -> Result<Self, ParseIpv4BlockError> {
        let parse = || {
            let (address, prefix) = text.split_once('/')?;
            let first: Ipv4Addr = address.parse().ok()?;
            let prefix: u8 = prefix.parse().ok()?;
            let clean = (1..=31).contains(&prefix) && u32::from(first) << prefix == 0;
            clean.then_some(Self { first, prefix })
        };
        parse().ok_or_else(|| ParseIpv4BlockError { text: text.to_owned() })
    }
}

impl TryFrom<String> for Ipv4Block {
    type Error = ParseIpv4BlockError;

    fn try_from(text: String) -> Result<Self, ParseIpv4BlockError> {
        text.parse()
    }
}

impl From<Ipv4Block> for String {
    fn from(block: Ipv4Block) -> Self {
        block.to_string()
    }
}

impl fmt::Display for Ipv4Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.first, self.prefix)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_reads_back_as_written_and_hands_out_pairs() {
        let block: Ipv4Block = "10.12.0.0/16".parse().expect("valid");
        assert_eq!(block, Ipv4Block::DEFAULT_VETH);
        assert_eq!(block.to_string(), "10.12.0.0/16");
        assert_eq!(block.pairs(), 32768);
        assert_eq!(block.pair(0), (Ipv4Addr::new(10, 12, 0, 0), Ipv4Addr::new(10, 12, 0, 1)));
        assert_eq!(block.pair(32767), (Ipv4Addr::new(10, 12, 255, 254), Ipv4Addr::new(10, 12, 255, 255)));
    }

    #[test]
    fn the_first_resolver_that_a_guest_could_reach_is_found() {
        let text = "# by dhcp\nsearch x\nnameserver 127.0.0.53\nnameserver ::1\n nameserver 192.0.2.1 \nnameserver 192.0.2.2\n";
        assert_eq!(resolver_of(text), Some(Ipv4Addr::new(192, 0, 2, 1)));
        assert_eq!(resolver_of("nameserver 127.0.0.1\nnameserver\nnameserver0 1.1.1.1"), None);
    }

    #[test]
    fn what_is_no_block_is_refused_with_an_example() {
        for text in ["10.12.0.0", "10.12.0.1/16", "10.12.0.0/32", "10.12.0.0/0", "10.12/16", "x/8", ""] {
            let error = text.parse::<Ipv4Block>().expect_err(text);
            assert!(error.to_string().contains("10.12.0.0/16"), "{error}");
        }
    }
}
