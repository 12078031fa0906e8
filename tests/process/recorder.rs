//! Whoever wants to know of each signal.

use std::fs::OpenOptions;
use std::io::Write;
use std::time::Duration;

use nix::libc;
use nix::sys::signal::{SigSet, SigmaskHow, sigprocmask};

use super::context::{ProcessContext, leave};

/// Writes the number of each signal that it is sent to `DIR/recorded`, up to SIGTERM and what has come by then.
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
    let mut over = false;
    loop {
        let wait = if over {
            Duration::from_millis(50)
        } else {
            Duration::from_secs(100)
        };
        let wait = libc::timespec {
            tv_sec: wait.as_secs() as i64,
            tv_nsec: i64::from(wait.subsec_nanos()),
        };
        // SAFETY: the set and the time are what is meant, and nobody wants to know more than the number.
        let number = unsafe { libc::sigtimedwait(all.as_ref(), std::ptr::null_mut(), &wait) };
        match number {
            1.. => writeln!(file, "{number}").expect("write the record"),
            _ => leave(i32::from(!over)),
        }
        over |= number == libc::SIGTERM;
    }
}
