"""α* as the optimizers measure it: where it lies, what moves it, what does not, and where it is kept."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import lr_scheduler

from blockadapt import BlockAdam, SpectrumClip
from blockadapt.kernels import Batch, Change, Segment, Tally
from blockadapt.kernels.eigh import EighKernel
from blockadapt.moments import unpack
from blockadapt.optimizers.estimates import _added
from blockadapt.optimizers.peak import peak_lr, set_peak_
from blockadapt.optimizers.unit import Group
from blockadapt.spectrum import Estimate
from support import ranks_errands
from support.cases import each_backend
from support.contract_cases import bits, give_gradients_, param_bits, run, twins
from support.files import through_a_file
from support.processes import together

WIDE = SpectrumClip("auto", gamma=1e-12)
"""Measures, and clips nothing."""

OPEN = SpectrumClip("auto", gamma=0.05)

CLOSING = SpectrumClip("auto", gamma=80.0)
"""Closed from step 3 on."""


def estimate(optimizer: BlockAdam, group: int = 0) -> Estimate:
    """A group's estimate, up to the last step."""
    return Estimate(*optimizer.state_dict()["param_groups"][group]["estimate"])


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


# Where it lies -----------------------------------------------------------------------------------------------------


@each_backend
@settings(max_examples=25, deadline=None)
@given(
    n=st.sampled_from([1, 2, 5]),
    scale=st.sampled_from([1e-22, 1e-3, 1.0, 1e8]),
    steps=st.integers(1, 4),
    seed=st.integers(0, 999),
    refresh_every=st.sampled_from([1, 2]),
)
def test_it_lies_between_the_ends_of_the_spectra_that_were_seen(
    backend: str, n: int, scale: float, steps: int, seed: int, refresh_every: int
) -> None:
    """Also where squares of float32 would be lost."""
    (weight,) = parameters((5, 4))
    optimizer = BlockAdam(
        [weight], lr=0.02, clip=WIDE, block_size=n, refresh_every=refresh_every, backend=backend, eps=1e-6
    )
    generator = torch.Generator().manual_seed(seed)
    ends: list[float] = []
    for step in range(1, steps + 1):
        weight.grad = scale * torch.randn(5, 4, generator=generator)
        optimizer.step()
        V = unpack(optimizer.state[weight]["second_moment"].double(), n) / (1 - 0.999**step)
        roots = torch.linalg.eigvalsh(V).clamp(min=0).sqrt()
        ends += [float(1 / (root + 1e-6)) for root in (roots.min(), roots.max())]
    ratio = estimate(optimizer).ratio
    assert ratio is not None
    assert min(ends) * (1 - 1e-4) <= ratio <= max(ends) * (1 + 1e-4)
    assert optimizer.final_lr(optimizer.param_groups[0]) == pytest.approx(0.02 * ratio)


@each_backend
def test_what_the_clip_does_to_a_step_is_not_measured(backend: str) -> None:
    """One step from the same state: an interval that has almost closed elsewhere measures the same."""
    found = []
    for clip in (WIDE, SpectrumClip("auto", gamma=50.0)):
        params = parameters((6, 4))
        optimizer = BlockAdam(params, block_size=3, clip=clip, backend=backend)
        optimizer.param_groups[0]["estimate"] = (1e-3 * 7.0, 1)
        run(optimizer, [1])
        found.append((estimate(optimizer), param_bits(params)))
    assert found[0][0] == found[1][0]
    assert found[0][1] != found[1][1]


def test_threads_change_no_bit_of_it() -> None:
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            optimizer = BlockAdam(parameters((96, 96), (40_000,)), block_size=2, clip=OPEN, backend="numba")
            optimizer.add_param_group({"params": parameters((50_001,)), "grouping": "diagonal"})
            run(optimizer, [1, 2])
            found.append([estimate(optimizer, group) for group in (0, 1)])
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1] == found[2]


# What moves nothing ------------------------------------------------------------------------------------------------


