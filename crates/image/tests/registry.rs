//! Imports from a real registry, and from one that misbehaves.

mod common;
#[path = "common/registry.rs"]
mod registry;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use aenv_image::{Credentials, ImportError, ImportErrorKind, Imported, Progress};
use base64::Engine as _;
use common::{Bench, Image, OWNER, Tar, host_architecture, sha256};
use registry::{Answer, Front, PASSWORD, Registry};
use tokio_util::sync::CancellationToken;

fn hello() -> Image {
    let (mut lower, mut upper) = (Tar::default(), Tar::default());
    lower.dir("bin/").file("bin/hello", b"hello").file("old", b"");
    upper.file(".wh.old", b"").file("big", &[7; 300_000]);
    Image::of([lower.finish(), upper.finish()])
}

async fn import_as(bench: &Bench, reference: &str, credentials: Credentials) -> Result<Imported, ImportError> {
    let (importer, cancel) = (bench.importer(), CancellationToken::new());
    let reference = reference.parse().unwrap();
    importer.import(&reference, Some(credentials), &bench.target(), OWNER, &|_| {}, cancel).await
}

fn me(password: &str) -> Credentials {
    Credentials::Basic { username: "me".into(), password: password.into() }
}

async fn assert_nothing_left(bench: &Bench) {
    bench.assert_nothing_left().await;
    assert!(!bench.target().exists() && !bench.is_leased());
}

#[test]
#[ignore = "run by tests that import"]
fn the_daemon_of_a_test() {
    common::be_a_daemon();
}

#[tokio::test]
async fn an_image_is_pulled_by_tag_by_digest_and_by_short_name() {
    let (Some(registry), Some(mut bench)) = (Registry::start(false).await, Bench::start().await) else { return };
    let digest = registry.push("team/hello:v1", &hello()).await;
    let layers = std::sync::Mutex::new([0u64; 2]);
    let tell = |step: Progress| {
        if let Progress::Layer { index, total: 2, done_bytes, total_bytes } = step {
            assert!(done_bytes <= total_bytes);
            layers.lock().unwrap()[index] = total_bytes.get() - done_bytes.get();
        }
    };
    let reference = format!("{}/team/hello:v1", registry.host);
    let imported = bench.import_with(&reference, &tell, CancellationToken::new()).await.unwrap();
    assert_eq!(imported.digest, digest);
    assert_eq!(imported.config.cmd, ["/bin/hello"]);
    assert_eq!(layers.into_inner().unwrap(), [0, 0], "every layer's last report is that it is here");
    let ext4 = bench.ext4();
    ext4.assert_clean();
    assert_eq!(ext4.cat("/bin/hello"), b"hello");
    assert!(!ext4.exists("/old"));
    bench.import(&format!("{}/team/hello@{digest}", registry.host)).await.unwrap();
    bench.config.search_registries =
        vec![registry.host.parse().unwrap(), format!("{}/team", registry.host).parse().unwrap()];
    assert_eq!(bench.import("hello:v1").await.unwrap().digest, digest);
    bench.assert_nothing_left().await;
}

#[tokio::test]
async fn what_the_registry_does_not_have_is_not_found_in_its_words() {
    let (Some(registry), Some(mut bench)) = (Registry::start(false).await, Bench::start().await) else { return };
    registry.push("there:v1", &hello()).await;
    for (name, words) in [("there:v2", "MANIFEST_UNKNOWN: manifest unknown"), ("gone:v1", "MANIFEST_UNKNOWN")] {
        let error = bench.import(&format!("{}/{name}", registry.host)).await.unwrap_err();
        assert_eq!(error.kind(), ImportErrorKind::NotFound, "{}", error.report());
        assert!(error.to_string().contains(words) && error.to_string().contains(name), "{error}");
    }
    bench.config.search_registries =
        vec![registry.host.parse().unwrap(), format!("{}/a", registry.host).parse().unwrap()];
    let error = bench.import("gone").await.unwrap_err();
    assert_eq!(error.kind(), ImportErrorKind::NotFound);
    assert!(error.to_string().contains(&format!("{}/a/gone:latest", registry.host)), "all places are named: {error}");
    assert_nothing_left(&bench).await;
}

