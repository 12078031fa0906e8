//! Table of the import rules.

use std::path::Path;

use super::scan::Mention;

/// Rule that forbids paths or words in some files. Lists are separated by white space.
pub struct Rule {
    pub name: &'static str,
    /// Path prefixes of the files that the rule covers.
    within: &'static str,
    /// Path prefixes of exceptions.
    except: &'static str,
    /// Whether the rule also covers `#[cfg(test)]` code.
    in_tests: bool,
    /// Forbidden mentions: `a::b` is that path and all below it, `f()` a call of any function of that name, and a bare word
    /// that word.
    forbidden: &'static str,
    /// Allowed paths below the forbidden ones.
    allowed: &'static str,
    pub why: &'static str,
}

const PRODUCT: &str = "reaper-user/host/src reaper-user/model/src reaper-user/src";

/// Defaults for the fields of a rule.
const RULE: Rule = Rule {
    name: "",
    within: "",
    except: "",
    in_tests: false,
    forbidden: "",
    allowed: "",
    why: "",
};

/// All rules. Cargo already prevents imports from crates that are no dependency.
pub const RULES: &[Rule] = &[
    Rule {
        name: "pure-model",
        within: "reaper-user/model/src",
        forbidden: "std::env std::fs std::io std::net std::os std::process std::thread std::time::Instant \
                    std::time::SystemTime",
        allowed: "std::os::unix::ffi",
        why: "the model does no IO and reads no clock, so that it cannot fail or block; time comes in as `now`",
        ..RULE
    },
    Rule {
        name: "sources-know-no-policy",
        within: "reaper-user/host/src",
        in_tests: true,
        forbidden: "reaper_model::policy reaper_model::session",
        why: "a source only reports events; the policy decides about them",
        ..RULE
    },
    Rule {
        name: "one-place-signals",
        within: PRODUCT,
        except: "reaper-user/src/reap reaper-user/host/src/sys",
        forbidden: "kill() killpg() tgkill() tkill() pidfd_send_signal() send_signal() libc::SYS_kill \
                    libc::SYS_pidfd_send_signal libc::SYS_tgkill libc::kill libc::killpg nix::sys::signal::kill \
                    nix::sys::signal::killpg",
        allowed: "crate::reap",
        why: "only reap/ sends signals, so that none goes to a process whose identity was not checked",
        ..RULE
    },
    Rule {
        name: "engine-border",
        within: "reaper-user/src/engine",
        forbidden: "reaper_host::facts::FactPool reaper_host::kernel::SystemClock reaper_host::source::procfs::Procfs \
                    reaper_host::source::selection reaper_host::sys::after reaper_host::sys::boot_time \
                    reaper_host::sys::cgroup reaper_host::sys::monotonic reaper_host::sys::pidfd std::env std::fs \
                    std::process tokio::time",
        why: "the engine uses only reaper_host::kernel and Source, so that it also runs on a simulated kernel",
        ..RULE
    },
    Rule {
        name: "unsafe-has-its-places",
        within: "reaper-common/src reaper-user/host/src reaper-user/model/src reaper-user/src xtask/src",
        // xtask/src/bench/raw creates 30,000 children that share memory, which no safe function does. The tests of decode
        // read the bytes of records as the probes write them.
        except: "reaper-user/host/src/source/ebpf reaper-user/host/src/sys xtask/src/bench/raw \
                 reaper-common/src/decode/tests",
        in_tests: true,
        forbidden: "unsafe",
        why: "unsafe code is confined to sys/, source/ebpf/, bench/raw.rs and reaper-ebpf",
        ..RULE
    },
    Rule {
        name: "terminal-escapes-all-output",
        within: PRODUCT,
        except: "reaper-user/src/export/terminal",
        forbidden: "anstream println eprintln",
        why: "names of processes and files may contain terminal escape sequences; export/terminal.rs escapes them",
        ..RULE
    },
    Rule {
        name: "json-has-one-writer",
        within: "reaper-user/src/api reaper-user/src/cli reaper-user/src/export reaper-user/src/run",
        forbidden: "serde_json::to_string serde_json::to_string_pretty serde_json::to_vec serde_json::to_vec_pretty \
                    serde_json::to_writer serde_json::to_writer_pretty",
        why: "export/json.rs escapes control and invisible characters, which serde_json does not",
        ..RULE
    },
    Rule {
        name: "faces-ask-the-engine",
        within: "reaper-user/src/api reaper-user/src/cli",
        in_tests: true,
        forbidden: "reaper_model::policy reaper_model::session reaper_model::tree",
        why: "the engine owns the model; API and CLI send requests to the engine",
        ..RULE
    },
];

