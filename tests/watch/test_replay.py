"""Replays: bitwise equal on every device; damaged and forged files are refused."""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import re
import sys
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from games.crew import Crew
from games.economy import OpenEconomy
from games.fragile import FAULTS, Fragile
from games.painter import Painter
from games.scouts import Scouts
from support.training import LEAVING, SMALL, leaving, policy_of

import gpu_vecenv
from gpu_vecenv.cli.main import main
from gpu_vecenv.declare.drawing import Circle
from gpu_vecenv.declare.env import Env, Field, i32
from gpu_vecenv.envs.registry import GAMES
from gpu_vecenv.errors import (
    CapacityError,
    ConfigError,
    NonFiniteError,
    ReplayFormatError,
    ReplayMismatchError,
    UnknownGameError,
)
from gpu_vecenv.train.evaluation import evaluate
from gpu_vecenv.train.trainer import Trainer
from gpu_vecenv.watch import recording, replay, replay_file
from gpu_vecenv.watch.player import page
from gpu_vecenv.watch.replay import Replay, film, is_stale, play, record, verify
from gpu_vecenv.watch.replay_file import HEADER_LIMIT, MAGIC, PAYLOAD_LIMIT

# Short episodes; the ledger plays the same configurations.
SHORT = {"tag_continuous": {"max_steps": 60}, "acrobot": {"max_steps": 100}}
SHORT |= {name: {"max_steps": 100} for name in ("mountain_car", "continuous_mountain_car")}
SHORT |= {name: {"max_steps": 60} for name in ("harvest", "cleanup", "economy")}


def random_policies(env):
    return dict.fromkeys(env.game.roles)


def recorded(game, device="cpu", episodes=3, seed=11, **config):
    env = gpu_vecenv.make(game, 1, device, **config)
    return record(env, random_policies(env), episodes=episodes, seed=seed)


def alike(one, other):
    arrays = [np.array_equal(getattr(one, n), getattr(other, n)) for n in ("actions", "step_digests")]
    shared = one.shared.keys() == other.shared.keys() and all(
        a.dtype == other.shared[n].dtype and a.tobytes() == other.shared[n].tobytes() for n, a in one.shared.items()
    )
    return all(arrays) and shared and one.actions.dtype == other.actions.dtype and one.header() == other.header()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Frail(Fragile):
    """Fragile, whose agents all have a role."""

    roles = {"agent": 2}  # noqa: RUF012


@pytest.fixture(scope="module")
def poles():
    """Three replays of cartpole, of a few steps each."""
    return recorded("cartpole")


@pytest.fixture(scope="module")
def small(poles):
    """The content of a small file, with a shared field of each type."""
    kinds = replay_file.FIELD_TYPES
    shared = {f"of_{name}": np.arange(6).reshape(2, 3).astype(kind) for name, kind in kinds.items()}
    shared |= {"scalar": np.array(-3, np.int32), "actions": np.array([np.nan, -0.0], np.float32)}
    return dataclasses.replace(poles[0], shared=shared).to_bytes()


# ---------------------------------------------------------------------- bitwise equality


@pytest.mark.parametrize("name", GAMES)
def test_a_file_gives_the_episode_again(name, device, tmp_path):
    """All actions are random, so that stepping an environment by hand gives the same episode."""
    config = SHORT.get(name, {})
    made = recorded(name, device, **config)
    assert [one.env_index for one in made] == [0, 1, 2]
    loaded = Replay.load(made[2].save(tmp_path / "one.replay"))
    assert alike(loaded, made[2])
    verify(loaded, device)
    seen = play(loaded, device)
    assert not seen.stale and seen.game == gpu_vecenv.configure(name, **config)
    env = gpu_vecenv.make(name, 3, device, autoreset_mode="disabled", **config)
    obs, info = env.reset(seed=11)
    for step in range(loaded.num_steps + 1):
        assert np.array_equal(seen.obs[step], obs[2].cpu()) and np.array_equal(
            seen.active[step], info["active"][2].cpu()
        )
        if step % 10 == 0 or step == loaded.num_steps:
            assert env.game.draw(seen.state_at(step)) == env.game.draw(_state(env, 2))
        assert seen.state_at(step)["elapsed_steps"] == step and bool(env.active[2].any()) == (step < loaded.num_steps)
        if step < loaded.num_steps:
            actions = env.sample_actions()
            acts = info.get("acting", env.active)[2].cpu().numpy()
            assert np.array_equal(loaded.actions[step][acts], actions[2].cpu()[acts])
            assert not loaded.actions[step][~acts].any(), "agents that left, died or wait have action 0"
            obs, *outputs, info = env.step(actions)
            for one, other in zip((seen.rewards, seen.terminations, seen.truncations), outputs, strict=True):
                assert np.array_equal(one[step], other[2].cpu())
    for role, where in env.game.layout.role_slices.items():
        returns = seen.rewards[:, where].astype(np.float64).cumsum(0)[-1]
        assert loaded.returns[role] == math.fsum(returns) / len(returns)


