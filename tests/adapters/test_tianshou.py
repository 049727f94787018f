"""Tianshou: the adapter against Tianshou's own DummyVectorEnv, collectors, masks, and learning with Tianshou's PPO."""

from functools import partial

import numpy as np
import pytest
import torch

pytest.importorskip("tianshou", reason="tianshou is not installed")

from games.crew import Crew
from games.painter import Painter
from games.scouts import Scouts
from games.script import Script
from support.adapter_contract import run_example_here
from tianshou.algorithm import DQN, PPO, SAC
from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy
from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy, ProbabilisticActorPolicy
from tianshou.algorithm.modelfree.sac import SACPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import Batch, Collector, VectorReplayBuffer
from tianshou.env import DummyVectorEnv, VectorEnvNormObs
from tianshou.trainer import OffPolicyTrainerParams, OnPolicyTrainerParams
from tianshou.utils.net.common import Net
from tianshou.utils.net.continuous import ContinuousActorProbabilistic, ContinuousCritic
from tianshou.utils.net.discrete import DiscreteActor, DiscreteCritic
from torch.distributions import Categorical

import gpu_vecenv
from gpu_vecenv import EpisodeLog, GymnasiumEnv, GymnasiumVectorEnv
from gpu_vecenv.adapters import tianshou
from gpu_vecenv.errors import InvalidActionError, InvalidSeedError, ResetNeededError, UnsupportedGameError
from gpu_vecenv.wrappers import FlattenObservation

LEAVING = {"num_leads": 1, "num_others": 2, "leave": 3, "max_steps": 6}
CAUGHT = {"num_taggers": 2, "num_runners": 3, "num_neighbors": 3, "side": 3.0, "max_steps": 12, "tagging_distance": 0.1}
ADAM = AdamOptimizerFactory(lr=1e-3)


@pytest.fixture(autouse=True)
def one_thread_one_seed():
    torch.set_num_threads(1)
    torch.manual_seed(1)
    np.random.seed(1)  # Tianshou draws from it


def assert_same(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)


def actor_policy(env, **options):
    space = env.action_space[0]
    net = Net(state_shape=env.observation_space[0].shape, hidden_sizes=[64, 64])
    return DiscreteActorPolicy(
        actor=DiscreteActor(preprocess_net=net, action_shape=int(space.n), softmax_output=False),
        action_space=space,
        **options,
    )


def critic(env):
    return DiscreteCritic(preprocess_net=Net(state_shape=env.observation_space[0].shape, hidden_sizes=[64, 64]))


@pytest.mark.parametrize(
    ("game", "config"),
    [(Script, {}), (Script, {"continuous": True}), ("cartpole", {"max_steps": 20}), ("pendulum", {"max_steps": 5})],
)
def test_some_rows_are_stepped_and_reset_as_in_tianshous_own(game, config, device):
    """In any order, in and out of episodes; there each row is an env of its own, so that those left out stand."""
    num = 5
    ours = tianshou.make(game, num, device, **config)
    theirs = DummyVectorEnv([partial(GymnasiumEnv, game, first_env_index=i, **config) for i in range(num)])
    rng, space = np.random.default_rng(0), ours.action_space[0]
    space.seed(0)
    assert_same(ours.reset(seed=5), theirs.reset(seed=5))
    whole = 0
    for step in range(200):
        rows = rng.permutation(num)[: rng.integers(1, num + 2)]
        whole += len(rows) == num
        actions = np.stack([space.sample() for _ in rows])
        given = ours.step(actions, rows)
        *expected, _ = theirs.step(actions, rows)
        assert_same(given[:4], expected)
        for array in given[:4]:
            array.fill(0)  # who is given arrays may write to them
        begin = rows[expected[2] | expected[3]]
        if step % 5 == 0:  # and one that may be in the middle of its episode
            begin = np.union1d(begin, rng.integers(num))
        if len(begin):
            chosen, seeded = (None if step % 7 == 0 else begin), ({"seed": step} if step % 3 == 0 else {})
            assert_same(ours.reset(chosen, **seeded)[:1], theirs.reset(chosen, **seeded)[:1])
    assert 30 < whole < 170


