use super::*;

const HEADER: Header = Header {
    len: 0,
    kind: 0,
    abi: ABI_VERSION,
    time_ns: 77,
    lost: 3,
};

fn header(kind: RecordKind, len: usize) -> Header {
    Header {
        len: len as u32,
        kind: kind as u16,
        ..HEADER
    }
}

fn raw(pid: u32) -> RawKey {
    RawKey {
        pid,
        _pad: 0,
        start_ns: u64::from(pid) << 33,
    }
}

/// Returns the bytes of a record as a probe writes them.
fn bytes<T: Copy>(record: &T) -> Vec<u8> {
    // SAFETY: the records are `repr(C)` integers with named padding, so all bytes are initialized.
    unsafe { core::slice::from_raw_parts((&raw const *record).cast(), size_of::<T>()) }.to_vec()
}

fn member() -> Member {
    Member {
        session: raw(7),
        flags: 0x1a5,
        check: 5,
    }
}

fn fork() -> ForkRecord {
    ForkRecord {
        header: header(RecordKind::Fork, size_of::<ForkRecord>()),
        child: raw(10),
        parent: raw(9),
        creator: raw(8),
        pidfd_inode: 1 << 40,
        uid: 1000,
        euid: 1001,
        flags: crate::PROCESS_NAMESPACE_INIT,
        signal: 9,
        member: member(),
    }
}

fn exit() -> ExitRecord {
    ExitRecord {
        header: header(RecordKind::Exit, size_of::<ExitRecord>()),
        process: raw(10),
        parent: raw(9),
        status: 0x8b,
        children: 32,
        peak_rss_pages: 1 << 35,
        member: member(),
    }
}

fn reparent() -> ReparentRecord {
    ReparentRecord {
        header: header(RecordKind::Reparent, size_of::<ReparentRecord>()),
        child: raw(10),
        old_parent: raw(9),
        adopter: RawKey::default(),
        member: member(),
        signal: 15,
        _pad: 0,
    }
}

fn moved() -> MoveRecord {
    MoveRecord {
        header: header(RecordKind::Move, size_of::<MoveRecord>()),
        process: raw(10),
        cgroup_id: 1 << 33,
        member: member(),
    }
}

fn exec(filename: &[u8], exe: &[u8], argv: &[u8]) -> (ExecRecord, Vec<u8>) {
    let len = size_of::<ExecRecord>() + filename.len() + exe.len() + argv.len();
    let fixed = ExecRecord {
        header: header(RecordKind::Exec, len),
        process: raw(10),
        parent: raw(9),
        pidfd_inode: 5,
        cgroup_id: 6,
        uid: 7,
        euid: 8,
        pgid: 9,
        sid: 10,
        tty: 11,
        old_tid: 12,
        argv_full_len: argv.len() as u32 + 100,
        argv_len: argv.len() as u32,
        filename_len: filename.len() as u16,
        exe_len: exe.len() as u16,
        exe_cut: 1,
        comm: *b"claude\0\0\0\0\0\0\0\0\0\0",
        member: member(),
        signal: 9,
        environment: crate::ENVIRONMENT_KEEP,
    };
    let mut all = bytes(&fixed);
    all.extend([filename, argv, exe].concat());
    (fixed, all)
}

fn samples() -> [Vec<u8>; 5] {
    let (_, exec) = exec(b"./claude", b"claude\0bin\0", b"claude\0--resume\0");
    let (exit, reparent) = (bytes(&exit()), bytes(&reparent()));

    [bytes(&fork()), exec, exit, reparent, bytes(&moved())]
}

