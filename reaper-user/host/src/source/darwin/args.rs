//! Parses the arguments and the environment of a process, as `KERN_PROCARGS2` returns them.
//!
//! ```text
//!   argc (4 bytes)  path as given to exec NUL  NULs up to a multiple of 8  argv[0] NUL … argv[argc-1] NUL  environment
//! ```
//!
//! The process can overwrite all of it except argc at any time. Parsing therefore accepts any bytes.

/// Arguments and environment of a process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Arguments<'a> {
    /// Path as given to exec; empty if unknown.
    pub path: &'a [u8],
    /// Arguments, each terminated by NUL.
    pub argv: &'a [u8],
    /// Whether there are fewer arguments than argc says.
    pub is_cut: bool,
    /// Variables `NAME=value`, each terminated by NUL; `None` if none exist or the arguments are cut. The kernel
    /// hides the environment of system programs, which then looks empty.
    pub environment: Option<&'a [u8]>,
}

impl<'a> Arguments<'a> {
    /// Parses a buffer of `KERN_PROCARGS2`. Never fails: of a truncated one, returns what it has and sets `is_cut`.
    /// Without a complete argc, all is empty.
    pub fn parse(bytes: &'a [u8]) -> Arguments<'a> {
        let Some((argc, rest)) = bytes.split_first_chunk() else {
            return Arguments::default();
        };
        let argc = i32::from_ne_bytes(*argc);
        let (path, rest) = word(rest);
        let padding = rest.iter().take_while(|byte| **byte == 0).count();
        let rest = &rest[padding..];
        let mut after = rest;
        let mut found = 0;
        // Each argument takes at least one byte, so the loop ends with the bytes even if argc is wrong.
        while found < argc && !after.is_empty() {
            let (argument, next) = word(after);
            // The last argument has no NUL, so it is cut off.
            if argument.len() == after.len() {
                break;
            }
            after = next;
            found += 1;
        }
        let argv = match found < argc {
            true => rest,
            false => &rest[..rest.len() - after.len()],
        };
        let environment = environment(after);
        Arguments {
            path,
            argv,
            is_cut: found < argc,
            environment: environment.filter(|_| found == argc && argc > 0),
        }
    }
}

/// Splits the bytes at the first NUL.
fn word(bytes: &[u8]) -> (&[u8], &[u8]) {
    let end = bytes.iter().position(|byte| *byte == 0);
    match end {
        Some(end) => (&bytes[..end], &bytes[end + 1..]),
        None => (bytes, &[]),
    }
}

/// Returns the variables up to the empty string that ends them; `None` if none exist. After that string the kernel
/// stores other strings for the program.
fn environment(bytes: &[u8]) -> Option<&[u8]> {
    let padding = bytes.iter().take_while(|byte| **byte == 0).count();
    let bytes = &bytes[padding..];
    let mut rest = bytes;
    loop {
        let (variable, next) = word(rest);
        if variable.is_empty() {
            break;
        }
        rest = next;
    }
    let whole = &bytes[..bytes.len() - rest.len()];
    (!whole.is_empty()).then_some(whole)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::damage::mutated;

    fn bytes(argc: i32, rest: &[u8]) -> Vec<u8> {
        [&argc.to_ne_bytes(), rest].concat()
    }

    #[test]
    fn path_arguments_and_environment_are_separated() {
        let given = bytes(
            3,
            b"/bin/sh\0\0\0\0sh\0\0-c\0A=1\0REAPER_KEEP=1\0\0ptr_munge=\0",
        );
        let read = Arguments::parse(&given);
        assert_eq!(read.path, b"/bin/sh");
        assert_eq!(read.argv, b"sh\0\0-c\0");
        assert_eq!(
            (read.is_cut, read.environment),
            (false, Some(&b"A=1\0REAPER_KEEP=1\0"[..]))
        );
    }

    #[test]
    fn cut_arguments_and_missing_environment_are_marked() {
        for (argc, rest, argv, is_cut) in [
            // The environment is hidden.
            (2, &b"/bin/sh\0sh\0-c\0"[..], &b"sh\0-c\0"[..], false),
            (2, b"/bin/sh\0sh\0-c\0\0\0", b"sh\0-c\0", false),
            // argc is too high.
            (9, b"/bin/sh\0sh\0-c\0", b"sh\0-c\0", true),
            (i32::MAX, b"/bin/sh\0sh\0", b"sh\0", true),
            // Cut within an argument, and within the path.
            (2, b"/bin/sh\0sh\0-", b"sh\0-", true),
            (1, b"/bin/s", b"", true),
            // Invalid argc, and nothing but argc.
            (0, b"/bin/sh\0sh\0A=1\0", b"", false),
            (-1, b"/bin/sh\0sh\0A=1\0", b"", false),
            (1, b"", b"", true),
        ] {
            let given = bytes(argc, rest);
            let read = Arguments::parse(&given);
            assert_eq!((read.argv, read.is_cut), (argv, is_cut), "{argc} {rest:?}");
            assert_eq!(read.environment, None, "{argc} {rest:?}");
        }
        assert_eq!(Arguments::parse(&[1, 0, 0]), Arguments::default());
    }

    const SHELL: &[u8] = b"\x02\0\0\0/bin/sh\0\0\0\0\0sh\0-c\0A=1\0REAPER_KEEP=1\0\0ptr_munge=\0";

    proptest! {
        #[test]
        fn damaged_bytes_are_read(given in mutated(SHELL.to_vec())) {
            let read = Arguments::parse(&given);
            let all = read.path.len() + read.argv.len() + read.environment.map_or(0, <[u8]>::len);
            prop_assert!(all <= given.len());
            prop_assert!(read.is_cut || read.argv.is_empty() || read.argv.ends_with(&[0]));
        }

        #[test]
        fn any_bytes_are_read(argc in any::<i32>(), rest in prop::collection::vec(0..4_u8, 0..64)) {
            let given = bytes(argc, &rest);
            let read = Arguments::parse(&given);
            let all = read.path.len() + read.argv.len() + read.environment.map_or(0, <[u8]>::len);
            prop_assert!(all <= rest.len());
            let count = read.argv.iter().filter(|byte| **byte == 0).count();
            prop_assert!(i64::try_from(count).unwrap() <= i64::from(argc.max(0)));
            prop_assert!(read.is_cut || i64::try_from(count).unwrap() == i64::from(argc.max(0)));
        }

        #[test]
        fn written_arguments_are_read(
            path in "[a-z/]{1,20}",
            argv in prop::collection::vec("[a-z ]{0,8}", 1..6),
            environment in prop::collection::vec("[A-Z]{1,4}=[a-z]{0,4}", 0..4),
            padding in 0..8_usize,
        ) {
            // An empty first argument cannot be distinguished from the padding.
            prop_assume!(!argv[0].is_empty());
            let words = |words: &[String]| words.iter().map(|w| format!("{w}\0")).collect::<String>();
            let (argv_bytes, environment) = (words(&argv), words(&environment));
            let rest = format!("{path}\0{}{argv_bytes}{environment}\0", "\0".repeat(padding));
            let given = bytes(i32::try_from(argv.len()).unwrap(), rest.as_bytes());
            let read = Arguments::parse(&given);
            prop_assert_eq!(read.path, path.as_bytes());
            prop_assert_eq!(read.argv, argv_bytes.as_bytes());
            prop_assert_eq!(read.environment.unwrap_or_default(), environment.as_bytes());
        }
    }
}
