//! Stops the engine, and informs a service manager.

use super::*;
use reaper_host::kernel::ServiceState;
use reaper_host::sys::notify::Notifier;

/// Interval of the watchdog.
const WATCHDOG: Duration = Duration::from_secs(10);

/// Kills an agent with one child, lets the engine run for `lasts` of simulated time, and stops it. Returns the totals,
/// the signals, the messages to the service manager, and the simulated time that the stop took.
fn stopped_after(
    lasts: Duration,
    child: &'static str,
    times: Times,
) -> (Totals, Vec<(u32, Signal)>, Vec<ServiceState>, Duration) {
    let sim = boot(child);
    let (sink, writer) = Writer::start(Vec::new()).unwrap();
    let (kernel, source) = sim.interfaces();
    let (notifier, states) = Notifier::channel(Some(WATCHDOG));
    let states = std::thread::spawn(move || states.iter().collect());
    let clock = Arc::clone(&kernel.clock);
    let kernel = Kernel { notifier, ..kernel };
    let settings = EngineSettings {
        times,
        ..settings(Mode::Enforce)
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let (totals, stopped_at) = runtime.block_on(async {
        let engine = Engine::start(kernel, source, settings, sink).unwrap();
        kill_agent(&sim);
        let (stopped, at) = oneshot::channel();
        let stop = async {
            // In steps, because each sleep advances the clock to its end at once.
            for _ in 0..10 {
                clock.sleep_until(clock.after(lasts / 10)).await;
            }
            stopped.send(clock.monotonic()).unwrap();
            Stop::because("test")
        };
        let (_sender, requests) = mpsc::channel(1);
        let run = tokio::time::timeout(Duration::from_secs(60), engine.run(stop, requests));
        (
            run.await.expect("a stop in time").unwrap(),
            at.await.unwrap(),
        )
    });
    writer.join();
    let took = Duration::from_nanos(clock.monotonic() - stopped_at);
    (totals, sim.sent(), states.join().unwrap(), took)
}

#[test]
fn stopped_service_kills_what_ignores_sigterm() {
    let (totals, sent, _, took) =
        stopped_after(Duration::from_secs(1), "stubborn", Times::default());
    assert_eq!((totals.reaped, totals.failed), (1, 0));
    assert_eq!(sent.last(), Some(&(CHILD, Signal::SIGKILL)));
    assert!(took < Duration::from_secs(10), "{took:?}");
}

#[test]
fn grace_beyond_the_limit_does_not_delay_a_stop() {
    let times = Times {
        grace: Duration::from_secs(60),
        ..Times::default()
    };
    let (totals, sent, _, took) = stopped_after(Duration::from_secs(1), "stubborn", times);
    assert_eq!((totals.reaped, totals.failed), (0, 1));
    assert!(
        sent.iter().all(|sent| *sent != (CHILD, Signal::SIGKILL)),
        "{sent:?}"
    );
    assert!(took < Duration::from_secs(1), "{took:?}");
}

#[test]
fn delay_of_a_rule_does_not_delay_a_stop() {
    let (totals, sent, _, took) = stopped_after(Duration::from_secs(1), "server", Times::default());
    assert_eq!((totals.reaped, totals.waiting, sent.len()), (0, 1, 0));
    assert!(took < Duration::from_secs(1), "{took:?}");
}

#[test]
fn service_manager_learns_the_state_of_the_engine() {
    let (_, _, states, _) = stopped_after(6 * WATCHDOG / 10, "server", Times::default());
    let Some(ServiceState::Ready(text)) = states.first() else {
        panic!("{states:?}");
    };
    assert_eq!(
        text,
        "Reaping: 1 open session, 0 processes reaped, 0 B RSS freed"
    );
    assert!(
        states.contains(&ServiceState::Alive),
        "half of the interval has passed: {states:?}"
    );
    let last = ServiceState::Stopping("Stopping (test)".into());
    assert_eq!(states.last(), Some(&last));
}
