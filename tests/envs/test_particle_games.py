"""The particle games against mpe2, whose rules, parameters and defaults they have.

Every step mpe2's world is set to our float32 state, both take the same actions, and what mpe2's float64 makes of it is
compared: positions and velocities may differ by the rounding of float32. Then mpe2 is set to the state that our step
led to, so that its observations, rewards and flags are about the very same numbers as ours.
"""

import importlib
import inspect

import numpy as np
import pytest
import torch
from support.actions import beyond_bounds

import gpu_vecenv
from gpu_vecenv import StepBuffers, VecEnv
from gpu_vecenv.engine.digest import trajectory_digest
from gpu_vecenv.envs.registry import GAMES, configuration_names

pytest.importorskip("mpe2", reason="mpe2, the oracle, is not installed")
stats = pytest.importorskip("scipy.stats", reason="scipy, for tests of distributions, is not installed")

NAMES = ("simple_spread", "simple_tag", "simple_adversary")
TAG_CROWD = {"num_good": 3, "num_adversaries": 5, "num_obstacles": 4}
CASES = [  # game, configuration, stage of the curriculum, episodes
    ("simple_spread", {}, 0, 64),
    ("simple_spread", {"continuous_actions": True}, 0, 64),
    ("simple_spread", {"num_agents": 6, "local_ratio": 0.3, "max_steps": 7}, 0, 20),
    ("simple_spread", {"local_ratio": 1.0}, 0, 10),
    ("simple_spread", {"num_agents": 2, "local_ratio": 0.0}, 0, 10),
    ("simple_spread", {"curriculum": True}, 0, 10),
    ("simple_spread", {"curriculum": True, "continuous_actions": True}, 1, 10),
    ("simple_spread", {"num_agents": 1, "terminate_on_success": True, "max_steps": 30}, 0, 80),
    ("simple_spread", {"num_agents": 1, "terminate_on_success": True, "max_steps": 1}, 0, 60),
    ("simple_spread", {"num_agents": 5, "num_agent_neighbors": 2, "num_landmark_neighbors": 3}, 0, 15),
    ("simple_spread", {"num_agent_neighbors": 4, "num_landmark_neighbors": 5}, 0, 10),
    ("simple_tag", {}, 0, 64),
    ("simple_tag", {"continuous_actions": True}, 0, 64),
    ("simple_tag", {**TAG_CROWD, "max_steps": 9}, 0, 20),
    ("simple_tag", {"num_obstacles": 0, "num_good": 2, "continuous_actions": True}, 0, 15),
    ("simple_tag", {"curriculum": True}, 0, 10),
    ("simple_tag", {"curriculum": True}, 1, 10),
    ("simple_tag", {"curriculum": True}, 2, 10),
    ("simple_tag", {"terminate_on_success": True, "num_adversaries": 1}, 0, 80),
    ("simple_tag", {**TAG_CROWD, "num_agent_neighbors": 3, "num_landmark_neighbors": 2}, 0, 10),
    ("simple_tag", {"num_agent_neighbors": 5, "num_landmark_neighbors": 3}, 0, 10),
    ("simple_tag", {"num_good": 40, "num_adversaries": 80, "num_obstacles": 8, "max_steps": 2}, 0, 1),
    ("simple_adversary", {}, 0, 64),
    ("simple_adversary", {"continuous_actions": True}, 0, 64),
    ("simple_adversary", {"num_good": 1, "max_steps": 3}, 0, 15),
    ("simple_adversary", {"num_good": 6}, 0, 15),
    ("simple_adversary", {"num_good": 4, "num_agent_neighbors": 2, "num_landmark_neighbors": 3}, 0, 10),
]
IDS = [f"{name}-{' '.join(f'{k}={v}' for k, v in config.items())}-stage {stage}" for name, config, stage, _ in CASES]

U = 2.0**-24  # the largest relative error of one float32 operation
# Distances that decide something are left out of the comparison if they are that close, relatively, to what they are
# compared with: 3 U is the error of a distance, 2 U that of a sum of two radii; and two distances have 6 U.
TIE = 8 * U
DT, CONTACT_FORCE, MARGIN = 0.1, 100.0, 1e-3  # mpe2's
REACH = 17 * MARGIN  # beyond it the device code sees no contact


def module(name):
    return importlib.import_module(f"mpe2.{name}_v3")


def their_config(name, config):
    words = {"max_steps": "max_cycles"}
    words |= {"simple_spread": {"num_agents": "N"}, "simple_adversary": {"num_good": "N"}}.get(name, {})
    return {words.get(key, key): value for key, value in config.items()}


