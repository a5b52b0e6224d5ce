//! What happens while the pipeline starts, for the first time or again: told to whoever listens, and kept, so that it can be asked for.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{mpsc, watch};

use crate::StartupEvent;
use crate::request::Readiness;

/// Where start-up events go. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Startup {
    events: mpsc::UnboundedSender<StartupEvent>,
    ready: watch::Sender<Readiness>,
    progress: Arc<Mutex<Progress>>,
}

#[derive(Debug, Default)]
struct Progress {
    stages: Vec<Start>,
    /// Whether the pipeline is made; what ends it is the driver's to say.
    serving: bool,
    /// Why the last pipeline ended.
    failure: Option<String>,
}

/// How far one stage is, and what is known of it.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Start {
    pub(crate) phase: Phase,
    pub(crate) backend: String,
    pub(crate) address: String,
    /// Where it answers `/metrics`; empty when it does not.
    pub(crate) metrics: String,
    pub(crate) device: String,
    pub(crate) bytes_read: u64,
    /// Bytes of the slice; 0 before it is known.
    pub(crate) bytes_total: u64,
}

/// What a stage has done last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    #[default]
    Absent,
    Joined,
    Loading,
    Loaded,
    Wired,
}

impl Phase {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Absent => "absent",
            Self::Joined => "joined",
            Self::Loading => "loading",
            Self::Loaded => "loaded",
            Self::Wired => "wired",
        }
    }
}

