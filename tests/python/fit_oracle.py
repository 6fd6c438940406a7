# SPDX-License-Identifier: Apache-2.0
"""Which readings a tensor has, by naive search: the rule of detection written a second time, in Python."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import kvstride as kv

AXES = "LBNHD"
Sizes = dict[str, int]


@dataclass
class Atom:
    """One dimension of the natural tensor: a term, `KV`, or the record in braces."""

    kind: str  #: "axis", "outer" (`N/k`), "inner" (`N%k`), "KV" or "record"
    axis: str = ""
    symbol: str = ""
    stride: int | None = None  #: `@`, in bytes
    record: dict[str, int] = field(default_factory=dict)  #: dims of each plane

    def length(self, sizes: Sizes) -> int | None:
        """Length, where the sizes are known."""
        if self.kind == "KV":
            return 2
        if self.kind == "record":
            return sum(self.record.values())
        if self.kind == "axis":
            return sizes.get(self.axis)
        if self.kind == "inner":
            return sizes.get(self.symbol)
        if self.axis in sizes and self.symbol in sizes and sizes[self.axis] % sizes[self.symbol] == 0:
            return sizes[self.axis] // sizes[self.symbol]
        return None

    def learn(self, length: int, sizes: Sizes) -> bool:
        """Take a dimension's length; False where it contradicts."""
        if self.kind in ("KV", "record"):
            return length == self.length(sizes)
        if self.kind == "outer":
            if self.symbol not in sizes:
                return False
            length *= sizes[self.symbol]
        name = self.symbol if self.kind == "inner" else self.axis
        return sizes.setdefault(name, length) == length

    @property
    def label(self) -> str:
        """As a declared shape has it."""
        return {
            "axis": self.axis,
            "outer": f"{self.axis}//{self.symbol}",
            "inner": self.symbol,
            "KV": "2",
            "record": "?",
        }[self.kind]


def atoms_of(order: str) -> list[list[Atom]]:
    """Atoms of each tensor of a registry order without an opaque interior."""
    parts = []
    for text in order.split("|"):
        text = re.sub(r"^\s*\w+:", "", text)
        atoms = []
        for word in re.findall(r"\{[^}]*\}|\S+", text):
            if word.startswith("{"):
                dims = re.findall(r"(\w+): D\[(\d+)\]", word)
                atoms.append(Atom("record", record={name: int(n) for name, n in dims}))
            elif word.startswith("KV"):
                atoms.append(Atom("KV", stride=int(word[3:]) if "@" in word else None))
            elif "/" in word:
                atoms.append(Atom("outer", word[0], word[2:]))
            elif "%" in word:
                atoms.append(Atom("inner", word[0], word[2:]))
            else:
                atoms.append(Atom("axis", word))
        parts.append(atoms)
    return parts


#: Which atoms (by index) a dimension holds, and whether it is a padded one.
Dims = list[tuple[tuple[int, ...], bool]]


def natural_groups(num_atoms: int, rank: int) -> Iterator[Dims]:
    """All ways to fuse neighbours into `rank` dimensions."""
    for cuts in itertools.combinations(range(1, num_atoms), rank - 1):
        edges = [0, *cuts, num_atoms]
        yield [(tuple(range(a, b)), False) for a, b in itertools.pairwise(edges)]


def declared_groups(atoms: list[Atom], shape: str) -> Dims | None:
    """The dimensions of a declared shape; a bare number holds what no other dimension does."""
    dims: list[tuple[list[int], bool]] = []
    open_dim = None
    for text in shape.split(","):
        group = []
        for factor in text.strip().split("*"):
            at = next((i for i, atom in enumerate(atoms) if atom.label == factor), None)
            if at is not None:
                group.append(at)
            elif atoms[-1].kind == "record" and factor.isdigit() and factor != "1":
                group.append(len(atoms) - 1)
            elif factor.isdigit() and factor != "1":
                open_dim = len(dims)
        dims.append((sorted(group), False))
    left = [i for i in range(len(atoms)) if all(i not in group for group, _ in dims)]
    if left:
        if open_dim is None or len(left) > 1:
            return None
        dims[open_dim] = (left, True)
    return [(tuple(group), padded) for group, padded in dims]


@dataclass(frozen=True)
class Read:
    """Lengths of the axes by plane, and what each index of each axis adds to the address."""

    lengths: tuple
    addresses: tuple


