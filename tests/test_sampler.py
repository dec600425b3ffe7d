"""Indices from a shared counter: each once, however fast ranks are, however often the run is interrupted."""

import os
import threading
import time
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import islice
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed import HashStore
from torch.utils.data import DataLoader

import lightning_sync as ls
from lightning_sync.comm.attendance import NotedInStore
from lightning_sync.comm.board import Board
from lightning_sync.strategies.joined import joined
from tests.models import Noise, Toy, fit
from tests.workers import run_ranks

SIZE, WORLD, BATCH = 103, 4, 4


def samplers(store: HashStore, run: str, **options: Any) -> list[ls.SharedSampler]:
    made = [ls.SharedSampler(SIZE, **{"chunk": BATCH, **options}) for _ in range(WORLD)]
    for rank, sampler in enumerate(made):
        sampler.attach(Board(store, run), rank, WORLD)
    return made


def together(bodies: list[Callable[[], Any]]) -> list[Any]:
    found: list[Any] = [None] * len(bodies)

    def run(place: int) -> None:
        found[place] = bodies[place]()

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def test_with_one_rank_four_times_slower_each_sample_comes_once_and_all_end_within_one_batch() -> None:
    made, orders = samplers(HashStore(), "run"), []
    for epoch in range(2):
        for sampler in made:
            sampler.set_epoch(epoch)
        loaders = [iter(DataLoader(range(SIZE), batch_size=BATCH, sampler=sampler)) for sampler in made]  # type: ignore[arg-type]
        seen: list[list[int]] = [[] for _ in made]
        ends = [0.0] * WORLD
        clock = [(0.0, rank) for rank in range(WORLD)]  # in virtual time: whoever is free first asks next
        while clock:
            now, rank = heappop(clock)
            batch = next(loaders[rank], None)
            if batch is None:
                ends[rank] = now
                continue
            seen[rank] += batch.tolist()
            heappush(clock, (now + (4.0 if rank == 0 else 1.0), rank))
        assert sorted(i for part in seen for i in part) == list(range(SIZE))
        assert len(seen[0]) < min(map(len, seen[1:])) / 3, "fast ranks take more"
        assert max(ends) - min(ends) <= 4.0, "one batch of the slowest"
        orders.append(seen[1])
    assert orders[0] != orders[1], "every epoch has another order"


def test_what_was_handed_out_is_never_handed_out_again_after_a_resume() -> None:
    store = HashStore()
    made = samplers(store, "first")
    iterators = [iter(sampler) for sampler in made]
    used: list[int] = []
    states = []
    for rank, steps in enumerate((3, 9, 5, 0)):  # in the middle of chunks; loaders ahead by some
        drawn = [next(iterators[rank]) for _ in range(steps)]
        trained = max(0, steps - 2)
        used += drawn[:trained]
        states.append(made[rank].state_dict(trained))
    for interruption in range(2):
        made = samplers(store, f"resumed {interruption}")
        for sampler, state in zip(made, states, strict=True):
            sampler.load_state_dict(state)
        if interruption == 0:
            first = together([lambda s=s: next(iter(s)) for s in made])  # type: ignore[misc]
            states = [sampler.state_dict(1) for sampler in made]
            used += first
    rest = together([lambda s=s: list(s) for s in made])  # type: ignore[misc]
    assert sorted([*used, *(i for seen in rest for i in seen)]) == list(range(SIZE))


def test_a_rank_that_dies_loses_at_most_what_it_held() -> None:
    made = samplers(HashStore(), "run", shuffle=False)
    dead = iter(made[3])
    lost = {next(dead) for _ in range(2)}
    rest = together([lambda s=s: list(s) for s in made[:3]])  # type: ignore[misc]
    seen = [i for part in rest for i in part]
    assert len(seen) == len(set(seen))
    assert lost <= set(range(SIZE)) - set(seen)
    assert len(seen) == SIZE - BATCH


