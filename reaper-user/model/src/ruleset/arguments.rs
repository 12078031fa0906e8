//! Reads the arguments of a program as options and positional arguments.
//!
//! An option starts with `-`, is not `-` alone and stands before `--`. All other arguments are positional.
//! A prompt that contains the name of an option or a subcommand is therefore one positional argument.

use std::borrow::Cow;

use super::Pattern;
use crate::event::Image;

/// Syntax of a program's arguments, as a rule defines it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Syntax {
    /// Options whose value is the next argument: `--name value` is read as `--name=value`.
    pub value_options: Vec<Box<str>>,
    /// Number (from 1) of the positional argument that begins another command line, after which no option follows.
    /// 0 if none exists.
    pub command_at: u32,
}

/// An option with its value, or a positional argument.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Word<'a> {
    Option(Cow<'a, [u8]>),
    Positional(&'a [u8]),
}

/// Iterator over the arguments. Joins an option to a value that is the next argument, as [`Syntax::value_options`]
/// says, and leaves out `--`. Allocates only for such a value.
pub(super) struct Words<'a, I> {
    args: I,
    syntax: &'a Syntax,
    /// Number of positional arguments so far.
    positionals: u32,
    /// Whether only positional arguments follow.
    options_ended: bool,
    /// Whether arguments are missing at the end.
    is_cut: bool,
    /// Last argument of a truncated vector, which may be incomplete. It is not part of `args`.
    last: Option<&'a [u8]>,
}

/// Reads the arguments after the first `skipped`.
///
/// With `is_cut`, the last argument of the image may be incomplete and more may follow.
pub(super) fn read<'a>(
    image: &'a Image,
    skipped: usize,
    is_cut: bool,
    syntax: &'a Syntax,
) -> Words<'a, impl Iterator<Item = &'a [u8]>> {
    let (line, separator) = match title(image) {
        Some(title) => (title, b' '),
        None => (image.argv.strip_suffix(&[0]).unwrap_or(&image.argv), 0),
    };
    let mut args = line.split(move |byte| *byte == separator);
    let last = if is_cut { args.next_back() } else { None };
    let are_skipped = args.by_ref().take(skipped).count() == skipped;
    Words {
        args,
        last: last.filter(|_| are_skipped),
        syntax,
        positionals: 0,
        options_ended: false,
        is_cut,
    }
}

/// Returns the title that a process has written over its arguments.
///
/// Chromium does so for its helpers: /proc shows only the arguments joined by spaces.
fn title(image: &Image) -> Option<&[u8]> {
    let end = image.argv.iter().position(|byte| *byte == 0);
    let (first, rest) = image.argv.split_at(end?);
    let is_alone = rest.iter().all(|byte| *byte == 0);
    (is_alone && first.contains(&b' ')).then_some(first)
}

impl<'a, I: Iterator<Item = &'a [u8]>> Words<'a, I> {
    /// Returns whether the first positional arguments match the patterns, one each.
    ///
    /// Returns `None` if that depends on missing arguments.
    pub(super) fn begin_with(mut self, patterns: &[Pattern]) -> Option<bool> {
        for pattern in patterns {
            let positional = self.by_ref().find_map(|word| match word {
                Word::Positional(arg) => Some(arg),
                Word::Option(_) => None,
            });
            let matches = match positional {
                Some(arg) => Some(pattern.is_match(arg)),
                None if !self.is_cut => Some(false),
                None => {
                    let is_option = |arg: &&[u8]| !self.options_ended && arg.starts_with(b"-");
                    let last = self.last.take().filter(|arg| !is_option(arg));
                    last.and_then(|arg| pattern.matches_prefix(arg))
                }
            };
            if matches != Some(true) {
                return matches;
            }
        }
        Some(true)
    }

    /// Returns whether any option matches any pattern, `None` if that depends on missing arguments.
    pub(super) fn have_option(mut self, patterns: &[Pattern]) -> Option<bool> {
        let matches = |word| match word {
            Word::Option(option) => patterns.iter().any(|p| p.is_match(&option)),
            Word::Positional(_) => false,
        };
        let found = self.by_ref().any(matches);
        (found || self.options_ended || !self.is_cut).then_some(found)
    }
}

impl<'a, I: Iterator<Item = &'a [u8]>> Iterator for Words<'a, I> {
    type Item = Word<'a>;

    fn next(&mut self) -> Option<Word<'a>> {
        let mut arg = self.args.next()?;
        if !self.options_ended && arg == b"--" {
            self.options_ended = true;
            arg = self.args.next()?;
        }
        if self.options_ended || !arg.starts_with(b"-") || arg == b"-" {
            self.positionals += 1;
            self.options_ended |= self.positionals == self.syntax.command_at;
            return Some(Word::Positional(arg));
        }
        let values = &self.syntax.value_options;
        let takes_value = values.iter().any(|option| option.as_bytes() == arg);
        let value = takes_value.then(|| self.args.next()).flatten();
        if takes_value && value.is_none() {
            self.last = None;
        }
        Some(Word::Option(match value {
            Some(value) => Cow::Owned([arg, b"=", value].concat()),
            None => Cow::Borrowed(arg),
        }))
    }
}

#[cfg(test)]
mod tests;
