"""The examples run offline, and what they show is so."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from blockadapt import BlockAdamW, param_groups
from support.contract_cases import param_bits, state_bits

EXAMPLES = [
    path
    for path in sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
    if path.stem != "torchrun_resume"  # which is for several processes, and has a test of its own
]

NEEDS = {
    "accelerate_loop": "accelerate",
    "hugging_face_trainer": "transformers",
    "lightning_resume": "lightning",
    "lora": "peft",
}
"""What an example needs of the `trainers` extra."""

pytestmark = pytest.mark.filterwarnings("default")  # what other packages warn of is theirs


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def example(name: str) -> ModuleType:
    """The example as a module, as a user would run it."""
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason='needs pip install "blockadapt[trainers]"')
    (path,) = (path for path in EXAMPLES if path.stem == name)
    spec = importlib.util.spec_from_file_location(f"example_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def groups_by_name(groups: Iterable[dict[str, Any]]) -> dict[str, tuple[Any, ...]]:
    """Grouping, block size and weight decay of each parameter."""
    kept = ("grouping", "block_size", "weight_decay")
    return {name: tuple(group[key] for key in kept) for group in groups for name in group["param_names"]}


@pytest.mark.parametrize(
    "name", [pytest.param(path.stem, marks=[pytest.mark.slow] * (path.stem == "compiled_model")) for path in EXAMPLES]
)
def test_an_example_runs_and_prints_a_finite_loss(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    example(name).main()
    words = [line.partition("loss ")[2].split() for line in capsys.readouterr().out.splitlines() if "loss " in line]
    assert words
    assert all(0 < float(after[0].strip(",")) < 4 for after in words)


# Hugging Face's Trainer --------------------------------------------------------------------------------------------

each_way = pytest.mark.parametrize("way", ["with_an_optimizer", "with_a_class", "with_a_model_init"])


@each_way
def test_the_trainer_keeps_groupings_and_weight_decay(way: str, tmp_path: Path) -> None:
    trainer = getattr(example("hugging_face_trainer"), way)(tmp_path)
    trainer.create_optimizer_and_scheduler(num_training_steps=10)
    found = groups_by_name(trainer.optimizer.param_groups)
    assert found.keys() == dict(trainer.model.named_parameters()).keys()
    assert found["transformer.h.1.mlp.c_fc.weight"] == ("output", 10, 0.1)
    assert found["transformer.h.1.attn.c_attn.weight"] == ("output", 8, 0.1)
    assert found["transformer.h.1.attn.c_attn.bias"] == ("chunk", 8, 0.0)
    assert found["transformer.wte.weight"] == ("output", 10, 0.1)
    assert found["transformer.ln_f.weight"] == ("chunk", 10, 0.0)


def test_both_ways_with_a_model_of_ours_train_alike_bit_for_bit(tmp_path: Path) -> None:
    module = example("hugging_face_trainer")

    def trained(way: Callable[[Path], Any]) -> list[bytes]:
        trainer = way(tmp_path / way.__name__)  # seeds dropout
        trainer.train()
        return param_bits(trainer.model.parameters())

    first, second = trained(module.with_an_optimizer), trained(module.with_a_class)
    assert first == second
    assert first != param_bits(module.model().parameters())


def test_each_trial_of_a_search_trains_a_new_model_in_our_groups_with_its_own_lr_and_weight_decay(
    tmp_path: Path,
) -> None:
    trainer = example("hugging_face_trainer").with_a_model_init(tmp_path, steps=2)
    before, ends = param_bits(trainer.model.parameters()), []
    for lr, decay in ((1e-2, 0.1), (3e-3, 0.2), (1e-2, 0.1)):
        trainer.args.learning_rate, trainer.args.weight_decay = lr, decay  # as the Trainer does before each trial
        trainer.train()
        ends.append(param_bits(trainer.model.parameters()))
        assert {group["initial_lr"] for group in trainer.optimizer.param_groups} == {lr}
        found = groups_by_name(trainer.optimizer.param_groups)
        assert found["transformer.h.1.mlp.c_fc.weight"] == ("output", 10, decay)
        assert found["transformer.h.1.mlp.c_fc.bias"] == ("chunk", 10, 0.0)
    assert ends[0] == ends[2]
    assert before != ends[0] != ends[1]


def test_a_trainer_of_ours_that_was_given_a_model_goes_on_with_its_optimizer(tmp_path: Path) -> None:
    module = example("hugging_face_trainer")
    trainer = module.BlockTrainer(module.model(), module.arguments(tmp_path, 2), train_dataset=module.counting())
    for _ in range(2):
        trainer.train()
    assert {state["step"].item() for state in trainer.optimizer.state.values()} == {4}


def test_groups_given_beside_a_model_init_train_nothing_and_then_the_trainers_own_are_stepped(tmp_path: Path) -> None:
    module = example("hugging_face_trainer")
    from transformers import Trainer

    before = param_bits(module.model().parameters())
    made = (BlockAdamW, {"params": param_groups(module.model()), "lr": 1e-2})
    data, args = module.counting(), module.arguments(tmp_path, 2)
    trainer = Trainer(model_init=module.model, args=args, train_dataset=data, optimizer_cls_and_kwargs=made)
    for trains in (False, True):
        trainer.train()
        assert (param_bits(trainer.model.parameters()) != before) is trains
        assert ({group["grouping"] for group in trainer.optimizer.param_groups} == {"auto"}) is trains


def test_an_optimizer_beside_a_model_init_is_refused_by_the_trainer(tmp_path: Path) -> None:
    module = example("hugging_face_trainer")
    from transformers import Trainer

    optimizer = BlockAdamW(param_groups(module.model()))
    with pytest.raises(RuntimeError, match="`model_init` is incompatible with providing the `optimizers`"):
        Trainer(model_init=module.model, args=module.arguments(tmp_path, 2), optimizers=(optimizer, None))


def test_the_trainers_own_groups_would_cut_conv1d_along_the_wrong_axis(tmp_path: Path) -> None:
    module = example("hugging_face_trainer")
    from transformers import Trainer

    trainer = Trainer(module.model(), module.arguments(tmp_path, 10), optimizer_cls_and_kwargs=(BlockAdamW, {}))
    trainer.create_optimizer()
    assert [group["grouping"] for group in trainer.optimizer.param_groups] == ["auto", "auto"]


@each_way
def test_a_resumed_trainer_equals_the_uninterrupted_one_bit_for_bit(way: str, tmp_path: Path) -> None:
    make = getattr(example("hugging_face_trainer"), way)
    whole = make(tmp_path / "whole")
    whole.train()
    resumed = make(tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-5"))
    assert resumed.state.global_step == 10
    assert param_bits(resumed.model.parameters()) == param_bits(whole.model.parameters())


# Accelerate --------------------------------------------------------------------------------------------------------


@pytest.fixture
def in_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("in_float64")
def test_accumulated_gradients_step_as_whole_batches_do() -> None:
    """In float64: in float32 the sums round differently, and V has no full rank in four steps, which makes it show."""
    module = example("accelerate_loop")
    whole = module.Run(accumulate=1)
    whole.epoch()
    halves = module.Run(accumulate=2)  # only now: Accelerate keeps one number of accumulated batches for the process
    halves.epoch()
    steps = [run.optimizer.state[run.model[0].weight]["step"].item() for run in (whole, halves)]
    assert steps == [4, 4]
    for a, b in zip(whole.model.parameters(), halves.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_a_state_that_accelerate_saved_resumes_bit_for_bit(tmp_path: Path) -> None:
    module = example("accelerate_loop")
    whole = module.Run()
    whole.epoch()
    whole.accelerator.save_state(str(tmp_path))
    resumed = module.Run()
    resumed.accelerator.load_state(str(tmp_path))
    for run in (whole, resumed):
        run.epoch()
    assert param_bits(resumed.model.parameters()) == param_bits(whole.model.parameters())
    assert state_bits(resumed.optimizer.optimizer) == state_bits(whole.optimizer.optimizer)


# Lightning ---------------------------------------------------------------------------------------------------------


def test_a_run_that_lightning_resumed_equals_the_uninterrupted_one_bit_for_bit(tmp_path: Path) -> None:
    module = example("lightning_resume")
    model, trainer = module.resumed(tmp_path / "resumed")
    whole_model, whole = module.Classifier(), module.trainer(tmp_path / "whole", epochs=3)
    whole.fit(whole_model, module.batches())
    assert param_bits(model.parameters()) == param_bits(whole_model.parameters())
    assert state_bits(trainer.optimizers[0]) == state_bits(whole.optimizers[0])
    assert param_bits(model.parameters()) != param_bits(module.Classifier().parameters())


# Plain torch -------------------------------------------------------------------------------------------------------


def test_stepping_in_backward_equals_ordinary_training_and_frees_each_gradient() -> None:
    module = example("optimizer_in_backward")
    hooked, plain = module.model(), module.model()
    module.step_in_backward_(hooked)
    module.train(hooked, steps=5)
    assert all(param.grad is None for param in hooked.parameters())
    optimizer = BlockAdamW(param_groups(plain, weight_decay=0.1, decay_norms_and_biases=False), lr=1e-2)
    for step in range(5):
        x, y = module.data(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(x), y).backward()
        optimizer.step()
    assert param_bits(hooked.parameters()) == param_bits(plain.parameters())


def test_a_compiled_model_trains_as_the_eager_one() -> None:
    """Traced and differentiated by torch.compile; the generated code is left to the slow run of the example."""
    module = example("compiled_model")
    eager, traced = module.model(), module.model()
    optimizers = [BlockAdamW(param_groups(net), lr=1e-2) for net in (eager, traced)]
    module.train(eager, optimizers[0], steps=4)
    module.train(torch.compile(traced, backend="aot_eager"), optimizers[1], steps=4)
    for a, b in zip(eager.parameters(), traced.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    optimizers[0].load_state_dict(optimizers[1].state_dict())  # checkpoints go from one to the other
    assert state_bits(optimizers[0]) == state_bits(optimizers[1])


def test_the_scaler_skips_a_step_that_overflowed_and_the_optimizer_counts_it_not() -> None:
    module = example("grad_scaler")
    net = module.model()
    optimizer = BlockAdamW(param_groups(net), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    before, steps, skipped = param_bits(net.parameters()), 0, 0
    for step in range(8):
        scale = scaler.get_scale()
        module.step_(net, optimizer, scaler, step)
        overflowed = scaler.get_scale() < scale
        moved = param_bits(net.parameters()) != before
        assert moved is not overflowed
        before, steps, skipped = param_bits(net.parameters()), steps + moved, skipped + overflowed
    assert steps > 0
    assert skipped > 0
    assert {state["step"].item() for state in optimizer.state.values()} == {steps}


def test_only_the_adapters_move_and_only_they_have_state() -> None:
    module = example("lora")
    net = module.model()
    before = {name: param.detach().clone() for name, param in net.named_parameters()}
    _, optimizer = module.train(net, steps=3)
    moved = {name for name, param in net.named_parameters() if not torch.equal(param, before[name])}
    assert moved == {name for name in before if "lora_" in name}
    assert optimizer.state.keys() == {param for name, param in net.named_parameters() if "lora_" in name}
