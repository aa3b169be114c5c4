//! What the repository promises, on every store.

#[path = "../../objects/tests/support/mod.rs"]
mod s3;
mod support;

use std::sync::Arc;

use aenv_block_overlaybd::{Algorithm, LocalFile, unwrap};
use aenv_model::{Bytes, TemplateId};
use aenv_objects::{Condition, LocalStore, ObjectStore, S3Store};
use aenv_repository::{
    ArtifactCache, BuildStatus, Clock, Content, ErrorReason, FileKind, NewFile, Options, Packing, Repository,
    RepositoryError, RepositoryErrorKind, Source, Swept,
};
use futures::future::join_all;
use support::{RESOURCES, TestClock, is_whole, keys, node, publication, snapshot};

#[tokio::test]
async fn a_shared_folder_is_a_repository() {
    let dir = tempfile::tempdir().unwrap();
    let open = || Arc::new(LocalStore::open(dir.path()).unwrap()) as Arc<dyn ObjectStore>;
    conformance([open(), open()]).await;
}

#[tokio::test]
async fn an_s3_bucket_is_a_repository() {
    let server = s3::Server::start().await;
    let open = || Arc::new(S3Store::open(&server.config()).unwrap()) as Arc<dyn ObjectStore>;
    conformance([open(), open()]).await;
}

/// All of it, on the stores of two nodes that are the same place.
async fn conformance(stores: [Arc<dyn ObjectStore>; 2]) {
    snapshots(&stores).await;
    layers_are_shared_and_go_with_the_last_record(&stores).await;
    names(&stores).await;
    builds(&stores).await;
    bad_records_hide_no_other(&stores).await;
    files(&stores).await;
    assert_eq!(keys(&stores[0]).await, [] as [String; 0], "nothing is left");
}

async fn snapshots(stores: &[Arc<dyn ObjectStore>; 2]) {
    let clock = TestClock::new();
    let [a, b] = [node(&stores[0], &clock), node(&stores[1], &clock)];
    assert!(a.list().await.unwrap().records.is_empty());
    assert!(matches!(b.find("prepared").await, Err(RepositoryError::NotFound(_))));
    let content = publication(&["base", "top"]);
    let record = snapshot(&a, Some("prepared"), &content).await.unwrap();
    assert_eq!(record.committed.as_ref().unwrap().files.len(), 4);
    for reference in ["prepared".to_owned(), record.id.to_string()] {
        let found = b.find(&reference).await.unwrap();
        assert_eq!(found, record);
        is_whole(&b, &found, &content).await.unwrap();
    }
    let listing = b.list().await.unwrap();
    assert_eq!((listing.records, listing.problems), (vec![record.clone()], vec![]));
    let deleted = b.delete(record.id).await.unwrap();
    assert_eq!(deleted, record);
    for reference in ["prepared".to_owned(), record.id.to_string()] {
        assert_eq!(a.find(&reference).await.unwrap_err().kind(), RepositoryErrorKind::NotFound);
    }
    assert_eq!(a.delete(record.id).await.unwrap_err().kind(), RepositoryErrorKind::NotFound);
    let error = is_whole(&a, &record, &content).await.unwrap_err();
    assert!(matches!(error, RepositoryError::Deleted(id) if id == record.id), "{error:?}");
    assert!(a.list().await.unwrap().records.is_empty());
    let swept = a.sweep().await.unwrap();
    assert_eq!(swept, Swept { layers: 2, layer_bytes: 7, aliases: 1, ..Swept::default() });
}

