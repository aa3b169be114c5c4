//! Every store does what all promise, and each what it alone does.

mod support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use aenv_objects::test_support::conformance;
use aenv_objects::{
    Addressing, Condition, Key, LocalStore, ObjectError, ObjectErrorKind, ObjectStore, S3Config, S3Credentials, S3Store,
};
use bytes::Bytes;
use support::{BUCKET, Fault, Server};

/// More than one part of an upload.
const LARGE: usize = (40 << 20) + 12_345;

fn key(text: &str) -> Key {
    text.parse().unwrap()
}

fn open(config: &S3Config) -> Arc<dyn ObjectStore> {
    Arc::new(S3Store::open(config).unwrap())
}

#[tokio::test]
async fn a_folder_is_a_store() {
    let dir = tempfile::tempdir().unwrap();
    let store = LocalStore::open(dir.path().join("new/store")).unwrap();
    conformance(Arc::new(store), 3_000_000).await;
    let left: Vec<_> = walk(&dir.path().join("new/store/.partial"));
    assert_eq!(left, [] as [String; 0], "nothing half-written stays");
}

#[tokio::test]
async fn an_s3_bucket_is_a_store() {
    let server = Server::start().await;
    conformance(open(&server.config()), LARGE).await;
    let seen = server.seen();
    assert!(seen.iter().any(|request| request.contains("partNumber=3")), "a large file goes in parts");
}

#[tokio::test]
async fn a_folder_of_a_bucket_is_a_store_beside_others() {
    let server = Server::start().await;
    let config = server.config();
    let (whole, part) = (open(&config), open(&S3Config { prefix: "/team/a/".into(), ..config.clone() }));
    assert_eq!(part.name(), "s3://our-bucket/team/a");
    whole.put(&key("team/b/other"), Bytes::from_static(b"x"), Condition::None).await.unwrap();
    conformance(Arc::clone(&part), 1000).await;
    part.put(&key("mine"), Bytes::from_static(b"x"), Condition::None).await.unwrap();
    let names: Vec<_> = whole.list(None).await.unwrap().into_iter().map(|info| info.key.to_string()).collect();
    assert_eq!(names, ["team/a/mine", "team/b/other"]);
}

#[tokio::test]
async fn the_bucket_may_be_in_the_host() {
    if let Err(error) = tokio::net::lookup_host(format!("{BUCKET}.localhost:80")).await {
        eprintln!("skipped: names below localhost are not looked up here ({error})");
        return;
    }
    let server = Server::start_virtual().await;
    let config = S3Config { addressing: Addressing::Virtual, ..server.config() };
    conformance(open(&config), 1000).await;
    assert!(server.seen().iter().all(|request| !request.contains("our-bucket/")), "{:?}", server.seen());
}

#[tokio::test]
async fn keys_may_come_from_a_command() {
    let server = Server::start().await;
    let printed = r#"{"Version": 1, "AccessKeyId": "us", "SecretAccessKey": "secret"}"#;
    let credentials = S3Credentials::Process(format!("/bin/echo '{printed}'"));
    conformance(open(&S3Config { credentials, ..server.config() }), 1000).await;
}

#[tokio::test]
async fn strangers_are_told_that_they_may_not() {
    let server = Server::start().await;
    let wrong =
        S3Credentials::Static { access_key_id: "us".into(), secret_access_key: "wrong".into(), security_token: None };
    for credentials in [wrong, S3Credentials::Anonymous] {
        let store = open(&S3Config { credentials, ..server.config() });
        let error = store.put(&key("x"), Bytes::new(), Condition::None).await.unwrap_err();
        assert_eq!(error.kind(), ObjectErrorKind::Denied, "{error}");
        assert!(!format!("{error:?}").contains("wrong"));
    }
    let credentials = S3Credentials::Process("/bin/false".into());
    let error = open(&S3Config { credentials, ..server.config() }).head(&key("x")).await.unwrap_err();
    assert_eq!(error.kind(), ObjectErrorKind::Failed);
    assert!(format!("{error:?}").contains("/bin/false"), "{error:?}");
}

#[tokio::test]
async fn passing_failures_are_passed_over_and_lasting_ones_end_with_patience() {
    let server = Server::faulty(|_, _, number| if number % 3 == 2 { Fault::None } else { Fault::Status(503) }).await;
    let store = open(&server.config());
    store.put(&key("x"), Bytes::from_static(b"hello"), Condition::None).await.unwrap();
    assert_eq!(store.get(&key("x"), 1..3).await.unwrap(), &b"el"[..]);
    assert_eq!(server.seen().len(), 6);
    let down = Server::faulty(|_, _, _| Fault::Status(503)).await;
    let hung = Server::faulty(|_, _, _| Fault::Hang).await;
    for (config, least) in [(down.config(), 2), (hung.config(), 1), (S3Config::new("http://127.0.0.1:1", "r", "b"), 0)]
    {
        let (patience, timeout) = (Duration::from_secs(1), Duration::from_millis(600));
        let begun = Instant::now();
        let error = open(&S3Config { patience, timeout, ..config }).get(&key("x"), 0..1).await.unwrap_err();
        assert_eq!(error.kind(), ObjectErrorKind::Failed, "{error}");
        // Looking whether the range was wrong takes as long again.
        assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
        let seen = down.seen().len().max(hung.seen().len());
        assert!(seen >= least, "{seen}");
    }
}

