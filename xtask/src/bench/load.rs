//! Starts loads and sends requests to them.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

use super::{Bench, process, raw, wait};

/// Whether the load's processes are in a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadPlacement {
    /// In no session. With a scope, the service tracks them without emitting events. With the whole host as scope,
    /// they are untracked.
    Outside,
    /// Members of a session: the service emits each of their events.
    Inside,
}

impl LoadPlacement {
    pub fn name(self) -> &'static str {
        match self {
            LoadPlacement::Outside => "outside a session",
            LoadPlacement::Inside => "inside a session",
        }
    }
}

/// Process that creates processes. On drop, all of them exit.
pub struct Load {
    child: Child,
    requests: Option<ChildStdin>,
    responses: BufReader<ChildStdout>,
}

impl Load {
    /// Starts a load as root.
    ///
    /// # Errors
    /// The load cannot be started.
    pub fn start(bench: &Bench, place: LoadPlacement) -> Result<Load> {
        Load::start_as(bench, place, None)
    }

    /// Starts a load as the user `uid`.
    ///
    /// # Errors
    /// As [`Load::start`].
    pub fn start_as(bench: &Bench, place: LoadPlacement, uid: Option<u32>) -> Result<Load> {
        let image = match place {
            LoadPlacement::Outside => process::LOAD,
            LoadPlacement::Inside => process::AGENT,
        };
        let mut command = Command::new(bench.dir.join(image));
        command.args(["bench-process", "load"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        if let Some(uid) = uid {
            command.uid(uid);
        }
        raw::end_with_us(&mut command);
        let mut child = command.spawn().context("cannot start a load")?;
        let (requests, responses) = (child.stdin.take(), child.stdout.take());
        let responses = BufReader::new(responses.context("no pipe from the load")?);
        let mut load = Load {
            child,
            requests,
            responses,
        };
        // After the response, the exec is over.
        load.request("vfork 1")?;
        Ok(load)
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a request and waits for the response.
    ///
    /// # Errors
    /// The error of the load, or the load is gone.
    pub fn request(&mut self, request: &str) -> Result<u64> {
        self.send_request(request)?;
        self.read_response()
    }

    /// Creates `n` sleeping processes.
    ///
    /// # Errors
    /// The system does not allow that many.
    pub fn sleepers(&mut self, n: u64) -> Result<()> {
        let made = self.request(&format!("sleepers {n}"))?;
        ensure!(made == n, "the system allowed {made} of {n} processes");
        Ok(())
    }

    /// Sends a request. [`Load::read_response`] must follow.
    ///
    /// # Errors
    /// The load is gone.
    pub fn send_request(&mut self, request: &str) -> Result<()> {
        let requests = self.requests.as_mut().context("the load is exiting")?;
        requests
            .write_all(format!("{request}\n").as_bytes())
            .context("the load is gone")
    }

    /// Waits for the response to a request.
    ///
    /// # Errors
    /// As [`Load::request`].
    pub fn read_response(&mut self) -> Result<u64> {
        let mut line = String::new();
        self.responses
            .read_line(&mut line)
            .context("the load is gone")?;
        match line.trim_end().strip_prefix("ok ") {
            Some(number) => number.parse().context("bad response of the load"),
            None => bail!("load: {}", line.trim_end()),
        }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        drop(self.requests.take());
        if !wait::ended(&mut self.child) {
            // Fails only if the load has just exited.
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}
