"""What a run has learned, taken up again: a policy for every role of a game, acting for all of its agents."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gpu_vecenv.compile.device import resolve_device
from gpu_vecenv.declare.env import Env
from gpu_vecenv.engine.data_manager import TORCH_TYPES
from gpu_vecenv.envs.registry import GAMES, configure, find_game
from gpu_vecenv.errors import AgentKeyError, CheckpointCorruptError, ConfigError, UnknownGameError, nearest
from gpu_vecenv.train.checkpoint import BEST, CheckpointFolder, load_checkpoint
from gpu_vecenv.train.policy import Policy, RoleView
from gpu_vecenv.train.ppo import PPOConfig, make_policy

CHECKPOINTS = "checkpoints"  # a run's folder of them


class GamePolicy(nn.Module):
    """Acts for all agents of a game, each by the policy of its role.

    ``policy[role]`` is the ``Policy`` of one role, as ``evaluate`` takes it. For observations without an agent axis,
    as Gymnasium's views of a game with one agent give them, call ``policy["agent"].act(obs)``.

    Attributes:
        game: The game.
        policies: Role -> its ``Policy``; roles that share one have the same object.
        configs: Role -> the hyper-parameters that its policy was trained with, where they are known.

    Args:
        game: The game.
        policies: Role -> policy; the roles that share one are joined by "+", as in "tagger+runner".
        configs: Likewise.

    Raises:
        ConfigError: Some role has no policy or several, or a policy is of other roles than its key says.
    """

    def __init__(
        self, game: Env, policies: Mapping[str, Policy], configs: Mapping[str, PPOConfig] | None = None
    ) -> None:
        super().__init__()
        known = list(game.layout.present_roles)
        if sorted(role for name in policies for role in name.split("+")) != sorted(known):
            raise ConfigError(f"policies are for {list(policies)}; expected each of the roles {known} once")
        for name, policy in policies.items():
            if not isinstance(policy, Policy):
                raise TypeError(f"policies[{name!r}] is a {type(policy).__name__}; expected a Policy")
            if "+".join(policy.view.roles) != name:
                raise ConfigError(f"policies[{name!r}] is of {'+'.join(policy.view.roles)!r}; expected the same roles")
        self.game = game
        self.policies = {role: policy for policy in policies.values() for role in policy.view.roles}
        self.configs = {role: config for name, config in (configs or {}).items() for role in name.split("+")}
        self._modules_of_roles = nn.ModuleList(policies.values())  # a dictionary's modules are not found by nn.Module

    def __getitem__(self, role: str) -> Policy:
        if role not in self.policies:
            raise AgentKeyError(f"no role with agents is called {role!r}; {nearest(str(role), self.policies)}")
        return self.policies[role]

    @property
    def device(self) -> torch.device:
        """Where it acts."""
        return next(iter(self.policies.values())).action_bounds.device

    @torch.no_grad()
    def forward(
        self,
        obs: torch.Tensor,
        action_mask: torch.Tensor | None = None,
        *,
        greedy: bool = True,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        """Actions of all agents, as ``VecEnv.step`` takes them. Waits for no device.

        Args:
            obs: (…, num_agents, *shape) float32 or uint8, as ``VecEnv`` gives it: padded to the widest role.
            action_mask: (…, num_agents, num_logits) bool, ``info["action_mask"]`` of games that have it; None allows
                every choice.
            greedy: Take the likeliest actions (of a Gaussian the mean) instead of drawing.
            generator: Of the draws, on the device of ``obs``; None takes torch's own.

        Returns:
            (…, num_agents[, heads]) int32 or, of a Box, (…, num_agents, k) float32; 0 where a role lacks a head.

        Raises:
            TypeError, ValueError: Dtype, shape or device of an argument is wrong.
        """
        game, action = self.game, self.game.layout.action
        row = (game.layout.num_agents, *game.layout.observation.shape)
        self._check("obs", obs, TORCH_TYPES[game.layout.observation.dtype], row)
        batch = tuple(obs.shape[: obs.ndim - len(row)])
        if action_mask is not None:
            if action.continuous:
                raise ValueError("action_mask is given; expected None, as actions of a Box are no choices")
            self._check("action_mask", action_mask, torch.bool, (game.layout.num_agents, action.num_logits), batch)
        kind = torch.float32 if action.continuous else torch.int32
        actions = torch.zeros((*batch, game.layout.num_agents, *action.shape), dtype=kind, device=obs.device)
        for policy in dict.fromkeys(self.policies.values()):
            view = policy.view
            where: tuple[Any, ...] = (..., view.agents, *view.obs_slice)
            mask = None if action_mask is None else view.mask(action_mask[..., view.agents, :])
            part = policy.act(obs[where], mask, greedy=greedy, generator=generator)
            if action.shape:
                actions[..., view.agents, : view.num_heads] = part
            else:
                actions[..., view.agents] = part
        return actions

    def _check(
        self, name: str, tensor: Any, dtype: torch.dtype, row: tuple[int, ...], batch: tuple[int, ...] | None = None
    ) -> None:
        """Raise TypeError or ValueError unless it is a tensor (*batch, *row), with any batch if that is None."""
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}; expected a torch tensor on {self.device}")
        if tensor.dtype != dtype:
            raise TypeError(f"{name} has dtype {tensor.dtype}; expected {dtype}")
        shape = tuple(tensor.shape)
        if shape[-len(row) :] != row or batch not in (None, shape[: -len(row)]):
            expected = ", ".join(map(str, (*(("…",) if batch is None else batch), *row)))
            raise ValueError(f"{name} has shape {shape}; expected ({expected})")
        if tensor.device != self.device:
            raise ValueError(f"{name} is on {tensor.device}; expected {self.device}, where the policy is")


def load_policy(
    run: str | Path,
    *,
    game: Env | None = None,
    networks: Mapping[str, nn.Module] | None = None,
    best: bool = False,
    device: str | torch.device | None = None,
) -> GamePolicy:
    """What a training run has learned, ready to act: in eval mode, without gradients. Nothing in a file is executed.

    Of a run of several processes the first one's file is enough, on any machine.

    Args:
        run: A run's folder, of which the newest checkpoint is taken, or one checkpoint file.
        game: The game, configured as in the run; None: the registered one of the run's name, with its configuration.
        networks: Name of a policy, as "tagger" or "tagger+runner" -> a module like the one it was trained with. It
            gets the weights. Needed for policies that were given a network of their own.
        best: Take the run's best checkpoint instead of the newest.
        device: Where to act; None: cuda if usable, else cpu.

    Raises:
        FileNotFoundError: There is no such file, or no checkpoint in the folder.
        CheckpointCorruptError: The file, or every one in the folder, is damaged or foreign. A warning names each newer
            one that is damaged where another is taken.
        UnknownGameError: No registered game has the run's name.
        ConfigError: ``game`` is another one than the run's, or weights do not fit their network.
    """
    path, tensors, manifest = _read(Path(run), best)
    where = resolve_device(device)
    configs = _configs(path, manifest)
    game = _game(path, manifest, game)
    networks = networks or {}
    if unknown := sorted(set(networks) - set(configs)):
        raise ConfigError(f"networks are for {unknown}; the policies in {path} are {list(configs)}")
    policies = {}
    for name, config in configs.items():
        prefix = f"policy.{name}."
        weights = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
        if bad := [key for key, tensor in weights.items() if not bool(tensor.isfinite().all())]:
            raise CheckpointCorruptError(f"{path} holds NaN or infinite numbers in {prefix}{', '.join(bad)}")
        policies[name] = _policy(path, game, name, config, networks.get(name), weights, where)
    policy = GamePolicy(game, policies, configs)
    policy.requires_grad_(False).eval()
    return policy


def _read(run: Path, best: bool) -> tuple[Path, dict[str, torch.Tensor], dict[str, Any]]:
    """The file that is meant, and what it holds."""
    if not run.is_dir():
        if best:
            raise ConfigError(f"best is True, but {run} is no folder of a run; expected one, or best=False")
        return (run, *load_checkpoint(run))
    folder = run / CHECKPOINTS if (run / CHECKPOINTS).is_dir() else run
    if best:
        return (folder / BEST, *load_checkpoint(folder / BEST))
    refused: list[Exception] = []
    for iteration in reversed(CheckpointFolder(folder).iterations()):
        path = folder / f"iteration-{iteration:08d}.safetensors"  # rank 0's: all ranks have the same weights
        try:
            tensors, manifest = load_checkpoint(path)
        except (CheckpointCorruptError, FileNotFoundError) as error:  # a run that goes on removes old ones
            refused.append(error)
            continue
        for refusal in refused:
            warnings.warn(f"{refusal}; iteration {iteration} is taken instead", stacklevel=3)
        return path, tensors, manifest
    kind = CheckpointCorruptError if refused else FileNotFoundError
    raise kind(f"no usable checkpoint in {folder}: {'; '.join(map(str, refused)) or 'it has none'}")


def _configs(path: Path, manifest: Mapping[str, Any]) -> dict[str, PPOConfig]:
    """Of each policy in the file."""
    kinds = {"game": str, "game_config": dict, "policies": dict}
    if wrong := [key for key, kind in kinds.items() if not isinstance(manifest.get(key), kind)]:
        raise CheckpointCorruptError(f"{path} is no checkpoint of a training run: it lacks {', '.join(wrong)}")
    known = {field.name for field in dataclasses.fields(PPOConfig)}
    configs = {}
    for name, values in manifest["policies"].items():
        if not isinstance(values, dict):
            raise CheckpointCorruptError(
                f"{path}: the configuration of policy {name!r} is {values!r:.80}; expected keys"
            )
        if unknown := sorted(set(values) - known):
            raise ConfigError(
                f"{path}: policy {name!r} has unknown configuration keys {unknown}; it was "
                f"made with {manifest.get('made_with')}, maybe a newer version"
            )
        configs[name] = PPOConfig(**values)
    return configs


def _game(path: Path, manifest: Mapping[str, Any], given: Env | None) -> Env:
    """The run's game, configured; one that is given is compared with it."""
    name, config = manifest["game"], manifest["game_config"]
    if given is not None:
        if given.name() != name or configure(type(given), **config) != given:
            raise ConfigError(f"{path} is of {name} with {config}; game is {given!r}: expected the same")
        return given
    own = [kind for kind in GAMES.values() if kind.name() == name]  # it may be registered by another name
    try:
        return configure(own[0] if own else find_game(name), **config)
    except UnknownGameError as error:
        raise UnknownGameError(
            f"{path} is of a game that is not registered: {error}. Import the module that declares it and register it "
            "first, or give load_policy the game: game=MyGame(…)"
        ) from error


