"""Parameters of a ``BasicsTransformerLM``, by component."""

from dataclasses import dataclass

from cs336sys.sizes import ModelSize


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters by component, the whole model's (all layers together)."""

    embedding: int
    attention: int
    feed_forward: int
    norms: int
    lm_head: int

    @property
    def total(self) -> int:
        return self.embedding + self.attention + self.feed_forward + self.norms + self.lm_head


def parameters_by_component(size: ModelSize) -> ParameterCounts:
    """Parameters of a pre-norm Transformer with SwiGLU, rotary embeddings and no biases.

    A layer has four square attention projections (q, k, v, output: ``4 d^2``), the three SwiGLU matrices
    (``3 d d_ff``) and two RMSNorm gains (``2 d``); a last RMSNorm follows the layers. The token embedding and the LM
    head are separate ``vocab x d`` matrices; rotary embeddings have no parameters.
    """
    d_model, layers = size.d_model, size.num_layers
    return ParameterCounts(
        embedding=size.vocab_size * d_model,
        attention=layers * 4 * d_model * d_model,
        feed_forward=layers * 3 * d_model * size.d_ff,
        norms=(2 * layers + 1) * d_model,
        lm_head=size.vocab_size * d_model,
    )


def count_parameters(size: ModelSize) -> int:
    """Parameters of the whole model, embedding and LM head included."""
    return parameters_by_component(size).total


def parameter_shapes(size: ModelSize) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter, in the order in which the model registers and uses them."""
    d_model, d_ff, vocab_size = size.d_model, size.d_ff, size.vocab_size
    layer = {
        **{f"attn.{name}_proj.weight": (d_model, d_model) for name in ("q", "k", "v", "output")},
        "ffn.w1.weight": (d_ff, d_model),
        "ffn.w2.weight": (d_model, d_ff),
        "ffn.w3.weight": (d_ff, d_model),
        "ln1.weight": (d_model,),
        "ln2.weight": (d_model,),
    }
    layers = {f"layers.{n}.{name}": shape for n in range(size.num_layers) for name, shape in layer.items()}
    return {
        "token_embeddings.weight": (vocab_size, d_model),
        **layers,
        "ln_final.weight": (d_model,),
        "lm_head.weight": (vocab_size, d_model),
    }
