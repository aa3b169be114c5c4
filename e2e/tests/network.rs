//! What sandboxes reach. The node runs in a network namespace that stands for a host, beside one that stands for the internet:
//! this machine's own network is not touched.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{Ipv4Addr, TcpListener};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use aenv_api::{ConnectRequest, ForkRequest, NetworkConfig, NetworkUpdate, NewSandbox, PauseRequest};
use aenv_e2e::{Node, NodeOptions, eventually};
use nix::sched::{CloneFlags, setns, unshare};

/// Servers on the internet (documentation networks, RFC 5737).
const SERVER: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 1);
const OTHER: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 1);
/// What a cloud has its metadata at.
const METADATA: Ipv4Addr = Ipv4Addr::new(169, 254, 169, 254);
/// The host's own address towards the internet.
const HOST: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);

/// Longest wait for a request.
const PATIENCE: Duration = Duration::from_secs(20);

/// The internet: a namespace held by a process, with a server on each of its addresses.
struct Internet {
    holder: Child,
    visits: [(Ipv4Addr, Arc<AtomicUsize>); 3],
}

impl Internet {
    /// Makes it, and has the calling thread's namespace lead there.
    async fn new() -> Self {
        let holder = Command::new("unshare").args(["--net", "sleep", "3600"]).spawn().expect("run unshare");
        let netns = PathBuf::from(format!("/proc/{}/ns/net", holder.id()));
        let ours = std::fs::read_link("/proc/thread-self/ns/net").expect("own netns");
        eventually("the internet has a namespace", async || {
            std::fs::read_link(&netns).is_ok_and(|theirs| theirs != ours).then_some(())
        })
        .await;
        let pid = holder.id().to_string();
        ip(&format!("link add up0 type veth peer name net0 netns {pid}"));
        for line in
            ["link set lo up", "link set up0 up", "address add 192.0.2.2/24 dev up0", "route add default via 192.0.2.1"]
        {
            ip(line);
        }
        let there = File::open(&netns).expect("open the internet");
        let addresses = [SERVER, OTHER, METADATA];
        let listeners = thread::spawn(move || {
            setns(&there, CloneFlags::CLONE_NEWNET).expect("enter the internet");
            for line in ["link set lo up", "link set net0 up", "address add 192.0.2.1/24 dev net0"] {
                ip(line);
            }
            addresses.map(|address| {
                ip(&format!("address add {address}/32 dev lo"));
                (address, TcpListener::bind((address, 80)).expect("listen"))
            })
        });
        let visits = listeners.join().expect("thread").map(|(address, listener)| {
            let count = Arc::new(AtomicUsize::new(0));
            let visits = Arc::clone(&count);
            thread::spawn(move || {
                for mut stream in listener.incoming().flatten() {
                    visits.fetch_add(1, Ordering::SeqCst);
                    // Read what is asked: a connection that is closed over it is reset.
                    _ = stream.set_read_timeout(Some(PATIENCE));
                    _ = BufReader::new(&stream).read_line(&mut String::new());
                    _ = stream.write_all(b"hello\n");
                }
            });
            (address, count)
        });
        Self { holder, visits }
    }

    fn visits(&self, address: Ipv4Addr) -> usize {
        let visits = self.visits.iter().find(|(at, _)| *at == address).expect("an address of the internet");
        visits.1.load(Ordering::SeqCst)
    }
}

impl Drop for Internet {
    fn drop(&mut self) {
        _ = self.holder.kill();
        _ = self.holder.wait();
    }
}

fn ip(line: &str) {
    let status = Command::new("ip").args(line.split(' ')).status().expect("run ip");
    assert!(status.success(), "ip {line}");
}

/// Runs `test` on threads in a namespace that stands for a host.
fn on_a_host(test: impl AsyncFnOnce() + Send + 'static) {
    if !nix::unistd::geteuid().is_root() {
        return println!("skipped: needs root for network namespaces");
    }
    let program = |name: &str| Command::new(name).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    if program("unshare").is_err() || program("ip").is_err() {
        return println!("skipped: no unshare or ip (Debian packages util-linux, iproute2)");
    }
    let host = thread::spawn(|| {
        unshare(CloneFlags::CLONE_NEWNET).expect("a namespace for the host");
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("runtime");
        runtime.block_on(test());
    });
    if let Err(panic) = host.join() {
        std::panic::resume_unwind(panic);
    }
}

/// What a guest gets from a server; `Err` with what its client says.
fn fetch(node: &Node, id: &str, address: Ipv4Addr) -> Result<String, String> {
    let output = node.aenv(&["exec", id, "sh", "-c", &format!("echo hello? | busybox nc -w 20 {address} 80")]);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
}

#[track_caller]
fn reaches(node: &Node, id: &str, address: Ipv4Addr) {
    assert_eq!(fetch(node, id, address), Ok("hello\n".to_owned()), "{address}");
}

