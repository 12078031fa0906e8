//! A reader of the event stream that keeps little of it, for runs that tell of millions of events.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::thread::{Builder, JoinHandle};

use anyhow::{Context, Result};

/// What happens to every process is counted only.
const COUNTED: [&str; 4] = ["fork\"", "exec\"", "exit\"", "reparent\""];
/// Where a line has told by then which event it is of.
const HEAD: usize = 192;

/// Writes all other lines to a file; the thread gives the number of those that it left out.
///
/// # Errors
/// The system has no thread left.
pub fn start(stream: impl Read + Send + 'static, to: File) -> Result<JoinHandle<Result<u64>>> {
    let thread = Builder::new().name("sieve".into());
    let thread = thread.spawn(move || sieve(BufReader::with_capacity(1 << 20, stream), to));
    thread.context("cannot start a thread")
}

fn sieve(mut stream: impl BufRead, mut to: impl Write) -> Result<u64> {
    let (mut line, mut left_out) = (Vec::new(), 0);
    while stream.read_until(b'\n', &mut line)? > 0 {
        if is_counted(&line) {
            left_out += 1;
        } else {
            to.write_all(&line)?;
        }
        line.clear();
    }
    Ok(left_out)
}

fn is_counted(line: &[u8]) -> bool {
    let head = String::from_utf8_lossy(&line[..line.len().min(HEAD)]);
    let event = head.split_once("\"event\":\"").map(|(_, event)| event);
    event.is_some_and(|event| COUNTED.iter().any(|counted| event.starts_with(counted)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_happens_to_every_process_is_left_out() {
        let stream = "{\"seq\":1,\"event\":\"ready\"}\n{\"seq\":2,\"event\":\"fork\"}\n\
                      {\"seq\":3,\"event\":\"exit\",\"process.comm\":\"\u{e4}\"}\n{\"seq\":4,\"event\":\"summary\"}\n";
        let mut kept = Vec::new();
        assert_eq!(sieve(stream.as_bytes(), &mut kept).unwrap(), 2);
        let kept = String::from_utf8(kept).unwrap();
        assert!(kept.contains("ready") && kept.contains("summary") && !kept.contains("exit"));
    }
}
