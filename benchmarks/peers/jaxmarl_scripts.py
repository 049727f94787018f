"""JaxMARL's published learners, which its package does not have: their names, settings and ``make_train``."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.peers import jax_ppo, jaxmarl_games
from benchmarks.workload import Workload


@dataclass(frozen=True)
class Script:
    """A published script.

    Attributes:
        module: Its name.
        title: What is printed in the results.
        settings: Of its configuration, beside what the workload names and where they differ from those of ``jax_ppo``.
    """

    module: str
    title: str
    settings: Mapping[str, Any] = field(default_factory=dict)


# Of pqn_vdn_rnn_mpe.yaml, but without its evaluations, which ours has no part of either. The mode makes it log.
PQN = {
    "WANDB_MODE": "offline",
    "MEMORY_WINDOW": 0,
    "NUM_LAYERS": 2,
    "NORM_INPUT": False,
    "NORM_TYPE": "layer_norm",
    "EPS_START": 1.0,
    "EPS_FINISH": 0.1,
    "EPS_DECAY": 0.1,
    "MAX_GRAD_NORM": 1,
    "LR": 5e-4,
    "LR_LINEAR_DECAY": False,
    "GAMMA": 0.9,
    "LAMBDA": 0.3,
    "NUM_EPOCHS": 4,
    "TEST_DURING_TRAINING": False,
    "TEST_NUM_ENVS": 1,
    "TEST_NUM_STEPS": 1,
}
# Of pqn_vdn_rnn_smax.yaml.
PQN_SMAX = {
    **PQN,
    "MEMORY_WINDOW": 4,
    "NORM_INPUT": True,
    "NORM_TYPE": "batch_norm",
    "EPS_FINISH": 0.01,
    "LR": 2.5e-4,
    "LR_LINEAR_DECAY": True,
    "GAMMA": 0.99,
    "LAMBDA": 0.85,
    "REW_SCALE": 10.0,
}
# Of mappo_homogenous_rnn_smax.yaml.
SMAX = {"LR": 2e-3, "ENT_COEF": 0.0, "MAX_GRAD_NORM": 0.25, "OBS_WITH_AGENT_ID": True}
# Of ippo_cnn_overcooked.yaml.
OVERCOOKED = {"LR": 5e-4, "ACTIVATION": "relu", "REW_SHAPING_HORIZON": 2.5e6}
SCRIPTS = {  # game, algorithm -> script
    ("simple_spread", "ppo"): Script("ippo_ff_mpe", "JaxMARL IPPO"),
    ("simple_spread", "ppo_rnn"): Script(
        "ippo_rnn_mpe", "JaxMARL IPPO with a GRU", {"LR": 5e-4, "CLIP_EPS": 0.3, "VF_COEF": 1.0}
    ),
    ("simple_spread", "mappo_rnn"): Script("mappo_rnn_mpe", "JaxMARL MAPPO with a GRU", {"LR": 2e-3}),
    ("simple_spread", "pqn_vdn_rnn"): Script("pqn_vdn_rnn", "JaxMARL PQN-VDN with a GRU", PQN),
    ("overcooked", "ppo_cnn"): Script("ippo_cnn_overcooked", "JaxMARL IPPO with a CNN", OVERCOOKED),
    ("skirmish", "mappo_rnn"): Script("mappo_rnn_smax", "JaxMARL MAPPO with a GRU", SMAX),
    ("skirmish", "pqn_vdn_rnn"): Script("pqn_vdn_rnn", "JaxMARL PQN-VDN with a GRU", PQN_SMAX),
}


def script_of(workload: Workload) -> Script:
    """The script that trains what a workload names."""
    return SCRIPTS[workload.game, workload.algorithm]


def published(workload: Workload, folder: str, log: Any = lambda metrics, step=None: None) -> Any:
    """``make_train`` of the script in a folder.

    The modules that only logs, films and the command line use are stood in for; ``log`` gets what it logs.
    """
    for absent in ("wandb", "hydra", "omegaconf", "jaxmarl.viz.overcooked_visualizer"):
        sys.modules[absent] = types.ModuleType(absent)
    stand_ins: Any = sys.modules
    stand_ins["wandb"].log = log
    stand_ins["hydra"].main = lambda **_: lambda function: function
    stand_ins["omegaconf"].OmegaConf = None
    stand_ins["jaxmarl.viz.overcooked_visualizer"].OvercookedVisualizer = None
    jax_ppo.provide_distrax()
    sys.path.insert(0, folder)
    script = script_of(workload)
    module = importlib.import_module(script.module)
    config = {
        **jax_ppo.settings(workload),
        "ENV_NAME": jaxmarl_games.name_of(workload),
        "ENV_KWARGS": jaxmarl_games.arguments_of(workload),
        "WANDB_MODE": "disabled",
        **script.settings,
    }
    if workload.game == "overcooked":
        _name_agent_by_default()
    if workload.game == "skirmish":  # its scripts look the scenario up themselves
        config |= {"MAP_NAME": workload.config["scenario"], "ENV_KWARGS": {}}
    if workload.algorithm == "pqn_vdn_rnn":
        config |= {"HIDDEN_SIZE": workload.hidden_size}
        return module.make_train(config, module.env_from_config(config)[0])
    units = {"FC_DIM_SIZE": workload.hidden_size, "GRU_HIDDEN_DIM": workload.hidden_size, "SCALE_CLIP_EPS": False}
    return module.make_train({**config, **units})


def _name_agent_by_default() -> None:
    """The script asks for an action space without naming an agent, which JaxMARL 0.2.0 no longer has a default for."""
    from jaxmarl.environments.overcooked import Overcooked

    Overcooked.action_space = lambda self, agent="agent_0": self.action_spaces[agent]
