//! Commands that speak to the control plane only, against its stand-in.

mod support;

use std::os::unix::fs::PermissionsExt as _;
use std::time::Duration;

use axum::http::HeaderMap;
use serde_json::{Value, json};
use support::server::{Server, listed, sandbox};
use support::{KEY, SANDBOX, TEMPLATE, User};

fn next_token(token: &str) -> HeaderMap {
    HeaderMap::from_iter([("x-next-token".parse().unwrap(), token.parse().unwrap())])
}

fn status(status: &str, entries: &[&str]) -> Value {
    let entry = |message: &&str| json!({"timestamp": "2026-01-31T12:00:00Z", "message": message, "level": "info"});
    json!({"templateID": TEMPLATE, "buildID": TEMPLATE, "status": status, "logs": entries,
        "logEntries": entries.iter().map(entry).collect::<Vec<_>>()})
}

fn created() -> Value {
    json!({"templateID": TEMPLATE, "buildID": TEMPLATE, "public": false, "names": ["x"], "tags": [], "aliases": ["x"]})
}

#[tokio::test]
async fn auth_keeps_what_it_is_told_for_its_owner_only() {
    let user = User::fresh();
    let ran = user.run_with_input(&["auth"], &format!("\n  {KEY} \n")).await;
    assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), ""), "{ran:?}");
    assert!(ran.stdout.starts_with("AENV server URL [http://localhost:8000]: "), "{ran:?}");
    assert!(ran.stdout.ends_with("Credentials saved.\n"), "{ran:?}");
    let text = std::fs::read_to_string(user.credentials_path()).unwrap();
    assert_eq!(text, format!("url = \"http://localhost:8000\"\napi_key = \"{KEY}\"\n"));
    assert_eq!(user.credentials_path().metadata().unwrap().permissions().mode() & 0o777, 0o600);
}

#[tokio::test]
async fn auth_refuses_an_empty_key_and_an_address_that_is_none() {
    let user = User::fresh();
    let ran = user.run_with_input(&["auth"], "\n\n").await;
    assert!(ran.code == Some(1) && ran.stderr.contains("key is empty"), "{ran:?}");
    let ran = user.run_with_input(&["auth"], "localhost:8000\nk\n").await;
    assert!(ran.code == Some(1) && ran.stderr.contains("http://HOST:PORT"), "{ran:?}");
    assert!(!user.credentials_path().exists());
}

#[tokio::test]
async fn stored_credentials_are_used() {
    let server = Server::start().await;
    server.answer("GET /v2/sandboxes", 200, json!([]));
    let user = User::fresh();
    assert_eq!(user.run_with_input(&["auth"], &format!("{}\n{KEY}\n", server.url)).await.code, Some(0));
    let ran = user.run(&["list"]).await;
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(0), "[]\n"), "{ran:?}");
}

#[tokio::test]
async fn without_credentials_the_way_to_get_some_is_named() {
    let ran = User::fresh().run(&["list"]).await;
    assert_eq!(ran.code, Some(1));
    assert!(ran.stderr.contains("aenv auth") && ran.stderr.contains(".config/aenv/credentials"), "{ran:?}");
}

#[tokio::test]
async fn a_list_is_the_servers_words_as_json_over_all_pages() {
    let server = Server::start().await;
    let mut first = listed("running");
    first["later"] = json!({"kept": true});
    server.answer_with("GET /v2/sandboxes", 200, json!([first]), next_token("more"));
    server.answer("GET /v2/sandboxes", 200, json!([listed("paused")]));
    let ran = User::of(&server.url).run(&["list"]).await;
    let printed: Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!(printed, json!([first, listed("paused")]), "{ran:?}");
    let lines: Vec<_> = server.calls().into_iter().map(|call| call.line).collect();
    assert_eq!(lines, ["GET /v2/sandboxes?limit=100", "GET /v2/sandboxes?limit=100&nextToken=more"]);
}

