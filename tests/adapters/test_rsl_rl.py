"""rsl_rl: the adapter's contract, clocks that are set, what the logger gets, and learning with rsl_rl's own PPO."""

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("rsl_rl", reason="rsl-rl-lib is not installed")

from games.painter import Painter
from games.script import Script
from rsl_rl.env import VecEnv
from rsl_rl.runners import OnPolicyRunner
from support.adapter_contract import Recorder, TerminatesAndTruncates, run_example_here
from support.synchronisation import no_synchronisation
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gpu_vecenv import GymnasiumVectorEnv
from gpu_vecenv.adapters import rsl_rl
from gpu_vecenv.errors import UnsupportedGameError
from gpu_vecenv.wrappers import RescaleObservation

ROOT = Path(__file__).parents[2]
THREADS_PER_ENV = {"num_leads": 1, "num_others": 2, "leave": 3, "max_steps": 8}


def runner(env: VecEnv, num_steps: int, log_dir: Path | None = None, **algorithm) -> OnPolicyRunner:
    net = {"class_name": "MLPModel", "hidden_dims": [64, 64]}
    config = {
        "num_steps_per_env": num_steps,
        "save_interval": 1000,
        "obs_groups": {"actor": ["policy"], "critic": ["policy"], "rnd_state": ["policy"]},
        "actor": {**net, "distribution_cfg": {"class_name": "GaussianDistribution"}},
        "critic": net,
        "algorithm": {"class_name": "PPO", "gamma": 0.95, "entropy_coef": 0.0, **algorithm},
    }
    return OnPolicyRunner(env, config, log_dir=log_dir and str(log_dir), device=str(env.device))


@pytest.mark.parametrize(
    ("game", "config"), [("pendulum", {"max_steps": 9}), (Script, THREADS_PER_ENV), (Painter, {"max_steps": 5})]
)
def test_steps_are_those_of_the_gymnasium_view(game, config, device):
    config = config | ({"continuous": True} if game is Script else {})
    env, twin = rsl_rl.make(game, 5, device, **config), GymnasiumVectorEnv(game, 5, device, **config)
    assert isinstance(env, VecEnv) and env.unwrapped is env
    assert env.num_envs == 5 * twin.num_agents and env.num_actions == twin.single_action_space.shape[0]
    assert env.device == twin.device and env.cfg == twin.game and env.max_episode_length == twin.game.max_steps
    obs, extras = env.reset(seed=5)
    expected, _ = twin.reset(seed=5)
    episodes = 0
    for _ in range(30):
        assert obs.batch_size == (env.num_envs,) and obs.device == env.device
        assert torch.equal(obs["policy"], expected) and torch.equal(env.get_observations()["policy"], expected)
        actions = twin.sample_actions()
        obs, rewards, dones, extras = env.step(actions)
        expected, twin_rewards, terminations, truncations, _ = twin.step(actions)
        assert torch.equal(rewards, twin_rewards)
        assert dones.dtype == torch.int64 and torch.equal(dones > 0, terminations | truncations)
        assert torch.equal(extras["time_outs"], truncations)
        episodes += int(dones.sum())
    assert episodes >= 3 * env.num_envs


@pytest.mark.parametrize("config", [{"max_steps": 8}, THREADS_PER_ENV])
def test_dones_and_time_outs_follow_the_script(config, device):
    """A row is done where its agent leaves, without time-out, and where its environment ends."""
    env = rsl_rl.make(Script, 64, device, continuous=True, **config)
    obs, _ = env.reset(seed=2)
    scripts = obs["policy"][:, 1:4].cpu()  # step, the step that ends it, whether that truncates
    kind = torch.arange(env.num_envs) % env.vec_env.num_agents
    left, ends = torch.zeros(env.num_envs, dtype=torch.bool), 0
    for _ in range(30):
        obs, _, dones, extras = env.step(torch.zeros(env.num_envs, 2, device=device))
        step, last, truncates = scripts.unbind(1)
        over, leaves = step + 1 == last, (kind > 0) & (step + 1 == config.get("leave", 0)) & (step + 1 < last)
        assert torch.equal(dones.cpu() > 0, over | leaves)
        assert torch.equal(extras["time_outs"].cpu(), over & (truncates > 0) & ~left)
        seen = obs["policy"].cpu()
        assert not seen[left & ~over].any()
        left, ends = (left | leaves) & ~over, ends + int(over.sum())
        scripts = torch.where(over[:, None], seen[:, 1:4], torch.stack([step + 1, last, truncates], 1))
    assert ends > 3 * env.num_envs


