"""More small networks of PyTorch: see `networks`."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.nn.utils import parametrizations

from tests.support.networks import (
    CNN,
    GPT,
    MAE,
    Attention,
    Block,
    ChannelsFirstNorm,
    Depthwise,
    Encoder,
    FloatMask,
    PreActivation,
    RMSNorm,
    Rotary,
    UNet,
    ViT,
)


class Recurrent(nn.Module):
    """An LSTM, GRU or RNN that starts from zeros, or from a learned state."""

    def __init__(self, kind, learned=False, **options):
        super().__init__()
        self.embed, self.rnn = nn.Embedding(11, 4), kind(4, 5, batch_first=True, **options)
        self.head = nn.Linear(5 * (1 + self.rnn.bidirectional), 3)
        self.h0 = nn.Parameter(torch.zeros(1, 1, 5)) if learned else None

    def forward(self, ids):
        x = self.embed(ids)
        state = None if self.h0 is None else self.h0.expand(-1, x.shape[0], -1).contiguous()
        return self.head(self.rnn(x, state)[0][:, -1])


class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(6, 4, bias=False), nn.Embedding(11, 4)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))
        self.norm = nn.LayerNorm(4)

    def forward(self, image, ids):
        a, b = self.image(image), self.norm(self.text(ids).mean(1))
        a, b = a / a.norm(dim=-1, keepdim=True), b / b.norm(dim=-1, keepdim=True)
        return self.logit_scale.exp() * a @ b.T


class ScaledLogits(nn.Module):
    """A learned temperature and a learned offset that are used as they are, as SigLIP's."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 4), nn.Linear(4, 3, bias=False)
        self.temperature, self.logit_bias = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))

    def forward(self, x):
        h = F.normalize(self.body(x), dim=-1)
        return self.head(h) * self.temperature + self.logit_bias


class Detector(nn.Module):
    """Boxes from anchors, grid and stride, as YOLO decodes them."""

    def __init__(self):
        super().__init__()
        grid = torch.stack(torch.meshgrid(torch.arange(4.0), torch.arange(4.0), indexing="xy"), -1)
        self.register_buffer("grid", grid[None, None])
        self.register_buffer("anchors", torch.tensor([[10.0, 13], [16, 30]]).view(1, 2, 1, 1, 2))
        self.register_buffer("stride", torch.tensor(8.0))
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.SiLU())
        self.head = nn.Conv2d(4, 2 * 7, 1)

    def forward(self, x):
        y = self.head(self.body(x))
        y = y.view(-1, 2, 7, y.shape[2], y.shape[3]).permute(0, 1, 3, 4, 2).sigmoid()
        xy = (y[..., 0:2] * 2.0 - 0.5 + self.grid) * self.stride
        wh = (y[..., 2:4] * 2) ** 2 * self.anchors
        return torch.cat([xy, wh, y[..., 4:]], -1).reshape(x.shape[0], -1, 7)


class PointDetector(nn.Module):
    """Points shifted by distances, with a learned factor at each level, as FCOS's."""

    def __init__(self):
        super().__init__()
        y, x = torch.meshgrid(torch.arange(4.0), torch.arange(4.0), indexing="ij")
        self.register_buffer("points", 8 * torch.stack([x, y], -1).reshape(1, 16, 2))
        self.body, self.norm = nn.Conv2d(3, 4, 3, 2, 1), nn.GroupNorm(2, 4)
        self.reg, self.cls = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 2, 1)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        h = self.norm(self.body(x)).relu()
        d = (self.reg(h) * self.scale).exp().flatten(2).transpose(1, 2) * 8.0
        boxes = torch.cat([self.points - d[..., :2], self.points + d[..., 2:]], -1)
        return self.cls(h).flatten(2).transpose(1, 2), boxes


class Swin(nn.Module):
    """Attention in windows: a learned table of relative positions, and the mask of shifts."""

    def __init__(self):
        super().__init__()
        at = torch.stack(torch.meshgrid(torch.arange(2), torch.arange(2), indexing="ij")).flatten(1)
        apart = at[:, :, None] - at[:, None] + 1
        self.register_buffer("index", apart[0] * 3 + apart[1])
        self.register_buffer("mask", torch.tensor([[0.0, -100.0]]).expand(4, 2).repeat(1, 2))
        self.table = nn.Parameter(torch.zeros(9, 2))
        self.patch, self.block, self.block2 = nn.Linear(3, 8), Block(), Block()
        self.merge = nn.Linear(8, 4, bias=False)

    def forward(self, x):
        bias = self.table[self.index.view(-1)].view(4, 4, 2).permute(2, 0, 1)[None]
        x = self.block(self.patch(x), lambda s: s + bias)
        return self.merge(self.block2(x, lambda s: s + bias + self.mask[None, None]))


