//! What `inspect` finds, for people: a name, then one fact a line.

use std::fmt::Write as _;

use aenv_block_overlaybd::{Coverage, HeaderFacts, Inspected, Mode, Packaging};
use aenv_model::Bytes;
use uuid::Uuid;

use crate::inspect::{ConfigTold, Extent, FileTold, LowerTold, Told};

/// All of it, without a newline at the end.
pub(crate) fn text(told: &Told) -> String {
    let mut page = Page::default();
    let extents = match told {
        Told::File(told) => {
            file(&mut page, told);
            &told.extents
        }
        Told::Config(told) => {
            config(&mut page, told);
            &told.extents
        }
    };
    for extent in extents.iter().flatten() {
        page.fact("extent", extent_text(extent));
    }
    page.text
}

#[derive(Default)]
struct Page {
    text: String,
}

impl Page {
    fn title(&mut self, name: &str) {
        self.text.push_str(name);
    }

    fn fact(&mut self, name: &str, value: impl std::fmt::Display) {
        let _ = write!(self.text, "\n  {name:<13} {value}"); // into memory
    }
}

fn file(page: &mut Page, told: &FileTold) {
    let inspection = &told.inspection;
    page.title(&inspection.file);
    page.fact("kind", kind(&inspection.content));
    page.fact("size", bytes(inspection.size));
    if let Some(digest) = &told.digest {
        page.fact("digest", digest);
    }
    match &inspection.content {
        Inspected::Layer { packaging, header: facts, coverage: of, unused, .. } => {
            wrappings(page, packaging);
            header(page, facts);
            page.fact("index", format!("{} entries at byte {}", facts.index_count, facts.index_offset));
            coverage(page, of);
            page.fact("unused", bytes(*unused));
        }
        Inspected::UpperData { header: facts, .. } => {
            header(page, facts);
            match &told.upper {
                Some(of) => coverage(page, of),
                None => page.fact("entries", "in its index file: give that, too"),
            }
        }
        Inspected::UpperIndex { header: facts, log_entries, torn, needs, coverage: of } => {
            header(page, facts);
            page.fact("log", format!("{log_entries} entries from byte 4096"));
            if *torn > 0 {
                page.fact("torn", format!("{torn} bytes behind the last entry are ignored"));
            }
            page.fact("needs", format!("a data file of {}", bytes(*needs)));
            coverage(page, of);
        }
        Inspected::ZFile { packaging, .. } => wrappings(page, packaging),
    }
}

fn kind(content: &Inspected) -> String {
    let layout = |mode: &Mode| match mode {
        Mode::Log => "log",
        Mode::Hybrid => "hybrid",
        Mode::Sparse => "sparse",
    };
    match content {
        Inspected::Layer { sealed_from: None, .. } => "layer, compacted".to_owned(),
        Inspected::Layer { sealed_from: Some(mode), .. } => {
            format!("layer, sealed in place from a {} upper", layout(mode))
        }
        Inspected::UpperData { mode, .. } => format!("data file of a {} upper, open for writing", layout(mode)),
        Inspected::UpperIndex { .. } => "index file of an upper, open for writing".to_owned(),
        Inspected::ZFile { .. } => "ZFile around something that is no layer".to_owned(),
    }
}

fn wrappings(page: &mut Page, packaging: &Packaging) {
    if let Some(member) = packaging.tar {
        page.fact("tar", format!("member of {} at byte {}", bytes(Bytes(member.size)), member.offset));
    }
    if let Some(zfile) = packaging.zfile {
        let algorithm = format!("{:?}", zfile.algorithm).to_lowercase();
        let sums = if zfile.verify { "with" } else { "without" };
        page.fact(
            "zfile",
            format!("{algorithm}, {} blocks of {} bytes {sums} check sums", zfile.block_count, zfile.block_size.get()),
        );
        page.fact("", format!("{} of content, jump table at byte {}", bytes(zfile.original_size), zfile.index_offset));
        let digest = if zfile.digest { "digests of its structure" } else { "no digest of its structure" };
        page.fact(
            "",
            format!("{digest}, {}", if zfile.header_overwritten { "final header" } else { "trailer decides" }),
        );
    }
}

fn header(page: &mut Page, facts: &HeaderFacts) {
    let uuid = |uuid: Uuid| if uuid.is_nil() { "none".to_owned() } else { uuid.to_string() };
    page.fact("uuid", uuid(facts.uuid));
    page.fact("parent", uuid(facts.parent_uuid));
    if !facts.user_tag.is_empty() {
        page.fact("tag", format!("{:?}", facts.user_tag));
    }
    page.fact(
        "virtual size",
        match facts.virtual_size {
            Bytes(0) => "inherited from the layer below".to_owned(),
            size => bytes(size),
        },
    );
    const NAMES: [(u32, &str); 5] = [(0, "header"), (1, "data"), (2, "sealed"), (4, "sparse"), (5, "hybrid")];
    let set: Vec<_> = NAMES.iter().filter(|(bit, _)| facts.flags & (1 << bit) != 0).map(|(_, name)| *name).collect();
    page.fact("flags", format!("{:#x} ({})", facts.flags, set.join(", ")));
    page.fact("version", format!("{}.{}", facts.version.0, facts.version.1));
}

fn coverage(page: &mut Page, coverage: &Coverage) {
    page.fact("extents", format!("{}, {} of them zeroed", coverage.entries, coverage.zeroed_entries));
    page.fact("mapped", format!("{} of data", bytes(coverage.data)));
    page.fact("zeroed", bytes(coverage.zeroed));
}

fn config(page: &mut Page, told: &ConfigTold) {
    let content = &told.content;
    page.title(&told.file);
    page.fact("kind", "image config");
    page.fact("size", bytes(told.size));
    page.fact("depth", content.depth);
    match &content.device {
        None => page.fact("virtual size", "unknown: not all layers are on this machine"),
        Some(device) => {
            page.fact("virtual size", bytes(device.virtual_size));
            coverage(page, &device.coverage);
            if let Some(number) = device.broken_parent {
                page.fact("parents", format!("lowers[{number}] does not name the layer below it"));
            }
        }
    }
    for (number, lower) in content.lowers.iter().enumerate() {
        page.fact(&format!("lowers[{number}]"), lower_text(lower));
    }
    if let Some(upper) = &content.upper {
        page.fact("upper", format!("{} ({:?}), uuid {}", upper.data.display(), upper.mode, upper.uuid));
    }
}

fn lower_text(lower: &LowerTold) -> String {
    match (&lower.file, &lower.inspection) {
        (Some(file), Some(inspection)) => {
            let mut text = format!("{}: {}, {}", file.display(), kind(&inspection.content), bytes(inspection.size));
            if let Inspected::Layer { header, .. } = &inspection.content {
                let _ = write!(text, ", uuid {}", header.uuid); // into memory
            }
            text
        }
        _ => format!(
            "{} at {}, not on this machine",
            lower.digest.as_deref().unwrap_or("?"),
            lower.url.as_deref().unwrap_or("?")
        ),
    }
}

fn extent_text(extent: &Extent) -> String {
    let Extent { offset, length, position, layer } = extent;
    match position {
        Some(position) => format!("{offset:>14} +{length:<10} data at byte {position} of layer {layer}"),
        None => format!("{offset:>14} +{length:<10} zeros of layer {layer}"),
    }
}

/// The number, and what it is about.
fn bytes(bytes: Bytes) -> String {
    if bytes.get() < 1024 { format!("{} bytes", bytes.get()) } else { format!("{} bytes ({bytes})", bytes.get()) }
}
