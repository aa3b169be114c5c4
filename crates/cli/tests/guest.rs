//! `exec` and `connect` through the server's stand-in to a real guest agent, which here is an ordinary process: its
//! "sandbox" is this machine.

mod support;

use std::process::Stdio;

use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use support::agent::Agent;
use support::pty::Pty;
use support::server::{Server, sandbox};
use support::{PATIENCE, SANDBOX, User, eventually};
use tokio::io::{AsyncBufReadExt as _, BufReader};

struct World {
    user: User,
    server: Server,
    _agent: Agent,
}

/// `None` where there is no agent to be had.
async fn world() -> Option<World> {
    let agent = Agent::start().await?;
    let server = Server::before(Some(agent.address.clone())).await;
    Some(World { user: User::of(&server.url), server, _agent: agent })
}

impl World {
    /// A terminal in which somebody has connected to the sandbox and sees the shell answer.
    async fn connected(&self) -> Pty {
        let mut pty = Pty::run(self.user.command(&["connect", SANDBOX]), 80, 24);
        pty.is_raw().await;
        // What is looked for is nowhere in what is typed, which is shown too.
        pty.type_in("PS1='at-the''-prompt> '\r");
        pty.sees("at-the-prompt> ").await;
        pty
    }

    /// The pid of the shell in that terminal.
    async fn shell(&self, pty: &mut Pty) -> Pid {
        pty.clear();
        pty.type_in("echo pid''-$$''-end\r");
        pty.sees("-end\r").await;
        let shown = pty.shown();
        pid(shown.rsplit("pid-").next().unwrap().split("-end").next().unwrap())
    }
}

fn pid(text: &str) -> Pid {
    Pid::from_raw(text.trim().parse().unwrap()).unwrap()
}

async fn is_gone(pid: Pid) {
    eventually("the process has ended", || test_kill_process(pid).is_err()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn exec_gives_output_apart_and_the_exit_code() {
    let Some(world) = world().await else { return };
    let ran = world.user.run(&["exec", SANDBOX, "sh", "-c", "echo out; echo err >&2; exit 7"]).await;
    assert_eq!((ran.code, ran.stdout.as_str(), ran.stderr.as_str()), (Some(7), "out\n", "err\n"));
    let ran = world.user.run(&["exec", SANDBOX, "--", "echo", "-n", "a  b", "$HOME"]).await;
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(0), "a  b $HOME"), "no shell in between");
}

