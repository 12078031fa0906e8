//! What users have asked to be kept, one process at a time, or with all that descends from it.
//!
//! A wish is for the process that it was asked for, and, if it is for a tree, for whoever descends from that by birth.
//! Several may be for one process, each of which stands until it is over or taken back; the one that lasts longest
//! tells until when.
//!
//! Who descends from whom is told by forks. Of one that was found instead, be it that its fork was lost or that it is
//! older than this program, the kernel's mark says more than the parent it has by now: a child of one that is spared
//! has that in its mark from birth on. What then is still in doubt is kept.

use reaper_common::MEMBER_KEPT;

use super::event::{Membership, ProcessKey, TICK_NS};
use super::keeps::KeepRequest;
pub use super::keeps::{StoredKeep, UserKeep};
use super::session::SessionId;
use super::tree::tick;
use super::{Model, Node, Tree};

/// Of whom it is asked whether they descend from a kept process.
#[derive(Clone, Copy)]
struct KeepCandidate {
    key: ProcessKey,
    session: Option<SessionId>,
    /// Who may have made it, the likeliest first.
    possible_parents: [Option<ProcessKey>; 3],
    /// The first of these has, if it is known at all.
    forked: bool,
    membership: Option<Membership>,
}

impl KeepCandidate {
    fn living(node: &Node, creator: Option<ProcessKey>) -> KeepCandidate {
        KeepCandidate {
            key: node.key,
            session: node.state.member.session,
            possible_parents: [creator, node.birth_parent, node.parent],
            forked: creator.is_some() || node.reported.forked,
            membership: node.membership,
        }
    }

    fn possible_parents(&self) -> impl Iterator<Item = ProcessKey> {
        self.possible_parents.into_iter().flatten()
    }
}

impl Model {
    /// Keeps a member, with its living descendants where that is asked for; says how many. None, where the
    /// process is a member of nothing.
    ///
    /// What was asked for it before is replaced, but what was kept with it stays so: to keep something has nothing
    /// reaped.
    pub fn keep(&mut self, key: ProcessKey, mut keep: UserKeep) -> usize {
        let own = |node: &Node| {
            Some((
                node.key,
                self.sessions.get(node.state.member.session?)?.first_root,
            ))
        };
        let Some((key, session)) = self.tree.get(key).and_then(own) else {
            return 0;
        };
        keep.with_descendants |= self
            .own_keep(key)
            .is_some_and(|before| before.with_descendants);
        let noted = StoredKeep {
            key,
            session,
            is_direct: true,
            keep,
        };
        self.add_keep_request(&[noted], self.clock.now());
        self.inherit_keeps(|wish| wish.keep == keep);
        self.kept_by(&keep).count()
    }

    /// Keeps what the service before this one was asked to keep. Whom a wish names need not be known yet, and of those
    /// who are gone descendants may live.
    pub fn restore_keeps(&mut self, mut all: Vec<StoredKeep>) {
        let order = |noted: &StoredKeep| {
            let StoredKeep { key, keep, .. } = noted;
            (
                keep.made_at,
                keep.by_uid,
                !noted.is_direct,
                key.start,
                key.pid,
            )
        };
        all.sort_unstable_by_key(order);
        for named in all.chunk_by(|one, other| one.keep == other.keep) {
            self.add_keep_request(named, 0);
        }
        self.inherit_keeps(|_| true);
    }

    /// Takes note of a wish, in place of what was asked for the same process. It is for all `named`, who were kept by
    /// it at `at`; for the first of them it was asked.
    fn add_keep_request(&mut self, named: &[StoredKeep], at: u64) {
        let Some(&StoredKeep {
            key: top,
            session,
            is_direct: asked,
            keep,
        }) = named.first()
        else {
            return;
        };
        let same = |wish: &&KeepRequest| asked && wish.process.has_same_tick(top);
        let replaced = self.keep_requests.iter().filter(same).map(|wish| wish.keep);
        self.forget_keeps(&replaced.collect::<Vec<_>>());
        self.forget_finished_keeps();
        // It may be known by another name by now: what had relaunched it is not.
        let own = self
            .tree
            .get(top)
            .and_then(|node| node.state.member.session);
        let own = own.and_then(|id| self.sessions.get(id));
        let known = own.or_else(|| self.sessions.by_first_root(session));
        let session = known.map_or(session, |known| known.first_root);
        let is_root = known.is_some_and(|known| known.root.has_same_tick(top));
        self.keep_requests.push(KeepRequest {
            keep,
            process: top,
            names: named.iter().map(|noted| tick(noted.key)).collect(),
            session,
            is_session_unknown: known.is_none(),
            is_whole_session: is_root || session.has_same_tick(top),
            at,
        });
    }

