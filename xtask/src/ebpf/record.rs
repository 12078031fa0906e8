//! The record of what built the object, beside it as text.

use std::fmt;
use std::str::FromStr;

use anyhow::{Context, Result, bail};

/// Where the compiler is from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// rustup's nightly with its component rust-src.
    Rustup,
    /// Debian's packages.
    Debian,
}

/// What has to be the same for the same bytes to come out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    pub origin: Origin,
    /// First line of `rustc -vV`.
    pub rustc: String,
    pub commit: String,
    pub llvm: String,
    pub bpf_linker: String,
}

/// The text file beside the object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    pub identity: Identity,
    /// Of the object, in hex.
    pub sha256: String,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Origin::Rustup => "rustup nightly",
            Origin::Debian => "debian rustc-web",
        })
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Identity {
            origin,
            rustc,
            llvm,
            bpf_linker,
            ..
        } = self;
        write!(
            f,
            "{rustc} from {origin}, LLVM {llvm}, bpf-linker {bpf_linker}"
        )
    }
}

impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "# What built reaper.bpf.o; written by `cargo xtask build-ebpf`, compared with `--check`."
        )?;
        let Identity {
            origin,
            rustc,
            commit,
            llvm,
            bpf_linker,
        } = &self.identity;
        writeln!(
            f,
            "origin: {origin}\nrustc: {rustc}\ncommit: {commit}\nllvm: {llvm}"
        )?;
        writeln!(f, "bpf-linker: {bpf_linker}\nsha256: {}", self.sha256)
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
        let origin = match field("origin")?.as_str() {
            name if name == Origin::Rustup.to_string() => Origin::Rustup,
            name if name == Origin::Debian.to_string() => Origin::Debian,
            other => bail!("unknown origin `{other}`"),
        };
        Ok(Record {
            identity: Identity {
                origin,
                rustc: field("rustc")?,
                commit: field("commit")?,
                llvm: field("llvm")?,
                bpf_linker: field("bpf-linker")?,
            },
            sha256: field("sha256")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_reads_back_as_written() {
        let record = Record {
            identity: Identity {
                origin: Origin::Debian,
                rustc: "rustc 1.96.0 (ac68faa20 2026-05-25) (built from a source tarball)"
                    .to_owned(),
                commit: "ac68faa20c58cbccd01ee7208bf3b6e93a7d7f96".to_owned(),
                llvm: "22.1.8".to_owned(),
                bpf_linker: "0.10.3".to_owned(),
            },
            sha256: "00ff".to_owned(),
        };
        assert_eq!(record.to_string().parse::<Record>().unwrap(), record);
    }

    #[test]
    fn a_record_without_a_line_names_it() {
        let error = "origin: debian rustc-web\n".parse::<Record>().unwrap_err();
        assert_eq!(error.to_string(), "no line `rustc: …`");
    }
}
