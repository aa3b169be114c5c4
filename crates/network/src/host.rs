//! What egress needs of the host: one table of ours, and forwarding.

use std::fs;
use std::io;
use std::net::Ipv4Addr;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use tracing::{info, warn};

use crate::config::EgressConfig;
use crate::conntrack;
use crate::egress::{Family, host_tables};
use crate::error::StartPoolError;
use crate::name::Names;
use crate::netns::IP_FORWARD;
use crate::nft::{Batch, Netfilter};

/// The host's side of egress.
#[derive(Debug)]
pub(crate) struct HostEgress {
    config: EgressConfig,
    table: String,
    /// Its socket is used by one at a time: answers are read by whoever asked.
    netfilter: Mutex<Netfilter>,
}

impl HostEgress {
    /// Makes the table, whatever a predecessor left of it, and has the host forward. `None` if nothing is to leave; a
    /// predecessor's table goes.
    pub(crate) fn start(
        names: &Names,
        slots: ipnet::Ipv4Net,
        mut config: EgressConfig,
    ) -> Result<Option<Self>, StartPoolError> {
        let table = names.table();
        if !config.enabled {
            // Where the kernel has no nf_tables, there is none to remove.
            let removal = Batch::new().remove_table(Family::Ipv4, &table);
            _ = Netfilter::open().and_then(|netfilter| netfilter.commit(removal));
            return Ok(None);
        }
        config.internal.push(slots);
        let rules = |source| StartPoolError::Rules { source };
        let netfilter = Netfilter::open().map_err(rules)?;
        let tables = host_tables(table.clone(), &names.links(), slots, &config);
        netfilter.commit(Batch::new().replace_tables(tables)).map_err(rules)?;
        forward(config.set_ip_forward)?;
        Ok(Some(Self { config, table, netfilter: Mutex::new(netfilter) }))
    }

    pub(crate) fn config(&self) -> &EgressConfig {
        &self.config
    }

    /// Removes the table. Slots that are left are cut off from what they do not reach already.
    pub(crate) fn remove(&self) -> io::Result<()> {
        self.commit(Batch::new().remove_table(Family::Ipv4, &self.table))
    }

    /// Forgets the connections of a slot that is gone.
    pub(crate) fn forget(&self, address: Ipv4Addr) -> io::Result<usize> {
        conntrack::forget(&self.netfilter.lock().unwrap_or_else(PoisonError::into_inner), address)
    }

    fn commit(&self, batch: Batch) -> io::Result<()> {
        self.netfilter.lock().unwrap_or_else(PoisonError::into_inner).commit(batch)
    }
}

/// Has the host forward, if it does not and we may.
fn forward(may_set: bool) -> Result<(), StartPoolError> {
    let path = Path::new(IP_FORWARD);
    let failed = |source| StartPoolError::Forwarding { path: path.to_owned(), source };
    if fs::read_to_string(path).map_err(failed)?.trim() != "0" {
        return Ok(());
    }
    if !may_set {
        warn!("the host does not forward IPv4 everywhere, and the configuration forbids to change that");
        return Ok(());
    }
    info!("switching on net.ipv4.ip_forward: guests leave through this host");
    fs::write(path, "1").map_err(failed)
}

/// Settings of our end of a slot's link: it forwards even where the host does not by itself, and the host has no IPv6 on it.
pub(crate) fn set_up_link(link: &str) -> io::Result<()> {
    for (family, name, value) in [("ipv4", "forwarding", "1"), ("ipv6", "disable_ipv6", "1")] {
        let file = Path::new("/proc/sys/net").join(family).join("conf").join(link).join(name);
        match fs::write(file, value) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {} // a kernel without IPv6
            result => result?,
        }
    }
    Ok(())
}
