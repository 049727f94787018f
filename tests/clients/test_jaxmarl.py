"""skirmish's oracle against JaxMARL's own SMAX, step by step, with JAX's random numbers; starts of both are alike.

tests/envs/test_skirmish.py compares the game with the oracle bitwise.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.skirmish import SkirmishOracle

jaxmarl_smax = pytest.importorskip("jaxmarl.environments.smax", reason="pip install jaxmarl==0.2.0")

F = np.float32
# How far numbers may be apart after one step from the same state. A place is the result of eight moves and pushes, each
# rounded to 2^-19 at the size of the map, one after the other; a push may double an error. 2^-19 (2 + 4 + … + 2^8) is
# 1e-3 at worst; errors mostly cancel, and the largest seen was 1e-5.
NEAR = 1e-4
SCENARIOS = ("3m", "2s3z", "3s5z", "5m_vs_6m", "10m_vs_11m", "27m_vs_30m", "3s5z_vs_3s6z", "3s_vs_5z", "6h_vs_8z")
SCENARIOS += ("smacv2_5_units", "smacv2_10_units")
OPTIONS = {
    "random attacks": ("5m_vs_6m", {"attack_mode": "random"}),
    "peaceful enemies": ("3m", {"enemy_shoots": False}),
    "soft walls": ("3m", {"walls_cause_death": False, "map_width": 11, "map_height": 11}),
    "hidden actions": ("3s5z", {"see_enemy_actions": False}),
    "time": ("2s3z", {"world_steps_per_env_step": 3, "time_per_step": 0.11, "won_battle_bonus": 2.5, "max_steps": 40}),
}


class JaxDraws:
    """The random numbers that JaxMARL's step makes of a key, at the places where it draws them."""

    def __init__(self, key, env, dt):
        key, enemies = jax.random.split(key)
        pairs = jax.vmap(jax.random.split)(jax.random.split(enemies, env.num_enemies))
        self.to_follow, self.to_pick = pairs[:, 0], pairs[:, 1]
        self.deviations = []
        for _ in range(env.world_steps_per_env_step):
            key, now = jax.random.split(key)
            keys = jax.random.split(now, env._env.num_agents)
            drawn = jax.vmap(lambda k: jax.random.uniform(k, minval=-dt, maxval=2 * dt))(keys)
            self.deviations.append(((np.asarray(drawn, np.float64) / dt + 1) / 3).astype(F))

    def deviation(self, move):
        return self.deviations[move]

    def follow(self, enemy, n):
        return int(jax.random.choice(self.to_follow[enemy], jnp.arange(n), p=jnp.ones(n) / n))

    def pick(self, enemy, n):
        return int(jax.random.choice(self.to_pick[enemy], jnp.arange(n), p=jnp.ones(n) / n))


def inject(oracle, state):
    """JaxMARL's state for the oracle."""
    world, policy = state.state, state.enemy_policy_state
    oracle.elapsed_steps = int(world.step)
    oracle.position, oracle.health = np.array(world.unit_positions, F), np.array(world.unit_health, F)
    oracle.cooldown = np.array(world.unit_weapon_cooldowns, F)
    oracle.unit_type = np.array(world.unit_types, np.int32)
    oracle.goal = np.array(policy.default_target, F)
    slot = np.array(policy.last_attacked_enemy)
    oracle.prey = np.where(slot < 0, -1, oracle.allies - 1 - slot)
    moves = np.rint(np.array(world.prev_movement_actions)).astype(int)
    way = np.select([moves[:, 1] > 0, moves[:, 0] > 0, moves[:, 1] < 0, moves[:, 0] < 0], [0, 1, 2, 3], 4)
    attack = np.array(world.prev_attack_actions)
    oracle.action = np.where(attack >= 5, attack, way).astype(np.int32)


def close(what, ours, theirs):
    np.testing.assert_allclose(np.asarray(ours, F), np.asarray(theirs, F), rtol=0, atol=NEAR, err_msg=what)


def compare_views(oracle, env, state, obs):
    names = env.agents
    close("obs", oracle.observe(), np.stack([obs[name] for name in names]))
    close("world state", oracle.world(), obs["world_state"])
    masks = env.get_avail_actions(state)
    np.testing.assert_array_equal(oracle.action_masks(), np.stack([masks[name] for name in names]).astype(bool))


def play(scenario, config, seed, steps):
    """Compare each step from JaxMARL's own state; how often what happened."""
    theirs = {**config, "max_steps": config.get("max_steps", 100) - 1}  # its episodes last a step longer than that says
    env = jaxmarl_smax.HeuristicEnemySMAX(scenario=jaxmarl_smax.map_name_to_scenario(scenario), **theirs)
    oracle, random = SkirmishOracle(scenario, **config), np.random.default_rng(seed)
    reset, step, seen = jax.jit(env.reset), jax.jit(env.step_env), dict.fromkeys(("ends", "won", "deaths", "hits"), 0)
    key = jax.random.PRNGKey(seed)
    state = None
    for _ in range(steps):
        key, now = jax.random.split(key)
        if state is None:
            obs, state = reset(now)
            inject(oracle, state)
            compare_views(oracle, env, state, obs)
        inject(oracle, state)
        before, mask = oracle.health.copy(), oracle.action_masks()
        weights = random.random(mask.shape) * mask
        weights[:, 5:] *= 10
        weights[:, 1] *= 3
        actions = weights.argmax(1)
        obs, state, rewards, dones, _ = step(now, state, dict(zip(env.agents, map(jnp.asarray, actions), strict=True)))
        ours, *_ = oracle.step(actions, JaxDraws(now, env, env.time_per_step))
        world, policy = state.state, state.enemy_policy_state
        close("rewards", ours, [rewards[name] for name in env.agents])
        close("positions", oracle.position, world.unit_positions)
        close("health", oracle.health, world.unit_health)
        alive = np.array(world.unit_alive)
        np.testing.assert_array_equal(oracle.alive, alive)
        close("cooldowns", oracle.cooldown, world.unit_weapon_cooldowns)
        lived = before[oracle.allies :] > 0  # what the script plans for a dead unit is nothing
        close("goals", oracle.goal[lived], np.array(policy.default_target)[lived])
        slot = np.array(policy.last_attacked_enemy)
        prey = np.where(slot < 0, -1, oracle.allies - 1 - slot)
        np.testing.assert_array_equal(oracle.prey[lived], prey[lived])
        assert oracle.over == bool(dones["__all__"])
        compare_views(oracle, env, state, obs)
        seen["ends"] += oracle.over
        seen["won"] += oracle.won
        seen["deaths"] += int((~oracle.alive).any())
        seen["hits"] += int((oracle.health < before).any())
        state = None if oracle.over else state
    return seen


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_oracle_steps_like_jaxmarl(scenario):
    seen = play(scenario, {}, 1, 130)
    assert seen["ends"] and seen["deaths"] and seen["hits"]


@pytest.mark.parametrize("name", OPTIONS)
def test_the_oracle_steps_like_jaxmarl_with_other_parameters(name):
    scenario, config = OPTIONS[name]
    assert play(scenario, config, 2, 130)["ends"]
