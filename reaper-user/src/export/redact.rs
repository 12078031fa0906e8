//! Secrets in command lines are not passed on.

use std::borrow::Cow;
use std::sync::LazyLock;

use regex::bytes::Regex;

/// What stands in a secret's place.
const MARK: &[u8] = b"[redacted]";

/// `--token=…`, `API_KEY=…`, `password:…`: the value goes.
static NAMED: LazyLock<Regex> = LazyLock::new(|| {
    regex(
        r"(?is-u)^(-{0,2}[\w.-]*(?:token|secret|passwd|password|api[_-]?key|access[_-]?key|credentials?)[=:]\s*)\S.*$",
    )
});
/// `--token …`: the argument that follows goes.
static OPTION: LazyLock<Regex> = LazyLock::new(|| {
    regex(r"(?is-u)^--?[\w.-]*(?:token|secret|passwd|password|api[_-]?key|access[_-]?key)$")
});
/// What is a secret by its looks, anywhere.
static SHAPED: LazyLock<Regex> = LazyLock::new(|| {
    regex(concat!(
        r"(?i-u:(authorization:\s*\w+\s+|bearer\s+)[\w.~+/=-]{8,})",
        r"|()(?-u:sk-[\w-]{16,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|xox[abprs]-[\w-]{10,}|AKIA[0-9A-Z]{16}|glpat-[\w-]{16,})",
        r"|(?-u:(://[^/\s:@]+:)[^/\s@]+)",
    ))
});

fn regex(pattern: &str) -> Regex {
    Regex::new(pattern).expect("a pattern of this file, which its tests compile")
}

/// The arguments with their secrets taken out.
pub fn arguments<'a>(args: impl Iterator<Item = &'a [u8]>) -> impl Iterator<Item = Cow<'a, [u8]>> {
    let mut secret_follows = false;
    args.map(move |arg| {
        if std::mem::replace(&mut secret_follows, OPTION.is_match(arg)) && !arg.starts_with(b"-") {
            return Cow::Borrowed(MARK);
        }
        match NAMED.replace(arg, [b"${1}".as_slice(), MARK].concat()) {
            Cow::Borrowed(arg) => {
                SHAPED.replace_all(arg, [b"${1}${2}${3}".as_slice(), MARK].concat())
            }
            redacted => redacted,
        }
    })
}

#[cfg(test)]
mod tests {
    #[test]
    fn secrets_go_and_the_rest_stays() {
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
            ("node server.js --port 80", "node server.js --port 80"),
            ("tokenize file", "tokenize file"),
        ] {
            let redacted: Vec<_> = super::arguments(args.split(' ').map(str::as_bytes)).collect();
            assert_eq!(String::from_utf8_lossy(&redacted.join(&b' ')), expected);
        }
        let header = [b"Authorization: Bearer abcdefgh".as_slice()];
        let redacted: Vec<_> = super::arguments(header.into_iter()).collect();
        assert_eq!(&*redacted[0], b"Authorization: Bearer [redacted]");
    }
}
