//! Debian's stanza format, as in `*.sources` files and in what `apt-cache show` prints.

/// The fields of one stanza in order. Names compare without case; continuation lines are joined by newlines.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Stanza(Vec<(String, String)>);

impl Stanza {
    /// The value of a field, trimmed.
    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(field, _)| field.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
    }

    /// The words of a field; none if it is absent.
    pub(crate) fn words(&self, name: &str) -> impl Iterator<Item = &str> {
        self.get(name).unwrap_or_default().split_ascii_whitespace()
    }
}

/// Reads all stanzas of `text`. Lines that are neither a field, a continuation nor a comment are skipped: apt is the
/// judge of such files, we only borrow from them.
pub(crate) fn parse(text: &str) -> Vec<Stanza> {
    let mut stanzas = Vec::new();
    let mut current = Stanza::default();
    for line in text.lines() {
        if line.trim().is_empty() {
            if !current.0.is_empty() {
                stanzas.push(std::mem::take(&mut current));
            }
        } else if line.starts_with('#') {
            // may stand anywhere, also amid a folded field
        } else if line.starts_with([' ', '\t']) {
            if let Some((_, value)) = current.0.last_mut() {
                value.push('\n');
                value.push_str(line.trim());
            }
        } else if let Some((name, value)) = line.split_once(':') {
            current.0.push((name.trim().to_owned(), value.trim().to_owned()));
        }
    }
    if !current.0.is_empty() {
        stanzas.push(current);
    }
    stanzas
}

/// The packages a `Depends` value names, first alternative of each, without versions: `a (= 1), b | c` → `a`, `b`.
pub(crate) fn dependencies(depends: &str) -> Vec<String> {
    depends
        .split(',')
        .filter_map(|clause| clause.split('|').next())
        .filter_map(|first| first.split([' ', '(', ':', '\n', '\t']).find(|word| !word.is_empty()))
        .map(str::to_owned)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stanzas_keep_folded_fields_and_skip_comments() {
        let stanzas = parse("Types: deb\n# note\nURIs: http://a\n  http://b\nSuites: x y\n\n\nTypes: deb-src\n");
        assert_eq!(stanzas.len(), 2);
        assert_eq!(stanzas[0].words("uris").collect::<Vec<_>>(), ["http://a", "http://b"]);
        assert_eq!(stanzas[0].words("Suites").collect::<Vec<_>>(), ["x", "y"]);
        assert_eq!(stanzas[1].get("Types"), Some("deb-src"));
        assert_eq!(stanzas[1].get("URIs"), None);
    }

    #[test]
    fn dependencies_lose_versions_architectures_and_later_alternatives() {
        let depends = "kmod, linux-base (>= 4.3~), linux-modules-6.8.0-31-generic, wireless-regdb:any, \
                       initramfs-tools (>= 0.120+deb8u2) | linux-initramfs-tool";
        assert_eq!(
            dependencies(depends),
            ["kmod", "linux-base", "linux-modules-6.8.0-31-generic", "wireless-regdb", "initramfs-tools"]
        );
        assert!(dependencies("").is_empty());
    }
}
