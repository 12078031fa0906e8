//! Reasons to keep a process despite the evidence, and rules with a delay.

use std::sync::Arc;

use super::{Judge, file_name, tick};
use crate::event::Image;
use crate::facts::Fact;
use crate::leftover::{KeepReason, LeftoverRow};
use crate::ruleset::{Action, Rule, UidCondition};

/// Terminal emulators, by the file name or the `comm` of their program.
const TERMINALS: &[&[u8]] = &[
    b"gnome-terminal-server",
    b"gnome-terminal-",
    b"kgx",
    b"ptyxis",
    b"ptyxis-agent",
    b"konsole",
    b"yakuake",
    b"xfce4-terminal",
    b"mate-terminal",
    b"lxterminal",
    b"qterminal",
    b"tilix",
    b"terminator",
    b"guake",
    b"kitty",
    b"alacritty",
    b"wezterm-gui",
    b"wezterm-mux-server",
    b"foot",
    b"footserver",
    b"ghostty",
    b"rio",
    b"st",
    b"xterm",
    b"urxvt",
    b"urxvtd",
    b"rxvt",
    b"ttyd",
    b"mosh-server",
];
/// Prefixes of units in which a desktop places programs started by a user, with all of their descendants.
const DESKTOP: &[&str] = &[
    "app-",
    "vte-spawn-",
    "tmux-spawn-",
    "kitty-",
    "ptyxis-spawn-",
];
/// Rules that keep programs in which users start no processes: container engines, agents for keys, sound servers, and
/// servers that run requests with the environment of their clients.
const NOT_HOSTS: &[&str] = &[
    "filters",
    "containers",
    "ssh-agent",
    "gpg-agent",
    "ssh-master",
    "sound",
    "sccache",
    "adb",
    "git-fsmonitor",
];

/// Reason to keep a process.
#[derive(Clone)]
pub(super) struct Kept {
    pub(super) reason: KeepReason,
    pub(super) rule: Option<Arc<str>>,
    /// Pid of the process that the reason is about.
    pub(super) pid: u32,
    /// Whether its ancestors are kept for the same reason.
    pub(super) holds_relatives: bool,
}

/// Reason to reap a process only later. Its ancestors and descendants wait too.
#[derive(Clone)]
pub(super) struct Waiting {
    pub(super) rule: Arc<str>,
    /// Remaining delay in ns.
    pub(super) remaining_ns: u64,
    /// Pid of the process that the rule matches.
    pub(super) pid: u32,
}

impl Kept {
    fn new(row: &LeftoverRow, reason: KeepReason) -> Kept {
        Kept {
            reason,
            rule: None,
            pid: row.entry.key.pid,
            holds_relatives: false,
        }
    }

    fn by(self, rule: &Arc<str>) -> Kept {
        Kept {
            rule: Some(Arc::clone(rule)),
            ..self
        }
    }
}

/// Returns whether a program is a terminal emulator.
pub(crate) fn is_terminal(image: &Image) -> bool {
    let names = [file_name(&image.exe), &image.comm];
    names.iter().any(|name| TERMINALS.contains(name))
}

impl<'a> Judge<'a> {
    /// Returns the reason to keep a process for its own sake. `subtree_root` is the root of its subtree.
    pub(super) fn keep_reason(
        &self,
        row: &'a LeftoverRow,
        subtree_root: &'a LeftoverRow,
    ) -> Option<Kept> {
        let kept = |reason| Some(Kept::new(row, reason));
        // The user works in it.
        if self.own.contains(&row.entry.key.pid) {
            return kept(KeepReason::NeverSelf);
        }
        if let Some(kept) = self.keep_with_descendants(row) {
            return Some(kept);
        }
        if self.kept_by_users.contains(&tick(row.entry.key)) {
            return kept(KeepReason::KeptByUser);
        }
        let image = &row.entry.image;
        let rules = self.query.rules;
        let judging = rules.matching_member_rules(image);
        let keeps = |rule: &&Rule| {
            let keeps = matches!(rule.action, Action::Keep | Action::Report);
            // That of the unit is checked below.
            let is_of_unit = rule.when.is_of_own_unit_alone() && rule.matchers.is_empty();
            keeps && rule.may_keep() && !is_of_unit && may_hold(rule, row, subtree_root)
        };
        if let Some(rule) = judging.iter().map(|id| rules.rule(*id)).find(keeps) {
            let reason = if rule.when.uid.is_some_and(UidCondition::is_other) {
                KeepReason::OtherUid
            } else {
                KeepReason::KeepRule
            };
            return Some(Kept {
                holds_relatives: rule.keeps_relatives(),
                ..Kept::new(row, reason).by(&rule.name)
            });
        }
        let Fact::Known(env_markers) = &row.env_markers else {
            return kept(KeepReason::Unreadable);
        };
        if env_markers.keep && self.query.honor_keep {
            return kept(KeepReason::KeepMarker);
        }
        if env_markers.cut && self.query.honor_keep || image.exe.is_empty() {
            return kept(KeepReason::Unreadable);
        }
        if let Some(rule) = rules.unknown_keep(image, &judging) {
            return Some(Kept::new(row, KeepReason::Unreadable).by(rules.name(rule)));
        }
        match &row.unit {
            Fact::Known(unit) => {
                let managed = is_managed(unit) || self.is_main(row, unit);
                let own = managed && !self.has_inherited_unit(row, subtree_root, unit);
                own.then(|| Kept::new(row, KeepReason::OwnUnit).by(unit))
            }
            Fact::Unread | Fact::Unreadable => kept(KeepReason::Unreadable),
        }
    }

