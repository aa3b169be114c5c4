//! `/files`: up and down, whole and in part.

use std::io::Write as _;
use std::os::unix::fs::PermissionsExt;

use flate2::Compression;
use flate2::write::{GzDecoder, GzEncoder};

use crate::harness::Agent;

const OCTETS: (&str, &str) = ("content-type", "application/octet-stream");
const MULTIPART: (&str, &str) = ("content-type", "multipart/form-data; boundary=XX");

fn part(name: &str, filename: &str, content: &[u8]) -> Vec<u8> {
    let head = format!("--XX\r\nContent-Disposition: form-data; name=\"{name}\"; filename=\"{filename}\"\r\n\r\n");
    [head.as_bytes(), content, b"\r\n"].concat()
}

fn multipart(parts: &[Vec<u8>]) -> Vec<u8> {
    [parts.concat().as_slice(), b"--XX--\r\n"].concat()
}

#[tokio::test]
async fn a_file_goes_up_and_comes_down_unchanged() {
    let agent = Agent::start();
    let content: Vec<u8> = (0..1_500_000_u32).map(|n| (n * 7 / 3) as u8).collect();
    let path = agent.path("new/dir/blob");
    let target = format!("/files?path={path}");
    let up = agent.http("POST", &target, &[OCTETS], &content).await;
    assert_eq!(up.status, 200, "{}", up.text());
    assert_eq!(up.json(), serde_json::json!([{ "name": "blob", "path": path, "type": "file" }]));
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o644);

    let down = agent.http("GET", &target, &[], b"").await;
    assert!(down.status == 200 && down.body == content);
    assert_eq!(down.header("content-length"), Some("1500000"));
    assert_eq!(down.header("content-disposition"), Some("inline; filename=blob"));

    let zipped = agent.http("GET", &target, &[("accept-encoding", "gzip, deflate")], b"").await;
    assert_eq!((zipped.header("content-encoding"), zipped.header("content-length")), (Some("gzip"), None));
    let mut decoder = GzDecoder::new(Vec::new());
    decoder.write_all(&zipped.body).unwrap();
    assert!(decoder.finish().unwrap() == content);

    let ranged = agent.http("GET", &target, &[("range", "bytes=10-19"), ("accept-encoding", "gzip")], b"").await;
    assert!(ranged.status == 206 && ranged.body == content[10..20]);
    assert_eq!(ranged.header("content-range"), Some("bytes 10-19/1500000"));
    let modified = down.header("last-modified").unwrap().to_owned();
    assert_eq!(agent.http("GET", &target, &[("if-modified-since", &modified)], b"").await.status, 304);
}

#[tokio::test]
async fn several_files_go_up_in_one_request_named_by_their_parts() {
    let agent = Agent::start();
    let (a, b) = (agent.path("a"), agent.path("deep/b"));
    let large = vec![b'l'; 5_000_000];
    let body = multipart(&[part("file", &a, &large), part("other", "x", b"ignored"), part("file", &b, b"")]);
    let up = agent.http("POST", "/files", &[MULTIPART], &body).await;
    assert_eq!(up.status, 200, "{}", up.text());
    assert_eq!((up.json()[0]["path"].as_str(), up.json()[1]["path"].as_str()), (Some(a.as_str()), Some(b.as_str())));
    assert!(std::fs::read(&a).unwrap() == large && std::fs::read(&b).unwrap().is_empty());
    let empty = agent.http("GET", &format!("/files?path={b}"), &[], b"").await;
    assert_eq!((empty.status, empty.header("content-length")), (200, Some("0")));

    let twice = multipart(&[part("file", &a, b"1"), part("file", &a, b"2")]);
    let refused = agent.http("POST", "/files", &[MULTIPART], &twice).await;
    assert_eq!(refused.status, 400);
    assert!(
        refused.json()["message"].as_str().unwrap().starts_with("you cannot upload multiple files to the same path")
    );
}

#[tokio::test]
async fn bodies_may_be_gzipped_and_broken_ones_are_refused_without_a_trace() {
    let agent = Agent::start();
    let path = agent.path("unzipped");
    let target = format!("/files?path={path}");
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(&vec![b'z'; 300_000]).unwrap();
    let zipped = encoder.finish().unwrap();
    let gzip = ("content-encoding", "gzip");
    let torn = agent.http("POST", &target, &[OCTETS, gzip], &zipped[..zipped.len() / 2]).await;
    assert_eq!(torn.status, 400);
    assert!(torn.text().contains("error decompressing request body"), "{}", torn.text());
    assert!(!std::fs::exists(&path).unwrap(), "nothing half-made is left");

    assert_eq!(agent.http("POST", &target, &[OCTETS, gzip], &zipped).await.status, 200);
    assert_eq!(std::fs::read(&path).unwrap().len(), 300_000);
    assert_eq!(agent.http("POST", &target, &[OCTETS, ("content-encoding", "br")], b"x").await.status, 400);
}

#[tokio::test]
async fn what_cannot_be_served_is_refused_with_its_name() {
    let agent = Agent::start();
    let message = async |target: &str| {
        let answer = agent.http("GET", target, &[], b"").await;
        (answer.status, answer.json()["message"].as_str().unwrap().to_owned())
    };
    assert_eq!(message("/files?path=/nope").await, (404, "path '/nope' does not exist".into()));
    assert_eq!(message("/files?path=/tmp").await, (400, "path '/tmp' is a directory".into()));
    assert_eq!(message("/files?path=/tmp&username=ghost").await.0, 401);
    assert_eq!(message("/files?path=~ghost/x").await.0, 400);
    let raw = agent.http("POST", "/files", &[OCTETS], b"x").await;
    assert_eq!(raw.json()["message"], "path query parameter is required for raw body upload");
    let directory = agent.path("");
    assert_eq!(agent.http("POST", &format!("/files?path={directory}"), &[OCTETS], b"x").await.status, 400);
    let text = agent.http("POST", "/files?path=/tmp/x", &[("content-type", "text/plain")], b"x").await;
    assert_eq!(text.json()["message"], "unsupported content type: text/plain");
}

