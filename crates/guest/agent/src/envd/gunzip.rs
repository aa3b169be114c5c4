//! Decompresses a request body as it arrives, in bounded memory.

use std::io::{self, Write as _};

use axum::body::{Body, BodyDataStream, Bytes};
use flate2::write::GzDecoder;
use futures::{Stream, StreamExt as _};

/// Compressed bytes decoded in one go. Deflate expands at most about a thousandfold, so a hostile body makes us hold
/// half a megabyte, not the whole bomb.
const STEP: usize = 512;

struct Gunzip {
    body: BodyDataStream,
    /// `None` once the body has ended.
    decoder: Option<GzDecoder<Vec<u8>>>,
    pending: Bytes,
}

impl Gunzip {
    async fn next(&mut self) -> Option<io::Result<Bytes>> {
        loop {
            let decoder = self.decoder.as_mut()?;
            if self.pending.is_empty() {
                match self.body.next().await {
                    Some(Ok(bytes)) => self.pending = bytes,
                    Some(Err(error)) => {
                        self.decoder = None;
                        return Some(Err(io::Error::other(error)));
                    }
                    None => {
                        let finished = self.decoder.take()?.finish();
                        return match finished {
                            Ok(rest) if rest.is_empty() => None,
                            Ok(rest) => Some(Ok(rest.into())),
                            Err(error) => Some(Err(as_invalid(&error))),
                        };
                    }
                }
                continue;
            }
            let piece = self.pending.split_to(self.pending.len().min(STEP));
            if let Err(error) = decoder.write_all(&piece).and_then(|()| decoder.flush()) {
                self.decoder = None;
                return Some(Err(as_invalid(&error)));
            }
            let decoded = std::mem::take(decoder.get_mut());
            if !decoded.is_empty() {
                return Some(Ok(decoded.into()));
            }
        }
    }
}

/// Tells corrupt data apart from a broken connection.
fn as_invalid(error: &io::Error) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("error decompressing request body: {error}"))
}

/// The decompressed bytes. Corrupt data is an `InvalidData` error whose text is meant for the caller.
pub(super) fn gunzip(body: Body) -> impl Stream<Item = io::Result<Bytes>> + Send + 'static {
    let state =
        Gunzip { body: body.into_data_stream(), decoder: Some(GzDecoder::new(Vec::new())), pending: Bytes::new() };
    futures::stream::unfold(state, |mut state| async move { state.next().await.map(|item| (item, state)) })
}

#[cfg(test)]
mod tests {
    use flate2::{Compression, write::GzEncoder};

    use super::*;

    fn zipped(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    async fn unzip(bytes: Vec<u8>) -> (Vec<u8>, usize, Option<io::Error>) {
        let mut stream = std::pin::pin!(gunzip(Body::from(bytes)));
        let (mut all, mut largest) = (Vec::new(), 0);
        while let Some(item) = stream.next().await {
            match item {
                Ok(bytes) => {
                    largest = largest.max(bytes.len());
                    all.extend_from_slice(&bytes);
                }
                Err(error) => return (all, largest, Some(error)),
            }
        }
        (all, largest, None)
    }

    #[tokio::test]
    async fn a_bomb_is_unpacked_in_small_pieces_and_a_torn_body_is_an_error() {
        let zeroes = vec![0; 8 << 20];
        let (all, largest, error) = unzip(zipped(&zeroes)).await;
        assert!(error.is_none() && all == zeroes);
        assert!(largest <= 1 << 20, "{largest} bytes in one piece");

        let mut torn = zipped(b"hello hello hello");
        torn.truncate(torn.len() - 6);
        assert_eq!(unzip(torn).await.2.unwrap().kind(), io::ErrorKind::InvalidData);
        assert_eq!(unzip(b"not gzip at all".to_vec()).await.2.unwrap().kind(), io::ErrorKind::InvalidData);
    }
}
