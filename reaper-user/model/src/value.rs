//! Deserializers for values of config files: durations, sizes, numbers, names and lists.
//!
//! Their errors say what to write. [`get`] and [`read`] add the key and its position.

use std::fmt;
use std::time::Duration;

use bytesize::ByteSize;
use serde::de::value::Error as NameError;
use serde::de::{
    DeserializeOwned, DeserializeSeed, Error, IntoDeserializer, SeqAccess, Unexpected,
};
use serde::{Deserializer, Serializer};
use toml::Spanned;
use toml::de::{DeTable, DeValue, ValueDeserializer};

/// Byte offset in the text, and the error there.
pub type Problem = (usize, String);

/// Reads one key of a table. Returns `None` if the key is absent.
///
/// # Errors
/// The value is not what `read` accepts.
pub fn get<'t, T>(
    table: &DeTable<'t>,
    key: &str,
    read: impl FnOnce(ValueDeserializer<'t>) -> Result<T, toml::de::Error>,
) -> Result<Option<T>, Problem> {
    let Some(value) = table.get(key) else {
        return Ok(None);
    };
    let found = read(value.clone().into());
    found
        .map(Some)
        .map_err(|error| problem(&error, table, value.span().start, &[], ""))
}

/// Reads a table that starts at byte `at`, except the keys in `others`. `place` is added to errors about unknown keys.
///
/// # Errors
/// A key is unknown or its value is wrong.
pub fn read<T: DeserializeOwned>(
    table: &DeTable<'_>,
    at: usize,
    others: &[&str],
    place: &str,
) -> Result<T, Problem> {
    let mine = table
        .iter()
        .filter(|(key, _)| !others.contains(&&**key.get_ref()));
    let mine = mine.map(|(key, value)| (key.clone(), value.clone()));
    let value = Spanned::new(at..at, DeValue::Table(mine.collect()));
    T::deserialize(ValueDeserializer::from(value))
        .map_err(|error| problem(&error, table, at, others, place))
}

/// Returns an error with its position and the key that it is about. `at` is the position if the error has none.
fn problem(
    error: &toml::de::Error,
    table: &DeTable<'_>,
    at: usize,
    others: &[&str],
    place: &str,
) -> Problem {
    let at = error.span().map_or(at, |span| span.start);
    let message = error.message();
    // The message of serde quotes the unknown key first, then the known ones.
    let mut names = message.split('`').skip(1).step_by(2);
    let what = match (names.next(), key_at(table, at)) {
        (Some(name), _) if message.starts_with("unknown field") => {
            let known: Vec<&str> = names.chain(others.iter().copied()).collect();
            unknown_key(name, &known, place)
        }
        (_, Some(key)) => format!("`{key}`: {}", in_words(message)),
        (_, None) => in_words(message),
    };
    (at, what)
}

/// Returns a message of serde in plain words: `expected a boolean, not integer `1``.
fn in_words(message: &str) -> String {
    let kinds = ["invalid type: ", "invalid value: ", "unknown variant "];
    let wrong = kinds.iter().find_map(|kind| message.strip_prefix(kind));
    if let Some((found, expected)) = wrong.and_then(|wrong| wrong.rsplit_once(", expected ")) {
        // Names of Rust's integers.
        let found = found
            .trim_end_matches(" as i128")
            .trim_end_matches(" as u128");
        return format!("expected {expected}, not {found}");
    }
    match message.strip_prefix("missing field ") {
        Some(key) => format!("the key {key} is missing"),
        None => message.into(),
    }
}

/// Returns the innermost key whose value contains a byte offset.
fn key_at<'a>(table: &'a DeTable<'_>, at: usize) -> Option<&'a str> {
    table.iter().find_map(|(key, value)| {
        let inner = value.get_ref().as_table();
        let inner = inner.and_then(|inner| key_at(inner, at));
        inner.or_else(|| value.span().contains(&at).then_some(&**key.get_ref()))
    })
}

