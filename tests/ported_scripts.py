"""Small PyTorch scripts, as their users wrote them, and their port to aiograd: another import, ``async def``, and ``await`` before backward.

Each defines ``main()``, which returns numbers. `port` makes the three changes by text. The expected numbers are in `EXPECTED`, as PyTorch 2.13 gives
them; ``make parity`` runs the scripts under both.
"""

from __future__ import annotations

import re
from typing import Any

SCRIPTS: dict[str, str] = {
    "linear regression by hand": """
import torch

def main():
    x = torch.linspace(-1, 1, steps=20).unsqueeze(1)
    y = 3 * x + 0.5
    w = torch.zeros(1, 1, requires_grad=True)
    b = torch.zeros(1, requires_grad=True)
    for _ in range(30):
        loss = ((x.mm(w) + b - y) ** 2).mean()
        loss.backward()
        with torch.no_grad():
            w.sub_(w.grad, alpha=0.4)
            b.sub_(b.grad, alpha=0.4)
            w.grad.zero_()
            b.grad.zero_()
    return w.item(), b.item(), loss.item()
""",
    "data attribute and step": """
import torch

def main():
    p = torch.tensor([1.0, -2.0, 3.0], requires_grad=True)
    for _ in range(3):
        loss = p.pow(2).sum() + p.abs().sum()
        loss.backward()
        p.data.add_(p.grad.data, alpha=-0.1)
        p.grad.data.zero_()
    p.data = p.data.clamp(min=-1.0, max=1.0)
    return p.detach().tolist()
""",
    "softmax classifier": """
import torch
import torch.nn.functional as F

def main():
    x = torch.arange(24, dtype=torch.float).view(6, 4) / 10 - 1
    y = torch.tensor([0, 1, 2, 0, 1, 2]).long()
    w = (torch.arange(12).float().view(4, 3) / 12).requires_grad_()
    for _ in range(5):
        logits = x @ w
        loss = -logits.log_softmax(dim=1).gather(1, y.unsqueeze(1)).mean()
        loss.backward()
        with torch.no_grad():
            w -= 0.5 * w.grad
        w.grad = None
    accuracy = (torch.argmax(x @ w, dim=-1, keepdim=False) == y).float().mean()
    return loss.item(), accuracy.item(), F.softmax(x @ w, dim=1).sum().item()
""",
    "module and optimizer": """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.second = nn.Linear(5, 1)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))

def main():
    net = Net()
    with torch.no_grad():
        for i, p in enumerate(net.parameters()):
            p.copy_((torch.arange(p.numel()).float().view(p.shape) - 3 * i) / 20)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    x = torch.stack([torch.full((3,), float(i)) for i in range(4)]) / 4
    y = x.sum(dim=1, keepdim=True).sin()
    for _ in range(10):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
    return loss.item(), sum(p.numel() for p in net.parameters())
""",
    "scaled dot-product attention": """
import math
import torch

def main():
    q = (torch.arange(24).float().reshape(2, 3, 4) / 24).requires_grad_(True)
    k = torch.cat([q.detach(), -q.detach()], dim=1)
    v = k.flip(dims=(1,)).double().float()
    scores = torch.bmm(q, k.transpose(1, 2)) / math.sqrt(q.shape[-1])
    mask = torch.triu(torch.ones(3, 6), diagonal=4).bool()
    weights = scores.masked_fill(mask, float("-inf")).softmax(dim=-1)
    out = torch.matmul(weights, v)
    out.square().sum().backward()
    return out.sum().item(), q.grad.norm().item(), weights.sum(dim=-1).numel()
""",
    "layer norm by hand": """
import torch

def main():
    x = torch.arange(12, dtype=torch.float32).reshape(3, 4).pow(1.5).requires_grad_()
    mean = x.mean(dim=-1, keepdim=True)
    var = x.var(dim=-1, unbiased=False, keepdim=True)
    out = (x - mean) * torch.rsqrt(var + 1e-5)
    (out * torch.arange(4.0)).sum().backward()
    return out.sum().item(), x.grad.abs().sum().item(), torch.std(x.detach(), dim=0, correction=1).mean().item()
""",
    "chunks, stacks and topk": """
import torch

def main():
    x = torch.arange(12.0).view(3, 4).requires_grad_()
    left, right = x.chunk(2, dim=1)
    parts = torch.unbind(torch.stack([left, right], dim=0), dim=0)
    values, indices = torch.topk(parts[0] * parts[1], k=2, dim=0)
    picked = torch.index_select(x, 0, torch.tensor([2, 0]))
    loss = values.sum() + picked.t().narrow(0, 1, 2).sum() + x.select(1, 3).prod()
    loss.backward()
    return loss.item(), indices.tolist(), x.grad.sum().item(), torch.numel(x), x.dim()
""",
    "newton's method": """
import torch

def main():
    x = torch.tensor(2.0, dtype=torch.double, requires_grad=True)
    for _ in range(6):
        y = x ** 3 - 2 * x - 5
        slope, = torch.autograd.grad(y, x)
        with torch.no_grad():
            x -= y / slope
    return x.item()
""",
    "gaussian mixture": """
import math
import torch

def main():
    x = torch.linspace(-2, 2, 9).unsqueeze(-1)
    mean = torch.tensor([-1.0, 0.5], requires_grad=True)
    log_std = torch.zeros(2, requires_grad=True)
    weight = torch.zeros_like(mean, requires_grad=True)
    for _ in range(4):
        log_prob = -0.5 * ((x - mean) / log_std.exp()) ** 2 - log_std - 0.5 * math.log(2 * math.pi)
        loss = -torch.logsumexp(log_prob + torch.log_softmax(weight, dim=0), dim=1).mean()
        loss.backward()
        for p in (mean, log_std, weight):
            p.data -= 0.3 * p.grad
            p.grad.zero_()
    return loss.item(), mean.tolist(), torch.special.ndtr(mean.detach()).sum().item()
""",
    "in-place updates of an intermediate": """
import torch

def main():
    w = torch.tensor([0.5, -1.5, 2.0], requires_grad=True)
    h = w * 2
    h.mul_(w).add_(1.0)
    h.exp_()
    h = h.clamp(max=20.0)
    h[1].fill_(3.0)
    h.sigmoid_()
    total = h.addcmul(w, w, value=0.5).lerp(w, 0.25).sum()
    total.backward()
    return total.item(), w.grad.tolist()
""",
    "fourier filter": """
import torch

def main():
    t = torch.arange(16, dtype=torch.float64)
    x = torch.sin(t).requires_grad_()
    spectrum = torch.fft.rfft(x)
    keep = (torch.fft.rfftfreq(16, d=1.0, dtype=torch.float64) < 0.2).double()
    smooth = torch.fft.irfft(spectrum * keep, n=16)
    loss = (smooth - x).square().sum()
    loss.backward()
    return loss.item(), x.grad.norm(p=1).item()
""",
    "linear algebra": """
import torch

def main():
    a = (torch.eye(3, dtype=torch.double) * 2 + torch.ones(3, 3, dtype=torch.double) * 0.5).requires_grad_()
    b = torch.arange(3, dtype=torch.double)
    x = torch.linalg.solve(a, b)
    loss = x.dot(b) + torch.logdet(a) + torch.trace(torch.inverse(a)) + torch.linalg.norm(a) + torch.det(a)
    loss = loss + torch.einsum("ij,jk,k->", a, torch.matrix_exp(-a), b) + torch.outer(b, b).mul(a).sum()
    loss.backward()
    return loss.item(), a.grad.sum().item()
""",
    "scatter and embedding by hand": """
import torch

def main():
    table = (torch.arange(10).to(torch.float32).reshape(5, 2) / 10).requires_grad_()
    tokens = torch.as_tensor([3, 1, 3, 0])
    one_hot = torch.zeros(4, 5).scatter_(1, tokens.unsqueeze(1), torch.ones(4, 1))
    looked_up = one_hot @ table
    same = torch.eq(looked_up, table[tokens]).all().item()
    counts = torch.bincount(tokens, minlength=5).float()
    loss = looked_up.cumsum(dim=0).tanh().sum() + (counts.unsqueeze(-1) * table).sum()
    loss.backward()
    return same, loss.item(), table.grad.sum(dim=1).tolist()
""",
    "random numbers have shapes, ranges and seeds": """
import torch

def main():
    torch.manual_seed(0)
    a = torch.rand(100, 2)
    torch.manual_seed(0)
    again = torch.rand((100, 2))
    n = torch.randn(1000)
    like = torch.randn_like(n, dtype=torch.float64)
    i = torch.randint(0, 5, (100,))
    order = torch.randperm(10)
    weights = torch.empty(3, 4).uniform_(-0.5, 0.5)
    noise = torch.empty(2000).normal_(mean=1.0, std=0.5)
    coin = torch.bernoulli(torch.full((100,), 0.5))
    return (
        a.equal(again), a.shape == (100, 2), bool(((a >= 0) & (a < 1)).all()), abs(n.mean().item()) < 0.2, like.dtype == torch.float64,
        i.min().item() >= 0 and i.max().item() <= 4, sorted(order.tolist()) == list(range(10)),
        weights.abs().max().item() <= 0.5, abs(noise.mean().item() - 1) < 0.1, set(coin.tolist()) == {0.0, 1.0},
    )
""",
    "modules under their names": """
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset, TensorDataset

class Squares(Dataset):
    def __init__(self, n):
        self.x = torch.linspace(-1, 1, n).unsqueeze(1)

    def __len__(self):
        return self.x.size(0)

    def __getitem__(self, i):
        return self.x[i], self.x[i] ** 2

def main():
    device = torch.device("cpu")
    model = nn.Sequential(nn.Linear(1, 8, True, device, torch.float32), nn.Tanh(), nn.Linear(8, 1)).to(device)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.linspace(-0.5, 0.7, p.numel()).view(p.size()))
    optimizer = torch.optim.NAdam(model.parameters(), lr=0.02)
    scheduler = StepLR(optimizer, step_size=3, gamma=0.5)
    loader = DataLoader(Squares(16), batch_size=4, shuffle=False, num_workers=0)
    for epoch in range(6):
        total = 0.0
        for x, y in loader:
            loss = F.mse_loss(model(x.to(device)), y)
            optimizer.zero_grad()
            loss.backward()
            clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            total += loss.item() * x.size(0)
        scheduler.step()
    pairs = TensorDataset(torch.arange(6).view(3, 2), torch.arange(3))
    return total / len(loader.dataset), scheduler.get_last_lr()[0], len(pairs), x.size(), next(model.parameters()).device.type == "cpu"
""",
    "causal attention with shared heads": """
import torch
import torch.nn.functional as F

def main():
    q = torch.linspace(-1, 1, 2 * 4 * 5 * 3).view(2, 4, 5, 3).requires_grad_()
    k = torch.linspace(1, -1, 2 * 2 * 5 * 3).view(2, 2, 5, 3)
    B, H, T, C = q.size()
    mask = torch.triu(torch.ones(T, T), 1)
    bias = torch.zeros(T, T).masked_fill(mask == 1, float("-inf"))
    by_mask = F.scaled_dot_product_attention(q, k, k, attn_mask=bias, enable_gqa=True)
    causal = F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
    out = torch.transpose(causal, 1, 2).reshape(B, T, H * C)
    out.pow(2).sum().backward()
    low = torch.tril(q.detach()[0, 0], -1)
    return out.sum().item(), (by_mask - causal).abs().max().item(), q.grad.norm().item(), low.sum().item(), torch.diag(mask, 1).sum().item()
""",
}  # fmt: skip

