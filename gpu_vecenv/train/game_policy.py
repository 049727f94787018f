"""Load the policies of a training run; GamePolicy acts for all agents of a game."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gpu_vecenv.compile.device import resolve_device
from gpu_vecenv.declare.arguments import check_flag, check_kind
from gpu_vecenv.declare.env import Env
from gpu_vecenv.declare.randomize import with_ranges
from gpu_vecenv.engine.arguments import shared_field_arrays
from gpu_vecenv.engine.data_manager import TORCH_TYPES
from gpu_vecenv.envs.registry import GAMES, configure, find_game, stored_configuration
from gpu_vecenv.errors import AgentKeyError, CheckpointCorruptError, ConfigError, UnknownGameError, nearest
from gpu_vecenv.train.algorithms import algorithm_of
from gpu_vecenv.train.checkpoint import BEST, CHECKPOINTS, CheckpointFolder, load_checkpoint, newest_usable
from gpu_vecenv.train.encoders import make_encoder
from gpu_vecenv.train.fixed_policy import FUNCTION, FixedPolicy, stored_actors
from gpu_vecenv.train.learner_config import LearnerConfig
from gpu_vecenv.train.policy import Policy, check_tensor, num_inputs
from gpu_vecenv.train.populations import check_member, stored_members, stored_populations
from gpu_vecenv.train.recurrent import recurrent_weights
from gpu_vecenv.train.role_view import RoleView, check_each_agent_once, role_of
from gpu_vecenv.train.stored_config import stored_configs, with_defaults

MEMBER_OF_RUN = re.compile(r"(.+):([0-9]{1,6})", re.DOTALL)


class GamePolicy(nn.Module):
    """Acts for all agents of a game, each with its policy.

    ``policy[name]`` is the ``Policy`` of a role, or of an agent, which ``evaluate`` accepts. For observations without
    an agent axis, such as those of Gymnasium's views of a game with one agent, call ``policy["agent"].act(obs)``; they
    are tensors: ``torch.as_tensor(obs)`` of an array.

    Recurrent policies have a state, which the caller keeps: start with ``initial_state``, give each call the state that
    the one before returned, and set the rows of agents to 0 whose observation is the first of an episode.

    Attributes:
        game: The game. Of ``load_policy``, ``game.randomize`` has the ranges of the checkpoint, which a curriculum may
            have changed.
        policies: Role -> its ``Policy``, or agent -> its ``Policy`` where those of a role do not share one. Those that
            share one have the same object. ``evaluate`` takes it.
        configs: The hyperparameters that they were trained with, if known, under the same keys.
        recurrent_state_size: Numbers in an agent's state, of the policy with most; 0 if none is recurrent.
        shared: Values that the game's shared fields had at the checkpoint, which a curriculum may have changed: play
            with them in ``VecEnv(policy.game, num_envs, arrays=policy.shared)``.
        iteration: Of the checkpoint that ``load_policy`` took; None: it took none.

    Args:
        game: The game.
        policies: Role or agent -> policy; those that share one are joined by "+", as in "tagger+runner".
        configs: Hyperparameters under the same keys.
        shared: Values of shared fields.

    Raises:
        TypeError: ``game`` is no Env, ``policies`` no mapping, or a policy no Policy.
        ConfigError: An agent has no policy or several, a policy's name differs from its key, or ``shared`` has other
            names, shapes or dtypes than the game's shared fields.

    Example:
        >>> env = gpu_vecenv.make("tag_gridworld", num_envs=8)
        >>> trainer = gpu_vecenv.Trainer(env)
        >>> policy = gpu_vecenv.GamePolicy(env.game, trainer.policies)
        >>> policy(env.reset(seed=1)[0]).shape
        torch.Size([8, 5])
    """

    def __init__(
        self,
        game: Env,
        policies: Mapping[str, Policy],
        configs: Mapping[str, LearnerConfig] | None = None,
        shared: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        super().__init__()
        optional = {"configs": configs, "shared": shared}
        kinds = {"game": (game, Env), "policies": (policies, Mapping), **{k: (v, Mapping) for k, v in optional.items()}}
        for name, (value, kind) in kinds.items():
            if not isinstance(value, kind) and not (name in optional and value is None):
                raise TypeError(f"{name} is a {type(value).__name__}; expected a {kind.__name__}")
        check_each_agent_once(game, policies)
        for name in configs or {}:
            check_kind("the name of a policy in configs", name, str, f"one of {list(policies)}")
        for name, policy in policies.items():
            if not isinstance(policy, Policy):
                raise TypeError(f"policies[{name!r}] is a {type(policy).__name__}; expected a Policy")
            if policy.view.name != name:
                raise ConfigError(f"policies[{name!r}] is of {policy.view.name!r}; expected the same name")
        if shared:
            shared_field_arrays(game, shared)  # raises for other names, shapes and dtypes
        self.game, self.shared = game, dict(shared or {})
        self.iteration: int | None = None
        self.policies = {name: policy for policy in policies.values() for name in policy.view.names}
        self.configs = {name: config for key, config in (configs or {}).items() for name in key.split("+")}
        self.recurrent_state_size: int = max(policy.acting_state_size for policy in policies.values())
        self._registered = nn.ModuleList(policies.values())  # nn.Module does not register those of a dict

    def __getitem__(self, name: str) -> Policy:
        own = self.policies_of(name)
        if len({id(policy) for policy in own.values()}) > 1:
            raise AgentKeyError(f"the agents of {name!r} have several policies; expected one of {list(own)}")
        return next(iter(own.values()))

    def policies_of(self, name: str) -> dict[str, Policy]:
        """Name -> policy for the agents of a role, or for an agent: those of ``policies`` that are of them.

        Raises:
            AgentKeyError: There is no such role with agents, nor such an agent.
        """
        layout = self.game.layout
        if name in self.policies:
            return {name: self.policies[name]}
        if layout.roles.get(name):
            return {key: policy for key, policy in self.policies.items() if role_of(self.game, key) == name}
        if name in layout.agent_names:
            return {name: self.policies[layout.agent_roles[layout.agent_names.index(name)]]}
        raise AgentKeyError(f"no role {name!r} with agents; {nearest(str(name), self.policies)}")

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(iter(self.policies.values())).action_bounds.device

    def initial_state(self, *batch: int) -> torch.Tensor:
        """The state before the first observations, (*batch, num_agents, recurrent_state_size) float32: zeros.

        Raises:
            ConfigError: No policy is recurrent.
        """
        if not self.recurrent_state_size:
            raise ConfigError("initial_state: no policy is recurrent; call the policy without a state")
        return torch.zeros((*batch, self.game.layout.num_agents, self.recurrent_state_size), device=self.device)

    @torch.no_grad()
    def forward(
        self,
        obs: torch.Tensor,
        action_mask: torch.Tensor | None = None,
        *,
        state: torch.Tensor | None = None,
        greedy: bool = False,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Actions of all agents, in the format of ``VecEnv.step``. No device synchronisation.

        Args:
            obs: (…, num_agents, *shape) float32 or uint8, the observations of ``VecEnv``, padded to the widest role.
            action_mask: (…, num_agents, num_logits) bool, ``info["action_mask"]`` of games with masks; None allows
                every choice.
            state: Of recurrent policies, (…, num_agents, recurrent_state_size) float32, see above; else None.
            greedy: Take the most likely actions (of a Box the mean of the distribution) instead of sampling.
            generator: For sampling, on the device of ``obs``; None uses torch's default.

        Returns:
            (…, num_agents[, heads]) int32 or, if a role has a Box, (…, num_agents, k) float32; 0 for heads that a role
            lacks. If a policy is recurrent a pair of them and the next state, a new tensor like ``state``.

        Raises:
            TypeError, ValueError: Dtype, shape or device of an argument is wrong.
            ConfigError: ``state`` is missing, or no policy is recurrent.
        """
        game, action = self.game, self.game.layout.action
        row = (game.layout.num_agents, *game.layout.observation.shape)
        check_tensor("obs", obs, self.device, (TORCH_TYPES[game.layout.observation.dtype],), row)
        batch = tuple(obs.shape[: obs.ndim - len(row)])
        if action_mask is not None:
            if action.continuous:
                raise ValueError("action_mask is given; expected None, as actions of a Box have no masks")
            choices = (game.layout.num_agents, action.num_logits)
            check_tensor("action_mask", action_mask, self.device, (torch.bool,), choices, batch)
        if (state is None) != (self.recurrent_state_size == 0):
            raise ConfigError(
                "a policy is recurrent: expected state=, at first policy.initial_state(num_envs)"
                if state is None
                else "state is given; expected None, as no policy is recurrent"
            )
        if state is not None:
            row = (game.layout.num_agents, self.recurrent_state_size)
            check_tensor("state", state, self.device, (torch.float32,), row, batch)
        next_state = None if state is None else torch.zeros_like(state)
        shape = (*batch, game.layout.num_agents, *action.shape)
        actions = torch.zeros(shape, dtype=TORCH_TYPES[action.dtype], device=obs.device)
        for policy in dict.fromkeys(self.policies.values()):
            view = policy.view
            where: tuple[Any, ...] = (..., view.agents, *view.obs_slice)
            mask = None if action_mask is None else view.mask(action_mask[..., view.agents, :])
            own: tuple[Any, ...] = (..., view.agents, slice(policy.acting_state_size))
            own_state = None if state is None or not policy.acting_state_size else state[own]
            part = policy.act(obs[where], mask, state=own_state, greedy=greedy, generator=generator)
            if isinstance(part, tuple):
                assert next_state is not None
                part, next_state[own] = part
            if action.shape:
                actions[..., view.agents, : view.num_heads] = part.to(actions.dtype)
            else:
                actions[..., view.agents] = part.to(actions.dtype)
        return actions if next_state is None else (actions, next_state)


