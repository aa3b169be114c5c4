//! The client against a server that says what a test wants.

use std::path::Path;

use aenv_block_client::wire::ErrorBody;
use aenv_block_client::{BlockdClient, BlockdError, ErrorKind, Uppers};
use axum::http::{StatusCode, Uri};
use tokio::net::UnixListener;

/// Answers everything with a status and a body; the path is echoed where the body says `PATH`.
fn serve(socket: &Path, status: u16, body: &str) {
    let listener = UnixListener::bind(socket).unwrap();
    let (status, body) = (StatusCode::from_u16(status).unwrap(), body.to_owned());
    let app =
        axum::Router::new().fallback(move |uri: Uri| async move { (status, body.replace("PATH", &uri.to_string())) });
    tokio::spawn(async move { axum::serve(listener, app).await });
}

fn refusal(kind: ErrorKind) -> String {
    serde_json::to_string(&ErrorBody { kind, message: "no: PATH".to_owned() }).unwrap()
}

#[tokio::test]
async fn refusals_keep_their_kind_and_words() {
    for (kind, status) in [
        (ErrorKind::Conflict, 409),
        (ErrorKind::Invalid, 400),
        (ErrorKind::NoSpace, 507),
        (ErrorKind::Remote, 502),
        (ErrorKind::Failed, 500),
        (ErrorKind::Unreachable, 503),
    ] {
        let dir = tempfile::tempdir().unwrap();
        serve(&dir.path().join("s"), status, &refusal(kind));
        let client = BlockdClient::new(dir.path().join("s"));
        let error = client.get("a b/c").await.unwrap_err();
        assert_eq!((error.kind(), error.to_string().as_str()), (kind, "no: /v1/devices/a%20b%2Fc"));
    }
}

#[tokio::test]
async fn what_is_not_there_is_none_or_closed_already() {
    let dir = tempfile::tempdir().unwrap();
    serve(&dir.path().join("s"), 404, &refusal(ErrorKind::NotFound));
    let client = BlockdClient::new(dir.path().join("s"));
    assert_eq!(client.get("a").await.unwrap(), None);
    client.close("a", Uppers::Remove).await.unwrap();
    assert_eq!(client.flush("a").await.unwrap_err().kind(), ErrorKind::NotFound);
}

#[tokio::test]
async fn an_answer_of_another_form_is_no_success() {
    for (status, body) in [(200, "<html>"), (500, "oops"), (200, "{}")] {
        let dir = tempfile::tempdir().unwrap();
        serve(&dir.path().join("s"), status, body);
        let error = BlockdClient::new(dir.path().join("s")).info().await.unwrap_err();
        assert!(matches!(error, BlockdError::Answer { .. }), "{error}");
        assert_eq!(error.kind(), ErrorKind::Failed);
    }
}

#[tokio::test]
async fn nobody_at_the_socket_and_a_hang_up_are_unreachable() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let client = BlockdClient::new(&socket);
    assert_eq!(client.info().await.unwrap_err().kind(), ErrorKind::Unreachable);
    let listener = UnixListener::bind(&socket).unwrap();
    let hang_up = async {
        let (stream, _) = listener.accept().await.unwrap();
        stream.readable().await.unwrap();
        drop(stream);
    };
    let (error, ()) = tokio::join!(client.info(), hang_up);
    assert_eq!(error.unwrap_err().kind(), ErrorKind::Unreachable);
    drop(listener);
    assert_eq!(client.info().await.unwrap_err().kind(), ErrorKind::Unreachable, "a socket that a dead process left");
}

#[tokio::test(start_paused = true)]
async fn a_silent_daemon_is_waited_for_with_a_deadline() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let _listener = UnixListener::bind(&socket).unwrap();
    let client = BlockdClient::new(&socket);
    for error in [client.info().await.unwrap_err(), client.flush("a").await.unwrap_err()] {
        assert!(matches!(error, BlockdError::TimedOut { .. }), "{error}");
        assert_eq!(error.kind(), ErrorKind::Unreachable);
    }
}
