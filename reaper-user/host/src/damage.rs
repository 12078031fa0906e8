//! Generates damaged input for tests of the parsers.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};

/// Bytes that occur in the parsed formats.
const FORMAT_BYTES: &[u8] = b"0123456789-+ \t\n\0()[]:/.,=\\_\x7f\xffaSZUidxN";

/// One damage at a position.
#[derive(Clone, Debug)]
enum Damage {
    Overwrite(Index, u8),
    Truncate(Index),
    Delete(Index, usize),
    Duplicate(Index, usize),
    Insert(Index, Vec<u8>),
}

impl Damage {
    fn apply(self, bytes: &mut Vec<u8>) {
        let at = |index: Index| index.index(bytes.len() + 1);
        let end = |at: usize, count: usize| (at + count).min(bytes.len());
        match self {
            Damage::Overwrite(index, byte) => {
                let at = at(index);
                if let Some(place) = bytes.get_mut(at) {
                    *place = byte;
                }
            }
            Damage::Truncate(index) => bytes.truncate(at(index)),
            Damage::Delete(index, count) => {
                let range = at(index)..end(at(index), count);
                bytes.drain(range);
            }
            Damage::Duplicate(index, count) => {
                let range = at(index)..end(at(index), count);
                bytes.extend_from_within(range);
            }
            Damage::Insert(index, added) => {
                let at = at(index);
                bytes.splice(at..at, added);
            }
        }
    }
}

/// Generates copies of `real` with up to three damages.
pub fn mutated(real: Vec<u8>) -> impl Strategy<Value = Vec<u8>> {
    let byte_values = || prop_oneof![any::<u8>(), select(FORMAT_BYTES)];
    let damage = prop_oneof![
        3 => (any::<Index>(), byte_values()).prop_map(|(at, byte)| Damage::Overwrite(at, byte)),
        1 => any::<Index>().prop_map(Damage::Truncate),
        1 => (any::<Index>(), 1..40_usize).prop_map(|(at, count)| Damage::Delete(at, count)),
        1 => (any::<Index>(), 1..40_usize).prop_map(|(at, count)| Damage::Duplicate(at, count)),
        1 => (any::<Index>(), vec(byte_values(), 1..24)).prop_map(|(at, added)| Damage::Insert(at, added)),
    ];
    vec(damage, 0..=3).prop_map(move |damages| {
        let mut bytes = real.clone();
        damages
            .into_iter()
            .for_each(|damage| damage.apply(&mut bytes));
        bytes
    })
}

/// Generates random bytes, random bytes of the parsed formats, and damaged copies of `real`.
pub fn arbitrary_bytes(real: impl AsRef<[u8]>) -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        1 => vec(any::<u8>(), 0..400),
        1 => vec(select(FORMAT_BYTES), 0..400),
        2 => mutated(real.as_ref().to_vec()),
    ]
}

/// Returns the content of a file in /proc/self, or nothing if it cannot be read.
pub fn proc_self_file(file: &str) -> Vec<u8> {
    std::fs::read(std::path::Path::new("/proc/self").join(file)).unwrap_or_default()
}
