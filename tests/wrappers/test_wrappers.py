"""The torch twins of Gymnasium's vector wrappers, held against Gymnasium's own and against plain loops."""

import copy
import time
import warnings
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from games.crew import Crew
from games.painter import Painter
from games.script import Script
from gymnasium.error import InvalidBound, InvalidProbability
from gymnasium.spaces import Box, Dict
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space
from gymnasium.wrappers import vector as theirs
from gymnasium.wrappers.utils import RunningMeanStd as TheirRunningMeanStd
from support.synchronisation import no_synchronisation

from gpu_vecenv import GymnasiumVectorEnv
from gpu_vecenv import wrappers as ours
from gpu_vecenv.engine.running_statistics import EpisodeRingBuffer, RunningMeanStd
from gpu_vecenv.errors import ResetNeededError, UnsupportedGameError

SAME, NEXT, DISABLED = AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED
MODES = (SAME, NEXT, DISABLED)
ROWS, HEADS, STEPS = 5, 2, 23
GYMNASIUM = tuple(map(int, gymnasium.__version__.split(".")[:2]))
pytestmark = [  # Gymnasium's own, of its wrappers as of ours
    pytest.mark.filterwarnings("ignore:.*precision lowered by casting:UserWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:__array_wrap__ must:DeprecationWarning"),
]
compares = pytest.mark.skipif(
    GYMNASIUM < (1, 4), reason="the twins follow Gymnasium 1.4; earlier ones compute otherwise"
)

# Gymnasium keeps the statistics of observations, and the returns whose variance scales rewards, in float32: each of the
# few dozen updates here rounds them by 2^-24 = 6e-8, relative to values of order 1.
FLOAT32_STATISTICS = 1e-5
# Ours are float64; a reference that sums in another order differs by a few dozen roundings of 2^-53 = 1.1e-16.
FLOAT64_STATISTICS = 1e-12
# One rounding of a quotient, and of each operand, to float32: at most 3 * 2^-24.
FLOAT32_QUOTIENT = 2e-7


class Toy(VectorEnv):
    """Rows whose episodes last 2 to 5 steps, and end in turn by termination and by truncation; all on one device.

    What is unspecified is poison: NaN, or 255. With ``partners`` two neighbours are agents of one env: the odd one
    leaves first, is a row of zeros until the even one ends, and then ends again, as ``info["active"]`` tells.
    """

    def __init__(self, mode, device="cpu", shape=(3,), kind=np.float32, partners=False, tells=False, rows=ROWS):
        self.num_envs, self.device, self.partners, self.tells = rows, torch.device(device), partners, tells or partners
        self.metadata = {"autoreset_mode": mode}
        low, high = (0, 255) if kind == np.uint8 else (-4.1, 12.3)
        self.single_observation_space = Box(low, high, shape, kind)
        self.observation_space = batch_space(self.single_observation_space, rows)
        self.single_action_space = Box(np.float32([-1.1, 0.1]), np.float32([0.7, 2]))
        self.action_space = batch_space(self.single_action_space, rows)
        self.kind = torch.from_numpy(np.zeros(0, kind)).dtype
        self.row = torch.arange(rows, device=device)
        self.place = torch.arange(int(np.prod(shape)), device=device).view(shape)
        self.given, self.number = None, 0

    def obs(self):
        row, episode, clock = (t.view(-1, *[1] * self.place.ndim) for t in (self.row, self.episode, self.clock))
        number = (row * 37 + episode * 11 + clock * 7 + self.place * 5 + 3) % 23
        values = number * 11 if self.kind == torch.uint8 else number * 0.5 - 3  # the same bits everywhere
        return values.to(self.kind) * self.here().view(row.shape)

    def here(self):
        """Whose row is still played: an odd row leaves after its first step, when it has a partner."""
        return (
            ~((self.clock > 0) & (self.row % 2 == 1)) if self.partners else torch.ones_like(self.row, dtype=torch.bool)
        )

    def reset(self, *, seed=None, options=None):
        mask = (options or {}).get("reset_mask")
        if mask is None:
            self.clock, self.episode = torch.zeros_like(self.row), torch.zeros_like(self.row)
            self.over = torch.zeros_like(self.row, dtype=torch.bool)
        else:
            self.renew(torch.as_tensor(mask, device=self.device))
        return self.obs(), {"active": self.here() & ~self.over} if self.tells else {}

    def renew(self, rows):
        self.episode, self.clock = self.episode + rows, self.clock * ~rows
        self.over = self.over & ~rows

    def step(self, actions):
        if not isinstance(actions, torch.Tensor):
            raise TypeError(f"actions are a {type(actions)}")
        self.given, self.number = actions, self.number + 1
        waiting, before, mode = self.over, self.here(), self.metadata["autoreset_mode"]
        if mode is NEXT:
            self.renew(waiting)
        self.clock = self.clock + ~waiting
        here, pair = self.here(), self.row // 2 * 2 if self.partners else self.row
        done = (self.clock >= 2 + (pair + self.episode) % 4) & ~waiting
        terminates = (pair + self.episode) % 2 == 0
        # Who leaves early terminates there, and once more when the environment ends.
        terminations = (done & (terminates | ~here)) | (before & ~here & ~waiting)
        truncations = done & ~terminates & here
        rewards = (
            (self.row * 7 + self.episode * 5 + self.clock * 3) % 11 * 0.125 - 0.5 + (actions[:, 0] - actions[:, 1]) / 4
        )
        rewards = (rewards * ~waiting * before).float()
        obs, info, self.over = self.obs(), {}, self.over | done
        if mode is SAME:
            poison = 255 if self.kind == torch.uint8 else np.nan
            marked = done.view(-1, *[1] * self.place.ndim)
            info = {"final_obs": obs.masked_fill(~marked, poison), "_final_obs": done}
            self.renew(done)
            obs = self.obs()
        if self.tells:
            info["active"] = self.here() & ~self.over
        return obs, rewards, terminations, truncations, info


class NumpyFace(VectorWrapper):
    """The same environment in NumPy, for Gymnasium's wrappers."""

    def reset(self, *, seed=None, options=None):
        return on_host(super().reset(seed=seed, options=options))

    def step(self, actions):
        return on_host(super().step(torch.from_numpy(np.array(actions))))


class Witness(VectorWrapper):
    """Remembers every tensor that passes, and what it held then."""

    def __init__(self, env):
        super().__init__(env)
        self.seen = []

    def reset(self, *, seed=None, options=None):
        return self.noted(super().reset(seed=seed, options=options))

    def step(self, actions):
        self.noted((actions,))
        return self.noted(super().step(actions))

    def noted(self, results):
        self.seen += [(tensor, tensor.clone()) for tensor in tensors(results)]
        return results

    def unchanged(self):
        return all(torch.equal(bits(now), bits(then)) for now, then in self.seen)


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


def tensors(results):
    if isinstance(results, torch.Tensor):
        return [results]
    if isinstance(results, dict):
        results = results.values()
    return [] if isinstance(results, str) else [tensor for part in results for tensor in tensors(part)]


def on_host(results):
    if isinstance(results, torch.Tensor):
        return results.cpu().numpy().copy()
    if isinstance(results, dict):
        return {key: on_host(value) for key, value in results.items()}
    return tuple(map(on_host, results)) if isinstance(results, tuple) else results


def actions_of(number, rows=ROWS, device="cpu"):
    values = torch.sin(torch.arange(rows * HEADS, dtype=torch.float32).view(rows, HEADS) + number) * 2
    return values.to(device)


def ticks(env, steps=STEPS):
    """What reset and each step gave; in DISABLED mode, ended rows are reset by hand at every third step."""
    toy, numpy = env.unwrapped, is_numpy(env)
    actions = [actions_of(number, env.num_envs, "cpu" if numpy else toy.device) for number in range(steps)]
    obs, info = env.reset(seed=0)
    yield obs, None, None, None, info
    for number in range(steps):
        yield env.step(actions[number].numpy() if numpy else actions[number])
        if toy.metadata["autoreset_mode"] is DISABLED and number % 3 == 2:
            obs, info = env.reset(options={"reset_mask": toy.over.numpy() if numpy else toy.over})
            yield obs, None, None, None, info


def is_numpy(env):
    while isinstance(env, VectorWrapper):
        if isinstance(env, NumpyFace):
            return True
        env = env.env
    return False


def close(ours, theirs, tolerance):
    """Equal within ``tolerance``, relative to values of order 1."""
    np.testing.assert_allclose(np.asarray(ours, np.float64), np.asarray(theirs, np.float64), tolerance, tolerance)


def scaled_image(obs):
    return (
        obs.movedim(-1, 1).float() / 255 if isinstance(obs, torch.Tensor) else np.float32(np.moveaxis(obs, -1, 1)) / 255
    )


def doubled(obs):
    return obs * 2