def _policy(
    path: Path,
    game: Env,
    name: str,
    config: PPOConfig,
    network: nn.Module | None,
    weights: Mapping[str, torch.Tensor],
    device: torch.device,
) -> Policy:
    given = network is not None
    if not given:
        _check_layers(path, game, name, config, weights)
    with torch.random.fork_rng(devices=[]):  # first weights are drawn, and the caller's draws are the caller's
        policy = make_policy(game, name.split("+"), config, network, device)
    try:
        policy.load_weights(weights)
    except ConfigError as error:
        advice = (
            f"networks[{name!r}] is not like the network that it was trained with"
            if given
            else f"a policy that was trained with a network of its own needs one: networks={{{name!r}: module}}"
        )
        raise ConfigError(f"{path}: {advice}. {error}") from error
    return policy


def _check_layers(path: Path, game: Env, name: str, config: PPOConfig, weights: Mapping[str, torch.Tensor]) -> None:
    """Whether the hidden layers that the file describes are in it; so that no network is made that is larger than it.

    Raises:
        ConfigError: They are not.
    """
    sizes = [math.prod(RoleView(game, name.split("+")).obs_shape), *config.hidden_sizes]
    shapes = [tuple(tensor.shape) for tensor in weights.values()]
    lacking = [(after, before) for before, after in pairwise(sizes) if (after, before) not in shapes]
    if lacking or len(sizes) > len(shapes) + 1:
        raise ConfigError(
            f"{path}: a policy that was trained with a network of its own needs one: networks={{{name!r}: module}}. "
            f"Its hidden_sizes are {config.hidden_sizes!r:.80}, but no weights have the shapes {lacking[:3]!r:.200} "
            f"among {dict(zip(weights, shapes, strict=True))!r:.800}"
        )