/// Returns the error for an unknown key, with the most similar known key. `place` follows the name of the key.
pub fn unknown_key(name: &str, known: &[&str], place: &str) -> String {
    let hint = match nearest(name, known) {
        Some(near) => format!("did you mean `{near}`?"),
        None => format!("known keys: {}", known.join(", ")),
    };
    format!("unknown key `{}`{place}: {hint}", name.escape_debug())
}

/// Returns the known name that is most similar to a mistyped one, if any is similar enough.
pub fn nearest<'k>(name: &str, known: &[&'k str]) -> Option<&'k str> {
    let near = |key: &&&'k str| strsim::damerau_levenshtein(name, key);
    let best = known.iter().min_by_key(near)?;
    (near(&best) <= 1 + best.len() / 4).then_some(*best)
}

/// Shortest beginning of a name that counts as a hint for it, in bytes.
const BEGINNING_MIN: usize = 3;

/// Returns `did you mean ...?` with the known name that is most similar to an unknown one, or else the shortest that begins
/// with it.
pub fn did_you_mean(name: &str, known: &[&str]) -> Option<String> {
    let beginning = || {
        let is_telling = name.len() >= BEGINNING_MIN;
        let known = known.iter().copied();
        let known = known.filter(|known| is_telling && known.starts_with(name));
        known.min_by_key(|known| known.len())
    };
    let near = nearest(name, known).or_else(beginning)?;
    Some(format!("did you mean `{near}`?"))
}

/// Reads a string with a function whose error describes what is wrong.
pub fn text<'de, D: Deserializer<'de>, T>(
    deserializer: D,
    expected: &str,
    read: impl Fn(&str) -> Result<T, String>,
) -> Result<T, D::Error> {
    Text { expected, read }.deserialize(deserializer)
}

/// Reads a string or a non-empty list of strings, each with a function as in [`text`].
pub fn list<'de, D: Deserializer<'de>, T>(
    deserializer: D,
    read: impl Fn(&str) -> Result<T, String>,
) -> Result<Vec<T>, D::Error> {
    deserializer.deserialize_any(List { read, min: 1 })
}

/// Reads a string or a list of strings as [`list`]. An empty list means none.
pub fn list_or_none<'de, D: Deserializer<'de>, T>(
    deserializer: D,
    read: impl Fn(&str) -> Result<T, String>,
) -> Result<Vec<T>, D::Error> {
    deserializer.deserialize_any(List { read, min: 0 })
}

/// Reads the name of an enum variant.
pub fn choice<'de, D: Deserializer<'de>, T: DeserializeOwned>(
    deserializer: D,
) -> Result<T, D::Error> {
    let read = |name: &str| {
        let found = T::deserialize(name.into_deserializer());
        found.map_err(|error: NameError| error.to_string())
    };
    // The error for the empty name lists the known names.
    let unknown = read("").err().unwrap_or_default();
    let expected = unknown.split_once("expected ");
    text(
        deserializer,
        expected.map_or("a name", |(_, names)| names),
        read,
    )
}

/// Reads a number from `MIN` to `MAX`.
pub fn number<'de, D: Deserializer<'de>, const MIN: u32, const MAX: u32>(
    deserializer: D,
) -> Result<u32, D::Error> {
    deserializer.deserialize_any(Number::<MIN, MAX>)
}

/// Parses a time with its units, such as `30s`, `10min` or `1h 30m`. All times that people write pass through here.
///
/// # Errors
/// The text is not a time. The error says what to write.
pub fn parse_time(text: &str) -> Result<Duration, &'static str> {
    humantime::parse_duration(text).map_err(|error| match error {
        humantime::DurationError::NumberOverflow => "this time is too long",
        _ => "not a time: write 30s, 10min or 2h",
    })
}

/// Parses a size in bytes with its unit, such as `64 MiB` or `2 GB`. All sizes that people write pass through here.
///
/// # Errors
/// The text is not a size. The error says what to write.
pub fn parse_size(text: &str) -> Result<u64, &'static str> {
    let parsed = text.parse::<ByteSize>();
    parsed
        .map(|ByteSize(bytes)| bytes)
        .map_err(|_| "not a size: write 512 KiB, 64 MiB or 2 GiB")
}