#[tokio::test]
async fn registries_that_are_not_allowed_are_not_asked() {
    let (Some(registry), Some(mut bench)) = (Registry::start(false).await, Bench::start().await) else { return };
    registry.push("hello:v1", &hello()).await;
    let reference = format!("{}/hello:v1", registry.host);
    for (allowed, kind) in [(vec![], false), (vec!["127.0.0.1".to_owned()], false), (vec![registry.host.clone()], true)]
    {
        bench.config.allowed_registries = Some(allowed);
        match bench.import(&reference).await {
            Ok(_) => assert!(kind),
            Err(error) => assert_eq!((error.kind(), kind), (ImportErrorKind::NotAllowed, false), "{error}"),
        }
    }
}

#[tokio::test]
async fn of_an_index_this_machines_image_is_taken_and_no_other() {
    let (Some(registry), Some(bench)) = (Registry::start(false).await, Bench::start().await) else { return };
    let mut other = hello();
    other.architecture = "s390x".into();
    let (mine, theirs) = (registry.push("x:mine", &hello()).await, registry.push("x:theirs", &other).await);
    let index = |entries: &[(&str, &str, usize)]| {
        let entries: Vec<_> = entries
            .iter()
            .map(|(digest, architecture, size)| {
                serde_json::json!({"mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": digest,
                    "size": size, "platform": {"os": "linux", "architecture": architecture}})
            })
            .collect();
        let kind = "application/vnd.docker.distribution.manifest.list.v2+json";
        serde_json::to_vec(&serde_json::json!({"schemaVersion": 2, "mediaType": kind, "manifests": entries})).unwrap()
    };
    let kind = "application/vnd.docker.distribution.manifest.list.v2+json";
    let sizes = (hello().parts().1.len(), other.parts().1.len());
    let both = index(&[(&theirs, "s390x", sizes.1), (&mine, host_architecture(), sizes.0)]);
    registry.push_manifest(&registry.reference("x:both"), both, kind).await;
    registry.push_manifest(&registry.reference("x:none"), index(&[(&theirs, "s390x", sizes.1)]), kind).await;
    assert_eq!(bench.import(&format!("{}/x:both", registry.host)).await.unwrap().digest, mine);
    bench.forget();
    for name in ["x:none", "x:theirs"] {
        let error = bench.import(&format!("{}/{name}", registry.host)).await.unwrap_err();
        assert_eq!(error.kind(), ImportErrorKind::WrongArchitecture, "{}", error.report());
        let text = error.to_string();
        assert!(text.contains("linux/s390x") && text.contains(host_architecture()), "{text}");
    }
    assert_nothing_left(&bench).await;
}

