//! Processes: how they start, what is heard of them, how they end.

use std::time::{Duration, Instant};

use aenv_guest_proto::wire::process as wire;
use connectrpc::ErrorCode;
use connectrpc::client::CallOptions;
use wire::__buffa::oneof::process_input::Input;

use crate::harness::{Agent, PATIENCE, Story, by_pid, shell};

async fn run_with(agent: &Agent, request: wire::StartRequest, options: CallOptions) -> Story {
    let mut story = Story::default();
    let work = async {
        let mut stream = match agent.processes().start_with_options(request, options).await {
            Ok(stream) => stream,
            Err(error) => return story.error = Some(error),
        };
        loop {
            match stream.message().await {
                Ok(Some(message)) => story.add(message.to_owned_message().event.into_option()),
                Ok(None) => return,
                Err(error) => return story.error = Some(error),
            }
        }
    };
    tokio::time::timeout(PATIENCE, work).await.expect("the stream to end");
    story
}

async fn run(agent: &Agent, request: wire::StartRequest) -> Story {
    run_with(agent, request, CallOptions::default()).await
}

/// Starts a process and leaves: returns its pid.
pub(crate) async fn start_detached(agent: &Agent, request: wire::StartRequest) -> u32 {
    let mut stream = agent.processes().start(request).await.unwrap();
    let mut story = Story::default();
    story.add(stream.message().await.unwrap().unwrap().to_owned_message().event.into_option());
    story.pid
}

pub(crate) async fn wait_for(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition().await {
        assert!(Instant::now() < deadline, "{what} did not come true");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

fn alive(pid: u32) -> bool {
    std::path::Path::new(&format!("/proc/{pid}")).exists()
}

#[tokio::test]
async fn statuses_and_streams_are_exact() {
    let agent = Agent::start();
    let story = run(&agent, shell("echo out; echo err >&2; exit 7")).await;
    assert_eq!((story.stdout.as_slice(), story.stderr.as_slice()), (&b"out\n"[..], &b"err\n"[..]));
    let end = story.end.unwrap();
    assert_eq!((end.exit_code, end.exited, end.status.as_str()), (7, true, "exit status 7"));
    assert_eq!(end.error.as_deref(), Some("exit status 7"));

    let end = run(&agent, shell("kill -TERM $$")).await.end.unwrap();
    assert_eq!((end.exit_code, end.exited, end.status.as_str()), (-1, false, "signal: terminated"));
}

#[tokio::test]
async fn binary_output_is_octet_exact_in_bounded_events() {
    let agent = Agent::start();
    let story = run(&agent, shell("head -c 3000000 /dev/urandom | tee /dev/stderr")).await;
    assert_eq!(story.stdout.len(), 3_000_000);
    assert!(story.stdout == story.stderr, "both streams must carry the same bytes");
    assert!(story.largest <= 32 * 1024, "{} bytes in one event", story.largest);
}

#[tokio::test]
async fn an_unknown_command_starts_says_so_and_exits_127() {
    let agent = Agent::start();
    let mut request = shell("");
    request.process.get_or_insert_default().cmd = "no-such-command".into();
    let story = run(&agent, request).await;
    assert!(story.pid > 0);
    assert_eq!(story.exit_code(), 127);
    assert_eq!(story.stderr, b"exec: no-such-command: not found\n");

    let mut request = shell("");
    request.process.get_or_insert_default().cmd = "/etc/passwd".into();
    assert_eq!(run(&agent, request).await.exit_code(), 126, "not executable");

    // No argument may be longer than 32 pages.
    let story = run(&agent, shell(&format!(": {}", "x".repeat(140_000)))).await;
    assert_eq!(story.exit_code(), 126);
    assert!(story.stderr.ends_with(b": argument list too long\n"), "{:?}", String::from_utf8_lossy(&story.stderr));
}

#[tokio::test]
async fn a_script_without_an_interpreter_line_runs_under_sh() {
    let agent = Agent::start();
    let script = agent.path("script");
    std::fs::write(&script, "echo \"$1\"\n").unwrap();
    std::fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let mut request = shell("");
    let process = request.process.get_or_insert_default();
    (process.cmd, process.args) = (script, vec!["word".into()]);
    assert_eq!(run(&agent, request).await.stdout, b"word\n");
}

#[tokio::test]
async fn only_the_promised_environment_is_inherited() {
    let agent = Agent::start();
    let mut request = shell("env | cut -d= -f1 | sort | tr '\\n' ' '; cat /proc/self/oom_score_adj");
    request.process.get_or_insert_default().envs.insert("MINE".into(), "1".into());
    let story = run(&agent, request).await;
    let text = String::from_utf8(story.stdout).unwrap();
    // The shell adds PWD itself.
    assert_eq!(text, "E2B_SANDBOX HOME LOGNAME MINE PATH PWD USER 100\n");
}

#[tokio::test]
async fn a_background_child_that_holds_the_output_delays_the_end() {
    let agent = Agent::start();
    let story = run(&agent, shell("(sleep 0.5; echo child) & echo parent")).await;
    assert_eq!(story.stdout, b"parent\nchild\n");
    assert_eq!(story.exit_code(), 0);
}

#[tokio::test]
async fn with_a_grace_the_end_does_not_wait_for_children() {
    let agent = Agent::start();
    let options = CallOptions::default().with_header("output-grace-ms", "100");
    let story = run_with(&agent, shell("sleep 300 & echo $!; exit 3"), options).await;
    assert_eq!(story.exit_code(), 3);
    let child: u32 = String::from_utf8(story.stdout).unwrap().trim().parse().unwrap();
    assert!(alive(child));
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(child as i32), nix::sys::signal::Signal::SIGKILL).unwrap();

    let options = CallOptions::default().with_header("output-grace-ms", "soon");
    let refused = run_with(&agent, shell("true"), options).await.error.unwrap();
    assert_eq!(refused.code, ErrorCode::InvalidArgument);
}

#[tokio::test]
async fn at_its_deadline_a_process_dies_with_its_whole_group() {
    let agent = Agent::start();
    let pids = agent.path("pids");
    let script = format!("sleep 300 & echo $! > {pids}; echo $$ >> {pids}; echo partial; wait");
    let options = CallOptions::default().with_timeout(Duration::from_millis(700));
    let started = Instant::now();
    let story = run_with(&agent, shell(&script), options).await;
    assert!(started.elapsed() < Duration::from_secs(5));
    assert_eq!(story.error.expect("an error").code, ErrorCode::DeadlineExceeded);
    assert_eq!(story.stdout, b"partial\n");
    for pid in std::fs::read_to_string(&pids).unwrap().lines() {
        let pid = pid.parse().unwrap();
        // The orphan is reaped by whoever is its new parent.
        wait_for("death of the group", async || !alive(pid) || is_zombie(pid)).await;
    }
}

#[tokio::test]
async fn a_deadline_holds_even_when_the_caller_has_gone() {
    let agent = Agent::start();
    let options = CallOptions::default().with_timeout(Duration::from_millis(500));
    let mut stream = agent.processes().start_with_options(shell("sleep 300"), options).await.unwrap();
    let mut story = Story::default();
    story.add(stream.message().await.unwrap().unwrap().to_owned_message().event.into_option());
    drop(stream);
    wait_for("death of the process", async || !alive(story.pid)).await;
}

fn is_zombie(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| stat.contains(") Z "))
}

