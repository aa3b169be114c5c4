//! Blobs of a registry that misbehaves.

mod support;

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use aenv_block_source::{
    BlockCache, CacheOptions, CredentialSource, Credentials, FetchError, FetchProblem, FindBlobError, Network,
    Registry, RegistryUrlError, Source,
};
use support::{Answer, Ask, Stub, blob, digest, impatient, pattern, quick, read, redirect, say};

const LENGTH: usize = 300_000;

#[track_caller]
fn problem(error: io::Error) -> FetchProblem {
    error.downcast::<FetchError>().unwrap().source
}

/// A loopback address of one test.
fn own_address(number: u8) -> SocketAddr {
    ([127, 0, 9, number], 0).into()
}

/// Answers the first requests with `faults`, later ones with what was asked for.
fn faulty(faults: Vec<Answer>) -> impl Fn(&Ask) -> Answer {
    move |ask| faults.get(ask.number).cloned().unwrap_or(Answer::Serve)
}

#[test]
fn a_range_is_read_with_one_request() {
    let bytes = pattern(LENGTH);
    let stub = Stub::start(bytes.clone(), |_| Answer::Serve);
    let blob = stub.blob(LENGTH as u64);
    assert_eq!(read(&blob, 1000, 5000).unwrap(), bytes[1000..6000]);
    assert_eq!(read(&blob, LENGTH as u64 - 1, 1).unwrap(), bytes[LENGTH - 1..]);
    let seen: Vec<_> = stub.seen().iter().map(|ask| ask.range.clone().unwrap()).collect();
    assert_eq!(seen, [1000..6000, LENGTH as u64 - 1..LENGTH as u64]);
    assert!(stub.seen()[0].target.ends_with(&digest(b"x")));
    assert!(read(&blob, 5, 0).unwrap().is_empty());
    assert_eq!(read(&blob, LENGTH as u64 - 1, 2).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    assert_eq!(stub.asked(), 2, "what can't be there is not asked for");
}

#[test]
fn a_body_that_is_cut_is_gone_on_with() {
    let bytes = pattern(LENGTH);
    let stub = Stub::start(bytes.clone(), faulty(vec![Answer::Cut(70_000), Answer::Cut(0), Answer::Cut(50_000)]));
    assert_eq!(read(&stub.blob(LENGTH as u64), 100, 200_000).unwrap(), bytes[100..200_100]);
    let starts: Vec<_> = stub.seen().iter().map(|ask| ask.range.clone().unwrap().start).collect();
    assert_eq!(starts, [100, 70_100, 70_100, 120_100]);
}

#[test]
fn passing_failures_are_passed_over() {
    let bytes = pattern(LENGTH);
    let wait = Answer::Say(429, vec![("retry-after", "1".to_owned())], "slow down");
    let faults = vec![say(500), say(502), say(503), wait, say(408), say(504)];
    let stub = Stub::start(bytes.clone(), faulty(faults));
    let start = Instant::now();
    assert_eq!(read(&stub.blob(LENGTH as u64), 0, 100).unwrap(), bytes[..100]);
    assert_eq!(stub.asked(), 7);
    assert!(start.elapsed() >= Duration::from_secs(1), "what the server asks for is granted");
}

#[test]
fn an_answer_that_is_not_what_was_asked_for_is_never_taken() {
    let bytes = pattern(LENGTH);
    type Expected = fn(&FetchProblem) -> bool;
    let cases: [(Answer, Expected); 5] = [
        (Answer::Shifted, |problem| matches!(problem, FetchProblem::WrongRange { .. })),
        (Answer::Whole, |problem| matches!(problem, FetchProblem::RangeIgnored)),
        (Answer::TooLong, |problem| matches!(problem, FetchProblem::TooLong)),
        (Answer::OfTotal(300_001), |problem| {
            matches!(problem, FetchProblem::WrongSize { expected: 300_000, found: 300_001 })
        }),
        (Answer::Say(404, vec![], "BLOB_UNKNOWN"), |problem| problem.to_string().contains("BLOB_UNKNOWN")),
    ];
    for (answer, expected) in cases {
        let always = answer.clone();
        let stub = Stub::start(bytes.clone(), move |_| always.clone());
        let problem = problem(read(&stub.blob(LENGTH as u64), 1000, 5000).unwrap_err());
        assert!(expected(&problem), "{answer:?}: {problem:?}");
        assert_eq!(stub.asked(), 3, "{answer:?}");
        let stub = Stub::start(bytes.clone(), faulty(vec![answer.clone(), answer]));
        assert_eq!(read(&stub.blob(LENGTH as u64), 1000, 5000).unwrap(), bytes[1000..6000]);
    }
}

#[test]
fn a_server_without_ranges_will_do_for_a_whole_blob() {
    let bytes = pattern(LENGTH);
    let stub = Stub::start(bytes.clone(), |_| Answer::Whole);
    assert_eq!(read(&stub.blob(LENGTH as u64), 0, LENGTH).unwrap(), bytes);
}

#[test]
fn the_length_is_asked_for_if_nobody_knows_it() {
    let bytes = pattern(LENGTH);
    let stub = Stub::start(bytes.clone(), faulty(vec![say(500)]));
    let registry = |stub: &Stub| {
        Registry::new(Network::start().unwrap(), &stub.url(), Arc::new(Credentials::Anonymous), quick()).unwrap()
    };
    let blob = registry(&stub).find_blob(&digest(&bytes)).unwrap();
    assert_eq!(blob.size(), LENGTH as u64);
    assert_eq!(read(&blob, 0, LENGTH).unwrap(), bytes);
    let stub = Stub::start(bytes, |_| say(404));
    assert!(matches!(registry(&stub).find_blob(&digest(b"")).unwrap_err(), FindBlobError::Fetch(_)));
    for bad in ["", "sha256", "sha256:", "sha256:../../x", "sha256:ABCDEF0123456789ABCDEF0123456789AB"] {
        assert!(matches!(registry(&stub).blob(bad, 1).unwrap_err(), RegistryUrlError::Digest(_)), "{bad}");
    }
}

#[test]
fn a_registry_that_is_down_is_an_error_until_it_is_back() {
    let bytes = pattern(LENGTH);
    let stub = Stub::start_at(own_address(1), bytes.clone(), |_| Answer::Serve);
    let (address, url) = (stub.address, stub.url());
    let blob = blob(&url, Arc::new(Credentials::Anonymous), impatient(), &digest(b"x"), LENGTH as u64);
    assert_eq!(read(&blob, 0, 10).unwrap(), bytes[..10]);
    drop(stub);
    let start = Instant::now();
    let error = read(&blob, 10, 10).unwrap_err();
    assert!(start.elapsed() < Duration::from_secs(10), "patience ends");
    let attempts = error.get_ref().and_then(|error| error.downcast_ref::<FetchError>()).unwrap().attempts;
    assert!(attempts > 1, "{attempts}");
    assert!(matches!(problem(error), FetchProblem::Transport(_)));
    let _stub = Stub::start_at(address, bytes.clone(), |_| Answer::Serve);
    assert_eq!(read(&blob, 10, 10).unwrap(), bytes[10..20]);
}

#[test]
fn a_registry_that_is_down_in_mid_read_and_back_in_time_is_not_noticed() {
    let bytes = pattern(LENGTH);
    let (down, is_down) = std::sync::mpsc::channel();
    let down = Mutex::new(down);
    let stub = Stub::start_at(own_address(2), bytes.clone(), move |_| {
        let _ = down.lock().unwrap().send(());
        Answer::Cut(1000)
    });
    let (address, blob) = (stub.address, stub.blob(LENGTH as u64));
    thread::scope(|scope| {
        let reader = scope.spawn(|| read(&blob, 0, 100_000));
        is_down.recv_timeout(Duration::from_secs(20)).unwrap();
        drop(stub);
        let _stub = Stub::start_at(address, bytes.clone(), |_| Answer::Serve);
        assert_eq!(reader.join().unwrap().unwrap(), bytes[..100_000]);
    });
}

#[test]
fn a_registry_that_says_nothing_is_waited_for_no_longer_than_the_patience() {
    let stub = Stub::start(pattern(10), |_| Answer::After(Duration::from_secs(60), Box::new(Answer::Serve)));
    let blob = blob(&stub.url(), Arc::new(Credentials::Anonymous), impatient(), &digest(b"x"), 10);
    assert_eq!(read(&blob, 0, 10).unwrap_err().kind(), io::ErrorKind::TimedOut);
}

#[test]
fn the_cache_serves_what_it_has_while_the_registry_is_down() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = pattern(LENGTH);
    let stub = Stub::start_at(own_address(3), bytes.clone(), |_| Answer::Serve);
    let address = stub.address;
    let origin = blob(&stub.url(), Arc::new(Credentials::Anonymous), impatient(), &digest(b"x"), LENGTH as u64);
    let cache = BlockCache::open(&CacheOptions { refill: 0, ..CacheOptions::new(dir.path(), 1 << 20) }).unwrap();
    let blob = cache.blob(&digest(b"x"), Arc::new(origin));
    assert_eq!(read(&blob, 0, 65_536).unwrap(), bytes[..65_536]);
    drop(stub);
    assert_eq!(read(&blob, 1000, 5000).unwrap(), bytes[1000..6000]);
    assert!(read(&blob, 65_000, 1000).unwrap_err().to_string().contains("fetch bytes 65536..131072"));
    let _stub = Stub::start_at(address, bytes.clone(), |_| Answer::Serve);
    assert_eq!(read(&blob, 0, LENGTH).unwrap(), bytes);
}

