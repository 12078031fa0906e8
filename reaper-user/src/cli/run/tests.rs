use super::*;

#[test]
fn times_are_typed_as_for_timeout_or_in_words() {
    assert_eq!(time("5"), Ok(Duration::from_secs(5)));
    assert_eq!(time("0"), Ok(Duration::ZERO));
    assert_eq!(time("45min"), Ok(Duration::from_secs(45 * 60)));
    assert_eq!(time("1h 30m"), Ok(Duration::from_secs(5400)));
    for wrong in [
        "",
        "-1",
        "1.5",
        "soon",
        "99999999999999999999",
        "1 fortnight",
    ] {
        assert!(time(wrong).is_err(), "{wrong}");
    }
    assert!(limit("0s").is_err());
}

#[test]
fn signals_are_typed_as_for_kill() {
    for typed in ["TERM", "term", "SIGTERM", "15"] {
        assert_eq!(signal(typed), Ok(Signal::SIGTERM));
    }
    for wrong in ["", "0", "99", "-9", "SIGSIGTERM", "STOPPED"] {
        assert!(signal(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn nobody_loses_everything() {
    for wrong in ["/", "//", "/.."] {
        assert!(removable(wrong).is_err(), "{wrong}");
    }
    let home = std::env::var("HOME").unwrap();
    assert!(removable(&home).is_err());
    assert_eq!(
        removable("/tmp/some/where"),
        Ok(PathBuf::from("/tmp/some/where"))
    );
}
