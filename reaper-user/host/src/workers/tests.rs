use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::time::{Duration, Instant};

use super::*;

/// Time limit for a job on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);

/// A pool, and the ids of the jobs that it has run, in order.
struct Scenario {
    workers: Workers,
    wanted: Arc<()>,
    send: Sender<u64>,
    ran: Receiver<u64>,
}

impl Scenario {
    fn new(size: Size) -> Scenario {
        let (send, ran) = channel();
        Scenario {
            workers: Workers::new("test", size),
            wanted: Arc::default(),
            send,
            ran,
        }
    }

    fn submit(&self, uid: u32, id: u64, is_urgent: bool, wanted: &Arc<()>) {
        let send = self.send.clone();
        self.submit_work(uid, id, is_urgent, wanted, move || {
            send.send(id).unwrap();
        });
    }

    fn submit_work(
        &self,
        uid: u32,
        id: u64,
        is_urgent: bool,
        wanted: &Arc<()>,
        work: impl FnOnce() + Send + 'static,
    ) {
        let job = Job {
            owner: uid,
            id,
            is_urgent,
            wanted: Arc::downgrade(wanted),
            work: Box::new(move |_| work()),
        };
        self.workers.submit(job).unwrap();
    }

    /// Occupies a thread until the returned sender is dropped.
    fn block(&self, uid: u32, id: u64) -> Sender<()> {
        let (release, released) = channel();
        let send = self.send.clone();
        self.submit_work(uid, id, false, &self.wanted, move || {
            send.send(id).unwrap();
            let _ = released.recv();
        });
        assert_eq!(self.next(), id);
        release
    }

    /// Waits until a thread sleeps in job `id`.
    fn await_stuck(&self, id: u64) {
        await_stuck(&self.workers, id);
    }

    fn next(&self) -> u64 {
        self.ran.recv_timeout(PATIENCE).unwrap()
    }
}

fn await_stuck(workers: &Workers, id: u64) {
    let end = Instant::now() + PATIENCE;
    loop {
        let found = workers.replace_stuck(0, None);
        if found.is_empty() {
            assert!(Instant::now() < end, "{id} is not stuck");
            std::thread::yield_now();
            continue;
        }
        return assert_eq!(found, [id]);
    }
}

fn size(threads: usize, max_threads: usize, max_per_owner: usize) -> Size {
    Size {
        max_threads,
        max_per_owner,
        ..Size::fixed(threads)
    }
}

#[test]
fn many_jobs_of_one_user_delay_another_by_one_job() {
    let scenario = Scenario::new(size(1, 1, 1));
    let gate = scenario.block(9, 0);
    for id in 1..=1000 {
        scenario.submit(1, id, true, &scenario.wanted);
    }
    scenario.submit(2, 2000, false, &scenario.wanted);
    scenario.submit(3, 3000, true, &scenario.wanted);
    drop(gate);
    let order: Vec<u64> = (0..1002).map(|_| scenario.next()).collect();
    assert_eq!(order[..4], [1, 2000, 3000, 2]);
    assert_eq!(order[1001], 1000);
}

#[test]
fn one_user_does_not_occupy_all_threads() {
    let scenario = Scenario::new(size(2, 2, 1));
    let _gate = scenario.block(1, 1);
    scenario.submit(1, 2, true, &scenario.wanted);
    scenario.submit(2, 3, false, &scenario.wanted);
    assert_eq!(scenario.next(), 3);
    assert!(scenario.ran.try_recv().is_err());
}

#[test]
fn urgent_jobs_of_a_user_run_first() {
    let scenario = Scenario::new(size(1, 1, 1));
    let gate = scenario.block(1, 0);
    for (id, is_urgent) in [(1, false), (2, false), (3, true), (4, true)] {
        scenario.submit(1, id, is_urgent, &scenario.wanted);
    }
    drop(gate);
    let order: Vec<u64> = (0..4).map(|_| scenario.next()).collect();
    assert_eq!(order, [3, 4, 1, 2]);
}

#[test]
fn job_without_requester_is_dropped() {
    let scenario = Scenario::new(size(1, 1, 1));
    let gate = scenario.block(1, 0);
    let expired = Arc::new(());
    (1..100).for_each(|id| scenario.submit(1, id, true, &expired));
    scenario.submit(1, 100, false, &scenario.wanted);
    drop(expired);
    // The queue drops expired jobs before its turn comes.
    (101..200).for_each(|id| scenario.submit(1, id, true, &scenario.wanted));
    assert!(scenario.workers.0.lock().queues[&1].len() < 150);
    drop(gate);
    let order: Vec<u64> = (0..100).map(|_| scenario.next()).collect();
    assert_eq!((order[0], order[98], order[99]), (101, 199, 100));
}

