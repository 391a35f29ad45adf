"""Hold what `blockadapt list` shows, so that it answers at once: the experiments themselves load torch.

A test holds it to what the experiments say of themselves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from blockadapt_experiments.core.shipped import shipped_tables
from blockadapt_experiments.drawing.colours import STYLES
from blockadapt_experiments.names import NOT_IN_PAPER, SCALES, nearest, require_optimizer, require_optimizers

CONTENTS: dict[str, tuple[str, str]] = {
    "toy-adagrad": (
        "AdaGrad with a full matrix against a diagonal, on a network of ten weights",
        "Section 2; appendix A, figure 6",
    ),
    "toy-landscape": (
        "The loss over two weights of the toy network: same layer against different layers",
        "Section 2, figure 2",
    ),
    "toy-trajectories": (
        "RMSprop with one 2 × 2 block against a diagonal, on the loss over two weights",
        "Section 2, figure 2",
    ),
    "terms": ("Term A and Term B of Theorem 1 on MNIST, blocks of 10 against a diagonal", "Section 3, figure 3"),
    "mnist-lenet300": (
        "LeNet-300-100 on MNIST: block against diagonal against GGT",
        "Section 5, figure 4; appendix, figure 7",
    ),
    "mnist-lenet5": (
        "LeNet-5 (Caffe's) on MNIST: block against diagonal against GGT",
        "Section 5, figure 4; appendix, figure 7",
    ),
    "cifar10-densenet": ("DenseNet-BC on CIFAR-10: spectrum clipping", "Section 5, table 1; appendix, figure 8"),
    "cifar100-densenet": ("DenseNet-BC on CIFAR-100: spectrum clipping", "Section 5, table 1, figure 5"),
    "lm-lstm": ("LSTM language model: spectrum clipping", "Section 5, figure 5"),
    "tcvae": ("β-TCVAE: disentanglement against β, block against diagonal", "Section 5, figure 5(c)"),
    "cifar10-cnn": ("A small convolutional network on CIFAR-10: what people use", NOT_IN_PAPER),
    "gpt-char": ("A small GPT on characters: what people use", NOT_IN_PAPER),
    "gpt-words": ("A small GPT on words: what blocks in the embedding do", NOT_IN_PAPER),
}
"""Title and place in the paper of each experiment, by its name."""


def require_known(experiment: str, scale: str, contents: Collection[str] = CONTENTS) -> None:
    """Refuse a name that no experiment or no scale has, in the words that loading them has.

    Raises:
        ValueError: There is none such; the sentence names the nearest experiment, or all scales.
    """
    if experiment not in contents:
        near = nearest(experiment, contents)
        raise ValueError(f"blockadapt: there is no experiment {experiment!r}; the nearest is {near!r}.")
    if scale not in SCALES:
        raise ValueError(f"{experiment}: `scale` must be one of {', '.join(map(repr, SCALES))}, got {scale!r}.")


def require_chosen(experiment: str, scale: str, optimizers: Sequence[str], arms: Iterable[str]) -> None:
    """Refuse the name of an optimizer that does not exist, in the words that loading the settings has.

    Args:
        experiment: A known one.
        scale: A known one.
        optimizers: The names that were chosen.
        arms: The arms that were made, as they are typed.
    """
    tables = shipped_tables(experiment)
    # What an experiment compares may be no optimizer, as in toy-landscape, or an arm.
    own = (
        name for table in ("defaults", scale) for key in ("optimizers", "arms") for name in tables[table].get(key, ())
    )
    known = {*STYLES, *own, *(arm.partition("=")[0] for arm in arms)}  # every optimizer has a style
    require_optimizers(experiment, "optimizers", optimizers, known)


def require_arms(arms: Iterable[str]) -> None:
    """Refuse an arm of an optimizer that does not exist, in the words that loading the settings has.

    Args:
        arms: As they are typed. One of another form is left to who reads it.

    Raises:
        ValueError: There is no such optimizer; the sentence names the nearest.
    """
    for arm in arms:
        name, _, rest = arm.partition("=")
        optimizer = rest.partition(",")[0].strip()
        if optimizer and "=" not in optimizer:
            require_optimizer(f"arms.{name}", optimizer, STYLES)
