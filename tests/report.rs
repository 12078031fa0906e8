//! Report of a failed test, printed in one piece: its message, its context and the command that runs it again.

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind};

use libtest_mimic::Failed;

thread_local! {
    /// Whether this thread runs a test, whose sections are collected.
    static TESTING: Cell<bool> = const { Cell::new(false) };
    static REPORT: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

/// Adds the panic messages of tests to their reports, so that they do not mix with the output of other tests.
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

/// Adds a section to the report of this thread's test. Prints it if the thread runs none.
pub fn add(section: &str) {
    if TESTING.get() {
        REPORT.with_borrow_mut(|report| report.push(section.trim_end().to_owned()));
    } else {
        eprintln!("{section}");
    }
}

/// Runs a test.
///
/// # Errors
/// The report of the test, if it panics.
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
