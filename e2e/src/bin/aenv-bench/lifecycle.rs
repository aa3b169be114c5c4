//! Machines that stop and go on: how long a client waits, and how long a machine stands still.

use std::fs;
use std::time::{Duration, Instant};

use aenv_api::{Client, ConnectRequest, ForkRequest, NewSandbox, NewSnapshot, PauseRequest, Sandbox};
use anyhow::{Context as _, Result, bail};
use reqwest::Response;

use crate::exec::Guest;
use crate::report::{Report, Row};
use crate::{Args, SANDBOX_TTL_SECS, create, delete, peers};

/// Children of one fork.
const CHILDREN: u32 = 16;
/// Pauses of one sandbox, one after the other, of which the last resumes are compared with the first.
const CYCLES: usize = 200;
/// Resumes at either end of them that are compared.
const ENDS: usize = 10;
/// Creates for each one that is to find a machine that stands ready.
const ATTEMPTS: usize = 4;
/// Pause after each of them, in which another machine is made ready.
const REFILL: Duration = Duration::from_secs(2);
/// How long the machine of a fork's or a snapshot's source stood still, in milliseconds.
const STALL_HEADER: &str = "x-agentenv-stall-ms";

pub(crate) async fn run(args: &Args, client: &Client) -> Result<Report> {
    let samples = args.samples.unwrap_or(20).max(1);
    let http = reqwest::Client::new();
    let mut rows = vec![creates(args, client, &http, samples).await?];
    if let Some(template) = &args.pooled_template {
        rows.push(pooled_creates(args, client, &http, template, samples).await?);
    }
    let sandbox = create(args, client).await?;
    let measured = async {
        let bench = Bench { args, client, sandbox: &sandbox, http };
        let [pause_16, resume, resume_server] = bench.pauses("pause_16", 60.0, 16, samples).await?;
        rows.extend([resume, resume_server, pause_16]);
        let [pause_256, ..] = bench.pauses("pause_256", 350.0, 256, samples.div_ceil(2)).await?;
        rows.push(pause_256);
        rows.push(bench.snapshots(samples).await?);
        rows.extend(bench.forks(samples.div_ceil(4)).await?);
        rows.push(bench.cycles(if args.samples.is_some() { samples * 4 } else { CYCLES }).await?);
        Ok::<_, anyhow::Error>(())
    }
    .await;
    delete(client, &sandbox).await?;
    measured?;
    if let Some(layout) = args.layout.clone() {
        let (peers, ours) = tokio::task::spawn_blocking(move || (peers::rows(&layout, samples, &rows), rows)).await?;
        rows = ours;
        rows.extend(peers?);
    }
    Ok(Report::new("lifecycle", rows))
}

/// From the request for a sandbox to the first output of its first command.
async fn creates(args: &Args, client: &Client, http: &reqwest::Client, samples: usize) -> Result<Row> {
    let mut row = Row::new("create_first_output", "ms").at_most(250.0);
    for _ in 0..samples {
        row.add(first_output(args, client, http, &args.template).await?.0);
    }
    Ok(row)
}

/// The same, of sandboxes whose machines stood ready.
async fn pooled_creates(
    args: &Args,
    client: &Client,
    http: &reqwest::Client,
    template: &str,
    samples: usize,
) -> Result<Row> {
    let mut row = Row::new("create_pooled", "ms").at_most(60.0);
    let mut left = samples;
    for _ in 0..ATTEMPTS * samples {
        let (took, times) = first_output(args, client, http, template).await?;
        // A machine that stood ready had nothing to be prepared.
        if times.prepare == 0.0 {
            row.add(took);
            left -= 1;
        }
        if left == 0 {
            return Ok(row);
        }
        tokio::time::sleep(REFILL).await;
    }
    bail!("of {} sandboxes from {template}, only {} had a machine that stood ready", ATTEMPTS * samples, samples - left)
}

/// Milliseconds from the request for a sandbox to the output of its first command, and where those of the start went.
async fn first_output(args: &Args, client: &Client, http: &reqwest::Client, template: &str) -> Result<(f64, Times)> {
    let wanted =
        NewSandbox { template_id: template.to_owned(), timeout: Some(SANDBOX_TTL_SECS), ..NewSandbox::default() };
    let begun = Instant::now();
    let response = post(http, args, "v2/sandboxes", &wanted).await?;
    let times = Times::of(&response)?;
    let sandbox: Sandbox = response.json().await.context("read the sandbox")?;
    let output = async { Guest::new(&args.sandbox_url, &sandbox)?.run(&["echo", "hi"]).await }.await;
    let took = millis(begun);
    delete(client, &sandbox).await?;
    output?;
    Ok((took, times))
}

