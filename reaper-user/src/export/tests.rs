//! The exact JSON and text line of each kind of event: `tests/golden.jsonl` and `tests/golden.txt`, in the order of `samples`.

mod samples;

use super::*;

/// Compares lines with a file, so that the first difference is shown with its number.
#[track_caller]
fn assert_golden(written: &[u8], golden: &str) {
    let written = String::from_utf8_lossy(written).replace(env!("CARGO_PKG_VERSION"), "VERSION");
    for (n, (line, expected)) in written.lines().zip(golden.lines()).enumerate() {
        assert_eq!(line, expected, "line {}", n + 1);
    }
    assert_eq!(written.lines().count(), golden.lines().count());
}

#[test]
fn json_lines_are_the_golden_ones() {
    let (clock, mut out) = (EventClock::fixed(), Vec::new());
    for (record, seq) in samples::records().iter().zip(1..) {
        json::write(&mut out, record, seq, &clock).unwrap();
    }
    assert_golden(&out, include_str!("tests/golden.jsonl"));
}

#[test]
fn text_lines_are_the_golden_ones() {
    let (clock, mut out) = (EventClock::fixed(), Vec::new());
    for record in samples::records() {
        line::write(&mut anstream::StripStream::new(&mut out), &record, &clock).unwrap();
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