/// Hands out tokens, each good until the next; knows `me` by password if `private`.
#[derive(Debug, Default)]
struct Tokens {
    given: AtomicUsize,
    /// The number of the token that is good.
    good: AtomicUsize,
}

fn token_rules(tokens: Arc<Tokens>, private: bool) -> impl Fn(&Ask) -> Answer {
    move |ask| {
        let authorization = ask.authorization.as_deref().unwrap_or_default();
        if ask.target.starts_with("/token") {
            let fine =
                ask.target.contains("scope=repository%3Ateam%2Fimage%3Apull") && ask.target.contains("service=test");
            if !fine || (private && authorization != "Basic bWU6c2VjcmV0") {
                return Answer::Say(401, vec![], "who are you");
            }
            let number = 1 + tokens.given.fetch_add(1, Ordering::SeqCst);
            tokens.good.store(number, Ordering::SeqCst);
            let body: &'static str = ["", r#"{"token":"t1"}"#, r#"{"token":"t2"}"#, r#"{"token":"t3"}"#][number];
            return Answer::Say(200, vec![("content-type", "application/json".into())], body);
        }
        if authorization == format!("Bearer t{}", tokens.good.load(Ordering::SeqCst)) {
            return Answer::Serve;
        }
        let realm = r#"Bearer realm="http://SELF/token",service="test""#;
        Answer::Say(401, vec![("www-authenticate", realm.to_owned())], "")
    }
}

