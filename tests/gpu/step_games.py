"""Steps every kernel at several shapes, for tools that watch memory; prints a fingerprint of each environment.

    compute-sanitizer --tool racecheck python3 tests/gpu/step_games.py
    python3 tests/gpu/step_games.py --device cpu      # fewer and smaller shapes; for the host's sanitizers
    python3 tests/gpu/step_games.py --part 0 --parts 4   # every fourth of them

Every output is a tensor with an allocation of its own, so that a tool sees where it ends; on a GPU this also takes
PYTORCH_NO_CUDA_MEMORY_CACHING=1. The last line tells how many environments were stepped.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[1]))
from games.crew import Crew
from games.economy import Economy
from games.painter import Painter
from games.race import Race
from games.sacrifice import Sacrifice
from games.scouts import Scouts

import gpu_vecenv
from gpu_vecenv.declare.env import Env
from gpu_vecenv.engine.digest import Digest
from gpu_vecenv.engine.step_buffers import StepBuffers
from gpu_vecenv.engine.vec_env import VecEnv
from gpu_vecenv.train import policy_kernels
from gpu_vecenv.train.opponents_config import OpponentsConfig
from gpu_vecenv.train.policy_specs import PolicySpec
from gpu_vecenv.train.ppo import PPOConfig
from gpu_vecenv.train.trainer import Trainer

Game = str | type[Env]

MODES = ("same_step", "next_step", "disabled")
FEW = {"num_taggers": 2, "num_runners": 3, "num_neighbors": 3}
GAMES: tuple[tuple[Game, dict[str, Any]], ...] = (
    ("tag_gridworld", {}),
    ("tag_gridworld", {"num_taggers": 40, "full_observation": False, "random_start": True}),
    ("tag_continuous", FEW),
    ("tag_continuous", {**FEW, "num_neighbors": "all", "side": 2.0}),
    ("tag_continuous", {"num_taggers": 5, "num_runners": 60, "side": 3.0}),
    ("tag_continuous", {**FEW, "egocentric": False}),
    ("tag_continuous", {**FEW, "num_neighbors": "all", "egocentric": False}),
    ("tag_continuous", {"num_taggers": 5, "num_runners": 60, "side": 3.0, "egocentric": False}),
    ("simple_spread", {"num_agents": 40}),
    ("simple_tag", {"continuous_actions": True}),
    ("simple_adversary", {}),
    ("connect_four", {"slip": 0.3}),
    ("overcooked", {}),
    ("overcooked", {"grid": "XPSX\nO12D\nXXXX", "random_start_positions": True, "random_object_probability": 0.5}),
    ("warehouse", {"num_agents": 4}),
    (
        "warehouse",
        {
            "num_agents": 12,
            "request_queue_size": 9,
            "grid": "xx.x.x\n..gx.x\nx...g.\nxx.x.x",
            "reward_type": "two_stage",
        },
    ),
    ("harvest", {"max_steps": 60}),
    ("harvest", {"num_agents": 40, "view_side": 2, "common_reward": "mean", "max_steps": 60}),
    ("cleanup", {"max_steps": 60}),
    ("cleanup", {"layout_name": "small", "num_agents": 4, "common_reward": "sum", "max_steps": 60}),
    ("economy", {"max_steps": 60, "period": 20}),
    ("economy", {"num_workers": 40, "fixed_four_skill_and_loc": False, "period": 7, "max_steps": 60}),
    ("cartpole", {}),
    ("mountain_car", {}),
    ("continuous_mountain_car", {}),
    ("acrobot", {}),
    ("pendulum", {}),
    ("skirmish", {}),
    ("skirmish", {"scenario": "smacv2_20_units", "observed_units": 4, "attack_mode": "random"}),
    ("pursuit", {"num_pursuers": 40, "num_evaders": 60, "shared_reward": False, "x_size": 9, "constraint_window": 0.9}),
    (Crew, {}),
    (Scouts, {}),
    (Painter, {}),
    (Economy, {}),
    (Race, {}),
    (Sacrifice, {"num_units": 5}),
)
# On a GPU: agents that are sorted into cells; then scratch that does not fit in shared memory, and agents that are more
# than the lanes of a team.
CROWD = ("tag_continuous", {"num_taggers": 6, "num_runners": 214})
HUGE = ("tag_continuous", {"num_taggers": 10, "num_runners": 1500, "num_neighbors": 45})
TICKS, MAX_STEPS = 6, 4  # every environment passes an end


class Learnt(NamedTuple):
    """What is trained for an iteration. Kernels are made for a game's agents and actions, a network, a precision."""

    game: Game
    config: dict[str, Any]
    changes: dict[str, Any]  # of PPO's configuration
    trainer: Mapping[str, Any] = MappingProxyType({})  # other arguments of the trainer


