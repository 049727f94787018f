"""TorchRL: environments as an ``EnvBase`` of batch size (num_envs,), roles as agent groups with their own spaces.

TorchRL resets by mask: the autoreset mode is fixed to "disabled". Observations, rewards and masks are views of the step
buffers; one copy concatenates actions, another the action masks of MultiDiscrete spaces. The adapter does not
synchronise with the device; TorchRL does once per step, to check for done environments.

A discrete action that does not exist, or NaN, truncates its environment with reward NaN, see
``env.env.vec_env.faults()``; Box actions are clipped. If the game masks actions, random actions follow the action spec,
whose mask is updated; with transforms add TorchRL's ActionMask for each group.
"""

from __future__ import annotations

from typing import Any

import torch
from gymnasium.spaces import Box, Discrete

from gpu_vecenv import BatchedParallelEnv
from gpu_vecenv.adapters import check_argument, requires_extra, split_config
from gpu_vecenv.errors import UnsupportedGameError, refuse_counterparts

with requires_extra("torchrl"):
    from tensordict import TensorDict, TensorDictBase
    from torchrl import data
    from torchrl.envs import EnvBase
    from torchrl.envs.utils import check_marl_grouping

FLAGS = ("done", "terminated", "truncated")
OTHER_KEYS = {*FLAGS, "collector", "next", "state"}  # root keys, not allowed as group names