@each_backend
def test_without_an_estimate_a_step_is_not_clipped(backend: str) -> None:
    """Neither a gradient of zeros nor an lr of zero shows anything, and a huge γ closes on nothing."""
    clipped, plain = parameters((6, 4)), parameters((6, 4))
    optimizers = [
        BlockAdam(params, block_size=3, clip=clip, backend=backend)
        for params, clip in ((clipped, SpectrumClip("auto", gamma=1e9)), (plain, None))
    ]
    for optimizer in optimizers:
        for param in optimizer.param_groups[0]["params"]:
            param.grad = torch.zeros_like(param)
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.0
        run(optimizer, [1])
        optimizer.param_groups[0]["lr"] = 0.1
        assert estimate(optimizer) == Estimate()
        assert optimizer.final_lr(optimizer.param_groups[0]) is None
        run(optimizer, [2])
    assert param_bits(clipped) == param_bits(plain)
    assert estimate(optimizers[0]).steps == 1
    run(optimizers[0], [3])
    assert "second_moment" not in optimizers[0].state[clipped[0]]


@pytest.mark.parametrize("how", ["skip", "propagate"])
@each_backend
def test_a_gradient_that_is_not_finite_shows_nothing(how: str, backend: str) -> None:
    params = parameters((6, 4))
    optimizer = BlockAdam(params, block_size=3, clip=OPEN, on_nonfinite=how, backend=backend)
    run(optimizer, [1, 2])
    before = estimate(optimizer)
    give_gradients_(params, 3)
    assert params[0].grad is not None
    params[0].grad[1, 2] = torch.nan
    optimizer.step()
    assert estimate(optimizer) == before


@pytest.mark.parametrize("kept", ["many", (0.1,), (0.1, 1.0), (-1.0, 1), (float("nan"), 1), (0.1, -1)])
def test_an_estimate_that_is_none_is_refused(kept: Any) -> None:
    params = parameters((3, 2))
    optimizer = BlockAdam(params, clip=OPEN)
    run(optimizer, [1])
    optimizer.param_groups[0]["estimate"] = kept
    before = param_bits(params)
    with pytest.raises(ValueError, match=r"^BlockAdam: `estimate` must be a pair of a finite number >= 0 and a count"):
        run(optimizer, [2])
    assert param_bits(params) == before


# One for each group ------------------------------------------------------------------------------------------------


@each_backend
def test_each_group_has_its_own_as_if_it_were_alone(backend: str) -> None:
    together_, apart = parameters((6, 4), (5, 5)), parameters((6, 4), (5, 5))
    options = {"block_size": 3, "clip": OPEN, "backend": backend}
    optimizer = BlockAdam([{"params": [together_[0]]}], **options)  # type: ignore[arg-type]
    optimizer.add_param_group({"params": [together_[1]], "lr": 0.1})
    alone = [BlockAdam([param], lr=lr, **options) for param, lr in zip(apart, (1e-3, 0.1), strict=True)]  # type: ignore[arg-type]
    for step in range(1, 5):
        give_gradients_(together_, step)
        give_gradients_(apart, step)
        for each in (optimizer, *alone):
            each.step()
    for index, each in enumerate(alone):
        assert estimate(optimizer, index) == pytest.approx(estimate(each), rel=1e-6)
    assert all(torch.allclose(a, b, rtol=1e-6) for a, b in zip(together_, apart, strict=True))


def test_nobody_who_does_not_ask_is_measured() -> None:
    asked: list[bool] = []

    class Watched(EighKernel):
        def prepare(self, batch: Batch, segments: Any) -> Any:
            asked.extend(segment.tally is not None for segment in segments)
            return super().prepare(batch, segments)

    groups: list[Group] = [
        {"params": parameters((3, 2)), "clip": clip} for clip in (None, SpectrumClip(0.1), OPEN, CLOSING)
    ]
    optimizer = BlockAdam(groups, backend=Watched())
    run(optimizer, [1, 2])
    assert asked == [False, False, True, True] * 2
    asked.clear()
    run(optimizer, [3])
    assert asked == [False, False, True]  # the last one has closed


def test_a_users_kernel_that_measures_nothing_is_refused_and_changes_nothing() -> None:
    class Silent(EighKernel):
        name = "silent"
        measures = False

    params = parameters((6, 4))
    before = param_bits(params)
    with pytest.raises(
        ValueError,
        match=r"^BlockAdam: `clip` must be one with a number for `final_lr`, because the kernel 'silent' measures "
        r"none, got 'auto'\.$",
    ):
        run(BlockAdam(params, clip=OPEN, backend=Silent()), [1])
    assert param_bits(params) == before
    run(BlockAdam(params, clip=SpectrumClip(0.1), backend=Silent()), [1])
    assert param_bits(params) != before