BOUNDS = np.float32([-2, -1, -10]), np.float32([1, 0, 1])
IMAGE = {"shape": (4, 4, 3), "kind": np.uint8}
OBSERVATION_WRAPPERS = {
    "flatten": (ours.FlattenObservation, {}, {}),
    "flatten image": (ours.FlattenObservation, {}, IMAGE),
    "flatten number": (ours.FlattenObservation, {}, {"shape": ()}),
    "reshape": (ours.ReshapeObservation, {"shape": (3, 1)}, {}),
    "reshape image": (ours.ReshapeObservation, {"shape": (16, 3)}, IMAGE),
    "rescale": (ours.RescaleObservation, {"min_obs": -1.0, "max_obs": 0.1}, {}),
    "rescale by arrays": (ours.RescaleObservation, {"min_obs": BOUNDS[0], "max_obs": BOUNDS[1]}, {}),
    "double": (ours.DtypeObservation, {"dtype": np.float64}, {}),
    "half": (ours.DtypeObservation, {"dtype": np.float16}, {}),
    "grey image": (ours.GrayscaleObservation, {}, IMAGE),
    "grey image with channel": (ours.GrayscaleObservation, {"keep_dim": True}, IMAGE),
    "float image": (ours.DtypeObservation, {"dtype": np.float32}, IMAGE),
    "transform": (ours.TransformObservation, {"func": doubled, "single_observation_space": Box(-8, 24, (3,))}, {}),
    "transform image": (
        ours.TransformObservation,
        {"func": scaled_image, "single_observation_space": Box(0, 1, (3, 4, 4))},
        IMAGE,
    ),
}
STATISTICS = [ours.NormalizeObservation, ours.NormalizeReward, ours.RecordEpisodeStatistics]
WRAPPERS = {
    **OBSERVATION_WRAPPERS,
    "normalize": (ours.NormalizeObservation, {}, {}),
    "normalize image": (ours.NormalizeObservation, {}, IMAGE),
    "normalize reward": (ours.NormalizeReward, {}, {}),
    "episodes": (ours.RecordEpisodeStatistics, {"buffer_length": 3}, {}),
    "clip reward": (ours.ClipReward, {"min_reward": -0.3, "max_reward": 0.4}, {}),
    "clip action": (ours.ClipAction, {}, {}),
    "rescale action": (ours.RescaleAction, {"min_action": -2.0, "max_action": 2.0}, {}),
    "list": (ours.DictInfoToList, {}, {"tells": True}),
}
STICKY = (ours.StickyAction, {"repeat_action_probability": 0.4, "repeat_action_duration": (1, 3)}, {})
MORE = {  # Gymnasium has them for single environments only, or not at all; or needs OpenCV
    "stack": (ours.FrameStackObservation, {"stack_size": 3}, {}),
    "stack images": (ours.FrameStackObservation, {"stack_size": 2, "padding_type": "zero"}, IMAGE),
    "delay": (ours.DelayObservation, {"delay": 2}, {}),
    "max": (ours.MaxObservation, {"memory": 2}, {}),
    "small image": (ours.ResizeObservation, {"shape": (3, 2)}, IMAGE),
    "sticky": STICKY,
}
every_twin = pytest.mark.parametrize(("wrapper", "arguments", "toy"), WRAPPERS.values(), ids=WRAPPERS)
every_wrapper = pytest.mark.parametrize(
    ("wrapper", "arguments", "toy"), (WRAPPERS | MORE).values(), ids=WRAPPERS | MORE
)
every_mode = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)


def twin(wrapper):
    return getattr(theirs, wrapper.__name__)


# ---------------------------------------------------------------------- why there are twins


@every_twin
def test_gymnasiums_wrapper_does_not_serve_tensors_in_some_mode(wrapper, arguments, toy):
    toy = {"tells": True, **toy}
    for mode in MODES:
        assert list(ticks(Toy(mode, **toy)))
        witness = Witness(Toy(mode, **toy))
        try:
            results = list(ticks(twin(wrapper)(witness, **arguments)))
        except (TypeError, ValueError, RuntimeError, AssertionError):
            return
        if not all(isinstance(part, torch.Tensor) for part in results[-1][:4]) or not witness.unchanged():
            return
    pytest.fail("no twin is needed")


@every_mode
def test_gymnasiums_reward_and_action_transforms_serve_tensors(mode):
    plain = list(ticks(Toy(mode)))
    halved = theirs.TransformReward(theirs.TransformAction(Toy(mode), torch.clone), lambda reward: reward / 2)
    for (*_, reward, _, _, _), (*_, other, _, _, _) in zip(plain, ticks(halved), strict=True):
        assert reward is other is None or torch.equal(reward / 2, other)


# ---------------------------------------------------------------------- equal to Gymnasium's


@every_mode
@pytest.mark.parametrize(("wrapper", "arguments", "toy"), OBSERVATION_WRAPPERS.values(), ids=OBSERVATION_WRAPPERS)
def test_an_observation_wrapper_gives_gymnasiums_bits(wrapper, arguments, toy, mode):
    reference = twin(wrapper)(NumpyFace(Toy(NEXT, **toy)), **copy.copy(arguments))  # it refuses SAME_STEP
    env = wrapper(Toy(mode, **toy), **arguments)
    assert env.single_observation_space == reference.single_observation_space
    assert env.observation_space == reference.observation_space
    finals = 0
    for raw, wrapped in zip(ticks(Toy(mode, **toy)), ticks(env), strict=True):
        pairs = [(raw[0], wrapped[0])]
        if "final_obs" in raw[4]:
            rows = raw[4]["_final_obs"]
            assert torch.equal(rows, wrapped[4]["_final_obs"])
            finals += int(rows.sum())
            pairs.append(
                (raw[4]["final_obs"].nan_to_num(), torch.where(spread(rows, wrapped), wrapped[4]["final_obs"], 0))
            )
        for (before, after), marked in zip(pairs, (None, pairs[-1]), strict=False):
            expected = reference.observations(before.numpy().copy())
            rows = slice(None) if marked is None else raw[4]["_final_obs"].numpy()
            assert after.numpy().dtype == expected.dtype == env.single_observation_space.dtype
            np.testing.assert_array_equal(after.numpy()[rows], expected[rows])
        assert wrapped[1] is None or torch.equal(raw[1], wrapped[1])
    assert (finals > 5) == (mode is SAME)


def spread(rows, results):
    return rows.view(-1, *[1] * (results[0].ndim - 1))


@compares
def test_normalized_observations_are_gymnasiums():
    env, reference = ours.NormalizeObservation(Toy(NEXT)), theirs.NormalizeObservation(NumpyFace(Toy(NEXT)))
    assert env.single_observation_space == reference.single_observation_space
    assert env.observation_space == reference.observation_space
    for number, (mine, other) in enumerate(zip(ticks(env), ticks(reference), strict=True)):
        assert mine[0].dtype == torch.float32
        close(mine[0], other[0], FLOAT32_STATISTICS)
        env.update_running_mean = reference.update_running_mean = number < 12
    assert env.obs_rms.count == pytest.approx(13 * ROWS + 1e-4)
    close(env.obs_rms.mean, reference.obs_rms.mean, FLOAT32_STATISTICS)
    close(env.obs_rms.var, reference.obs_rms.var, FLOAT32_STATISTICS)


@compares
@every_mode
@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
def test_normalized_rewards_are_gymnasiums(mode, gamma):
    """In DISABLED mode, without partial resets: there Gymnasium forgets the returns of all rows."""
    env = ours.NormalizeReward(Toy(mode), gamma)
    reference = theirs.NormalizeReward(NumpyFace(Toy(mode)), gamma)
    for part in range(2):
        env.reset()
        reference.reset()
        for number in range(3 if mode is DISABLED else 15):
            rewards, others = env.step(actions_of(number))[1], reference.step(actions_of(number).numpy())[1]
            assert rewards.dtype == torch.float32
            close(rewards, others, FLOAT32_STATISTICS)
            close(env.accumulated_reward, reference.accumulated_reward, FLOAT32_STATISTICS)
        env.update_running_mean = reference.update_running_mean = part == 0
    close(env.return_rms.var, reference.return_rms.var, FLOAT32_STATISTICS)


@compares
@every_mode
@pytest.mark.parametrize("buffer_length", [1, 2, 100])
def test_episode_statistics_are_gymnasiums(mode, buffer_length):
    arguments = {"buffer_length": buffer_length, "stats_key": "e"}
    env = ours.RecordEpisodeStatistics(Toy(mode), **arguments)
    reference = theirs.RecordEpisodeStatistics(NumpyFace(Toy(mode)), **arguments)
    for mine, other in zip(ticks(env), ticks(reference), strict=True):
        if mine[1] is None:
            continue
        if "e" not in other[4]:
            assert not mine[4]["_e"].any()
            other[4].update(
                e={"r": np.zeros(ROWS), "l": np.zeros(ROWS, int), "t": np.zeros(ROWS)}, _e=np.zeros(ROWS, bool)
            )
        assert mine[4]["_e"].tolist() == other[4]["_e"].tolist()
        for key in "rlt":
            assert mine[4]["e"][key].numpy().dtype == other[4]["e"][key].dtype
        np.testing.assert_array_equal(mine[4]["e"]["r"], other[4]["e"]["r"])  # the same float64 sums
        np.testing.assert_array_equal(mine[4]["e"]["l"], other[4]["e"]["l"])
    assert env.episode_count == reference.episode_count > buffer_length or buffer_length == 100
    assert env.return_queue == reference.return_queue and env.length_queue == reference.length_queue
    assert len(env.time_queue) == len(reference.time_queue)
    assert env.return_queue.maxlen == reference.return_queue.maxlen == buffer_length


@every_mode
@pytest.mark.parametrize("bounds", [(-0.3, 0.4), (None, 0.1), (0.1, None), (0.2, 0.2)], ids=str)
def test_clipped_rewards_have_gymnasiums_bits(mode, bounds):
    env, reference = ours.ClipReward(Toy(mode), *bounds), theirs.ClipReward(NumpyFace(Toy(mode)), *bounds)
    for mine, other in zip(ticks(env), ticks(reference), strict=True):
        assert mine[1] is None or mine[1].numpy().tobytes() == other[1].tobytes()


