//! Removes secrets from command lines.

use std::borrow::Cow;
use std::sync::LazyLock;

use regex::bytes::Regex;

/// Replacement for a secret.
pub(super) const REDACTED: &str = "[redacted]";

/// `--token=…`, `API_KEY=…`, `"password": "…"`, `?token=…`, anywhere in an argument. The value is redacted.
static NAMED: LazyLock<Regex> = LazyLock::new(|| {
    regex(concat!(
        r"(?is-u)([\w.-]*(?:token|secret|passwd|password|_pwd|api[_-]?key|access[_-]?key|private[_-]?key|credentials?)",
        r#"["']?\s*[=:]\s*)(?:"[^"]*"|'[^']*'|[^\s"'&;,|)}]+)"#,
    ))
});
/// `--token=…` as a whole argument. Everything after the `=` is redacted.
static WHOLE: LazyLock<Regex> = LazyLock::new(|| {
    regex(
        r"(?is-u)^(--?[\w.-]*(?:token|secret|passwd|password|api[_-]?key|access[_-]?key|credentials?|auth|pat)=).+$",
    )
});
/// `--token …` inside of an argument, such as a shell script. The next word is redacted.
static WITHIN: LazyLock<Regex> = LazyLock::new(|| {
    regex(
        r"(?is-u)(\s--?[\w.-]*(?:token|secret|passwd|password|api[_-]?key|access[_-]?key|auth)\s+)[^\s-]\S*",
    )
});
/// `--token` as a whole argument. The next argument is redacted.
static OPTION: LazyLock<Regex> = LazyLock::new(|| {
    regex(
        r"(?is-u)^--?[\w.-]*(?:token|secret|passwd|password|api[_-]?key|access[_-]?key|auth|pat)$",
    )
});
/// Tokens in well-known formats, anywhere in an argument.
static SHAPED: LazyLock<Regex> = LazyLock::new(|| {
    regex(concat!(
        r"(?i-u:(authorization:\s*\w+\s+|bearer\s+)[\w.~+/=-]{8,})",
        r"|()(?-u:sk-[\w-]{16,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|xox[abprs]-[\w-]{10,}|AKIA[0-9A-Z]{16}|glpat-[\w-]{16,})",
        r"|(?-u:(://[^/\s:@]+:)[^/\s@]+)",
    ))
});

fn regex(pattern: &str) -> Regex {
    Regex::new(pattern).expect("the patterns of this file are valid")
}

/// Returns the arguments with secrets redacted. Finds only secrets with a well-known option, name or format.
pub fn arguments<'a>(args: impl Iterator<Item = &'a [u8]>) -> impl Iterator<Item = Cow<'a, [u8]>> {
    let mut secret_follows = false;
    args.map(move |arg| {
        if std::mem::replace(&mut secret_follows, OPTION.is_match(arg)) && !arg.starts_with(b"-") {
            return Cow::Borrowed(REDACTED.as_bytes());
        }
        let mut arg = Cow::Borrowed(arg);
        for (pattern, kept) in [
            (&WHOLE, "${1}"),
            (&NAMED, "${1}"),
            (&WITHIN, "${1}"),
            (&SHAPED, "${1}${2}${3}"),
        ] {
            let with = [kept, REDACTED].concat().into_bytes();
            if let Cow::Owned(redacted) = pattern.replace_all(&arg, with) {
                arg = Cow::Owned(redacted);
            }
        }
        arg
    })
}

#[cfg(test)]
mod tests {
    #[test]
    fn secrets_are_redacted_and_other_text_stays() {
        for (args, expected) in [
            (
                "curl --token abc https://x",
                "curl --token [redacted] https://x",
            ),
            ("x --api-key=abc -v", "x --api-key=[redacted] -v"),
            (
                "env GITHUB_TOKEN=abc make",
                "env GITHUB_TOKEN=[redacted] make",
            ),
            ("x --token --verbose", "x --token --verbose"),
            (
                "git clone https://u:pw@host/x",
                "git clone https://u:[redacted]@host/x",
            ),
            ("x sk-abcdefghijklmnopqrst", "x [redacted]"),
            (
                "x --url=https://h/?token=abc&x=1",
                "x --url=https://h/?token=[redacted]&x=1",
            ),
            ("node server.js --port 80", "node server.js --port 80"),
            ("tokenize file", "tokenize file"),
        ] {
            let redacted: Vec<_> = super::arguments(args.split(' ').map(str::as_bytes)).collect();
            assert_eq!(String::from_utf8_lossy(&redacted.join(&b' ')), expected);
        }
        for (arg, expected) in [
            (
                "cd / && API_KEY=hunter2 make; MYSQL_PWD=foo x",
                "cd / && API_KEY=[redacted] make; MYSQL_PWD=[redacted] x",
            ),
            (
                r#"{"token": "abc", "n": 1}"#,
                r#"{"token": [redacted], "n": 1}"#,
            ),
            (
                "curl --token abc https://x",
                "curl --token [redacted] https://x",
            ),
            ("--password=a\nb c", "--password=[redacted]"),
            ("tokenize --keep", "tokenize --keep"),
        ] {
            let redacted: Vec<_> = super::arguments([arg.as_bytes()].into_iter()).collect();
            assert_eq!(String::from_utf8_lossy(&redacted[0]), expected);
        }
        let header = [b"Authorization: Bearer abcdefgh".as_slice()];
        let redacted: Vec<_> = super::arguments(header.into_iter()).collect();
        assert_eq!(&*redacted[0], b"Authorization: Bearer [redacted]");
    }
}