#[tokio::test]
async fn a_table_is_for_people() {
    let server = Server::start().await;
    server.answer("GET /v2/sandboxes", 200, json!([listed("running"), listed("paused")]));
    let ran = User::of(&server.url).run(&["ls", "--output", "table"]).await;
    let lines: Vec<_> = ran.stdout.lines().map(|line| line.split("  ").map(str::trim).collect::<Vec<_>>()).collect();
    let cells = |line: &[&str]| line.iter().filter(|c| !c.is_empty()).map(|c| (*c).to_owned()).collect::<Vec<_>>();
    let header = ["SANDBOX ID", "TEMPLATE", "STATE", "CPU", "MEM (MiB)", "DISK (MiB)", "STARTED"];
    assert_eq!(cells(&lines[0]), header);
    for (line, state) in lines[1..].iter().zip(["running", "paused"]) {
        assert_eq!(cells(line), [SANDBOX, "base", state, "2", "1024", "2048", "2026-01-31 12:00:00Z"]);
    }
}

#[tokio::test]
async fn a_refused_key_comes_with_advice() {
    let server = Server::start().await;
    let user = User::of(&server.url);
    let ran = Ran::with_key(&user, "wrong").await;
    assert_eq!(ran.0, Some(1));
    assert!(ran.1.contains("invalid API key") && ran.1.contains("aenv auth"), "{}", ran.1);
}

/// Exit code and standard error of `aenv list` with another key.
struct Ran;

impl Ran {
    async fn with_key(user: &User, key: &str) -> (Option<i32>, String) {
        let output = user.command(&["list"]).env("AENV_API_KEY", key).output().await.unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    }
}

#[tokio::test]
async fn a_server_that_is_not_there_is_named_with_the_way_out() {
    let gone = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let ran = User::of(&format!("http://{gone}")).run(&["list"]).await;
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(1), ""));
    for text in [&gone.to_string(), "aenv-server", "aenv auth", "Connection refused"] {
        assert!(ran.stderr.contains(text), "{text}: {ran:?}");
    }
    assert_eq!(ran.stderr.lines().count(), 1, "{ran:?}");
}

#[tokio::test]
async fn usage_errors_exit_with_2() {
    let user = User::fresh();
    for words in [&["delete", "box"][..], &["nonsense"], &["timeout", SANDBOX, "-1"], &["start", "x", "--cpu", "2"]] {
        let ran = user.run(words).await;
        assert_eq!(ran.code, Some(2), "{words:?}: {ran:?}");
    }
    let ran = user.run(&["template", "list", "--version"]).await;
    assert!(ran.code == Some(0) && ran.stdout.contains(env!("CARGO_PKG_VERSION")), "{ran:?}");
}

#[tokio::test]
async fn simple_commands_say_what_they_did() {
    let server = Server::start().await;
    let user = User::of(&server.url);
    server.answer("DELETE /sandboxes/", 204, Value::Null);
    let ran = user.run(&["rm", SANDBOX]).await;
    assert_eq!((ran.code, ran.stdout), (Some(0), format!("Deleted sandbox {SANDBOX}\n")));
    server.answer(&format!("POST /sandboxes/{SANDBOX}/timeout"), 204, Value::Null);
    let ran = user.run(&["timeout", SANDBOX, "42"]).await;
    assert_eq!((ran.code, ran.stdout), (Some(0), format!("Timeout for {SANDBOX} set to 42s\n")));
    assert_eq!(server.called(&format!("POST /sandboxes/{SANDBOX}/timeout")).unwrap().body, json!({"timeout": 42}));
}

#[tokio::test]
async fn pause_and_resume_say_what_they_did_and_ask_for_what_was_meant() {
    let server = Server::start().await;
    let user = User::of(&server.url);
    let (pause, connect) = (format!("POST /sandboxes/{SANDBOX}/pause"), format!("POST /sandboxes/{SANDBOX}/connect"));
    server.answer(&pause, 204, Value::Null);
    let table = [
        (&["pause", SANDBOX][..], &pause, json!({}), "Paused"),
        (&["pause", SANDBOX, "--disk-only"], &pause, json!({"memory": false}), "Paused"),
        (&["resume", SANDBOX], &connect, json!({"timeout": 300}), "Resumed"),
        (
            &["resume", SANDBOX, "--timeout", "60", "--boot"],
            &connect,
            json!({"timeout": 60, "memory": false}),
            "Resumed",
        ),
    ];
    for (words, line, body, done) in table {
        let ran = user.run(words).await;
        assert_eq!((ran.code, ran.stdout), (Some(0), format!("{done} {SANDBOX}\n")), "{words:?}");
        assert_eq!(server.called(line).unwrap().body, body, "{words:?}");
    }
}

