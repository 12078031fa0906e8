//! Record of the toolchain that built the object, a text file next to it.

use std::fmt;
use std::str::FromStr;

use anyhow::{Context, Result};

/// Origins of the compiler: rustup's nightly with its component rust-src, or Debian's packages.
pub const RUSTUP: &str = "rustup nightly";
pub const DEBIAN: &str = "debian rustc-web";

const KEYS: [&str; 5] = ["origin", "rustc", "commit", "llvm", "bpf-linker"];

/// Properties of a toolchain that determine the bytes of the object: origin of the compiler, first line of `rustc -vV`,
/// commit, LLVM version, bpf-linker version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity(pub [String; KEYS.len()]);

/// Content of the record file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    pub identity: Identity,
    /// Hash of the object, in hexadecimal digits.
    pub sha256: String,
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [origin, rustc, _, llvm, linker] = &self.0;
        write!(f, "{rustc} from {origin}, LLVM {llvm}, bpf-linker {linker}")
    }
}

impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "# What built reaper.bpf.o; written by `cargo xtask build-ebpf`, compared with `--check`."
        )?;
        for (key, value) in KEYS.iter().zip(&self.identity.0) {
            writeln!(f, "{key}: {value}")?;
        }
        writeln!(f, "sha256: {}", self.sha256)
    }
}

impl FromStr for Record {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Record> {
        let field = |name: &str| {
            let mut fields = text.lines().filter_map(|line| line.split_once(": "));
            let found = fields.find(|(key, _)| *key == name);
            found
                .map(|(_, value)| value.trim().to_owned())
                .with_context(|| format!("no line `{name}: …`"))
        };
        let [origin, rustc, commit, llvm, linker] = KEYS.map(field);
        Ok(Record {
            identity: Identity([origin?, rustc?, commit?, llvm?, linker?]),
            sha256: field("sha256")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn record_reads_back_as_written() {
        let identity = [
            DEBIAN,
            "rustc 1.96.0 (ac68faa20 2026-05-25) (built from a source tarball)",
            "ac68faa20c58cbccd01ee7208bf3b6e93a7d7f96",
            "22.1.8",
            "0.10.3",
        ];
        let record = Record {
            identity: Identity(identity.map(str::to_owned)),
            sha256: "00ff".to_owned(),
        };
        assert_eq!(record.to_string().parse::<Record>().unwrap(), record);
    }

    #[test]
    fn record_without_a_line_is_an_error_that_names_it() {
        let error = "origin: debian rustc-web\n".parse::<Record>().unwrap_err();
        assert_eq!(error.to_string(), "no line `rustc: …`");
    }
}
