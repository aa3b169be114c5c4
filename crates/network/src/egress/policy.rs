//! A policy as its user writes it.

use std::fmt;

use ipnet::{IpNet, Ipv4Net};
use serde::{Deserialize, Serialize};

/// Most entries of a list: rules are looked through in order, once a connection.
const LIST_LIMIT: usize = 512;

/// What a sandbox may reach. The default is everything that the node does not deny to all.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct EgressPolicy {
    /// Accepted, whatever the rest says.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub allow_out: Vec<Destination>,
    /// Refused.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub deny_out: Vec<Destination>,
    /// What happens to the rest: refused if `false`. `None`: nobody said, and it is accepted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub internet: Option<bool>,
}

impl EgressPolicy {
    /// Reads a user's lists.
    ///
    /// Errors: the first entry that is no IPv4 address or network, or a list that is too long.
    pub fn new(allow_out: &[String], deny_out: &[String], internet: Option<bool>) -> Result<Self, PolicyError> {
        let allow_out = parse_list("allowOut", allow_out)?;
        Ok(Self { allow_out, deny_out: parse_list("denyOut", deny_out)?, internet })
    }

    /// Nothing is reached.
    #[must_use]
    pub fn sealed() -> Self {
        Self { internet: Some(false), ..Self::default() }
    }

    /// Whether what no list names is reached.
    #[must_use]
    pub fn has_internet(&self) -> bool {
        self.internet != Some(false)
    }

    /// Nothing is reached at all, so nobody needs names resolved.
    pub(crate) fn is_sealed(&self) -> bool {
        !self.has_internet() && self.allow_out.is_empty()
    }
}

fn parse_list(list: &'static str, texts: &[String]) -> Result<Vec<Destination>, PolicyError> {
    if texts.len() > LIST_LIMIT {
        return Err(PolicyError { list, entry: None, problem: PolicyProblem::TooMany(texts.len()) });
    }
    let parse = |(index, text): (usize, &String)| {
        let refused = |problem| PolicyError { list, entry: Some((index, text.clone())), problem };
        Destination::try_from(text.clone()).map_err(refused)
    };
    texts.iter().enumerate().map(parse).collect()
}

/// An IPv4 address or network, told as it was given.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Destination {
    text: String,
    net: Ipv4Net,
}

impl Destination {
    /// The network; an address is one of 32 bits.
    #[must_use]
    pub fn net(&self) -> Ipv4Net {
        self.net
    }
}

impl fmt::Display for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl From<Destination> for String {
    fn from(destination: Destination) -> Self {
        destination.text
    }
}

impl TryFrom<String> for Destination {
    type Error = PolicyProblem;

    fn try_from(text: String) -> Result<Self, PolicyProblem> {
        let trimmed = text.trim();
        let net = match trimmed.parse() {
            Ok(net) => net,
            Err(_) => IpNet::from(trimmed.parse::<std::net::IpAddr>().map_err(|_| PolicyProblem::of_name(trimmed))?),
        };
        match net {
            IpNet::V4(net) => Ok(Self { text, net: net.trunc() }),
            IpNet::V6(_) => Err(PolicyProblem::Ipv6),
        }
    }
}

/// An entry, or a list, that cannot be part of a policy. `list` and index are told as in the API.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}: {problem}", place(list, entry))]
pub struct PolicyError {
    /// `allowOut` or `denyOut`.
    pub list: &'static str,
    /// Index and text of the entry; `None` if it is about the whole list.
    pub entry: Option<(usize, String)>,
    /// What is wrong with it.
    pub problem: PolicyProblem,
}

fn place(list: &str, entry: &Option<(usize, String)>) -> String {
    match entry {
        Some((index, text)) => format!("{list}[{index}]: {text:?}"),
        None => list.to_owned(),
    }
}

/// What is wrong with an entry.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PolicyProblem {
    /// It is neither address nor network.
    #[error("expected an IPv4 address or network, as in 198.51.100.7 or 198.51.100.0/24")]
    Malformed,
    /// It is a domain name.
    #[error("domain names are not supported yet; expected an IPv4 address or network")]
    Domain,
    /// It is IPv6.
    #[error("IPv6 does not leave a sandbox; expected an IPv4 address or network")]
    Ipv6,
    /// The list is too long.
    #[error("{0} entries, expected at most {LIST_LIMIT}")]
    TooMany(usize),
}

impl PolicyProblem {
    /// Why `text`, which is no address, is refused.
    fn of_name(text: &str) -> Self {
        let name = text.strip_prefix("*.").unwrap_or(text);
        let label = |label: &str| {
            (1..=63).contains(&label.len()) && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
        };
        let last = name.rsplit('.').next().unwrap_or_default();
        // The last label of a name is never a number: 300.1.2.3 is a mistyped address.
        let is_name = name.split('.').all(label) && last.bytes().any(|byte| byte.is_ascii_alphabetic());
        if text == "*" || is_name { Self::Domain } else { Self::Malformed }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(texts: &[&str]) -> Vec<String> {
        texts.iter().map(|text| (*text).to_owned()).collect()
    }

    #[test]
    fn entries_are_addresses_and_networks_and_told_as_given() {
        let policy = EgressPolicy::new(&texts(&["1.2.3.4", "10.1.2.3/8"]), &texts(&["0.0.0.0/0"]), None).unwrap();
        let nets: Vec<_> = policy.allow_out.iter().map(|entry| entry.net().to_string()).collect();
        assert_eq!(nets, ["1.2.3.4/32", "10.0.0.0/8"]);
        assert_eq!(policy.allow_out[1].to_string(), "10.1.2.3/8");
        let json = serde_json::to_string(&policy).unwrap();
        assert_eq!(json, r#"{"allow_out":["1.2.3.4","10.1.2.3/8"],"deny_out":["0.0.0.0/0"]}"#);
        assert_eq!(serde_json::from_str::<EgressPolicy>(&json).unwrap(), policy);
        assert_eq!(serde_json::from_str::<EgressPolicy>("{}").unwrap(), EgressPolicy::default());
    }

    #[test]
    fn a_wrong_entry_is_named_with_its_place_and_what_is_wrong() {
        use PolicyProblem::{Domain, Ipv6, Malformed};
        let wrong = [
            ("300.1.2.3", Malformed),
            ("1.2.3.4/33", Malformed),
            ("1.2.3", Malformed),
            ("", Malformed),
            ("a b", Malformed),
            ("http://x.y", Malformed),
            ("example.com", Domain),
            ("*.example.com", Domain),
            ("*", Domain),
            ("localhost", Domain),
            ("::1", Ipv6),
            ("2001:db8::/32", Ipv6),
        ];
        for (text, problem) in wrong {
            let error = EgressPolicy::new(&[], &texts(&["1.1.1.1", text]), None).unwrap_err();
            assert_eq!(error.problem, problem, "{text}");
            assert!(error.to_string().starts_with(&format!("denyOut[1]: {text:?}: ")), "{error}");
        }
        let many = vec!["1.1.1.1".to_owned(); LIST_LIMIT + 1];
        let error = EgressPolicy::new(&many, &[], None).unwrap_err();
        assert_eq!(error.to_string(), "allowOut: 513 entries, expected at most 512");
        assert!(EgressPolicy::new(&many[1..], &[], None).is_ok());
    }
}