#[tokio::test]
async fn what_is_paused_already_is_told_in_the_servers_words() {
    let server = Server::start().await;
    let message = format!("sandbox {SANDBOX} is paused already");
    server.answer(&format!("POST /sandboxes/{SANDBOX}/pause"), 409, json!({"code": 409, "message": message}));
    let ran = User::of(&server.url).run(&["pause", SANDBOX]).await;
    assert_eq!((ran.code, ran.stderr), (Some(1), format!("error: {message} (409)\n")));
}

#[tokio::test]
async fn a_fork_prints_its_children_and_fails_if_one_is_missing() {
    let server = Server::start().await;
    let user = User::of(&server.url);
    let fork = format!("POST /sandboxes/{SANDBOX}/fork");
    let child = json!({"sandbox": sandbox()});
    let missing = json!({"error": {"code": 503, "message": "the node is full"}});
    server.answer(&fork, 201, json!([child, child]));
    server.answer(&fork, 201, json!([missing, child]));
    let ran = user.run(&["fork", SANDBOX, "--count", "2", "--timeout", "60"]).await;
    assert_eq!((ran.code, ran.stdout), (Some(0), format!("{SANDBOX}\n{SANDBOX}\n")));
    assert_eq!(server.called(&fork).unwrap().body, json!({"count": 2, "timeout": 60}));
    let ran = user.run(&["fork", SANDBOX, "-n", "2"]).await;
    assert_eq!((ran.code, ran.stdout), (Some(1), format!("{SANDBOX}\n")));
    assert!(ran.stderr.contains("1 of 2 children") && ran.stderr.contains("the node is full"), "{}", ran.stderr);
    let ran = user.run(&["fork", SANDBOX, "-n", "2", "--output", "json"]).await;
    assert_eq!(serde_json::from_str::<Value>(&ran.stdout).unwrap(), json!([missing, child]));
    let ran = user.run(&["fork", SANDBOX, "-n", "2", "--output", "table"]).await;
    let lines: Vec<_> = ran.stdout.lines().collect();
    assert!(lines[0].starts_with("SANDBOX ID") && lines[1].ends_with("the node is full"), "{lines:?}");
    assert!(lines[2].starts_with(SANDBOX) && lines[2].ends_with('-'), "{lines:?}");
}

#[tokio::test]
async fn snapshots_are_taken_listed_and_deleted() {
    let server = Server::start().await;
    let user = User::of(&server.url);
    let taken = json!({"snapshotID": TEMPLATE, "names": ["prepared"], "cpuCount": 2, "memoryMB": 1024, "diskSizeMB": 2048,
        "createdAt": "2026-01-31T12:00:00Z", "updatedAt": "2026-01-31T12:00:00Z"});
    let create = format!("POST /sandboxes/{SANDBOX}/snapshots");
    server.answer(&create, 201, taken.clone());
    let ran = user.run(&["snapshot", "create", SANDBOX, "--name", "prepared"]).await;
    assert_eq!((ran.code, ran.stdout), (Some(0), format!("Created snapshot {TEMPLATE}\n")));
    assert_eq!(server.called(&create).unwrap().body, json!({"name": "prepared"}));

    server.answer_with("GET /snapshots?", 200, json!([taken]), next_token("more"));
    server.answer("GET /snapshots?", 200, json!([taken]));
    let ran = user.run(&["snap", "ls"]).await;
    assert_eq!(serde_json::from_str::<Value>(&ran.stdout).unwrap(), json!([taken, taken]), "{ran:?}");
    let ran = user.run(&["snapshot", "list", "--sandbox-id", SANDBOX, "--output", "table"]).await;
    let lines: Vec<_> = ran.stdout.lines().map(|line| line.split("  ").filter(|cell| !cell.is_empty())).collect();
    let cells: Vec<_> = lines[1].clone().map(str::trim).collect();
    assert_eq!(cells, [TEMPLATE, "prepared", "2", "1024", "2048", "2026-01-31 12:00:00Z"]);
    let lines: Vec<_> = server.calls().into_iter().map(|call| call.line).filter(|line| line.contains("?")).collect();
    let expected =
        ["limit=100".to_owned(), "limit=100&nextToken=more".to_owned(), format!("sandboxID={SANDBOX}&limit=100")];
    assert_eq!(lines, expected.map(|query| format!("GET /snapshots?{query}")));

    server.answer("GET /snapshots/prepared", 200, taken);
    server.answer("GET /snapshots/base", 404, json!({"code": 404, "message": "snapshot 'base' not found"}));
    server.answer(&format!("DELETE /templates/{TEMPLATE}"), 204, Value::Null);
    let ran = user.run(&["snapshot", "rm", "prepared"]).await;
    assert_eq!((ran.code, ran.stdout), (Some(0), format!("Deleted snapshot {TEMPLATE}\n")));
    let ran = user.run(&["snapshot", "delete", "base"]).await;
    assert_eq!((ran.code, ran.stderr.as_str()), (Some(1), "error: snapshot 'base' not found (404)\n"));
}

