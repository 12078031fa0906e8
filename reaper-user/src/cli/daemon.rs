//! `reaper daemon`.

use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context;
use clap::Args;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, oneshot};

use super::engine::{
    in_thread, kernel, names, open_source, options, runtime, settings, stop_signal, with_writer,
};
use super::{Failure, absolute, load, lock, scope, user};
use crate::api::messages::{EngineRequest, RequestKind};
use crate::api::peer::Peer;
use crate::api::server::{self, Backend, Socket};
use crate::config::{Config, EventScope, KernelReap, Mode};
use crate::engine::reload::LoadedConfig;
use crate::engine::{Engine, EngineSettings, KeepStore};
use crate::export::{Format, Sink, StreamOutput};
use crate::journal::{self, Journal, JournalError, NewerSchema};
use crate::leftovers::Scanner;
use reaper_host::source::kind::SourceChoice;
use reaper_host::source::probes::{PinOptions, ProbeOptions};
use reaper_host::source::{Source, SourceError};
use reaper_host::sys;
use reaper_host::sys::pidfd;

pub(super) const HELP: &str = "\
Never signalled: pid 1, kernel threads, this program and its ancestors, whatever does not
descend from a recognised agent, and whatever a rule keeps or declares a boundary. With --observe
the same decisions are made and printed, and no signal is sent.