def test_what_terminates_is_no_time_out(device):
    env = rsl_rl.wrap(TerminatesAndTruncates(GymnasiumVectorEnv("pendulum", 2, device)))
    env.reset()
    _, _, dones, extras = env.step(torch.zeros(2, 1, device=device))
    assert dones.tolist() == [1, 1] and extras["time_outs"].tolist() == [False, False]


def test_nothing_is_copied(device):
    env = rsl_rl.wrap(Recorder(GymnasiumVectorEnv("pendulum", 4, device)))
    obs, rewards, _, _ = env.step(torch.zeros(4, 1, device=device))
    given_obs, given_rewards, *_ = env.env.outputs
    assert obs["policy"].data_ptr() == given_obs.data_ptr() == env.get_observations()["policy"].data_ptr()
    assert rewards.data_ptr() == given_rewards.data_ptr()


@pytest.mark.gpu
def test_no_step_waits_for_the_device():
    env = rsl_rl.make("simple_spread", 64, "cuda", continuous_actions=True, max_steps=7)
    actions = torch.randn(env.num_envs, env.num_actions, device="cuda")
    with no_synchronisation():
        for _ in range(100):
            env.step(actions)


def test_clocks_can_be_set(device):
    """Each environment then ends when its own clock says; its observations show the clock at once."""
    env = rsl_rl.make("pendulum", 6, device, max_steps=10)
    assert env.episode_length_buf.dtype == torch.int64 and env.episode_length_buf.tolist() == [0] * 6
    env.episode_length_buf = torch.arange(6, device=device) + 4
    ended = torch.stack([env.step(torch.zeros(6, 1, device=device))[2] for _ in range(6)])
    assert torch.equal(ended.cpu(), torch.eye(6, dtype=torch.int64).flip(1))
    assert env.episode_length_buf.tolist() == [0, 1, 2, 3, 4, 5]


def test_an_env_takes_the_clock_of_its_first_row(device):
    env = rsl_rl.make(Script, 2, device, continuous=True, num_leads=2)
    env.episode_length_buf = torch.tensor([3, 9, 1, 8], device=device)
    assert env.episode_length_buf.tolist() == [3, 3, 1, 1]
    assert env.get_observations()["policy"][:, 1].tolist() == [3, 3, 1, 1]
    with pytest.raises(ValueError, match=re.escape("shape is (2,); expected (4,)")):
        env.episode_length_buf = torch.tensor([1, 1], device=device)


class Counting(rsl_rl.RslRlVecEnv):
    """Counts the rows that end in each step."""

    def __init__(self, env):
        super().__init__(env)
        self.ended = []

    def step(self, actions):
        step = super().step(actions)
        self.ended.append(int(step[2].sum()))
        return step


@pytest.mark.parametrize("staggered", [True, False])
def test_random_initial_episode_lengths_stagger_the_ends(staggered):
    env = Counting(GymnasiumVectorEnv("pendulum", 64, "cpu", max_steps=16))
    torch.manual_seed(0)
    runner(env, 16).learn(1, init_at_random_ep_len=staggered)
    assert sum(env.ended) == 64
    assert max(env.ended) < 16 if staggered else env.ended == [0] * 15 + [64]


def test_a_game_without_limit_says_so():
    env = rsl_rl.make("pendulum", 2, "cpu")
    env.cfg = object()
    with pytest.raises(UnsupportedGameError, match="init_at_random_ep_len=False"):
        runner(env, 8).learn(1, init_at_random_ep_len=True)


def test_the_log_has_the_episodes_since_the_previous_row(device):
    env = rsl_rl.make(Script, 50, device, continuous=True, **THREADS_PER_ENV)
    env.reset(seed=3)
    returns, played, length = torch.zeros(50, 3), torch.zeros(3), torch.zeros(50)
    known = {}
    for step in range(1, 41):
        script = env.get_observations()["policy"].cpu().view(50, 3, 6)[:, 0]
        _, rewards, dones, extras = env.step(torch.zeros(env.num_envs, 2, device=device))
        returns, length = returns + rewards.cpu().view(50, 3), length + 1
        over = dones.cpu().view(50, 3)[:, 0] > 0  # the lead stays to the end
        played = played + torch.tensor([float(over.sum()), length[over].sum(), (over & (script[:, 3] == 0)).sum()])
        known["lead"] = known.get("lead", 0) + returns[over][:, :1].sum()
        known["other"] = known.get("other", 0) + returns[over][:, 1:].sum()
        returns[over], length[over] = 0, 0
        assert ("log" in extras) == (step % rsl_rl.LOG_EVERY == 0)
        if "log" in extras:
            log = {name: value.mean().item() for name, value in extras["log"].items()}
            assert log == pytest.approx(  # whole numbers, divided in float64 there and float32 here
                {
                    "Episode/return_lead": float(known["lead"] / played[0]),
                    "Episode/return_other": float(known["other"] / played[0] / 2),
                    "Episode/length": float(played[1] / played[0]),
                    "Episode/terminated": float(played[2] / played[0]),
                },
                rel=1e-6,
            )
            known, played = {}, torch.zeros(3)


