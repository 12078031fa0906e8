//! Other rules, while all goes on: the config is read by a thread of its own, and what it says is taken over at
//! once or not at all.

use std::sync::Arc;

use tokio::sync::oneshot;

use super::Engine;
use super::ingest::Queued;
use crate::api::ErrorResponse;
use crate::api::messages::EngineReply;
use crate::config::Config;
use crate::export::EventBody;
use crate::reap::Times;
use reaper_model::ruleset::NameTable;

/// Settings, and the names for the probes that follow from them.
pub struct LoadedConfig {
    pub config: Config,
    pub names: NameTable,
}

/// Reads the config, and blocks for that; or says what is wrong with it, a line for each problem.
pub type ConfigLoader = Arc<dyn Fn() -> Result<LoadedConfig, String> + Send + Sync>;

/// A config that is being read.
pub struct Reloading {
    read: oneshot::Receiver<Result<LoadedConfig, String>>,
    /// Who is to be told what came of it.
    answer: oneshot::Sender<EngineReply>,
}

impl Engine {
    /// Begins to read the config anew.
    pub(super) fn reload(&mut self, answer: oneshot::Sender<EngineReply>) {
        let refuse = |what: &str| EngineReply::Refused(ErrorResponse::new("conflict", what));
        if self.reloading.is_some() {
            let _ = answer.send(refuse("the config is being read already"));
            return;
        }
        let load = Arc::clone(&self.settings.load);
        let (done, read) = oneshot::channel();
        let thread = std::thread::Builder::new().name("reload".into());
        match thread.spawn(move || drop(done.send(load()))) {
            Ok(_) => self.reloading = Some(Reloading { read, answer }),
            Err(error) => {
                let what = format!("cannot start a thread to read the config: {error}");
                let _ = answer.send(refuse(&what));
            }
        }
    }

    /// Waits for the config that is being read, if one is.
    pub(super) async fn reloaded(
        reloading: &mut Option<Reloading>,
    ) -> Result<LoadedConfig, String> {
        match reloading {
            Some(reloading) => (&mut reloading.read)
                .await
                .unwrap_or_else(|_| Err("reading the config has failed; this is a bug".into())),
            None => std::future::pending().await,
        }
    }

    /// Takes over what the config says now, if it is fit for that, and tells so. Gives how many records were read
    /// for that.
    pub(super) fn on_config_loaded(&mut self, loaded: Result<LoadedConfig, String>) -> u64 {
        let said = loaded.and_then(|loaded| self.change_rules(loaded));
        let (done, message) = match &said {
            Ok(message) => (true, message.clone()),
            Err(message) => (false, message.clone()),
        };
        self.emit(EventBody::ConfigReload { done, message });
        // The probes go by the new rules before it is said to be done.
        let read = self.settle();
        if let Some(Reloading { answer, .. }) = self.reloading.take() {
            // Whoever has asked may have gone.
            let _ = answer.send(EngineReply::Reload(said));
        }
        read
    }

    fn change_rules(
        &mut self,
        LoadedConfig { config, names }: LoadedConfig,
    ) -> Result<String, String> {
        let unchanged = |what: String| format!("{what}; the rules are what they were");
        let reader = (self.kernel.start_facts)(&config.rules);
        let reader =
            reader.map_err(|error| unchanged(format!("cannot start a thread: {error}")))?;
        // The probes know of what may be kept before anybody is judged by it.
        let maps = self.source.maps_mut();
        let told = maps.map_or(Ok(()), |maps| maps.set_names(&names));
        told.map_err(|error| unchanged(error.to_string()))?;
        self.deferred.read_by(reader);
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
        // The reader that was asked before answers no more.
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
        let rules = config.summary();
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
