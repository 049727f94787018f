"""The random numbers: known answers, streams that share nothing, and batteries of tests over four layouts."""

import contextlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from oracles.philox import ONES, philox
from scipy import stats
from support.kernels import signature

from gpu_vecenv.compile.function_manager import FunctionManager, Program
from reliability.experiment import Experiment, Metrics, pieces, said

# Random123, tests/kat_vectors: philox4x32, 10 rounds.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
TEXT = """
#include "rng.cuh"

KERNEL(known_answers) {
    auto [counter, key, out, n] = args;
    FOR_ITEMS (k, n) {
        const u32* c = counter + 4 * k;
        Philox4 block = philox({{c[0], c[1], c[2], c[3]}}, key[2 * k], key[2 * k + 1]);
        for (int i = 0; i < 4; ++i) out[4 * k + i] = block.word[i];
    }
}

// The k-th block of four words of a layout, which says what changes from block to block.
KERNEL(blocks) {
    auto [layout, seed, first, out, n] = args;
    FOR_ITEMS (k, n) {
        u64 b = (u64)(first + k), environment = 0;
        u32 draw = 0, item = 0, episode = 0;
        if (layout == 0) {
            draw = (u32)(b & 0xfffffff);
            item = (u32)(b >> 28);
        } else if (layout == 1) {  // 4096 environments, then the next draw
            environment = b & 4095;
            draw = (u32)(b >> 12);
        } else if (layout == 2) {  // 16 blocks of each seed
            seed += b >> 4;
            draw = (u32)(b & 15);
        } else {
            episode = (u32)b;
            item = (u32)(b >> 32);
        }
        u32 key[2];
        env_key(seed, environment, key);
        Rng rng = {key[0], key[1], STEP_STREAM, episode, 1};
        Philox4 block = rng.block(item, draw);
        for (int i = 0; i < 4; ++i) out[4 * k + i] = block.word[i];
    }
}

// The first four words of the k-th of many streams: 64 seeds and 4 streams, and environments.
KERNEL(beginnings) {
    auto [seed, out, n] = args;
    FOR_ITEMS (k, n) {
        u32 key[2];
        env_key(seed + (u64)(k & 63), (u64)k >> 8, key);
        Rng rng = {key[0], key[1], (u32)(k >> 6 & 3), 0, 0};
        Philox4 block = rng.block(0, 0);
        out[2 * k] = (u64)block.word[0] << 32 | block.word[1];
        out[2 * k + 1] = (u64)block.word[2] << 32 | block.word[3];
    }
}

KERNEL(below) {
    auto [seed, first, size, out, n] = args;
    u32 key[2];
    env_key(seed, 0, key);
    FOR_ITEMS (k, n) {
        u64 b = (u64)(first + k);
        Rng rng = {key[0], key[1], STEP_STREAM, 0, 1};
        out[k] = rng.below((u32)(b >> 28), (u32)(b & 0xfffffff), size);
    }
}
"""
KERNELS = [
    signature("known_answers", "const u32* counter, const u32* key, u32* out, i64 n"),
    signature("blocks", "i32 layout, u64 seed, i64 first, u32* out, i64 n"),
    signature("beginnings", "u64 seed, u64* out, i64 n"),
    signature("below", "u64 seed, i64 first, u32 size, i32* out, i64 n"),
]
LAYOUTS = {"one stream": 0, "transposed across environments": 1, "neighbouring seeds": 2, "first draws of episodes": 3}
BOUNDS = (2, 3, 6, 7, 10, 1000)
CHUNK = 1 << 22  # blocks, drawn at a time
LEAST_P = 1e-7  # a fair generator falls below in one of some 10^5 runs of all tests together
# Of the tests that dieharder calls good; "quick" leaves out those that take minutes each.
DIEHARDER = {"quick": "0 3 4 8 9 10 11 15 16 100 101 205 208 209", "full": "-a"}
# Of each line: name | n-tuple | samples of a p-value | p-values | their p-value | verdict.
VERDICT = re.compile(r"^\s*(\w+)\|\s*(\d+)\|\s*\d+\|\s*(\d+)\|[^|]*\|\s*(PASSED|WEAK|FAILED)\s*$", re.MULTILINE)
MOST_WEAK = 2


