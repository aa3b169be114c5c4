//! A sandbox's network as its creator asked for it.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// `network` of a create request, given back by the sandbox's detail.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct NetworkConfig {
    /// `false`: requests to the sandbox's ports need its traffic token. Default true.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allow_public_traffic: Option<bool>,
    /// Destinations allowed whatever `deny_out` says: IPs, CIDRs, domains, `*.domain`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allow_out: Option<Vec<String>>,
    /// Denied destinations: IPs and CIDRs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deny_out: Option<Vec<String>>,
    /// Resolvers that stay reachable when `allow_out` names a domain.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dns_servers: Option<Vec<String>>,
    /// SOCKS5 proxy for what leaves the sandbox.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub egress_proxy: Option<EgressProxy>,
    /// `Host` that the sandbox's service sees; `${PORT}` is replaced.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mask_request_host: Option<String>,
    /// Ports that speak TLS.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub https_ports: Option<Vec<u16>>,
    /// Header rules by domain; opaque here.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rules: Option<BTreeMap<String, Value>>,
}

/// Body of `PUT /sandboxes/{id}/network`: replaces all that a sandbox may reach. What is left out is as if it was never said.
///
/// Unlike elsewhere, unknown fields are refused: one that is misspelt would open what it was meant to close.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct NetworkUpdate {
    /// Destinations allowed whatever `deny_out` says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allow_out: Option<Vec<String>>,
    /// Denied destinations.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deny_out: Option<Vec<String>>,
    /// `false`: what `allow_out` does not name is not reached. In snake case, as at create; camel case is taken too.
    #[serde(rename = "allow_internet_access", alias = "allowInternetAccess", skip_serializing_if = "Option::is_none")]
    pub allow_internet_access: Option<bool>,
    /// Resolvers that stay reachable when `allow_out` names a domain.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dns_servers: Option<Vec<String>>,
    /// SOCKS5 proxy for what leaves the sandbox.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub egress_proxy: Option<EgressProxy>,
    /// Header rules by domain; opaque here.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rules: Option<BTreeMap<String, Value>>,
}

/// A SOCKS5 proxy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct EgressProxy {
    /// `host:port`.
    pub address: String,
    /// At most 255 bytes, as SOCKS5 has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub username: Option<String>,
    /// At most 255 bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub password: Option<String>,
    /// TLS towards the proxy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls: Option<EgressProxyTls>,
}

/// TLS towards a SOCKS5 proxy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct EgressProxyTls {
    /// Whether to use it at all.
    pub enabled: bool,
    /// Name to verify, if not the address's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server_name: Option<String>,
    /// PEM of the authority to trust.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca_cert: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_update_that_is_misspelt_closes_what_it_means_to_or_is_refused() {
        let read = |text: &str| serde_json::from_str::<NetworkUpdate>(text);
        for spelling in ["allow_internet_access", "allowInternetAccess"] {
            let update = read(&format!(r#"{{"{spelling}": false}}"#)).unwrap();
            assert_eq!(update.allow_internet_access, Some(false));
        }
        assert!(read(r#"{"deny_out": ["0.0.0.0/0"]}"#).unwrap_err().to_string().contains("unknown field `deny_out`"));
        assert_eq!(read("{}").unwrap(), NetworkUpdate::default());
    }
}
