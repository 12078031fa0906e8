//! `reaper daemon`.

use std::path::{Path, PathBuf};

use anyhow::Context;
use tokio::signal::unix::{SignalKind, signal};

use super::{DaemonArgs, Failure, lock, scope};
use crate::config::{Config, EventScope, Mode};
use crate::engine::{Engine, Settings};
use crate::export::{Clock, Format, Output, Sink, Writer};
use crate::model::Scope;
use crate::model::agent::Ruleset;
use crate::reap::Times;
use crate::source::ebpf::{Options, Source};
use crate::sys;

pub(super) fn run(args: DaemonArgs) -> Result<(), Failure> {
    let mut config = match &args.config {
        Some(path) => Config::load(path)?,
        None => Config::default(),
    };
    if args.observe {
        config.mode = Mode::Observe;
    } else if args.enforce {
        config.mode = Mode::Enforce;
    }
    let scope = scope::parse(&args.scope)?;
    let outputs = outputs(
        args.events.as_deref(),
        args.json,
        config.events == EventScope::All,
    )?;
    let directory = args.runtime_dir.as_deref().unwrap_or(&config.runtime_dir);
    let options = Options {
        ring_size: config.ring_size,
        log: args.bpf_log,
        object: args.bpf_object.clone(),
    };
    let source = Source::open(&options)?;
    let _lock = lock::take(directory, &args.scope)?;
    if config.mode == Mode::Enforce {
        warn_of_missing(&sys::host::Host::read());
    }
    let settings = settings(config, scope, args.scope.clone());
    with_writer(outputs, |sink| {
        in_thread(move || watch(source, settings, sink, args.bpf_log))
    })
}

impl From<crate::source::ebpf::SourceError> for Failure {
    fn from(error: crate::source::ebpf::SourceError) -> Failure {
        Failure::Probes(error)
    }
}

/// Says what reaping lacks that watching does not need.
fn warn_of_missing(host: &sys::host::Host) {
    for (capability, without) in [
        ("CAP_KILL", "processes of other users cannot be signalled"),
        (
            "CAP_SYS_PTRACE",
            "what other users' processes run cannot be read, and such processes are kept",
        ),
    ] {
        if !host.capabilities.has(capability) {
            tracing::warn!("without {capability} {without}");
        }
    }
}

/// What the config says, for the engine.
pub(super) fn settings(config: Config, scope: Scope, scope_names: Vec<String>) -> Settings {
    let Config {
        mode,
        events,
        grace,
        stuck_after,
        rules,
        ..
    } = config;
    let rules: Ruleset = rules;
    let cgroups = scope_names.iter().filter(|name| name.starts_with('/'));
    let cgroups = cgroups.map(PathBuf::from).collect();
    Settings {
        mode,
        events,
        scope,
        scope_names,
        cgroups,
        times: Times { grace, stuck_after },
        rules,
    }
}

fn outputs(events: Option<&Path>, json: bool, lifecycle: bool) -> Result<Vec<Output>, Failure> {
    let to_stdout = events.is_some_and(|path| path.as_os_str() == "-");
    let format = if json || to_stdout {
        Format::Json
    } else {
        Format::Lines { lifecycle }
    };
    let mut outputs = vec![Output::stdout(format)];
    if let Some(path) = events.filter(|_| !to_stdout) {
        let file = Output::file(path).map_err(|error| {
            Failure::Usage(format!(
                "cannot write events to {}: {error}",
                path.display()
            ))
        })?;
        outputs.push(file);
    }
    Ok(outputs)
}

/// Runs with a writer of the event stream, and waits until it has written all.
pub(super) fn with_writer<T>(
    outputs: Vec<Output>,
    work: impl FnOnce(Sink) -> Result<T, Failure>,
) -> Result<T, Failure> {
    let clock = Clock::new(sys::host::Host::read().boot_id);
    let (sink, writer) =
        Writer::start(outputs, clock).context("cannot start the event stream's writer")?;
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

fn watch(mut source: Source, settings: Settings, sink: Sink, log: bool) -> Result<(), Failure> {
    runtime()?.block_on(async {
        let stop = stop_signal()?;
        if log {
            let mut logger = source.logger()?;
            let ready =
                sys::readable(&logger).context("cannot wait for the probes' diagnostics")?;
            tokio::spawn(async move {
                while let Ok(mut guard) = ready.readable().await {
                    guard.clear_ready();
                    logger.flush();
                }
            });
        }
        Engine::start(source, settings, sink)?.run(stop).await?;
        Ok(())
    })
}

/// Done at SIGINT, SIGTERM or SIGHUP, with its name.
pub(super) fn stop_signal() -> Result<impl Future<Output = &'static str>, Failure> {
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot catch SIGINT")?;
    let mut terminate = signal(SignalKind::terminate()).context("cannot catch SIGTERM")?;
    let mut hangup = signal(SignalKind::hangup()).context("cannot catch SIGHUP")?;
    Ok(async move {
        tokio::select! {
            _ = interrupt.recv() => "SIGINT",
            _ = terminate.recv() => "SIGTERM",
            _ = hangup.recv() => "SIGHUP",
        }
    })
}