def _state(env, env_index):
    fields = {f.name: env.state[f.name] if f.shared else env.state[f.name][env_index] for f in env.layout.fields}
    tensors = {"elapsed_steps": env.elapsed_steps[env_index], "active": env.active[env_index], **fields}
    return {name: tensor.cpu().numpy() for name, tensor in tensors.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("devices", [("cuda", "cpu"), ("cpu", "cuda")], ids="->".join)
@pytest.mark.parametrize("name", GAMES)
def test_another_device_plays_a_recording(name, devices, tmp_path):
    recorder, player = devices
    made = recorded(name, recorder, episodes=20, **SHORT.get(name, {}))
    assert len({one.digest for one in made}) == 20
    for one in made:
        verify(Replay.load(one.save(tmp_path / "one.replay")), player)


@pytest.mark.parametrize("kind", [Crew, OpenEconomy, Painter, Scouts])
def test_an_unregistered_game_is_passed_to_play(kind, device):
    """Masked choices, roles of several sizes, images, boxes, agents that leave early."""
    for one in recorded(kind, device, episodes=2):
        loaded = Replay.from_bytes(one.to_bytes())
        verify(loaded, device, game=kind)
        with pytest.raises(UnknownGameError, match=f"{one.game}.*game=MyGame.*--game my_game.py"):
            verify(loaded, device)
        with pytest.raises(ConfigError, match="game is Cartpole, cartpole; expected that of the replay"):
            verify(loaded, device, game=GAMES["cartpole"])
        with pytest.raises(TypeError, match=r"expected a class derived from gpu_vecenv.Env"):
            verify(loaded, device, game=kind.name())


def test_actions_of_policies_and_scripts_are_recorded(device):
    env = leaving(device)
    role_policies = {"tagger": policy_of(env, "tagger"), "runner": lambda obs: torch.ones_like(obs[..., :2]).int()}
    made = {greedy: record(env, role_policies, episodes=5, seed=4, greedy=greedy) for greedy in (False, True)}
    assert [one.digest for one in made[False]] != [one.digest for one in made[True]]
    for greedy, replays in made.items():
        metrics = evaluate(env.like(num_envs=5), role_policies, 5, seed=4, greedy=greedy)
        assert np.mean([one.num_steps for one in replays]) == metrics["episode_length"]
        for role in env.game.roles:
            mean = np.mean([one.returns[role] for one in replays])
            assert mean == pytest.approx(metrics[f"return_{role}"], rel=1e-14)  # another order of additions
        runners = np.concatenate([one.actions[:, env.game.layout.role_slices["runner"]] for one in replays])
        assert set(np.unique(runners)) == {0, 1}, "1, or 0 once tagged"


def test_changed_shared_fields_are_recorded(device):
    env = gpu_vecenv.make("simple_tag", 2, device, curriculum=True)
    (declared,) = record(env, random_policies(env))
    assert declared.shared == {}
    env.state["curriculum_stage"].fill_(2)
    (changed,) = record(env, random_policies(env))
    assert changed.shared.keys() == {"curriculum_stage"} and changed.shared["curriculum_stage"] == 2
    assert changed.digest != declared.digest
    verify(Replay.from_bytes(changed.to_bytes()), device)
    with pytest.raises(ReplayMismatchError, match="not bitwise equal"):
        verify(dataclasses.replace(changed, shared={}), device)
    for shared in ({"nothing": np.zeros(1, np.int32)}, {"curriculum_stage": np.zeros(2, np.int32)}):
        with pytest.raises(ReplayMismatchError, match="shared fields do not fit"):
            verify(dataclasses.replace(changed, shared=shared), device)


def test_end_on_nonfinite_is_recorded(device):
    env = gpu_vecenv.VecEnv(Frail(), 1, device, end_on_nonfinite=True)
    ends = {"agent": lambda obs: torch.full(obs.shape[:2], FAULTS.index("NaN in the state")).to(obs.device)}
    (made,) = record(env, ends)
    assert (made.num_steps, made.end_on_nonfinite) == (1, True)
    verify(made, device, game=Frail)
    with pytest.raises(ReplayMismatchError):
        verify(dataclasses.replace(made, end_on_nonfinite=False), device, game=Frail)


def test_a_return_that_is_not_finite_is_none(poles):
    one = dataclasses.replace(poles[0], returns={"agent": None})
    assert Replay.from_bytes(one.to_bytes()).returns == {"agent": None}
    with pytest.raises(ReplayMismatchError, match=r"returns are .*; expected {'agent': None}"):
        verify(one, "cpu")
    with pytest.raises(ReplayFormatError, match=r"returns is .*nan"):
        dataclasses.replace(one, returns={"agent": float("nan")})


# ---------------------------------------------------------------------- mismatches are found


def test_a_changed_action_is_found_in_its_step(poles):
    one = poles[0]
    for step in range(one.num_steps):
        actions = one.actions.copy()
        actions[step] = 1 - actions[step]
        with pytest.raises(
            ReplayMismatchError, match=rf"not bitwise equal on cpu from step {step + 1} of {one.num_steps} on"
        ):
            verify(dataclasses.replace(one, actions=actions), "cpu")


@pytest.mark.parametrize(
    ("changes", "config", "step"),
    [({"seed": 12}, {}, 0), ({"env_index": 1}, {}, 0), ({}, {"reset_high": 0.06}, 0), ({}, {"gravity": 9.9}, 1)],
)
def test_seed_env_index_and_config_decide_the_episode(changes, config, step, poles):
    changed = dataclasses.replace(poles[0], config={**poles[0].config, **config}, **changes)
    with pytest.raises(ReplayMismatchError, match=f"not bitwise equal on cpu from step {step} of"):
        verify(changed, "cpu")


def test_a_changed_digest_is_found(poles):
    one = poles[0]
    with pytest.raises(
        ReplayMismatchError, match=f"from step {one.num_steps} of.*expected {'0' * 16}; .*please report"
    ):
        verify(dataclasses.replace(one, digest="0" * 16), "cpu")
    step_digests = one.step_digests.copy()
    step_digests[3] ^= 1
    with pytest.raises(ReplayMismatchError, match="from step 3 of"):
        play(dataclasses.replace(one, step_digests=step_digests), "cpu")


def test_changed_sources_are_reported(poles):
    """A changed source may be bitwise equal; if it is not, the message says that the source has changed."""
    old = dataclasses.replace(poles[0], sources="0" * 64, made_with="0.0.9", version=7)
    verify(old, "cpu")
    assert is_stale(old) and play(old, "cpu").stale and not is_stale(poles[0])
    with pytest.raises(ReplayMismatchError, match=r"source has changed since .* gpu_vecenv 0\.0\.9, rules version 7"):
        verify(dataclasses.replace(old, seed=3), "cpu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_steps": 0}, "configuration does not fit the current game: .*max_steps is 0"),
        ({"max_steps": "many"}, "does not fit the current game.*max_steps"),
        ({"grid_size": 3}, "does not fit the current game.*no configuration key 'grid_size'"),
        ({"num_taggers": 5}, r"its actions are \(\d+, 5\) int32; .* takes \(\d+, 6\) int32"),
    ],
)
def test_a_game_that_no_longer_fits_is_refused(changes, message):
    (one,) = recorded("tag_gridworld", episodes=1)
    with pytest.raises(ReplayMismatchError, match=message):
        verify(dataclasses.replace(one, config={**one.config, **changes}), "cpu")
    with pytest.raises(ReplayMismatchError, match=r"float32; .*int32"):
        verify(dataclasses.replace(one, actions=one.actions.astype(np.float32)), "cpu")


