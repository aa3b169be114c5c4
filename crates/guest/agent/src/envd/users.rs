//! The image's users and groups, read from its `/etc/passwd` and `/etc/group` by us: there may be no libc to ask.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// Whom a process runs as and who owns what a request creates.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct User {
    pub(crate) name: String,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// Supplementary groups, `gid` not repeated.
    pub(crate) groups: Vec<u32>,
    pub(crate) home: PathBuf,
}

/// The two files as they were at one moment. A missing file is an empty one.
#[derive(Debug, Default)]
pub(crate) struct Accounts {
    passwd: String,
    group: String,
}

struct PasswdLine<'a> {
    name: &'a str,
    uid: u32,
    gid: u32,
    home: &'a str,
}

struct GroupLine<'a> {
    name: &'a str,
    gid: u32,
    members: &'a str,
}

impl Accounts {
    /// Reads the files below `/etc`. They are a few kilobytes, so this is done on every use and sees every change.
    pub(crate) fn load() -> Self {
        Self::load_from(Path::new("/etc"))
    }

    fn load_from(etc: &Path) -> Self {
        let read = |name: &str| {
            let bytes = std::fs::read(etc.join(name)).unwrap_or_default();
            String::from_utf8(bytes).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
        };
        Self { passwd: read("passwd"), group: read("group") }
    }

    /// Finds a user by name or by number (`1000`, or `1000:1000` with a group, as image configs write it).
    ///
    /// `root` always exists, as uid 0 with home `/root`. A number that no line has is a user without a name: group 0,
    /// home `/`.
    pub(crate) fn find(&self, wanted: &str) -> Option<User> {
        if wanted.is_empty() {
            return None;
        }
        let (account, group) = match wanted.split_once(':') {
            Some((account, group)) => (account, Some(self.group_number(group)?)),
            None => (wanted, None),
        };
        let mut user = self.find_account(account)?;
        if let Some(gid) = group {
            user.gid = gid;
            user.groups.clear();
        }
        Some(user)
    }

    fn find_account(&self, account: &str) -> Option<User> {
        let number = account.parse::<u32>().ok();
        // A name wins over a number: a user may be called "1000".
        let line = self
            .passwd_lines()
            .find(|line| line.name == account)
            .or_else(|| self.passwd_lines().find(|line| Some(line.uid) == number));
        if let Some(line) = line {
            let home = if line.home.is_empty() { "/" } else { line.home };
            return Some(User {
                name: line.name.to_owned(),
                uid: line.uid,
                gid: line.gid,
                groups: self.groups_of(line.name, line.gid),
                home: PathBuf::from(home),
            });
        }
        match (account, number) {
            ("root", _) | (_, Some(0)) => {
                Some(User { name: "root".into(), uid: 0, gid: 0, groups: Vec::new(), home: "/root".into() })
            }
            (_, Some(uid)) => Some(User { name: account.into(), uid, gid: 0, groups: Vec::new(), home: "/".into() }),
            _ => None,
        }
    }

    fn group_number(&self, group: &str) -> Option<u32> {
        self.group_lines().find(|line| line.name == group).map(|line| line.gid).or_else(|| group.parse().ok())
    }

    fn groups_of(&self, name: &str, primary: u32) -> Vec<u32> {
        let mut groups: Vec<u32> = self
            .group_lines()
            .filter(|line| line.gid != primary && line.members.split(',').any(|member| member.trim() == name))
            .map(|line| line.gid)
            .collect();
        groups.sort_unstable();
        groups.dedup();
        groups
    }

    /// Names of all users and groups by number, for listings.
    pub(crate) fn names(&self) -> Names<'_> {
        let mut names = Names { users: HashMap::new(), groups: HashMap::new() };
        // As in getpwuid: the first line of a number counts.
        for line in self.passwd_lines() {
            names.users.entry(line.uid).or_insert(line.name);
        }
        for line in self.group_lines() {
            names.groups.entry(line.gid).or_insert(line.name);
        }
        names
    }

    fn passwd_lines(&self) -> impl Iterator<Item = PasswdLine<'_>> {
        self.passwd.lines().filter_map(|line| {
            let mut fields = line.split(':');
            let (name, _password) = (fields.next()?, fields.next()?);
            let (uid, gid) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
            let (_comment, home) = (fields.next(), fields.next().unwrap_or_default());
            (!name.is_empty()).then_some(PasswdLine { name, uid, gid, home })
        })
    }

    fn group_lines(&self) -> impl Iterator<Item = GroupLine<'_>> {
        self.group.lines().filter_map(|line| {
            let mut fields = line.split(':');
            let (name, _password) = (fields.next()?, fields.next()?);
            let gid = fields.next()?.parse().ok()?;
            (!name.is_empty()).then_some(GroupLine { name, gid, members: fields.next().unwrap_or_default() })
        })
    }
}

/// Names by number; see [`Accounts::names`].
#[derive(Debug)]
pub(crate) struct Names<'a> {
    users: HashMap<u32, &'a str>,
    groups: HashMap<u32, &'a str>,
}

impl Names<'_> {
    /// The user's name, or its number in decimal.
    pub(crate) fn user(&self, uid: u32) -> String {
        self.users.get(&uid).map_or_else(|| uid.to_string(), |name| (*name).to_owned())
    }

    /// The group's name, or its number in decimal.
    pub(crate) fn group(&self, gid: u32) -> String {
        self.groups.get(&gid).map_or_else(|| gid.to_string(), |name| (*name).to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn accounts() -> Accounts {
        Accounts {
            passwd: "root:x:0:0:root:/root:/bin/bash\nbroken line\nuser:x:1000:1000:,,,:/home/user:/bin/bash\n".into(),
            group: "root:x:0:\nsudo:x:27:user,other\nuser:x:1000:user\ndocker:x:999:other,user\n".into(),
        }
    }

    #[test]
    fn a_user_comes_with_all_its_groups() {
        let user = accounts().find("user").unwrap();
        assert_eq!((user.uid, user.gid, user.groups, user.home), (1000, 1000, vec![27, 999], "/home/user".into()));
        assert_eq!(accounts().find("nobody"), None);
        assert_eq!(accounts().find(""), None);
    }

    #[test]
    fn numbers_name_users_with_and_without_a_line() {
        assert_eq!(accounts().find("1000").unwrap().name, "user");
        let nameless = accounts().find("4242").unwrap();
        assert_eq!((nameless.uid, nameless.gid, nameless.home), (4242, 0, "/".into()));
        let with_group = accounts().find("user:docker").unwrap();
        assert_eq!((with_group.uid, with_group.gid, with_group.groups), (1000, 999, vec![]));
    }

    #[test]
    fn root_exists_even_in_an_image_without_passwd() {
        let empty = Accounts::default();
        assert_eq!(empty.find("root").unwrap().home, PathBuf::from("/root"));
        assert_eq!(empty.find("user"), None);
        assert_eq!(empty.names().user(0), "0");
        assert_eq!(accounts().names().group(27), "sudo");
    }
}
