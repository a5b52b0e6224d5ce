//! One decoder layer: its weights and its forward pass, as in `docs/model.md`.

use baton_kernels::{
    Backend, Dtype, ExpertMatrices, IndexParams, RopeLayout, RopeTable, RouterParams,
};
use baton_plan::ModelConfig;

use crate::slice::SliceError;
use crate::weights::Weights;

/// LayerNorm of the index keys, in every implementation.
const INDEX_NORM_EPS: f32 = 1e-6;

/// What all layers of a slice share.
#[derive(Debug)]
pub(crate) struct Shape {
    pub(crate) heads: usize,
    pub(crate) nope: usize,
    pub(crate) rope_width: usize,
    pub(crate) rope: RopeTable,
    pub(crate) rope_layout: RopeLayout,
    pub(crate) index_rope_layout: RopeLayout,
    pub(crate) index: IndexParams,
    pub(crate) router: RouterParams,
    pub(crate) eps: f32,
    pub(crate) latent_eps: f32,
    pub(crate) softmax_scale: f32,
    pub(crate) hidden_dtype: Dtype,
}

pub(crate) struct Layer<B: Backend> {
    /// Global number.
    pub(crate) number: usize,
    input_norm: B::Vector,
    q_a: B::Weight,
    q_a_norm: B::Vector,
    q_b: B::Weight,
    kv_a: B::Weight,
    kv_a_norm: B::Vector,
    kv_b: B::Absorbed,
    o: B::Weight,
    /// Present on full layers.
    indexer: Option<Indexer<B>>,
    latents: B::LatentCache,
    post_norm: B::Vector,
    ffn: Ffn<B>,
}

struct Indexer<B: Backend> {
    wq_b: B::Weight,
    wk: B::Weight,
    k_norm_weight: B::Vector,
    k_norm_bias: B::Vector,
    weights: B::Weight,
    keys: B::IndexCache,
}

struct Mlp<B: Backend> {
    gate: B::Weight,
    up: B::Weight,
    down: B::Weight,
}

enum Ffn<B: Backend> {
    Dense(Mlp<B>),
    Moe { gate: B::Weight, correction: B::Vector, experts: B::Experts, shared: Option<Mlp<B>> },
}

