"""A folder with trained policies for the Hugging Face hub: weights, configuration and a model card."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpu_vecenv._version import __version__
from gpu_vecenv.envs.registry import gymnasium_id
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.files import replace_file
from gpu_vecenv.train.checkpoint import save_checkpoint
from gpu_vecenv.train.evaluation_tables import ALL_TRAINED
from gpu_vecenv.train.game_policy import GamePolicy
from gpu_vecenv.train.run_folder import CURVE_FILE, EVALUATION_FILE

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
    policies = {"+".join(one.view.roles): one for one in policy.policies.values()}
    if set(policy.configs) != set(policy.policies):
        raise ConfigError("the policies' hyperparameters are not known; expected policies from load_policy")
    tensors = {
        f"policy.{name}.{key}": tensor for name, one in policies.items() for key, tensor in one.state_dict().items()
    }
    manifest: dict[str, Any] = {
        "game": policy.game.name(),
        "game_config": dataclasses.asdict(policy.game),
        "algorithms": {name: policy.configs[one.view.roles[0]].algorithm for name, one in policies.items()},
        "policies": {name: dataclasses.asdict(policy.configs[one.view.roles[0]]) for name, one in policies.items()},
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
    card = model_card(policy, results.get(ALL_TRAINED, {}), curve=CURVE_FILE in copied)
    replace_file(folder / CARD, card.encode())
    return [*files, folder / CARD]


def model_card(policy: GamePolicy, results: Mapping[str, float], *, curve: bool) -> str:
    """The card as Markdown with the hub's metadata.

    Args:
        policy: The policies.
        results: What ``evaluate`` returned of them; may be empty.
        curve: Whether ``learning_curve.png`` lies beside it.
    """
    game, name = policy.game, policy.game.name()
    identifier = gymnasium_id(type(game))
    algorithms = sorted({config.algorithm for config in policy.configs.values()})
    returns = {role: results[f"return_{role}"] for role in policy.policies if f"return_{role}" in results}
    metrics = [{"type": "mean_reward", "name": f"return_{role}", "value": value} for role, value in returns.items()]
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
    lines += [
        f"# {' and '.join(algorithms).upper()} on {name}",
        "",
        (type(game).__doc__ or name).strip().splitlines()[0],
        "",
    ]
    lines += ["| role | observations | actions | mean return |", "|---|---|---|---|"]
    for role in policy.policies:
        spaces = game.layout.observation.spaces[role], game.layout.action.spaces[role]
        mean = f"{returns[role]:.4g}" if role in returns else "not evaluated"
        lines.append(f"| {role} | {spaces[0].dtype} {spaces[0].shape} | {spaces[1]} | {mean} |")
    lines += ["", f"The game's configuration: `{game.layout.config}`. Hyperparameters: `{CONFIG}`.", ""]
    if curve:
        lines += [f"![returns during training]({CURVE_FILE})", ""]
    lines += [
        f"Trained with [gpu_vecenv](https://pypi.org/project/gpu-vecenv/) {__version__}. To act:",
        "",
        "```python",
        "import gpu_vecenv",
        "from huggingface_hub import hf_hub_download",
        "",
        f'policy = gpu_vecenv.load_policy(hf_hub_download("OWNER/NAME", "{WEIGHTS}"))',
        "env = gpu_vecenv.make(policy.game, 100, policy.device)",
        "obs, info = env.reset(seed=1)",
        "actions = policy(obs, greedy=True)",
        "```",
        "",
    ]
    return "\n".join(lines)