impl Rule {
    /// Returns whether the rule covers a file, given relative to the root.
    pub fn covers(&self, file: &Path) -> bool {
        // `a/b` matches both forms of a module, a/b/… and a/b.rs.
        let lies_in =
            |place: &str| file.starts_with(place) || file.with_extension("") == Path::new(place);
        self.within.split_whitespace().any(lies_in) && !self.except.split_whitespace().any(lies_in)
    }

    pub fn forbids(&self, mention: &Mention) -> bool {
        let is_in = |list: &str| {
            list.split_whitespace()
                .any(|pattern| matches(pattern, mention))
        };
        (self.in_tests || !mention.test) && is_in(self.forbidden) && !is_in(self.allowed)
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
            // A glob import covers everything below.
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

    /// Returns the names of the rules that `source` as content of `file` violates.
    fn violated(file: &str, source: &str) -> Vec<&'static str> {
        let file = Path::new(file);
        let mentions = scan(file, source).unwrap();
        let broken = |rule: &&Rule| rule.covers(file) && mentions.iter().any(|m| rule.forbids(m));
        RULES.iter().filter(broken).map(|rule| rule.name).collect()
    }

    /// Cases: file (relative to reaper-user), the violated rule, and the text of the file.
    const CASES: &str = r#"
model/src/tree.rs         | pure-model | use std::{collections::HashMap, fs::File};
model/src/tree.rs         | pure-model | use std::time::*;
model/src/tree.rs         | pure-model | use std::time; fn f() { time::Instant::now(); }
model/src/lib.rs          | pure-model | fn f() -> u32 { ::std::process::id() }
model/src/lib.rs          |            | fn f(t: core::time::Duration) {}
model/src/tree.rs         |            | use std::time::Duration; use std::sync::Arc;
model/src/tree.rs         |            | #[cfg(test)] mod tests { use std::fs; }
model/src/tree.rs         | pure-model | #[cfg(test)] use std::fs; use std::io;
model/src/tree.rs         |            | use super::event::Key; use reaper_model::agent;
model/src/tree.rs         |            | mod a { use super::super::event; use super::b; }
host/src/source/procfs.rs | sources-know-no-policy | use reaper_model::policy::Decision;
host/src/source/procfs.rs | sources-know-no-policy | use reaper_model::{event, session};
host/src/source/procfs.rs |            | use reaper_model::event::Key;
src/engine.rs             | one-place-signals | use nix::sys::signal as s; fn f() { s::kill(p, t) }
src/engine.rs             | one-place-signals | fn f() { sys::pidfd_send_signal(fd, 15) }
src/engine.rs             | one-place-signals | fn f() { pidfd.send_signal(s) }
src/engine.rs             |            | fn kill(p: Key) {} use nix::sys::signal::Signal;
src/engine.rs             |            | fn f() { crate::reap::kill(key) } // libc::kill(1)
src/reap/send.rs          |            | fn f() { libc::kill(1, 2) }
src/engine/signal.rs      | engine-border | use reaper_host::source::procfs::{Liveness, Procfs};
src/engine/signal.rs      | engine-border | use reaper_host::sys; fn f() { sys::monotonic() }
host/src/sys.rs           |            | fn f() { unsafe { libc::kill(1, 2) } }
src/engine.rs             | unsafe-has-its-places | fn f() { unsafe { g() } }
src/engine.rs             | unsafe-has-its-places | #[unsafe(no_mangle)] static A: u8 = 0;
src/engine.rs             | unsafe-has-its-places | m! { unsafe impl Send for A {} }
src/engine.rs             | unsafe-has-its-places | #[cfg(test)] mod t { unsafe fn f() {} }
src/cli/agents.rs         | terminal-escapes-all-output | fn f() { println!("{}", comm) }
src/export/terminal.rs    |            | fn f() { eprintln!("{}", escaped) }
src/api/server.rs         | json-has-one-writer | fn f() { serde_json::to_string(&answer) }
src/engine.rs             |            | /* unsafe */ fn f() { "unsafe"; }
host/src/source/ebpf/ring.rs |         | unsafe fn f() {}
src/cli/daemon.rs         | faces-ask-the-engine | use reaper_model::tree::Tree;
src/cli/daemon.rs         |            | use crate::engine::Engine;
src/modelling.rs          |            | use std::fs;
../reaper-ebpf/src/exit.rs |           | unsafe fn f() { std::fs::read(p) }
../xtask/src/run.rs       | unsafe-has-its-places | unsafe fn f() {}
"#;

    #[test]
    fn each_rule_finds_its_violations_only() {
        for case in CASES.trim().lines() {
            let [file, expected, source] = [0, 1, 2].map(|n| case.splitn(3, '|').nth(n).unwrap());
            let file = format!("reaper-user/{}", file.trim());
            let file = file.trim_start_matches("reaper-user/../");
            assert_eq!(violated(file, source).join(" "), expected.trim(), "{case}");
        }
    }
}
