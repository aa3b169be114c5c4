//! Kernel names that say whose they are.

use std::path::{Path, PathBuf};

/// Slot numbers are written in at most four hex digits, so that `av` + tag + `-` + number stays within the 15
/// characters of an interface name.
pub(crate) const MAX_SLOTS: u32 = 0x1_0000;

/// The names of one node's slots. Two nodes with different tags never produce, or recognize, each other's: the tag has
/// no `-`, so it ends where the number begins.
#[derive(Debug, Clone)]
pub(crate) struct Names {
    tag: String,
    dir: PathBuf,
}

impl Names {
    /// `None` if `tag` is not 1 to 8 characters `a-z0-9`.
    pub(crate) fn new(tag: &str, run_dir: &Path) -> Option<Self> {
        let valid =
            (1..=8).contains(&tag.len()) && tag.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit());
        valid.then(|| Self { tag: tag.to_owned(), dir: run_dir.join("netns") })
    }

    pub(crate) fn tag(&self) -> &str {
        &self.tag
    }

    /// The directory of the bind-mounted namespaces.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    pub(crate) fn netns(&self, index: u32) -> String {
        format!("aenv-{}-{index:x}", self.tag)
    }

    pub(crate) fn netns_path(&self, index: u32) -> PathBuf {
        self.dir.join(self.netns(index))
    }

    /// The veth end on the host.
    pub(crate) fn link(&self, index: u32) -> String {
        format!("av{}-{index:x}", self.tag)
    }

    /// All of those, as a pattern of nf_tables.
    pub(crate) fn links(&self) -> String {
        format!("av{}-*", self.tag)
    }

    /// The table on the host.
    pub(crate) fn table(&self) -> String {
        format!("aenv-{}", self.tag)
    }

    /// The slot number in a file name of ours.
    pub(crate) fn index_of_netns(&self, name: &str) -> Option<u32> {
        parse_index(name.strip_prefix("aenv-")?.strip_prefix(&self.tag)?)
    }

    /// The slot number in a link name of ours.
    pub(crate) fn index_of_link(&self, name: &str) -> Option<u32> {
        parse_index(name.strip_prefix("av")?.strip_prefix(&self.tag)?)
    }
}

/// Reads `-<hex>`, accepting only the spelling that `format!("{:x}")` makes.
fn parse_index(rest: &str) -> Option<u32> {
    let digits = rest.strip_prefix('-')?;
    let index = u32::from_str_radix(digits, 16).ok().filter(|index| *index < MAX_SLOTS)?;
    (format!("{index:x}") == digits).then_some(index)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn names(tag: &str) -> Names {
        Names::new(tag, Path::new("/run/x")).expect("valid tag")
    }

    proptest! {
        #[test]
        fn a_name_is_recognized_by_its_own_tag_only(tag in "[a-z0-9]{1,8}", other in "[a-z0-9]{1,8}", index in 0..MAX_SLOTS) {
            let ours = names(&tag);
            prop_assert!(ours.link(index).len() <= 15);
            prop_assert_eq!(ours.index_of_link(&ours.link(index)), Some(index));
            prop_assert_eq!(ours.index_of_netns(&ours.netns(index)), Some(index));
            if tag != other {
                prop_assert_eq!(names(&other).index_of_link(&ours.link(index)), None);
                prop_assert_eq!(names(&other).index_of_netns(&ours.netns(index)), None);
            }
        }
    }

    #[test]
    fn other_spellings_of_a_number_are_not_ours() {
        let ours = names("ab12");
        for name in ["avab12-01", "avab12-A", "avab12-", "avab12", "avab123", "avab12-+1", "avab12-10000", "eth0"] {
            assert_eq!(ours.index_of_link(name), None, "{name}");
        }
    }

    #[test]
    fn a_tag_that_would_not_fit_or_not_separate_is_refused() {
        for tag in ["", "123456789", "a-b", "A1", "é"] {
            assert!(Names::new(tag, Path::new("/run/x")).is_none(), "{tag}");
        }
    }
}
