//! Who gets in, for what, and who is told of it.

use aenv_api::{Client, KeyScope, ListQuery, ListedSandbox, NewApiKey, NewSandbox, SandboxDetail};
use aenv_e2e::{Node, eventually};

/// The status that a refusal has.
fn status<T: std::fmt::Debug>(answer: Result<T, aenv_api::ClientError>) -> Option<u16> {
    answer.expect_err("a refusal").status().map(|status| status.as_u16())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_opens_what_it_may_until_it_is_revoked() {
    let Some(mut node) = Node::start().await else { return };
    let Some(()) = node.tiny("tiny").await else { return };
    let id = node.sandbox("tiny").await.sandbox_id.to_string();
    let own = node.client();
    let named = |name: &str, scope| NewApiKey { name: name.to_owned(), scope };
    let looker = own.create_key(&named("dashboard", KeyScope::Read)).await.expect("make a key");
    let robot = own.create_key(&named("robot", KeyScope::Admin)).await.expect("make a key");
    let with = |node: &Node, key: &str| Client::new(&node.url(), key).expect("a client");

    let looking = with(&node, &looker.key);
    let listed = looking.list_sandboxes::<ListedSandbox>(&ListQuery::default()).await.expect("list").items;
    assert_eq!(listed.len(), 1);
    let shown: SandboxDetail = looking.sandbox(&id).await.expect("look");
    assert_eq!(shown.envd_access_token, None, "it would open the sandbox");
    assert!(with(&node, &robot.key).sandbox(&id).await.unwrap().envd_access_token.is_some());
    assert_eq!(status(looking.create_sandbox(&NewSandbox::default()).await), Some(403));
    assert_eq!(status(looking.delete_sandbox(&id).await), Some(403));
    assert_eq!(status(looking.list_keys().await), Some(403));
    assert_eq!(status(with(&node, "e2b_0000000000000000000000000000000000000000").list_keys().await), Some(401));

    // The same by the command line.
    let made = node.aenv_ok(&["key", "create", "by hand"]);
    assert!(with(&node, made.trim()).sandbox(&id).await.is_ok());
    let listed: serde_json::Value = serde_json::from_str(&node.aenv_ok(&["key", "list"])).unwrap();
    let by_hand = listed.as_array().unwrap().iter().find(|key| key["name"] == "by hand").unwrap();
    _ = node.aenv_ok(&["key", "revoke", by_hand["id"].as_str().unwrap()]);
    assert_eq!(status(with(&node, made.trim()).sandbox(&id).await), Some(401));

    // A revoked key is none from the next request on, and after a restart.
    own.revoke_key(robot.info.id).await.expect("revoke");
    assert_eq!(status(with(&node, &robot.key).sandbox(&id).await), Some(401));
    assert_eq!(status(own.revoke_key(robot.info.id).await), Some(404));
    node.kill9();
    node.restart().await;
    let names: Vec<_> = node.client().list_keys().await.expect("list").into_iter().map(|key| key.name).collect();
    assert_eq!(names, ["dashboard"]);
    assert_eq!(status(with(&node, &robot.key).sandbox(&id).await), Some(401));
    with(&node, &looker.key).sandbox(&id).await.expect("look");

    // A client that does not wait for its answer is seen all the same.
    let hasty = node.client().create_key(&named("hasty", KeyScope::Admin)).await.expect("make a key").info.id;
    let head = format!("DELETE /api-keys/{hasty} HTTP/1.1\r\nhost: node\r\nx-api-key: {}\r\n\r\n", node.key());
    let mut stream = std::net::TcpStream::connect(node.url().trim_start_matches("http://")).unwrap();
    std::io::Write::write_all(&mut stream, head.as_bytes()).unwrap();
    drop(stream);

    let log = node.home().join("logs/audit.jsonl");
    let kept = eventually("the log has what was asked", async || {
        let text = std::fs::read_to_string(&log).ok()?;
        let lines: Vec<serde_json::Value> = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        let has = |key: &str, method: &str, path: &str, status: u16| {
            lines.iter().any(|line| {
                line["key"] == key && line["method"] == method && line["path"] == path && line["status"] == status
            })
        };
        let is_whole = has("deployment", "POST", "/api-keys", 201)
            && has("dashboard", "DELETE", &format!("/sandboxes/{id}"), 403)
            && has("deployment", "DELETE", &format!("/api-keys/{}", robot.info.id), 204)
            && lines.iter().any(|line| line["path"] == format!("/api-keys/{hasty}"))
            && lines.iter().any(|line| line["key"].is_null() && line["status"] == 401 && line["from"] == "127.0.0.1");
        is_whole.then_some(text)
    })
    .await;
    assert!(!kept.contains(&robot.key) && !kept.contains(&looker.key));
    node.client().delete_sandbox(&id).await.unwrap();
    node.finish().await;
}
