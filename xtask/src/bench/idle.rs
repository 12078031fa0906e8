//! How often the service wakes up when nothing happens.

use std::time::Duration;

use anyhow::Result;

use super::Bench;
use super::daemon::Setup;
use super::host::{births_and_tasks, switches};
use super::pins::Pins;
use super::table::Row;

const WHAT: &str = "wake-ups a minute with nothing happening";

/// The default config, pins included, but that it observes. Agents may be at work on this host, so only
/// seconds count in which nobody was born or died, and that follow upon such a second: what is left to be
/// read late is read within 0.1 s.
pub fn measure(bench: &Bench) -> Result<Vec<Row>> {
    let wanted: u32 = bench.pick(60, 10);
    let pins = Pins::mounted(bench)?;
    let setup = Setup::new(bench, "observe").whole_catalogue().pinned(&pins);
    let daemon = setup.start()?;
    daemon.settle();
    let (mut seconds, mut quiet, mut wakes, mut others) = (0, 0, 0, 0);
    let mut before = (births_and_tasks()?, switches(daemon.pid())?);
    let mut calm = true;
    while quiet < wanted && seconds < 2 * wanted {
        std::thread::sleep(Duration::from_secs(1));
        seconds += 1;
        let now = (births_and_tasks()?, switches(daemon.pid())?);
        let still = now.0 == before.0;
        if still && calm {
            quiet += 1;
            wakes += now.1 - before.1;
        } else {
            others += now.1 - before.1;
        }
        (before, calm) = (now, still);
    }
    daemon.stop()?;
    let loud = seconds - quiet;
    let note = match loud {
        0 => format!("{quiet} s, all threads"),
        _ => format!(
            "{quiet} quiet seconds; {others} in {loud} s in which others made or ended processes"
        ),
    };
    if quiet == 0 {
        return Ok(vec![Row::missing(WHAT, note)]);
    }
    let a_minute = wakes as f64 * 60.0 / f64::from(quiet);
    Ok(vec![Row::new(WHAT, a_minute, "").at_most(0.0).note(note)])
}
