"""The laboratory: demos and experiments on top of `blockadapt`. The library never imports it."""
