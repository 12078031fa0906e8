//! Reads the arguments, the environment, and what depends on these.

use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use super::ProcDir;
use crate::facts::reading::registry::{RegistryDir, RegistryProcess, variable};
use crate::facts::reading::{home, match_markers, script};
use reaper_model::conversation::{ConversationSource, Conversations};
use reaper_model::event::{Image, ProcessKey};
use reaper_model::facts::{Fact, InheritedFacts, is_distinctive};
use reaper_model::leftover::EnvMarkers;
use reaper_model::ruleset::{Pattern, script_path};

/// Maximum number of bytes read from an environment.
pub(in crate::facts) const ENVIRON_MAX: usize = 128 << 10;
/// Maximum number of bytes read from a command line: the limit of exec(2) with the default stack limit of 8 MiB.
pub(in crate::facts) const ARGUMENTS_MAX: usize = 2 << 20;

impl ProcDir {
    /// Returns the environment with which the program was started, and whether it is complete. It is cut after
    /// [`ENVIRON_MAX`] bytes. `None` if it cannot be read. The program can have overwritten parts of it.
    pub(in crate::facts) fn environ(&mut self) -> Option<(&[u8], bool)> {
        let read = self
            .dir
            .read_some("environ", ENVIRON_MAX + 1, &mut self.buffer);
        read.ok()?;
        let whole = self.buffer.len() <= ENVIRON_MAX;
        Some((&self.buffer[..self.buffer.len().min(ENVIRON_MAX)], whole))
    }

    /// Returns whether an environment that was read as empty is really empty. Within an exec it reads as empty until it
    /// is set up.
    fn is_set_up(&mut self) -> bool {
        if self.dir.read("stat", &mut self.buffer).is_err() {
            return false;
        }
        // env_end is field 51 of proc_pid_stat(5). The name in parentheses is field 2.
        let fields = self.buffer.rsplit(|b| *b == b')').next();
        let mut fields = fields.unwrap_or_default().split(|b| *b == b' ');
        let placed = fields.nth(49).is_some_and(|end| end != b"0");
        placed
            && self
                .environ()
                .is_some_and(|(environ, _)| environ.is_empty())
    }

    /// Like `environ`, but also returns `None` within an exec that has not set up the environment yet.
    fn settled_environ(&mut self) -> Option<(&[u8], bool)> {
        if matches!(self.environ(), Some(([], _))) && !self.is_set_up() {
            return None;
        }
        self.environ()
    }

    /// Returns the absolute path of the script that `image` runs, with links resolved below the process's root
    /// directory. A file or directory that no longer exists keeps its name.
    ///
    /// `None` if `image` runs no script, or if the file cannot be reached or is not a regular file. Blocks as long as a
    /// file system on the way does.
    pub(in crate::facts) fn script(&self, image: &Image) -> Option<Vec<u8>> {
        script::resolve(&self.path, script_path(image)?)
    }

    /// Returns which patterns match a variable of the environment, as a bit set (see [`match_markers`]). Unreadable if
    /// the environment cannot be read or an exec is setting it up.
    pub(in crate::facts::reading) fn markers(&mut self, patterns: &[Pattern]) -> Fact<u64> {
        match self.settled_environ() {
            Some((environ, whole)) => match_markers(environ, whole, patterns),
            None => Fact::Unreadable,
        }
    }

    /// Returns the whole command line, of which `image` has the beginning. `None` if it is too long, cannot be read
    /// completely or belongs to another program.
    pub(in crate::facts) fn arguments(&mut self, image: &Image) -> Option<Vec<u8>> {
        let read = self
            .dir
            .read_some("cmdline", ARGUMENTS_MAX + 1, &mut self.buffer);
        read.ok()?;
        let argv = &self.buffer;
        // The kernel returns less if the process has overwritten or unmapped its arguments.
        let is_complete = argv.len() as u64 == u64::from(image.argv_full_len);
        let is_it = argv.len() <= ARGUMENTS_MAX && is_complete && argv.starts_with(&image.argv);
        is_it.then(|| std::mem::take(&mut self.buffer))
    }

    /// Returns the markers of agents in the environment, and the working directory if it is distinctive
    /// ([`is_distinctive`], and not writable for all users). `None` if one of the two cannot be read.
    pub(in crate::facts::reading) fn inherited(&mut self) -> Option<InheritedFacts> {
        let (environ, whole) = self.settled_environ()?;
        let (env_markers, home) = (EnvMarkers::of(environ, whole), home(environ));
        let place = self.path.join("cwd");
        let directory = std::fs::read_link(&place).ok()?;
        // In a directory like /tmp, where all users may write, any process can be working.
        let shared = std::fs::metadata(&place).ok()?.mode() & 0o002 != 0;
        let is_distinctive_here = !shared && is_distinctive(&directory, home.as_deref());
        let directory = is_distinctive_here.then(|| directory.into());
        Some(InheritedFacts {
            env_markers,
            directory,
            input: self.input_inode().unwrap_or(0),
            login_uid: self.login_uid(),
        })
    }

    /// Returns the conversation ids in the environment, and what the registries of the agents contain about the
    /// process.
    ///
    /// `None` if its status or environment cannot be read, or if the environment is cut and lacks a variable. An
    /// unreadable registry only sets [`Conversations::registry_unreadable`].
    pub(in crate::facts::reading) fn conversations(
        &mut self,
        key: ProcessKey,
        sources: &[Arc<ConversationSource>],
    ) -> Option<Conversations> {
        self.dir.read("status", &mut self.buffer).ok()?;
        let process = RegistryProcess::new(&self.buffer, key)?;
        let (environ, whole) = self.settled_environ()?;
        let mut found = Conversations::default();
        let mut directories = Vec::new();
        for source in sources {
            let value = variable(environ, &source.variable);
            found.inherited.insert_from(value.unwrap_or_default());
            if value.is_none() && !whole {
                return None;
            }
            if let Some(registry) = &source.registry {
                let directory = RegistryDir::of(registry, environ, process.uid);
                directories.push((registry, directory));
            }
        }
        for (registry, directory) in directories {
            let read = directory.and_then(|d| d.read(registry, &self.path, &process, &mut found));
            found.registry_unreadable |= read.is_none();
        }
        Some(found)
    }
}