impl Startup {
    /// Keeps `ready` up to date until the pipeline is.
    pub(crate) fn new(
        stages: usize,
        events: mpsc::UnboundedSender<StartupEvent>,
        ready: watch::Sender<Readiness>,
    ) -> Self {
        let progress = Progress { stages: vec![Start::default(); stages], ..Progress::default() };
        ready.send_replace(progress.readiness());
        Self { events, ready, progress: Arc::new(Mutex::new(progress)) }
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        // Every change under the lock is a row of assignments; half of them still show where the stage is.
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How far every stage is.
    pub(crate) fn now(&self) -> Vec<Start> {
        self.progress().stages.clone()
    }

    pub(crate) fn tell(&self, event: StartupEvent) {
        {
            let mut progress = self.progress();
            note(&mut progress.stages, &event);
            if matches!(event, StartupEvent::Ready { .. }) {
                progress.serving = true;
                progress.failure = None;
            }
            self.ready.send_replace(progress.readiness());
        }
        // The listener may have gone; nothing depends on it.
        let _ = self.events.send(event);
    }

    /// A stage went away: its place is free again.
    pub(crate) fn forget(&self, stage: usize) {
        let mut progress = self.progress();
        progress.stages[stage] = Start::default();
        self.ready.send_replace(progress.readiness());
    }

    /// The pipeline has failed.
    pub(crate) fn failed(&self, reason: &str) {
        let mut progress = self.progress();
        progress.serving = false;
        progress.failure = Some(reason.to_owned());
        drop(progress);
        self.start_over();
    }

    /// The stages that are there begin again; why the pipeline failed stays what it was.
    pub(crate) fn start_over(&self) {
        let mut progress = self.progress();
        for start in &mut progress.stages {
            start.phase = start.phase.min(Phase::Joined);
        }
        self.ready.send_replace(progress.readiness());
    }
}

impl Progress {
    fn readiness(&self) -> Readiness {
        if self.serving {
            return Readiness::Ready;
        }
        let missing = missing(&self.stages);
        Readiness::NotReady(match &self.failure {
            Some(failure) => format!("{failure}; {missing}"),
            None => missing,
        })
    }
}

fn note(stages: &mut [Start], event: &StartupEvent) {
    match event {
        StartupEvent::Joined { stage, backend, address, metrics } => {
            stages[*stage] = Start {
                phase: Phase::Joined,
                backend: backend.clone(),
                address: address.clone(),
                metrics: metrics.clone(),
                ..Start::default()
            };
        }
        StartupEvent::Loading { stage, bytes_done, bytes_total } => {
            let start = &mut stages[*stage];
            start.phase = Phase::Loading;
            start.bytes_read = *bytes_done;
            start.bytes_total = *bytes_total;
        }
        StartupEvent::Loaded { stage, device, bytes_read, .. } => {
            let start = &mut stages[*stage];
            start.phase = Phase::Loaded;
            start.device.clone_from(device);
            start.bytes_read = *bytes_read;
        }
        StartupEvent::Wired { stage, .. } => stages[*stage].phase = Phase::Wired,
        StartupEvent::Ready { .. } => {}
    }
}

/// One sentence on what the start still waits for.
fn missing(stages: &[Start]) -> String {
    let short_of = |phase: Phase| {
        let behind = stages.iter().enumerate().filter(|(_, start)| start.phase < phase);
        let behind: Vec<String> = behind.map(|(stage, _)| stage.to_string()).collect();
        let stages = if behind.len() == 1 { "stage" } else { "stages" };
        (!behind.is_empty()).then(|| format!("{stages} {}", behind.join(", ")))
    };
    if let Some(stages) = short_of(Phase::Joined) {
        format!("waiting for {stages} to join")
    } else if let Some(stages) = short_of(Phase::Loaded) {
        format!("loading {stages}")
    } else {
        "wiring the stages".to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn startup() -> (Startup, watch::Receiver<Readiness>) {
        let (ready, readiness) = watch::channel(Readiness::Ready);
        (Startup::new(2, mpsc::unbounded_channel().0, ready), readiness)
    }

    fn joined(stage: usize) -> StartupEvent {
        StartupEvent::Joined {
            stage,
            backend: "cpu".into(),
            address: "http://a:1".into(),
            metrics: "a:2".into(),
        }
    }

    #[test]
    fn readiness_names_what_the_start_waits_for() {
        let (startup, readiness) = startup();
        let says = |text: &str| assert_eq!(*readiness.borrow(), Readiness::NotReady(text.into()));
        says("waiting for stages 0, 1 to join");
        startup.tell(joined(1));
        says("waiting for stage 0 to join");
        startup.tell(joined(0));
        startup.tell(StartupEvent::Loading { stage: 1, bytes_done: 3, bytes_total: 9 });
        says("loading stages 0, 1");
        startup.forget(1);
        says("waiting for stage 1 to join");
        startup.tell(joined(1));
        for stage in [0, 1] {
            startup.tell(StartupEvent::Loaded {
                stage,
                device: "a GPU".into(),
                bytes_read: 9,
                bytes_needed: 9,
                seconds: 0.5,
                kv_blocks: 4,
                held: false,
            });
        }
        says("wiring the stages");
        startup.tell(StartupEvent::Wired { stage: 0, link: "tcp".into() });
        says("wiring the stages");
        startup.tell(StartupEvent::Wired { stage: 1, link: String::new() });
        startup.tell(StartupEvent::Ready { kv_blocks: 4 });
        assert_eq!(*readiness.borrow(), Readiness::Ready);
        // A stage that goes now ends nothing by itself.
        startup.forget(1);
        assert_eq!(*readiness.borrow(), Readiness::Ready);
        startup.failed("stage 1 was lost");
        says("stage 1 was lost; waiting for stage 1 to join");
        startup.tell(joined(1));
        says("stage 1 was lost; loading stages 0, 1");
        startup.tell(StartupEvent::Wired { stage: 0, link: "tcp".into() });
        says("stage 1 was lost; loading stage 1");
        startup.start_over();
        says("stage 1 was lost; loading stages 0, 1");
    }

    #[test]
    fn what_is_known_of_a_stage_lasts_until_it_leaves() {
        let (startup, _) = startup();
        startup.tell(joined(0));
        startup.tell(StartupEvent::Loading { stage: 0, bytes_done: 3, bytes_total: 9 });
        let expected = Start {
            phase: Phase::Loading,
            backend: "cpu".into(),
            address: "http://a:1".into(),
            metrics: "a:2".into(),
            device: String::new(),
            bytes_read: 3,
            bytes_total: 9,
        };
        assert_eq!(startup.now(), [expected, Start::default()]);
        startup.forget(0);
        assert_eq!(startup.now(), [Start::default(), Start::default()]);
    }
}
