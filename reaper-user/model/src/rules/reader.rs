//! Typed reading of TOML tables that notes what is wrong and goes on.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use bytesize::ByteSize;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// A value with its place in the text.
pub type Value<'a> = Spanned<DeValue<'a>>;

/// Collects problems. What is wrong leaves the value it was for as it was.
#[derive(Default)]
pub struct Reader {
    /// Byte offset and text.
    problems: Vec<(usize, String)>,
}

impl Reader {
    /// Returns the problems found, each with its byte offset in the text.
    pub fn into_problems(self) -> Vec<(usize, String)> {
        self.problems
    }

    pub fn problem(&mut self, at: usize, what: impl Into<String>) {
        self.problems.push((at, what.into()));
    }

    /// Problems noted so far.
    pub fn count(&self) -> usize {
        self.problems.len()
    }

    /// Notes every key that is none of `known`, with the nearest that is.
    pub fn known_keys(&mut self, table: &DeTable<'_>, known: &[&str], whose: &str) {
        for (key, _) in table {
            let name = &**key.get_ref();
            if known.contains(&name) {
                continue;
            }
            let hint = match nearest(name, known) {
                Some(near) => format!("did you mean `{near}`?"),
                None => format!("known are {}", known.join(", ")),
            };
            self.problem(
                key.span().start,
                format!("unknown key `{}`{whose}: {hint}", name.escape_debug()),
            );
        }
    }

    /// Notes a name that is none of `known`, with the nearest that is.
    pub fn known_name(&mut self, at: usize, name: &str, known: &[&str], what: &str) {
        if known.contains(&name) {
            return;
        }
        let hint = match nearest(name, known) {
            Some(near) => format!("did you mean `{near}`?"),
            None => "`reaper config show --defaults` has them all".into(),
        };
        self.problem(at, format!("{what} `{}`: {hint}", name.escape_debug()));
    }

