"""Outputs of a vector environment, copied to the host and compared bitwise."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[Any]
Bools = NDArray[np.bool_]
DEFINED = {"final_obs", "action_mask"}  # infos that are part of the interface, at any depth
MAX_CHARACTERS = 100  # of a value in a message
Tree = Any  # an array, or dicts and tuples of trees


@dataclass(frozen=True)
class Finding:
    """One violation: the value found, the expected value, row and step (0 is the reset)."""

    got: str
    expected: str
    row: int | None = None
    step: int | None = None


class Leaf(NamedTuple):
    """An array on the host, and a mask of its valid rows (None: all)."""

    values: Array
    mask: Bools | None

    def bits(self, rows: int) -> NDArray[np.uint8]:
        """(rows, bytes): the bytes of each row, zero where it is masked, then one byte with the mask."""
        values = self.values[:rows]
        if values.dtype == object:
            digests = [hashlib.blake2b(canonical(value), digest_size=16).digest() for value in values]
            bits = np.frombuffer(b"".join(digests), np.uint8).reshape(rows, -1)
        else:
            bits = np.ascontiguousarray(values).reshape(rows, -1).view(np.uint8)
        shown = np.ones(rows, np.bool_) if self.mask is None else self.mask[:rows]
        return np.concatenate([bits * shown[:, None], shown[:, None].view(np.uint8)], axis=1)

    def same(self, other: Leaf) -> bool:
        """Whether values and masks are bitwise equal, masked rows included; a fast path before ``bits``."""
        kinds = [(leaf.values.dtype, leaf.values.shape) for leaf in (self, other)]
        if kinds[0] != kinds[1] or self.values.dtype == object:
            return False
        masks = [None if leaf.mask is None else leaf.mask.tobytes() for leaf in (self, other)]
        return masks[0] == masks[1] and self.values.tobytes() == other.values.tobytes()

    def text(self, row: int | None) -> str:
        """A row, or all of it, for a message."""
        if row is not None and self.mask is not None and not self.mask[row]:
            return "nothing"
        return show(self.values[()] if row is None else self.values[row])


class Record:
    """The outputs of one reset or step: copies (``leaves``, by dotted name) and the objects returned (``raw``).

    Args:
        raw: Name -> output.
        rows: Rows of the vector environment.
        left_out: Names of leaves that are not compared.
    """

    def __init__(self, raw: Mapping[str, Tree], rows: int, left_out: Collection[str] = ()):
        self.raw, self.rows, self.left_out = dict(raw), rows, left_out
        leaves = (leaf for name, value in raw.items() for leaf in _leaves(name, value, None))
        self.leaves: dict[str, Leaf] = {name: leaf for name, leaf in leaves if name not in left_out}
        self._added: list[tuple[Record, str, Bools]] = []

    def add(self, other: Record, prefix: str, rows: Bools) -> None:
        """Add the outputs of another call, of which only some rows are valid."""
        self._added.append((other, prefix, rows))
        for name, leaf in other.leaves.items():
            if other.by_row(leaf):
                self.leaves[f"{prefix}.{name}"] = Leaf(leaf.values, rows if leaf.mask is None else rows & leaf.mask)

    def copied_again(self) -> Record:
        """The same from the outputs as they are by now."""
        record = Record(self.raw, self.rows, self.left_out)
        for other, prefix, rows in self._added:
            record.add(other.copied_again(), prefix, rows)
        return record

    def by_row(self, leaf: Leaf) -> bool:
        """Whether an output has one entry for each row."""
        return leaf.values.ndim > 0 and len(leaf.values) == self.rows

    def values(self, name: str) -> Array:
        """One output on the host."""
        return self.leaves[name].values

    def named(self, *prefixes: str) -> list[str]:
        """Sorted names of the outputs at or below these names."""
        return sorted(n for n in self.leaves if any(n == p or n.startswith(f"{p}.") for p in prefixes))

    def bits(self, names: Sequence[str], chosen: slice) -> bytes:
        """The bytes of some rows of some outputs.

        An output that is masked in all these rows is left out: whether it is there at all depends on other rows.
        """
        leaves = [leaf for leaf in map(self.leaves.__getitem__, names) if self.by_row(leaf)]
        shown = [leaf for leaf in leaves if leaf.mask is None or leaf.mask[chosen].any()]
        return b"".join(leaf.bits(self.rows)[chosen].tobytes() for leaf in shown)

    def row(self, name: str, row: int) -> list[bytes]:
        """One row of an output as canonical bytes per leaf, independent of how dicts and arrays nest."""
        values = [self.leaves[leaf].values[row] for leaf in self.named(name)]
        return [canonical(leaf.values) for value in values for _, leaf in sorted(_leaves("", value, None))]


def host(value: Any) -> Array:
    """A copy as a NumPy array; other objects become an array of dtype object."""
    if isinstance(value, torch.Tensor):
        return np.array(value.detach().cpu().numpy())
    if isinstance(value, np.ndarray | np.generic | bool | int | float | complex):
        return _copied(value) if isinstance(value, np.ndarray) and value.dtype == object else np.array(value)
    array = np.empty((), object)
    array[()] = _copied(value)
    return array


def _copied(value: Any) -> Any:
    """A deep copy with tensors converted to arrays."""
    if isinstance(value, torch.Tensor):
        return host(value)
    if isinstance(value, np.ndarray) and value.dtype == object:
        array = np.empty(value.shape, object)
        for index in np.ndindex(value.shape):
            array[index] = _copied(value[index])
        return array
    if type(value) in (dict, list, tuple):
        return {k: _copied(v) for k, v in value.items()} if type(value) is dict else type(value)(map(_copied, value))
    return deepcopy(value)


def arrays(tree: Tree) -> Iterator[Array]:
    """All arrays of a tree, on the host."""
    if isinstance(tree, Mapping | tuple):
        for part in tree.values() if isinstance(tree, Mapping) else tree:
            yield from arrays(part)
    else:
        yield host(tree)


def canonical(value: Any) -> bytes:
    """Bytes that are equal where two values are bitwise equal."""
    if isinstance(value, Mapping):
        return b"{" + b",".join(canonical(key) + b":" + canonical(value[key]) for key in sorted(value, key=str)) + b"}"
    if isinstance(value, list | tuple):
        return b"[" + b",".join(map(canonical, value)) + b"]"
    if value is None or isinstance(value, str):
        return repr(value).encode()
    array = host(value)
    if array.dtype == object and array.ndim:
        return b"".join(map(canonical, array.ravel()))
    if array.dtype == object:  # the default repr of an object contains its address
        plain = vars(object)["__repr__"] is getattr(type(value), "__repr__", None)
        return (type(value).__qualname__ if plain else repr(value)).encode()
    return f"{array.dtype.str}{array.shape}".encode() + array.tobytes()


def show(value: Any) -> str:
    """A short text of a value, with all digits of its numbers."""
    if isinstance(value, np.ndarray | np.generic) and value.dtype != object:
        text = np.array2string(np.asarray(value), threshold=8, edgeitems=3, floatmode="unique")
        return f"{' '.join(text.split())} {value.dtype}"
    text = repr(value)
    return text if len(text) <= MAX_CHARACTERS else text[: MAX_CHARACTERS - 3] + "..."


def difference(
    got: Sequence[Record], expected: Sequence[Record], chosen: Bools | None = None, name: str = ""
) -> Finding | None:
    """The first difference between two trajectories.

    Args:
        got: The trajectory under test; its first record is a reset.
        expected: The reference. Rows that only one of them has are not compared.
        chosen: (rows,) bool, rows to compare; None compares all rows, and outputs without a row axis too.
        name: Compare only outputs at or below this name.
    """
    for step, (new, old) in enumerate(zip(got, expected, strict=True)):
        names = sorted({*new.leaves, *old.leaves}) if not name else sorted({*new.named(name), *old.named(name)})
        for leaf in names:
            finding = _leaf_difference(leaf, step, new, old, chosen)
            if finding is not None:
                return finding
    return None


def differing_infos(got: Record, expected: Record) -> set[str] | None:
    """Names of infos that differ, but for those that interfaces define; None if another output differs."""
    names = sorted({*got.leaves, *expected.leaves})
    differing = {name for name in names if _leaf_difference(name, 0, got, expected, None) is not None}
    infos = {name for name in differing if name.startswith("info.") and not DEFINED.intersection(name.split("."))}
    return infos if infos == differing else None


def _leaf_difference(name: str, step: int, new: Record, old: Record, chosen: Bools | None) -> Finding | None:
    sides = [(record, record.leaves.get(name)) for record in (new, old)]
    if sides[0][1] is not None and sides[1][1] is not None and sides[0][1].same(sides[1][1]):
        return None
    present = [leaf for _, leaf in sides if leaf is not None]
    row, rows = None, min(new.rows, old.rows)
    if all(leaf is None or record.by_row(leaf) for record, leaf in sides):
        if len({(leaf.values.dtype, leaf.values.shape[1:]) for leaf in present}) == 1:
            # A missing output equals one whose rows are all masked.
            bits = [leaf.bits(rows) if leaf else np.zeros_like(present[0].bits(rows)) for _, leaf in sides]
            unequal = (bits[0] != bits[1]).any(1) & (True if chosen is None else chosen)
            if not unequal.any():
                return None
            row = int(unequal.argmax())
    elif chosen is not None or (len(present) == 2 and canonical(present[0].values) == canonical(present[1].values)):
        return None
    texts = ["nothing" if leaf is None else leaf.text(row) for _, leaf in sides]
    return Finding(f"{name} = {texts[0]}", f"{name} = {texts[1]}", row, step)


def _leaves(name: str, value: Tree, mask: Bools | None) -> Iterator[tuple[str, Leaf]]:
    masked = name.split(".")[0] == "info"  # in Gymnasium's infos "_key" is the mask of "key"
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if masked and str(key).startswith("_") and str(key)[1:] in value:
                continue
            own = value.get(f"_{key}") if masked else None
            if own is not None:
                own = host(own).astype(np.bool_)
                own = own if mask is None or mask.shape != own.shape else own & mask
            yield from _leaves(f"{name}.{key}", inner, mask if own is None else own)
    elif isinstance(value, tuple) and not masked:
        for index, inner in enumerate(value):
            yield from _leaves(f"{name}.{index}", inner, mask)
    else:
        values = host(value)
        fits = mask is not None and values.ndim > 0 and mask.shape == values.shape[:1]
        yield name, Leaf(values, mask if fits else None)
