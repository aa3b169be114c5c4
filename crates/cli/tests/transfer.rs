//! `upload` and `download` through the server's stand-in to a real guest agent, which here is an ordinary process: its
//! "sandbox" is this machine, so that what it has can be looked at.

mod support;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use rustix::process::{Pid, Signal, kill_process};
use support::agent::Agent;
use support::pty::Pty;
use support::server::Server;
use support::{PATIENCE, SANDBOX, User, eventually};

struct World {
    user: User,
    server: Server,
    _agent: Agent,
    /// Where the sandbox's files are.
    there: PathBuf,
    /// Where `aenv` is run.
    here: PathBuf,
}

/// `None` where there is no agent to be had.
async fn world() -> Option<World> {
    let agent = Agent::start().await?;
    let server = Server::before(Some(agent.address.clone())).await;
    let user = User::of(&server.url);
    let home = user.home().canonicalize().unwrap();
    let (there, here) = (home.join("there"), home.join("here"));
    fs::create_dir(&there).unwrap();
    fs::create_dir(&here).unwrap();
    Some(World { user, server, _agent: agent, there, here })
}

impl World {
    async fn aenv(&self, words: &[&str]) -> (Option<i32>, String, String) {
        let output = tokio::time::timeout(PATIENCE, self.user.command(words).current_dir(&self.here).output());
        let output = output.await.expect("aenv ends in time").unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        (output.status.code(), text(output.stdout), text(output.stderr))
    }

    async fn ok(&self, words: &[&str]) -> String {
        let (code, stdout, stderr) = self.aenv(words).await;
        assert_eq!((code, stderr.as_str()), (Some(0), ""), "{words:?}: {stdout}");
        stdout
    }

    async fn refused(&self, words: &[&str]) -> String {
        let (code, stdout, stderr) = self.aenv(words).await;
        assert_eq!((code, stdout.as_str()), (Some(1), ""), "{words:?}: {stderr}");
        stderr
    }

    fn path(&self, name: &str) -> String {
        self.there.join(name).to_str().unwrap().to_owned()
    }
}

/// Everything below `dir`, sorted: contents, `None` for directories.
fn tree(dir: &Path) -> Vec<(String, Option<Vec<u8>>)> {
    let mut found = Vec::new();
    let mut dirs = vec![dir.to_owned()];
    while let Some(next) = dirs.pop() {
        for entry in fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            let name = path.strip_prefix(dir).unwrap().to_str().unwrap().to_owned();
            if path.is_dir() {
                found.push((name, None));
                dirs.push(path);
            } else {
                found.push((name, Some(fs::read(&path).unwrap())));
            }
        }
    }
    found.sort();
    found
}

