"""Ctrl-C at any instant; environments in forked and spawned processes."""

import copy
import json
import multiprocessing
import os
import pickle
import random
import select
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import gpu_vecenv
from gpu_vecenv import VecEnv
from gpu_vecenv.engine.digest import Digest, trajectory_digest
from gpu_vecenv.errors import ForkedProcessError
from gpu_vecenv.train.ppo import PPOConfig
from gpu_vecenv.train.trainer import Trainer
from reliability.experiment import Experiment, Metrics, said

DEADLINE = 60.0  # seconds; another process that takes longer hangs
NUM_ENVS = 2000  # x 5 agents: enough for several host threads in each launch
AFTER = 3  # steps that an environment and its uninterrupted twin take together
ENOUGH = 5000  # repetitions within which an interrupt must have come
CONFIG = PPOConfig(total_steps=10**6, num_steps=8, num_epochs=2, num_minibatches=2, hidden_sizes=(16,))
PACKAGE = str(Path(gpu_vecenv.__file__).parent)
USES = ("step", "reset", "state", "make", "train")


@dataclass(kw_only=True)
class Interrupts(Experiment):
    """Interrupt steps, resets, construction and training, at random and at each line; fork and spawn."""

    count: int = 200
    """Interrupts at random instants, in addition to one at each line of a step, a reset and a load."""

    depends_on = ("gpu_vecenv/train/trainer.py", "gpu_vecenv/train/graph.py")

    def measure(self) -> Metrics:
        torch.set_num_threads(1)
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            metrics = self._interrupts()
        finally:
            signal.signal(signal.SIGINT, before)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of fork beside threads
            self._processes()
        return {**metrics, "ways_into_other_processes": 5}

    def _interrupts(self) -> Metrics:
        chance, found = random.Random(self.seed), dict.fromkeys(USES, 0)
        env, twin = self._env(), self._env()
        trainer, trainer_twin = (Trainer(self._env(40), CONFIG, seed=self.seed) for _ in range(2))
        env.reset(seed=self.seed)
        expected = trajectory_digest(self._env(), self.seed, AFTER).hex()
        slow = 0.0
        for number in range(self.count):
            use = USES[number % len(USES)]
            what = f"interrupt {number}, {use}"
            work = self._work(use, env, trainer)
            begin = time.monotonic()
            came, late = interrupted(work, chance.uniform(0.0, 0.06 if use == "train" else 0.015))
            slow = max(slow, late)
            if not self.check(came, f"{what}: it has no effect within {time.monotonic() - begin:.1f} s"):
                continue
            found[use] += 1
            if use == "train":
                self._compare_trainers(what, trainer, trainer_twin)
            elif use == "make":
                self.check(trajectory_digest(self._env(), self.seed, AFTER).hex() == expected, f"{what}: other bits")
            else:
                self._compare(what, env, twin)
        lines = 0
        for use in ("step", "reset", "state"):
            work, at = self._work(use, env, trainer), 1
            while broken_off(work, at):
                self._compare(f"interrupt at line {at}, {use}", env, twin)
                lines, at = lines + 1, at + 1
        for one in (env, twin, trainer, trainer_twin):
            one.close()
        metrics = {f"while_{use}": number for use, number in found.items()}
        return {**metrics, "at_each_line": lines, "slowest_reaction_ms": round(slow * 1e3, 1)}

    def _env(self, num_envs: int = NUM_ENVS) -> VecEnv:
        return gpu_vecenv.make("tag_gridworld", num_envs, self.device, max_steps=9)

    def _work(self, use: str, env: VecEnv, trainer: Trainer) -> Callable[[], Any]:
        return {
            "step": lambda: env.step(env.sample_actions()),
            "reset": lambda: env.reset(seed=self.seed),
            "state": lambda: env.load_state_dict(env.state_dict()),
            "make": lambda: self._env().reset(seed=self.seed),
            "train": trainer.train_iteration,
        }[use]

    def _compare(self, what: str, env: VecEnv, twin: VecEnv) -> None:
        """The environment is determined by its state: no hidden state, and no pending writes."""
        twin.load_state_dict(env.state_dict())
        self.disturb(twin)
        digests = []
        for one in (env, twin):
            digest = Digest(one.functions, one.num_envs)
            for _ in range(AFTER):
                try:
                    obs, rewards, terminations, truncations, info = one.step(one.sample_actions())
                except Exception as error:
                    self.failures.append(f"{what}: afterwards {error!r}")
                    return
                digest.add_outputs(obs, rewards, terminations, truncations, info["active"])
            digest.add_state(one)
            digests.append(digest.hex())
        self.check(digests[0] == digests[1], f"{what}: environment and twin differ afterwards: {digests}")
        faults = int(env.faults().count_nonzero())
        self.check(faults == 0, f"{what}: {faults} environments have fault bits")

    def _compare_trainers(self, what: str, trainer: Trainer, twin: Trainer) -> None:
        tensors, manifest = trainer.state()
        tensors = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        twin.load_state(tensors, json.loads(json.dumps(manifest)), "the interrupted trainer")
        for one in (trainer, twin):
            one.train_iteration()
        states = [one.state()[0] for one in (trainer, twin)]
        other = [name for name, tensor in states[0].items() if not tensor.equal(states[1][name])]
        self.check(not other, f"{what}: trainer and twin differ afterwards in {other[:5]}")

    def disturb(self, twin: VecEnv) -> None:
        """Called before each comparison."""

    def _processes(self) -> None:
        env = self._env(50)
        env.reset(seed=self.seed)
        expected = trajectory_digest(self._env(50), self.seed, AFTER).hex()
        said_by_fork = in_fork(lambda: env.reset(seed=self.seed) and trajectory_digest(env, self.seed, AFTER).hex())
        wanted = ForkedProcessError.__name__ if self.device.startswith("cuda") else expected
        self.check(said_by_fork == wanted, f"a forked process says {said_by_fork!r}; expected {wanted!r}")
        self.check(in_spawned(env, self.seed) == expected, "a spawned process gets other bits")
        pickled, copied = pickle.loads(pickle.dumps(env)), copy.deepcopy(env)
        for how, one in {"pickled": pickled, "copied": copied, "after all": env}.items():
            self.check(trajectory_digest(one, self.seed, AFTER).hex() == expected, f"{how}: other bits")
        with ThreadPoolExecutor(2) as threads:
            envs = [self._env(50) for _ in range(2)]
            digests = [threads.submit(trajectory_digest, one, self.seed, 40 * AFTER) for one in envs]
            one, other = (digest.result().hex() for digest in digests)
        alone = trajectory_digest(self._env(50), self.seed, 40 * AFTER).hex()
        self.check(one == other == alone, "two threads with an environment each get other bits")

    def plant(self) -> Metrics:
        return {"one cell of the twin changes": said(Disturbed(count=1, device=self.device))}