@pytest.mark.parametrize("wanted", [{"n_step": 60}, {"n_episode": 3}, {"n_episode": 6}, {"n_episode": 17}])
def test_a_collector_collects_the_same_as_from_tianshous_own(wanted):
    """Fewer episodes than rows, as many, and more: rows stop one after the other."""
    envs = (
        tianshou.make(Script, 6, "cpu"),
        DummyVectorEnv([partial(GymnasiumEnv, Script, first_env_index=i) for i in range(6)]),
    )
    policy, found = actor_policy(envs[0], deterministic_eval=True), []
    for env in envs:
        collector = Collector(policy, env, VectorReplayBuffer(600, 6))
        collector.reset(gym_reset_kwargs={"seed": 3})
        found.append([(collector.collect(**wanted), collector.collect(**wanted)), collector.buffer.sample(0)[0]])
    (ours, our_data), (theirs, their_data) = found
    for one, other in zip(ours, theirs, strict=True):
        assert_same((one.returns, one.lens), (other.returns, other.lens))
        assert one.n_collected_steps == other.n_collected_steps >= 6
    names = ("obs", "act", "rew", "terminated", "truncated", "obs_next")
    assert_same([our_data[name] for name in names], [their_data[name] for name in names])


@pytest.mark.parametrize(
    ("game", "config"),
    [
        (Script, LEAVING),
        (Painter, {}),
        ("tag_continuous", CAUGHT),
        ("simple_spread", {"max_steps": 4, "continuous_actions": True}),
        (Crew, {}),
        (Scouts, {}),
    ],
)
def test_steps_are_those_of_the_gymnasium_view(game, config, device):
    """Agents that leave early, images, masks: each row's last observation from step, its next from reset."""
    ours, twin = tianshou.make(game, 4, device, **config), GymnasiumVectorEnv(game, 4, device, **config)
    twin_obs, info = twin.reset(seed=7)
    obs, infos = ours.reset(seed=7)
    episodes = 0
    for _ in range(40):
        if twin.game.masks_actions:
            assert isinstance(obs, Batch)
            np.testing.assert_array_equal(obs.mask, info["action_mask"].cpu())
            obs = obs.obs
        np.testing.assert_array_equal(obs, twin_obs.cpu())
        assert obs.dtype == ours.observation_space[0].dtype and infos.shape == (len(ours),)
        actions = twin.sample_actions()
        obs, rewards, terminated, truncated, infos = ours.step(actions.cpu().numpy())
        twin_obs, *expected, info = twin.step(actions)
        assert_same((rewards, terminated, truncated), [tensor.cpu() for tensor in expected])
        done = terminated | truncated
        last = np.where(
            info["_final_obs"].cpu().reshape(-1, *[1] * (twin_obs.ndim - 1)), info["final_obs"].cpu(), twin_obs.cpu()
        )
        np.testing.assert_array_equal(getattr(obs, "obs", obs), last)
        if done.any():
            episodes += done.sum()
            obs[done] = ours.reset(np.flatnonzero(done))[0]
    assert episodes >= len(ours)


def test_collected_episodes_are_the_agents_own():
    """As many as rows: one of each, up to where its agent left; and nobody's rest counts."""
    env = tianshou.make(Script, 8, "cpu", **LEAVING)
    buffer = VectorReplayBuffer(24 * 10, 24)
    collector = Collector(actor_policy(env), env, buffer)
    collector.reset(gym_reset_kwargs={"seed": 1})
    stats = collector.collect(n_episode=24)
    early, truncated = 0, 0
    for row, own in enumerate(buffer.buffers):
        agent, (_, _, ends, truncates, _, _) = row % 3, own.obs[0]
        leaves = agent > 0 and ends > LEAVING["leave"]
        length = LEAVING["leave"] if leaves else int(ends)
        early, truncated = early + leaves, truncated + bool(truncates and not leaves)
        assert len(own) == length
        episode = own[:length]
        steps = np.arange(length)
        np.testing.assert_array_equal(episode.obs[:, 1], steps)
        np.testing.assert_array_equal(episode.obs_next[:, 1], steps + 1)
        np.testing.assert_array_equal(episode.obs_next[:, 5], episode.act)
        np.testing.assert_array_equal(episode.rew, 10 * (agent + 1) + steps + 1)
        assert episode.terminated[-1] == (leaves or not truncates) and episode.truncated[-1] != episode.terminated[-1]
        assert not episode.done[:-1].any()
        assert (episode.rew.sum(), length) in zip(stats.returns, stats.lens, strict=True)
    assert early and truncated and stats.n_collected_episodes == 24
    assert stats.n_collected_steps == len(buffer) == stats.lens.sum()