class Reference:
    """mpe2's environment with the state of its world set to ours."""

    def __init__(self, name, config, stage=0):
        self.env = module(name).parallel_env(**their_config(name, config))
        self.agents, self.world = self.env.possible_agents, self.env.unwrapped.world
        # mpe2 1.1.1 loses what set_curriculum_stage() is given: a property of its base class hides the attribute and
        # keeps nothing. An attribute of a derived class is seen.
        scenario = self.env.unwrapped.scenario
        scenario.__class__ = type("AtStage", (scenario.__class__,), {"curriculum_stage": stage})
        self._move, self.world.step = self.world.step, self._step

    def put(self, row, when):
        for i, agent in enumerate(self.world.agents):
            agent.state.p_pos = row[f"position {when}"][i].astype(np.float64)
            agent.state.p_vel = row[f"velocity {when}"][i].astype(np.float64)
            if f"goal {when}" in row:
                agent.goal_a = self.world.landmarks[row[f"goal {when}"]]
        for j, landmark in enumerate(self.world.landmarks):
            landmark.state.p_pos = row[f"landmark {when}"][j].astype(np.float64)

    def _step(self):
        self._move()
        self.moved = {
            "position": [agent.state.p_pos for agent in self.world.agents],
            "velocity": [agent.state.p_vel for agent in self.world.agents],
        }
        self.put(self.row, "after")

    def step(self, row):
        """mpe2's results for one row of ``play``: name -> value for each agent."""
        if row["elapsed_steps"] == 0:
            self.env.reset()
        self.put(row, "before")
        self.row = row
        results = self.env.step(dict(zip(self.agents, row["actions"], strict=True)))
        outputs = zip(("obs", "rewards", "terminations", "truncations"), results[:4], strict=True)
        return self.moved | {what: [result[agent] for agent in self.agents] for what, result in outputs}


def poisoned(env):
    """Step buffers filled with 0xFF bytes, so that an element that a kernel does not write shows."""
    buffers: StepBuffers = env.step_buffers()
    for tensor in buffers.tensors().values():
        tensor.view(torch.uint8).fill_(0xFF)
    return buffers


def arrange(env, step):
    """Three quarters of the environments anew: a crowd at speed; agents beside landmarks; far out and fast."""
    generator = torch.Generator().manual_seed(step)
    drawn, speeds = (2 * torch.rand(2, env.num_envs, env.num_agents, 2, generator=generator) - 1).to(env.device)
    landmark = env.state["landmark"]
    beside = landmark[:, torch.arange(env.num_agents, device=env.device) % landmark.shape[1]] + 0.15 * drawn
    kinds = [(0.3 * drawn, speeds), (beside, 0.5 * speeds), (3 * drawn, 2 * speeds)]
    for kind, (places, velocities) in enumerate(kinds, start=1):
        env.state["position"][kind::4] = places[kind::4]
        env.state["velocity"][kind::4] = velocities[kind::4]


def play(name, config, stage, episodes, device):
    """Random play, agents put elsewhere every fifth step: name -> (rows, …), step by step of episode by episode."""
    env = VecEnv(gpu_vecenv.configure(name, **config), episodes, device, autoreset_mode="disabled")
    if "curriculum_stage" in env.state:
        env.state["curriculum_stage"].fill_(stage)
    env.reset(seed=2**33 + 1)
    steps = []
    for time in range(env.game.max_steps):
        if time % 5 == 0:
            arrange(env, time)
        step = {"active": env.active.any(1), "elapsed_steps": env.elapsed_steps}
        step |= {"actions": beyond_bounds(env.sample_actions())}
        step |= {f"{field} before": tensor for field, tensor in env.state.items() if tensor.ndim}
        step = {what: tensor.clone() for what, tensor in step.items()}
        step["obs"], step["rewards"], step["terminations"], step["truncations"], info = env.step(
            step["actions"], out=poisoned(env)
        )
        step |= {f"{field} after": tensor.clone() for field, tensor in env.state.items() if tensor.ndim}
        steps.append(step | {"active after": info["active"]})
    columns = {what: torch.stack([step[what] for step in steps], 1).cpu().numpy() for what in steps[0]}
    return {what: column[columns["active"]] for what, column in columns.items()}


def distances(a, b):
    """(…, n, m) of points (…, n, 2) and (…, m, 2), in float64."""
    return np.linalg.norm(a[..., :, None, :].astype(float) - b[..., None, :, :], axis=-1)


