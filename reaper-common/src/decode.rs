//! Decodes bytes from the ring into a [`Record`]. Does not trust the bytes.

use crate::{
    ABI_VERSION, ARGV_MAX, EXE_MAX, ExecRecord, ExitRecord, FILENAME_MAX, ForkRecord, Header,
    Member, MoveRecord, RawKey, RecordKind, ReparentRecord, TableRow,
};

/// A record whose lengths have been checked. Borrows its strings from the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Record<'a> {
    /// A new process.
    Fork(ForkRecord),
    /// A new program of a process.
    Exec {
        /// Part of fixed length.
        fixed: ExecRecord,
        /// File name as passed to exec, without NUL. Truncated to [`FILENAME_MAX`] bytes.
        filename: &'a [u8],
        /// Path components from the last to the first, each with a NUL.
        exe: &'a [u8],
        /// Arguments, each with a NUL. Truncated to [`ARGV_MAX`] bytes.
        argv: &'a [u8],
    },
    /// The end of a process.
    Exit(ExitRecord),
    /// A new parent of a child, because its parent exits.
    Reparent(ReparentRecord),
    /// A new cgroup of a process.
    Move(MoveRecord),
}

/// Reasons why bytes are not a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecodeError {
    /// Fewer bytes than the length in the header, or than this kind of record needs.
    Short {
        /// Number of bytes that are there.
        have: usize,
        /// Number of bytes that are needed.
        need: usize,
    },
    /// ABI version of another object.
    Abi(u16),
    /// Number that is no [`RecordKind`].
    Kind(u16),
    /// Length above its maximum.
    Length(u32),
    /// Record without a process: its pid or start time is zero.
    NoPid,
}

impl core::fmt::Display for DecodeError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            DecodeError::Short { have, need } => write!(f, "{have} bytes where {need} are needed"),
            DecodeError::Abi(v) => write!(f, "abi version {v} where {ABI_VERSION} is expected"),
            DecodeError::Kind(k) => write!(f, "unknown record kind {k}"),
            DecodeError::Length(n) => write!(f, "length {n} is above the maximum"),
            DecodeError::NoPid => write!(f, "the pid or the start time is 0"),
        }
    }
}

/// Reader of consecutive fields that checks every length.
struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn take(&mut self, n: usize) -> Result<&'a [u8], DecodeError> {
        let short = DecodeError::Short {
            have: self.0.len(),
            need: n,
        };
        let (head, tail) = self.0.split_at_checked(n).ok_or(short)?;
        self.0 = tail;
        Ok(head)
    }
    fn array<const N: usize>(&mut self) -> Result<[u8; N], DecodeError> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N)?);
        Ok(out)
    }
    fn u16(&mut self) -> Result<u16, DecodeError> {
        self.array().map(u16::from_ne_bytes)
    }
    fn u32(&mut self) -> Result<u32, DecodeError> {
        self.array().map(u32::from_ne_bytes)
    }
    fn u64(&mut self) -> Result<u64, DecodeError> {
        self.array().map(u64::from_ne_bytes)
    }
    fn key(&mut self) -> Result<RawKey, DecodeError> {
        Ok(RawKey {
            pid: self.u32()?,
            _pad: self.u32()?,
            start_ns: self.u64()?,
        })
    }
    fn member(&mut self) -> Result<Member, DecodeError> {
        Ok(Member {
            session: self.key()?,
            flags: self.u32()?,
            check: self.u32()?,
        })
    }
    /// Returns the key of an existing process.
    fn process(&mut self) -> Result<RawKey, DecodeError> {
        let key = self.key()?;
        if key.pid == 0 || key.start_ns == 0 {
            Err(DecodeError::NoPid)
        } else {
            Ok(key)
        }
    }
}

