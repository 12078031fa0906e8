//! Applies requests of users to keep a process, alone or with all of its descendants.
//!
//! Several requests can apply to one process. Each stays in force until it expires or is revoked. The one that lasts
//! longest determines the expiry.
//!
//! Descent is known from forks. A discovered process has no reported fork: the event was lost, or the process is older
//! than the service. Its entry in the kernel's map then says more than its current parent: a child of a kept process
//! has the flag `MEMBER_KEPT` from its fork on. In doubt, the process is kept.

use reaper_common::MEMBER_KEPT;

use super::event::{Membership, ProcessKey, TICK_NS};
use super::keeps::KeepRequest;
pub use super::keeps::{StoredKeep, UserKeep};
use super::session::SessionId;
use super::tree::tick;
use super::{Model, Node, Tree};

/// Process that may descend from a kept process.
#[derive(Clone, Copy)]
struct KeepCandidate {
    key: ProcessKey,
    session: Option<SessionId>,
    /// Possible parents, the most likely first.
    possible_parents: [Option<ProcessKey>; 3],
    /// Whether the fork was reported, so that the first possible parent is the real one.
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
    /// Keeps a member, with its living descendants if requested. Returns the number of kept processes, 0 if the process
    /// is not a member.
    ///
    /// Replaces an earlier request for the same process. Descendants stay kept if they were, because a keep must not
    /// cause a reap.
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
        let stored = StoredKeep {
            key,
            session,
            is_direct: true,
            keep,
        };
        self.add_keep_request(&[stored], self.clock.now());
        self.inherit_keeps(|request| request.keep == keep);
        self.kept_by(&keep).count()
    }

    /// Puts the requests that a previous service stored into force again. Their processes need not be known yet. Exited
    /// ones may have living descendants.
    pub fn restore_keeps(&mut self, mut all: Vec<StoredKeep>) {
        let order = |stored: &StoredKeep| {
            let StoredKeep { key, keep, .. } = stored;
            (
                keep.made_at,
                keep.by_uid,
                !stored.is_direct,
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

    /// Adds a request, which replaces an earlier one for the same process. `targets` are the processes known to be kept
    /// by it at `at`, in ns since boot; 0 for a request to a previous service. The first one is the process that the
    /// user named.
    fn add_keep_request(&mut self, targets: &[StoredKeep], at: u64) {
        let Some(&StoredKeep {
            key: top,
            session,
            is_direct,
            keep,
        }) = targets.first()
        else {
            return;
        };
        let same = |request: &&KeepRequest| is_direct && request.process.has_same_tick(top);
        let replaced = self
            .keep_requests
            .iter()
            .filter(same)
            .map(|request| request.keep);
        self.forget_keeps(&replaced.collect::<Vec<_>>());
        self.forget_finished_keeps();
        // A session can have a new name after a restart: the root from before a relaunch may be unknown to this
        // service.
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
            names: targets.iter().map(|stored| tick(stored.key)).collect(),
            session,
            is_session_unknown: known.is_none(),
            is_whole_session: is_root || session.has_same_tick(top),
            at,
        });
    }

    /// Revokes the next request that keeps a process, for all processes that it keeps. Returns their number. See
    /// [`Model::keep_to_revoke`].
    pub fn unkeep(&mut self, key: ProcessKey) -> usize {
        let Some(keep) = self.keep_to_revoke(key) else {
            return 0;
        };
        let count = self.kept_by(&keep).count();
        self.forget_keeps(&[keep]);
        count
    }

    /// Returns the request to revoke next for a process: the one for the process itself, then the one that lasts
    /// longest. Returns `None` if no request in force keeps it.
    pub fn keep_to_revoke(&self, key: ProcessKey) -> Option<UserKeep> {
        let now = self.monotonic_now();
        let kept = || self.tree.get(key)?.user_keep().copied();
        let kept = || kept().filter(|keep| keep.is_in_force(now));
        self.own_keep(key).or_else(kept)
    }

    /// Returns the living process for which a user made the request that [`Model::keep_to_revoke`] returns for `key`.
    /// Returns `None` if that is `key` itself, or if `key` is not kept.
    pub fn kept_with(&self, key: ProcessKey) -> Option<ProcessKey> {
        let request = self.keep_to_revoke(key)?;
        let request = self
            .keep_requests
            .iter()
            .find(|known| known.keep == request)?;
        let top = self.tree.get(request.process)?.key;
        (!top.has_same_tick(key)).then_some(top)
    }

    /// Returns the request for this very process, if it is in force.
    fn own_keep(&self, key: ProcessKey) -> Option<UserKeep> {
        let now = self.monotonic_now();
        let own = |request: &&KeepRequest| {
            request.process.has_same_tick(key) && request.keep.is_in_force(now)
        };
        self.keep_requests
            .iter()
            .find(own)
            .map(|request| request.keep)
    }

    /// Returns the living processes that a request keeps, in no order.
    pub fn kept_by(&self, keep: &UserKeep) -> impl Iterator<Item = &Node> {
        let all = self.tree.iter();
        all.filter(|node| node.state.keeps.user_keeps.contains(keep))
    }

    #[cfg(test)]
    pub(super) fn keep_request_count(&self) -> usize {
        self.keep_requests.len()
    }

    /// Returns the processes kept by users now, in no order.
    pub fn kept_by_users(&self) -> impl Iterator<Item = (&Node, &UserKeep)> {
        let now = self.monotonic_now();
        let all = self.tree.iter();
        all.filter_map(move |node| {
            Some((node, node.user_keep().filter(|keep| keep.is_in_force(now))?))
        })
    }

    /// Removes requests that have expired or whose session is neither open nor recently closed. No member of such a
    /// session can appear.
    pub(super) fn forget_finished_keeps(&mut self) {
        let now = self.monotonic_now();
        let over = |request: &&KeepRequest| {
            let may_be =
                request.is_session_unknown || self.sessions.id_by_name(request.session).is_some();
            !request.keep.is_in_force(now) || !may_be
        };
        let over = self
            .keep_requests
            .iter()
            .filter(over)
            .map(|request| request.keep);
        self.forget_keeps(&over.collect::<Vec<_>>());
    }

    fn forget_keeps(&mut self, over: &[UserKeep]) {
        if !over.is_empty() {
            self.keep_requests
                .retain(|request| !over.contains(&request.keep));
            self.tree.forget_keeps(over);
        }
    }

    /// Records which requests keep a process that became known or a member. `creator` is known if its fork was
    /// reported.
    pub(super) fn inherit_keep(&mut self, key: ProcessKey, creator: Option<ProcessKey>) {
        let node = self
            .tree
            .get(key)
            .filter(|_| !self.keep_requests.is_empty());
        if let Some(candidate) = node.map(|node| KeepCandidate::living(node, creator)) {
            self.put_keeps(&candidate, |_| true);
        }
    }

    /// Puts requests into force that name a session which has opened only now. They also keep its processes that are
    /// already known.
    pub(super) fn inherit_awaited_keeps(&mut self, session: SessionId) {
        let mut found = Vec::new();
        for request in self
            .keep_requests
            .iter_mut()
            .filter(|request| request.is_session_unknown)
        {
            if self.sessions.id_by_name(request.session) == Some(session) {
                request.is_session_unknown = false;
                found.push(request.keep);
            }
        }
        if !found.is_empty() {
            self.inherit_keeps(|request| found.contains(&request.keep));
        }
    }

    /// Records which of the selected requests keep a process, for all living processes and exited members with living
    /// descendants, oldest first.
    fn inherit_keeps(&mut self, selects: impl Fn(&KeepRequest) -> bool) {
        let living = self.tree.iter();
        let living = living.map(|node| KeepCandidate::living(node, None));
        let exited = self.tree.all_exited().map(|exited| KeepCandidate {
            key: exited.key,
            session: exited.remains.lineage.session,
            possible_parents: [exited.birth_parent, None, None],
            forked: true,
            membership: None,
        });
        let mut all: Vec<KeepCandidate> = living.chain(exited).collect();
        all.sort_unstable_by_key(|candidate| (candidate.key.start, candidate.key.pid));
        for candidate in all {
            self.put_keeps(&candidate, &selects);
        }
    }

    /// Adds the selected requests that keep a process to it. Removes none.
    fn put_keeps(&mut self, candidate: &KeepCandidate, selects: impl Fn(&KeepRequest) -> bool) {
        let requests = self.keep_requests.iter().filter(|request| selects(request));
        let keeps = requests.filter(|request| self.keep_applies_to(request, candidate));
        let keeps: Vec<UserKeep> = keeps.map(|request| request.keep).collect();
        if let Some(known) = self
            .tree
            .keeps_mut(candidate.key)
            .filter(|_| !keeps.is_empty())
        {
            known.retain(|keep| !keeps.contains(keep));
            known.extend(keeps);
        }
    }

    /// Returns whether a request keeps a process: it names the process, or an ancestor with its descendants.
    fn keep_applies_to(&self, request: &KeepRequest, candidate: &KeepCandidate) -> bool {
        if request.names.contains(&tick(candidate.key)) {
            return true;
        }
        let holds = request.keep.with_descendants && request.keep.is_in_force(self.monotonic_now());
        let Some(session) = candidate.session.filter(|_| holds) else {
            return false;
        };
        let descends = |parent| {
            let keeps = self.tree.keeps_of(parent);
            keeps.is_some_and(|keeps| keeps.contains(&request.keep))
        };
        let named = self.sessions.id_by_name(request.session);
        let mut outwards = self.sessions.with_enclosing(session);
        let within = outwards.any(|session| Some(session.id) == named);
        candidate.possible_parents().any(descends)
            || within && (request.is_whole_session || self.may_descend(candidate, request))
    }

    /// Returns whether a process may descend from the process of a request, although no known parent of it does.
    fn may_descend(&self, candidate: &KeepCandidate, request: &KeepRequest) -> bool {
        let older =
            |one: ProcessKey, other: ProcessKey| one.start / TICK_NS < other.start / TICK_NS;
        let is_flagged_kept = candidate.membership.map(|entry| entry.has(MEMBER_KEPT));
        let root = self.sessions.by_first_root(request.session);
        if older(candidate.key, request.process)
            || root.is_some_and(|session| session.root == candidate.key)
            || is_flagged_kept == Some(false) && candidate.key.start > request.at
        {
            return false;
        }
        let known = |parent: &ProcessKey| self.tree.keeps_of(*parent).is_some();
        let Some(parent) = candidate.possible_parents().find(known) else {
            return true;
        };
        if candidate.forked && candidate.possible_parents().next() == Some(parent) {
            return false;
        }
        let lineage = self.tree.lineage_of(parent);
        if lineage.is_none_or(|lineage| lineage.session.is_none()) {
            return true;
        }
        // A member can be an adopter too. It then is an ancestor of the process whose children it adopts. So either the
        // same request keeps the adopter, or the adopter is an ancestor of the process in the request.
        let node = self.tree.get(parent);
        let is_flagged = |node: &Node| node.membership.is_some_and(|entry| entry.has(MEMBER_KEPT));
        let above = || self.tree.ancestors(request.process);
        let apart =
            above().any(|above| above.key.pid == 1) && above().all(|above| above.key != parent);
        let adopts = !apart && !older(request.process, parent)
            || node.is_some_and(|node| node.namespace_init);
        adopts
            && is_flagged_kept != Some(false)
            && !(is_flagged_kept == Some(true) && node.is_some_and(is_flagged))
    }
}

impl Tree {
    /// Returns the requests that keep a living or remembered process; `None` if it is unknown.
    fn keeps_of(&self, key: ProcessKey) -> Option<&[UserKeep]> {
        if let Some(node) = self.get(key) {
            return Some(&node.state.keeps.user_keeps);
        }
        let exited = self.exited(key).map(|exited| &exited.remains);
        let remains = exited.or_else(|| self.recent_remains(key))?;
        Some(&remains.user_keeps)
    }

    /// Returns the requests that keep a living process, or one with living descendants, for changes.
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
