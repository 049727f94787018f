"""A long run: constant memory, no faults, consistent clocks and counters."""

from dataclasses import dataclass

import torch

import gpu_vecenv
from gpu_vecenv import VecEnv
from gpu_vecenv.engine.digest import Digest
from reliability.experiment import Experiment, Metrics, live_memory, said

MEASUREMENTS = 20  # spread over the run
GROWTH_LIMIT = 4 << 20  # bytes: the heap of a process varies


@dataclass(kw_only=True)
class Soak(Experiment):
    """Step for ``count`` agent-steps, and check memory, faults, clocks and counters repeatedly."""

    count: int = 0
    """Agent-steps; 0 means 1e9 on CUDA and 1e7 on the CPU."""
    game: str = "tag_gridworld"
    """Registered name."""
    num_envs: int = 0
    """Environments; 0 means 65536 on CUDA and 1024 on the CPU."""

    def __post_init__(self) -> None:
        cuda = self.device.startswith("cuda")
        self.count = self.count or (10**9 if cuda else 10**7)
        self.num_envs = self.num_envs or (65536 if cuda else 1024)

    def measure(self) -> Metrics:
        torch.set_num_threads(1)
        env = gpu_vecenv.make(self.game, self.num_envs, self.device)
        env.reset(seed=self.seed)
        buffers = env.step_buffers()
        steps = -(-self.count // (self.num_envs * env.num_agents))
        memory = []
        for step in range(1, steps + 1):
            env.step(env.sample_actions(), out=buffers)
            self.after(env, step)
            if step % max(steps // MEASUREMENTS, 1) == 0 or step == steps:
                self._look(env, step)
                memory.append(self._memory())
        allocated, resident = zip(*memory, strict=True)
        if self.device.startswith("cuda"):
            self.check(len(set(allocated)) == 1, f"allocated bytes were {sorted(set(allocated))}")
        growth = max(resident[len(resident) // 4 :]) - resident[len(resident) // 4]
        self.check(growth <= GROWTH_LIMIT, f"memory grew by {growth} bytes after a quarter of the run")
        digest = Digest(env.functions, env.num_envs)
        digest.add_state(env)
        episodes = int(env.episode_statistics()["episodes"].sum())
        metrics = {
            "game": self.game,
            "environments": self.num_envs,
            "steps": steps,
            "agent_steps": steps * self.num_envs * env.num_agents,
            "episodes": episodes,
            "growth_bytes": growth,
            "state_digest": digest.hex(),
        }
        env.close()
        return metrics

    def _memory(self) -> tuple[int, int]:
        cuda = self.device.startswith("cuda")
        return torch.cuda.memory_allocated(self.device) if cuda else 0, live_memory()

    def _look(self, env: VecEnv, step: int) -> None:
        sums = env.episode_statistics()
        faults = int(env.faults().count_nonzero())
        self.check(faults == 0, f"step {step}: {faults} environments have fault bits")
        # Without an idle step between episodes each step is one of the running or of a completed episode.
        clocks = sums["lengths"] + env.elapsed_steps
        self.check(bool((clocks == step).all()), f"step {step}: clocks are {clocks.min()} to {clocks.max()}")
        counted, begun = sums["episodes"], env.data["engine_episode"][:, 0]
        self.check(
            bool((counted == begun).all()), f"step {step}: {int((counted != begun).sum())} episode counters differ"
        )
        self.check(bool((sums["terminations"] <= counted).all()), f"step {step}: more terminations than episodes")
        self.check(bool(sums["returns"].isfinite().all()), f"step {step}: a return is not finite")

    def after(self, env: VecEnv, step: int) -> None:
        """Called after each step."""

    def plant(self) -> Metrics:
        planted = {"a clock that loses a step": LostTick, "a counter one too high": Miscount, "memory kept": Kept}
        return {fault: said(kind(count=10**5, num_envs=64, device=self.device)) for fault, kind in planted.items()}


class LostTick(Soak):
    def after(self, env: VecEnv, step: int) -> None:
        if step == 7:
            env.elapsed_steps[-1] -= 1


class Miscount(Soak):
    def after(self, env: VecEnv, step: int) -> None:
        if step == 7:
            env.episode_statistics()["episodes"][0] += 1


class Kept(Soak):
    def after(self, env: VecEnv, step: int) -> None:
        vars(self).setdefault("kept", []).append(torch.ones(1 << 20, dtype=torch.uint8, device=env.device))