    /// Takes back what a user has asked for, for all that was kept by it; says how many. See [`Model::keep_to_revoke`].
    pub fn unkeep(&mut self, key: ProcessKey) -> usize {
        let Some(keep) = self.keep_to_revoke(key) else {
            return 0;
        };
        let count = self.kept_by(&keep).count();
        self.forget_keeps(&[keep]);
        count
    }

    /// The wish that is to be taken back next of those by which a process is kept: what was asked for itself first,
    /// then what keeps it for longest.
    pub fn keep_to_revoke(&self, key: ProcessKey) -> Option<UserKeep> {
        let now = self.monotonic_now();
        let kept = || self.tree.get(key)?.user_keep().copied();
        let kept = || kept().filter(|keep| keep.is_in_force(now));
        self.own_keep(key).or_else(kept)
    }

    /// The living process with which another is kept for which nothing was asked itself.
    pub fn kept_with(&self, key: ProcessKey) -> Option<ProcessKey> {
        let wish = self.keep_to_revoke(key)?;
        let wish = self.keep_requests.iter().find(|known| known.keep == wish)?;
        let top = self.tree.get(wish.process)?.key;
        (!top.has_same_tick(key)).then_some(top)
    }

    /// What was asked for this very process, and is not over.
    fn own_keep(&self, key: ProcessKey) -> Option<UserKeep> {
        let now = self.monotonic_now();
        let own =
            |wish: &&KeepRequest| wish.process.has_same_tick(key) && wish.keep.is_in_force(now);
        self.keep_requests.iter().find(own).map(|wish| wish.keep)
    }

    /// Living processes that a wish is for.
    pub fn kept_by(&self, keep: &UserKeep) -> impl Iterator<Item = &Node> {
        let all = self.tree.iter();
        all.filter(|node| node.state.keeps.user_keeps.contains(keep))
    }

    #[cfg(test)]
    pub(super) fn wishes(&self) -> usize {
        self.keep_requests.len()
    }

    /// Who is kept by a user's wish now, in no order.
    pub fn kept_by_users(&self) -> impl Iterator<Item = (&Node, &UserKeep)> {
        let now = self.monotonic_now();
        let all = self.tree.iter();
        all.filter_map(move |node| {
            Some((node, node.user_keep().filter(|keep| keep.is_in_force(now))?))
        })
    }

    /// Forgets wishes that are over, or whose session is: nobody can turn up in it any more.
    pub(super) fn forget_finished_keeps(&mut self) {
        let now = self.monotonic_now();
        let over = |wish: &&KeepRequest| {
            let may_be =
                wish.is_session_unknown || self.sessions.id_by_name(wish.session).is_some();
            !wish.keep.is_in_force(now) || !may_be
        };
        let over = self.keep_requests.iter().filter(over).map(|wish| wish.keep);
        self.forget_keeps(&over.collect::<Vec<_>>());
    }

    fn forget_keeps(&mut self, over: &[UserKeep]) {
        if !over.is_empty() {
            self.keep_requests.retain(|wish| !over.contains(&wish.keep));
            self.tree.forget_keeps(over);
        }
    }

    /// Has a process kept that has come to be known or to be a member, where a wish is for it. `creator`: who has
    /// made it, if its fork has told so.
    pub(super) fn inherit_keep(&mut self, key: ProcessKey, creator: Option<ProcessKey>) {
        let node = self
            .tree
            .get(key)
            .filter(|_| !self.keep_requests.is_empty());
        if let Some(of) = node.map(|node| KeepCandidate::living(node, creator)) {
            self.put_keeps(&of, |_| true);
        }
    }

    /// A session has opened: what was asked for before it was known is for those who are its members.
    pub(super) fn inherit_awaited_keeps(&mut self, session: SessionId) {
        let mut found = Vec::new();
        for wish in self
            .keep_requests
            .iter_mut()
            .filter(|wish| wish.is_session_unknown)
        {
            if self.sessions.id_by_name(wish.session) == Some(session) {
                wish.is_session_unknown = false;
                found.push(wish.keep);
            }
        }
        if !found.is_empty() {
            self.inherit_keeps(|wish| found.contains(&wish.keep));
        }
    }

    /// Goes through all whom some wishes may be for, the oldest first, the dead of whom something is remembered among
    /// them.
    fn inherit_keeps(&mut self, of_these: impl Fn(&KeepRequest) -> bool) {
        let living = self.tree.iter();
        let living = living.map(|node| KeepCandidate::living(node, None));
        let dead = self.tree.all_exited().map(|exited| KeepCandidate {
            key: exited.key,
            session: exited.remains.lineage.session,
            possible_parents: [exited.birth_parent, None, None],
            forked: true,
            membership: None,
        });
        let mut all: Vec<KeepCandidate> = living.chain(dead).collect();
        all.sort_unstable_by_key(|of| (of.key.start, of.key.pid));
        for of in all {
            self.put_keeps(&of, &of_these);
        }
    }

