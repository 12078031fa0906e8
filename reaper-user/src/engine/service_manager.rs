//! Informs the service manager: ready, reloading, alive, stopping.

use super::Engine;
use crate::api::peer::Peer;
use reaper_host::kernel::ServiceState;
use reaper_host::sys;

/// State of the messages to the service manager.
#[derive(Default)]
pub(super) struct ServiceMessages {
    /// Time of the next [`ServiceState::Alive`], in ns of CLOCK_MONOTONIC. `None` without a watchdog.
    pub(super) next_alive: Option<u64>,
    /// Last status that was sent.
    status: String,
}

impl Engine {
    /// Sends that the service is ready, at the start and after a reload.
    pub(super) fn notify_ready(&mut self) {
        let status = self.status_line();
        self.service_messages.status.clone_from(&status);
        self.kernel.notifier.send(ServiceState::Ready(status));
        self.service_messages.next_alive = self.next_alive();
    }

    /// Sends the status, if there is a service manager and the status has changed.
    pub(super) fn notify_status(&mut self) {
        if !self.kernel.notifier.is_connected() {
            return;
        }
        let status = self.status_line();
        if status != self.service_messages.status {
            self.service_messages.status.clone_from(&status);
            self.kernel.notifier.send(ServiceState::Status(status));
        }
    }

    /// Sends that the engine's loop runs, if the service manager expects that by now.
    pub(super) fn notify_alive(&mut self) {
        let now = self.kernel.clock.monotonic();
        if self.service_messages.next_alive.is_some_and(|at| at <= now) {
            self.kernel.notifier.send(ServiceState::Alive);
            self.service_messages.next_alive = self.next_alive();
            self.notify_status();
        }
    }

    /// Sends that the service stops.
    pub(super) fn notify_stopping(&self, reason: &str) {
        let open = match self.ingest.reaper.open_escalations() {
            0 => String::new(),
            _ => ": ends the processes that have been signalled".into(),
        };
        let text = format!("Stopping ({reason}){open}");
        self.kernel.notifier.send(ServiceState::Stopping(text));
    }

    /// Returns the time of the next [`ServiceState::Alive`], in ns of CLOCK_MONOTONIC: half of the watchdog's interval
    /// from now.
    fn next_alive(&self) -> Option<u64> {
        let interval = self.kernel.notifier.watchdog()?;
        let now = self.kernel.clock.monotonic();
        Some(now.saturating_add(sys::nanoseconds(interval / 2)))
    }

    /// Returns what the service has done, for the service manager.
    fn status_line(&self) -> String {
        self.status_for(Peer { uid: 0 }).summary()
    }
}