ACTION_WRAPPERS = {
    "clip": (ours.ClipAction, {}),
    "rescale": (ours.RescaleAction, {"min_action": -2.0, "max_action": 1.7}),
    "rescale by ints": (ours.RescaleAction, {"min_action": 0, "max_action": 3}),
    "rescale by arrays": (
        ours.RescaleAction,
        {"min_action": np.float32([-9, 0.1]), "max_action": np.float32([9, 0.3])},
    ),
}


@pytest.mark.parametrize(("wrapper", "arguments"), ACTION_WRAPPERS.values(), ids=ACTION_WRAPPERS)
def test_an_action_wrapper_gives_gymnasiums_bits(wrapper, arguments):
    toy, other = Toy(SAME), Toy(SAME)
    env, reference = wrapper(toy, **arguments), twin(wrapper)(NumpyFace(other), **arguments)
    assert env.single_action_space == reference.single_action_space and env.action_space == reference.action_space
    for _ in zip(ticks(env), ticks(reference), strict=True):
        if toy.given is not None:
            assert toy.given.numpy().tobytes() == other.given.numpy().tobytes()
            assert not torch.equal(toy.given, actions_of(toy.number - 1))


def test_rescaled_actions_that_fit_still_fit():
    """The engine refuses what is outside by a single rounding. What does not fit stays outside: nothing is clipped."""
    generator, outside = np.random.default_rng(0), 0
    for _ in range(200):
        toy = Toy(SAME)
        box = toy.single_action_space
        env = ours.RescaleAction(toy, -generator.uniform(0.1, 5), generator.uniform(0.1, 5))
        env.reset()
        least, most = (torch.tensor(bound) for bound in (env.single_action_space.low, env.single_action_space.high))
        env.step(torch.stack([least, most, least.nextafter(most), most.nextafter(least), (least + most) / 2]))
        assert all(box.contains(action) for action in toy.given.numpy())
        _, offset, *_ = env._constants
        outside += any(not box.contains((a - offset).div(env._constants[0]).numpy()) for a in (least, most))
        env.step(torch.stack([least - 1, most + 1, least - 1, most + 1, most + 1]))
        assert not any(box.contains(action) for action in toy.given.numpy())
    assert outside > 10, "by itself the formula leaves the Box"


@compares
@every_mode
def test_the_list_of_infos_is_gymnasiums(mode):
    # "episode" is a nested dict with a mask, computed in tensors below both.
    mine = ours.DictInfoToList(ours.RecordEpisodeStatistics(Toy(mode)))
    other = theirs.DictInfoToList(NumpyFace(ours.RecordEpisodeStatistics(Toy(mode))))
    episodes = 0
    for (*_, infos), (*_, expected) in zip(ticks(mine), ticks(other), strict=True):
        assert len(infos) == ROWS
        for info, wanted in zip(infos, expected, strict=True):
            assert info.keys() == wanted.keys()
            if "episode" in info:
                episodes += 1
                assert all(isinstance(value, torch.Tensor) for value in info["episode"].values())
                assert int(info["episode"]["l"]) == wanted["episode"]["l"] > 0
                assert float(info["episode"]["r"]) == wanted["episode"]["r"]
            if "final_obs" in info:
                np.testing.assert_array_equal(info["final_obs"], wanted["final_obs"])
        assert [info.keys() for info in infos[1:-1]] == [info.keys() for info in expected[1:-1]]
        assert infos[-1].keys() == expected[-1].keys()
        with pytest.raises(IndexError):
            infos[ROWS]
    assert episodes > 5


# ---------------------------------------------------------------------- equal to plain loops


def observed(mode, **toy):
    """Every observation that somebody saw, once: (n, *shape) float64, from a run whose rows end as they like."""
    seen, active = [], torch.ones(ROWS, dtype=torch.bool)
    for obs, rewards, *_, info in ticks(Toy(mode, **toy)):
        again = rewards is None and seen  # a partial reset shows the other rows again
        rows = info["active"] & ~active if again else info["active"] | active
        if "final_obs" in info:
            seen += list(info["final_obs"][active & info["_final_obs"]])
        seen += list(obs[rows])
        active = info["active"]
    return np.stack([np.asarray(row, np.float64) for row in seen])


def moments(rows):
    """Of the rows and of 1e-4 of a row with mean 0 and variance 1."""
    count = len(rows) + 1e-4
    mean = rows.sum(0) / count
    return mean, (np.square(rows - mean).sum(0) + 1e-4 * (1 + np.square(mean))) / count, count


@every_mode
@pytest.mark.parametrize("toy", [{}, {"partners": True}, IMAGE], ids=["alone", "partners", "image"])
def test_every_observation_counts_once(mode, toy):
    mean, var, count = moments(observed(mode, tells=True, **toy))
    for tells in {True, "partners" in toy}:  # without partners nobody need be told who is active
        env = ours.NormalizeObservation(Toy(mode, tells=tells, **toy))
        results = list(ticks(env))
        assert env.obs_rms.count.item() == pytest.approx(count, rel=FLOAT64_STATISTICS)
        close(env.obs_rms.mean / 100, mean / 100, FLOAT64_STATISTICS)
        close(env.obs_rms.var / 1e4, var / 1e4, FLOAT64_STATISTICS)
        for obs, *_, info in results:
            assert obs.dtype == torch.float32 and obs.isfinite().all()
            if mode is SAME and "final_obs" in info:
                assert info["final_obs"][info["_final_obs"]].isfinite().all()


def test_an_observation_is_normalized_by_the_statistics_that_know_it():
    toy, env = Toy(SAME), ours.NormalizeObservation(Toy(SAME), epsilon=0.5)
    for raw, (obs, *_, info) in zip(ticks(toy), ticks(env), strict=True):
        mean, std = env.obs_rms.mean, (env.obs_rms.var + 0.5).sqrt()
        # Mean and deviation are rounded to float32, so that the difference is off by 2^-24 of a mean of up to 11.
        close(obs, (raw[0].double() - mean) / std, 11 * FLOAT32_QUOTIENT)
        if "final_obs" in info:
            rows = info["_final_obs"]
            close(info["final_obs"][rows], (raw[4]["final_obs"][rows].double() - mean) / std, 11 * FLOAT32_QUOTIENT)


@every_mode
def test_frozen_statistics_stay_as_they_are(mode):
    for env in (ours.NormalizeObservation(Toy(mode)), ours.NormalizeReward(Toy(mode))):
        list(ticks(env, 4))
        before = env.state_dict()
        env.update_running_mean = False
        list(ticks(env))
        after = env.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in ("mean", "var", "count"))
        env.update_running_mean = True
        list(ticks(env, 4))
        assert not any(torch.equal(before[name], env.state_dict()[name]) for name in ("mean", "var", "count"))


def test_a_partial_reset_leaves_the_returns_of_other_rows_alone():
    env, toy = ours.NormalizeReward(Toy(DISABLED), gamma=0.5), Toy(DISABLED)
    returns, seen, active = np.zeros(ROWS), [], np.ones(ROWS, bool)
    env.reset()
    toy.reset()
    for number in range(STEPS):
        scaled = env.step(actions_of(number))[1]
        _, rewards, terminations, truncations, _ = on_host(toy.step(actions_of(number)))
        new = returns * 0.5 * ~terminations + rewards
        returns = np.where(active, new, returns)
        seen += list(returns[active])
        active = active & ~(terminations | truncations)
        close(scaled, rewards / np.sqrt(moments(np.array(seen))[1] + 1e-8), 2 * FLOAT32_QUOTIENT)
        if number % 3 == 2:
            mask = ~active
            env.reset(options={"reset_mask": torch.from_numpy(mask)})
            toy.reset(options={"reset_mask": mask})
            returns[mask], active = 0, active | mask
        close(env.accumulated_reward, returns, FLOAT64_STATISTICS)
    mean, var, count = moments(np.array(seen))
    close(env.return_rms.mean, mean, FLOAT64_STATISTICS)
    close(env.return_rms.var, var, FLOAT64_STATISTICS)
    assert env.return_rms.count.item() == pytest.approx(count, rel=FLOAT64_STATISTICS)


def episodes_of(mode, **toy):
    """(step, row, return, length) of every episode, row by row in plain Python."""
    episodes, running, active = [], [(0.0, 0)] * ROWS, [True] * ROWS
    for step, (_, rewards, terminations, truncations, info) in enumerate(ticks(Toy(mode, tells=True, **toy))):
        for row in range(ROWS if rewards is not None else 0):
            if active[row]:
                total, length = running[row]
                running[row] = total + rewards[row].item(), length + 1
                if terminations[row] or truncations[row]:
                    episodes.append((step, row, *running[row]))
                    running[row] = (0.0, 0)
        active = info["active"].tolist()
    return episodes


@every_mode
@pytest.mark.parametrize("partners", [False, True], ids=["alone", "partners"])
def test_episode_statistics_are_those_of_a_plain_loop(mode, partners):
    expected = episodes_of(mode, partners=partners)
    assert len(expected) > 12
    for tells in {True, partners}:
        env, found = ours.RecordEpisodeStatistics(Toy(mode, partners=partners, tells=tells), buffer_length=7), []
        for step, (_, rewards, *_, info) in enumerate(ticks(env)):
            if rewards is None:
                continue
            episode, ended = info["episode"], info["_episode"]
            found += [
                (step, row, episode["r"][row].item(), episode["l"][row].item()) for row in range(ROWS) if ended[row]
            ]
            assert all((figure[~ended] == 0).all() for figure in episode.values())
        assert found == expected
        assert env.episode_count == len(expected)
        assert list(env.return_queue) == [total for *_, total, _ in expected[-7:]]
        assert list(env.length_queue) == [length for *_, length in expected[-7:]]