# ---------------------------------------------------------------------- refused recordings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counting(Env):
    """A game with state across environments and episodes."""

    allows = ("mutable variables",)
    state = (Field("place", i32),)
    obs_dim = 1
    action_space = gpu_vecenv.configure("cartpole").action_space


def test_a_game_that_is_not_reproducible_is_refused(tmp_path):
    text = """
        static int begun;
        struct Scratch {};
        HD void reset(State s, Io io) { s.place[0] = begun++; }
        HD void step(State s, Io io) { io.terminations[0] = true; }
        HD void observe(State s, Io io) { io.obs[0][0] = s.place[0]; }
    """
    Counting.source = tmp_path / "counting.cu"
    Counting.source.write_text(text)
    env = gpu_vecenv.VecEnv(Counting(), 1, "cpu")
    with pytest.raises(ReplayMismatchError, match=r"Counting is not reproducible.*depend on more than.*step 0 of 1"):
        record(env, random_policies(env), episodes=2)


def test_a_replay_has_the_ranges_that_a_curriculum_has_set(device):
    env = gpu_vecenv.make("cartpole", 8, device, randomize={"gravity": (5.1, 15.0), "half_length": (0.4, 0.6)})
    curriculum = gpu_vecenv.Curriculum(randomize={"gravity": lambda progress: (9.0, 10.0)})
    config = gpu_vecenv.PPOConfig(total_steps=32, num_steps=4, num_minibatches=1, hidden_sizes=(8,))
    with contextlib.closing(env), contextlib.closing(gpu_vecenv.Trainer(env, config, curriculum=curriculum)) as trainer:
        assert record(env, random_policies(env))[0].config["randomize"][0] == ["gravity", 5.1, 15.0]
        trainer.train()
        (replay,) = record(trainer.env, random_policies(env))  # which plays it again
    assert replay.config["randomize"] == [["gravity", 9.0, 10.0], ["half_length", 0.4, 0.6]]