/// Largest pid that Linux gives out (`PID_MAX_LIMIT`).
const PID_MAX: u32 = 4_194_304;

/// Parses a pid in decimal digits. All pids that people write pass through here.
///
/// # Errors
/// The text is not a pid. The error says what to write.
pub fn parse_pid(text: &str) -> Result<u32, &'static str> {
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    let pid = text.parse().ok().filter(|_| digits);
    pid.filter(|pid| (1..=PID_MAX).contains(pid))
        .ok_or("not a pid: write a number from 1 to 4194304")
}

/// Reads a duration from `MIN` to `MAX` milliseconds.
pub fn duration<'de, D: Deserializer<'de>, const MIN: u64, const MAX: u64>(
    deserializer: D,
) -> Result<Duration, D::Error> {
    let (min, max) = (Duration::from_millis(MIN), Duration::from_millis(MAX));
    text(
        deserializer,
        "a string such as \"5s\"",
        |text| match parse_time(text) {
            Ok(found) if (min..=max).contains(&found) => Ok(found),
            Ok(_) => Err(format!(
                "{text:?} is out of bounds: write a time from {} to {}",
                show_duration(min),
                show_duration(max)
            )),
            Err(what) => Err(format!("{text:?}: {what}")),
        },
    )
}

/// Reads a duration from `MIN` to `MAX` milliseconds as nanoseconds. Returns `None` only if the number does not fit
/// into 64 bits.
pub fn nanoseconds<'de, D: Deserializer<'de>, const MIN: u64, const MAX: u64>(
    deserializer: D,
) -> Result<Option<u64>, D::Error> {
    let found = duration::<D, MIN, MAX>(deserializer)?;
    Ok(u64::try_from(found.as_nanos()).ok())
}

/// Reads a size from `MIN` to `MAX` bytes.
pub fn size<'de, D: Deserializer<'de>, const MIN: u64, const MAX: u64>(
    deserializer: D,
) -> Result<u64, D::Error> {
    text(
        deserializer,
        "a string such as \"64 MiB\"",
        |text| match parse_size(text) {
            Ok(bytes) if (MIN..=MAX).contains(&bytes) => Ok(bytes),
            Ok(_) => Err(format!(
                "{text:?} is out of bounds: write a size from {:?} to {:?}",
                show_size(MIN),
                show_size(MAX)
            )),
            Err(what) => Err(format!("{text:?}: {what}")),
        },
    )
}

/// Returns a duration in the form that [`parse_time`] reads, such as `9m 59s`. It is exact to the nanosecond.
pub fn show_duration(duration: Duration) -> String {
    const UNITS: [(u128, &str); 7] = [
        (86_400_000_000_000, "d"),
        (3_600_000_000_000, "h"),
        (60_000_000_000, "m"),
        (1_000_000_000, "s"),
        (1_000_000, "ms"),
        (1000, "us"),
        (1, "ns"),
    ];
    let mut rest = duration.as_nanos();
    let parts = UNITS.iter().filter_map(|(unit, name)| {
        let count = rest / unit;
        rest %= unit;
        (count > 0).then(|| format!("{count}{name}"))
    });
    let parts: Vec<String> = parts.collect();
    match parts.is_empty() {
        true => "0s".into(),
        false => parts.join(" "),
    }
}

/// Returns a size in the form that [`size`] reads, exact to the byte.
pub fn show_size(bytes: u64) -> String {
    let short = ByteSize::b(bytes).to_string().replace(".0 ", " ");
    match short.parse::<ByteSize>() {
        Ok(ByteSize(read)) if read == bytes => short,
        _ => format!("{bytes} B"),
    }
}

/// Serializes nanoseconds as a duration.
pub fn write_nanoseconds<S: Serializer>(time: &Option<u64>, out: S) -> Result<S::Ok, S::Error> {
    match time {
        Some(time) => out.serialize_str(&show_duration(Duration::from_nanos(*time))),
        None => out.serialize_none(),
    }
}