def test_the_log_keeps_its_metrics_while_no_episode_ends():
    env = rsl_rl.make("pendulum", 3, "cpu", max_steps=16)
    logs = [extras["log"] for *_, extras in (env.step(torch.zeros(3, 1)) for _ in range(24)) if "log" in extras]
    assert [log["Episode/length"].item() for log in logs] == [pytest.approx(float("nan"), nan_ok=True), 16, 16]
    assert logs[2]["Episode/terminated"] == 0


def test_rsl_rls_logger_and_curiosity_take_what_they_get(tmp_path):
    env = rsl_rl.make(Script, 16, "cpu", continuous=True, **THREADS_PER_ENV)
    net = {"num_outputs": 4, "predictor_hidden_dims": [8], "target_hidden_dims": [8], "weight": 0.1}
    trained = runner(env, 24, tmp_path, rnd_cfg=net)
    trained.learn(2)
    trained.logger.writer.flush()  # a thread writes the events
    events = EventAccumulator(str(tmp_path)).Reload()
    assert 2 <= events.Scalars("Episode/length")[-1].value <= THREADS_PER_ENV["max_steps"]
    assert {f"Episode/{name}" for name in ("return_lead", "return_other", "terminated")} <= set(
        events.Tags()["scalars"]
    )
    assert len(events.Scalars("Train/mean_reward")) == 2


def test_seeds_repeat():
    env = rsl_rl.make("pendulum", 3, "cpu")
    starts = [env.reset(seed)[0]["policy"].tolist() for seed in (7, None, 7)]
    assert starts[0] == starts[2] != starts[1]


def test_our_wrappers_work_inside():
    bare = rsl_rl.make("pendulum", 6, "cpu", max_steps=4)
    env = rsl_rl.wrap(RescaleObservation(GymnasiumVectorEnv("pendulum", 6, "cpu", max_steps=4), -1.0, 1.0))
    for each in (bare, env):
        each.reset(seed=1)
        each.episode_length_buf = torch.full((6,), 2)
    for _ in range(6):  # the greatest speed is 8
        assert torch.equal(env.get_observations()["policy"][:, 2], bare.get_observations()["policy"][:, 2] / 8)
        steps = [each.step(torch.full((6, 1), 0.5)) for each in (bare, env)]
        assert torch.equal(steps[0][3]["time_outs"], steps[1][3]["time_outs"])
    assert env.episode_length_buf.tolist() == [0] * 6


def test_what_it_does_not_know_is_refused():
    with pytest.raises(UnsupportedGameError, match="rsl_rl"):
        rsl_rl.make("cartpole", 2, "cpu")
    with pytest.raises(ValueError, match='expected output="torch" and "same_step"'):
        rsl_rl.make("pendulum", 2, "cpu", autoreset_mode="next_step")
    with pytest.raises(ValueError, match='expected output="torch"'):
        rsl_rl.wrap(GymnasiumVectorEnv("pendulum", 2, "cpu", output="numpy"))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_ppo_learns_simple_spread():
    """Agents as rows; the episodes begin staggered."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    env = rsl_rl.make("simple_spread", 128, "cpu", continuous_actions=True)
    env.reset(seed=1)
    ppo = runner(env, 25)
    at_random = mean_return(env, lambda obs: env.env.sample_actions())
    ppo.learn(30, init_at_random_ep_len=True)
    trained = mean_return(env, ppo.get_inference_policy())
    assert trained > at_random + 2  # about -25 at random, -20.7 when trained; the means of two runs differ by 0.3


def mean_return(env: rsl_rl.RslRlVecEnv, policy) -> float:
    """Of the rows, over one episode."""
    obs, _ = env.reset(seed=3)
    total = torch.zeros(env.num_envs)
    with torch.inference_mode():
        for _ in range(env.max_episode_length):
            obs, rewards, *_ = env.step(policy(obs))
            total += rewards
    return float(total.mean())


@pytest.mark.slow
def test_the_example_learns(tmp_path):
    at_random, trained = run_example_here("rsl_rl_ppo.py", r"return at random (-\d+), trained (-\d+)", tmp_path)
    assert trained > at_random / 2  # costs: about -1200 at random, -160 when trained
