//! What a verification found, as data, as a table and as a verdict.

use std::fmt;

use comfy_table::Table;
use comfy_table::presets::UTF8_FULL_CONDENSED;
use serde::Serialize;

pub use crate::html::to_html;

/// Whether both sides answer alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// Within the tolerances.
    Same,
    /// Not.
    Differs,
}

/// One verification.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// What is taken to be right.
    pub reference: String,
    /// What is compared with it.
    pub candidate: String,
    /// The fault that was reproduced on purpose.
    pub reproduced: Option<String>,
    /// Index rows at every cut; empty for servers.
    pub carries: Vec<Carries>,
    /// The first layer whose output differs in any bit; never set for servers.
    pub first_diverging_layer: Option<usize>,
    /// Log-probabilities of a text.
    pub loss: Loss,
    /// Copies of word lists.
    pub copies: Vec<Copies>,
    /// Greedy continuations.
    pub prefixes: Vec<Prefix>,
    /// Tokens per second of the reference.
    pub reference_speed: Speed,
    /// Tokens per second of the candidate.
    pub candidate_speed: Speed,
    /// What speaks against "same", in words.
    pub differences: Vec<String>,
    /// The verdict.
    pub verdict: Verdict,
}

/// Index rows that one stage began with, against those that the uncut model computed in the same steps.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Carries {
    /// The stage.
    pub stage: usize,
    /// Its layers: first, and one past the last.
    pub layers: [usize; 2],
    /// The layer whose rows it needs; none when it begins with a full layer.
    pub from_layer: Option<usize>,
    /// In steps of more than one row: rows past `index_topk`, and how many of them were equal.
    pub prefill: Rows,
    /// In steps of one row.
    pub decode: Rows,
}

/// Rows that were compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Rows {
    /// Due.
    pub all: usize,
    /// Equal.
    pub equal: usize,
}

/// Mean negative log-probability of a text, in nats per token.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Loss {
    /// Segments of the text.
    pub segments: usize,
    /// Tokens that were scored.
    pub tokens: usize,
    /// Of the reference.
    pub reference: f64,
    /// Of the candidate.
    pub candidate: f64,
    /// Candidate less reference.
    pub difference: f64,
    /// Largest difference that counts as equal.
    pub tolerance: f64,
    /// Mean over the segments by position in the segment: reference, candidate.
    pub by_position: Vec<[f64; 2]>,
}

/// Copies of lists of one length.
#[derive(Clone, Debug, Serialize)]
pub struct Copies {
    /// Words in a list.
    pub words: usize,
    /// Lists.
    pub trials: usize,
    /// Exact copies of the reference.
    pub reference: usize,
    /// Exact copies of the candidate.
    pub candidate: usize,
    /// Lists that both answered with the same text, right or wrong.
    pub identical: usize,
}

/// How long two continuations of one text stay together.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Prefix {
    /// Characters in common.
    pub common: usize,
    /// Characters that the reference wrote.
    pub of: usize,
}

/// Tokens per second.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Speed {
    /// Tokens read.
    pub prefill: f64,
    /// Tokens written, one sequence at a time.
    pub decode: f64,
}

impl Rows {
    fn share(self) -> String {
        match self.all {
            0 => "-".to_owned(),
            all => format!("{}/{all} ({:.0}%)", self.equal, 100.0 * self.equal as f64 / all as f64),
        }
    }
}

