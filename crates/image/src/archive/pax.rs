//! PAX extended header records: `LENGTH KEY=VALUE\n`, where LENGTH counts the whole record.

use std::io;

use super::malformed;

const XATTR: &[u8] = b"SCHILY.xattr.";

/// The records of a PAX block in order. A later record of the same key wins; an empty value takes one away.
#[derive(Debug, Default, Clone)]
pub(super) struct Records(Vec<(Vec<u8>, Vec<u8>)>);

impl Records {
    /// Reads by length, never by line: a value may hold any byte.
    pub(super) fn parse(mut data: &[u8]) -> io::Result<Self> {
        let broken = || malformed("a PAX record is malformed");
        let mut records = Vec::new();
        // Some writers pad the block with NULs inside its declared size.
        while data.first().is_some_and(|byte| *byte != 0) {
            let space = data.iter().position(|byte| *byte == b' ').ok_or_else(broken)?;
            let length: usize =
                std::str::from_utf8(&data[..space]).ok().and_then(|digits| digits.parse().ok()).ok_or_else(broken)?;
            let record = data.get(space + 1..length).ok_or_else(broken)?;
            let record = record.strip_suffix(b"\n").ok_or_else(broken)?;
            let equals = record.iter().position(|byte| *byte == b'=').ok_or_else(broken)?;
            records.push((record[..equals].to_vec(), record[equals + 1..].to_vec()));
            data = &data[length..];
        }
        Ok(Self(records))
    }

    pub(super) fn extend(&mut self, later: Self) {
        self.0.extend(later.0);
    }

    /// These records with `local` ones on top.
    pub(super) fn overlaid(&self, local: Self) -> Self {
        let mut all = self.clone();
        all.extend(local);
        all
    }

    pub(super) fn get(&self, key: &[u8]) -> Option<&[u8]> {
        let (_, value) = self.0.iter().rev().find(|(name, _)| name == key)?;
        (!value.is_empty()).then_some(value)
    }

    pub(super) fn number(&self, key: &[u8]) -> io::Result<Option<u64>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match std::str::from_utf8(value).ok().and_then(|digits| digits.parse().ok()) {
            Some(number) => Ok(Some(number)),
            None => Err(malformed(format!("the PAX record {} is no number", String::from_utf8_lossy(key)))),
        }
    }

    /// All values in order, for keys that repeat.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        self.0.iter().map(|(key, value)| (key.as_slice(), value.as_slice()))
    }

    /// The extended attributes, each once. An empty value is a value here.
    pub(super) fn xattrs(&self) -> Vec<(Vec<u8>, Vec<u8>)> {
        let mut found: Vec<(Vec<u8>, Vec<u8>)> = Vec::new();
        for (key, value) in self.iter() {
            let Some(name) = key.strip_prefix(XATTR) else { continue };
            found.retain(|(known, _)| known != name);
            found.push((name.to_vec(), value.to_vec()));
        }
        found
    }
}

/// `SECONDS[.FRACTION]`, possibly negative, as seconds and nanoseconds; digits beyond nanoseconds are cut off.
pub(super) fn time(text: &[u8]) -> io::Result<(i64, u32)> {
    let broken = || malformed("a PAX time is no number");
    let text = std::str::from_utf8(text).map_err(|_| broken())?;
    let (seconds, fraction) = text.split_once('.').unwrap_or((text, ""));
    let whole: i64 = seconds.parse().map_err(|_| broken())?;
    if !fraction.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(broken());
    }
    let nanos =
        fraction.bytes().chain(std::iter::repeat(b'0')).take(9).fold(0, |n, digit| n * 10 + u32::from(digit - b'0'));
    // -1.25 is 0.75 after second -2.
    Ok(if seconds.starts_with('-') && nanos > 0 { (whole - 1, 1_000_000_000 - nanos) } else { (whole, nanos) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_may_hold_line_feeds_and_equal_signs() {
        let records = Records::parse(b"18 SCHILY.xattr.a=\n=5 e=\n").unwrap_err();
        assert_eq!(records.kind(), io::ErrorKind::InvalidData, "the length must end at a line feed");
        let records = Records::parse(b"22 SCHILY.xattr.a=\n=\n\n5 e=\n").unwrap();
        assert_eq!(records.xattrs(), [(b"a".to_vec(), b"\n=\n".to_vec())]);
        assert_eq!(records.get(b"e"), None, "an empty value takes the record away");
    }

    #[test]
    fn lengths_that_lie_are_refused() {
        for data in [&b"3 a"[..], b"99 a=b\n", b"x a=b\n", b"0 a=b\n", b"2 a=b\n", b"5 a=b\n", b"7 a=b\n\n6 c"] {
            assert!(Records::parse(data).is_err(), "{data:?}");
        }
    }

    #[test]
    fn times_keep_their_fraction_and_sign() {
        assert_eq!(time(b"12").unwrap(), (12, 0));
        assert_eq!(time(b"12.5").unwrap(), (12, 500_000_000));
        assert_eq!(time(b"-1.25").unwrap(), (-2, 750_000_000));
        assert_eq!(time(b"1.0000000019").unwrap(), (1, 1));
        assert!(time(b"1.x").is_err());
        assert!(time(b"").is_err());
    }
}
