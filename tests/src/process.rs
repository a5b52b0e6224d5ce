//! Processes of this machine, read from `/proc`.

use std::fs;
use std::path::Path;

use rustix::process::{Pid, Signal, kill_process};

/// A process as `/proc` shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// Its id.
    pub pid: i32,
    parent: i32,
    zombie: bool,
    arguments: Vec<String>,
}

impl Process {
    fn read(pid: i32) -> Option<Self> {
        let directory = Path::new("/proc").join(pid.to_string());
        let stat = fs::read_to_string(directory.join("stat")).ok()?;
        // The second field, the name, may hold anything; the third and fourth follow its closing parenthesis.
        let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
        let zombie = fields.next()? == "Z";
        let parent = fields.next()?.parse().ok()?;
        let line = fs::read(directory.join("cmdline")).ok()?;
        let arguments = line
            .split(|&byte| byte == 0)
            .map(|argument| String::from_utf8_lossy(argument).into_owned())
            .collect();
        Some(Self { pid, parent, zombie, arguments })
    }

    /// The value after `flag` on its command line.
    #[must_use]
    pub fn argument(&self, flag: &str) -> Option<&str> {
        let at = self.arguments.iter().position(|argument| argument == flag)?;
        self.arguments.get(at + 1).map(String::as_str)
    }

    /// Whether it still runs.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        Self::read(self.pid).is_some_and(|now| !now.zombie && now.arguments == self.arguments)
    }

    /// Sends a signal. A process that has ended already is left in peace.
    pub fn signal(&self, signal: Signal) {
        if let Some(pid) = Pid::from_raw(self.pid).filter(|_| self.is_alive()) {
            // It may end between the look and the signal.
            let _ = kill_process(pid, signal);
        }
    }
}

fn all() -> Vec<Process> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter_map(Process::read)
        .filter(|process| !process.zombie)
        .collect()
}

/// Children of a process, oldest first.
#[must_use]
pub fn children_of(parent: u32) -> Vec<Process> {
    let mut children = all();
    children.retain(|process| process.parent.cast_unsigned() == parent);
    children.sort_by_key(|process| process.pid);
    children
}

/// Processes whose command line names this path.
#[must_use]
pub fn that_name(path: &Path) -> Vec<Process> {
    let path = path.to_string_lossy();
    let mut found = all();
    found.retain(|process| process.arguments.iter().any(|a| a.contains(path.as_ref())));
    found
}