#[tokio::test]
async fn a_killed_process_is_reaped_when_the_call_returns() {
    let agent = Agent::start();
    let pid = start_detached(&agent, shell("sleep 300")).await;
    let kill = |pid| wire::SendSignalRequest {
        process: by_pid(pid).into(),
        signal: wire::Signal::SIGNAL_SIGKILL.into(),
        ..Default::default()
    };
    agent.processes().send_signal(kill(pid)).await.unwrap();
    assert!(!alive(pid), "not even a zombie may be left");
    assert_eq!(agent.processes().send_signal(kill(pid)).await.unwrap_err().code, ErrorCode::NotFound);

    // Its end is told to who asks within half a minute.
    let request = wire::ConnectRequest { process: by_pid(pid).into(), ..Default::default() };
    let mut story = Story::default();
    let mut stream = agent.processes().connect(request).await.unwrap();
    while let Some(message) = stream.message().await.unwrap() {
        story.add(message.to_owned_message().event.into_option());
    }
    let end = story.end.unwrap();
    assert_eq!((story.pid, end.exit_code, end.status.as_str()), (pid, -1, "signal: killed"));
}

#[tokio::test]
async fn killing_does_not_wait_for_children_that_hold_the_output() {
    let agent = Agent::start();
    let mut stream = agent.processes().start(shell("sleep 300 & echo $!; wait")).await.unwrap();
    let mut story = Story::default();
    while story.stdout.is_empty() {
        story.add(stream.message().await.unwrap().unwrap().to_owned_message().event.into_option());
    }
    let signal = wire::SendSignalRequest {
        process: by_pid(story.pid).into(),
        signal: wire::Signal::SIGNAL_SIGTERM.into(),
        ..Default::default()
    };
    agent.processes().send_signal(signal).await.unwrap();
    let rest = async {
        while let Some(message) = stream.message().await.unwrap() {
            story.add(message.to_owned_message().event.into_option());
        }
    };
    tokio::time::timeout(PATIENCE, rest).await.expect("the stream to end");
    assert_eq!(story.end.unwrap().status, "signal: terminated");
    let child = String::from_utf8(story.stdout).unwrap().trim().parse().unwrap();
    assert!(alive(child), "the signal is for the process, not its group");
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(child as i32), nix::sys::signal::Signal::SIGKILL).unwrap();
}