/// Decodes one record. Ignores bytes after the record's own length.
///
/// # Errors
/// See [`DecodeError`]. The caller counts the error and continues with the next record.
pub fn decode(bytes: &[u8]) -> Result<Record<'_>, DecodeError> {
    let mut b = Bytes(bytes);
    let header = Header {
        len: b.u32()?,
        kind: b.u16()?,
        abi: b.u16()?,
        time_ns: b.u64()?,
        lost: b.u64()?,
    };
    if header.abi != ABI_VERSION {
        return Err(DecodeError::Abi(header.abi));
    }
    let kind = *RecordKind::ALL
        .iter()
        .find(|k| **k as u16 == header.kind)
        .ok_or(DecodeError::Kind(header.kind))?;
    let len = header.len as usize;
    let Some(record) = bytes.get(..len) else {
        return Err(DecodeError::Short {
            have: bytes.len(),
            need: len,
        });
    };
    // Only the bytes of this record, after its header.
    b.0 = record
        .get(size_of::<Header>()..)
        .ok_or(DecodeError::Short {
            have: len,
            need: size_of::<Header>(),
        })?;
    match kind {
        RecordKind::Fork => Ok(Record::Fork(ForkRecord {
            header,
            child: b.process()?,
            parent: b.key()?,
            creator: b.key()?,
            pidfd_inode: b.u64()?,
            uid: b.u32()?,
            euid: b.u32()?,
            flags: b.u32()?,
            signal: b.u32()?,
            member: b.member()?,
        })),
        RecordKind::Exec => exec(header, b),
        RecordKind::Exit => Ok(Record::Exit(ExitRecord {
            header,
            process: b.process()?,
            parent: b.key()?,
            status: b.u32()?,
            children: b.u32()?,
            peak_rss_pages: b.u64()?,
            member: b.member()?,
        })),
        RecordKind::Reparent => Ok(Record::Reparent(ReparentRecord {
            header,
            child: b.process()?,
            old_parent: b.key()?,
            adopter: b.key()?,
            member: b.member()?,
            signal: b.u32()?,
            _pad: b.u32()?,
        })),
        RecordKind::Move => Ok(Record::Move(MoveRecord {
            header,
            process: b.process()?,
            cgroup_id: b.u64()?,
            member: b.member()?,
        })),
    }
}

/// Decodes the next row of the process table. Returns the remaining bytes too.
///
/// # Errors
/// A [`DecodeError`] if the bytes end within a row, or the row has no process.
pub fn decode_row(bytes: &[u8]) -> Result<(TableRow, &[u8]), DecodeError> {
    let mut b = Bytes(bytes);
    let row = TableRow {
        process: b.process()?,
        parent: b.key()?,
        pidfd_inode: b.u64()?,
        flags: b.u32()?,
        _pad: b.u32()?,
    };
    Ok((row, b.0))
}

fn exec(header: Header, mut b: Bytes<'_>) -> Result<Record<'_>, DecodeError> {
    let fixed = ExecRecord {
        header,
        process: b.process()?,
        parent: b.key()?,
        pidfd_inode: b.u64()?,
        cgroup_id: b.u64()?,
        uid: b.u32()?,
        euid: b.u32()?,
        pgid: b.u32()?,
        sid: b.u32()?,
        tty: b.u32()?,
        old_tid: b.u32()?,
        argv_full_len: b.u32()?,
        argv_len: b.u32()?,
        filename_len: b.u16()?,
        exe_len: b.u16()?,
        exe_cut: b.u32()?,
        comm: b.array()?,
        member: b.member()?,
        signal: b.u32()?,
        environment: b.u32()?,
    };
    if fixed.argv_len as usize > ARGV_MAX || fixed.argv_len > fixed.argv_full_len {
        return Err(DecodeError::Length(fixed.argv_len));
    }
    if usize::from(fixed.filename_len) > FILENAME_MAX {
        return Err(DecodeError::Length(fixed.filename_len.into()));
    }
    if usize::from(fixed.exe_len) > EXE_MAX + 256 {
        return Err(DecodeError::Length(fixed.exe_len.into()));
    }
    let filename = b.take(fixed.filename_len.into())?;
    let argv = b.take(fixed.argv_len as usize)?;
    let exe = b.take(fixed.exe_len.into())?;
    Ok(Record::Exec {
        fixed,
        filename,
        exe,
        argv,
    })
}

#[cfg(test)]
mod tests;
