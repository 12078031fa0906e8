//! `reaper daemon`: starts the service and connects its parts.

mod mode;
mod scope_journal;

use std::io::{self, IsTerminal};
use std::path::{self, Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, anyhow};
use clap::Args;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, oneshot};

use super::engine::{
    check_open_files, in_thread, kernel, names, open_source, options, runtime, settings,
    stop_signals, with_writer,
};
use super::user::{self, ConfigOwner};
use super::{Failure, absolute, load_for, lock, scope, sockets};
use crate::api::messages::{EngineRequest, RequestKind};
use crate::api::peer::Peer;
use crate::api::server::{self, Backend, Socket};
use crate::config::{Config, EventScope, KernelReap, Mode};
use crate::engine::reload::LoadedConfig;
use crate::engine::{Engine, EngineSettings, KeepStore, Stop};
use crate::export::{Detail, Format, Sink, StreamOutput};
use crate::journal::{self, Journal, JournalError, NewerSchema};
use crate::leftovers::Scanner;
use reaper_host::kernel::Kernel;
use reaper_host::source::kind::SourceChoice;
use reaper_host::source::probes::{PinOptions, ProbeOptions};
use reaper_host::source::{Source, SourceError};
use reaper_host::sys;
use reaper_host::sys::host::Capabilities;
use reaper_host::sys::notify::Notifier;
use reaper_host::sys::pidfd;
use reaper_host::sys::privileges::{self, Privilege};

pub(super) const HELP: &str = "\
Signals only members of the sessions of recognised agents, and leftovers: processes that an agent left behind before the \
    daemon started. It looks for leftovers when it starts, and reaps those with strong evidence (see `reaper scan --help`; \
    `reap_leftovers = false` turns that off).

Never signalled: pid 1, kernel threads, reaper and its ancestors, processes that a rule keeps or declares a boundary, and \
    processes with REAPER_KEEP=1 (unless `honor_keep = false`). With --observe the same decisions are made and printed \
    as `would reap`, but no signal is sent. Ctrl-C then sums up what would have been reaped.

Event sources: BPF probes need privileges and a recent kernel. Without them, the daemon uses the netlink proc \
    connector (root only before Linux 6.6), or polls the process table. It also does so if a source fails later, and logs \
    it. Run `reaper doctor` to see what is available.

Restarts: probes, maps and ring buffer are pinned on a bpffs. If the daemon is killed, the kernel continues to track \
    processes, and the next daemon of the same scope picks up all events since then. A daemon that is stopped first \
    ends, for at most 10 s, what it has signalled, and removes the pins. A second signal stops it at once. With SIGUSR2 or \
    --leave-pinned it leaves the pins, and the next daemon continues. It also leaves them, with a warning, if it could not decide \
    about all due processes within 2 s. `reaper unpin` removes them.

Examples:
  # Print what would be reaped, but send no signal
  sudo reaper daemon --observe

  # Reap, and append the event stream to a file
  sudo reaper daemon --events /var/log/reaper.jsonl

  # Before an upgrade: the next daemon misses nothing
  sudo reaper daemon --leave-pinned

  # Watch only the descendants of this shell
  sudo reaper daemon --scope $$

  # Watch your own agents, without privileges
  reaper daemon --user

  # Watch a cgroup, and print the name of each event
  sudo reaper daemon --scope /sys/fs/cgroup/user.slice --json | jq .event";