#[tokio::test]
async fn an_upload_that_fails_leaves_no_object_and_no_parts() {
    let server = Server::faulty(|_, target, _| match target.contains("partNumber=2") {
        true => Fault::Status(400),
        false => Fault::None,
    })
    .await;
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, vec![1; LARGE]).unwrap();
    let store = open(&server.config());
    let error = store.put_file(&key("x"), &file).await.unwrap_err();
    assert_eq!(error.kind(), ObjectErrorKind::Failed);
    assert!(server.seen().iter().any(|request| request.starts_with("DELETE ") && request.contains("uploadId=")));
    assert_eq!(store.head(&key("x")).await.unwrap_err().kind(), ObjectErrorKind::NotFound);
    let shrinking = dir.path().join("none");
    assert_eq!(store.put_file(&key("x"), &shrinking).await.unwrap_err().kind(), ObjectErrorKind::File);
}

#[tokio::test]
async fn two_processes_may_share_a_folder() {
    let dir = tempfile::tempdir().unwrap();
    // Each opens it for itself, as another host would.
    let stores: Vec<_> = (0..4).map(|_| LocalStore::open(dir.path()).unwrap()).collect();
    let counter = key("deep/in/folders/counter");
    stores[0].put(&counter, Bytes::from_static(b"0"), Condition::Absent).await.unwrap();
    let mut counting = tokio::task::JoinSet::new();
    for store in &stores {
        let (store, counter) = (store.clone(), counter.clone());
        counting.spawn(async move {
            let mut done = 0;
            while done < 10 {
                let (bytes, version) = store.read(&counter, 100).await.unwrap();
                let number: u32 = std::str::from_utf8(&bytes).unwrap().parse().unwrap();
                let next = Bytes::from((number + 1).to_string());
                match store.put(&counter, next, Condition::Is(version)).await {
                    Ok(_) => done += 1,
                    Err(ObjectError::Changed { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
            }
        });
    }
    while let Some(joined) = counting.join_next().await {
        joined.unwrap();
    }
    assert_eq!(stores[1].read(&counter, 100).await.unwrap().0, &b"40"[..], "no count is lost");
}

#[tokio::test]
async fn writers_and_removers_of_one_folder_do_not_disturb_each_other() {
    let dir = tempfile::tempdir().unwrap();
    let store = LocalStore::open(dir.path()).unwrap();
    let mut work = tokio::task::JoinSet::new();
    for number in 0..8 {
        let (store, mine) = (store.clone(), key(&format!("a/b/c/{number}")));
        work.spawn(async move {
            for _ in 0..20 {
                store.put(&mine, Bytes::from_static(b"x"), Condition::None).await.unwrap();
                store.delete(&mine).await.unwrap();
            }
        });
    }
    while let Some(joined) = work.join_next().await {
        joined.unwrap();
    }
    assert!(!dir.path().join("a").exists(), "empty folders go");
}

#[tokio::test]
async fn what_a_killed_writer_left_goes_after_a_day_and_is_never_seen() {
    let dir = tempfile::tempdir().unwrap();
    let store = LocalStore::open(dir.path()).unwrap();
    let (old, young) = (dir.path().join(".partial/old"), dir.path().join(".partial/young"));
    for file in [&old, &young, &dir.path().join("not a key"), &dir.path().join(".hidden")] {
        std::fs::write(file, b"half").unwrap();
    }
    let long_ago = std::time::SystemTime::now() - Duration::from_secs(2 * 24 * 3600);
    std::fs::File::open(&old).unwrap().set_modified(long_ago).unwrap();
    LocalStore::open(dir.path()).unwrap();
    assert!(!old.exists() && young.exists());
    assert_eq!(store.list(None).await.unwrap(), []);
}

#[tokio::test]
async fn an_object_and_a_folder_of_one_name_are_told_from_an_absent_one() {
    let dir = tempfile::tempdir().unwrap();
    let store = LocalStore::open(dir.path()).unwrap();
    store.put(&key("a/b"), Bytes::new(), Condition::None).await.unwrap();
    for bad in ["a", "a/b/c"] {
        for condition in [Condition::None, Condition::Absent] {
            let error = store.put(&key(bad), Bytes::new(), condition).await.unwrap_err();
            assert_eq!(error.kind(), ObjectErrorKind::Failed, "{bad}: {error}");
        }
        assert_eq!(store.head(&key(bad)).await.unwrap_err().kind(), ObjectErrorKind::NotFound);
        store.delete(&key(bad)).await.unwrap();
    }
    assert_eq!(std::fs::read(store.path(&key("a/b"))).unwrap(), b"");
}

fn walk(folder: &std::path::Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    entries.map(|entry| entry.unwrap().path().display().to_string()).collect()
}
