"""How tensor parallel ranks cut a model, as plain arithmetic.

Source: Megatron-LM (https://arxiv.org/abs/1909.08053), section 3, and its sequence parallelism
(https://arxiv.org/abs/2205.05198), section 4.2.
"""

from cs336sys.errors import UsageError

# By the ends of names in the state dict, the dimension along which a weight (d_out, d_in) is cut: 0 makes columns of
# x W^T, 1 its rows; None is held whole.
CUT_DIMENSIONS: dict[str, int | None] = {
    "token_embeddings.weight": 0,
    "attn.q_proj.weight": 0,
    "attn.k_proj.weight": 0,
    "attn.v_proj.weight": 0,
    "attn.output_proj.weight": 1,
    "ffn.w1.weight": 0,
    "ffn.w2.weight": 1,
    "ffn.w3.weight": 0,
    "ln1.weight": None,
    "ln2.weight": None,
    "ln_final.weight": None,
    "lm_head.weight": 0,
}


def cut_dimension(name: str) -> int | None:
    """Along which dimension the parameter of this name in the state dict is cut; None if every rank holds the whole.

    Raises:
        UsageError: no ``cs336_basics`` has such a parameter.
    """
    parts = name.split(".")
    inner = ".".join(parts[2:]) if parts[0] == "layers" and len(parts) > 2 else name
    if inner not in CUT_DIMENSIONS:
        raise UsageError(
            f"parameter {name}: tensor parallelism knows how to cut those of cs336_basics alone, "
            f"layers.N.*, token_embeddings.weight, ln_final.weight and lm_head.weight"
        )
    return CUT_DIMENSIONS[inner]


def own_part(length: int, rank: int, world_size: int) -> range:
    """Which of ``length`` rows or columns a rank holds; the first ranks hold one more where they do not divide."""
    each, more = divmod(length, world_size)
    first = rank * each + min(rank, more)
    return range(first, first + each + (rank < more))


def heads_refusal(num_heads: int, world_size: int) -> str | None:
    """Why ranks cannot share attention heads; None if they can."""
    if num_heads % world_size == 0:
        return None
    divisors = [str(ranks) for ranks in range(1, num_heads + 1) if num_heads % ranks == 0]
    return (
        f"{num_heads} attention heads cannot be shared by {world_size} tensor parallel ranks: "
        f"choose {', '.join(divisors[:-1])} or {divisors[-1]} ranks"
        if len(divisors) > 1
        else f"1 attention head cannot be shared by {world_size} tensor parallel ranks: choose 1 rank"
    )