#[derive(Args)]
pub(super) struct DaemonArgs {
    /// Config file (TOML) [default: /etc/reaper/config.toml, if it exists].
    ///
    /// With --user, the default is $XDG_CONFIG_HOME/reaper/config.toml. Without a file, the built-in settings apply.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Print decisions, but send no signal, even if the config says `mode = "enforce"`.
    #[arg(long, conflicts_with = "enforce")]
    observe: bool,
    /// Send signals, even if the config says `mode = "observe"`.
    #[arg(long)]
    enforce: bool,
    /// Watch only this process or cgroup, with all descendants; can be repeated.
    ///
    /// A cgroup is named by the absolute path of its directory (cgroup v2).
    #[arg(long, value_name = "PID|CGROUP")]
    scope: Vec<String>,
    /// Append the event stream to this file as JSON lines; `-` is stdout.
    ///
    /// The file may be rotated: it is created again when it was renamed or removed.
    #[arg(long, value_name = "FILE|-")]
    events: Option<PathBuf>,
    /// Print each step: orphans, decisions and signals.
    ///
    /// Without it, each process that has ended, waits or is reported has one line. So have the start and the end of
    /// each session.
    #[arg(long, short)]
    verbose: bool,
    /// Print the event stream to stdout as JSON lines instead of text.
    ///
    /// The daemon stops when the reader closes stdout, as in a pipeline.
    #[arg(long)]
    json: bool,
    /// Run as your own service, for your own processes only.
    ///
    /// Unless the config or an option names others, the lock and the socket are in $XDG_RUNTIME_DIR/reaper, and the
    /// journal in $XDG_STATE_HOME/reaper (default: ~/.local/state/reaper).
    #[arg(long)]
    user: bool,
    /// Event source; overrides the config. `auto`, the default, uses the best one available here.
    #[arg(long, value_name = "auto|ebpf|proc-connector|procfs")]
    source: Option<SourceChoice>,
    /// Print messages of the BPF probes to stderr.
    #[arg(long)]
    pub(super) bpf_log: bool,
    /// Load the BPF probes from this object file.
    #[arg(long, value_name = "FILE")]
    bpf_object: Option<PathBuf>,
    /// Keep the journal in this directory, even if the config says `journal = false` [default: /var/lib/reaper].
    ///
    /// With --scope PID, the default is the runtime directory. A later daemon removes the journal of a process that has
    /// exited.
    #[arg(long, value_name = "DIR", conflicts_with = "no_journal")]
    journal_dir: Option<PathBuf>,
    /// Keep no journal.
    #[arg(long)]
    no_journal: bool,
    /// Directory of the lock file and the socket; overrides the config [default: /run/reaper].
    #[arg(long, value_name = "DIR")]
    runtime_dir: Option<PathBuf>,
    /// Leave the probes pinned on exit, so that the next daemon misses nothing.
    #[arg(long, conflicts_with = "no_pin")]
    leave_pinned: bool,
    /// Pin the probes in this directory, on a bpffs, even if the config says `pin = false`.
    ///
    /// The default is /sys/fs/bpf/reaper.
    #[arg(long, value_name = "DIR", conflicts_with = "no_pin")]
    pin_dir: Option<PathBuf>,
    /// Pin nothing: tracking ends with the daemon.
    #[arg(long)]
    no_pin: bool,
    /// Let the probes send the first signal to children of an exited agent, or not; overrides the config.
    ///
    /// With `auto` they do so if the kernel supports it, with `off` the daemon sends all signals.
    #[arg(long, value_name = "auto|off", hide_possible_values = true)]
    kernel_reap: Option<KernelReap>,
}

