"""What a kernel's PTX must not hold: floats that round otherwise than the source says, addresses formed in 32 bits.

``lint`` reads the PTX that NVRTC or nvcc gives and returns findings; ``-lineinfo`` among the compiler's flags lets them
name the line of the source. Float rules look at single instructions. The rule about addresses follows values:

* A value may be as large as the number of environments if it comes from the number of a block or of blocks (``%ctaid``,
  ``%nctaid``), or from a parameter of the kernel that is no float: a count, or a pointer.
* It is cut to 32 bits by a 32-bit product or shift to the left with such a value in it, by a conversion to 32 bits in
  any of the forms that compilers give it, and by a float between. A 32-bit sum alone is none: compilers shorten a
  64-bit sum of a block's and a thread's number where it cannot overflow.
* It is small again as a remainder, as the bits that a constant below 2**31 leaves, and as the upper half of a long
  word, which is how a random number below n is drawn.
* If a value that was cut feeds an address of global memory (or of unknown memory), that is a finding.

Numbers inside an env (lanes, agents, products of them and of constants) depend on no block and are let pass: they
are bounded by an env's size. So are numbers that were read from memory, but for local and shared memory, where what
is read may be whatever the same kernel wrote there with as many bits. The order of instructions does not matter to
the rule: a register is whatever any instruction writes to it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

ENTRY = re.compile(r"\.(?:entry|func)\b\s*(?:\([^)]*\)\s*)?([\w$]+)")
FILE = re.compile(r'\.file\s+(\d+)\s+"([^"]*)"')
LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)")
PARAMETER = re.compile(r"\.param\s+\.([a-z])(\d+)\b[^,()]*?([\w$]+_param_\d+)")  # kind, bits and name
INSTRUCTION = re.compile(r"(?:@!?(%?[\w$]+)\s+)?([a-z]\w*(?:(?:\.|::)\w+)*)\s*(.*)", re.DOTALL)
LABEL = re.compile(r"[$\w]+:(?!:)\s*")
REGISTER = re.compile(r"%[A-Za-z_]\w*(?:\.[xyzw])?")
CONSTANT = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|\d+)U?")
ZEROS = re.compile(r"0f[08]0{7}|0d[08]0{15}")
GRID_SIZED = re.compile(r"%(?:n?ctaid|n?clusterid|gridid)\b")
FLOATS = {"f16", "f16x2", "bf16", "bf16x2", "tf32", "f32", "f32x2", "f64"}
NARROW = FLOATS - {"f32", "f32x2", "f64"}
ROUNDED = {"add", "sub", "mul", "fma", "div", "sqrt", "rcp", "cvt"}
APPROXIMATIONS = {"ex2", "lg2", "sin", "cos", "tanh", "rsqrt"}
SPACES = {"param", "const", "local", "shared"}  # neither global nor unknown
MEMORY = {"ld", "ldu", "st", "atom", "red", "prefetch", "cp"}
NO_RESULT = {"st", "red", "prefetch", "bra", "ret", "exit", "bar", "barrier", "trap", "membar", "fence", "nanosleep"}
SMALL = {"setp", "set", "popc", "clz", "bfind", "vote", "activemask", "match", "testp", "isspacep"}

COUNT_BITS = (1 << 48) - (1 << 31)  # beyond a positive int; no count has more
INSIDE, LARGE, CUT = 0, 1, 2  # inside an environment; as large as the number of environments; that, and cut to 32 bits


@dataclass(frozen=True)
class Instruction:
    """One instruction of a kernel."""

    kernel: str
    line: int  # of the PTX
    source: str  # file:line, where the PTX tells it
    opcode: str
    operands: tuple[str, ...]

    @property
    def parts(self) -> list[str]:
        return self.opcode.split(".")

    @property
    def base(self) -> str:
        return self.parts[0]

    def __str__(self) -> str:
        return f"{self.opcode} {', '.join(self.operands)}".rstrip()


@dataclass(frozen=True)
class Finding:
    """A rule and the instruction that breaks it; of an address, where the value was cut."""

    rule: str
    instruction: Instruction
    origin: Instruction | None = None

    def __str__(self) -> str:
        where = f"{self.instruction.kernel}, PTX line {self.instruction.line} ({self.instruction.source})"
        text = f"{self.rule}: {self.instruction} in {where}"
        if self.origin is not None:
            text += f", from {self.origin}, PTX line {self.origin.line} ({self.origin.source})"
        return text


def instructions(ptx: str) -> Iterator[Instruction]:
    """The instructions of all kernels, in order."""
    files: dict[str, str] = dict(FILE.findall(ptx))
    kernel, source, pending, depth = "", "?", "", 0
    for number, line in enumerate(ptx.splitlines(), start=1):
        text = line.split("//")[0].strip()
        if match := LOC.match(text):
            source = f"{files.get(match[1], '?').rpartition('/')[2]}:{match[2]}"
            continue
        pending = f"{pending} {text}".strip()
        if depth == 0:  # a head may take several lines, until its brace
            if pending.endswith("{") and (match := ENTRY.search(pending)):
                kernel, pending, depth = match[1], "", 1
            elif pending.endswith((";", "{", "}")) or not ENTRY.search(pending):
                pending = ""
            continue
        if not pending.endswith((";", ":", "{", "}")):
            continue  # goes on in the next line
        depth += pending.count("{") - pending.count("}")
        for piece in pending.split(";"):
            piece = LABEL.sub("", piece.strip().lstrip("{}").strip(), count=1)
            match = INSTRUCTION.fullmatch(piece)
            if match is not None:
                yield Instruction(kernel, number, source, match[2], tuple(_split(match[3])))
        pending = ""


def _split(operands: str) -> Iterator[str]:
    """At commas outside of brackets."""
    depth, start = 0, 0
    for place, letter in enumerate(operands):
        depth += (letter in "{[(") - (letter in "}])")
        if letter == "," and depth == 0:
            yield operands[start:place].strip()
            start = place + 1
    if operands[start:].strip():
        yield operands[start:].strip()


def lint(ptx: str, allowed: Collection[str] = ()) -> list[Finding]:
    """Everything in ``ptx`` that breaks a rule.

    The float rules leave out the ``allowed`` instructions, whole opcodes that a source writes itself.

    Rules: "approximate", "flush to zero", "saturated", "may be fused" (a product or sum that a later compiler may
    contract), "fused", "minimum" (the GPU's own idea of NaN and -0), "rounding" (not to nearest), "narrow float",
    "float atomic", "call" (what is called cannot be followed) and "address".
    """
    found, kernels = [], dict[str, list[Instruction]]()
    parameters = PARAMETER.findall(ptx)
    wide = {f"[{name}]" for _, bits, name in parameters if bits == "64"}
    floats = {f"[{name}]" for kind, _, name in parameters if kind == "f"}
    for instruction in instructions(ptx):
        if instruction.opcode not in allowed:
            found += [Finding(rule, instruction) for rule in _float_rules(instruction)]
        kernels.setdefault(instruction.kernel, []).append(instruction)
    for body in kernels.values():
        found += _addresses(body, wide, floats)
    return found


def _float_rules(instruction: Instruction) -> Iterator[str]:
    parts, base = instruction.parts, instruction.base
    floats = FLOATS.intersection(parts)
    if base == "call":
        yield "call"
    if "approx" in parts or "full" in parts or (base in APPROXIMATIONS and floats):
        yield "approximate"
    if "ftz" in parts:
        yield "flush to zero"
    if "sat" in parts or "satfinite" in parts:
        yield "saturated"
    if floats & NARROW:
        yield "narrow float"
    if not floats:
        return
    if base in ("atom", "red", "redux", "multimem"):
        yield "float atomic"
    elif base in ("fma", "mad"):
        yield "fused"
    elif base in ("add", "sub", "mul") and not {"rn", "rz", "rm", "rp"}.intersection(parts):
        yield "may be fused"
    elif base in ("min", "max"):
        # Beside a number other than 0 they are the comparison and choice that math.cuh writes.
        numbers = [operand for operand in instruction.operands if operand.startswith(("0f", "0d"))]
        if not any(not ZEROS.fullmatch(number) for number in numbers):
            yield "minimum"
    if base in ROUNDED and {"rz", "rm", "rp"}.intersection(parts):
        yield "rounding"


@dataclass
class _Values:
    """What is known of the registers of one kernel: how large, and where they were cut."""

    wide_parameters: Collection[str]  # of 64 bits: a load of fewer cuts them
    float_parameters: Collection[str]  # neither counts nor pointers
    level: dict[str, int] = field(default_factory=dict)
    origin: dict[str, Instruction] = field(default_factory=dict)

    def of(self, operand: str) -> tuple[int, Instruction | None]:
        """The largest of the registers in an operand."""
        level, origin = INSIDE, None
        for register in REGISTER.findall(operand) or [operand]:
            own = LARGE if GRID_SIZED.match(register) else self.level.get(register, INSIDE)
            if own > level:
                level, origin = own, self.origin.get(register)
        return level, origin

    def join(self, operand: str, level: int, origin: Instruction | None) -> bool:
        """Write to a register, or several; whether that told something new."""
        new = False
        for register in REGISTER.findall(operand) or [operand]:
            if level > self.level.get(register, INSIDE):
                self.level[register], new = level, True
                if origin is not None:
                    self.origin[register] = origin
        return new


def _addresses(
    body: list[Instruction], wide_parameters: Collection[str], float_parameters: Collection[str]
) -> list[Finding]:
    values, changed = _Values(wide_parameters, float_parameters), True
    while changed:  # levels only rise: this ends
        changed = False
        for instruction in body:
            changed |= _flow(instruction, values)
    found = []
    for instruction in body:
        spaces = set(instruction.opcode.replace("::", ".").split("."))
        if instruction.base not in MEMORY or ("global" not in spaces and spaces & SPACES):
            continue
        for operand in instruction.operands:
            level, origin = values.of(operand) if operand.startswith("[") else (INSIDE, None)
            if level == CUT:
                found.append(Finding("address", instruction, origin))
    return found


def _flow(instruction: Instruction, values: _Values) -> bool:
    """Carry what is known through one instruction; whether that told something new."""
    base, parts, operands = instruction.base, instruction.opcode.replace("::", ".").split("."), instruction.operands
    if base == "st" and (space := SPACES.intersection(parts)):  # of each size, the memory counts as one register
        memory = f"@{space.pop()}{_bits(parts[-1])}"
        return any(values.join(memory, *values.of(operand)) for operand in operands[1:])
    if base in NO_RESULT or not operands:
        return False
    if base in MEMORY:
        if "param" in parts:
            return _load_parameter(instruction, values)
        read = [f"@{space}{_bits(parts[-1])}" for space in ("local", "shared") if space in parts]
        return any(values.join(operands[0], *values.of(place)) for place in read)
    if base in SMALL:
        return False
    inputs = list(operands[1:])
    if base in ("selp", "slct"):  # who chooses is no part of what is chosen
        inputs = inputs[:2]
    elif base in ("shfl", "mov", "cvt", "cvta"):
        inputs = inputs[:1]
    levels = [values.of(operand) for operand in inputs]
    level, origin = max(levels, key=lambda known: known[0], default=(INSIDE, None))
    if level == INSIDE or _bounds(instruction, inputs, levels):
        return False
    if level == LARGE and _cuts(instruction, inputs):
        level, origin = CUT, instruction
    return values.join(operands[0], level, origin)


def _load_parameter(instruction: Instruction, values: _Values) -> bool:
    """Load a parameter, which may be as large as the number of environments if it is no float."""
    target, source = instruction.operands
    if source in values.float_parameters:
        return False
    if source in values.wide_parameters and _bits(instruction.parts[-1]) < 64:
        return values.join(target, CUT, instruction)
    return values.join(target, LARGE, None)


def _bounds(instruction: Instruction, inputs: list[str], levels: list[tuple[int, Instruction | None]]) -> bool:
    """Whether the result is small, however large one input is."""
    base, numbers = instruction.base, _constants(inputs)
    if base == "rem":
        return levels[1][0] == INSIDE
    if base == "and":
        return any(0 <= number < 1 << 31 for number in numbers)
    if base == "min" and {"u32", "u64"}.intersection(instruction.parts):
        return any(level == INSIDE for level, _ in levels)
    if base == "shr":
        lifted = [origin for _, origin in levels if origin is not None and origin.base in ("mul", "mad", "shl")]
        upper_half = _bits(instruction.parts[-1]) == 64 and any(number >= 32 for number in numbers[-1:])
        return upper_half and not any(_bits(origin.parts[-1]) == 64 for origin in lifted)
    return base == "bfe" and bool(numbers) and 0 <= numbers[-1] < 31


def _cuts(instruction: Instruction, inputs: list[str]) -> bool:
    """Whether a value that may be as large as the number of environments comes out of it in 32 bits, or rounded."""
    base, parts, numbers = instruction.base, instruction.parts, _constants(inputs)
    kind = parts[-1]
    if base == "cvt":
        to, source = parts[-2:]
        # cvt.s64.s32 %rd2, %rd1 takes the lower half of a long register.
        return to in FLOATS or _bits(to) < _bits(source) or (_bits(source) < 64 and inputs[0].startswith("%rd"))
    if base == "mov":  # mov.b64 {%r1, %r2}, %rd1 takes a long register apart
        return instruction.operands[0].startswith("{")
    # Times 2**32, to be shifted down again: the lower half.
    if base in ("mul", "mad") and "wide" not in parts and "hi" not in parts:
        return _bits(kind) < 64 or any(number and number % (1 << 32) == 0 for number in numbers)
    if base == "shl" and _bits(kind) == 64:
        return any(number >= 32 for number in numbers)
    if base == "and":
        # A mask of 62 bits or more rounds a count down; one of fewer may leave it as it is.
        return any(1 << 31 <= number < 1 << 62 and number & COUNT_BITS != COUNT_BITS for number in numbers)
    return base in ("mul24", "mad24", "dp2a", "dp4a", "shl", "shf", "bfe")


def _constants(operands: list[str]) -> list[int]:
    return [int(operand.rstrip("U"), 0) for operand in operands if CONSTANT.fullmatch(operand)]


def _bits(kind: str) -> int:
    digits = re.search(r"\d+", kind)
    return int(digits[0]) if digits else 32