    /// A string, with its offset.
    pub fn string<'a>(
        &mut self,
        key: &str,
        value: &'a Value<'_>,
        like: &str,
    ) -> Option<(usize, &'a str)> {
        let at = value.span().start;
        match value.get_ref() {
            DeValue::String(text) => Some((at, text)),
            other => {
                self.wrong_type(at, key, other, &format!("a string such as \"{like}\""));
                None
            }
        }
    }

    /// One string, or a list of them that is not empty.
    pub fn strings<'a>(&mut self, key: &str, value: &'a Value<'_>) -> Vec<(usize, &'a str)> {
        let at = value.span().start;
        match value.get_ref() {
            DeValue::String(text) => vec![(at, text)],
            DeValue::Array(list) if list.is_empty() => {
                self.problem(
                    at,
                    format!(
                        "`{key}` is an empty list, which can never match: fill it or leave it out"
                    ),
                );
                Vec::new()
            }
            DeValue::Array(list) => {
                let mut found = Vec::new();
                for item in list {
                    let at = item.span().start;
                    match item.get_ref() {
                        DeValue::String(text) => found.push((at, &**text)),
                        other => self.problem(
                            at,
                            format!("`{key}` holds {}: write strings only", a_or_an(other)),
                        ),
                    }
                }
                found
            }
            other => {
                self.wrong_type(at, key, other, "a string or a list of strings");
                Vec::new()
            }
        }
    }

    pub fn choice<T: Copy>(
        &mut self,
        table: &DeTable<'_>,
        key: &str,
        all: &[(&str, T)],
        into: &mut T,
    ) {
        let Some((at, text)) = table.get(key).and_then(|v| self.string(key, v, all[0].0)) else {
            return;
        };
        match all.iter().find(|(name, _)| *name == text) {
            Some((_, found)) => *into = *found,
            None => {
                let names: Vec<_> = all.iter().map(|(name, _)| format!("{name:?}")).collect();
                self.problem(
                    at,
                    format!("`{key}` is {text:?}: write {}", names.join(" or ")),
                );
            }
        }
    }

    pub fn duration(
        &mut self,
        table: &DeTable<'_>,
        key: &str,
        within: RangeInclusive<Duration>,
        into: &mut Duration,
    ) {
        let Some((at, text)) = table.get(key).and_then(|v| self.string(key, v, "5s")) else {
            return;
        };
        match humantime::parse_duration(text) {
            Ok(found) if within.contains(&found) => *into = found,
            Ok(_) => {
                let (least, most) = (humantime::format_duration(*within.start()), humantime::format_duration(*within.end()));
                self.problem(at, format!("`{key}` is {text:?}: write a duration from {least} to {most}"));
            }
            Err(_) => self.problem(
                at,
                format!("`{key}` is {text:?}, which is no duration: write one such as \"5s\" or \"500ms\""),
            ),
        }
    }

    pub fn size(
        &mut self,
        table: &DeTable<'_>,
        key: &str,
        within: RangeInclusive<u64>,
        into: &mut u64,
    ) {
        let Some((at, text)) = table.get(key).and_then(|v| self.string(key, v, "64 MiB")) else {
            return;
        };
        match text.parse::<ByteSize>() {
            Ok(ByteSize(bytes)) if within.contains(&bytes) => *into = bytes,
            Ok(_) => {
                let (least, most) = (size(*within.start()), size(*within.end()));
                self.problem(
                    at,
                    format!("`{key}` is {text:?}: write a size from {least:?} to {most:?}"),
                );
            }
            Err(_) => self.problem(
                at,
                format!("`{key}` is {text:?}, which is no size: write one such as \"64 MiB\""),
            ),
        }
    }

    /// A size that is a power of two.
    pub fn power_of_two(
        &mut self,
        table: &DeTable<'_>,
        key: &str,
        within: RangeInclusive<u32>,
        into: &mut u32,
    ) {
        let Some((at, text)) = table.get(key).and_then(|v| self.string(key, v, "8 MiB")) else {
            return;
        };
        let what = match text.parse::<ByteSize>() {
            Ok(ByteSize(bytes)) => match u32::try_from(bytes) {
                Ok(bytes) if within.contains(&bytes) && bytes.is_power_of_two() => {
                    *into = bytes;
                    return;
                }
                Ok(bytes) if within.contains(&bytes) => {
                    let below = size(1 << bytes.ilog2());
                    format!("{bytes} bytes, which is no power of two: write for instance {below:?}")
                }
                _ => format!(
                    "{text:?}: write a power of two from {:?} to {:?}",
                    size((*within.start()).into()),
                    size((*within.end()).into())
                ),
            },
            Err(_) => format!("{text:?}, which is no size: write one such as \"8 MiB\""),
        };
        self.problem(at, format!("`{key}` is {what}"));
    }

    pub fn number(
        &mut self,
        table: &DeTable<'_>,
        key: &str,
        within: RangeInclusive<u32>,
        into: &mut u32,
    ) {
        let Some(value) = table.get(key) else { return };
        let at = value.span().start;
        let wanted = format!("a number from {} to {}", within.start(), within.end());
        match value.get_ref() {
            DeValue::Integer(found) => match u32::from_str_radix(found.as_str(), found.radix()) {
                Ok(number) if within.contains(&number) => *into = number,
                _ => self.problem(at, format!("`{key}` is {found}: write {wanted}")),
            },
            other => self.wrong_type(at, key, other, &wanted),
        }
    }

    pub fn absolute_path(&mut self, table: &DeTable<'_>, key: &str, into: &mut PathBuf) {
        let like = into.display().to_string();
        match table.get(key).and_then(|v| self.string(key, v, &like)) {
            Some((_, text)) if text.starts_with('/') && !text.contains('\0') => *into = text.into(),
            Some((at, text)) => {
                self.problem(at, format!("`{key}` is {text:?}: write an absolute path"))
            }
            None => {}
        }
    }

    pub fn maybe_flag(&mut self, table: &DeTable<'_>, key: &str) -> Option<bool> {
        table.get(key)?;
        let (before, mut found) = (self.count(), false);
        self.flag(table, key, &mut found);
        (self.count() == before).then_some(found)
    }

    pub fn maybe_number(
        &mut self,
        table: &DeTable<'_>,
        key: &str,
        within: RangeInclusive<u32>,
    ) -> Option<u32> {
        table.get(key)?;
        let (before, mut found) = (self.count(), 0);
        self.number(table, key, within, &mut found);
        (self.count() == before).then_some(found)
    }

    pub fn flag(&mut self, table: &DeTable<'_>, key: &str, into: &mut bool) {
        let Some(value) = table.get(key) else { return };
        match value.get_ref() {
            DeValue::Boolean(found) => *into = *found,
            other => self.wrong_type(value.span().start, key, other, "true or false"),
        }
    }

    pub fn table<'a, 't>(&mut self, table: &'a DeTable<'t>, key: &str) -> Option<&'a DeTable<'t>> {
        let value = table.get(key)?;
        match value.get_ref() {
            DeValue::Table(found) => Some(found),
            other => {
                self.wrong_type(value.span().start, key, other, &format!("a table: [{key}]"));
                None
            }
        }
    }

    /// A list of tables, each with its offset; `like` says how one is written.
    pub fn tables<'a, 't>(
        &mut self,
        table: &'a DeTable<'t>,
        key: &str,
        like: &str,
    ) -> Vec<(usize, &'a DeTable<'t>)> {
        let Some(value) = table.get(key) else {
            return Vec::new();
        };
        let items = match value.get_ref() {
            DeValue::Array(items) => items.iter().collect(),
            _ => vec![value],
        };
        let mut found = Vec::new();
        for item in items {
            match item.get_ref() {
                DeValue::Table(inner) if !std::ptr::eq(item, value) => {
                    found.push((item.span().start, inner))
                }
                other => self.wrong_type(item.span().start, key, other, like),
            }
        }
        found
    }

    fn wrong_type(&mut self, at: usize, key: &str, found: &DeValue<'_>, wanted: &str) {
        self.problem(at, format!("`{key}` is {}: write {wanted}", a_or_an(found)));
    }
}

pub fn size(bytes: u64) -> String {
    ByteSize::b(bytes).to_string().replace(".0 ", " ")
}

fn a_or_an(value: &DeValue<'_>) -> String {
    match value.type_str() {
        kind @ ("integer" | "array") => format!("an {kind}"),
        kind => format!("a {kind}"),
    }
}

/// The known key that a mistyped one is most likely to mean.
fn nearest<'k>(name: &str, known: &[&'k str]) -> Option<&'k str> {
    let near = |key: &&&'k str| strsim::damerau_levenshtein(name, key);
    let best = known.iter().min_by_key(near)?;
    (near(&best) <= 1 + best.len() / 4).then_some(*best)
}