#[tokio::test]
async fn a_password_is_taken_from_the_caller_or_from_dockers_configuration() {
    let (Some(registry), Some(mut bench)) = (Registry::start(true).await, Bench::start().await) else { return };
    registry.push("hello:v1", &hello()).await;
    let reference = format!("{}/hello:v1", registry.host);
    for result in [bench.import(&reference).await, import_as(&bench, &reference, me("wrong")).await] {
        let error = result.unwrap_err();
        assert_eq!(error.kind(), ImportErrorKind::Unauthorized, "{}", error.report());
    }
    assert_nothing_left(&bench).await;
    import_as(&bench, &reference, me(PASSWORD)).await.unwrap();
    let config = bench.dir.path().join("config.json");
    let auth = base64::engine::general_purpose::STANDARD.encode(format!("me:{PASSWORD}"));
    std::fs::write(&config, format!(r#"{{"auths":{{"{}":{{"auth":"{auth}"}}}}}}"#, registry.host)).unwrap();
    bench.config.docker_config = Some(config.clone());
    bench.import(&reference).await.unwrap();
    std::fs::write(&config, r#"{"credsStore":"of-no-such-helper"}"#).unwrap();
    let error = bench.import(&reference).await.unwrap_err();
    assert!(error.to_string().contains("credential helper"), "what went wrong before explains it: {error}");
}

/// A front that wants a bearer token, and hands them out: to `me` by password, or for the identity token `identity`.
async fn token_front(registry: &Registry) -> Front {
    let basic = format!("Basic {}", base64::engine::general_purpose::STANDARD.encode(format!("me:{PASSWORD}")));
    Front::start(&registry.host, move |request| {
        let authorization = request.headers.get("authorization").map(String::as_str);
        let json = || vec![("content-type", "application/json".to_owned())];
        if request.target.starts_with("/token") {
            let posted = String::from_utf8_lossy(&request.body);
            let identity = request.method == "POST"
                && posted.contains("grant_type=refresh_token")
                && posted.contains("refresh_token=identity");
            let parts = format!("{}&{posted}", request.target);
            let scoped = parts.contains("scope=repository%3Ahello%3Apull") && parts.contains("service=test");
            return match identity || authorization == Some(&basic) {
                true if scoped => Answer::Say(200, json(), r#"{"token":"good","access_token":"good"}"#.into()),
                true => Answer::Say(400, json(), "no scope".into()),
                false => {
                    Answer::Say(401, json(), r#"{"errors":[{"code":"UNAUTHORIZED","message":"who are you"}]}"#.into())
                }
            };
        }
        if authorization == Some("Bearer good") {
            return Answer::Pass;
        }
        let host = &request.headers["host"];
        let challenge = format!(r#"Bearer realm="http://{host}/token",service="test""#);
        Answer::Say(401, vec![("www-authenticate", challenge)], String::new())
    })
    .await
}

#[tokio::test]
async fn a_bearer_token_is_fetched_where_the_registry_says() {
    let (Some(registry), Some(bench)) = (Registry::start(false).await, Bench::start().await) else { return };
    registry.push("hello:v1", &hello()).await;
    let front = token_front(&registry).await;
    let reference = format!("{}/hello:v1", front.host);
    let error = bench.import(&reference).await.unwrap_err();
    assert_eq!(error.kind(), ImportErrorKind::Unauthorized);
    assert!(error.to_string().contains("UNAUTHORIZED: who are you"), "{error}");
    assert_nothing_left(&bench).await;
    import_as(&bench, &reference, me(PASSWORD)).await.unwrap();
    import_as(&bench, &reference, Credentials::Bearer("good".into())).await.unwrap();
}

#[tokio::test]
async fn an_identity_token_of_dockers_configuration_is_traded_for_an_access_token() {
    let (Some(registry), Some(mut bench)) = (Registry::start(false).await, Bench::start().await) else { return };
    registry.push("hello:v1", &hello()).await;
    let front = token_front(&registry).await;
    let config = bench.dir.path().join("config.json");
    bench.config.docker_config = Some(config.clone());
    for (identity, good) in [("identity", true), ("expired", false)] {
        std::fs::write(&config, format!(r#"{{"auths":{{"{}":{{"identitytoken":"{identity}"}}}}}}"#, front.host))
            .unwrap();
        match bench.import(&format!("{}/hello:v1", front.host)).await {
            Ok(_) => assert!(good),
            Err(error) => {
                assert_eq!((error.kind(), good), (ImportErrorKind::Unauthorized, false), "{}", error.report());
                assert!(error.to_string().contains("who are you"), "{error}");
            }
        }
    }
}

#[tokio::test]
async fn credentials_for_a_short_name_go_to_the_first_registry_only() {
    let (Some(registry), Some(mut bench)) = (Registry::start(false).await, Bench::start().await) else { return };
    let second = Front::start(&registry.host, |_| Answer::Pass).await;
    bench.config.search_registries = vec![registry.host.parse().unwrap(), second.host.parse().unwrap()];
    let error = import_as(&bench, "gone", me(PASSWORD)).await.unwrap_err();
    assert_eq!(error.kind(), ImportErrorKind::NotFound);
    assert_eq!(second.count(""), 0);
    bench.import("gone").await.unwrap_err();
    assert!(second.count("/manifests/") > 0);
}

#[tokio::test]
async fn dropping_an_import_leaves_nothing() {
    let (Some(registry), Some(bench)) = (Registry::start(false).await, Bench::start().await) else { return };
    registry.push("hello:v1", &hello()).await;
    let layer = sha256(&hello().parts().0[1]);
    let front = Front::start(&registry.host, move |request| match request.target.contains(&layer) {
        true => Answer::Hang,
        false => Answer::Pass,
    })
    .await;
    let unpacking = tokio::sync::Notify::new();
    let tell = |step: Progress| {
        if matches!(step, Progress::Unpacking { .. }) {
            unpacking.notify_one();
        }
    };
    let reference = format!("{}/hello:v1", front.host);
    tokio::select! {
        result = bench.import_with(&reference, &tell, CancellationToken::new()) => panic!("{result:?}"),
        () = unpacking.notified() => {}
    }
    assert_nothing_left(&bench).await;
}

#[tokio::test]
async fn passing_failures_are_passed_over() {
    let (Some(registry), Some(bench)) = (Registry::start(false).await, Bench::start().await) else { return };
    registry.push("hello:v1", &hello()).await;
    let (manifests, blobs) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let front = Front::start(&registry.host, move |request| {
        if request.target.contains("/manifests/") {
            return match manifests.fetch_add(1, Ordering::Relaxed) {
                0 => Answer::Say(503, vec![], "come again".into()),
                1 => Answer::Say(
                    429,
                    vec![("content-type", "application/json".into())],
                    r#"{"errors":[{"code":"TOOMANYREQUESTS","message":"slow down"}]}"#.into(),
                ),
                _ => Answer::Pass,
            };
        }
        match request.target.contains("/blobs/").then(|| blobs.fetch_add(1, Ordering::Relaxed)) {
            Some(1 | 2) => Answer::Cut(100),
            _ => Answer::Pass,
        }
    })
    .await;
    bench.import(&format!("{}/hello:v1", front.host)).await.unwrap();
    assert_eq!(front.count("/manifests/"), 3);
    assert_eq!(front.count("/blobs/"), 5, "a configuration and two layers, and two of them once more");
    bench.ext4().assert_clean();
}

#[tokio::test]
async fn lasting_failures_end_in_the_registrys_words_when_patience_does() {
    let (Some(registry), Some(mut bench)) = (Registry::start(false).await, Bench::start().await) else { return };
    let front = Front::start(&registry.host, |request| match request.target.contains("/manifests/") {
        true => Answer::Say(502, vec![], "the backend is on fire".into()),
        false => Answer::Pass,
    })
    .await;
    bench.config.patience = Duration::from_secs(1);
    let error = bench.import(&format!("{}/hello:v1", front.host)).await.unwrap_err();
    assert_eq!(error.kind(), ImportErrorKind::Registry);
    assert!(error.to_string().contains("502: the backend is on fire"), "{error}");
    assert!(front.count("/manifests/") > 1);
    let error = bench.import("127.0.0.1:1/nobody/listens").await.unwrap_err();
    assert_eq!(error.kind(), ImportErrorKind::Registry);
    assert!(error.report().contains("Connection refused"), "{}", error.report());
    assert_nothing_left(&bench).await;
}

#[tokio::test]
async fn a_blob_that_is_not_what_its_digest_says_is_refused() {
    let (Some(registry), Some(bench)) = (Registry::start(false).await, Bench::start().await) else { return };
    registry.push("hello:v1", &hello()).await;
    let layer = sha256(&hello().parts().0[1]);
    for part in [layer, sha256(&hello().file())] {
        let front = Front::start(&registry.host, move |request| match request.target.contains(&part) {
            true => Answer::Corrupt,
            false => Answer::Pass,
        })
        .await;
        let error = bench.import(&format!("{}/hello:v1", front.host)).await.unwrap_err();
        assert_eq!(error.kind(), ImportErrorKind::Invalid, "{}", error.report());
        assert!(error.to_string().contains("Invalid digest"), "{error}");
        assert_nothing_left(&bench).await;
    }
}

#[tokio::test]
async fn cancelling_ends_a_pull_that_hangs_and_leaves_nothing() {
    let (Some(registry), Some(bench)) = (Registry::start(false).await, Bench::start().await) else { return };
    registry.push("hello:v1", &hello()).await;
    let layer = sha256(&hello().parts().0[1]);
    let front = Front::start(&registry.host, move |request| match request.target.contains(&layer) {
        true => Answer::Hang,
        false => Answer::Pass,
    })
    .await;
    let cancel = CancellationToken::new();
    let trigger = cancel.clone();
    // The first layer is unpacked while the second hangs.
    let tell = move |step: Progress| {
        if matches!(step, Progress::Unpacking { index: 0, .. }) {
            trigger.cancel();
        }
    };
    let begun = Instant::now();
    let error = bench.import_with(&format!("{}/hello:v1", front.host), &tell, cancel).await.unwrap_err();
    assert_eq!(error.kind(), ImportErrorKind::Cancelled);
    assert!(begun.elapsed() < Duration::from_secs(10));
    assert_nothing_left(&bench).await;
}
