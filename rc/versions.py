"""Weight versions and identities.

A *version* (an integer, written ``rc-7`` wherever people or engines see it) says **when** a generation of weights was
published. A `WeightIdentity` says **what** it is declared to contain. A `Manifest` lists the parameters of a model: two
checkpoints of one architecture share it, so it proves shape, never content.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec

from rc.errors import InvalidIdentity

__all__ = ("Manifest", "ParameterSpec", "WeightIdentity", "dtype_bytes", "parse_version_label", "version_label")

_PREFIX = "rc-"

_MAX_DIGITS = 18
"""Of a version in a label: what 64 bits hold. A label with more digits is somebody else's, not a number to parse."""


def version_label(version: int) -> str:
    """Name a version the way engines and people see it: ``7`` becomes ``"rc-7"``."""
    return f"{_PREFIX}{version}"


def parse_version_label(label: str) -> int | None:
    """Give the version that a label names, or None where the label is not one of ours (``"default"``)."""
    digits = label.removeprefix(_PREFIX)
    if digits == label or not (digits.isascii() and digits.isdigit()) or len(digits) > _MAX_DIGITS:
        return None
    version = int(digits)
    return version if version_label(version) == label else None


class WeightIdentity(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a version is declared to contain.

    Attributes:
        run: Name of the training run.
        step: Training step within the run; it never goes backwards within one run.
        checkpoint: Where the same weights are stored, if they are.
        content_digest: Digest of the bytes, if the trainer computed one.
    """

    run: str
    step: int
    checkpoint: str | None = None
    content_digest: str | None = None

    def __post_init__(self) -> None:
        if not self.run:
            raise InvalidIdentity("a weight identity needs a run name: WeightIdentity(run='my-run', step=0)")
        if self.step < 0:
            raise InvalidIdentity(f"a weight identity's step counts from 0; {self.step} is negative")

    def check_follows(self, published: WeightIdentity | None) -> None:
        """Raise `InvalidIdentity` if this identity is older than ``published`` within the same run."""
        if published is not None and published.run == self.run and self.step < published.step:
            raise InvalidIdentity(
                f"step {self.step} of run {self.run!r} is behind the published step {published.step}; publish a later "
                f"step, or name the rewound run differently"
            )


class ParameterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One parameter as a trainer names it. ``dtype`` is torch's name without the prefix, e.g. ``"bfloat16"``."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count * dtype_bytes(self.dtype)


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of a model, sorted by name."""

    parameters: tuple[ParameterSpec, ...]

    @classmethod
    def of(cls, parameters: Iterable[ParameterSpec]) -> Manifest:
        """Build a manifest from parameters in any order."""
        return cls(parameters=tuple(sorted(parameters, key=lambda spec: spec.name)))

    @property
    def digest(self) -> str:
        """SHA-256 over names, dtypes and shapes; equal for every checkpoint of one architecture and dtype."""
        return hashlib.sha256(msgspec.json.encode(self.parameters)).hexdigest()

    @property
    def nbytes(self) -> int:
        """Total size in bytes."""
        return sum(spec.nbytes for spec in self.parameters)

    def problems_against(self, expected: Manifest, *, optional: frozenset[str] = frozenset()) -> tuple[str, ...]:
        """List what makes these parameters differ from ``expected``; empty when they agree.

        Args:
            expected: What the engine loads.
            optional: Names that may be present without being expected, e.g. a tied ``lm_head.weight``.
        """
        ours = {spec.name: spec for spec in self.parameters}
        theirs = {spec.name: spec for spec in expected.parameters}
        problems = [f"{name} is missing" for name in theirs if name not in ours]
        problems += [f"{name} is not a parameter of the engine" for name in ours.keys() - theirs.keys() - optional]
        for name in ours.keys() & theirs.keys():
            mine, other = ours[name], theirs[name]
            if mine.dtype != other.dtype:
                problems.append(f"{name} has dtype {mine.dtype}, the engine expects {other.dtype}")
            if mine.shape != other.shape:
                problems.append(f"{name} has shape {list(mine.shape)}, the engine expects {list(other.shape)}")
        return tuple(sorted(problems))


_DTYPE_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


def dtype_bytes(dtype: str) -> int:
    """Bytes per element of a torch dtype name.

    Raises:
        ValueError: For a dtype that no checkpoint of ours has.
    """
    try:
        return _DTYPE_BYTES[dtype]
    except KeyError:
        raise ValueError(f"unknown dtype {dtype!r}; known are {', '.join(sorted(_DTYPE_BYTES))}") from None
