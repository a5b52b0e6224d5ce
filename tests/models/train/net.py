"""GLM-DSA in plain PyTorch, for whole sequences: dense masked attention, every expert computed and weighted."""

import math

import torch
import torch.nn.functional as F
from torch import nn

CONFIG = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "vocab_size": 1024,
    "hidden_size": 256,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "qk_head_dim": 48,
    "head_dim": 16,
    "v_head_dim": 32,
    "intermediate_size": 256,
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "n_group": 1,
    "topk_group": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "moe_router_dtype": "float32",
    "index_n_heads": 16,
    "index_head_dim": 32,
    "index_topk": 32,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "rope_interleave": True,
    "indexer_rope_interleave": True,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 0,
    "dtype": "bfloat16",
}


def full_layers(config):
    """Layers with an indexer of their own."""
    freq, offset = config["index_topk_freq"], config["index_skip_topk_offset"]
    return [i for i in range(config["num_hidden_layers"]) if max(i - offset + 1, 0) % freq == 0]


class RmsNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), 1e-6).to(x.dtype)


def rotate(x, angles):
    """Rotates interleaved pairs of the last axis; `angles` `[length, pairs]`, `x` `[batch, length, heads, 2 * pairs]`."""
    cos, sin = (f(angles)[None, :, None].to(x.dtype) for f in (torch.cos, torch.sin))
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)


class Indexer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads, self.width, self.rope = c["index_n_heads"], c["index_head_dim"], c["qk_rope_head_dim"]
        self.wq_b = nn.Linear(c["q_lora_rank"], self.heads * self.width, bias=False)
        self.wk = nn.Linear(c["hidden_size"], self.width, bias=False)
        self.k_norm = nn.LayerNorm(self.width, eps=1e-6)
        self.weights_proj = nn.Linear(c["hidden_size"], self.heads, bias=False)

    def forward(self, x, latent, angles):
        """Scores `[batch, length, length]` of every position for every row, before the causal mask."""
        batch, length, _ = x.shape
        q = self.wq_b(latent).view(batch, length, self.heads, self.width)
        k = self.k_norm(self.wk(x)).view(batch, length, 1, self.width)
        q = torch.cat([rotate(q[..., : self.rope], angles), q[..., self.rope :]], -1)
        k = torch.cat([rotate(k[..., : self.rope], angles), k[..., self.rope :]], -1).squeeze(2)
        weights = self.weights_proj(x).float() * self.heads**-0.5
        dots = torch.einsum("bthd,bsd->bhts", q, k)
        dots = F.relu(dots.float() * self.width**-0.5)
        return (dots * weights.permute(0, 2, 1)[..., None]).sum(1)


class Attention(nn.Module):
    def __init__(self, c, full):
        super().__init__()
        self.heads, self.nope, self.rope, self.value = (
            c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
        )
        self.rank, hidden = c["kv_lora_rank"], c["hidden_size"]
        head = self.nope + self.rope
        self.q_a_proj = nn.Linear(hidden, c["q_lora_rank"], bias=False)
        self.q_a_layernorm = RmsNorm(c["q_lora_rank"])
        self.q_b_proj = nn.Linear(c["q_lora_rank"], self.heads * head, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, self.rank + self.rope, bias=False)
        self.kv_a_layernorm = RmsNorm(self.rank)
        self.kv_b_proj = nn.Linear(self.rank, self.heads * (self.nope + self.value), bias=False)
        self.o_proj = nn.Linear(self.heads * self.value, hidden, bias=False)
        if full:
            self.indexer = Indexer(c)

    def forward(self, x, latent, angles, causal, selected):
        """Output, and the mean over heads of the attention to all earlier positions (the indexer's target)."""
        batch, length, _ = x.shape
        q = self.q_b_proj(latent).view(batch, length, self.heads, -1)
        q = torch.cat([q[..., : self.nope], rotate(q[..., self.nope :], angles)], -1)
        kv, k_rope = self.kv_a_proj_with_mqa(x).split([self.rank, self.rope], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(kv)).view(batch, length, self.heads, -1)
        k, v = kv.split([self.nope, self.value], -1)
        k_rope = rotate(k_rope.view(batch, length, 1, self.rope), angles)
        k = torch.cat([k, k_rope.expand(-1, -1, self.heads, -1)], -1)
        logits = torch.einsum("bthd,bshd->bhts", q, k).float() * (self.nope + self.rope) ** -0.5
        logits = logits.masked_fill(~causal, -torch.inf)
        dense = logits.softmax(-1)
        probs = dense if selected is None else logits.masked_fill(~selected[:, None], -torch.inf).softmax(-1)
        out = torch.einsum("bhts,bshd->bthd", probs.to(v.dtype), v)
        return self.o_proj(out.flatten(-2)), dense.detach().mean(1)


