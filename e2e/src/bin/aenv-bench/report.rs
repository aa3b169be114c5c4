//! What was measured, as a table for people or one JSON object for programs.

use anyhow::Result;
use serde::Serialize;

use crate::host::Host;

/// Samples of one quantity.
#[derive(Debug)]
pub(crate) struct Row {
    name: &'static str,
    unit: &'static str,
    samples: Vec<f64>,
    /// The median's, twice of which is the 95th percentile's.
    bound: Option<f64>,
}

impl Row {
    pub(crate) fn new(name: &'static str, unit: &'static str) -> Self {
        Self { name, unit, samples: Vec::new(), bound: None }
    }

    /// The same, with what the median is to be at most; twice that is the 95th percentile's.
    pub(crate) fn at_most(self, bound: f64) -> Self {
        Self { bound: Some(bound), ..self }
    }

    /// Whether it is within its bound; `None` without one.
    fn holds(&self) -> Option<bool> {
        let bound = self.bound?;
        Some(!self.samples.is_empty() && self.percentile(50) <= bound && self.percentile(95) <= 2.0 * bound)
    }

    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    pub(crate) fn median(&self) -> f64 {
        self.percentile(50)
    }

    pub(crate) fn add(&mut self, sample: f64) {
        self.samples.push(sample);
    }

    /// The smallest sample that at least `percent` of all samples do not exceed; 0 without samples.
    fn percentile(&self, percent: usize) -> f64 {
        let mut sorted = self.samples.clone();
        sorted.sort_by(f64::total_cmp);
        let rank = (sorted.len() * percent).div_ceil(100).max(1);
        sorted.get(rank - 1).copied().unwrap_or(0.0)
    }
}

/// All rows of one bench, with the machine they were measured on.
#[derive(Debug)]
pub(crate) struct Report {
    bench: &'static str,
    rows: Vec<Row>,
}

#[derive(Serialize)]
struct JsonReport<'a> {
    bench: &'a str,
    host: Host,
    rows: Vec<JsonRow<'a>>,
}

#[derive(Serialize)]
struct JsonRow<'a> {
    name: &'a str,
    unit: &'a str,
    n: usize,
    min: f64,
    p50: f64,
    p95: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    bound: Option<f64>,
}

impl Report {
    pub(crate) fn new(bench: &'static str, rows: Vec<Row>) -> Self {
        Self { bench, rows }
    }

    pub(crate) fn print(&self, json: bool) -> Result<()> {
        if json {
            println!("{}", self.to_json()?);
        } else {
            print!("{}", self.to_table());
        }
        Ok(())
    }

    fn to_json(&self) -> Result<String> {
        let rounded = |value: f64| (value * 1000.0).round() / 1000.0;
        let rows = self
            .rows
            .iter()
            .map(|row| JsonRow {
                name: row.name,
                unit: row.unit,
                n: row.samples.len(),
                min: rounded(row.percentile(0)),
                p50: rounded(row.percentile(50)),
                p95: rounded(row.percentile(95)),
                bound: row.bound,
            })
            .collect();
        Ok(serde_json::to_string(&JsonReport { bench: self.bench, host: Host::read(), rows })?)
    }

    fn to_table(&self) -> String {
        let head = ["min", "median", "p95", "bound"].map(|name| format!("{name:>12}")).concat();
        let mut table = format!("{:<24}{:>6}{head}\n", "", "n");
        for row in &self.rows {
            let [min, median, p95] = [0, 50, 95].map(|percent| format!("{:.1} {}", row.percentile(percent), row.unit));
            let bound = match (row.bound, row.holds()) {
                (Some(bound), Some(true)) => format!("{bound} {}", row.unit),
                (Some(bound), _) => format!("{bound} {} MISSED", row.unit),
                (None, _) => String::new(),
            };
            let line = format!("{:<24}{:>6}{min:>12}{median:>12}{p95:>12}{bound:>12}", row.name, row.samples.len());
            table += &format!("{}\n", line.trim_end());
        }
        table
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(samples: &[f64]) -> Row {
        Row { samples: samples.to_vec(), ..Row::new("r", "ms") }
    }

    #[test]
    fn percentiles_are_samples() {
        let shuffled = row(&[3.0, 1.0, 2.0, 4.0]);
        assert_eq!([0, 50, 95].map(|percent| shuffled.percentile(percent)), [1.0, 2.0, 4.0]);
        let hundred: Vec<f64> = (1..=100).map(f64::from).collect();
        assert_eq!(row(&hundred).percentile(95), 95.0);
        assert_eq!(row(&[7.0]).percentile(50), 7.0);
    }

    #[test]
    fn a_bound_is_the_medians_and_twice_it_the_tails() {
        assert_eq!(row(&[1.0]).holds(), None);
        assert_eq!(row(&[1.0, 2.0, 4.0]).at_most(2.0).holds(), Some(true));
        assert_eq!(row(&[1.0, 2.0, 4.1]).at_most(2.0).holds(), Some(false));
        assert_eq!(row(&[2.1, 2.1, 2.1]).at_most(2.0).holds(), Some(false));
        assert_eq!(row(&[]).at_most(2.0).holds(), Some(false), "nothing was measured");
    }

    #[test]
    fn json_is_one_object_with_the_agreed_keys() -> Result<()> {
        let report = Report::new("boot", vec![row(&[1.0, 2.0])]);
        let value: serde_json::Value = serde_json::from_str(&report.to_json()?)?;
        assert_eq!(value["bench"], "boot");
        assert!(value["host"].is_object());
        assert_eq!(value["rows"][0]["n"], 2);
        assert_eq!(value["rows"][0]["p50"], 1.0);
        Ok(())
    }
}