@dataclass(kw_only=True)
class Rng(Experiment):
    """Known answers, equal beginnings of streams, statistics over four layouts, and dieharder where it is installed."""

    count: int = 10**8
    """32-bit words of each layout; of streams whose beginnings are compared, and of bounded numbers, a tenth."""
    dieharder: Literal["no", "quick", "full"] = "quick"
    """Its tests: none, those of seconds, or all of them, which takes hours."""

    @cached_property
    def program(self) -> Program:
        return FunctionManager(self.device).compile(TEXT, name="rng_battery.cu", kernels=KERNELS)

    def measure(self) -> Metrics:
        self._known_answers()
        streams = max(self.count // 10, 1000)
        metrics: Metrics = {"words_a_layout": self.count, "streams": streams, "equal_beginnings": self._equal(streams)}
        self.lowest = 1.0
        for name in LAYOUTS:
            self._statistics(name)
        self._bounded(streams)
        metrics |= {"lowest_p": float(f"{self.lowest:.2g}")}
        if self.dieharder != "no" and shutil.which("dieharder"):
            verdicts = {name: self._dieharder(name) for name in LAYOUTS}
            for verdict in ("PASSED", "WEAK", "FAILED"):
                metrics[f"dieharder_{verdict.lower()}"] = sum(found.count(verdict) for found in verdicts.values())
        return metrics

    def words(self, name: str, first: int, n: int) -> np.ndarray:
        """``n`` blocks of a layout from the ``first`` one on: their words one after the other, u32."""
        out = torch.empty(4 * n, dtype=torch.uint32, device=self.device)
        self.program.launch("blocks", n, layout=LAYOUTS[name], seed=self.seed, first=first, out=out, n=n)
        return out.cpu().numpy()

    def _known_answers(self) -> None:
        counter, key, expected = (np.array(column, np.uint32) for column in zip(*KNOWN, strict=True))
        out = torch.zeros(expected.shape, dtype=torch.uint32, device=self.device)
        inputs = {n: torch.from_numpy(x).to(self.device) for n, x in (("counter", counter), ("key", key))}
        self.program.launch("known_answers", len(KNOWN), **inputs, out=out, n=len(KNOWN))
        self.check(out.cpu().numpy().tolist() == expected.tolist(), "Philox does not give the published answers")
        for block in (0, 1, 12345, 2**28 + 3):  # a block of a stream is where the documents say
            own = philox([0, 0, 0, 0], [self.seed & ONES, self.seed >> 32])[:2]
            right = philox([1 << 29 | block & 0xFFFFFFF, block >> 28, 1, 0], own)
            self.check(self.words("one stream", block, 1).tolist() == right, f"block {block} of one stream is another")

    def _equal(self, streams: int) -> int:
        """Streams that begin with the same four words as another one."""
        out = torch.empty((streams, 2), dtype=torch.uint64, device=self.device)
        self.program.launch("beginnings", streams, seed=self.seed, out=out, n=streams)
        first, second = out.cpu().numpy().T
        order = np.argsort(first, kind="stable")
        twins = np.flatnonzero(first[order][1:] == first[order][:-1])  # of 10^7 streams one pair in 10^5 runs
        equal = sum(bool(second[order[k]] == second[order[k + 1]]) for k in twins)
        self.check(equal == 0, f"{equal} of {streams} streams begin as another one does")
        return equal

    def _statistics(self, name: str) -> None:
        """Sums over all words, chunk by chunk, so that memory does not limit their number."""
        high, low, serial = np.zeros(1 << 16, np.int64), np.zeros(1 << 16, np.int64), np.zeros(1 << 16, np.int64)
        across, runs, ones = np.zeros(1 << 16, np.int64), 0, np.zeros(32, np.int64)
        products, n = np.zeros(3), 0
        for first, end in pieces(max(self.count // 4, 64), CHUNK):
            words = self.words(name, first, end - first)
            n += len(words)
            high += np.bincount(words >> 16, minlength=1 << 16)
            low += np.bincount(words & 0xFFFF, minlength=1 << 16)
            serial += np.bincount((words[0::2] >> 24 << 8) | words[1::2] >> 24, minlength=1 << 16)
            block = words.reshape(-1, 4)
            pairs = (block[:-1:2, 0] >> 24 << 8) | block[1::2, 0][: len(block[:-1:2])] >> 24
            across += np.bincount(pairs, minlength=1 << 16)
            ones += np.unpackbits(words.view(np.uint8)).reshape(-1, 4, 8).sum(0, dtype=np.int64).ravel()
            signs = (words[1:] >> 31) != (words[:-1] >> 31)
            runs += int(signs.sum()) + (first > 0)  # the seam of two chunks counts as fair: half a run either way
            x = words.astype(np.float64) / 2**32 - 0.5
            lagged = [x[1:] @ x[:-1], x[4:] @ x[:-4], x[64:] @ x[:-64]]
            products += lagged
        for what, counts in {"high halves": high, "low halves": low, "pairs": serial, "blocks": across}.items():
            self._fair(f"{name}: {what}", stats.chisquare(counts).pvalue)
        seams = -(-max(self.count // 4, 64) // CHUNK) - 1
        self._fair(f"{name}: runs of the sign", two_sided((runs - seams - (n - 1 - seams) / 2) / np.sqrt((n - 1) / 4)))
        self._fair(f"{name}: bits", 32 * min(two_sided(z) for z in (ones - n / 2) / np.sqrt(n / 4)), high=False)
        for lag, product in zip((1, 4, 64), products, strict=True):  # x has variance 1/12
            self._fair(f"{name}: lag {lag}", two_sided(product * 12 / np.sqrt(n)))

    def _bounded(self, n: int) -> None:
        for bound in BOUNDS:
            counts = np.zeros(bound, np.int64)
            for first, end in pieces(n, CHUNK):
                out = torch.empty(end - first, dtype=torch.int32, device=self.device)
                arguments = {"seed": self.seed, "first": first, "size": bound, "out": out, "n": end - first}
                self.program.launch("below", end - first, **arguments)
                counts += np.bincount(out.cpu().numpy(), minlength=bound)
            self._fair(f"numbers below {bound}", stats.chisquare(counts).pvalue)

    def _fair(self, what: str, p: float, high: bool = True) -> None:
        """Neither too far from what is expected nor too near to it."""
        p = min(p, 1.0)
        self.lowest = min(self.lowest, p)
        self.check(p > LEAST_P and (not high or p < 1 - LEAST_P), f"{what}: p = {p:.3g}")

    def _stream(self, name: str) -> Iterator[bytes]:
        first = 0
        while True:
            yield self.words(name, first, CHUNK).tobytes()
            first += CHUNK

    def _dieharder(self, name: str) -> list[str]:
        """What dieharder says to each of its tests."""
        tests = DIEHARDER[self.dieharder]
        # -Y 1: a weak result is looked into until it is clear; one in a hundred of a fair generator's is weak.
        chosen = [["-a"]] if tests == "-a" else [["-d", test] for test in tests.split()]
        verdicts = []
        for arguments in chosen:
            command = ["dieharder", "-g", "200", "-Y", "1", "-k", "2", *arguments]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=False) as running:
                assert running.stdin and running.stdout
                with contextlib.suppress(BrokenPipeError):
                    for piece in self._stream(name):
                        running.stdin.write(piece)
                with contextlib.suppress(BrokenPipeError):
                    running.stdin.close()
                text = running.stdout.read().decode(errors="replace")
            found = clear_verdicts(text)
            self.check(bool(found), f"{name}: dieharder {arguments} says nothing: {text[-200:]}")
            self.check("FAILED" not in found, f"{name}: {text}")
            verdicts += found
        weak = verdicts.count("WEAK")
        self.check(weak <= MOST_WEAK, f"{name}: {weak} weak results of dieharder")
        return verdicts

    def plant(self) -> Metrics:
        kinds = {"seed + environment as the key": Added, "a bit that is always 0": StuckBit, "a short period": Short}
        planted = {fault: kind(count=10**6, dieharder="no", device=self.device) for fault, kind in kinds.items()}
        return {fault: said(experiment) for fault, experiment in planted.items()}


class Added(Rng):
    @cached_property
    def program(self) -> Program:
        text = TEXT.replace("env_key(seed + (u64)(k & 63), (u64)k >> 8, key)", "env_key(seed + k % 999, 0, key)")
        return FunctionManager(self.device).compile(text, name="rng_battery.cu", kernels=KERNELS)


class StuckBit(Rng):
    def words(self, name: str, first: int, n: int) -> np.ndarray:
        return super().words(name, first, n) & np.uint32(0xFFFFFFFE)


class Short(Rng):
    def words(self, name: str, first: int, n: int) -> np.ndarray:
        return np.resize(super().words(name, first, min(n, 3000)), 4 * n)


def clear_verdicts(text: str) -> list[str]:
    """The verdicts of dieharder's output; of a test that it went on with, those over the most p-values."""
    lines = [(test, size, int(values), verdict) for test, size, values, verdict in VERDICT.findall(text)]
    most: dict[tuple[str, str], int] = {}
    for test, size, values, _ in lines:
        most[test, size] = max(values, most.get((test, size), 0))
    return [verdict for test, size, values, verdict in lines if values == most[test, size]]


def two_sided(z: float) -> float:
    return float(2 * stats.norm.sf(abs(z)))