def load_policy(
    run: str | Path,
    *,
    game: Env | None = None,
    networks: Mapping[str, nn.Module] | None = None,
    best: bool = False,
    member: int | None = None,
    device: str | torch.device | None = None,
) -> GamePolicy:
    """Load the policies of a training run, in eval mode and without gradients. Nothing in a file is executed.

    Of a run with several processes, the file of rank 0 is enough, on any machine. A function that acted in place of a
    policy, see ``PolicySpec``, is not in a checkpoint: the policy is there, but raises ConfigError where it has to act.

    Args:
        run: A run folder, whose newest checkpoint is loaded, or one checkpoint file. "runs/tag:2" is of "runs/tag" the
            ``member`` 2.
        game: The game, configured as in the run; None uses the registered game and configuration of the run.
        networks: Name of a policy, such as "tagger" or "tagger+runner" -> a module like the one it was trained with,
            into which the weights are loaded. Required for policies that do not use the default network.
        best: Load the run's best checkpoint instead of the newest.
        member: Of a run with populations: the number of the member of each of them, beginning with 0. A population of
            fewer members begins anew: of 2 taggers and 4 runners 3 is tagger 1 and runner 3.
        device: Device to act on; None: cuda if usable, else cpu.

    Raises:
        FileNotFoundError: There is no such file, or no checkpoint in the folder.
        CheckpointCorruptError: The file, or every file in the folder, is damaged or not a checkpoint. A warning names
            each damaged file for which an older one is used.
        CheckpointVersionError: Another version of the library wrote it, in another format.
        UnknownGameError: The run's game is not registered.
        ConfigError: The run has populations and no ``member`` is given, or it has no such member; ``game`` differs from
            the run's, the weights do not match their network, or the run has options
            that this version lacks. Options that a run of an older version lacks have their defaults.

    Example:
        >>> env = gpu_vecenv.make("cartpole", num_envs=8)
        >>> path = gpu_vecenv.Trainer(env).save("first.safetensors")  # or the folder of gpu-vecenv train, runs/first
        >>> policy = gpu_vecenv.load_policy(path)
        >>> policy(env.reset(seed=1)[0]).shape
        torch.Size([8, 1])
    """
    check_kind("run", run, (str, Path), "the path of a run's folder or of a checkpoint")
    check_kind("game", game, Env, "a configured Env", optional=True)
    check_kind("networks", networks, Mapping, "a mapping, name of a policy -> module", optional=True)
    check_flag("best", best)
    run, member = run_and_member(run, member)
    path, tensors, manifest = read_run(run, best)
    where = resolve_device(device)
    configs = _configs(path, manifest)
    game = _game(path, manifest, game)
    if (ranges := tensors.get("curriculum.ranges")) is not None:
        if ranges.shape != (expected := (len(game.layout.randomized), 3)):
            raise CheckpointCorruptError(
                f"{path}: curriculum.ranges has shape {tuple(ranges.shape)}; expected {expected}"
            )
        game = with_ranges(game, ranges.tolist())
    populations = stored_populations(manifest, str(path))
    if populations and member is None:
        most = max(populations.values()) - 1
        raise ConfigError(
            f"{path} has several members of {', '.join(populations)}; expected member=0 to {most}, or as the run "
            f"{run}:0 to {run}:{most}"
        )
    if member is not None:
        check_member(populations, member)
    stored = stored_members(populations, configs, str(path))
    own = {name: names[(member or 0) % len(names)] for name, names in stored.items()}
    configs = {name: configs[stored_name] for name, stored_name in own.items()}
    networks = networks or {}
    if unknown := sorted(set(networks) - set(configs), key=str):
        raise ConfigError(f"networks has {unknown}; expected some of {list(configs)}, the policies in {path}")
    policies, actors = dict[str, Policy](), stored_actors(manifest, str(path))
    for name, config in configs.items():
        if name in actors:
            actor: Any = None if actors[name] == FUNCTION else actors[name]
            policies[name] = FixedPolicy(game, name.split("+"), actor, squash=config.squash, device=where)
            continue
        prefix = f"policy.{own[name]}."
        weights = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
        if bad := [key for key, tensor in weights.items() if not bool(tensor.isfinite().all())]:
            raise CheckpointCorruptError(
                f"{path} has NaN or infinite values in {prefix}{', '.join(bad)}; use another checkpoint"
            )
        policies[name] = _policy(path, game, name, config, networks.get(name), weights, where)
    fields = [field.name for field in game.layout.fields if field.shared and f"shared.{field.name}" in tensors]
    policy = GamePolicy(game, policies, configs, {name: tensors[f"shared.{name}"] for name in fields})
    policy.iteration = manifest.get("iteration")
    policy.requires_grad_(False).eval()
    return policy


