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
        (_, Some(key)) => format!("`{key}`: {message}"),
        (_, None) => message.into(),
    };
    (at, what)
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

/// Reads a duration from `MIN` to `MAX` milliseconds.
pub fn duration<'de, D: Deserializer<'de>, const MIN: u64, const MAX: u64>(
    deserializer: D,
) -> Result<Duration, D::Error> {
    let (min, max) = (Duration::from_millis(MIN), Duration::from_millis(MAX));
    text(
        deserializer,
        "a string such as \"5s\"",
        |text| match humantime::parse_duration(text) {
            Ok(found) if (min..=max).contains(&found) => Ok(found),
            Ok(_) => Err(format!(
                "{text:?} is out of bounds: write a duration from {} to {}",
                show_duration(min),
                show_duration(max)
            )),
            Err(_) => Err(format!(
                "{text:?} is not a duration: write one such as \"5s\" or \"500ms\""
            )),
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
        |text| match text.parse::<ByteSize>() {
            Ok(ByteSize(bytes)) if (MIN..=MAX).contains(&bytes) => Ok(bytes),
            Ok(_) => Err(format!(
                "{text:?} is out of bounds: write a size from {:?} to {:?}",
                show_size(MIN),
                show_size(MAX)
            )),
            Err(_) => Err(format!(
                "{text:?} is not a size: write one such as \"64 MiB\""
            )),
        },
    )
}

/// Returns a duration in the form that [`duration`] reads.
pub fn show_duration(duration: Duration) -> String {
    humantime::format_duration(duration).to_string()
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
