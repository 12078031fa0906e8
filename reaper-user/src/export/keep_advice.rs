//! Advice for people: what keeps a process, or one like it, from being reaped.

use serde::{Deserialize, Serialize};

use super::redact;
use reaper_model::event::Image;
use reaper_model::rules::suggest;

/// Ways to keep a process, or one like it, from being reaped.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct KeepAdvice {
    /// Whether it is too late for the process, so that this is about the next one like it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub too_late: bool,
    /// Variable that keeps a process and what it starts, if it is set when the process starts. Absent if the service
    /// does not honor it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub environment: Option<String>,
    /// Command that keeps the process while it runs; with `PID` for its pid if it is too late for this one.
    pub command: String,
    /// `[[keep]]` table for the config, which keeps each such process. Absent if none can be suggested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rule: Option<String>,
}

impl KeepAdvice {
    /// Creates the advice for a process with this pid and this `[[keep]]` table. Without a pid it is too late for the
    /// process: it was signalled or has exited.
    pub fn new(pid: Option<u32>, honors_keep: bool, rule: Option<String>) -> KeepAdvice {
        let too_late = pid.is_none();
        let pid = pid.map_or_else(|| "PID".into(), |pid| pid.to_string());
        KeepAdvice {
            too_late,
            environment: honors_keep.then(|| "REAPER_KEEP=1".into()),
            command: format!("reaper keep {pid}"),
            rule,
        }
    }
}

/// Returns a `[[keep]]` table that matches this program, without secrets. `None` if none can be suggested.
pub fn keep_rule(image: &Image) -> Option<String> {
    let mut argv = Vec::with_capacity(image.argv.len());
    for arg in redact::arguments(image.args()) {
        argv.extend_from_slice(&arg);
        argv.push(0);
    }
    let image = Image {
        argv,
        ..image.clone()
    };
    suggest::keep_rule(&image, |text| text.contains(redact::REDACTED))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keep_rule_has_no_secrets() {
        let image = |argv: &str| Image {
            exe: b"/usr/bin/curl".into(),
            argv: argv.replace(' ', "\0").into_bytes(),
            ..Image::default()
        };
        let conditions = |argv| {
            let rule = keep_rule(&image(argv)).expect("a rule");
            let (name, conditions) = rule.split_once("\nexe").expect("a name");
            assert!(name.starts_with("[[keep]]\nname = \"my-curl-"), "{name}");
            conditions.to_owned()
        };
        let exe = " = \"/usr/bin/curl\"\n";
        assert_eq!(conditions("curl --token abc https://x"), exe);
        let with_args = format!("{exe}args = [\"https://x\"]\n");
        assert_eq!(conditions("curl https://x"), with_args);
    }
}