def test_wrong_arguments_of_record_are_refused(device, monkeypatch):
    env = gpu_vecenv.make("cartpole", 2, device)
    with pytest.raises(TypeError, match="env is a GymnasiumVectorEnv; expected a VecEnv"):
        record(gpu_vecenv.GymnasiumVectorEnv("cartpole", 1, device), {"agent": None})
    field = next(f for f in env.layout.fields if not f.shared)
    initial_states = np.zeros((1, *field.shape), field.dtype)
    restarted = gpu_vecenv.make("cartpole", 2, device, initial_states={field.name: initial_states})
    with pytest.raises(ConfigError, match=f"initial_states of {field.name} are not stored"):
        record(restarted, random_policies(restarted))
    for episodes, error in ((0, ValueError), (1.5, TypeError)):
        with pytest.raises(error, match="episodes is"):
            record(env, random_policies(env), episodes=episodes)
    with pytest.raises(ValueError, match="seed is -1"):
        record(env, random_policies(env), seed=-1)
    with pytest.raises(ConfigError, match="role_policies are for"):
        record(env, {})
    with pytest.raises(NonFiniteError):
        record(env, {"agent": lambda obs: torch.full(obs.shape[:2], 2, device=obs.device)})
    monkeypatch.setattr(recording, "MAX_REPLAY_STEPS", 20)
    endless = gpu_vecenv.make("pendulum", 1, device)
    with pytest.raises(ConfigError, match="an episode has not ended after 20 steps"):
        record(endless, random_policies(endless))
    assert env.seed is None, "env itself is not stepped"


def test_an_invalid_action_is_refused_even_if_the_episode_ends(device):
    """The environment is not stepped at the invalid action, and its episode ends before the next host read."""
    env = gpu_vecenv.make(Painter, 1, device)
    drawn = iter([float("nan")])

    def once(obs):
        return torch.full((1, 1, 2), next(drawn, 0.5), device=obs.device)

    with pytest.raises(NonFiniteError):
        record(env, {"agent": once})


def test_states_that_do_not_fit_in_memory_are_refused(poles, monkeypatch):
    monkeypatch.setattr(replay, "free_bytes", lambda device: 1000)
    with pytest.raises(CapacityError, match="1,000 are free; verify stores none"):
        play(poles[0], "cpu")
    verify(poles[0], "cpu")


# ---------------------------------------------------------------------- files


def test_a_file_restores_every_attribute_and_is_small(small, poles):
    loaded = Replay.from_bytes(small)
    assert loaded.to_bytes() == small and alike(loaded, Replay.from_bytes(small))
    assert loaded.shared["actions"].tobytes() == np.array([np.nan, -0.0], np.float32).tobytes()
    assert loaded.shared["scalar"].shape == () and loaded.shared["of_bool"].dtype == bool
    assert not any(array.flags.writeable for array in (loaded.actions, loaded.step_digests, *loaded.shared.values()))
    assert len(poles[0].to_bytes()) < 1000
    actions = np.random.default_rng(1).integers(0, 21, (500, 110, 2)).astype(np.int32)
    tag = dataclasses.replace(poles[0], actions=actions, step_digests=np.arange(501, dtype=np.uint32))
    assert len(tag.to_bytes()) < 70_000, "110 kB of random choices of 21"
    assert np.array_equal(Replay.from_bytes(tag.to_bytes()).actions, actions)


@pytest.mark.parametrize("name", GAMES)
def test_the_file_of_an_episode_of_random_actions_is_small(name):
    (one,) = recorded(name, episodes=1)
    assert len(one.to_bytes()) < 40_000  # docs/reliability.md; tag_continuous has 500 steps of 110 agents


@pytest.mark.parametrize("largest", [1, 255, 256, 65535, 65536, 2**31 - 1])
def test_actions_of_every_size_are_restored(largest, poles):
    actions = np.array([[0], [largest]], np.int32)
    one = dataclasses.replace(poles[0], actions=actions, step_digests=np.zeros(3, np.uint32))
    loaded = Replay.from_bytes(one.to_bytes())
    assert loaded.actions.dtype == np.int32 and np.array_equal(loaded.actions, actions)