#[tokio::test]
async fn a_process_outlives_its_caller_and_can_be_followed_again() {
    let agent = Agent::start();
    let go = agent.path("go");
    let script = format!("while [ ! -e {go} ]; do sleep 0.05; done; head -c 200000 /dev/zero; echo late");
    let pid = start_detached(&agent, shell(&script)).await;
    let listed = agent.processes().list(wire::ListRequest::default()).await.unwrap();
    assert_eq!(listed.view().processes.iter().map(|process| process.pid).collect::<Vec<_>>(), [pid]);

    let request = wire::ConnectRequest { process: by_pid(pid).into(), ..Default::default() };
    let mut stream = agent.processes().connect(request).await.unwrap();
    let mut story = Story::default();
    story.add(stream.message().await.unwrap().unwrap().to_owned_message().event.into_option());
    std::fs::write(&go, "").unwrap();
    while let Some(message) = stream.message().await.unwrap() {
        story.add(message.to_owned_message().event.into_option());
    }
    assert_eq!((story.pid, story.exit_code()), (pid, 0));
    assert!(story.stdout.ends_with(b"late\n") && story.stdout.len() == 200_005);
}

#[tokio::test]
async fn who_follows_later_gets_the_newest_output_first() {
    let agent = Agent::start();
    let (go, here) = (agent.path("go"), agent.path("here"));
    let script = format!(
        "head -c 100000 /dev/zero; echo early; echo loud >&2; touch {here}; while [ ! -e {go} ]; do sleep 0.05; done; echo late"
    );
    let pid = start_detached(&agent, shell(&script)).await;
    wait_for("the output", async || std::path::Path::new(&here).exists()).await;
    let follow = async |options: CallOptions| {
        let request = wire::ConnectRequest { process: by_pid(pid).into(), ..Default::default() };
        let mut stream = agent.processes().connect_with_options(request, options).await.unwrap();
        let mut story = Story::default();
        story.add(stream.message().await.unwrap().unwrap().to_owned_message().event.into_option());
        (stream, story)
    };
    let newest_only = CallOptions::default().with_header("output-replay-bytes", "0");
    let mut followers = [follow(CallOptions::default()).await, follow(newest_only).await];
    std::fs::write(&go, "").unwrap();
    for (stream, story) in &mut followers {
        while let Some(message) = stream.message().await.unwrap() {
            story.add(message.to_owned_message().event.into_option());
        }
        assert_eq!(story.exit_code(), 0);
    }
    let [(_, whole), (_, rest)] = followers;
    assert!(whole.stdout.ends_with(b"early\nlate\n"));
    // The order of two pipes is not known: what is kept is bounded over both.
    assert!(whole.stdout.len() > 60_000 && whole.stdout.len() <= 65_541, "{} bytes", whole.stdout.len());
    assert_eq!((rest.stdout.as_slice(), rest.stderr.as_slice()), (&b"late\n"[..], &b""[..]));

    // It has ended, a moment ago: what it said is still there.
    let (mut stream, mut story) = follow(CallOptions::default()).await;
    while let Some(message) = stream.message().await.unwrap() {
        story.add(message.to_owned_message().event.into_option());
    }
    assert!(story.stdout.ends_with(b"early\nlate\n") && story.exit_code() == 0);
}

#[tokio::test]
async fn a_slow_reader_holds_the_process_back_instead_of_filling_memory() {
    let agent = Agent::start();
    let written = agent.path("written");
    // Writes 64 MiB and notes how far it came.
    let script =
        format!("i=0; while [ $i -lt 64 ]; do head -c 1048576 /dev/zero; i=$((i+1)); echo $i > {written}; done");
    let mut stream = agent.processes().start(shell(&script)).await.unwrap();
    let progress = || std::fs::read_to_string(&written).ok().and_then(|text| text.trim().parse::<u32>().ok());
    // Nobody reads: it must come to a standstill long before the end.
    wait_for("the first megabyte", async || progress() >= Some(1)).await;
    let mut last = None;
    wait_for("a standstill", async || {
        tokio::time::sleep(Duration::from_millis(500)).await;
        std::mem::replace(&mut last, progress()) == progress()
    })
    .await;
    assert!(progress() < Some(40), "went on to {:?} MiB", progress());
    assert!(resident_kib(agent.pid()) < 64 * 1024, "{} KiB resident", resident_kib(agent.pid()));
    let mut story = Story::default();
    let rest = async {
        while let Some(message) = stream.message().await.unwrap() {
            story.add(message.to_owned_message().event.into_option());
        }
    };
    tokio::time::timeout(PATIENCE * 3, rest).await.expect("the stream to end");
    assert_eq!((story.stdout.len(), story.exit_code()), (64 << 20, 0));
}

