//! `cargo xtask demo-svg`: the picture in the README, drawn from the demo's real output.

use std::fmt::Write;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};

use crate::shell::{as_root, built_reaper, output, say, workspace};

/// Path of the picture in the workspace.
const FILE: &str = "reaper-user/docs/demo.svg";

/// Longest line, in characters. Longer ones are cut.
const WIDTH: usize = 110;
/// Width and height of a character, and the margin around the text, in pixels.
const CHARACTER: f64 = 8.4;
const LINE: usize = 20;
const MARGIN: usize = 20;
/// Height of the title bar, in pixels.
const BAR: usize = 34;

/// Colours of a line, by the first of these words in it.
const COLOURS: [(&str, &str); 5] = [
    (" agent  ", "#79c0ff"),
    (" FAILED ", "#ff7b72"),
    (" ended ", "#ffa657"),
    (" closed ", "#7ee787"),
    ("Nothing is left", "#7ee787"),
];
const PLAIN: &str = "#c9d1d9";
const PROMPT: &str = "#8b949e";

#[derive(clap::Args)]
pub struct Args {
    /// Run the demo of this executable instead of building one
    #[arg(long, value_name = "FILE")]
    reaper: Option<PathBuf>,
}

/// Builds reaper, runs its demo as root, and writes the picture.
///
/// # Errors
/// The build or the demo fails, or the picture cannot be written.
pub fn draw(args: Args) -> Result<()> {
    let reaper = match args.reaper {
        Some(reaper) => reaper,
        None => {
            say("building reaper");
            built_reaper(&["--release"])?
        }
    };
    say("running its demo, which ends only its own processes");
    let demo = output(as_root(&reaper)?.arg("demo"))?;
    ensure!(demo.contains("SIGKILL"), "the demo printed:\n{demo}");
    let demo = demo.replace(&reaper.display().to_string(), "reaper");
    let file = workspace().join(FILE);
    fs::write(&file, picture(&demo)).with_context(|| file.display().to_string())?;
    say(format_args!("wrote {FILE}"));
    Ok(())
}

/// Returns a terminal window with this output.
fn picture(demo: &str) -> String {
    let lines: Vec<&str> = demo.trim_end().lines().collect();
    let (width, height) = (
        WIDTH as f64 * CHARACTER + 2.0 * MARGIN as f64,
        BAR + MARGIN + LINE * (lines.len() + 1),
    );
    let mut svg = format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0} {height}" width="{width:.0}" height="{height}" role="img">
<title>Output of sudo reaper demo</title>
<rect width="100%" height="100%" rx="8" fill="#0d1117"/>
<circle cx="20" cy="17" r="6" fill="#ff5f56"/><circle cx="40" cy="17" r="6" fill="#ffbd2e"/><circle cx="60" cy="17" r="6" fill="#27c93f"/>
<g font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace" font-size="14" xml:space="preserve">
"##
    );
    let mut add = |row: usize, colour: &str, line: &str| {
        let (y, text) = (BAR + LINE * (row + 1), escaped(&cut(line)));
        // Writing to a String does not fail.
        let _ = writeln!(
            svg,
            r#"<text x="{MARGIN}" y="{y}" fill="{colour}">{text}</text>"#
        );
    };
    add(0, PROMPT, "$ sudo reaper demo");
    for (index, line) in lines.iter().enumerate() {
        // Lines of the stream begin with a time.
        let is_event = line.starts_with(|c: char| c.is_ascii_digit());
        let known = COLOURS
            .iter()
            .find(|(word, _)| line.contains(word) && (is_event || line.starts_with(word)));
        add(index + 1, known.map_or(PLAIN, |(_, colour)| *colour), line);
    }
    svg + "</g>\n</svg>\n"
}

fn cut(line: &str) -> String {
    match line.char_indices().nth(WIDTH) {
        Some((end, _)) => format!("{}…", line[..end].trim_end()),
        None => line.to_owned(),
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn picture_escapes_cuts_and_colours_lines() {
        let svg = picture(&format!("a <b> & c\n1 ended y\n{}\n", "z".repeat(200)));
        assert!(svg.contains(">a &lt;b&gt; &amp; c</text>"), "{svg}");
        assert!(svg.contains(r##"fill="#ffa657">1 ended y<"##), "{svg}");
        assert!(svg.contains(&format!(">{}…<", "z".repeat(WIDTH))), "{svg}");
        assert_eq!(svg.matches("<text").count(), 4);
    }
}