#[test]
fn an_expired_token_is_renewed_once_for_all_readers() {
    let bytes = pattern(LENGTH);
    let tokens = Arc::new(Tokens::default());
    let stub = Stub::start(bytes.clone(), token_rules(Arc::clone(&tokens), false));
    let blob = stub.blob(LENGTH as u64);
    assert_eq!(read(&blob, 0, 10).unwrap(), bytes[..10]);
    tokens.good.store(99, Ordering::SeqCst);
    thread::scope(|scope| {
        for reader in 0..16usize {
            let (blob, bytes) = (&blob, &bytes);
            scope.spawn(move || assert_eq!(read(blob, reader as u64, 1000).unwrap(), bytes[reader..reader + 1000]));
        }
    });
    assert_eq!(tokens.given.load(Ordering::SeqCst), 2);
}

/// Credentials that somebody changes.
#[derive(Debug, Clone)]
struct Changing(Arc<Mutex<Credentials>>);

impl CredentialSource for Changing {
    fn credentials(&self, repo_blob_url: &str) -> io::Result<Credentials> {
        assert!(repo_blob_url.ends_with("/v2/team/image/blobs"));
        Ok(self.0.lock().unwrap().clone())
    }
}

fn me(password: &str) -> Credentials {
    Credentials::Basic { username: "me".into(), password: password.into() }
}

#[test]
fn credentials_are_looked_up_again_after_a_refusal() {
    let bytes = pattern(LENGTH);
    let tokens = Arc::new(Tokens::default());
    let stub = Stub::start(bytes.clone(), token_rules(Arc::clone(&tokens), true));
    let credentials = Changing(Arc::new(Mutex::new(me("old"))));
    let blob = stub.blob_as(credentials.clone(), LENGTH as u64);
    assert!(matches!(problem(read(&blob, 0, 10).unwrap_err()), FetchProblem::Token(_)));
    *credentials.0.lock().unwrap() = me("secret");
    assert_eq!(read(&blob, 0, 10).unwrap(), bytes[..10]);
    *credentials.0.lock().unwrap() = Credentials::Bearer("t1".into());
    assert_eq!(read(&blob, 0, 10).unwrap(), bytes[..10]);
}

