//! Wake-ups of an idle service.

use std::time::Duration;

use anyhow::Result;

use super::Bench;
use super::daemon::Setup;
use super::host::{births_and_tasks, switches};
use super::pins::Pins;
use super::table::Row;

const WHAT: &str = "wake-ups per minute, idle";

/// Measures with the default config and pins, in observe mode.
///
/// Other processes may start and exit on this host. A second counts only if none did in it or in the second before: the
/// service reads late records within 0.1 s.
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
            "{quiet} idle seconds; {others} wake-ups in {loud} s in which processes started or exited"
        ),
    };
    if quiet == 0 {
        return Ok(vec![Row::missing(WHAT, note)]);
    }
    let a_minute = wakes as f64 * 60.0 / f64::from(quiet);
    Ok(vec![Row::new(WHAT, a_minute, "").at_most(0.0).note(note)])
}
