//! On memory that looks like a ring, without a kernel behind it.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use nix::sys::memfd::{MFdFlags, memfd_create};

use super::*;
use crate::sys::page_size;

/// Bytes of data. No multiple of what a record takes up.
const SIZE: u32 = 1 << 16;
/// Bytes of a record without its header, which says nothing that is understood.
const LENGTH: u32 = 32;
const BUSY: u32 = 1 << 31;

/// The kernel's side of a ring.
struct Kernel {
    file: File,
    produced: u64,
}

impl Kernel {
    fn new() -> (Kernel, Reader) {
        let file = memfd_create(c"ring", MFdFlags::empty()).expect("a file in memory");
        let file = File::from(file);
        file.set_len(2 * page_size() + 2 * u64::from(SIZE))
            .expect("its length");
        let memory = RingMemory::map(file.as_fd(), SIZE).expect("map it");
        (Kernel { file, produced: 0 }, Reader::new(memory))
    }

    /// A record that begins with this word, and takes up so many bytes with its header.
    fn write(&mut self, word: u32, bytes: u64) {
        let data = 2 * page_size() + self.produced % u64::from(SIZE);
        let at = |at, bytes: &[u8]| self.file.write_all_at(bytes, at).expect("write");
        at(data, &word.to_ne_bytes());
        at(page_size(), &(self.produced + bytes).to_ne_bytes());
        self.produced += bytes;
    }
}

fn drain(reader: &mut Reader) -> Drained {
    let until = reader.memory.produced();
    reader.drain_until(until, |event| panic!("nobody has said that: {event:?}"))
}

#[test]
fn room_is_given_back_up_to_where_a_record_begins() {
    let (mut kernel, mut reader) = Kernel::new();
    let (size, each) = (u64::from(SIZE), u64::from(LENGTH) + 8);
    let mut behind = 0;
    for n in 1..5 * size / each {
        kernel.write(LENGTH, each);
        assert_eq!(drain(&mut reader).malformed, 1, "each is handed over once");
        behind = reader.behind();
        assert!(behind.is_multiple_of(each), "no record begins at {behind}");
        let held = n * each - behind;
        let enough = held < size / 4 + size / PARTS + each;
        assert!(held >= size / 4 && enough || n * each < size / 2, "{held}");
        if n * each > size / 2 {
            reader.memory.release(behind);
        }
    }
    assert!(behind > 4 * size, "{behind}");
}

#[test]
fn where_no_record_begins_all_that_is_there_is_skipped() {
    // Longer than what is there, and one that nobody is at.
    for word in [1 << 20, BUSY | LENGTH] {
        let (mut kernel, mut reader) = Kernel::new();
        kernel.write(LENGTH, 40);
        kernel.write(word, 40);
        kernel.write(LENGTH, 40);
        let drained = drain(&mut reader);
        assert_eq!((drained.records, drained.malformed), (1, 2));
        assert_eq!(drained.malformation, Some(Malformation::Ring(80)));
        // What comes next is read again.
        kernel.write(LENGTH, 40);
        let drained = drain(&mut reader);
        assert_eq!((drained.records, drained.malformed), (1, 1));
        assert_eq!(reader.read, kernel.produced);
    }
}