def test_rows_of_ended_agents_are_zero_until_their_env_ends():
    env = tianshou.make(Script, 1, "cpu", **LEAVING)
    first = next(obs for obs in (env.reset()[0] for _ in range(100)) if obs[0, 2] == 6)
    assert first[:, 1].tolist() == [0, 0, 0]
    for step in range(1, 7):
        obs, rewards, terminated, truncated, _ = env.step(np.zeros(3, int))
        left = step == 3
        assert (terminated | truncated).tolist() == [step == 6, left or step == 6, left or step == 6]
        assert obs[0, 1] == step and bool(rewards[1]) == (step <= 3)
        if step < 6:  # then it is shown how its environment ended
            assert obs[1].any() == (step <= 3)
        if left:
            np.testing.assert_array_equal(env.reset([1, 2])[0], np.zeros((2, 6)))
    assert terminated[1:].all()
    assert env.reset([2, 0])[0][:, 1].tolist() == [0, 0]


def test_agents_move_and_begin_together():
    env = tianshou.make(Script, 4, "cpu", **LEAVING)
    with pytest.raises(ResetNeededError):
        env.step(np.zeros(12, int))
    before, _ = env.reset(seed=1)
    for rows in ([0, 1], [0, 1, 2, 3], [11]):
        with pytest.raises(ValueError, match="id omits an active agent of an environment; expected all of them"):
            env.step(np.zeros(len(rows), int), rows)
    obs, *_ = env.step(np.zeros(3, int), [5, 3, 4])
    assert obs[:, :2].tolist() == [[3, 1], [1, 1], [2, 1]]
    with pytest.raises(ValueError, match="whose episode has not ended; expected all rows of its environment"):
        env.reset([3])
    with pytest.raises(ValueError, match="expected each row at most once"):
        env.step(np.zeros(3, int), [3, 4, 4])
    with pytest.raises(IndexError):
        env.reset([12])
    obs, *_ = env.step(np.zeros(12, int))
    assert obs[:, 1].tolist() == [1] * 3 + [2] * 3 + [1] * 6  # what was refused has moved nobody
    begun, _ = env.reset([0, 2, 1])
    assert (begun[:, 1] == 0).all() and begun[0, 4] != before[0, 4]
    collector = Collector(actor_policy(env), env)
    collector.reset(gym_reset_kwargs={"seed": 1})
    with pytest.raises(ValueError, match="Use an n_episode that is a multiple of the 3 agents"):
        collector.collect(n_episode=4)


def test_actions_are_taken_as_tianshou_makes_them():
    env = tianshou.make(Script, 2, "cpu", continuous=True)
    env.reset()
    beyond = np.nextafter(np.float32([[1, -1], [-1, 1]]), np.float32([[2, -2], [-2, 2]]))
    np.testing.assert_array_equal(env.step(beyond)[0][:, 5], [1, -1])  # rounding of Tianshou's scaling
    env.reset()
    np.testing.assert_array_equal(env.step(np.float64([[0.5, 0], [0, 0]]))[0][:, 5], [0.5, 0])
    np.testing.assert_array_equal(env.step(np.array([[7, 0], [0, 0]], np.float32))[0][:, 5], [1, 0])  # clipped
    with pytest.raises(InvalidActionError):
        env.step(np.array([[0, 0], [np.nan, 0]], np.float32))
    for wrong in (np.zeros((1, 2), np.float32), np.zeros(2, np.float32), None):
        with pytest.raises((TypeError, ValueError), match=r"shape|cast"):
            env.step(wrong)
    env = tianshou.make(Script, 2, "cpu")
    env.reset()
    assert env.step(np.int32([1, 3]))[0][:, 5].tolist() == [1, 3]
    for wrong in ([4, 0], np.array([0.5, 0.0])):
        with pytest.raises(InvalidActionError):
            env.step(wrong)