#[track_caller]
fn does_not_reach(node: &Node, internet: &Internet, id: &str, address: Ipv4Addr) {
    let before = internet.visits.iter().map(|(_, count)| count.load(Ordering::SeqCst)).sum::<usize>();
    let error = fetch(node, id, address).expect_err("it is denied");
    assert!(error.contains("refused") || error.contains("unreachable"), "{address}: {error}");
    let after = internet.visits.iter().map(|(_, count)| count.load(Ordering::SeqCst)).sum::<usize>();
    assert_eq!(before, after, "{address}");
}

async fn sandbox(node: &Node, change: impl FnOnce(&mut NewSandbox)) -> String {
    let mut request = NewSandbox { template_id: "tiny".to_owned(), ..NewSandbox::default() };
    change(&mut request);
    node.client().create_sandbox(&request).await.expect("create a sandbox").sandbox_id.to_string()
}

fn list(entries: &[&str]) -> Option<Vec<String>> {
    Some(entries.iter().map(|entry| (*entry).to_owned()).collect())
}

#[test]
fn a_sandbox_reaches_what_its_policy_allows_and_nothing_else() {
    on_a_host(async || {
        let internet = Internet::new().await;
        // Its resolver is one that nobody here has.
        let config = "network.egress.resolver = \"192.0.2.53\"".to_owned();
        let options = NodeOptions { egress: true, on_stop: Some("leave"), config, ..NodeOptions::default() };
        let Some(mut node) = Node::start_with(options).await else { return };
        let Some(()) = node.tiny("tiny").await else { return node.finish().await };
        let client = node.client();

        // By default: the internet, and nothing that is nearer.
        let open = sandbox(&node, |_| {}).await;
        reaches(&node, &open, SERVER);
        for near in [METADATA, HOST, Ipv4Addr::new(10, 12, 0, 0), Ipv4Addr::new(169, 254, 0, 22)] {
            does_not_reach(&node, &internet, &open, near);
        }
        assert_eq!(internet.visits(METADATA), 0);
        assert_eq!(node.aenv_ok(&["exec", &open, "cat", "/etc/resolv.conf"]), "nameserver 192.0.2.53\n");
        let detail = client.sandbox(&open).await.unwrap();
        assert_eq!((detail.network, detail.allow_internet_access), (None, None));

        let closed = sandbox(&node, |request| request.allow_internet_access = Some(false)).await;
        does_not_reach(&node, &internet, &closed, SERVER);
        assert_eq!(client.sandbox(&closed).await.unwrap().allow_internet_access, Some(false));
        client.delete_sandbox(&closed).await.unwrap();

        // Changed while it runs, as a whole each time.
        let update = NetworkUpdate {
            allow_out: list(&["198.51.100.0/24"]),
            deny_out: list(&["0.0.0.0/0"]),
            ..NetworkUpdate::default()
        };
        client.set_network(&open, &update).await.unwrap();
        reaches(&node, &open, SERVER);
        does_not_reach(&node, &internet, &open, OTHER);
        let network = client.sandbox(&open).await.unwrap().network.expect("a network that was asked for");
        let told = NetworkConfig {
            allow_out: update.allow_out.clone(),
            deny_out: update.deny_out.clone(),
            ..NetworkConfig::default()
        };
        assert_eq!(network, told);
        let wrong = NetworkUpdate { allow_out: list(&["198.51.100.0/24", "example.com"]), ..NetworkUpdate::default() };
        let refused = client.set_network(&open, &wrong).await.unwrap_err();
        assert_eq!(refused.status().map(|status| status.as_u16()), Some(400));
        assert!(refused.to_string().contains("invalid field allowOut[1]"), "{refused}");

        // A fork has it from the beginning, and a pause keeps it.
        let forked = client.fork_sandbox(&open, &ForkRequest { count: Some(1), timeout: None }).await.unwrap();
        let child =
            forked.into_iter().next().and_then(|result| result.sandbox).expect("a child").sandbox_id.to_string();
        reaches(&node, &child, SERVER);
        does_not_reach(&node, &internet, &child, OTHER);
        client.delete_sandbox(&child).await.unwrap();
        client.pause_sandbox(&open, &PauseRequest::default()).await.unwrap();
        let refused = client.set_network(&open, &NetworkUpdate::default()).await.unwrap_err();
        assert_eq!(refused.status().map(|status| status.as_u16()), Some(409));
        client.connect_sandbox(&open, &ConnectRequest { timeout: Some(300), memory: None }).await.unwrap();
        reaches(&node, &open, SERVER);
        does_not_reach(&node, &internet, &open, OTHER);

        // The next server finds it as it was.
        node.stop().await;
        node.restart().await;
        let client = node.client();
        reaches(&node, &open, SERVER);
        does_not_reach(&node, &internet, &open, OTHER);
        client.set_network(&open, &NetworkUpdate::default()).await.unwrap();
        reaches(&node, &open, OTHER);
        assert_eq!(client.sandbox(&open).await.unwrap().network, None);
        client.delete_sandbox(&open).await.unwrap();
        node.finish().await;
    });
}
