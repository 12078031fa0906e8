//! A process that records the signals that it receives.

use std::fs::OpenOptions;
use std::io::Write;
use std::time::Duration;

use nix::libc;
use nix::sys::signal::{SigSet, SigmaskHow, sigprocmask};

use super::context::{ProcessContext, leave};

/// Writes the number of each signal that it receives to `DIR/recorded`. Exits when no signal has come for 50 ms after
/// SIGTERM.
pub fn recorder(s: &ProcessContext) -> ! {
    let all = SigSet::all();
    sigprocmask(SigmaskHow::SIG_SETMASK, Some(&all), None).expect("block all signals");
    s.report();
    let mut file = OpenOptions::new();
    let mut file = file
        .append(true)
        .create(true)
        .open(s.dir.join("recorded"))
        .expect("open the record");
    let mut terminated = false;
    loop {
        let wait = if terminated {
            Duration::from_millis(50)
        } else {
            Duration::from_secs(100)
        };
        let wait = libc::timespec {
            tv_sec: wait.as_secs() as i64,
            tv_nsec: i64::from(wait.subsec_nanos()),
        };
        // SAFETY: the set and the timeout are valid, and a null pointer for the details is allowed.
        let number = unsafe { libc::sigtimedwait(all.as_ref(), std::ptr::null_mut(), &wait) };
        match number {
            1.. => writeln!(file, "{number}").expect("write the record"),
            _ => leave(i32::from(!terminated)),
        }
        terminated |= number == libc::SIGTERM;
    }
}
