//! `--color`: whether output has colours.

use std::ffi::OsStr;

use clap::ValueEnum;

use crate::export::set_colors;

/// When to use colours.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(super) enum Color {
    /// On a terminal, unless `NO_COLOR` is set.
    #[default]
    Auto,
    Always,
    Never,
}

impl Color {
    /// Applies the choice to all later output of this program.
    pub(super) fn apply(self) {
        set_colors(match self {
            Color::Auto => None,
            Color::Always => Some(true),
            Color::Never => Some(false),
        });
    }

    /// Finds the choice in arguments that clap does not accept, or that ask for the help.
    pub(super) fn find(args: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Color {
        let mut args = args.into_iter();
        let read = |word: &str| Color::from_str(word, false).ok();
        while let Some(arg) = args.next() {
            match arg.as_ref().to_str() {
                Some("--") => break,
                Some("--color") => {
                    let word = args.next();
                    let word = word.as_ref().and_then(|word| word.as_ref().to_str());
                    return word.and_then(read).unwrap_or_default();
                }
                Some(arg) => {
                    if let Some(word) = arg.strip_prefix("--color=") {
                        return read(word).unwrap_or_default();
                    }
                }
                None => {}
            }
        }
        Color::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn color_is_found_in_arguments() {
        for (args, expected) in [
            (&["tree", "--color", "never"][..], Color::Never),
            (&["--color=always", "tree"], Color::Always),
            (&["tree", "--color", "pink"], Color::Auto),
            (&["tree", "--color"], Color::Auto),
            (&["run", "--", "ls", "--color=always"], Color::Auto),
        ] {
            assert_eq!(Color::find(args), expected, "{args:?}");
        }
    }
}
