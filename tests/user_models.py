"""Models, losses, batches and optimizers as users write them; named on command lines by this file's path."""

import torch
import torch.nn.functional as F
from cs336_basics.model import BasicsTransformerLM
from torch import nn


def ours(size):
    return BasicsTransformerLM(
        vocab_size=size.vocab_size,
        context_length=size.context,
        d_model=size.d_model,
        num_layers=size.num_layers,
        num_heads=size.num_heads,
        d_ff=size.d_ff,
        rope_theta=10_000.0,
    )


def _of_transformers(name, size, **more):
    """A model of the package transformers, by the first part of its names."""
    import transformers

    shared = {"vocab_size": size.vocab_size, "max_position_embeddings": size.context, "use_cache": False}
    shared |= {"hidden_size": size.d_model, "intermediate_size": size.d_ff, "num_hidden_layers": size.num_layers}
    shared |= {"num_attention_heads": size.num_heads, "num_key_value_heads": size.num_heads // 2}
    return getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**shared | more))


def llama(size):
    return _of_transformers("Llama", size)


def qwen3(size):
    return _of_transformers("Qwen3", size, head_dim=size.d_model // size.num_heads)


def mistral(size, attention="sdpa"):
    return _of_transformers("Mistral", size, sliding_window=4, attn_implementation=attention)


def eager_mistral(size):
    return mistral(size, "eager")


def gpt2(size):
    from transformers import GPT2Config, GPT2LMHeadModel

    shared = {"n_embd": size.d_model, "n_inner": size.d_ff, "n_layer": size.num_layers, "n_head": size.num_heads}
    shared |= {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
    return GPT2LMHeadModel(GPT2Config(vocab_size=size.vocab_size, n_positions=size.context, **shared))


class Encoder(nn.Module):
    """torch's own blocks, with dropout, in an attribute that is no list."""

    def __init__(self, size):
        super().__init__()
        self.embedding = nn.Embedding(size.vocab_size, size.d_model)
        layer = nn.TransformerEncoderLayer(size.d_model, size.num_heads, size.d_ff, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, size.num_layers)
        self.head = nn.Linear(size.d_model, size.vocab_size)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        return self.head(self.encoder(self.embedding(tokens), mask=mask, is_causal=True))


class Gate(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.gate, self.up = (nn.Linear(size.d_model, size.d_ff, bias=False) for _ in range(2))
        self.down = nn.Linear(size.d_ff, size.d_model, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class GatedBlock(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.before, self.between = (nn.RMSNorm(size.d_model, eps=1e-6) for _ in range(2))
        self.mix, self.gate = nn.Linear(size.d_model, size.d_model, bias=False), Gate(size)

    def forward(self, x):
        query = self.mix(self.before(x))
        x = x + F.scaled_dot_product_attention(query, query, query, is_causal=True)
        return x + self.gate(self.between(x))


class Gated(nn.Module):
    """A Transformer with norms and gates that fused kernels know by what they compute."""

    def __init__(self, size):
        super().__init__()
        self.embedding = nn.Embedding(size.vocab_size, size.d_model)
        self.blocks = nn.ModuleList(GatedBlock(size) for _ in range(size.num_layers))
        self.norm = nn.RMSNorm(size.d_model, eps=1e-6)
        self.head = nn.Linear(size.d_model, size.vocab_size, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def half(output, targets):
    return F.cross_entropy(output.flatten(0, 1), targets.flatten()) / 2


def without_blocks(size, **how):
    return nn.Sequential(nn.Embedding(size.vocab_size, size.d_model, **how), nn.Linear(size.d_model, size.vocab_size))


class ResidualBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.convolution = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x):
        return F.relu(x + self.norm(self.convolution(x)))


class Classifier(nn.Module):
    """A residual network of two stages, whose blocks are in two lists."""

    def __init__(self, size):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.stages = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(8) for _ in range(size.num_layers))) for _ in range(2)
        )
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(8, 10)

    def forward(self, images):
        x = self.stem(images)
        for stage in self.stages:
            x = self.pool(stage(x))
        return self.head(x.mean((2, 3)))


def images(size, generator, device):
    pixels = torch.randn(size.batch_size, 3, 16, 16, generator=generator, device=device)
    return pixels, torch.randint(10, (size.batch_size,), generator=generator, device=device)


def classes(output, targets):
    return F.cross_entropy(output, targets)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def with_groups(parameters):
    parameters = list(parameters)
    decayed = [parameter for parameter in parameters if parameter.dim() > 1]
    others = [parameter for parameter in parameters if parameter.dim() <= 1]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}])