    fn put_keeps(&mut self, of: &KeepCandidate, of_these: impl Fn(&KeepRequest) -> bool) {
        let wishes = self.keep_requests.iter().filter(|wish| of_these(wish));
        let keeps = wishes.filter(|wish| self.keep_applies_to(wish, of));
        let keeps: Vec<UserKeep> = keeps.map(|wish| wish.keep).collect();
        if let Some(known) = self.tree.keeps_mut(of.key).filter(|_| !keeps.is_empty()) {
            known.retain(|keep| !keeps.contains(keep));
            known.extend(keeps);
        }
    }

    /// Whether a wish is for a process: it names it, or one from which this descends.
    fn keep_applies_to(&self, wish: &KeepRequest, of: &KeepCandidate) -> bool {
        if wish.names.contains(&tick(of.key)) {
            return true;
        }
        let holds = wish.keep.with_descendants && wish.keep.is_in_force(self.monotonic_now());
        let Some(session) = of.session.filter(|_| holds) else {
            return false;
        };
        let descends = |maker| {
            let keeps = self.tree.keeps_of(maker);
            keeps.is_some_and(|keeps| keeps.contains(&wish.keep))
        };
        let named = self.sessions.id_by_name(wish.session);
        let mut outwards = self.sessions.with_enclosing(session);
        let within = outwards.any(|session| Some(session.id) == named);
        of.possible_parents().any(descends)
            || within && (wish.is_whole_session || self.may_descend(of, wish))
    }

    /// Whether a process may descend from the one that a wish was asked for, though nobody who may have made it does
    /// for all that is known.
    fn may_descend(&self, of: &KeepCandidate, wish: &KeepRequest) -> bool {
        let older =
            |one: ProcessKey, other: ProcessKey| one.start / TICK_NS < other.start / TICK_NS;
        let spared = of.membership.map(|mark| mark.has(MEMBER_KEPT));
        let root = self.sessions.by_first_root(wish.session);
        if older(of.key, wish.process)
            || root.is_some_and(|session| session.root == of.key)
            || spared == Some(false) && of.key.start > wish.at
        {
            return false;
        }
        let known = |maker: &ProcessKey| self.tree.keeps_of(*maker).is_some();
        let Some(maker) = of.possible_parents().find(known) else {
            return true;
        };
        if of.forked && of.possible_parents().next() == Some(maker) {
            return false;
        }
        let lineage = self.tree.lineage_of(maker);
        if lineage.is_none_or(|lineage| lineage.session.is_none()) {
            return true;
        }
        // A member may be an adopter too: it is an ancestor of those whose children it adopts, so that it is kept by
        // the same wish itself, or an ancestor of who that was asked for.
        let node = self.tree.get(maker);
        let is_marked = |node: &Node| node.membership.is_some_and(|mark| mark.has(MEMBER_KEPT));
        let above = || self.tree.ancestors(wish.process);
        let apart =
            above().any(|above| above.key.pid == 1) && above().all(|above| above.key != maker);
        let adopts =
            !apart && !older(wish.process, maker) || node.is_some_and(|node| node.namespace_init);
        adopts && spared != Some(false) && !(spared == Some(true) && node.is_some_and(is_marked))
    }
}

impl Tree {
    /// Returns the requests of users for a process which lives or is remembered; `None` if nothing is known of it.
    fn keeps_of(&self, key: ProcessKey) -> Option<&[UserKeep]> {
        if let Some(node) = self.get(key) {
            return Some(&node.state.keeps.user_keeps);
        }
        let exited = self.exited(key).map(|exited| &exited.remains);
        let remains = exited.or_else(|| self.recent_remains(key))?;
        Some(&remains.user_keeps)
    }

    /// Returns the same of a process that lives or has living descendants.
    fn keeps_mut(&mut self, key: ProcessKey) -> Option<&mut Vec<UserKeep>> {
        if self.get(key).is_some() {
            return self
                .get_mut(key)
                .map(|node| &mut node.state.keeps.user_keeps);
        }
        self.remains_mut(key).map(|remains| &mut remains.user_keeps)
    }

    /// Removes requests from all processes.
    fn forget_keeps(&mut self, over: &[UserKeep]) {
        for state in self.all_states_mut() {
            state.keeps.user_keeps.retain(|keep| !over.contains(keep));
        }
        for remains in self.all_remains_mut() {
            remains.user_keeps.retain(|keep| !over.contains(keep));
        }
    }
}
