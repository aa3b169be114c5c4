//! Refusals: each names what was wrong, with the status and body that SDKs branch on.

use aenv_api::{BuildState, Client, NewSandbox};
use aenv_e2e::{Node, Registry, tiny};
use serde_json::{Value, json};

/// One raw request; status, body as JSON.
async fn send(node: &Node, method: &str, path: &str, key: Option<&str>, body: &str) -> (u16, Value) {
    let client = aenv_api::http_builder(&node.url()).unwrap().build().unwrap();
    let mut request = client.request(method.parse().unwrap(), format!("{}{path}", node.url())).body(body.to_owned());
    if let Some(key) = key {
        request = request.header("x-api-key", key);
    }
    let answer = request.send().await.unwrap();
    let (status, text) = (answer.status().as_u16(), answer.text().await.unwrap());
    (status, serde_json::from_str(&text).unwrap_or(Value::String(text)))
}

#[tokio::test]
async fn refusals_have_the_body_that_clients_parse() {
    let Some(node) = Node::start().await else { return };
    let key = Some(node.key());
    assert_eq!(send(&node, "GET", "/health", None, "").await, (204, Value::String(String::new())));

    let expect = async |method: &str, path: &str, key: Option<&str>, body: &str, status: u16, parts: &[&str]| {
        let (got, answer) = send(&node, method, path, key, body).await;
        assert_eq!(got, status, "{method} {path}: {answer}");
        assert_eq!(answer["code"], status, "{method} {path}: {answer}");
        let message = answer["message"].as_str().unwrap_or_default();
        for part in parts {
            assert!(message.contains(part), "{method} {path}: {message:?} lacks {part:?}");
        }
    };
    expect("GET", "/v2/sandboxes", None, "", 401, &["X-API-Key"]).await;
    expect("GET", "/v2/sandboxes", Some("wrong"), "", 401, &["invalid"]).await;
    expect("GET", "/nowhere", None, "", 401, &[]).await;
    expect("GET", "/nowhere", key, "", 404, &["GET /nowhere"]).await;
    expect("PATCH", "/v2/sandboxes", key, "", 405, &["PATCH"]).await;
    let nobody = "01936f8e-72f5-7000-8000-000000000001";
    for id in [nobody, "nonexistingsandbox"] {
        expect("GET", &format!("/sandboxes/{id}"), key, "", 404, &[id]).await;
        expect("DELETE", &format!("/sandboxes/{id}"), key, "", 404, &[id]).await;
        expect("POST", &format!("/sandboxes/{id}/timeout"), key, r#"{"timeout":1}"#, 404, &[id]).await;
        expect("POST", &format!("/v2/sandboxes/{id}/connect"), key, "{}", 404, &[id]).await;
        for call in ["pause", "resume", "fork", "snapshots"] {
            expect("POST", &format!("/sandboxes/{id}/{call}"), key, "", 404, &[id]).await;
        }
    }
    expect("POST", "/v2/sandboxes", key, "{\"templateID\":\n nonsense}", 400, &["malformed JSON", "line 2 column"])
        .await;
    expect("POST", "/v2/sandboxes", key, "{}", 400, &["templateID"]).await;
    expect("POST", "/v2/sandboxes", key, r#"{"templateID":"x","timeout":"soon"}"#, 400, &["timeout"]).await;
    expect("POST", "/v2/sandboxes", key, r#"{"templateID":"ghost","fromTheFuture":1}"#, 404, &["ghost"]).await;
    let disk_only = json!({"templateID": "x", "autoPauseMemory": false}).to_string();
    expect("POST", "/v2/sandboxes", key, &disk_only, 400, &["autoPauseMemory", "autoPause: true"]).await;
    let egress = json!({"templateID": "x", "network": {"allowOut": ["10.0.0.0/8", "example.com"]}}).to_string();
    expect("POST", "/sandboxes", key, &egress, 400, &["network.allowOut[1]", "domain"]).await;
    expect("GET", "/v2/sandboxes?limit=0", key, "", 400, &["limit"]).await;
    expect("GET", "/v2/sandboxes?nextToken=zz", key, "", 400, &["nextToken"]).await;
    expect("GET", "/templates/ghost", key, "", 404, &["ghost"]).await;
    expect("GET", "/templates/aliases/ghost", key, "", 404, &["ghost"]).await;
    expect("DELETE", "/templates/ghost", key, "", 404, &["ghost"]).await;
    expect("POST", "/v3/templates", key, r#"{"name":"not a name"}"#, 400, &["not a name"]).await;
    expect("POST", "/v3/templates", key, r#"{"name":"x","memoryMB":1}"#, 400, &["memoryMB"]).await;
    expect("POST", &format!("/v2/templates/{nobody}/builds/{nobody}"), key, "{}", 404, &[nobody]).await;
    node.finish().await;
}

#[tokio::test]
async fn images_that_cannot_be_had_fail_their_build_with_the_reason() {
    let Some(node) = Node::start().await else { return };
    let Some(registry) = Registry::start().await else { return node.finish().await };
    let dir = tempfile::tempdir().unwrap();
    let Some(layout) = tiny::layout(&dir.path().join("amd64")) else { return node.finish().await };
    registry.push(&layout, "team/tiny", "1").await;

    let status = node.build("from-registry", &format!("{}/team/tiny:1", registry.host())).await;
    assert_eq!(status.status, BuildState::Ready, "{status:?}");
    let sandbox = node.sandbox("from-registry").await;
    assert_eq!(node.aenv_ok(&["exec", &sandbox.sandbox_id.to_string(), "echo", "pulled"]), "pulled\n");

    let refused = async |name: &str, image: &str, parts: &[&str]| {
        let status = node.build(name, image).await;
        assert_eq!(status.status, BuildState::Error, "{status:?}");
        let reason = status.reason.expect("a reason");
        assert_eq!(reason.step.as_deref(), Some("base"));
        for part in parts {
            assert!(
                reason.message.to_lowercase().contains(&part.to_lowercase()),
                "{:?} lacks {part:?}",
                reason.message
            );
        }
    };
    refused("ghost", &format!("{}/team/ghost:1", registry.host()), &["team/ghost", "unknown"]).await;
    let foreign = tiny::layout_for(&dir.path().join("riscv64"), "riscv64").expect("as above");
    refused("foreign", &format!("oci:{}", foreign.display()), &["riscv64", "amd64"]).await;
    refused("nowhere", "oci:/no/such/layout", &["/no/such/layout"]).await;

    // A failed build leaves a template that says so, and no sandbox starts from it.
    let request = NewSandbox { template_id: "ghost".into(), ..NewSandbox::default() };
    let error = node.client().create_sandbox(&request).await.unwrap_err();
    assert_eq!(error.status().map(|status| status.as_u16()), Some(400), "{error}");
    node.client().delete_template("ghost").await.unwrap();
    node.finish().await;
}

#[tokio::test]
async fn only_the_key_opens_the_control_plane() {
    let Some(node) = Node::start().await else { return };
    let wrong = Client::new(&node.url(), &"x".repeat(40)).unwrap();
    let error = wrong.list_sandboxes::<Value>(&Default::default()).await.unwrap_err();
    assert_eq!(error.status().map(|status| status.as_u16()), Some(401), "{error}");
    let client = aenv_api::http_builder(&node.url()).unwrap().build().unwrap();
    for (header, value) in [("authorization", format!("Bearer {}", node.key())), ("x-admin-token", node.key().into())] {
        let answer = client.get(format!("{}/v2/sandboxes", node.url())).header(header, value).send().await.unwrap();
        assert_eq!(answer.status().as_u16(), 401, "{header}");
    }
    let twice = client
        .get(format!("{}/v2/sandboxes", node.url()))
        .header("x-api-key", node.key())
        .header("x-api-key", node.key())
        .send()
        .await
        .unwrap();
    assert_eq!(twice.status().as_u16(), 401);
    node.finish().await;
}
