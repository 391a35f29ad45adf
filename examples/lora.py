"""Block-AdamW on the low-rank adapters of a frozen GPT-2, by PEFT."""

from __future__ import annotations

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers.models.gpt2 import GPT2Config, GPT2LMHeadModel

from blockadapt import BlockAdamW, param_groups


def model() -> PeftModel:
    """Build a GPT-2 that fits a test, with adapters of rank 4 in its attention."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=40, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    adapters = LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.0)
    return get_peft_model(GPT2LMHeadModel(config), adapters)


def train(net: PeftModel, steps: int = 20) -> tuple[float, BlockAdamW]:
    """Frozen parameters may stay in the groups: they get no gradient, so no step and no state."""
    optimizer = BlockAdamW(param_groups(net), lr=1e-2)
    tokens = (torch.arange(8)[:, None] + torch.arange(16)) % 40
    for _ in range(steps):
        optimizer.zero_grad()
        loss = net(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
    return loss.item(), optimizer


def main() -> None:
    """Train the adapters."""
    loss, optimizer = train(model())
    held = sum(value.numel() for state in optimizer.state.values() for value in state.values())
    print(f"loss {loss:.3f}, {held} numbers of optimizer state")


if __name__ == "__main__":
    main()