/// Where the time of a start went, in milliseconds.
struct Times {
    prepare: f64,
    machine: f64,
}

impl Times {
    fn of(response: &Response) -> Result<Self> {
        let header = response.headers().get("server-timing").context("no header server-timing")?.to_str()?;
        let part = |name: &str| -> Result<f64> {
            let part = header.split(", ").find_map(|part| part.strip_prefix(name)?.strip_prefix(";dur="));
            Ok(part.with_context(|| format!("no {name} in {header}"))?.parse()?)
        };
        Ok(Self { prepare: part("prepare")?, machine: part("machine")? })
    }
}

struct Bench<'a> {
    args: &'a Args,
    client: &'a Client,
    sandbox: &'a Sandbox,
    http: reqwest::Client,
}

impl Bench<'_> {
    /// Pauses with `mib` of memory written since the last one, the resumes between them, and the server's part in those.
    async fn pauses(&self, name: &'static str, bound: f64, mib: usize, samples: usize) -> Result<[Row; 3]> {
        let mut pauses = Row::new(name, "ms").at_most(bound);
        let mut resumes = Row::new("resume", "ms").at_most(180.0);
        let mut servers = Row::new("resume_server", "ms").at_most(25.0);
        for _ in 0..samples {
            self.dirty(mib).await?;
            pauses.add(self.pause().await?);
            let (resume, server) = self.resume().await?;
            resumes.add(resume);
            servers.add(server);
        }
        Ok([pauses, resumes, servers])
    }

    /// How long the source of a snapshot stands still with 16 MiB written since the last one.
    async fn snapshots(&self, samples: usize) -> Result<Row> {
        let mut row = Row::new("snapshot_stall", "ms").at_most(40.0);
        for _ in 0..samples {
            self.pause().await?;
            self.resume().await?;
            self.dirty(16).await?;
            let response = self.post("snapshots", &NewSnapshot::default()).await?;
            row.add(stall(&response)?);
            let snapshot: aenv_api::SnapshotInfo = response.json().await.context("read the snapshot")?;
            self.client.delete_template(snapshot.snapshot_id).await.context("delete the snapshot")?;
        }
        Ok(row)
    }

    /// Forks until the last child is announced, how long the source stands still, and what each child's guest and VMM
    /// occupy, shared pages counted by their part.
    async fn forks(&self, samples: usize) -> Result<[Row; 4]> {
        let mut rows = [
            Row::new("fork_16", "ms").at_most(3000.0),
            Row::new("fork_stall", "ms").at_most(60.0),
            Row::new("fork_pss", "MiB").at_most(25.0),
            Row::new("fork_vmm_pss", "MiB"),
        ];
        for _ in 0..samples {
            self.pause().await?;
            self.resume().await?;
            let begun = Instant::now();
            let response = self.post("fork", &ForkRequest { count: Some(CHILDREN), timeout: None }).await?;
            rows[1].add(stall(&response)?);
            let children: Vec<aenv_api::ForkResult> = response.json().await.context("read the children")?;
            rows[0].add(millis(begun));
            let mut failed = None;
            for child in children {
                match (child.sandbox, child.error) {
                    (Some(child), _) => {
                        let (guest, vmm) = pss_mib(&child, self.memory_mib().await?)?;
                        rows[2].add(guest);
                        rows[3].add(vmm);
                        delete(self.client, &child).await?;
                    }
                    (None, error) => failed = Some(error),
                }
            }
            if let Some(error) = failed {
                bail!("a child was not made: {error:?}");
            }
        }
        Ok(rows)
    }

    /// The last resumes of many, in times of the first.
    async fn cycles(&self, cycles: usize) -> Result<Row> {
        let mut took = Vec::with_capacity(cycles);
        for _ in 0..cycles {
            self.pause().await?;
            took.push(self.resume().await?.0);
        }
        let ends = ENDS.min(cycles / 2).max(1);
        let mut row = Row::new("resume_200_ratio", "×").at_most(1.3);
        row.add(median(&took[took.len() - ends..]) / median(&took[..ends]));
        Ok(row)
    }

    async fn pause(&self) -> Result<f64> {
        let begun = Instant::now();
        self.client.pause_sandbox(self.sandbox.sandbox_id, &PauseRequest::default()).await.context("pause")?;
        Ok(millis(begun))
    }

    /// To the answer, which comes after the guest's own; and of that, the server's part.
    async fn resume(&self) -> Result<(f64, f64)> {
        let request = ConnectRequest { timeout: Some(SANDBOX_TTL_SECS), memory: None };
        let begun = Instant::now();
        let response = self.post("connect", &request).await?;
        let took = millis(begun);
        let Times { prepare, machine } = Times::of(&response)?;
        Ok((took, prepare + machine))
    }

    async fn memory_mib(&self) -> Result<u64> {
        Ok(self.client.sandbox(self.sandbox.sandbox_id).await.context("look at the sandbox")?.listed.memory_mb)
    }

    /// Has the guest write this much memory, none of it zeros.
    async fn dirty(&self, mib: usize) -> Result<()> {
        let script = format!("yes | head -c {} > /dev/shm/dirty", mib << 20);
        Guest::new(&self.args.sandbox_url, self.sandbox)?.run(&["sh", "-c", &script]).await?;
        Ok(())
    }

    async fn post<B: serde::Serialize>(&self, what: &str, body: &B) -> Result<Response> {
        post(&self.http, self.args, &format!("sandboxes/{}/{what}", self.sandbox.sandbox_id), body).await
    }
}