class Mlp(nn.Module):
    def __init__(self, hidden, width):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Moe(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.count, self.chosen = c["n_routed_experts"], c["num_experts_per_tok"]
        self.width, self.scale = c["moe_intermediate_size"], c["routed_scaling_factor"]
        hidden = c["hidden_size"]
        self.gate = nn.Parameter(torch.empty(self.count, hidden))
        self.correction = nn.Buffer(torch.zeros(self.count))
        self.load = nn.Buffer(torch.zeros(self.count), persistent=False)
        self.gate_proj = nn.Parameter(torch.empty(self.count * self.width, hidden))
        self.up_proj = nn.Parameter(torch.empty(self.count * self.width, hidden))
        self.down_proj = nn.Parameter(torch.empty(hidden, self.count * self.width))
        self.shared_experts = Mlp(hidden, c["n_shared_experts"] * self.width)

    def forward(self, x):
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.float(), self.gate.float()).sigmoid()
        picked = (scores.detach() + self.correction).topk(self.chosen, -1).indices
        chosen = torch.zeros_like(scores).scatter(-1, picked, 1.0)
        if self.training:
            self.load += chosen.detach().sum((0, 1))
        weights = scores * chosen
        weights = self.scale * weights / (weights.sum(-1, keepdim=True) + 1e-20)
        inner = F.silu(F.linear(x, self.gate_proj)) * F.linear(x, self.up_proj)
        inner = inner * weights.to(inner.dtype).repeat_interleave(self.width, -1)
        return F.linear(inner, self.down_proj) + self.shared_experts(x)

    @torch.no_grad()
    def balance(self, rate):
        """Moves the correction towards equal loads; it steers the choice and never the weights."""
        self.correction += rate * torch.sign(self.load.mean() - self.load)
        self.load.zero_()


class Layer(nn.Module):
    def __init__(self, c, number, full):
        super().__init__()
        self.input_layernorm = RmsNorm(c["hidden_size"])
        self.self_attn = Attention(c, full)
        self.post_attention_layernorm = RmsNorm(c["hidden_size"])
        dense = number < c["first_k_dense_replace"]
        self.mlp = Mlp(c["hidden_size"], c["intermediate_size"]) if dense else Moe(c)


class Net(nn.Module):
    def __init__(self, c=CONFIG):
        super().__init__()
        self.config, self.full = c, full_layers(c)
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(c, i, i in self.full) for i in range(c["num_hidden_layers"]))
        self.norm = RmsNorm(c["hidden_size"])
        self.lm_head = nn.Linear(c["hidden_size"], c["vocab_size"], bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                std = 0.02
                if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                    std /= math.sqrt(2 * len(self.layers))
                nn.init.normal_(weight, std=std if "embed" not in name else 0.5)

    def forward(self, ids, sparse, stale=()):
        """Hidden states before the head, and the indexers' loss: KL to the mean attention of the layers that share each choice.

        `stale`: layers that read rows nobody has written for this step, as behind a cut that carries none.
        """
        c, length = self.config, ids.shape[1]
        device = ids.device
        pairs = c["qk_rope_head_dim"] // 2
        freqs = c["rope_parameters"]["rope_theta"] ** (-torch.arange(pairs, device=device).float() / pairs)
        angles = torch.arange(length, device=device).float()[:, None] * freqs
        causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
        nothing = torch.zeros_like(causal)
        nothing[:, 0] = True
        topk = min(c["index_topk"], length)
        x = self.embed_tokens(ids)
        loss = x.new_zeros((), dtype=torch.float32)
        scores = selected = None
        targets = []
        for number, layer in enumerate(self.layers):
            attn = layer.self_attn
            y = layer.input_layernorm(x)
            latent = attn.q_a_layernorm(attn.q_a_proj(y))
            if number in self.full:
                if targets:
                    loss = loss + divergence(scores, targets)
                scores = attn.indexer(y.detach(), latent.detach(), angles)
                scores = scores.masked_fill(~causal, -torch.inf)
                targets = []
                if sparse:
                    best = scores.detach().topk(topk, -1).indices
                    selected = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True) & causal
            chosen = selected
            if sparse and number in stale:
                chosen = nothing.expand(ids.shape[0], -1, -1)
            out, target = attn(y, latent, angles, causal, chosen)
            targets.append(target)
            x = x + out
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x), (loss + divergence(scores, targets)) / len(self.full)


def divergence(scores, targets):
    """KL of the softmax of the scores from the mean of the targets."""
    target = torch.stack(targets).mean(0)
    log = scores.float().log_softmax(-1)
    log = torch.where(log == -torch.inf, 0.0, log)
    return (torch.xlogy(target, target) - target * log).sum(-1).mean()


def tensors(net):
    """The checkpoint's tensors by name."""
    c, found = net.config, {}
    for name, value in net.state_dict().items():
        value = value.detach().float().cpu()
        if name.startswith("lm_head"):
            found[name] = value
        elif name.endswith(".mlp.gate"):
            found[f"model.{name}.weight"] = value
        elif name.endswith(".mlp.correction"):
            found[f"model.{name.removesuffix('correction')}gate.e_score_correction_bias"] = value
        elif name.endswith((".mlp.gate_proj", ".mlp.up_proj", ".mlp.down_proj")):
            prefix, projection = name.rsplit(".", 1)
            width, axis = c["moe_intermediate_size"], 1 if projection == "down_proj" else 0
            for expert, part in enumerate(value.split(width, axis)):
                found[f"model.{prefix}.experts.{expert}.{projection}.weight"] = part.contiguous()
        else:
            found[f"model.{name}"] = value
    return found