Without the privilege or the kernel for probes it goes by what else there is: the netlink proc
connector (root's alone before Linux 6.6), or the process table, and says so. So it does if a
source fails while it is at work. `reaper doctor` tells what there is here.

Probes, maps and ring are pinned on a bpffs: if the daemon is killed, the kernel goes on keeping
the trees, and the next daemon of the same scope takes them up with all that has happened
meanwhile. A daemon that is stopped removes them, unless it was started with --leave-pinned. It
also leaves them, with a warning, if processes are due for which it could not decide within 2 s.
`reaper unpin` removes them too.

Examples:
  sudo reaper daemon --observe
  sudo reaper daemon --config /etc/reaper.toml --events /var/log/reaper.jsonl
  sudo reaper daemon --leave-pinned         before an upgrade: the next one misses nothing
  sudo reaper daemon --scope $$            only this shell's descendants
  reaper daemon --user                     your own agents, without any privilege
  sudo reaper daemon --scope /sys/fs/cgroup/user.slice --json | jq .event";

#[derive(Args)]
pub(super) struct DaemonArgs {
    /// Settings and rules, in TOML; without it the built-in ones.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Decide and print, but send no signal.
    #[arg(long, conflicts_with = "enforce")]
    observe: bool,
    /// Reap, whatever the config file says.
    #[arg(long)]
    enforce: bool,
    /// Consider only this process and what descends from it, or what runs in this cgroup (a directory
    /// of cgroup v2) and what descends from that. May be given several times.
    #[arg(long, value_name = "PID|CGROUP")]
    scope: Vec<String>,
    /// Append the event stream to this file as JSON lines; `-` is standard output.
    #[arg(long, value_name = "FILE|-")]
    events: Option<PathBuf>,
    /// JSON lines on standard output instead of readable ones.
    #[arg(long)]
    json: bool,
    /// Have lock, socket and journal where a user's are: $XDG_RUNTIME_DIR/reaper and ~/.local/state/reaper.
    #[arg(long)]
    user: bool,
    /// Where events come from: auto takes the first of the others that can be used here.
    #[arg(long, value_name = "auto|ebpf|proc-connector|procfs")]
    source: Option<SourceChoice>,
    /// Print the probes' own diagnostics to standard error.
    #[arg(long)]
    pub(super) bpf_log: bool,
    /// Load the probes from this object file instead of the built-in one.
    #[arg(long, value_name = "FILE")]
    bpf_object: Option<PathBuf>,
    /// Directory of the journal, instead of the config's.
    #[arg(long, value_name = "DIR", conflicts_with = "no_journal")]
    journal_dir: Option<PathBuf>,
    /// Keep no journal of sessions, decisions and outcomes.
    #[arg(long)]
    no_journal: bool,
    /// Directory of the lock file and the socket, instead of the config's.
    #[arg(long, value_name = "DIR")]
    runtime_dir: Option<PathBuf>,
    /// Leave probes, maps and ring pinned and at work when it stops, so that the next start misses nothing.
    #[arg(long, conflicts_with = "no_pin")]
    leave_pinned: bool,
    /// Directory of the pins, on a bpffs, instead of the config's.
    #[arg(long, value_name = "DIR", conflicts_with = "no_pin")]
    pin_dir: Option<PathBuf>,
    /// Pin nothing: tracking ends with this process.
    #[arg(long)]
    no_pin: bool,
    /// Whether the kernel itself sends the first signal to the children of an agent that exits.
    #[arg(long, value_name = "auto|off", hide_possible_values = true)]
    kernel_reap: Option<KernelReap>,
}

pub(super) fn run(args: DaemonArgs) -> Result<(), Failure> {
    let mut config = configured(&args)?;
    let mut scope = scope::parse(&args.scope)?;
    let scope_name = scope::name(&args.scope, &scope);
    let outputs = outputs(
        args.events.as_deref(),
        args.json,
        config.events == EventScope::All,
    )?;
    let directory = args.runtime_dir.as_deref().unwrap_or(&config.runtime_dir);
    // Before anything that another daemon may be at work with is touched.
    let _lock = lock::take(directory, scope_name.as_deref())
        .map_err(|failure| better_known(failure, &args))?;
    let journal = journal_options(&config, scope_name.as_deref());
    // Before the source, since the mode decides whether the probes may send signals.
    let newer = journal
        .as_ref()
        .and_then(|options| NewerSchema::check(&options.path()).err());
    if newer.is_some() {
        config.mode = Mode::Observe;
    }
    let socket = scope::socket(directory, scope_name.as_deref());
    let socket = config.socket.then(|| Socket::bind(&socket)).transpose()?;
    let options = ProbeOptions {
        log: args.bpf_log,
        object: args.bpf_object.clone(),
        pin: config.pin.then(|| PinOptions {
            dir: config.pin_dir.clone(),
            name: scope_name
                .as_ref()
                .map_or("host".into(), |name| format!("scope-{name}")),
        }),
        ..options(&config, &scope)
    };
    let (source, passed_over) = open_source(&config, &options)?;
    // After the source: a daemon that cannot run leaves no journal behind.
    let (journal, newer) = match (newer, journal) {
        (None, Some(options)) => open_journal(options),
        (newer, _) => (None, newer),
    };
    let mode_reason = newer.as_ref().map(|newer| {
        config.mode = Mode::Observe;
        format!("stored keeps are unknown: {newer}, then restart the service")
    });
    if let Some(reason) = &mode_reason {
        tracing::error!("this service only observes, and keeps no journal: {reason}");
    }
    let host = sys::host::Host::read();
    // What cannot be signalled is not to be decided about; nor is what the user's own service was not meant for.
    if args.user || source.probes().is_none() && !host.capabilities.has("CAP_KILL") {
        scope.uid = Some(nix::unistd::getuid().as_raw());
    }
    if let Some(lacks) = source.kind().limitation() {
        tracing::warn!("watching through {}: {lacks}", source.name());
    }
    if config.mode == Mode::Enforce && scope.uid.is_none() {
        warn_of_missing(&host);
    }
    let (asks, asked) = mpsc::channel(server::QUEUE);
    let unsure = match &journal {
        None if config.journal && newer.is_none() => Some("no journal could be opened"),
        Some(journal) if journal.was_replaced() => Some("the journal was begun anew"),
        _ => None,
    };
    // Whoever asks before the engine is up waits for it.
    let kept_in = journal.as_ref().map(|journal| journal.path().into());
    // For a newer schema too: the error of each read says why it cannot be read.
    let kept_in = kept_in.or(newer.map(|newer| newer.path));
    let scanner = Scanner::new(asks.clone(), kept_in.clone()).with_keeps_error(unsure);
    let backend = Backend {
        engine: asks.clone(),
        journal: kept_in,
        leftovers: Arc::new(scanner.clone()),
    };
    let serve = |socket: Socket| socket.serve(backend);
    let _server = socket.map(serve).transpose()?;
    let begun = scanner.begin(config.reap_leftovers);
    begun.context("cannot start a thread to look for what agents left behind")?;
    let own = scope.uid.map(|uid| format!("uid:{uid}"));
    let names_of_scope = args.scope.iter().cloned().chain(own).collect();
    let settings = EngineSettings {
        leave_pinned: args.leave_pinned,
        rejected_sources: passed_over,
        mode_reason,
        keeps: journal
            .as_ref()
            .map_or(Vec::new(), |journal| journal.keeps().to_vec()),
        keep_store: journal
            .as_ref()
            .map(|journal| Arc::new(journal.keeper()) as Arc<dyn KeepStore>),
        ..settings(config, scope, names_of_scope)
    };
    let log = args.bpf_log;
    let only_observes = settings.mode_reason.is_some();
    let settings = match args.config {
        Some(_) => EngineSettings {
            load: Arc::new(move || again(&args, only_observes)),
            ..settings
        },
        None => settings,
    };
    let result = with_writer(outputs, |mut sink| {
        if let Some(journal) = &journal {
            sink.set_consumer(journal.feed());
        }
        in_thread(move || watch(source, settings, sink, (asks, asked), log))
    });
    if let Some(journal) = journal {
        journal.close();
    }
    result
}

/// Reads the config anew, with what the arguments say. With `only_observes` its mode is observe, as at the start, so that
/// no reload reports that a change of the mode waits for a restart.
fn again(args: &DaemonArgs, only_observes: bool) -> Result<LoadedConfig, String> {
    let said = |failure: Failure| failure.to_string();
    let mut config = configured(args).map_err(said)?;
    if only_observes {
        config.mode = Mode::Observe;
    }
    let names = names(&config).map_err(said)?;
    Ok(LoadedConfig { config, names })
}

/// What the config and the arguments say together; where nothing can be signalled, that it only observes.
fn configured(args: &DaemonArgs) -> Result<Config, Failure> {
    let mut config = load(args.config.as_deref())?;
    for warning in &config.warnings {
        let file = args.config.as_deref().unwrap_or(Path::new(""));
        let (line, column) = warning.place.unwrap_or((1, 1));
        tracing::warn!("{}:{line}:{column}: {}", file.display(), warning.what);
    }
    if args.observe {
        config.mode = Mode::Observe;
    } else if args.enforce {
        config.mode = Mode::Enforce;
    }
    if let Err(refused) = pidfd::probe() {
        tracing::warn!("this only observes: {refused}");
        config.mode = Mode::Observe;
    }
    config.source = args.source.unwrap_or(config.source);
    config.kernel_reap = args.kernel_reap.unwrap_or(config.kernel_reap);
    if let Some(directory) = &args.pin_dir {
        config.pin_dir = absolute("--pin-dir", directory)?;
    }
    config.pin = !args.no_pin && (config.pin || args.pin_dir.is_some());
    if args.leave_pinned && !config.pin {
        let what = "--leave-pinned: the config says `pin = false`, so there is nothing to leave";
        return Err(Failure::Usage(what.into()));
    }
    if args.user {
        user::place(&mut config)?;
    }
    if let Some(directory) = &args.journal_dir {
        config.journal_dir = absolute("--journal-dir", directory)?;
    }
    config.journal = !args.no_journal && (config.journal || args.journal_dir.is_some());
    Ok(config)
}

/// Returns where the journal is and what it may hold, if the config wants one.
fn journal_options(config: &Config, scope: Option<&str>) -> Option<journal::JournalOptions> {
    config.journal.then(|| journal::JournalOptions {
        directory: config.journal_dir.clone(),
        scope: scope.map(str::to_owned),
        max_age: config.journal_max_age,
        max_size: config.journal_max_size,
    })
}

/// Opens the journal. Returns the reason instead if it has a newer schema. Only logs other errors, since the service also
/// works without a journal.
fn open_journal(options: journal::JournalOptions) -> (Option<Journal>, Option<NewerSchema>) {
    match Journal::open(options, sys::host::Host::read().boot_id) {
        Ok(journal) => (Some(journal), None),
        Err(JournalError::Newer(newer)) => (None, Some(newer)),
        Err(error) => {
            tracing::warn!("no journal is kept: {error}");
            (None, None)
        }
    }
}

impl From<SourceError> for Failure {
    fn from(error: SourceError) -> Failure {
        match error.is_held() {
            true => Failure::Locked(error.to_string()),
            false => Failure::Source(error),
        }
    }
}

/// Who may not make the lock is told how they can have a service of their own.
fn better_known(failure: Failure, args: &DaemonArgs) -> Failure {
    match failure {
        Failure::Other(error) if !nix::unistd::geteuid().is_root() && !args.user => Failure::Usage(
            format!("{error:#}: run it as root, or with --user to watch your own processes"),
        ),
        other => other,
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

fn outputs(
    events: Option<&Path>,
    json: bool,
    lifecycle: bool,
) -> Result<Vec<StreamOutput>, Failure> {
    let to_stdout = events.is_some_and(|path| path.as_os_str() == "-");
    let format = if json || to_stdout {
        Format::Json
    } else {
        Format::Lines { lifecycle }
    };
    let mut outputs = vec![StreamOutput::stdout(format)];
    if let Some(path) = events.filter(|_| !to_stdout) {
        let file = StreamOutput::file(path).map_err(|error| {
            Failure::Usage(format!(
                "cannot write events to {}: {error}",
                path.display()
            ))
        })?;
        outputs.push(file);
    }
    Ok(outputs)
}

fn watch(
    mut source: Box<dyn Source + Send>,
    settings: EngineSettings,
    sink: Sink,
    (asks, asked): (mpsc::Sender<EngineRequest>, mpsc::Receiver<EngineRequest>),
    log: bool,
) -> Result<(), Failure> {
    runtime()?.block_on(async {
        // A terminal that goes takes the service that runs in it along.
        let stop = stop_signal(io::stdout().is_terminal())?;
        reload_at_hangup(asks)?;
        if log {
            let mut logger = source
                .probes_mut()
                .context("the probes are not the source")?
                .diagnostics()?;
            let ready =
                sys::readable(&logger).context("cannot wait for the probes' diagnostics")?;
            tokio::spawn(async move {
                while let Ok(mut guard) = ready.readable().await {
                    guard.clear_ready();
                    logger.flush();
                }
            });
        }
        Engine::start(kernel(&settings)?, source, settings, sink)?
            .run(stop, asked)
            .await?;
        Ok(())
    })
}

/// Has the config read anew at each SIGHUP; what comes of it is told in the stream.
fn reload_at_hangup(asks: mpsc::Sender<EngineRequest>) -> Result<(), Failure> {
    let mut hangup = signal(SignalKind::hangup()).context("cannot catch SIGHUP")?;
    tokio::spawn(async move {
        while hangup.recv().await.is_some() {
            let (answer, _) = oneshot::channel();
            let ask = EngineRequest {
                peer: Peer { uid: 0 },
                question: RequestKind::Reload,
                answer,
            };
            if asks.send(ask).await.is_err() {
                break;
            }
        }
    });
    Ok(())
}
