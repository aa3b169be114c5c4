//! Words of instructions: variables, quotes, continued lines.

/// The value of a variable.
pub(super) type Lookup<'a> = dyn Fn(&str) -> Option<String> + 'a;

/// Puts the values of variables in the place of their names: `$NAME`, `${NAME}`, `${NAME:-other}`, `${NAME:+other}`,
/// and both without the colon. `\$` is a dollar sign.
pub(super) fn expand(text: &str, value_of: &Lookup<'_>) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(['$', '\\']) {
        out.push_str(&rest[..at]);
        let found = &rest[at..];
        if let Some(after) = found.strip_prefix('\\') {
            let protected = after.chars().next().filter(|next| matches!(next, '$' | '\\'));
            out.push(protected.unwrap_or('\\'));
            rest = &after[protected.map_or(0, char::len_utf8)..];
        } else if let Some((value, length)) = variable(&found[1..], value_of) {
            out.push_str(&value);
            rest = &found[1 + length..];
        } else {
            out.push('$');
            rest = &found[1..];
        }
    }
    out + rest
}

/// The value of the variable named at the beginning of `text`, and the length of that.
fn variable(text: &str, value_of: &Lookup<'_>) -> Option<(String, usize)> {
    let Some(braced) = text.strip_prefix('{') else {
        let name = name_of(text)?;
        return Some((value_of(name).unwrap_or_default(), name.len()));
    };
    let name = name_of(braced)?;
    let end = name.len() + braced[name.len()..].find('}')?;
    let operation = &braced[name.len()..end];
    let (set, operation) = match operation.strip_prefix(':') {
        Some(operation) => (value_of(name).filter(|value| !value.is_empty()), operation),
        None => (value_of(name), operation),
    };
    let value = match (operation.strip_prefix('-'), operation.strip_prefix('+'), set) {
        (None, None, set) if operation.is_empty() => set.unwrap_or_default(),
        (Some(_), _, Some(set)) => set,
        (Some(other), _, None) | (_, Some(other), Some(_)) => expand(other, value_of),
        (_, Some(_), None) => String::new(),
        (None, None, _) => return None,
    };
    Some((value, end + 2))
}

fn name_of(text: &str) -> Option<&str> {
    let end = text.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(text.len());
    Some(&text[..end]).filter(|name| name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_'))
}

/// The pairs of an `ENV` or `ARG`, whose values still have their variables, as [`expand`] takes them: what was quoted
/// from that is protected by backslashes. `None` as a value: no `=`. Errors: a quote that is not closed.
pub(super) fn pairs(text: &str) -> Result<Vec<(String, Option<String>)>, String> {
    let words = split(text)?;
    Ok(words
        .into_iter()
        .map(|word| match word.split_once('=') {
            Some((name, value)) => (name.to_owned(), Some(value.to_owned())),
            None => (word, None),
        })
        .collect())
}

fn split(text: &str) -> Result<Vec<String>, String> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut quote = None;
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match (quote, c) {
            (None, c) if c.is_whitespace() => words.extend(word.take()),
            (None, '"' | '\'') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (Some(open), c) if c == open => quote = None,
            (Some('\''), '$' | '\\') => word.get_or_insert_default().extend(['\\', c]),
            (_, '\\') => {
                let word = word.get_or_insert_default();
                match chars.next() {
                    Some(next @ ('$' | '\\')) => word.extend(['\\', next]),
                    Some(next) if quote.is_none() || next == '"' => word.push(next),
                    Some(next) => word.extend(['\\', '\\', next]),
                    None => word.extend(['\\', '\\']),
                }
            }
            (_, c) => word.get_or_insert_default().push(c),
        }
    }
    if quote.is_some() {
        return Err(format!("a quote is not closed in {text:?}"));
    }
    words.extend(word);
    Ok(words)
}

/// A shell command of several lines as one: without the ends of continued lines, and the comments between them.
pub(super) fn joined(text: &str, escape: char) -> String {
    let mut out = String::new();
    let mut continued = false;
    for line in text.lines() {
        if continued && (line.trim_start().starts_with('#') || line.trim().is_empty()) {
            continue;
        }
        continued = line.trim_end().ends_with(escape);
        match line.trim_end().strip_suffix(escape) {
            Some(line) => out.push_str(line),
            None => {
                out.push_str(line);
                out.push('\n');
            }
        }
    }
    out.trim().to_owned()
}

/// A program and its arguments as a line for a shell.
pub(super) fn quoted(words: &[String]) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=@%+,".contains(c);
    let quote = |word: &String| {
        let is_plain = !word.is_empty() && word.chars().all(plain);
        if is_plain { word.clone() } else { format!("'{}'", word.replace('\'', "'\\''")) }
    };
    words.iter().map(quote).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expanded(text: &str) -> String {
        expand(text, &|name| [("A", "one"), ("E", "")].into_iter().find(|(n, _)| *n == name).map(|(_, v)| v.to_owned()))
    }

    #[test]
    fn variables_have_values_and_defaults() {
        assert_eq!(expanded("$A/${A}x$ ${N:-d} ${E:-d} ${E-d} ${A:+y}${E:+y} $(id) \\$A"), "one/onex$ d d  y $(id) $A");
        assert_eq!(expanded("${N:-$A} ${A!} ${A"), "one ${A!} ${A");
    }

    #[test]
    fn pairs_are_read_as_a_shell_would() {
        let read =
            |text: &str| pairs(text).unwrap().into_iter().map(|(n, v)| format!("{n}|{}", v.unwrap_or("-".into())));
        let all = |text: &str| read(text).collect::<Vec<_>>();
        assert_eq!(all(r#"A=b C="d e" D=e\ f E= F"#), ["A|b", "C|d e", "D|e f", "E|", "F|-"]);
        assert_eq!(all(r#"A='$x \n' B="$x" C=\$x"#), [r"A|\$x \\n", "B|$x", r"C|\$x"]);
        assert!(pairs("A='x").is_err());
        // What the server makes of it is what was meant.
        assert_eq!(expanded(r"\$x \\n"), r"$x \n");
    }

    #[test]
    fn continued_lines_are_joined_without_comments() {
        let text = "apt-get update && \\\n  # why\n\n  apt-get install -y \\\n    curl";
        assert_eq!(joined(text, '\\'), "apt-get update &&   apt-get install -y     curl");
        assert_eq!(joined("a `\nb", '`'), "a b");
        assert_eq!(joined("echo # not a comment line", '\\'), "echo # not a comment line");
    }

    #[test]
    fn exec_forms_are_quoted() {
        let words = ["echo", "a b", "it's", "", "--x=1"].map(str::to_owned);
        assert_eq!(quoted(&words), r"echo 'a b' 'it'\''s' '' --x=1");
    }
}