#[tokio::test(flavor = "multi_thread")]
async fn exec_tells_a_signal_as_a_shell_does() {
    let Some(world) = world().await else { return };
    for (signal, code) in [("KILL", 137), ("TERM", 143), ("SEGV", 139)] {
        let ran = world.user.run(&["exec", SANDBOX, "sh", "-c", &format!("kill -{signal} $$")]).await;
        assert_eq!(ran.code, Some(code), "{ran:?}");
    }
    let ran = world.user.run(&["exec", SANDBOX, "no-such-command"]).await;
    assert_eq!(ran.code, Some(127), "{ran:?}");
    assert!(ran.stderr.contains("no-such-command"), "{ran:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn exec_keeps_every_octet_of_a_large_output() {
    let Some(world) = world().await else { return };
    let script = "i=0; while [ $i -lt 4096 ]; do printf '\\000\\377\\n%0509d' $i; i=$((i+1)); done";
    let output = world.user.command(&["exec", SANDBOX, "sh", "-c", script]).output().await.unwrap();
    assert_eq!(output.stdout.len(), 2 << 20);
    for (n, chunk) in output.stdout.chunks(512).enumerate() {
        assert_eq!(&chunk[..3], b"\x00\xff\n");
        assert_eq!(std::str::from_utf8(&chunk[3..]).unwrap().parse::<usize>().unwrap(), n);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn exec_shows_output_while_the_command_runs() {
    let Some(world) = world().await else { return };
    let flag = world.user.home().join("go");
    let script = format!("echo first; while [ ! -e {} ]; do sleep 0.05; done; echo second", flag.display());
    let mut command = world.user.command(&["exec", SANDBOX, "sh", "-c", &script]);
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let first = tokio::time::timeout(PATIENCE, lines.next_line()).await.unwrap().unwrap();
    assert_eq!(first.as_deref(), Some("first"));
    std::fs::write(&flag, "").unwrap();
    assert_eq!(lines.next_line().await.unwrap().as_deref(), Some("second"));
    assert!(child.wait().await.unwrap().success());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interrupted_exec_ends_the_command_too() {
    let Some(world) = world().await else { return };
    let mut command = world.user.command(&["exec", SANDBOX, "sh", "-c", "echo $$; exec sleep 1000"]);
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let remote = pid(&lines.next_line().await.unwrap().unwrap());
    let ours = pid(&child.id().unwrap().to_string());
    kill_process(ours, Signal::INT).unwrap();
    let status = tokio::time::timeout(PATIENCE, child.wait()).await.unwrap().unwrap();
    assert_eq!(status.code(), Some(130));
    is_gone(remote).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn data_requests_carry_the_route_and_the_token_but_never_the_key() {
    let Some(world) = world().await else { return };
    assert_eq!(world.user.run(&["exec", SANDBOX, "true"]).await.code, Some(0));
    let seen = world.server.data_headers();
    assert!(!seen.is_empty());
    for headers in seen {
        assert_eq!(headers["x-agentenv-sandbox-id"], SANDBOX);
        assert_eq!(headers["x-agentenv-target-port"], "49983");
        assert_eq!(headers["x-access-token"], "guest-token");
        assert_eq!(headers["content-type"], "application/connect+proto");
        assert!(!headers.contains_key("x-api-key"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_that_does_not_answer_is_told_in_the_servers_words() {
    let server = Server::start().await;
    let ran = User::of(&server.url).run(&["exec", SANDBOX, "true"]).await;
    assert_eq!(ran.code, Some(1));
    assert!(ran.stderr.contains(SANDBOX) && ran.stderr.contains("The sandbox was not found"), "{ran:?}");
    server.set_sandbox("paused");
    let ran = User::of(&server.url).run(&["exec", SANDBOX, "true"]).await;
    assert_eq!(ran.code, Some(1));
    assert!(ran.stderr.contains(&format!("is paused, `aenv resume {SANDBOX}` lets it go on")), "{ran:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn output_that_breaks_off_is_an_error_not_an_end() {
    let Some(world) = world().await else { return };
    let script = "echo $$; exec sleep 1000";
    let mut command = world.user.command(&["exec", SANDBOX, "sh", "-c", script]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let remote = pid(&lines.next_line().await.unwrap().unwrap());
    world.server.cut();
    let output = tokio::time::timeout(PATIENCE, child.wait_with_output()).await.unwrap().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    kill_process(remote, Signal::KILL).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn exec_takes_variables_a_directory_and_a_user() {
    let Some(world) = world().await else { return };
    let dir = world.user.home().canonicalize().unwrap();
    let dir = dir.to_str().unwrap();
    let mut command = world.user.command(&["exec", "-e", "A=one two", "-e", "OURS", "-w", dir, "-u", "root", SANDBOX]);
    let script = "echo $A,$OURS,$PWD,$(id -un); cat | wc -c";
    let output = command.args(["sh", "-c", script]).env("OURS", "ours").output().await.unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), format!("one two,ours,{dir},root\n0\n"), "{output:?}");
    for (option, value, why) in [("-u", "nobody-here", "invalid username"), ("-w", "/no/such/place", "does not exist")]
    {
        let ran = world.user.run(&["exec", option, value, SANDBOX, "true"]).await;
        assert_eq!(ran.code, Some(1), "{ran:?}");
        assert!(ran.stderr.contains(why) && ran.stderr.contains(value), "{ran:?}");
    }
    let ran = world.user.run(&["exec", "-i", "box", "ls"]).await;
    assert_eq!(ran.code, Some(2), "{ran:?}");
}

/// Octets that differ from each other everywhere.
fn octets(length: usize) -> Vec<u8> {
    let mut state = 1u32;
    let next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state.to_be_bytes()[0]
    };
    std::iter::repeat_with(next).take(length).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn exec_hands_on_every_octet_of_its_input_and_its_end() {
    let Some(world) = world().await else { return };
    let sent = octets(50 << 20);
    let path = world.user.home().join("input");
    std::fs::write(&path, &sent).unwrap();
    let mut command = world.user.command(&["exec", "-i", SANDBOX, "cat"]);
    let output = command.stdin(std::fs::File::open(&path).unwrap()).output().await.unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.stdout == sent, "{} octets came back", output.stdout.len());
    let ran = world.user.run_with_input(&["exec", "-i", SANDBOX, "wc", "-c"], "").await;
    assert_eq!((ran.code, ran.stdout.trim()), (Some(0), "0"), "{ran:?}");
    let ran = world.user.run_with_input(&["exec", SANDBOX, "wc", "-c"], "unasked").await;
    assert_eq!((ran.code, ran.stdout.trim()), (Some(0), "0"), "{ran:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn input_that_a_command_does_not_take_is_held_back_and_dropped() {
    let Some(world) = world().await else { return };
    // More than all buffers on the way have room for.
    let input = world.user.home().join("input");
    std::fs::write(&input, octets(24 << 20)).unwrap();
    let with_input = |words: &[&str]| {
        let mut command = world.user.command(&[&["exec", "-i", SANDBOX], words].concat());
        command.stdin(std::fs::File::open(&input).unwrap());
        command
    };
    let output = with_input(&["sh", "-c", "head -c 3 | wc -c; exit 4"]).output().await.unwrap();
    assert_eq!((output.status.code(), output.stdout.trim_ascii()), (Some(4), &b"3"[..]), "{output:?}");
    // It goes on after it has closed its input.
    let output = with_input(&["sh", "-c", "exec 0<&-; sleep 0.5; echo on"]).output().await.unwrap();
    assert_eq!((output.status.code(), output.stdout.trim_ascii()), (Some(0), &b"on"[..]), "{output:?}");
    // Nobody reads the output any more, while there is still much to read and to send.
    let mut child = with_input(&["cat"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut stdout = child.stdout.take().unwrap();
    tokio::io::AsyncReadExt::read_exact(&mut stdout, &mut [0; 10]).await.unwrap();
    drop(stdout);
    let status = tokio::time::timeout(PATIENCE, child.wait()).await.unwrap().unwrap();
    assert_eq!(status.code(), Some(141));
    // While the command sleeps, reading stops: what we have read is bounded.
    let mut child = with_input(&["sleep", "1000"]).stdout(Stdio::piped()).spawn().unwrap();
    let fdinfo = format!("/proc/{}/fdinfo/0", child.id().unwrap());
    let position = || -> u64 {
        let info = std::fs::read_to_string(&fdinfo).unwrap();
        info.lines().next().unwrap().trim_start_matches("pos:").trim().parse().unwrap()
    };
    eventually("it has read something", || position() > 0).await;
    let mut before = u64::MAX;
    eventually("it reads no more", || std::mem::replace(&mut before, position()) == position()).await;
    assert!(position() < 20 << 20, "{} octets taken by a command that reads none", position());
    kill_process(pid(&child.id().unwrap().to_string()), Signal::TERM).unwrap();
    let status = tokio::time::timeout(PATIENCE, child.wait()).await.unwrap().unwrap();
    assert_eq!(status.code(), Some(143));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_that_takes_too_long_is_killed() {
    let Some(world) = world().await else { return };
    let mut command = world.user.command(&["exec", "--timeout", "1", SANDBOX, "sh", "-c", "echo $$; exec sleep 1000"]);
    let output = tokio::time::timeout(PATIENCE, command.output()).await.unwrap().unwrap();
    assert_eq!(output.status.code(), Some(124), "{output:?}");
    is_gone(pid(&String::from_utf8(output.stdout).unwrap())).await;
    assert_eq!(world.user.run(&["exec", "--timeout", "60", SANDBOX, "sh", "-c", "exit 3"]).await.code, Some(3));
}

#[tokio::test(flavor = "multi_thread")]
async fn exec_gives_a_command_a_terminal() {
    let Some(world) = world().await else { return };
    let script = "stty size; trap 'echo caught; exit 9' INT; echo re''ady; while :; do sleep 0.05; done";
    let mut pty = Pty::run(world.user.command(&["exec", "-t", SANDBOX, "sh", "-c", script]), 90, 30);
    let before = pty.mode();
    pty.sees("30 90").await;
    pty.sees("ready").await;
    pty.is_raw().await;
    pty.type_in("\x03");
    assert_eq!(pty.exit_code().await, Some(9));
    assert!(pty.shown().contains("caught") && !pty.shown().contains("aenv connect"), "{:?}", pty.shown());
    assert_eq!(pty.mode(), before, "the terminal is as it was");
    // Without one here, the command has one all the same, and input ends as a terminal's does.
    let ran = world.user.run_with_input(&["exec", "-it", SANDBOX, "sh", "-c", "tty >&2; cat; exit 5"], "typed\n").await;
    assert_eq!(ran.code, Some(5), "{ran:?}");
    assert!(ran.stdout.contains("/dev/pts/") && ran.stdout.contains("typed\r\n"), "{ran:?}");
    let ran = world.user.run(&["exec", "-t", "--timeout", "1", SANDBOX, "sleep", "1000"]).await;
    assert_eq!(ran.code, Some(124), "{ran:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn connect_is_a_real_terminal() {
    let Some(world) = world().await else { return };
    let mut pty = Pty::run(world.user.command(&["connect", SANDBOX]), 80, 24);
    let before = pty.mode();
    pty.is_raw().await;
    pty.type_in("stty size; echo term-$TERM\r");
    pty.sees("24 80").await;
    pty.sees("term-xterm").await;
    pty.resize(100, 40);
    // The new size is sent once it is noticed; ask until it has arrived.
    for _ in 0..40 {
        pty.type_in("stty size\r");
        tokio::time::sleep(std::time::Duration::from_millis(250)).await;
        if pty.shown().contains("40 100") {
            break;
        }
    }
    pty.sees("40 100").await;
    // Ctrl-C is the remote program's, not ours.
    pty.type_in("echo asleep''-now; sleep 1000\r");
    pty.sees("asleep-now").await;
    pty.type_in("\x03");
    pty.sees("^C").await;
    pty.clear();
    pty.type_in("exit 3\r");
    assert_eq!(pty.exit_code().await, Some(3));
    pty.sees(&format!("aenv connect {SANDBOX}")).await;
    assert_eq!(pty.mode(), before, "the terminal is as it was");
}

#[tokio::test(flavor = "multi_thread")]
async fn start_attaches_to_what_it_made() {
    let Some(world) = world().await else { return };
    world.server.answer("POST /sandboxes", 201, sandbox());
    let mut pty = Pty::run(world.user.command(&["start", "base"]), 80, 24);
    pty.sees(&format!("Started sandbox {SANDBOX}")).await;
    pty.is_raw().await;
    pty.type_in("exit 4\r");
    assert_eq!(pty.exit_code().await, Some(4));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_finds_its_shell_again_after_the_connection_was_cut() {
    let Some(world) = world().await else { return };
    let mut pty = world.connected().await;
    pty.type_in("mark=41\r");
    pty.sees("mark=41").await;
    world.server.cut();
    for _ in 0..40 {
        pty.type_in("echo answer-$((mark+1))\r");
        tokio::time::sleep(std::time::Duration::from_millis(500)).await;
        if pty.shown().contains("answer-42") {
            break;
        }
    }
    pty.sees("answer-42").await;
    pty.type_in("exit\r");
    assert_eq!(pty.exit_code().await, Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_end_of_the_sandbox_ends_the_session() {
    let Some(world) = world().await else { return };
    let endings = [("paused", "was paused"), ("deleted", "was deleted"), ("unreachable", "was lost")];
    for (state, notice) in endings {
        world.server.set_sandbox("running");
        let mut pty = world.connected().await;
        let shell = world.shell(&mut pty).await;
        world.server.set_sandbox(state);
        world.server.cut();
        assert_eq!(pty.exit_code().await, Some(130), "{state}");
        pty.sees(notice).await;
        kill_process(shell, Signal::KILL).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_signal_restores_the_terminal_and_ends_the_shell() {
    let Some(world) = world().await else { return };
    let mut pty = world.connected().await;
    let shell = world.shell(&mut pty).await;
    kill_process(pty.pid(), Signal::TERM).unwrap();
    assert_eq!(pty.exit_code().await, Some(143));
    is_gone(shell).await;
    assert!(pty.mode().contains("ICANON"), "{}", pty.mode());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_script_on_standard_input_runs_to_its_end() {
    let Some(world) = world().await else { return };
    let ran = world.user.run_with_input(&["connect", SANDBOX], "echo sum-$((40+2))\nexit 5").await;
    assert_eq!(ran.code, Some(5), "{ran:?}");
    assert!(ran.stdout.contains("sum-42"), "{ran:?}");
    let ran = world.user.run_with_input(&["connect", SANDBOX], "true\n").await;
    assert_eq!(ran.code, Some(0), "{ran:?}");
}