#: the numbers that PyTorch gives
EXPECTED: dict[str, Any] = {
    'linear regression by hand': (2.999915361404419, 0.5, 5.303548711310668e-09),
    'data attribute and step': [0.2679999768733978, -0.7800000309944153, 1.0],
    'softmax classifier': (0.9863924980163574, 0.3333333432674408, 6.0),
    'module and optimizer': (0.2545771598815918, 26),
    'scaled dot-product attention': (-7.617655277252197, 1.0430257320404053, 6),
    'layer norm by hand': (-7.152557373046875e-07, 0.4522066116333008, 13.686857223510742),
    'chunks, stacks and topk': (491.0, [[2, 2], [1, 1]], 195.0, 12, 2),
    "newton's method": 2.0945514815423265,
    'gaussian mixture': (1.6529946327209473, [-0.9851975440979004, 0.6417257189750671], 0.9017379283905029),
    'in-place updates of an intermediate': (4.893539905548096, [0.6993681192398071, -0.875, 1.75]),
    'fourier filter': (0.38548620414639106, 3.997367561570699),
    'linear algebra': (39.098986998406744, 22.531443226739324),
    'scatter and embedding by hand': (True, 9.419966697692871, [2.3197107315063477, 3.6399025917053223, 0.0, 7.647092819213867, 0.0]),
    'random numbers have shapes, ranges and seeds': (True, True, True, True, True, True, True, True, True, True),
    'modules under their names': (0.27218481339514256, 0.005, 3, (4, 1), 1),
    'causal attention with shared heads': (12.310389518737793, 0.0, 0.23481863737106323, -7.571428298950195, 4.0),
}


def port(script: str) -> str:
    """The script for aiograd: the import, ``async`` before main, ``await`` before backward and grad."""
    script = script.replace("import torch.nn.functional as F", "import aiograd.nn.functional as F")
    script = re.sub(r"\bfrom torch([\w.]*) import", r"from aiograd\1 import", script)
    script = re.sub(r"\bimport torch$", "import aiograd as torch", script, flags=re.M)
    script = re.sub(r"^def main", "async def main", script, flags=re.M)
    script = re.sub(r"^( *)(\S.*\.backward\()", r"\1await \2", script, flags=re.M)
    return re.sub(r"= torch\.autograd\.grad\(", "= await torch.autograd.grad(", script)


def namespace(script: str) -> dict[str, Any]:
    """The names that a script defines."""
    found: dict[str, Any] = {"__name__": "script"}
    exec(script, found)  # noqa: S102
    return found


def same(found: Any, expected: Any) -> bool:
    """True if two results have the same numbers to what float32 holds, sums of many rounded ones included."""
    if isinstance(expected, (tuple, list)):
        return len(found) == len(expected) and all(map(same, found, expected))
    return abs(found - expected) <= 1e-5 + 1e-5 * abs(expected)