impl<B: Backend> Layer<B> {
    pub(crate) fn load(
        backend: &B,
        config: &ModelConfig,
        weights: &Weights<'_>,
        number: usize,
        blocks: usize,
        block_size: usize,
    ) -> Result<Self, SliceError> {
        let name = |tensor: &str| format!("model.layers.{number}.{tensor}.weight");
        let matrix = |tensor: &str, rows, cols| -> Result<B::Weight, SliceError> {
            Ok(backend.weight(weights.matrix(&name(tensor), rows, cols, config.fp8)?)?)
        };
        let vector = |tensor: &str, len| -> Result<B::Vector, SliceError> {
            Ok(backend.vector(&weights.vector(&name(tensor), len)?)?)
        };
        let (hidden, heads) = (config.hidden_size, config.num_heads);
        let (rq, rkv) = (config.q_lora_rank, config.kv_lora_rank);
        let (nope, rope, value) =
            (config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim);
        let indexer = if config.schedule.is_full(number) {
            let (index_heads, index_dim) = (config.index_heads, config.index_head_dim);
            let bias = format!("model.layers.{number}.self_attn.indexer.k_norm.bias");
            Some(Indexer {
                wq_b: matrix("self_attn.indexer.wq_b", index_heads * index_dim, rq)?,
                wk: matrix("self_attn.indexer.wk", index_dim, hidden)?,
                k_norm_weight: vector("self_attn.indexer.k_norm", index_dim)?,
                k_norm_bias: backend.vector(&weights.vector(&bias, index_dim)?)?,
                weights: matrix("self_attn.indexer.weights_proj", index_heads, hidden)?,
                keys: backend.index_cache(blocks, block_size, index_dim)?,
            })
        } else {
            None
        };
        let mlp = |prefix: &str, width: usize| -> Result<Mlp<B>, SliceError> {
            Ok(Mlp {
                gate: matrix(&format!("{prefix}.gate_proj"), width, hidden)?,
                up: matrix(&format!("{prefix}.up_proj"), width, hidden)?,
                down: matrix(&format!("{prefix}.down_proj"), hidden, width)?,
            })
        };
        let ffn = if config.is_moe(number) {
            let correction = format!("model.layers.{number}.mlp.gate.e_score_correction_bias");
            let shared = match config.num_shared_experts {
                0 => None,
                n => Some(mlp("mlp.shared_experts", n * config.moe_intermediate_size)?),
            };
            Ffn::Moe {
                gate: matrix("mlp.gate", config.num_routed_experts, hidden)?,
                correction: backend
                    .vector(&weights.vector(&correction, config.num_routed_experts)?)?,
                experts: experts(backend, config, weights, number)?,
                shared,
            }
        } else {
            Ffn::Dense(mlp("mlp", config.intermediate_size)?)
        };
        let kv_b = weights.matrix(
            &name("self_attn.kv_b_proj"),
            heads * (nope + value),
            rkv,
            config.fp8,
        )?;
        Ok(Self {
            number,
            input_norm: vector("input_layernorm", hidden)?,
            q_a: matrix("self_attn.q_a_proj", rq, hidden)?,
            q_a_norm: vector("self_attn.q_a_layernorm", rq)?,
            q_b: matrix("self_attn.q_b_proj", heads * (nope + rope), rq)?,
            kv_a: matrix("self_attn.kv_a_proj_with_mqa", rkv + rope, hidden)?,
            kv_a_norm: vector("self_attn.kv_a_layernorm", rkv)?,
            kv_b: backend.absorbed(kv_b, heads, nope, value)?,
            o: matrix("self_attn.o_proj", hidden, heads * value)?,
            indexer,
            latents: backend.latent_cache(blocks, block_size, rkv, rope)?,
            post_norm: vector("post_attention_layernorm", hidden)?,
            ffn,
        })
    }

    /// Runs the layer on `hidden` in place. `selection` holds the index rows of the nearest earlier full layer of this step,
    /// if there was one; a full layer replaces them.
    pub(crate) fn forward(
        &mut self,
        backend: &B,
        shape: &Shape,
        batch: &B::Placed,
        hidden: &mut B::Tensor,
        selection: &mut Option<B::Selection>,
    ) -> Result<(), SliceError> {
        let x = backend.rms_norm(hidden, &self.input_norm, shape.eps);
        let attended = self.attention(backend, shape, batch, &x, selection)?;
        backend.add(hidden, &attended, shape.hidden_dtype);
        let y = backend.rms_norm(hidden, &self.post_norm, shape.eps);
        let fed = self.ffn.forward(backend, shape, &y);
        backend.add(hidden, &fed, shape.hidden_dtype);
        Ok(())
    }

    /// Fills the layer's caches with made-up values.
    pub(crate) fn make_up_context(&mut self, backend: &B) {
        let seed = self.number as u64;
        backend.make_up_latents(&mut self.latents, seed);
        if let Some(indexer) = &mut self.indexer {
            backend.make_up_index_keys(&mut indexer.keys, seed);
        }
    }

