"""One replica of five sends noise: the digits are still learned with robust aggregators, and not with the mean."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from lightning_sync.aggregators import Aggregator, Mean, Median, TrimmedMean
from lightning_sync.comm.simulated import SimulatedWorld
from lightning_sync.compressors import BlockInt8, Compressor, ErrorFeedback, PlainBlocks
from lightning_sync.examples.digits import Digits
from lightning_sync.examples.digits_cnn import DigitsCNN
from lightning_sync.testing import make_specs

REPLICAS, STEPS, BATCH = 5, 240, 8


@pytest.fixture(scope="module")
def digits() -> Digits:
    data = Digits()
    data.setup("fit")
    return data


def accuracy(digits: Digits, aggregator: Aggregator, compressor: Compressor, *, noisy: bool, seed: int = 0) -> float:
    """Validation accuracy after training between simulated replicas, the last of which sends 100 times white noise."""
    torch.manual_seed(seed)
    model = DigitsCNN(width=8)
    params = list(model.parameters())
    optimizer = model.configure_optimizers()
    specs = make_specs({n: p.shape for n, p in model.named_parameters()})
    world = SimulatedWorld(compressor, specs, REPLICAS, aggregator=aggregator)
    images, labels = digits.train_set.tensors
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        contributions = []
        for batch in torch.randperm(len(images), generator=generator)[: REPLICAS * BATCH].split(BATCH):
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            contributions.append(list(torch.autograd.grad(loss, params)))
        if noisy:
            contributions[-1] = [100 * torch.randn(p.shape, generator=generator) for p in params]
        for p, g in zip(params, world.reduce(contributions)[0], strict=True):
            p.grad = g
        optimizer.step()
    model.eval()
    with torch.no_grad():
        images, labels = digits.val_set.tensors
        return float((model(images).argmax(1) == labels).float().mean())


@pytest.fixture(scope="module")
def clean(digits: Digits) -> float:
    reached = accuracy(digits, Mean(), PlainBlocks(), noisy=False)
    assert reached > 0.85, "the digits are learned without noise"
    return reached


@pytest.mark.parametrize("compressor", [PlainBlocks(), ErrorFeedback(BlockInt8())], ids=["uncompressed", "int8"])
@pytest.mark.parametrize("aggregator", [Median(), TrimmedMean()], ids=["median", "trimmed mean"])
def test_robust_aggregators_reach_95_percent_of_the_clean_accuracy(
    digits: Digits, clean: float, aggregator: Aggregator, compressor: Compressor
) -> None:
    assert accuracy(digits, aggregator, compressor, noisy=True) >= 0.95 * clean


def test_the_mean_does_not(digits: Digits, clean: float) -> None:
    assert accuracy(digits, Mean(), PlainBlocks(), noisy=True) < 0.5 * clean