class Disturbed(Interrupts):
    def disturb(self, twin: VecEnv) -> None:
        twin.state["cell"][0, 0, 0] ^= 1


def interrupted(work: Callable[[], Any], delay: float) -> tuple[bool, float]:
    """Repeat the work until a SIGINT arrives after a delay; returns whether it arrived, and its latency."""
    sent = 0.0
    begun = threading.Event()

    def interrupt() -> None:
        nonlocal sent
        begun.wait()
        time.sleep(delay)
        sent = time.monotonic()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    sender = threading.Thread(target=interrupt)
    sender.start()
    try:
        begun.set()
        for _ in range(ENOUGH):
            work()
        sender.join()
    except KeyboardInterrupt:
        seen = time.monotonic()
        sender.join()
        return True, seen - sent
    return False, 0.0


def broken_off(work: Callable[[], Any], at: int) -> bool:
    """Do the work once, with an interrupt before the n-th line of the package; returns whether that line exists."""
    line = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal line
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        line += event == "line"
        if event == "line" and line == at:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def in_fork(work: Callable[[], str]) -> str:
    """The result of a forked process, or the name of its error."""
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            try:
                answer = work()
            except Exception as error:
                answer = type(error).__name__
            os.write(sender, answer.encode())
        finally:
            os._exit(0)
    os.close(sender)
    try:
        ready, _, _ = select.select([receiver], [], [], DEADLINE)
        return os.read(receiver, 10_000).decode() if ready else "nothing: it hangs"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(receiver)


def in_spawned(env: VecEnv, seed: int) -> str:
    """The result of a spawned process to which an environment is sent."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=digest_there, args=(env, seed, sender))
    child.start()
    sender.close()
    try:
        return str(receiver.recv()) if receiver.poll(DEADLINE) else "nothing: it hangs"
    except EOFError:
        return "nothing: it ended"
    finally:
        child.kill()
        child.join()


def digest_there(env: VecEnv, seed: int, sender: Any) -> None:
    torch.set_num_threads(1)
    sender.send(trajectory_digest(env, seed, AFTER).hex())