MEMBERS = {"policies": {"tagger": PolicySpec(), "runner": PolicySpec(population=3)}}
OPPONENTS = {"opponents": OpponentsConfig(members=("snapshots", "random"), share=0.5, reassign_interval=1)}
LEARNT = (
    Learnt("tag_gridworld", {}, {}),
    Learnt("tag_gridworld", {}, {"shared_trunk": False, "precision": "bfloat16", "hidden_sizes": (40, 24)}),
    Learnt("tag_continuous", FEW, {"precision": "tf32", "hidden_sizes": (128, 120)}),  # several warps share a row
    Learnt("pendulum", {}, {"shared_trunk": False, "activation": "relu"}),
    Learnt("pendulum", {}, {"hidden_sizes": (1024,)}),  # too large for a block's memory: layer by layer
    Learnt("cartpole", {}, {"hidden_sizes": (256, 256), "precision": "bfloat16"}),  # with products of our own
    # Rollouts by groups of several warps.
    Learnt("tag_continuous", {}, {"hidden_sizes": (64, 64), "precision": "tf32"}),
    Learnt("tag_continuous", FEW, {"network": "entities", "hidden_sizes": (24,)}),
    Learnt("tag_continuous", FEW, {"network": "gru", "hidden_sizes": (24, 64), "precision": "tf32"}),
    Learnt("tag_gridworld", {}, {"network": "gru", "hidden_sizes": (20,), "num_minibatches": 1}),  # padded units
    Learnt("pendulum", {}, {"network": "gru", "hidden_sizes": (128,), "precision": "bfloat16", "shared_trunk": False}),
    Learnt("tag_gridworld", {}, {"network": "lstm", "hidden_sizes": (33,), "precision": "bfloat16"}),
    Learnt("pendulum", {}, {"network": "gru", "hidden_sizes": (256,)}),  # a launch for each step
    Learnt(Race, {}, {"shared_trunk": False, "normalize_obs": True}),
    Learnt(Crew, {}, {"precision": "tf32", "normalize_obs": True, "normalize_returns": True}),
    Learnt(Economy, {}, {}),
    # Ranges of environments with weights of their own, in one launch and in several.
    Learnt("tag_gridworld", {}, {"num_minibatches": 1}, MEMBERS),
    Learnt("tag_gridworld", {}, {"precision": "bfloat16"}, OPPONENTS),
    Learnt("tag_continuous", FEW, {"precision": "tf32", "hidden_sizes": (128, 120)}, OPPONENTS),
    Learnt("tag_gridworld", {}, {"network": "gru", "num_minibatches": 1}, OPPONENTS),
    Learnt("connect_four", {}, {"hidden_sizes": (1024,)}, OPPONENTS),
)


def cases(device: str) -> Iterator[tuple[Game, dict[str, Any], int, str, str]]:
    """Game, configuration, environments, autoreset mode, kind: 1 environment, 33, no multiple of a block, many.

    The kinds are "plain", "rows" (agents_as_envs) and "guards" (guard bands between environments, end_on_nonfinite).
    On a GPU, where the tools are slow, guards and numbers of environments other than 33 have one mode each, in turn.
    """
    for index, (game, config) in enumerate(GAMES):
        agents = gpu_vecenv.configure(game, **config).num_agents
        many = 4097 if agents <= 8 else 1025 if agents <= 40 else 257
        for place, num_envs in enumerate((1, 33) if device == "cpu" else (1, 33, 130, many)):
            turn = index + place
            for mode in MODES if device == "cpu" or num_envs == 33 else MODES[turn % 3 :][:1]:
                yield game, config, num_envs, mode, "rows" if num_envs in (33, many) else "plain"
            if num_envs == 33:
                for mode in MODES if device == "cpu" else MODES[turn % 3 :][:1]:
                    yield game, config, num_envs, mode, "guards"
    if device == "cpu":  # many enough for a second thread
        yield "cartpole", {}, 8193, "same_step", "plain"
    else:
        yield *CROWD, 9, "same_step", "plain"
        yield *HUGE, 1, "same_step", "plain"
        yield *HUGE, 3, "next_step", "rows"


def outputs_apart(env: VecEnv) -> StepBuffers:
    """A buffers of tensors that each have an allocation of their own; guard bands need the buffers's own."""
    specs = {} if env.buffers_layout.guard_rows else env.buffers_layout.specs
    out = env.step_buffers(
        **{n: torch.empty(shape, dtype=kind, device=env.device) for n, (shape, kind) in specs.items()}
    )
    if out.final_obs is not None:  # only some of its rows are ever written
        out.final_obs.zero_()
    return out