class CosineAttention(nn.Module):
    """Swin v2: cosines of queries and keys, times a factor for each head."""

    def __init__(self):
        super().__init__()
        self.attn, self.head = Attention(8, 2), nn.Linear(8, 2)
        self.logit_scale = nn.Parameter(torch.zeros(2, 1, 1))
        self.gamma = nn.Parameter(torch.ones(8))

    def forward(self, x):
        q, k, v = self.attn.split(x)
        s = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        s = s * self.logit_scale.clamp(max=math.log(100)).exp()
        return self.head(x + self.gamma * self.attn.join(s.softmax(-1) @ v))


class DETR(nn.Module):
    """Learned queries that look at an image whose positions are sines."""

    def __init__(self):
        super().__init__()
        angle = torch.arange(4.0)[:, None] / 10 ** torch.arange(4.0)[None]
        self.register_buffer("pos", torch.cat([angle.sin(), angle.cos()], -1)[None])
        self.conv, self.query_embed = nn.Conv2d(3, 8, 4, 4), nn.Embedding(3, 8)
        self.self_attn = nn.MultiheadAttention(8, 2, batch_first=True)
        self.cross = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.cls, self.box = nn.Linear(8, 3), nn.Linear(8, 4)

    def forward(self, x):
        memory = self.conv(x).flatten(2).transpose(1, 2)
        query = self.query_embed.weight[None].expand(x.shape[0], -1, -1)
        target = torch.zeros_like(query)
        q = target + query
        target = self.norm1(target + self.self_attn(q, q, target, need_weights=False)[0])
        keys = memory + self.pos
        y = self.cross(target + query, keys, memory, need_weights=False)[0]
        target = self.norm2(target + y)
        return self.cls(target), self.box(target).sigmoid()


class ConvNeXt(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm0 = nn.Conv2d(3, 4, 2, 2), ChannelsFirstNorm(4)
        self.depth, self.norm = nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.LayerNorm(4)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.gamma = nn.Parameter(1e-6 * torch.ones(4))
        self.last, self.head = ChannelsFirstNorm(4), nn.Linear(4, 2)

    def forward(self, x):
        x = self.norm0(self.stem(x))
        y = self.norm(self.depth(x).permute(0, 2, 3, 1))
        x = x + (self.gamma * self.down(F.gelu(self.up(y)))).permute(0, 3, 1, 2)
        return self.head(self.last(x).mean((2, 3)))


class T5(nn.Module):
    """Buckets of relative positions, computed from the length, and a table of them."""

    def __init__(self):
        super().__init__()
        self.embed, self.relative = nn.Embedding(11, 8), nn.Embedding(8, 2)
        self.block, self.block2 = Block(norm=RMSNorm), Block(norm=RMSNorm)
        self.norm, self.head = RMSNorm(8), nn.Linear(8, 11, bias=False)

    def forward(self, ids):
        at = torch.arange(ids.shape[1])
        apart = at[None] - at[:, None]
        near = apart.abs().clamp(min=1).float().log2().to(torch.int64).clamp(max=3)
        bias = self.relative(near + 4 * (apart > 0).to(torch.int64)).permute(2, 0, 1)[None]
        x = self.block(self.embed(ids), lambda s: s + bias)
        return self.head(self.norm(self.block2(x, lambda s: s + bias)))


class Alibi(nn.Module):
    """Biases that grow with the distance, by slopes that are a buffer; a causal mask."""

    def __init__(self, computed):
        super().__init__()
        self.register_buffer("slopes", torch.tensor([0.25, 0.0625]).view(2, 1, 1))
        at = torch.arange(6.0)
        self.register_buffer("table", self.slopes * -(at[None] - at[:, None]).abs()[None])
        self.computed, self.embed = computed, nn.Embedding(11, 8)
        self.block, self.head = Block(), nn.Linear(8, 2)

    def forward(self, ids):
        bias = self.table
        if self.computed:
            at = torch.arange(ids.shape[1], dtype=torch.float32)
            bias = self.slopes * (at[None] - at[:, None])[None]
        return self.head(self.block(self.embed(ids), lambda s: s + bias).mean(1))


class Scaled(nn.Module):
    """Inputs and targets are scaled inside of the network."""

    def __init__(self):
        super().__init__()
        self.register_buffer("x_mean", torch.tensor([1.0, 2, 3, 4]))
        self.register_buffer("x_std", torch.tensor([0.5, 2, 1.5, 3]))
        self.register_buffer("y_mean", torch.tensor([10.0, 20]))
        self.register_buffer("y_std", torch.tensor([3.0, 7]))
        self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 2)

    def forward(self, x):
        y = self.b(self.a((x - self.x_mean) / self.x_std).tanh())
        return y * self.y_std + self.y_mean