def test_of_more_ended_episodes_than_fit_the_last_are_kept():
    env = ours.RecordEpisodeStatistics(Toy(SAME, rows=40), buffer_length=3)
    assert list(env.return_queue) == list(env.length_queue) == list(env.time_queue) == [] and env.episode_count == 0
    env.reset()
    kept, most = [], 0
    for number in range(6):
        info = env.step(actions_of(number, 40))[4]
        kept = [*kept, *info["episode"]["r"][info["_episode"]].tolist()][-3:]
        assert list(env.return_queue) == kept
        assert len(env.time_queue) == len(kept)
        most = max(most, int(info["_episode"].sum()))
    env.reset()
    assert list(env.return_queue) == kept, "a reset keeps the queues"
    assert most > 3


def test_episode_times_are_the_hosts():
    env = ours.RecordEpisodeStatistics(Toy(SAME))
    begin = time.perf_counter()
    env.reset()
    after_reset = time.perf_counter()
    for number in range(2):
        before_step = time.perf_counter()
        info = env.step(actions_of(number))[4]
        end = time.perf_counter()
    ended = info["_episode"]
    assert ended.any() and not ended.all()
    times = info["episode"]["t"][ended]
    assert torch.equal(times, times.round(decimals=6))
    # Times are rounded to microseconds.
    assert (times >= before_step - after_reset - 1e-6).all() and (times <= end - begin + 1e-6).all()
    assert (env.episode_start_times[ended] >= before_step).all() and (
        env.episode_start_times[~ended] <= after_reset
    ).all()


@every_mode
@pytest.mark.parametrize("numpy", [False, True], ids=["torch", "numpy"])
def test_a_masked_reset_restarts_its_rows_alone(mode, numpy):
    env = ours.RecordEpisodeStatistics(Toy(mode))
    env.reset()
    env.step(actions_of(0))
    returns, starts = env.episode_returns.clone(), env.episode_start_times.clone()
    mask = torch.tensor([True, False, False, True, False])
    options = {"reset_mask": mask.numpy() if numpy else mask}
    given = dict(options)
    env.reset(options=options)
    assert options.keys() == given.keys() and options["reset_mask"] is given["reset_mask"]
    assert mask.tolist() == [True, False, False, True, False]
    assert torch.equal(env.episode_returns, returns.masked_fill(mask, 0)) and (returns != 0).all()
    assert env.episode_lengths.tolist() == [0, 1, 1, 0, 1]
    assert ((env.episode_start_times > starts) == mask).all()


class Popping(VectorWrapper):
    """Takes the mask out of the options, as Gymnasium's SyncVectorEnv does."""

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed, options={"reset_mask": options.pop("reset_mask")} if options else None)


def test_two_wrappers_see_the_mask_of_an_environment_that_takes_it_away():
    env = ours.NormalizeReward(ours.RecordEpisodeStatistics(Popping(Toy(DISABLED))))
    env.reset()
    env.step(actions_of(0))
    env.reset(options={"reset_mask": torch.tensor([True] + [False] * 4)})
    assert env.env.episode_lengths.tolist() == [0, 1, 1, 1, 1]
    assert (env.accumulated_reward == 0).tolist() == [True] + [False] * 4


def test_live_flags_of_an_environment_do_no_harm():
    class Live(VectorWrapper):
        def step(self, actions):
            *outputs, info = super().step(actions)
            self.flags.copy_(info["active"])
            return *outputs, {**info, "active": self.flags}

        def reset(self, **arguments):
            obs, info = super().reset(**arguments)
            self.flags = info["active"].clone()
            return obs, {**info, "active": self.flags}

    env = ours.RecordEpisodeStatistics(Live(Toy(NEXT, tells=True)))
    list(ticks(env))
    assert list(env.length_queue) == [length for *_, length in episodes_of(NEXT)]


# ---------------------------------------------------------------------- what rows remember, row by row


class Fed(gymnasium.Env):
    """A single environment that shows what it is told to, for wrappers of single environments."""

    action_space = Box(-np.inf, np.inf, (HEADS,))

    def __init__(self, space):
        self.observation_space, self.coming, self.given = space, None, None

    def reset(self, *, seed=None, options=None):
        return self.coming, {}

    def step(self, action):
        self.given = action
        return self.coming, 0.0, False, False, {}


class Highest(gymnasium.Wrapper):
    """The highest of the latest ``memory`` observations, by a list."""

    def __init__(self, env, memory):
        super().__init__(env)
        self.memory, self.seen = memory, []

    def reset(self, **arguments):
        self.seen = [super().reset(**arguments)[0]]
        return self.seen[0], {}

    def step(self, action):
        obs, *others = super().step(action)
        self.seen = [*self.seen, obs][-self.memory :]
        return np.maximum.reduce(self.seen), *others


CUSTOM = np.float32([-1, 0, 12])
MEMORIES = {
    "stack of 1": (ours.FrameStackObservation, {"stack_size": 1}, {}),
    "stack": (ours.FrameStackObservation, {"stack_size": 3}, {}),
    "stack of more than an episode": (ours.FrameStackObservation, {"stack_size": 9}, {}),
    "stack on zeros": (ours.FrameStackObservation, {"stack_size": 3, "padding_type": "zero"}, {}),
    "stack on one's own": (ours.FrameStackObservation, {"stack_size": 3, "padding_type": CUSTOM}, {}),
    "stack of images": (ours.FrameStackObservation, {"stack_size": 2}, IMAGE),
    "stack of numbers": (ours.FrameStackObservation, {"stack_size": 2, "padding_type": "zero"}, {"shape": ()}),
    "no delay": (ours.DelayObservation, {"delay": 0}, {}),
    "delay": (ours.DelayObservation, {"delay": 2}, {}),
    "delay of images": (ours.DelayObservation, {"delay": 1}, IMAGE),
    "max of 1": (ours.MaxObservation, {"memory": 1}, {}),
    "max": (ours.MaxObservation, {"memory": 2}, {}),
    "max of images": (ours.MaxObservation, {"memory": 3}, IMAGE),
}


@every_mode
@pytest.mark.parametrize("partners", [False, True], ids=["alone", "partners"])
@pytest.mark.parametrize(("wrapper", "arguments", "toy"), MEMORIES.values(), ids=MEMORIES)
def test_a_row_sees_what_gymnasiums_wrapper_shows_of_its_episodes(wrapper, arguments, toy, partners, mode):
    """A row's episode, from its first observation to its last, through the wrapper of a single environment."""
    single = Highest if wrapper is ours.MaxObservation else getattr(gymnasium.wrappers, wrapper.__name__)
    for tells in {True, partners}:  # without partners nobody need be told who is active
        env = wrapper(Toy(mode, partners=partners, tells=tells, **toy), **arguments)
        rows = [single(Fed(env.env.single_observation_space), **arguments) for _ in range(ROWS)]
        assert env.single_observation_space == rows[0].observation_space
        assert env.observation_space == batch_space(rows[0].observation_space, ROWS)
        active, shown, seen = np.ones(ROWS, bool), [None] * ROWS, 0
        raw_ticks = ticks(Toy(mode, partners=partners, tells=True, **toy))
        for raw, wrapped in zip(map(on_host, raw_ticks), map(on_host, ticks(env)), strict=True):
            obs, rewards, terminations, truncations, info = raw
            for row, one in enumerate(rows):
                one.unwrapped.coming = obs[row]
                if rewards is None:  # a reset, of all rows or of those that had ended
                    begins = shown[row] is None or (info["active"] & ~active)[row]
                else:
                    begins = not active[row]
                    if mode is SAME and active[row] and (terminations | truncations)[row]:
                        one.unwrapped.coming = info["final_obs"][row]
                        final, seen = one.step(None)[0], seen + 1
                        np.testing.assert_array_equal(wrapped[4]["final_obs"][row], final)
                        one.unwrapped.coming, begins = obs[row], True
                if begins:
                    shown[row] = one.reset()[0]
                elif rewards is not None:
                    shown[row] = one.step(None)[0]
                assert wrapped[0].dtype == shown[row].dtype == env.single_observation_space.dtype
                np.testing.assert_array_equal(wrapped[0][row], shown[row])
            active = info["active"]
        assert (seen > 5) == (mode is SAME)


class Drawn:
    """A stream of random numbers that gives what it is told to."""

    def uniform(self):
        return self.number

    def integers(self, low, high):
        assert low <= self.steps < high
        return self.steps