pub(super) fn run(args: DaemonArgs) -> Result<(), Failure> {
    check_open_files()?;
    sys::lower_oom_score();
    let mut config = load_config(&args)?;
    if let Some(platform) = mode::NEVER_RUN {
        tracing::warn!("{}", mode::warning(platform, config.mode));
    }
    // All that this program ever has.
    let held = sys::host::Host::read().capabilities;
    let mut scope = scope::parse(&args.scope)?;
    let scope_name = scope::name(&args.scope, &scope);
    let outputs = outputs(args.events.as_deref(), args.json, detail(&args, &config))?;
    let directory = args.runtime_dir.as_deref().unwrap_or(&config.runtime_dir);
    // Taken before anything is touched that another daemon may use.
    let _lock = lock::take(directory, scope_name.as_deref())
        .map_err(|failure| suggest_user(failure, &args))?;
    if config.journal {
        scope_journal::remove_past(directory);
    }
    let journal = journal_options(&config, scope_name.as_deref());
    // Known before the source opens, because the mode decides whether the probes may send signals.
    let newer = journal
        .as_ref()
        .and_then(|options| NewerSchema::check(&options.path()).err());
    if newer.is_some() {
        config.mode = Mode::Observe;
    }
    let socket = scope::socket(directory, scope_name.as_deref());
    let socket = config.socket.then(|| Socket::bind(&socket)).transpose()?;
    let socket_path = socket.as_ref().map(Socket::path).map(path::absolute);
    let socket_path = socket_path
        .transpose()
        .map_err(Failure::system("cannot find the working directory"))?;
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
    let (source, rejected) = open_source(&config, &options)?;
    // Before any other thread starts: each thread has its own capabilities.
    drop_privileges(args.events.is_some());
    // Opened after the source: a daemon that cannot run leaves no journal behind.
    let (journal, newer) = match (newer, journal) {
        (None, Some(options)) => open_journal(options),
        (newer, _) => (None, newer),
    };
    let mode_reason = newer.as_ref().map(|newer| {
        config.mode = Mode::Observe;
        format!("it is unknown which processes users keep: {newer}, then restart the service")
    });
    if let Some(reason) = &mode_reason {
        tracing::error!("this service sends no signals and writes no journal: {reason}");
    }
    // With --user, or with neither probes nor CAP_KILL, only the processes of this user are tracked.
    if args.user || source.probes().is_none() && !held.has("CAP_KILL") {
        scope.uid = Some(nix::unistd::getuid().as_raw());
    }
    if let Some(lacks) = source.kind().limitation() {
        let advice = if cfg!(target_os = "macos") {
            ""
        } else {
            "; run `reaper doctor` to see whether a better source can be used"
        };
        tracing::warn!("event source {}: {lacks}{advice}", source.name());
    }
    if scope.uid.is_none() {
        warn_of_missing(held);
    }
    let (requests, request_receiver) = mpsc::channel(server::QUEUE);
    let unsure = match &journal {
        None if config.journal && newer.is_none() => Some(
            "no journal could be opened; repair it and restart the service, or set `journal = false`",
        ),
        Some(journal) if journal.was_replaced() => Some(
            "the journal was unusable and was replaced; to reap leftovers all the same, restart the service",
        ),
        _ => None,
    };
    // Requests that arrive before the engine runs wait in this channel.
    let journal_path = journal.as_ref().map(|journal| journal.path().into());
    // Also set for a newer schema: each read then fails with an error that says so.
    let journal_path = journal_path.or(newer.map(|newer| newer.path));
    let scanner = Scanner::new(requests.clone(), journal_path.clone()).with_keeps_error(unsure);
    let backend = Backend {
        engine: requests.clone(),
        journal: journal_path,
        leftovers: Arc::new(scanner.clone()),
    };
    let serve = |socket: Socket| socket.serve(backend);
    let _server = socket.map(serve).transpose()?;
    let started = scanner.start(config.reap_leftovers);
    started.map_err(Failure::system(
        "cannot start the thread that scans for leftovers",
    ))?;
    let own = scope.uid.map(|uid| format!("uid:{uid}"));
    let names_of_scope = args.scope.iter().cloned().chain(own).collect();
    let log = args.bpf_log;
    let needs_reader = writes_json(&args);
    let only_observes = mode_reason.is_some();
    let settings = EngineSettings {
        leave_pinned: args.leave_pinned,
        next_command: socket_path.as_deref().map(sockets::tree_command),
        socket: socket_path,
        rejected_sources: rejected,
        mode_reason,
        keeps: journal
            .as_ref()
            .map_or(Vec::new(), |journal| journal.keeps().to_vec()),
        keep_store: journal
            .as_ref()
            .map(|journal| Arc::new(journal.keep_writer()) as Arc<dyn KeepStore>),
        load: Arc::new(move || reload(&args, only_observes)),
        ..settings(config, scope, names_of_scope)
    };
    let result = with_writer(outputs, |mut sink| {
        if let Some(journal) = &journal {
            sink.set_consumer(journal.feed());
        }
        in_thread(move || {
            let requests = (requests, request_receiver);
            watch(source, settings, sink, requests, log, needs_reader)
        })
    });
    if let Some(journal) = journal {
        journal.close();
    }
    result
}

/// Loads the config again and applies the arguments.
///
/// With `only_observes` the mode is observe, as at the start. Otherwise each reload would report that a change of
/// the mode needs a restart.
fn reload(args: &DaemonArgs, only_observes: bool) -> Result<LoadedConfig, String> {
    let to_text = |failure: Failure| failure.to_string();
    let mut config = load_config(args).map_err(to_text)?;
    if only_observes {
        config.mode = Mode::Observe;
    }
    let names = names(&config).map_err(to_text)?;
    Ok(LoadedConfig { config, names })
}

