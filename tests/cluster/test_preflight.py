"""Whatever is wrong with a SLURM job is said before anything starts, each thing in its own words, with the remedy."""

import dataclasses
import io
import json
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_sync.cluster import preflight
from lightning_sync.cluster.facts import Facts, gather_facts, visible_gpus
from lightning_sync.cluster.findings import Finding, common_findings, rank_findings, shape_findings
from lightning_sync.cluster.meeting import Gathered, attend_meeting, host_meeting
from lightning_sync.cluster.network import interface_addresses, interface_towards, is_port_free
from lightning_sync.cluster.preflight import PreflightError
from lightning_sync.cluster.slurm import Job, current_job, first_host
from tests.workers import run_ranks

ENV = {
    "SLURM_JOB_ID": "41",
    "SLURM_JOB_NAME": "train",
    "SLURM_STEP_ID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_JOB_NODELIST": "gpu[03-04]",
}
GOOD = Facts(
    rank=2,
    local_rank=0,
    node_rank=1,
    host="gpu04",
    accelerator="cuda",
    visible_gpus=2,
    backend="nccl",
    master="gpu03",
    master_address="10.0.0.3",
    port=15041,
    interface="eth0",
    addresses={"lo": "127.0.0.1", "eth0": "10.0.0.4", "ib0": "10.1.0.4"},
    versions={"python": "3.11.7", "torch": "2.13.0"},
)
FIRST = dataclasses.replace(
    GOOD, rank=0, node_rank=0, host="gpu03", port_free=True, addresses={"lo": "127.0.0.1", "eth0": "10.0.0.3"}
)


def job(**changes: str | None) -> Job:
    env = {k: v for k, v in {**ENV, **changes}.items() if v is not None}
    found = current_job(env)
    assert found is not None
    return found


def test_a_job_that_is_as_it_should_be_is_left_alone() -> None:
    assert shape_findings(job(), devices=2, num_nodes=2) == []
    assert rank_findings(GOOD, job()) == []
    assert rank_findings(FIRST, job()) == []
    assert common_findings([FIRST, GOOD], {2: 0.1}, job()) == []


@pytest.mark.parametrize(
    ("changes", "devices", "nodes", "check", "remedy"),
    [
        ({"SLURM_STEP_ID": None}, None, None, "srun", "Put srun before the command"),
        ({"SLURM_JOB_NAME": "bash"}, None, None, "job name", "Give the job another name"),
        ({"SLURM_JOB_NAME": "interactive"}, None, None, "job name", "Give the job another name"),
        ({"SLURM_NTASKS_PER_NODE": None}, None, None, "tasks", "--nodes=2 --ntasks-per-node=2"),
        ({"SLURM_STEP_NUM_TASKS": "3"}, None, None, "tasks", "Use --nodes and --ntasks-per-node"),
        ({}, 4, None, "tasks per node", "Use --ntasks-per-node=4, or trainer.devices=2"),
        ({}, 1, None, "tasks per node", "Use --ntasks-per-node=1, or trainer.devices=2"),
        ({}, None, 4, "nodes", "Use --nodes=4, or trainer.num_nodes=2"),
    ],
)
def test_a_job_of_another_shape_than_the_trainer_is_told_which_number_to_change(
    changes: dict[str, str | None], devices: int | None, nodes: int | None, check: str, remedy: str
) -> None:
    (finding,) = shape_findings(job(**changes), devices, nodes)
    assert finding.check == check
    assert finding.fatal
    assert remedy in finding.fix


LO = {"lo": "127.0.0.1", "eth0": "10.0.0.4"}


