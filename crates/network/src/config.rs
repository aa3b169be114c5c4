//! What a pool is told: where its files are, whose names it uses, how many slots wait.

use std::fmt;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

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
    /// Most fresh slots kept; one that comes back unused beyond this is closed.
    pub high_watermark: usize,
}

impl NetworkConfig {
    /// The usual settings for a node with this runtime directory and tag.
    #[must_use]
    pub fn new(run_dir: PathBuf, tag: String) -> Self {
        Self { run_dir, tag, veth_cidr: Ipv4Block::DEFAULT_VETH, low_watermark: 4, high_watermark: 16 }
    }
}

/// A block of IPv4 addresses, written `10.12.0.0/16`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Ipv4Block {
    first: Ipv4Addr,
    prefix: u8,
}

impl Ipv4Block {
    /// `10.12.0.0/16`: 32768 slots.
    pub const DEFAULT_VETH: Self = Self { first: Ipv4Addr::new(10, 12, 0, 0), prefix: 16 };

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
    fn what_is_no_block_is_refused_with_an_example() {
        for text in ["10.12.0.0", "10.12.0.1/16", "10.12.0.0/32", "10.12.0.0/0", "10.12/16", "x/8", ""] {
            let error = text.parse::<Ipv4Block>().expect_err(text);
            assert!(error.to_string().contains("10.12.0.0/16"), "{error}");
        }
    }
}
