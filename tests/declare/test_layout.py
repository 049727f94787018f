"""GameLayout: resolved once, when a game is configured; later stages read it and not the declaration."""

import collections
import dataclasses
import pickle
from dataclasses import dataclass

import pytest

import gpu_vecenv
from gpu_vecenv.envs.tag_gridworld import TagGridworld
from gpu_vecenv.errors import EnvDefinitionError

DECLARED = ("roles", "num_agents", "obs_dim", "obs_shape", "obs_dtype", "observation_space", "action_space")
READS: collections.Counter[str] = collections.Counter()


def counting(name):
    def read(self):
        READS[name] += 1
        return getattr(super(Watched, self), name)

    return property(read)


@dataclass(frozen=True, kw_only=True)
class Watched(TagGridworld):
    """Tag on a grid that counts how often its declaration is read."""

    source = TagGridworld.source_path()


for declared in DECLARED:
    setattr(Watched, declared, counting(declared))


def test_no_stage_after_configuration_reads_the_declaration_again():
    READS.clear()
    game = Watched(num_taggers=2, max_steps=5)
    assert READS["action_space"] == READS["observation_space"] == 1
    READS.clear()
    env = gpu_vecenv.make(game, 4, "cpu", autoreset_mode="next_step")
    env.reset(seed=1)
    env.step(env.sample_actions())
    gpu_vecenv.GymnasiumVectorEnv(game, 2, "cpu").reset(seed=1)
    gpu_vecenv.parallel_env(game, device="cpu").reset(seed=1)
    gpu_vecenv.batched_parallel_env(game, num_envs=2, device="cpu").reset(seed=1)
    config = gpu_vecenv.PPOConfig(num_steps=4, total_steps=32, hidden_sizes=(4,))
    gpu_vecenv.Trainer(env, config).train()
    assert READS == {}


def test_a_layout_is_frozen_and_shared_by_all_environments_of_a_game():
    game = TagGridworld()
    assert game.layout is game.layout is gpu_vecenv.make(game, 2, "cpu").layout
    with pytest.raises(dataclasses.FrozenInstanceError):
        game.layout.roles = {}


def test_a_pickled_game_resolves_its_layout_again():
    game = TagGridworld(num_taggers=3)
    copied = pickle.loads(pickle.dumps(game))
    assert copied == game and "layout" not in vars(copied)
    assert copied.layout is not game.layout and copied.layout.constants == game.layout.constants


def test_roles_and_num_agents_must_agree():
    class Miscounted(TagGridworld):
        num_agents = 3

    with pytest.raises(EnvDefinitionError, match=r"num_agents is 3, but roles .* have 5 agents"):
        Miscounted()