#[tokio::test]
async fn a_path_that_no_file_can_have_is_the_callers_mistake() {
    let agent = Agent::start();
    let (looped, pipe) = (agent.path("loop"), agent.path("pipe"));
    std::os::unix::fs::symlink(&looped, &looped).unwrap();
    nix::unistd::mkfifo(pipe.as_str(), nix::sys::stat::Mode::S_IRWXU).unwrap();
    std::fs::write(agent.path("file"), "").unwrap();
    let paths = ["/tmp/a%00b".to_owned(), format!("/tmp/{}", "x".repeat(300)), looped, agent.path("file/below")];
    for path in &paths {
        let target = format!("/files?path={path}");
        let read = agent.http("GET", &target, &[], b"").await.status;
        assert!(matches!(read, 400 | 404), "{read} for reading {path}");
        assert_eq!(agent.http("POST", &target, &[OCTETS], b"x").await.status, 400, "writing {path}");
    }
    // Nobody reads it: a write would wait for ever.
    assert_eq!(agent.http("POST", &format!("/files?path={pipe}"), &[OCTETS], b"x").await.status, 400);
}

#[tokio::test]
async fn files_without_a_size_are_read_to_their_end() {
    let agent = Agent::start();
    let answer = agent.http("GET", "/files?path=/proc/version", &[], b"").await;
    assert!(answer.status == 200 && answer.text().starts_with("Linux version"), "{answer:?}");
}

#[tokio::test]
async fn an_overwrite_keeps_the_mode_and_a_full_disk_is_507() {
    let agent = Agent::start();
    let path = agent.path("kept");
    std::fs::write(&path, "a much longer text than the new one").unwrap();
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o700)).unwrap();
    let target = format!("/files?path={path}");
    assert_eq!(agent.http("POST", &target, &[OCTETS], b"short").await.status, 200);
    assert_eq!(std::fs::read(&path).unwrap(), b"short");
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700);

    let full = agent.http("POST", "/files?path=/dev/full", &[OCTETS], b"x").await;
    assert_eq!(full.status, 507, "{}", full.text());
    assert_eq!(full.json()["message"], "attempted to write 1 bytes: not enough disk space available");
}

#[tokio::test]
async fn parts_are_composed_into_one_file_and_removed() {
    let agent = Agent::start();
    let (a, b, whole) = (agent.path("part-a"), agent.path("part-b"), agent.path("sub/whole"));
    std::fs::write(&a, "one ").unwrap();
    std::fs::write(&b, "two").unwrap();
    let json = [("content-type", "application/json")];
    let request = serde_json::json!({ "source_paths": [a, b], "destination": whole }).to_string();
    let composed = agent.http("POST", "/files/compose", &json, request.as_bytes()).await;
    assert_eq!(composed.json(), serde_json::json!({ "name": "whole", "path": whole, "type": "file" }));
    assert_eq!(std::fs::read(&whole).unwrap(), b"one two");
    assert!(!std::fs::exists(&a).unwrap() && !std::fs::exists(&b).unwrap());
    assert_eq!(agent.http("POST", "/files/compose", &json, request.as_bytes()).await.status, 404);
    let itself = serde_json::json!({ "source_paths": [whole], "destination": whole }).to_string();
    assert_eq!(agent.http("POST", "/files/compose", &json, itself.as_bytes()).await.status, 400);
}

#[tokio::test]
async fn with_a_token_files_need_it_or_a_signature() {
    let agent = Agent::start();
    agent.http("POST", "/init", &[], br#"{"accessToken":"tok"}"#).await;
    let message = async |target: &str, headers: &[(&str, &str)]| {
        let answer = agent.http("GET", target, headers, b"").await;
        (answer.status, String::from_utf8_lossy(&answer.body).into_owned())
    };
    assert_eq!(message("/files?path=a", &[]).await.0, 401);
    let signed = "/files?path=a&signature=v1_54rCkEfEkZrpUtVWRlqL2nxBx/LpQ6ChNKYkiNC4s3g";
    assert_eq!(message(signed, &[]).await.0, 404, "let through to a file that is not there");
    assert_eq!(message(signed, &[("x-access-token", "wrong")]).await.0, 401);
    assert_eq!(message("/files?path=a", &[("x-access-token", "tok")]).await.0, 404);
    // Signed for 2001: v1_ + base64(sha256("a:read::tok:1000000000")).
    let expired = "/files?path=a&signature=v1_SIGNATURE&signature_expiration=1000000000"
        .replace("SIGNATURE", &percent_encode(&expired_signature()));
    assert_eq!(message(&expired, &[]).await, (401, r#"{"code":401,"message":"signature is already expired"}"#.into()));
}

fn expired_signature() -> String {
    use base64::Engine as _;
    use sha2::Digest as _;
    base64::engine::general_purpose::STANDARD_NO_PAD.encode(sha2::Sha256::digest("a:read::tok:1000000000"))
}

fn percent_encode(text: &str) -> String {
    percent_encoding::utf8_percent_encode(text, percent_encoding::NON_ALPHANUMERIC).to_string()
}
