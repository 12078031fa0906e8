//! Helpers for the commands that run an engine: `daemon` and `demo`.

use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::Arc;

use tokio::signal::unix::{Signal, SignalKind, signal};

use super::Failure;
use crate::config::{Config, EventScope};
use crate::engine::{EngineSettings, Stop};
use crate::export::{Sink, StreamOutput, Writer};
use crate::reap::Times;
use reaper_host::kernel::Kernel;
use reaper_host::source::Source;
use reaper_host::source::kind::RejectedSource;
use reaper_host::source::probes::ProbeOptions;
use reaper_host::source::selection::{self, SourceOptions};
use reaper_host::sys;
use reaper_model::Scope;
use reaper_model::ruleset::NameTable;

/// Number of files that an engine needs before it tracks a process: probes, maps, sockets, journal and worker threads.
const FILES: usize = 80;

/// Raises the limit on open files, and checks that an engine can start with it.
///
/// # Errors
/// Not enough files can be opened.
pub(super) fn check_open_files() -> Result<(), Failure> {
    sys::raise_open_files();
    sys::check_free_files(FILES).map_err(Failure::system(&format!(
        "cannot open the {FILES} files that the service needs at least"
    )))
}

/// Returns the program names that the probes recognise: those of the rules, and this program.
///
/// This program is never signalled, even before it is registered.
pub(super) fn names(config: &Config) -> Result<NameTable, Failure> {
    let mut names = config.rules.names();
    // Ignored, because it only fails without /proc, and then opening the source reports more.
    if let Ok(program) = std::env::current_exe() {
        names.add_keep(program.file_name().unwrap_or_default().as_bytes());
    }
    Ok(names)
}

/// Opens the source that the config selects. Returns the rejected sources too, and logs them.
pub(super) fn open_source(
    config: &Config,
    options: &ProbeOptions,
) -> Result<(Box<dyn Source + Send>, Vec<RejectedSource>), Failure> {
    let wanted = SourceOptions {
        probes: options,
        names: &names(config)?,
        scan: config.scan(),
    };
    let (source, rejected) = selection::open(config.source, &wanted)?;
    for reason in &rejected {
        tracing::warn!("{reason}");
    }
    Ok((source, rejected))
}

/// Returns the options of the probes by the config, without pins.
pub(super) fn options(config: &Config, scope: &Scope) -> ProbeOptions {
    ProbeOptions {
        ring_size: config.ring_size,
        max_members: config.max_members,
        // Only the service can tell which processes run in a cgroup of the scope, so it needs all events.
        filter: config.events == EventScope::Agents && scope.cgroups.is_empty(),
        scoped: !scope.roots.is_empty() && scope.cgroups.is_empty(),
        kernel_reap: config.may_kernel_reap(),
        ..ProbeOptions::default()
    }
}

/// Returns the settings of the engine by the config, without reload and without stored keeps.
pub(super) fn settings(config: Config, scope: Scope, scope_names: Vec<String>) -> EngineSettings {
    let kernel_reap = config.may_kernel_reap();
    let Config {
        mode,
        events,
        grace,
        kill_timeout,
        ..
    } = config;
    let cgroups = scope_names.iter().filter(|name| name.starts_with('/'));
    let cgroups = cgroups.map(PathBuf::from).collect();
    EngineSettings {
        mode,
        mode_reason: None,
        events,
        scope,
        scope_names,
        cgroups,
        times: Times {
            grace,
            kill_timeout,
        },
        leave_pinned: false,
        rejected_sources: Vec::new(),
        kernel_reap,
        running: config.clone(),
        config,
        load: Arc::new(|| Err("this program has no config file to reload".into())),
        keeps: Vec::new(),
        keep_store: None,
        socket: None,
        next_command: None,
    }
}

/// Creates the [`Kernel`], by which the engine reads processes and sends signals.
pub(super) fn kernel(settings: &EngineSettings) -> Result<Kernel, Failure> {
    let config = &settings.running;
    Kernel::open(config.ring_size, config.scan())
        .map_err(Failure::system("cannot watch process exits"))
}

/// Runs `work` with a writer of the event stream. Then waits until all records are written, at most for 2 s.
pub(super) fn with_writer<T>(
    outputs: Vec<StreamOutput>,
    work: impl FnOnce(Sink) -> Result<T, Failure>,
) -> Result<T, Failure> {
    let started = Writer::start(outputs);
    let failed = Failure::system("cannot start the thread that writes the event stream");
    let (sink, writer) = started.map_err(failed)?;
    let result = work(sink);
    writer.join();
    result
}

/// Runs the engine's work on its own thread, which has raised priority, and returns its result.
pub(super) fn in_thread<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    let work = move || {
        sys::raise_priority();
        work()
    };
    let thread = std::thread::Builder::new()
        .name("engine".into())
        .spawn(work)
        .map_err(Failure::system("cannot start the thread of the engine"))?;
    thread.join().unwrap_or_else(|_| {
        let what = "the engine, which tracks and reaps processes, has panicked; restart it, and report this as a bug";
        Err(anyhow::anyhow!(what).into())
    })
}

/// Creates the engine's runtime, which has a single thread.
pub(super) fn runtime() -> Result<tokio::runtime::Runtime, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    runtime.map_err(Failure::system("cannot start the event loop of the engine"))
}

/// Returns a future that resolves when a signal stops the service.
///
/// SIGINT and SIGTERM do, with `at_hangup` also SIGHUP. SIGUSR2 also does, and hands over to the next service. A second
/// signal stops the service at once.
pub(super) fn stop_signals(at_hangup: bool) -> Result<impl Future<Output = Stop>, Failure> {
    let mut signals = StopSignals::catch(at_hangup)?;
    Ok(async move {
        let (reason, hands_over) = signals.next().await;
        Stop {
            reason,
            hands_over,
            at_once: Box::pin(async move {
                signals.next().await;
            }),
        }
    })
}

/// Caught signals that stop the service.
struct StopSignals {
    interrupt: Signal,
    terminate: Signal,
    hangup: Signal,
    hand_over: Signal,
    /// Whether SIGHUP stops the service.
    at_hangup: bool,
}

impl StopSignals {
    fn catch(at_hangup: bool) -> Result<StopSignals, Failure> {
        let catch = |kind, name: &str| {
            signal(kind).map_err(Failure::system(&format!("cannot catch {name}")))
        };
        Ok(StopSignals {
            interrupt: catch(SignalKind::interrupt(), "SIGINT")?,
            terminate: catch(SignalKind::terminate(), "SIGTERM")?,
            hangup: catch(SignalKind::hangup(), "SIGHUP")?,
            hand_over: catch(SignalKind::user_defined2(), "SIGUSR2")?,
            at_hangup,
        })
    }

    /// Waits for a signal. Returns its name, and whether it hands over to the next service.
    async fn next(&mut self) -> (&'static str, bool) {
        tokio::select! {
            _ = self.interrupt.recv() => ("SIGINT", false),
            _ = self.terminate.recv() => ("SIGTERM", false),
            _ = self.hangup.recv(), if self.at_hangup => ("SIGHUP", false),
            _ = self.hand_over.recv() => ("SIGUSR2", true),
        }
    }
}