#[test]
fn stuck_thread_is_replaced_and_ends_after_its_job() {
    let scenario = Scenario::new(size(1, 2, 1));
    let gate = scenario.block(1, 1);
    assert!(scenario.workers.replace_stuck(u64::MAX, None).is_empty());
    scenario.submit(1, 2, false, &scenario.wanted);
    scenario.await_stuck(1);
    assert_eq!(scenario.next(), 2);
    // The second thread gets stuck too, and there is no room for a third.
    let second = scenario.block(1, 3);
    scenario.await_stuck(3);
    assert!(!scenario.workers.has_room());
    let mut stuck: Vec<u64> = scenario.workers.stuck().iter().map(|(id, _)| *id).collect();
    stuck.sort_unstable();
    assert_eq!(stuck, [1, 3]);
    scenario.submit(2, 4, false, &scenario.wanted);
    assert!(scenario.ran.try_recv().is_err());
    drop(second);
    assert_eq!(scenario.next(), 4);
    assert!(scenario.workers.has_room());
    drop(gate);
}

#[test]
fn busy_thread_is_not_stuck() {
    let scenario = Scenario::new(size(1, 2, 1));
    let (end, ended) = channel::<()>();
    let send = scenario.send.clone();
    scenario.submit_work(1, 1, false, &scenario.wanted, move || {
        send.send(1).unwrap();
        while ended.try_recv() == Err(TryRecvError::Empty) {
            std::hint::spin_loop();
        }
        send.send(2).unwrap();
    });
    assert_eq!(scenario.next(), 1);
    for _ in 0..1000 {
        assert!(scenario.workers.replace_stuck(0, None).is_empty());
        assert!(scenario.workers.has_progress(1));
    }
    drop(end);
    assert_eq!(scenario.next(), 2);
}

#[test]
fn stuck_reads_of_one_user_leave_threads_to_others() {
    let scenario = Scenario::new(size(2, 4, 1));
    let mut gates = Vec::new();
    for id in 1..=2 {
        gates.push(scenario.block(1, id));
        scenario.await_stuck(id);
    }
    scenario.submit(1, 3, true, &scenario.wanted);
    for id in 4..=6 {
        scenario.submit(2, id, false, &scenario.wanted);
        assert_eq!(scenario.next(), id);
    }
    drop(gates);
    assert_eq!(scenario.next(), 3);
}

#[test]
fn job_continues_until_its_thread_is_replaced() {
    let workers = Workers::new("test", size(1, 2, 1));
    let wanted = Arc::new(());
    let (send, begun) = channel();
    let (replaced, checked) = channel::<()>();
    let work = move |slot: &Slot| {
        slot.begin(7);
        send.send(slot.is_replaced()).unwrap();
        let _ = checked.recv();
        send.send(slot.is_replaced()).unwrap();
    };
    let job = Job {
        owner: 0,
        id: 6,
        is_urgent: false,
        wanted: Arc::downgrade(&wanted),
        work: Box::new(work),
    };
    workers.submit(job).unwrap();
    assert_eq!(begun.recv_timeout(PATIENCE), Ok(false));
    await_stuck(&workers, 7);
    drop(replaced);
    assert_eq!(begun.recv_timeout(PATIENCE), Ok(true));
}

/// Returns the scheduling policy and nice value of the calling thread (proc_pid_stat(5)).
#[cfg(target_os = "linux")]
fn scheduling() -> (u32, i32) {
    let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
    let fields = stat.rsplit(')').next().unwrap();
    let fields: Vec<&str> = fields.split_whitespace().collect();
    (fields[38].parse().unwrap(), fields[16].parse().unwrap())
}

#[cfg(target_os = "linux")]
#[test]
fn threads_do_not_inherit_a_raised_priority() {
    let run = || {
        sys::raise_priority();
        let workers = Workers::new("test", size(1, 1, 1));
        let wanted = Arc::new(());
        let (send, found) = channel();
        let job = Job {
            owner: 0,
            id: 1,
            is_urgent: true,
            wanted: Arc::downgrade(&wanted),
            work: Box::new(move |_| send.send(scheduling()).unwrap()),
        };
        workers.submit(job).unwrap();
        found.recv_timeout(PATIENCE).unwrap()
    };
    let (policy, nice) = std::thread::spawn(run).join().unwrap();
    assert_eq!(policy, libc::SCHED_OTHER.cast_unsigned());
    assert!(nice >= 0, "{nice}");
}
