//! The command line against a real sandbox: streams, terminals, files, ports and builds. What it does by itself is in
//! its own tests. One node and one sandbox for all, as each of them takes its time.

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use aenv_e2e::{Node, eventually};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};

/// A node with a sandbox, and a folder of our own.
struct World {
    node: Node,
    id: String,
    dir: std::path::PathBuf,
}

impl World {
    /// `aenv` for this node, in our folder.
    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(&self.node.machine().cli);
        command.args(words).env("AENV_SERVER", self.node.url()).env("AENV_API_KEY", self.node.key());
        command.env("HOME", &self.dir).env("TERM", "xterm").current_dir(&self.dir).stdin(Stdio::null());
        command
    }

    /// What `aenv` printed, if it went well.
    fn ok(&self, words: &[&str]) -> String {
        let output = self.command(words).output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        assert!(output.status.success(), "{words:?}: {}{}", text(&output.stdout), text(&output.stderr));
        text(&output.stdout)
    }
}

/// A program that is ended when this is dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A terminal in which a program runs, and what it has shown.
struct Terminal {
    master: fs::File,
    shown: Arc<Mutex<Vec<u8>>>,
    child: Running,
}

impl Terminal {
    fn run(mut command: Command, columns: u16, rows: u16) -> Self {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap().into_string().unwrap();
        let slave = fs::OpenOptions::new().read(true).write(true).open(name).unwrap();
        tcsetwinsize(&master, Winsize { ws_col: columns, ws_row: rows, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
        let stdio = || Stdio::from(OwnedFd::from(slave.try_clone().unwrap()));
        let child = Running(command.stdin(stdio()).stdout(stdio()).stderr(stdio()).spawn().unwrap());
        let shown = Arc::new(Mutex::new(Vec::new()));
        let (mut screen, seen) = (fs::File::from(master.try_clone().unwrap()), Arc::clone(&shown));
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(n @ 1..) = screen.read(&mut buffer) {
                seen.lock().unwrap().extend_from_slice(&buffer[..n]);
            }
        });
        Self { master: fs::File::from(master), shown, child }
    }

    fn type_in(&mut self, text: &str) {
        self.master.write_all(text.as_bytes()).unwrap();
    }

