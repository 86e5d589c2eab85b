//! The sampler again, as plainly as it can be written: full sorts, 64-bit floats, no shortcuts.

use proto::TokenId;
use proto::generate::Sampling;

use super::uniform;

/// The token, and how far the closest decision was from going the other way (relative to the whole
/// mass): below some 1e-5 the fast sampler's 32-bit weights may rightly decide otherwise.
pub(super) fn choose(
    logits: &[f32],
    s: &Sampling,
    prompt: &[TokenId],
    emitted: &[TokenId],
    index: u32,
) -> (TokenId, f64) {
    let logits = edit(logits, s, prompt, emitted);
    let mut ranked: Vec<(TokenId, f32)> = (0..).zip(logits).collect();
    ranked.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    let top = ranked[0].1;
    if s.temperature == 0.0 || s.top_k == 1 {
        return (ranked[0].0, f64::INFINITY);
    }
    let mut weights: Vec<(TokenId, f64)> = ranked
        .iter()
        .map(|&(id, x)| {
            (
                id,
                ((f64::from(x) - f64::from(top)) / f64::from(s.temperature)).exp(),
            )
        })
        .collect();
    let mut margin = f64::INFINITY;
    if s.min_p > 0.0 {
        let bar = f64::from(s.min_p);
        margin = weights
            .iter()
            .fold(margin, |m, w| m.min((w.1 - bar).abs() / bar));
        weights.retain(|w| w.1 >= bar);
    }
    if s.top_k > 0 {
        weights.truncate(s.top_k as usize);
    }
    if s.top_p < 1.0 {
        let total: f64 = weights.iter().map(|w| w.1).sum();
        let needed = f64::from(s.top_p) * total;
        let mut sum = 0.0;
        let mut kept = 0;
        while kept < weights.len() {
            sum += weights[kept].1;
            kept += 1;
            margin = margin.min((sum - needed).abs() / total);
            if sum >= needed {
                break;
            }
        }
        if kept < weights.len() {
            // Which of two nearly equal tokens is the last one in.
            margin = margin.min((weights[kept - 1].1 / weights[kept].1 - 1.0).abs());
        }
        weights.truncate(kept);
    }
    weights.sort_by_key(|w| w.0);
    let total: f64 = weights.iter().map(|w| w.1).sum();
    let target = uniform(s.seed, index) * total;
    let mut sum = 0.0;
    for &(id, w) in &weights {
        let below = sum;
        sum += w;
        if sum > target {
            let edge = (target - below).min(sum - target) / total;
            return (id, margin.min(edge));
        }
    }
    (weights[weights.len() - 1].0, 0.0)
}

fn edit(logits: &[f32], s: &Sampling, prompt: &[TokenId], emitted: &[TokenId]) -> Vec<f32> {
    let mut logits = logits.to_vec();
    for &(token, bias) in &s.logit_bias {
        logits[token as usize] += bias;
    }
    for (token, logit) in (0..).zip(&mut logits) {
        let produced = emitted.iter().filter(|&&t| t == token).count();
        if produced > 0 || prompt.contains(&token) {
            *logit = if *logit > 0.0 {
                *logit / s.repetition_penalty
            } else {
                *logit * s.repetition_penalty
            };
        }
        if produced > 0 {
            *logit -= s.frequency_penalty * produced as f32 + s.presence_penalty;
        }
    }
    logits
}