    fn attention(
        &mut self,
        backend: &B,
        shape: &Shape,
        batch: &B::Placed,
        x: &B::Tensor,
        selection: &mut Option<B::Selection>,
    ) -> Result<B::Tensor, SliceError> {
        let query_latent =
            backend.rms_norm(&backend.linear(&self.q_a, x), &self.q_a_norm, shape.latent_eps);
        let mut queries = backend.linear(&self.q_b, &query_latent);
        let head = shape.nope + shape.rope_width;
        backend.rope(
            &mut queries,
            batch,
            &shape.rope,
            shape.rope_layout,
            shape.heads,
            head,
            shape.nope,
        );
        let kv = backend.linear(&self.kv_a, x);
        backend.write_latent(
            &mut self.latents,
            batch,
            &kv,
            &self.kv_a_norm,
            shape.latent_eps,
            &shape.rope,
        );
        if let Some(indexer) = &mut self.indexer {
            *selection = Some(indexer.select(backend, shape, batch, x, &query_latent));
        }
        let selection = selection.as_ref().ok_or(SliceError::NoSelection { layer: self.number })?;
        let attended = backend.sparse_attention(
            &self.latents,
            batch,
            &queries,
            &self.kv_b,
            selection,
            shape.softmax_scale,
        );
        Ok(backend.linear(&self.o, &attended))
    }
}

impl<B: Backend> Indexer<B> {
    /// Writes this step's index keys, then chooses.
    fn select(
        &mut self,
        backend: &B,
        shape: &Shape,
        batch: &B::Placed,
        x: &B::Tensor,
        query_latent: &B::Tensor,
    ) -> B::Selection {
        let keys = backend.linear(&self.wk, x);
        backend.write_index_key(
            &mut self.keys,
            batch,
            &keys,
            &self.k_norm_weight,
            &self.k_norm_bias,
            INDEX_NORM_EPS,
            &shape.rope,
            shape.index_rope_layout,
        );
        let mut queries = backend.linear(&self.wq_b, query_latent);
        backend.rope(
            &mut queries,
            batch,
            &shape.rope,
            shape.index_rope_layout,
            shape.index.heads,
            shape.index.head_dim,
            0,
        );
        let weights = backend.linear_f32(&self.weights, x);
        backend.select(&self.keys, batch, &queries, &weights, &shape.index)
    }
}

impl<B: Backend> Ffn<B> {
    fn forward(&self, backend: &B, shape: &Shape, y: &B::Tensor) -> B::Tensor {
        match self {
            Self::Dense(mlp) => mlp.forward(backend, y),
            Self::Moe { gate, correction, experts, shared } => {
                let routes = backend.route(gate, correction, y, &shape.router);
                let mut out = backend.run_experts(experts, &routes, y);
                if let Some(shared) = shared {
                    backend.accumulate(&mut out, &shared.forward(backend, y));
                }
                out
            }
        }
    }
}

impl<B: Backend> Mlp<B> {
    fn forward(&self, backend: &B, y: &B::Tensor) -> B::Tensor {
        backend.swiglu(&self.gate, &self.up, &self.down, y)
    }
}

/// The routed experts of a layer, stored one by one or fused.
fn experts<B: Backend>(
    backend: &B,
    config: &ModelConfig,
    weights: &Weights<'_>,
    layer: usize,
) -> Result<B::Experts, SliceError> {
    let (count, width, hidden) =
        (config.num_routed_experts, config.moe_intermediate_size, config.hidden_size);
    let prefix = format!("model.layers.{layer}.mlp.experts");
    let gate_up = format!("{prefix}.gate_up_proj");
    let matrices = (0..count)
        .map(|expert| {
            if weights.has(&gate_up) {
                let fused = [count, 2 * width, hidden];
                return Ok(ExpertMatrices {
                    gate: weights.fused(&gate_up, fused, expert, 0..width)?,
                    up: weights.fused(&gate_up, fused, expert, width..2 * width)?,
                    down: weights.fused(
                        &format!("{prefix}.down_proj"),
                        [count, hidden, width],
                        expert,
                        0..hidden,
                    )?,
                });
            }
            let matrix = |name: &str, rows, cols| {
                let name = format!("{prefix}.{expert}.{name}_proj.weight");
                weights.matrix(&name, rows, cols, config.fp8)
            };
            Ok(ExpertMatrices {
                gate: matrix("gate", width, hidden)?,
                up: matrix("up", width, hidden)?,
                down: matrix("down", hidden, width)?,
            })
        })
        .collect::<Result<Vec<_>, SliceError>>()?;
    Ok(backend.experts(&matrices)?)
}
