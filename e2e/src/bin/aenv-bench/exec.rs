//! A command in a guest, asked for the way the SDKs do: Connect RPC with the JSON codec over one kept connection.

use aenv_api::Sandbox;
use anyhow::{Context as _, Result, bail};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use http::{HeaderMap, HeaderValue};
use serde_json::{Value, json};

/// Port of the guest agent.
const AGENT_PORT: &str = "49983";
/// Set in the flags of the frame that ends a stream.
const END_OF_STREAM: u8 = 0x02;

/// A sandbox's guest, over a connection of its own.
#[derive(Debug)]
pub(crate) struct Guest {
    http: reqwest::Client,
    start: String,
}

impl Guest {
    pub(crate) fn new(url: &str, sandbox: &Sandbox) -> Result<Self> {
        let mut headers = HeaderMap::new();
        let mut insert = |name: &'static str, value: &str| -> Result<()> {
            headers.insert(name, HeaderValue::from_str(value).with_context(|| format!("header {name}"))?);
            Ok(())
        };
        insert("e2b-sandbox-id", &sandbox.sandbox_id.to_string())?;
        insert("e2b-sandbox-port", AGENT_PORT)?;
        insert("connect-protocol-version", "1")?;
        insert("content-type", "application/connect+json")?;
        insert("keepalive-ping-interval", "50")?;
        insert("authorization", &format!("Basic {}", BASE64.encode("user:")))?;
        if let Some(token) = &sandbox.envd_access_token {
            insert("x-access-token", token)?;
        }
        let http = aenv_api::http_builder(url)?.default_headers(headers).build().context("set up the HTTP client")?;
        Ok(Self { http, start: format!("{}/process.Process/Start", url.trim_end_matches('/')) })
    }

    /// Runs `argv` to its end; returns its standard output.
    ///
    /// Errors: the stream broke off or reported an error; the command failed.
    pub(crate) async fn run(&self, argv: &[&str]) -> Result<Vec<u8>> {
        let (cmd, args) = argv.split_first().context("no command")?;
        let request = json!({ "process": { "cmd": cmd, "args": args }, "stdin": false });
        let response = self.http.post(&self.start).body(frame(0, &serde_json::to_vec(&request)?)).send().await?;
        let status = response.status();
        let body = response.bytes().await.context("read the stream")?;
        if !status.is_success() {
            bail!("{argv:?}: {status}: {}", String::from_utf8_lossy(&body));
        }
        read_stream(&body).with_context(|| format!("{argv:?}"))
    }

    /// Resident size of PID 1, which is the agent.
    pub(crate) async fn agent_rss_mib(&self) -> Result<f64> {
        let status = String::from_utf8(self.run(&["cat", "/proc/1/status"]).await?)?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS in /proc/1/status")?;
        let kib: f64 = line.trim().trim_end_matches("kB").trim().parse().with_context(|| format!("VmRSS:{line}"))?;
        Ok(kib / 1024.0)
    }
}

fn frame(flags: u8, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap_or(u32::MAX);
    [&[flags], &length.to_be_bytes()[..], payload].concat()
}

/// Standard output of a finished `Start` stream.
fn read_stream(mut body: &[u8]) -> Result<Vec<u8>> {
    let mut stdout = Vec::new();
    let mut exit = None;
    while let [flags, l0, l1, l2, l3, rest @ ..] = body {
        let length = u32::from_be_bytes([*l0, *l1, *l2, *l3]) as usize;
        let payload = rest.get(..length).context("the stream is cut short")?;
        body = &rest[length..];
        let message: Value = serde_json::from_slice(payload).context("a message is not JSON")?;
        if flags & END_OF_STREAM != 0 {
            if let Some(error) = message.get("error") {
                bail!("the stream ended with {error}");
            }
            return match exit {
                Some(0) => Ok(stdout),
                Some(code) => bail!("exit code {code}"),
                None => bail!("the stream ended without an end event"),
            };
        }
        let event = &message["event"];
        if let Some(text) = event["data"]["stdout"].as_str() {
            stdout.extend(BASE64.decode(text).context("stdout is not base64")?);
        }
        if let Some(end) = event.get("end") {
            // proto3 JSON leaves a zero out.
            exit = Some(end.get("exitCode").and_then(Value::as_i64).unwrap_or(0));
        }
    }
    bail!("the stream is cut short")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream(messages: &[(u8, &str)]) -> Vec<u8> {
        messages.iter().flat_map(|(flags, text)| frame(*flags, text.as_bytes())).collect()
    }

    #[test]
    fn a_whole_stream_gives_its_output() -> Result<()> {
        let body = stream(&[
            (0, r#"{"event":{"start":{"pid":5}}}"#),
            (0, r#"{"event":{"data":{"stdout":"aGkK"}}}"#),
            (0, r#"{"event":{"end":{"exited":true,"status":"exit status 0"}}}"#),
            (2, "{}"),
        ]);
        assert_eq!(read_stream(&body)?, b"hi\n");
        assert!(read_stream(&body[..body.len() - 1]).is_err());
        Ok(())
    }

    #[test]
    fn failures_are_told() {
        let failed = stream(&[(0, r#"{"event":{"end":{"exitCode":3,"exited":true}}}"#), (2, "{}")]);
        assert!(read_stream(&failed).is_err());
        assert!(read_stream(&stream(&[(2, r#"{"error":{"code":"not_found","message":"no"}}"#)])).is_err());
        assert!(read_stream(&stream(&[(2, "{}")])).is_err());
    }
}
