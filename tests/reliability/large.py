"""Beyond 2^31: tensors of more elements, clocks and counters near that limit, and sizes that are refused."""

import math
from dataclasses import dataclass

import torch

import gpu_vecenv
from gpu_vecenv import Sampler, VecEnv
from gpu_vecenv.compile.device import free_bytes
from gpu_vecenv.engine.digest import Digest
from gpu_vecenv.errors import CapacityError
from reliability.experiment import Experiment, Metrics, live_memory, said
from reliability.wide import Wide

INDEX_END = 2**31
GUARD = 4096  # elements before and after the observations
GUARDED_BY = 77
WINDOW = 5  # consecutive environments that are compared
STEPS = 3  # an episode has 2
REFUSED = (2**40, 2**62, 2**63, 2**64, 10**30)
REFUSAL_LIMIT = 16 << 20  # bytes that a refusal may leave in the heap


@dataclass(kw_only=True)
class Large(Experiment):
    """Tensors beyond 2^31 elements equal those of the same environments alone; counters pass 2^31 and 2^32."""

    count: int = INDEX_END + 10_000
    """Least number of elements of the largest tensor."""
    mode: str = ""
    """Autoreset; by default same_step on CUDA, and on the host next_step, which needs half the memory."""

    depends_on = ("gpu_vecenv/engine/sampler.py", "gpu_vecenv/engine/digest.py", "tests/reliability/wide.*")

    def measure(self) -> Metrics:
        torch.set_num_threads(1)
        numbers = "floats" if self.device.startswith("cuda") else "bytes"
        parts = {
            "observations": Wide(width=4096, numbers=numbers),
            "state": Wide(depth=4096),
            "rows": Wide(crowd=1024),
        }
        metrics: Metrics = {}
        for part, game in parts.items():
            each = 4096 if part != "rows" else 1024
            num_envs = -(-self.count // each) + WINDOW
            need, free = self._bytes(game, num_envs), free_bytes(torch.device(self.device))
            if need > free:
                metrics[part] = f"left out: {need} bytes needed, {free} free"
                continue
            self._part(part, game, num_envs, min(INDEX_END, self.count // 2) // each)
            metrics[part] = num_envs * each
        self.check(any(isinstance(value, int) for value in metrics.values()), f"nothing fits: {metrics}")
        return {**metrics, **self._clocks(), **self._refusals()}

    def _bytes(self, game: Wide, num_envs: int) -> int:
        """Bytes of the environment, its step buffers and the sampler's inputs and outputs, plus 10%."""
        each = VecEnv(game, 1, self.device, autoreset_mode=self._mode).bytes_per_env()
        return int(1.1 * num_envs * (each + game.num_agents * 30))

    @property
    def _mode(self) -> str:
        return self.mode or ("same_step" if self.device.startswith("cuda") else "next_step")

    def _part(self, part: str, game: Wide, num_envs: int, border: int) -> None:
        env = VecEnv(game, num_envs, self.device, autoreset_mode=self._mode)
        starts = [0, max(border - WINDOW // 2, 0), num_envs - WINDOW]
        # The same environments alone, with the random streams that they have in the large one.
        twins = [
            VecEnv(game, WINDOW, self.device, autoreset_mode=self._mode, first_env_index=start) for start in starts
        ]
        shape, kind = env.buffers_layout.specs["obs"]
        guarded = torch.full((math.prod(shape) + 2 * GUARD,), GUARDED_BY, dtype=kind, device=self.device)
        buffers = env.step_buffers(obs=guarded[GUARD:-GUARD].view(shape))

        def compare(what: str, whole: dict[str, torch.Tensor], alone: list[dict[str, torch.Tensor]]) -> None:
            for start, twin in zip(starts, alone, strict=True):
                for name, tensor in twin.items():
                    there = whole[name][start : start + WINDOW]
                    self.check(there.equal(tensor), f"{part}, {what}: {name} from environment {start} on differs")

        def compare_all(what: str, outputs: dict[str, torch.Tensor], alone: list[dict[str, torch.Tensor]]) -> None:
            self.disturb(what, env, guarded)
            compare(what, outputs, alone)
            compare(what, dict(env.data), [twin.state_dict() for twin in twins])
            for name, edge in {"before": guarded[:GUARD], "after": guarded[-GUARD:]}.items():
                self.check(bool((edge == GUARDED_BY).all()), f"{part}, {what}: memory {name} the observations changed")

        def given(out: tuple) -> dict[str, torch.Tensor]:
            *values, info = out
            names = ("obs", "rewards", "terminations", "truncations")
            final = info.get("final_obs")
            found = {**dict(zip(names, values, strict=False)), "active": info["active"]}
            # Rows of final_obs outside the mask are unspecified.
            return found if final is None or not info["_final_obs"].all() else {**found, "final_obs": final}

        whole = given(env.reset(seed=self.seed, out=buffers))
        compare_all("reset", whole, [given(twin.reset(seed=self.seed)) for twin in twins])
        for step in range(1, STEPS + 1):
            actions = env.sample_actions()
            compare("random actions", {"": actions}, [{"": twin.sample_actions()} for twin in twins])
            whole = given(env.step(actions, out=buffers))
            alone = [
                given(twin.step(actions[start : start + WINDOW].clone()))
                for start, twin in zip(starts, twins, strict=True)
            ]
            compare_all(f"step {step}", whole, alone)
        mask = torch.arange(num_envs, device=self.device) % 3 == 0
        alone = [given(t.reset(mask=mask[s : s + WINDOW].clone())) for s, t in zip(starts, twins, strict=True)]
        compare_all("masked reset", given(env.reset(mask=mask, out=buffers)), alone)
        buffers.obs.zero_()
        env.observe(out=buffers.obs)
        compare_all("observe", {"obs": buffers.obs}, [{"obs": twin.observe()} for twin in twins])
        self._digests(part, starts, buffers.obs if part != "state" else env.state["cell"])
        buffers = guarded = whole = actions = None  # free memory for the sampler
        logits = torch.zeros((num_envs, env.num_agents, 2), device=self.device)
        sample = Sampler(env).sample(logits)
        small = torch.zeros((WINDOW, env.num_agents, 2), device=self.device)
        drawn = [Sampler(twin).sample(small) for twin in twins]
        for name in ("actions", "log_probs", "entropies"):
            compare("sampler", {name: getattr(sample, name)}, [{name: getattr(one, name)} for one in drawn])
        for one in (env, *twins):
            one.close()

    def _digests(self, part: str, starts: list[int], tensor: torch.Tensor) -> None:
        functions = gpu_vecenv.FunctionManager(self.device)
        whole = Digest(functions, len(tensor))
        whole.add(tensor.view(len(tensor), -1))
        for start in starts:
            alone = Digest(functions, WINDOW)
            alone.add(tensor[start : start + WINDOW].reshape(WINDOW, -1).clone())
            same = whole.words[start : start + WINDOW].equal(alone.words)
            self.check(same, f"{part}: digests from environment {start} on differ")

    def disturb(self, what: str, env: VecEnv, guarded: torch.Tensor) -> None:
        """Called before each comparison."""

    def _clocks(self) -> Metrics:
        """An episode may have 2^31 - 1 steps, the number of episodes 64 bits, of which 32 choose the random streams."""
        env = VecEnv(Wide(max_steps=2**31 - 1), 4, self.device)
        env.reset(seed=self.seed)
        state = env.state_dict()
        state["engine_elapsed_steps"].fill_(2**31 - 4)
        state["engine_completed_lengths"].fill_(2**40)
        env.load_state_dict(state)
        for step in range(2**31 - 3, 2**31):
            *_, truncations, _ = env.step(env.sample_actions())
            last = step == 2**31 - 1
            self.check(
                env.elapsed_steps.tolist() == [0 if last else step] * 4,
                f"clocks are {env.elapsed_steps.tolist()} at step {step}",
            )
            self.check(truncations.tolist() == [[last]] * 4, f"truncations are {truncations.tolist()} at step {step}")
        lengths = env.episode_statistics()["lengths"].tolist()
        self.check(lengths == [2**40 + 2**31 - 1] * 4, f"lengths are {lengths}")

        env, marks = VecEnv(Wide(max_steps=1), 4, self.device), {}
        env.reset(seed=self.seed)
        marks[0] = env.state["mark"].tolist()
        for border in (2**31, 2**32):
            state = env.state_dict()
            state["engine_episode"].fill_(border - 3)
            state["engine_completed_episodes"].fill_(border - 3)
            env.load_state_dict(state)
            for episode in range(border - 2, border + 2):
                env.step(env.sample_actions())
                begun = env.data["engine_episode"][:, 0].tolist()
                counted = env.episode_statistics()["episodes"].tolist()
                self.check(begun == counted == [episode] * 4, f"episode {episode}: {begun} begun, {counted} counted")
                marks[episode] = env.state["mark"].tolist()
        repeated = marks.pop(2**32) == marks[0]
        self.check(repeated, "episode 2^32 does not repeat the random numbers of episode 0, as it is documented to")
        marks.pop(2**32 + 1)
        self.check(len({mark[0] for mark in marks.values()}) == len(marks), "two episodes below 2^32 begin alike")
        return {"longest_episode": 2**31 - 1, "episodes_before_streams_repeat": 2**32}

    def _refusals(self) -> Metrics:
        for num_envs in REFUSED:
            before = live_memory()
            try:
                gpu_vecenv.make("cartpole", num_envs, self.device)
            except CapacityError as error:
                self.check("bytes" in str(error) and f"{num_envs:,}" in str(error), f"{num_envs} environments: {error}")
            else:
                self.failures.append(f"{num_envs} environments are not refused")
            grown = live_memory() - before
            self.check(grown < REFUSAL_LIMIT, f"{num_envs} envs: {grown} bytes more in memory after the refusal")
        return {"refused_sizes": len(REFUSED)}

    def plant(self) -> Metrics:
        kinds = {"one wrong number in the last environment": WrongNumber, "one number written outside": Outside}
        return {fault: said(kind(count=10**6, device=self.device)) for fault, kind in kinds.items()}


class WrongNumber(Large):
    def disturb(self, what: str, env: VecEnv, guarded: torch.Tensor) -> None:
        if what == "masked reset":
            env.state["cell"][-1, -1] += 1


class Outside(Large):
    def disturb(self, what: str, env: VecEnv, guarded: torch.Tensor) -> None:
        if what == "step 2":
            guarded[-GUARD] = 0
