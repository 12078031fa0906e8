//! Tests with memory that has the layout of a ring buffer, without the kernel.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use nix::sys::memfd::{MFdFlags, memfd_create};

use super::*;
use crate::sys::page_size;

/// Size of the data area in bytes, not a multiple of the size of a record.
const SIZE: u32 = 1 << 16;
/// Length in bytes of a record without its header. Its contents are malformed.
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

    /// Writes a record that begins with `word` and takes up `bytes` with its header.
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
    reader.drain_until(until, |event| panic!("unexpected event: {event:?}"))
}

#[test]
fn restart_position_is_the_start_of_a_record() {
    let (mut kernel, mut reader) = Kernel::new();
    let (size, each) = (u64::from(SIZE), u64::from(LENGTH) + 8);
    let mut restart = 0;
    for n in 1..5 * size / each {
        kernel.write(LENGTH, each);
        assert_eq!(drain(&mut reader).malformed, 1, "read once");
        restart = reader.restart_position();
        assert!(
            restart.is_multiple_of(each),
            "no record begins at {restart}"
        );
        let held = n * each - restart;
        let enough = held < size / 4 + size / PARTS + each;
        assert!(held >= size / 4 && enough || n * each < size / 2, "{held}");
        if n * each > size / 2 {
            reader.memory.release(restart);
        }
    }
    assert!(restart > 4 * size, "{restart}");
}

#[test]
fn invalid_record_skips_all_available_data() {
    // A length beyond the available data, and a record that is never committed.
    for word in [1 << 20, BUSY | LENGTH] {
        let (mut kernel, mut reader) = Kernel::new();
        kernel.write(LENGTH, 40);
        kernel.write(word, 40);
        kernel.write(LENGTH, 40);
        let drained = drain(&mut reader);
        assert_eq!((drained.records, drained.malformed), (1, 2));
        assert_eq!(drained.malformation, Some(Malformation::Ring(80)));
        // Later records are read again.
        kernel.write(LENGTH, 40);
        let drained = drain(&mut reader);
        assert_eq!((drained.records, drained.malformed), (1, 1));
        assert_eq!(reader.position, kernel.produced);
    }
}
