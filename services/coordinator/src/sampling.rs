//! What a step says about the draw of a sequence's next token.

use baton_proto::v1;

use crate::sequence::Sequence;

/// The draw of the token behind the sequence's last one. Takes the grammar's mask.
pub(crate) fn sampling(sequence: &mut Sequence, eos: &[u32]) -> v1::Sampling {
    let allowed_tokens = sequence.mask.take();
    let request = &sequence.request;
    let params = &request.sampling;
    let generated = sequence.generated();
    let mut banned_tokens = Vec::new();
    // A grammar alone says where its text may end.
    let free = request.grammar.is_none();
    if free && (request.ignore_eos || generated < request.min_tokens) {
        banned_tokens.extend(eos);
    }
    if free && generated < request.min_tokens {
        banned_tokens.extend(&request.stop_token_ids);
    }
    v1::Sampling {
        temperature: params.temperature,
        top_p: params.top_p,
        top_k: params.top_k,
        min_p: params.min_p,
        seed: params.seed,
        draw: generated as u64,
        logprobs: request.logprobs.map(|n| n as u32),
        banned_tokens,
        biased_tokens: params.logit_bias.iter().map(|(token, _)| *token).collect(),
        biases: params.logit_bias.iter().map(|(_, bias)| *bias).collect(),
        penalties: sequence.seen.as_ref().map(|seen| {
            // In order, so that the same request always makes the same step.
            let mut seen: Vec<(u32, u32)> = seen.iter().map(|(t, n)| (*t, *n)).collect();
            seen.sort_unstable();
            let (tokens, generated) = seen.into_iter().unzip();
            v1::Penalties {
                presence: params.presence_penalty,
                frequency: params.frequency_penalty,
                repetition: params.repetition_penalty,
                tokens,
                generated,
            }
        }),
        allowed_tokens,
    }
}
