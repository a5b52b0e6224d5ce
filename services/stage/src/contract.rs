//! The contract's message and its type.

use baton_plan::StageContract;
use baton_proto::v1;

/// Reads a contract.
pub(crate) fn from_message(message: v1::StageContract) -> Result<StageContract, String> {
    let (stage, stages) = (message.stage as usize, message.stages as usize);
    if stage >= stages || message.first_layer >= message.end_layer {
        return Err(format!(
            "contract of stage {stage} of {stages} with layers {}..{} is not one of a pipeline",
            message.first_layer, message.end_layer
        ));
    }
    Ok(StageContract {
        stage,
        stages,
        layers: message.first_layer as usize..message.end_layer as usize,
        hidden_size: message.hidden_size as usize,
        hidden_dtype: message.hidden_dtype.parse()?,
        index_topk: message.index_topk as usize,
        index_dtype: message.index_dtype.parse()?,
        row_capacity: message.row_capacity as usize,
        block_size: message.block_size as usize,
        receives_from_layer: message.receives_from_layer.map(|l| l as usize),
        sends_from_layer: message.sends_from_layer.map(|l| l as usize),
        config_digest: message.config_digest,
    })
}