async fn layers_are_shared_and_go_with_the_last_record(stores: &[Arc<dyn ObjectStore>; 2]) {
    let clock = TestClock::new();
    let [a, b] = [node(&stores[0], &clock), node(&stores[1], &clock)];
    let contents = [publication(&["base", "base", "one"]), publication(&["base", "two"])];
    let first = snapshot(&a, None, &contents[0]).await.unwrap();
    let second = snapshot(&b, None, &contents[1]).await.unwrap();
    let layers = async || keys(&stores[0]).await.iter().filter(|key| key.starts_with("managed-layers/")).count();
    assert_eq!(layers().await, 3);
    assert_eq!(a.sweep().await.unwrap(), Swept::default());
    b.delete(first.id).await.unwrap();
    let swept = b.sweep().await.unwrap();
    assert_eq!((swept.layers, layers().await), (1, 2));
    is_whole(&a, &second, &contents[1]).await.unwrap();
    a.delete(second.id).await.unwrap();
    assert_eq!(a.sweep().await.unwrap().layers, 2);
}

async fn names(stores: &[Arc<dyn ObjectStore>; 2]) {
    let clock = TestClock::new();
    let [a, b] = [node(&stores[0], &clock), node(&stores[1], &clock)];
    // Of many who want one name at once, one gets it.
    let content = publication(&["base"]);
    let wanted = [&a, &b, &a, &b, &a, &b].map(|node| snapshot(node, Some("wanted"), &content));
    let (got, refused): (Vec<_>, Vec<_>) = join_all(wanted).await.into_iter().partition(Result::is_ok);
    assert_eq!(got.len(), 1);
    for refused in refused {
        assert!(matches!(refused, Err(RepositoryError::Taken { .. })), "{refused:?}");
    }
    let holder = got.into_iter().next().unwrap().unwrap();
    assert_eq!(b.find("wanted").await.unwrap().id, holder.id);
    assert!(matches!(a.announce("wanted", RESOURCES).await, Err(RepositoryError::Taken { .. })));
    // Given up, it is another's at once.
    a.delete(holder.id).await.unwrap();
    let next = snapshot(&b, Some("wanted"), &content).await.unwrap();
    assert_eq!(a.find("wanted").await.unwrap().id, next.id);
    a.delete(next.id).await.unwrap();
    for bad in ["", "a/b", "..", ".hidden", "ä", &"x".repeat(300)] {
        assert_eq!(b.find(bad).await.unwrap_err().kind(), RepositoryErrorKind::NotFound, "{bad}");
        assert_eq!(snapshot(&a, Some(bad), &content).await.unwrap_err().kind(), RepositoryErrorKind::Unusable, "{bad}");
    }
    a.sweep().await.unwrap();
}

async fn builds(stores: &[Arc<dyn ObjectStore>; 2]) {
    let clock = TestClock::new();
    let [a, b] = [node(&stores[0], &clock), node(&stores[1], &clock)];
    // Two nodes announce the same new name at once: it is one template.
    let announced = tokio::join!(a.announce("base", RESOURCES), b.announce("base", RESOURCES));
    let records = [announced.0, announced.1];
    let ids: Vec<_> =
        records.iter().filter_map(|announced| announced.as_ref().ok()).map(|(record, _)| record.id).collect();
    assert!(!ids.is_empty() && ids.iter().all(|id| *id == ids[0]), "{records:?}");
    let (template, first) = a.announce("base", RESOURCES).await.unwrap();
    assert_eq!(template.id, ids[0]);
    assert_eq!(b.find("base").await.unwrap().committed, None);
    // One of many takes it up.
    let claims = join_all([&a, &b, &a, &b].map(|node| node.claim(template.id, first))).await;
    assert_eq!(claims.iter().filter(|claim| claim.is_ok()).count(), 1, "{claims:?}");
    let status = |record: &aenv_repository::Record| match &record.source {
        Source::Template { build } => (build.id, build.status),
        Source::Sandbox { .. } => panic!("a template"),
    };
    assert_eq!(status(&b.find("base").await.unwrap()), (first, BuildStatus::Building));
    let contents = [publication(&["base", "one"]), publication(&["base", "two"])];
    a.publish_build(template.id, first, contents[0].clone()).await.unwrap();
    let ready = b.find("base").await.unwrap();
    assert_eq!(status(&ready), (first, BuildStatus::Ready));
    is_whole(&b, &ready, &contents[0]).await.unwrap();
    // A newer build that fails leaves what there was; one that does not takes its place.
    let (_, second) = b.announce("base", RESOURCES).await.unwrap();
    b.claim(template.id, second).await.unwrap();
    let reason = ErrorReason { message: "no such image".into(), step: "base".into() };
    b.fail(template.id, second, reason).await.unwrap();
    let failed = a.find("base").await.unwrap();
    assert_eq!((status(&failed), &failed.committed), ((second, BuildStatus::Error), &ready.committed));
    let (_, third) = b.announce("base", RESOURCES).await.unwrap();
    b.claim(template.id, third).await.unwrap();
    b.publish_build(template.id, third, contents[1].clone()).await.unwrap();
    is_whole(&a, &a.find("base").await.unwrap(), &contents[1]).await.unwrap();
    let error = is_whole(&a, &ready, &contents[0]).await.unwrap_err();
    assert!(matches!(error, RepositoryError::Deleted(_)), "{error:?}");
    // What is deleted meanwhile is not brought back.
    let (_, fourth) = a.announce("base", RESOURCES).await.unwrap();
    a.claim(template.id, fourth).await.unwrap();
    b.delete(template.id).await.unwrap();
    let error = a.publish_build(template.id, fourth, contents[0].clone()).await.unwrap_err();
    assert!(matches!(error, RepositoryError::Deleted(_)), "{error:?}");
    assert!(matches!(a.claim(template.id, fourth).await, Err(RepositoryError::NotFound(_))));
    assert!(a.list().await.unwrap().records.is_empty());
    a.sweep().await.unwrap();
}

