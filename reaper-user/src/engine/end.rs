//! The end that the root of a session orders for all that descends from it.

use tokio::sync::oneshot;

use super::Engine;
use super::ingest::Queued;
use crate::api::messages::{EndAsked, EngineReply};
use crate::api::peer::Peer;
use crate::api::{Claimed, ErrorResponse};
use crate::config::Mode;
use crate::reap::Times;
use reaper_model::event::ProcessKey;

impl Engine {
    /// Answers as soon as those who are there have been sent the first signal, as far as they can be by now. Gives how many records were read for that.
    pub(super) fn end(
        &mut self,
        peer: Peer,
        asked: &EndAsked,
        answer: oneshot::Sender<EngineReply>,
    ) -> u64 {
        let mut read = self.settle();
        self.model.set_now(self.kernel.clock.boot_time());
        let said = match self.order_end(peer, asked) {
            Ok(members) => {
                self.decide();
                read += self.signal_round();
                EngineReply::End(self.claimed(members))
            }
            Err(refusal) => EngineReply::Refused(refusal),
        };
        // Whoever waits for it ends them itself if it waits too long.
        self.send_reply(said, answer);
        // Before it is read that they are gone.
        self.on_reap_events();
        read + self.settle()
    }

    /// Those of them who are being ended, on whichever ladder they are.
    fn claimed(&self, members: Vec<ProcessKey>) -> Vec<Claimed> {
        let claimed = members.into_iter().filter_map(|key| {
            let memory = self.ingest.reaper.claimed_memory(key)?;
            Some(Claimed {
                pid: key.pid,
                start_ns: key.start,
                rss: memory.map(|memory| memory.rss),
            })
        });
        claimed.collect()
    }

    /// Gives whom it is for.
    fn order_end(
        &mut self,
        peer: Peer,
        asked: &EndAsked,
    ) -> Result<Vec<ProcessKey>, ErrorResponse> {
        if self.settings.mode == Mode::Observe {
            let what = "this service only observes";
            return Err(ErrorResponse::new("conflict", what));
        }
        if self.gap.is_some() {
            let what = "events are missing, and whose a process is is being looked for";
            return Err(ErrorResponse::new("busy", what));
        }
        if self.kernel.clock.boot_time() > asked.until {
            let what = "the time is over until which that was wanted";
            return Err(ErrorResponse::new("timeout", what));
        }
        let pid = asked.root.pid;
        let root = self.model.tree.by_pid(pid).map(|node| node.key);
        let root = root.filter(|root| root.has_same_tick(asked.root));
        let ordered = root.and_then(|root| self.model.end_order_for(root, peer.uid));
        let Some((order, meant)) = ordered else {
            let what = format!("process {pid} is the root of no session");
            return Err(ErrorResponse::new("not_found", what));
        };
        let times = Times {
            grace: asked.grace,
            ..self.settings.times
        };
        let reaper = &mut self.ingest.reaper;
        if !meant.is_empty() && !reaper.open_escalation(order.session, times, asked.signal) {
            let what = "others of that session are being killed already";
            return Err(ErrorResponse::new("conflict", what));
        }
        self.model.order_end(order, &meant);
        let pending = meant.iter().copied().map(Queued::Process);
        self.ingest.queued.extend(pending);
        Ok(meant)
    }
}
