//! The main job: image, template, sandbox, command, files, end.

use aenv_api::{ListQuery, ListedSandbox, NewSandbox, TimeoutRequest};
use aenv_e2e::{Node, eventually};

#[tokio::test]
async fn a_debian_image_becomes_a_sandbox_that_runs_python() {
    let Some(node) = Node::start().await else { return };
    node.debian("base").await;
    let sandbox = node.sandbox("base").await;
    let id = sandbox.sandbox_id.to_string();
    assert!(sandbox.envd_access_token.is_some(), "the SDKs count on a token");

    let hello = node.aenv_ok(&["exec", &id, "python3", "-c", "import os; print(os.getuid(), os.getcwd())"]);
    assert_eq!(hello, "1000 /home/user\n");
    let exit = node.aenv(&["exec", &id, "sh", "-c", "echo out; echo err >&2; exit 7"]);
    assert_eq!(
        (exit.status.code(), exit.stdout.as_slice(), exit.stderr.as_slice()),
        (Some(7), &b"out\n"[..], &b"err\n"[..])
    );
    let table = node.aenv_ok(&["list", "--output", "json"]);
    assert!(table.contains(&id), "{table}");

    assert_eq!(node.aenv_ok(&["delete", &id]), format!("Deleted sandbox {id}\n"));
    assert!(node.client().sandbox(&id).await.unwrap_err().is_not_found());
    assert_eq!(node.vmm_pids(), Vec::<i32>::new());
    node.finish().await;
}

#[tokio::test]
async fn an_image_with_nothing_but_busybox_works_and_keeps_its_settings() {
    let Some(node) = Node::start().await else { return };
    let Some(()) = node.tiny("tiny").await else { return node.finish().await };
    let request = NewSandbox {
        template_id: "tiny".into(),
        env_vars: [("FROM_CREATE".to_owned(), "yes".to_owned())].into(),
        ..NewSandbox::default()
    };
    let sandbox = node.client().create_sandbox(&request).await.unwrap();
    let id = sandbox.sandbox_id.to_string();
    assert_eq!(node.aenv_ok(&["exec", &id, "sh", "-c", "echo $TINY $FROM_CREATE"]), "yes yes\n");
    assert_eq!(node.aenv_ok(&["exec", &id, "id", "-u"]), "0\n");
    // Binary output is octet-exact, also when it is larger than any pipe.
    let bytes = node.aenv(&["exec", &id, "head", "-c", "1000000", "/dev/zero"]).stdout;
    assert_eq!((bytes.len(), bytes.iter().all(|byte| *byte == 0)), (1_000_000, true));
    let unknown = node.aenv(&["exec", &id, "no-such-program"]);
    assert_eq!(unknown.status.code(), Some(127));
    node.finish().await;
}

#[tokio::test]
async fn lists_are_filtered_and_paged() {
    let Some(node) = Node::start().await else { return };
    let Some(()) = node.tiny("tiny").await else { return node.finish().await };
    let client = node.client();
    for number in ["one", "two", "three"] {
        let metadata = [("number".to_owned(), number.to_owned()), ("a b".to_owned(), "c&d".to_owned())].into();
        let request = NewSandbox { template_id: "tiny".into(), metadata, ..NewSandbox::default() };
        client.create_sandbox(&request).await.unwrap();
    }
    let metadata = Some(aenv_api::encode_metadata_filter([("number", "two"), ("a b", "c&d")]));
    let query = ListQuery { metadata, ..ListQuery::default() };
    let found = client.list_sandboxes::<ListedSandbox>(&query).await.unwrap();
    assert_eq!(found.items.len(), 1);
    assert_eq!(found.items[0].metadata["number"], "two");

    let mut query = ListQuery { limit: Some("2".into()), ..ListQuery::default() };
    let first = client.list_sandboxes::<ListedSandbox>(&query).await.unwrap();
    query.next_token = first.next_token.clone();
    let second = client.list_sandboxes::<ListedSandbox>(&query).await.unwrap();
    let numbers: Vec<_> = first.items.iter().chain(&second.items).map(|item| item.metadata["number"].clone()).collect();
    assert_eq!(numbers, ["three", "two", "one"], "newest first, no gaps, no repeats");
    assert!(second.next_token.is_none());
    let paused = ListQuery { state: Some("paused".into()), ..ListQuery::default() };
    assert!(client.list_sandboxes::<ListedSandbox>(&paused).await.unwrap().items.is_empty());
    node.finish().await;
}

#[tokio::test]
async fn a_sandbox_ends_at_its_deadline() {
    let Some(node) = Node::start().await else { return };
    let Some(()) = node.tiny("tiny").await else { return node.finish().await };
    let sandbox = node.sandbox("tiny").await;
    let client = node.client();
    client.set_timeout(sandbox.sandbox_id, &TimeoutRequest { timeout: 1 }).await.unwrap();
    let error =
        eventually("the sandbox expires", async || client.sandbox(sandbox.sandbox_id).await.err()).await.to_string();
    eventually("nothing of it is left", async || node.vmm_pids().is_empty().then_some(())).await;
    assert!(error.contains("not found"), "{error}");
    node.finish().await;
}

#[tokio::test]
async fn twenty_sandboxes_come_and_go_eight_at_a_time() {
    use futures::StreamExt as _;
    let Some(node) = Node::start().await else { return };
    let Some(()) = node.tiny("tiny").await else { return node.finish().await };
    let client = node.client();
    let one = async |number: usize| {
        let sandbox = node.sandbox("tiny").await;
        client.delete_sandbox(sandbox.sandbox_id).await.map_err(|error| format!("sandbox {number}: {error}"))
    };
    let outcomes: Vec<_> = futures::stream::iter(0..20).map(one).buffer_unordered(8).collect().await;
    let failures: Vec<_> = outcomes.into_iter().filter_map(Result::err).collect();
    assert!(failures.is_empty(), "{failures:?}");
    assert_eq!(node.vmm_pids(), Vec::<i32>::new());
    node.finish().await;
}
