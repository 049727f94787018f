"""Signatures of kernels that tests write themselves, from their arguments as C++ declares them."""

import numpy as np

from gpu_vecenv.declare.kernels import C_TYPES, Array, KernelSignature, Scalar

DTYPES = {c_type: dtype for dtype, c_type in C_TYPES.items()}


def signature(name: str, parameters: str) -> KernelSignature:
    """``signature("scale", "float* x, float a, i64 n")``."""
    arguments: list[Array | Scalar] = []
    for parameter in parameters.split(","):
        *words, argument = parameter.replace("*", " * ").split()
        const, pointer = "const" in words, "*" in words
        (c_type,) = [word for word in words if word not in ("const", "*")]
        if pointer:
            arguments.append(Array(argument, DTYPES.get(c_type), const=const, optional=c_type == "void"))
        else:
            arguments.append(Scalar(argument, DTYPES[c_type]))
    return KernelSignature(name, tuple(arguments))


def unpack(kernel: KernelSignature) -> str:
    """C++ that gives the body of a kernel a local copy of each argument, under the argument's name."""
    return f"auto [{', '.join(kernel.by_name)}] = args;"


SCALE = '#include "kernel.cuh"\nKERNEL(scale) { FOR_ITEMS (k, args.n) args.x[k] *= args.a; }\n'
SCALE_KERNEL = KernelSignature("scale", (Array("x", np.float32), Scalar("a", np.float32), Scalar("n", np.int64)))
