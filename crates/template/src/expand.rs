//! `$NAME` in the values of a build's steps, by the rules of a shell, without its commands.

/// Longest value: no program can be started with a longer one (`MAX_ARG_STRLEN` of Linux).
pub(crate) const LONGEST: usize = 128 << 10;
/// Defaults within defaults.
const DEEPEST: usize = 16;
/// How far behind its opening a brace may close; what is further away is no name with a default.
const WIDEST: usize = 4096;

/// Why variables cannot be put in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ExpandError {
    #[error("with its variables put in, it is longer than {LONGEST} bytes")]
    Long,
    #[error("its defaults are nested more than {DEEPEST} deep")]
    Deep,
}

/// The value of a variable.
pub(crate) type Lookup<'a> = dyn Fn(&str) -> Option<&'a str> + 'a;

/// Puts the values of variables in the place of their names: `$NAME`, `${NAME}`, `${NAME:-other}` and `${NAME:+other}` (and
/// both without the colon, which then ask only whether there is such a variable). `\$` is a dollar sign. What is none of
/// these, `$(command)` above all, stays as it is.
pub(crate) fn expand(text: &str, value_of: &Lookup<'_>) -> Result<String, ExpandError> {
    expand_within(text, value_of, DEEPEST)
}

fn expand_within(text: &str, value_of: &Lookup<'_>, depth: usize) -> Result<String, ExpandError> {
    let depth = depth.checked_sub(1).ok_or(ExpandError::Deep)?;
    let mut out = String::with_capacity(text.len().min(LONGEST));
    let mut push = |part: &str| {
        out.push_str(part);
        if out.len() > LONGEST { Err(ExpandError::Long) } else { Ok(()) }
    };
    let mut rest = text;
    while let Some(at) = rest.find(['$', '\\']) {
        push(&rest[..at])?;
        let found = &rest[at..];
        if let Some(after) = found.strip_prefix('\\') {
            // A backslash counts only before what it can protect.
            let protected = after.chars().next().filter(|next| matches!(next, '$' | '\\'));
            push(protected.unwrap_or('\\').encode_utf8(&mut [0; 4]))?;
            rest = &after[protected.map_or(0, char::len_utf8)..];
            continue;
        }
        let (value, length) = variable(found, value_of, depth)?.unwrap_or_else(|| ("$".to_owned(), 1));
        push(&value)?;
        rest = &found[length..];
    }
    push(rest)?;
    Ok(out)
}

/// The value of the variable that `text` begins with, and how long its name is there.
fn variable(text: &str, value_of: &Lookup<'_>, depth: usize) -> Result<Option<(String, usize)>, ExpandError> {
    let after = text.strip_prefix('$').unwrap_or(text);
    let Some(braced) = after.strip_prefix('{') else {
        let named = |name: &str| (value_of(name).unwrap_or_default().to_owned(), 1 + name.len());
        return Ok(name_of(after).map(named));
    };
    let Some((name, end)) = name_of(braced).zip(closing(braced)) else { return Ok(None) };
    let operation = &braced[name.len()..end];
    let set = value_of(name);
    let value = match operation {
        "" => set.unwrap_or_default().to_owned(),
        _ => {
            let (set, operation) = match operation.strip_prefix(':') {
                Some(operation) => (set.filter(|value| !value.is_empty()), operation),
                None => (set, operation),
            };
            match (operation.strip_prefix('-'), operation.strip_prefix('+'), set) {
                (Some(_), _, Some(set)) => set.to_owned(),
                (Some(other), _, None) | (_, Some(other), Some(_)) => expand_within(other, value_of, depth)?,
                (_, Some(_), None) => String::new(),
                (None, None, _) => return Ok(None),
            }
        }
    };
    Ok(Some((value, 2 + end + 1)))
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
    for (at, byte) in text.bytes().enumerate().take(WIDEST) {
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

    fn value_of(name: &str) -> Option<&'static str> {
        [("A", "one"), ("EMPTY", ""), ("B_2", "two")]
            .into_iter()
            .find(|(known, _)| *known == name)
            .map(|(_, value)| value)
    }

    fn expanded(text: &str) -> String {
        expand(text, &value_of).expect("neither long nor deep")
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

    #[test]
    fn what_would_take_forever_or_all_memory_is_refused() {
        let nested = |depth| format!("{}x{}", "${N:-".repeat(depth), "}".repeat(depth));
        assert_eq!(expanded(&nested(DEEPEST - 1)), "x");
        assert_eq!(expand(&nested(DEEPEST), &value_of), Err(ExpandError::Deep));
        assert_eq!(expand(&nested(20_000), &value_of), Err(ExpandError::Deep));
        let long = "$A".repeat(LONGEST / 3 + 1);
        assert_eq!(expand(&long, &value_of), Err(ExpandError::Long));
        expand(&"${A".repeat(LONGEST / 30), &value_of).expect("open braces are text");
    }
}