#[tokio::test]
async fn an_unknown_sandbox_is_told_in_the_servers_words() {
    let server = Server::start().await;
    server.set_sandbox("deleted");
    for words in [&["delete"][..], &["connect"], &["pause"], &["resume"], &["fork"], &["snapshot", "create"]] {
        let ran = User::of(&server.url).run(&[words, &[SANDBOX]].concat()).await;
        assert_eq!(ran.code, Some(1), "{ran:?}");
        assert!(ran.stderr.contains(&format!("error: sandbox {SANDBOX} not found (404)")), "{ran:?}");
    }
}

#[tokio::test]
async fn a_detached_start_prints_the_id_alone() {
    let server = Server::start().await;
    server.answer("POST /sandboxes", 201, sandbox());
    let user = User::of(&server.url);
    let ran = user.run(&["start", "base", "-d", "--timeout", "60"]).await;
    assert_eq!((ran.code, ran.stdout, ran.stderr.as_str()), (Some(0), format!("{SANDBOX}\n"), ""));
    let body = server.called("POST /sandboxes").unwrap().body;
    assert_eq!(body, json!({"templateID": "base", "timeout": 60, "autoPause": true, "secure": true}));

    let ran = user.run(&["start", "--cold", "debian:12", "-d", "--cpu", "2", "--disk-mb", "2048"]).await;
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let body = server.called("POST /sandboxes-cold").unwrap().body;
    let expected = json!({"image": "debian:12", "timeout": 300, "autoPause": true, "secure": true, "cpuCount": 2,
        "diskSizeMB": 2048});
    assert_eq!(body, expected);
}

#[tokio::test]
async fn a_pull_is_followed_to_its_end() {
    let server = Server::start().await;
    server.answer("POST /v3/templates", 202, created());
    server.answer(&format!("POST /v2/templates/{TEMPLATE}/builds/{TEMPLATE}"), 202, Value::Null);
    let poll = format!("GET /templates/{TEMPLATE}/builds/{TEMPLATE}/status");
    server.answer(&poll, 200, status("building", &["layer 1/2"]));
    server.answer(&poll, 503, json!({"code": 503, "message": "restarting"}));
    server.answer(&poll, 200, status("ready", &["layer 2/2"]));
    let ran = User::of(&server.url).run(&["pull", "oci:/images/base:v1", "--cpu", "2", "--probe", "80"]).await;
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let expected =
        format!("Created template {TEMPLATE} (build {TEMPLATE})\nBuild succeeded: template {TEMPLATE} is ready.\n");
    assert_eq!(ran.stdout, expected);
    for text in ["Build status: building", "layer 1/2", "layer 2/2", "asking again"] {
        assert!(ran.stderr.contains(text), "{text}: {ran:?}");
    }
    let create = server.called("POST /v3/templates").unwrap().body;
    assert_eq!(create, json!({"name": "base", "cpuCount": 2}));
    let start = server.called(&format!("POST /v2/templates/{TEMPLATE}/builds/{TEMPLATE}")).unwrap().body;
    let expected = json!({"fromImage": "oci:/images/base:v1", "readyCmd": "bash -c '</dev/tcp/127.0.0.1/80'"});
    assert_eq!(start, expected);
    assert!(server.called(&format!("{poll}?logsOffset=1&limit=100")).is_some(), "{:?}", server.calls());
}

