"""Samples of a rollout for the loss in torch, and one update of a learner."""

import torch

from gpu_vecenv.train.ppo import Batch


def batch_of(rollout, view, indices, advantages):
    """A role's samples at ``indices`` (B,), which count through (T, E, A), with these advantages."""

    def rows(tensor):
        return tensor[: len(rollout.draws)].flatten(0, 2)[indices]

    draws = rows(rollout.draws).view(len(indices), -1)[:, : view.num_heads]
    log_probs, values, returns, active = map(rows, (rollout.log_probs, rollout.values, rollout.returns, rollout.active))
    mask = None if rollout.action_mask is None else view.mask(rows(rollout.action_mask))
    acting = None if rollout.acting is None else rows(rollout.acting)
    return Batch(rollout.flat_obs(view)[indices], draws, log_probs, values, advantages, returns, active, mask, acting)


def run_update(learner, progress=0.0, iteration=0):
    """All updates of an iteration; returns its metrics."""
    learner.prepare_update(iteration)
    learner.progress.fill_(progress)
    learner.begin_update()
    learner.update()
    learner.update_normalizers()
    return metrics_of(learner)


def metrics_of(learner):
    """Means over the minibatches of the last iteration up to the first that was skipped, and the share of those."""
    *sums, skipped = learner.metric_sums
    computed = learner.num_updates - (skipped - 1).clamp(min=0)
    means = [*(x / computed for x in sums), skipped / learner.num_updates]
    means = torch.stack([*means, learner.explained_variance, learner.learning_rate])
    return dict(zip(learner.metric_names(), means.tolist(), strict=True))
