//! Tests of parsing damaged files of /proc.

use proptest::prelude::*;

use super::*;
use crate::damage::{arbitrary_bytes, proc_self_file};
use crate::sys::proc_file::{innermost_pid, is_nested, number, words};

/// Returns the value of a field, numbered as in proc(5); 0 if it is negative.
fn numbered(stat: &[u8], field: usize) -> Option<u64> {
    let rest = stat.rsplit(|b| *b == b')').next()?;
    let word = words(rest).nth(field - 3)?;
    if word.starts_with(b"-") {
        Some(0)
    } else {
        number(word)
    }
}

proptest! {
    #[test]
    fn parsed_stat_has_the_numbers_of_the_file(bytes in arbitrary_bytes(proc_self_file("stat"))) {
        if let Some(stat) = Stat::parse(&bytes) {
            prop_assert_eq!(numbered(&bytes, 22), Some(stat.start));
            prop_assert_eq!(numbered(&bytes, 4), Some(stat.parent.into()));
            prop_assert!(bytes.contains(&stat.state));
        }
    }

    #[test]
    fn name_does_not_change_other_fields(comm in prop::collection::vec(any::<u8>(), 0..64)) {
        let real = proc_self_file("stat");
        let place = |sign| real.iter().position(|byte| *byte == sign).unwrap();
        let (open, close) = (place(b'('), real.iter().rposition(|byte| *byte == b')').unwrap());
        let named = [&real[..=open], &comm, &real[close..]].concat();
        let (expected, found) = (Stat::parse(&real).unwrap(), Stat::parse(&named).unwrap());
        prop_assert_eq!(found.comm, &comm);
        prop_assert_eq!(
            (found.state, found.parent, found.start, found.exit_code),
            (expected.state, expected.parent, expected.start, expected.exit_code)
        );
    }

    #[test]
    fn damaged_status_does_not_panic(bytes in arbitrary_bytes(proc_self_file("status"))) {
        if uids(&bytes).is_some() {
            prop_assert!(field(&bytes, b"Uid:").is_some());
        }
        let ids = words(field(&bytes, b"NSpid:").unwrap_or_default()).count();
        prop_assert!(!namespace_init(&bytes) || ids > 1);
        prop_assert_eq!(is_nested(&bytes), ids > 1);
        prop_assert!(innermost_pid(&bytes).is_none() || ids > 0);
    }

    #[test]
    fn damaged_cmdline_is_bounded(bytes in arbitrary_bytes(proc_self_file("cmdline")), area in any::<u64>(), many in 0..3_usize) {
        let bytes = bytes.repeat(1 + many * 100);
        let bytes = &bytes[..bytes.len().min(ARGV_MAX + 1)];
        let mut image = Image::default();
        set_argv(&mut image, bytes, area);
        prop_assert_eq!(image.truncated, bytes.len() > ARGV_MAX);
        prop_assert!(image.argv.len() <= ARGV_MAX + 1);
        prop_assert!(image.argv_full_len as usize >= image.argv.len().min(ARGV_MAX));
        prop_assert!(image.truncated || image.argv.is_empty() || image.argv.ends_with(&[0]));
        prop_assert!(image.args().count() <= image.argv.len());
    }

    #[test]
    fn number_accepts_only_digits_in_range(word in prop_oneof!["[0-9]{0,22}", "[-+]?[0-9]{1,3}", ".{0,5}"]) {
        let digits = !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_digit());
        let expected = word.parse::<u32>().ok().filter(|_| digits);
        prop_assert_eq!(number::<u32>(word.as_bytes()), expected);
    }

    #[test]
    fn cgroup_id_of_damaged_file_is_stable(bytes in arbitrary_bytes(proc_self_file("cgroup"))) {
        let mount = tempfile::tempdir().unwrap();
        let line = format!("1 2 0:1 / {} rw - cgroup2 c rw\n", mount.path().display());
        let mounts = Mounts::parse(line.as_bytes());
        let mut cgroups = CgroupCache { mounts: &mounts, known: HashMap::new() };
        let id = cgroups.id(&bytes);
        prop_assert_eq!(cgroups.id(&bytes), id);
        prop_assert!(cgroups.known.len() <= 1);
    }
}

proptest! {
    // Fewer cases, because each creates files.
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn damaged_process_does_not_panic(
        stat in prop_oneof![Just(super::stat("x", 'S', 1).into_bytes()), arbitrary_bytes(proc_self_file("stat"))],
        status in prop_oneof![Just(b"Uid:\t1\t1\t1\t1\n".to_vec()), arbitrary_bytes(proc_self_file("status"))],
        cmdline in arbitrary_bytes(proc_self_file("cmdline")),
        cgroup in arbitrary_bytes(proc_self_file("cgroup")),
        statm in arbitrary_bytes(proc_self_file("statm")),
        rollup in arbitrary_bytes(proc_self_file("smaps_rollup")),
    ) {
        let fake = Fake::new();
        for (name, content) in [
            ("stat", stat),
            ("status", status),
            ("cmdline", cmdline),
            ("cgroup", cgroup),
            ("statm", statm),
            ("smaps_rollup", rollup),
        ] {
            fake.file(&format!("7/{name}"), content);
        }
        let procfs = fake.procfs();
        if let Ok(ProcessReading::Alive(seen)) = procfs.read(7) {
            prop_assert_eq!(seen.key.pid, 7);
            prop_assert!(seen.image.comm.len() <= COMM_MAX);
            let liveness = procfs.probe(seen.key).unwrap();
            prop_assert_eq!(liveness, Liveness::Alive { parent: seen.parent });
        }
        procfs.memory(7, false);
        procfs.memory(7, true);
        procfs.rss_bytes(7);
        procfs.zombies().unwrap();
    }
}