@every_mode
@pytest.mark.parametrize("duration", [1, 2, (1, 3)], ids=str)
@pytest.mark.parametrize("partners", [False, True], ids=["alone", "partners"])
def test_actions_stick_as_gymnasiums_do(partners, duration, mode):
    """Row by row, Gymnasium's wrapper with the random numbers that ours draws."""
    toy = Toy(mode, partners=partners, tells=True)
    env = ours.StickyAction(toy, 0.4, duration)
    rows = [gymnasium.wrappers.StickyAction(Fed(toy.single_observation_space), 0.4, duration) for _ in range(ROWS)]
    low, high = env.repeat_action_duration_range
    generator, active, number, repeated = torch.Generator(), np.ones(ROWS, bool), 0, 0
    for _, rewards, terminations, truncations, info in ticks(env, 80):
        if rewards is None:
            if not number:
                generator.set_state(env._generator.get_state())
            begins = info["active"].numpy() & ~active if number else active
            for row in np.flatnonzero(begins):
                rows[row].reset()
            active = info["active"].numpy()
            continue
        drawn = torch.rand(ROWS, generator=generator)
        steps = torch.full((ROWS,), low)
        if low < high:
            steps.random_(low, high + 1, generator=generator)
        actions = actions_of(number)
        for row, one in enumerate(rows):
            one.unwrapped.np_random = source = Drawn()
            source.number, source.steps = drawn[row].item(), steps[row].item()
            if active[row]:
                one.step(actions[row].numpy())
                np.testing.assert_array_equal(toy.given[row], one.unwrapped.given)
                repeated += not torch.equal(toy.given[row], actions[row])
            else:
                assert torch.equal(toy.given[row], actions[row])
            if not active[row] or terminations[row] or truncations[row]:
                one.reset()
        active, number = info["active"].numpy(), number + 1
    assert repeated > 40


def given_actions(env, seed, steps=40):
    env.reset(seed=seed)
    given = []
    for number in range(steps):
        env.step(actions_of(number, env.num_envs))
        given.append(env.unwrapped.given)
    return torch.stack(given)


def test_the_seed_decides_which_actions_stick():
    env = ours.StickyAction(Toy(SAME), 0.5)
    first, goes_on, other = given_actions(env, 2**64 - 1), given_actions(env, None), given_actions(env, 1)
    assert torch.equal(first, given_actions(ours.StickyAction(Toy(SAME), 0.5), 2**64 - 1))
    assert not torch.equal(first, goes_on) and not torch.equal(first, other)
    unseeded = [given_actions(ours.StickyAction(Toy(SAME), 0.5), None) for _ in range(2)]
    assert not torch.equal(*unseeded)


def test_a_policy_with_the_same_seed_draws_other_numbers():
    env = ours.StickyAction(Toy(SAME), 0.5)
    env.reset(seed=7)
    drawn = torch.rand(4, generator=torch.Generator().manual_seed(7))
    assert not torch.equal(torch.rand(4, generator=env._generator), drawn)


def test_actions_stick_as_often_as_they_should():
    env = ours.StickyAction(Toy(DISABLED, rows=40_000), 0.3)
    given = given_actions(env, 3, 2)
    stuck = (given[1] == given[0]).all(1).double()
    # 40,000 rows with a deviation of sqrt(0.21) each: 0.0023 in the mean, of which five are allowed.
    assert abs(stuck.mean().item() - 0.3) < 5 * 0.0023


def test_an_action_that_the_environment_refuses_does_not_stick():
    class Refusing(VectorWrapper):
        def step(self, actions):
            if actions.dtype != torch.float32:
                raise TypeError("float32 only")
            return super().step(actions)

    env = ours.StickyAction(Refusing(Toy(DISABLED)), 0.99)
    env.reset(seed=1)
    env.step(actions_of(0))
    with pytest.raises(TypeError, match="float32 only"):
        env.step(actions_of(1).double())
    env.step(actions_of(2))
    assert torch.equal(env.unwrapped.given[env._remaining == 0], actions_of(0)[env._remaining == 0])


@every_mode
@pytest.mark.parametrize("name", ["stack", "stack of 1", "no delay", "delay", "max of 1", "max"])
def test_who_writes_into_observations_changes_no_memory(name, mode):
    wrapper, arguments, _ = MEMORIES[name]
    for (obs, *_), (expected, *_) in zip(
        ticks(wrapper(Toy(mode), **arguments)), ticks(wrapper(Toy(mode), **arguments)), strict=True
    ):
        assert torch.equal(obs, expected)
        obs.fill_(77)


@pytest.mark.parametrize("duration", [1, 9])
def test_no_action_sticks_beyond_a_reset_by_hand(duration):
    env = ours.StickyAction(Toy(DISABLED), 0.999, duration)
    env.reset(seed=1)
    for number in range(2):
        env.step(actions_of(number))
    assert torch.equal(env.unwrapped.given, actions_of(0))
    mask = torch.tensor([True, False, False, True, True])  # rows 0 and 4 have ended
    env.reset(options={"reset_mask": mask})
    env.step(actions_of(2))
    assert (env.unwrapped.given == actions_of(2)).all(1).equal(mask)
    env.reset()
    env.step(actions_of(3))
    assert torch.equal(env.unwrapped.given, actions_of(3))


def test_a_new_run_over_the_same_wrapper_begins_anew():
    env = ours.FrameStackObservation(Toy(SAME), 3, padding_type="zero")
    first = [results[0] for results in ticks(env, 4)]
    assert all(torch.equal(a, results[0]) for a, results in zip(first, ticks(env, 4), strict=True))


SCRIPT = {"num_leads": 1, "num_others": 2, "leave": 2, "max_steps": 7}


@every_mode
def test_a_frame_stack_never_mixes_episodes(mode, device):
    """The game's observations tell who sees, when, and in which episode."""
    env = ours.FrameStackObservation(
        GymnasiumVectorEnv(Script, 30, device, autoreset_mode=mode, **SCRIPT), 3, padding_type="zero"
    )
    obs, info = env.reset(seed=2)
    active, stacks = info["active"], [(obs, info["active"])]
    for _ in range(40):
        obs, _, terminations, truncations, info = env.step(env.unwrapped.sample_actions())
        played, active = active, info["active"]
        stacks.append((obs, active if mode is SAME else active | played))
        waiting = ~active & (mode is SAME or ~played) & (obs[:, -1, 0] == 0)
        assert (obs[waiting] == 0).all()
        if mode is SAME:
            stacks.append((info["final_obs"], played & (terminations | truncations)))
        elif mode is DISABLED:
            over = ~active.view(30, 3).any(1)
            obs, info = env.reset(options={"reset_mask": over.repeat_interleave(3)})
            active = info["active"]
            stacks.append((obs, active))
    rows = torch.arange(90, device=obs.device) % 3 + 1
    long = 0
    for obs, counted in stacks:
        agent, step, mark = obs[..., 0], obs[..., 1], obs[..., 4]
        there, newest = agent != 0, step[:, -1:]
        assert (torch.where(there, agent, rows[:, None]) == rows[:, None])[counted].all()
        back = torch.arange(-2, 1, device=obs.device)
        assert (there == (newest + back >= 0))[counted].all()
        assert torch.where(there, step - newest == back, True)[counted].all()
        assert torch.where(there, mark == mark[:, -1:], True)[counted].all()
        long += int((counted & (newest[:, 0] >= 2)).sum())
    assert long > 100


# ---------------------------------------------------------------------- whose rows, and images


@pytest.mark.parametrize("type_only", [False, True])
def test_rows_say_whose_they_are(type_only, device):
    config = {"num_leads": 2, "num_others": 1}
    env = ours.AgentIndicator(GymnasiumVectorEnv(Script, 4, device, **config), type_only)
    plain = GymnasiumVectorEnv(Script, 4, device, **config)
    marks = [[1, 0], [1, 0], [0, 1]] if type_only else np.eye(3).tolist()
    obs, wanted = env.reset(seed=1)[0], plain.reset(seed=1)[0]
    for _ in range(9):
        assert torch.equal(obs[:, :6], wanted) and obs[:, 6:].tolist() == marks * 4
        actions = plain.sample_actions()
        obs, *_, info = env.step(actions)
        wanted, *_, plain_info = plain.step(actions)
        over = plain_info["_final_obs"]
        assert torch.equal(info["final_obs"][over][:, :6], plain_info["final_obs"][over])
        assert info["final_obs"][:, 6:].tolist() == marks * 4
    space = env.single_observation_space
    assert space.shape == (6 + len(marks[0]),) and space.low[6:].max() == 0 and space.high[6:].min() == 1


def test_images_get_a_channel_for_each_agent(device):
    env = ours.AgentIndicator(GymnasiumVectorEnv(Painter, 3, device))
    obs, _ = env.reset(seed=1)
    assert obs.shape == (3, 4, 5, 4) and obs.dtype == torch.uint8 and (obs[..., 3] == 255).all()
    assert env.single_observation_space == Box(0, 255, (4, 5, 4), np.uint8)
    grey = ours.AgentIndicator(ours.GrayscaleObservation(GymnasiumVectorEnv(Painter, 3, device)))
    assert grey.reset(seed=1)[0].shape == (3, 4, 5, 2)
    assert grey.single_observation_space == Box(0, 255, (4, 5, 2), np.uint8)


def test_rows_of_another_environment_have_no_agents():
    with pytest.raises(TypeError, match=r"env is a Toy; expected a gpu_vecenv\.GymnasiumVectorEnv"):
        ours.AgentIndicator(Toy(SAME))
    inner = GymnasiumVectorEnv(Script, 2, "cpu")
    with pytest.raises(ValueError, match=r"shape \(6, 1, 1, 1\); expected 1 to 3 axes"):
        ours.AgentIndicator(ours.ReshapeObservation(inner, (6, 1, 1, 1)))


def test_grey_is_gymnasiums_to_the_last_level():
    images = np.random.default_rng(0).integers(0, 256, (ROWS, 40, 50, 3), np.uint8)
    toy = {"shape": (40, 50, 3), "kind": np.uint8}
    expected = theirs.GrayscaleObservation(NumpyFace(Toy(NEXT, **toy))).observations(images)
    np.testing.assert_array_equal(
        ours.GrayscaleObservation(Toy(SAME, **toy)).observations(torch.from_numpy(images)), expected
    )