fn plant(dir: &Path) {
    for path in ["a/.hidden", "empty", "a/ü b"] {
        fs::create_dir_all(dir.join(path)).unwrap();
    }
    for (path, content) in
        [("x", &b"\0\xff\n"[..]), ("a/.hidden/.y", b"y"), ("a/ü b/z?&=%", b""), ("a/big", &[7; 300_000])]
    {
        fs::write(dir.join(path), content).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tree_goes_in_and_comes_out_as_it_was() {
    let Some(world) = world().await else { return };
    plant(&world.here.join("tree"));
    let target = world.path("new/tree");
    assert_eq!(world.ok(&["upload", SANDBOX, "tree", &target]).await, format!("Uploaded directory tree to {target}\n"));
    assert_eq!(tree(&world.there.join("new/tree")), tree(&world.here.join("tree")));
    // Into a directory that is there, it keeps its name; `.` has one, too.
    world.ok(&["upload", SANDBOX, "tree", &world.path("new")]).await;
    world.ok(&["upload", SANDBOX, "./tree/.", &world.path("other/")]).await;
    assert_eq!(tree(&world.there.join("other/tree")), tree(&world.here.join("tree")));

    let (code, _, stderr) = world.aenv(&["download", SANDBOX, &target]).await;
    assert_eq!((code, stderr.contains("is here already; --force replaces it")), (Some(1), true), "{stderr}");
    fs::remove_dir_all(world.here.join("tree")).unwrap();
    world.ok(&["download", SANDBOX, &target, "out"]).await;
    assert_eq!(tree(&world.here.join("out")), tree(&world.there.join("new/tree")));
    fs::write(world.here.join("out/x"), "old").unwrap();
    fs::write(world.here.join("out/more"), "stays").unwrap();
    world.ok(&["download", "--force", SANDBOX, &target, "."]).await;
    world.ok(&["download", "--force", SANDBOX, &format!("{target}/x"), "out/x"]).await;
    assert_eq!(fs::read(world.here.join("out/x")).unwrap(), b"\0\xff\n");
    assert_eq!(fs::read(world.here.join("out/more")).unwrap(), b"stays");
    for (name, _) in tree(&world.here) {
        assert!(!name.contains(".aenv-download"), "{name}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn files_are_named_by_where_they_go() {
    let Some(world) = world().await else { return };
    fs::write(world.here.join("f"), "one").unwrap();
    let (into, as_g) = (world.path("sub/"), world.path("g"));
    assert_eq!(world.ok(&["upload", SANDBOX, "f", &into]).await, format!("Uploaded f to {into}f\n"));
    world.ok(&["upload", SANDBOX, "f", &as_g]).await;
    fs::write(world.here.join("f"), "changed").unwrap();
    world.ok(&["upload", SANDBOX, "f", &as_g]).await;
    assert_eq!(
        tree(&world.there),
        [
            ("g".to_owned(), Some(b"changed".to_vec())),
            ("sub".to_owned(), None),
            ("sub/f".to_owned(), Some(b"one".to_vec())),
        ]
    );
    world.ok(&["download", SANDBOX, &as_g]).await;
    assert_eq!(fs::read(world.here.join("g")).unwrap(), b"changed");
    assert!(world.refused(&["download", SANDBOX, &as_g]).await.contains("--force"));
    assert!(world.refused(&["download", SANDBOX, &as_g, "no/where"]).await.contains("no is no directory"));
    assert!(world.refused(&["download", SANDBOX, &world.path("none")]).await.contains("there is no "));
    assert!(world.refused(&["upload", SANDBOX, "none", &into]).await.contains("No such file"));
    // What tells its size as nothing is read to its end all the same.
    world.ok(&["download", SANDBOX, "/proc/version", "version"]).await;
    assert_eq!(fs::read(world.here.join("version")).unwrap(), fs::read("/proc/version").unwrap());
    // A user is the file's owner, has a home, and has to exist.
    world.ok(&["upload", "--user", "daemon", SANDBOX, "f", &as_g]).await;
    let owner = std::os::unix::fs::MetadataExt::uid(&fs::metadata(&as_g).unwrap());
    assert_eq!(owner, 1);
    assert!(world.refused(&["upload", "--user", "nobody-here", SANDBOX, "f", &as_g]).await.contains("nobody-here"));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_copied_is_told_before_anything_is() {
    let Some(world) = world().await else { return };
    for base in [&world.here, &world.there] {
        fs::create_dir(base.join("tree")).unwrap();
        fs::write(base.join("tree/a"), "").unwrap();
        symlink("a", base.join("tree/link")).unwrap();
    }
    let target = world.path("new");
    assert!(world.refused(&["upload", SANDBOX, "tree", &target]).await.contains("link is a symlink"));
    assert!(world.refused(&["upload", SANDBOX, "tree/link", &target]).await.contains("link is a symlink"));
    assert!(!Path::new(&target).exists());
    assert!(
        world
            .refused(&["download", SANDBOX, &world.path("tree"), "new"])
            .await
            .contains("link in the sandbox is a symlink")
    );
    assert!(world.refused(&["download", SANDBOX, &world.path("tree/link")]).await.contains("is a symlink"));
    assert!(world.refused(&["download", SANDBOX, "/dev/null"]).await.contains("neither a file nor a directory"));
    assert!(!world.here.join("new").exists());
    for words in [["upload", SANDBOX, "tree", "relative"], ["download", SANDBOX, "relative/..", "x"]] {
        assert_eq!(world.aenv(&words).await.0, Some(1), "{words:?}");
    }
    let stderr = world.refused(&["upload", "--user", "root", SANDBOX, "tree", &target]).await;
    assert!(stderr.contains("--user is for files"), "{stderr}");
    // What is in the way of a tree is told at once, too.
    fs::remove_file(world.there.join("tree/link")).unwrap();
    fs::create_dir(world.here.join("dst")).unwrap();
    fs::write(world.here.join("dst/tree"), "a file").unwrap();
    let stderr = world.refused(&["download", "--force", SANDBOX, &world.path("tree"), "dst"]).await;
    assert!(stderr.contains("is no directory"), "{stderr}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interrupted_download_leaves_nothing_or_goes_on() {
    let Some(world) = world().await else { return };
    let content: Vec<u8> = (0..8 << 20).map(|n: u32| n.to_be_bytes()[1] ^ n.to_be_bytes()[3]).collect();
    let source = world.path("big");
    fs::write(&source, &content).unwrap();
    let partial = |world: &World| {
        let name = tree(&world.here).into_iter().map(|(name, _)| name).find(|name| name.starts_with(".aenv-download"));
        name.map(|name| world.here.join(name))
    };
    world.server.stall_after(1 << 20);
    for (option, kept) in [(&[][..], false), (&["--resume"], true)] {
        let words = [&["download"][..], option, &[SANDBOX, &source]].concat();
        let mut child = world.user.command(&words).current_dir(&world.here).spawn().unwrap();
        eventually("a part is here", || {
            partial(&world).is_some_and(|path| path.metadata().is_ok_and(|found| found.len() >= 1 << 20))
        })
        .await;
        let pid = Pid::from_raw(i32::try_from(child.id().unwrap()).unwrap()).unwrap();
        kill_process(pid, Signal::INT).unwrap();
        let status = tokio::time::timeout(PATIENCE, child.wait()).await.unwrap().unwrap();
        assert_eq!(status.code(), Some(130));
        assert_eq!(partial(&world).is_some(), kept, "{option:?}");
    }
    let kept = partial(&world).unwrap().metadata().unwrap().len();
    world.server.stall_after(u64::MAX);
    world.ok(&["download", "--resume", SANDBOX, &source]).await;
    assert!(fs::read(world.here.join("big")).unwrap() == content);
    assert_eq!(partial(&world), None);
    let asked = world.server.data_headers();
    let range = asked.iter().rev().find_map(|headers| headers.get("range")).unwrap();
    assert_eq!(range.to_str().unwrap(), format!("bytes={kept}-"));
    // A part of another version is of no use.
    world.server.stall_after(1 << 20);
    let mut child = world.user.command(&["download", "--resume", SANDBOX, &source, "second"]);
    let mut child = child.current_dir(&world.here).spawn().unwrap();
    eventually("a part is here", || partial(&world).is_some_and(|path| path.metadata().is_ok_and(|f| f.len() > 1000)))
        .await;
    child.kill().await.unwrap();
    world.server.stall_after(u64::MAX);
    fs::write(&source, "another").unwrap();
    world.ok(&["download", "--resume", SANDBOX, &source, "second"]).await;
    assert_eq!(fs::read(world.here.join("second")).unwrap(), b"another");
    assert_eq!(partial(&world), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_there_already_may_be_left_out() {
    let Some(world) = world().await else { return };
    plant(&world.here.join("tree"));
    let target = world.path("tree");
    world.ok(&["upload", SANDBOX, "tree", &target]).await;
    fs::write(world.here.join("tree/x"), "longer than it was").unwrap();
    let said = world.ok(&["upload", "--skip-same", SANDBOX, "tree", &format!("{}/", world.there.display())]).await;
    assert!(said.ends_with(", without 3 files that are there\n"), "{said}");
    assert_eq!(tree(&world.there.join("tree")), tree(&world.here.join("tree")));
    world.ok(&["download", SANDBOX, &target, "out"]).await;
    fs::remove_file(world.here.join("out/x")).unwrap();
    fs::create_dir(world.here.join("in")).unwrap();
    fs::rename(world.here.join("out"), world.here.join("in/tree")).unwrap();
    let said = world.ok(&["download", "--skip-same", SANDBOX, &target, "in"]).await;
    assert!(said.ends_with(", without 3 files that are here\n"), "{said}");
    assert_eq!(tree(&world.here.join("in/tree")), tree(&world.there.join("tree")));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bar_is_for_people_and_goes_at_the_end() {
    let Some(world) = world().await else { return };
    fs::write(world.here.join("big"), vec![1; 30 << 20]).unwrap();
    let target = world.path("big");
    let mut command = world.user.command(&["upload", SANDBOX, "big", &target]);
    command.current_dir(&world.here);
    let mut pty = Pty::run(command, 100, 24);
    pty.sees("Uploaded big").await;
    assert_eq!(pty.exit_code().await, Some(0));
    let shown = pty.shown();
    assert!(shown.contains("30.00 MiB") && shown.contains("ETA"), "{shown:?}");
}