    fn resize(&self, columns: u16, rows: u16) {
        tcsetwinsize(&self.master, Winsize { ws_col: columns, ws_row: rows, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
    }

    fn shows(&self, text: &str) -> bool {
        String::from_utf8_lossy(&self.shown.lock().unwrap()).contains(text)
    }

    async fn sees(&self, text: &str) {
        eventually(&format!("{text:?} is shown"), async || self.shows(text).then_some(())).await;
    }

    async fn exit_code(&mut self) -> Option<i32> {
        eventually("aenv ends", async || self.child.0.try_wait().unwrap()).await.code()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_command_line_does_what_it_says() {
    let Some(node) = Node::start().await else { return };
    node.debian("base").await;
    let id = node.sandbox("base").await.sandbox_id.to_string();
    let dir = node.scratch().join("work");
    fs::create_dir(&dir).unwrap();
    let world = World { node, id, dir };
    world.ok(&["timeout", &world.id, "1200"]);
    input_arrives_whole(&world);
    commands_have_variables_a_directory_and_a_user(&world);
    a_terminal_has_a_size_and_keys(&world).await;
    trees_go_in_and_come_out(&world);
    shells_are_offered_the_sandbox(&world);
    a_port_of_the_sandbox_is_here(&world).await;
    a_dockerfile_becomes_a_template(&world);
    what_happens_is_told_while_it_does(&world).await;
    world.node.finish().await;
}

fn input_arrives_whole(world: &World) {
    let sent: Vec<u8> = (0..50u32 << 20).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    fs::write(world.dir.join("input"), &sent).unwrap();
    let input = || fs::File::open(world.dir.join("input")).unwrap();
    let output = world.command(&["exec", "-i", &world.id, "cat"]).stdin(input()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.stdout == sent, "{} octets came back", output.stdout.len());
    let early = ["exec", "-i", &world.id, "sh", "-c", "head -c 5 | wc -c; exit 6"];
    let output = world.command(&early).stdin(input()).output().unwrap();
    assert_eq!((output.status.code(), output.stdout.trim_ascii()), (Some(6), &b"5"[..]));
    assert_eq!(world.command(&["exec", &world.id, "sh", "-c", "kill -9 $$"]).status().unwrap().code(), Some(137));
    assert_eq!(
        world.command(&["exec", "--timeout", "1", &world.id, "sleep", "600"]).status().unwrap().code(),
        Some(124)
    );
}

fn commands_have_variables_a_directory_and_a_user(world: &World) {
    let script = "echo $A $PWD $(id -un)";
    let told = world.ok(&["exec", "-e", "A=b c", "-w", "/usr", "-u", "root", &world.id, "sh", "-c", script]);
    assert_eq!(told, "b c /usr root\n");
}

async fn a_terminal_has_a_size_and_keys(world: &World) {
    let script = "stty size; trap 'stty size; echo caught; exit 9' INT; echo re''ady; while :; do sleep 0.1; done";
    let mut terminal = Terminal::run(world.command(&["exec", "-it", &world.id, "sh", "-c", script]), 90, 30);
    terminal.sees("30 90").await;
    terminal.sees("ready").await;
    terminal.resize(100, 40);
    // The new size arrives after a moment of its own.
    let size = || {
        let pts = "for t in /dev/pts/[0-9]*; do stty -F $t size; done";
        world.ok(&["exec", "-u", "root", &world.id, "sh", "-c", pts]).contains("40 100")
    };
    eventually("the size has arrived", async || size().then_some(())).await;
    terminal.type_in("\x03");
    assert_eq!(terminal.exit_code().await, Some(9));
    assert!(terminal.shows("40 100") && terminal.shows("caught"));
}

fn trees_go_in_and_come_out(world: &World) {
    let tree = world.dir.join("tree");
    fs::create_dir_all(tree.join("a/.hidden")).unwrap();
    fs::create_dir_all(tree.join("empty")).unwrap();
    fs::write(tree.join("a/.hidden/x y"), "hidden").unwrap();
    fs::write(tree.join("big"), vec![7; 3 << 20]).unwrap();
    fs::write(tree.join("nothing"), "").unwrap();
    world.ok(&["upload", &world.id, "tree", "/home/user/tree"]);
    let there = world.ok(&["exec", &world.id, "sh", "-c", "cd tree && find . | sort && stat -c %U big"]);
    assert_eq!(there, ".\n./a\n./a/.hidden\n./a/.hidden/x y\n./big\n./empty\n./nothing\nuser\n");
    world.ok(&["download", &world.id, "/home/user/tree", "back"]);
    let same = Command::new("diff").args(["-r", "tree", "back"]).current_dir(&world.dir).output().unwrap();
    assert!(same.status.success(), "{}", String::from_utf8_lossy(&same.stdout));
    let refused = world.command(&["download", &world.id, "tree/big", "back"]).output().unwrap();
    assert_eq!(refused.status.code(), Some(1));
    world.ok(&["download", "--force", "--resume", &world.id, "tree/big", "back"]);
    world.ok(&["upload", "--user", "root", &world.id, "tree/big", "of-root"]);
    assert_eq!(world.ok(&["exec", "-u", "root", &world.id, "stat", "-c", "%U", "/root/of-root"]), "root\n");
}

fn shells_are_offered_the_sandbox(world: &World) {
    for shell in ["bash", "fish"] {
        let mut command = world.command(&["--", "aenv", "exec", &world.id[..4]]);
        let output = command.env("COMPLETE", shell).env("_CLAP_COMPLETE_INDEX", "2").output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(text.contains(&world.id), "{shell}: {output:?}");
    }
    // And profiles: a server by its name, whatever the variables say.
    let mut auth = world.command(&["auth", "--profile", "node"]).stdin(Stdio::piped()).spawn().unwrap();
    writeln!(auth.stdin.take().unwrap(), "{}\n{}", world.node.url(), world.node.key()).unwrap();
    assert!(auth.wait().unwrap().success());
    let mut listed = world.command(&["--profile", "node", "ls"]);
    let listed = listed.env("AENV_SERVER", "http://127.0.0.1:1").output().unwrap();
    assert!(String::from_utf8_lossy(&listed.stdout).contains(&world.id));
}

async fn a_port_of_the_sandbox_is_here(world: &World) {
    let serve = "cd tree && exec python3 -m http.server 8123";
    let _server = Running(world.command(&["exec", &world.id, "sh", "-c", serve]).spawn().unwrap());
    let mut forward = world.command(&["port-forward", &world.id, ":8123"]);
    let mut forward = Running(forward.stdout(Stdio::piped()).spawn().unwrap());
    let mut line = String::new();
    BufReader::new(forward.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let address = line.strip_prefix("Forwarding http://").and_then(|rest| rest.split(' ').next()).unwrap().to_owned();
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    let url = format!("http://{address}");
    eventually("the service is up", async || {
        let answer = http.get(format!("{url}/nothing")).send().await.ok()?;
        answer.status().is_success().then_some(())
    })
    .await;
    let big = http.get(format!("{url}/big")).send().await.unwrap().bytes().await.unwrap();
    assert_eq!(big.len(), 3 << 20);
    assert_eq!(http.get(format!("{url}/none")).send().await.unwrap().status(), 404);
    // Two requests on one connection.
    let mut stream = TcpStream::connect(&address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    for last in [false, true] {
        let close = if last { "connection: close\r\n" } else { "" };
        write!(stream, "GET /a/.hidden/x%20y HTTP/1.1\r\nhost: x\r\n{close}\r\n").unwrap();
        let mut answer = Vec::new();
        while !answer.ends_with(b"hidden") {
            let mut octet = [0];
            stream.read_exact(&mut octet).unwrap();
            answer.push(octet[0]);
        }
        assert!(answer.starts_with(b"HTTP/1.1 200 OK\r\n"));
    }
    kill(Pid::from_raw(forward.0.id() as i32), Signal::SIGINT).unwrap();
    assert_eq!(forward.0.wait().unwrap().code(), Some(130));
}

fn a_dockerfile_becomes_a_template(world: &World) {
    let context = world.dir.join("context");
    fs::create_dir_all(context.join("app/lib")).unwrap();
    let write = |path: &str, text: &str| fs::write(context.join(path), text).unwrap();
    write("app/main.sh", "#!/bin/sh\necho main\n");
    write("app/lib/part.txt", "part");
    write("app/left.log", "left out");
    write("one.txt", "one");
    write("two.txt", "two");
    write(".dockerignore", "**/*.log\n");
    let dockerfile = "ARG IMAGE\nFROM $IMAGE\nARG WHO=world\nENV GREETING=\"hello $WHO\"\nWORKDIR /srv/app\n\
        COPY app .\nCOPY --chmod=600 *.txt texts/\nRUN echo $GREETING > said && \\\n    # a comment\n    id -un >> said\n\
        RUN cat <<EOF >> said\nfrom a document of $WHO\nEOF\nUSER user\nEXPOSE 80\n\
        CMD [\"sh\", \"-c\", \"echo up > /tmp/up; exec sleep 1000000\"]\nHEALTHCHECK CMD test -e /tmp/up\n";
    write("Dockerfile", dockerfile);
    let image = format!("IMAGE=oci:{}", world.node.machine().image.display());
    let words = ["build", "context", "--name", "built", "--build-arg", &image, "--cpu", "1", "--memory", "256"];
    let output = world.command(&words).output().unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{stdout}{stderr}");
    assert!(stderr.contains("warning: line 15: EXPOSE") && stderr.contains("RUN echo $GREETING"), "{stderr}");
    assert!(stdout.contains("Build succeeded"), "{stdout}");
    let built = world.node.aenv_ok(&["start", "-d", "built"]);
    let script = "cat said /tmp/up; find . -type f | sort; stat -c '%U %a' texts/one.txt; id -un; pwd";
    let told = world.ok(&["exec", built.trim(), "sh", "-c", script]);
    let expected = "hello world\nroot\nfrom a document of world\nup\n./lib/part.txt\n./main.sh\n./said\n./texts/one.txt\n\
        ./texts/two.txt\nroot 600\nuser\n/srv/app\n";
    assert_eq!(told, expected);
    world.ok(&["delete", built.trim()]);
    // What was done is not done again; what fails is named by its line.
    write("Dockerfile", &dockerfile.replace("USER user\n", "RUN echo why >&2; exit 3\n"));
    let output = world.command(&words).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("CACHED") && stderr.contains("line 14: RUN echo why >&2; exit 3"), "{stderr}");
    world.ok(&["template", "delete", "built"]);
}

async fn what_happens_is_told_while_it_does(world: &World) {
    let lines = |words: &[&str]| {
        let child = world.command(words).stdout(Stdio::piped()).spawn().unwrap();
        let mut child = Running(child);
        let heard = Arc::new(Mutex::new(String::new()));
        let (stdout, hears) = (child.0.stdout.take().unwrap(), Arc::clone(&heard));
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                hears.lock().unwrap().push_str(&format!("{line}\n"));
            }
        });
        (child, heard)
    };
    let (mut following, told) = lines(&["logs", "-f", "--level", "info", &world.id]);
    let (_watching, seen) = lines(&["ls", "--watch"]);
    let hears = async |text: &Mutex<String>, what: &str| {
        eventually(what, async || text.lock().unwrap().contains(what).then_some(())).await;
    };
    hears(&seen, "\"state\":\"running\"").await;
    hears(&told, "sandbox: ").await;
    assert!(world.ok(&["metrics", &world.id]).contains("memUsed"));
    world.ok(&["pause", &world.id]);
    hears(&seen, "\"state\":\"paused\"").await;
    world.ok(&["delete", &world.id]);
    hears(&seen, "\"state\":\"gone\"").await;
    let status = eventually("following ends with the sandbox", async || following.0.try_wait().unwrap()).await;
    assert!(status.success(), "{status}");
    assert!(told.lock().unwrap().contains("paused"), "{}", told.lock().unwrap());
    let tail = world.ok(&["logs", "-n", "1", &world.id]);
    assert_eq!(tail.lines().count(), 1, "{tail}");
    assert!(Path::new(&world.dir).exists());
}
