"""Iterations that the device starts while it still works on others, and one read for several of them."""

import csv
import dataclasses
import warnings

import pytest
import torch
from support.bitwise import equal_bits
from support.synchronisation import no_synchronisation
from support.training import SMALL, leaving

import gpu_vecenv
from gpu_vecenv.errors import ConfigError, NonFiniteError
from gpu_vecenv.train.policy_specs import PolicySpec
from gpu_vecenv.train.ppo_learner import PPOLearner
from gpu_vecenv.train.run import RunConfig, run
from gpu_vecenv.train.trainer import Trainer

CONFIG = dataclasses.replace(SMALL, total_steps=7 * 6 * 8, normalize_obs=True, normalize_returns=True)
BY_ITERATION = ("time_fraction", "per_s", "seconds")  # names of metrics that no run repeats


def halved(transition):
    return transition.rewards / 2 + 1


GIVEN = {"roles": {}, "shared": {"policies": {"tagger+runner": PolicySpec()}}, "shaped": {"reward": halved}}


def trainer_of(device, given="roles", config=CONFIG, **arguments):
    return Trainer(leaving(device), config, seed=3, **GIVEN[given], **arguments)


def bits(trainer):
    return {name: x.detach().clone() for name, x in trainer.state()[0].items()}


def repeatable(metrics):
    return {name: x for name, x in metrics.items() if not any(part in name for part in BY_ITERATION)}


@pytest.mark.parametrize("given", GIVEN)
def test_weights_do_not_depend_on_the_interval(given, device):
    each, some = (trainer_of(device, given) for _ in range(2))
    last, found = each.train(), some.train(log_interval=3)
    assert equal_bits(bits(each), bits(some)) and each.iteration == some.iteration == 7
    assert repeatable(last) == repeatable(found)  # the last read is of the seventh alone


def test_reads_are_at_multiples_of_the_interval_and_at_the_end(tmp_path):
    told, resumed = [], []
    first, second = trainer_of("cpu", on_iteration=told.append), trainer_of("cpu", on_iteration=resumed.append)
    first.train_iteration()
    second.load(first.save(tmp_path / "one"))
    first.train(log_interval=3)
    second.train(log_interval=3)
    assert [metrics["iteration"] for metrics in told] == [3, 6, 7]
    assert list(map(repeatable, told)) == list(map(repeatable, resumed))
    assert equal_bits(bits(first), bits(second))


def test_training_ends_after_a_read_when_the_callback_says_so(device):
    trainer = trainer_of(device, on_iteration=lambda metrics: True)
    assert trainer.train(log_interval=2)["iteration"] == trainer.iteration == 2


@pytest.mark.parametrize("given", GIVEN)
def test_metrics_of_an_interval_are_those_of_its_iterations(given, device):
    each, some = (trainer_of(device, given) for _ in range(2))
    for _ in range(2):
        apart = [each.train_iteration() for _ in range(3)]
        found = some.train_interval(3)
        assert found.keys() == apart[-1].keys() and found["iteration"] == apart[-1]["iteration"]
        assert found["episodes"] == sum(metrics["episodes"] for metrics in apart)
        for name in set(PPOLearner.metric_names()) - {"learning_rate"}:  # which is that of the last iteration
            for policy in each.learners:
                key = f"{name}_{policy}"
                # Sums of three doubles.
                assert found[key] == pytest.approx(sum(metrics[key] for metrics in apart) / 3, rel=1e-14)
        same = ("env_steps", "first_episodes", "episode_length", "terminated_fraction", "return_tagger")
        assert [found[name] for name in same] == pytest.approx([apart[-1][name] for name in same], nan_ok=True)
        assert found["agent_steps_per_s"] > 0 and found["update_time_fraction"] > 0
    if given == "shaped":
        names = ["shaped_reward_tagger", "shaped_reward_runner"]
        for name in names:  # a mean over agent-steps, of which iterations have different numbers
            low, high = min(x[name] for x in apart), max(x[name] for x in apart)
            assert low <= found[name] <= high and low < high


def test_the_device_follows_the_schedules_that_are_logged(device):
    config = dataclasses.replace(CONFIG, final_clip=0.01, final_entropy_coefficient=0.3)
    trainer = trainer_of(device, config=config)
    (learner, *_), rates = trainer.learners.values(), set()
    for iteration in range(9):  # two more than the run has
        metrics = trainer.train_iteration()
        expected = torch.tensor(config.schedule(min(iteration / 7, 1.0)))
        found = torch.stack([learner.learning_rate, learner.clip, learner.entropy_coefficient]).cpu()
        assert found.equal(expected) and torch.tensor(metrics["learning_rate_tagger"]) == expected[0]
        rates.add(metrics["learning_rate_tagger"])
    assert len(rates) == 8