def test_masks_reach_policies_that_know_them():
    """Roles have choices of their own number here; an action that is not allowed would raise."""
    env = tianshou.make(Scouts, 6, "cpu")
    env.seed(1)
    model = Net(state_shape=env.observation_space[0].shape, action_shape=4, hidden_sizes=[32])
    policy = DiscreteQLearningPolicy(model=model, action_space=env.action_space[0], eps_training=0.5)
    dqn = DQN(policy=policy, optim=ADAM, target_update_freq=50)
    collector = Collector(dqn, env, VectorReplayBuffer(1800, 18), exploration_noise=True)
    params = OffPolicyTrainerParams(
        training_collector=collector,
        max_epochs=1,
        epoch_num_steps=900,
        collection_step_num_env_steps=180,
        batch_size=32,
    )
    dqn.run_training(params)
    data = collector.buffer.sample(0)[0]
    assert len(data) >= 900 and data.done.any()
    assert data.obs.mask[np.arange(len(data)), data.act].all() and not data.obs.mask.all()
    pilots = data.obs.obs.reshape(len(data), -1)[:, 6:].any(1)
    assert len(set(data.act[pilots])) == 4
    assert collector.collect(n_episode=18).n_collected_episodes == 18
    with pytest.raises(InvalidActionError):
        collector.collect(n_step=180, random=True)


def test_seeds_repeat_and_attributes_are_found():
    env = tianshou.make("cartpole", 3, "cpu")
    rollouts = []
    for _ in range(2):
        assert env.seed(7) == [[7]] * 3
        rollouts.append([env.reset()[0], *(env.step(np.ones(3, int))[0] for _ in range(5))])
    assert_same(*rollouts)
    assert_same(env.reset(seed=7)[:1], env.reset([2, 0, 1], seed=7)[:1][0][[1, 2, 0]][None])
    assert env.seed([1, 2, 3]) == [[1], [2], [3]]
    with pytest.raises(InvalidSeedError):
        env.seed([1, 2])
    assert len(env.seed()) == 3 and len(env) == env.env_num == 3
    with pytest.raises(TypeError, match="options"):
        env.reset(options={})
    assert env.action_space == [env.env.single_action_space] * 3 and env.metadata[0] is env.env.metadata
    assert env.get_env_attr("num_agents", [0, 2]) == [1, 1] and env.render() == [None] * 3
    env.set_env_attr("note", "kept")
    assert env.get_env_attr("note", 1) == ["kept"]
    with pytest.raises(ValueError, match="one environment serves all rows"):
        env.set_env_attr("note", "other", 1)
    env.close()
    for use in (env.reset, partial(env.step, np.ones(3, int)), env.seed):
        with pytest.raises(AssertionError, match="after close"):
            use()
    drawn = tianshou.make("cartpole", 3, "cpu", render_mode="rgb_array")
    drawn.reset()
    assert len(drawn.render()) == 3 and drawn.render()[2].dtype == np.uint8


def test_only_the_right_views_are_wrapped():
    with pytest.raises(TypeError, match=r"expected a gpu_vecenv\.GymnasiumVectorEnv"):
        tianshou.wrap(gpu_vecenv.make("cartpole", 2, "cpu"))
    for wrong in ({"output": "torch"}, {"output": "numpy", "autoreset_mode": "disabled"}):
        with pytest.raises(ValueError, match='expected output="numpy" and "same_step"'):
            tianshou.wrap(GymnasiumVectorEnv("cartpole", 2, "cpu", **wrong))
    with pytest.raises(TypeError, match="expected a GymnasiumVectorEnv without wrappers for Tianshou"):
        tianshou.wrap(FlattenObservation(GymnasiumVectorEnv("cartpole", 2, "cpu", output="numpy")))
    with pytest.raises(UnsupportedGameError, match="roles with actions of their own"):
        tianshou.make(Script, 2, "cpu", num_others=1, choices_of_others=2)


