//! Rounds, rows and the one JSON object.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Result;
use serde::Serialize;

use crate::host::Host;

/// What is measured, and what came of it so far.
pub(crate) struct Bench {
    only: Vec<String>,
    dir: PathBuf,
    /// Sizes are divided by this.
    pub(crate) scale: u64,
    rows: Vec<Row>,
}

#[derive(Serialize)]
pub(crate) struct Row {
    pub(crate) name: &'static str,
    pub(crate) unit: &'static str,
    /// Rounds.
    pub(crate) n: usize,
    pub(crate) min: f64,
    pub(crate) p50: f64,
    pub(crate) p95: f64,
    /// The peer's median.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) peer: Option<f64>,
    /// Ours to the peer's speed, unless the row says otherwise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ratio: Option<f64>,
}

#[derive(Serialize)]
struct Report {
    host: Host,
    rows: Vec<Row>,
}

/// How a row is measured: its name, the unit of its figures, rounds, units of work in one, and what makes seconds the unit.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Plan {
    pub(crate) name: &'static str,
    pub(crate) unit: &'static str,
    pub(crate) rounds: usize,
    pub(crate) work: f64,
    pub(crate) factor: f64,
}

impl Bench {
    pub(crate) fn new(only: Vec<String>, dir: &Path, scale: u64) -> Self {
        Self { only, dir: dir.to_owned(), scale, rows: Vec::new() }
    }

    /// Whether any of these rows is asked for.
    pub(crate) fn wants(&self, names: &[&str]) -> bool {
        let wanted = self.only.is_empty() || names.iter().any(|name| self.only.iter().any(|only| only == name));
        if wanted {
            eprintln!("  measuring {}", names.join(", "));
        }
        wanted
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Runs `ours` and `peer` in turn, each first every other time.
    pub(crate) fn compare(
        &mut self,
        plan: Plan,
        mut ours: impl FnMut(usize) -> Result<Duration>,
        mut peer: impl FnMut(usize) -> Result<Duration>,
    ) -> Result<()> {
        let (mut our_times, mut peer_times) = (Vec::new(), Vec::new());
        for round in 0..plan.rounds {
            if round % 2 == 0 {
                our_times.push(ours(round)?);
                peer_times.push(peer(round)?);
            } else {
                peer_times.push(peer(round)?);
                our_times.push(ours(round)?);
            }
        }
        let ratios = our_times.iter().zip(&peer_times).map(|(ours, peer)| peer.as_secs_f64() / ours.as_secs_f64());
        let ratio = Some(median(&ratios.collect::<Vec<_>>()));
        let peer = Some(median(&plan.figures(&peer_times)));
        self.rows.push(Row { peer, ratio, ..plan.row(&our_times) });
        Ok(())
    }

    /// Runs what has no peer.
    pub(crate) fn alone(&mut self, plan: Plan, mut run: impl FnMut(usize) -> Result<Duration>) -> Result<()> {
        let times = (0..plan.rounds).map(&mut run).collect::<Result<Vec<_>>>()?;
        self.rows.push(plan.row(&times));
        Ok(())
    }

    /// Adds a row that was measured elsewhere.
    pub(crate) fn add(&mut self, row: Row) {
        self.rows.push(row);
    }

    pub(crate) fn print(self) -> Result<()> {
        println!("{}", serde_json::to_string(&Report { host: Host::read(), rows: self.rows })?);
        Ok(())
    }
}

impl Plan {
    fn figures(&self, times: &[Duration]) -> Vec<f64> {
        times.iter().map(|time| time.as_secs_f64() / self.work * self.factor).collect()
    }

    pub(crate) fn row(&self, times: &[Duration]) -> Row {
        let figures = self.figures(times);
        Row {
            name: self.name,
            unit: self.unit,
            n: figures.len(),
            min: percentile(&figures, 0),
            p50: median(&figures),
            p95: percentile(&figures, 95),
            peer: None,
            ratio: None,
        }
    }
}

/// How long `run` takes; what it makes is dropped afterwards.
pub(crate) fn timed<T>(run: impl FnOnce() -> Result<T>) -> Result<Duration> {
    let start = Instant::now();
    let made = run()?;
    let time = start.elapsed();
    drop(made);
    Ok(time)
}

pub(crate) fn median(figures: &[f64]) -> f64 {
    percentile(figures, 50)
}

/// The smallest figure that at least `percent` of all do not exceed; 0 without figures.
fn percentile(figures: &[f64], percent: usize) -> f64 {
    let mut sorted = figures.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted.get(rank - 1).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_comparison_takes_turns_and_compares_neighbours() -> Result<()> {
        let mut bench = Bench::new(Vec::new(), Path::new(""), 1);
        let plan = Plan { name: "row", unit: "ms", rounds: 3, work: 1.0, factor: 1e3 };
        let ms = |n: usize| Ok(Duration::from_millis(n as u64));
        bench.compare(plan, |round| ms(20 * (round + 1)), |round| ms(10 * (round + 1)))?;
        let row = &bench.rows[0];
        assert_eq!((row.n, row.min, row.p50, row.peer, row.ratio), (3, 20.0, 40.0, Some(20.0), Some(0.5)));
        Ok(())
    }
}