class ReZero(nn.Module):
    """Residual branches whose learned factors are entries of a list."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.alphas = nn.ParameterList(nn.Parameter(torch.zeros(1)) for _ in range(2))

    def forward(self, x):
        for layer, alpha in zip(self.layers, self.alphas, strict=True):
            x = x + alpha * layer(x).relu()
        return x


class WeightNorm(nn.Module):
    """Weights that are computed from others, and low-rank terms added to them."""

    def __init__(self):
        super().__init__()
        self.conv = parametrizations.weight_norm(nn.Conv1d(2, 4, 3, padding=1))
        self.base, self.norm = nn.Linear(4, 4), nn.LayerNorm(4, elementwise_affine=False)
        self.lora_a, self.lora_b = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        h = self.norm(self.conv(x).mean(2))
        return self.head((self.base(h) + self.lora_b(self.lora_a(h)) * 0.5).relu())


class BlurPool(nn.Module):
    """A fixed filter for every channel, between convolutions; a learned residual factor."""

    def __init__(self):
        super().__init__()
        kernel = torch.tensor([1.0, 2, 1])
        kernel = (kernel[:, None] * kernel / 16)[None, None].repeat(4, 1, 1, 1)
        self.register_buffer("kernel", kernel)
        self.conv, self.conv2 = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.alpha, self.head = nn.Parameter(torch.zeros(1)), nn.Linear(4, 2)

    def forward(self, x):
        x = F.conv2d(self.conv(x).relu(), self.kernel, stride=2, padding=1, groups=4)
        x = x + self.alpha * self.conv2(x)
        return self.head(x.clamp(0, 6).pow(2.0).mean((2, 3)))


class Recommender(nn.Module):
    """Tables of users and items, their biases, and one for all."""

    def __init__(self):
        super().__init__()
        self.user, self.item = nn.Embedding(7, 4), nn.Embedding(9, 4)
        self.user_bias, self.item_bias = nn.Embedding(7, 1), nn.Embedding(9, 1)
        self.deep = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 1))

    def forward(self, user, item):
        u, i = self.user(user), self.item(item)
        dot = (u * i).sum(-1, keepdim=True) + self.user_bias(user) + self.item_bias(item)
        return (dot + self.deep(torch.cat([u, i], -1))).clamp(1.0, 5.0)


def image(channels=3, size=8):
    return (torch.rand(2, channels, size, size),)


def ids(length=6):
    return (torch.randint(1, 11, (2, length)),)


NETWORKS = {
    "cnn": lambda: (CNN(), image()),
    "preactivation": lambda: (PreActivation(), image()),
    "depthwise": lambda: (Depthwise(), image()),
    "unet": lambda: (UNet(), image(2)),
    "vit": lambda: (ViT(), image()),
    "mae": lambda: (MAE(), (torch.rand(2, 4, 6), torch.rand(2, 4) > 0.5)),
    "rotary decoder": lambda: (Rotary(), ids()),
    "rotary computed": lambda: (Rotary(computed=True), ids()),
    "gpt": lambda: (GPT(), ids()),
    "float mask": lambda: (FloatMask(), ids()),
    "encoder": lambda: (Encoder(), (*ids(), torch.ones(2, 6, dtype=torch.int64))),
    "lstm": lambda: (Recurrent(nn.LSTM, bidirectional=True), ids()),
    "gru": lambda: (Recurrent(nn.GRU, num_layers=2), ids()),
    "gru, learned state": lambda: (Recurrent(nn.GRU, learned=True), ids()),
    "rnn": lambda: (Recurrent(nn.RNN), ids()),
    "clip": lambda: (Clip(), (torch.rand(2, 6), *ids())),
    "scaled logits": lambda: (ScaledLogits(), (torch.rand(2, 6),)),
    "detector": lambda: (Detector(), image()),
    "point detector": lambda: (PointDetector(), image()),
    "swin": lambda: (Swin(), (torch.rand(2, 4, 3),)),
    "cosine attention": lambda: (CosineAttention(), (torch.rand(2, 4, 8),)),
    "detr": lambda: (DETR(), image()),
    "convnext": lambda: (ConvNeXt(), image()),
    "t5": lambda: (T5(), ids()),
    "alibi": lambda: (Alibi(True), ids()),
    "alibi table": lambda: (Alibi(False), ids()),
    "scaled": lambda: (Scaled(), (torch.rand(3, 4),)),
    "rezero": lambda: (ReZero(), (torch.rand(3, 4),)),
    "weight norm": lambda: (WeightNorm(), (torch.rand(2, 2, 5),)),
    "blur pool": lambda: (BlurPool(), image()),
    "recommender": lambda: (Recommender(), (torch.tensor([1, 2]), torch.tensor([3, 4]))),
}
