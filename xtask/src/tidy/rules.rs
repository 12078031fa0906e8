//! The import rules of the architecture, as a table.

use std::path::Path;

use super::scan::Mention;

/// What must not be mentioned where, and why.
pub struct Rule {
    pub name: &'static str,
    /// Files that it covers, by the beginning of their path.
    pub within: &'static [&'static str],
    /// Files among them that it does not cover.
    pub except: &'static [&'static str],
    /// Whether it holds in `#[cfg(test)]` too.
    pub in_tests: bool,
    /// `a::b` is that path and all below it, `f()` a call of something of that name, whatever its
    /// path, and a bare word that word.
    pub forbidden: &'static [&'static str],
    /// Paths among the forbidden ones that are fine.
    pub allowed: &'static [&'static str],
    pub why: &'static str,
}

/// All rules.
pub const RULES: &[Rule] = &[
    Rule {
        name: "pure-model",
        within: &["reaper-user/model/src"],
        except: &[],
        in_tests: false,
        forbidden: &[
            "std::env",
            "std::fs",
            "std::io",
            "std::net",
            "std::os",
            "std::process",
            "std::thread",
            "std::time::Instant",
            "std::time::SystemTime",
            "aya",
            "libc",
            "nix",
            "tokio",
        ],
        allowed: &["std::os::unix::ffi"],
        why: "the model does no IO and reads no clock, so that it cannot fail or block; time comes in as `now`",
    },
    Rule {
        name: "sources-know-no-policy",
        within: &["reaper-user/host/src"],
        except: &[],
        in_tests: true,
        forbidden: &[
            "reaper_model::policy",
            "reaper_model::session",
            "crate::reap",
        ],
        allowed: &[],
        why: "a source says what happened; what is done about it is decided elsewhere",
    },
    Rule {
        name: "one-place-signals",
        within: &[
            "reaper-user/host/src",
            "reaper-user/model/src",
            "reaper-user/src",
        ],
        except: &[
            "reaper-user/src/reap",
            "reaper-user/host/src/sys",
            "reaper-user/host/src/kernel/signals",
        ],
        in_tests: false,
        forbidden: &[
            "kill()",
            "killpg()",
            "tgkill()",
            "tkill()",
            "pidfd_send_signal()",
            "send_signal()",
            "libc::SYS_kill",
            "libc::SYS_pidfd_send_signal",
            "libc::SYS_tgkill",
            "libc::kill",
            "libc::killpg",
            "nix::sys::signal::kill",
            "nix::sys::signal::killpg",
        ],
        allowed: &["crate::reap"],
        why: "only reap/ sends signals, so that none goes to a process whose identity was not checked",
    },
    Rule {
        name: "engine-border",
        within: &["reaper-user/src/engine"],
        except: &[],
        in_tests: false,
        forbidden: &[
            "reaper_host::facts::FactPool",
            "reaper_host::kernel::SystemClock",
            "reaper_host::source::procfs::Procfs",
            "reaper_host::source::selection",
            "reaper_host::sys::after",
            "reaper_host::sys::boot_time",
            "reaper_host::sys::cgroup",
            "reaper_host::sys::monotonic",
            "reaper_host::sys::pidfd",
            "std::env",
            "std::fs",
            "std::process",
            "tokio::time",
        ],
        allowed: &[],
        why: "the engine reaches the machine through reaper_host::kernel and Source alone, so that it also runs on a simulated kernel",
    },
    Rule {
        name: "unsafe-has-its-places",
        within: &[
            "reaper-common/src",
            "reaper-user/host/src",
            "reaper-user/model/src",
            "reaper-user/src",
            "xtask/src",
        ],
        except: &[
            "reaper-user/host/src/source/ebpf",
            "reaper-user/host/src/sys",
            // Children without a copy of memory, 30,000 of them: nothing safe makes these.
            "xtask/src/bench/raw",
            // The bytes of the records as the probes write them, to be decoded.
            "reaper-common/src/decode/tests",
        ],
        in_tests: true,
        forbidden: &["unsafe"],
        allowed: &[],
        why: "unsafe code lives in sys/, source/ebpf/, bench/raw.rs and reaper-ebpf, where it is reviewed as such",
    },
    Rule {
        name: "terminal-escapes-all-output",
        within: &[
            "reaper-user/host/src",
            "reaper-user/model/src",
            "reaper-user/src",
        ],
        except: &["reaper-user/src/export/terminal"],
        in_tests: false,
        forbidden: &["anstream", "println", "eprintln"],
        allowed: &[],
        why: "names of processes and files command a terminal; export/terminal.rs escapes what goes there",
    },
    Rule {
        name: "json-has-one-writer",
        within: &[
            "reaper-user/src/api",
            "reaper-user/src/cli",
            "reaper-user/src/export",
            "reaper-user/src/run",
        ],
        except: &[],
        in_tests: false,
        forbidden: &[
            "serde_json::to_string",
            "serde_json::to_string_pretty",
            "serde_json::to_vec",
            "serde_json::to_vec_pretty",
            "serde_json::to_writer",
            "serde_json::to_writer_pretty",
        ],
        allowed: &[],
        why: "export/json.rs escapes what commands a terminal or hides text, which serde_json does not",
    },
    Rule {
        name: "faces-ask-the-engine",
        within: &["reaper-user/src/api", "reaper-user/src/cli"],
        except: &[],
        in_tests: true,
        forbidden: &[
            "reaper_model::policy",
            "reaper_model::session",
            "reaper_model::tree",
        ],
        allowed: &[],
        why: "the engine owns the model; who talks to users talks to the engine",
    },
];

