"""What is not plain memory of the right shape is refused in one sentence, before anything is written."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from blockadapt.kernels import Segment
from blockadapt.kernels.cpu.kernel import NumbaKernel
from support.blocks import Case, bits, step_, stepped, training, with_amsgrad, with_basis


class Wrapper(Tensor):
    """A tensor that keeps its numbers elsewhere."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, strides=inner.stride())  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("it is not to be computed with")


class Tagged(Tensor):
    """A tensor whose numbers are its own."""


def fake(tensor: Tensor) -> Tensor:
    with FakeTensorMode() as mode:
        return mode.from_tensor(tensor)


def negative(tensor: Tensor) -> Tensor:
    return torch._neg_view(tensor)


def freed(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def cut_short(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(tensor.numel() * tensor.itemsize - 4)
    return tensor


def column_major(tensor: Tensor) -> Tensor:
    return tensor.mT.contiguous().mT


def overlapping(tensor: Tensor) -> Tensor:
    return tensor.new_zeros(tensor.numel()).as_strided(tensor.shape, (1, *tensor.stride()[1:]))


def case() -> Case:
    return with_basis(with_amsgrad(training(5, 40, torch.float32, minor=8)), refresh=True)


ANYWHERE: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "meta": (lambda t: t.to("meta"), "a plain strided CPU tensor, got Tensor (torch.strided, meta)."),
    "fake": (fake, "a plain strided CPU tensor, got FakeTensor (torch.strided, cpu)."),
    "wrapper": (Wrapper, "a plain strided CPU tensor, got Wrapper (torch.strided, cpu)."),
    "negative bit": (negative, "a plain strided CPU tensor, got Tensor (torch.strided, cpu, negative bit)."),
    "bfloat16": (Tensor.bfloat16, "of dtype torch.float32, got torch.bfloat16."),
    "float64": (Tensor.double, "of dtype torch.float32, got torch.float64."),
    "freed": (freed, "bytes from its first element on, got 0."),
    "cut short": (cut_short, "bytes from its first element on, got "),
}
PLACES = ["x", "m", "second_moment", "largest", "basis", "eigenvalues"]
OTHERS: dict[str, tuple[str, Callable[[Tensor], Any], str]] = {
    "two axes": ("x", lambda t: t[0], "of shape [major, minor, k] with 1 <= k <= 5, got (8, 5)."),
    "six coordinates": ("x", lambda t: t.new_zeros(5, 8, 6), "with 1 <= k <= 5, got (5, 8, 6)."),
    "no coordinate": ("x", lambda t: t[:, :, :0], "with 1 <= k <= 5, got (5, 8, 0)."),
    "overlapping x": ("x", overlapping, "without overlap, got strides (1, 5, 1) of (5, 8, 5)."),
    "expanded m": ("m", lambda t: t[:, :1].expand(5, 8, 5), "without overlap, got strides (40, 0, 1) of (5, 8, 5)."),
    "m of fewer blocks": ("m", lambda t: t[1:], "of shape (5, 8, 5), got (4, 8, 5)."),
    "m of fewer coordinates": ("m", lambda t: t[:, :, 1:], "of shape (5, 8, 5), got (5, 8, 4)."),
    "V not packed": ("second_moment", lambda t: t.new_zeros(5, 8, 25), "of shape (5, 8, 15), got (5, 8, 25)."),
    "V column-major": ("second_moment", column_major, "contiguous along its last axis, got strides (120, 1, 8)."),
    "maxima column-major": ("largest", column_major, "contiguous along its last axis, got strides (40, 1, 8)."),
    "maxima of fewer": ("largest", lambda t: t[:, :, 1:], "of shape (5, 8, 5), got (5, 8, 4)."),
    "a basis too short": ("basis", lambda t: t[1:], "of shape (400,), got (399,)."),
    "a basis with gaps": ("basis", lambda t: t.repeat_interleave(2)[::2], "contiguous, got strides (2,)."),
    "eigenvalues with gaps": ("eigenvalues", lambda t: t.repeat_interleave(2)[::2], "contiguous, got strides (2,)."),
    "eigenvalues by block": ("eigenvalues", lambda t: t.new_zeros(40, 5), "of shape (200,), got (40, 5)."),
    "basis alone": ("eigenvalues", lambda t: None, "kept together with `eigenvalues`, got one of them alone."),
}


def assert_refused(bad: Case, name: str, sentence: str, others: Case) -> None:
    """With this sentence about the tensor, and with all the other tensors as they were."""
    before = bits(others)
    segment = bad.segment()
    batch = others.batch
    with pytest.raises(ValueError, match=re.escape(sentence)) as refusal:
        NumbaKernel().prepare(batch, [others.segment(), segment])
    assert str(refusal.value).startswith(f"NumbaKernel: `{name}` must be ")
    assert "\n" not in str(refusal.value)
    assert bits(others) == before


@pytest.mark.parametrize("how", ANYWHERE)
@pytest.mark.parametrize("name", [*PLACES, "grad"])
def test_a_tensor_that_is_not_in_plain_memory_is_refused(name: str, how: str) -> None:
    spoil, sentence = ANYWHERE[how]
    good = case()
    assert_refused(replace(good, **{name: spoil(getattr(good, name))}), name, sentence, good)


@pytest.mark.parametrize("what", OTHERS)
def test_a_tensor_of_another_shape_or_order_is_refused(what: str) -> None:
    name, spoil, sentence = OTHERS[what]
    good = case()
    bad = replace(good, **{name: spoil(getattr(good, name))})
    assert_refused(bad, "basis" if what == "basis alone" else name, sentence, good)


def test_a_gradient_that_does_not_reach_to_the_end_of_the_parameter_is_refused() -> None:
    good = training(5, 40, torch.float32)
    short = replace(good, grad=torch.randn(5, 4))
    assert_refused(short, "grad", "in a storage of at least 800 bytes from its first element on, got 80.", good)
    late = replace(good, grad=torch.randn(201)[1:].view(40, 1, 5))
    assert stepped(NumbaKernel(), [late])
    memory = torch.randn(200)
    beyond = replace(good, grad=memory[1:].as_strided((1,), (1,)))
    assert_refused(beyond, "grad", "at least 800 bytes from its first element on, got 796.", good)


@pytest.mark.parametrize("begin", [0, 5])
def test_an_empty_view_of_a_gradient_is_refused_at_first_and_after_a_good_step(begin: int) -> None:
    """It lies at address 0, whatever its storage holds and wherever in it the view begins."""
    good = replace(training(5, 40, torch.float32), grad=torch.randn(200 + begin)[begin:].view(40, 1, 5))
    kernel, segment = NumbaKernel(), good.segment()
    for _ in range(2):
        before = bits(good)
        with pytest.raises(
            ValueError, match=r"`grad` must be .* at least 800 bytes from its first element on, got 0\."
        ):
            kernel.prepare(good.batch, [segment._replace(grad=good.grad[:0])])
        assert bits(good) == before
        kernel.prepare(good.batch, [segment]).write_()


def test_a_place_that_begins_later_in_its_parameter_needs_more_of_the_gradient() -> None:
    good = training(5, 40, torch.float32).segment()
    kernel = NumbaKernel()
    place = replace(good.place, offset=3)
    with pytest.raises(ValueError, match="`grad` must be in a storage of at least 812 bytes"):
        kernel.prepare(place.batch, [good._replace(place=place)])
    kernel.prepare(place.batch, [good._replace(place=place, grad=torch.randn(203))]).write_()
    with pytest.raises(ValueError, match="`offset` must be an integer >= 0, got -1"):
        kernel.prepare(place.batch, [good._replace(place=replace(place, offset=-1))])


def test_the_gradient_is_checked_at_every_step() -> None:
    good = training(5, 40, torch.float32).segment()
    kernel = NumbaKernel()
    kernel.prepare(good.place.batch, [good]).write_()
    for spoil, sentence in ANYWHERE.values():
        with pytest.raises(ValueError, match=re.escape(sentence)):
            kernel.prepare(good.place.batch, [good._replace(grad=spoil(good.grad))])
    kernel.prepare(good.place.batch, [good]).write_()


def test_blocks_of_another_size_or_too_large_are_refused() -> None:
    segment = training(5, 40, torch.float32).segment()
    with pytest.raises(ValueError, match="`n` must be 4 in all places of the batch, got 5"):
        NumbaKernel().prepare(segment.place.batch._replace(n=4), [segment])
    large = training(65, 2, torch.float32).segment()
    with pytest.raises(ValueError, match=r"`n` must be in \[1, 64\], got 65"):
        NumbaKernel().prepare(large.place.batch, [large])


def test_a_subclass_whose_numbers_are_its_own_steps_as_a_tensor() -> None:
    segment = training(5, 40, torch.float32)
    (expected,) = stepped(NumbaKernel(), [segment])
    tagged = replace(segment, x=segment.x.as_subclass(Tagged), grad=segment.grad.as_subclass(Tagged))
    step_(NumbaKernel(), [tagged])
    assert segment.x.equal(expected.x)


def test_an_empty_place_is_passed_over() -> None:
    segments = [training(5, 0, torch.float32), training(5, 3, torch.float32)]
    (expected,) = stepped(NumbaKernel(), segments[1:])
    step_(NumbaKernel(), segments)
    assert segments[1].x.equal(expected.x)
    NumbaKernel().prepare(segments[0].batch, [segments[0].segment()]).write_()


def test_views_with_gaps_and_any_order_of_axes_are_taken() -> None:
    segment = training(5, 40, torch.float32, minor=8)
    (expected,) = stepped(NumbaKernel(), [segment])
    for axes in [(0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 2, 1)]:
        back = [axes.index(axis) for axis in range(3)]
        x, m, grad = (
            torch.zeros(*(2 * size for size in t.permute(axes).shape))[::2, ::2, ::2].permute(back).copy_(t)
            for t in (segment.x, segment.m, segment.grad)
        )
        wide = replace(segment, x=x, m=m, grad=grad, second_moment=segment.second_moment.clone())
        inputs: Segment = wide.segment()
        NumbaKernel().prepare(inputs.place.batch, [inputs]).write_()
        assert x.equal(expected.x)
        assert m.equal(expected.m)