def run_and_member(run: str | Path, member: int | None = None) -> tuple[Path, int | None]:
    """The path of a run, and the number of the member in "RUN:2", where there is no such file; else ``member``.

    Raises:
        ConfigError: There are two numbers.
    """
    found = MEMBER_OF_RUN.fullmatch(str(run))
    if found is None or Path(run).exists():
        return Path(run), member
    if member is not None:
        raise ConfigError(f"run is {str(run)!r} and member is {member}; expected one of the two numbers")
    return Path(found[1]), int(found[2])


def populations_of_run(run: str | Path, best: bool = False) -> dict[str, int]:
    """Policy -> number of members, of the populations of a run; errors as of ``load_policy``."""
    path, _, manifest = read_run(run_and_member(run)[0], best)
    return stored_populations(manifest, str(path))


def read_run(run: Path, best: bool) -> tuple[Path, dict[str, torch.Tensor], dict[str, Any]]:
    """The checkpoint of a run folder, or of this file, its tensors and its manifest; errors as of ``load_policy``."""
    if not run.is_dir():
        if best:
            raise ConfigError(f"best is True, but {run} is not a run folder; expected one, or best=False")
        if not run.exists():
            raise FileNotFoundError(f"no run at {run}; expected the folder of a run, or a checkpoint file")
        return (run, *load_checkpoint(run))
    folder = run / CHECKPOINTS if (run / CHECKPOINTS).is_dir() else run
    try:
        if best and CheckpointFolder(folder).begun() and not (folder / BEST).exists():
            raise FileNotFoundError(f"{run} has no best checkpoint, as it made no evaluations: leave out best")
        if best:
            return (folder / BEST, *load_checkpoint(folder / BEST))
        files = CheckpointFolder(folder)  # rank 0's: all ranks have the same weights
        found = reversed(files.iterations())
        iteration, loaded = newest_usable(found, lambda k: load_checkpoint(files.path(k)), f"in {folder}")
    except FileNotFoundError as error:
        if runs := sorted(path.parent.name for path in run.glob(f"*/{CHECKPOINTS}")):
            raise FileNotFoundError(f"{error}; the folder has runs, expected one of them: {', '.join(runs)}") from None
        raise
    return (files.path(iteration), *loaded)