impl Report {
    /// Finds what differs, and decides. Servers of other engines round differently, so that their texts may part in the end:
    /// for them (`exact` false) the loss decides, and copies that only the candidate breaks.
    pub(crate) fn decide(mut self, exact: bool) -> Self {
        let mut found = Vec::new();
        for carries in &self.carries {
            let wrong = |rows: Rows| rows.all - rows.equal;
            let rows = wrong(carries.prefill) + wrong(carries.decode);
            // Another device rounds in another way, and near-ties fall the other way.
            if let (Some(layer), true, true) = (carries.from_layer, rows > 0, exact) {
                let stage = carries.stage;
                found.push(format!(
                    "stage {stage} began with {rows} index rows that layer {layer} did not compute"
                ));
            }
        }
        if let (Some(layer), true) = (self.first_diverging_layer, exact) {
            found.push(format!("the output of layer {layer} is the first that differs"));
        }
        // A loss that is not a number differs, too.
        let within = self.loss.difference.abs() <= self.loss.tolerance;
        if !within {
            found.push(format!(
                "the mean loss differs by {:+.5}, more than {}",
                self.loss.difference, self.loss.tolerance
            ));
        }
        for copies in &self.copies {
            if exact && copies.identical < copies.trials {
                let differing = copies.trials - copies.identical;
                found.push(format!(
                    "{differing} of {} copies of {} words differ from the reference's",
                    copies.trials, copies.words
                ));
            }
            // One broken copy in twenty may be rounding.
            if !exact && copies.candidate + copies.trials.div_ceil(20) < copies.reference {
                found.push(format!(
                    "{} of {} copies of {} words are exact, {} of the reference's",
                    copies.candidate, copies.trials, copies.words, copies.reference
                ));
            }
        }
        let parted = self.prefixes.iter().filter(|p| p.common < p.of).count();
        if exact && parted > 0 {
            found.push(format!("{parted} of {} continuations part", self.prefixes.len()));
        }
        self.verdict = if found.is_empty() { Verdict::Same } else { Verdict::Differs };
        self.differences = found;
        self
    }

    fn stages(&self) -> Table {
        let mut table = Table::new();
        table.load_style(UTF8_FULL_CONDENSED);
        table.set_header(["stage", "layers", "rows from", "equal in prefill", "equal in decode"]);
        for carries in &self.carries {
            let [start, end] = carries.layers;
            table.add_row([
                carries.stage.to_string(),
                format!("{start}-{}", end - 1),
                carries.from_layer.map_or("-".to_owned(), |layer| format!("layer {layer}")),
                carries.prefill.share(),
                carries.decode.share(),
            ]);
        }
        table
    }

    fn checks(&self) -> Table {
        let mut table = Table::new();
        table.load_style(UTF8_FULL_CONDENSED);
        table.set_header(["check", "reference", "candidate", "result"]);
        if !self.carries.is_empty() {
            let layer = self.first_diverging_layer;
            let result = layer.map_or("none".to_owned(), |layer| format!("layer {layer}"));
            table.add_row(["first layer that differs", "", "", &result]);
        }
        let loss = &self.loss;
        table.add_row([
            format!("mean loss, {} tokens in {} segments", loss.tokens, loss.segments),
            format!("{:.5}", loss.reference),
            format!("{:.5}", loss.candidate),
            format!("{:+.5}", loss.difference),
        ]);
        for copies in &self.copies {
            table.add_row([
                format!("exact copies of {} words", copies.words),
                format!("{}/{}", copies.reference, copies.trials),
                format!("{}/{}", copies.candidate, copies.trials),
                format!("{} alike", copies.identical),
            ]);
        }
        if !self.prefixes.is_empty() {
            let common: Vec<String> =
                self.prefixes.iter().map(|p| format!("{}/{}", p.common, p.of)).collect();
            table.add_row([
                "characters in common".to_owned(),
                String::new(),
                String::new(),
                common.join(", "),
            ]);
        }
        for (name, of) in [
            ("tokens/s read", (|speed: &Speed| speed.prefill) as fn(&Speed) -> f64),
            ("tokens/s written", |speed| speed.decode),
        ] {
            let (reference, candidate) = (of(&self.reference_speed), of(&self.candidate_speed));
            table.add_row([
                name.to_owned(),
                format!("{reference:.0}"),
                format!("{candidate:.0}"),
                format!("{:.2} x", candidate / reference),
            ]);
        }
        table
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "reference: {}", self.reference)?;
        writeln!(f, "candidate: {}", self.candidate)?;
        if let Some(fault) = &self.reproduced {
            writeln!(f, "reproduced on purpose: {fault}")?;
        }
        if !self.carries.is_empty() {
            writeln!(f, "{}", self.stages())?;
        }
        writeln!(f, "{}", self.checks())?;
        for difference in &self.differences {
            writeln!(f, "- {difference}")?;
        }
        let verdict = match self.verdict {
            Verdict::Same => "same",
            Verdict::Differs => "differs",
        };
        write!(f, "verdict: {verdict}")
    }
}
