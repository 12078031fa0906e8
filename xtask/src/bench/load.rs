//! Giving orders to a load.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

use super::{Bench, process, raw, wait};

/// Where the load's processes are, as the service sees them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadPlacement {
    /// In no agent's session. In scope they are followed and not told of; where the whole host is considered
    /// they are strangers.
    Outside,
    /// Members of an agent's session: each of their events is told.
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

/// A process that makes processes, and ends with all of them when this is dropped.
pub struct Load {
    child: Child,
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Load {
    /// # Errors
    /// It cannot be started.
    pub fn start(bench: &Bench, place: LoadPlacement) -> Result<Load> {
        Load::start_as(bench, place, None)
    }

    /// The same as another user.
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
        let (orders, answers) = (child.stdin.take(), child.stdout.take());
        let answers = BufReader::new(answers.context("no pipe from the load")?);
        let mut load = Load {
            child,
            orders,
            answers,
        };
        // So that it runs, and is no copy of this program any more, when somebody looks.
        load.request("vfork 1")?;
        Ok(load)
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Gives an order and waits for its answer.
    ///
    /// # Errors
    /// What the load says went wrong.
    pub fn request(&mut self, order: &str) -> Result<u64> {
        self.send_request(order)?;
        self.read_response()
    }

    /// Has it make that many sleeping processes.
    ///
    /// # Errors
    /// The system does not allow so many.
    pub fn sleepers(&mut self, n: u64) -> Result<()> {
        let made = self.request(&format!("sleepers {n}"))?;
        ensure!(made == n, "the system allowed {made} of {n} processes");
        Ok(())
    }

    /// Gives an order, to be followed by [`Load::read_response`].
    ///
    /// # Errors
    /// The load is gone.
    pub fn send_request(&mut self, order: &str) -> Result<()> {
        let orders = self.orders.as_mut().context("the load is ending")?;
        orders
            .write_all(format!("{order}\n").as_bytes())
            .context("the load is gone")
    }

    /// # Errors
    /// As [`Load::request`].
    pub fn read_response(&mut self) -> Result<u64> {
        let mut line = String::new();
        self.answers
            .read_line(&mut line)
            .context("the load is gone")?;
        match line.trim_end().strip_prefix("ok ") {
            Some(number) => number.parse().context("an answer of the load"),
            None => bail!("load: {}", line.trim_end()),
        }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        drop(self.orders.take());
        if !wait::ended(&mut self.child) {
            // Fails only where it has ended meanwhile.
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}
