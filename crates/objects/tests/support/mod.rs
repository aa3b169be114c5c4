//! An S3-compatible server in this process.
#![allow(dead_code, unreachable_pub, reason = "each test program uses a part")]

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use aenv_objects::{S3Config, S3Credentials};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto::Builder;
use s3s::auth::SimpleAuth;
use s3s::host::MultiDomain;
use s3s::service::{S3Service, S3ServiceBuilder};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

pub const BUCKET: &str = "our-bucket";
pub const REGION: &str = "nowhere-1";

/// What is done with a request before the server sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    None,
    /// A status and no more.
    Status(u16),
    /// No answer for a long time.
    Hang,
}

type Rules = dyn Fn(&str, &str, usize) -> Fault + Send + Sync;

/// A server with one bucket. Ends when dropped.
pub struct Server {
    pub host: String,
    /// `METHOD PATH` of every request.
    pub seen: Arc<Mutex<Vec<String>>>,
    task: JoinHandle<()>,
    _dir: tempfile::TempDir,
}

impl Server {
    pub async fn start() -> Self {
        Self::faulty(|_, _, _| Fault::None).await
    }

    /// One that expects the bucket in the host's name.
    pub async fn start_virtual() -> Self {
        Self::start_with(true, |_, _, _| Fault::None).await
    }

    /// `rules` sees method, path and query, and the number of the request.
    pub async fn faulty(rules: impl Fn(&str, &str, usize) -> Fault + Send + Sync + 'static) -> Self {
        Self::start_with(false, rules).await
    }

    async fn start_with(is_virtual: bool, rules: impl Fn(&str, &str, usize) -> Fault + Send + Sync + 'static) -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join(BUCKET)).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let service = service(dir.path(), is_virtual.then(|| format!("localhost:{port}")));
        let (rules, seen): (Arc<Rules>, _) = (Arc::new(rules), Arc::new(Mutex::new(Vec::new())));
        let log = Arc::clone(&seen);
        let task = tokio::spawn(async move {
            let mut connections = tokio::task::JoinSet::new();
            // The server looks at what is there and then writes: what conditions need, it does one at a time.
            let one_write = Arc::new(tokio::sync::Mutex::new(()));
            while let Ok((stream, _)) = listener.accept().await {
                let (service, rules, log, one_write) =
                    (service.clone(), Arc::clone(&rules), Arc::clone(&log), Arc::clone(&one_write));
                let handler = hyper::service::service_fn(move |request: hyper::Request<hyper::body::Incoming>| {
                    let (service, rules, log, one_write) =
                        (service.clone(), Arc::clone(&rules), Arc::clone(&log), Arc::clone(&one_write));
                    async move {
                        let (method, target) = (request.method().to_string(), request.uri().to_string());
                        let number = {
                            let mut log = log.lock().unwrap();
                            log.push(format!("{method} {target}"));
                            log.len() - 1
                        };
                        match rules(&method, &target, number) {
                            Fault::None => {}
                            Fault::Status(status) => {
                                let answer = hyper::Response::builder().status(status).body(s3s::Body::empty());
                                return Ok(answer.unwrap());
                            }
                            Fault::Hang => tokio::time::sleep(Duration::from_secs(600)).await,
                        }
                        let _one = if method == "PUT" { Some(one_write.lock().await) } else { None };
                        hyper::service::Service::call(&service, request).await
                    }
                });
                connections.spawn(async move {
                    // A client that hangs up is no failure of the test.
                    let _ = Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(stream), handler).await;
                });
            }
        });
        let host = if is_virtual { "localhost" } else { "127.0.0.1" };
        Self { host: format!("{host}:{port}"), seen, task, _dir: dir }
    }

    pub fn config(&self) -> S3Config {
        S3Config {
            credentials: S3Credentials::Static {
                access_key_id: "us".into(),
                secret_access_key: "secret".into(),
                security_token: None,
            },
            patience: Duration::from_secs(20),
            ..S3Config::new(format!("http://{}", self.host), REGION, BUCKET)
        }
    }

    pub fn seen(&self) -> Vec<String> {
        self.seen.lock().unwrap().clone()
    }
}

fn service(root: &Path, domain: Option<String>) -> S3Service {
    let mut builder = S3ServiceBuilder::new(s3s_fs::FileSystem::new(root).unwrap());
    builder.set_auth(SimpleAuth::from_single("us", "secret"));
    if let Some(domain) = domain {
        builder.set_host(MultiDomain::new([domain]).unwrap());
    }
    builder.build()
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}