async fn post<B: serde::Serialize>(http: &reqwest::Client, args: &Args, path: &str, body: &B) -> Result<Response> {
    let url = format!("{}/{path}", args.api_url.trim_end_matches('/'));
    let response = http.post(&url).header("x-api-key", &args.api_key).json(body).send().await?;
    match response.status().is_success() {
        true => Ok(response),
        false => bail!("{path}: {}: {}", response.status(), response.text().await.unwrap_or_default()),
    }
}

fn stall(response: &Response) -> Result<f64> {
    let header = response.headers().get(STALL_HEADER).with_context(|| format!("no header {STALL_HEADER}"))?;
    Ok(header.to_str()?.parse()?)
}

/// What a sandbox with `memory` MiB occupies: its guest's memory, and all else of its VMM. Pages that several share are
/// counted by their part (PSS).
fn pss_mib(sandbox: &Sandbox, memory: u64) -> Result<(f64, f64)> {
    // Its command line may be that of a VMM that waited for a machine; what it has open is the sandbox's own disk.
    let disk = sandbox.sandbox_id.to_string();
    for entry in fs::read_dir("/proc")? {
        let dir = entry?.path();
        let is_qemu = fs::read_to_string(dir.join("comm")).is_ok_and(|name| name.starts_with("qemu"));
        let files = fs::read_dir(dir.join("fd")).into_iter().flatten().flatten();
        let mut targets = files.filter_map(|file| fs::read_link(file.path()).ok());
        if is_qemu && targets.any(|target| target.file_name().is_some_and(|name| name.to_string_lossy() == disk)) {
            return pss_of(&fs::read_to_string(dir.join("smaps")).context("read what a VMM occupies")?, memory << 10);
        }
    }
    bail!("no VMM of sandbox {} on this host", sandbox.sandbox_id)
}

/// The same of the text of `/proc/PID/smaps`, with a guest of `memory` KiB.
fn pss_of(smaps: &str, memory: u64) -> Result<(f64, f64)> {
    let (mut guest, mut vmm, mut is_guest) = (0.0, 0.0, false);
    for line in smaps.lines() {
        let Some((name, value)) = line.split_once(':') else { continue };
        let kib = || value.trim().trim_end_matches("kB").trim().parse::<u64>();
        match name {
            "Size" => is_guest = kib()? == memory,
            "Pss" if is_guest => guest += kib()? as f64,
            "Pss" => vmm += kib()? as f64,
            _ => {}
        }
    }
    Ok((guest / 1024.0, vmm / 1024.0))
}

fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(0.0)
}

fn millis(begun: Instant) -> f64 {
    begun.elapsed().as_secs_f64() * 1e3
}