def _configs(path: Path, manifest: Mapping[str, Any]) -> dict[str, LearnerConfig]:
    """The configuration of each policy in the file."""
    kinds = {"game": str, "game_config": dict, "policies": dict}
    if wrong := [key for key, kind in kinds.items() if not isinstance(manifest.get(key), kind)]:
        raise CheckpointCorruptError(f"{path} is not a checkpoint of a training run: it lacks {', '.join(wrong)}")
    return stored_configs(with_defaults(manifest, str(path)), str(path))


def _game(path: Path, manifest: Mapping[str, Any], given: Env | None) -> Env:
    """The run's game, configured; ``given`` must be equal to it."""
    name, config = manifest["game"], manifest["game_config"]
    if given is not None:
        if given.name() != name or configure(type(given), **stored_configuration(type(given), config)) != given:
            raise ConfigError(f"game is {given!r}; expected {name} with {config}, as in {path}")
        return given
    own = [kind for kind in GAMES.values() if kind.name() == name]  # it may be registered under another name
    try:
        kind = own[0] if own else find_game(name)
        return configure(kind, **stored_configuration(kind, config))
    except UnknownGameError as error:
        raise UnknownGameError(
            f"the game of {path} is not registered: {error}. Import the module that declares and registers it, or pass "
            "the game: load_policy(…, game=MyGame(…))"
        ) from error