#[test]
fn an_identity_token_is_traded_at_the_place_that_the_registry_names() {
    let bytes = pattern(LENGTH);
    let stub = Stub::start(bytes.clone(), |ask| match (&*ask.target, ask.authorization.as_deref()) {
        // A form is posted there; a password would be asked for with a query.
        ("/token", None) => {
            Answer::Say(200, vec![("content-type", "application/json".into())], r#"{"access_token":"traded"}"#)
        }
        (_, Some("Bearer traded")) => Answer::Serve,
        _ => Answer::Say(401, vec![("www-authenticate", r#"Bearer realm="http://SELF/token",service="s""#.into())], ""),
    });
    let blob = stub.blob_as(Credentials::Identity("identity".into()), LENGTH as u64);
    assert_eq!(read(&blob, 5, 10).unwrap(), bytes[5..15]);
    let refusing = Stub::start(bytes, |ask| match &*ask.target {
        "/token" => Answer::Say(401, vec![], "expired"),
        _ => Answer::Say(401, vec![("www-authenticate", r#"Bearer realm="http://SELF/token""#.into())], ""),
    });
    let blob = refusing.blob_as(Credentials::Identity("identity".into()), LENGTH as u64);
    let problem = problem(read(&blob, 0, 10).unwrap_err());
    assert!(matches!(&problem, FetchProblem::Identity(error) if error.to_string().contains("expired")), "{problem:?}");
}

/// Credentials that can't be looked up.
#[derive(Debug)]
struct Broken;

impl CredentialSource for Broken {
    fn credentials(&self, _: &str) -> io::Result<Credentials> {
        Err(io::Error::other("the helper is broken"))
    }
}

#[test]
fn credentials_that_can_not_be_had_hinder_only_what_needs_them() {
    let bytes = pattern(LENGTH);
    let public = Stub::start(bytes.clone(), token_rules(Arc::default(), false));
    assert_eq!(read(&public.blob_as(Broken, LENGTH as u64), 5, 10).unwrap(), bytes[5..15]);
    let no_token = Stub::start(vec![], token_rules(Arc::default(), true));
    let no_password = Stub::start(vec![], |_| say(401));
    for private in [no_token, no_password] {
        let problem = problem(read(&private.blob_as(Broken, LENGTH as u64), 0, 10).unwrap_err());
        let words = "the helper is broken";
        assert!(matches!(&problem, FetchProblem::Credentials(error) if error.to_string() == words), "{problem:?}");
    }
}

#[test]
fn a_password_is_sent_to_a_registry_without_tokens() {
    let bytes = pattern(LENGTH);
    let stub = Stub::start(bytes.clone(), |ask| match ask.authorization.as_deref() {
        Some("Basic bWU6c2VjcmV0") => Answer::Serve,
        _ => Answer::Say(401, vec![("www-authenticate", r#"Basic realm="x""#.to_owned())], "UNAUTHORIZED"),
    });
    assert_eq!(read(&stub.blob_as(me("secret"), LENGTH as u64), 0, 10).unwrap(), bytes[..10]);
    let problem = problem(read(&stub.blob_as(me("wrong"), LENGTH as u64), 0, 10).unwrap_err());
    assert!(matches!(&problem, FetchProblem::Unauthorized(words) if words.contains("UNAUTHORIZED")), "{problem:?}");
}

#[test]
fn storage_behind_a_redirect_never_sees_our_credentials_and_is_remembered() {
    let bytes = pattern(LENGTH);
    let signature = Arc::new(AtomicUsize::new(1));
    let storage = Stub::start(bytes.clone(), {
        let signature = Arc::clone(&signature);
        move |ask| match ask.target == format!("/store?signature={}", signature.load(Ordering::SeqCst)) {
            true if ask.authorization.is_none() => Answer::Serve,
            _ => say(403),
        }
    });
    let registry = Stub::start(vec![], {
        let (signature, place) = (Arc::clone(&signature), storage.address);
        move |ask| match ask.authorization.as_deref() {
            Some("Bearer mine") => {
                redirect(format!("http://{place}/store?signature={}", signature.load(Ordering::SeqCst)))
            }
            _ => say(401),
        }
    });
    let blob = registry.blob_as(Credentials::Bearer("mine".into()), LENGTH as u64);
    for _ in 0..3 {
        assert_eq!(read(&blob, 5, 10).unwrap(), bytes[5..15]);
    }
    assert_eq!((registry.asked(), storage.asked()), (2, 3), "a refusal, then a redirect that holds");
    signature.store(2, Ordering::SeqCst);
    assert_eq!(read(&blob, 5, 10).unwrap(), bytes[5..15]);
    assert_eq!((registry.asked(), storage.asked()), (3, 5), "an expired signature is asked for again");
    assert!(storage.seen().iter().all(|ask| ask.authorization.is_none()));
}

#[test]
fn redirects_without_end_are_refused() {
    let stub = Stub::start(vec![], |_| redirect("/again".to_owned()));
    assert!(matches!(problem(read(&stub.blob(10), 0, 10).unwrap_err()), FetchProblem::Redirect(_)));
    let stub = Stub::start(vec![], |_| say(302));
    assert!(matches!(problem(read(&stub.blob(10), 0, 10).unwrap_err()), FetchProblem::Redirect(_)));
}
