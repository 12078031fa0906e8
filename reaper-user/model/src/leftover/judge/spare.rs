//! What keeps a process whatever speaks against it.

use std::sync::Arc;

use super::{Judge, file_name, tick};
use crate::event::Image;
use crate::facts::Fact;
use crate::leftover::{KeepReason, LeftoverRow};
use crate::ruleset::{Action, Rule, UidIs};

/// Terminals, by the file name of their program or the kernel's name of it.
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
/// Units in which a desktop puts what a person starts, with all that descends from it.
const DESKTOP: &[&str] = &[
    "app-",
    "vte-spawn-",
    "tmux-spawn-",
    "kitty-",
    "ptyxis-spawn-",
];
/// Rules whose programs are spared, but from which nobody starts anything that is their own: what runs containers,
/// what holds keys or sound, and servers that run what they are asked to as their clients would.
const HANDS_ON_NOTHING: &[&str] = &[
    "containers",
    "ssh-agent",
    "gpg-agent",
    "ssh-master",
    "sound",
    "sccache",
    "adb",
    "git-fsmonitor",
];

/// Why a process is kept.
#[derive(Clone)]
pub(super) struct Spared {
    pub(super) spare: KeepReason,
    pub(super) rule: Option<Arc<str>>,
    /// For whose sake.
    pub(super) pid: u32,
    /// Those above it are needed for that.
    pub(super) holds_kin: bool,
}

/// Why it is not to be reaped yet. Those above and below are waited for with it.
#[derive(Clone)]
pub(super) struct Waiting {
    pub(super) rule: Arc<str>,
    /// Ns.
    pub(super) rest: u64,
    /// For whose sake.
    pub(super) pid: u32,
}

impl Spared {
    fn new(row: &LeftoverRow, spare: KeepReason) -> Spared {
        Spared {
            spare,
            rule: None,
            pid: row.entry.key.pid,
            holds_kin: false,
        }
    }

    fn by(self, rule: &Arc<str>) -> Spared {
        Spared {
            rule: Some(Arc::clone(rule)),
            ..self
        }
    }
}

/// Whether it runs terminals for people.
pub(crate) fn is_terminal(image: &Image) -> bool {
    let names = [file_name(&image.exe), &image.comm];
    names.iter().any(|name| TERMINALS.contains(name))
}

impl<'a> Judge<'a> {
    /// Why it is kept for its own sake, as a part of what is below that head.
    pub(super) fn spare(&self, row: &'a LeftoverRow, head: &'a LeftoverRow) -> Option<Spared> {
        let spared = |spare| Some(Spared::new(row, spare));
        // A person is at work in it.
        if self.own.contains(&row.entry.key.pid) {
            return spared(KeepReason::NeverSelf);
        }
        if let Some(spared) = self.spare_of_all(row) {
            return Some(spared);
        }
        if self.kept.contains(&tick(row.entry.key)) {
            return spared(KeepReason::KeptByUser);
        }
        let image = &row.entry.image;
        let rules = self.question.rules;
        let judging = rules.matching_member_rules(image);
        // But for units, which are looked at below.
        let keeps = |rule: &&Rule| {
            let keeps = matches!(rule.action, Action::Keep | Action::Report);
            keeps && rule.may_keep() && !rule.when.is_of_units_alone() && may_hold(rule, row, head)
        };
        if let Some(rule) = judging.iter().map(|id| rules.rule(*id)).find(keeps) {
            let spare = if rule.when.uid == Some(UidIs::Other) {
                KeepReason::OtherUid
            } else {
                KeepReason::KeepRule
            };
            return Some(Spared {
                holds_kin: rule.keeps_relatives(),
                ..Spared::new(row, spare).by(&rule.name)
            });
        }
        let Fact::Known(trace) = &row.env_markers else {
            return spared(KeepReason::Unreadable);
        };
        if trace.keep && self.question.honor_keep {
            return spared(KeepReason::KeepMarker);
        }
        if trace.cut && self.question.honor_keep || image.exe.is_empty() {
            return spared(KeepReason::Unreadable);
        }
        if let Some(rule) = rules.unread_keep(image, &judging) {
            return Some(Spared::new(row, KeepReason::Unreadable).by(rules.name(rule)));
        }
        match &row.unit {
            Fact::Known(unit) => {
                let managed = is_managed(unit) || self.is_main(row, unit);
                let own = managed && !self.has_from_above(row, head, unit);
                own.then(|| Spared::new(row, KeepReason::OwnUnit).by(unit))
            }
            Fact::Unread | Fact::Unreadable => spared(KeepReason::Unreadable),
        }
    }