def area_mean(image, shape):
    """Each new pixel by a loop over the old ones that it covers, wholly or in part."""
    height, width = image.shape[:2]
    small = np.zeros((*shape, *image.shape[2:]))
    tall, wide = height / shape[0], width / shape[1]
    for y, x in np.ndindex(*shape):
        for v, u in np.ndindex(height, width):
            high = max(0, min((y + 1) * tall, v + 1) - max(y * tall, v))
            broad = max(0, min((x + 1) * wide, u + 1) - max(x * wide, u))
            small[y, x] += high * broad * image[v, u] / (tall * wide)
    return small


@every_mode
@pytest.mark.parametrize("image", [(4, 4, 3), (7, 5), (9, 6, 1)], ids=str)
@pytest.mark.parametrize("shape", [(2, 2), (3, 4), (4, 1)], ids=str)
def test_a_small_image_is_the_mean_of_areas(image, shape, mode):
    env = ours.ResizeObservation(Toy(mode, shape=image, kind=np.uint8), shape)
    assert env.single_observation_space == Box(0, 255, shape + image[2:], np.uint8)
    for raw, wrapped in zip(ticks(Toy(mode, shape=image, kind=np.uint8)), ticks(env), strict=True):
        pairs = list(zip(raw[0], wrapped[0], strict=True))
        if mode is SAME and raw[1] is not None:
            rows = raw[4]["_final_obs"]
            pairs += zip(raw[4]["final_obs"][rows], wrapped[4]["final_obs"][rows], strict=True)
        for before, after in pairs:
            # Half a level by rounding to a byte; sums of at most 63 float32 products below 255, of 2^-24 * 255 each.
            assert np.abs(area_mean(before.numpy(), shape) - after.numpy()).max() < 0.5 + 63 * 255 * 2**-24


# ---------------------------------------------------------------------- running statistics


def test_running_statistics_are_gymnasiums_in_float64():
    mine, other = RunningMeanStd(shape=(3,)), TheirRunningMeanStd(shape=(3,))
    for number, size in enumerate([1, 7, 100, 2]):
        batch = np.random.default_rng(number).normal(size=(size, 3)) * [1, 10, 0.1] + [1000, 0, -3]
        mine.update(torch.from_numpy(batch))
        other.update(batch)
        # A mean of 1000 and a deviation of 1: squares of 10^6 lose as many digits of the 2^-53.
        close(mine.mean, other.mean, FLOAT64_STATISTICS)
        close(mine.var, other.var, 1e6 * FLOAT64_STATISTICS)
        assert mine.count.item() == other.count


def test_rows_that_do_not_count_change_no_bit():
    kept, shown = RunningMeanStd(shape=(2,)), RunningMeanStd(shape=(2,))
    rows = torch.tensor([[1.5, -2.0], [torch.nan, torch.inf], [0.3, 7.0]])
    kept.update(rows[[0, 2]])
    shown.update(rows, torch.tensor([True, False, True]))
    for _ in range(1000):
        shown.update(rows, torch.zeros(3, dtype=torch.bool))
    assert {k: v.tolist() for k, v in kept.state_dict().items()} == {
        k: v.tolist() for k, v in shown.state_dict().items()
    }


def test_a_late_batch_still_moves_the_mean():
    statistics = RunningMeanStd()
    statistics.count.fill_(1e9)
    for _ in range(1000):
        statistics.update(torch.ones(64))
    # 64000 ones among 10^9 zeros; in float32 a count of 10^9 would not even grow.
    assert statistics.mean.item() == pytest.approx(64000 / (1e9 + 64000), rel=1e-9)


@pytest.mark.parametrize("rows", [5, 3000])
def test_the_ring_keeps_the_latest_in_order(rows, device):
    for size in (1, 2, 3, 8, 1000):
        ring, expected, generator = EpisodeRingBuffer(size, 2), [], np.random.default_rng(size)
        ring.to(torch.device(device))
        for step in range(40):
            ended = generator.random(rows) < generator.choice([0, 0.3, 1])
            metrics = np.stack([np.full(rows, step), np.arange(rows)], 1).astype(np.float64)
            ring.add(torch.from_numpy(ended).to(device), torch.from_numpy(metrics).to(device))
            expected += metrics[ended].tolist()
            assert ring.count() == len(expected)
            assert list(map(list, zip(*ring.read(), strict=True))) == expected[-size:]


@every_mode
@pytest.mark.parametrize("wrapper", STATISTICS[:2])
def test_a_saved_state_continues_the_same_run(wrapper, mode):
    env = wrapper(Toy(mode))
    list(ticks(env, 11))
    saved, toy = env.state_dict(), copy.deepcopy(env.unwrapped)
    kept = {name: tensor.clone() for name, tensor in saved.items()}
    expected = [env.step(actions_of(number)) for number in range(9)]
    other = wrapper(Toy(mode))
    other.reset()
    other.env = toy
    other.load_state_dict(saved)
    for number, results in enumerate(expected):
        again = other.step(actions_of(number))
        assert all(torch.equal(a, b) for a, b in zip(again[:4], results[:4], strict=True))
    assert all(torch.equal(saved[name], kept[name]) for name in kept), "neither run writes into a saved state"
    for tensor in [*saved.values(), *env.state_dict().values()]:
        tensor.zero_()
    assert env.state_dict()["count"] > 0
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in env.state_dict().items())


def test_statistics_move_to_an_environment_of_another_size():
    trained = ours.NormalizeReward(Toy(SAME))
    list(ticks(trained))
    evaluated = ours.NormalizeReward(Toy(SAME, rows=2))
    evaluated.return_rms.load_state_dict(trained.return_rms.state_dict())
    evaluated.update_running_mean = False
    evaluated.reset()
    rewards = evaluated.step(actions_of(0, 2))[1]
    plain = Toy(SAME, rows=2)
    plain.reset()
    close(rewards, plain.step(actions_of(0, 2))[1] / (trained.return_rms.var + 1e-8).sqrt(), FLOAT32_QUOTIENT)


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.pop("var"),
        lambda state: state.update(more=torch.zeros(())),
        lambda state: state.update(mean=torch.zeros(2, dtype=torch.float64)),
        lambda state: state.update(mean=state["mean"].float()),
        lambda state: state.update(count=3.0),
    ],
    ids=["missing", "unknown", "shape", "dtype", "number"],
)
@pytest.mark.parametrize("wrapper", STATISTICS[:2])
def test_a_wrong_state_is_refused_and_changes_nothing(wrapper, change):
    env = wrapper(Toy(SAME))
    list(ticks(env, 3))
    before, state = env.state_dict(), wrapper(Toy(SAME)).state_dict()
    change(state)
    with pytest.raises(ValueError, match=r"load_state_dict: the state is .*expected"):
        env.load_state_dict(state)
    assert all(torch.equal(before[name], tensor) for name, tensor in env.state_dict().items())


# ---------------------------------------------------------------------- tensors


@every_wrapper
@every_mode
def test_nothing_that_was_returned_ever_changes(wrapper, arguments, toy, mode):
    inside = Witness(Toy(mode, **toy))
    outside = Witness(wrapper(inside, **arguments))
    if wrapper is ours.DictInfoToList:
        outside.noted = lambda results: Witness.noted(outside, results[:-1]) and results
    for _ in ticks(outside):
        for env in (outside.env, getattr(outside.env, "return_rms", None), getattr(outside.env, "obs_rms", None)):
            outside.seen += [(t, t.clone()) for t in vars(env or object).values() if isinstance(t, torch.Tensor)]
    assert len(outside.seen) > STEPS and inside.unchanged() and outside.unchanged()


def tower(env):
    """One of each, in an order that lets all of them work."""
    env = ours.RescaleAction(ours.RecordEpisodeStatistics(env), -3.0, 3.0)
    env = ours.ClipReward(ours.NormalizeReward(ours.ClipAction(env)), -5, 5)
    env = ours.NormalizeObservation(ours.FlattenObservation(ours.DtypeObservation(env, torch.float64)))
    env = ours.TransformObservation(env, torch.abs)
    return ours.DictInfoToList(ours.ReshapeObservation(env, (*env.single_observation_space.shape, 1)))


@every_mode
@pytest.mark.parametrize("toy", [{}, IMAGE], ids=["vector", "image"])
def test_wrappers_stack(mode, toy):
    env = tower(Toy(mode, **toy))
    assert isinstance(env, VectorEnv) and isinstance(env, VectorWrapper) and isinstance(env.unwrapped, Toy)
    assert env.num_envs == ROWS and env.device == torch.device("cpu") and env.metadata == {"autoreset_mode": mode}
    size = int(np.prod(toy.get("shape", (3,))))
    assert env.single_observation_space == Box(-np.inf, np.inf, (size, 1))
    assert env.observation_space == batch_space(env.single_observation_space, ROWS)
    assert env.action_space == batch_space(Box(-np.inf, np.inf, (HEADS,)), ROWS)
    episodes = 0
    for obs, rewards, *_, infos in ticks(env):
        assert obs.shape == (ROWS, size, 1) and obs.dtype == torch.float32 and (obs >= 0).all()
        if rewards is not None:
            assert rewards.dtype == torch.float32 and rewards.abs().max() <= 5
            episodes += sum("episode" in info for info in infos)
            for info in infos:
                assert ("final_obs" in info) == ("episode" in info and mode is SAME)
                assert "final_obs" not in info or info["final_obs"].shape == (size, 1)
    assert episodes == len(episodes_of(mode))
    wide, narrow = torch.tensor([[9.0, -9.0]] * ROWS), torch.tensor([[3.0, -3.0]] * ROWS)
    for actions in (wide, narrow):  # clipped to [-3, 3], then moved to the bounds
        env.step(actions)
        # Quotient and product are off by a rounding each, of numbers below 8.
        close(env.unwrapped.given, [[0.7, 0.1]] * ROWS, 8 * FLOAT32_QUOTIENT)


