"""Small networks of PyTorch in the forms that real ones have, for tests of what trains by default.

`NETWORKS` maps names to functions that return a network and its inputs. Buffers hold what real
networks keep in them: masks, tables of sines, anchors, means of images.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn


class Attention(nn.Module):
    """Multi-head attention with a free choice of what is added to its scores."""

    def __init__(self, width: int, heads: int, bias: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=bias), nn.Linear(width, width, bias)

    def split(self, x):
        n, t, d = x.shape
        parts = self.qkv(x).reshape(n, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        return parts[0], parts[1], parts[2]

    def join(self, y):
        n, h, t, d = y.shape
        return self.proj(y.transpose(1, 2).reshape(n, t, h * d))

    def scores(self, x, scores_to_weights):
        q, k, v = self.split(x)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        return self.join(scores_to_weights(scores).softmax(-1) @ v)


class Block(nn.Module):
    """A pre-norm block; `change` is applied to the scores of attention."""

    def __init__(self, width=8, heads=2, norm=nn.LayerNorm):
        super().__init__()
        self.norm1, self.norm2 = norm(width), norm(width)
        self.attn = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 12), nn.GELU(), nn.Linear(12, width))

    def forward(self, x, change=lambda scores: scores):
        x = x + self.attn.scores(self.norm1(x), change)
        return x + self.mlp(self.norm2(x))


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class ChannelsFirstNorm(nn.Module):
    """The layer norm over channels of ConvNeXt."""

    def __init__(self, width):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x):
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        x = (x - u) / torch.sqrt(s + 1e-6)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 5, 3), nn.BatchNorm2d(5)
        self.fc = nn.Linear(5, 3)

    def forward(self, x):
        x = F.max_pool2d(self.bn1(self.conv1(x)).relu(), 2)
        return self.fc(self.bn2(self.conv2(x)).relu().mean((2, 3)))


class PreActivation(nn.Module):
    """Batch normalization that no convolution can take up, one without scale and bias."""

    def __init__(self):
        super().__init__()
        self.bn0, self.conv = nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3)
        self.bn1, self.conv1 = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1)
        self.bn2, self.fc = nn.BatchNorm1d(4, affine=False), nn.Linear(4, 2)

    def forward(self, x):
        x = self.conv(self.bn0(x).relu())
        x = x + self.conv1(self.bn1(x).relu())
        return self.fc(self.bn2(x.mean((2, 3))).tanh())


class Depthwise(nn.Module):
    """MobileNet with squeeze and excite, PReLU, and the mean and deviation of images inside."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1))
        self.stem, self.act = nn.Conv2d(3, 4, 3, 2), nn.PReLU(4)
        self.depth, self.point = nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.Conv2d(4, 6, 1)
        self.squeeze, self.excite = nn.Conv2d(6, 2, 1), nn.Conv2d(2, 6, 1)
        self.act1, self.head = nn.PReLU(), nn.Linear(6, 3)

    def forward(self, x):
        x = self.act(self.stem((x - self.mean) / self.std))
        x = self.point(self.depth(x))
        x = x * F.hardsigmoid(self.excite(self.squeeze(x.mean((2, 3), keepdim=True)).relu()))
        return self.head(self.act1(x).mean((2, 3)))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.middle, self.plain = nn.Conv2d(4, 6, 3, padding=1), nn.GroupNorm(2, 6, affine=False)
        self.up, self.inst = nn.ConvTranspose2d(6, 4, 2, 2), nn.InstanceNorm2d(4, affine=True)
        self.last, self.unit = nn.Conv2d(8, 2, 3, padding=1), nn.InstanceNorm2d(2)

    def forward(self, x):
        a = self.norm(self.down(x)).relu()
        b = self.plain(self.middle(F.max_pool2d(a, 2))).relu()
        big = F.interpolate(self.inst(self.up(b)), scale_factor=2.0, mode="bilinear")
        c = F.avg_pool2d(big, 2)
        return self.unit(self.last(torch.cat([a, c], 1))).sigmoid()


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("pixel_mean", torch.tensor([123.675, 116.28, 103.53]).view(3, 1, 1))
        self.register_buffer("pixel_std", torch.tensor([58.395, 57.12, 57.375]).view(3, 1, 1))
        self.patch = nn.Conv2d(3, 8, 4, 4)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 8))
        self.pos_embed = nn.Parameter(torch.zeros(1, 5, 8))
        self.block1, self.block2 = Block(), Block()
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x):
        x = self.patch((x - self.pixel_mean) / self.pixel_std).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], 1) + self.pos_embed
        return self.head(self.norm(self.block2(self.block1(x)))[:, 0])


