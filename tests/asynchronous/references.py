"""Rules written again from their papers' equations, element by element in Python floats (float64)."""

from __future__ import annotations

from math import sqrt


def add(x: list[float], d: list[float], w: float) -> list[float]:
    return [xi - w * di for xi, di in zip(x, d, strict=True)]


def inverse_staleness(x: list[float], d: list[float], w: float, tau: int) -> list[float]:
    """Staleness-aware async-SGD: the learning rate divided by the staleness, counted from 1."""
    return [xi - (w / (tau + 1)) * di for xi, di in zip(x, d, strict=True)]


class DelayCompensated:
    """DC-ASGD, algorithm 2 and section 6."""

    def __init__(self, n: int, lam: float, adaptive: bool, m: float) -> None:
        self.lam, self.adaptive, self.m = lam, adaptive, m
        self.mean_square = [0.0] * n

    def step(self, x: list[float], g: list[float], read: list[float], eta: float) -> list[float]:
        out = []
        for i in range(len(x)):
            lam = self.lam
            if self.adaptive:
                self.mean_square[i] = self.m * self.mean_square[i] + (1 - self.m) * g[i] ** 2
                lam = self.lam / sqrt(self.mean_square[i] + 1e-7)
            out.append(x[i] - eta * (g[i] + lam * g[i] * g[i] * (x[i] - read[i])))
        return out


class DelayedNesterov:
    """Asynchronous Local-SGD, algorithm 3: contributions g / N, momentum once every N."""

    def __init__(self, n: int, lr: float, beta: float, period: int, c: float) -> None:
        self.lr, self.beta, self.period, self.c = lr, beta, period, c
        self.m, self.buffer, self.t = [0.0] * n, [0.0] * n, 0

    def step(self, x: list[float], g: list[float]) -> list[float]:
        n = self.period
        self.buffer = [b + gi for b, gi in zip(self.buffer, g, strict=True)]
        if (self.t + 1) % n == 0:
            self.m = [self.beta * mi + b / n for mi, b in zip(self.m, self.buffer, strict=True)]
            x = [
                xi - self.lr * ((1 - self.c * n + self.c) * self.beta * mi + gi / n)
                for xi, mi, gi in zip(x, self.m, g, strict=True)
            ]
            self.buffer = [0.0] * len(x)
        else:
            x = [xi - self.lr * (self.c * self.beta * mi + gi / n) for xi, mi, gi in zip(x, self.m, g, strict=True)]
        self.t += 1
        return x


def elastic(centre: list[float], local: list[float], alpha: float) -> tuple[list[float], list[float]]:
    """Asynchronous EASGD, algorithm 1: both sides move by alpha (x_i - centre)."""
    pull = [alpha * (xi - ci) for xi, ci in zip(local, centre, strict=True)]
    moved = [xi - p for xi, p in zip(local, pull, strict=True)]
    return [ci + p for ci, p in zip(centre, pull, strict=True)], moved


def nesterov(x: list[float], m: list[float], d: list[float], lr: float, mu: float) -> tuple[list[float], list[float]]:
    """DiLoCo's outer step."""
    m = [mu * mi + di for mi, di in zip(m, d, strict=True)]
    return [xi - lr * (di + mu * mi) for xi, di, mi in zip(x, d, m, strict=True)], m