struct Text<'a, F> {
    expected: &'a str,
    read: F,
}

impl<'de, T, F: Fn(&str) -> Result<T, String>> DeserializeSeed<'de> for Text<'_, F> {
    type Value = T;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<T, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<T, F: Fn(&str) -> Result<T, String>> serde::de::Visitor<'_> for Text<'_, F> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.expected)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<T, E> {
        (self.read)(text).map_err(E::custom)
    }
}

struct List<F> {
    read: F,
    /// Minimum number of strings.
    min: usize,
}

impl<'de, T, F: Fn(&str) -> Result<T, String>> serde::de::Visitor<'de> for List<F> {
    type Value = Vec<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string or a list of strings")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Vec<T>, E> {
        (self.read)(text).map(|one| vec![one]).map_err(E::custom)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<T>, A::Error> {
        let (expected, read) = ("a string", &self.read);
        let mut all = Vec::new();
        while let Some(one) = list.next_element_seed(Text { expected, read })? {
            all.push(one);
        }
        if all.len() < self.min {
            let what = "an empty list can never match: fill it or leave it out";
            return Err(A::Error::custom(what));
        }
        Ok(all)
    }
}

struct Number<const MIN: u32, const MAX: u32>;

impl<const MIN: u32, const MAX: u32> serde::de::Visitor<'_> for Number<MIN, MAX> {
    type Value = u32;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a number from {MIN} to {MAX}")
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<u32, E> {
        let found = u32::try_from(number).ok();
        let found = found.filter(|found| (MIN..=MAX).contains(found));
        found.ok_or_else(|| E::invalid_value(Unexpected::Signed(number), &self))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_as_they_are_shown() {
        for (text, ms, shown) in [
            ("30s", 30_000, "30s"),
            ("10min", 600_000, "10m"),
            ("1h 30m", 5_400_000, "1h 30m"),
            ("9m 59s", 599_000, "9m 59s"),
            ("1500ms", 1500, "1s 500ms"),
            ("40days", 3_456_000_000, "40d"),
            ("0s", 0, "0s"),
        ] {
            let time = Duration::from_millis(ms);
            assert_eq!(parse_time(text), Ok(time), "{text}");
            assert_eq!(show_duration(time), shown);
            assert_eq!(parse_time(shown), Ok(time), "{shown}");
        }
    }

    #[test]
    fn unknown_name_has_the_most_similar_known_one_as_a_hint() {
        let known = ["codex", "claude-daemon", "claude-code"];
        for (name, hint) in [
            ("claud-code", Some("did you mean `claude-code`?")),
            ("claud", Some("did you mean `claude-code`?")),
            ("codecs", Some("did you mean `codex`?")),
            ("cl", None),
            ("aider", None),
        ] {
            assert_eq!(did_you_mean(name, &known).as_deref(), hint, "{name}");
        }
    }

    #[test]
    fn wrong_times_sizes_and_pids_have_one_error_each() {
        for text in ["", "5", "-1h", "1.5", "soon", "1 fortnight", "2 h 5"] {
            assert_eq!(
                parse_time(text),
                Err("not a time: write 30s, 10min or 2h"),
                "{text}"
            );
        }
        for text in ["99999999999999999999s", "99999999999999999999h"] {
            assert_eq!(parse_time(text), Err("this time is too long"), "{text}");
        }
        for text in ["", "big", "-1 MiB", "64 XB"] {
            let error = "not a size: write 512 KiB, 64 MiB or 2 GiB";
            assert_eq!(parse_size(text), Err(error), "{text}");
        }
        for text in ["", "0", "-1", "+1", "1.5", "x", "4194305", "99999999999"] {
            let error = "not a pid: write a number from 1 to 4194304";
            assert_eq!(parse_pid(text), Err(error), "{text}");
        }
        assert_eq!((parse_pid("1"), parse_pid("4194304")), (Ok(1), Ok(PID_MAX)));
        assert_eq!(parse_size("64 MiB"), Ok(64 << 20));
    }
}
