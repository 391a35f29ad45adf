"""The kernel for GPUs, in Triton: `kernel` keeps the contract, `work` launches, `step` is what is launched."""