def _policy(
    path: Path,
    game: Env,
    name: str,
    config: LearnerConfig,
    network: nn.Module | None,
    weights: Mapping[str, torch.Tensor],
    device: torch.device,
) -> Policy:
    given = network is not None
    if not given:
        _check_layers(path, game, name, config, weights)
    with torch.random.fork_rng(devices=[]):  # do not advance the caller's random state
        policy = algorithm_of(config).make_policy(game, name.split("+"), config, network, device)
    try:
        policy.load_weights(weights)
    except ConfigError as error:
        advice = (
            f"networks[{name!r}] differs from the network that the policy was trained with"
            if given
            else f"a policy that does not use the default network needs one: networks={{{name!r}: module}}"
        )
        raise ConfigError(f"{path}: {advice}. {error}") from error
    return policy


def _check_layers(path: Path, game: Env, name: str, config: LearnerConfig, weights: Mapping[str, torch.Tensor]) -> None:
    """Check, before a network is allocated, that the file has the hidden layers that its configuration describes.

    Raises:
        ConfigError: It does not.
    """
    view, kind = RoleView(game, name.split("+")), config.network
    features = num_inputs(view, config.agent_ids)
    if kind == "cnn" or kind == "entities":
        with torch.device("meta"):  # without memory
            features = make_encoder(kind, view.roles, view.obs_shape, view.obs_parts, config.activation).size
    sizes = [features, *config.hidden_sizes]
    shapes = [tuple(tensor.shape) for tensor in weights.values()]
    expected: list[tuple[int, ...]] = [(after, before) for before, after in pairwise(sizes)]
    if (kind == "gru" or kind == "lstm") and len(sizes) > 1:
        expected[-1:] = recurrent_weights(sizes, kind, algorithm_of(config).num_cells(config))
        post = [sizes[-1], *getattr(config, "post_hidden_sizes", ())]
        expected += [(after, before) for before, after in pairwise(post)]
    lacking = [shape for shape in expected if shape not in shapes]
    if lacking or len(expected) > len(shapes):
        raise ConfigError(
            f"{path}: a policy that does not use the default network needs one: networks={{{name!r}: module}}. "
            f"Its hidden_sizes are {config.hidden_sizes!r:.80}, but no weights have the shapes {lacking[:3]!r:.200} "
            f"among {dict(zip(weights, shapes, strict=True))!r:.800}"
        )
