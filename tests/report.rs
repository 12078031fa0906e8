//! What is printed of a test that failed, in one piece: its message, what it was about, and how to run it again.

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind};

use libtest_mimic::Failed;

thread_local! {
    /// Whether this thread runs a test, of which everything is reported together.
    static TESTING: Cell<bool> = const { Cell::new(false) };
    static REPORT: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

/// Has panics of tests be part of their report, instead of lines among those of other tests.
pub fn collect_panics() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if TESTING.get() {
            add(&message(panic));
        } else {
            usual(panic);
        }
    }));
}

/// Adds a section to the report of the test that this thread runs; elsewhere prints it.
pub fn add(section: &str) {
    if TESTING.get() {
        REPORT.with_borrow_mut(|report| report.push(section.trim_end().to_owned()));
    } else {
        eprintln!("{section}");
    }
}

/// Runs a test. If it panics, returns its report.
pub fn of(name: &str, test: impl FnOnce()) -> Result<(), Failed> {
    TESTING.set(true);
    let ended = catch_unwind(AssertUnwindSafe(test));
    TESTING.set(false);
    let sections = REPORT.take();
    ended.map_err(|_| {
        let again = format!("--- to run it again: cargo xtask test {name}");
        let all: Vec<_> = sections.into_iter().chain([again]).collect();
        Failed::from(all.join("\n"))
    })
}

fn message(panic: &PanicHookInfo<'_>) -> String {
    let place = panic.location().map(ToString::to_string);
    let text = panic.payload_as_str().unwrap_or("no message");
    let mut message = format!("{}: {text}", place.unwrap_or_default());
    if std::env::var_os("RUST_BACKTRACE").is_some_and(|wanted| wanted == "full") {
        message += &format!("\n{}", std::backtrace::Backtrace::force_capture());
    }
    message
}