class Attentive(nn.Module):
    """Gradients that are zero but for rounding (a key's bias, one in front of batch norm), and one that is tiny."""

    def __init__(self, size):
        super().__init__()
        self.embedding = nn.Embedding(size.vocab_size, size.d_model)
        self.query, self.key = (nn.Linear(size.d_model, size.d_model) for _ in range(2))
        self.tiny = nn.Parameter(torch.randn(size.d_model))
        self.head = nn.Linear(size.d_model, size.vocab_size)

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + F.scaled_dot_product_attention(self.query(x), self.key(x), x, is_causal=True)
        return self.head(x + 1e-9 * self.tiny)


def attentive_in_bf16(size):
    return Attentive(size).bfloat16()


class Recurrent(nn.Module):
    """Random in ways that no layer of dropout shows: between torch's own layers, and in a function."""

    def __init__(self, size):
        super().__init__()
        self.embedding = nn.Embedding(size.vocab_size, size.d_model)
        self.layers = nn.LSTM(size.d_model, size.d_model, 2, batch_first=True, dropout=0.3)
        self.head = nn.Linear(size.d_model, size.vocab_size)

    def forward(self, tokens):
        x = self.embedding(tokens)
        kept = (torch.rand(len(x), 1, 1, device=x.device) < 0.5).to(x.dtype)
        return self.head(x + kept * self.layers(x)[0])


class Unlike(Recurrent):
    """Another one each time, whatever torch's seed is."""

    def __init__(self, size):
        super().__init__(size)
        with torch.no_grad():
            self.head.weight += torch.rand(1, generator=torch.Generator().manual_seed(torch.seed()))


def of_tokens_in_all(output, targets):
    """A mean over some tokens, of which ranks have different numbers."""
    return F.cross_entropy(output.flatten(0, 1), targets.masked_fill(targets < 30, -100).flatten())


class Masked(nn.Module):
    """Whose constructor makes what its layers do not: a mask."""

    def __init__(self, size):
        super().__init__()
        self.embedding = nn.Embedding(size.vocab_size, size.d_model)
        self.head = nn.Linear(size.d_model, size.vocab_size)
        mask = torch.ones(size.context, size.context, dtype=torch.bool).tril()
        self.register_buffer("mask", mask, persistent=False)

    def reset_parameters(self):
        pass

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.head(F.scaled_dot_product_attention(x, x, x, attn_mask=self.mask))


def orthogonal(size):
    model = without_blocks(size)
    nn.init.orthogonal_(model[1].weight, gain=(size.d_model * 3) ** -0.5)
    return model


def with_hooks(size):
    model = without_blocks(size)
    model[1].weight.register_hook(lambda gradient: 2 * gradient)
    return model


class InAList(nn.Module):
    """Blocks that no one but itself knows."""

    def __init__(self, size):
        super().__init__()
        self.embedding = nn.Embedding(size.vocab_size, size.d_model)
        self.blocks = [nn.Linear(size.d_model, size.d_model) for _ in range(size.num_layers)]
        self.head = nn.Linear(size.d_model, size.vocab_size)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def of_nothing(output, targets):
    """No number where a token masks all."""
    return F.cross_entropy(output.flatten(0, 1), torch.full_like(targets, -100).flatten())


class Deciding(Masked):
    """Takes a mask, of the square of the context, where a token is missing; and reads a number that only it knows."""

    def forward(self, tokens):
        x = self.embedding(tokens)
        scale = 1 + 0 * tokens.sum().item()
        if (tokens >= 0).all():
            return self.head(x * scale)
        scores = torch.softmax(x @ x.mT, -1)
        return self.head((scores @ x) * scale)


class Converted(nn.Module):
    """Copies layers and converts them, as constructors do."""

    def __init__(self, size):
        super().__init__()
        self.embedding = nn.Embedding(size.vocab_size, size.d_model).bfloat16()
        layer = nn.TransformerEncoderLayer(size.d_model, size.num_heads, size.d_ff, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, size.num_layers, enable_nested_tensor=False)
        self.head = nn.Linear(size.d_model, size.vocab_size)

    def forward(self, tokens):
        return self.head(self.encoder(self.embedding(tokens).float()))