def test_a_users_kernel_may_count_in_parts() -> None:
    class InParts(EighKernel):
        def prepare(self, batch: Batch, segments: Any) -> Change:
            changes = [super(InParts, self).prepare(batch, [segment]) for segment in segments]

            class All:
                def write_(self) -> None:
                    for change in changes:
                        change.write_()

            return All()

    found = []
    for backend in (InParts(), "eigh"):
        optimizer = BlockAdam(parameters((6, 4), (9,)), block_size=3, clip=OPEN, backend=backend)
        run(optimizer, range(1, 4))
        found.append(estimate(optimizer))
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    assert isinstance(Segment._field_defaults["tally"], type(None))


def test_a_tally_is_the_same_pair_in_plain_numbers_and_as_a_tensor() -> None:
    for counted in ([], [torch.rand(2, 7)], [torch.rand(2)], [torch.rand(2), torch.rand(2, 2, 3)]):
        tally = Tally(torch.device("cpu"))
        for sums in counted:
            tally.add(sums.double(), 0.3)
        assert torch.equal(torch.as_tensor(tally.pair(), dtype=torch.float64), tally.total())


def test_pairs_of_this_process_and_of_others_are_added_up() -> None:
    other = torch.tensor([3.0, 4.0], dtype=torch.float64)
    for pairs in (((1.0, 2.0), other), (other, (1.0, 2.0))):
        assert _added(*pairs).tolist() == [4.0, 6.0]


# Closing -----------------------------------------------------------------------------------------------------------


@each_backend
def test_once_closed_it_stays_and_a_step_is_that_of_sgd(backend: str) -> None:
    params = parameters((6, 4), (5,))
    optimizer = BlockAdam(params, block_size=3, lr=0.01, clip=CLOSING, backend=backend)
    run(optimizer, [1, 2])
    last = estimate(optimizer)
    assert last.steps == 2
    assert last.ratio is not None
    optimizer.param_groups[0]["lr"] = 0.003
    run(optimizer, [3])
    before = [param.detach().clone() for param in params]
    run(optimizer, [4])
    assert estimate(optimizer) == last
    for param, x in zip(params, before, strict=True):
        assert {*optimizer.state[param]} == {"step", "exp_avg"}
        step: Tensor = last.ratio * 0.003 * optimizer.state[param]["exp_avg"]
        assert torch.allclose(param, x - step, rtol=1e-6, atol=0)


# Kept --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [OPEN, CLOSING], ids=["open", "closing"])
def test_it_survives_every_way_to_keep_an_optimizer(clip: SpectrumClip) -> None:
    nets = twins(count=3)
    whole, copied, saved = (BlockAdam(net.parameters(), block_size=4, clip=clip) for net in nets)
    for optimizer in (whole, copied, saved):
        run(optimizer, [1, 2])
    copied = copy.deepcopy(copied)
    loaded = BlockAdam(nets[2].parameters())
    loaded.load_state_dict(through_a_file(saved.state_dict()))
    for optimizer in (whole, copied, loaded):
        run(optimizer, [3, 4])
    ends = [param_bits(p for group in each.param_groups for p in group["params"]) for each in (whole, copied, loaded)]
    assert ends[0] == ends[1] == ends[2]
    assert estimate(whole) == estimate(copied) == estimate(loaded)


def test_what_was_counted_before_a_state_is_loaded_does_not_count_after_it() -> None:
    (net,) = twins(count=1)
    optimizer = BlockAdam(net.parameters(), clip=OPEN)
    fresh = copy.deepcopy(optimizer.state_dict())
    run(optimizer, [1])
    optimizer.load_state_dict(fresh)
    assert estimate(optimizer) == Estimate()


