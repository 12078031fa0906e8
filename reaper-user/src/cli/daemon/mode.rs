//! Decides whether the daemon sends signals.

use crate::config::Mode;

/// Platform for which this program was type-checked, and on which it was never run.
pub(super) const NEVER_RUN: Option<&str> = if cfg!(target_os = "macos") {
    Some("macOS")
} else {
    None
};

/// Returns the mode by the config and the flags `--observe` and `--enforce`. On a platform where this program was never
/// run, only `--enforce` makes it send signals.
pub(super) fn choose(config: Mode, observe: bool, enforce: bool, never_run: bool) -> Mode {
    if enforce {
        Mode::Enforce
    } else if observe || never_run {
        Mode::Observe
    } else {
        config
    }
}

/// Returns the warning for a platform where this program was never run.
pub(super) fn warning(platform: &str, mode: Mode) -> String {
    let effect = match mode {
        Mode::Enforce => "this service sends signals, because of --enforce",
        Mode::Observe => "this service only observes; --enforce sends signals",
    };
    format!("reaper was type-checked for {platform} and never run there: {effect}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use Mode::{Enforce, Observe};

    #[test]
    fn never_run_platform_observes_unless_enforced() {
        for (config, observe, enforce, never_run, expected) in [
            (Enforce, false, false, false, Enforce),
            (Observe, false, false, false, Observe),
            (Enforce, true, false, false, Observe),
            (Observe, false, true, false, Enforce),
            (Enforce, false, false, true, Observe),
            (Enforce, true, false, true, Observe),
            (Enforce, false, true, true, Enforce),
            (Observe, false, true, true, Enforce),
        ] {
            let chosen = choose(config, observe, enforce, never_run);
            assert_eq!(
                chosen, expected,
                "{config:?} {observe} {enforce} {never_run}"
            );
        }
        for mode in [Enforce, Observe] {
            let said = warning("macOS", mode);
            assert!(
                said.contains("type-checked for macOS and never run"),
                "{said}"
            );
        }
        assert_eq!(NEVER_RUN.is_some(), cfg!(target_os = "macos"));
    }
}