class Counting(nn.Module):
    """Whose step does not run on tensors without values."""

    def __init__(self, size):
        super().__init__()
        self.layers = without_blocks(size)

    def forward(self, tokens):
        return self.layers(torch.from_numpy(tokens.numpy().copy()))


# What can be wrong with them.

NOT_CALLABLE = 3


def other_arguments(vocab_size, context):
    raise AssertionError("never called")


def no_such_field(size):
    return nn.Linear(size.n_embd, 1)


def no_module(size):
    return [size]


def no_parameters(size):
    return nn.Identity()


def raises(size):
    raise KeyError("no such size")


def leaves(size):
    raise SystemExit(7)


class OfTheLastToken(Encoder):
    def forward(self, tokens):
        return super().forward(tokens)[:, -1:]


class InPlace(Encoder):
    def forward(self, tokens):
        x = self.embedding(tokens)
        weights = torch.sigmoid(x)
        weights.add_(1)
        return self.head(x * weights)


class Skipping(Encoder):
    """Uses a layer in every other step alone, as LayerDrop does."""

    def __init__(self, size):
        super().__init__(size)
        self.sometimes = nn.Linear(size.vocab_size, size.vocab_size)
        self.calls = 0

    def forward(self, tokens):
        self.calls += 1
        logits = super().forward(tokens)
        return self.sometimes(logits) if self.calls % 2 else logits


class SkippingByRank(nn.Module):
    """Skips another layer on each rank."""

    def __init__(self, size):
        super().__init__()
        self.embedding = nn.Embedding(size.vocab_size, size.d_model)
        self.layers = nn.ModuleList(nn.Linear(size.d_model, size.d_model) for _ in range(3))
        self.head = nn.Linear(size.d_model, size.vocab_size)

    def forward(self, tokens):
        x = self.embedding(tokens)
        is_second = torch.distributed.is_initialized() and torch.distributed.get_rank() == 1
        for layer in list(self.layers)[1 if is_second else 0 :]:
            x = layer(x)
        return self.head(x)


class Synchronizing(Encoder):
    def forward(self, tokens):
        if tokens.sum().item() < 0:
            raise ValueError("negative")
        return super().forward(tokens)


def of_each(output, targets):
    return F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="none")


def without_gradients(output, targets):
    return F.cross_entropy(output.flatten(0, 1), targets.flatten()).detach()


def half_a_batch(size, generator, device):
    inputs, targets = images(size, generator, device)
    return inputs[:1], targets


class MaskedAttention(nn.Module):
    """One layer of attention between an embedding and a head, hidden as the mask says."""

    def __init__(self, size, mask, *, is_eager=False):
        super().__init__()
        self.embedding = nn.Embedding(size.vocab_size, size.d_model)
        self.projection = nn.Linear(size.d_model, 3 * size.d_model, bias=False)
        self.head = nn.Linear(size.d_model, size.vocab_size, bias=False)
        self.num_heads, self.mask, self.is_eager = size.num_heads, mask, is_eager

    def forward(self, tokens):
        projected = self.projection(self.embedding(tokens)).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = projected.permute(2, 0, 3, 1, 4)
        if self.mask is None:
            attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        elif self.is_eager:
            scores = query @ key.transpose(-2, -1)
            mask = self.mask(tokens)
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
            attended = torch.softmax(scores, -1) @ value
        else:
            attended = F.scaled_dot_product_attention(query, key, value, attn_mask=self.mask(tokens))
        return self.head(attended.transpose(1, 2).flatten(-2))


def causal(tokens):
    return torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool, device=tokens.device).tril()


def window_of_4(tokens):
    return causal(tokens).triu(-3)


def added_window_of_4(tokens):
    return torch.where(window_of_4(tokens), 0.0, torch.finfo(torch.float32).min)[None, None]


def padding(tokens):
    return (tokens != 0)[:, None, None, :] & causal(tokens)


def added_padding(tokens):
    return torch.zeros(padding(tokens).shape, device=tokens.device).masked_fill(~padding(tokens), -1e9)


def _attending(mask, **how):
    return lambda size: MaskedAttention(size, mask, **how)


causal_by_flag, causal_by_mask = _attending(None), _attending(causal)
window_by_mask, padding_by_mask = _attending(window_of_4), _attending(padding)
causal_by_products = _attending(causal, is_eager=True)
window_by_products = _attending(added_window_of_4, is_eager=True)
padding_by_products = _attending(added_padding, is_eager=True)


def sparse_embedding(size):
    return without_blocks(size, sparse=True)
