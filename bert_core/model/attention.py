"""How tokens look at each other."""

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from bert_core.model.variants import EncoderConfig


class SelfAttention(nn.Module):
    """Multi-head self-attention (Vaswani et al. 2017), without the residual and norm around it.

    Query, key and value are one matrix product: 3D outputs, in that order, which Hugging Face
    stores as three tensors (`hf.py` splits and joins them).
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.dropout = config.attention_probs_dropout_prob
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.output = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(
        self,
        hidden: Float[Tensor, "batch seq hidden"],
        bias: Float[Tensor, "batch 1 1 seq"] | None,
    ) -> Float[Tensor, "batch seq hidden"]:
        """Attend; `bias` is added to every score: 0 where a token may be seen, -inf where not."""
        joined = self.qkv(hidden).unflatten(-1, (3, self.num_heads, -1))  # (B, S, 3, H, D / H)
        query, key, value = joined.permute(2, 0, 3, 1, 4)  # each (B, H, S, D / H)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=bias, dropout_p=self.dropout if self.training else 0.0
        )
        return self.output(mixed.transpose(1, 2).flatten(2))