def solve(
    atoms: list[Atom],
    dims: Dims,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    item: int,
    given: Sizes,
    sizes: Sizes,
) -> list[tuple[int, int]] | None:
    """(length, byte stride) of each atom, or None where the tensor is not that. Learns `sizes`."""
    for (group, padded), length in zip(dims, shape, strict=True):
        if not group and length != 1:
            return None
        if len(group) == 1 and padded:
            if sizes.setdefault(atoms[group[0]].axis, length) > length:
                return None
        elif len(group) == 1 and atoms[group[0]].kind != "outer" and not atoms[group[0]].learn(length, sizes):
            return None
    for (group, padded), length in zip(dims, shape, strict=True):
        if len(group) == 1 and not padded and not atoms[group[0]].learn(length, sizes):
            return None
    for (group, _), length in zip(dims, shape, strict=True):
        if len(group) < 2:
            continue
        members = [atoms[i] for i in group]
        if any(atom.kind == "record" or (atom.axis == "L" and sizes.get("L") == 1) for atom in members):
            return None  # one layer is a dimension of its own, or not in the tensor at all
        unknown = [atom for atom in members if atom.length(sizes) is None]
        packed = len(members) == 2 and members[0].kind == "KV" and members[1].label == "D"
        hinted = any(atom.kind == "axis" and atom.axis in given for atom in members)
        if len(unknown) > 1 or (unknown and (unknown[0].kind != "axis" or not (packed or hinted))):
            return None
        known = math.prod(atom.length(sizes) or 1 for atom in members)
        if unknown and (length % known or not unknown[0].learn(length // known, sizes)):
            return None
        if not unknown and known != length:
            return None
    placed: dict[int, tuple[int, int]] = {}
    for (group, _), stride in zip(dims, strides, strict=True):
        step = stride * item
        for i in reversed(group):
            length = atoms[i].length(sizes)
            if length is None or length < 1:
                return None
            placed[i] = (length, step)
            step *= length
    span = item
    for i in reversed(range(len(atoms))):
        length, step = placed[i]
        if atoms[i].stride is not None and length > 1 and step != atoms[i].stride:
            return None
        if length == 1:
            continue
        if atoms[i].kind == "record" and step != item:
            return None
        if step < span:
            return None
        span += (length - 1) * step
    return [placed[i] for i in range(len(atoms))]


def read(
    parts: list[list[Atom]],
    groups: list[Dims],
    tensors: list[tuple[tuple, tuple]],
    item: int,
    given: Sizes,
    layers: int,
) -> Read | None:
    """The reading of all tensors with these dimensions."""
    sizes = dict(given)
    placed = []
    for atoms, dims, (shape, strides) in zip(parts, groups, tensors, strict=True):
        modes = solve(atoms, dims, shape, strides, item, given, sizes)
        if modes is None:
            return None
        placed.append(modes)
    planes: dict[str, tuple] = {}
    for part, (atoms, modes) in enumerate(zip(parts, placed, strict=True)):
        record = next((a.record for a in atoms if a.kind == "record"), None)
        names = list(record) if record else ["key", "value"] if len(parts) == 1 else [["key", "value"][part]]
        base = 0
        for name in names:
            steps = {axis: [0] * (sizes[axis] if any(a.axis == axis for a in atoms) else 1) for axis in AXES}
            if record:
                steps["D"] = [i * item for i in range(record[name])]
            for atom, (_, stride) in zip(atoms, modes, strict=True):
                if atom.kind == "KV":
                    if name == "value":
                        base = stride
                elif atom.kind != "record":
                    for i in range(len(steps[atom.axis])):
                        digit = i if atom.kind == "axis" else i // sizes[atom.symbol]
                        steps[atom.axis][i] += (i % sizes[atom.symbol] if atom.kind == "inner" else digit) * stride
            layered = any(a.axis == "L" for a in atoms)
            lengths = tuple(len(steps[axis]) if axis != "L" or layered else layers for axis in AXES)
            planes[name] = (part, base, lengths, tuple(tuple(steps[a]) for a in AXES), layered and len(steps["L"]) > 1)
            if record:
                base += record[name] * item
    return Read(
        tuple((name, lengths) for name, (_, _, lengths, _, _) in planes.items()),
        tuple((name, part, base, steps, layered) for name, (part, base, _, steps, layered) in planes.items()),
    )


def readings(entry: kv.Entry, tensors: list[tuple[tuple, tuple]], given: Sizes, item: int = 2) -> set[Read]:
    """All readings of the tensors (shape, strides in elements) as this row; `given` are the hints by axis letter."""
    layers = given.get("L", 1)
    given = {"L": 1} | given
    out = set()
    whole = atoms_of(entry.order)
    if len(whole) != len(tensors):
        return out
    if given.get("B", 1) != 1 and all(atom.axis != "B" for atoms in whole for atom in atoms):
        return out  # one block, but the caller knows of more
    layered = any(atom.axis == "L" for atom in whole[0])
    declared_parts = [[a for a in atoms if a.axis != "L" or not layered or "L" in entry.shape] for atoms in whole]
    dims = []
    for atoms, text, (shape, _) in zip(declared_parts, entry.shape.split("|"), tensors, strict=True):
        group = declared_groups(atoms, text)
        if group is None or len(group) != len(shape):
            break
        dims.append(group)
    else:
        found = read(declared_parts, dims, tensors, item, given, layers)
        if found:
            out.add(found)
    choices = [list(natural_groups(len(atoms), len(shape))) for atoms, (shape, _) in zip(whole, tensors, strict=True)]
    for combination in itertools.product(*choices):
        found = read(whole, list(combination), tensors, item, given, layers)
        if found:
            out.add(found)
    return out


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """C-contiguous strides."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def reading_of(layout: kv.Layout) -> Read:
    """A layout of the library in the same form."""
    words = {"L": "layer", "B": "block", "N": "token", "H": "head", "D": "dim"}
    lengths, addresses = [], []
    for plane in layout.planes:
        size = layout.extents(plane)
        tensor, base = layout.offset(plane)
        steps = []
        for axis, length in zip(AXES, size, strict=True):
            if axis == "L" and not layout.layered:
                steps.append((0,))
            else:
                steps.append(tuple(layout.offset(plane, **{words[axis]: i})[1] - base for i in range(length)))
        lengths.append((plane, size))
        addresses.append((plane, tensor, base, tuple(steps), layout.layered and size[0] > 1))
    return Read(tuple(lengths), tuple(addresses))
