//! Images of overlaybd blobs: found, told from others, and looked at before they are taken.

mod common;
#[path = "common/registry.rs"]
mod registry;

use std::error::Error as _;
use std::path::Path;

use aenv_image::{ImageInfo, ImportError, ImportErrorKind};
use common::{Bench, Image, Tar, host_architecture, sha256};
use registry::{Answer, Front, Registry};
use serde_json::{Value, json};

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const INDEX: &str = "application/vnd.oci.image.index.v1+json";
const NATIVE: &str = "application/vnd.containerd.overlaybd.native.v1+json";
const AZURE: &str = "application/vnd.azure.artifact.streaming.v1";
const TAR: &str = "application/vnd.oci.image.layer.v1.tar";

/// A layer that overlaybd's own tools made.
fn golden(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../block/overlaybd/tests/fixtures").join(name);
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn three() -> Vec<Vec<u8>> {
    ["stack/st-base.commit", "zlsmt/zl-tar-lz4-4k.commit", "stack/st-top.commit"].map(golden).into()
}

fn plain() -> Image {
    let mut layer = Tar::default();
    layer.dir("bin/").file("bin/hello", b"hello");
    Image::of([layer.finish()])
}

fn config() -> Vec<u8> {
    serde_json::to_vec(
        &json!({"os": "linux", "config": {"Cmd": ["/sbin/native"]}, "rootfs": {"type": "layers", "diff_ids": []}}),
    )
    .unwrap()
}

/// The descriptor of an overlaybd blob, as converters write it.
fn descriptor(blob: &[u8]) -> Value {
    let digest = sha256(blob);
    json!({"mediaType": TAR, "digest": digest, "size": blob.len(), "annotations": {
        "containerd.io/snapshot/overlaybd/blob-digest": digest,
        "containerd.io/snapshot/overlaybd/blob-size": blob.len().to_string(),
        "containerd.io/snapshot/overlaybd/version": "0.1.0"}})
}

fn manifest(layers: &[Value], more: Value) -> Vec<u8> {
    let config = config();
    let mut manifest = json!({"schemaVersion": 2, "mediaType": MANIFEST, "layers": layers,
        "config": {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": sha256(&config), "size": config.len()}});
    manifest.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    serde_json::to_vec(&manifest).unwrap()
}

impl Registry {
    async fn push_blobs(&self, name: &str, blobs: &[Vec<u8>]) {
        let client = self.client().await;
        for blob in blobs.iter().chain([&config()]) {
            client.push_blob(&self.reference(name), blob.clone(), &sha256(blob)).await.unwrap();
        }
    }

    /// Pushes an overlaybd image and gives its digest.
    async fn push_native(&self, name: &str, blobs: &[Vec<u8>], more: Value) -> String {
        self.push_blobs(name, blobs).await;
        let layers: Vec<_> = blobs.iter().map(|blob| descriptor(blob)).collect();
        let manifest = manifest(&layers, more);
        self.push_manifest(&self.reference(name), manifest.clone(), MANIFEST).await;
        sha256(&manifest)
    }

    async fn push_index(&self, name: &str, entries: &[Value]) -> String {
        let index = json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": entries});
        let index = serde_json::to_vec(&index).unwrap();
        self.push_manifest(&self.reference(name), index.clone(), INDEX).await;
        sha256(&index)
    }

    /// Says under the tag for it that `entries` refer to `subject`.
    async fn push_referrers(&self, repository: &str, subject: &str, entries: &[Value]) {
        self.push_index(&format!("{repository}:{}", subject.replace(':', "-")), entries).await;
    }
}

fn entry(digest: &str, artifact: &str) -> Value {
    json!({"mediaType": MANIFEST, "digest": digest, "size": 400, "artifactType": artifact})
}

async fn inspect(bench: &Bench, reference: &str) -> Result<ImageInfo, ImportError> {
    bench.importer().inspect(&reference.parse().unwrap(), None).await
}

fn digests(info: &ImageInfo) -> Vec<String> {
    info.layers.iter().map(|layer| layer.digest.clone().unwrap()).collect()
}

#[tokio::test]
async fn an_overlaybd_image_is_opened_where_it_is() {
    let Some(registry) = Registry::start(false).await else { return };
    let digest = registry.push_native("team/disk:v1", &three(), json!({"artifactType": NATIVE})).await;
    let info = inspect(&Bench::new(), &format!("{}/team/disk:v1", registry.host)).await.unwrap();
    assert_eq!(info.digest, digest);
    assert_eq!(info.config.cmd, ["/sbin/native"]);
    assert_eq!(digests(&info), three().iter().map(|blob| sha256(blob)).collect::<Vec<_>>());
    let native = info.native.unwrap();
    assert_eq!(native.repo_blob_url.unwrap(), format!("http://{}/v2/team/disk/blobs", registry.host));
    assert_eq!(native.virtual_size.get(), 2 << 20, "the topmost layer tells the size");
}

#[tokio::test]
async fn what_only_helps_to_read_the_layers_is_no_layer() {
    let Some(registry) = Registry::start(false).await else { return };
    let (base, trace) = (golden("stack/st-base.commit"), b"a trace of accesses".to_vec());
    registry.push_blobs("disk:v1", &[base.clone(), trace.clone()]).await;
    let mut acceleration = descriptor(&trace);
    acceleration["annotations"]["containerd.io/snapshot/overlaybd/acceleration-layer"] = "yes".into();
    let manifest = manifest(&[descriptor(&base), acceleration], json!({}));
    registry.push_manifest(&registry.reference("disk:v1"), manifest, MANIFEST).await;
    let info = inspect(&Bench::new(), &format!("{}/disk:v1", registry.host)).await.unwrap();
    assert_eq!(digests(&info), [sha256(&base)]);
}

#[tokio::test]
async fn an_overlaybd_image_may_be_local() {
    let (bench, folder) = (Bench::new(), tempfile::tempdir().unwrap());
    let (base, config) = (golden("stack/st-base.commit"), config());
    let manifest = manifest(&[descriptor(&base)], json!({}));
    let index = json!({"schemaVersion": 2, "manifests": [
        {"mediaType": MANIFEST, "digest": sha256(&manifest), "size": manifest.len()}]});
    std::fs::create_dir_all(folder.path().join("blobs/sha256")).unwrap();
    std::fs::write(folder.path().join("index.json"), index.to_string()).unwrap();
    let blob = |bytes: &[u8]| folder.path().join("blobs").join(sha256(bytes).replace(':', "/"));
    for bytes in [&base, &config, &manifest] {
        std::fs::write(blob(bytes), bytes).unwrap();
    }
    let reference = format!("oci:{}", folder.path().display());
    let native = inspect(&bench, &reference).await.unwrap().native.unwrap();
    assert_eq!((native.repo_blob_url, native.virtual_size.get()), (None, 1 << 20));
    let mut broken = base.clone();
    broken[100] = 1; // a magic byte is not zero
    broken[0] ^= 0xff;
    std::fs::write(blob(&base), broken).unwrap();
    let error = inspect(&bench, &reference).await.unwrap_err();
    assert_eq!(error.kind(), ImportErrorKind::Invalid, "{}", error.report());
}

#[tokio::test]
async fn a_broken_layer_is_named_before_the_image_is_taken() {
    let Some(registry) = Registry::start(false).await else { return };
    let (base, compressed) = (golden("lsmt/lsmt-basic.commit"), golden("zlsmt/zl-lz4-4k.commit"));
    let trailer = base.len() - 4096;
    let changed = |blob: &[u8], at: usize, bytes: &[u8]| {
        let mut blob = blob.to_vec();
        blob[at..at + bytes.len()].copy_from_slice(bytes);
        blob
    };
    let cases = [
        ("cut", base[..base.len() - 512].to_vec(), "magic"),
        ("cut within its header", base[..5000].to_vec(), "header and a trailer"),
        ("of other bytes", vec![7; 50_000], "neither LSMT nor ZFile"),
        ("without a trailer", changed(&base, trailer, &[0; 390]), "magic"),
        ("with an index outside", changed(&base, trailer + 32, &(1u64 << 40).to_le_bytes()), "do not fit before"),
        ("with an index too long", changed(&base, trailer + 40, &100_000u64.to_le_bytes()), "do not fit before"),
        ("cut and compressed", compressed[..compressed.len() - 100].to_vec(), "ZFile"),
        ("with a damaged jump table", changed(&compressed, compressed.len() - 512 - 20, &[0xff; 8]), "jump table"),
    ];
    let bench = Bench::new();
    for (number, (what, blob, why)) in cases.into_iter().enumerate() {
        let name = format!("broken:v{number}");
        let layers = [base.clone(), golden("stack/st-mid.commit"), blob.clone(), golden("stack/st-top.commit")];
        registry.push_native(&name, &layers, json!({})).await;
        let error = inspect(&bench, &format!("{}/{name}", registry.host)).await.unwrap_err();
        assert_eq!(error.kind(), ImportErrorKind::Invalid, "{what}: {}", error.report());
        assert!(error.to_string().contains(&format!("layer 3 ({})", sha256(&blob))), "{what}: {error}");
        assert!(error.report().contains(why), "{what}: {}", error.report());
    }
}

#[tokio::test]
async fn a_manifest_that_lies_about_its_layers_is_refused() {
    let Some(registry) = Registry::start(false).await else { return };
    let base = golden("stack/st-base.commit");
    registry.push_blobs("lies:v1", std::slice::from_ref(&base)).await;
    let mut short = descriptor(&base);
    short["size"] = (base.len() - 4096).into();
    let bench = Bench::new();
    // The registry itself refuses a manifest with a blob that it does not have, so a front has to take it away.
    let digest = sha256(&base);
    let gone = Front::start(&registry.host, move |request| match request.target.ends_with(&digest) {
        true => Answer::Say(404, vec![], r#"{"errors":[{"code":"BLOB_UNKNOWN","message":"blob unknown"}]}"#.into()),
        false => Answer::Pass,
    })
    .await;
    for (host, layer, why) in [(&registry.host, short, "bytes long"), (&gone.host, descriptor(&base), "BLOB_UNKNOWN")] {
        let manifest = manifest(&[layer], json!({}));
        registry.push_manifest(&registry.reference("lies:v1"), manifest, MANIFEST).await;
        let error = inspect(&bench, &format!("{host}/lies:v1")).await.unwrap_err();
        assert_eq!(error.kind(), ImportErrorKind::Invalid, "{}", error.report());
        assert!(error.report().contains(why), "{}", error.report());
    }
}

#[tokio::test]
async fn a_registry_that_fails_or_ignores_ranges_is_told_from_a_broken_layer() {
    let Some(registry) = Registry::start(false).await else { return };
    let base = golden("stack/st-base.commit");
    registry.push_native("disk:v1", std::slice::from_ref(&base), json!({})).await;
    let mut bench = Bench::new();
    let digest = sha256(&base);
    for (status, kind) in
        [(401, ImportErrorKind::Unauthorized), (200, ImportErrorKind::Unsupported), (503, ImportErrorKind::Registry)]
    {
        // What passes is repeated to the end of patience; what is meant is not.
        bench.config.patience = std::time::Duration::from_secs(if status == 503 { 1 } else { 20 });
        let digest = digest.clone();
        let front = Front::start(&registry.host, move |request| match request.target.ends_with(&digest) {
            true => Answer::Say(status, vec![], "no".into()),
            false => Answer::Pass,
        })
        .await;
        let error = inspect(&bench, &format!("{}/disk:v1", front.host)).await.unwrap_err();
        assert_eq!(error.kind(), kind, "{}", error.report());
        assert!(error.source().is_some());
    }
}

#[tokio::test]
async fn what_can_not_be_used_is_refused_with_its_layer() {
    let Some(registry) = Registry::start(false).await else { return };
    let base = golden("stack/st-base.commit");
    registry.push_blobs("odd:v1", std::slice::from_ref(&base)).await;
    let bench = Bench::new();
    let mut turbo = descriptor(&base);
    turbo["annotations"]["containerd.io/snapshot/overlaybd/turbo-oci/target-digest"] = "x".into();
    let mut wrapped = descriptor(&base);
    wrapped["annotations"]["containerd.io/snapshot/overlaybd/blob-digest"] = sha256(b"inner").into();
    let mut unknown = descriptor(&base);
    unknown["mediaType"] = "application/vnd.cncf.helm.chart.content.v1.tar+gzip".into();
    let mut tar = descriptor(&base);
    tar["annotations"] = json!({});
    let two = |layer: &Value| vec![descriptor(&base), layer.clone()];
    for (layers, why) in [
        (two(&turbo), "layer 2 of 2"),
        (two(&wrapped), "inside a tar"),
        (two(&unknown), "helm"),
        (two(&tar), "of one kind"),
    ] {
        registry.push_manifest(&registry.reference("odd:v1"), manifest(&layers, json!({})), MANIFEST).await;
        let error = inspect(&bench, &format!("{}/odd:v1", registry.host)).await.unwrap_err();
        assert_eq!(error.kind(), ImportErrorKind::Unsupported, "{}", error.report());
        assert!(error.kind().is_refusal() && error.to_string().contains(why), "{error}");
    }
    registry.push_manifest(&registry.reference("odd:v1"), manifest(&[], json!({})), MANIFEST).await;
    let error = inspect(&bench, &format!("{}/odd:v1", registry.host)).await.unwrap_err();
    assert_eq!(error.kind(), ImportErrorKind::Invalid, "{error}");
}

#[tokio::test]
async fn without_conversion_only_overlaybd_images_are_taken() {
    let Some(registry) = Registry::start(false).await else { return };
    registry.push("files:v1", &plain()).await;
    registry.push_native("disk:v1", &[golden("stack/st-base.commit")], json!({})).await;
    let mut bench = Bench::new();
    assert!(inspect(&bench, &format!("{}/files:v1", registry.host)).await.unwrap().native.is_none());
    bench.config.convert_standard_oci = false;
    let error = inspect(&bench, &format!("{}/files:v1", registry.host)).await.unwrap_err();
    assert_eq!(error.kind(), ImportErrorKind::NotAllowed);
    assert!(error.kind().is_refusal() && error.to_string().contains("convert_standard_oci"), "{error}");
    assert!(inspect(&bench, &format!("{}/disk:v1", registry.host)).await.unwrap().native.is_some());
    let folder = tempfile::tempdir().unwrap();
    plain().write_layout(folder.path(), "v1");
    let error = inspect(&bench, &format!("oci:{}", folder.path().display())).await.unwrap_err();
    assert_eq!(error.kind(), ImportErrorKind::NotAllowed);
}

#[tokio::test]
async fn an_overlaybd_image_that_refers_to_the_image_is_taken_where_configured() {
    let Some(registry) = Registry::start(false).await else { return };
    let digest = registry.push("x:v1", &plain()).await;
    let azure = registry.push_native("x:azure", &[golden("stack/st-mid.commit")], json!({"artifactType": AZURE})).await;
    let native =
        registry.push_native("x:native", &[golden("stack/st-base.commit")], json!({"artifactType": NATIVE})).await;
    let mut bench = Bench::new();
    let reference = format!("{}/x:v1", registry.host);
    bench.config.referrers_prefixes = vec!["ghcr.io/".into(), format!("{}/x", registry.host)];
    let expect = async |bench: &Bench, expected: &str| {
        let info = inspect(bench, &reference).await.unwrap();
        assert_eq!(info.digest, expected);
        assert_eq!(info.native.is_some(), expected != digest);
        assert_eq!(info.config.cmd, ["/bin/hello"], "the image itself says how it is run");
    };
    expect(&bench, &digest).await;
    registry.push_referrers("x", &digest, &[entry(&azure, AZURE), entry(&native, NATIVE)]).await;
    expect(&bench, &native).await;
    registry.push_referrers("x", &digest, &[entry(&azure, AZURE), entry(&native, "application/spdx+json")]).await;
    expect(&bench, &azure).await;
    // Whatever is wrong with it, the image itself will do.
    let turbo = "application/vnd.containerd.overlaybd.turbo.v1+json";
    let turbo_one =
        registry.push_native("x:turbo", &[golden("stack/st-base.commit")], json!({"artifactType": turbo})).await;
    for bad in [
        entry(&turbo_one, turbo),
        entry(&turbo_one, NATIVE),
        entry(&digest, NATIVE),
        entry(&sha256(b"not there"), NATIVE),
        entry("sha256:no digest", NATIVE),
    ] {
        // The registry refuses indexes of what it does not have.
        let list = json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": [bad]}).to_string();
        let tag = digest.replace(':', "-");
        let front = Front::start(&registry.host, move |request| match request.target.ends_with(&tag) {
            true => Answer::Say(200, vec![("content-type", INDEX.into())], list.clone()),
            false => Answer::Pass,
        })
        .await;
        bench.config.referrers_prefixes = vec![front.host.clone()];
        let info = inspect(&bench, &format!("{}/x:v1", front.host)).await.unwrap();
        assert_eq!((info.digest, info.native), (digest.clone(), None), "{bad}");
    }
    for prefixes in [vec![], vec![format!("{}/y", registry.host)]] {
        bench.config.referrers_prefixes = prefixes;
        expect(&bench, &digest).await;
    }
}

#[tokio::test]
async fn referrers_are_those_of_this_platforms_manifest_on_every_page() {
    let Some(registry) = Registry::start(false).await else { return };
    let mut other = plain();
    other.architecture = "s390x".into();
    let (mine, theirs) = (registry.push("x:mine", &plain()).await, registry.push("x:theirs", &other).await);
    let native =
        registry.push_native("x:native", &[golden("stack/st-base.commit")], json!({"artifactType": NATIVE})).await;
    let platform = |digest: &str, image: &Image, architecture: &str| {
        json!({"mediaType": MANIFEST, "digest": digest, "size": image.parts().1.len(),
            "platform": {"os": "linux", "architecture": architecture}})
    };
    let entries = [platform(&theirs, &other, "s390x"), platform(&mine, &plain(), host_architecture())];
    registry.push_index("x:both", &entries).await;
    let list = |entries: &[Value]| json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": entries}).to_string();
    let (first, second) = (list(&[entry(&sha256(b"1"), "application/spdx+json")]), list(&[entry(&native, NATIVE)]));
    let subject = mine.clone();
    let front = Front::start(&registry.host, move |request| {
        let index = || ("content-type", INDEX.to_owned());
        match request.target.strip_prefix(&format!("/v2/x/referrers/{subject}")) {
            Some("") => {
                let next = format!(r#"</v2/x/referrers/{subject}?page=2>; rel="next""#);
                Answer::Say(200, vec![index(), ("link", next)], first.clone())
            }
            Some(_) => Answer::Say(200, vec![index()], second.clone()),
            None => Answer::Pass,
        }
    })
    .await;
    let mut bench = Bench::new();
    bench.config.referrers_prefixes = vec![front.host.clone()];
    let info = inspect(&bench, &format!("{}/x:both", front.host)).await.unwrap();
    assert_eq!(info.digest, native);
    assert_eq!(front.count("/referrers/"), 2);
    assert_eq!(front.count(&theirs), 0);
}

#[tokio::test]
async fn a_referrers_interface_that_fails_is_no_obstacle() {
    let Some(registry) = Registry::start(false).await else { return };
    let digest = registry.push("x:v1", &plain()).await;
    let index = || vec![("content-type", INDEX.to_owned())];
    for (status, headers, body) in [
        (403, vec![], "no".to_owned()),
        (200, index(), "{".to_owned()),
        (200, vec![("content-type", "text/html".to_owned())], "<html>".to_owned()),
        (200, index(), "x".repeat(5 << 20)),
        (
            200,
            [index(), vec![("link", r#"</v2/x/referrers/again>; rel="next""#.to_owned())]].concat(),
            r#"{"manifests":[]}"#.to_owned(),
        ),
    ] {
        let front = Front::start(&registry.host, move |request| match request.target.contains("/referrers/") {
            true => Answer::Say(status, headers.clone(), body.clone()),
            false => Answer::Pass,
        })
        .await;
        let mut bench = Bench::new();
        bench.config.referrers_prefixes = vec![front.host.clone()];
        let info = inspect(&bench, &format!("{}/x:v1", front.host)).await.unwrap();
        assert_eq!(info.digest, digest);
        assert!(front.count("/referrers/") > 0);
    }
}

#[tokio::test]
async fn indexes_are_followed_four_deep() {
    let Some(registry) = Registry::start(false).await else { return };
    let digest = registry.push("x:v1", &plain()).await;
    let bench = Bench::new();
    let mut inner = json!({"mediaType": MANIFEST, "digest": digest, "size": plain().parts().1.len()});
    for depth in 1..=6 {
        let name = format!("x:depth{depth}");
        let size = json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": [&inner]}).to_string().len();
        let outer = registry.push_index(&name, &[inner.clone()]).await;
        inner = json!({"mediaType": INDEX, "digest": outer, "size": size});
        let found = inspect(&bench, &format!("{}/{name}", registry.host)).await;
        match found {
            Ok(info) => assert!(info.digest == digest && depth <= 4, "{depth}"),
            Err(error) => {
                assert!(depth > 4 && error.kind() == ImportErrorKind::Invalid, "{depth}: {}", error.report());
                assert!(error.to_string().contains("nested"), "{error}");
            }
        }
    }
}