def step_game(device: str, game: Game, config: dict[str, Any], num_envs: int, mode: Any, kind: str) -> str:
    """Make, reset, step past an end, reset some, close; the fingerprint of all that it gave."""
    env = VecEnv(
        gpu_vecenv.configure(game, **{"max_steps": MAX_STEPS, **config}),
        num_envs,
        device,
        autoreset_mode=mode,
        driver="cuda_core" if device == "cuda" else None,
        agents_as_envs=kind == "rows",
        guards=kind == "guards",
        end_on_nonfinite=kind == "guards",
    )
    digest, out = Digest(env.functions, num_envs), outputs_apart(env)

    def feed(*outputs: torch.Tensor, **info: torch.Tensor) -> None:
        digest.add_outputs(*outputs, info["active"], *([info["action_mask"]] if "action_mask" in info else []))
        if "final_obs" in info:
            digest.add_final_obs(info["final_obs"], info["_final_obs"])

    obs, info = env.reset(seed=1, out=out)
    feed(obs, **info)
    sampler = None if kind == "guards" else gpu_vecenv.Sampler(env)  # it takes no clocks with bands between them
    for step in range(TICKS):
        actions = env.sample_actions()
        if step % 3 == 1 and sampler is not None:
            parameters = torch.zeros((*env.buffers_layout.batch, sampler.num_parameters), device=device)
            if (mask := info.get("action_mask")) is not None:
                forbidden = ~mask & mask.any(-1, keepdim=True)  # a Box has no choices
                parameters[..., : mask.shape[-1]].masked_fill_(forbidden, torch.finfo(parameters.dtype).min)
            if step == 1:
                *outputs, info = env.step(sampler.sample(parameters).actions, out=out)
            else:  # a step that draws its actions is a kernel of its own
                _, (*outputs, info) = sampler.step(parameters, out=out)
        else:
            int64_actions = step % 3 == 2 and env.game.layout.action.discrete
            *outputs, info = env.step(actions.long() if int64_actions else actions, out=out)
        feed(*outputs, **info)
    some = torch.arange(num_envs, device=device) % 2 == 0
    obs, info = env.reset(seed=2, mask=some, out=out)
    feed(obs, **info)
    wrong = env.sample_actions()
    wrong.fill_(2**31 - 1 if env.game.layout.action.discrete else float("nan"))
    *outputs, info = env.step(wrong, out=out)  # refused: no game may see it
    feed(*outputs, **info)
    digest.add_outputs(env.observe())
    digest.add_state(env)
    name = f"{env.game.name()} {env.num_agents} agents {num_envs} {mode} {kind}"
    env.close()
    return f"{name} {digest.hex()}"


class WrittenProducts(TorchDispatchMode):
    """torch's matrix products write to memory that a kernel has written before.

    initcheck does not see what products on a Hopper's tensor cores store (by TMA), and would report whatever reads it.
    """

    PRODUCTS = tuple(getattr(torch.ops.aten, name) for name in ("mm", "addmm", "bmm", "baddbmm", "_addmm_activation"))
    # Overload -> the one that writes to the memory of `out`.
    INTO_MEMORY = MappingProxyType({"default": "out", "dtype": "dtype_out"})

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Multiply, once more if that made the memory."""
        kwargs, product, overload = kwargs or {}, operator.overloadpacket, operator._overloadname
        if product not in self.PRODUCTS:
            return operator(*args, **kwargs)
        if overload in self.INTO_MEMORY:
            kwargs = {**kwargs, "out": torch.empty_like(operator(*args, **kwargs))}
            operator = getattr(product, self.INTO_MEMORY[overload])
        kwargs["out"].fill_(torch.nan)
        return operator(*args, **kwargs)


def learn_game(device: str, learnt: Learnt) -> str:
    """Train without graphs, twice if opponents change; the fingerprint of the last advantages."""
    game, config, changes, others = learnt
    env = VecEnv(
        gpu_vecenv.configure(game, **{"max_steps": MAX_STEPS, **config}),
        33,
        device,
        autoreset_mode="next_step",
        driver="cuda_core" if device == "cuda" else None,
    )
    settings = {"num_steps": 5, "num_epochs": 1, "num_minibatches": 3, "hidden_sizes": (8,), "total_steps": 10**6}
    policy_kernels.MIN_STEP_ROWS = 0  # kernels layer by layer also where torch would be faster
    with WrittenProducts():
        trainer = Trainer(env, PPOConfig(**{**settings, **changes}), graphs=False, **others)
        for _ in range(2 if "opponents" in others else 1):
            trainer.train_iteration()
    digest = Digest(env.functions, env.num_envs)
    digest.add(trainer.rollout.advantages.transpose(0, 1))
    name = f"{env.game.name()} {env.num_agents} agents {' '.join(map(str, [*changes.values(), *others]))} learnt"
    trainer.close()
    return f"{name} {digest.hex()}"


def main() -> None:
    """Step them all."""
    parser = argparse.ArgumentParser(description="Steps every kernel at several shapes.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--part", type=int, default=0)
    parser.add_argument("--parts", type=int, default=1)
    given = parser.parse_args()
    stepped = 0
    for case in islice(cases(given.device), given.part, None, given.parts):
        print(step_game(given.device, *case), flush=True)
        stepped += 1
    for learnt in LEARNT[given.part :: given.parts]:
        print(learn_game(given.device, learnt), flush=True)
    print(f"stepped {stepped} environments")


if __name__ == "__main__":
    main()
