//! Names of KV blocks by content: a block's hash covers its tokens and, through the block before, all earlier ones.

/// Content of a block and of all before it. Equal hashes mean equal KV.
pub(crate) type BlockHash = [u8; 32];

/// What the first block of a text is chained to: blocks of other models or other salts never have the same hash.
pub(crate) fn root(model: &BlockHash, salt: &str) -> BlockHash {
    let mut hasher = blake3::Hasher::new_keyed(model);
    hasher.update(salt.as_bytes());
    *hasher.finalize().as_bytes()
}

/// The identity of a model: its config and checkpoint.
pub(crate) fn model(config_digest: &str, checkpoint_digest: &str) -> BlockHash {
    let mut hasher = blake3::Hasher::new();
    for part in [config_digest, checkpoint_digest] {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part.as_bytes());
    }
    *hasher.finalize().as_bytes()
}

fn chain(before: &BlockHash, tokens: &[u32]) -> BlockHash {
    let mut hasher = blake3::Hasher::new_keyed(before);
    for token in tokens {
        hasher.update(&token.to_le_bytes());
    }
    *hasher.finalize().as_bytes()
}

/// Hashes of the full blocks of a growing text.
#[derive(Clone, Debug)]
pub(crate) struct BlockHashes {
    root: BlockHash,
    hashes: Vec<BlockHash>,
}

impl BlockHashes {
    pub(crate) fn new(root: BlockHash) -> Self {
        Self { root, hashes: Vec::new() }
    }

    /// The hashes of the first `blocks` blocks of `tokens`, which only ever grow. At most as many as there are full ones.
    pub(crate) fn of(&mut self, tokens: &[u32], blocks: usize, block_size: usize) -> &[BlockHash] {
        let full = blocks.min(tokens.len() / block_size);
        for block in self.hashes.len()..full {
            let before = self.hashes.last().unwrap_or(&self.root);
            let hash = chain(before, &tokens[block * block_size..(block + 1) * block_size]);
            self.hashes.push(hash);
        }
        &self.hashes[..full]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_covers_model_salt_and_everything_before() {
        let hashes = |model: &BlockHash, salt: &str, tokens: &[u32]| {
            BlockHashes::new(root(model, salt)).of(tokens, 9, 2).to_vec()
        };
        let (a, b) = (model("config", "checkpoint"), model("configcheck", "point"));
        let plain = hashes(&a, "", &[1, 2, 3, 4, 5]);
        assert_eq!(plain.len(), 2, "full blocks only");
        assert_eq!(plain, hashes(&a, "", &[1, 2, 3, 4, 9]));
        assert_ne!(plain[1], hashes(&a, "", &[9, 2, 3, 4])[1]);
        assert_ne!(plain[0], hashes(&b, "", &[1, 2])[0]);
        assert_ne!(plain[0], hashes(&a, "tenant", &[1, 2])[0]);
        // As a text grows its hashes stay.
        let mut growing = BlockHashes::new(root(&a, ""));
        assert_eq!(growing.of(&[1, 2, 3], 1, 2), &plain[..1]);
        assert_eq!(growing.of(&[1, 2, 3, 4, 5], 2, 2), plain);
    }
}
