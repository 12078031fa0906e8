//! `reaper --version`: what identifies a build. `reaper -V` prints only the version.

use std::sync::LazyLock;

/// Version, git commit, and what two services must have in common to share pins.
static LONG: LazyLock<String> = LazyLock::new(|| {
    let (version, commit) = (env!("CARGO_PKG_VERSION"), env!("REAPER_COMMIT"));
    format!("{version}\ncommit: {commit}{}", probes())
});

pub(super) fn long() -> &'static str {
    &LONG
}

#[cfg(target_os = "linux")]
fn probes() -> String {
    let hash = reaper_host::source::ebpf::object_sha256().unwrap_or("unknown");
    let abi = reaper_common::ABI_VERSION;
    format!("\nbpf object: sha256 {hash}\nbpf abi: {abi}")
}

#[cfg(not(target_os = "linux"))]
fn probes() -> &'static str {
    ""
}
