//! Watching directories through the protocol.

use aenv_guest_proto::wire::filesystem as wire;
use connectrpc::ErrorCode;

use crate::harness::{Agent, PATIENCE};

async fn watch(agent: &Agent, path: &str, recursive: bool) -> String {
    let request =
        wire::CreateWatcherRequest { path: path.into(), recursive, include_entry: true, ..Default::default() };
    agent.filesystem().create_watcher(request).await.unwrap().view().watcher_id.to_owned()
}

async fn events(agent: &Agent, id: &str) -> Vec<wire::FilesystemEvent> {
    let request = wire::GetWatcherEventsRequest { watcher_id: id.into(), ..Default::default() };
    agent.filesystem().get_watcher_events(request).await.unwrap().into_owned().events
}

#[tokio::test]
async fn an_uploaded_file_is_exactly_three_events_and_they_are_there_at_once() {
    let agent = Agent::start();
    let id = watch(&agent, &agent.path(""), false).await;
    let target = format!("/files?path={}", agent.path("new.txt"));
    let octets = [("content-type", "application/octet-stream")];
    assert_eq!(agent.http("POST", &target, &octets, b"hello").await.status, 200);
    let seen = events(&agent, &id).await;
    let kinds: Vec<_> = seen.iter().map(|event| (event.name.as_str(), event.r#type.to_i32())).collect();
    assert_eq!(kinds, [("new.txt", 1), ("new.txt", 5), ("new.txt", 2)], "create, chmod, write");
    assert!(seen.iter().all(|event| event.entry.as_option().is_some_and(|entry| entry.size == 5)));
    assert!(events(&agent, &id).await.is_empty(), "asking drains");

    let remove = wire::RemoveWatcherRequest { watcher_id: id.clone(), ..Default::default() };
    agent.filesystem().remove_watcher(remove.clone()).await.unwrap();
    assert_eq!(agent.filesystem().remove_watcher(remove).await.unwrap_err().code, ErrorCode::NotFound);
}

#[tokio::test]
async fn nothing_uploaded_into_new_directories_is_missed() {
    let agent = Agent::start();
    let id = watch(&agent, &agent.path(""), true).await;
    let octets = [("content-type", "application/octet-stream")];
    let target = format!("/files?path={}", agent.path("x/y/z"));
    assert_eq!(agent.http("POST", &target, &octets, b"hello").await.status, 200);
    let make = wire::MakeDirRequest { path: agent.path("made"), ..Default::default() };
    agent.filesystem().make_dir(make).await.unwrap();
    let target = format!("/files?path={}", agent.path("made/file"));
    assert_eq!(agent.http("POST", &target, &octets, b"hello").await.status, 200);
    let seen = events(&agent, &id).await;
    for name in ["x/y/z", "made/file"] {
        let kinds: Vec<_> = seen.iter().filter(|event| event.name == name).map(|event| event.r#type.to_i32()).collect();
        assert_eq!(kinds, [1, 5, 2], "{name}");
    }
}

#[tokio::test]
async fn a_watch_stream_starts_at_once_and_tells_of_new_depths() {
    let agent = Agent::start();
    let missing = wire::WatchDirRequest { path: "/nope".into(), ..Default::default() };
    let mut stream = agent.filesystem().watch_dir(missing).await.unwrap();
    assert_eq!(stream.message().await.unwrap_err().code, ErrorCode::NotFound);

    let request = wire::WatchDirRequest { path: agent.path(""), recursive: true, ..Default::default() };
    let mut stream = agent.filesystem().watch_dir(request).await.unwrap();
    let mut names = Vec::new();
    let work = async {
        use wire::__buffa::oneof::watch_dir_response::Event;
        while let Some(message) = stream.message().await.unwrap() {
            match message.to_owned_message().event {
                Some(Event::Start(_)) => std::fs::create_dir_all(agent.path("a/b")).unwrap(),
                Some(Event::Filesystem(event)) => {
                    if event.name == "a/b" {
                        std::fs::write(agent.path("a/b/c"), "x").unwrap();
                    }
                    let done = event.name == "a/b/c";
                    names.push(event.name);
                    if done {
                        return;
                    }
                }
                _ => {}
            }
        }
    };
    tokio::time::timeout(PATIENCE, work).await.expect("the deepest file to be told of");
    assert_eq!(names, ["a", "a/b", "a/b/c"]);
}
