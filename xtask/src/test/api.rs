//! Tests the API against its document with schemathesis, a public program that makes requests from such documents.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::shell::{as_root, install, run, say, target_dir};
use crate::tally::Tally;

/// Name of the check, as in the list of tests.
pub const NAME: &str = "schemathesis::api";

/// Version of schemathesis from PyPI.
const VERSION: &str = "4.32.5";
/// Debian's Python, which every user can run.
const PYTHON: &str = "/usr/bin/python3";
/// Time limit in seconds. schemathesis itself stops after 18 and 10 s, which a busy machine exceeds.
const TIME_MAX: &str = "300";
/// Namespaces of the service and its client. They have no network.
const UNSHARE: &[&str] = &[
    "unshare",
    "--mount",
    "--mount-proc",
    "--net",
    "--pid",
    "--fork",
    "--kill-child",
];

/// Runs schemathesis against the service. Leaves it out, with the reason, if it cannot be installed or isolated here.
pub fn check(reaper: &Path, tally: &mut Tally) {
    let environment = isolation().and_then(|()| environment());
    match environment {
        Ok(environment) => tally.step(NAME, requests(reaper, &environment)),
        Err(error) => tally.leave_out(&format!("{NAME}: {error:#}")),
    }
}

/// Checks that new namespaces can be created.
fn isolation() -> Result<()> {
    let mut unshare = as_root(UNSHARE[0])?;
    unshare.args(&UNSHARE[1..]).arg("true");
    run(&mut unshare)
        .context("needs a new PID namespace, so that no request names a process of this host")
}

/// Returns the virtual environment with schemathesis in the target directory, and creates it if necessary.
fn environment() -> Result<PathBuf> {
    let environment = target_dir().join("tools/schemathesis");
    let python = environment.join("bin/python");
    // Written last, so that an interrupted installation is repeated.
    let version = environment.join("version");
    if fs::read_to_string(&version).is_ok_and(|version| version == VERSION) {
        return Ok(environment);
    }
    let has_venv = Command::new(PYTHON)
        .args(["-c", "import ensurepip"])
        .stderr(Stdio::null())
        .status();
    if !has_venv.is_ok_and(|status| status.success()) {
        install(&["python3-venv"], "schemathesis tests the API")?;
    }
    say(format_args!(
        "installing schemathesis {VERSION} from PyPI into {} (about 1 min)",
        environment.display()
    ));
    run(Command::new(PYTHON)
        .args(["-m", "venv", "--clear"])
        .arg(&environment))?;
    run(Command::new(&python)
        .args([
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
        ])
        .arg(format!("schemathesis=={VERSION}")))?;
    fs::write(version, VERSION)?;
    Ok(environment)
}

/// Starts the service and schemathesis in their namespaces.
fn requests(reaper: &Path, environment: &Path) -> Result<()> {
    let dir = std::env::temp_dir().join(format!("reaper-api-{}", std::process::id()));
    let write = || {
        fs::create_dir_all(dir.join("work"))?;
        fs::set_permissions(&dir, Permissions::from_mode(0o755))?;
        fs::set_permissions(dir.join("work"), Permissions::from_mode(0o1777))?;
        fs::write(dir.join("config.toml"), "")?;
        let hooks = include_str!("api/unix_socket.py");
        fs::write(dir.join("unix_socket.py"), hooks)
    };
    write().with_context(|| dir.display().to_string())?;
    let mut timeout = as_root("timeout")?;
    timeout.args(["--kill-after=5", TIME_MAX]).args(UNSHARE);
    timeout.args(["sh", "-euc", include_str!("api/run.sh"), "sh"]);
    timeout.args([&dir, environment, reaper]);
    let status = timeout.stdin(Stdio::null()).status();
    // Its mounts were seen in the namespace alone.
    run(as_root("rm")?.args(["-r", "--one-file-system"]).arg(&dir))?;
    let status = status.context("cannot start timeout")?;
    ensure!(
        status.success(),
        "the service and its document differ, or schemathesis could not test them: {status}"
    );
    Ok(())
}
