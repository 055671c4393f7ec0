"""The policies: which variants are tried for a key, in which order, and why."""

from __future__ import annotations

from attentune.group import Context, Group, Policy, always

CMMA = ("flash_cmma_2_planes", "flash_cmma_4_planes", "flash_cmma_8_planes")
# In this order ties are broken: what is simplest first.
ORIGINAL = ("fallback", *CMMA, "flash_unit")

WORTH_A_TRY = 3
LAST = 0
NEVER = -1
# A cmma covers 16 query rows; with fewer queries most of it is padding.
CMMA_ROWS = 16


def _fragment(context: Context) -> str:
    """Return the element type of the fragments that cmma variants use on a target."""
    return "bfloat16" if context.target.is_cpu else "float16"


def _seed_cmma(context: Context) -> int:
    # Without the matrix unit the variant cannot run, but a plan is never to be empty.
    return WORTH_A_TRY if _fragment(context) in context.target.cmma_dtypes else LAST


def _seed_fallback(context: Context) -> int:
    # The fallback materializes scores of [batch, heads, seq_q, seq_kv]. Only while seq_q is no
    # greater than head_dim is that no larger than keys or values are, [batch, heads, seq_kv,
    # head_dim]. Beyond it grows quadratically, and is left for when nothing else works.
    return LAST if context.key.seq_q > context.key.head_dim else WORTH_A_TRY


SEED = Policy(
    "seed",
    ORIGINAL,
    (
        Group(
            "flash_attention",
            always(WORTH_A_TRY),
            (*((name, _seed_cmma) for name in CMMA), ("flash_unit", always(LAST))),
        ),
        Group("fallback", _seed_fallback, (("fallback", always(WORTH_A_TRY)),)),
    ),
)


def _unsplit(context: Context) -> bool:
    """Return whether the matrix unit takes operands as they are: in their own type, or relaxed."""
    key, dtypes = context.key, context.target.cmma_dtypes
    return key.query_dtype in dtypes or (key.precision == "relaxed" and bool(dtypes))


def _any_fragment(context: Context) -> bool:
    """Return whether the matrix unit can serve the problem, by splitting operands or relaxed."""
    return bool(context.target.cmma_dtypes)


def _cmma(context: Context) -> int:
    return WORTH_A_TRY if _any_fragment(context) else LAST


def _unit(context: Context) -> int:
    # Without a matrix unit there is nothing better, and a batch of one would measure nothing.
    # Where the fragments are narrower than a strict problem, operands are split and the work
    # grows, so the unit may win. With fewer queries than a cmma has rows, most of it is padding.
    full_speed = _unsplit(context) and context.key.seq_q >= CMMA_ROWS
    return LAST if full_speed else WORTH_A_TRY


def _split_kv(context: Context) -> int:
    # It spreads the keys of few queries over the cores; with more queries these fill the cores.
    return WORTH_A_TRY if context.key.seq_q < CMMA_ROWS else NEVER


def _fallback(context: Context) -> int:
    # Scores that do not fit in memory are never materialized by choice. On a CPU, fused is not
    # always faster: there the fallback competes whenever they fit.
    if context.score_bytes > context.memory_bytes:
        return LAST
    if context.target.is_cpu:
        return WORTH_A_TRY
    return _seed_fallback(context)


DEFAULT = Policy(
    "default",
    (*ORIGINAL, "flash_split_kv"),
    (
        Group(
            "flash_attention",
            always(WORTH_A_TRY),
            (
                *((name, _cmma) for name in CMMA),
                ("flash_unit", _unit),
                ("flash_split_kv", _split_kv),
            ),
        ),
        Group("fallback", _fallback, (("fallback", always(WORTH_A_TRY)),)),
    ),
)

POLICIES = {policy.name: policy for policy in (SEED, DEFAULT)}