# ---------------------------------------------------------------------- wrong use


@every_wrapper
def test_an_environment_of_arrays_is_refused_at_reset(wrapper, arguments, toy):
    env = wrapper(NumpyFace(Toy(NEXT, **toy)), **arguments)
    name = wrapper.__name__
    place = next((place.__name__ for place in (theirs, gymnasium.wrappers) if hasattr(place, name)), None)
    advice = f"use {place}.{name}$" if place else "expected a torch tensor$"
    with pytest.raises(TypeError, match=f"{name}: reset returned observations of type ndarray.*{advice}"):
        env.reset()


@every_wrapper
def test_a_step_before_reset_is_refused(wrapper, arguments, toy):
    with pytest.raises(ResetNeededError, match=wrapper.__name__):
        wrapper(Toy(NEXT, **toy), **arguments).step(actions_of(0))


@every_wrapper
def test_what_is_no_vector_environment_is_refused(wrapper, arguments, toy):
    with pytest.raises((TypeError, AssertionError), match="VectorEnv"):  # the second before Gymnasium 1.2
        wrapper(gymnasium.Env(), **arguments)


WRONG = [
    (ours.ClipReward, {}, {}, InvalidBound, "expected at least one"),
    (ours.ClipReward, {"min_reward": 1, "max_reward": 0}, {}, InvalidBound, "min_reward is 1, max_reward 0"),
    (ours.ClipReward, {"min_reward": np.nan}, {}, InvalidBound, "nan"),
    (ours.ClipReward, {"min_reward": "low"}, {}, ValueError, "min_reward"),
    (ours.NormalizeReward, {"gamma": 1.1}, {}, InvalidBound, "gamma is 1.1"),
    (ours.NormalizeReward, {"gamma": np.nan}, {}, InvalidBound, "gamma is nan"),
    (ours.NormalizeReward, {"epsilon": 0}, {}, InvalidBound, "epsilon is 0"),
    (ours.NormalizeObservation, {"epsilon": -1}, {}, InvalidBound, "epsilon is -1"),
    (ours.NormalizeObservation, {"epsilon": np.nan}, {}, InvalidBound, "epsilon is nan"),
    (ours.RecordEpisodeStatistics, {"buffer_length": 0}, {}, ValueError, "buffer_length is 0"),
    (ours.RecordEpisodeStatistics, {"buffer_length": None}, {}, TypeError, "buffer_length is None"),
    (ours.ReshapeObservation, {"shape": 3}, {}, TypeError, "shape is 3"),
    (ours.ReshapeObservation, {"shape": (1.5, 2)}, {}, TypeError, "shape is"),
    (ours.ReshapeObservation, {"shape": (2, 2)}, {}, ValueError, "product is 3"),
    (ours.ReshapeObservation, {"shape": (-1, -3)}, {}, ValueError, "positive"),
    (ours.RescaleObservation, {"min_obs": 0.0, "max_obs": 1.0}, IMAGE, TypeError, "DtypeObservation"),
    (ours.RescaleObservation, {"min_obs": 1.0, "max_obs": 0.0}, {}, (ValueError, AssertionError), None),
    (ours.RescaleObservation, {"min_obs": np.zeros(2), "max_obs": 1.0}, {}, (ValueError, AssertionError), None),
    (ours.RescaleObservation, {"min_obs": "0", "max_obs": 1.0}, {}, (TypeError, AssertionError), None),
    (ours.RescaleObservation, {"min_obs": -np.inf, "max_obs": 1.0}, {}, (ValueError, AssertionError), None),
    (ours.RescaleAction, {"min_action": 1.0, "max_action": 1.0}, {}, InvalidBound, "min_action < max_action"),
    (ours.FrameStackObservation, {"stack_size": 0}, {}, ValueError, "stack_size is 0"),
    (ours.FrameStackObservation, {"stack_size": 2.0}, {}, TypeError, "stack_size is 2.0"),
    (
        ours.FrameStackObservation,
        {"stack_size": 2, "padding_type": "repeat"},
        {},
        ValueError,
        "padding_type is 'repeat'",
    ),
    (
        ours.FrameStackObservation,
        {"stack_size": 2, "padding_type": np.zeros(2)},
        {},
        ValueError,
        "padding_type is array",
    ),
    (ours.FrameStackObservation, {"stack_size": 2, "padding_type": None}, {}, ValueError, "padding_type is None"),
    (ours.DelayObservation, {"delay": -1}, {}, ValueError, "delay is -1"),
    (ours.DelayObservation, {"delay": 1.0}, {}, TypeError, "delay is 1.0"),
    (ours.MaxObservation, {"memory": 0}, {}, ValueError, "memory is 0"),
    (ours.StickyAction, {"repeat_action_probability": 1}, {}, InvalidProbability, "is 1; expected"),
    (ours.StickyAction, {"repeat_action_probability": np.nan}, {}, InvalidProbability, "is nan; expected"),
    (ours.StickyAction, {"repeat_action_probability": 0.1, "repeat_action_duration": 0}, {}, ValueError, "is 0"),
    (
        ours.StickyAction,
        {"repeat_action_probability": 0.1, "repeat_action_duration": (3, 2)},
        {},
        InvalidBound,
        "expected .lowest, highest.",
    ),
    (
        ours.StickyAction,
        {"repeat_action_probability": 0.1, "repeat_action_duration": (1,)},
        {},
        ValueError,
        "a pair of ints",
    ),
    (ours.StickyAction, {"repeat_action_probability": 0.1, "repeat_action_duration": 1.5}, {}, TypeError, "is 1.5"),
    (ours.GrayscaleObservation, {}, {}, ValueError, "expected images"),
    (ours.GrayscaleObservation, {}, {"shape": (4, 4, 1), "kind": np.uint8}, ValueError, "expected 3 channels"),
    (ours.ResizeObservation, {"shape": (1, 1)}, {}, ValueError, "expected images"),
    (ours.ResizeObservation, {"shape": (5, 2)}, IMAGE, ValueError, "shape is 5; expected an int >= 1 and <= 4"),
    (ours.ResizeObservation, {"shape": (2, 0)}, IMAGE, ValueError, "shape is 0"),
    (ours.ResizeObservation, {"shape": (2, 1.5)}, IMAGE, TypeError, "shape is 1.5"),
    (ours.ResizeObservation, {"shape": 2}, IMAGE, TypeError, "tuple of height and width"),
    (ours.DtypeObservation, {"dtype": torch.bfloat16}, {}, TypeError, "BFloat16"),
    (ours.DtypeObservation, {"dtype": "many"}, {}, TypeError, "many"),
    (ours.DtypeObservation, {"dtype": object}, {}, TypeError, "object"),
]


@pytest.mark.parametrize(("wrapper", "arguments", "toy", "error", "message"), WRONG)
def test_wrong_arguments_are_refused(wrapper, arguments, toy, error, message):
    with pytest.raises(error, match=message):
        wrapper(Toy(SAME, **toy), **arguments)


def test_a_space_that_is_no_box_is_refused():
    toy = Toy(SAME)
    toy.single_observation_space = Dict({"a": Box(0, 1)})
    toy.single_action_space = gymnasium.spaces.Discrete(3)
    observing = [w[:2] for w in [*OBSERVATION_WRAPPERS.values(), *MEMORIES.values(), MORE["small image"]]]
    for wrapper, arguments in [*observing, *ACTION_WRAPPERS.values()]:
        if wrapper is not ours.TransformObservation:
            with pytest.raises(TypeError, match=f"{wrapper.__name__}: the .* space is .*; expected a Box"):
                wrapper(toy, **arguments)
    with pytest.raises(TypeError, match="expected a Box"):
        ours.NormalizeObservation(toy)


@pytest.mark.parametrize(("wrapper", "arguments"), ACTION_WRAPPERS.values(), ids=ACTION_WRAPPERS)
def test_wrong_actions_are_refused_and_step_nothing(wrapper, arguments):
    env = wrapper(Toy(SAME), **arguments)
    env.reset()
    with pytest.raises(TypeError, match="actions are a ndarray"):
        env.step(actions_of(0).numpy())
    for shape in [(HEADS,), (ROWS, 1), (1, HEADS), (ROWS + 1, HEADS), ()]:  # torch would broadcast most of them
        with pytest.raises(ValueError, match="expected"):
            env.step(torch.zeros(shape))
    with pytest.raises(ValueError, match="meta"):
        env.step(torch.zeros((ROWS, HEADS), device="meta"))
    assert env.unwrapped.number == 0


@pytest.mark.parametrize("wrapper", STATISTICS)
def test_a_wrong_mask_is_refused_before_anything_happens(wrapper):
    env = wrapper(Toy(DISABLED))
    env.reset()
    env.step(actions_of(0))
    clock = env.unwrapped.clock.clone()
    for mask, error in [([True] * ROWS, TypeError), (torch.ones(ROWS), TypeError), (np.ones(ROWS), TypeError)]:
        with pytest.raises(error, match="reset_mask"):
            env.reset(options={"reset_mask": mask})
    for size in (ROWS - 1, 1):
        with pytest.raises(ValueError, match="reset_mask"):
            env.reset(options={"reset_mask": torch.ones(size, dtype=torch.bool)})
    assert torch.equal(env.unwrapped.clock, clock)


