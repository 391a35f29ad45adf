"""The kernel for GPUs is written in Triton: `kernel` keeps the contract, `work` launches, `step` is launched."""