pub(crate) fn resident_kib(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

#[tokio::test]
async fn without_followers_output_is_drained_and_the_process_finishes() {
    let agent = Agent::start();
    let done = agent.path("done");
    start_detached(&agent, shell(&format!("head -c 5000000 /dev/zero; echo done > {done}"))).await;
    wait_for("the end of the process", async || std::fs::exists(&done).unwrap()).await;
}

#[tokio::test]
async fn standard_input_is_ordered_closed_and_absent_when_not_asked_for() {
    let agent = Agent::start();
    let mut request = shell("cat");
    request.stdin = None;
    let mut stream = agent.processes().start(request).await.unwrap();
    let mut story = Story::default();
    story.add(stream.message().await.unwrap().unwrap().to_owned_message().event.into_option());
    let send = |input| wire::SendInputRequest {
        process: by_pid(story.pid).into(),
        input: wire::ProcessInput { input: Some(input), ..Default::default() }.into(),
        ..Default::default()
    };
    for text in ["one ", "", "two"] {
        agent.processes().send_input(send(Input::Stdin(text.into()))).await.unwrap();
    }
    let error = agent.processes().send_input(send(Input::Pty(b"x".to_vec()))).await.unwrap_err();
    assert!(error.code == ErrorCode::Internal && error.to_string().contains("tty not assigned to process"), "{error}");
    let close = wire::CloseStdinRequest { process: by_pid(story.pid).into(), ..Default::default() };
    agent.processes().close_stdin(close.clone()).await.unwrap();
    let pid = story.pid;
    while let Some(message) = stream.message().await.unwrap() {
        story.add(message.to_owned_message().event.into_option());
    }
    assert_eq!((story.stdout.as_slice(), story.exit_code()), (&b"one two"[..], 0));
    assert_eq!(agent.processes().close_stdin(close).await.unwrap_err().code, ErrorCode::NotFound, "{pid} has ended");

    let pid = start_detached(&agent, shell("cat; sleep 300")).await;
    let input = wire::SendInputRequest {
        process: by_pid(pid).into(),
        input: wire::ProcessInput { input: Some(Input::Stdin(b"x".to_vec())), ..Default::default() }.into(),
        ..Default::default()
    };
    let error = agent.processes().send_input(input).await.unwrap_err();
    assert!(error.to_string().contains("stdin not enabled or closed"), "{error}");
}

#[tokio::test]
async fn a_terminal_is_controlling_sized_and_resized() {
    let agent = Agent::start();
    let size = |cols, rows| wire::PTY {
        size: wire::pty::Size { cols, rows, ..Default::default() }.into(),
        ..Default::default()
    };
    let mut request = shell("stty size; read line; stty size; echo got $line; echo x > /dev/tty");
    (request.pty, request.stdin) = (size(81, 25).into(), None);
    let mut stream = agent.processes().start(request).await.unwrap();
    let mut story = Story::default();
    while !String::from_utf8_lossy(&story.pty).contains("25 81") {
        story.add(stream.message().await.unwrap().expect("output").to_owned_message().event.into_option());
    }
    let selector = by_pid(story.pid);
    let resize =
        wire::UpdateRequest { process: selector.clone().into(), pty: size(120, 40).into(), ..Default::default() };
    agent.processes().update(resize).await.unwrap();
    // Before anything is typed: the shell ends once it has read a line.
    let close = wire::CloseStdinRequest { process: selector.clone().into(), ..Default::default() };
    assert_eq!(agent.processes().close_stdin(close).await.unwrap_err().code, ErrorCode::Unknown);
    let typed = wire::SendInputRequest {
        process: selector.into(),
        input: wire::ProcessInput { input: Some(Input::Pty(b"hello\n".to_vec())), ..Default::default() }.into(),
        ..Default::default()
    };
    agent.processes().send_input(typed).await.unwrap();
    while let Some(message) = stream.message().await.unwrap() {
        story.add(message.to_owned_message().event.into_option());
    }
    let text = String::from_utf8_lossy(&story.pty).into_owned();
    assert!(text.contains("40 120") && text.contains("got hello") && text.ends_with("x\r\n"), "{text:?}");
    assert_eq!(story.exit_code(), 0);
    assert!(story.stdout.is_empty() && story.stderr.is_empty());
}
