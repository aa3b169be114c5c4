//! The environment of a process we start.

use std::collections::{BTreeMap, HashMap};

use super::users::User;

/// Where commands are looked up unless an image or request says otherwise.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Later sources win: the user's basics, the global environment, the request's own. Nothing else is inherited.
pub(super) fn compose(
    user: &User,
    global: BTreeMap<String, String>,
    request: HashMap<String, String>,
) -> Vec<(String, String)> {
    let basics = [
        ("PATH", DEFAULT_PATH.to_owned()),
        ("HOME", user.home.to_string_lossy().into_owned()),
        ("USER", user.name.clone()),
        ("LOGNAME", user.name.clone()),
    ];
    let mut environment: BTreeMap<String, String> =
        basics.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    environment.extend(global);
    environment.extend(request);
    environment.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_overrides_the_sandbox_which_overrides_the_user() {
        let user = User { name: "u".into(), uid: 1, gid: 1, groups: vec![], home: "/home/u".into() };
        let global = BTreeMap::from([("HOME".into(), "/elsewhere".into()), ("A".into(), "global".into())]);
        let request = HashMap::from([("A".into(), "request".into())]);
        let environment: BTreeMap<_, _> = compose(&user, global, request).into_iter().collect();
        assert_eq!(environment["HOME"], "/elsewhere");
        assert_eq!(environment["A"], "request");
        assert_eq!(environment["USER"], "u");
        assert_eq!(environment["PATH"], DEFAULT_PATH);
    }
}
