//! Rows of the process table as sysctl(3) returns them: `struct kinfo_proc` of bsd/sys/sysctl.h.
//!
//! The structure is the same on both processor architectures. Incomplete or invalid rows are skipped.

use reaper_model::event::Uids;

/// Size of a row in bytes.
pub const SIZE: usize = 648;
/// Offsets of the fields. The second part, `struct eproc`, starts after 296 bytes.
const START_SECONDS: usize = 0;
const START_MICROS: usize = 8;
const FLAGS: usize = 32;
const STATE: usize = 36;
const PID: usize = 40;
const NAME: usize = 243;
const REAL_UID: usize = 392;
const SAVED_UID: usize = 396;
const EFFECTIVE_UID: usize = 420;
const PARENT: usize = 560;
const GROUP: usize = 564;
const TERMINAL: usize = 572;

/// Maximum length of a name. The kernel has 16 bytes, but other systems have 15, and rules expect at most that.
const NAME_MAX: usize = 15;
/// `P_SYSTEM`: flag of processes of the kernel.
const SYSTEM: u32 = 0x200;
/// `SZOMB`: state of an exited process that has not been waited for.
pub const ZOMBIE: u8 = 5;

/// A row of the process table (`struct kinfo_proc`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KinfoProc {
    /// Pid of the process.
    pub pid: u32,
    /// Pid of the parent; 0 without a parent.
    pub parent: u32,
    /// Start time by the wall clock of that time, in µs since the epoch.
    pub began: u64,
    /// Real and effective uid.
    pub uids: Uids,
    /// Saved set-user-ID.
    pub saved_uid: u32,
    /// Process group id.
    pub group: u32,
    /// Device number of the controlling terminal; 0 without a terminal.
    pub terminal: u32,
    /// Name of the program, at most 15 bytes.
    pub comm: Vec<u8>,
    /// State, such as [`ZOMBIE`].
    pub state: u8,
    /// Whether it is a process of the kernel.
    pub is_kernel: bool,
}

/// Identity of a process, as numbers that are not reused before the next boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Number of the process itself.
    pub unique: u64,
    /// Number of the birth parent, also after the process was reparented.
    pub parent: u64,
}

impl KinfoProc {
    /// Parses consecutive rows. Skips that of pid 0, the kernel, and those that cannot be parsed.
    pub fn all(bytes: &[u8]) -> impl Iterator<Item = KinfoProc> + '_ {
        bytes.chunks_exact(SIZE).filter_map(KinfoProc::parse)
    }

    /// Returns the number of rows that cannot be parsed, except that of pid 0. An incomplete last row counts.
    pub fn flawed(bytes: &[u8]) -> usize {
        let rows = bytes.chunks(SIZE);
        let kernels = |row: &&[u8]| row.len() == SIZE && word(row, PID) == Some(0);
        rows.filter(|row| !kernels(row) && KinfoProc::parse(row).is_none())
            .count()
    }

    fn parse(row: &[u8]) -> Option<KinfoProc> {
        let row = row.get(..SIZE)?;
        let word = |at: usize| word(row, at);
        let seconds = u64::from_ne_bytes(*row.get(START_SECONDS..)?.first_chunk()?);
        let micros = u64::from(word(START_MICROS)?);
        let pid = word(PID)?;
        let name = row.get(NAME..NAME + NAME_MAX)?;
        let comm = name.split(|byte| *byte == 0).next()?;
        // Pid 0 is the kernel itself, and no pid is negative.
        (pid != 0 && pid <= i32::MAX.cast_unsigned()).then_some(KinfoProc {
            pid,
            parent: word(PARENT)?,
            began: seconds.checked_mul(1_000_000)?.checked_add(micros)?,
            uids: Uids {
                real: word(REAL_UID)?,
                effective: word(EFFECTIVE_UID)?,
            },
            saved_uid: word(SAVED_UID)?,
            group: word(GROUP)?,
            // -1 means no terminal.
            terminal: Some(word(TERMINAL)?)
                .filter(|device| *device != u32::MAX)
                .unwrap_or(0),
            comm: comm.to_vec(),
            state: *row.get(STATE)?,
            is_kernel: word(FLAGS)? & SYSTEM != 0,
        })
    }

    /// Returns whether the process has exited and has not been waited for.
    pub fn is_zombie(&self) -> bool {
        self.state == ZOMBIE
    }

    /// Returns a letter for the state in the process table (`p_stat`); `?` if it is unknown.
    ///
    /// It can differ from that of ps(1), which derives it from the threads.
    pub fn state(&self) -> char {
        match self.state {
            1 => 'I',
            2 => 'R',
            3 => 'S',
            4 => 'T',
            ZOMBIE => 'Z',
            _ => '?',
        }
    }
}

