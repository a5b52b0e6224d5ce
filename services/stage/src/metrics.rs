//! What a stage tells a scraper: read from the host and its totals when somebody asks.

use std::sync::Arc;

use baton_proto::v1::StageState;
use baton_telemetry::metrics::catalog::{self, Metric};
use baton_telemetry::metrics::{KeyValue, Metrics};

use crate::service::{Host, View};
use crate::totals::Counts;

const STATES: [(StageState, &str); 6] = [
    (StageState::Joined, "joined"),
    (StageState::Loading, "loading"),
    (StageState::Loaded, "loaded"),
    (StageState::Wired, "wired"),
    (StageState::Draining, "draining"),
    (StageState::Failed, "failed"),
];

/// Shows the host's numbers from now on.
pub(crate) fn register(metrics: &Metrics, host: &Arc<Host>) {
    let register = Register { metrics, host };
    register.state();
    register.steps();
    register.cuts();
    register.loading();
}

struct Register<'a> {
    metrics: &'a Metrics,
    host: &'a Arc<Host>,
}

/// Labels beside the stage's.
type Labels = Vec<(&'static str, String)>;

impl Register<'_> {
    /// A metric whose series are made anew from the host's state each time.
    fn u64(
        &self,
        metric: &Metric,
        series: impl Fn(&View, Counts) -> Vec<(u64, Labels)> + Send + Sync + 'static,
    ) {
        let host = Arc::clone(self.host);
        self.metrics.observe_u64(metric, move |to| {
            let view = host.view();
            for (value, labels) in series(&view, host.totals.now()) {
                to.observe(value, &labelled(&view, labels));
            }
        });
    }

    fn f64(
        &self,
        metric: &Metric,
        series: impl Fn(&View, Counts) -> Vec<(f64, Labels)> + Send + Sync + 'static,
    ) {
        let host = Arc::clone(self.host);
        self.metrics.observe_f64(metric, move |to| {
            let view = host.view();
            for (value, labels) in series(&view, host.totals.now()) {
                to.observe(value, &labelled(&view, labels));
            }
        });
    }

    fn state(&self) {
        let backend = self.host.backend_name();
        self.u64(&catalog::STAGE_INFO, move |view, _| {
            let layers = view.layers.as_ref().map_or(String::new(), |layers| {
                format!("{}-{}", layers.start, layers.end.saturating_sub(1))
            });
            vec![(1, vec![("layers", layers), ("backend", backend.to_owned())])]
        });
        self.u64(&catalog::STAGE_STATE, |view, _| {
            let state = |&(state, name): &(StageState, &str)| {
                (u64::from(view.phase == state), vec![("state", name.to_owned())])
            };
            STATES.iter().map(state).collect()
        });
        self.u64(&catalog::STAGE_READY, |view, _| vec![(view.ready.into(), vec![])]);
        self.u64(&catalog::STAGE_EPOCH, |view, _| vec![(view.epoch, vec![])]);
        self.u64(&catalog::STAGE_JOINS, |view, _| vec![(view.joins, vec![])]);
        self.u64(&catalog::STAGE_KV_BLOCKS, |view, _| vec![(view.kv_blocks.into(), vec![])]);
        let host = Arc::clone(self.host);
        self.u64(&catalog::STAGE_FAILURES, move |_, _| {
            let mut kinds = host.totals.failures();
            // A series that is there before the first failure shows the first failure as an increase.
            kinds.entry("panic").or_default();
            kinds.into_iter().map(|(kind, n)| (n, vec![("kind", kind.to_owned())])).collect()
        });
    }

    fn steps(&self) {
        self.u64(&catalog::STAGE_STEPS, |_, counts| vec![(counts.steps, vec![])]);
        self.u64(&catalog::STAGE_ROWS, |_, counts| vec![(counts.rows, vec![])]);
        self.u64(&catalog::NAN_SCORES, |_, counts| vec![(counts.nan_scores, vec![])]);
        self.f64(&catalog::STAGE_TIME, |_, counts| {
            let part = |name: &str, micros: u64| (micros as f64 / 1e6, vec![("part", name.into())]);
            vec![
                part("queue_wait", counts.queue_wait),
                part("receive_wait", counts.receive_wait),
                part("compute", counts.compute),
                part("send", counts.send),
            ]
        });
    }

    fn cuts(&self) {
        let both = |view: &View, sent: u64, received: u64| {
            let sides =
                [(view.cut_after(), "sent", sent), (view.cut_before(), "received", received)];
            let series = |(cut, direction, value): (Option<String>, &str, u64)| {
                Some((value, vec![("cut", cut?), ("direction", direction.to_owned())]))
            };
            sides.into_iter().filter_map(series).collect()
        };
        self.u64(&catalog::HANDOFF, move |view, counts| {
            both(view, counts.bytes_sent, counts.bytes_received)
        });
        self.u64(&catalog::CARRY_ROWS, move |view, counts| {
            both(view, counts.carry_rows_sent, counts.carry_rows_received)
        });
        let after = |view: &View| view.cut_after().map(|cut| ("cut", cut));
        self.u64(&catalog::HANDOFF_ROWS, move |view, counts| {
            after(view).map(|cut| (counts.rows_sent, vec![cut])).into_iter().collect()
        });
        self.u64(&catalog::LINK_INFO, move |view, _| {
            let cut = after(view).filter(|_| !view.link.is_empty());
            cut.map(|cut| (1, vec![cut, ("link", view.link.clone())])).into_iter().collect()
        });
    }

    fn loading(&self) {
        let host = Arc::clone(self.host);
        self.u64(&catalog::LOAD_READ, move |_, _| vec![(host.checkpoint_bytes_read(), vec![])]);
        self.u64(&catalog::LOAD_NEEDED, |view, _| vec![(view.bytes_needed, vec![])]);
        self.f64(&catalog::LOAD_DURATION, |view, _| vec![(view.load_seconds, vec![])]);
    }
}

fn labelled(view: &View, labels: Labels) -> Vec<KeyValue> {
    let stage = view.index.map(|index| KeyValue::new("stage", index.to_string()));
    stage
        .into_iter()
        .chain(labels.into_iter().map(|(name, value)| KeyValue::new(name, value)))
        .collect()
}