#[tokio::test]
async fn a_failed_build_says_where_and_why() {
    let server = Server::start().await;
    server.answer("POST /v3/templates", 202, created());
    server.answer("POST /v2/templates", 202, Value::Null);
    let mut failed = status("error", &["Build failed: manifest unknown"]);
    failed["logEntries"][0]["level"] = json!("error");
    failed["reason"] = json!({"message": "manifest unknown", "step": "base"});
    server.answer("GET /templates", 200, failed);
    let ran = User::of(&server.url).run(&["pull", "nope"]).await;
    assert_eq!(ran.code, Some(1));
    assert!(ran.stderr.ends_with("error: Build failed: manifest unknown (step: base)\n"), "{ran:?}");
    assert_eq!(ran.stderr.matches("manifest unknown").count(), 1, "{ran:?}");
}

#[tokio::test]
async fn a_pull_can_be_left_to_itself() {
    let server = Server::start().await;
    server.answer("POST /v3/templates", 202, created());
    server.answer("POST /v2/templates", 202, Value::Null);
    server.answer("GET /templates", 200, status("building", &[]));
    let user = User::of(&server.url);
    let ran = user.run(&["pull", "debian:12", "-d"]).await;
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert!(ran.stdout.ends_with("Build started. Watch it with: aenv template watch debian\n"), "{ran:?}");
    let ran = user.run(&["pull", "debian:12", "--timeout", "1"]).await;
    assert_eq!(ran.code, Some(1));
    assert!(ran.stderr.contains("aenv template watch debian"), "{ran:?}");
}

#[tokio::test]
async fn templates_are_found_by_id_and_by_name() {
    let server = Server::start().await;
    let user = User::of(&server.url);
    server.answer("GET /templates/aliases/base", 200, json!({"templateID": TEMPLATE, "public": false}));
    server.answer("GET /templates/aliases/nope", 404, json!({"code": 404, "message": "template 'nope' not found"}));
    server.answer(&format!("DELETE /templates/{TEMPLATE}"), 204, Value::Null);
    for reference in [TEMPLATE, "base"] {
        let ran = user.run(&["template", "rm", reference]).await;
        assert_eq!((ran.code, ran.stdout), (Some(0), format!("Deleted template {TEMPLATE}\n")));
    }
    let ran = user.run(&["template", "delete", "nope"]).await;
    assert!(ran.code == Some(1) && ran.stderr.contains("template 'nope' not found"), "{ran:?}");

    let build = json!({"buildID": TEMPLATE, "status": "building", "createdAt": "2026-01-31T12:00:00Z",
        "updatedAt": "2026-01-31T12:00:00Z", "cpuCount": 2, "memoryMB": 512});
    let template = json!({"templateID": TEMPLATE, "public": false, "aliases": [], "names": [], "spawnCount": 0,
        "createdAt": "2026-01-31T12:00:00Z", "updatedAt": "2026-01-31T12:00:00Z", "lastSpawnedAt": null,
        "builds": [build]});
    server.answer(&format!("GET /templates/{TEMPLATE}/builds"), 200, status("ready", &[]));
    server.answer(&format!("GET /templates/{TEMPLATE}"), 200, template);
    let watched = tokio::time::timeout(Duration::from_secs(20), user.run(&["template", "watch", "base"])).await;
    let ran = watched.unwrap();
    assert!(ran.code == Some(0) && ran.stdout.starts_with("Build succeeded"), "{ran:?}");
}

#[tokio::test]
async fn completion_scripts_ask_the_program_itself() {
    for shell in ["bash", "zsh", "fish"] {
        let ran = User::fresh().run(&["completion", shell]).await;
        assert_eq!(ran.code, Some(0), "{ran:?}");
        assert!(ran.stdout.contains("COMPLETE=") && ran.stdout.contains(shell), "{shell}: {ran:?}");
    }
}

/// A log entry at a millisecond.
fn logged(millisecond: u32, level: &str, message: &str) -> Value {
    json!({"timestamp": format!("2026-01-31T12:00:00.{millisecond:03}Z"), "level": level, "message": message,
        "fields": {"logger": "sandbox"}})
}