# Processes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [0.05, 40.0], ids=["open", "closing"])
def test_all_ranks_have_that_of_one_process(gamma: float) -> None:
    options = {"block_size": 4, "lr": 0.01, "clip": SpectrumClip("auto", gamma)}
    net, optimizer = ranks_errands.built("one", options)
    ranks_errands.train(net, optimizer, range(8))
    alone, params = estimate(optimizer), ranks_errands.whole(net.parameters())
    calls = [(kind, options, 8) for kind in ("shared", "fsdp")]
    answers = together(2, ranks_errands.for_each, ranks_errands.measured, calls)
    for (here, x), (there, y) in zip(*answers, strict=True):
        assert here == there
        assert here == pytest.approx(alone, rel=1e-5)
        assert all(torch.equal(a, b) for a, b in zip(x, y, strict=True))
        assert all(torch.allclose(a, b, rtol=0, atol=1e-5) for a, b in zip(x, params, strict=True))


def test_several_processes_measure_each_group_apart() -> None:
    """Not all of them come to the groups in one order."""
    alone = ranks_errands.measured_in_groups("one", 6)
    for answers in together(2, ranks_errands.for_each, ranks_errands.measured_in_groups, [("fsdp", 6), ("shared", 6)]):
        for measured in answers:
            assert [count for _, count in measured] == [6] * len(alone)
            assert [ratio for ratio, _ in measured] == pytest.approx([ratio for ratio, _ in alone], rel=1e-6)


def test_what_every_rank_moves_counts_once() -> None:
    """Also in blocks of one, which are of one kind with the scalar."""
    alone = [ranks_errands.measured_beside_a_scalar("one", size, 6) for size in (1, 2)]
    calls = [(kind, size, 6) for kind in ("shared", "fsdp") for size in (1, 2)]
    for answers in together(2, ranks_errands.for_each, ranks_errands.measured_beside_a_scalar, calls):
        for here, there in zip(answers, alone * 2, strict=True):
            assert here == pytest.approx(there, rel=1e-5)


def test_a_checkpoint_of_two_ranks_keeps_it(tmp_path: Any) -> None:
    options = {"block_size": 4, "lr": 0.01, "clip": SpectrumClip("auto", 0.05)}
    net, optimizer = ranks_errands.built("one", options)
    ranks_errands.train(net, optimizer, range(12))
    alone = ranks_errands.whole(net.parameters())
    together(2, ranks_errands.save, options, 7, str(tmp_path))
    for answers in together(2, ranks_errands.resume, ["shared", "fsdp"], options, range(7, 12), str(tmp_path)):
        for params in answers.values():
            assert all(torch.allclose(a, b, rtol=0, atol=1e-5) for a, b in zip(params, alone, strict=True))


# A number for α* ---------------------------------------------------------------------------------------------------


def test_a_schedule_that_rises_does_not_take_a_given_final_lr_with_it() -> None:
    """OneCycleLR goes to 100 times the lr that the optimizer was made with. α* was 10 there."""
    optimizer = BlockAdam(parameters((3, 2)), lr=1e-3, clip=SpectrumClip(0.1, gamma=1.0))
    schedule = lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20, cycle_momentum=False)
    (group,) = optimizer.param_groups
    largest, found = 1e-3, []
    for step in range(1, 20):
        largest = max(largest, group["lr"])
        final_lr = optimizer.final_lr(group)
        assert final_lr == pytest.approx(0.1 * group["lr"] / largest)
        found.append(final_lr)
        run(optimizer, [step])
        schedule.step()
    assert max(found) == pytest.approx(0.1)
    assert found[-1] < 0.01
    assert bits(torch.tensor(float(group["peak_lr"]))) == bits(torch.tensor(0.1))


@pytest.mark.parametrize(("lr", "peak"), [("meta", 0.1), (0.1, "meta"), ("meta", "meta")])
def test_the_largest_lr_is_found_and_kept_on_the_device_of_either(lr: Any, peak: Any) -> None:
    """On the meta device, whose tensors have no numbers: the host must not ask for any."""
    lr, peak = (torch.tensor(0.1, device=where) if where == "meta" else where for where in (lr, peak))
    group = {"lr": lr, "peak_lr": peak}
    found = peak_lr(group)
    assert (found.device.type, found.dtype) == ("meta", torch.float64)
    set_peak_(group, peak_lr(group))
    assert (group["peak_lr"] is peak) == isinstance(peak, torch.Tensor)  # where a captured step will look for it
    assert group["peak_lr"].device.type == "meta"
