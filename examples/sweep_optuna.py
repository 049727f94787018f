"""A search of PPO's hyper-parameters by Optuna. The unit is several seeds: a trial trains them side by side.

A trial reports the mean of their returns while it trains, and is pruned where other trials were better at that time.
"""

import math
import statistics
from dataclasses import dataclass

import optuna
import tyro

from gpu_vecenv import PPOConfig, Trainer, configure, make
from gpu_vecenv.errors import NonFiniteError
from gpu_vecenv.train.parallel_trainers import ParallelTrainers


@dataclass
class Options:
    """Search hyper-parameters."""

    game: str = "cartpole"  # name of a game, in its default configuration
    role: str | None = None  # whose return counts; default: that of the first role
    trials: int = 30  # trials of this process
    seeds: int = 4  # seeds of a trial
    num_envs: int = 64  # environments of each seed
    total_steps: int = 200_000  # env-steps of each seed
    reports: int = 10  # times in a trial at which it may be pruned
    startup_trials: int = 5  # trials before any is pruned
    seed: int = 0  # of the search, and the first of a trial
    device: str | None = None  # cpu, cuda or cuda:1; by default cuda if usable, else cpu
    storage: str | None = None  # such as sqlite:///sweep.db: continues, and is shared by processes; default: memory


def suggested(trial: optuna.Trial) -> dict[str, object]:
    """Values of PPOConfig."""
    width = trial.suggest_categorical("width", [32, 64, 128])
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-2, log=True),
        "gamma": 1 - trial.suggest_float("one_minus_gamma", 3e-3, 0.1, log=True),
        "entropy_coefficient": trial.suggest_float("entropy_coefficient", 1e-4, 0.03, log=True),
        "clip": trial.suggest_float("clip", 0.1, 0.4),
        "num_epochs": trial.suggest_int("num_epochs", 1, 8),
        "hidden_sizes": (width, width),
    }


def objective(trial: optuna.Trial, options: Options) -> float:
    """Mean over the seeds of the return at the end of training."""
    game = configure(options.game)
    metric = f"return_{options.role or next(iter(game.roles))}"
    preset = {key: value for key, value in game.own_preset.items() if key != "num_envs"}
    config = PPOConfig(**{**preset, **suggested(trial), "total_steps": options.total_steps})
    trainers = [
        Trainer(make(game, options.num_envs, options.device), config, seed=options.seed + index)
        for index in range(options.seeds)
    ]
    try:
        together = ParallelTrainers(trainers)
        interval, mean = max(1, trainers[0].num_iterations // options.reports), math.nan
        while trainers[0].iteration < trainers[0].num_iterations:
            results = together.train_interval(trainers, interval)
            if any(isinstance(result, NonFiniteError) for result in results):
                raise optuna.TrialPruned("a loss is not finite")
            mean = statistics.fmean(result[metric] for result in results)
            if not math.isnan(mean):  # until the first episodes of all environments have ended
                trial.report(mean, step=trainers[0].iteration // interval)
                if trial.should_prune():
                    raise optuna.TrialPruned()
        return mean
    finally:
        for trainer in trainers:
            trainer.close()


if __name__ == "__main__":
    options = tyro.cli(Options)
    study = optuna.create_study(
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=options.seed),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=options.startup_trials, n_warmup_steps=1),
        study_name=options.game,
        storage=options.storage,
        load_if_exists=True,
    )
    study.optimize(lambda trial: objective(trial, options), n_trials=options.trials)
    states = [trial.state for trial in study.trials]
    complete, pruned = (
        states.count(state) for state in (optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED)
    )
    print(f"{len(states)} trials: {complete} complete, {pruned} pruned")
    if complete:
        values = ", ".join(f"{name} {value:.4g}" for name, value in study.best_params.items())
        print(f"best mean over {options.seeds} seeds {study.best_value:.4g}: {values}")
