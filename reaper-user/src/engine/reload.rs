//! Reloads the config without a restart. A thread reads it, and the engine applies all of it or nothing.

use std::sync::Arc;

use tokio::sync::oneshot;

use super::Engine;
use super::queue::Queued;
use crate::api::messages::{EngineReply, RefusedReload};
use crate::api::{ProblemDetails, StatusCode};
use crate::config::Config;
use crate::export::EventBody;
use crate::reap::Times;
use reaper_host::advice::Advised as _;
use reaper_host::kernel::ServiceState;
use reaper_model::ruleset::NameTable;

/// Config, with the name table for the probes that follows from it.
pub struct LoadedConfig {
    pub config: Config,
    pub names: NameTable,
}

/// Reads the config, which may block. The error has one line per problem.
pub type ConfigLoader = Arc<dyn Fn() -> Result<LoadedConfig, String> + Send + Sync>;

/// A config that is being read.
pub struct Reloading {
    read: oneshot::Receiver<Result<LoadedConfig, String>>,
    /// Recipient of the result.
    sender: oneshot::Sender<EngineReply>,
}

impl Engine {
    /// Starts to read the config again on another thread. The reply follows once the config is applied or refused.
    /// Refuses at once if a reload is already running or no thread can be started.
    pub(super) fn reload(&mut self, sender: oneshot::Sender<EngineReply>) {
        let refuse =
            |what: &str| EngineReply::Refused(ProblemDetails::new(StatusCode::CONFLICT, what));
        if self.reloading.is_some() {
            let _ = sender.send(refuse(
                "the config is already being reloaded; try again in a few seconds",
            ));
            return;
        }
        let load = Arc::clone(&self.settings.load);
        let (done, read) = oneshot::channel();
        let thread = std::thread::Builder::new().name("reload".into());
        match thread.spawn(move || drop(done.send(load()))) {
            Ok(_) => {
                self.reloading = Some(Reloading { read, sender });
                self.kernel.notifier.send(ServiceState::Reloading);
            }
            Err(error) => {
                let message = format!(
                    "cannot start a thread to read the config: {}; the old config stays in force",
                    error.advised_or("try again later")
                );
                let _ = sender.send(refuse(&message));
            }
        }
    }

    /// Waits for the config that is being read, forever if none is.
    pub(super) async fn reloaded(
        reloading: &mut Option<Reloading>,
    ) -> Result<LoadedConfig, String> {
        match reloading {
            Some(reloading) => (&mut reloading.read).await.unwrap_or_else(|_| {
                Err("the thread that reads the config has panicked; report this as a bug; the old config stays in force".into())
            }),
            None => std::future::pending().await,
        }
    }

    /// Applies the new config if valid. Reports the result in the stream and to the requester. Returns the number of
    /// records that were read meanwhile.
    pub(super) fn on_config_loaded(&mut self, loaded: Result<LoadedConfig, String>) -> u64 {
        let result = loaded.and_then(|loaded| self.change_rules(loaded));
        let (applied, message) = match &result {
            Ok(message) => (true, message.clone()),
            Err(message) => (false, message.clone()),
        };
        self.refused = result.as_ref().err().map(|error| RefusedReload {
            since: match &self.refused {
                Some(earlier) => earlier.since,
                None => self.kernel.clock.boot_time(),
            },
            error: error.clone(),
        });
        self.emit(EventBody::ConfigReload { applied, message });
        // The probes must use the new rules before the reload is reported as done.
        let read = self.settle();
        self.notify_ready();
        if let Some(Reloading { sender, .. }) = self.reloading.take() {
            // The client may have disconnected.
            let _ = sender.send(EngineReply::Reload(result));
        }
        read
    }

    /// Returns the config in force: of a reloaded one, only what does not wait for a restart.
    pub(super) fn config_in_force(&self) -> Config {
        let Config {
            grace,
            kill_timeout,
            honor_keep,
            defaults,
            rules,
            file,
            ..
        } = self.settings.config.clone();
        Config {
            grace,
            kill_timeout,
            honor_keep,
            defaults,
            rules,
            file,
            ..self.settings.running.clone()
        }
    }

    /// Applies a new config, and queues the members whose decision it may change. Returns a text for the user, which
    /// names the settings that wait for a restart.
    ///
    /// # Errors
    /// The config file is gone, or the probes cannot get the new names. The old rules stay in force.
    fn change_rules(
        &mut self,
        LoadedConfig { config, names }: LoadedConfig,
    ) -> Result<String, String> {
        if let (Some(path), false) = (&config.file.path, config.file.exists)
            && self.settings.config.file.exists
        {
            return Err(format!(
                "{path}: no such file, so the old config stays in force; restore the file, or restart the service to use the \
                 built-in settings"
            ));
        }
        // The probes must know which names are kept before members are evaluated by the new rules.
        let maps = self.source.maps_mut();
        let written = maps.map_or(Ok(()), |maps| maps.set_names(&names));
        written.map_err(|error| {
            format!("cannot give the probes the new names: {error}; the old rules stay in force")
        })?;
        let reader = (self.kernel.start_facts)(&config.rules);
        self.deferred.set_reader(reader);
        self.model.set_rules(config.rules.clone());
        let Config {
            grace,
            kill_timeout,
            ..
        } = config;
        self.ingest.reaper.set_times(Times {
            grace,
            kill_timeout,
        });
        // The old reader delivers no more answers, so its requests are repeated.
        self.ingest.new_images.extend(self.model.awaited());
        let living = self.model.rules.has_rules_for_living(false);
        for node in self.model.tree.iter() {
            let Some(session) = node.state.member.session else {
                continue;
            };
            self.ingest.map_changes.push(node.key);
            self.ingest.new_images.push(node.key);
            let due = || self.model.sessions.due(session).is_some();
            if living
                || self.model.has_rules_for_root(node.key)
                || node.orphaned.is_some()
                || self.ingest.decided.contains_key(&node.key)
                || due()
            {
                self.ingest.queued.push(Queued::Process(node.key));
            }
        }
        let restart = self.settings.running.restart_only_changes(&config);
        let rules = format!("{}: {}", config.file, config.summary());
        self.settings.config = config;
        Ok(match restart.as_slice() {
            [] => format!("{rules} are in force"),
            keys => format!(
                "{rules} are in force; these settings wait for a restart: {}",
                keys.join(", ")
            ),
        })
    }
}
