//! Reading tar archives member by member, exactly.
//!
//! The `tar` crate reads the 512-byte blocks; what follows from a *sequence* of blocks is read here, since an image
//! layer may hold what the crate's own iterator loses: PAX values with line feeds in them (binary capabilities are
//! such values), global PAX records, and the three PAX encodings of sparse files.
//!
//! ```text
//!   [ 'g' global PAX ]*  [ 'x' PAX | 'L' long name | 'K' long link ]*  header  [ sparse map ]  data  padding   …
//! ```

mod pax;
mod sparse;

use std::io::{self, Read};

use tar::{EntryType, Header};

use self::pax::Records;
pub(crate) use self::sparse::Extent;

/// The unit everything in an archive is padded to.
const BLOCK: u64 = 512;
/// Longest name, link or PAX block that is believed. Paths end at 4 KiB; an xattr may take 64 KiB.
const MAX_EXTENSION: u64 = 1 << 20;

/// What kind of file a member describes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Kind {
    File,
    Directory,
    Symlink {
        target: Vec<u8>,
    },
    /// Another name of a file; `target` is a path in the archive's own naming.
    HardLink {
        target: Vec<u8>,
    },
    CharDevice {
        major: u32,
        minor: u32,
    },
    BlockDevice {
        major: u32,
        minor: u32,
    },
    Fifo,
}

/// One file of an archive, its data still to be read from the [`Members`] it came from.
#[derive(Debug, Clone)]
pub(crate) struct Member {
    /// As written in the archive, not yet judged.
    pub(crate) path: Vec<u8>,
    pub(crate) kind: Kind,
    /// Permission bits, with setuid, setgid and sticky.
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// Seconds and nanoseconds since 1970.
    pub(crate) mtime: (i64, u32),
    /// Extended attributes by their full names, such as `security.capability`.
    pub(crate) xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    /// Length of the file once unpacked, holes included.
    pub(crate) size: u64,
    /// Where the stored bytes belong; `None` if they are the whole file.
    pub(crate) extents: Option<Vec<Extent>>,
    /// Where in the archive the stored bytes begin.
    pub(crate) data_offset: u64,
}

/// A malformed archive, as the error that a reader gives.
fn malformed(problem: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, problem.into())
}

/// The members of an archive, in order.
pub(crate) struct Members<R> {
    input: R,
    offset: u64,
    /// Data and padding of the current member that nobody has read yet.
    data_left: u64,
    padding: u64,
    globals: Records,
}

impl<R: Read> Members<R> {
    pub(crate) fn new(input: R) -> Self {
        Self { input, offset: 0, data_left: 0, padding: 0, globals: Records::default() }
    }

    /// The next member, or `None` at the archive's end. Data of the one before that was not read is skipped.
    ///
    /// Errors: `InvalidData` and `UnexpectedEof` for a broken archive, else whatever the input gives.
    pub(crate) fn next(&mut self) -> io::Result<Option<Member>> {
        let mut local = Records::default();
        let mut long_name = None;
        let mut long_link = None;
        loop {
            self.skip_rest()?;
            let Some(header) = self.header()? else { return Ok(None) };
            let stored = number(&header.as_old().size, "size")?;
            match header.entry_type() {
                EntryType::XGlobalHeader => {
                    let records = Records::parse(&self.extension(stored)?)?;
                    self.globals.extend(records);
                }
                EntryType::XHeader => local.extend(Records::parse(&self.extension(stored)?)?),
                EntryType::GNULongName => long_name = Some(until_nul(&self.extension(stored)?)),
                EntryType::GNULongLink => long_link = Some(until_nul(&self.extension(stored)?)),
                _ => {
                    let records = self.globals.overlaid(local);
                    return self.member(&header, &records, long_name, long_link).map(Some);
                }
            }
        }
    }