/// Loads the config and applies the arguments. The mode is observe if no signals can be sent.
fn load_config(args: &DaemonArgs) -> Result<Config, Failure> {
    let owner = match args.user {
        true => ConfigOwner::User,
        false => ConfigOwner::Host,
    };
    let mut config = load_for(args.config.as_deref(), owner)?;
    for warning in &config.warnings {
        let (line, column) = warning.place.unwrap_or((1, 1));
        tracing::warn!(
            "config {}:{line}:{column}: {}",
            config.file,
            warning.message
        );
    }
    let never_run = mode::NEVER_RUN.is_some();
    config.mode = mode::choose(config.mode, args.observe, args.enforce, never_run);
    if let Err(refused) = pidfd::probe() {
        tracing::warn!("this service only observes: {refused}");
        config.mode = Mode::Observe;
    }
    config.source = args.source.unwrap_or(config.source);
    config.kernel_reap = args.kernel_reap.unwrap_or(config.kernel_reap);
    if let Some(directory) = &args.pin_dir {
        config.pin_dir = absolute("--pin-dir", directory)?;
    }
    config.pin = !args.no_pin && (config.pin || args.pin_dir.is_some());
    if args.leave_pinned && !config.pin {
        let what = "--leave-pinned: nothing is pinned, because the config says `pin = false`: set `pin = true`, or omit \
                    --leave-pinned";
        return Err(Failure::Usage(what.into()));
    }
    config.journal = !args.no_journal && (config.journal || args.journal_dir.is_some());
    // A directory that an option names needs no environment variable.
    if args.user && args.runtime_dir.is_none() {
        user::place_runtime_dir(&mut config)?;
    }
    // Shown by `reaper config show`. The daemon opens the path as given, as that of a socket may not be long.
    if let Some(directory) = &args.runtime_dir {
        config.runtime_dir = absolute("--runtime-dir", directory)?;
    }
    match &args.journal_dir {
        Some(directory) => config.journal_dir = absolute("--journal-dir", directory)?,
        None if scope_journal::has_process(&args.scope)
            && config.journal_dir == Config::default().journal_dir =>
        {
            config.journal_dir.clone_from(&config.runtime_dir);
        }
        None if args.user && config.journal => user::place_journal_dir(&mut config)?,
        None => {}
    }
    Ok(config)
}

/// Returns the options of the journal, `None` if the config wants no journal.
fn journal_options(config: &Config, scope: Option<&str>) -> Option<journal::JournalOptions> {
    config.journal.then(|| journal::JournalOptions {
        directory: config.journal_dir.clone(),
        scope: scope.map(str::to_owned),
        max_age: config.journal_max_age,
        max_size: config.journal_max_size,
    })
}