def refused(content, message=None, path=None):
    """A file with this content is refused; nothing is imported and little memory is allocated."""
    modules = set(sys.modules)
    tracemalloc.start()
    try:
        with pytest.raises(ReplayFormatError, match=message):
            if path is None:
                Replay.from_bytes(content)
            else:
                path.write_bytes(content)
                Replay.load(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert set(sys.modules) == modules
    assert peak < 8 * len(content) + (1 << 20)


def test_every_truncation_and_every_flipped_bit_is_found(small):
    for length in range(len(small)):
        with pytest.raises(ReplayFormatError):
            Replay.from_bytes(small[:length])
    for offset in range(len(small)):
        damaged = bytearray(small)
        damaged[offset] ^= 1 << offset % 8
        with pytest.raises(ReplayFormatError):
            Replay.from_bytes(bytes(damaged))
    with pytest.raises(ReplayFormatError, match="SHA-256"):
        Replay.from_bytes(small + b"\0")


FOREIGN = {
    "nothing": b"",
    "text": b"hello\n" * 100,
    "a page": b"<html><script>alert(1)</script></html>",
    "a picture": b"\x89PNG\r\n\x1a\n" + bytes(100),
    "a pickle": b"\x80\x04cos\nsystem\n(S'touch owned'\ntR.",
    "a zip": b"PK\x03\x04" + bytes(100),
    "safetensors": (16).to_bytes(8, "little") + b'{"a":{"dtype":1}}',
    "zeros": bytes(1000),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_a_file_of_another_kind_is_refused(what, tmp_path):
    refused(FOREIGN[what], "not a replay of this format, or damaged: its first line is", tmp_path / "x.replay")
    assert os.listdir(tmp_path) == ["x.replay"]


def test_other_things_than_files_are_refused(tmp_path, small):
    os.mkfifo(tmp_path / "pipe")
    for name in ("nothing", ".", "pipe"):
        with pytest.raises(FileNotFoundError, match="no replay at"):
            Replay.load(tmp_path / name)
    with (tmp_path / "large").open("wb") as file:
        file.truncate(replay_file.FILE_LIMIT + 1)
    with pytest.raises(ReplayFormatError, match=r"large is not a replay.*its size is 269484033; expected at most"):
        Replay.load(tmp_path / "large")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (b"2", "its format is '2'; expected 3: it is of an older gpu_vecenv, record the episode again"),
        (b"4", "its format is '4'; expected 3: update gpu_vecenv to read it"),
        (b"x", "its format is 'x'; expected 3"),
    ],
)
def test_another_format_is_refused(other, message, small):
    refused(small.replace(MAGIC + b"3", MAGIC + other, 1), message)


def test_a_failed_save_leaves_the_existing_file(tmp_path, poles, monkeypatch):
    path = poles[0].save(tmp_path / "a" / "one.replay")
    before = path.read_bytes()

    def full(source, target):
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="no space"):
        poles[1].save(path)
    assert path.read_bytes() == before and os.listdir(path.parent) == ["one.replay"]


def forged(content, header=None, payload=None, line=None):
    """The file with another header (a function of the dictionary), payload or header line, and a SHA-256 that fits."""
    start = content.index(b"\n") + 1
    end = content.index(b"\n", start)
    if header is not None:
        changed = json.loads(content[start:end])
        header(changed)
        line = json.dumps(changed, sort_keys=True, separators=(",", ":")).encode()
    line = content[start:end] if line is None else line(content[start:end]) if callable(line) else line
    payload = content[end + 1 : -32] if payload is None else payload
    body = content[:start] + line + b"\n" + payload
    return body + hashlib.sha256(body).digest()


def test_an_unchanged_forgery_is_read(small):
    assert forged(small, header=lambda header: None) == small


BAD_VALUES = {
    "game": ["../cartpole", "os.system", "my_game.py", "Cartpole", "", "a" * 64, "cärtpole", "cartpole\n", 3, None],
    "version": [-1, 1.0, True, "1", 2**31, None],
    "seed": [-1, 2**64, 0.5, True, "3", None],
    "env_index": [-1, 2**63, 0.5, False, []],
    "end_on_nonfinite": [0, 1, None, "False"],
    "digest": ["", "0" * 15, "g" * 16, "A" * 16, 5, "0" * 17],
    "sources": ["", "0" * 63, "z" * 64, 5],
    "made_with": ["", "<b>", "1 2", "a" * 65, 1, "1\n"],
    "returns": [[], {"agent": 1}, {"agent": True}, {"<b>": 1.0}, {"": 1.0}, {"agent": "1"}, {"agent": [1.0]}],
    "config": [
        [],
        {"<script>": 1},
        {"a b": 1},
        {"": 1},
        {"__class__.x": 1},
        {"a": {"b": 1}},
        {"a": [[[[[1]]]]]},
        {"a": 2**63},
        {"a": "line\nbreak"},
        {"a": "\x1b[31m"},
        {"a": "\ud800"},
        {"a": "b" * 1001},
        {"a" * 64: 1},
    ],
    "actions": [
        [],
        {},
        {"dtype": "uint8"},
        {"dtype": "uint8", "shape": [5, 1], "more": 1},
        *({"dtype": kind, "shape": [5, 1]} for kind in ("int32", "float64", "object", "O", "|u1", "<f4", 3, None)),
        *(
            {"dtype": "uint8", "shape": s}
            for s in ([], [5], [0, 1], [-5, 1], [5, 1.0], [True, 1], [5, 1, 1, 1], 5, None)
        ),
        {"dtype": "uint8", "shape": [1] * 17},
        {"dtype": "uint8", "shape": [2_000_000, 1]},
    ],
    "shared": [
        [],
        {"a": 1},
        {"a": {"dtype": "object", "shape": []}},
        {"a": {"dtype": "float32", "shape": [0]}},
        {"../a": {"dtype": "float32", "shape": []}},
        {"A": {"dtype": "float32", "shape": []}},
    ],
}