class MAE(nn.Module):
    """Patches under a mask become a learned token; a fixed table of sines in two dimensions."""

    def __init__(self):
        super().__init__()
        angle = torch.outer(torch.arange(4.0), 1 / 10 ** torch.arange(2.0))
        half = torch.cat([angle.sin(), angle.cos()], 1)
        table = torch.cat([half.repeat_interleave(2, 0)[:4], half.repeat(2, 1)[:4]], 1)
        self.register_buffer("pos_embed", torch.cat([torch.zeros(1, 8), table])[None])
        self.patch, self.mask_token = nn.Linear(6, 8), nn.Parameter(torch.zeros(1, 1, 8))
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 8))
        self.block, self.head = Block(), nn.Linear(8, 6)

    def forward(self, x, mask):
        x = torch.where(mask[..., None], self.mask_token, self.patch(x)) + self.pos_embed[:, 1:]
        cls = self.cls_token + self.pos_embed[:, :1]
        x = torch.cat([cls.expand(x.shape[0], -1, -1), x], 1)
        return self.head(self.block(x))[:, 1:]


class Rotary(nn.Module):
    """A causal decoder as Llama's: RMS norm, rotary tables, a gated MLP, tied embedding."""

    def __init__(self, length=16, computed=False):
        super().__init__()
        inv = 1.0 / 10000 ** (torch.arange(0, 4, 2) / 4)
        angle = torch.outer(torch.arange(length).float(), inv)
        angle = torch.cat([angle, angle], -1)
        self.computed = computed
        self.register_buffer("inv_freq", inv)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())
        self.embed = nn.Embedding(11, 8)
        self.norm1, self.norm2, self.norm3 = RMSNorm(8), RMSNorm(8), RMSNorm(8)
        self.attn = Attention(8, 2, bias=False)
        self.gate, self.up = nn.Linear(8, 12, bias=False), nn.Linear(8, 12, bias=False)
        self.down = nn.Linear(12, 8, bias=False)

    def tables(self, t):
        if not self.computed:
            return self.cos[:t], self.sin[:t]
        angle = torch.arange(t, dtype=torch.float32)[:, None] * self.inv_freq[None]
        angle = torch.cat([angle, angle], -1)
        return angle.cos(), angle.sin()

    def forward(self, ids):
        x, (cos, sin) = self.embed(ids), self.tables(ids.shape[1])

        def turned(u):
            return u * cos + torch.cat([-u[..., 2:], u[..., :2]], -1) * sin

        q, k, v = self.attn.split(self.norm1(x))
        y = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)
        x = x + self.attn.join(y)
        y = self.norm2(x)
        x = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return self.norm3(x) @ self.embed.weight.T


class GPT(nn.Module):
    """Learned positions, a causal mask that is a buffer, and -inf where it is zero."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.tril(torch.ones(16, 16))[None, None])
        self.register_buffer("masked_bias", torch.tensor(-1e4))
        self.wte, self.wpe = nn.Embedding(11, 8), nn.Embedding(16, 8)
        self.block, self.block2 = Block(), Block()
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 11, bias=False)

    def forward(self, ids):
        t = ids.shape[1]
        mask = self.mask[:, :, :t, :t]
        x = self.wte(ids) + self.wpe(torch.arange(t))
        x = self.block(x, lambda s: s.masked_fill(mask == 0, float("-inf")))
        x = self.block2(x, lambda s: torch.where(mask.bool(), s, self.masked_bias))
        return self.head(self.norm(x))


class FloatMask(nn.Module):
    """A decoder whose causal mask is a table of zeros and -inf that is added; sines as positions"""

    def __init__(self):
        super().__init__()
        self.register_buffer("causal", torch.full((16, 16), float("-inf")).triu(1))
        angle = torch.arange(16)[:, None] / 100 ** (torch.arange(0, 8, 2) / 8)
        table = torch.zeros(1, 16, 8)
        table[0, :, 0::2], table[0, :, 1::2] = angle.sin(), angle.cos()
        self.register_buffer("pe", table)
        self.embed, self.block, self.norm = nn.Embedding(11, 8), Block(), nn.LayerNorm(8)

    def forward(self, ids):
        t = ids.shape[1]
        x = self.embed(ids) * math.sqrt(8) + self.pe[:, :t]
        x = self.block(x, lambda s: s + self.causal[:t, :t])
        return F.linear(self.norm(x), self.embed.weight)


class Encoder(nn.Module):
    """A masked encoder as BERT's: three tables, post-norm, a mask computed from integers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("position_ids", torch.arange(16)[None])
        self.word, self.position = nn.Embedding(11, 8, padding_idx=0), nn.Embedding(16, 8)
        self.kind, self.norm = nn.Embedding(2, 8), nn.LayerNorm(8)
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.pooler, self.head = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, ids, attention_mask):
        n, t = ids.shape
        x = self.word(ids) + self.position(self.position_ids[:, :t])
        x = self.norm(x + self.kind(torch.zeros_like(ids)))
        mask = (1.0 - attention_mask[:, None, None].float()) * torch.finfo(torch.float32).min
        q, k, v = (f(x).view(n, t, 2, 4).transpose(1, 2) for f in (self.q, self.k, self.v))
        p = (q @ k.transpose(-1, -2) / math.sqrt(4) + mask).softmax(-1)
        x = self.norm1(x + self.o((p @ v).transpose(1, 2).reshape(n, t, 8)))
        x = self.norm2(x + self.down(F.gelu(self.up(x))))
        return self.head(self.pooler(x[:, 0]).tanh()).softmax(-1)