    /// The rule that gives it time which is not over yet.
    pub(super) fn wait(&self, row: &'a LeftoverRow, head: &'a LeftoverRow) -> Option<Waiting> {
        let rules = self.question.rules;
        let waited = self.question.waited.get(&head.entry.key).copied();
        let judging = rules.matching_member_rules(&row.entry.image);
        judging.iter().find_map(|id| {
            let rule = rules.rule(*id);
            let rest = rule.after.saturating_sub(waited.unwrap_or(0));
            let waits = rule.action == Action::Reap && rule.may_keep() && rest > 0;
            (waits && may_hold(rule, row, head)).then(|| Waiting {
                rule: Arc::clone(&rule.name),
                rest,
                pid: row.entry.key.pid,
            })
        })
    }

    /// Whether it looks like what a user's service manager starts a service by: so are applications, where a
    /// desktop has them started, with the environment that it was told of.
    fn is_main(&self, row: &LeftoverRow, unit: &str) -> bool {
        let parent = self.parent(row);
        let started = parent.is_some_and(|parent| {
            parent.entry.image.exe.ends_with(b"/systemd") && self.is_adopter(parent)
        });
        started && unit.ends_with(".service") && row.entry.image.sid == row.entry.key.pid
    }

    /// Whether a unit is not a process's own: that of its head or, for the head itself, that of a parent which is
    /// not the one that starts units.
    fn has_from_above(&self, row: &LeftoverRow, head: &LeftoverRow, unit: &Arc<str>) -> bool {
        let above = if row.entry.key == head.entry.key {
            self.parent(row).filter(|parent| !self.is_adopter(parent))
        } else {
            Some(head)
        };
        above.is_some_and(|above| above.unit == Fact::Known(Arc::clone(unit)))
    }

    /// What spares a process with all that is below it, adopted or not.
    pub(super) fn spare_of_all(&self, row: &LeftoverRow) -> Option<Spared> {
        let image = &row.entry.image;
        if let Some(rule) = self.question.rules.leaves_session(image) {
            let name = self.question.rules.name(rule);
            return Some(Spared::new(row, KeepReason::Boundary).by(name));
        }
        is_terminal(image).then(|| Spared::new(row, KeepReason::Terminal))
    }

    /// Whether a person, or what a rule keeps, may start processes from it, and they get its environment. An
    /// agent's own daemon is no such place.
    pub(super) fn is_host(&self, row: &LeftoverRow) -> bool {
        let image = &row.entry.image;
        let rules = self.question.rules;
        if rules.agent(image).is_some() {
            return false;
        }
        let hands_on = |rule: &str| !HANDS_ON_NOTHING.contains(&rule);
        if let Some(spared) = self.spare_of_all(row) {
            return spared.rule.is_none_or(|rule| hands_on(&rule));
        }
        let judging = rules.matching_member_rules(image);
        let keeps = |rule: &Rule| {
            rule.action == Action::Keep && !rule.matchers.is_empty() && hands_on(&rule.name)
        };
        let might_keep = || rules.unread_keep(image, &judging);
        let marked = matches!(&row.env_markers, Fact::Known(trace) if !trace.markers.is_empty());
        let is_main = || matches!(&row.unit, Fact::Known(unit) if self.is_main(row, unit));
        judging.iter().any(|id| keeps(rules.rule(*id)))
            || marked && is_main()
            || might_keep().is_some_and(|id| hands_on(rules.name(id)))
    }
}

/// Whether a rule may say something of it. Asked is what may be known; all else that it rests on may hold.
fn may_hold(rule: &Rule, row: &LeftoverRow, head: &LeftoverRow) -> bool {
    let (uid, listening) = (rule.when.uid, rule.when.listening);
    uid.is_none_or(|uid| uid.holds(row.entry.uids, head.entry.uids))
        && listening.is_none_or(|wanted| row.listening != Fact::Known(!wanted))
}

/// Whether somebody manages what runs in a unit, or it only holds what a person has started.
fn is_managed(unit: &str) -> bool {
    !unit.is_empty() && !DESKTOP.iter().any(|start| unit.starts_with(start))
}
