"""RLlib: one policy for all agents as rows of a vector env (``shared_policy``), or one per role (``policy_per_role``).

RLlib works in NumPy. With ``shared_policy`` an env runner steps all its environments at once, for one copy of the
outputs to pinned memory and one synchronisation. It expects the first observation of an episode one step after the end:
the autoreset mode is fixed to "next_step". With ``policy_per_role`` each environment is a separate object, by default
on the CPU: RLlib supports several policies only with multi-agent environments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gymnasium.vector import VectorEnv, VectorWrapper

from gpu_vecenv import Env, GymnasiumVectorEnv, parallel_env
from gpu_vecenv.adapters import checked_vector_env, requires_extra, split_config, unsupported
from gpu_vecenv.errors import ConfigError, refuse_counterparts

with requires_extra("rllib"):
    from ray.rllib.algorithms import AlgorithmConfig
    from ray.rllib.env.multi_agent_env import MultiAgentEnv

VIEW: Any = {"output": "numpy", "autoreset_mode": "next_step"}


class RLlibVectorEnv(VectorWrapper):
    """Row ``e * num_agents + a`` is agent ``a`` of environment ``e``; all rows of an environment end together.

    When an agent ends before its environment, RLlib would start an episode without an active agent, which could extend
    into the next episode. Instead the row has zero observations and rewards until the environment ends, and terminates
    then. Its return is correct, its length is the environment's, and an early truncation counts as a termination.

    Args:
        env: A Gymnasium view with ``output="numpy"`` and "next_step". Or RLlib's env_config: "game", "num_envs" (which
            counts rows and comes from ``num_envs_per_env_runner``), and arguments of ``GymnasiumVectorEnv``.

    Raises:
        TypeError, ValueError: ``env`` is of another class or mode, or "num_envs" is not a multiple of the agents.
        UnsupportedGameError: The game masks actions, or its roles have different action sizes.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any] | Mapping[str, Any]) -> None:
        if isinstance(env, Mapping):
            env = _view(**env)
        super().__init__(checked_vector_env(env, "RLlib's single-agent runner", output="numpy", mode="NEXT_STEP"))
        self._by_env = (-1, env.unwrapped.num_agents)  # type: ignore[attr-defined]

    def step(self, actions: Any) -> Any:
        """One step, see ``GymnasiumVectorEnv.step``."""
        obs, rewards, terminations, truncations, info = self.env.step(actions)
        dones = (terminations | truncations).reshape(self._by_env)
        left = (dones & ~dones.all(1, keepdims=True)).ravel()
        obs[left], terminations[left], truncations[left] = 0, False, False
        return obs, rewards, terminations, truncations, info


class RLlibParallelEnv(MultiAgentEnv):
    """One environment. An agent that ends is in the dictionaries and ``agents`` of that step for the last time.

    When the last agents are truncated, only "__all__" is set: with a flag for each agent RLlib would treat the episode
    as terminated and not bootstrap.

    Args:
        config: RLlib's env_config: "game", and arguments of ``gpu_vecenv.parallel_env``.

    Raises:
        UnsupportedGameError: The game masks actions.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        # RLlib's seeds of neighbouring env runners overlap; first_env_index separates their random streams.
        stream = getattr(config, "worker_index", None) or 0
        self.env = parallel_env(**{"device": "cpu", "first_env_index": stream, **config, "output": "numpy"})
        if self.env.game.layout.masks_actions:
            raise unsupported("RLlib", "action masks", "them")
        self.possible_agents, self.agents = self.env.possible_agents, list(self.env.possible_agents)
        self.observation_spaces, self.action_spaces = self.env.observation_spaces, self.env.action_spaces
        self.metadata, self.render_mode = self.env.metadata, self.env.render_mode

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Start an episode: observations and infos of all agents."""
        self.agents = list(self.possible_agents)
        return self.env.reset(seed, options)

    def step(self, action_dict: Mapping[str, Any]) -> Any:
        """Observations, rewards, terminateds, truncateds and infos of the agents active in this step."""
        obs, rewards, terminateds, truncateds, infos = self.env.step(action_dict)
        self.agents = list(obs)
        ended, truncated = not self.env.agents, any(truncateds.values())
        if ended:
            truncateds = dict.fromkeys(truncateds, False)
        terminateds["__all__"], truncateds["__all__"] = ended and not truncated, ended and truncated
        return obs, rewards, terminateds, truncateds, infos

    def render(self) -> Any:
        """A frame, or None without a render mode."""
        return self.env.render()

    def close(self) -> None:
        """Free all memory."""
        self.env.close()


