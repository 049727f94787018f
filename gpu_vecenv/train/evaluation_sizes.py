"""How many episodes the evaluations of a run have, and in how many environments at a time they are played."""

from __future__ import annotations

from math import prod

from gpu_vecenv.engine.vec_env import VecEnv
from gpu_vecenv.train.trainer import Trainer

EPISODES, BEST_EPISODES = 1000, 100  # of each pairing after training; of each match of an evaluation of checkpoints
LEAST_EPISODES = 10
# All pairings after training have at most max(AGENT_STEPS, agent-steps of training / TRAINING_PER_EVALUATION) of them.
# The first takes about a second on a CPU.
TRAINING_PER_EVALUATION, AGENT_STEPS = 10, 100_000
# At a time, where a run has fewer: larger batches gain nothing, and networks need many times the observations' memory.
AGENTS, BYTES = 1 << 17, 1 << 26


def num_episodes(trainer: Trainer, pairings: int) -> int:
    """Episodes of each pairing after training, where a run does not set them: fewer after a short training.

    The longest possible episodes count, so that the number depends on the configuration alone; without the game's
    ``max_steps`` it is ``EPISODES``.

    Args:
        trainer: The trainer.
        pairings: How many are played.
    """
    max_steps = getattr(trainer.env.game, "max_steps", None)
    if type(max_steps) is not int:
        return EPISODES
    agents: int = trainer.env.game.layout.num_agents
    trained = trainer.num_iterations * trainer.env_steps_per_iteration * agents
    limit = max(trained // TRAINING_PER_EVALUATION, AGENT_STEPS)
    return max(LEAST_EPISODES, min(EPISODES, limit // max(1, pairings * max_steps * agents)))


def num_envs_for(env: VecEnv, episodes: int) -> int:
    """Environments in which episodes of ``env``'s game are played, in rounds of equal size.

    There are as many rounds as if each had at least as many environments as ``env``, more while agents and memory stay
    few; with one round each episode has an environment.
    """
    layout = env.game.layout
    fields = (field for field in (*layout.fields, *layout.engine_fields) if not field.shared)
    observations: int = layout.num_agents * prod(layout.observation.shape) * layout.observation.dtype.itemsize
    each = sum(field.nbytes for field in fields) + observations
    most = max(env.num_envs, min(AGENTS // layout.num_agents, BYTES // each))
    rounds = -(-episodes // most)
    return -(-episodes // rounds)
