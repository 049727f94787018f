"""Curricula: values that change between iterations, where kernels read them."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from games.shade import Shade

import gpu_vecenv
from gpu_vecenv import ByMetric, Curriculum, PiecewiseLinear, PPOConfig, PQNConfig, Trainer
from gpu_vecenv.errors import CheckpointCorruptError, ConfigError
from gpu_vecenv.train.checkpoint import load_checkpoint, save_checkpoint
from gpu_vecenv.train.evaluation import Evaluator

STEPS = 8 * 8  # of an iteration
CONFIG = PPOConfig(total_steps=10 * STEPS, num_steps=8, num_minibatches=2, num_epochs=2, hidden_sizes=(8,))
GRAVITY = {"gravity": (8.0, 12.0)}

pytestmark = pytest.mark.usefixtures("one_thread")


def square(progress):
    return 0.01 * (1 - progress) ** 2


def cartpole(device, randomize=None):
    return gpu_vecenv.make("cartpole", 8, device, autoreset_mode="next_step", max_steps=12, randomize=randomize)


def shade(device):
    return gpu_vecenv.make(Shade, 8, device, autoreset_mode="next_step")


def trained(env, iterations, config=CONFIG, **arguments):
    trainer = Trainer(env, config, seed=3, **arguments)
    metrics = [trainer.train_iteration() for _ in range(iterations)]
    return trainer, metrics


def same(one, other):
    a, b = (trainer.state()[0] for trainer in (one, other))
    return a.keys() == b.keys() and all(x.equal(b[name]) for name, x in a.items())


# Schedules


def test_points_are_joined_by_lines():
    line = PiecewiseLinear([(0, 1), (0.5, 2), (1.0, -2)])
    assert [float(line(x)) for x in (-1, 0, 0.25, 0.5, 0.75, 1, 2)] == [1, 1, 1.5, 2, 0, -2, -2]
    pairs = PiecewiseLinear([(10, (0, 1)), (20, (2, 1))])
    assert pairs(15).tolist() == [1, 1] and pairs(99).tolist() == [2, 1]
    assert PiecewiseLinear([(3, 7)])(0) == 7


@pytest.mark.parametrize(
    "points",
    [
        [],
        [(0, 1), (0, 2)],
        [(1, 1), (0, 2)],
        [(0, math.nan)],
        [(0, "x")],
        [(0, 10**400)],
        [(0, (1, 2)), (1, 3)],
        3,
        [(0,)],
    ],
)
def test_points_that_are_none_are_refused(points):
    with pytest.raises(ConfigError, match="points are"):
        PiecewiseLinear(points)


# Options


def test_options_of_a_policy_follow_their_schedules(device):
    config = {"learning_rate": square, "clip": PiecewiseLinear([(0, 0.4), (0.5, 0.1)]), "entropy_coefficient": square}
    trainer = Trainer(cartpole(device), CONFIG, curriculum=Curriculum(config=config))
    (learner,) = trainer.learners.values()
    for iteration in range(10):
        metrics, progress = trainer.train_iteration(), iteration / 10
        clip = max(0.1, 0.4 - 0.6 * progress)
        for tensor, value in (
            (learner.learning_rate, square(progress)),
            (learner.entropy_coefficient, square(progress)),
            (learner.clip, clip),
        ):
            assert tensor.item() == pytest.approx(value, rel=1e-6)  # float32
        assert metrics["learning_rate_agent"] == metrics["curriculum_learning_rate_agent"] == square(progress)


def test_a_schedule_of_the_configuration_gives_the_same_bits(device):
    plain, _ = trained(cartpole(device), 5, dataclasses.replace(CONFIG, learning_rate=0.01, final_learning_rate=0.002))
    line = Curriculum(config={"learning_rate": PiecewiseLinear([(0, 0.01), (1, 0.002)])})
    assert same(plain, trained(cartpole(device), 5, curriculum=line)[0])


@pytest.mark.parametrize(("name", "value"), [("gamma", 0.5), ("gae_lambda", 0.3)])
def test_discounts_are_those_of_a_configuration_with_them(name, value, device):
    plain, _ = trained(cartpole(device), 3, dataclasses.replace(CONFIG, **{name: value}))
    curriculum = Curriculum(config={name: lambda progress: value})
    found, _ = trained(cartpole(device), 3, curriculum=curriculum)
    assert same(plain, found) and not same(plain, trained(cartpole(device), 3)[0])


def test_a_policy_is_named_as_in_metrics(device):
    env = gpu_vecenv.make("tag_gridworld", 8, device, autoreset_mode="next_step", max_steps=7)
    curriculum = Curriculum(config={"learning_rate_tagger": square, "entropy_coefficient": lambda progress: 0.5})
    trainer, _ = trained(env, 1, curriculum=curriculum)
    tagger, runner = (trainer.learners[role] for role in ("tagger", "runner"))
    assert tagger.learning_rate.item() == pytest.approx(0.01) and runner.learning_rate.item() == pytest.approx(3e-4)
    assert tagger.entropy_coefficient == runner.entropy_coefficient == 0.5


def test_the_learning_rate_of_pqn(device):
    config = PQNConfig(total_steps=10 * STEPS, num_steps=8, num_minibatches=2, num_epochs=1, hidden_sizes=(8,))
    trainer, metrics = trained(cartpole(device), 4, config, curriculum=Curriculum(config={"learning_rate": square}))
    assert trainer.learners["agent"].learning_rate.item() == pytest.approx(square(0.3), rel=1e-6)
    assert metrics[-1]["learning_rate_agent"] == square(0.3)


# Environments


def test_ranges_are_those_of_an_environment_made_with_them(device):
    narrow = {"gravity": (9.0, 10.0)}
    plain, _ = trained(cartpole(device, narrow), 4)
    found, _ = trained(cartpole(device, GRAVITY), 4, curriculum=Curriculum(randomize={"gravity": lambda _: (9, 10)}))
    assert found.env.state["gravity"].equal(plain.env.state["gravity"])
    assert all(
        x.equal(y)
        for x, y in zip(found.policies["agent"].parameters(), plain.policies["agent"].parameters(), strict=True)
    )


def test_ranges_count_from_the_next_reset_on(device):
    schedule = PiecewiseLinear([(0, (9, 9)), (0.1, (11, 11.5))])
    trainer, _ = trained(cartpole(device, GRAVITY), 1, curriculum=Curriculum(randomize={"gravity": schedule}))
    gravity = trainer.env.state["gravity"]
    assert gravity.eq(9).all()
    metrics = [trainer.train_iteration() for _ in range(4)][-1]
    assert gravity.min() >= 11 and gravity.max() < 11.5 and len(gravity.unique()) > 1
    assert (metrics["curriculum_gravity_low"], metrics["curriculum_gravity_high"]) == (11, 11.5)


def test_evaluations_have_the_ranges_of_the_time(device):
    trainer, _ = trained(
        cartpole(device, GRAVITY), 1, curriculum=Curriculum(randomize={"gravity": lambda progress: (9, 9)})
    )
    evaluator = Evaluator(trainer.env, 4)
    evaluator({"agent": None}, 4)
    assert evaluator.env.state["gravity"].eq(9).all()


def test_a_checkpoint_of_other_initial_states_is_refused(tmp_path):
    def trainer(x, scheduled=False):
        given = {"x": np.full(3, x, np.float32), "theta": np.zeros(3, np.float32)}
        env = gpu_vecenv.make("cartpole", 8, "cpu", autoreset_mode="next_step", max_steps=12, initial_states=given)
        schedule = Curriculum(initial_states={"x": lambda progress: [0, 0, 0]})
        return Trainer(env, CONFIG, seed=3, curriculum=schedule if scheduled else None)

    path = trainer(0.01).save(tmp_path / "one.safetensors")
    trainer(0.01).load(path)
    with pytest.raises(ConfigError, match=r"of a different run: its initial_states\.x is '.*', this trainer's '.*'$"):
        trainer(0.02).load(path)
    tensors, manifest = load_checkpoint(path)
    del manifest["initial_states"]  # as older versions wrote it
    save_checkpoint(path, tensors, manifest)
    trainer(0.02).load(path)
    trainer(0.02, scheduled=True).load(trainer(0.01, scheduled=True).save(path))  # the schedule sets them


def test_a_policy_has_the_ranges_of_its_checkpoint(tmp_path):
    curriculum = Curriculum(randomize={"gravity": lambda progress: (9, 9.5)})
    other = {"pole_mass": (0.1, 0.3)}  # no float32 numbers: they stay as they were given
    trainer, _ = trained(cartpole("cpu", GRAVITY | other), 1, curriculum=curriculum)
    path = trainer.save(tmp_path / "now.safetensors")
    game = gpu_vecenv.load_policy(path, device="cpu").game
    assert game == gpu_vecenv.configure("cartpole", max_steps=12, randomize={"gravity": (9, 9.5)} | other)
    tensors, manifest = load_checkpoint(path)
    save_checkpoint(path, tensors | {"curriculum.ranges": torch.zeros(1, 3)}, manifest)
    with pytest.raises(CheckpointCorruptError, match=r"curriculum\.ranges has shape \(1, 3\); expected \(2, 3\)"):
        gpu_vecenv.load_policy(path, device="cpu")


def test_shared_fields_follow_and_observations_with_them(device):
    curriculum = Curriculum(
        shared={
            "table": PiecewiseLinear([(0, (0, 1, 2)), (1, (10, 11, 12))]),
            "stage": lambda progress: 2.6 * progress,
        }
    )
    trainer = Trainer(shade(device), CONFIG, seed=3, curriculum=curriculum)
    data = trainer.rollout
    for iteration in range(10):
        metrics = trainer.train_iteration()
        table = torch.tensor([iteration, iteration + 1, iteration + 2.0], device=device)
        expected = torch.cat([table, torch.tensor([float(round(0.26 * iteration))], device=device)])
        active = data.active[:, :, 0]
        assert trainer.env.state["table"].equal(table)
        assert data.obs[:, :, 0][active].eq(expected).all()
        assert data.rewards[:, :, 0][active[:-1]].eq(iteration).all()
        assert metrics["curriculum_stage"] == round(0.26 * iteration) and "curriculum_table" not in metrics
    assert trainer.evaluate(4)["return_agent"] == 6 * 9


def test_initial_states_count_from_the_next_reset_on_and_in_evaluations(device):
    given = {"gravity": np.full(4, 9, np.float32), "theta": np.zeros(4, np.float32)}
    env = gpu_vecenv.make(
        "cartpole", 8, device, autoreset_mode="next_step", max_steps=12, randomize=GRAVITY, initial_states=given
    )
    curriculum = Curriculum(
        initial_states={
            "gravity": lambda progress: 10 + progress + np.arange(4) / 4,
            "theta": lambda progress: progress,
        }
    )
    trainer, _ = trained(env, 1, curriculum=curriculum)
    assert set(trainer.env.state["gravity"].unique().tolist()) <= {10, 10.25, 10.5, 10.75}
    for _ in range(4):
        trainer.train_iteration()
    assert trainer.env.state["gravity"].min() >= 10.1  # those of the second iteration, or later ones
    evaluator = Evaluator(trainer.env, 8)
    evaluator({"agent": None}, 8)
    expected = torch.tensor([10.4, 10.65, 10.9, 11.15], device=device)
    found = evaluator.env.state["gravity"]
    assert found[:, None].sub(expected).abs().min(1).values.max() < 1e-6 and len(found.unique()) > 1


# Metrics


@pytest.mark.parametrize("largest", [False, True])
def test_a_value_follows_a_metric(largest, device):
    """The reward is what the curriculum makes of the return: it rises with it up to 3, then falls to 0."""
    table = {0.0: 1.0, 6.0: 2.0, 12.0: 3.0, 18.0: 0.0}
    schedule = ByMetric("return_agent", lambda x: table[float(x)], start=0, largest=largest)
    config = dataclasses.replace(CONFIG, num_steps=14, staggered_starts=False, total_steps=10**6)  # two whole episodes
    trainer, found = Trainer(shade(device), config, curriculum=Curriculum(shared={"table": schedule})), []
    for _ in range(6):
        metrics = trainer.train_iteration()
        found.append((metrics["return_agent"], trainer.env.state["table"][0].item()))
    returns, values = zip(*found, strict=True)
    assert returns == tuple(6 * value for value in values)
    assert values == ((1, 2, 3, 0, 0, 0) if largest else (1, 2, 3, 0, 1, 2))


def test_means_that_are_not_there_yet_leave_the_start(device):
    curriculum = Curriculum(config={"clip": ByMetric("episode_length", lambda x: 0.01 * x, start=25)})
    trainer = Trainer(cartpole(device), CONFIG, curriculum=curriculum)
    metrics = trainer.train_iteration()
    trainer.train_iteration()
    assert math.isnan(metrics["episode_length"]) and trainer.learners["agent"].clip.item() == pytest.approx(0.25)


# Checkpoints


def everything(device):
    curriculum = Curriculum(
        shared={"table": PiecewiseLinear([(0, 1), (0.5, 3), (1, 0)])},
        config={
            "clip": ByMetric("entropy_agent", lambda x: 0.1 + x / 10, start=0.5),
            "entropy_coefficient": ByMetric("return_agent", lambda x: 0.001 * abs(x), start=1, largest=True),
        },
    )
    return Trainer(shade(device), CONFIG, seed=3, curriculum=curriculum)


def ranges(device):
    schedule = {"gravity": PiecewiseLinear([(0, (9, 9)), (0.5, (8, 12)), (1, (9, 9))])}
    return Trainer(cartpole(device, GRAVITY), CONFIG, seed=3, curriculum=Curriculum(randomize=schedule))


def starts(device):
    given = {"theta": np.linspace(0, 0.1, 3, dtype=np.float32)}
    env = gpu_vecenv.make("cartpole", 8, device, autoreset_mode="next_step", max_steps=12, initial_states=given)
    schedule = PiecewiseLinear([(0, (0, 0.1, 0.1)), (0.5, (0.1, 0, 0)), (1, (0, 0.1, 0.2))])
    return Trainer(env, CONFIG, seed=3, curriculum=Curriculum(initial_states={"theta": schedule}))


@pytest.mark.parametrize("make", [everything, ranges, starts])
@pytest.mark.parametrize("before", [1, 6])
def test_a_resumed_run_is_bit_identical(make, before, device, tmp_path):
    whole, part, resumed = (make(device) for _ in range(3))
    for _ in range(before):
        whole.train_iteration()
        part.train_iteration()
    part.save(tmp_path / "a.safetensors")
    resumed.train_iteration()  # another state than at the beginning
    resumed.load(tmp_path / "a.safetensors")
    assert same(whole, resumed) and whole.evaluate(8) == resumed.evaluate(8)
    for _ in range(10 - before):
        one, other = whole.train_iteration(), resumed.train_iteration()
        names = [name for name in one if "time_fraction" not in name and "_per_s" not in name]
        assert str([one[name] for name in names]) == str([other[name] for name in names])
        assert same(whole, resumed)


def test_a_checkpoint_of_another_curriculum_is_refused(device, tmp_path):
    path = everything(device).save(tmp_path / "a.safetensors")
    for other in (None, Curriculum(config={"clip": square})):
        trainer = Trainer(shade(device), CONFIG, seed=3, curriculum=other)
        before = {name: tensor.clone() for name, tensor in trainer.state()[0].items()}
        with pytest.raises(ConfigError, match="its curriculum"):
            trainer.load(path)
        assert all(tensor.equal(before[name]) for name, tensor in trainer.state()[0].items())


def test_checkpoints_that_name_no_curriculum_are_of_none(device):
    trainer = Trainer(shade(device), CONFIG, seed=3)
    tensors, manifest = trainer.state()
    del manifest["curriculum"]
    trainer.load_state({name: tensor.clone() for name, tensor in tensors.items()}, manifest, "a file")


# Refusals


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"config": {"num_steps": square}}, ["config has 'num_steps'", "'clip'", "'gae_lambda'", "can change"]),
        ({"config": {"clip_runner": square}}, ["config has 'clip_runner'", "'clip_agent'"]),
        ({"config": {"clip": square, "clip_agent": square}}, ["clip_agent twice"]),
        ({"config": {"clip": lambda progress: -1.0}}, ["clip_agent at 0.0", "-1.0"]),
        ({"config": {"clip": lambda progress: (1, 2)}}, ["clip_agent", "[1.0, 2.0]; expected a number"]),
        ({"config": {"clip": lambda progress: progress["x"]}}, ["schedule of clip_agent raised TypeError: "]),
        ({"config": {"clip": lambda progress: 1 / 0}}, ["schedule of clip_agent raised ZeroDivisionError: "]),
        ({"config": {"clip": lambda progress: math.nan}}, ["clip_agent gives nan at 0.0; expected finite"]),
        ({"config": {"clip": lambda progress: "x"}}, ["clip_agent gives 'x'"]),
        ({"config": {"clip": ByMetric("return", square, start=0)}}, ["no metric 'return'", "return_agent"]),
        ({"config": {"clip": ByMetric("env_time_fraction", square, start=0)}}, ["no metric 'env_time_fraction'"]),
        ({"shared": {"x": square}}, ["shared has 'x'", "[]"]),
        ({"initial_states": {"x": square}}, ["initial_states has 'x'", "[]"]),
        ({"randomize": {"cart_mass": lambda progress: (1, 2)}}, ["randomize has 'cart_mass'", "['gravity']"]),
        ({"randomize": {"gravity": lambda progress: (7, 9)}}, ["gravity at 0.0", "[7.0, 9.0]", "8.0 <= low"]),
        ({"randomize": {"gravity": lambda progress: (10, 9)}}, ["[10.0, 9.0]"]),
        ({"randomize": {"gravity": lambda progress: 9}}, ["gravity at 0.0", "9.0"]),
    ],
)
def test_what_cannot_change_is_refused(arguments, words, device):
    with pytest.raises(ConfigError) as caught:
        Trainer(cartpole(device, GRAVITY), CONFIG, curriculum=Curriculum(**arguments))
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("changes", "name"), [({"desired_kl": 0.01}, "learning_rate"), ({"normalize_returns": True}, "gamma")]
)
def test_what_follows_something_else_is_refused(changes, name, device):
    with pytest.raises(ConfigError, match=f"config has '{name}'"):
        Trainer(cartpole(device), dataclasses.replace(CONFIG, **changes), curriculum=Curriculum(config={name: square}))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (lambda _: (1, 2), "the shape is"),
        (lambda _: 1e300, "do not fit in float32"),
        (lambda _: np.inf, "finite"),
        (lambda _: 10**400, "finite"),
    ],
)
def test_values_that_a_shared_field_cannot_have_are_refused(value, words, device):
    with pytest.raises(ConfigError, match=words):
        Trainer(shade(device), CONFIG, curriculum=Curriculum(shared={"table": value}))


def test_a_value_that_does_not_fit_later_changes_nothing(device):
    curriculum = Curriculum(shared={"table": lambda x: x}, config={"clip": lambda x: 0.2 if x < 0.15 else -1.0})
    trainer, _ = trained(shade(device), 2, curriculum=curriculum)
    with pytest.raises(ConfigError, match=r"clip_agent at 0\.2"):
        trainer.train_iteration()
    assert trainer.env.state["table"].tolist() == pytest.approx([0.1] * 3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Curriculum(config={"clip": 3}),
        lambda: Curriculum(shared=[1]),
        lambda: ByMetric("return_agent", 3, start=0),
        lambda: ByMetric(3, square, start=0),
        lambda: Trainer(cartpole("cpu"), CONFIG, curriculum={"clip": square}),
    ],
)
def test_other_types_are_refused(make):
    with pytest.raises(TypeError):
        make()


def test_a_trainer_that_goes_back_has_the_values_of_its_checkpoint(device, tmp_path):
    """Also where the values that were written last are those of the next iteration."""
    schedule = {0.0: 1.0, 0.1: 2.0, 0.2: 1.0}
    curriculum = Curriculum(shared={"table": lambda progress: schedule[round(progress, 1)]})
    trainer = Trainer(shade(device), CONFIG, seed=3, curriculum=curriculum)
    path = trainer.save(tmp_path / "a.safetensors")
    trainer.train_iteration()
    trainer.train_iteration()
    two = trainer.save(tmp_path / "b.safetensors")
    trainer.train_iteration()
    trainer.load(two)
    assert trainer.env.state["table"].eq(2).all()
    trainer.train_iteration()
    assert trainer.env.state["table"].eq(1).all() and trainer.rollout.rewards.max() == 1
    trainer.load(path)
    trainer.train_iteration()
    assert trainer.env.state["table"].eq(1).all()


def test_a_run_is_played_with_the_shared_fields_of_its_checkpoint(device, tmp_path):
    trainer, _ = trained(shade(device), 2, curriculum=Curriculum(shared={"table": lambda progress: 3 + 10 * progress}))
    path = trainer.save(tmp_path / "a.safetensors")
    policy = gpu_vecenv.load_policy(path, game=trainer.env.game, device=device)
    assert policy.shared.keys() == {"table", "stage"} and policy.shared["table"].eq(4).all()
    env = gpu_vecenv.VecEnv(policy.game, 4, device, arrays=policy.shared)
    assert gpu_vecenv.evaluate(env, policy.policies, 4)["return_agent"] == 6 * 4