#[tokio::test]
async fn logs_are_lines_or_json_and_the_newest_come_last() {
    let server = Server::start().await;
    let user = User::of(&server.url);
    let path = format!("GET /v2/sandboxes/{SANDBOX}/logs");
    server.answer(&format!("{path}?cursor="), 200, json!({"logs": [logged(1, "info", "created")]}));
    server.answer(
        &format!("{path}?limit=2&direction=backward"),
        200,
        json!({"logs": [logged(3, "warn", "paused"), logged(2, "info", "resumed")]}),
    );
    let ran = user.run(&["logs", "--since", "1h", SANDBOX]).await;
    assert_eq!((ran.code, &*ran.stdout), (Some(0), "2026-01-31T12:00:00.001Z info  sandbox: created\n"), "{ran:?}");
    let ran = user.run(&["logs", "-n", "2", "--level", "info", "--json", SANDBOX]).await;
    let lines: Vec<Value> = ran.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines, [logged(2, "info", "resumed"), logged(3, "warn", "paused")], "{ran:?}");
    assert!(server.called(&format!("{path}?limit=2&direction=backward&level=info")).is_some());
    // None of what is there, and all that comes.
    server.answer(&format!("{path}?limit=1&direction=backward"), 200, json!({"logs": [logged(3, "warn", "paused")]}));
    server.set_sandbox("deleted");
    let ran = user.run(&["logs", "-f", "-n", "0", SANDBOX]).await;
    assert_eq!((ran.code, &*ran.stdout), (Some(0), "2026-01-31T12:00:00.001Z info  sandbox: created\n"), "{ran:?}");
    assert!(server.called(&format!("{path}?cursor=1769860800004&limit=1000")).is_some(), "{:?}", server.calls());
}

