//! Running an engine, for all commands that do.

use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context;
use tokio::signal::unix::{SignalKind, signal};

use super::Failure;
use crate::config::{Config, EventScope};
use crate::engine::EngineSettings;
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

/// The names that the probes are to know: of the rules, and of this program, which nobody signals, not
/// even before it has said that it is there.
pub(super) fn names(config: &Config) -> Result<NameTable, Failure> {
    let mut names = config.rules.names();
    // It is told by /proc, without which no source can be used: that says more.
    if let Ok(program) = std::env::current_exe() {
        names.add_keep(program.file_name().unwrap_or_default().as_bytes());
    }
    Ok(names)
}

/// Opens the source that the config asks for, and says which better ones could not be used.
pub(super) fn open_source(
    config: &Config,
    options: &ProbeOptions,
) -> Result<(Box<dyn Source + Send>, Vec<RejectedSource>), Failure> {
    let wanted = SourceOptions {
        probes: options,
        names: &names(config)?,
        scan: config.scan(),
    };
    let (source, passed_over) = selection::open(config.source, &wanted)?;
    for passed in &passed_over {
        tracing::warn!("{passed}");
    }
    Ok((source, passed_over))
}

/// What the config says, for the probes. Nothing is pinned.
pub(super) fn options(config: &Config, scope: &Scope) -> ProbeOptions {
    ProbeOptions {
        ring_size: config.ring_size,
        max_members: config.max_members,
        // Who runs in a cgroup of the scope, only the service can tell: it has to hear of everybody.
        filter: config.events == EventScope::Agents && scope.cgroups.is_empty(),
        scoped: !scope.roots.is_empty() && scope.cgroups.is_empty(),
        kernel_reap: config.may_kernel_reap(),
        ..ProbeOptions::default()
    }
}

/// What the config says, for the engine. It is not read anew, and nothing is kept for longer than the engine runs.
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
        load: Arc::new(|| Err("started without a config file: there is none to read anew".into())),
        keeps: Vec::new(),
        keep_store: None,
    }
}

/// Opens the real kernel.
pub(super) fn kernel(settings: &EngineSettings) -> Result<Kernel, Failure> {
    let config = &settings.running;
    let kernel = Kernel::open(config.ring_size, config.scan());
    Ok(kernel.context("cannot wait for exits of processes")?)
}

/// Runs with a writer of the event stream, and waits until it has written all.
pub(super) fn with_writer<T>(
    outputs: Vec<StreamOutput>,
    work: impl FnOnce(Sink) -> Result<T, Failure>,
) -> Result<T, Failure> {
    let (sink, writer) =
        Writer::start(outputs).context("cannot start the event stream's writer")?;
    let result = work(sink);
    writer.join();
    result
}

/// Runs the engine's work in a thread of its own, before ordinary ones.
pub(super) fn in_thread<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    let work = move || {
        sys::prioritise();
        sys::raise_open_files();
        work()
    };
    let thread = std::thread::Builder::new()
        .name("engine".into())
        .spawn(work)
        .context("cannot start a thread")?;
    thread
        .join()
        .unwrap_or_else(|_| Err(anyhow::anyhow!("the engine has panicked; this is a bug").into()))
}

/// A runtime for the engine: one thread, which sleeps when nothing happens.
pub(super) fn runtime() -> Result<tokio::runtime::Runtime, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    Ok(runtime.context("cannot start the engine's runtime")?)
}

/// Done at SIGINT or SIGTERM, and at SIGHUP if that is wanted, with its name.
pub(super) fn stop_signal(at_hangup: bool) -> Result<impl Future<Output = &'static str>, Failure> {
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot catch SIGINT")?;
    let mut terminate = signal(SignalKind::terminate()).context("cannot catch SIGTERM")?;
    let mut hangup = signal(SignalKind::hangup()).context("cannot catch SIGHUP")?;
    Ok(async move {
        tokio::select! {
            _ = interrupt.recv() => "SIGINT",
            _ = terminate.recv() => "SIGTERM",
            _ = hangup.recv(), if at_hangup => "SIGHUP",
        }
    })
}