def contacts(world, position, landmark):
    """Distance of each agent to every body, infinite if they cannot touch, (…, N, bodies); at which they touch."""
    bodies = world.agents + world.landmarks
    d = distances(position, np.concatenate([position, landmark], -2)[..., : len(bodies), :])
    solid = np.array([[a.collide and b.collide and a is not b for b in bodies] for a in world.agents])
    return np.where(solid, d, np.inf), np.array([[a.size + b.size for b in bodies] for a in world.agents])


def physics_tolerances(world, rows):
    """How far float32 may be from mpe2 after one step, for positions and velocities.

    Errors to first order in U, of the formulas as the device code writes them.
    Position: 0.1 as a float and its product with the velocity, 2 U of the step; the sum, U of the position.
    A contact: its distance d has 3 U d, the distance of touch 2 U touch, their difference and its division by the
    margin 3 U |d - touch|. The softplus passes these on as they are, at most, and adds 4 U margin by exp, 1 + … and log
    and 3 U depth by its sum and product; the direction and the other products add 7 U depth. Where the device code sees
    no contact it lacks mpe2's tail. Each contact rounds the sum of the forces once.
    Velocity: the force times 0.1 has 3 U, damping and sum 2 U, the limit of the speed 5 U.
    """
    d, touch = contacts(world, rows["position before"], rows["landmark before"])
    depth = MARGIN * np.logaddexp(0, (touch - d) / MARGIN)
    near = d < touch + 1.05 * REACH  # at the very reach either may hold; both bounds are good there
    error = CONTACT_FORCE * U * (3 * d + 2 * touch + 3 * abs(d - touch) + 4 * MARGIN + 10 * depth)
    force = 5 + CONTACT_FORCE * depth.sum(-1)  # 5 is the strongest action
    error = np.where(near, error, CONTACT_FORCE * depth).sum(-1) + near.sum(-1) * U * force
    speed = np.linalg.norm(rows["velocity before"], axis=-1)
    position = 2 * U * (DT * speed[..., None] + abs(rows["position after"]))
    velocity = DT * error + 3 * U * DT * force + 7 * U * (speed + DT * force)
    return {"position": position, "velocity": velocity[..., None]}


def reward_tolerance(name, rows):
    """How far rewards may be from mpe2's, given the same positions; a distance is less than ``reach``, and has 3 U.

    Spread: n distances are summed, each rounding the sum; then it is mixed with at most n collisions.
    Tag: per axis exp, at most 10, has 4.2 U, or (x - 0.9) * 10, at most 1, has 11 U; and the sum 3 U.
    Adversary: a difference of two distances.
    """
    n, reach = rows["position after"].shape[1], 3 * abs(rows["position after"]).max() + 3
    if name == "simple_spread":
        return U * (n + 10) * n * (reach + 1)
    return U * (2 * (42 + 11) + 3 * abs(rows["rewards"])) if name == "simple_tag" else 8 * U * reach


def unclear_contacts(name, world, rows):
    """(rows,): some contact of agents, or covered landmark, is within rounding of not being one."""
    d, touch = contacts(world, rows["position after"], rows["landmark after"])
    ties = (abs(d - touch) < TIE * touch)[..., : len(world.agents)].any((-2, -1))
    if name == "simple_spread":
        ties |= (abs(distances(rows["position after"], rows["landmark after"]) - 0.1) < TIE).any((-2, -1))
    return ties


def unclear_order(game, world, rows):
    """(rows, N): agents that see the nearest only, and for whom two are equally far within rounding."""
    places, landmarks = rows["position after"], rows["landmark after"][:, : len(world.landmarks)]
    ties = np.zeros(places.shape[:2], bool)
    for sees_all, others in ((game.observe_all_agents, places), (game.observe_all_landmarks, landmarks)):
        d = np.sort(distances(places, others), axis=-1)
        ties |= (np.diff(d, axis=-1) < TIE * d[..., 1:]).any(-1) & ~np.bool_(sees_all)
    return ties


@pytest.mark.parametrize("name", NAMES)
def test_parameters_and_defaults_are_those_of_mpe2(name):
    not_of_the_game = {"self", "render_mode"}  # all views have it
    theirs = inspect.signature(module(name).raw_env.__init__).parameters
    theirs = {key: p.default for key, p in theirs.items() if key not in not_of_the_game}
    ours = configuration_names(GAMES[name]())
    assert {key: ours[key] for key in theirs} == theirs
    drawn_or_reported = {"dynamic_rescaling", "benchmark_data"}
    assert (
        set(their_config(name, {field.name: field.default for field in GAMES[name].own_fields()}))
        == {*theirs} - drawn_or_reported
    )
    assert module(name).raw_env().metadata["name"] == f"{name}_v{GAMES[name].version}"