def test_alone_it_is_a_plain_sampler() -> None:
    assert list(ls.SharedSampler(10, shuffle=False)) == list(range(10))
    assert sorted(ls.SharedSampler(range(10))) == list(range(10))
    with pytest.raises(TypeError, match="not known before"):
        len(DataLoader(range(10), batch_size=2, sampler=ls.SharedSampler(10)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "text"), [({"chunk": 0}, "chunk=0"), ({"shuffle": 1}, "shuffle=1"), ({"seed": -1}, "seed=-1")]
)
def test_wrong_values_are_named(options: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ls.SharedSampler(10, **options)


def test_a_rank_that_had_run_out_when_the_run_was_interrupted_does_not_hold_up_the_others() -> None:
    store, data = HashStore(), list(range(28))

    def ranks(run: str) -> list[Any]:
        made = []
        for rank in range(2):
            sampler = ls.SharedSampler(data, chunk=4)
            sampler.attach(Board(store, f"{run}/draw"), rank, 2)
            attendance = NotedInStore(store, f"{run}/data", rank, 2)
            loader = DataLoader(data, batch_size=4, sampler=sampler)  # type: ignore[arg-type]
            made.append(joined(loader, attendance, attendance.miss))
        return made

    def walk(loader: Any, iterator: Any, most: int = 100) -> list[int]:
        used: list[int] = []
        for batch in islice(iterator, most):
            loader.taken += 1
            used += [] if loader.spare else batch.tolist()
        return used

    slow, fast = first = ranks("first")
    iterators = [iter(loader) for loader in first]
    used = walk(slow, iterators[0], 2)
    ahead = [next(iterators[1]).tolist() for _ in range(5)]  # a loop's loader may run ahead of it
    fast.taken = 4
    used += [i for batch in ahead[:4] for i in batch]
    assert walk(slow, iterators[0], 2) == []
    states = [loader.state_dict() for loader in first]
    assert [(state["taken"], state["real"], state["ended"]) for state in states] == [(4, 2, False), (4, None, False)]
    second = ranks("second")
    for loader, state in zip(second, states, strict=True):
        loader.load_state_dict(state)
    rest = together([lambda loader=loader: walk(loader, iter(loader)) for loader in second])  # type: ignore[misc]
    assert rest == [[], ahead[4]]
    assert sorted([*used, *rest[1]]) == data
    assert [loader.taken for loader in second] == [5, 5]
    for loader in first + second:
        loader.attendance.close()


class Drawing(Toy):
    """Notes the samples it is trained on; rank 0 is slower."""

    def __init__(self, slow: float = 0.0, manual: bool = False) -> None:
        super().__init__()
        self.slow, self.used, self.steps = slow, [], []
        self.automatic_optimization = not manual

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y, index = batch
        self.used.append((self.current_epoch, index.tolist()))
        self.steps.append(self.global_step)
        time.sleep(self.slow if self.global_rank == 0 else 0)
        return super().training_step((x, y), batch_idx)

    def train_dataloader(self) -> DataLoader[Any]:
        noise = Noise(54)
        rows = [(*noise[i], i) for i in range(54)]
        return DataLoader(rows, batch_size=4, sampler=ls.SharedSampler(rows, chunk=4))  # type: ignore[arg-type]


def trained(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("strict", "local_sgd"):
        whole = Drawing(slow=0.02)
        trainer = fit(whole, ls.strategy(name), world, -1, max_epochs=2)
        found[f"{name}, whole"] = (whole.used, trainer.global_step)
        folder = f"{os.environ['RANKS_FOLDER']}/{name}"
        saving = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
        first = Drawing()
        fit(first, ls.strategy(name), world, -1, max_epochs=2, callbacks=[saving], enable_checkpointing=True)
        for steps in (2, 7):  # in the middle of the first epoch, and of the second
            second = Drawing()
            fit(second, ls.strategy(name), world, -1, max_epochs=2, ckpt_path=f"{folder}/step={steps}.ckpt")
            before = [used for used, step in zip(first.used, first.steps, strict=True) if step < steps]
            found[f"{name}, {steps}"] = (before, second.used)
    try:
        fit(Drawing(manual=True), ls.strategy("strict"), world, 4)
    except ValueError as error:
        found["manual"] = str(error)
    return found


@pytest.mark.dist
def test_in_training_each_sample_comes_once_per_epoch_also_across_a_resume() -> None:
    ranks = run_ranks(trained, 3, init="env", deadline=170)
    for case in ranks[0]:
        if case == "manual":
            assert all("SharedSampler" in found[case] and "manual" in found[case] for found in ranks)
            continue
        if case.endswith("whole"):
            parts = [found[case][0] for found in ranks]
            assert len({found[case][1] for found in ranks}) == 1, "all count the same steps"
        else:
            parts = [[*before, *after] for before, after in (found[case] for found in ranks)]
        for epoch in range(2):
            used = sorted(i for part in parts for e, indices in part if e == epoch for i in indices)
            assert used == list(range(54)), f"{case}, epoch {epoch}"