def test_sac_and_normalised_observations_run():
    """Box actions, scaled by Tianshou; its own wrapper around the adapter."""
    env = VectorEnvNormObs(tianshou.make("pendulum", 4, "cpu", max_steps=20))
    obs, action = env.observation_space[0], env.action_space[0]
    actor = ContinuousActorProbabilistic(
        preprocess_net=Net(state_shape=obs.shape, hidden_sizes=[32]),
        action_shape=action.shape,
        unbounded=True,
        conditioned_sigma=True,
    )
    q = ContinuousCritic(
        preprocess_net=Net(state_shape=obs.shape, action_shape=action.shape, hidden_sizes=[32], concat=True)
    )
    sac = SAC(policy=SACPolicy(actor=actor, action_space=action), policy_optim=ADAM, critic=q, critic_optim=ADAM)
    collector = Collector(sac, env, VectorReplayBuffer(800, 4))
    collector.reset(gym_reset_kwargs={"seed": 1})
    collector.collect(n_step=160, random=True)
    params = OffPolicyTrainerParams(
        training_collector=collector, max_epochs=1, epoch_num_steps=80, collection_step_num_env_steps=8, batch_size=32
    )
    sac.run_training(params)
    data = collector.buffer.sample(0)[0]
    assert len(data) >= 240 and data.truncated.sum() == 4 * (len(data) // 80) and not data.terminated.any()


class Heads(torch.distributions.Distribution):
    """One Categorical for each number of a MultiDiscrete action."""

    def __init__(self, logits, sizes):
        self.heads = [Categorical(logits=part) for part in logits.split(list(sizes), -1)]
        super().__init__(logits.shape[:-1], torch.Size([len(sizes)]), validate_args=False)

    def sample(self):
        return torch.stack([head.sample() for head in self.heads], -1)

    def log_prob(self, action):
        return sum(head.log_prob(part) for head, part in zip(self.heads, action.unbind(-1), strict=True))

    def entropy(self):
        return sum(head.entropy() for head in self.heads)

    @property
    def stddev(self):
        return torch.zeros(self.batch_shape + self.event_shape)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_ppo_learns_tag_continuous():
    """Runners that are tagged leave early. They learn as well: judged are the taggers, over one episode an env."""
    config = {"num_taggers": 3, "num_runners": 2, "num_neighbors": 4, "side": 10.0, "max_steps": 30}
    config |= {"tagging_distance": 0.08, "runner_skill": 0.3, "acceleration_levels": 2, "turn_levels": 4}
    env, test_env = (tianshou.make("tag_continuous", num, "cpu", **config) for num in (64, 192))
    env.seed(1), test_env.seed(2)
    space, shape = env.action_space[0], env.observation_space[0].shape
    net = Net(state_shape=shape, hidden_sizes=[64, 64])
    actor = DiscreteActor(preprocess_net=net, action_shape=int(space.nvec.sum()), softmax_output=False)
    policy = ProbabilisticActorPolicy(
        actor=actor, dist_fn=lambda logits: Heads(logits, space.nvec), action_space=space, action_scaling=False
    )
    ppo = PPO(policy=policy, critic=critic(env), optim=AdamOptimizerFactory(lr=2e-3), gamma=0.95)
    rows = len(env)
    collector = Collector(ppo, env, VectorReplayBuffer(32 * rows, rows))
    test, log = Collector(ppo, test_env), EpisodeLog(test_env.env.vec_env)
    space.seed(1)

    def taggers(**how):
        test.reset()
        assert test.collect(n_episode=len(test_env), **how).n_collected_episodes == len(test_env)
        return float(log.means()["return_tagger"])

    at_random = taggers(random=True)
    params = OnPolicyTrainerParams(
        training_collector=collector,
        batch_size=1024,
        max_epochs=6,
        epoch_num_steps=96 * rows,
        collection_step_num_env_steps=32 * rows,
        update_step_num_repetitions=8,
    )
    ppo.run_training(params)
    trained = taggers()
    assert trained > at_random + 0.5  # about 2.2 and 3.6 of 6.7, with an error of the means below 0.2


@pytest.mark.slow
def test_the_example_learns(tmp_path):
    at_random, trained = run_example_here("tianshou_ppo.py", r"return at random (\d+), trained (\d+)", tmp_path)
    assert trained > 5 * at_random  # about 21 and 490