@pytest.mark.parametrize("key", BAD_VALUES)
def test_a_forged_value_is_refused(key, small):
    for value in BAD_VALUES[key]:
        refused(forged(small, header=lambda header, value=value: header.update({key: value})))


def test_sizes_beyond_the_limit_are_refused_before_anything_is_read(small):
    message = r"the size of all arrays is \d+.*; expected at most 268,435,456 bytes"
    for shape in ([1, 2**40], [1, PAYLOAD_LIMIT // 4], [5, 2**60], [1, 1, 10**4000]):
        spec = {"dtype": "uint8", "shape": shape}
        refused(forged(small, header=lambda header, spec=spec: header.update(actions=spec)), message)
    for size, count in ((2**40, 1), (PAYLOAD_LIMIT, 1), (PAYLOAD_LIMIT // 4, 4)):
        many = {f"a{k}": {"dtype": "uint8", "shape": [size]} for k in range(count)}
        refused(forged(small, header=lambda header, many=many: header.update(shared=many)), message)


def test_shared_fields_are_an_object(poles):
    refused(forged(poles[0].to_bytes(), header=lambda header: header.update(shared=[])), r"shared is \[\]; expected")


@pytest.mark.parametrize("key", replay_file.KEYS)
def test_a_header_has_exactly_its_keys(key, small):
    refused(forged(small, header=lambda header: header.pop(key)), rf"keys is \['{key}'\]; expected none, exactly")
    refused(forged(small, header=lambda header: header.update({f"{key}_": 1})), f"keys is .*{key}_")


def replaced(old, new):
    def change(line):
        assert old in line
        return line.replace(old, new, 1)

    return change


LINES = {
    "a key twice": (replaced(b'"seed":11', b'"seed":11,"seed":11'), "each key once"),
    "spaces": (replaced(b'"seed":11', b'"seed": 11'), "without spaces"),
    "another order": (lambda line: b"{" + b",".join(reversed(line[1:-1].split(b","))) + b"}", None),
    "NaN": (replaced(b'"gravity":9.8', b'"gravity":NaN'), "not strict JSON"),
    "infinity": (replaced(b'"gravity":9.8', b'"gravity":-Infinity'), "not strict JSON"),
    "a number too large for a float": (replaced(b'"gravity":9.8', b'"gravity":1e999'), "not strict JSON"),
    "a number of many digits": (replaced(b'"seed":11', b'"seed":' + b"9" * 5000), None),
    "no JSON": (b"{", "not strict JSON"),
    "no object": (b"[]", "expected a JSON object"),
    "nothing": (b"", "not strict JSON"),
    "invalid UTF-8": (b"\xff\xfe\x00", "not strict JSON"),
    "many brackets": (b"[" * 50_000, "not strict JSON"),
    "too long": (lambda line: line[:-1] + b" " * HEADER_LIMIT + b"}", "a line end within"),
}


@pytest.mark.parametrize("what", LINES)
def test_a_forged_header_is_refused(what, small):
    line, message = LINES[what]
    refused(forged(small, line=line), message)


def test_a_header_without_end_is_refused(small):
    body = MAGIC + b"3\n" + b"x" * 200_000
    refused(body + hashlib.sha256(body).digest(), "the end of its header is -1; expected a line end within")


def test_arrays_have_the_size_in_the_header(small):
    start = small.index(b"\n", len(MAGIC) + 2) + 1
    honest = zlib.decompress(small[start:-32])
    for payload in (b"", b"no zlib", small[start:-33], small[start:-32] + b"more"):
        refused(forged(small, payload=payload))
    for content in (
        honest[:-1],
        honest + b"\0",
        b"",
        bytes(64 << 20),
    ):  # the last is a decompression bomb, 64 kB for 64 MB
        refused(forged(small, payload=zlib.compress(content, 9)), r"the length of its arrays is|cannot be decompressed")


def test_invalid_actions_and_bools_are_refused(poles):
    one = poles[0]

    def with_payload(array, **changes):
        content = dataclasses.replace(
            one, actions=np.zeros((1, 1), np.int32), step_digests=np.zeros(2, np.uint32), **changes
        )
        head = lambda header: header.update(actions={"dtype": array.dtype.name, "shape": [1, 1]})  # noqa: E731
        shared = b"".join(a.tobytes() for a in changes.get("shared", {}).values())
        payload = zlib.compress(array.tobytes() + bytes(8) + shared.replace(b"\1", b"\2"))
        return forged(content.to_bytes(), header=head, payload=payload)

    assert Replay.from_bytes(with_payload(np.array([[1.5]], np.float32))).actions == 1.5
    for value in (np.nan, np.inf, -np.inf):
        refused(with_payload(np.array([[value]], np.float32)), "worst of actions is array.*expected finite")
    refused(with_payload(np.array([[2**31]], np.uint32)), "the largest action is 2147483648; expected an int32")
    flags = {"flags": np.array([True, False])}
    refused(with_payload(np.zeros((1, 1), np.uint8), shared=flags), "other than 0 and 1'; expected bools")
    with pytest.raises(ReplayFormatError, match=r"worst of actions is array.*-1.*choices >= 0"):
        dataclasses.replace(one, actions=one.actions - 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"actions": [[1]]}, "the type of actions is False; expected an array of int32 or float32"),
        ({"actions": np.zeros((3, 1))}, r"the type of actions is dtype\('float64'\)"),
        ({"actions": np.zeros((0, 1), np.int32)}, r"the shape of actions is \(0, 1\)"),
        ({"actions": np.zeros((1_000_001, 1), np.int32)}, r"the shape of actions is \(1000001, 1\); .* T <= 1,000,000"),
        ({"step_digests": np.zeros(2, np.uint32)}, "step_digests is .*; expected an array of"),
        ({"shared": {"x": np.zeros(3, np.complex64)}}, r"shared\['x'\] is"),
        ({"shared": None}, "shared is None"),
        ({"seed": np.int64(3)}, "seed is"),
    ],
)
def test_attributes_are_validated(changes, message, poles):
    with pytest.raises(ReplayFormatError, match=message):
        dataclasses.replace(poles[0], **changes)


# ---------------------------------------------------------------------- films


def test_a_film_shows_the_states(device):
    (one,) = recorded("tag_continuous", device, 1, **LEAVING)
    seen, shown = play(one, device), film(one, device, title="<b>")
    assert (shown.title, shown.fps, len(shown.drawings)) == ("<b>", 30, one.num_steps + 1)
    assert list(shown.agents) == ["tagger_0", "tagger_1", "tagger_2", "runner_0", "runner_1", "runner_2", "runner_3"]
    assert shown.roles == {"tagger": 3, "runner": 4}
    for name in ("rewards", "active", "terminations", "truncations"):
        assert np.array_equal(getattr(shown, name), getattr(seen, name))
    for step, drawing in enumerate(shown.drawings):
        circles = [shape for shape in drawing.shapes if isinstance(shape, Circle)]
        places = {(circle.x, circle.y) for circle in circles}
        assert {tuple(place) for place in seen.state["position"][step].tolist()} <= places
    assert shown.facts["digest"] == one.digest and shown.facts["seed"] == "11, environment 0"
    assert "num_taggers 3, num_runners 4, side 3.0" in shown.facts["configuration"]
    assert shown.facts["return, tagger"] == f"{shown.rewards[:, :3].astype(np.float64).sum(0).mean():.6g}" != "0"


# ---------------------------------------------------------------------- the command line


@pytest.fixture
def command(capsys, monkeypatch, tmp_path):
    """Runs a command line in an empty folder: exit code, output, lines of errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(line):
        capsys.readouterr()
        try:
            code = main(["replay", *line.split()])
        except SystemExit as stop:
            code = stop.code
        output, errors = capsys.readouterr()
        return code, output, errors.splitlines()

    return run


def test_the_commands_record_play_show_and_html(command, tmp_path):
    code, output, errors = command("record cartpole --episodes 2 --seed 11 --gravity 9.9 --out kept --device cpu")
    assert (code, errors) == (0, [])
    assert sorted(os.listdir(tmp_path / "kept")) == ["cartpole-11-0.replay", "cartpole-11-1.replay"]
    one = Replay.load(tmp_path / "kept" / "cartpole-11-1.replay")
    assert (one.config["gravity"], one.seed, one.env_index) == (9.9, 11, 1)
    size = (tmp_path / "kept" / "cartpole-11-1.replay").stat().st_size
    assert (
        f"wrote kept/cartpole-11-1.replay: {one.num_steps} steps, return agent {one.num_steps}, {size} bytes" in output
    )
    assert output.endswith(
        "\nto watch, as a page: gpu-vecenv replay html kept\nto compare a run with them: gpu-vecenv replay play kept\n"
    )
    for files in ("kept", "kept/cartpole-11-0.replay kept/cartpole-11-1.replay"):
        code, output, errors = command(f"play {files} --device cpu")
        assert (code, errors) == (0, []) and len(re.findall(r"  identical  ", output)) == 2 and one.digest in output
    code, output, errors = command("show kept/cartpole-11-1.replay")
    assert (code, errors) == (0, [])
    for line in (
        "  game = cartpole",
        "    gravity = 9.9",
        f"  digest = {one.digest}",
        f"    shape = [{one.num_steps}, 1]",
    ):
        assert line in output.splitlines()
    code, output, errors = command("html kept --device cpu --out page.html --title Poles")
    assert (code, errors) == (0, []) and output.startswith("wrote page.html: 2 episodes, ")
    paths = sorted((tmp_path / "kept").iterdir())
    films = [film(Replay.load(path), "cpu", title=f"kept/{path.stem}") for path in paths]
    assert (tmp_path / "page.html").read_text() == page(films, "Poles")


def test_a_mismatch_fails_and_the_other_files_are_still_played(command, tmp_path, poles):
    poles[0].save(tmp_path / "good.replay")
    dataclasses.replace(poles[1], digest="0" * 16).save(tmp_path / "[red]bad.replay")
    dataclasses.replace(poles[2], sources="0" * 64).save(tmp_path / "old.replay")
    code, output, errors = command("play . --device cpu")
    assert code == 1 and len(errors) == 1
    assert errors[0].startswith(
        "gpu-vecenv: [red]bad.replay: replay of cartpole, seed 11, environment 1: not bitwise equal on cpu"
    )
    rows = {row.split()[0]: row for row in output.splitlines() if ".replay" in row}
    assert "  identical   " in rows["good.replay"] and "DIFFERENT" in rows["[red]bad.replay"]
    assert "identical, although the game's source has changed" in rows["old.replay"]
    assert command("html [red]bad.replay --device cpu")[0] == 2 and not (tmp_path / "replays.html").exists()


def test_a_run_is_recorded(command, tmp_path):
    env = leaving("cpu", 2)
    run = Trainer(env, SMALL).save("run.safetensors")
    code, output, errors = command(f"record {run} --episodes 3 --seed 2 --device cpu --greedy --out kept")
    assert (code, errors) == (0, []) and output.count("wrote kept/") == 3
    policies = gpu_vecenv.load_policy(run, device="cpu").policies
    expected = [one.digest for one in record(env, policies, episodes=3, seed=2, greedy=True)]
    found = [Replay.load(path).digest for path in sorted((tmp_path / "kept").iterdir())]
    assert found == expected
    code, output, errors = command(f"record {run} --seed 2 --device cpu --out kept")
    assert (code, output) == (2, "") and "kept/tag_continuous-2-0.replay exists with other contents" in errors[0]
    assert command(f"record {run} --seed 2 --device cpu --greedy --out kept")[0] == 0, "the same file once more"
    assert Replay.load(tmp_path / "kept" / "tag_continuous-2-0.replay").digest == expected[0]


def test_the_file_that_declares_a_recorded_game_is_found_or_named(command, tmp_path, monkeypatch):
    known = dict(GAMES)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for suffix in (".py", ".cu"):
        (tmp_path / f"my_crew{suffix}").write_text((Path(__file__).parents[1] / "games" / f"crew{suffix}").read_text())
    try:
        code, _, errors = command("record my_crew.py --device cpu --num-helpers 2")
        assert code == 0 and all("my_crew.py has not been checked as it is now" in line for line in errors)
        GAMES.pop("crew")
        assert command("play replays --device cpu")[::2] == (0, []) and "crew" in GAMES
        GAMES.pop("crew")
        (tmp_path / "my_crew.py").rename(tmp_path / "moved.py")
        code, _, errors = command("play replays --device cpu")
        assert code == 2 and "my_crew.py is missing" in errors[0] and errors[0].endswith("cpu --game my_crew.py")
        (tmp_path / "my_crew.cu").rename(tmp_path / "moved.cu")
        assert command("play replays --device cpu --game moved.py")[0] == 0
    finally:
        GAMES.clear()
        GAMES.update(known)
        for name in ("my_crew", "moved"):
            sys.modules.pop(name, None)


def test_help_lists_the_commands_and_their_options(command):
    code, output, errors = command("--help")
    assert (code, errors) == (0, []) and all(verb in output for verb in ("record", "play", "html", "show"))
    for line, option in (
        ("record --help", "GAME"),
        ("record cartpole --help", "--gravity"),
        ("html --help", "--title"),
    ):
        code, output, _ = command(line)
        assert code == 0 and option in output


REFUSED = {
    "record cartpol": "no game is called 'cartpol'; nearest: cartpole.*Nor is there a run at cartpol",
    "record cartpole --episodes 0": r"episodes is 0; expected a value in \[1",
    "record nowhere.py": "no file nowhere.py",
    "record . --device cpu": "no usable checkpoint in",
    "play": "replay needs at least one file",
    "play nothing.replay": "no replay at nothing.replay",
    "play .": r"no \*.replay in the folder",
    "html": "replay needs at least one file",
    "show nothing.replay": "no replay at nothing.replay",
}


@pytest.mark.parametrize(
    ("line", "word"),
    [("plya x", "plya"), ("record", "GAME"), ("record cartpole --greedy", "--greedy"), ("show --all", "--all")],
)
def test_tyro_reports_unknown_commands_and_options(line, word, command, tmp_path):
    code, output, errors = command(line)
    assert (code, output) == (2, "") and any(word in error for error in errors), errors
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("line", REFUSED)
def test_a_wrong_argument_gives_one_line_and_exit_code_2(line, command, tmp_path):
    code, output, errors = command(line)
    assert (code, output, len(errors)) == (2, "", 1)
    assert re.search(REFUSED[line], errors[0]), errors
    assert os.listdir(tmp_path) == []
