"""A folder with trained policies for the Hugging Face hub: weights, configuration and a model card."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from gpu_vecenv._version import __version__
from gpu_vecenv.envs.registry import gymnasium_id
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.files import replace_file
from gpu_vecenv.train.checkpoint import save_checkpoint
from gpu_vecenv.train.default_networks import policies_with_own_networks
from gpu_vecenv.train.evaluation_curves import EVALUATION_FILE
from gpu_vecenv.train.evaluation_tables import Results, results_as_in_training
from gpu_vecenv.train.fixed_policy import FUNCTION, kinds_of
from gpu_vecenv.train.game_policy import GamePolicy
from gpu_vecenv.train.role_view import role_of
from gpu_vecenv.train.run_folder import CURVE_FILE

WEIGHTS, CONFIG, CARD = "policy.safetensors", "config.json", "README.md"


def export_hub(policy: GamePolicy, folder: Path, run: Path | None = None) -> list[Path]:
    """Write the folder; nothing is sent anywhere, and no package of the hub is needed.

    ``policy.safetensors`` has weights and configuration, without the optimizer; ``load_policy`` loads it.
    ``config.json`` has the configuration again, ``README.md`` is the card, with the returns of the run's evaluation.

    Args:
        policy: As ``load_policy`` returns it.
        folder: Made if necessary; files in it are replaced.
        run: The folder of the run, whose evaluation and learning curve are copied if it has them.

    Returns:
        The files.

    Raises:
        ConfigError: The policy has no ``configs``.
    """
    policies = {one.view.name: one for one in policy.policies.values()}
    if set(policy.configs) != set(policy.policies):
        raise ConfigError("the policies' hyperparameters are not known; expected policies from load_policy")
    tensors = {
        f"policy.{name}.{key}": tensor for name, one in policies.items() for key, tensor in one.state_dict().items()
    }
    manifest: dict[str, Any] = {
        "game": policy.game.name(),
        "game_config": dataclasses.asdict(policy.game),
        "algorithms": {name: policy.configs[one.view.names[0]].algorithm for name, one in policies.items()},
        "policies": {name: dataclasses.asdict(policy.configs[one.view.names[0]]) for name, one in policies.items()},
        "actors": kinds_of(policies) or None,
        "made_with": {"gpu_vecenv": __version__},
    }
    save_checkpoint(folder / WEIGHTS, tensors, manifest)
    replace_file(folder / CONFIG, (json.dumps(manifest, indent=1) + "\n").encode())
    files = [folder / WEIGHTS, folder / CONFIG]
    copied = [name for name in (EVALUATION_FILE, CURVE_FILE) if run is not None and (run / name).is_file()]
    for name in copied:
        assert run is not None
        replace_file(folder / name, (run / name).read_bytes())
        files.append(folder / name)
    results = json.loads((folder / EVALUATION_FILE).read_bytes()) if EVALUATION_FILE in copied else {}
    card = model_card(policy, results, curve=CURVE_FILE in copied)
    replace_file(folder / CARD, card.encode())
    return [*files, folder / CARD]


def model_card(policy: GamePolicy, results: Results, *, curve: bool) -> str:
    """The card as Markdown with the hub's metadata; its code loads the policies and acts.

    Args:
        policy: The policies.
        results: Pairing -> what ``evaluate`` returned: "all trained", or as "trained with runner frozen", and of roles
            against fixed opponents, such as "tagger against random"; may be empty.
        curve: Whether ``learning_curve.png`` lies beside it.
    """
    game, name = policy.game, policy.game.name()
    identifier = gymnasium_id(type(game))
    algorithms = sorted({config.algorithm for config in policy.configs.values()})
    trained = results_as_in_training(results)
    returns = {own: trained[f"return_{own}"] for own in policy.policies if f"return_{own}" in trained}
    metrics = [{"type": "mean_reward", "name": f"return_{own}", "value": value} for own, value in returns.items()]
    result = {
        "task": {"type": "reinforcement-learning", "name": "reinforcement-learning"},
        "dataset": {"type": identifier, "name": name},
        "metrics": metrics,
    }
    metadata: dict[str, Any] = {
        "library_name": "gpu_vecenv",
        "pipeline_tag": "reinforcement-learning",
        "tags": ["reinforcement-learning", "deep-reinforcement-learning", "gpu_vecenv", name],
    }
    if metrics:
        metadata["model-index"] = [{"name": "-".join((*algorithms, name)), "results": [result]}]
    lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in metadata.items()), "---", ""]  # JSON is YAML
    title = f"# {' and '.join(map(str.upper, algorithms))} on {name}"
    lines += [title, "", (type(game).__doc__ or name).strip().splitlines()[0], ""]
    per_role = all(own in game.layout.roles for own in policy.policies)
    lines += [f"| {'role' if per_role else 'agent'} | observations | actions | mean return |", "|---|---|---|---|"]
    kinds = kinds_of(policy.policies)
    for own in policy.policies:
        role = role_of(game, own)
        spaces = game.layout.observation.spaces[role], game.layout.action.spaces[role]
        mean = f"{returns[own]:.4g}" if own in returns else "not evaluated"
        mean = "played by a function in training" if kinds.get(own) == FUNCTION else mean
        lines.append(f"| {own} | {spaces[0].dtype} {spaces[0].shape} | {spaces[1]} | {mean} |")
    matches = [name for name in results if " against " in name]
    if matches:
        lines += ["", "| against fixed opponents | episodes | mean return |", "|---|---|---|"]
    for match in matches:
        found, (role, *_) = results[match], match.partition(" against ")  # a script's file may have any name
        lines.append(f"| {match} | {found['episodes']:,.0f} | {found[f'return_{role}']:.4g} |")
    lines += ["", f"The game's configuration: `{game.layout.config}`. Hyperparameters: `{CONFIG}`.", ""]
    if curve:
        lines += [f"![returns during training]({CURVE_FILE})", ""]
    recurrent = {role: one.acting_state_size for role, one in policy.policies.items() if one.acting_state_size}
    for role, size in recurrent.items():
        lines += [
            f"The policy of {role} is recurrent: each agent has a state of {size} float32 numbers, which is 0 at an "
            "episode's start. A call takes it and returns the next one, for the next observation.",
            "",
        ]
    lines += [
        f"Trained with [gpu_vecenv](https://pypi.org/project/gpu-vecenv/) {__version__}. To act:",
        "",
        "```python",
        *_code(policy),
        "```",
        "",
    ]
    return "\n".join(lines)


def _code(policy: GamePolicy) -> list[str]:
    """Python that loads the policies and acts, as lines."""
    networks = {
        one.view.name: type(one.network).__name__ for one in policies_with_own_networks(policy.policies.values())
    }
    given = ", ".join(f'"{name}": {kind}()' for name, kind in networks.items())
    arguments = "obs" + ', info["action_mask"]' * policy.game.masks_actions
    stateful = bool(policy.recurrent_state_size)
    lines = [
        "import gpu_vecenv",
        "from huggingface_hub import hf_hub_download",
        "",
        f'path = hf_hub_download("OWNER/NAME", "{WEIGHTS}")',
        *(f"# {kind}: a module like the one that was trained" for kind in networks.values()),
        f"policy = gpu_vecenv.load_policy(path{f', networks={{{given}}}' if given else ''})",
        "env = gpu_vecenv.make(policy.game, 100, policy.device)",
    ]
    functions = [own for own, kind in kinds_of(policy.policies).items() if kind == FUNCTION]
    if functions:
        actors = ", ".join(
            f'"{own}": "random"' if own in functions else f'"{own}": policy["{own}"]' for own in policy.policies
        )
        return [
            *lines,
            f'# In place of "random" the function that played {" and ".join(functions)} in training.',
            f"print(gpu_vecenv.evaluate(env, {{{actors}}}, episodes=100))",
        ]
    return [
        *lines,
        "obs, info = env.reset(seed=1)",
        *(["state = policy.initial_state(env.num_envs)  # zeros"] if stateful else []),
        "for _ in range(100):",
        f"    actions{', state' * stateful} = policy({arguments}{', state=state' * stateful}, greedy=True)",
        "    obs, rewards, terminations, truncations, info = env.step(actions)",
        *(['    state[info["_final_obs"]] = 0  # where obs is the first of an episode'] if stateful else []),
    ]