def test_a_taken_key_is_refused():
    env = ours.RecordEpisodeStatistics(ours.RecordEpisodeStatistics(Toy(SAME)))
    env.reset()
    with pytest.raises(ValueError, match="'episode'"):
        env.step(actions_of(0))
    list(ticks(ours.RecordEpisodeStatistics(ours.RecordEpisodeStatistics(Toy(SAME)), stats_key="outer")))


def test_the_list_of_infos_must_be_outermost():
    env = ours.ClipReward(ours.DictInfoToList(Toy(SAME)), 0, 1)
    with pytest.raises(TypeError, match="outermost"):
        env.reset()


@pytest.mark.parametrize(("value", "error"), [(3, TypeError), ("x", TypeError), (torch.zeros(2), ValueError)], ids=str)
def test_an_info_without_rows_is_refused(value, error):
    with pytest.raises(error, match="info\\['a'\\]"):
        ours.RowInfos({"a": value}, ROWS)
    with pytest.raises(error, match="info\\['a'\\]"):
        ours.RowInfos({"nested": {"a": value}}, ROWS)


@pytest.mark.parametrize("wrapper", STATISTICS)
def test_the_mode_must_be_a_member_of_the_enumeration(wrapper):
    with pytest.raises(TypeError, match="AutoresetMode"):
        wrapper(Toy("SameStep"))
    toy = Toy(NEXT)
    toy.metadata = {}
    with pytest.warns(UserWarning, match="NEXT_STEP is assumed"):
        wrapper(toy)


def test_contradicting_spaces_are_reported():
    with pytest.warns(UserWarning, match="TransformObservation: observation_space is"):
        ours.TransformObservation(Toy(SAME), doubled, observation_space=Box(0, 1, (ROWS, 4)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        single_space = Box(-8, 24, (3,))
        env = ours.TransformObservation(Toy(SAME), doubled, batch_space(single_space, ROWS), single_space)
    assert env.observation_space == batch_space(single_space, ROWS)


def test_actions_do_not_stick_where_some_are_masked():
    with pytest.raises(UnsupportedGameError, match="masks actions"):
        ours.StickyAction(GymnasiumVectorEnv(Crew, 2, "cpu"), 0.2)


def test_what_a_reset_shows_of_rows_that_go_on_is_remembered():
    """Somebody has written to the state, and resets nobody to see it."""
    env = ours.FrameStackObservation(GymnasiumVectorEnv("pendulum", 3, "cpu"), 2)
    env.reset(seed=1)
    env.step(torch.zeros(3, 1))
    env.unwrapped.vec_env.state["theta"][1] = 0.0
    obs, _ = env.reset(options={"reset_mask": torch.tensor([True, False, False])})
    assert torch.equal(obs[1, 1], env.unwrapped.vec_env.observe()[1]) and not torch.equal(obs[1, 0], obs[1, 1])
    assert torch.equal(obs[0, 0], obs[0, 1])


# ---------------------------------------------------------------------- on the GPU


def without_waiting(env):
    """``ticks``, where all but the first reset raises if it waits for the GPU."""
    results = ticks(env)
    yield next(results)
    with no_synchronisation():
        yield from results


@pytest.mark.gpu
@every_mode
@pytest.mark.parametrize("name", [*WRAPPERS, *(name for name in MORE if name != "sticky"), "tower"])
def test_the_gpu_agrees_and_no_call_synchronises(name, mode):
    wrapper, arguments, toy = (WRAPPERS | MORE).get(name, (tower, {}, {}))
    env = wrapper(Toy(mode, "cuda", **toy), **arguments)
    found = list(without_waiting(env))
    for mine, expected in zip(found, ticks(wrapper(Toy(mode, **toy), **arguments)), strict=True):
        mine, expected = plain(mine), plain(expected)
        assert len(mine) == len(expected)
        for tensor, wanted in zip(mine, expected, strict=True):
            assert tensor.device == torch.device("cuda", 0) and tensor.dtype == wanted.dtype
            # Sums over rows run in another order; what follows from them is rounded to float32.
            close(tensor.cpu(), wanted, FLOAT32_STATISTICS)


@pytest.mark.gpu
@every_mode
def test_no_draw_synchronises_with_the_gpu(mode):
    wrapper, arguments, toy = STICKY
    env = wrapper(Toy(mode, "cuda", **toy), **arguments)
    found = list(without_waiting(env))
    assert all(tensor.is_cuda for results in found for tensor in plain(results))


def plain(results):
    """All tensors but times and what is unspecified."""
    *outputs, info = results
    if isinstance(info, dict):
        info = dict(info)
        if "final_obs" in info:
            info["final_obs"] = info["final_obs"][info["_final_obs"]]
        if "episode" in info:
            info["episode"] = [info["episode"][key] for key in "rl"]
    else:
        info = [[entries[key] for key in sorted(entries) if key != "episode"] for entries in info]
    return tensors([part for part in outputs if part is not None]) + tensors(info)


# ---------------------------------------------------------------------- our environments


@every_mode
def test_episode_statistics_are_those_of_the_engine(mode, device):
    arguments = {"max_steps": 6, "num_taggers": 2, "grid": 4, "autoreset_mode": mode, "device": device}
    env = ours.RecordEpisodeStatistics(
        gymnasium.make_vec("gpu_vecenv/TagGridworld-v0", num_envs=50, **arguments), 10**4
    )
    env.reset(seed=4)
    returns, lengths = torch.zeros((2, env.num_envs), dtype=torch.float64, device=env.device)
    for _ in range(40):
        info = env.step(env.unwrapped.sample_actions())[4]
        returns, lengths = returns + info["episode"]["r"], lengths + info["episode"]["l"]
        if mode is DISABLED:
            env.reset(options={"reset_mask": ~info["active"]})
    engine = env.unwrapped.vec_env.episode_statistics()
    assert env.episode_count == 3 * engine["episodes"].sum().item() > 300
    assert torch.equal(lengths.view(50, 3), engine["lengths"][:, None].double().expand(50, 3))
    assert torch.equal(returns.view(50, 3), engine["returns"])


@every_mode
def test_an_agent_that_leaves_early_has_one_episode(mode, device):
    """Its row ends twice, as the vector environment tells it, and has no transitions between the two."""
    arguments = {"max_steps": 9, "num_taggers": 3, "num_runners": 4, "side": 2.0, "tagging_distance": 0.2}
    name = "gpu_vecenv/TagContinuous-v1"
    inner = gymnasium.make_vec(name, num_envs=20, autoreset_mode=mode, device=device, **arguments)
    env = ours.NormalizeObservation(ours.RecordEpisodeStatistics(inner, 10**5))
    env.reset(seed=1)
    episodes = torch.zeros(env.num_envs, dtype=torch.int64, device=env.device)
    ends, steps = 0, 0
    for _ in range(60):
        before = inner.vec_env.active.clone().flatten()
        _, _, terminations, truncations, info = env.step(inner.sample_actions())
        episodes += info["_episode"]
        ends += int((terminations | truncations).sum())
        steps += int(before.sum())
        if mode is DISABLED:
            over = ~info["active"].view(20, 7).any(1)
            env.reset(options={"reset_mask": over.repeat_interleave(7)})
    assert int(episodes.sum()) == env.env.episode_count < ends
    waiting = (~inner.vec_env.active & inner.vec_env.active.any(1, keepdim=True)).flatten()
    completed = inner.vec_env.episode_statistics()["episodes"].repeat_interleave(7)
    assert torch.equal(episodes, completed + waiting)
    assert sum(env.env.length_queue) + int(env.env.episode_lengths.sum()) == steps


@pytest.mark.gpu
@pytest.mark.parametrize("wrapper", [ours.NormalizeReward, ours.RecordEpisodeStatistics, ours.NormalizeObservation])
def test_a_graph_cannot_hold_what_is_remembered(wrapper):
    env = wrapper(GymnasiumVectorEnv("cartpole", 4, "cuda"))
    env.reset(seed=1)
    actions = env.unwrapped.sample_actions()
    env.step(actions)
    with pytest.raises(RuntimeError, match="cannot be captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        env.step(actions)
    env.step(actions)


def test_a_step_with_a_fault_is_in_no_statistics():
    """The reward of an invalid action is NaN: it must neither be counted nor spoil what is."""
    make = partial(GymnasiumVectorEnv, "pendulum", 4, "cpu", max_steps=6)
    env, twin = (ours.NormalizeReward(ours.RecordEpisodeStatistics(make())) for _ in range(2))
    assert isinstance(env.env, ours.RecordEpisodeStatistics)
    env.reset(seed=1)
    twin.reset(seed=1)
    for step in range(5):
        actions = torch.zeros(4, 1)
        twin.step(actions)
        actions[2] = torch.nan if step == 3 else 0
        _, rewards, _, truncations, info = env.step(actions)
        assert (
            rewards.isnan().tolist()
            == info["fault"].tolist()
            == truncations.tolist()
            == [False, False, step == 3, False]
        )
        assert not info["_episode"].any()
    assert env.env.episode_count == 0 and env.env.episode_returns.isfinite().all()
    assert env.env.episode_lengths.tolist() == [5, 5, 1, 5]
    assert env.return_rms.std(1e-8).isfinite() and env.accumulated_reward.isfinite().all()
    assert torch.equal(env.accumulated_reward[[0, 1, 3]], twin.accumulated_reward[[0, 1, 3]])
    env.step(torch.zeros(4, 1))
    assert env.env.episode_count == 3