@pytest.mark.parametrize(
    ("facts", "changes", "check", "found", "remedy", "fatal"),
    [
        (GOOD, {"visible_gpus": 1}, "GPUs", "bound to this task", "without --gpus-per-task", True),
        (GOOD, {"visible_gpus": 0}, "GPUs", "0 GPUs", "--gres=gpu:2 with --ntasks-per-node=2", True),
        (GOOD, {"accelerator": "cpu"}, "GPUs", "of which torch uses none", "--gres=none", False),
        (GOOD, {"has_backend": False}, "backend", "torch without it", "built for CUDA", True),
        (FIRST, {"port_free": False}, "port", "another process listens", "export MASTER_PORT=", True),
        (GOOD, {"master_address": None}, "master address", "cannot be resolved", "export MASTER_ADDR=", True),
        (GOOD, {"master_address": "127.0.1.1"}, "master address", "loopback", "export MASTER_ADDR=", True),
        (FIRST, {"master_address": "10.0.0.9"}, "master address", "another host's", "first node: gpu03", True),
        (GOOD, {"gloo_interface": "eth9"}, "interface", "does not exist", "GLOO_SOCKET_IFNAME=eth0", True),
        (GOOD, {"gloo_interface": "lo"}, "interface", "no other node", "GLOO_SOCKET_IFNAME=eth0", True),
        (GOOD, {"gloo_interface": "ib0"}, "interface", "leave by eth0", "GLOO_SOCKET_IFNAME=eth0", False),
        (GOOD, {"nccl": {"NCCL_SOCKET_IFNAME": "=eth9"}}, "interface", "matches none", "NCCL_SOCKET_IFNAME=eth0", True),
        (GOOD, {"nccl": {"NCCL_IB_DISABLE": "1"}}, "NCCL variables", "NCCL_IB_DISABLE=1", "unset", False),
        (GOOD, {"folder_problem": "/x: Permission denied"}, "run directory", "denied", "Give run_dir=PATH", True),
    ],
)
def test_what_is_wrong_on_one_host_names_the_rank_and_the_remedy(
    facts: Facts, changes: dict[str, Any], check: str, found: str, remedy: str, fatal: bool
) -> None:
    (finding,) = rank_findings(dataclasses.replace(facts, **changes), job())
    assert (finding.check, finding.fatal) == (check, fatal)
    assert finding.where == f"rank {facts.rank} on {facts.host}"
    assert found in finding.found
    assert remedy in finding.fix


@pytest.mark.parametrize(
    ("changes", "skew", "check", "remedy", "fatal"),
    [
        ({"versions": {"python": "3.11.7", "torch": "2.8.0"}}, 0.0, "versions", "same environment", True),
        ({"resume": "/local/last.ckpt"}, 0.0, "run directory", "shared file system", True),
        ({"nccl": {"NCCL_DEBUG": "INFO"}}, 0.0, "NCCL variables", "before srun", False),
        ({}, 60.0, "clock", "chrony", False),
        ({"host": "gpu03"}, 0.0, "nodes", "same host name", False),
    ],
)
def test_what_differs_between_ranks_is_said(
    changes: dict[str, Any], skew: float, check: str, remedy: str, fatal: bool
) -> None:
    (finding,) = common_findings([FIRST, dataclasses.replace(GOOD, **changes)], {2: skew}, job())
    assert (finding.check, finding.fatal) == (check, fatal)
    assert remedy in finding.fix


@pytest.mark.parametrize(("pattern", "fits"), [("eth", True), ("=eth", False), ("^docker", True), ("^eth,ib", False)])
def test_nccls_patterns_are_read_as_nccl_reads_them(pattern: str, fits: bool) -> None:
    found = rank_findings(dataclasses.replace(GOOD, nccl={"NCCL_SOCKET_IFNAME": pattern}), job())
    assert (found == []) is fits


def test_every_message_is_one_line_with_what_was_expected_and_found() -> None:
    text = str(
        Finding("port", "rank 0 on gpu03", "port 15041 to be free", "another process listens", "Choose another.")
    )
    assert text == (
        "error (port, rank 0 on gpu03): expected port 15041 to be free; found another process listens. Choose another."
    )


def test_a_job_in_the_wrong_shape_ends_before_anything_is_touched(tmp_path: Path) -> None:
    said = io.StringIO()
    env = {**ENV, "SLURM_PROCID": "0"}
    with pytest.raises(PreflightError, match="tasks per node"):
        preflight(tmp_path / "runs" / "a", devices=8, environ=env, out=said)
    assert "expected --ntasks-per-node=8" in said.getvalue()
    assert list(tmp_path.iterdir()) == []


def test_outside_of_slurm_and_when_switched_off_nothing_is_checked(tmp_path: Path) -> None:
    assert preflight(tmp_path / "a", environ={}).findings == ()
    off = {**ENV, "LIGHTNING_SYNC_PREFLIGHT": "off"}
    assert preflight(tmp_path / "a", devices=8, environ=off).findings == ()
    with pytest.raises(ValueError, match="accepted: off, or a number"):
        preflight(tmp_path / "a", environ={**ENV, "LIGHTNING_SYNC_PREFLIGHT": "no"})


