//! `aenv start`: a new sandbox, and a shell in it.

use std::process::ExitCode;

use aenv_api::{Client, NewColdSandbox, NewSandbox};

use crate::args::Start;
use crate::progress::StatusLine;
use crate::{attach, output};

/// Creates the sandbox and attaches to it; it lives on when the shell ends, and is paused when its time is over: somebody
/// may still want what is in it. Detached, prints its id alone.
pub(crate) async fn run(client: &Client, start: Start) -> anyhow::Result<ExitCode> {
    let status = StatusLine::while_waiting(&format!("Starting a sandbox from {}", start.target));
    let sandbox = if start.cold {
        let request = NewColdSandbox {
            image: start.target,
            timeout: Some(start.timeout),
            auto_pause: Some(true),
            secure: Some(true),
            cpu_count: start.cpu,
            memory_mb: start.memory,
            disk_size_mb: start.disk_size_mb,
            ..Default::default()
        };
        client.create_sandbox_cold(&request).await?
    } else {
        let request = NewSandbox {
            template_id: start.target,
            timeout: Some(start.timeout),
            auto_pause: Some(true),
            secure: Some(true),
            ..Default::default()
        };
        client.create_sandbox_v1(&request).await?
    };
    drop(status);
    if start.detach {
        output::object(&sandbox, start.output, sandbox.sandbox_id)?;
        return Ok(ExitCode::SUCCESS);
    }
    output::line(format_args!("Started sandbox {}", sandbox.sandbox_id))?;
    attach::attach(client, &sandbox).await
}
