//! Template builds that are cut short, and the way in for their files. What steps do is in the SDKs' suites.

use aenv_api::{BuildState, TemplateBuildStartV2, TemplateStep};
use aenv_e2e::{Node, eventually};
use serde_json::Value;

fn run(command: &str) -> TemplateStep {
    TemplateStep { kind: "RUN".to_owned(), args: vec![command.to_owned()], ..TemplateStep::default() }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_build_ends_with_its_server_and_the_next_one_says_so() {
    let Some(mut node) = Node::start().await else { return };
    let created = node.announce("base").await;
    let (template, build) = (created.template_id, created.build_id);
    let start = TemplateBuildStartV2 {
        from_image: Some(format!("oci:{}", node.machine().image.display())),
        steps: vec![run("sleep 1000 & echo begun"), run("echo at work; sleep 600")],
        ..TemplateBuildStartV2::default()
    };
    node.client().start_build(template, build, &start).await.unwrap();
    let status = async |node: &Node| node.client().build_status(template, build, &Default::default()).await.unwrap();
    eventually("the second step runs, and the log says so meanwhile", async || {
        let status = status(&node).await;
        assert_eq!(status.status, BuildState::Building, "{status:?}");
        status.logs.iter().any(|line| line.ends_with("[stdout]: at work")).then_some(())
    })
    .await;
    assert_eq!(node.vmm_pids().len(), 1);
    node.kill9();
    node.restart().await;
    let ended = status(&node).await;
    assert_eq!(ended.status, BuildState::Error);
    assert!(ended.reason.unwrap().message.contains("server was restarted"));
    assert_eq!(node.vmm_pids(), [0; 0], "its machine ended with it");

    // What the first step has made is still there, and a server that is stopped leaves nothing either.
    let again = node.announce("base").await;
    node.client().start_build(template, again.build_id, &start).await.unwrap();
    eventually("the build goes on from the first step", async || {
        let status = node.client().build_status(template, again.build_id, &Default::default()).await.unwrap();
        let at_work = status.logs.iter().any(|line| line.ends_with("[stdout]: at work"));
        at_work.then(|| {
            assert!(status.logs.contains(&"CACHED [builder 1/2] RUN sleep 1000 & echo begun".to_owned()), "{status:?}")
        })
    })
    .await;
    node.stop().await;
    assert_eq!(node.vmm_pids(), [0; 0]);
    node.restart().await;
    let stopped = node.client().build_status(template, again.build_id, &Default::default()).await.unwrap();
    assert!(stopped.reason.unwrap().message.contains("server was stopped"));
    node.client().delete_template("base").await.unwrap();
    node.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn files_come_in_by_their_link_only() {
    let Some(node) = Node::start().await else { return };
    let created = node.announce("base").await;
    let http = aenv_api::http_builder(&node.url()).unwrap().build().unwrap();
    let hash = "0123456789abcdef".repeat(4);
    let link = async |hash: &str| {
        let path = format!("{}/templates/{}/files/{hash}", node.url(), created.template_id);
        let answer = http.get(path).header("x-api-key", node.key()).send().await.unwrap();
        let status = answer.status().as_u16();
        (status, answer.json::<Value>().await.unwrap())
    };
    let put = async |url: &str| http.put(url).body("an archive").send().await.unwrap().status().as_u16();

    let (status, told) = link(&hash).await;
    assert_eq!((status, &told["present"]), (201, &Value::Bool(false)), "{told}");
    let url = told["url"].as_str().unwrap();
    assert!(url.starts_with(&format!("{}/uploads/", node.url())), "{url}");
    let other = "f".repeat(64);
    let signed_at = url.find("expires=").unwrap() + "expires=".len();
    let later = format!("{}9{}", &url[..signed_at], &url[signed_at..]);
    for forged in [url.replace(&hash, &other), later, url.replace("token=", "token=0")] {
        assert_eq!(put(&forged).await, 403, "{forged}");
    }
    assert_eq!(put(&url[..url.find('?').unwrap()]).await, 400);
    assert_eq!(link(&hash).await.1["present"], Value::Bool(false));
    assert_eq!(put(url).await, 201);
    assert_eq!(link(&hash).await.1["present"], Value::Bool(true));
    assert_eq!(link(&other).await.1["present"], Value::Bool(false));
    assert_eq!(link("../../node.redb").await.0, 404);
    assert_eq!(link("abc").await.0, 400);
    node.finish().await;
}
