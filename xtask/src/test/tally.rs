//! Counting what test runners say, so that a whole run ends in one line.

use std::fmt;
use std::io::{BufRead as _, BufReader};
use std::ops::AddAssign;
use std::process::Stdio;

use anyhow::{Context, Result};

use crate::sh::Run;

/// How many tests went which way.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) passed: usize,
    pub(crate) failed: usize,
    pub(crate) skipped: usize,
}

impl Tally {
    /// A step that is no test runner: one that went well or did not.
    pub(crate) fn of_step(ok: bool) -> Self {
        Self { passed: ok.into(), failed: (!ok).into(), skipped: 0 }
    }

    /// A whole suite that did not run, and counts as one.
    pub(crate) fn of_skip() -> Self {
        Self { skipped: 1, ..Self::default() }
    }

    /// A runner that failed without naming a test (did not compile, crashed) has failed once.
    fn ended(mut self, ok: bool) -> Self {
        if !ok && self.failed == 0 {
            self.failed = 1;
        }
        self
    }
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped)
    }
}

/// Runs `cargo test … -- --show-output` and counts.
///
/// A test that finds the machine lacking prints `skipped: why` and returns; libtest calls that passed, we do not.
/// Other output of tests that passed is left out.
pub(crate) fn of_cargo_test(cargo: Run) -> Result<Tally> {
    let line = cargo.to_string();
    let mut child = cargo
        .into_command()
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("start `{line}`"))?;
    let stdout = child.stdout.take().context("cargo's output is not piped")?;
    let mut reader = Libtest::default();
    for line in BufReader::new(stdout).split(b'\n') {
        let line = line.context("read the test runner's output")?;
        if let Some(line) = reader.line(&String::from_utf8_lossy(&line)) {
            println!("{line}");
        }
    }
    let status = child.wait().with_context(|| format!("wait for `{line}`"))?;
    Ok(reader.tally.ended(status.success()))
}

/// Reads libtest's output line by line.
#[derive(Debug, Default)]
struct Libtest {
    tally: Tally,
    /// Inside the `successes:` part, where `--show-output` repeats what passing tests printed.
    in_successes: bool,
    /// Whose output is being repeated.
    test: String,
    /// Tests of this program that said they were skipped; its sum counts them as passed.
    said_skipped: usize,
}

impl Libtest {
    /// Takes one line; returns what of it a person wants to see.
    fn line(&mut self, line: &str) -> Option<String> {
        if let Some(result) = line.strip_prefix("test result: ") {
            self.in_successes = false;
            let said_skipped = std::mem::take(&mut self.said_skipped);
            self.tally.passed += number_before(result, " passed").saturating_sub(said_skipped);
            self.tally.failed += number_before(result, " failed");
            self.tally.skipped += number_before(result, " ignored") + said_skipped;
            return Some(line.to_owned());
        }
        match line {
            "successes:" => self.in_successes = true,
            "failures:" => self.in_successes = false,
            _ => {}
        }
        if !self.in_successes {
            return Some(line.to_owned());
        }
        if let Some(test) = line.strip_prefix("---- ").and_then(|rest| rest.strip_suffix(" stdout ----")) {
            self.test = test.to_owned();
        } else if line.starts_with("skipped: ") {
            self.said_skipped += 1;
            return Some(format!("{}: {line}", self.test));
        }
        None
    }
}

/// The number that ends right before `word`; 0 if there is none.
pub(crate) fn number_before(text: &str, word: &str) -> usize {
    let Some(end) = text.find(word) else { return 0 };
    let digits = text[..end].rsplit(|c: char| !c.is_ascii_digit()).next().unwrap_or_default();
    digits.parse().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> (Tally, Vec<String>) {
        let mut reader = Libtest::default();
        let shown = text.lines().filter_map(|line| reader.line(line)).collect();
        (reader.tally, shown)
    }

    #[test]
    fn results_of_several_programs_are_added_up() {
        let (tally, _) = read(
            "running 3 tests\n...\ntest result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out\n\
             test result: FAILED. 1 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out\n",
        );
        assert_eq!(tally, Tally { passed: 4, failed: 2, skipped: 1 });
    }

    #[test]
    fn a_test_that_says_it_was_skipped_did_not_pass() {
        let (tally, shown) = read(
            "running 2 tests\n..\nsuccesses:\n\n---- tap::makes_a_tap stdout ----\nnoise\nskipped: not root\n\n\n\
             successes:\n    tap::makes_a_tap\n    other\n\n\
             test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out\n",
        );
        assert_eq!(tally, Tally { passed: 1, failed: 0, skipped: 1 });
        assert!(shown.contains(&"tap::makes_a_tap: skipped: not root".to_owned()));
        assert!(!shown.contains(&"noise".to_owned()));
    }

    #[test]
    fn what_failing_tests_printed_is_shown() {
        let (tally, shown) = read(
            "successes:\n\n---- good stdout ----\nquiet\n\nfailures:\n\n---- bad stdout ----\nloud\n\n\
             test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out\n",
        );
        assert_eq!(tally, Tally { passed: 1, failed: 1, skipped: 0 });
        assert!(shown.contains(&"loud".to_owned()) && !shown.contains(&"quiet".to_owned()));
    }

    #[test]
    fn a_runner_that_breaks_without_a_word_has_failed() {
        assert_eq!(Tally::default().ended(false).failed, 1);
        assert_eq!(Tally { failed: 3, ..Tally::default() }.ended(false).failed, 3);
    }

    #[test]
    fn the_last_line_has_the_plain_form() {
        assert_eq!(Tally { passed: 12, failed: 0, skipped: 3 }.to_string(), "12 passed, 0 failed, 3 skipped");
    }
}