#[tokio::test]
async fn followed_logs_go_on_to_the_sandboxs_end() {
    let server = Server::start().await;
    let path = format!("GET /v2/sandboxes/{SANDBOX}/logs?");
    server.answer(&path, 200, json!({"logs": [logged(1, "info", "created")]}));
    server.answer(&path, 200, json!({"logs": []}));
    server.answer(&path, 200, json!({"logs": [logged(5, "info", "ended")]}));
    server.answer(&path, 200, json!({"logs": []}));
    let mut child = User::of(&server.url).command(&["logs", "-f", SANDBOX]);
    let child = child.stdout(std::process::Stdio::piped()).spawn().unwrap();
    support::eventually("it has asked for more", || server.calls().len() >= 6).await;
    assert!(server.called(&format!("{path}cursor=1769860800002&limit=1000")).is_some(), "{:?}", server.calls());
    server.set_sandbox("deleted");
    server.answer_first(&path, 200, json!({"logs": [logged(9, "info", "the last word")]}));
    let output = tokio::time::timeout(support::PATIENCE, child.wait_with_output()).await.unwrap().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && text.starts_with("2026-01-31T12:00:00.001Z info  sandbox: created\n"), "{text}");
    assert!(text.contains("ended\n") && text.ends_with("the last word\n"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watched_list_is_told_by_its_changes_or_drawn_over() {
    use tokio::io::{AsyncBufReadExt as _, BufReader};
    let server = Server::start().await;
    let user = User::of(&server.url);
    server.answer("GET /v2/sandboxes", 200, json!([listed("running")]));
    server.answer("GET /v2/sandboxes", 200, json!([listed("running")]));
    server.answer("GET /v2/sandboxes", 200, json!([listed("paused")]));
    server.answer("GET /v2/sandboxes", 200, json!([]));
    let mut child = user.command(&["ls", "--watch"]).stdout(std::process::Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    for state in ["running", "paused", "gone"] {
        let line = tokio::time::timeout(support::PATIENCE, lines.next_line()).await.unwrap().unwrap().unwrap();
        let item: Value = serde_json::from_str(&line).unwrap();
        assert_eq!((item["sandboxID"].as_str(), item["state"].as_str()), (Some(SANDBOX), Some(state)));
    }
    child.kill().await.unwrap();
    server.answer("GET /v2/sandboxes", 200, json!([listed("running")]));
    let pty = support::pty::Pty::run(user.command(&["ls", "--watch"]), 200, 24);
    pty.sees("\x1b[H").await;
    pty.sees("SANDBOX ID").await;
    pty.sees(SANDBOX).await;
}

#[tokio::test]
async fn metrics_are_the_newest_or_all_of_a_time() {
    let server = Server::start().await;
    let user = User::of(&server.url);
    let metric = |at: i64| {
        json!({"timestamp": "2026-01-31T12:00:00Z", "timestampUnix": at, "cpuCount": 2,
        "cpuUsedPct": 12.345, "memUsed": 64 << 20, "memTotal": 1 << 30, "memCache": 0, "diskUsed": 3 << 20,
        "diskTotal": 2u64 << 30})
    };
    server.answer(&format!("GET /sandboxes/{SANDBOX}/metrics"), 200, json!([metric(1), metric(2)]));
    let ran = user.run(&["metrics", SANDBOX]).await;
    assert_eq!(serde_json::from_str::<Value>(&ran.stdout).unwrap(), json!([metric(2)]), "{ran:?}");
    let ran = user.run(&["metrics", "--since", "10m", "--output", "table", SANDBOX]).await;
    assert_eq!(ran.stdout.lines().count(), 3, "{ran:?}");
    assert!(ran.stdout.contains("12.3   2     64              1024       3                2048"), "{ran:?}");
    server.answer_first(&format!("GET /sandboxes/{SANDBOX}/metrics"), 200, json!([]));
    assert!(user.run(&["metrics", SANDBOX]).await.stderr.contains("no metrics"));
}

#[tokio::test]
async fn profiles_stand_for_servers() {
    let (first, second) = (Server::start().await, Server::start().await);
    first.answer("GET /v2/sandboxes", 200, json!([listed("running")]));
    second.answer("GET /v2/sandboxes", 200, json!([]));
    let user = User::fresh();
    for (words, server) in [(&["auth"][..], &first), (&["auth", "--profile", "work"], &second)] {
        let ran = user.run_with_input(words, &format!("{}\n{KEY}\n", server.url)).await;
        assert_eq!(ran.code, Some(0), "{ran:?}");
    }
    let empty = async |words: &[&str]| user.run(words).await.stdout == "[]\n";
    assert!(!empty(&["ls"]).await);
    assert!(empty(&["ls", "--profile", "work"]).await && empty(&["--profile", "work", "ls"]).await);
    let output = user.command(&["ls"]).env("AENV_PROFILE", "work").output().await.unwrap();
    assert_eq!(output.stdout, b"[]\n");
    // Variables beat what is stored, but not what is asked for in so many words.
    let with_variables = async |words: &[&str]| {
        let mut command = user.command(words);
        command.env("AENV_SERVER", &first.url).env("AENV_API_KEY", KEY).output().await.unwrap().stdout
    };
    assert_ne!(with_variables(&["ls"]).await, b"[]\n");
    assert_eq!(with_variables(&["ls", "--profile", "work"]).await, b"[]\n");

    assert_eq!(user.run(&["profile", "use", "work"]).await.stdout, "Using profile work\n");
    assert!(empty(&["ls"]).await && !empty(&["ls", "--profile", "default"]).await);
    let ran = user.run(&["profile", "list"]).await;
    let expected = json!([{"name": "default", "url": first.url, "current": false},
        {"name": "work", "url": second.url, "current": true}]);
    assert_eq!(serde_json::from_str::<Value>(&ran.stdout).unwrap(), expected, "{ran:?}");
    assert!(!ran.stdout.contains(KEY));
    for path in ["profiles/work", "credentials"] {
        let path = user.credentials_path().with_file_name(path);
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(path.parent().unwrap().metadata().unwrap().permissions().mode() & 0o777, 0o700);
    }
    assert_eq!(user.run(&["profile", "rm", "work"]).await.stdout, "Deleted profile work\n");
    assert!(!empty(&["ls"]).await);
    let ran = user.run(&["ls", "--profile", "work"]).await;
    assert!(ran.code == Some(1) && ran.stderr.contains("there is no profile work"), "{ran:?}");
}

/// What bash would offer at the end of `words`.
async fn offered(user: &User, words: &[&str]) -> Vec<String> {
    let mut command = user.command(&[&["--"], words].concat());
    let index = (words.len() - 1).to_string();
    command.env("COMPLETE", "bash").env("_CLAP_COMPLETE_INDEX", index).env("_CLAP_COMPLETE_COMP_TYPE", "9");
    command.env("_CLAP_IFS", "\n");
    let output = command.output().await.unwrap();
    assert!(output.stderr.is_empty(), "{output:?}");
    String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
}

#[tokio::test]
async fn shells_offer_the_sandboxes_that_a_command_is_for() {
    let server = Server::start().await;
    let user = User::of(&server.url);
    let id = |n: u32| SANDBOX.replace("000000000001", &format!("{n:012}"));
    let of = |n: u32, state: &str| {
        let mut item = listed(state);
        item["sandboxID"] = json!(id(n));
        item
    };
    server.answer("GET /v2/sandboxes?state=running&", 200, json!([of(1, "running")]));
    server.answer("GET /v2/sandboxes?state=paused", 200, json!([of(2, "paused")]));
    server.answer("GET /v2/sandboxes?state=running%2Cpaused", 200, json!([of(1, "running"), of(2, "paused")]));
    for command in
        [&["pause"][..], &["exec"], &["exec", "-i"], &["timeout"], &["upload"], &["download"], &["snapshot", "create"]]
    {
        let words = [&["aenv"], command, &["01"]].concat();
        assert_eq!(offered(&user, &words).await, [id(1)], "{words:?}");
    }
    assert_eq!(offered(&user, &["aenv", "resume", ""]).await.iter().filter(|word| word.starts_with("01")).count(), 1);
    assert!(offered(&user, &["aenv", "resume", ""]).await.contains(&id(2)));
    for command in ["connect", "delete", "rm"] {
        assert_eq!(offered(&user, &["aenv", command, "0"]).await, [id(1), id(2)], "{command}");
    }
    // Not for the command's own words, nor from somewhere else.
    assert!(!offered(&user, &["aenv", "exec", &id(1), "0"]).await.contains(&id(1)));
    assert!(offered(&user, &["aenv", "pause", "zz"]).await.is_empty());
    assert!(offered(&user, &["aenv", "tem"]).await.contains(&"template".to_owned()));
    let nobody = User::fresh();
    assert!(offered(&nobody, &["aenv", "pause", "0"]).await.is_empty());
    // A server that takes connections and says nothing is not waited for.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let started = std::time::Instant::now();
    let user = User::of(&format!("http://{}", silent.local_addr().unwrap()));
    assert!(offered(&user, &["aenv", "pause", "0"]).await.is_empty());
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
}

#[tokio::test]
async fn manual_pages_are_written_for_every_command() {
    let user = User::fresh();
    let dir = user.home().join("man");
    let ran = user.run(&["man", dir.to_str().unwrap()]).await;
    assert_eq!(ran.code, Some(0), "{ran:?}");
    for page in ["aenv.1", "aenv-exec.1", "aenv-template-inspect.1"] {
        let text = std::fs::read_to_string(dir.join(page)).unwrap();
        assert!(text.contains(".SH SYNOPSIS"), "{page}");
    }
}

#[tokio::test]
async fn single_objects_come_as_json_where_asked_for() {
    let server = Server::start().await;
    let user = User::of(&server.url);
    server.answer("POST /sandboxes", 201, sandbox());
    let ran = user.run(&["start", "-d", "base", "--output", "json"]).await;
    assert_eq!(serde_json::from_str::<Value>(&ran.stdout).unwrap()["sandboxID"], SANDBOX, "{ran:?}");
    let builds = json!([{"buildID": TEMPLATE, "status": "ready", "createdAt": "2026-01-31T12:00:00Z",
        "updatedAt": "2026-01-31T12:00:01Z", "cpuCount": 2, "memoryMB": 512}]);
    let template = json!({"templateID": TEMPLATE, "public": false, "aliases": ["x"], "names": ["x"],
        "createdAt": "2026-01-31T12:00:00Z", "updatedAt": "2026-01-31T12:00:01Z", "spawnCount": 3, "builds": builds});
    server.answer(&format!("GET /templates/{TEMPLATE}/builds"), 200, status("ready", &["one", "two"]));
    server.answer(&format!("GET /templates/{TEMPLATE}"), 200, template);
    let ran = user.run(&["template", "inspect", TEMPLATE]).await;
    assert_eq!(serde_json::from_str::<Value>(&ran.stdout).unwrap()["builds"][0]["status"], "ready", "{ran:?}");
    let ran = user.run(&["template", "inspect", TEMPLATE, "--output", "table"]).await;
    assert!(ran.stdout.contains("Names      x\n") && ran.stdout.contains("BUILD ID"), "{ran:?}");
    let ran = user.run(&["template", "logs", "-f", TEMPLATE]).await;
    assert_eq!(ran.stdout.lines().count(), 2, "{ran:?}");
    assert!(ran.stdout.starts_with("2026-01-31T12:00:00.000Z info  one\n"), "{ran:?}");
}
