"""Versions, identities and manifests."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rc.errors import InvalidIdentity
from rc.versions import Manifest, ParameterSpec, WeightIdentity, dtype_bytes, parse_version_label, version_label


@given(st.integers(0, 10**18 - 1))
def test_a_version_is_read_back_from_its_label(version: int) -> None:
    assert parse_version_label(version_label(version)) == version


@pytest.mark.parametrize(
    "label",
    ["default", "", "rc-", "rc-x", "rc--1", "rc-1.0", "rc-01", "rc-1 ", "RC-1", "7", "rc-٣", "rc-" + "9" * 5000],
)
def test_a_label_that_is_not_ours_is_no_version(label: str) -> None:
    assert parse_version_label(label) is None


@given(st.text())
def test_a_label_is_a_version_or_none_and_never_an_error(label: str) -> None:
    version = parse_version_label(label)
    assert version is None or version_label(version) == label


def test_an_identity_needs_a_run_and_a_step_from_zero() -> None:
    with pytest.raises(InvalidIdentity, match="needs a run name"):
        WeightIdentity(run="", step=0)
    with pytest.raises(InvalidIdentity, match="-1 is negative"):
        WeightIdentity(run="r", step=-1)


def test_the_first_identity_follows_nothing() -> None:
    WeightIdentity(run="r", step=0).check_follows(None)


EMBED = ParameterSpec(name="embed", dtype="bfloat16", shape=(10, 4))
HEAD = ParameterSpec(name="head", dtype="float32", shape=(4,))


def test_a_manifest_has_one_digest_whatever_the_order() -> None:
    assert Manifest.of([HEAD, EMBED]) == Manifest.of([EMBED, HEAD])
    assert Manifest.of([HEAD, EMBED]).digest == Manifest.of([EMBED, HEAD]).digest


@pytest.mark.parametrize(
    "other",
    [
        ParameterSpec(name="embed", dtype="float16", shape=(10, 4)),
        ParameterSpec(name="embed", dtype="bfloat16", shape=(4, 10)),
        ParameterSpec(name="embed.weight", dtype="bfloat16", shape=(10, 4)),
    ],
)
def test_a_manifest_tells_names_dtypes_and_shapes_apart(other: ParameterSpec) -> None:
    assert Manifest.of([HEAD, other]).digest != Manifest.of([HEAD, EMBED]).digest


def test_sizes_are_in_bytes() -> None:
    assert (EMBED.nbytes, HEAD.nbytes) == (80, 16)
    assert ParameterSpec(name="scalar", dtype="float32", shape=()).nbytes == 4
    assert Manifest.of([EMBED, HEAD]).nbytes == 96


def test_an_unknown_dtype_is_named() -> None:
    with pytest.raises(ValueError, match="unknown dtype 'float3'; known are bfloat16"):
        dtype_bytes("float3")


def test_equal_manifests_have_no_problems() -> None:
    assert Manifest.of([EMBED, HEAD]).problems_against(Manifest.of([HEAD, EMBED])) == ()


def test_each_difference_is_named_in_order() -> None:
    sent = Manifest.of(
        [
            ParameterSpec(name="a", dtype="float16", shape=(2,)),
            ParameterSpec(name="b", dtype="float32", shape=(3,)),
            ParameterSpec(name="tied", dtype="float32", shape=(1,)),
            ParameterSpec(name="extra", dtype="float32", shape=(1,)),
        ]
    )
    expected = Manifest.of(
        [
            ParameterSpec(name="a", dtype="float32", shape=(2,)),
            ParameterSpec(name="b", dtype="float32", shape=(3, 1)),
            ParameterSpec(name="c", dtype="float32", shape=(1,)),
        ]
    )
    assert sent.problems_against(expected, optional=frozenset({"tied"})) == (
        "a has dtype float16, the engine expects float32",
        "b has shape [3], the engine expects [3, 1]",
        "c is missing",
        "extra is not a parameter of the engine",
    )
