//! Boot parameters: how the node tells PID 1 about its machine, as `aenv.*` words on the kernel command line.

use std::fmt;
use std::net::Ipv4Addr;

/// The machine as PID 1 needs to know it. Written with `Display`, read with [`BootParams::parse`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BootParams {
    /// Block device that holds the root file system (`/dev/vda`).
    pub root: String,
    /// Address of `eth0`.
    pub address: Ipv4Addr,
    /// Prefix length of `eth0`'s network.
    pub prefix: u8,
    /// Default gateway.
    pub gateway: Ipv4Addr,
    /// Name server, if the guest has one.
    pub dns: Option<Ipv4Addr>,
    /// Host name until `/init` gives another.
    pub hostname: String,
}

/// A command line that PID 1 cannot work with.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ParseBootParamsError {
    /// A parameter is absent.
    #[error("kernel command line lacks {0}")]
    Missing(&'static str),
    /// A parameter has a value that is not of its kind.
    #[error("kernel command line has {key}={value}, expected {expected}")]
    Invalid { key: &'static str, value: String, expected: &'static str },
}

impl fmt::Display for BootParams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "aenv.root={} aenv.ip={}/{} aenv.gw={}", self.root, self.address, self.prefix, self.gateway)?;
        if let Some(dns) = self.dns {
            write!(f, " aenv.dns={dns}")?;
        }
        write!(f, " aenv.hostname={}", self.hostname)
    }
}

impl BootParams {
    /// Reads the `aenv.*` words of a kernel command line (`/proc/cmdline`); others are the kernel's.
    pub fn parse(cmdline: &str) -> Result<Self, ParseBootParamsError> {
        use ParseBootParamsError::{Invalid, Missing};
        let find = |key: &'static str| {
            cmdline.split_ascii_whitespace().find_map(|word| word.strip_prefix(key)?.strip_prefix('='))
        };
        let address = |key: &'static str, text: &str| {
            text.parse::<Ipv4Addr>().map_err(|_| Invalid { key, value: text.to_owned(), expected: "an IPv4 address" })
        };
        let ip = find("aenv.ip").ok_or(Missing("aenv.ip"))?;
        let (ip_text, prefix_text) = ip.split_once('/').unwrap_or((ip, "32"));
        let prefix = prefix_text.parse().ok().filter(|p| *p <= 32).ok_or_else(|| Invalid {
            key: "aenv.ip",
            value: ip.to_owned(),
            expected: "ADDRESS/PREFIX with a prefix of at most 32",
        })?;
        Ok(Self {
            root: find("aenv.root").ok_or(Missing("aenv.root"))?.to_owned(),
            address: address("aenv.ip", ip_text)?,
            prefix,
            gateway: address("aenv.gw", find("aenv.gw").ok_or(Missing("aenv.gw"))?)?,
            dns: find("aenv.dns").map(|text| address("aenv.dns", text)).transpose()?,
            hostname: find("aenv.hostname").unwrap_or("aenv").to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn params() -> BootParams {
        BootParams {
            root: "/dev/vda".into(),
            address: Ipv4Addr::new(169, 254, 0, 21),
            prefix: 30,
            gateway: Ipv4Addr::new(169, 254, 0, 22),
            dns: None,
            hostname: "box".into(),
        }
    }

    #[test]
    fn parameters_read_back_as_written_among_the_kernels_own() {
        for dns in [None, Some(Ipv4Addr::new(8, 8, 8, 8))] {
            let params = BootParams { dns, ..params() };
            assert_eq!(BootParams::parse(&format!("console=ttyS0 {params} quiet")), Ok(params));
        }
    }

    #[test]
    fn a_bad_word_is_named_with_what_was_expected() {
        let line = params().to_string().replace("/30", "/99");
        let error = BootParams::parse(&line).unwrap_err().to_string();
        assert!(error.contains("aenv.ip=169.254.0.21/99") && error.contains("at most 32"), "{error}");
        assert_eq!(BootParams::parse("quiet"), Err(ParseBootParamsError::Missing("aenv.ip")));
    }
}
