"""CPU and GPU are bit-identical for any driver, number of environments and of threads each, eager or in a graph."""

import pytest
import torch
from support.synchronisation import no_synchronisation

import gpu_vecenv
from gpu_vecenv.engine.digest import Digest, trajectory_digest
from gpu_vecenv.engine.vec_env import VecEnv

pytestmark = pytest.mark.gpu

DRIVERS = ("pycuda", "cuda_core")
FEW = {"num_taggers": 2, "num_runners": 3, "num_neighbors": 3}
BATTLE = {"scenario": "500m", "map_width": 160.0, "map_height": 160.0, "start_spread": 20.0}
# game, configuration, envs, steps: 50 M agent-steps of tag_gridworld, 10 M of tag_continuous at each size, 20 M of
# each of the others; shorter episodes where chance seldom ends one
LONG_RUNS = [
    ("tag_gridworld", {}, 65_536, 153),
    ("tag_continuous", {**FEW, "max_steps": 60}, 20_000, 100),
    ("tag_continuous", {"max_steps": 30}, 2000, 46),
    ("tag_continuous", {"max_steps": 30, "egocentric": False}, 2000, 46),
    ("tag_continuous", {"num_taggers": 100, "num_runners": 900, "max_steps": 30}, 200, 50),
    ("tag_continuous", {"num_taggers": 500, "num_runners": 9500, "max_steps": 30}, 20, 50),
    ("cartpole", {}, 65_536, 306),
    ("mountain_car", {"max_steps": 100}, 65_536, 306),
    ("continuous_mountain_car", {"max_steps": 100}, 65_536, 306),
    ("acrobot", {"max_steps": 100}, 65_536, 306),
    ("pendulum", {}, 65_536, 306),
    ("simple_spread", {}, 32_768, 204),
    ("simple_tag", {}, 32_768, 153),
    ("simple_adversary", {}, 32_768, 204),
    ("skirmish", {}, 4_000, 204),
    ("skirmish", {**BATTLE, "observed_units": 16, "max_steps": 20}, 8, 40),
    ("connect_four", {}, 65_536, 153),
    ("overcooked", {}, 25_000, 404),
    ("pursuit", {"max_steps": 100}, 12_500, 204),
    ("warehouse", {"num_agents": 4}, 10_000, 504),
    ("harvest", {"max_steps": 200}, 8_000, 204),
    ("cleanup", {"max_steps": 200}, 8_000, 204),
    ("economy", {"max_steps": 200}, 4_000, 204),
]
PANTRY = {"random_start_positions": True, "random_object_probability": 0.5}
CROWDED = {"x_size": 6, "y_size": 9, "num_pursuers": 11, "num_evaders": 40}
HALL = {"num_agents": 12, "request_queue_size": 9, "grid": "xx.x.x\n..gx.x\nx...g.\nxx.x.x"}
VARIANTS = [
    ("tag_gridworld", {"num_taggers": 40, "full_observation": False, "random_start": True, "grid": 5}),
    ("tag_gridworld", {"num_taggers": 1, "grid": 1, "max_steps": 3}),
    ("tag_continuous", {**FEW, "num_neighbors": "all", "max_steps": 50, "side": 3.0}),
    ("tag_continuous", {**FEW, "num_neighbors": "all", "max_steps": 50, "side": 3.0, "egocentric": False}),
    ("tag_continuous", {"num_taggers": 3, "num_runners": 40, "side": 4.0, "max_steps": 50, "edge_penalty": -0.5}),
    ("tag_continuous", {**FEW, "runner_leaves_when_tagged": False, "side": 2.0, "max_steps": 20}),
    ("simple_spread", {"num_agents": 40, "continuous_actions": True, "local_ratio": 0.3}),
    ("simple_tag", {"num_good": 3, "num_adversaries": 5, "num_obstacles": 0, "continuous_actions": True}),
    ("simple_adversary", {"num_good": 4, "continuous_actions": True}),
    *(("skirmish", {"scenario": scenario}) for scenario in ("27m_vs_30m", "6h_vs_8z", "smacv2_10_units")),
    ("skirmish", {"scenario": "8m", "observed_units": 3, "attack_mode": "random", "walls_cause_death": False}),
    ("connect_four", {"num_rows": 9, "num_columns": 12, "line_length": 5, "slip": 0.3, "max_steps": 60}),
    ("overcooked", {"layout_name": "counter_circuit_o_1order", **PANTRY, "max_steps": 40, "cook_time": 6}),
    ("overcooked", {"grid": "XPSX\nO12D\nXXXX", **PANTRY, "max_steps": 25, "cook_time": 2}),
    ("pursuit", {**CROWDED, "max_steps": 40}),
    ("pursuit", {**CROWDED, "surround": False, "shared_reward": False, "obs_range": 4, "constraint_window": 0.7}),
    ("warehouse", {"num_agents": 19, "size": "small", "max_steps": 40, "max_inactivity_steps": 25}),
    ("warehouse", {**HALL, "reward_type": "two_stage", "max_steps": 60, "sensor_range": 3}),
    ("harvest", {"layout_name": "small", "common_reward": "mean", "zap_reward": 0.1, "max_steps": 40}),
    ("harvest", {"num_agents": 40, "beam_radius": 3, "view_ahead": 2, "view_side": 8, "max_steps": 40}),
    ("cleanup", {"layout_name": "small", "zapped_steps": 5, "dirt_spawn_delay": 0, "max_steps": 80}),
    ("cleanup", {"num_agents": 19, "common_reward": "sum", "max_apple_growth_rate": 0.5, "max_steps": 40}),
    ("economy", {"num_workers": 19, "fixed_four_skill_and_loc": False, "period": 7, "max_steps": 40}),
]


