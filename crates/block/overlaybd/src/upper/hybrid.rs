//! Hybrid: sectors that have a place are rewritten in it, the others are appended.

use std::io;

use super::Upper;
use crate::index::{Content, Span};
use crate::mapping::SECTOR;

impl Upper {
    pub(super) fn write_hybrid(&self, sector: u64, buf: &[u8]) -> io::Result<()> {
        let length = buf.len() as u64 / SECTOR;
        let spans: Vec<Span> = self.with_live(|live| live.spans(sector, sector + length).collect());
        let bytes = |from: u64, to: u64| &buf[((from - sector) * SECTOR) as usize..((to - sector) * SECTOR) as usize];
        let mut spans = spans.into_iter().peekable();
        while let Some(span) = spans.next() {
            let mut end = span.offset + span.length;
            if let Content::Data { position, .. } = span.content {
                self.data.write_at(position * SECTOR, bytes(span.offset, end))?;
                continue;
            }
            // Holes and zeros next to each other are appended together.
            while let Some(next) = spans.next_if(|next| !matches!(next.content, Content::Data { .. })) {
                end = next.offset + next.length;
            }
            self.append(span.offset, bytes(span.offset, end))?;
        }
        Ok(())
    }
}
