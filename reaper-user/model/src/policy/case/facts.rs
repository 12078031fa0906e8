//! Conditions on facts from /proc, except CPU use.

use super::{Case, ConditionResult};
use crate::Node;
use crate::facts::{Fact, FactSet, Facts, Stdio};
use crate::ruleset::{Rule, UidCondition, When};

impl Case<'_> {
    /// Evaluates the conditions on facts from /proc, except CPU use.
    pub(super) fn facts(&self, rule: &Rule) -> ConditionResult {
        let when = &rule.when;
        let read = self.read();
        let listening = when.listening.map_or(ConditionResult::Yes, |wanted| {
            ConditionResult::of(FactSet::LISTENING, &read.listening, |is| *is == wanted)
        });
        let tty = when.tty.map_or(ConditionResult::Yes, |wanted| {
            ConditionResult::of(FactSet::KERNEL_SESSION, &read.kernel_session, |now| {
                (now.tty != 0) == wanted
            })
        });
        let new_session = when.new_session.map_or(ConditionResult::Yes, |wanted| {
            let root = self.session.sid;
            let own = ConditionResult::of(FactSet::KERNEL_SESSION, &read.kernel_session, |now| {
                (now.sid != root) == wanted
            });
            if root == 0 {
                ConditionResult::Unreadable
            } else {
                own
            }
        });
        let piped = when.piped.map_or(ConditionResult::Yes, |wanted| {
            ConditionResult::of(FactSet::STDIO, &read.stdio, |stdio| {
                // Something outside of the session may write to the input of the root.
                let of_root = match &self.session.inherited {
                    Fact::Known(root) => root.input,
                    Fact::Unread | Fact::Unreadable => 0,
                };
                matches!(stdio, Stdio::Connected(input) if *input != of_root) == wanted
            })
        });
        let local = self.local_sockets(rule, read);
        let (units, markers) = (self.units(when, read), self.markers(when, read));
        let login = self.login(when);
        [
            units,
            markers,
            listening,
            tty,
            new_session,
            piped,
            local,
            login,
        ]
        .into_iter()
        .fold(ConditionResult::Yes, ConditionResult::and)
    }

    /// Evaluates the conditions on Unix sockets.
    fn local_sockets(&self, rule: &Rule, read: &Facts) -> ConditionResult {
        let when = &rule.when;
        let needs = FactSet::LOCAL_SOCKETS;
        let listens = when.listening_unix.map_or(ConditionResult::Yes, |wanted| {
            ConditionResult::of(needs, &read.local_sockets, |local| local.listens == wanted)
        });
        let has_window = match when.window {
            true if !self.model.has_display => ConditionResult::No,
            true => ConditionResult::of(needs, &read.local_sockets, |local| {
                let mut displays = local.displays.iter();
                displays.any(|display| !self.model.serves_display(self.session.id, display))
                    && rule.matches_program(&self.node.image)
            }),
            false => ConditionResult::Yes,
        };
        listens.and(has_window)
    }

    /// Evaluates the condition on a login, for a process of another user.
    pub(super) fn login(&self, when: &When) -> ConditionResult {
        let uids = self.node.uids;
        let is_by_sudo = self.node.is_by_sudo() && uids.real == uids.effective;
        if when.uid != Some(UidCondition::OtherLogin) || !is_by_sudo {
            return ConditionResult::Yes;
        }
        let of_root = match &self.session.inherited {
            Fact::Known(root) => root.login_uid,
            Fact::Unread | Fact::Unreadable => None,
        };
        ConditionResult::of(FactSet::INHERITED, &self.read().inherited, |own| {
            own.login_uid.is_none() || own.login_uid != of_root
        })
    }

    /// Evaluates the conditions on systemd units.
    pub(super) fn units(&self, when: &When, read: &Facts) -> ConditionResult {
        if when.own_unit.is_none() && when.units.is_empty() {
            return ConditionResult::Yes;
        }
        let own = when.own_unit.map_or(ConditionResult::Yes, |wanted| {
            let root = self.session.cgroup_id;
            if root != 0 && root == self.node.image.cgroup_id {
                return ConditionResult::from(!wanted);
            }
            match &read.unit {
                Fact::Known(own) if own.is_empty() => ConditionResult::from(!wanted),
                Fact::Known(own) => match self.session.is_in_unit(own) {
                    Some(is_same) => ConditionResult::from(is_same != wanted),
                    None if self.model.unit_source(self.session).is_some() => {
                        ConditionResult::Needs(FactSet::ROOT_UNIT)
                    }
                    None => ConditionResult::Unreadable,
                },
                _ => ConditionResult::of(FactSet::UNIT, &read.unit, |_| false),
            }
        });
        let named = ConditionResult::of(FactSet::UNIT, &read.unit, |unit| {
            when.units.is_empty() || when.units.iter().any(|glob| glob.is_match(unit.as_bytes()))
        });
        if when.units.is_empty() {
            own
        } else {
            own.and(named)
        }
    }

    /// Evaluates the conditions on environment markers and multiplexers.
    pub(super) fn markers(&self, when: &When, read: &Facts) -> ConditionResult {
        let has = |bits: u64| {
            ConditionResult::of(FactSet::MARKERS, &read.markers, |markers| {
                markers & bits != 0
            })
        };
        let matches = if when.markers.is_empty() {
            ConditionResult::Yes
        } else {
            has(when.marker_bits)
        };
        let multiplexed = when.multiplexed.map_or(ConditionResult::Yes, |wanted| {
            let mut above = self.model.tree.ancestors(self.node.key);
            if self.session.multiplexed || above.any(Node::is_multiplexer) {
                return ConditionResult::from(wanted);
            }
            let bits = self.model.rules.multiplexer_bits();
            ConditionResult::of(FactSet::MARKERS, &read.markers, |markers| {
                (markers & bits != 0) == wanted
            })
        });
        matches.and(multiplexed)
    }
}
