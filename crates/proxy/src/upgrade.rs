//! Connections that stop being HTTP: WebSocket and whatever else a service upgrades to.

use std::io;

use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::io::copy_bidirectional_with_sizes;
use tracing::debug;

use crate::body::{Connection, Cut};

/// Bytes on the way in each direction: enough for a full segment train, little enough for thousands of idle sockets.
const BUFFER: usize = 16 << 10;

/// Passes bytes both ways between the upgraded sides, until both have ended, one fails, or `cut` fires. A half-closed side
/// is passed on as such.
pub(crate) async fn splice(client: OnUpgrade, guest: OnUpgrade, connection: Connection, cut: Cut) {
    let work = async {
        // The guest's side is handed over by the task of its connection, the client's once the 101 was written.
        let guest = guest.await.map_err(io::Error::other)?;
        let client = client.await.map_err(io::Error::other)?;
        let (mut client, mut guest) = (TokioIo::new(client), TokioIo::new(guest));
        copy_bidirectional_with_sizes(&mut client, &mut guest, BUFFER, BUFFER).await
    };
    tokio::select! {
        result = work => match result {
            Ok((up, down)) => debug!(up, down, "upgraded connection ended"),
            Err(error) => debug!(%error, "upgraded connection broke"),
        },
        () = cut.fired() => debug!("upgraded connection cut"),
    }
    drop(connection);
}
