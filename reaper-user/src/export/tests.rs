//! The exact JSON and text line of each kind of event: `tests/golden.jsonl` and `tests/golden.txt`, in the order of `samples`.

pub(super) mod samples;

use jiff::Timestamp;
use regex::{Captures, Regex};

use super::*;
use reaper_host::sys::host::Host;

/// Compares lines with a golden file, which has the boot id `boot` and a boot at 2026-01-01.
#[track_caller]
fn assert_golden(written: &[u8], golden: &str) {
    let golden = golden
        .replace(
            "\"VERSION\"",
            concat!("\"", env!("CARGO_PKG_VERSION"), "\""),
        )
        .replace("\"boot-", &format!("\"{}-", Host::read().boot_id));
    let boot: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
    let since_boot = |time: &Captures<'_>| {
        let time: Timestamp = time[0].parse().unwrap();
        let since_boot = time.as_nanosecond() - boot.as_nanosecond();
        wall_time(since_boot.try_into().unwrap()).to_string()
    };
    let time = Regex::new("2026-01-01T[0-9:.]+Z").unwrap();
    let golden = time.replace_all(&golden, since_boot);
    let written = String::from_utf8_lossy(written);
    for (n, (line, expected)) in written.lines().zip(golden.lines()).enumerate() {
        assert_eq!(line, expected, "line {}", n + 1);
    }
    assert_eq!(written.lines().count(), golden.lines().count());
}

#[test]
fn json_lines_match_the_golden_file() {
    let mut out = Vec::new();
    for (record, seq) in samples::records().iter().zip(1..) {
        json::write(&mut out, record, seq).unwrap();
    }
    assert_golden(&out, include_str!("tests/golden.jsonl"));
}

#[test]
fn text_lines_match_the_golden_file() {
    let mut out = Vec::new();
    for detail in [Detail::Lifecycle, Detail::Summary] {
        out.extend(format!("# {detail:?}\n").bytes());
        let mut lines = line::LineWriter::new(detail);
        for record in samples::records() {
            let mut line = Vec::new();
            let mut plain = anstream::StripStream::new(&mut line);
            lines.write(&mut plain, &record, None).unwrap();
            for row in line.split_inclusive(|byte| *byte == b'\n') {
                let row = row.split_at(clock::time_of_day_in_seconds(0).len()).1;
                let digit = |byte: &u8| *byte == b'.' || byte.is_ascii_digit();
                let start = row.iter().position(|byte| !digit(byte)).unwrap();
                out.extend_from_slice(row[start..].trim_ascii_start());
            }
        }
    }
    assert_golden(&out, include_str!("tests/golden.txt"));
}

#[test]
fn json_escapes_controls_and_hidden_text() {
    let text = "\u{1b}\u{7f}\u{80}\u{9b}\u{ad}\u{200b}\u{2028}\u{202e}\u{2066}\u{feff}\u{e0041}é日";
    let line = String::from_utf8(to_json(&text)).unwrap();
    assert_eq!(
        line,
        "\"\\u001b\\u007f\\u0080\\u009b\\u00ad\\u200b\\u2028\\u202e\\u2066\\ufeff\\udb40\\udc41é日\"\n"
    );
    assert_eq!(serde_json::from_str::<String>(&line).unwrap(), text);
}
