"""States the theorems of Yun, Lozano and Yang (2019) as functions: constants, conditions and bounds.

A function is the corrected form, which holds; in `printed`, one of the same name is what the paper prints. Letters:

    P_t    the operator that step t applies to m_t; α_t V̂_t^{-1/2} in the paper, with δ inside
    Q_t    ‖P_t − P_{t−1}‖₂, the largest of all blocks: Term B. Term A is ‖P_t g_t‖²
    b      β₁ / (1 − β₁)
    G      a bound of ‖g_t‖₂, ‖∇f(x_t)‖₂ and ‖∇f(z_t)‖₂, z_t = x_t + b_t (x_t − x_{t−1}). The paper bounds ‖·‖_∞, and
           only g_t and ∇f(x_t); its proofs use the Euclidean norm and z_t
    L      `smoothness`, the Lipschitz constant of ∇f
    D      `step_bound` ≥ ‖P_t m_t‖
    σ²     `variance` ≥ E‖∇f(x; ξ) − ∇f(x)‖² of one sample; M is `batch_size`

`eps` is δ and `lr` is α, as in the optimizers.
"""

from blockadapt.diagnostics.theory import printed
from blockadapt.diagnostics.theory.theorem1 import (
    Theorem1Constants,
    corollary_bound,
    euclidean_bound,
    term_a_log_det,
    term_a_sum,
    term_b_square_sum,
    term_b_sum,
    term_b_trace,
    theorem1_bound,
    theorem1_constants,
    theorem1_rate,
)
from blockadapt.diagnostics.theory.theorem2 import (
    Theorem2Conditions,
    condition_bound,
    gradient_limit,
    momentum_bound,
    root_change_bound,
    theorem2_bound,
    theorem2_conditions,
    theorem2_remainder,
)

__all__ = [
    "Theorem1Constants",
    "Theorem2Conditions",
    "condition_bound",
    "corollary_bound",
    "euclidean_bound",
    "gradient_limit",
    "momentum_bound",
    "printed",
    "root_change_bound",
    "term_a_log_det",
    "term_a_sum",
    "term_b_square_sum",
    "term_b_sum",
    "term_b_trace",
    "theorem1_bound",
    "theorem1_constants",
    "theorem1_rate",
    "theorem2_bound",
    "theorem2_conditions",
    "theorem2_remainder",
]