    /// Returns the first rule whose delay has not expired; `None` if none makes the process wait. Only rules count that
    /// reap and may match.
    pub(super) fn wait(
        &self,
        row: &'a LeftoverRow,
        subtree_root: &'a LeftoverRow,
    ) -> Option<Waiting> {
        let rules = self.query.rules;
        let waited = self.query.waited.get(&subtree_root.entry.key).copied();
        let judging = rules.matching_member_rules(&row.entry.image);
        judging.iter().find_map(|id| {
            let rule = rules.rule(*id);
            let rest = rule.delay_ns.saturating_sub(waited.unwrap_or(0));
            let waits = rule.action == Action::Reap && rule.may_keep() && rest > 0;
            (waits && may_hold(rule, row, subtree_root)).then(|| Waiting {
                rule: Arc::clone(&rule.name),
                remaining_ns: rest,
                pid: row.entry.key.pid,
            })
        })
    }

    /// Returns whether a process looks like the main process of a service of the user's service manager. Desktops start
    /// applications that way too, with the environment of the service manager.
    fn is_main(&self, row: &LeftoverRow, unit: &str) -> bool {
        let parent = self.parent(row);
        let started = parent.is_some_and(|parent| {
            parent.entry.image.exe.ends_with(b"/systemd") && self.is_adopter(parent)
        });
        started && unit.ends_with(".service") && row.entry.image.sid == row.entry.key.pid
    }

    /// Returns whether the unit of a process is not its own: it is that of the root of its subtree. For that root
    /// itself, it is that of a parent which is not the service manager.
    fn has_inherited_unit(
        &self,
        row: &LeftoverRow,
        subtree_root: &LeftoverRow,
        unit: &Arc<str>,
    ) -> bool {
        let above = if row.entry.key == subtree_root.entry.key {
            self.parent(row).filter(|parent| !self.is_adopter(parent))
        } else {
            Some(subtree_root)
        };
        above.is_some_and(|above| above.unit == Fact::Known(Arc::clone(unit)))
    }

    /// Returns the reason to keep a process with all of its descendants, adopted or not: it is a boundary, a server or
    /// a terminal emulator.
    pub(super) fn keep_with_descendants(&self, row: &LeftoverRow) -> Option<Kept> {
        let image = &row.entry.image;
        if let Some(rule) = self.query.rules.leaves_session(image) {
            let name = self.query.rules.name(rule);
            return Some(Kept::new(row, KeepReason::Boundary).by(name));
        }
        is_terminal(image).then(|| Kept::new(row, KeepReason::Terminal))
    }

    /// Returns whether a process is a host: a boundary, a terminal or another kept program that passes its environment
    /// to processes started in it. An agent's own daemon is excluded.
    pub(super) fn is_host(&self, row: &LeftoverRow) -> bool {
        let image = &row.entry.image;
        let rules = self.query.rules;
        if rules.agent(image).is_some() {
            return false;
        }
        let passes_on = |rule: &str| !NOT_HOSTS.contains(&rule);
        if let Some(kept) = self.keep_with_descendants(row) {
            return kept.rule.is_none_or(|rule| passes_on(&rule));
        }
        let judging = rules.matching_member_rules(image);
        let keeps = |rule: &Rule| {
            let names = !rule.matchers.is_empty() && !rule.when.window;
            rule.action == Action::Keep && names && passes_on(&rule.name)
        };
        let might_keep = || rules.unknown_keep(image, &judging);
        let has_markers =
            matches!(&row.env_markers, Fact::Known(env_markers) if !env_markers.markers.is_empty());
        let is_main = || matches!(&row.unit, Fact::Known(unit) if self.is_main(row, unit));
        judging.iter().any(|id| keeps(rules.rule(*id)))
            || has_markers && is_main()
            || might_keep().is_some_and(|id| passes_on(rules.name(id)))
    }
}

/// Returns whether a rule may match a process, by its conditions on uids, listening sockets and windows. `subtree_root`
/// is the root of its subtree, whose uids the condition compares with. False for a rule with `detached`: the process
/// table does not show what a process ran before. All other conditions are assumed to hold.
fn may_hold(rule: &Rule, row: &LeftoverRow, subtree_root: &LeftoverRow) -> bool {
    let (uid, listening) = (rule.when.uid, rule.when.listening);
    rule.when.detached != Some(true)
        && uid.is_none_or(|uid| uid.holds(row.entry.uids, subtree_root.entry.uids))
        && listening.is_none_or(|wanted| row.listening != Fact::Known(!wanted))
        && (!rule.when.window
            || row.window != Fact::Known(false) && rule.matches_program(&row.entry.image))
}

/// Returns whether a unit is managed as a service, and does not merely hold what a user has started.
fn is_managed(unit: &str) -> bool {
    !unit.is_empty() && !DESKTOP.iter().any(|start| unit.starts_with(start))
}
