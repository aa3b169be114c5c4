//! Documents behind a command: `RUN cat <<EOF > /x`.
//!
//! The parser knows documents that are the command; a command with a document is one, too, once another is put around
//! it:
//!
//! ```text
//! RUN cat <<EOF > /x         RUN <<AENV-0
//! hello                      cat <<EOF > /x
//! EOF                  ──▶   hello
//!                            EOF
//!                            AENV-0
//! ```

/// A Dockerfile as the parser takes it.
#[derive(Debug, Default)]
pub(super) struct Wrapped {
    pub(super) text: String,
    /// Numbers, from 1 and in `text`, of the lines that were put in.
    added: Vec<usize>,
}

impl Wrapped {
    pub(super) fn of(original: &str) -> Self {
        let mut wrapped = Self::default();
        let mut lines = original.lines();
        let mut written = 0;
        let mut continued = false;
        while let Some(line) = lines.next() {
            let starts = !std::mem::replace(&mut continued, line.trim_end().ends_with('\\'));
            let names = if starts && !continued { names_in(line) } else { Vec::new() };
            let mut put = |line: &str| {
                wrapped.text.push_str(line);
                wrapped.text.push('\n');
                written += 1;
                written
            };
            let around = names.first().is_some_and(|_| !is_alone(line)).then(|| format!("AENV-{}", names.len() - 1));
            match &around {
                None => drop(put(line)),
                Some(around) => {
                    put(&format!("RUN <<{around}"));
                    let at = put(&line.trim_start()[3..]);
                    wrapped.added.push(at);
                }
            }
            let mut put = |line: &str| {
                wrapped.text.push_str(line);
                wrapped.text.push('\n');
                written += 1;
                written
            };
            'documents: for (name, strip) in &names {
                for line in lines.by_ref() {
                    put(line);
                    let end = if *strip { line.trim_start_matches('\t') } else { line };
                    if end == name {
                        continue 'documents;
                    }
                }
            }
            if let Some(around) = &around {
                let at = put(around);
                wrapped.added.push(at);
            }
        }
        wrapped
    }

    /// The number of the line in the original that an octet of `text` is in.
    pub(super) fn line_of(&self, at: usize) -> usize {
        let at = at.min(self.text.len());
        self.number_of(1 + self.text.as_bytes()[..at].iter().filter(|byte| **byte == b'\n').count())
    }

    /// The number in the original of a line of `text`.
    pub(super) fn number_of(&self, line: usize) -> usize {
        line - self.added.iter().filter(|added| **added <= line).count()
    }
}

/// Whether a document is the command itself.
fn is_alone(line: &str) -> bool {
    let is_run = line.trim_start().get(..4).is_some_and(|word| word.eq_ignore_ascii_case("RUN "));
    // Of other instructions, the parser knows documents.
    !is_run || line.trim_start()[4..].trim_start().starts_with("<<")
}

/// The documents that a line of `RUN`, `COPY` or `ADD` announces: their names, and whether tabs before their lines go.
fn names_in(line: &str) -> Vec<(String, bool)> {
    let trimmed = line.trim_start();
    let is = |word: &str| trimmed.get(..word.len()).is_some_and(|start| start.eq_ignore_ascii_case(word));
    if !["RUN ", "COPY ", "ADD "].into_iter().any(is) {
        return Vec::new();
    }
    let mut names = Vec::new();
    let mut quote = None;
    let mut rest = trimmed;
    while let Some(c) = rest.chars().next() {
        match (quote, c) {
            (None, '\'' | '"') => quote = Some(c),
            (Some(open), c) if open == c => quote = None,
            (None, '<') if rest.starts_with("<<<") => rest = &rest[2..],
            (None, '<') if rest.starts_with("<<") => {
                let strip = rest[2..].starts_with('-');
                let word =
                    rest[2 + usize::from(strip)..].split(|c: char| c.is_whitespace() || ";&|>)".contains(c)).next();
                let name = word.unwrap_or_default().trim_matches(['"', '\'']);
                if name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_') {
                    names.push((name.to_owned(), strip));
                }
                rest = &rest[1..];
            }
            _ => {}
        }
        rest = &rest[rest.chars().next().map_or(0, char::len_utf8)..];
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_with_documents_are_put_into_one() {
        let text = "FROM x\nRUN cat <<'E' > /x && cat <<-F\na\nE\n\tb\n\tF\nRUN y\n";
        let wrapped = Wrapped::of(text);
        let expected = "FROM x\nRUN <<AENV-1\n cat <<'E' > /x && cat <<-F\na\nE\n\tb\n\tF\nAENV-1\nRUN y\n";
        assert_eq!(wrapped.text, expected);
        assert_eq!(wrapped.line_of(wrapped.text.find("RUN <<").unwrap()), 2);
        assert_eq!(wrapped.line_of(wrapped.text.find("RUN y").unwrap()), 7);
    }

    #[test]
    fn all_else_is_left_as_it_is() {
        for text in [
            "FROM x\nRUN <<EOF\nRUN cat <<X\nEOF\nRUN y\n",
            "COPY <<EOF /x\nRUN cat <<X\nEOF\n",
            "RUN echo '<<X' && cat <<<word && echo $((1<<2))\nRUN y\n",
            "# RUN cat <<EOF\nRUN a \\\n  b\n",
        ] {
            assert_eq!(Wrapped::of(text).text, text);
        }
    }
}