def shared_policy(config: Any, game: Any, num_envs: int, device: Any = None, **arguments: Any) -> Any:
    """Set ``config``, an AlgorithmConfig, to train one policy on agents as rows; other arguments as for ``make``.

    Each env runner has ``num_envs`` environments; ``device`` None takes cuda if Ray assigned a GPU, else cpu.
    """
    game, arguments = _checked(config, game, arguments)
    config.environment(RLlibVectorEnv, env_config={"game": game, "device": device, **arguments})
    count = num_envs * game.layout.num_agents
    return config.env_runners(num_envs_per_env_runner=count, gym_env_vectorize_mode="vector_entry_point")


def policy_per_role(config: Any, game: Any, num_envs: int = 1, device: Any = "cpu", **arguments: Any) -> Any:
    """Set ``config`` to train one policy per role, named after it; ``arguments`` as for ``gpu_vecenv.parallel_env``."""
    game, arguments = _checked(config, game, arguments)
    config.environment(RLlibParallelEnv, env_config={"game": game, "device": device, **arguments})
    # The check seeds each environment with 42: without a seed of the run, all would play the same episodes.
    config.environment(disable_env_checking=True)
    config.env_runners(num_envs_per_env_runner=num_envs, gym_env_vectorize_mode="sync")
    policies = {role for role, agents in game.layout.roles.items() if agents}
    return config.multi_agent(policies=policies, policy_mapping_fn=lambda agent, *_, **__: agent.rpartition("_")[0])


@refuse_counterparts
def make(game: Any, num_envs: int, device: Any = None, **config: Any) -> RLlibVectorEnv:
    """``num_envs`` environments as ``shared_policy`` uses them; ``config`` as for ``GymnasiumVectorEnv``."""
    game, config = split_config(game, config, **VIEW)
    return wrap(GymnasiumVectorEnv(game, num_envs, device, **config))


def wrap(env: VectorEnv[Any, Any, Any]) -> RLlibVectorEnv:
    """A Gymnasium view with ``output="numpy"`` and "next_step" for RLlib's single-agent runner."""
    return RLlibVectorEnv(env)


def _view(game: Any, num_envs: int = 0, **arguments: Any) -> GymnasiumVectorEnv:
    game, arguments = split_config(game, arguments, **VIEW)
    num_agents = game.layout.num_agents
    if num_envs < 1 or num_envs % num_agents:
        raise ConfigError(
            f'num_envs is {num_envs} rows; expected gym_env_vectorize_mode="vector_entry_point" and '
            f"num_envs_per_env_runner a multiple of {num_agents}: each agent is a row"
        )
    return GymnasiumVectorEnv(game, num_envs // num_agents, **arguments)


def _checked(config: Any, game: Any, arguments: Mapping[str, Any]) -> tuple[Env, dict[str, Any]]:
    """The configured game, since names registered here are unknown in other processes; and the other arguments."""
    if not isinstance(config, AlgorithmConfig):
        raise TypeError(f"config is {config!r}; expected an AlgorithmConfig, for example PPOConfig()")
    known, rest = split_config(game, arguments)
    if known.masks_actions:
        raise unsupported("RLlib", "action masks", "them")
    return known, rest