impl Rule {
    /// Whether the rule holds in a file, given relative to the root.
    pub fn covers(&self, file: &Path) -> bool {
        // `a/b` stands for the module in both its shapes, a/b/… and a/b.rs.
        let lies_in =
            |place: &&str| file.starts_with(place) || file.with_extension("") == Path::new(place);
        self.within.iter().any(lies_in) && !self.except.iter().any(lies_in)
    }

    pub fn forbids(&self, mention: &Mention) -> bool {
        (self.in_tests || !mention.test)
            && self
                .forbidden
                .iter()
                .any(|pattern| matches(pattern, mention))
            && !self.allowed.iter().any(|pattern| matches(pattern, mention))
    }
}

fn matches(pattern: &str, mention: &Mention) -> bool {
    if let Some(name) = pattern.strip_suffix("()") {
        return mention.called && mention.path.last().is_some_and(|last| last == name);
    }
    let mut pattern = pattern.split("::");
    let mut path = mention.path.iter().map(String::as_str);
    loop {
        match (pattern.next(), path.next()) {
            (None, _) => return true,
            // A glob brings in whatever lies below.
            (Some(_), Some("*")) => return true,
            (Some(wanted), Some(segment)) if wanted == segment => {}
            _ => return false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::scan::scan;

    /// Names of the rules that a snippet in `file` violates.
    fn violated(file: &str, source: &str) -> Vec<&'static str> {
        let file = Path::new(file);
        let mentions = scan(file, source).unwrap();
        let broken = |rule: &&Rule| rule.covers(file) && mentions.iter().any(|m| rule.forbids(m));
        RULES.iter().filter(broken).map(|rule| rule.name).collect()
    }

    #[test]
    fn every_rule_finds_its_violation_and_spares_the_neighbour() {
        let table = [
            (
                "model/src/tree.rs",
                "use std::{collections::HashMap, fs::File};",
                vec!["pure-model"],
            ),
            ("model/src/tree.rs", "use std::time::*;", vec!["pure-model"]),
            (
                "model/src/tree.rs",
                "use std::time; fn f() { time::Instant::now(); }",
                vec!["pure-model"],
            ),
            (
                "model/src/lib.rs",
                "fn f() -> u32 { ::std::process::id() }",
                vec!["pure-model"],
            ),
            (
                "model/src/lib.rs",
                "fn f(t: core::time::Duration) -> tokio::Handle {}",
                vec!["pure-model"],
            ),
            (
                "model/src/tree.rs",
                "use std::time::Duration; use std::sync::Arc;",
                vec![],
            ),
            (
                "model/src/tree.rs",
                "#[cfg(test)] mod tests { use std::fs; }",
                vec![],
            ),
            (
                "model/src/tree.rs",
                "#[cfg(test)] use std::fs; use std::io;",
                vec!["pure-model"],
            ),
            (
                "model/src/tree.rs",
                "use super::event::Key; use reaper_model::agent;",
                vec![],
            ),
            (
                "model/src/tree.rs",
                "mod a { use super::super::event; use super::b; }",
                vec![],
            ),
            (
                "host/src/source/procfs.rs",
                "use reaper_model::policy::Decision;",
                vec!["sources-know-no-policy"],
            ),
            (
                "host/src/source/procfs.rs",
                "use crate::{engine, reap};",
                vec!["sources-know-no-policy"],
            ),
            (
                "host/src/source/procfs.rs",
                "use reaper_model::event::Key;",
                vec![],
            ),
            (
                "src/engine.rs",
                "use nix::sys::signal as s; fn f() { s::kill(p, t) }",
                vec!["one-place-signals"],
            ),
            (
                "src/engine.rs",
                "fn f() { sys::pidfd_send_signal(fd, 15) }",
                vec!["one-place-signals"],
            ),
            (
                "src/engine.rs",
                "fn f() { pidfd.send_signal(s) }",
                vec!["one-place-signals"],
            ),
            (
                "src/engine.rs",
                "fn kill(p: Key) {} use nix::sys::signal::Signal;",
                vec![],
            ),
            (
                "src/engine.rs",
                "fn f() { crate::reap::kill(key) } // libc::kill(1)",
                vec![],
            ),
            ("src/reap/send.rs", "fn f() { libc::kill(1, 2) }", vec![]),
            (
                "src/engine/signal.rs",
                "use reaper_host::source::procfs::{Liveness, Procfs};",
                vec!["engine-border"],
            ),
            (
                "src/engine/signal.rs",
                "use reaper_host::sys; fn f() { sys::monotonic() }",
                vec!["engine-border"],
            ),
            (
                "host/src/sys.rs",
                "fn f() { unsafe { libc::kill(1, 2) } }",
                vec![],
            ),
            (
                "src/engine.rs",
                "fn f() { unsafe { g() } }",
                vec!["unsafe-has-its-places"],
            ),
            (
                "src/engine.rs",
                "#[unsafe(no_mangle)] static A: u8 = 0;",
                vec!["unsafe-has-its-places"],
            ),
            (
                "src/engine.rs",
                "m! { unsafe impl Send for A {} }",
                vec!["unsafe-has-its-places"],
            ),
            (
                "src/engine.rs",
                "#[cfg(test)] mod t { unsafe fn f() {} }",
                vec!["unsafe-has-its-places"],
            ),
            (
                "src/cli/agents.rs",
                "fn f() { println!(\"{}\", comm) }",
                vec!["terminal-escapes-all-output"],
            ),
            (
                "src/export/terminal.rs",
                "fn f() { eprintln!(\"{}\", escaped) }",
                vec![],
            ),
            (
                "src/api/server.rs",
                "fn f() { serde_json::to_string(&answer) }",
                vec!["json-has-one-writer"],
            ),
            (
                "src/engine.rs",
                "/// unsafe\nfn f() { \"unsafe\"; }",
                vec![],
            ),
            ("host/src/source/ebpf/ring.rs", "unsafe fn f() {}", vec![]),
            (
                "src/cli/daemon.rs",
                "use reaper_model::tree::Tree;",
                vec!["faces-ask-the-engine"],
            ),
            ("src/cli/daemon.rs", "use crate::engine::Engine;", vec![]),
        ];
        for (file, source, expected) in table {
            assert_eq!(
                violated(&format!("reaper-user/{file}"), source),
                expected,
                "{file}: {source}"
            );
        }
    }

    #[test]
    fn rules_hold_in_their_places_only() {
        assert_eq!(
            violated(
                "reaper-ebpf/src/exit.rs",
                "unsafe fn f() { std::fs::read(p) }"
            ),
            Vec::<&str>::new()
        );
        assert_eq!(
            violated("xtask/src/run.rs", "unsafe fn f() {}"),
            ["unsafe-has-its-places"]
        );
        assert_eq!(
            violated("reaper-user/src/modelling.rs", "use std::fs;"),
            Vec::<&str>::new()
        );
    }
}
