//! Processes that users keep.

use serde::de::{Deserializer, Error};
use serde::{Deserialize, Serialize};
use serde_json::Number;

use super::process::ProcessInfo;

/// Longest time for which `reaper keep` can keep a process: ten years.
pub const KEEP_MAX_S: u64 = 10 * 366 * 24 * 3600;

/// Answer to `GET /v1/keeps`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct KeepsResponse {
    /// Kept processes that the user may see.
    pub keeps: Vec<KeepInfo>,
}

/// Process kept with `reaper keep`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct KeepInfo {
    /// Process that is kept.
    pub process: ProcessInfo,
    /// Uid of the user that keeps it.
    pub by_uid: u32,
    /// Time left; absent if it is kept until it exits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remaining_s: Option<u64>,
    /// Whether its descendants are kept with it.
    pub tree: bool,
}

/// Body of `POST /v1/keeps`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct KeepParams {
    /// Process to keep, which must be a member of a session.
    #[cfg_attr(test, schemars(range(min = 1, max = 4_194_304), example = 4250))]
    #[serde(deserialize_with = "integer")]
    pub pid: u32,
    /// Time to keep it; absent for until it exits.
    #[cfg_attr(test, schemars(range(min = 1, max = KEEP_MAX_S)))]
    #[serde(
        default,
        deserialize_with = "optional_integer",
        skip_serializing_if = "Option::is_none"
    )]
    pub for_s: Option<u64>,
    /// Whether to keep its descendants with it.
    #[serde(default)]
    pub tree: bool,
}

/// Reads an integer. JSON Schema, and so the document of the API, counts `42.0` as one.
fn integer<'de, D: Deserializer<'de>, T: TryFrom<u64>>(deserializer: D) -> Result<T, D::Error> {
    converted(Number::deserialize(deserializer)?)
}

fn optional_integer<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    let number = Option::<Number>::deserialize(deserializer)?;
    number.map(converted).transpose()
}

fn converted<T: TryFrom<u64>, E: Error>(number: Number) -> Result<T, E> {
    // A larger float may stand for another integer.
    let is_exact = |float: &f64| float.fract() == 0.0 && (0.0..9e15).contains(float);
    let float = || Some(number.as_f64().filter(is_exact)? as u64);
    let integer = number.as_u64().or_else(float);
    let wrong = || E::custom(format!("{number} is no integer in the permitted range"));
    integer.and_then(|it| it.try_into().ok()).ok_or_else(wrong)
}

/// Result of a keep or unkeep request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct KeepResult {
    /// Process in the request.
    pub pid: u32,
    /// Number of processes affected, with this one.
    pub processes: u64,
    /// Whether it is in the journal and survives a restart of the service.
    pub durable: bool,
    /// Decision about a released process and its reason, as in [`Explanation::why`](super::explanation::Explanation::why).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// Next step for a released process, as in [`Explanation::next`](super::explanation::Explanation::next).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}
