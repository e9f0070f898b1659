//! Output that survives a closed pipe (`podring bench | head`), where `println!` would panic.

use std::io::{IsTerminal as _, Write as _};
use std::time::Instant;

/// A line on stdout.
pub(crate) fn out(line: &str) {
    let mut stdout = std::io::stdout().lock();
    let _ = writeln!(stdout, "{line}").and_then(|()| stdout.flush());
}

/// A line on stderr.
pub(crate) fn err(line: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{line}");
}

/// One line on stderr that is overwritten as work goes on; silent where stderr is no terminal.
pub(crate) struct Progress {
    live: bool,
    shown: bool,
    start: Instant,
}

impl Progress {
    pub(crate) fn new() -> Self {
        Progress { live: std::io::stderr().is_terminal(), shown: false, start: Instant::now() }
    }

    pub(crate) fn show(&mut self, text: &str) {
        if self.live {
            let seconds = self.start.elapsed().as_secs();
            let _ = write!(std::io::stderr().lock(), "\r\x1b[K{text} · {seconds} s");
            self.shown = true;
        }
    }

    /// Removes the line, before other output.
    pub(crate) fn clear(&mut self) {
        if self.shown {
            let _ = write!(std::io::stderr().lock(), "\r\x1b[K");
            self.shown = false;
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.clear();
    }
}

/// `text` in lines of at most `width` characters where its words allow, each after `indent` spaces.
pub(crate) fn wrap(text: &str, indent: usize, width: usize) -> Vec<String> {
    let margin = " ".repeat(indent);
    let mut lines: Vec<String> = Vec::new();
    let mut line = String::new();
    for word in text.split_whitespace() {
        if !line.is_empty() && indent + line.chars().count() + 1 + word.chars().count() > width {
            lines.push(format!("{margin}{line}"));
            line.clear();
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(word);
    }
    if !line.is_empty() {
        lines.push(format!("{margin}{line}"));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::wrap;

    #[test]
    fn wraps_at_words() {
        assert_eq!(wrap("aa bb cc", 2, 7), ["  aa bb", "  cc"]);
        assert_eq!(wrap("longerthanwidth b", 0, 4), ["longerthanwidth", "b"]);
        assert!(wrap(" ", 2, 9).is_empty());
    }
}