@pytest.mark.parametrize(("name", "config"), [case[:2] for case in CASES], ids=IDS)
def test_names_and_spaces_are_those_of_mpe2(name, config):
    game, theirs = gpu_vecenv.configure(name, **config), module(name).parallel_env(**their_config(name, config))
    assert list(game.layout.agent_names) == theirs.possible_agents
    for agent in theirs.possible_agents:
        role = agent.rpartition("_")[0]
        assert game.layout.observation.spaces[role] == theirs.observation_space(agent)
        assert game.layout.action.spaces[role] == theirs.action_space(agent)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "config", "stage", "episodes"), CASES, ids=IDS)
def test_every_step_agrees_with_mpe2(name, config, stage, episodes, device):
    game, theirs = gpu_vecenv.configure(name, **config), Reference(name, config, stage)
    rows = play(name, config, stage, episodes, device)
    count = len(rows["elapsed_steps"])
    steps = [theirs.step({what: column[r] for what, column in rows.items()}) for r in range(count)]
    expected = {what: np.array([step[what] for step in steps]) for what in steps[0] if what != "obs"}

    for what, tolerance in physics_tolerances(theirs.world, rows).items():
        errors = abs(rows[f"{what} after"] - expected[what]) / tolerance
        assert errors.max() <= 1, f"{what}, row {errors.max((1, 2)).argmax()}: {errors.max()} times the tolerance"

    # Floats subtracted in float64 and then rounded, as mpe2 does, give the bits of a float32 subtraction.
    unordered = unclear_order(game, theirs.world, rows)
    for i, name_of_agent in enumerate(game.layout.agent_names):
        size, clear = game.layout.observation.shapes[name_of_agent.rpartition("_")[0]][0], ~unordered[:, i]
        obs = np.array([step["obs"][i] for step in steps])
        np.testing.assert_array_equal(rows["obs"][clear, i, :size], obs[clear], f"observation of {name_of_agent}")
        assert (rows["obs"][:, i, size:] == 0).all(), "padding"

    ties = unclear_contacts(name, theirs.world, rows)
    errors = (abs(rows["rewards"] - expected["rewards"]) / reward_tolerance(name, rows))[~ties]
    assert errors.max() <= 1, f"rewards: {errors.max()} times the tolerance"
    for flags in ("terminations", "truncations"):
        np.testing.assert_array_equal(rows[flags][~ties], expected[flags][~ties], flags)
    ended = (rows["terminations"] | rows["truncations"]).any(1)
    assert ended.sum() == episodes and (rows["active after"].any(1) == ~ended).all()
    assert ties.sum() + unordered.sum() <= 2, "about 1e-6 of all pairs are that close"


def test_the_compared_trajectories_cover_every_rule():
    """The play that is compared above: how often it comes to each rule. A rule without data would go untested."""
    for name, config, stage, episodes in CASES:
        if episodes < 64:
            continue
        rows, world = play(name, config, stage, episodes, "cpu"), Reference(name, config).world
        d, touch = contacts(world, rows["position before"], rows["landmark before"])
        n, rewards, success = len(world.agents), rows["rewards"], int(rows["terminations"].any(1).sum())
        if config.get("terminate_on_success"):
            assert 10 <= success <= episodes - 10, "ends by success and by time"
            continue
        assert success == 0
        if name == "simple_adversary":
            assert set(rows["goal after"].tolist()) == {0, 1}
            continue
        among_agents = d[..., :n]
        for overlap, least in ((1, 150), (0.5, 30), (0.2, 6)):
            assert (among_agents < overlap * touch[:, :n]).any((1, 2)).sum() > least
        assert (abs(d - touch) < 5 * MARGIN).any((1, 2)).sum() > 15, "where the softplus bends"
        if name == "simple_spread":
            assert (rewards < rewards.max(1, keepdims=True) - 0.4).any(1).sum() > 30, "some collide, others do not"
            continue
        assert (d < touch)[..., n:].any((1, 2)).sum() > 150, "obstacles are hit"
        assert (rewards[:, 0] == 10).sum() > 30 and (rewards[:, 0] >= 20).any()
        x = abs(rows["position after"][:, 3])
        assert all(((low < x) & (x < high)).sum() > 8 for low, high in ((0, 0.9), (0.9, 1), (1, 2), (2.2, 9)))
        speed, limits = np.linalg.norm(rows["velocity after"], axis=-1), [agent.max_speed for agent in world.agents]
        assert 0.05 < (abs(speed - limits) < 1e-6).mean() < 0.5, "some at the limit of their speed"