fn word(row: &[u8], at: usize) -> Option<u32> {
    let bytes = row.get(at..)?.first_chunk()?;
    Some(u32::from_ne_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::damage::mutated;

    /// Returns a row with these words at these offsets.
    fn row(words: &[(usize, u32)]) -> Vec<u8> {
        let mut row = vec![0; SIZE];
        let mut put = |at: usize, bytes: &[u8]| row[at..at + bytes.len()].copy_from_slice(bytes);
        put(NAME, b"a name of 16 byt\0");
        put(STATE, &[3]);
        for (at, word) in words {
            put(*at, &word.to_ne_bytes());
        }
        row
    }

    #[test]
    fn row_fields_are_read_at_their_offsets() {
        let mut bytes = row(&[
            (START_SECONDS, 7),
            (START_MICROS, 5),
            (PID, 42),
            (PARENT, 1),
            (REAL_UID, 501),
            (EFFECTIVE_UID, 502),
            (SAVED_UID, 503),
            (GROUP, 40),
            (TERMINAL, 0x1000_0001),
        ]);
        bytes.extend(row(&[(PID, 43), (TERMINAL, u32::MAX), (FLAGS, SYSTEM)]));
        let all: Vec<_> = KinfoProc::all(&bytes).collect();
        let [first, second] = &all[..] else {
            panic!("{all:?}");
        };
        assert_eq!((first.pid, first.parent, first.began), (42, 1, 7_000_005));
        assert_eq!(
            (first.uids.real, first.uids.effective, first.saved_uid),
            (501, 502, 503)
        );
        assert_eq!((first.group, first.terminal), (40, 0x1000_0001));
        assert_eq!(first.comm, b"a name of 16 by");
        assert_eq!(
            (first.state(), first.is_zombie(), first.is_kernel),
            ('S', false, false)
        );
        assert_eq!((second.terminal, second.is_kernel), (0, true));
    }

    #[test]
    fn invalid_rows_are_skipped_and_counted() {
        let counts = |bytes: &[u8]| (KinfoProc::all(bytes).count(), KinfoProc::flawed(bytes));
        assert_eq!(counts(&row(&[(PID, 0)])), (0, 0), "the kernel");
        for pid in [u32::MAX, 1 << 31] {
            assert_eq!(counts(&row(&[(PID, pid)])), (0, 1), "{pid}");
        }
        let long_ago = row(&[(PID, 1), (START_SECONDS + 4, u32::MAX)]);
        assert_eq!(counts(&long_ago), (0, 1));
        assert_eq!(counts(&row(&[(PID, 1)])[..SIZE - 1]), (0, 1));
        let both = [row(&[(PID, 1)]), long_ago, row(&[(PID, 2)])].concat();
        assert_eq!(counts(&both), (2, 1));
        assert_eq!(counts(&both[..2 * SIZE + 1]), (1, 2));
    }

    fn two_rows() -> Vec<u8> {
        [row(&[(PID, 1), (PARENT, 0)]), row(&[(PID, 2), (PARENT, 1)])].concat()
    }

    proptest! {
        #[test]
        fn any_bytes_can_be_parsed(
            bytes in prop_oneof![
                prop::collection::vec(any::<u8>(), 0..3 * SIZE),
                mutated(two_rows()),
            ],
        ) {
            for process in KinfoProc::all(&bytes) {
                prop_assert!(process.pid > 0 && process.comm.len() <= NAME_MAX);
            }
            let rows = bytes.len().div_ceil(SIZE);
            prop_assert!(KinfoProc::all(&bytes).count() + KinfoProc::flawed(&bytes) <= rows);
        }
    }
}
