//! Which tensors a model has, and which of a checkpoint's belong to it.

use std::collections::BTreeSet;
use std::ops::Range;

use baton_plan::ModelConfig;
use baton_plan::tensors::slice_tensors;

use super::{Checkpoint, CheckpointError, SCALE_SUFFIX};

/// Names listed in a message.
const LISTED: usize = 5;

impl Checkpoint {
    /// Checks the names of the whole checkpoint against the model, and that the slice's tensors are there.
    ///
    /// Indexer tensors on shared layers and everything of MTP layers may be there and are not read.
    ///
    /// # Errors
    /// When tensors are missing or unknown; a few are named and all counted.
    pub fn check_names(
        &self,
        config: &ModelConfig,
        layers: Range<usize>,
    ) -> Result<(), CheckpointError> {
        let missing: Vec<String> = slice_tensors(config, layers)
            .into_iter()
            .map(|tensor| tensor.name)
            .filter(|name| !self.has(name) && !fused_name(name).is_some_and(|f| self.has(&f)))
            .collect();
        if !missing.is_empty() {
            let count = missing.len();
            let names = missing.into_iter().take(LISTED).collect();
            return Err(CheckpointError::Missing { names, count });
        }
        let known: BTreeSet<String> = slice_tensors(config, 0..config.num_layers)
            .into_iter()
            .flat_map(|tensor| fused_name(&tensor.name).into_iter().chain([tensor.name]))
            .collect();
        let unexpected: Vec<&str> = self
            .names()
            .filter(|name| {
                let base = name.strip_suffix(SCALE_SUFFIX).unwrap_or(name);
                !known.contains(base) && !is_ignored(config, base)
            })
            .collect();
        if !unexpected.is_empty() {
            let names = unexpected.iter().take(LISTED).map(|&name| name.to_owned()).collect();
            return Err(CheckpointError::Unexpected { names, count: unexpected.len() });
        }
        Ok(())
    }
}

/// The fused tensor that holds a per-expert one.
fn fused_name(name: &str) -> Option<String> {
    let (layer, expert) = name.split_once("mlp.experts.")?;
    let (_, matrix) = expert.split_once('.')?;
    let fused = match matrix {
        "gate_proj.weight" | "up_proj.weight" => "gate_up_proj",
        "down_proj.weight" => "down_proj",
        _ => return None,
    };
    Some(format!("{layer}mlp.experts.{fused}"))
}

/// Tensors that may be there and that nothing reads.
fn is_ignored(config: &ModelConfig, name: &str) -> bool {
    if name.ends_with("rotary_emb.inv_freq") {
        return true;
    }
    let Some((layer, rest)) = name.strip_prefix("model.layers.").and_then(|r| r.split_once('.'))
    else {
        return false;
    };
    match layer.parse::<usize>() {
        Ok(layer) if layer >= config.num_layers => {
            layer < config.num_layers + config.num_mtp_layers.max(1)
        }
        Ok(layer) => !config.schedule.is_full(layer) && rest.starts_with("self_attn.indexer."),
        Err(_) => false,
    }
}
