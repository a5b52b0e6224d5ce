//! How the rows of a step are divided among prompts.

/// The fewest rows worth giving to a prompt that has more; smaller pieces only add to the cost of every layer.
pub(crate) const LEAST: usize = 32;

/// Divides `budget` rows among prompts that want `wants[i]` each, in turn order: nobody gets more than it wants, the
/// small ones are served whole, the others alike. When there are too many to give each at least [`LEAST`], the last ones
/// in turn get none.
pub(crate) fn divide(budget: usize, wants: &[usize]) -> Vec<usize> {
    let mut shares = vec![0; wants.len()];
    let mut served = 0;
    let mut least = 0;
    for want in wants {
        least += (*want).min(LEAST);
        if least > budget && served > 0 {
            break;
        }
        served += 1;
    }
    let mut order: Vec<usize> = (0..served).collect();
    order.sort_by_key(|&i| wants[i]);
    let mut left = budget;
    for (nth, &i) in order.iter().enumerate() {
        shares[i] = wants[i].min(left / (served - nth));
        left -= shares[i];
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_prompts_are_served_whole_and_the_rest_is_shared() {
        assert_eq!(divide(512, &[3000, 20, 100_000]), [246, 20, 246]);
        assert_eq!(divide(512, &[600]), [512]);
        assert_eq!(divide(512, &[]), Vec::<usize>::new());
        assert_eq!(divide(0, &[5]), [0]);
    }

    #[test]
    fn too_many_prompts_take_turns() {
        let shares = divide(100, &[500; 8]);
        assert_eq!(shares.iter().sum::<usize>(), 100);
        assert_eq!(shares[..4], [33, 33, 34, 0]);
        assert_eq!(divide(16, &[500, 500]), [16, 0], "a small step serves one");
    }
}
