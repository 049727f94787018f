"""Replays simulated as WebAssembly in Node.js: every digest of the recorded run."""

import base64
import dataclasses

import numpy as np
import pytest
from support.node import SIMULATION, module_json, require_node, run_node

import gpu_vecenv
from gpu_vecenv.declare.field import C_TYPES
from gpu_vecenv.watch.replay import record

require_node()
PLAYED = ("tag_gridworld", "connect_four", "pendulum", "simple_adversary")  # choices; turns, masks; a Box; padding


def simulated(game, replays, **options):
    content = {**module_json(game, **options), "policies": [], "noop": {}}
    files = [base64.b64encode(replay.to_bytes()).decode() for replay in replays]
    return run_node("replayed.js", {"content": content, "replays": files}, *SIMULATION)


@pytest.mark.parametrize("name", PLAYED)
def test_every_digest_of_a_recorded_episode_is_reproduced(name):
    game = gpu_vecenv.configure(name)
    env = gpu_vecenv.VecEnv(game, 1, "cpu")
    replays = record(env, dict.fromkeys(game.layout.roles), episodes=2, seed=2**63 + 9)
    assert simulated(game, replays) == [None, None]


def test_the_first_step_that_differs_is_found():
    game = gpu_vecenv.configure("tag_gridworld", random_start=True)
    (replay,) = record(gpu_vecenv.VecEnv(game, 1, "cpu"), {"tagger": None, "runner": None}, seed=4)
    actions = replay.actions.copy()
    actions[6] = (actions[6] + 1) % 5
    later = replay.step_digests.copy()
    later[11] += 1
    changed = [
        dataclasses.replace(replay, actions=actions),
        dataclasses.replace(replay, step_digests=later),
        dataclasses.replace(replay, seed=5),
        dataclasses.replace(replay, env_index=1),
        dataclasses.replace(replay, digest="0" * 16),
    ]
    assert simulated(game, [replay, *changed]) == [None, 7, 11, 0, 0, replay.num_steps]


def test_shared_fields_of_a_replay_are_used():
    game = gpu_vecenv.configure("overcooked")
    env = gpu_vecenv.VecEnv(game, 1, "cpu")
    env.state["shaping_weight"].fill_(0.25)
    (replay,) = record(env.like(arrays={n: env.state[n] for n in _shared(env)}), {"player": None}, seed=4)
    assert list(replay.shared) == ["shaping_weight"]
    assert simulated(game, [replay]) == [None]


def _shared(env):
    return [field.name for field in env.layout.fields if field.shared]


def test_any_step_is_simulated_again_from_a_snapshot():
    game = gpu_vecenv.configure("tag_gridworld")
    (replay,) = record(gpu_vecenv.VecEnv(game, 1, "cpu"), {"tagger": None, "runner": None}, seed=4)
    last = replay.num_steps
    assert last == 100
    steps = [last, 0, 63, 64, 62, 3, 99, 99, 1, 50]
    content = {**module_json(game), "policies": [], "noop": {}}
    text = base64.b64encode(replay.to_bytes()).decode()
    given = {"content": content, "replay": text, "steps": steps, "snapshots": 8}
    found = run_node("scrubbed.js", given, *SIMULATION)
    assert found["sought"] == [found["played"][step] for step in steps]
    assert found["played"][-1][0] == replay.digest
    assert (found["spacing"], found["kept"]) == (16, 7), "at most 8 snapshots"
    assert found["length"] == 8 and found["cells"] == [3] * 10, "what was changed at a step is changed again"
    assert found["again"] == found["after"] != found["before"]


@pytest.mark.parametrize("dtype", C_TYPES, ids=str)
def test_arrays_of_files_are_read(dtype, tmp_path):
    numbers = np.arange(24).reshape(2, 3, 4)
    array = (numbers % 2 if dtype == np.bool_ else 7 * numbers).astype(dtype)
    game = gpu_vecenv.configure("cartpole")
    (replay,) = record(gpu_vecenv.VecEnv(game, 1, "cpu"), {"agent": None})
    file = dataclasses.replace(replay, shared={"table": array}).to_bytes()
    script = tmp_path / "print.js"
    script.write_text(
        'import { readFileSync } from "node:fs";\n'
        "const { file } = JSON.parse(readFileSync(process.argv[2]));\n"
        "const { shared } = await readReplay(bytesOfBase64(file));\n"
        "console.log(JSON.stringify([...shared.table].map(Number)));\n"
    )
    found = run_node(script, {"file": base64.b64encode(file).decode()}, "engine.js", "replay.js")
    assert found == array.ravel().tolist()
