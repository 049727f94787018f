"""What the CUDA compiler makes of every kernel: it compiles for GPUs that are not there, and its PTX is linted."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

import pytest
import torch
from games.crew import Crew
from games.economy import Economy
from games.painter import Painter
from games.race import Race
from games.sacrifice import Sacrifice
from games.scouts import Scouts
from games.weights import Weights
from support.cases import mostly_exhaustive
from support.kernels import signature, unpack
from support.ptx_lint import PARAMETER, Finding, instructions, lint

import gpu_vecenv
from gpu_vecenv.compile.backends import TensorCores, parameter_spans, structure
from gpu_vecenv.compile.backends.cuda import cuda_constants, default_threads_per_env
from gpu_vecenv.compile.backends.cuda_compiler import FLAGS, compile_cubin
from gpu_vecenv.compile.codegen import declared_source, game_source, inline_includes
from gpu_vecenv.compile.engine_kernels import DEFAULT_BUILD, BuildOptions, squash_source
from gpu_vecenv.compile.joined_launches import joined_source
from gpu_vecenv.declare.kernels import KernelSignature, arguments_source
from gpu_vecenv.declare.layout import GameLayout
from gpu_vecenv.engine.digest import DIGEST_KERNEL
from gpu_vecenv.engine.sampler import sample_kernel
from gpu_vecenv.envs.registry import GAMES
from gpu_vecenv.errors import KernelCompileError
from gpu_vecenv.files import cuda_folder
from gpu_vecenv.train import iteration_kernels, learner_kernels, normalizer_kernels, optimizer
from gpu_vecenv.train.convolution_kernels import FORWARD as FORWARD_CONVOLUTION
from gpu_vecenv.train.convolution_kernels import (
    INPUT_GRADIENTS,
    WEIGHT_GRADIENTS,
    ConvolutionShape,
    convolution_source,
    stack_signature,
    stack_source,
    why_not_convolution,
)
from gpu_vecenv.train.fused_rollout import rollout_kernels
from gpu_vecenv.train.gru_kernels import GRU_BACKWARD, GRU_FORWARD, gru_source
from gpu_vecenv.train.layers import LAYER_GRADIENTS
from gpu_vecenv.train.layerwise_kernels import LAYER_PRODUCT, Layers, Product, layerwise_kernels, layerwise_source
from gpu_vecenv.train.opponent_kernels import OPPONENT_RESULTS
from gpu_vecenv.train.perceptron import FORWARD, gradient_signature, perceptron_of
from gpu_vecenv.train.policy import Precision
from gpu_vecenv.train.ppo import PPOConfig, make_policy
from gpu_vecenv.train.recurrent import CellKind
from gpu_vecenv.train.recurrent_cells import CELLS_BACKWARD, CELLS_FORWARD, cells_source
from gpu_vecenv.train.rollout_tiles import RangeKind, choose_tile

USUAL = 90  # `make test-exhaustive` compiles the others, and all combinations of cases
ARCHITECTURES = (75, 80, 86, USUAL, 100)
EACH = [pytest.param(k, marks=[] if k == USUAL else pytest.mark.exhaustive) for k in ARCHITECTURES]
ENGINE_KERNELS = {f"kernel_vecenv_{name}" for name in ("layout", "reset", "step", "observe", "random_actions")}
LEARNER_KERNELS = {f"kernel_{name}" for name in ("advantages", "loss_gradients")}
SHARED_LIMIT = 48 << 10
FEW = {"num_taggers": 2, "num_runners": 3, "num_neighbors": 3}
BUNDLED = [name for name, game in GAMES.items() if game.__module__.startswith("gpu_vecenv.")]


def source_file(name: str) -> Path:
    (path,) = cuda_folder().rglob(name)
    return path


@dataclass(frozen=True)
class Text:
    """A game with its engine, and the sampler and the learner after it, as one text."""

    game: object
    config: tuple = ()
    build: BuildOptions = DEFAULT_BUILD

    def __str__(self) -> str:
        name = self.game if isinstance(self.game, str) else self.game.name()
        chosen = [f"{key}={value}" for key, value in self.config]
        chosen += [
            key for key in ("initial_fields", "end_on_nonfinite", "guards", "sampled") if getattr(self.build, key)
        ]
        chosen += [self.build.squash] if self.build.squash != "clip" else []
        return "-".join([name, *chosen])

    @cached_property
    def layout(self) -> GameLayout:
        return gpu_vecenv.configure(self.game, **dict(self.config)).layout

    def kernels_after_the_engine(self) -> list[KernelSignature]:
        learner = [learner_kernels.advantages(self.layout), learner_kernels.loss_gradients(self.layout)]
        return [sample_kernel(self.layout), *learner]

    def write(self) -> str:
        text = cuda_constants(default_threads_per_env(self.layout.num_agents, self.layout.largest_array), SHARED_LIMIT)
        text += game_source(self.layout, self.build) + arguments_source(self.kernels_after_the_engine())
        for name in ("beta.cuh", "sampling.cuh", "sampler.cu", "loss.cuh", "learner.cu"):
            if name in ("beta.cuh", "sampling.cuh") and self.build.sampled:
                continue  # the engine has it
            lines = [line for line in source_file(name).read_text().splitlines() if "#include" not in line]
            text += f'#line 1 "{name}"\n' + "\n".join(lines) + "\n"
        return text


# Every bundled game as it comes, and then: partial observations; teams of several warps, with scratch that is too large
# for shared memory; masks, roles and images; turns and deaths; Box actions; start pools; what debug builds have.
TEXTS = [
    *(Text(name) for name in BUNDLED),
    Text("tag_gridworld", (("num_taggers", 40), ("full_observation", False), ("random_start", True))),
    Text(
        "tag_continuous",
        tuple(FEW.items()),
        BuildOptions(initial_fields=("position", "in_game"), end_on_nonfinite=True),
    ),
    Text("tag_continuous", (*FEW.items(), ("num_neighbors", "all")), BuildOptions(guards=True)),
    Text("tag_continuous", (("num_taggers", 500), ("num_runners", 9500))),
    Text("tag_continuous", (("egocentric", False),)),
    Text("economy", (("tax_model", "saez"),)),  # doubles
    Text("tag_continuous", (*FEW.items(), ("egocentric", False), ("num_neighbors", "all")), BuildOptions(guards=True)),
    Text("simple_tag", (("continuous_actions", True),), BuildOptions(guards=True, end_on_nonfinite=True)),
    Text(Crew, (), BuildOptions(guards=True, initial_fields=("place",))),
    *(
        Text(game, (), BuildOptions(sampled=True))
        for game in ("cartpole", "tag_gridworld", "tag_continuous", "pendulum", Crew, Economy)
    ),
    Text(
        "tag_gridworld",
        (("num_taggers", 999), ("full_observation", False)),
        BuildOptions(sampled=True, end_on_nonfinite=True),
    ),
    Text("pendulum", (), BuildOptions(sampled=True, squash="beta")),
    Text(Economy, (), BuildOptions(sampled=True, squash="beta")),
    Text(Scouts),
    Text(Painter),
    Text(Economy, (), BuildOptions(guards=True)),
    Text(Race, (), BuildOptions(guards=True)),
    Text(Race, (), BuildOptions(sampled=True)),
    Text(Sacrifice),
    Text(Sacrifice, (("num_units", 100),), BuildOptions(end_on_nonfinite=True)),
    Text("cartpole", (("randomize", (("gravity", 8.0, 12.0), ("half_length", 0.4, 0.6))),)),
    Text(
        "tag_continuous",
        (*FEW.items(), ("randomize", (("side", 1.0, 2.0),))),
        BuildOptions(sampled=True, end_on_nonfinite=True),
    ),
    Text(Weights, (("randomize", (("lever", 0.5, 1.0), ("mass", 1.0, 2.0))),), BuildOptions(initial_fields=("mass",))),
]


OF_NO_GAME = {
    "digest": [DIGEST_KERNEL],
    "iteration": [
        iteration_kernels.BEGIN_UPDATE,
        iteration_kernels.EXPLAINED_VARIANCE,
        iteration_kernels.LEARNER_METRICS,
        iteration_kernels.EPISODE_METRICS,
    ],
    "layers": [LAYER_GRADIENTS],
    "minibatch": [learner_kernels.SHUFFLE, learner_kernels.GATHER_ROWS, learner_kernels.CLIP_GRAD_NORM],
    "normalizers": [
        normalizer_kernels.OBS_MOMENTS,
        normalizer_kernels.REWARD_MOMENTS,
        normalizer_kernels.UPDATE_NORMALIZER,
    ],
    "opponents": [OPPONENT_RESULTS],
    "optimizer": optimizer.KERNELS,
}


GPU_TENSOR_CORES = TensorCores(multiprocessors=132, shared_bytes=233472, block_shared_bytes=232448)  # an H200's
# Whole opcodes that tensor_core.cuh writes, of each precision: nothing else may round otherwise.
MMA = "mma.sync.aligned.m16n8k{}.row.col.f32.{}.f32"
TENSOR_CORE_OPCODES: dict[Precision, set[str]] = {
    "float32": {MMA.format(8, "tf32.tf32"), "rcp.approx.ftz.f32"},
    "tf32": {MMA.format(8, "tf32.tf32"), "tanh.approx.f32"},
    "bfloat16": {MMA.format(16, "bf16.bf16"), "tanh.approx.f32", "cvt.rn.bf16x2.f32"},
}
PERCEPTRONS = {
    "discrete": ("tag_continuous", {"normalize_obs": True}),
    "box": ("pendulum", {"shared_trunk": False, "normalize_returns": True, "hidden_sizes": (40, 24)}),
    "box, beta": ("pendulum", {"squash": "beta", "hidden_sizes": (40, 24)}),
    "agent ids": ("simple_spread", {"agent_ids": True, "normalize_obs": True, "hidden_sizes": (40, 24)}),
    "turns": (Race, {}),
}


def perceptron_text(policy: str, precision: Precision, forward: bool) -> str:
    """The program of a kernel of a default network, as on a GPU."""
    name, config = PERCEPTRONS[policy]
    game = gpu_vecenv.configure(name)
    made = make_policy(game, [list(game.layout.roles)[-1]], PPOConfig(**config), None, torch.device("cpu"))
    constants = perceptron_of(made, torch.zeros(0), precision)
    tile = constants.choose_tile(GPU_TENSOR_CORES, forward)
    assert tile is not None
    kernel, seen = FORWARD if forward else gradient_signature(game.layout), set[str]()
    text = declared_source(game.layout, DEFAULT_BUILD, seen) + arguments_source([kernel])
    text += squash_source(constants.squash)
    text += constants.source(tile, constants.blocks(tile, GPU_TENSOR_CORES, forward), forward)
    path = source_file(f"{kernel.name}.cu")
    return text + inline_includes(path.read_text(), path.name, path.parent, seen)


def layerwise_text(policy: str, precision: Precision) -> str:
    """The program of a default network layer by layer, as on a GPU."""
    name, config = PERCEPTRONS[policy]
    game = gpu_vecenv.configure(name)
    made = make_policy(game, [list(game.layout.roles)[-1]], PPOConfig(**config), None, torch.device("cpu"))
    text = declared_source(game.layout, DEFAULT_BUILD, seen := set[str]())
    text += arguments_source(layerwise_kernels(game.layout))
    perceptron = perceptron_of(made, torch.zeros(0), precision)
    text += squash_source(perceptron.squash)
    text += layerwise_source(perceptron, Layers(perceptron, 8 if precision == "bfloat16" else 4))
    path = source_file("layerwise.cu")
    return text + inline_includes(path.read_text(), path.name, path.parent, seen)


PRODUCTS = {
    "first layer": Product(72, 256, 256, "ACTIVATIONS"),
    "hidden layer": Product(256, 256, 256, "ACTIVATIONS", relu=True),
    "head": Product(256, 48, 48, "RESULTS"),
    "gradients of a head": Product(256, 48, 250, "GRADIENTS"),
    "gradients of a hidden layer": Product(256, 256, 256, "GRADIENTS"),
}


def product_text(product: Product) -> str:
    """The program of a product of a layer, as on a GPU."""
    source = f'#include "kernel.cuh"\n{arguments_source([LAYER_PRODUCT])}{product.source(GPU_TENSOR_CORES)}'
    path = source_file("layer_product.cu")
    return inline_includes(source + path.read_text(), path.name, path.parent)


GRUS = {"20 units": (20, 1), "64 units": (64, 1), "128 units": (128, 1), "128 units, two tiles": (128, 2)}


def gru_text(units: int, precision: Precision, warp_tiles: int) -> str:
    """The program of a GRU over sequences, as on a GPU."""
    constants = gru_source(units, precision, GPU_TENSOR_CORES, warp_tiles)
    source = f'#include "kernel.cuh"\n{arguments_source([GRU_FORWARD, GRU_BACKWARD])}{constants}'
    path = source_file("gru.cu")
    return inline_includes(source + path.read_text(), path.name, path.parent)


CONVOLUTIONS = {
    "published": ConvolutionShape((5, 8), (5, 8), 26, 32, 5, 1, 2),
    "strides": ConvolutionShape((11, 11), (6, 6), 3, 16, 3, 2, 1),
}


def convolution_text(shape: ConvolutionShape) -> str:
    """The program of a convolution, as on a GPU."""
    kernels = [FORWARD_CONVOLUTION, WEIGHT_GRADIENTS, *[INPUT_GRADIENTS][: shape.has_input_gradients]]
    source = f'#include "kernel.cuh"\n{arguments_source(kernels)}{convolution_source(shape, GPU_TENSOR_CORES)}'
    path = source_file("convolution.cu")
    return inline_includes(source + path.read_text(), path.name, path.parent)


def stack_text() -> str:
    """The program of several convolutions of few images, as on a GPU."""
    published = CONVOLUTIONS["published"]
    second = replace(published, channels=32, kernel=3, padding=1)
    shapes = published, second, replace(second, filters=5)
    source = f'#include "kernel.cuh"\n{arguments_source([stack_signature(3)])}{stack_source(shapes, GPU_TENSOR_CORES)}'
    path = source_file("convolution_stack.cu")
    return inline_includes(source + path.read_text(), path.name, path.parent)


def cells_text(kind: CellKind, precision: Precision) -> str:
    """The program of a step of recurrent cells."""
    source = f'#include "kernel.cuh"\n{arguments_source([CELLS_FORWARD, CELLS_BACKWARD])}'
    source += cells_source(kind, 33, 2, precision)
    path = source_file("recurrent_cells.cu")
    return inline_includes(source + path.read_text(), path.name, path.parent)


ROLLOUTS = {
    "one agent, box": (
        "pendulum",
        20_000,
        {"shared_trunk": False, "normalize_returns": True, "hidden_sizes": (40, 24)},
    ),
    "one agent, beta": ("pendulum", 20_000, {"squash": "beta", "hidden_sizes": (40, 24)}),
    "two policies": ("tag_gridworld", 100, {"normalize_obs": True}),
    "masks": (Crew, 100, {}),
    "groups of several warps": ("tag_continuous", 2000, {}),
    "turns": (Race, 100, {}),
    "agents apart": ("tag_gridworld", 100, {"hidden_sizes": (16,)}),
    "opponents": ("tag_gridworld", 100, {}),
    "populations": ("tag_gridworld", 100, {"normalize_obs": True}),
}
RANGES: dict[str, RangeKind] = {"opponents": "opponents", "populations": "populations"}  # of environments
JOINED_ROLLOUTS: dict[str, Precision] = {"masks": "tf32", "two policies": "bfloat16"}
POLICIES = {"agents apart": ("tagger_0+tagger_2", "tagger_1+runner", "tagger_3")}  # others: one for each role


def rollout_text(rollout: str, precision: Precision) -> str:
    """The program of a whole rollout with default networks, as on a GPU."""
    name, num_envs, config = ROLLOUTS[rollout]
    layout = gpu_vecenv.configure(name).layout
    build = BuildOptions(sampled=True, squash=PPOConfig(**config).squash)
    policies = [
        make_policy(gpu_vecenv.configure(name), own.split("+"), PPOConfig(**config), None, torch.device("cpu"))
        for own in POLICIES.get(rollout, layout.present_roles)
    ]
    networks = [perceptron_of(policy, torch.zeros(0), precision) for policy in policies]
    threads = default_threads_per_env(layout.num_agents)
    tile = choose_tile(layout, networks, num_envs, GPU_TENSOR_CORES, threads)
    assert tile is not None
    ranges = RANGES.get(rollout)
    kernels = rollout_kernels(layout, build, len(networks), ranges)
    before = inline_includes('#include "kernel.cuh"', "generated header", None) + arguments_source(kernels)
    return before + tile.source(build, GPU_TENSOR_CORES, min(2, tile.blocks(GPU_TENSOR_CORES)), ranges)


def plain_text(name: str) -> str:
    source = f'#include "kernel.cuh"\n{arguments_source(OF_NO_GAME[name])}#line 1 "{name}.cu"\n'
    path = source_file(f"{name}.cu")
    return inline_includes(source + path.read_text(), path.name, path.parent)


# ---------------------------------------------------------------------- the compiler


def nvrtc():
    return pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC (cuda.bindings) is not installed")


def call(result: tuple):
    status, *values = result
    assert int(status) == 0, status
    return values[0] if values else None


@cache
def known_architectures() -> list[int]:
    return list(call(nvrtc().nvrtcGetSupportedArchs()))


def need(architecture: int) -> None:
    nvrtc()
    if architecture not in known_architectures():
        version = ".".join(map(str, nvrtc().nvrtcVersion()[1:]))
        pytest.skip(f"NVRTC {version} does not know sm_{architecture}; it knows {known_architectures()}")


def built(text: str, architecture: str, flags: tuple[str, ...] = FLAGS) -> tuple[str, bytes]:
    """PTX, which tells source lines, and the cubin, of one compilation; virtual architectures have no cubin."""
    library = nvrtc()
    program = call(library.nvrtcCreateProgram(text.encode(), b"kernel.cu", 0, [], []))
    options = [option.encode() for option in (*flags, "-lineinfo", f"--gpu-architecture={architecture}")]
    status = int(library.nvrtcCompileProgram(program, len(options), options)[0])
    log = bytes(call(library.nvrtcGetProgramLogSize(program)))
    call(library.nvrtcGetProgramLog(program, log))
    assert status == 0, log.decode()
    made = bytes(call(library.nvrtcGetPTXSize(program)))
    call(library.nvrtcGetPTX(program, made))  # writes into the object it is given
    cubin = bytes(call(library.nvrtcGetCUBINSize(program)))
    if cubin:
        call(library.nvrtcGetCUBIN(program, cubin))
    library.nvrtcDestroyProgram(program)
    return made.rstrip(b"\0").decode(), cubin


def ptx(text: str, flags: tuple[str, ...] = FLAGS, architecture: int = 80) -> str:
    return built(text, f"compute_{architecture}", flags)[0]


def kernels_of(made: str) -> set[str]:
    return {instruction.kernel for instruction in instructions(made)}


def told(findings: list[Finding]) -> list[str]:
    return [str(finding) for finding in findings]


# ---------------------------------------------------------------------- our kernels


def test_every_device_source_is_in_one_of_these_programs():
    sources = {path.stem for path in cuda_folder().rglob("*.cu")}
    of_networks = {"gru", "layer_product", "layerwise", "perceptron_forward", "perceptron_gradients", "recurrent_cells"}
    of_networks |= {"convolution", "convolution_stack", "rollout"}
    on_cpus = {"host_forward", "host_gradients"}
    assert sources == {*BUNDLED, *OF_NO_GAME, *of_networks, *on_cpus, "sampler", "learner"}


# Of these builds another text has each mechanism, and of these games another text the rest.
SELDOM = {
    *("tag_continuous", "economy", "economy-guards", "economy-sampled"),
    "tag_continuous-num_taggers=2-num_runners=3-num_neighbors=3-initial_fields-end_on_nonfinite",
    *("tag_continuous-num_taggers=2-num_runners=3-num_neighbors=3-num_neighbors=all-guards", "race-guards"),
    *("tag_continuous-egocentric=False", "cartpole-sampled", "tag_continuous-sampled", "race-sampled"),
    *("tag_gridworld-num_taggers=999-full_observation=False-end_on_nonfinite-sampled", "pendulum-sampled-beta"),
    "sacrifice-num_units=100-end_on_nonfinite",
    "tag_continuous-num_taggers=500-num_runners=9500",
}


def test_what_is_seldom_compiled_are_texts():
    assert {str(text) for text in TEXTS} >= SELDOM
    often = [text for text in TEXTS if str(text) not in SELDOM]
    assert {text.game for text in often} == {text.game for text in TEXTS} - {Race}  # which rollouts have
    for value in ("initial_fields", "end_on_nonfinite", "guards", "sampled"):
        assert any(getattr(text.build, value) for text in often), value


@pytest.mark.slow
@pytest.mark.parametrize("architecture", EACH)
@pytest.mark.parametrize("text", mostly_exhaustive(TEXTS, [text for text in TEXTS if str(text) not in SELDOM]), ids=str)
def test_games_compile_for_gpus_that_are_not_there_round_as_written_and_address_in_64_bits(text, architecture):
    need(architecture)
    made, cubin = built(text.write(), f"sm_{architecture}")
    assert cubin.startswith(b"\x7fELF")
    kernels = kernels_of(made)
    engine = {"kernel_vecenv_layout", "kernel_vecenv_step"} if text.build.sampled else ENGINE_KERNELS
    known = engine | LEARNER_KERNELS | {"kernel_sample"}
    assert kernels == known
    for kernel in kernels:
        assert b".text." + kernel.encode() + b"\0" in cubin
    assert told(finding for finding in lint(made) if finding.rule != "fused") == []


@pytest.mark.parametrize("architecture", EACH)
@pytest.mark.parametrize("name", OF_NO_GAME)
def test_programs_without_a_game_follow_the_rules_too(name, architecture):
    need(architecture)
    made, cubin = built(plain_text(name), f"sm_{architecture}")
    assert all(b".text.kernel_" + kernel.name.encode() + b"\0" in cubin for kernel in OF_NO_GAME[name])
    assert told(lint(made)) == []


# The one function that asks for a fused product and sum, and what it is without.
WRITTEN = ("return __fmaf_rn(a, b, c);", "return __fadd_rn(__fmul_rn(a, b), c);")


@pytest.mark.parametrize(
    ("text", "architecture"),
    [*((text, 80) for text in TEXTS), *((Text("acrobot"), other) for other in ARCHITECTURES if other != 80)],
    ids=str,
)
@pytest.mark.exhaustive
def test_what_is_fused_is_what_the_source_fuses(text, architecture):
    need(architecture)
    text = text.write()
    assert text.count(WRITTEN[0]) == 1
    assert told(lint(ptx(text.replace(*WRITTEN), architecture=architecture))) == []


def rotating(cases: Iterable[object], offset: int = 0, seldom: Iterable[object] = ()) -> list[tuple]:
    """Each case and precision; one precision of each case in every run, which differ from case to case.

    Of the ``seldom`` ones, which take long, another test compiles a joined launch in every run.
    """
    cases, precisions = list(cases), list(TENSOR_CORE_OPCODES)
    usual = [
        (case, precisions[(offset + k) % len(precisions)]) for k, case in enumerate(cases) if case not in {*seldom}
    ]
    return mostly_exhaustive([(case, precision) for case in cases for precision in precisions], usual)


@pytest.mark.parametrize("architecture", [each for each in EACH if each.values[0] >= 80])
@pytest.mark.parametrize("forward", [False, True], ids=["gradients", "forward"])
@pytest.mark.parametrize(("policy", "precision"), rotating(PERCEPTRONS))
@pytest.mark.slow
def test_networks_on_tensor_cores_round_as_written_and_address_in_64_bits(policy, precision, forward, architecture):
    need(architecture)
    text, kernel = perceptron_text(policy, precision, forward), "forward" if forward else "gradients"
    assert text.count(WRITTEN[0]) == 1
    made, cubin = built(text.replace(*WRITTEN), f"sm_{architecture}")
    assert b".text.kernel_perceptron_" + kernel.encode() + b"\0" in cubin
    opcodes = {instruction.opcode for instruction in instructions(made)}
    assert opcodes >= TENSOR_CORE_OPCODES[precision]
    assert told(lint(made, TENSOR_CORE_OPCODES[precision])) == []


@pytest.mark.parametrize("architecture", [each for each in EACH if each.values[0] >= 80])
@pytest.mark.parametrize(("policy", "precision"), rotating(PERCEPTRONS, 2))
@pytest.mark.slow
def test_networks_layer_by_layer_round_as_written_and_address_in_64_bits(policy, precision, architecture):
    need(architecture)
    text, allowed = layerwise_text(policy, precision), {"tanh.approx.f32", "cvt.rn.bf16x2.f32"}
    assert text.count(WRITTEN[0]) == 1
    made, cubin = built(text.replace(*WRITTEN), f"sm_{architecture}")
    for kernel in layerwise_kernels(gpu_vecenv.configure(PERCEPTRONS[policy][0]).layout):
        assert b".text.kernel_" + kernel.name.encode() + b"\0" in cubin
    assert told(lint(made, allowed)) == []


@pytest.mark.parametrize("architecture", [each for each in EACH if each.values[0] >= 80])
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.slow
def test_products_of_layers_round_as_written_and_address_in_64_bits(product, architecture):
    need(architecture)
    assert PRODUCTS[product].blocks(GPU_TENSOR_CORES)
    text = product_text(PRODUCTS[product])
    assert text.count(WRITTEN[0]) == 1
    made, cubin = built(text.replace(*WRITTEN), f"sm_{architecture}")
    assert b".text.kernel_layer_product\0" in cubin
    assert told(lint(made, TENSOR_CORE_OPCODES["bfloat16"])) == []


@pytest.mark.parametrize("architecture", [each for each in EACH if each.values[0] >= 80])
@pytest.mark.parametrize(("gru", "precision"), rotating(GRUS))
@pytest.mark.slow
def test_a_gru_rounds_as_written_and_addresses_in_64_bits(gru, precision, architecture):
    need(architecture)
    units, warp_tiles = GRUS[gru]
    text = gru_text(units, precision, warp_tiles)
    assert text.count(WRITTEN[0]) == 1
    made, cubin = built(text.replace(*WRITTEN), f"sm_{architecture}")
    assert all(b".text.kernel_gru_" + kernel + b"\0" in cubin for kernel in (b"forward", b"backward"))
    assert {instruction.opcode for instruction in instructions(made)} >= TENSOR_CORE_OPCODES[precision]
    assert told(lint(made, TENSOR_CORE_OPCODES[precision])) == []


@pytest.mark.parametrize("architecture", [each for each in EACH if each.values[0] >= 80])
@pytest.mark.parametrize("convolution", CONVOLUTIONS)
@pytest.mark.slow
def test_convolutions_round_as_written_and_address_in_64_bits(convolution, architecture):
    need(architecture)
    shape = CONVOLUTIONS[convolution]
    assert why_not_convolution(shape, GPU_TENSOR_CORES) is None
    text = convolution_text(shape)
    assert text.count(WRITTEN[0]) == 1
    made, cubin = built(text.replace(*WRITTEN), f"sm_{architecture}")
    kernels = [b"forward", b"weight_gradients", *[b"input_gradients"][: shape.has_input_gradients]]
    assert all(b".text.kernel_convolution_" + kernel + b"\0" in cubin for kernel in kernels)
    assert told(lint(made, TENSOR_CORE_OPCODES["tf32"])) == []


@pytest.mark.parametrize("architecture", [each for each in EACH if each.values[0] >= 80])
@pytest.mark.slow
def test_a_stack_of_convolutions_rounds_as_written_and_addresses_in_64_bits(architecture):
    need(architecture)
    text = stack_text()
    assert text.count(WRITTEN[0]) == 1
    made, cubin = built(text.replace(*WRITTEN), f"sm_{architecture}")
    assert b".text.kernel_convolution_stack\0" in cubin
    assert told(lint(made, TENSOR_CORE_OPCODES["tf32"])) == []


@pytest.mark.parametrize("architecture", EACH)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_recurrent_cells_round_as_written_and_address_in_64_bits(kind, precision, architecture):
    need(architecture)
    text = cells_text(kind, precision)
    assert text.count(WRITTEN[0]) == 1
    made, cubin = built(text.replace(*WRITTEN), f"sm_{architecture}")
    assert all(b".text.kernel_cells_" + kernel + b"\0" in cubin for kernel in (b"forward", b"backward"))
    assert told(lint(made)) == []


@pytest.mark.parametrize("architecture", [each for each in EACH if each.values[0] >= 80])
@pytest.mark.parametrize(("rollout", "precision"), rotating(ROLLOUTS, 1, JOINED_ROLLOUTS))
@pytest.mark.slow
def test_rollouts_round_as_written_and_address_in_64_bits(rollout, precision, architecture):
    need(architecture)
    text = rollout_text(rollout, precision)
    assert text.count(WRITTEN[0]) == 1
    made, cubin = built(text.replace(*WRITTEN), f"sm_{architecture}")
    assert b".text.kernel_rollout\0" in cubin
    assert {instruction.opcode for instruction in instructions(made)} >= TENSOR_CORE_OPCODES[precision]
    assert told(lint(made, TENSOR_CORE_OPCODES[precision])) == []


@pytest.mark.parametrize("architecture", EACH)
@pytest.mark.parametrize(
    ("name", "parameter_bytes"),
    mostly_exhaustive(
        [(name, size) for name in OF_NO_GAME for size in (4096, 32764)],
        [("layers", 32764), *((name, 4096) for name in OF_NO_GAME)],
    ),
)
def test_joined_launches_follow_the_rules_too(name, architecture, parameter_bytes):
    need(architecture)
    text = joined_source(plain_text(name), parameter_bytes)
    made, cubin = built(text, f"sm_{architecture}")
    assert all(b".text.kernel_" + kernel.name.encode() + b"\0" in cubin for kernel in OF_NO_GAME[name])
    assert told(lint(made)) == []
    # Arguments stay in the parameters: no thread copies them to memory of its own.
    assert "__local_depot" not in made and "%ctaid.z" in made


@pytest.mark.parametrize("architecture", [each for each in EACH if each.values[0] >= 80])
@pytest.mark.slow
def test_joined_launches_of_games_and_networks_follow_the_rules_too(architecture):
    need(architecture)
    games = [joined_source(text.write(), 4096) for text in (Text("tag_continuous"), Text(Crew), Text("pendulum"))]
    assert told(f for text in games for f in lint(ptx(text, architecture=architecture)) if f.rule != "fused") == []
    networks = [perceptron_text("discrete", "tf32", False), perceptron_text("box", "bfloat16", True)]
    networks += [rollout_text(name, precision) for name, precision in JOINED_ROLLOUTS.items()]
    for precision, text in zip(("tf32", "bfloat16") * 2, networks, strict=True):
        made = ptx(joined_source(text.replace(*WRITTEN), 4096), architecture=architecture)
        assert told(lint(made, TENSOR_CORE_OPCODES[precision])) == []
        assert "%ctaid.z" in made


def test_cuda_errors_name_file_and_line_too():
    nvrtc()
    text = Text("tag_gridworld").write().replace("bool hit = false;", "bool hit = falsch;")
    line = next(
        number
        for number, line in enumerate((cuda_folder() / "games/tag_gridworld.cu").read_text().splitlines(), start=1)
        if "bool hit = false;" in line
    )
    with pytest.raises(KernelCompileError) as error:
        compile_cubin(text, "sm_80")
    assert re.search(rf'tag_gridworld\.cu\({line}\): error: identifier "falsch" is undefined', error.value.log)


# ---------------------------------------------------------------------- the linter can fail


@pytest.mark.slow
def test_looser_flags_are_seen():
    text = Text("acrobot").write().replace(*WRITTEN)
    loose = tuple(flag for flag in FLAGS if flag != "--fmad=false")
    rules = [finding.rule for finding in lint(ptx(text, flags=loose))]
    assert rules.count("fused") > 10
    rules = {finding.rule for finding in lint(ptx(text, flags=("--std=c++17", "--use_fast_math")))}
    assert rules >= {"fused", "flush to zero", "approximate"}


def planted(parameters: str, body: str) -> str:
    """A kernel of its own after kernel.cuh and rng.cuh."""
    words = inline_includes('#include "kernel.cuh"\n#include "rng.cuh"\n', "words", None)
    kernel = signature("planted", parameters)
    # Its fused sums are the source's own here, and no kernel below has any.
    return f'{words}{kernel.source}#line 1 "planted.cu"\nKERNEL(planted) {{ {unpack(kernel)} {body} }}\n'


def lint_planted(parameters: str, body: str) -> list[Finding]:
    return lint(ptx(planted(parameters, body)))


FLOAT_FAULTS = {
    "approximate": "x[0] = __fdividef(x[1], x[2]);",
    "flush to zero": 'asm("add.rn.ftz.f32 %0, %1, %2;" : "=f"(x[0]) : "f"(x[1]), "f"(x[2]));',
    "saturated": "x[0] = __saturatef(x[1]);",
    "may be fused": 'asm("mul.f32 %0, %1, %2;" : "=f"(x[0]) : "f"(x[1]), "f"(x[2]));',
    "fused": "x[0] = __fmaf_rn(x[1], x[2], x[3]);",
    "minimum": "x[0] = fminf(x[1], x[2]);",
    "rounding": "x[0] = __fadd_rz(x[1], x[2]);",
    "narrow float": '{ unsigned short h; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x[1])); x[0] = h; }',
    "float atomic": "atomicAdd(x, 1.0f);",
    "call": 'printf("%d", 1);',
}


@pytest.mark.parametrize("rule", FLOAT_FAULTS)
def test_a_planted_float_fault_is_seen(rule):
    head = 'extern "C" int printf(const char*, ...);\n' if rule == "call" else ""
    text = head + planted("float* x", f"FOR_ITEMS (k, 1) {{ {FLOAT_FAULTS[rule]} }}")
    found = lint(ptx(text))
    assert {finding.rule for finding in found} == {rule}, told(found)
    assert {finding.instruction.kernel for finding in found} == {"kernel_planted"}


def test_what_the_source_may_write_is_let_pass():
    body = """FOR_ITEMS (k, 1) {
        x[0] = x[1] * x[2] + x[3];
        x[1] = x[0] / x[3];
        x[2] = math::sqrt(x[1]) + (float)(int)x[4];
        x[3] = math::clamp(x[2], -3.0f, 7.0f);
        x[4] = math::min(x[5], x[6]);
    }"""
    assert told(lint_planted("float* x", body)) == []


# Parameters, body. Each forms an address in fewer than 64 bits from a block's number or a count.
ADDRESS_FAULTS = {
    "thread number": ("float* x", "int i = blockIdx.x * blockDim.x + threadIdx.x; x[i] = 1;"),
    "times a stride": (
        "float* x, i32 stride",
        "int i = blockIdx.x * blockDim.x + threadIdx.x; x[i * stride + 3] = 1;",
    ),
    "times a constant": ("float* x", "x[(int)blockIdx.x * 17 + (int)threadIdx.x] = 1;"),
    "shifted": ("float* x", "x[(blockIdx.x << 6) + threadIdx.x] = 1;"),
    "u32": ("float* x", "u32 e = blockIdx.x; x[e * 100u + threadIdx.x] = 1;"),
    "environment in an int": ("float* x, i64 n", "FOR_ITEMS (k, n) { int e = (int)k; x[e * 5] = 1; }"),
    "byte of an environment in an int": ("u8* x, i64 n", "FOR_ITEMS (k, n) { int e = (int)k; x[e * 5] = 1; }"),
    "byte of an environment in a u32": ("u8* x, i64 n", "FOR_ITEMS (k, n) { u32 e = (u32)k; x[e * 5] = 1; }"),
    "byte in an int": ("u8* x, i64 n", "FOR_ITEMS (k, n) x[(int)k] = 1;"),
    "element in an int": ("float* x, i64 n", "FOR_ITEMS (k, n) { int at = (int)(k * 5 + 2); x[at] = 1; }"),
    "element in a u32": ("float* x, i64 n", "FOR_ITEMS (k, n) { u32 at = (u32)(k * 5); x[at] = 1; }"),
    "element as a float": ("float* x, i64 n", "FOR_ITEMS (k, n) x[(i64)(float)k] = 1;"),
    "grid stride": (
        "float* x, i32 n",
        "for (int i = threadIdx.x; i < n; i += gridDim.x * blockDim.x) x[i] = 1;",
    ),
    "count as a stride": ("float* x, i32 n", "x[(i64)((int)threadIdx.x * n)] = 1;"),
    "count in an int": ("float* x, i64 n", "int size = (int)n; x[size + (int)threadIdx.x] = 1;"),
    "read": ("float* x, float* y", "y[threadIdx.x] = x[(int)(blockIdx.x * blockDim.x)];"),
    "atomic": ("i32* x", "atomicAdd(x + blockIdx.x * blockDim.x, 1);"),
    "choice": ("float* x, i32 c", "int at = c ? (int)blockIdx.x * 9 : 4; x[at] = 1;"),
    "through a local array": (
        "float* x, i32 c",
        "int at[4]; for (int j = 0; j < 4; ++j) at[j] = (int)(blockIdx.x * (blockDim.x + j)); x[at[c & 3]] = 1;",
    ),
    "through shared memory": (
        "float* x",
        "__shared__ int at[256]; at[threadIdx.x] = (int)(blockIdx.x * blockDim.x); __syncthreads(); "
        "x[at[threadIdx.x ^ 1]] = 1;",
    ),
    "through a shuffle": (
        "float* x",
        "int at = __shfl_sync(0xffffffffu, (int)(blockIdx.x * blockDim.x), 0); x[at] = 1;",
    ),
    "bits beyond an int masked": ("float* x, i64 n", "FOR_ITEMS (k, n) x[k & 0x400007fffffffll] = 1;"),
    "long word taken apart": ("float* x, i64 n", "FOR_ITEMS (k, n) x[(u32)(k * 3) + (u32)((k * 3) >> 32)] = 1;"),
}


@pytest.mark.parametrize("fault", ADDRESS_FAULTS)
def test_a_planted_short_address_is_seen(fault):
    found = lint_planted(*ADDRESS_FAULTS[fault])
    assert {finding.rule for finding in found} - {"rounding"} == {"address"}, told(found)
    short = next(finding for finding in found if finding.rule == "address")
    assert short.instruction.source == "planted.cu:1" and short.origin is not None
    assert "planted.cu:1" in str(short)


ADDRESSES = {
    "item": ("float* x, i64 n", "FOR_ITEMS (k, n) x[k * 5 + 3] = 1;"),
    "thread number": ("float* x", "x[(i64)blockIdx.x * blockDim.x + threadIdx.x] = 1;"),
    "block": ("float* x", "x[blockIdx.x] = 1;"),
    "block and lane": ("float* x", "x[(i64)blockIdx.x * 4 + threadIdx.x / 32] = 1;"),
    "lane inside an environment": (
        "float* x, i64 n",
        "FOR_ITEMS (k, n) for (int i = 0; i < 9; ++i) x[k * 81 + (int)(threadIdx.x % 9) * 9 + i] = 1;",
    ),
    "count as a stride": ("float* x, i64 n", "x[(i64)threadIdx.x * n] = 1;"),
    "remainder": ("float* x, i64 n", "FOR_ITEMS (k, n) x[(u32)k * 2654435761u % 16] = 1;"),
    "bits": ("float* x, i64 n", "FOR_ITEMS (k, n) x[(u32)(k >> 3) * 2654435761u & 15] = 1;"),
    "mask of 60 bits": ("float* x, i64 n", "FOR_ITEMS (k, n) x[k & 0x0fffffffffffffffll] = 1;"),
    "product as a value": ("i32* x, i64 n", "FOR_ITEMS (k, n) x[k] = (int)k * 3;"),
    "product in a question": ("i32* x, i64 n", "FOR_ITEMS (k, n) if ((int)k * 3 > 500) x[k] = 1;"),
    "random": (
        "float* x, const u32* key, i64 n",
        "FOR_ITEMS (k, n) { Rng rng = {key[2 * k], key[2 * k + 1], 0, (u32)k, 1}; x[k * 7 + rng.below(1, 0, 7)] = 1; }",
    ),
    "read from memory": ("float* x, const i32* at, i64 n", "FOR_ITEMS (k, n) x[k * 8 + at[k] * 2] = 1;"),
    "beside a float in shared memory": (
        "float* x, const i32* at, float scale",
        "__shared__ int index[32]; __shared__ float value[32]; index[threadIdx.x] = at[threadIdx.x]; "
        "value[threadIdx.x] = scale * 3; __syncthreads(); x[index[threadIdx.x ^ 1]] = value[threadIdx.x ^ 1];",
    ),
}


@pytest.mark.parametrize("case", ADDRESSES)
def test_addresses_in_64_bits_are_let_pass(case):
    made = ptx(planted(*ADDRESSES[case]))
    assert told(lint_planted(*ADDRESSES[case])) == []
    assert any(".global" in instruction.opcode for instruction in instructions(made))


@pytest.mark.parametrize(
    ("old", "new", "file"),
    [
        ("(i64)visit_order(blockIdx.x, gridDim.x) *", "(int)visit_order(blockIdx.x, gridDim.x) *", "step.cuh"),
        ("i64 k = (i64)blockIdx.x *", "int k = blockIdx.x *", "sampler.cu"),
        ("OUTPUT_ROWS = NUM_AGENTS", "UNUSED = 0; constexpr i32 OUTPUT_ROWS = NUM_AGENTS", None),  # e itself is long
        ("c.row = env *", "c.row = (i32)env * (i32)", "step.cuh"),
        ("(table + first * N)", "(table + (i32)first * N)", "sampler.cu"),
        ("(i64)env * 10", "(i32)env * 10", "generated functions"),
    ],
)
def test_a_32_bit_address_in_the_engine_is_found(old, new, file):
    game = Text("tag_gridworld")
    text = game.write()
    assert old in text
    found = [finding for finding in lint(ptx(text.replace(old, new))) if finding.rule == "address"]
    if file is None:
        assert told(found) == []
    else:
        assert any(f" ({file}:" in finding for finding in told(found))


def test_ptx_is_read_whole():
    made = """
    .version 8.0
    .target sm_80
    .address_size 64
    .visible .entry one(
        .param .u64 one_param_0,
        .param .u32 one_param_1
    )
    .maxntid 256, 1, 1
    {
        .reg .pred %p<3>;
        .local .align 4 .b8 __local_depot0[16];
        ld.param.u64 %rd1, [one_param_0];   // a comment; with a semicolon
    $L__BB0_1: @!%p1 bra $L__BB0_1;
        { // callseq 0, 0
        .param .b32 param0;
        call.uni (retval0),
        vprintf,
        (
        param0
        );
        } // callseq 0
        {  .reg .pred p; setp.ne.u32 p, %r1, 0; @p st.global.v2.f32 [%rd1+8], {%f1, %f2}; }
        ret;
    }
    .entry two()
    {
        cp.async.bulk.shared::cluster.global [%r1], [%rd1], %r2;
    }
    """
    read = [(instruction.kernel, instruction.opcode, instruction.operands) for instruction in instructions(made)]
    assert read == [
        ("one", "ld.param.u64", ("%rd1", "[one_param_0]")),
        ("one", "bra", ("$L__BB0_1",)),
        ("one", "call.uni", ("(retval0)", "vprintf", "( param0 )")),
        ("one", "setp.ne.u32", ("p", "%r1", "0")),
        ("one", "st.global.v2.f32", ("[%rd1+8]", "{%f1, %f2}")),
        ("one", "ret", ()),
        ("two", "cp.async.bulk.shared::cluster.global", ("[%r1]", "[%rd1]", "%r2")),
    ]


def test_a_kernel_has_a_parameter_for_each_field_of_its_struct():
    kernel = signature("planted", "float* x, bool flag, i64 n, u8 small, i32 last")
    made = ptx(
        planted("float* x, bool flag, i64 n, u8 small, i32 last", "FOR_ITEMS (k, n) x[k] = flag + small + last;")
    )
    sizes = [int(bits) // 8 for _, bits, _ in PARAMETER.findall(made)]
    assert sizes == [argument.field_dtype.itemsize for argument in kernel.arguments]
    assert parameter_spans(structure(kernel)) == list(zip(kernel.offsets.values(), sizes, strict=True))
