"""Every recipe, as it stands, runs on a real SLURM; only its length and its model are overridden."""

import json
from pathlib import Path

import pytest

from lightning_sync.strategies import NAMES
from tests.slurm.cluster import Cluster

ROOT = Path(__file__).parents[2]
WIDTH = 384
FIRST, LAST = 16, 48

# Per recipe: what else shortens it, and bytes per parameter and step that each of two nodes with one rank sends.
RECIPES = {
    "strict-bf16": ((), 2.0),
    "strict-powersgd": (("compressor.warmup_steps=0",), None),
    "hierarchical": ((), 4.0 / 8),
    "diloco": (("strategy.warmup_steps=0", "strategy.sync_every=8"), (1 + 4 / 256) / 8),
    "streaming-diloco": (("strategy.warmup_steps=0", "strategy.sync_every=32"), (1 + 4 / 256) / 32),
    "ssp": ((), None),
    "async": ((), None),
}


def run(cluster: Cluster, of_jobs: dict[str, str], folder: Path, recipe: str, tasks: int) -> Path:
    """Submit a recipe, wait for it and return its run directory."""
    shortened = [
        *RECIPES[recipe][0],
        f"hydra.searchpath=[pkg://lightning_sync.conf,file://{ROOT}/tests/slurm/conf]",
        "model=tiny",
        f"model.width={WIDTH}",
        "data=stateful",
        f"trainer.max_steps={LAST + 16}",
        "logger=none",
        "+callbacks.trace._target_=tests.slurm.tiny.Trace",
        f"+callbacks.trace.folder={folder}/trace",
        f"+callbacks.trace.bytes_at=[{FIRST},{LAST}]",
    ]
    resources = [f"--ntasks-per-node={tasks}", "--cpus-per-task=1", "--time=20"]
    arguments = [*resources, f"{ROOT}/recipes/{recipe}.sbatch", *shortened]
    job = cluster.sbatch(arguments, cwd=folder, env=of_jobs)
    state = cluster.wait(job, deadline=550)
    log = (folder / f"{recipe}-{job}.out").read_text(errors="replace")
    assert state == "COMPLETED", log[-4000:]
    return folder / "runs" / f"slurm-{job}.0"


def sizes() -> list[object]:
    found = []
    for recipe in RECIPES:
        for tasks in (1, 2):
            # Two tasks on each node show all that one does; the rest of the matrix is for `-m slow`.
            marks = [pytest.mark.slow] if tasks == 1 and recipe != "strict-bf16" else []
            found.append(pytest.param(recipe, tasks, marks=marks, id=f"{recipe}-2x{tasks}"))
    return found


@pytest.mark.parametrize(("recipe", "tasks"), sizes())
def test_a_recipe_runs_to_its_summary_and_sends_what_its_mode_promises(
    recipe: str, tasks: int, cluster: Cluster, of_jobs: dict[str, str], tmp_path: Path
) -> None:
    text = (ROOT / "recipes" / f"{recipe}.sbatch").read_text()
    (name,) = [word.removeprefix("strategy=") for word in text.split() if word.startswith("strategy=")]
    assert name in NAMES
    run_dir = run(cluster, of_jobs, tmp_path, recipe, tasks)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["world_size"] == 2 * tasks
    assert summary["steps"] >= LAST
    assert not (run_dir / "UNFINISHED").exists()
    if recipe in ("hierarchical", "diloco", "streaming-diloco"):  # a replica is a node, as SLURM numbers them
        assert json.loads((tmp_path / "trace" / "leaders").read_text()) == [0] * tasks + [tasks] * tasks
    for node in (0, 1):
        seen = {
            step: [json.loads((tmp_path / "trace" / f"bytes-{step}-{node}-{i}.json").read_text()) for i in range(tasks)]
            for step in (FIRST, LAST)
        }
        first, last = ([each["sent"] for each in seen[step]] for step in (FIRST, LAST))
        # Ranks that do not wait for each other come to a step at different times: what the interface sent while all of
        # them were between the steps is at most what they promise, and while any of them was, at least.
        meets = recipe not in ("async", "ssp")
        sent, least = (max(last) - max(first),) * 2 if meets else (min(last) - max(first), max(last) - min(first))
        promised = sum(b["promised"] - a["promised"] for a, b in zip(seen[FIRST], seen[LAST], strict=True))
        print(f"{recipe} 2x{tasks}, node {node}: {promised} bytes promised, {sent} on the interface")
        messages = sum(b["messages"] - a["messages"] for a, b in zip(seen[FIRST], seen[LAST], strict=True))
        # Headers and acknowledgements come on top, and what the ranks tell each other of being alive.
        seconds = seen[LAST][0]["time"] - seen[FIRST][0]["time"]
        under_way = 0 if meets else 2 * promised / (LAST - FIRST)  # letters are counted when they are handed over
        assert promised - under_way <= least, (promised, least)
        assert sent <= 1.06 * promised + 300 * messages + 30_000 * seconds + under_way, (promised, sent, messages)
        per_parameter = RECIPES[recipe][1]
        if tasks == 1 and per_parameter is not None:
            expected = per_parameter * seen[LAST][0]["parameters"] * (LAST - FIRST)
            assert promised == pytest.approx(expected, rel=0.03)


def test_recipes_differ_in_name_and_mode_only() -> None:
    def scaffold(path: Path) -> list[str]:
        lines = path.read_text().replace(path.stem, "NAME").splitlines()
        return [line for line in lines if not line.lstrip().startswith("strategy=")][2:]

    found = sorted((ROOT / "recipes").glob("*.sbatch"))
    assert {path.stem for path in found} == set(RECIPES)
    first = scaffold(found[0])
    for path in found:
        assert scaffold(path) == first, path
        assert 15 <= len(path.read_text().splitlines()) <= 40
