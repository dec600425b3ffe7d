"""The recipes outside of SLURM do what they say (those for SLURM: tests/slurm/test_recipes.py)."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "recipes"
README = (RECIPES / "README.md").read_text()


def test_the_readme_names_every_recipe_and_no_other() -> None:
    table = README.split("\n## ")[0]
    named = set(re.findall(r"^\| `([\w.-]+)` \|", table, flags=re.MULTILINE))
    assert named == {p.name for p in RECIPES.iterdir() if p.suffix in (".sbatch", ".yaml")} | {"torchrun.sh"}


def test_the_readmes_script_is_python_that_runs() -> None:
    (source,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    exec(compile(source, "recipes/README.md", "exec"), {"__name__": "readme"})


def test_every_message_in_the_table_of_failures_is_one_of_the_codes() -> None:
    table = README.split("## When it does not work")[1]
    messages = [m for row in re.findall(r"^\| (`.*?) \| ", table, re.MULTILINE) for m in re.findall(r"`([^`]+)`", row)]
    code = " ".join(p.read_text() for p in (ROOT / "lightning_sync" / "cluster").glob("*.py"))
    assert len(messages) > 15
    for message in messages:
        # Numbers and names are filled in; what stands between them is in the code.
        parts = [p for p in re.split(r"\d[\d.]*|\.\.\.|\bN\b|[=:()]|, |'|found ", message) if len(p) >= 10]
        assert parts, message
        assert any(part.strip() in code for part in parts), message


def test_the_pods_are_as_many_as_the_ranks_expect() -> None:
    service, job = yaml.safe_load_all((RECIPES / "kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    container = pod["containers"][0]
    env = {each["name"]: each["value"] for each in container["env"]}
    assert int(env["NODES"]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert int(env["DEVICES"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert env["HEAD"] == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert service["metadata"]["name"] == pod["subdomain"]
    assert "/app/recipes/torchrun.sh" in container["command"]


def torchrun(folder: Path, steps: int) -> "subprocess.CompletedProcess[str]":
    env: dict[str, Any] = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "TORCHELASTIC_", "MASTER_"))},
        "DEVICES": "2",
        "RUN": "mine",
        "PORT": "0",  # any free one
        "SAVE_EVERY": "5",
        "RESTARTS": "0",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
    }
    command = [
        str(RECIPES / "torchrun.sh"),
        f"hydra.searchpath=[pkg://lightning_sync.conf,file://{ROOT}/tests/slurm/conf]",
        *("model=tiny", "data=stateful", "logger=none"),
        f"trainer.max_steps={steps}",
    ]
    with subprocess.Popen(
        command, cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(timeout=150)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@pytest.mark.dist
@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
@pytest.mark.timeout(400)
def test_torchruns_recipe_trains_and_goes_on_from_its_newest_checkpoint(tmp_path: Path) -> None:
    first = torchrun(tmp_path, 12)
    assert first.returncode == 0, first.stderr[-3000:]
    second = torchrun(tmp_path, 20)
    assert second.returncode == 0, second.stderr[-3000:]
    summary = json.loads((tmp_path / "runs" / "mine" / "summary.json").read_text())
    assert (summary["world_size"], summary["steps"]) == (2, 20)
    assert "resuming from" in second.stdout + second.stderr
