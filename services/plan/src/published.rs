//! Configs as they were published, for plans and measurements without a checkpoint.

/// GLM-5.3: 78 layers, an indexer on every fourth.
pub const GLM_5_3: &str = include_str!("published/glm-5.3.json");
