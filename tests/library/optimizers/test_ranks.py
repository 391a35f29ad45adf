"""Many processes: what they compute together is what one computes, and a step happens in all of them or in none."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blockadapt import BlockAdam, SpectrumClip
from blockadapt.kernels.cpu.compilation import COMPILING, COMPILING_UNKEPT, WAITING
from blockadapt.kernels.flops import block_flops
from blockadapt.optimizers.ranks import shares
from blockadapt.optimizers.unit import units_of
from blockadapt.partition import Partition
from support import ranks_errands
from support.contract_cases import CASES, param_bits, run, twins
from support.processes import together

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "output": {"grouping": "output"},
    "amsgrad, kept bases": {"amsgrad": True, "refresh_every": 3},
    "closing clip": {"clip": SpectrumClip(0.1, gamma=40.0), "weight_decay": 0.1},
}
STEPS = 20
KINDS = [("fsdp",), ("shared",)]


def one_process(options: dict[str, Any], rows: int = 24, steps: int = STEPS) -> list[Tensor]:
    net, optimizer = ranks_errands.built("one", options, rows)
    ranks_errands.train(net, optimizer, range(steps))
    return ranks_errands.whole(net.parameters())


def distance(a: list[Tensor], b: list[Tensor]) -> float:
    return max((x - y).abs().max().item() for x, y in zip(a, b, strict=True))


# FSDP2 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3])
def test_shards_that_begin_where_blocks_begin_train_as_one_process(ranks: int) -> None:
    options = [{"block_size": 4, **each} for each in OPTIONS.values()]
    alone = [one_process(each) for each in options]
    for results in together(ranks, ranks_errands.trained, "fsdp", options, STEPS):
        assert all(distance(a, b) < 1e-5 for a, b in zip(alone, results, strict=True))


def test_a_rank_without_rows_trains_along_under_every_option() -> None:
    """Of 4 rows the third rank has none, and shards begin where blocks of 2 begin."""
    options = [{"block_size": 2, **each} for each in OPTIONS.values()]
    alone = [one_process(each, rows=4) for each in options]
    for results in together(3, ranks_errands.trained, "fsdp", options, STEPS, 4):
        assert all(distance(a, b) < 1e-5 for a, b in zip(alone, results, strict=True))


def test_every_way_to_shard_trains_alike() -> None:
    alone = one_process({"block_size": 4}, rows=16, steps=5)
    (rounded,) = [policies[3] for policies in together(1, ranks_errands.trained_under_policies, 5)]
    for resharded, kept, replicated, rounded_too in together(4, ranks_errands.trained_under_policies, 5):
        assert max(distance(alone, each) for each in (resharded, kept, replicated)) < 1e-6
        assert distance(rounded, rounded_too) == 0 < distance(alone, rounded)


@pytest.mark.parametrize(("ranks", "rows"), [(2, 9), (3, 7), (3, 4)])  # of 4 rows the third rank has none
def test_shards_that_begin_within_blocks_cut_them_there_and_say_so_once(ranks: int, rows: int) -> None:
    net, _ = ranks_errands.built("one", {}, rows)
    pieces = [[nn.Parameter(piece.detach().clone()) for piece in p.chunk(ranks)] for p in net.parameters()]
    optimizer = BlockAdam([piece for part in pieces for piece in part], block_size=4)
    for step in range(5):
        with torch.no_grad():
            for param, part in zip(net.parameters(), pieces, strict=True):
                param.copy_(torch.cat(part))
        net.zero_grad()
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(12, 10, generator=generator), torch.randn(12, 1, generator=generator)
        net(x).sub(y).square().mean().backward()
        for param, part in zip(net.parameters(), pieces, strict=True):
            for piece, grad in zip(part, param.grad.chunk(ranks), strict=True):  # type: ignore[union-attr]
                piece.grad = grad.clone()
        optimizer.step()
    whole_blocks = one_process({"block_size": 4}, rows, steps=5)
    answers = together(ranks, ranks_errands.torn, rows, 5)
    for params, _ in answers:
        assert distance(params, [torch.cat(part).detach() for part in pieces]) < 1e-5  # a third of three rounds
        assert distance(params, whole_blocks) > 1e-4
    (said,) = answers[0][1]
    assert all(f"'{name}'" in said for name in ("first.weight", "first.bias", "second.weight", "second.bias"))
    assert "Use grouping='output', or give each rank a number of rows that is a multiple of `block_size`." in said
    assert not any(warned for _, warned in answers[1:])


def test_the_first_process_of_a_mesh_warns_where_rank_zero_has_no_part_in_it() -> None:
    zero, first, second = together(3, ranks_errands.torn_on_a_mesh_without_rank_zero)
    assert zero == second == []
    assert len(first) == 1
    assert "shards begin within blocks of 'shards'." in first[0]


def test_an_optimizer_that_was_planned_before_its_shards_have_memory_steps_them() -> None:
    for late, usual in together(2, ranks_errands.planned_before_it_has_memory, 3):
        assert late == usual


def test_what_cannot_be_cut_where_it_is_sharded_is_refused_by_name() -> None:
    for said in together(2, ranks_errands.refusals):
        grouping = (
            "ValueError: BlockAdam: `grouping` must be one that cuts each parameter by itself where parameters are"
        )
        assert said["joint"] == f"{grouping} DTensors, got 'joint'."
        assert said["explicit"] == f"{grouping} DTensors, got IndexGroups(1 blocks over 48 coordinates)."
        placements = (
            "ValueError: BlockAdam: `params` must be replicated, or sharded along dimension 0 over one dimension of "
            "the mesh, where they are DTensors, got placements"
        )
        assert said["columns"] == f"{placements} (Shard(dim=1),) for 'weight'."
        assert said["columns, no name"] == f"{placements} (Shard(dim=1),) for parameter 1 of its group (shape (8, 6))."
        assert said["twice"] == f"{placements} (Shard(dim=0), Shard(dim=0)) for 'weight'."
        assert said["shared"] == (
            "ValueError: BlockAdam: `params` must be plain tensors with a `process_group`, got DTensor."
        )
        assert said["gradient"].startswith("ValueError: BlockAdam: `grad` must be a plain tensor of shape (8, 6)")
        assert said["flattened"] == said["flat"]
        assert said["flat"] == (
            "ValueError: BlockAdam: `params` must be whole, or sharded by `fully_shard` (FSDP2), because blocks are "
            "cut from a parameter's own shape, got one that FullyShardedDataParallel (FSDP1) has flattened."
        )


def test_a_replicated_dtensor_steps_as_a_plain_parameter() -> None:
    for spread, plain in together(2, ranks_errands.replicated, 5):
        assert distance(spread, plain) == 0


def test_a_layer_that_is_parallel_in_its_outputs_trains_as_in_one_process() -> None:
    for parallel, plain in together(2, ranks_errands.tensor_parallel, 5):
        assert distance(parallel, plain) < 1e-6


# Shared out --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3])
def test_shared_out_twenty_steps_are_those_of_one_process_bit_for_bit(ranks: int) -> None:
    options = [{"block_size": 4, **each} for each in OPTIONS.values()]
    alone = [param_bits(one_process(each)) for each in options]
    for results in together(ranks, ranks_errands.trained, "shared", options, STEPS):
        assert [param_bits(params) for params in results] == alone


@pytest.mark.parametrize(("ranks", "dtype"), [(2, torch.float32), (3, torch.float32), (3, torch.bfloat16)], ids=str)
def test_shared_out_every_case_is_that_of_one_process_bit_for_bit(ranks: int, dtype: torch.dtype) -> None:
    cases = [case for case in CASES if case.kwargs.get("backend") != "eigh"]
    results = together(ranks, ranks_errands.every_case, [case.id for case in cases], dtype, 6)
    for case in cases:
        (net,) = twins(count=1, dtype=dtype)
        run(case.build(net.parameters()), range(1, 7))
        assert [param_bits(result[case.id]) for result in results] == [param_bits(net.parameters())] * ranks, case.id


def test_shared_out_eigh_is_that_of_one_process_to_rounding() -> None:
    """Its batched products round by the size of the batch."""
    cases = [case for case in CASES if case.kwargs.get("backend") == "eigh"]
    first, second = together(2, ranks_errands.every_case, [case.id for case in cases], torch.float64, 6)
    for case in cases:
        (net,) = twins(count=1, dtype=torch.float64)
        run(case.build(net.parameters()), range(1, 7))
        assert param_bits(first[case.id]) == param_bits(second[case.id])
        assert distance(first[case.id], ranks_errands.whole(net.parameters())) < 1e-11, case.id


@pytest.mark.parametrize("ranks", [2, 3])
def test_each_rank_holds_its_share_of_the_state(ranks: int) -> None:
    options = {"block_size": 4, "amsgrad": True}
    (alone,) = together(1, ranks_errands.state_held, options)
    held = together(ranks, ranks_errands.state_held, options)
    assert sum(held) == alone
    assert max(held) <= alone / ranks * 1.05


def test_parameters_that_stand_are_asked_about_all_at_once_in_many_processes_too() -> None:
    """What Python takes for each parameter does not shrink with the ranks."""
    options = {"block_size": 4}, {"block_size": 4, "clip": SpectrumClip("auto", 80.0)}
    calls = [(*kind, each) for kind in KINDS for each in options]
    assert together(2, ranks_errands.for_each, ranks_errands.asked_about_one_by_one, calls) == [[[]] * 4] * 2


def test_buckets_that_follow_each_other_change_nothing() -> None:
    options = {"block_size": 4, "refresh_every": 3}
    for params in together(2, ranks_errands.in_small_buckets, options, 8):
        assert param_bits(params) == param_bits(one_process(options, steps=8))


def test_rows_that_are_gathered_as_between_gpus_are_those_that_go_straight() -> None:
    options = {"block_size": 4, "clip": SpectrumClip("auto", 0.05)}
    (estimate, params), *others = together(2, ranks_errands.gathered_by_gloo, options, 8)
    straight, expected = together(2, ranks_errands.measured, "shared", options, 8)[0]
    assert others == [(straight, param_bits(expected))] == [(estimate, params)]


def test_parameters_that_have_moved_in_memory_are_read_and_written_where_they_are() -> None:
    expected = param_bits(one_process({"block_size": 4}, steps=4))
    assert together(2, ranks_errands.with_new_memory) == [expected] * 2


def test_groups_of_one_parameter_are_cut_anew_and_loaded_as_in_one_process(tmp_path: Path) -> None:
    """Whoever is dealt out anew leaves all others where their state lies."""
    alone, _ = ranks_errands.in_groups_of_their_own(False, "")
    for answers in together(3, ranks_errands.in_groups_of_their_own, True, str(tmp_path)):
        assert answers == [alone, alone]


def test_a_state_is_loaded_where_it_lay_also_after_a_cut() -> None:
    alone = ranks_errands.loaded_after_a_cut(False)
    assert together(2, ranks_errands.loaded_after_a_cut, True) == [alone] * 2


def test_a_step_makes_no_memory_after_the_vote() -> None:
    """It might not get any, and the others would have gone on."""
    assert together(2, ranks_errands.memory_made_after_the_vote) == [[], []]


def test_under_ddp_a_process_group_changes_nothing() -> None:
    for plain, shared in together(2, ranks_errands.for_each, ranks_errands.under_ddp, [(5, False), (5, True)]):
        assert param_bits(plain) == param_bits(shared)


def test_a_compiled_step_of_many_processes_is_the_eager_one_and_no_graph() -> None:
    calls = [("shared", 3), ("fsdp", 3)]
    expected = param_bits(one_process({"block_size": 4}, steps=3))
    for answers in together(2, ranks_errands.for_each, ranks_errands.compiled, calls):
        assert answers == [(0, expected)] * 2


def test_what_a_process_group_does_not_allow_is_refused() -> None:
    first, second = together(2, ranks_errands.shared_refusals)
    for said in (first, second):
        assert said["copied"].startswith("TypeError: BlockAdam: an optimizer with a `process_group` cannot be copied")
        assert said["recorded"].startswith("ValueError: diagnostics: `optimizer` must be one whose blocks all lie in")
        for what in ("gradients", "cut", "order", "one of a block"):
            assert said[what].startswith("ValueError: BlockAdam: `grad` must be there for the same parameters in")
    assert second["outside"].startswith("ValueError: BlockAdam: `process_group` must be a process group that this")


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 64])
def test_ranks_differ_by_less_than_one_grain_in_arithmetic(ranks: int) -> None:
    shapes = [(300, 784), (300,), (100, 300), (100,), (10, 100), (10,), (64, 3, 3, 3), (7, 11), (), (1, 5), (0, 3)]
    group = {"params": [torch.empty(shape) for shape in shapes], "grouping": "auto", "block_size": 10}
    units = list(units_of(group, 0))
    costs, largest = [0] * ranks, 0
    for unit, borders in zip(units, shares(units, ranks), strict=True):
        cut = unit.cut
        assert isinstance(cut, Partition)
        if borders is None:
            assert not unit.owner.ndim
            continue
        assert (borders[0], borders[-1]) == (0, cut.length)
        for rank in range(ranks):
            piece = cut.between(*borders[rank : rank + 2])
            costs[rank] += piece.num_blocks * block_flops(cut.n)
        largest = max(largest, -(-cut.num_blocks * cut.grain // max(1, cut.length)) * block_flops(cut.n))
    assert max(costs) - min(costs) <= largest


# All or none -------------------------------------------------------------------------------------------------------


def test_a_gradient_that_is_not_finite_in_one_process_stops_all() -> None:
    expected = param_bits(one_process({"block_size": 4}, steps=3))
    calls = [(*kind, "raise") for kind in KINDS]
    first, second = together(2, ranks_errands.for_each, ranks_errands.with_one_bad_gradient, calls)
    for (here, *others), (there, *theirs) in zip(first, second, strict=True):
        said = "NonFiniteGradientError: BlockAdam: another process has a gradient that is not finite; parameters and"
        assert here == f"{said} state are unchanged."
        assert re.match("NonFiniteGradientError: BlockAdam: the gradient of 'second.weight' has 1 of", there)
        assert others == theirs == [True, 0, expected]


def test_a_gradient_that_is_not_finite_in_one_process_is_skipped_by_all() -> None:
    expected = param_bits(one_process({"block_size": 4}, steps=3))
    calls = [(*kind, "skip") for kind in KINDS]
    for answers in together(2, ranks_errands.for_each, ranks_errands.with_one_bad_gradient, calls):
        assert answers == [("nothing", True, 1, expected)] * 2


def test_an_exception_in_one_process_stops_all() -> None:
    first, second = together(2, ranks_errands.for_each, ranks_errands.with_one_exception, KINDS)
    for (here, *others), (there, *theirs) in zip(first, second, strict=True):
        said = "RuntimeError: BlockAdam: another process failed in this step; parameters and state are unchanged."
        assert here == said
        assert there == "ValueError: BlockAdam: `eps` must be a finite number > 0, got -1.0."
        assert others == theirs == [True, param_bits(one_process({"block_size": 4}, steps=3))]


@pytest.mark.parametrize(
    ("kind", "when"), [("shared", "before"), ("shared", "after it agreed"), ("fsdp", "before")], ids=str
)
def test_when_a_process_is_killed_the_others_raise_and_their_parameters_are_as_before(kind: str, when: str) -> None:
    for first, second, saved, unchanged in together(
        3, ranks_errands.with_one_killed, kind, when, timeout=ranks_errands.TIMEOUT, lost=2
    ):
        assert unchanged
        if when == "before":
            said = "RuntimeError: BlockAdam: another process does not answer; parameters and state are unchanged."
            assert (first, saved) == (said, "nothing")
        else:
            assert first == LOST  # a process may be gone when rows are expected, or when they are waited for
            assert second == saved == HALFWAY


def test_when_a_process_is_killed_after_the_vote_other_shards_end_the_step_and_raise_at_the_next() -> None:
    for first, second, saved, unchanged in together(
        3, ranks_errands.with_one_killed, "fsdp", "after it agreed", timeout=ranks_errands.TIMEOUT, lost=2
    ):
        assert (first, saved, unchanged) == ("nothing", "nothing", False)
        assert second == "RuntimeError: BlockAdam: another process does not answer; parameters and state are unchanged."


LOST = (
    "RuntimeError: BlockAdam: another process was lost after all had agreed on a step; parameters here are as before "
    "it, the state of the blocks may not be, here or elsewhere. Load a checkpoint."
)
HALFWAY = (
    "RuntimeError: BlockAdam: the last step was interrupted or another process was lost in it, so that parameters and "
    "state are not those of one step. Load a checkpoint."
)


def test_after_an_interrupt_behind_the_vote_nothing_goes_on_but_from_a_checkpoint() -> None:
    expected = param_bits(one_process({"block_size": 4}, steps=3))
    for said, unchanged, params in together(2, ranks_errands.with_an_interrupt):
        assert said == ["KeyboardInterrupt: ", HALFWAY, HALFWAY]
        assert unchanged
        assert params == expected


def test_rows_of_a_step_that_was_broken_off_are_not_taken_for_those_of_another() -> None:
    """Also where an interrupt leaves a process with one vote less than the others have counted."""
    expected = param_bits(one_process({"block_size": 4}, steps=3))
    calls = [("publish",), ("vote",)]
    answers = together(3, ranks_errands.for_each, ranks_errands.interrupted_at_different_places, calls)
    assert answers == [[expected] * 2] * 3


def test_a_process_that_is_lost_before_alpha_is_known_to_all_leaves_whole_steps() -> None:
    lost = "RuntimeError: BlockAdam: another process was lost before α* of the last step was known here; parameters and"
    for first, *later in together(
        3, ranks_errands.with_one_lost_before_alpha_is_known, timeout=ranks_errands.TIMEOUT, lost=2
    ):
        assert first == ("nothing", False)
        assert later == [(f"{lost} state are those of that step. Load a checkpoint.", True)] * 3


def test_a_process_that_leaves_after_its_step_has_told_the_others_alpha() -> None:
    errand, timeout = ranks_errands.with_one_that_leaves_and_does_not_read_alpha, ranks_errands.TIMEOUT
    assert together(2, errand, timeout=timeout, lost=1) == [("nothing", 3)]


def test_a_process_that_cannot_add_up_its_counts_says_so_and_is_lost_to_the_others() -> None:
    timeout = ranks_errands.TIMEOUT
    first, second = together(2, ranks_errands.with_no_memory_for_alpha, timeout=timeout)
    step = "parameters and state are those of that step. Load a checkpoint."
    lost = "RuntimeError: BlockAdam: another process was lost before α* of the last step was known here"
    own = "RuntimeError: BlockAdam: this process could not add up what the last step has shown of α*, nor tell the"
    assert first == ["nothing", *[f"{lost}; {step}"] * 2]
    assert second == ["nothing", *[f"{own} others; {step}"] * 2]


def test_a_process_that_is_lost_before_anything_is_written_leaves_parameters_and_state_here() -> None:
    assert together(2, ranks_errands.with_one_lost_when_rows_are_expected) == [[LOST, True, HALFWAY]] * 2


def test_a_closure_that_raises_in_one_process_at_the_first_step_stops_all() -> None:
    first, second = together(2, ranks_errands.for_each, ranks_errands.with_a_closure_that_raises, KINDS)
    said = "RuntimeError: BlockAdam: another process failed in this step; parameters and state are unchanged."
    assert (first, second) == ([said] * 2, ['KeyError: "of the user\'s own"'] * 2)


def test_the_first_vote_of_all_lies_on_the_device_of_the_parameters() -> None:
    """NCCL has no other."""
    assert together(1, ranks_errands.where_a_first_step_votes) == [["meta"]]


@pytest.mark.parametrize("kind", ["shared", "fsdp"])
def test_when_a_hook_ends_a_process_the_others_raise_and_nothing_has_changed(kind: str) -> None:
    first, second = together(2, ranks_errands.with_one_hook_that_raises, kind, timeout=ranks_errands.TIMEOUT)
    said = "RuntimeError: BlockAdam: another process does not answer; parameters and state are unchanged."
    assert (first, second) == ((said, True), ('KeyError: "of the user\'s own"', True))


# Checkpoints -------------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_two_ranks_goes_on_with_one_two_and_three(tmp_path: Path) -> None:
    options = {"block_size": 4, "lr": 0.01, "refresh_every": 3, "amsgrad": True, "clip": SpectrumClip(0.1, 0.05)}
    alone = one_process(options, steps=12)
    together(2, ranks_errands.save, options, 7, str(tmp_path))
    for ranks, kinds in {1: ["one", "shared", "fsdp"], 2: ["shared", "fsdp"], 3: ["shared", "fsdp"]}.items():
        for answers in together(ranks, ranks_errands.resume, kinds, options, range(7, 12), str(tmp_path)):
            assert len(answers) == 2 * len(kinds)
            for (saved, kind), params in answers.items():
                if (ranks, kind) == (3, "fsdp"):  # a third of a sum of three is not always that number
                    assert distance(params, alone) < 1e-6
                else:
                    assert param_bits(params) == param_bits(alone), (ranks, saved, kind)


def test_a_checkpoint_of_shards_and_their_copies_goes_on(tmp_path: Path) -> None:
    options = {"block_size": 4, "refresh_every": 3}
    for saved, loaded in together(4, ranks_errands.copies_saved, options, str(tmp_path)):
        assert saved == loaded


def test_torch_gathers_a_whole_state_dict_where_every_rank_has_as_many_blocks() -> None:
    options = {"block_size": 4, "amsgrad": True, "refresh_every": 3}
    calls = [("fsdp", options), ("shared", options)]
    for answers in together(2, ranks_errands.for_each, ranks_errands.gathered, calls):
        for shapes, saved, loaded in answers:
            assert shapes["1.weight"]["second_moment"] == (144, 10)
            assert shapes["1.weight"]["exp_avg"] == (24, 24)
            assert saved == loaded


def test_shards_that_cut_blocks_resume_themselves_and_refuse_a_state_whose_blocks_are_whole(tmp_path: Path) -> None:
    net, optimizer = ranks_errands.built("one", {"block_size": 4}, rows=9)
    ranks_errands.train(net, optimizer, range(3))
    for same, said in together(2, ranks_errands.torn_and_saved, optimizer.state_dict(), str(tmp_path / "torn")):
        assert same
        rule = "must be what cut the blocks of parameter 2 when their state was made (delete that state to begin anew)"
        got = "got one that gives runs of 4 down a column of 9 in 2 shards."
        assert said == f"ValueError: BlockAdam.load_state_dict: `grouping` {rule}, {got}"


def test_a_checkpoint_without_second_moments_goes_on(tmp_path: Path) -> None:
    options = {"block_size": 4, "clip": SpectrumClip(0.1, gamma=80.0)}
    for params in together(2, ranks_errands.resumed_after_a_clip_has_closed, options, str(tmp_path)):
        assert param_bits(params) == param_bits(one_process(options, steps=12))


def test_what_one_process_saved_goes_on_with_two() -> None:
    options = {"block_size": 4, "refresh_every": 3}
    net, optimizer = ranks_errands.built("one", options)
    ranks_errands.train(net, optimizer, range(5))
    saved = optimizer.state_dict(), ranks_errands.whole(net.parameters())
    alone = param_bits(one_process(options, steps=8))
    calls = [(*kind, *saved, range(5, 8)) for kind in KINDS]
    for answers in together(2, ranks_errands.for_each, ranks_errands.from_a_plain_state, calls):
        assert [param_bits(params) for params in answers] == [alone] * 2


# Starting together -------------------------------------------------------------------------------------------------


def test_three_ranks_with_an_empty_cache_compile_once_and_one_that_cannot_write_compiles_for_itself(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("not a folder")
    caches = [str(tmp_path / "cache")] * 3 + [str(tmp_path / "file")]
    *three, (told, warned, apart) = together(4, ranks_errands.trained_with_an_empty_cache, caches, 3, timeout=120)
    compiling, waiting, unkept = (words.format(dtype="float32") for words in (COMPILING, WAITING, COMPILING_UNKEPT))
    assert sorted(words for words, _, _ in three) == [[compiling], [waiting], [waiting]]
    assert len([file for file in (tmp_path / "cache").rglob("float32-*") if file.suffix != ".lock"]) == 1
    assert told == [unkept]
    assert len(warned) == 1
    assert "every process compiles the CPU kernel for itself" in warned[0]
    assert not any(others for _, others, _ in three)
    alone = param_bits(one_process({"block_size": 4}, steps=3))
    assert [*(params for _, _, params in three), apart] == [alone] * 4
