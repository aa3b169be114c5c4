//! `$NAME` in the values of a build's steps, by the rules of a shell, without its commands.

use std::collections::BTreeMap;

/// Puts the values of variables in the place of their names: `$NAME`, `${NAME}`, `${NAME:-other}` and `${NAME:+other}` (and
/// both without the colon, which then ask only whether there is such a variable). `\$` is a dollar sign. What is none of
/// these, `$(command)` above all, stays as it is.
pub(crate) fn expand(text: &str, env: &BTreeMap<String, String>) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(['$', '\\']) {
        out.push_str(&rest[..at]);
        let found = &rest[at..];
        if let Some(after) = found.strip_prefix('\\') {
            // A backslash counts only before what it can protect.
            let protected = after.chars().next().filter(|next| matches!(next, '$' | '\\'));
            out.push(protected.unwrap_or('\\'));
            rest = &after[protected.map_or(0, char::len_utf8)..];
            continue;
        }
        let (value, length) = variable(found, env).unwrap_or_else(|| ("$".to_owned(), 1));
        out.push_str(&value);
        rest = &found[length..];
    }
    out.push_str(rest);
    out
}

/// The value of the variable that `text` begins with, and how long its name is there.
fn variable(text: &str, env: &BTreeMap<String, String>) -> Option<(String, usize)> {
    let after = text.strip_prefix('$')?;
    let value = |name: &str| env.get(name).map(String::as_str);
    let Some(braced) = after.strip_prefix('{') else {
        let name = name_of(after)?;
        return Some((value(name).unwrap_or_default().to_owned(), 1 + name.len()));
    };
    let name = name_of(braced)?;
    let end = closing(braced)?;
    let length = 2 + end + 1;
    let operation = &braced[name.len()..end];
    let set = value(name);
    let set_and_not_empty = set.filter(|value| !value.is_empty());
    let value = match operation {
        "" => set.unwrap_or_default().to_owned(),
        _ => {
            let (set, operation) = match operation.strip_prefix(':') {
                Some(operation) => (set_and_not_empty, operation),
                None => (set, operation),
            };
            match (operation.strip_prefix('-'), operation.strip_prefix('+')) {
                (Some(other), _) => set.map_or_else(|| expand(other, env), str::to_owned),
                (_, Some(other)) => set.map(|_| expand(other, env)).unwrap_or_default(),
                _ => return None,
            }
        }
    };
    Some((value, length))
}

fn name_of(text: &str) -> Option<&str> {
    let is_name = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    let end = text.bytes().position(|byte| !is_name(byte)).unwrap_or(text.len());
    let name = &text[..end];
    name.bytes().next().filter(|first| !first.is_ascii_digit()).map(|_| name)
}

/// Where the brace closes that was opened before `text`.
fn closing(text: &str) -> Option<usize> {
    let mut depth = 0;
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            b'{' => depth += 1,
            b'}' if depth == 0 => return Some(at),
            b'}' => depth -= 1,
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expanded(text: &str) -> String {
        let env = [("A", "one"), ("EMPTY", ""), ("B_2", "two")];
        expand(text, &env.map(|(name, value)| (name.to_owned(), value.to_owned())).into())
    }

    #[test]
    fn names_give_way_to_their_values() {
        assert_eq!(expanded("$A/${B_2}/$NONE."), "one/two/.");
        assert_eq!(expanded("$A$A-${A}x$"), "oneone-onex$");
        assert_eq!(expanded("ü$Aü"), "üoneü");
    }

    #[test]
    fn a_default_takes_the_place_of_what_is_missing() {
        assert_eq!(expanded("${NONE:-$A} ${EMPTY:-x} ${EMPTY-x} ${NONE-${B_2}}"), "one x  two");
        assert_eq!(expanded("${A:+yes}${EMPTY:+yes}${EMPTY+yes}${NONE+yes}"), "yesyes");
    }

    #[test]
    fn nothing_is_executed_and_a_dollar_can_be_kept() {
        assert_eq!(expanded("$(id) `id` $1 ${A!} ${A \\$A \\\\$A \\n"), "$(id) `id` $1 ${A!} ${A $A \\one \\n");
    }
}