def test_nothing_can_be_written_under_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    one = {**ENV, "SLURM_NNODES": "1", "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
    said = io.StringIO()
    with pytest.raises(PreflightError, match="run directory"):
        preflight(tmp_path / "file" / "runs" / "a", environ=one, accelerator="cpu", out=said)
    assert "Not a directory" in said.getvalue()


def meet(rank: int, world_size: int, folders: list[Path], port: int, deadline: float) -> tuple[Any, str]:
    """One rank of a job on one node; the report's rows or the error, and what was printed."""
    said = io.StringIO()
    env = {
        **ENV,
        "SLURM_NNODES": "1",
        "SLURM_STEP_NUM_TASKS": str(world_size),
        "SLURM_NTASKS_PER_NODE": str(world_size),
        "SLURM_PROCID": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    run_dir = folders[rank] / "runs" / "a"
    try:
        report = preflight(run_dir, accelerator="cpu", deadline=deadline, measure_mb=1, environ=env, out=said)
    except PreflightError as error:
        return str(error), said.getvalue()
    return report.rows, said.getvalue()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.dist
def test_all_ranks_hear_the_same_and_leave_nothing(tmp_path: Path) -> None:
    outcomes = run_ranks(meet, 3, [tmp_path] * 3, free_port(), 60.0, init="none", deadline=120)
    rows, _ = outcomes[0]
    assert [said for _, said in outcomes] == ["", "", ""]
    assert all(other == rows for other, _ in outcomes)
    assert [row.split(" on ")[0] for row in rows] == ["rank 0", "rank 1", "rank 2"]
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.dist
def test_a_port_that_is_taken_ends_all_ranks_and_is_printed_once(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        outcomes = run_ranks(meet, 2, [tmp_path] * 2, port, 60.0, init="none", deadline=120)
    assert all("preflight failed (port)" in error for error, _ in outcomes)
    assert [said.count("another process listens there") for _, said in outcomes] == [1, 0]


@pytest.mark.dist
def test_run_directories_that_are_not_shared_are_found_out_by_both_sides(tmp_path: Path) -> None:
    folders = [tmp_path / "here", tmp_path / "there"]
    (_, said), (_, said1) = run_ranks(meet, 2, folders, free_port(), 5.0, init="none", deadline=120)
    assert "no sign of rank 1" in said
    assert "not on a file system that all nodes share" in said1


@pytest.mark.dist
def test_the_network_is_measured_and_strangers_are_turned_away(tmp_path: Path) -> None:
    (verdict, counted), (heard, _) = run_ranks(host_or_attend, 2, tmp_path / "place", init="none", deadline=120)
    assert verdict == heard == [0, 1]
    assert counted > 0


def host_or_attend(rank: int, world_size: int, place: Path) -> tuple[Any, float]:
    if rank:
        while not place.exists():
            time.sleep(0.01)
        invitation = json.loads(place.read_text())
        assert place.stat().st_mode & 0o077 == 0, "the secret is the user's own"
        with socket.create_connection(("127.0.0.1", invitation["port"])) as stranger:
            stranger.sendall(b'{"rank": 1, "proof": "guessed", "words": "mine"}\n')
            assert stranger.recv(1) == b"", "it hangs up"
        return attend_meeting(place, rank, "words", deadline=60), 0.0
    rates: dict[int, float] = {}

    def judge(gathered: Gathered) -> list[int]:
        assert gathered.words[1] == "words"
        assert abs(gathered.skews[1]) < 5
        rates.update(gathered.rates)
        return sorted(gathered.words)

    return host_meeting(
        place, "own", world_size, judge, addresses=["127.0.0.1"], deadline=60, measure=[1], measure_mb=2
    ), rates[1]


def test_an_element_of_an_array_is_known_by_both_numbers() -> None:
    assert job(SLURM_ARRAY_JOB_ID="34", SLURM_ARRAY_TASK_ID="0").job == "34_0"
    assert job().job == "41"
    assert job(SLURM_JOB_ID="1234567").port == 19567
    assert current_job({}) is None


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node1", "node1"),
        ("gpu[03-07,9],login1", "gpu03"),
        ("rack2-[1,4]-ib", "rack2-1-ib"),
        ("a,b", "a"),
        ("", "localhost"),
    ],
)
def test_the_first_host_of_a_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


def test_gpus_are_counted_as_slurm_shows_them() -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,1,3"}) == 3
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="interfaces are looked up on Linux only")
def test_the_interface_is_the_one_of_the_route(tmp_path: Path) -> None:
    addresses = interface_addresses()
    assert addresses["lo"] == "127.0.0.1"
    assert interface_towards("127.0.0.1", addresses) == "lo"
    assert interface_towards("no-such-host.invalid", addresses) is None
    facts = gather_facts(job(), tmp_path / "a", "cpu", {"MASTER_ADDR": "127.0.0.1"})
    assert (facts.interface, facts.backend, facts.port) == ("lo", "gloo", 15041)


def test_a_port_is_free_until_somebody_listens() -> None:
    port = free_port()
    assert is_port_free(port)
    with socket.create_server(("", port)):
        assert not is_port_free(port)
