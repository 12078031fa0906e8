//! Schedules heavy tests and measures how long each test takes.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use libtest_mimic::Trial;

/// Suffixes of the names of heavy tests, which fork without end or thousands of times. Only [`LANES`] of them run at a time.
const HEAVY: [&str; 10] = [
    "::fork-bomb",
    "::runaway",
    "::two-threads-give-away",
    "survival::births-lost-with-a-small-socket",
    "survival::deep-chain",
    "survival::fork-bomb-with-a-small-socket",
    "survival::fork-bomb-with-a-tiny-ring",
    "survival::killed-20-times",
    "survival::thousand-children",
    "survival::upgrade-while-it-forks",
];

/// Locks of the heavy tests. Each heavy test holds one of them, so two run at a time.
static LANES: [Mutex<()>; 2] = [const { Mutex::new(()) }; 2];
static TOOK: Mutex<Vec<(Duration, String)>> = Mutex::new(Vec::new());

/// Returns whether no other test may run at the same time. Soak tests use all CPUs for minutes.
pub fn runs_alone(trial: &Trial) -> bool {
    trial.name().starts_with("soak::")
}

/// Distributes the heavy tests evenly among the others, so that they rarely wait for each other.
pub fn spread(trials: Vec<Trial>) -> Vec<Trial> {
    let (heavy, light): (Vec<_>, Vec<_>) = trials.into_iter().partition(|t| is_heavy(t.name()));
    let distance = light.len() / (heavy.len() + 1) + 1;
    let mut heavy = heavy.into_iter();
    let mut spread = Vec::new();
    for (n, trial) in light.into_iter().enumerate() {
        if n % distance == 0 {
            spread.extend(heavy.next());
        }
        spread.push(trial);
    }
    spread.extend(heavy);
    spread
}

fn is_heavy(name: &str) -> bool {
    lane(name).is_some()
}

/// Returns the lock of a heavy test; `None` for other tests.
fn lane(name: &str) -> Option<&'static Mutex<()>> {
    let at = HEAVY.iter().position(|ending| name.ends_with(ending))?;
    Some(&LANES[at % LANES.len()])
}

/// Running test: measures its duration until drop, and holds the lock of a heavy test.
pub struct TestSlot {
    name: String,
    began: Instant,
    _heavy: Option<MutexGuard<'static, ()>>,
}

impl TestSlot {
    /// Waits until the test with this name may start.
    pub fn of(name: &str) -> TestSlot {
        let heavy = lane(name).map(lock);
        TestSlot {
            name: name.to_owned(),
            began: Instant::now(),
            _heavy: heavy,
        }
    }
}

impl Drop for TestSlot {
    fn drop(&mut self) {
        let took = (self.began.elapsed(), std::mem::take(&mut self.name));
        lock(&TOOK).push(took);
    }
}

/// Returns the `most` slowest tests as `slow SECONDS NAME`, slowest first.
pub fn slowest(most: usize) -> Vec<String> {
    let mut took = lock(&TOOK);
    took.sort_by(|a, b| b.cmp(a));
    let lines = took.iter().take(most);
    lines
        .map(|(took, name)| format!("slow {:.2} {name}", took.as_secs_f64()))
        .collect()
}

fn lock<T>(mutex: &'static Mutex<T>) -> MutexGuard<'static, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
