//! Rows of measuring programs, held against bounds.

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A promise about a row.
pub(super) struct Bound {
    pub(super) row: &'static str,
    figure: Figure,
    sense: Sense,
    value: f64,
    /// What the figure is held against.
    against: &'static str,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Figure {
    /// The row's median, in its unit.
    P50,
    /// Its ratio.
    Ratio,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) enum Sense {
    AtLeast,
    AtMost,
}

pub(super) const fn ratio(row: &'static str, sense: Sense, value: f64, against: &'static str) -> Bound {
    Bound { row, figure: Figure::Ratio, sense, value, against }
}

pub(super) const fn p50(row: &'static str, value: f64, against: &'static str) -> Bound {
    Bound { row, figure: Figure::P50, sense: Sense::AtMost, value, against }
}

/// A row as it was measured.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Row {
    pub(super) name: String,
    pub(super) unit: String,
    pub(super) n: usize,
    pub(super) min: f64,
    pub(super) p50: f64,
    pub(super) p95: f64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) peer: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) ratio: Option<f64>,
}

/// What a program measured.
#[derive(Debug, Deserialize)]
pub(super) struct Measured {
    pub(super) host: Value,
    pub(super) rows: Vec<Row>,
}

#[derive(Debug, Serialize)]
pub(super) struct Judged {
    #[serde(flatten)]
    pub(super) row: Row,
    bounds: Vec<Verdict>,
    pub(super) pass: bool,
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
pub(super) struct Report {
    pub(super) bench: &'static str,
    pub(super) host: Value,
    pub(super) rows: Vec<Judged>,
    pub(super) pass: bool,
}

/// Refuses rows that have no bound.
pub(super) fn check_names(rows: &[String], bounds: &[Bound]) -> Result<()> {
    for row in rows {
        if !bounds.iter().any(|bound| bound.row == row) {
            let mut known: Vec<_> = bounds.iter().map(|bound| bound.row).collect();
            known.dedup();
            bail!("there is no row {row}; there are {}", known.join(", "));
        }
    }
    Ok(())
}

/// Prints what a program measured. Errors: rows that missed their bounds.
pub(super) fn tell(bench: &'static str, bounds: &[Bound], measured: &str, json: bool) -> Result<()> {
    let measured: Measured = serde_json::from_str(measured).context("read what a measuring program says")?;
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

pub(super) fn judge(bench: &'static str, bounds: &[Bound], measured: Measured) -> Report {
    let rows: Vec<_> = measured.rows.into_iter().map(|row| Judged::new(row, bounds)).collect();
    let pass = rows.iter().all(|row| row.pass);
    Report { bench, host: measured.host, rows, pass }
}

impl Judged {
    pub(super) fn new(row: Row, bounds: &[Bound]) -> Self {
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
    pub(super) fn table(&self) -> String {
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