#[test]
fn what_a_probe_writes_is_what_is_read() {
    assert_eq!(decode(&bytes(&fork())), Ok(Record::Fork(fork())));
    assert_eq!(decode(&bytes(&exit())), Ok(Record::Exit(exit())));
    assert_eq!(
        decode(&bytes(&reparent())),
        Ok(Record::Reparent(reparent()))
    );
    assert_eq!(decode(&bytes(&moved())), Ok(Record::Move(moved())));
    for parts in [[&b"./x"[..], b"x\0bin\0", b"x\0y\0"], [b"", b"", b""]] {
        let [filename, exe, argv] = parts;
        let (fixed, all) = self::exec(filename, exe, argv);
        let record = Record::Exec {
            fixed,
            filename,
            exe,
            argv,
        };
        assert_eq!(decode(&all), Ok(record));
    }
}

#[test]
fn strings_of_any_bytes_up_to_their_bounds_are_read() {
    let (filename, argv) = ([b'\n'; FILENAME_MAX], [0xff; ARGV_MAX]);
    let exe = [b'x'; crate::EXE_MAX + 255];
    let (_, all) = exec(&filename, &exe, &argv);
    assert!(matches!(decode(&all), Ok(Record::Exec { argv: read, .. }) if read == argv));
}

#[test]
fn whatever_follows_a_record_is_ignored() {
    for sample in samples() {
        let longer = [&sample[..], b"and more"].concat();
        assert_eq!(decode(&longer), decode(&sample));
    }
}

#[test]
fn a_record_cut_short_anywhere_is_none() {
    for sample in samples() {
        for len in 0..sample.len() {
            assert!(
                matches!(decode(&sample[..len]), Err(DecodeError::Short { .. })),
                "{len} of {} bytes",
                sample.len()
            );
        }
    }
}

#[test]
fn each_defect_is_named() {
    let with = |at: usize, value: &[u8], sample: &[u8]| {
        let mut sample = sample.to_vec();
        sample[at..at + value.len()].copy_from_slice(value);
        decode(&sample).map(drop).unwrap_err()
    };
    let [fork, exec, ..] = samples();
    assert_eq!(with(6, &9_u16.to_ne_bytes(), &fork), DecodeError::Abi(9));
    assert_eq!(with(4, &0_u16.to_ne_bytes(), &fork), DecodeError::Kind(0));
    assert_eq!(with(4, &6_u16.to_ne_bytes(), &fork), DecodeError::Kind(6));
    for (at, value) in [(24, &[0; 4][..]), (32, &[0; 8])] {
        for sample in samples() {
            assert_eq!(with(at, value, &sample), DecodeError::NoPid);
        }
    }
    let argv_len = core::mem::offset_of!(ExecRecord, argv_len);
    let filename_len = core::mem::offset_of!(ExecRecord, filename_len);
    for n in [117, ARGV_MAX as u32 + 1, u32::MAX] {
        assert_eq!(
            with(argv_len, &n.to_ne_bytes(), &exec),
            DecodeError::Length(n)
        );
    }
    let long = FILENAME_MAX as u16 + 1;
    assert_eq!(
        with(filename_len, &long.to_ne_bytes(), &exec),
        DecodeError::Length(long.into())
    );
    for defect in [
        DecodeError::Abi(9),
        DecodeError::Kind(5),
        DecodeError::Length(1),
        DecodeError::NoPid,
    ] {
        assert!(!defect.to_string().is_empty());
    }
}

/// Modified records and random bytes: decoding never panics, and no string is longer than the input.
#[test]
fn no_bytes_panic() {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    for round in 0..200_000_usize {
        let mut sample = samples()[round % 4].clone();
        for _ in 0..random() % 4 {
            let at = random() as usize % sample.len();
            sample[at] = random() as u8;
        }
        if round % 5 == 0 {
            sample
                .iter_mut()
                .skip(24)
                .for_each(|byte| *byte = random() as u8);
        }
        sample.truncate(random() as usize % (2 * sample.len()));
        if let Ok(Record::Exec {
            filename,
            exe,
            argv,
            ..
        }) = decode(&sample)
        {
            assert!(filename.len() + exe.len() + argv.len() <= sample.len());
        }
    }
}