def test_nothing_is_learnt_after_a_loss_that_is_not_finite(device):
    trainer = trainer_of(device)
    trainer.launch_iteration()
    bias, before = trainer.policies["tagger"].network.critic.bias, None
    kept = bias.detach().clone()
    before = bits(trainer)
    bias.data.fill_(float("nan"))
    trainer.launch_iteration()
    learnt = {name: x for name, x in bits(trainer).items() if name.startswith("optimizer.runner")}
    bias.data.copy_(kept)
    trainer.launch_iteration()
    found = bits(trainer)
    names = [
        n for n in before if n.startswith(("policy.tagger.network", "optimizer.tagger")) and "reward_sums" not in n
    ]
    assert len(names) > 10 and all(found[name].equal(before[name]) for name in names)
    # The others learn in the iteration with the loss, as if it were read at its end, and not in later ones.
    assert all(x.equal(found[name]) for name, x in learnt.items() if "reward_sums" not in name)
    assert not learnt["optimizer.runner.0.step"].equal(before["optimizer.runner.0.step"])
    with pytest.raises(NonFiniteError, match=r"^iterations 1 to 3: losses .*nan"):
        trainer.read_iteration()
    assert trainer.iteration == 0
    steps = trainer.learners["tagger"].optimizer_state()["0.step"].clone()
    assert trainer.train_iteration()["iteration"] == 1
    assert trainer.learners["tagger"].optimizer_state()["0.step"] == steps + 8


def test_what_was_not_read_is_dropped_by_a_load(device, tmp_path):
    trainer = trainer_of(device)
    first = trainer.train_iteration()
    path = trainer.save(tmp_path / "one")
    expected = trainer.train_iteration()
    trainer.launch_iteration()
    trainer.load(path)
    assert trainer.iteration == first["iteration"] == 1
    assert repeatable(trainer.train_iteration()) == repeatable(expected)


def test_a_read_without_an_iteration_is_refused(device):
    trainer = trainer_of(device)
    for _ in range(2):
        with pytest.raises(ConfigError, match="no iteration since the last read; expected launch_iteration"):
            trainer.read_iteration()
        trainer.train_iteration()


@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)])
def test_other_intervals_are_refused(value, error):
    trainer = trainer_of("cpu")
    with pytest.raises(error, match="log_interval"):
        trainer.train(log_interval=value)
    with pytest.raises(ConfigError, match="log_interval"):
        RunConfig(log_interval=value)
    assert trainer.iteration == 0


def rows(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return [repeatable(row) for row in csv.DictReader(file)]


def test_a_run_with_an_interval_resumes_bitwise_equal(tmp_path):
    config = RunConfig(log_interval=2, episodes=2, best_episodes=0, checkpoint_seconds=0)
    whole = trainer_of("cpu")
    assert run(whole, tmp_path / "whole", config) == 0
    for iteration in (2, 6, None):
        trainer = trainer_of("cpu")
        original = trainer.train_interval

        def interrupted(log_interval, trainer=trainer, original=original, last=iteration):
            if trainer.iteration == last:
                raise KeyboardInterrupt
            return original(log_interval)

        trainer.train_interval = interrupted
        with pytest.raises(KeyboardInterrupt) if iteration else warnings.catch_warnings():
            run(trainer, tmp_path / "parts", config, resume=iteration != 2)
    assert equal_bits(bits(whole), bits(trainer))
    assert rows(tmp_path / "whole") == rows(tmp_path / "parts")
    assert [row["iteration"] for row in rows(tmp_path / "whole")] == ["2", "4", "6", "7"]


@pytest.mark.gpu
@pytest.mark.parametrize("network", ["kernels", "torch"])
def test_launches_wait_for_nothing_and_a_read_waits_once(network):
    env = gpu_vecenv.make("cartpole", 256, "cuda", autoreset_mode="next_step")
    hidden = {"kernels": (64, 64), "torch": ()}[network]
    trainer = Trainer(env, dataclasses.replace(SMALL, hidden_sizes=hidden), seed=1)
    assert (trainer.torch_reasons["agent"] is None) == (network == "kernels")
    for _ in range(3):  # checks and captures
        trainer.train_iteration()
    with no_synchronisation():
        for _ in range(5):
            trainer.launch_iteration()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            trainer.train_interval(4)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert trainer.iteration == 12
    assert len([one for one in caught if "synchroniz" in str(one.message)]) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("given", GIVEN)
def test_an_iteration_is_one_graph_and_changes_no_bit(given):
    captured, plain = (trainer_of("cuda", given, graphs=graphs) for graphs in (True, False))
    assert list(map(repeatable, (captured.train(2), captured.train_iteration()))) == list(
        map(repeatable, (plain.train(2), plain.train_iteration()))
    )
    assert equal_bits(bits(captured), bits(plain))
    assert captured._graphed_iteration.graph is not None
    assert not any(stage._warm for stage in (captured._graphed_rollout, captured._graphed_end))


@pytest.mark.gpu
def test_stages_after_a_graph_of_the_whole_change_no_bit():
    """As when a caller adds a hook to a network, which torch computes from then on."""
    runs = []
    for graphs in (True, False):
        trainer = trainer_of("cuda", graphs=graphs)
        for iteration in range(6):
            if iteration == 3:
                trainer.policies["tagger"].network.critic.register_forward_hook(lambda *_: None)
            trainer.train_iteration()
        runs.append(bits(trainer))
    assert equal_bits(*runs)


@pytest.mark.gpu
def test_weights_that_a_caller_freezes_after_the_capture_stay():
    trainer = trainer_of("cuda")
    for _ in range(3):
        trainer.train_iteration()
    parameters = dict(trainer.policies["tagger"].named_parameters())
    parameters["network.critic.bias"].requires_grad_(False)
    before = {name: p.detach().clone() for name, p in parameters.items()}
    for state in trainer.learners["tagger"].optimizer.state.values():
        state["exp_avg"].zero_()
    trainer.train_iteration()
    assert [name for name, p in parameters.items() if p.equal(before[name])] == ["network.critic.bias"]
