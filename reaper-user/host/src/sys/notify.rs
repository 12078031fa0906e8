//! Messages to the service manager that has started this program (sd_notify(3)).

use std::time::Duration;

/// State that the service manager learns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServiceState {
    /// The service works, after a start or a reload. The text says what it does.
    Ready(String),
    /// The service reads its config again.
    Reloading,
    /// The service works. The text says what it has done.
    Status(String),
    /// The engine's loop runs: the watchdog must not restart the service.
    Alive,
    /// The service stops. The text says what it waits for.
    Stopping(String),
}

/// Sender of messages to the service manager. Without one, it sends nothing.
///
/// A thread sends them, because the service manager may be too slow to receive them.
#[derive(Default)]
pub struct Notifier {
    #[cfg(target_os = "linux")]
    states: Option<std::sync::mpsc::SyncSender<ServiceState>>,
    watchdog: Option<Duration>,
}

impl Notifier {
    /// Returns whether there is a service manager.
    pub fn is_connected(&self) -> bool {
        #[cfg(target_os = "linux")]
        return self.states.is_some();
        #[cfg(target_os = "macos")]
        false
    }

    /// Returns the interval after which the service manager restarts the service if it gets no
    /// [`ServiceState::Alive`]. `None` if it does not watch the service.
    pub fn watchdog(&self) -> Option<Duration> {
        self.watchdog
    }

    /// Sends a state, unless 16 others wait to be sent.
    pub fn send(&self, state: ServiceState) {
        #[cfg(target_os = "linux")]
        if let Some(states) = &self.states
            && let Err(error) = states.try_send(state)
        {
            tracing::debug!("cannot pass a message to the service manager: {error}");
        }
        #[cfg(target_os = "macos")]
        let _ = state;
    }
}

#[cfg(target_os = "linux")]
mod systemd {
    use std::io;
    use std::sync::mpsc::{Receiver, sync_channel};

    use sd_notify::NotifyState;

    use super::{Duration, Notifier, ServiceState};

    /// Maximum number of messages that wait to be sent.
    const QUEUED_MAX: usize = 16;

    impl Notifier {
        /// Returns a sender to the service manager that `NOTIFY_SOCKET` names, if it is set.
        ///
        /// # Errors
        /// The thread that sends cannot be started.
        pub fn connect() -> io::Result<Notifier> {
            if std::env::var_os("NOTIFY_SOCKET").is_none() {
                return Ok(Notifier::default());
            }
            let (notifier, states) = Notifier::channel(sd_notify::watchdog_enabled());
            let thread = std::thread::Builder::new().name("notify".into());
            thread.spawn(move || states.iter().for_each(|state| send(&state)))?;
            Ok(notifier)
        }

        /// Returns a sender, and the receiver of what it sends.
        pub fn channel(watchdog: Option<Duration>) -> (Notifier, Receiver<ServiceState>) {
            let (sender, receiver) = sync_channel(QUEUED_MAX);
            let states = Some(sender);
            (Notifier { states, watchdog }, receiver)
        }
    }

    /// Sends one message. Only logs a failure: the service works without a service manager.
    fn send(state: &ServiceState) {
        use NotifyState::{Ready, Reloading, Status, Stopping, Watchdog};
        let sent = match state {
            ServiceState::Ready(text) => sd_notify::notify(&[Ready, Status(text)]),
            // `Type=notify-reload` needs the time.
            ServiceState::Reloading => NotifyState::monotonic_usec_now()
                .and_then(|now| sd_notify::notify(&[Reloading, now])),
            ServiceState::Status(text) => sd_notify::notify(&[Status(text)]),
            ServiceState::Alive => sd_notify::notify(&[Watchdog]),
            ServiceState::Stopping(text) => sd_notify::notify(&[Stopping, Status(text)]),
        };
        if let Err(error) = sent {
            tracing::warn!("cannot send a message to the service manager: {error}");
        }
    }
}

#[cfg(target_os = "macos")]
impl Notifier {
    /// Returns a sender that sends nothing: launchd expects no messages.
    ///
    /// # Errors
    /// Never.
    pub fn connect() -> std::io::Result<Notifier> {
        Ok(Notifier::default())
    }
}