@pytest.mark.parametrize("name", NAMES)
def test_initial_states_are_distributed_as_in_mpe2(name, device):
    env = gpu_vecenv.make(name, 2000, device)
    env.reset(seed=11)
    theirs = module(name).parallel_env()
    world, samples, goals = theirs.unwrapped.world, [], []
    theirs.reset(seed=12)
    for _ in range(2000):
        theirs.reset()
        samples.append([body.state.p_pos for body in world.entities])
        goals += [world.landmarks.index(agent.goal_a) for agent in world.agents[:1] if hasattr(agent, "goal_a")]
    ours = torch.cat([env.state["position"], env.state["landmark"]], 1).cpu().numpy()
    samples = np.array(samples)
    assert ours.shape == samples.shape
    for body, axis in np.ndindex(*ours.shape[1:]):
        # The seeds are fixed, so this passes or fails for good; of 40 right components one in 250 would fail anew.
        assert stats.ks_2samp(ours[:, body, axis], samples[:, body, axis]).pvalue > 1e-4
        # The largest of 2000 falls short of its bound by 1 % with probability 2e-9.
        assert abs(ours[:, body, axis]).max() == pytest.approx(abs(samples[:, body, axis]).max(), rel=0.01)
    # A 2000-sample correlation of independent numbers has a standard deviation of 0.0224; 5 of them.
    correlations = np.corrcoef(ours.reshape(2000, -1).T) - np.eye(ours[0].size)
    assert abs(correlations).max() < 0.112
    assert (env.state["velocity"] == 0).all()
    if goals:
        counts = [np.bincount(chosen, minlength=2) for chosen in (env.state["goal"].cpu().numpy(), goals)]
        assert stats.chi2_contingency(counts).pvalue > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("simple_spread", {"num_agents": 5}),
        ("simple_spread", {"continuous_actions": True, "num_agent_neighbors": 1, "num_landmark_neighbors": 2}),
        ("simple_tag", {"num_agent_neighbors": 2, "terminate_on_success": True}),
        ("simple_tag", {**TAG_CROWD, "continuous_actions": True}),
        ("simple_adversary", {"num_good": 4, "num_landmark_neighbors": 2}),
    ],
)
def test_thread_order_and_num_envs_change_no_result(name, config):
    game = gpu_vecenv.configure(name, **config)
    words = trajectory_digest(VecEnv(game, 33, "cpu"), 3, 60).words
    assert len(set(words.tolist())) == 33
    for order in (1, 2):
        assert torch.equal(trajectory_digest(VecEnv(game, 33, "cpu", thread_order=order), 3, 60).words, words)
    for num_envs in (1, 8):
        assert torch.equal(trajectory_digest(VecEnv(game, num_envs, "cpu"), 3, 60).words, words[:num_envs])


def test_bodies_at_the_same_position_exert_no_force(device):
    """mpe2 divides 0 by 0 there."""
    env = gpu_vecenv.make("simple_tag", 1, device, num_obstacles=1)
    env.reset(seed=1)
    for field in ("position", "landmark"):
        env.state[field].fill_(0.25)
    still = torch.zeros((1, 4), dtype=torch.int32, device=device)
    env.step(still)
    assert (env.state["position"] == 0.25).all() and (env.state["velocity"] == 0).all()


def test_the_curriculum_stage_is_read_as_in_mpe2(device):
    """Tag: at the start of an episode. Spread: at once. Stages outside the range count as the nearest one."""
    tag = gpu_vecenv.make("simple_tag", 2, device, curriculum=True)
    factors = []
    for stage in (0, 1, 2, 9, -3):
        tag.state["curriculum_stage"].fill_(stage)
        tag.reset(seed=1)
        tag.state["curriculum_stage"].fill_(2 - stage)
        tag.step(tag.sample_actions())
        factors.append(tag.state["speed_factor"].tolist())
    assert factors == [[0.5, 0.5], [0.75, 0.75], [1, 1], [1, 1], [0.5, 0.5]]

    spread = gpu_vecenv.make("simple_spread", 2, device, curriculum=True, local_ratio=1.0)
    rewards = []
    for stage in (0, 5):
        spread.reset(seed=1)
        spread.state["position"].mul_(0.1)
        spread.state["curriculum_stage"].fill_(stage)
        rewards.append(spread.step(spread.sample_actions())[1].tolist())
    assert rewards == [[[0, 0, 0]] * 2, [[-2, -2, -2]] * 2]
