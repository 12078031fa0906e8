//! Bytes as nobody should write them, for tests of what reads the formats of others.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};

/// What formats are made of.
const SIGNS: &[u8] = b"0123456789-+ \t\n\0()[]:/.,=\\_\x7f\xffaSZUidxN";

/// One thing that is wrong, at a place.
#[derive(Clone, Debug)]
enum Damage {
    Byte(Index, u8),
    Cut(Index),
    Lost(Index, usize),
    Twice(Index, usize),
    Put(Index, Vec<u8>),
}

impl Damage {
    fn apply(self, bytes: &mut Vec<u8>) {
        let at = |index: Index| index.index(bytes.len() + 1);
        let end = |at: usize, count: usize| (at + count).min(bytes.len());
        match self {
            Damage::Byte(index, byte) => {
                let at = at(index);
                if let Some(place) = bytes.get_mut(at) {
                    *place = byte;
                }
            }
            Damage::Cut(index) => bytes.truncate(at(index)),
            Damage::Lost(index, count) => {
                let range = at(index)..end(at(index), count);
                bytes.drain(range);
            }
            Damage::Twice(index, count) => {
                let range = at(index)..end(at(index), count);
                bytes.extend_from_within(range);
            }
            Damage::Put(index, more) => {
                let at = at(index);
                bytes.splice(at..at, more);
            }
        }
    }
}

/// These with up to three things wrong.
pub fn mutated(real: Vec<u8>) -> impl Strategy<Value = Vec<u8>> {
    let signs = || prop_oneof![any::<u8>(), select(SIGNS)];
    let damage = prop_oneof![
        3 => (any::<Index>(), signs()).prop_map(|(at, byte)| Damage::Byte(at, byte)),
        1 => any::<Index>().prop_map(Damage::Cut),
        1 => (any::<Index>(), 1..40_usize).prop_map(|(at, count)| Damage::Lost(at, count)),
        1 => (any::<Index>(), 1..40_usize).prop_map(|(at, count)| Damage::Twice(at, count)),
        1 => (any::<Index>(), vec(signs(), 1..24)).prop_map(|(at, more)| Damage::Put(at, more)),
    ];
    vec(damage, 0..=3).prop_map(move |damages| {
        let mut bytes = real.clone();
        damages
            .into_iter()
            .for_each(|damage| damage.apply(&mut bytes));
        bytes
    })
}

/// Anything: bytes of all kinds, of the kinds that formats are made of, and real ones that were damaged.
pub fn arbitrary_bytes(real: impl AsRef<[u8]>) -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        1 => vec(any::<u8>(), 0..400),
        1 => vec(select(SIGNS), 0..400),
        2 => mutated(real.as_ref().to_vec()),
    ]
}

/// What the kernel says of this process in a file of /proc; nothing where there is none.
pub fn proc_self_file(file: &str) -> Vec<u8> {
    std::fs::read(std::path::Path::new("/proc/self").join(file)).unwrap_or_default()
}
