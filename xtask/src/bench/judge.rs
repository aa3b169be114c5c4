//! Holds measured rows against their bounds.
//!
//! A row's ratio is our speed to that of a peer which did the same work in the same run, so that it says something on any
//! machine. What is slower than its bound is to be looked into; the bounds stand beside their bench and nowhere else.

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A promise about a row.
pub(crate) struct Bound {
    pub(crate) row: &'static str,
    figure: Figure,
    sense: Sense,
    value: f64,
    /// What the figure is held against.
    against: &'static str,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Figure {
    /// The row's median, in its unit.
    P50,
    /// Its ratio.
    Ratio,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum Sense {
    AtLeast,
    AtMost,
}

pub(crate) const fn ratio(row: &'static str, sense: Sense, value: f64, against: &'static str) -> Bound {
    Bound { row, figure: Figure::Ratio, sense, value, against }
}

pub(crate) const fn p50(row: &'static str, value: f64, against: &'static str) -> Bound {
    Bound { row, figure: Figure::P50, sense: Sense::AtMost, value, against }
}

/// A row as it was measured.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Row {
    name: String,
    unit: String,
    n: usize,
    min: f64,
    p50: f64,
    p95: f64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    peer: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ratio: Option<f64>,
}

/// What a program measured.
#[derive(Debug, Deserialize)]
struct Measured {
    host: Value,
    rows: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Judged {
    #[serde(flatten)]
    row: Row,
    bounds: Vec<Verdict>,
    pass: bool,
}

#[derive(Debug, Serialize)]
struct Verdict {
    figure: Figure,
    sense: Sense,
    bound: f64,
    against: &'static str,
    met: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    bench: &'static str,
    host: Value,
    rows: Vec<Judged>,
    pass: bool,
}

/// Prints what a program measured for a bench, as a table or as one JSON object, beside its bounds.
///
/// Errors: it is not what such a program says, or a row missed a bound.
pub(crate) fn report(bench: &'static str, bounds: &[Bound], measured: &str, json: bool) -> Result<()> {
    let measured = serde_json::from_str(measured).context("read what was measured")?;
    let report = judge(bench, bounds, measured);
    if json {
        println!("{}", serde_json::to_string(&report)?);
    } else {
        print!("{}", report.table());
    }
    match report.rows.iter().filter(|row| !row.pass).count() {
        0 => Ok(()),
        missed => bail!("{missed} row(s) missed their bounds"),
    }
}

/// Refuses rows that the bench has not.
pub(crate) fn check_rows(bounds: &[Bound], rows: &[String]) -> Result<()> {
    for row in rows {
        if !bounds.iter().any(|bound| bound.row == row) {
            let mut known: Vec<_> = bounds.iter().map(|bound| bound.row).collect();
            known.dedup();
            bail!("there is no row {row}; there are {}", known.join(", "));
        }
    }
    Ok(())
}

fn judge(bench: &'static str, bounds: &[Bound], measured: Measured) -> Report {
    let rows: Vec<_> = measured.rows.into_iter().map(|row| Judged::new(bounds, row)).collect();
    let pass = rows.iter().all(|row| row.pass);
    Report { bench, host: measured.host, rows, pass }
}

impl Judged {
    fn new(bounds: &[Bound], row: Row) -> Self {
        let verdict = |bound: &Bound| {
            let value = match bound.figure {
                Figure::P50 => Some(row.p50),
                Figure::Ratio => row.ratio,
            };
            let met = value.is_some_and(|value| match bound.sense {
                Sense::AtLeast => value >= bound.value,
                Sense::AtMost => value <= bound.value,
            });
            Verdict { figure: bound.figure, sense: bound.sense, bound: bound.value, against: bound.against, met }
        };
        let bounds: Vec<_> = bounds.iter().filter(|bound| bound.row == row.name).map(verdict).collect();
        let pass = bounds.iter().all(|verdict| verdict.met);
        Self { row, bounds, pass }
    }
}

impl Report {
    fn table(&self) -> String {
        let mut table = format!(
            "{:<14}{:>9}{:>6}{:>11}{:>11}{:>11}{:>8}  {:<6}bound\n",
            "", "unit", "n", "median", "p95", "peer", "ratio", ""
        );
        let figure = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.3}"));
        for Judged { row, bounds, pass } in &self.rows {
            let bounds: Vec<_> = bounds
                .iter()
                .map(|verdict| {
                    let sign = if verdict.sense == Sense::AtLeast { '≥' } else { '≤' };
                    format!("{sign} {} {}", verdict.bound, verdict.against)
                })
                .collect();
            table += &format!(
                "{:<14}{:>9}{:>6}{:>11.3}{:>11.3}{:>11}{:>8}  {:<6}{}\n",
                row.name,
                row.unit,
                row.n,
                row.p50,
                row.p95,
                figure(row.peer),
                figure(row.ratio),
                if *pass { "pass" } else { "FAIL" },
                bounds.join(", ")
            );
        }
        table
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: &[Bound] = &[
        ratio("seq_read", Sense::AtLeast, 0.85, "pread of the raw file"),
        p50("open_8", 8.0, "ms"),
        p50("seal_large", 10.0, "ms without flushes"),
        ratio("seal_large", Sense::AtMost, 1.5, "times apart from seal_small"),
        ratio("lz4", Sense::AtLeast, 0.8, "the same crate, all cores"),
    ];

    fn row(name: &str, p50: f64, ratio: Option<f64>) -> Row {
        Row { name: name.to_owned(), unit: "ms".to_owned(), n: 1, min: p50, p50, p95: p50, peer: None, ratio }
    }

    #[test]
    fn a_row_passes_if_it_keeps_all_of_its_bounds() {
        assert!(Judged::new(BOUNDS, row("seq_read", 1.0, Some(0.85))).pass);
        assert!(!Judged::new(BOUNDS, row("seq_read", 1.0, Some(0.84))).pass);
        assert!(!Judged::new(BOUNDS, row("seq_read", 1.0, None)).pass, "what was not measured was not kept");
        assert!(Judged::new(BOUNDS, row("open_8", 8.0, None)).pass);
        assert!(Judged::new(BOUNDS, row("seal_large", 10.0, Some(1.5))).pass);
        assert!(!Judged::new(BOUNDS, row("seal_large", 10.1, Some(1.0))).pass);
        assert!(!Judged::new(BOUNDS, row("seal_large", 1.0, Some(1.6))).pass);
    }

    #[test]
    fn a_report_says_of_each_row_whether_it_passed() -> Result<()> {
        let rows = vec![row("seq_read", 1.0, Some(0.9)), row("lz4", 1.0, Some(0.1))];
        let report = judge("storage", BOUNDS, Measured { host: Value::Null, rows });
        let json = serde_json::to_value(&report)?;
        assert_eq!((&json["bench"], &json["pass"]), (&"storage".into(), &false.into()));
        assert_eq!((&json["rows"][0]["pass"], &json["rows"][1]["pass"]), (&true.into(), &false.into()));
        assert_eq!(json["rows"][1]["bounds"][0]["sense"], "atLeast");
        let table = report.table();
        assert!(table.lines().nth(1).is_some_and(|line| line.contains("pass  ≥ 0.85 pread")), "{table}");
        Ok(())
    }
}