class TorchRLEnv(EnvBase):
    """Environments as one batched EnvBase; ``group_map`` is role -> names of its agents.

    Root keys: "done", "terminated" and "truncated", (num_envs, 1) bool, of the environment: done when no agent is
    active, truncated if that step truncated an agent. With ``return_state``, "state" (num_envs, elements).

    Keys of each group, (num_envs, agents, …): "observation"; "action", int64 indices, because one-hot would have to be
    converted; "reward" (…, 1) float32; "mask" (…) bool, the agents whose next action counts; "done", "terminated"
    and "truncated" (…, 1) bool, of each agent, for loss modules: an agent that left early stays "done" and "terminated"
    until the reset. They are in the observation spec, because TorchRL's collectors treat any key of the done spec as
    the end of the environment's trajectory. If the game masks actions, "action_mask" (…, choices), for MultiDiscrete
    (…, heads, choices) or, if heads differ in size, (…, choices of all heads); a Box has none.

    Args:
        env: With ``group_by="role"`` and ``autoreset_mode="disabled"``.
        return_state: Whether there is a "state" of all observations, for centralised critics.

    Raises:
        TypeError, ValueError: ``env`` is of another class, grouping or autoreset mode.
        UnsupportedGameError: A role has the name of a root key of TorchRL.
    """

    def __init__(self, env: BatchedParallelEnv, *, return_state: bool = False) -> None:
        if not isinstance(env, BatchedParallelEnv):
            raise TypeError(f"env is a {type(env).__name__}; expected a gpu_vecenv.BatchedParallelEnv")
        found = (env.group_by, env.vec_env.autoreset_mode, env.vec_env.agents_as_envs)
        if found != ("role", "disabled", False):
            raise ValueError(
                f'env has group_by, autoreset_mode, agents_as_envs = {found}; expected ("role", "disabled", False)'
            )
        check_argument("return_state", return_state, isinstance(return_state, bool), "True or False")
        if wrong := sorted(OTHER_KEYS & set(env.possible_agents)):
            raise UnsupportedGameError(f"roles {wrong} have names of TorchRL's root keys; expected other names")
        super().__init__(device=env.device, batch_size=[env.num_envs])
        self.env, self.return_state = env, return_state
        names, slices = list(env.game.layout.agent_names), env.game.layout.role_slices
        self.group_map = {role: names[slices[role]] for role in env.possible_agents}
        check_marl_grouping(self.group_map, names)
        self._seed: int | None = None  # of the next reset
        specs: dict[str, dict[str, Any]] = {"observation": {}, "action": {}, "reward": {}}
        specs["done"] = {flag: _flag(env.num_envs, 1) for flag in FLAGS}
        for role, agents in self.group_map.items():
            batch, action = (env.num_envs, len(agents)), _spec(env.action_space(role))
            own = {"mask": _flag(), **{flag: _flag(1) for flag in FLAGS}}
            own["observation"] = _spec(env.observation_space(role))
            if env.game.layout.masks_actions and not isinstance(env.action_space(role), Box):
                own["action_mask"] = _flag(*action.to_one_hot_spec().shape)
            specs["observation"][role] = data.Composite(own).expand(batch)
            specs["action"][role] = data.Composite(action=action).expand(batch)
            specs["reward"][role] = data.Composite(reward=data.Unbounded(1)).expand(batch)
        if return_state:
            specs["observation"]["state"] = _spec(env.state_space).expand(env.num_envs, *env.state_space.shape)
        for name, entries in specs.items():
            setattr(self, f"{name}_spec", data.Composite(entries, shape=self.batch_size).to(self.device))

    def _reset(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        options = None if mask is None else {"reset_mask": mask.reshape(self.batch_size)}
        observations, extras = self.env.reset(seed=self._seed, options=options)
        self._seed = None
        # TorchRL keeps its values of environments that are not reset, and adds the root flags, all False.
        none = {role: torch.zeros_like(active) for role, active in extras["active"].items()}
        return self._observed(observations, none, none, extras)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        actions = {role: tensordict.get((role, "action")) for role in self.group_map}
        observations, rewards, terminations, truncations, extras = self.env.step(actions)
        output = self._observed(observations, terminations, truncations, extras)
        for role, reward in rewards.items():
            output.get(role).set("reward", reward.unsqueeze(-1))
        done = ~self.env.vec_env.active.any(1, keepdim=True)
        truncated = done & torch.cat(tuple(truncations.values()), 1).any(1, keepdim=True)
        return output.update({"done": done, "terminated": done & ~truncated, "truncated": truncated})

    def _observed(self, observations: Any, terminations: Any, truncations: Any, extras: Any) -> TensorDict:
        output: dict[str, Any] = {"state": self.env.state()} if self.return_state else {}
        for role, agents in self.group_map.items():
            active, truncated = extras["active"][role], truncations[role]
            terminated = terminations[role] | ~(active | truncated)
            own = dict(zip(FLAGS, (flag.unsqueeze(-1) for flag in (~active, terminated, truncated)), strict=True))
            own |= {"observation": observations[role], "mask": active}
            if (mask := extras.get("action_mask", {}).get(role)) is not None:
                if isinstance(mask, tuple):
                    mask = torch.cat(mask, -1).reshape(self.full_observation_spec[role, "action_mask"].shape)
                self.full_action_spec[role, "action"].update_mask(mask)
                own["action_mask"] = mask
            output[role] = TensorDict(own, (*self.batch_size, len(agents)), device=self.device)
        return TensorDict(output, self.batch_size, device=self.device)

    def _set_seed(self, seed: int | None) -> None:
        self._seed = seed

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Let go of all memory."""
        self.env.close()
        super().close(raise_if_closed=raise_if_closed)


def _flag(*shape: int) -> Any:
    return data.Categorical(2, shape, dtype=torch.bool)


def _spec(space: Any) -> Any:
    if isinstance(space, Box):
        low, high = torch.from_numpy(space.low), torch.from_numpy(space.high)
        bounded = space.is_bounded("both")
        return data.Bounded(low, high, dtype=low.dtype) if bounded else data.Unbounded(low.shape, dtype=low.dtype)
    sizes = [int(space.n)] if isinstance(space, Discrete) else space.nvec.tolist()
    # As TorchRL does with Gymnasium's spaces. MultiCategorical makes a Python object for each number of each agent.
    return data.Categorical(sizes[0], space.shape) if len(set(sizes)) == 1 else data.MultiCategorical(sizes)


@refuse_counterparts
def make(game: Any, num_envs: int, device: Any = None, *, return_state: bool = False, **config: Any) -> TorchRLEnv:
    """``num_envs`` environments of a game; ``config`` as for ``gpu_vecenv.BatchedParallelEnv``."""
    game, config = split_config(game, config, group_by="role", autoreset_mode="disabled")
    return wrap(BatchedParallelEnv(game, num_envs, device, **config), return_state=return_state)


def wrap(env: BatchedParallelEnv, *, return_state: bool = False) -> TorchRLEnv:
    """A BatchedParallelEnv with ``group_by="role"`` and ``autoreset_mode="disabled"`` as TorchRL's EnvBase."""
    return TorchRLEnv(env, return_state=return_state)