/// Opens the journal, or returns the reason if its schema is newer.
///
/// Other errors are only logged, because the service works without a journal.
fn open_journal(options: journal::JournalOptions) -> (Option<Journal>, Option<NewerSchema>) {
    match Journal::open(options, sys::host::Host::read().boot_id) {
        Ok(journal) => (Some(journal), None),
        Err(JournalError::Newer(newer)) => (None, Some(newer)),
        Err(error) => {
            tracing::warn!(
                "the service runs without a journal: {error}; until that is fixed and the service restarted, there is no history, \
                 leftovers are not reaped, and keeps are lost when it stops"
            );
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

/// Adds what to do if the lock cannot be created: for users other than root, `--user`.
fn suggest_user(failure: Failure, args: &DaemonArgs) -> Failure {
    match failure {
        Failure::Other(_) if !nix::unistd::geteuid().is_root() && !args.user => Failure::Usage(
            format!("{failure}; run as root, or with --user to watch your own processes"),
        ),
        Failure::Other(_) => anyhow!(
            "{failure}; let this user write there, or set --runtime-dir to another directory"
        )
        .into(),
        other => other,
    }
}

/// Warns of each missing capability, with its purpose. Those to load probes are not among them: without them, no probe
/// is in use, and the reason was logged. Real-time priority is not either, as the service works without it.
fn warn_of_missing(held: Capabilities) {
    let needed = ["CAP_KILL", "CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH"];
    for Privilege { name, loss, .. } in privileges::missing(held) {
        if needed.contains(name) {
            tracing::warn!("without {name}, {loss}; run the service as root or with {name}");
        }
    }
}

/// Drops the capabilities that only the start needs. Only logs a failure.
fn drop_privileges(writes_file: bool) {
    if let Err(error) = privileges::drop_unneeded(writes_file) {
        tracing::warn!("cannot drop the capabilities that only the start needs: {error}");
    }
}

/// Returns whether stdout gets the event stream as JSON lines.
fn writes_json(args: &DaemonArgs) -> bool {
    args.json || args.events.as_deref().is_some_and(is_stdout)
}

/// Returns whether the argument of `--events` stands for stdout.
fn is_stdout(events: &Path) -> bool {
    events.as_os_str() == "-"
}

/// Returns the extent of the lines for people.
fn detail(args: &DaemonArgs, config: &Config) -> Detail {
    match (config.events, args.verbose) {
        (EventScope::All, _) => Detail::Lifecycle,
        (EventScope::Agents, true) => Detail::Steps,
        (EventScope::Agents, false) => Detail::Summary,
    }
}

/// Opens the outputs of the event stream: stdout, with lines of this `detail` unless they are JSON, and the file
/// `events` unless that is `-`.
fn outputs(
    events: Option<&Path>,
    json: bool,
    detail: Detail,
) -> Result<Vec<StreamOutput>, Failure> {
    let to_stdout = events.is_some_and(is_stdout);
    let format = if json || to_stdout {
        Format::Json
    } else {
        Format::Lines(detail)
    };
    let stdout = StreamOutput::stdout(format).map_err(Failure::system("cannot open stdout"))?;
    let mut outputs = vec![stdout.with_hints()];
    if let Some(path) = events.filter(|_| !to_stdout) {
        let file = StreamOutput::file(path).map_err(|error| {
            Failure::Usage(format!(
                "cannot open --events {}: {error}; name a file that this user can write",
                path.display()
            ))
        })?;
        outputs.push(file);
    }
    Ok(outputs)
}

/// Runs the engine until a stop signal arrives. With `log` it also prints the messages of the probes. With
/// `needs_reader` it also ends when the reader of stdout closes it.
fn watch(
    mut source: Box<dyn Source + Send>,
    settings: EngineSettings,
    sink: Sink,
    (requests, request_receiver): (mpsc::Sender<EngineRequest>, mpsc::Receiver<EngineRequest>),
    log: bool,
    needs_reader: bool,
) -> Result<(), Failure> {
    runtime()?.block_on(async {
        // In a terminal, the service stops when the terminal closes.
        let stop = stop_signals(io::stdout().is_terminal())?;
        let unread = needs_reader.then(|| sys::unread(io::stdout()));
        let unread = unread.transpose();
        let unread = unread.map_err(Failure::system("cannot wait for the reader of stdout"))?;
        let stop = async {
            match unread {
                None => stop.await,
                Some(unread) => tokio::select! {
                    signal = stop => signal,
                    () = unread => {
                        tracing::warn!("stdout was closed by its reader; the service stops");
                        Stop::because("stdout_closed")
                    }
                },
            }
        };
        reload_at_hangup(requests)?;
        if log {
            let mut logger = source
                .probes_mut()
                .context("--bpf-log needs the event source ebpf, which is not in use: see `reaper doctor`, or omit --bpf-log")?
                .diagnostics()?;
            let ready =
                sys::readable(&logger).map_err(Failure::system("cannot wait for the messages of the probes (--bpf-log)"))?;
            tokio::spawn(async move {
                while let Ok(mut guard) = ready.readable().await {
                    guard.clear_ready();
                    logger.flush();
                }
            });
        }
        let notifier = Notifier::connect()
            .map_err(Failure::system("cannot start the thread that informs the service manager"))?;
        let kernel = Kernel { notifier, ..kernel(&settings)? };
        Engine::start(kernel, source, settings, sink)?
            .run(stop, request_receiver)
            .await?;
        Ok(())
    })
}

/// Reloads the config on SIGHUP. The result is in the event stream.
fn reload_at_hangup(requests: mpsc::Sender<EngineRequest>) -> Result<(), Failure> {
    let mut hangup =
        signal(SignalKind::hangup()).map_err(Failure::system("cannot catch SIGHUP"))?;
    tokio::spawn(async move {
        while hangup.recv().await.is_some() {
            let (reply, _) = oneshot::channel();
            let ask = EngineRequest {
                peer: Peer { uid: 0 },
                kind: RequestKind::Reload,
                reply,
            };
            if requests.send(ask).await.is_err() {
                break;
            }
        }
    });
    Ok(())
}