    /// Reads stored bytes of the current member.
    pub(crate) fn read_data(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let want = buffer.len().min(usize::try_from(self.data_left).unwrap_or(usize::MAX));
        if want == 0 {
            return Ok(0);
        }
        let n = self.input.read(&mut buffer[..want])?;
        if n == 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the archive ends in the middle of a file"));
        }
        self.data_left -= n as u64;
        self.offset += n as u64;
        Ok(n)
    }

    /// Reads the input to its end, past whatever follows the archive's end mark, and gives it back.
    pub(crate) fn drain(mut self) -> io::Result<R> {
        io::copy(&mut self.input, &mut io::sink())?;
        Ok(self.input)
    }

    fn member(
        &mut self,
        header: &Header,
        records: &Records,
        long_name: Option<Vec<u8>>,
        long_link: Option<Vec<u8>>,
    ) -> io::Result<Member> {
        let old = header.as_old();
        let path = match (records.get(b"path"), long_name) {
            (Some(path), _) => path.to_vec(),
            (None, Some(path)) => path,
            (None, None) => header.path_bytes().into_owned(),
        };
        let link = match (records.get(b"linkpath"), long_link) {
            (Some(link), _) => link.to_vec(),
            (None, Some(link)) => link,
            (None, None) => until_nul(&old.linkname),
        };
        let kind = kind(header, &path, link)?;
        let mut member = Member {
            kind,
            mode: u32::try_from(number(&old.mode, "mode")? & 0o7777).unwrap_or(0),
            uid: id(records.number(b"uid")?, &old.uid, "uid")?,
            gid: id(records.number(b"gid")?, &old.gid, "gid")?,
            mtime: match records.get(b"mtime") {
                Some(text) => pax::time(text)?,
                // Base-256 fields may be negative; their low 64 bits are the two's complement.
                None => (number(&old.mtime, "mtime")?.cast_signed(), 0),
            },
            xattrs: records.xattrs(),
            size: 0,
            extents: None,
            data_offset: 0,
            path,
        };
        // As in Go's archive/tar, which writes nearly all layers: only files have data, whatever the size field says.
        let stored = match (&member.kind, records.number(b"size")?) {
            (Kind::File, Some(size)) => size,
            (Kind::File, None) => number(&old.size, "size")?,
            _ => 0,
        };
        self.begin_data(stored);
        member.size = stored;
        if member.kind == Kind::File {
            self.read_sparse_map(header, records, &mut member)?;
        }
        member.data_offset = self.offset;
        Ok(member)
    }

    /// Finds out whether a file is sparse; what the map takes of the stored bytes is read here.
    fn read_sparse_map(&mut self, header: &Header, records: &Records, member: &mut Member) -> io::Result<()> {
        let map = if header.entry_type() == EntryType::GNUSparse {
            // The map's continuation blocks lie between header and data and aren't counted in its size.
            sparse::from_header(header, || {
                let mut block = [0; BLOCK as usize];
                self.input.read_exact(&mut block)?;
                self.offset += BLOCK;
                Ok(block)
            })?
        } else if let Some(map) = sparse::from_records(records)? {
            map
        } else if sparse::map_is_in_data(records) {
            sparse::from_data(records, || {
                let mut block = [0; BLOCK as usize];
                let mut done = 0;
                while done < block.len() {
                    match self.read_data(&mut block[done..])? {
                        0 => return Err(malformed("a sparse file's map is cut short")),
                        n => done += n,
                    }
                }
                Ok(block)
            })?
        } else {
            return Ok(());
        };
        map.check(self.data_left)?;
        if let Some(name) = records.get(b"GNU.sparse.name") {
            member.path = name.to_vec();
        }
        member.size = map.size;
        member.extents = Some(map.extents);
        Ok(())
    }

    fn begin_data(&mut self, stored: u64) {
        self.data_left = stored;
        self.padding = (BLOCK - stored % BLOCK) % BLOCK;
    }

    /// Reads the data of a long name, long link or PAX block.
    fn extension(&mut self, size: u64) -> io::Result<Vec<u8>> {
        if size > MAX_EXTENSION {
            return Err(malformed(format!("a member's names and attributes take {size} bytes, more than 1 MiB")));
        }
        self.begin_data(size);
        let mut data = vec![0; usize::try_from(size).unwrap_or(0)];
        let mut done = 0;
        while done < data.len() {
            done += self.read_data(&mut data[done..])?;
        }
        Ok(data)
    }

    fn skip_rest(&mut self) -> io::Result<()> {
        let rest = self.data_left.checked_add(self.padding).ok_or_else(|| malformed("a member's size is absurd"))?;
        let skipped = io::copy(&mut (&mut self.input).take(rest), &mut io::sink())?;
        // A missing last padding is common and harms nobody; missing data does.
        if skipped < self.data_left {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the archive ends in the middle of a file"));
        }
        self.offset += skipped;
        self.data_left = 0;
        self.padding = 0;
        Ok(())
    }

    /// The next header block; `None` at the end mark, or where the input ends between members.
    fn header(&mut self) -> io::Result<Option<Header>> {
        let mut header = Header::new_old();
        let block = header.as_mut_bytes();
        let mut done = 0;
        while done < block.len() {
            match self.input.read(&mut block[done..]) {
                Ok(0) if done == 0 => return Ok(None),
                Ok(0) => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the archive ends in a header")),
                Ok(n) => done += n,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.offset += BLOCK;
        if block.iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        let (mut unsigned, mut signed) = (0u32, 0i32);
        for (at, byte) in header.as_bytes().iter().enumerate() {
            let byte = if (148..156).contains(&at) { b' ' } else { *byte };
            unsigned += u32::from(byte);
            signed += i32::from(byte.cast_signed());
        }
        // Some historic writers summed signed characters; every reader accepts both.
        let sum = number(&header.as_old().cksum, "checksum")?;
        if sum != u64::from(unsigned) && i64::try_from(sum) != Ok(i64::from(signed)) {
            return Err(malformed("a header's checksum is wrong"));
        }
        Ok(Some(header))
    }
}

fn kind(header: &Header, path: &[u8], link: Vec<u8>) -> io::Result<Kind> {
    let device = || -> io::Result<(u32, u32)> {
        let bytes = header.as_bytes();
        let part = |range: std::ops::Range<usize>, what| {
            u32::try_from(number(&bytes[range], what)?).map_err(|_| malformed(format!("{what} is too large")))
        };
        Ok((part(329..337, "device major")?, part(337..345, "device minor")?))
    };
    Ok(match header.entry_type() {
        // Before ustar, a directory was a file whose name ends in a slash.
        EntryType::Regular if path.ends_with(b"/") => Kind::Directory,
        EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => Kind::File,
        EntryType::Directory => Kind::Directory,
        EntryType::Symlink => Kind::Symlink { target: link },
        EntryType::Link => Kind::HardLink { target: link },
        EntryType::Fifo => Kind::Fifo,
        EntryType::Char => {
            let (major, minor) = device()?;
            Kind::CharDevice { major, minor }
        }
        EntryType::Block => {
            let (major, minor) = device()?;
            Kind::BlockDevice { major, minor }
        }
        other => {
            let flag = char::from(other.as_byte());
            return Err(malformed(format!("{} has the unknown member type {flag:?}", String::from_utf8_lossy(path))));
        }
    })
}

/// A numeric field: octal digits, or base 256 where the first bit is set; blank is 0, as Go reads it.
fn number(field: &[u8], what: &str) -> io::Result<u64> {
    if field[0] & 0x80 != 0 {
        let low = &field[field.len().saturating_sub(8)..];
        let mut value = low.iter().fold(0u64, |value, byte| value << 8 | u64::from(*byte));
        if field.len() <= 8 {
            value &= !(1 << 63); // the marker itself
        }
        return Ok(value);
    }
    let digits = until_nul(field);
    let digits = digits.trim_ascii();
    if digits.is_empty() {
        return Ok(0);
    }
    std::str::from_utf8(digits)
        .ok()
        .and_then(|digits| u64::from_str_radix(digits, 8).ok())
        .ok_or_else(|| malformed(format!("a header's {what} is no number")))
}

fn id(from_pax: Option<u64>, field: &[u8], what: &str) -> io::Result<u32> {
    let id = match from_pax {
        Some(id) => id,
        None => number(field, what)?,
    };
    // The last one means "leave it as it is" to the kernel.
    let valid = u32::try_from(id).ok().filter(|&id| id != u32::MAX);
    valid.ok_or_else(|| malformed(format!("{what} {id} does not exist on Linux")))
}

fn until_nul(bytes: &[u8]) -> Vec<u8> {
    bytes.split(|byte| *byte == 0).next().unwrap_or_default().to_vec()
}

#[cfg(test)]
mod tests;
