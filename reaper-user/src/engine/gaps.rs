//! What the kernel did not tell: lost records, records that were none, processes that its map had no room
//! for. It is announced, looked for by a thread of its own, and taken in; until then nothing new is decided.

use std::time::Duration;

use tokio::sync::oneshot;

use super::reconcile::Reconciled;
use super::survey::{Survey, SurveyScope, Surveyor};
use super::{Engine, EngineError};
use crate::export::EventBody;
use reaper_host::kernel::Clock;
use reaper_host::source::Lost;
use reaper_host::source::procfs::Liveness;
use reaper_model::event::{Event, EventKind, Provenance};

/// How long after a survey that failed the next one begins, at first and at most.
const DELAY_MIN: Duration = Duration::from_millis(50);
const DELAY_MAX: Duration = Duration::from_secs(1);

/// A stretch of time in which events may be missing.
pub struct Gap {
    reason: &'static str,
    /// What is missing.
    total: u64,
    /// In ns since boot.
    opened: u64,
    search: Search,
    /// How long to wait should the search fail.
    delay: Duration,
}

/// How what is missing is being found.
enum Search {
    Survey(oneshot::Receiver<Result<Survey, EngineError>>),
    /// It has failed. The next one begins at this time, in nanoseconds of the monotonic clock.
    Again(u64),
}

impl Gap {
    /// As [`EventBody::GapOpen`] has it.
    pub(super) fn reason(&self) -> &'static str {
        self.reason
    }
}

impl Engine {
    /// If records were lost, or there was no room for members, says so and sees to it.
    pub(super) fn look_for_loss(&mut self) {
        let lost = self.source.lost();
        if lost.total != self.lost.total {
            let since = lost.since(&self.lost);
            self.count.lost += since.total;
            self.lost = lost;
            for session in self.model.sessions.iter() {
                self.sessions.entry(session.id).or_default().lost += since.total;
                self.map_sync.dirty.insert(session.id);
            }
            let maps = self.source.maps_mut();
            if let Some(Err(error)) = maps.map(|maps| maps.set_lost_reported(lost.total)) {
                tracing::error!("{error}");
            }
            self.open_gap("records_lost", since);
        }
        let unfollowed = self.source.untracked_members();
        if unfollowed != self.untracked_members {
            let count = unfollowed - self.untracked_members.min(unfollowed);
            self.untracked_members = unfollowed;
            let room = self.source.maps().map_or(0, |maps| maps.capacity());
            self.emit(EventBody::MemberMapFull {
                count,
                capacity: room,
            });
            let total = Lost {
                total: count,
                ..Lost::default()
            };
            self.open_gap("member_map_full", total);
        }
    }

    /// If the kernel has left a probe out, says so and sees to it: nobody counts what was not told.
    pub(super) fn look_for_skips(&mut self) {
        let skipped = self.source.skipped();
        if skipped > self.skipped_probes {
            let total = Lost {
                total: skipped - self.skipped_probes,
                ..Lost::default()
            };
            self.skipped_probes = skipped;
            self.open_gap("probes_missed", total);
        }
    }

    /// A record was none: what it would have told is as good as lost.
    pub(super) fn note_malformed(&mut self) {
        let total = Lost {
            total: 1,
            ..Lost::default()
        };
        self.open_gap("record_malformed", total);
    }

    pub(super) fn open_gap(&mut self, reason: &'static str, missing: Lost) {
        self.has_losses = true;
        let (total, by_kind) = (missing.total, missing.named());
        if self.gap.is_some() {
            // The survey that is on its way may be too early for these.
            let (_, before) = self.next_gap.get_or_insert((reason, Lost::default()));
            before.add(&missing);
            return;
        }
        self.gaps += 1;
        self.emit(EventBody::GapOpen {
            reason,
            source: self.source.name(),
            total,
            by_kind,
        });
        self.gap = Some(Gap {
            reason,
            total,
            opened: self.kernel.clock.boot_time(),
            search: self.search(DELAY_MIN),
            delay: DELAY_MIN,
        });
    }