@pytest.fixture(scope="module")
def host_digests():
    return {}


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("run", range(len(LONG_RUNS)))
def test_long_runs_are_bitwise_equal(run, driver, host_digests):
    name, config, num_envs, steps = LONG_RUNS[run]
    game = gpu_vecenv.configure(name, **config)
    if run not in host_digests:
        env = VecEnv(game, num_envs, "cpu")
        host_digests[run] = trajectory_digest(env, 11, steps, state_every=10).words
        assert env.episode_statistics()["episodes"].min() >= 1
    there = trajectory_digest(VecEnv(game, num_envs, "cuda", driver=driver), 11, steps, state_every=10)
    assert torch.equal(there.words.cpu(), host_digests[run])


@pytest.mark.parametrize("mode", ["same_step", "next_step", "disabled"])
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize(("name", "config"), VARIANTS)
def test_variants_are_bitwise_equal_in_every_mode(name, config, rows, mode):
    game = gpu_vecenv.configure(name, **config)
    digests = [
        trajectory_digest(
            VecEnv(game, 333, device, autoreset_mode=mode, agents_as_envs=rows), 2**63 + 5, 120
        ).words.cpu()
        for device in ("cpu", "cuda")
    ]
    assert torch.equal(*digests)


@pytest.mark.parametrize(
    ("name", "config"),
    [("tag_gridworld", {}), ("tag_continuous", FEW), ("acrobot", {}), ("simple_tag", {}), *VARIANTS[:1]],
)
def test_results_do_not_depend_on_num_envs_group_size_or_block_order(name, config):
    game = gpu_vecenv.configure(name, **config)
    whole = trajectory_digest(VecEnv(game, 4097, "cpu"), 3, 40).words
    for num_envs in (1, 2, 31, 32, 33, 1023, 4097):
        there = trajectory_digest(VecEnv(game, num_envs, "cuda"), 3, 40).words.cpu()
        assert torch.equal(there, whole[:num_envs]), num_envs
    for threads_per_env in (1, 2, 4, 8, 16, 32, 64, 96, 256, 1024):
        there = trajectory_digest(VecEnv(game, 65, "cuda", threads_per_env=threads_per_env), 3, 40).words.cpu()
        assert torch.equal(there, whole[:65]), threads_per_env
    for order in (1, 2):
        there = trajectory_digest(VecEnv(game, 1023, "cuda", thread_order=order), 3, 40).words.cpu()
        assert torch.equal(there, whole[:1023]), order
    shard = trajectory_digest(VecEnv(game, 100, "cuda", first_env_index=1000), 3, 40).words.cpu()
    assert torch.equal(shard, whole[1000:1100])


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("where", ["graph", "side stream"])
def test_graphs_and_side_streams_are_bitwise_equal(driver, where):
    game = gpu_vecenv.configure("tag_continuous", **FEW)
    expected = trajectory_digest(VecEnv(game, 500, "cpu"), 4, 60)
    env = VecEnv(game, 500, "cuda", driver=driver)
    env.reset(seed=4)
    digest, buffers = Digest(env.functions, 500), env.step_buffers()
    sampled = env.sample_actions()

    def tick():
        sampled.copy_(env.sample_actions())
        *outputs, info = env.step(sampled, out=buffers)
        digest.add_outputs(sampled, *outputs, info["active"])
        digest.add_final_obs(buffers.final_obs, buffers.final_mask)
        digest.add_state(env)

    obs, info = env.reset(seed=4)
    digest.add_outputs(obs, info["active"])
    if where == "graph":
        saved, words = env.state_dict(), digest.words.clone()
        tick()  # warm-up outside the graph, then back to the start
        env.load_state_dict(saved)
        digest.words.copy_(words)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tick()
        for _ in range(60):
            graph.replay()
    else:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(60):
                tick()
        torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(digest.words.cpu(), expected.words)


def test_sampler_is_bitwise_equal():
    for name, config in (("tag_gridworld", {}), ("tag_continuous", FEW)):
        samples = []
        for device in ("cpu", "cuda"):
            env = gpu_vecenv.make(name, 5000, device, **config)
            env.reset(seed=9)
            sampler = gpu_vecenv.Sampler(env)
            generator = torch.Generator().manual_seed(1)
            logits = 4 * torch.randn((5000, env.num_agents, sampler.num_logits), generator=generator)
            for greedy in (False, True):
                sample = sampler.sample(logits.to(device), greedy=greedy)
                samples.append([t.cpu() for t in (sample.actions, sample.log_probs, sample.entropies)])
        for host, there in zip(samples[:2], samples[2:], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(host, there, strict=True))


def test_initial_states_are_bitwise_equal():
    game = gpu_vecenv.configure("tag_gridworld", max_steps=10)
    cells = torch.randint(0, 21, (37, 5, 2), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    digests = [
        trajectory_digest(VecEnv(game, 200, device, initial_states={"cell": cells}), 8, 50).words.cpu()
        for device in ("cpu", "cuda")
    ]
    assert torch.equal(*digests)


def test_no_step_looks_at_values_from_the_host():
    env = gpu_vecenv.make("tag_gridworld", 1000, "cuda")
    env.reset(seed=1)
    with no_synchronisation():
        for _ in range(20):
            env.step(env.sample_actions())


def test_a_large_game_steps_within_two_gigabytes():
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    env = gpu_vecenv.make("tag_continuous", 2000, "cuda", num_taggers=100, num_runners=900)
    buffers = env.step_buffers()
    env.reset(seed=1, out=buffers)
    for _ in range(5):
        env.step(env.sample_actions(), out=buffers)
    torch.cuda.synchronize()
    assert before - torch.cuda.mem_get_info()[0] < 2 * 10**9
