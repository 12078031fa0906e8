//! Classifies the signals that `reaper run` receives.

use nix::libc;
use nix::sys::signal::Signal;
use nix::unistd::{getpid, getsid};

use reaper_host::sys::child;

/// `si_code` of a signal that the kernel sent, for example for the terminal (`SI_KERNEL`).
const BY_KERNEL: i32 = 0x80;

/// A signal that was read from the signalfd.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReceivedSignal {
    number: i32,
    by_kernel: bool,
}

impl ReceivedSignal {
    pub(super) fn of(info: &libc::signalfd_siginfo) -> ReceivedSignal {
        ReceivedSignal {
            number: info.ssi_signo.cast_signed(),
            by_kernel: info.ssi_code == BY_KERNEL,
        }
    }

    pub(super) fn number(self) -> i32 {
        self.number
    }

    /// Returns whether it reports a change of a child.
    pub(super) fn is_of_child(self) -> bool {
        self.number == Signal::SIGCHLD as i32
    }

    /// Returns whether the terminal sent it to the whole process group of this process.
    ///
    /// A hangup sends SIGHUP and SIGCONT to the session leader alone. The kernel sends other signals, such as SIGALRM,
    /// to one process.
    pub(super) fn sent_to_group(self) -> bool {
        let to_leader = getsid(None) == Ok(getpid());
        let by_terminal = match Signal::try_from(self.number) {
            Ok(Signal::SIGHUP | Signal::SIGCONT) => !to_leader,
            Ok(Signal::SIGINT | Signal::SIGQUIT | Signal::SIGWINCH) => true,
            Ok(Signal::SIGTSTP | Signal::SIGTTIN | Signal::SIGTTOU) => true,
            _ => false,
        };
        self.by_kernel && by_terminal
    }

    /// Returns whether its sender wants the run to end: whether it is one of [`child::TERMINATION_SIGNALS`].
    pub(super) fn requests_termination(&self) -> bool {
        child::TERMINATION_SIGNALS
            .iter()
            .any(|signal| *signal as i32 == self.number)
    }
}