    /// Begins a survey, in a thread of its own.
    fn search(&self, delay: Duration) -> Search {
        // Who is not followed is not in the map: then all of /proc has to be looked at.
        let complete = self.is_mapped();
        let everybody = !self.source.is_filtered() || !complete;
        let whom = if everybody {
            SurveyScope::All
        } else {
            SurveyScope::Members
        };
        let begun = Surveyor::new(&self.kernel, &*self.source, complete).and_then(|surveyor| {
            let (done, survey) = oneshot::channel();
            // Nobody is there to take it where the engine has stopped meanwhile.
            let work = move || drop(done.send(surveyor.survey(whom)));
            std::thread::Builder::new()
                .name("survey".into())
                .spawn(work)?;
            Ok(survey)
        });
        match begun {
            Ok(survey) => Search::Survey(survey),
            Err(error) => {
                tracing::error!("cannot look for what was lost: {error}; trying again");
                Search::Again(self.kernel.clock.after(delay))
            }
        }
    }

    /// Waits for what a gap's survey has found; for ever if there is no gap. Without an answer it is
    /// time to begin anew.
    pub(super) async fn surveyed(
        clock: &dyn Clock,
        gap: &mut Option<Gap>,
    ) -> Option<Result<Survey, EngineError>> {
        match gap.as_mut().map(|gap| &mut gap.search) {
            Some(Search::Survey(survey)) => Some(match survey.await {
                Ok(survey) => survey,
                Err(_) => Err(std::io::Error::other("the survey was given up").into()),
            }),
            Some(Search::Again(at)) => {
                clock.sleep_until(*at).await;
                None
            }
            None => std::future::pending().await,
        }
    }

    /// Prepares the model for the survey of a gap. If the survey has failed, starts another one and returns `None`: the gap
    /// stays open.
    pub(super) fn gap_survey(
        &mut self,
        survey: Option<Result<Survey, EngineError>>,
    ) -> Option<Survey> {
        let survey = match survey {
            Some(Ok(survey)) => survey,
            failed => {
                if let Some(Err(error)) = failed {
                    tracing::error!("cannot look for what was lost: {error}; trying again");
                }
                let delay = self.gap.as_ref().map_or(DELAY_MIN, |gap| gap.delay);
                let search = self.search(delay);
                if let Some(gap) = &mut self.gap {
                    gap.delay = (2 * delay).min(DELAY_MAX);
                    gap.search = search;
                }
                return None;
            }
        };
        self.model.forget_program_facts();
        // Where nothing else knows whose they are, what they have from their makers has to say it.
        self.model
            .set_infers_membership(self.source.probes().is_none());
        self.attribute_late_discovered();
        Some(survey)
    }

    /// Closes a gap and decides by what was found, also where more events have been lost meanwhile: a ring that is always
    /// full must not keep everything from being reaped. `unreadable` processes could not be read.
    pub(super) fn close_gap(&mut self, reconciled: Reconciled, unreadable: u32) {
        let Reconciled { found, gone } = reconciled;
        if self.source.is_filtered() {
            self.model.forget_untracked();
        }
        let Some(gap) = self.gap.take() else { return };
        self.emit(EventBody::GapClose {
            reason: gap.reason,
            total: gap.total,
            processes_recovered: found,
            exits_recovered: gone,
            duration: self.kernel.clock.boot_time().saturating_sub(gap.opened),
        });
        // What could not be read is asked for again before a signal.
        self.has_losses = self.next_gap.is_some() || unreadable > 0;
        self.decide();
        if let Some((reason, missing)) = self.next_gap.take() {
            self.open_gap(reason, missing);
        }
        self.sync_maps();
    }

    /// Looks up in /proc who has the orphans of which the kernel's record did not come.
    pub(super) fn find_adopters(&mut self) {
        for child in std::mem::take(&mut self.ingest.without_adopter) {
            let node = self.model.tree.get(child);
            let Some(node) = node.filter(|node| node.parent.is_none()) else {
                continue;
            };
            let old_parent = node.orphaned.map(|orphaned| orphaned.old_parent);
            let Ok(Liveness::Alive { parent }) = self.kernel.processes.probe(child) else {
                continue;
            };
            let Some(adopter) = self.model.tree.by_pid(parent).map(|node| node.key) else {
                if old_parent.is_some_and(|old| old.pid == parent) {
                    // It still has the parent that is on its way out. The next look will tell.
                    self.ingest.without_adopter.push(child);
                }
                continue;
            };
            let kind = EventKind::Reparent {
                child,
                old_parent,
                adopter: Some(adopter),
                membership: None,
            };
            self.apply(&Event {
                time: self.kernel.clock.boot_time(),
                provenance: Provenance::Procfs,
                kind,
            });
        }
    }
}