async fn bad_records_hide_no_other(stores: &[Arc<dyn ObjectStore>; 2]) {
    let clock = TestClock::new();
    let a = node(&stores[0], &clock);
    let content = publication(&["base"]);
    let good = snapshot(&a, Some("good"), &content).await.unwrap();
    let garbage = snapshot(&a, None, &publication(&["garbage"])).await.unwrap();
    let newer = TemplateId::new();
    let bad = [
        (format!("catalog/records/{newer}.json"), format!(r#"{{"version": 7, "id": "{newer}"}}"#)),
        (format!("catalog/records/{}.json", TemplateId::new()), "{".to_owned()),
        ("catalog/records/strange".to_owned(), String::new()),
    ];
    for (key, text) in &bad {
        stores[0].put(&key.parse().unwrap(), bytes::Bytes::from(text.clone()), Condition::None).await.unwrap();
    }
    let newers = format!("artifacts/{newer}/{}/state", aenv_model::CaptureId::new());
    stores[0].put(&newers.parse().unwrap(), bytes::Bytes::from_static(b"x"), Condition::None).await.unwrap();
    let listing = a.list().await.unwrap();
    assert_eq!(listing.records.len(), 2);
    assert_eq!(listing.problems.len(), 3, "{:?}", listing.problems);
    assert!(listing.problems.iter().any(|problem| problem.problem.contains("format 7")), "{:?}", listing.problems);
    assert_eq!(a.find(&newer.to_string()).await.unwrap_err().kind(), RepositoryErrorKind::Unusable);
    assert_eq!(a.delete(newer).await.unwrap_err().kind(), RepositoryErrorKind::Unusable);
    // Whatever they may need stays.
    a.delete(garbage.id).await.unwrap();
    let swept = a.sweep().await.unwrap();
    assert_eq!((swept.layers, swept.artifacts, swept.problems.len()), (0, 0, 2));
    is_whole(&a, &good, &content).await.unwrap();
    for (key, _) in &bad {
        stores[0].delete(&key.parse().unwrap()).await.unwrap();
    }
    a.delete(good.id).await.unwrap();
    let swept = a.sweep().await.unwrap();
    assert_eq!((swept.layers, swept.artifacts), (2, 1));
}

#[tokio::test]
async fn layers_are_compressed_on_their_way_if_that_is_wanted() {
    let dir = tempfile::tempdir().unwrap();
    let store = Arc::new(LocalStore::open(dir.path().join("store")).unwrap()) as Arc<dyn ObjectStore>;
    let packing_dir = dir.path().join("packing");
    let packing = Packing { algorithm: Algorithm::Lz4, workers: 2, dir: packing_dir.clone() };
    let options = Options { packing: Some(packing), ..Options::default() };
    let packs = Repository::new(Arc::clone(&store), options, Clock::system());
    let (layer, raw) = (dir.path().join("layer"), vec![7; 1_000_000]);
    std::fs::write(&layer, &raw).unwrap();
    let mut content = publication(&[]);
    for (name, kind) in [("memory-000.commit", FileKind::Layer), ("kernel", FileKind::Common)] {
        content.files.push(NewFile { name: name.into(), content: Content::File(layer.clone()), kind });
    }
    for _ in 0..2 {
        let record = snapshot(&packs, None, &content).await.unwrap();
        let files = &record.committed.as_ref().unwrap().files;
        let size = |name: &str| files.iter().find(|file| file.name == name).unwrap().size;
        assert!(size("memory-000.commit") < 100_000, "{files:?}");
        assert_eq!(size("kernel"), 1_000_000);
        let cache = ArtifactCache::open(&dir.path().join("cache"), Bytes::mib(10)).unwrap();
        let fetched = packs.fetch(&record, &cache).await.unwrap();
        let path = fetched.files.iter().find(|(name, _)| name == "memory-000.commit").unwrap().1.path().to_owned();
        let (payload, packaging) = unwrap(Arc::new(LocalFile::open(&path).unwrap())).unwrap();
        let mut unpacked = vec![0; raw.len()];
        payload.read_at(0, &mut unpacked).unwrap();
        assert!(packaging.zfile.is_some() && unpacked == raw);
        assert_eq!(std::fs::read_dir(&packing_dir).unwrap().count(), 0);
        // The second time it is known what it becomes, and it is not there any more.
        packs.delete(record.id).await.unwrap();
        assert_eq!(packs.sweep().await.unwrap().layers, 2);
    }
}

async fn files(stores: &[Arc<dyn ObjectStore>; 2]) {
    let clock = TestClock::new();
    let [a, b] = [node(&stores[0], &clock), node(&stores[1], &clock)];
    let dir = tempfile::tempdir().unwrap();
    let mut content = publication(&["base"]);
    // More than one request, and not a multiple of one; and nothing.
    for (name, length) in [("large", (20 << 20) + 17), ("empty", 0)] {
        let path = dir.path().join(name);
        std::fs::write(&path, (0..length).map(|at| (at % 251) as u8).collect::<Vec<_>>()).unwrap();
        content.files.push(NewFile { name: name.into(), content: Content::File(path), kind: FileKind::Common });
    }
    let record = snapshot(&a, None, &content).await.unwrap();
    is_whole(&b, &record, &content).await.unwrap();
    // What was changed in the store is not given to anybody.
    let large = record.committed.as_ref().unwrap().files.iter().find(|file| file.name == "large").unwrap();
    let key = format!("managed-layers/{}", large.digest).parse().unwrap();
    stores[0].put(&key, bytes::Bytes::from(vec![0; large.size as usize]), Condition::None).await.unwrap();
    let error = is_whole(&b, &record, &content).await.unwrap_err();
    assert_eq!(error.kind(), RepositoryErrorKind::Unusable, "{error:?}");
    a.delete(record.id).await.unwrap();
    for wrong in ["a/b", "..", ""] {
        let mut content = publication(&[]);
        content.files[0].name = wrong.into();
        assert_eq!(snapshot(&a, None, &content).await.unwrap_err().kind(), RepositoryErrorKind::Unusable);
    }
    let mut content = publication(&[]);
    let missing = Content::File(dir.path().join("missing"));
    content.files.push(NewFile { name: "missing".into(), content: missing, kind: FileKind::Common });
    assert_eq!(snapshot(&a, None, &content).await.unwrap_err().kind(), RepositoryErrorKind::Local);
    assert_eq!(a.sweep().await.unwrap().layers, 3);
}
